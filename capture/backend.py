"""What a backend does: record a step's device work once, and run it again.

Two backends keep this contract and pass the same tests: CUDA graphs, and a tape that runs anywhere
and freezes just what a graph freezes. Python in a step runs at capture only; addresses, sizes and
numbers taken from Python are fixed; recording leaves all state as it was.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from .errors import CaptureError, DeviceLost, UnsupportedDriver
from .source import line_of_error
from .spans import Node, Span

__all__ = [
    "Backend",
    "CapturedStep",
    "HostBuffer",
    "choose_backend",
    "instantiating",
    "is_recording",
    "recording",
]


class CapturedStep(Protocol):
    """A recorded step.

    Attributes:
        nodes: operations a replay runs.
        device_bytes: device memory that recording it took.
        spans: the step's scopes, by the nodes they recorded.
    """

    nodes: int
    device_bytes: int
    spans: tuple[Span, ...]

    @property
    def external(self) -> Mapping[int, Tensor]:
        """What it holds by address besides what it made, by storage."""

    @property
    def replay(self) -> Callable[[], None]:
        """Runs it, in the order of the backend's stream; returns before it is done."""

    def describe(self) -> tuple[tuple[Node, ...], bool]:
        """Its nodes, and whether each depends on just the one before it."""

    def close(self) -> None:
        """Free the recording. Nothing may be running it."""


class HostBuffer(Protocol):
    """The source of an asynchronous copy.

    Attributes:
        view: int32 values to be written by the host.
    """

    view: memoryview

    def send(self, count: int) -> None:
        """Copy the first `count` values to the device, in the order of the backend's stream."""


class Backend(Protocol):
    """Records and replays on one device, in the order of one stream.

    Recordings share memory: what a step makes lasts until another step is replayed, in whatever
    order they were recorded. What is to last longer is written to memory made before.

    Attributes:
        name: "cuda_graph" or "tape".
        rehearsals: how often a step must run before a capture, until everything that it makes
            lazily is made.
    """

    name: str
    rehearsals: int

    def context(self) -> AbstractContextManager[Any]:
        """Within it, device work goes where replays go."""

    def capture(self, step: Callable[[], None]) -> CapturedStep:
        """Record a step, without running it as far as state can tell.

        Raises:
            CaptureError: when the step can't be recorded; the backend can be used as before.
        """

    def host_buffer(self, target: Tensor) -> HostBuffer:
        """A buffer that is copied to `target`, int32, asynchronously."""

    def synchronize(self) -> None:
        """Wait for the backend's stream, and for nothing else on the device.

        Raises:
            DeviceLost: when the device has failed.
        """

    def idle(self) -> bool:
        """Whether the stream has nothing left to run. Never waits.

        Raises:
            DeviceLost: when the device has failed.
        """

    def close(self) -> None:
        """Let go of the stream and of memory kept for recordings."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.recording = False


_thread = _Thread()


def is_recording() -> bool:
    """Whether this thread is recording a step just now."""
    return _thread.recording


class _Collector:
    """Python's collector, resting while any thread records."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recordings = 0
        self._was_enabled = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        with self._lock:
            if not self._recordings:
                self._was_enabled = gc.isenabled()
                # No finalizer of some collected cycle may run inside a capture.
                gc.disable()
            self._recordings += 1
        try:
            yield
        finally:
            with self._lock:
                self._recordings -= 1
                if not self._recordings and self._was_enabled:
                    gc.enable()


_collector = _Collector()


@contextmanager
def recording() -> Iterator[None]:
    """Around the recording of a step: the collector rests, and what the step raises gets its line.

    Raises:
        CaptureError: for whatever the step raises, with the user's line.
        DeviceLost: when the device has failed.
    """
    with _collector.resting(), _errors_of_step():
        _thread.recording = True
        try:
            yield
        finally:
            _thread.recording = False


@contextmanager
def instantiating() -> Iterator[None]:
    """Around what makes a recording ready to be replayed.

    Raises:
        CaptureError: for whatever fails; it is not the step's doing.
        DeviceLost: when the device has failed.
    """
    try:
        yield
    except (CaptureError, DeviceLost):
        raise
    except Exception as error:
        raise CaptureError(
            f"the step was recorded, but making it ready to replay raised {type(error).__name__}: "
            f"{error}"
        ) from error


@contextmanager
def _errors_of_step() -> Iterator[None]:
    try:
        yield
    except (CaptureError, DeviceLost):
        raise
    except Exception as error:
        raise CaptureError(
            f"the step raised {type(error).__name__} during capture: {error}",
            source=line_of_error(error),
        ) from error


def choose_backend(name: str, device: torch.device) -> Backend:
    """The backend of that name, or for "auto" the one that suits the device.

    Raises:
        CaptureError: for an unknown name.
        UnsupportedDriver: when CUDA graphs are asked for where there are none.
    """
    if name == "auto":
        name = "cuda_graph" if device.type == "cuda" else "tape"
    if name == "tape":
        if device.type != "cpu":
            raise CaptureError(
                f"the tape replays on the CPU, and the model is on {device}; use cuda_graph"
            )
        from .tape import TapeBackend

        return TapeBackend(device)
    if name == "cuda_graph":
        if device.type != "cuda":
            raise UnsupportedDriver(f"CUDA graphs need a CUDA device; the model is on {device}")
        from .cuda_graph import CudaGraphBackend

        return CudaGraphBackend(device)
    raise CaptureError(f"no backend {name!r}: choose auto, cuda_graph or tape")
