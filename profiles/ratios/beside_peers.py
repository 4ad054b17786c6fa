"""R5 and the host's part of R1: every peer beside this library, outputs first, then times."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..agreement import agreement
from ..peers import Ours, Peer, PeerUnavailable, SteppedPeer
from ..peers.raw_launch import RawLaunch
from ..results import PeerRun, Ratio, Record, Skipped
from ..timing import Sample

__all__ = ["PeerBench", "peer_prompts"]

CHECKED = 16
STEPS = 200
ROUNDS = 3
HOST_COUNT = 100
ROUND_NS = 1_500_000_000
"""A round of a slow peer takes about as long, with fewer steps."""
SETTLE = 8
"""First steps of a run, which are not timed: the pipeline fills."""
GOALS = {"HF generate": 2.0, "HF continuous batching": 2.0}
HOST_GOALS = {"nano-vllm's pattern": 10.0, "gpt-fast's pattern": 10.0}


def peer_prompts(model: Any, batch: int, context: int) -> list[list[int]]:
    """One for each row: `context` tokens and a pending one."""
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, context + 1)
    drawn: list[list[int]] = torch.randint(0, model.vocab_size, shape, generator=generator).tolist()
    return drawn


class PeerBench:
    """This library in mid-decode at one batch, for peers to be held against. A context manager.

    Args:
        model: a `TransformersDecoder`.
        batch: rows.
        context: tokens of each row before the first step.
        timed: whether to take times; without, outputs only.
    """

    def __init__(self, model: Any, batch: int, context: int, *, timed: bool = True) -> None:
        self._model, self._context, self._timed = model, context, timed
        self._steps = STEPS if timed else CHECKED
        self._prompts = peer_prompts(model, batch, context)
        self._ours = Ours(model)

    def __enter__(self) -> PeerBench:
        shown = Ours(self._model, keep_logits=True)
        shown.prepare(self._prompts, CHECKED)
        self._tokens, self._logits = _with_logits(shown)
        shown.close()
        self._ours.prepare(self._prompts, self._steps)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ours.close()

    def ours(self) -> Iterator[Record]:
        """This library's own line, and R11."""
        if not self._timed:
            return
        batch = len(self._prompts)
        period = _periods([self._ours.decode(self._steps).times_ns for _ in range(ROUNDS)])
        host = Sample.of(_hosts(self._ours))
        yield PeerRun(
            self._ours.name, self._ours.host, batch, self._context, "itself", True,
            period.median_us, period.p99_us, host.median_us, host.p99_us,
        )  # fmt: skip
        yield Ratio(
            "R11", "p99 / p50 of the steady step", batch, period.p99_us / period.median_us, 1.05,
            period.p99_us, period.p99_us, period.median_us, period.median_us,
        )  # fmt: skip

    def beside(self, kind: type[Peer]) -> Iterator[Record]:
        """A peer's line, and its ratios if its outputs are the same."""
        batch = len(self._prompts)
        peer = kind(self._model)
        try:
            try:
                peer.prepare(self._prompts, self._steps)
            except PeerUnavailable as error:
                yield Skipped(f"R5, {kind.name} at batch {batch}", str(error))
                return
            decoded = peer.decode(CHECKED)
            found = agreement(self._tokens, self._logits, decoded.tokens)
            if found.held and self._timed:
                step_ns = statistics.median(decoded.times_ns)
                yield from self._times(peer, str(found), _as_many(step_ns, self._steps))
                return
            yield PeerRun(kind.name, kind.host, batch, self._context, str(found), found.held)
        finally:
            peer.close()
            if self._model.device.type == "cuda":
                torch.cuda.empty_cache()

    def _times(self, peer: Peer, agreement: str, steps: int) -> Iterator[Record]:
        batch = len(self._prompts)
        ours, theirs = [], []
        for _ in range(ROUNDS):
            ours.append(self._ours.decode(steps).times_ns)
            theirs.append(peer.decode(steps).times_ns)
        mine, period = _periods(ours), _periods(theirs)
        hosts = _hosts(peer, min(HOST_COUNT, steps))
        host = Sample.of(hosts) if hosts else None
        yield PeerRun(
            peer.name, peer.host, batch, self._context, agreement, True,
            period.median_us, period.p99_us,
            host.median_us if host else 0.0, host.p99_us if host else 0.0,
        )  # fmt: skip
        # What launches and nothing else is no way to decode: the floor has no goal.
        goal = GOALS.get(peer.name, 1.0) if not isinstance(peer, RawLaunch) else 0.0
        yield Ratio(
            "R5", f"{peer.name}, step / ours", batch, period.median_us / mine.median_us, goal,
            period.median_us, period.p99_us, mine.median_us, mine.p99_us, at_most=False,
        )  # fmt: skip
        if host and not isinstance(peer, RawLaunch):
            own = Sample.of(_hosts(self._ours))
            yield Ratio(
                "R1", f"host time of {peer.name} / of step()", batch,
                host.median_us / own.median_us, HOST_GOALS.get(peer.name, 0.0),
                host.median_us, host.p99_us, own.median_us, own.p99_us, at_most=False,
            )  # fmt: skip


def _with_logits(ours: Ours) -> tuple[list[list[int]], list[Tensor]]:
    """The first steps, one at a time: a step's logits last until the next."""
    tokens, logits = [], []
    ours.rewind()
    for _ in range(CHECKED):
        ours.step()
        kept = ours.logits()
        assert kept is not None
        logits.append(kept.clone())
        tokens.append(ours.tokens())
    return tokens, logits


def _periods(runs: list[list[int]]) -> Sample:
    return Sample.of([took for run in runs for took in (run[SETTLE:] or run)])


def _as_many(step_ns: float, most: int) -> int:
    """Steps of a round."""
    return max(3 * SETTLE, min(most, int(ROUND_NS / step_ns)))


def _hosts(peer: Peer, count: int = HOST_COUNT) -> list[int]:
    """Host times of single steps; none where a step can't be had alone."""
    if isinstance(peer, SteppedPeer):
        peer.rewind()
    taken = [peer.host_ns() for _ in range(count)]
    return [took for took in taken[SETTLE:] if took is not None]
