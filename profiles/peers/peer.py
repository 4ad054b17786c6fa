"""What every peer does: take the model's own weights, absorb prompts, decode, hand out tokens."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["Decoded", "Peer", "PeerUnavailable", "SteppedPeer", "TokenReader", "periods", "sent"]

DEPTH = 4
"""Token buffers of a reader; more than the steps that may be unread."""


class PeerUnavailable(Exception):
    """A peer can't run here; says what is missing."""


@dataclass(frozen=True)
class Decoded:
    """Tokens of a run, and when they came.

    Attributes:
        tokens: by step, then by row.
        times_ns: by step, from the tokens of the step before in the caller's hands to its own;
            a single mean where a peer hands out nothing between.
    """

    tokens: list[list[int]]
    times_ns: list[int]


def periods(stamps: Sequence[int]) -> list[int]:
    """From each stamp to the next."""
    return [after - before for before, after in pairwise(stamps)]


class Peer(ABC):
    """One way to decode greedily with a model, run as its own users would run it.

    Args:
        model: this library's decoder, whose weights are shared, not copied.

    Attributes:
        name: as in tables.
        host: what it does on the host each step, in words.
        compiles: whether preparing it compiles the model, which takes a minute.
    """

    name: ClassVar[str]
    host: ClassVar[str]
    compiles: ClassVar[bool] = False

    def __init__(self, model: Any) -> None:
        self.hosted = model
        self.device: torch.device = model.device

    @abstractmethod
    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        """Build, absorb all but the last token of each prompt, warm up, capture.

        Args:
            prompts: of one length.
            steps: the most steps of a run, by which caches are sized.

        Raises:
            PeerUnavailable: naming what it lacks here.
        """

    @abstractmethod
    def decode(self, steps: int) -> Decoded:
        """So many tokens for every prompt, each in the caller's hands; starts anew every time."""

    def host_ns(self) -> int | None:
        """Host time of one step, the device idle before; None where a step can't be had alone."""
        return None

    def logits(self) -> Tensor | None:
        """[rows, V] of the latest step; None where the peer doesn't hand them out."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Free what `prepare` made."""


class SteppedPeer(Peer):
    """A peer that is asked for each step.

    Attributes:
        ahead: steps asked for before the tokens of the oldest are read.
    """

    ahead: ClassVar[int] = 0

    @abstractmethod
    def rewind(self) -> None:
        """Back to the prompts, so that every run attends to as many tokens."""

    @abstractmethod
    def step(self) -> None:
        """The host's part of a step."""

    @abstractmethod
    def tokens(self) -> list[int]:
        """Of the oldest step not read, by row; waits for it."""

    def decode(self, steps: int) -> Decoded:
        self.rewind()
        self.synchronize()
        tokens: list[list[int]] = []
        stamps = [time.perf_counter_ns()]
        asked = 0
        while len(tokens) < steps:
            while asked < min(steps, len(tokens) + 1 + self.ahead):
                self.step()
                asked += 1
            tokens.append(self.tokens())
            stamps.append(time.perf_counter_ns())
        return Decoded(tokens, periods(stamps))

    def host_ns(self) -> int | None:
        self.synchronize()
        start = time.perf_counter_ns()
        self.step()
        took = time.perf_counter_ns() - start
        self.tokens()
        return took

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def sent(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Python's numbers on the device: made in pinned memory, copied without waiting."""
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


class TokenReader:
    """Tokens to the host without waiting: a copy to pinned memory and an event for each step."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._buffers = [
            torch.zeros(rows, dtype=torch.int64, pin_memory=self._cuda) for _ in range(DEPTH)
        ]
        self._events = [torch.cuda.Event() for _ in range(DEPTH)] if self._cuda else []
        self._sent = 0
        self._unread: deque[int] = deque()

    def send(self, tokens: Tensor) -> None:
        """Enqueue the copy of [rows] tokens."""
        place = self._sent % DEPTH
        self._buffers[place].copy_(tokens, non_blocking=True)
        if self._cuda:
            self._events[place].record()
        self._unread.append(place)
        self._sent += 1

    def read(self) -> list[int]:
        """The oldest tokens sent and not read; waits for them."""
        place = self._unread.popleft()
        if self._cuda:
            self._events[place].synchronize()
        tokens: list[int] = self._buffers[place].tolist()
        return tokens
