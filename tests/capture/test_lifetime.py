"""Whose a runtime is, how it ends, and that its steps leave nothing behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from capture import DecodeRuntime
from capture.errors import (
    RuntimeBusy,
    RuntimeClosed,
)
from graphcache import Batch
from graphcache.errors import (
    PrefillFailed,
)
from tests.capture.support import (
    CALLS,
    Chain,
    ToyOracle,
    books,
    captured,
    chain_runtime,
    decode,
    toy_runtime,
)
from tests.toy import BACKENDS, ToyDecoder

both = pytest.mark.parametrize("backend", BACKENDS)


# --- ownership and end of life --------------------------------------------------------------------


class Blocking:
    """Lets a second thread look at a runtime while it is at work."""

    def __init__(self, chain: Chain) -> None:
        self.at_work, self.go = threading.Event(), threading.Event()
        chain.before = self.wait

    def wait(self, batch: Batch) -> None:
        self.at_work.set()
        assert self.go.wait(10)


@both
@pytest.mark.parametrize("work", ["admit", "capture", "eager step"])
def test_a_second_thread_is_told_so(backend: str, chain: Chain, work: str) -> None:
    with chain_runtime(backend, chain) as runtime:
        slot = runtime.admit([2])
        runtime.capture(progress=False)
        kept = runtime.checkpoint(slot)
        blocking = Blocking(chain)
        jobs: dict[str, Callable[[], Any]] = {
            "admit": lambda: runtime.admit([3, 4]),
            "capture": lambda: runtime.capture(progress=False),
            "eager step": lambda: runtime.step([slot], eager=True).tokens(),
        }
        failed: list[BaseException] = []

        def owner() -> None:
            try:
                jobs[work]()
            except BaseException as error:  # shown below
                failed.append(error)

        thread = threading.Thread(target=owner)
        thread.start()
        try:
            assert blocking.at_work.wait(10)
            for call in [*CALLS.values(), lambda r, s: r.restore(kept), lambda r, s: r.close()]:
                with pytest.raises(RuntimeBusy, match="belongs to one thread at a time"):
                    call(runtime, slot)
        finally:
            blocking.go.set()
            thread.join()
        assert failed == []
        # Then it is anyone's again.
        count = 2 if work == "eager step" else 1
        assert runtime.step([slot]).tokens() == chain.answer([2], count)[-1:]


@both
def test_a_runtime_may_change_hands(chained: DecodeRuntime, chain: Chain) -> None:
    slot = chained.admit([2])
    given: list[int] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: given.extend(decode(chained, slot, 2)))
        thread.start()
        thread.join()
    assert given == chain.answer([2], 6)


@both
def test_after_close_every_call_says_so(backend: str, chained: DecodeRuntime) -> None:
    slot = chained.admit([2])
    kept = chained.checkpoint(slot)
    chained.step([slot]).tokens()
    chained.close()
    chained.close()
    closed = {name: call for name, call in CALLS.items() if name != "step of none"}
    for call in [*closed.values(), lambda r, s: r.restore(kept)]:
        with pytest.raises(RuntimeClosed, match="make a new one"):
            call(chained, slot)
    with chain_runtime(backend) as other:
        assert other.step([other.admit([2])], eager=True).tokens() != [-1]


@both
def test_a_context_manager_closes_whatever_happens(backend: str) -> None:
    with pytest.raises(ZeroDivisionError), captured(chain_runtime(backend)) as runtime:
        slot = runtime.admit([2])
        raise ZeroDivisionError
    with pytest.raises(RuntimeClosed):
        runtime.step([slot])
    assert all(bucket.captured is None for bucket in runtime._buckets.values())


@both
def test_close_waits_for_steps_and_frees_captures(runtime: DecodeRuntime) -> None:
    slot = runtime.admit([2])
    results = [runtime.step([slot]), runtime.step([slot])]
    captures = [bucket.captured for bucket in runtime._buckets.values()]
    assert all(captures)
    runtime.close()
    assert runtime._mailbox.completed() == 2
    assert all(not capture.external for capture in captures if capture is not None)
    assert [result.tokens()[0] >= 0 for result in results] == [True, True]


@both
def test_runtimes_side_by_side(backend: str, toy: ToyDecoder) -> None:
    oracle = ToyOracle(toy)
    runtimes = [captured(toy_runtime(backend, toy)) for _ in range(3)]
    slots = [runtime.admit([index + 1]) for index, runtime in enumerate(runtimes)]
    given: list[list[int]] = [[], [], []]
    for turn in range(6):
        if turn == 3:
            runtimes[1].close()
        for index in (0, 2, 1):
            if index != 1 or turn < 3:
                given[index] += runtimes[index].step([slots[index]]).tokens()
    for index, answer in enumerate(given):
        assert answer == oracle.answer([index + 1], 3 if index == 1 else 6)
    for runtime in runtimes:
        runtime.close()


@both
def test_a_failed_prefill_spoils_its_slot_only(backend: str, chain: Chain) -> None:
    with captured(chain_runtime(backend, chain, prefill_chunk=2)) as runtime:
        other, slot = runtime.admit([3]), runtime.admit([2])
        fail_at = [2]

        def before(batch: Batch) -> None:
            fail_at[0] -= 1
            if not fail_at[0]:
                raise ValueError("a chunk in the middle")

        chain.before = before
        kept = books(runtime)
        with pytest.raises(ValueError, match="a chunk in the middle"):
            runtime.admit([1, 2, 3, 4, 5, 6])
        assert runtime.state.slots.live == kept["live"]
        fail_at[0] = 2
        with pytest.raises(ValueError, match="a chunk in the middle"):
            runtime.extend(slot, [1, 2, 3, 4, 5, 6])
        chain.before = lambda _: None
        with pytest.raises(PrefillFailed, match="retire it"):
            runtime.step([slot])
        for call in ("extend", "fork", "rewind", "checkpoint"):
            arguments: list[Any] = {"extend": [[1]], "rewind": [0]}.get(call, [])
            with pytest.raises(PrefillFailed, match="retire it"):
                getattr(runtime, call)(slot, *arguments)
        runtime.retire(slot)
        fresh = [runtime.admit([7, 8]) for _ in range(3)]
        tokens = runtime.step([other, *fresh]).tokens()
        assert tokens == chain.answer([3], 1) + chain.answer([8], 1) * 3


# --- garbage --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("ahead", [False, True])
def test_steps_leave_nothing_for_the_collector(backend: str, toy: ToyDecoder, ahead: bool) -> None:
    with captured(toy_runtime(backend, toy, max_context=512, max_requests=2)) as runtime:
        slots = [runtime.admit([1, 2]), runtime.admit([3])]

        def run(count: int) -> None:
            last = runtime.step(slots)
            for _ in range(count):
                if not ahead:
                    last.tokens()
                result = runtime.step(slots)
                last.tokens()
                last = result
            last.tokens()

        run(20)
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            run(300)
            grown = len(gc.get_objects()) - before
            found = gc.collect()
        finally:
            gc.enable()
        assert found == 0
        assert grown < 30  # a leak is one a step at least; the interpreter itself makes a few


@both
def test_a_changed_batch_leaves_nothing_either(chained: DecodeRuntime) -> None:
    slots = [chained.admit([token]) for token in range(4)]

    def run() -> None:
        for turn in range(12):
            asked = slots[: 1 + turn % 4]
            chained.step(asked).tokens()

    run()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(10):
            run()
        grown = len(gc.get_objects()) - before
        found = gc.collect()
    finally:
        gc.enable()
    assert found == 0
    assert grown < 12  # of 120 steps
