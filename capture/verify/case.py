"""What one trial runs: requests in their slots, and the batches they are stepped in."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from ..ladder import Bucket, Ladder

__all__ = ["Case", "Request", "prompt_of"]


@dataclass(frozen=True)
class Request:
    """A request of a trial.

    Attributes:
        key: its prompt and its draws follow from it, wherever it lies.
        row: of its slot.
        length: tokens absorbed when the trial begins.
        temperature: of its draws; 0 for greedy.
        finished: steps treat it as padding.
    """

    key: int
    row: int
    length: int
    temperature: float = 0.0
    finished: bool = False


@dataclass(frozen=True)
class Case:
    """A trial.

    Attributes:
        requests: each in a row of its own.
        batches: of each step, indices into `requests`, in the order of the batch's rows.
    """

    requests: tuple[Request, ...]
    batches: tuple[tuple[int, ...], ...]

    def running(self, step: int) -> list[Request]:
        """Who runs in a step, in the order of its rows."""
        asked = (self.requests[index] for index in self.batches[step])
        return [request for request in asked if not request.finished]

    def moved(self, rows: Iterable[int]) -> Case:
        """The same requests in other rows."""
        return replace(
            self,
            requests=tuple(
                replace(request, row=row) for request, row in zip(self.requests, rows, strict=True)
            ),
        )

    def in_words(self, ladder: Ladder) -> str:
        """Who steps in which bucket."""
        runs = [(self._said(batch, ladder), len(list(run))) for batch, run in groupby(self.batches)]
        return "step " + "; then ".join(
            said if times == 1 else f"{said}, {times} times" for said, times in runs
        )

    def _said(self, batch: tuple[int, ...], ladder: Ladder) -> str:
        bucket = ladder.bucket_for(len(batch), ladder.q_len)
        rows = f" in a bucket of {bucket.rows}" if isinstance(bucket, Bucket) else ""
        return ", ".join(_said(self.requests[index]) for index in batch) + rows


def _said(request: Request) -> str:
    extra = f" at temperature {request.temperature:g}" if request.temperature else ""
    done = ", finished" if request.finished else ""
    return f"slot {request.row} (len {request.length}{extra}{done})"


def prompt_of(request: Request, vocab_size: int) -> list[int]:
    """The request's tokens: one more than are absorbed, the last one pending."""
    draw = random.Random(request.key)
    return [draw.randrange(vocab_size) for _ in range(request.length + 1)]
