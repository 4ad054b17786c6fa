"""Random cases: who has which slot at which length, and who steps when."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

from graphcache import DecodeState

from ..ladder import Ladder
from .case import Case, Request
from .thresholds import thresholds

__all__ = ["Generator"]

MOST_REQUESTS = 12
MOST_STEPS = 3
TEMPERATURES = (0.0, 0.0, 0.7, 1e3)


class Generator:
    """Makes cases.

    Args:
        state: cases are to fit it.
        ladder: whose buckets are to be used.
        seed: cases follow from it.
    """

    def __init__(self, state: DecodeState, ladder: Ladder, seed: int) -> None:
        self._state = state
        self._ladder = ladder
        self._random = random.Random(seed)
        self._lengths = thresholds(state)
        # Lengths still to come; the first are an empty slot, and one with no room to spare.
        self._deck = [self._lengths[-1], self._lengths[0]]
        self._made = 0

    def case(self) -> Case:
        """The next case, for the buckets in turn: filled to the last row, then with some padding,
        then with nothing else, since all who are asked for have finished."""
        draw, most = self._random, self._state.max_requests
        buckets = self._ladder.buckets
        rows = buckets[self._made % len(buckets)].rows
        kind = self._made // len(buckets) % 3
        full, idle = kind == 0, kind == 2
        self._made += 1
        running = rows if full or idle else self._padded(rows)
        count = min(most, max(running, min(MOST_REQUESTS, running + 2)))
        batches = [tuple(draw.sample(range(count), min(running, count)))]
        if full and running > 1:
            # Its last row goes, and padding comes in its place.
            batches.append(batches[0][:-1])
        for _ in range(draw.randrange(MOST_STEPS)):
            batches.append(self._next_batch(batches[-1], count))
        done: Collection[int] = ()
        if idle:
            done = range(count)
        elif not full and count > 1:
            done = (draw.randrange(count),)
        # Who is stepped first, first: every length has its turn.
        order = [*batches[0], *(i for i in range(count) if i not in batches[0])]
        lengths = {index: self._next_length() for index in order}
        requests = tuple(
            Request(
                key=draw.randrange(1 << 30),
                row=row,
                length=lengths[index],
                temperature=draw.choice(TEMPERATURES),
                finished=index in done,
            )
            for index, row in enumerate(draw.sample(range(most), count))
        )
        return self._fitted(Case(requests, tuple(batches)))

    def some_lengths(self, count: int) -> list[int]:
        """An empty slot, and other lengths from which some steps can be made."""
        roomy = [length for length in self._lengths if length + 12 < self._state.max_context]
        rest = [length for length in roomy if length]
        return [0, *self._random.sample(rest, min(count - 1, len(rest)))]

    def _padded(self, rows: int) -> int:
        """So many rows that a bucket of `rows` serves them with padding, where there are any."""
        below = max((b.rows for b in self._ladder.buckets if b.rows < rows), default=0)
        return self._random.randint(below + 1, max(below + 1, rows - 1))

    def _next_batch(self, last: tuple[int, ...], count: int) -> tuple[int, ...]:
        """After a batch, what is left when its last rows have gone; or another one."""
        draw = self._random
        if draw.random() < 0.5:
            return last[: draw.randint(1, len(last))]
        return tuple(draw.sample(range(count), draw.randint(1, min(count, self._ladder.ceiling))))

    def _next_length(self) -> int:
        if not self._deck:
            self._deck = self._random.sample(self._lengths, len(self._lengths))
        return self._deck.pop()

    def _fitted(self, case: Case) -> Case:
        """The case with lengths that the blocks suffice for."""
        blocks = self._state.blocks
        if blocks is None:
            return case
        left = blocks.num_blocks - len(case.requests)
        fitted = []
        for request in case.requests:
            need = blocks.blocks_for(request.length + len(case.batches) + 2)
            length = request.length if need <= left else 0
            left -= blocks.blocks_for(length + len(case.batches) + 2) - 1
            fitted.append(replace(request, length=length))
        return Case(tuple(fitted), case.batches)
