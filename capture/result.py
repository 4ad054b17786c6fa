"""What a step gives its caller: tokens that may still be on their way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from graphcache import FinishReason

from .errors import NotCaptured

__all__ = ["StepResult"]


class _Source(Protocol):
    def collect(self, result: StepResult, timeout: float | None) -> tuple[list[int], list[int]]: ...

    def logits_of(self, result: StepResult) -> Tensor: ...


class StepResult:
    """A submitted step. Its tokens can be read until the second step after it is asked for.

    Attributes:
        number: of the step, from 1; 0 for a step of no slots, which never ran.
        slots: handles, in the order asked for.
    """

    __slots__ = ("_reasons", "_source", "_tokens", "expected_ns", "number", "slots", "submitted_ns")

    def __init__(
        self,
        number: int,
        slots: Sequence[int],
        source: _Source | None,
        submitted_ns: int,
        expected_ns: int,
    ) -> None:
        self.number = number
        self.slots = slots
        self.submitted_ns = submitted_ns
        self.expected_ns = expected_ns
        self._source = source
        self._tokens: list[int] | None = None if source is not None else []
        self._reasons: list[int] = []

    @property
    def is_read(self) -> bool:
        """Whether the tokens have been read."""
        return self._tokens is not None

    def tokens(self, timeout: float | None = None) -> list[int]:
        """Each slot's new token, in the order asked for; -1 where it had finished before.

        Waits for the step, not for the device; other threads run meanwhile.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            TimeoutError: the step may still complete; ask again.
            DeviceLost: when the device has failed.
        """
        if self._tokens is None:
            assert self._source is not None
            self._tokens, self._reasons = self._source.collect(self, timeout)
        return self._tokens

    @property
    def reasons(self) -> list[FinishReason]:
        """Why each slot has finished, `NONE` while it runs. Waits as `tokens()`."""
        self.tokens()
        return [FinishReason(reason) for reason in self._reasons]

    @property
    def logits(self) -> Tensor:
        """[slots, V] on the device, in the order asked for. Valid until the next step is asked for.

        Raises:
            NotCaptured: unless the runtime was made with `keep_logits=True`.
        """
        if self._source is None:
            raise NotCaptured("a step of no slots has no logits")
        return self._source.logits_of(self)

    def __repr__(self) -> str:
        state = f"tokens={self._tokens}" if self.is_read else "unread"
        return f"StepResult(number={self.number}, slots={list(self.slots)}, {state})"


def now_ns() -> int:
    """The clock of steps."""
    return time.perf_counter_ns()
