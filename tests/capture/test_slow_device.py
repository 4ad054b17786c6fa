"""A device that is slow, and one that is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capture import Ladder
from capture.errors import (
    DeviceLost,
    RuntimeClosed,
)
from capture.tape import TapeBackend, TapeStep
from graphcache import Batch
from tests.capture.support import (
    CALLS,
    Chain,
    captured,
    chain_runtime,
    decode,
)
from tests.toy import BACKENDS

both = pytest.mark.parametrize("backend", BACKENDS)


class HeldBackend(TapeBackend):
    """A tape whose replays wait until they are let go, as kernels queue on a stream."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.queue: list[Callable[[], None]] = []
        self.fault: str | None = None
        self.drops = False
        self.holds = False

    def capture(self, step: Callable[[], None]) -> TapeStep:
        made = super().capture(step)
        run = made.replay

        def replay() -> None:
            self._raise()
            if self.holds:
                self.queue.append(run)
            elif not self.drops:
                run()

        made.replay = replay  # type: ignore[method-assign]
        return made

    def let_go(self) -> None:
        self.holds = False
        while self.queue:
            self.queue[0]()
            del self.queue[0]

    def idle(self) -> bool:
        self._raise()
        return not self.queue

    def synchronize(self) -> None:
        self._raise()
        self.let_go()

    def _raise(self) -> None:
        if self.fault is not None:
            raise DeviceLost(self.fault)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldBackend:
    machine = HeldBackend()
    monkeypatch.setattr("capture.runtime.choose_backend", lambda *_: machine)
    monkeypatch.setattr("capture.runtime.CLOSE_TIMEOUT_S", 0.2)
    return machine


def test_a_timeout_then_success(held: HeldBackend) -> None:
    chain = Chain()
    with captured(chain_runtime("tape", chain)) as runtime:
        slot = runtime.admit([2])
        assert decode(runtime, slot, 2) == chain.answer([2], 2)
        held.holds = True
        results = [runtime.step([slot]), runtime.step([slot])]
        for result in (*results, results[0]):
            start = time.perf_counter()
            with pytest.raises(TimeoutError, match=r"step \d has not completed after 0.02 s"):
                result.tokens(timeout=0.02)
            assert 0.02 <= time.perf_counter() - start < 0.5
            assert not result.is_read
        with pytest.raises(TimeoutError):
            results[0].tokens(timeout=0)
        threading.Timer(0.05, held.let_go).start()
        assert results[1].tokens(timeout=5) == chain.answer([2], 4)[3:]
        assert results[0].tokens(timeout=0) == chain.answer([2], 4)[2:3]
        assert decode(runtime, slot, 1) == chain.answer([2], 5)[4:]


def let_go_soon(held: HeldBackend) -> threading.Event:
    """Let the held steps run in a moment; the event is set just before."""
    released = threading.Event()

    def let_go() -> None:
        released.set()
        held.let_go()

    threading.Timer(0.05, let_go).start()
    return released


def test_host_calls_wait_for_steps_that_are_on_their_way(held: HeldBackend) -> None:
    chain = Chain()
    with captured(chain_runtime("tape", chain)) as runtime:
        slot = runtime.admit([2])
        for call in (
            lambda: runtime.tokens_of(slot),
            lambda: runtime.extend(slot, [7]),
            lambda: runtime.fork(slot),
            lambda: runtime.checkpoint(slot),
            lambda: runtime.rewind(slot, runtime.length_of(slot)),
        ):
            held.holds = True
            result = runtime.step([slot])
            released = let_go_soon(held)
            call()
            assert released.is_set()
            assert result.tokens()[0] >= 0


def test_a_retired_row_rests_until_its_steps_are_done(held: HeldBackend) -> None:
    with captured(chain_runtime("tape", max_requests=2, ladder=Ladder([1]))) as runtime:
        first, second = runtime.admit([2]), runtime.admit([3])
        held.holds = True
        runtime.step([first])
        runtime.retire(first)
        released = let_go_soon(held)
        third = runtime.admit([4])
        assert released.is_set()
        rows = [runtime.state.slots.row_of(slot) for slot in (second, third)]
        assert rows == [1, 0]


def dry(machine: HeldBackend) -> None:
    machine.drops = True


def fault(machine: HeldBackend) -> None:
    machine.holds = True
    machine.fault = "CUDA reported CUDA_ERROR_ILLEGAL_ADDRESS"


def lose(call: Callable[[], Any]) -> DeviceLost:
    start = time.perf_counter()
    with pytest.raises(DeviceLost) as caught:
        call()
    assert time.perf_counter() - start < 2
    return caught.value


REST = [name for name in CALLS if name != "step of none"]


@pytest.mark.parametrize("how", [dry, fault], ids=lambda how: how.__name__)
@pytest.mark.parametrize("found_by", ["tokens", "retire and admit", "tokens_of", "capture"])
def test_a_lost_device_is_named_and_never_a_hang(
    held: HeldBackend, how: Callable[[HeldBackend], None], found_by: str
) -> None:
    runtime = captured(chain_runtime("tape", max_requests=1))
    slot = runtime.admit([2])
    kept = runtime.checkpoint(slot)
    runtime.step([slot]).tokens()
    held.holds = True
    if how is dry:
        how(held)
        held.holds = False
        result = runtime.step([slot])
    else:
        result = runtime.step([slot])
        how(held)
    finders: dict[str, Callable[[], Any]] = {
        "tokens": result.tokens,
        "retire and admit": lambda: (runtime.retire(slot), runtime.admit([1])),
        "tokens_of": lambda: runtime.tokens_of(slot),
        "capture": lambda: runtime.capture(progress=False),
    }
    error = lose(finders[found_by])
    expected = "step 2 never came" if how is dry else "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert expected in str(error)
    # From now on every call says the same, the steady step of the same list too.
    held.fault, held.drops = None, False
    for name in REST:
        error = lose(lambda name=name: CALLS[name](runtime, slot))
        assert expected in str(error)
    lose(lambda: runtime.step([slot], eager=True))
    lose(lambda: runtime.restore(kept))
    held.fault = "CUDA reported CUDA_ERROR_ILLEGAL_ADDRESS" if how is fault else None
    lose(lambda: result.tokens(timeout=1))
    start = time.perf_counter()
    runtime.close()
    runtime.close()
    assert time.perf_counter() - start < 2
    with pytest.raises(RuntimeClosed):
        runtime.admit([1])


def test_a_device_lost_at_a_launch(held: HeldBackend) -> None:
    runtime = captured(chain_runtime("tape"))
    slot = runtime.admit([2])
    good = runtime.step([slot])
    good.tokens()
    held.fault = "CUDA reported CUDA_ERROR_LAUNCH_FAILED"
    lose(lambda: runtime.step([slot]))
    held.fault = None
    for name in REST:
        error = lose(lambda name=name: CALLS[name](runtime, slot))
        assert "CUDA_ERROR_LAUNCH_FAILED" in str(error)
    assert good.tokens() == Chain().answer([2], 1)
    runtime.close()


def test_a_device_lost_at_a_copy(held: HeldBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = captured(chain_runtime("tape"))
    slot = runtime.admit([2])

    def send(count: int) -> None:
        raise DeviceLost("CUDA reported CUDA_ERROR_UNKNOWN")

    for source in runtime._inputs._sources:
        monkeypatch.setattr(source, "send", send)
    for _ in range(2):
        lose(lambda: runtime.step([slot]))
    lose(lambda: runtime.admit([2]))
    runtime.close()


@both
def test_a_failure_that_torch_reports_is_a_lost_device(backend: str, chain: Chain) -> None:
    runtime = captured(chain_runtime(backend, chain))
    slot = runtime.admit([2])

    def before(batch: Batch) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    chain.before = before
    with pytest.raises(DeviceLost, match=r"unspecified launch failure.*close this runtime"):
        runtime.admit([3, 4])
    chain.before = lambda _: None
    for name in REST:
        with pytest.raises(DeviceLost, match="unspecified launch failure"):
            CALLS[name](runtime, slot)
    runtime.close()


def test_close_of_a_device_that_never_answers_ends(held: HeldBackend) -> None:
    runtime = captured(chain_runtime("tape"))
    slot = runtime.admit([2])
    held.holds = True
    runtime.step([slot])
    start = time.perf_counter()
    runtime.close()
    assert time.perf_counter() - start < 2
