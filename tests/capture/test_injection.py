"""Whatever fails in a capture, and wherever: all is as it was, and a later capture succeeds."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import capture.tape
from capture import DecodeRuntime, Ladder
from capture.backend import is_recording
from capture.errors import CaptureError, DeviceLost, NotCaptured
from graphcache import Batch
from graphcache.models import StepFunction
from tests.capture.injection import Injector, stages_of
from tests.capture.support import CONTEXT, ToyOracle, books, differing, everything, toy_runtime
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

both = pytest.mark.parametrize("backend", BACKENDS)
PROMPT = [5, 6, 7]


class Subject:
    """A runtime with a request in the middle of its answer, and all that a failure must leave."""

    def __init__(self, backend: str) -> None:
        self.toy = ToyDecoder((6,), device_of(backend))
        self.runtime = toy_runtime(backend, self.toy, ladder=Ladder([1, 2]), max_requests=2)
        self.capture()
        self.slot = self.runtime.admit(PROMPT)
        self.length = self.runtime.length_of(self.slot)
        self.step()
        self.rewind()
        self.before = everything(self.runtime), books(self.runtime)
        self.around = surroundings(self.runtime)

    def capture(self) -> None:
        self.runtime.capture(progress=False)

    def step(self, *, eager: bool = False) -> list[int]:
        return self.runtime.step([self.slot], eager=eager).tokens()

    def rewind(self) -> None:
        self.runtime.rewind(self.slot, self.length)

    def check(self, *, captured: bool = False) -> None:
        """After a failed capture: nothing has changed, and everything can be done."""
        assert surroundings(self.runtime) == self.around
        taken, kept = self.before
        assert differing(everything(self.runtime), taken) == []
        assert books(self.runtime) == kept
        with pytest.raises(NotCaptured):
            self.step()
        expected = ToyOracle(self.toy).answer(PROMPT, 1)
        assert self.step(eager=True) == expected
        self.rewind()
        self.capture()
        assert self.step() == expected
        self.rewind()
        self.before = everything(self.runtime), books(self.runtime)


def surroundings(runtime: DecodeRuntime) -> dict[str, Any]:
    """What a capture changes for the process while it goes on."""
    around: dict[str, Any] = {
        "collector": gc.isenabled(),
        "recording": is_recording(),
        "gradients": torch.is_grad_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "guards": torch.cuda.synchronize,
        "lock": runtime._lock.locked(),
    }
    if runtime.device.type == "cuda":
        around["stream"] = torch.cuda.current_stream()
        around["capturing"] = torch.cuda.is_current_stream_capturing()
        with runtime._backend.context():
            around["capturing there"] = torch.cuda.is_current_stream_capturing()
        # A generator left registered with a capture would refuse to draw.
        torch.rand(1, device="cuda")
    return around


@pytest.fixture
def subject(backend: str) -> Iterator[Subject]:
    made = Subject(backend)
    with made.runtime:
        yield made


def everywhere(subject: Subject, every: int = 1) -> Iterator[tuple[Any, str, int]]:
    """Bucket, stage and operation: all of them, or each so-manieth."""
    counts = Injector(subject.runtime).operations(subject.capture)
    assert {stage for _, stage in counts} == set(stages_of(subject.runtime))
    assert min(counts.values()) > 20
    for (key, stage), count in counts.items():
        for at in range(0, count, every):
            yield key, stage, at


# --- at each operation ----------------------------------------------------------------------------


@both
def test_a_step_that_fails_at_any_operation(subject: Subject) -> None:
    injector = Injector(subject.runtime)
    for key, stage, at in everywhere(subject):
        with injector.failing(key, stage, at, lambda: ValueError("no such weight")):
            with pytest.raises(CaptureError, match=r"raised ValueError.*no such weight"):
                subject.capture()
        assert injector.reached
        subject.check()


@both
def test_out_of_memory_at_any_operation(subject: Subject) -> None:
    """It is told as what it is, with the step's line: the user may lower what he asked for."""
    injector = Injector(subject.runtime)
    for key, stage, at in everywhere(subject, every=3):
        with injector.failing(key, stage, at, lambda: torch.OutOfMemoryError("out of memory")):
            with pytest.raises(
                CaptureError, match=r"raised OutOfMemoryError.*out of memory"
            ) as told:
                subject.capture()
        assert isinstance(told.value.__cause__, torch.OutOfMemoryError)
        assert injector.reached
        subject.check()


@both
def test_an_interrupt_at_any_operation(subject: Subject) -> None:
    injector = Injector(subject.runtime)
    for key, stage, at in everywhere(subject, every=4):
        with injector.failing(key, stage, at, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                subject.capture()
        assert injector.reached
        subject.check()


@both
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_at_any_operation(subject: Subject) -> None:
    """The next thread finds the runtime free, and the process as it was."""
    injector = Injector(subject.runtime)
    for key, stage, at in everywhere(subject, every=5):
        with injector.failing(key, stage, at, SystemExit):
            thread = threading.Thread(target=subject.capture)
            thread.start()
            thread.join()
        assert injector.reached
        subject.check()


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["lint", "warm-up", "capture"])
def test_memory_that_really_runs_out(stage: str) -> None:
    """The allocator's own failure, in place of an exception of the test's."""
    subject = Subject("cuda_graph")
    with subject.runtime:
        free, _ = torch.cuda.mem_get_info()

        def too_much() -> BaseException:
            torch.empty(2 * free, dtype=torch.uint8, device="cuda")
            raise AssertionError("there was room")

        injector = Injector(subject.runtime)
        for key in subject.runtime.ladder.buckets:
            with injector.failing(key, stage, 7, too_much):
                with pytest.raises(CaptureError, match="OutOfMemoryError"):
                    subject.capture()
            subject.check()


# --- after the last operation ---------------------------------------------------------------------


@both
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, KeyboardInterrupt])
def test_a_recording_that_can_not_be_made_ready(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], after: int
) -> None:
    """Instantiation fails, for the first bucket or for one behind it."""
    owner: Any = torch.cuda.CUDAGraph if subject.runtime.device.type == "cuda" else None
    name = "instantiate"
    if owner is None:
        owner, name = capture.tape.TapeStep, "__init__"
    original = getattr(owner, name)
    calls = 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error("not ready")
        return original(*arguments)

    for _ in range(3):
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            expected = error if error is KeyboardInterrupt else CaptureError
            with pytest.raises(expected, match="not ready") as told:
                subject.capture()
            if error is not KeyboardInterrupt:
                assert f"making it ready to replay raised {error.__name__}" in str(told.value)
        subject.check()


@both
@pytest.mark.parametrize("at", [0, 1, -1])
def test_a_device_that_is_lost_in_a_capture(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Whatever the step raised then, the error says that the device is lost, now and later."""
    runtime, injector = subject.runtime, Injector(subject.runtime)
    stage = stages_of(runtime)[at]

    def lost() -> None:
        raise DeviceLost("CUDA reported an illegal address")

    def fails() -> BaseException:
        monkeypatch.setattr(runtime._backend, "synchronize", lost)
        return RuntimeError("some operation failed")

    with injector.failing(runtime.ladder.buckets[0], stage, 5, fails):
        with pytest.raises(DeviceLost, match="an illegal address"):
            subject.capture()
    for call in (subject.capture, lambda: subject.step(eager=True), subject.rewind):
        with pytest.raises(DeviceLost, match="an illegal address"):
            call()
    assert surroundings(runtime) == subject.around


@pytest.mark.gpu
def test_a_driver_that_reports_an_error_says_the_device_is_lost() -> None:
    subject = Subject("cuda_graph")
    stream: Any = subject.runtime._backend._driver_stream  # type: ignore[attr-defined]
    real = stream.driver

    class Broken:
        def __getattr__(self, name: str) -> Any:
            if name != "cuGraphGetNodes":
                return getattr(real, name)
            return lambda *_: (real.CUresult.CUDA_ERROR_LAUNCH_FAILED,)

    stream.driver = Broken()
    with pytest.raises(DeviceLost, match="State on the device is lost; close this runtime"):
        subject.capture()
    stream.driver = real
    with pytest.raises(DeviceLost):
        subject.step(eager=True)
    subject.runtime.close()
    # It was the bookkeeping of one runtime that was lost: others can be made.
    with Subject("cuda_graph").runtime as other:
        assert other.report is not None


# --- memory for the runtime itself ----------------------------------------------------------------


class _Allocations:
    """Counts calls of torch's makers, and lets one of them fail."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int | None) -> None:
        self.count = 0
        for name in ("empty", "zeros", "full"):
            patch.setattr(torch, name, self._around(getattr(torch, name), at))

    def _around(self, make: Callable[..., Tensor], at: int | None) -> Callable[..., Tensor]:
        def made(*arguments: Any, **options: Any) -> Tensor:
            self.count += 1
            if at is not None and self.count > at:
                raise torch.OutOfMemoryError("out of memory")
            return make(*arguments, **options)

        return made


@both
def test_a_runtime_that_can_not_be_made(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each allocation of its constructor fails once; nothing of it stays, and the next is made."""
    toy = ToyDecoder((None, 6), device_of(backend))
    with monkeypatch.context() as patch:
        allocations = _Allocations(patch, None)
        toy_runtime(backend, toy).close()
    assert allocations.count > 5
    gc.collect()
    before = torch.cuda.memory_allocated() if backend == "cuda_graph" else 0
    for at in range(allocations.count):
        with monkeypatch.context() as patch:
            _Allocations(patch, at)
            with pytest.raises(torch.OutOfMemoryError):
                toy_runtime(backend, toy)
        gc.collect()
        assert before == (torch.cuda.memory_allocated() if backend == "cuda_graph" else 0)
    with toy_runtime(backend, toy) as runtime:
        runtime.capture(progress=False)
        slot = runtime.admit(PROMPT)
        assert runtime.step([slot]).tokens() == ToyOracle(toy).answer(PROMPT, 1)


# --- the collector --------------------------------------------------------------------------------


class _Poison:
    """A cycle whose finalizer waits for the device, which no capture survives."""

    finalized = 0
    while_recording = 0

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        _Poison.finalized += 1
        _Poison.while_recording += is_recording()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def poisoned(backend: str, also: Callable[[], object] = lambda: None) -> DecodeRuntime:
    toy = ToyDecoder((None, 6), device_of(backend))

    def step(batch: Batch) -> Tensor:
        for _ in range(8):
            _Poison()
        also()
        return toy(batch)

    model = StepFunction(step, VOCAB, schemas=toy.schemas, device=toy.device, chunk=toy)
    return DecodeRuntime(
        model, max_requests=2, max_context=CONTEXT, block_tokens=16, backend=backend
    )


@both
def test_a_collector_that_can_not_wait(backend: str) -> None:
    """It would run at every allocation; within a capture it rests."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    _Poison.finalized = _Poison.while_recording = 0
    try:
        with poisoned(backend) as runtime:
            for _ in range(3):
                runtime.capture(progress=False)
            assert gc.isenabled()
            slot = runtime.admit([1, 2])
            assert len(runtime.step([slot]).tokens()) == 1
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert _Poison.finalized >= 3 * 8 * 2
    assert _Poison.while_recording == 0


@both
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_step_that_calls_the_collector_itself(backend: str) -> None:
    """The finalizer's wait is refused before it reaches the driver; Python drops what it raises."""
    # What other tests have left is not to be finalized within the capture.
    gc.collect()
    _Poison.finalized = _Poison.while_recording = 0
    with poisoned(backend, gc.collect) as runtime:
        runtime.capture(progress=False)
        slot = runtime.admit([1, 2])
        assert len(runtime.step([slot]).tokens()) == 1
    assert _Poison.while_recording > 0


def test_the_collector_rests_until_the_last_of_two_recordings_ends() -> None:
    """Two runtimes may capture at once, each in a thread of its own."""
    from capture.backend import recording

    first_in, second_in = threading.Event(), threading.Event()
    seen: list[bool] = []

    def second() -> None:
        first_in.wait(10)
        with recording():
            second_in.set()
            first_out.wait(10)
            seen.append(gc.isenabled())

    first_out = threading.Event()
    thread = threading.Thread(target=second)
    thread.start()
    assert gc.isenabled()
    with recording():
        first_in.set()
        assert second_in.wait(10)
    first_out.set()
    thread.join()
    assert seen == [False]
    assert gc.isenabled()
