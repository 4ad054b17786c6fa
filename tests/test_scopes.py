"""Scopes nest, are heard in balance, and survive steps that raise."""

from __future__ import annotations

import threading

import pytest

from graphcache import scopes
from graphcache.errors import UnbalancedScopes


class _Heard:
    def __init__(self) -> None:
        self.events: list[str] = []

    def push(self, name: str) -> None:
        self.events.append(name)

    def pop(self) -> None:
        self.events.append("-")


def test_scopes_nest_and_are_heard() -> None:
    heard = _Heard()
    with scopes.listening(heard), scopes.scope("a"):
        with scopes.scope("b"):
            assert scopes.path() == ("a", "b")
        with scopes.scope("c"):
            pass
    assert heard.events == ["a", "b", "-", "c", "-", "-"]
    assert scopes.path() == ()


def test_a_listener_that_comes_or_goes_within_a_scope_hears_in_balance() -> None:
    heard = _Heard()
    with scopes.scope("a"):
        with scopes.listening(heard):
            with scopes.scope("b"):
                pass
            scopes.open_scope("c")
        scopes.open_scope("d")
        scopes.reset(1)
    assert heard.events == ["b", "-", "c", "-"]
    assert scopes.path() == ()


def test_two_listeners_and_one_of_them_twice() -> None:
    one, other = _Heard(), _Heard()
    with scopes.listening(one), scopes.listening(other), scopes.scope("a"):
        pass
    assert one.events == other.events == ["a", "-"]


def test_an_exception_closes_what_it_left_open() -> None:
    heard = _Heard()
    with scopes.listening(heard):
        with pytest.raises(ZeroDivisionError), scopes.scope("a"):
            scopes.open_scope("b")
            scopes.open_scope("c")
            raise ZeroDivisionError
    assert heard.events == ["a", "b", "c", "-", "-", "-"]
    assert scopes.path() == ()


def test_reset_closes_down_to_a_depth() -> None:
    for name in "abc":
        scopes.open_scope(name)
    scopes.reset(2)
    assert scopes.path() == ("a", "b")
    scopes.reset()
    assert scopes.path() == ()


def test_closing_what_is_not_open_is_refused() -> None:
    with pytest.raises(UnbalancedScopes, match="no scope open"):
        scopes.close_scope()


def test_a_scope_left_open_is_named_and_closed() -> None:
    heard = _Heard()
    with scopes.listening(heard), scopes.scope("a"):
        with pytest.raises(UnbalancedScopes, match=r"'b' ended with 'c' / 'd' open"):
            with scopes.scope("b"):
                scopes.open_scope("c")
                scopes.open_scope("d")
        assert scopes.path() == ("a",)
    assert heard.events == ["a", "b", "c", "d", "-", "-", "-", "-"]


def test_a_scope_closed_by_its_own_block_is_named() -> None:
    with pytest.raises(UnbalancedScopes, match=r"'b' was closed before its block ended"):
        with scopes.scope("b"):
            scopes.close_scope()
    with pytest.raises(UnbalancedScopes, match=r"'b' was closed before its block ended"):
        with scopes.scope("b"):
            scopes.close_scope()
            scopes.open_scope("b")
    assert scopes.path() == ()


def test_unbalanced_scopes_do_not_hide_the_error_that_caused_them() -> None:
    with pytest.raises(ZeroDivisionError), scopes.scope("a"):
        scopes.open_scope("b")
        raise ZeroDivisionError


def test_threads_do_not_hear_each_other() -> None:
    heard = _Heard()
    paths = []

    def elsewhere() -> None:
        with scopes.scope("theirs"):
            paths.append(scopes.path())

    with scopes.listening(heard), scopes.scope("ours"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert paths == [("theirs",)]
    assert heard.events == ["ours", "-"]
