"""This library, measured as its peers are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from capture import DecodeRuntime, Ladder
from capture.result import StepResult

from .peer import SteppedPeer

__all__ = ["Ours"]


class Ours(SteppedPeer):
    """A runtime of one bucket.

    Args:
        keep_logits: for `logits()`; costs a copy a step.
    """

    name = "graphcache"
    host = "compares a list, launches, polls"
    ahead = 1

    def __init__(self, model: Any, *, keep_logits: bool = False) -> None:
        super().__init__(model)
        self._keep_logits = keep_logits

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        self._start = len(prompts[0]) - 1
        self._unread: deque[StepResult] = deque()
        self._runtime = DecodeRuntime(
            self.hosted,
            max_requests=len(prompts),
            max_context=len(prompts[0]) + steps + 1,
            ladder=Ladder([len(prompts)]),
            keep_logits=self._keep_logits,
        )
        self._runtime.capture(progress=False)
        self._slots = [self._runtime.admit(prompt) for prompt in prompts]

    def rewind(self) -> None:
        for slot in self._slots:
            if self._runtime.length_of(slot) > self._start:
                self._runtime.rewind(slot, self._start)

    def step(self) -> None:
        self._latest = self._runtime.step(self._slots)
        self._unread.append(self._latest)

    def tokens(self) -> list[int]:
        return self._unread.popleft().tokens()

    @property
    def nodes(self) -> int:
        """Of the captured step."""
        report = self._runtime.report
        assert report is not None
        return int(report.buckets[0].nodes)

    def logits(self) -> Tensor | None:
        return self._latest.logits if self._keep_logits else None

    def close(self) -> None:
        self._runtime.close()
