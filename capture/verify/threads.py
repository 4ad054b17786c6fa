"""Other threads: whether any was at work during a run, and some that are, on purpose."""

from __future__ import annotations

import threading
import time
from types import FrameType
from typing import Any

import torch

__all__ = ["Busy", "OtherThreads"]

ELEMENTS = 1 << 14
NOTICED_S = 20e-6
PAUSE_S = 1e-3


class OtherThreads:
    """A context that notes which other threads of Python's worked in it.

    Attributes:
        worked: their names, once it is left.
    """

    def __init__(self) -> None:
        self.worked: list[str] = []
        self._started: set[str] = set()
        self._times: dict[int, float] = {}

    def __enter__(self) -> OtherThreads:
        self._profile = threading.getprofile()
        threading.setprofile(self._note)
        self._times = _cpu_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(self._profile)
        now = _cpu_seconds()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        busy = {
            names.get(ident, "a thread")
            for ident, seconds in now.items()
            if seconds - self._times.get(ident, 0.0) > NOTICED_S
        }
        self.worked = sorted(busy | self._started)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        self._started.add(threading.current_thread().name)


def _cpu_seconds() -> dict[int, float]:
    """What each other thread has used of a processor, by its id."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None:
        return {}
    used = {}
    for thread in threading.enumerate():
        if thread.ident is not None and thread is not threading.current_thread():
            try:
                used[thread.ident] = time.clock_gettime(clock_of(thread.ident))
            except OSError:
                continue
    return used


class Busy:
    """A context in which another thread allocates, copies and computes on a device.

    Args:
        device: which one. A stream of its own is used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="verify-busy", daemon=True)

    def __enter__(self) -> Busy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        on_gpu = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if on_gpu else None
        while not self._stop.is_set():
            with torch.cuda.stream(stream):
                host = torch.arange(ELEMENTS, dtype=torch.float32, pin_memory=on_gpu)
                there = host.to(self._device, non_blocking=True) * 2
                there.cpu()
            if not on_gpu:
                time.sleep(PAUSE_S)
