"""How tokens come back: a ring in host memory that steps write and the host polls.

A step's last node writes what it gave into the ring's next place, then the step's number. Polling
that number takes no call into the driver, so a waiting host neither blocks the device nor asks it
anything, until too much time has passed: then it asks whether the device still lives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

import torch
from torch import Tensor

from graphcache.ops.publish import publish

from .errors import DeviceLost
from .host_view import host_view

__all__ = ["DEPTH", "Arrival", "Mailbox"]

DEPTH: Final = 4
"""Places in the ring. Two steps may be unread; a power of two keeps the remainder cheap."""

SPIN_NS: Final = 120_000
"""Sleeping ends this long before a step is expected: a sleeper wakes up to 100 us late."""
CHECK_NS: Final = 1_000_000
POLLS: Final = 64
OVERDUE_SLEEP_S: Final = 20e-6


class Arrival(Enum):
    """How a wait found its step."""

    BEFORE = "complete before the wait began"
    SEEN = "seen to complete while polling"
    OVERSLEPT = "complete when the wait woke up to poll"


class Mailbox:
    """The ring, and the wait for a step.

    Args:
        tokens: the most a step emits.
        rows: the most rows of a step.
        device: the steps run on.
        check: raises when the device has failed; returns whether it has nothing left to run.
    """

    def __init__(
        self, tokens: int, rows: int, device: torch.device, check: Callable[[], bool]
    ) -> None:
        pinned = device.type == "cuda"
        self.ring_tokens = torch.zeros((DEPTH, tokens), dtype=torch.int32, pin_memory=pinned)
        self.ring_reasons = torch.zeros((DEPTH, rows), dtype=torch.int32, pin_memory=pinned)
        self.word = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._check = check
        self._word_view = host_view(self.word)
        self._token_view = host_view(self.ring_tokens)
        self._reason_view = host_view(self.ring_reasons)
        self._tokens = tokens
        self._rows = rows

    def publish(self, emitted: Tensor, reasons: Tensor) -> None:
        """Within a step: count it, and write what it gave. One node."""
        publish(emitted, reasons, self.counter, self.ring_tokens, self.ring_reasons, self.word)

    def completed(self) -> int:
        """The newest step whose results are in the ring."""
        step: int = self._word_view[0]
        return step

    def read(self, step: int, tokens: int, rows: int) -> tuple[list[int], list[int]]:
        """Tokens and reasons of a completed step, at most `DEPTH - 1` steps old."""
        place = step % DEPTH
        start, row = place * self._tokens, place * self._rows
        return (
            self._token_view[start : start + tokens].tolist(),
            self._reason_view[row : row + rows].tolist(),
        )

    def wait(self, step: int, expected_ns: int = 0, timeout: float | None = None) -> Arrival:
        """Return once `step` has completed, with how it was found.

        Sleeps until shortly before `expected_ns`, then polls; both let other threads run. Asks the
        device every millisecond whether it lives.

        Args:
            step: its number.
            expected_ns: when it should be done, on the clock of `time.perf_counter_ns`.
            timeout: seconds from now; None for no limit.

        Raises:
            TimeoutError: the step may still complete; wait again.
            DeviceLost: when the device has failed, or ran dry without completing the step.
        """
        word = self._word_view
        if word[0] >= step:
            return Arrival.BEFORE
        now = time.perf_counter_ns()
        deadline = None if timeout in (None, math.inf) else now + int(timeout * 1e9)
        next_check = now + CHECK_NS
        while True:
            early = expected_ns - SPIN_NS - now
            if deadline is not None:
                early = min(early, deadline - now)
            if early > 0:
                time.sleep(min(early, CHECK_NS) * 1e-9)
            else:
                for _ in range(POLLS):
                    if word[0] >= step:
                        return Arrival.SEEN
                overdue = now > expected_ns + CHECK_NS
                time.sleep(OVERDUE_SLEEP_S if overdue else 0)
            now = time.perf_counter_ns()
            if word[0] >= step:
                return Arrival.OVERSLEPT if early > 0 else Arrival.SEEN
            late = deadline is not None and now >= deadline
            # Before giving up too: who polls with short timeouts must hear of a lost device.
            if late or now >= next_check:
                next_check = now + CHECK_NS
                # Dry first, then the word once more: a step may complete between the two.
                if self._check() and word[0] < step:
                    self._fail(step)
            if late:
                raise TimeoutError(f"step {step} has not completed after {timeout} s")

    def _fail(self, step: int) -> None:
        raise DeviceLost(
            f"the device has nothing left to run, and step {step} never came "
            f"(the newest is {self.completed()}); close this runtime"
        )
