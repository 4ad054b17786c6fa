"""Names for the parts of a step: `scope("layer 3")`, and within it `scope("attention")`.

A step opens and closes scopes as it runs; whoever wants to know listens. Under capture that is how
the nodes of a graph get the name of the layer that made them, since a replay runs no Python. With
no listener a scope costs one append and one pop.

Scopes and listeners belong to the thread that opened and subscribed them, so that a step running in
one thread is never named by another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from .errors import UnbalancedScopes

__all__ = ["ScopeListener", "close_scope", "listening", "open_scope", "path", "reset", "scope"]


class ScopeListener(Protocol):
    """Hears every scope opened and closed on the thread it subscribed on."""

    def push(self, name: str) -> None:
        """A scope was opened inside those that are open."""

    def pop(self) -> None:
        """The innermost open scope was closed."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.listeners: tuple[ScopeListener, ...] = ()
        # Beside each name who heard it opened: a listener that comes or goes while scopes are open
        # hears exactly one pop for each of its pushes.
        self.open: list[tuple[str, tuple[ScopeListener, ...]]] = []


_thread = _Thread()


def open_scope(name: str) -> None:
    """Open a scope; for hooks, which have no `with`. Each needs one `close_scope`."""
    listeners = _thread.listeners
    _thread.open.append((name, listeners))
    for listener in listeners:
        listener.push(name)


def close_scope() -> None:
    """Close the innermost open scope.

    Raises:
        UnbalancedScopes: when none is open.
    """
    if not _thread.open:
        raise UnbalancedScopes(
            "close_scope() was called with no scope open; each open_scope() has one close_scope()"
        )
    _, listeners = _thread.open.pop()
    for listener in reversed(listeners):
        listener.pop()


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name what runs inside. Scopes nest; an exception closes all that it left open.

    Usable in steps: touches no tensor and no device.

    Raises:
        UnbalancedScopes: when the block left a scope open, or closed this one. All that it opened
            is closed by then.
    """
    depth = len(_thread.open)
    open_scope(name)
    opened = _thread.open[depth]
    try:
        yield
        _check_balance(opened, depth)
    finally:
        reset(depth)


def _check_balance(opened: tuple[str, tuple[ScopeListener, ...]], depth: int) -> None:
    name = opened[0]
    if len(_thread.open) <= depth or _thread.open[depth] is not opened:
        raise UnbalancedScopes(
            f"scope {name!r} was closed before its block ended: one close_scope() too many"
        )
    left = [inner for inner, _ in _thread.open[depth + 1 :]]
    if left:
        raise UnbalancedScopes(
            f"scope {name!r} ended with {' / '.join(map(repr, left))} open in it: "
            "close_scope() is missing"
        )


def reset(depth: int = 0) -> None:
    """Close every scope of this thread deeper than `depth`: what an interrupted step left open."""
    while len(_thread.open) > depth:
        close_scope()


def path() -> tuple[str, ...]:
    """Names of this thread's open scopes, outermost first."""
    return tuple(name for name, _ in _thread.open)


@contextmanager
def listening(listener: ScopeListener) -> Iterator[None]:
    """Subscribe `listener` to this thread's scopes for the time of the block."""
    _thread.listeners += (listener,)
    try:
        yield
    finally:
        _thread.listeners = tuple(heard for heard in _thread.listeners if heard is not listener)
