"""A runtime's soak from capture to verdict."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from capture import DecodeRuntime, Ladder
from capture.debug import DebugOptions
from graphcache.errors import BlocksExhausted

from .life import Life
from .readings import SLACK, Reading, Readings, growth
from .reread import reread

__all__ = ["Soak", "SoakReport", "soak"]

ROWS = 8
SLOTS = 12
MAX_CONTEXT = 1024
BLOCK_TOKENS = 64
SHARE_OF_BLOCKS = 0.6
"""Of what full contexts would take: blocks run out now and then, and are taken up again."""
REREAD_EVERY = 16
"""Events."""


@dataclass(frozen=True)
class Soak:
    """How long, and how often to look.

    Args:
        replays: steps in all.
        seed: of all that is chosen.
        shadows: steps that run eagerly too, before their replay, evenly spread.
        readings: of memory, evenly spread.
        minutes: end by then; None for no limit.
        tolerance: most error of a reread request, see `Reread.error`.
    """

    replays: int
    seed: int = 0
    shadows: int = 1000
    readings: int = 100
    minutes: float | None = None
    tolerance: float = 1e-3


@dataclass
class SoakReport:
    """What a soak did and found.

    Attributes:
        replays: steps taken, those of rereads not counted.
        seconds: from the first admission on.
        events: by kind.
        buckets: replays by rows of the bucket.
        shadows: steps that were compared with an eager run, bit for bit.
        rereads: requests that were read again.
        reread_error: the largest, see `Reread.error`.
        garbage: objects that steps left for the collector.
        growth: since warm-up, by attribute of `Reading`; None after too few readings.
        readings: of memory.
        failures: what went wrong; empty when nothing did.
    """

    replays: int = 0
    seconds: float = 0.0
    events: dict[str, int] = field(default_factory=dict)
    buckets: dict[str, int] = field(default_factory=dict)
    shadows: int = 0
    rereads: int = 0
    reread_error: float = 0.0
    garbage: int = 0
    growth: dict[str, int] | None = None
    readings: list[Reading] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing went wrong."""
        return not self.failures


def soak(
    model: Any,
    plan: Soak,
    progress: Callable[[SoakReport], None] = lambda _: None,
    **options: Any,
) -> SoakReport:
    """Capture a model's steps and live through many of them.

    Stops at the first step or request that went wrong. Memory is judged at the end.

    Args:
        model: a runtime's.
        plan: how long, how often to look.
        progress: told after each event; must not keep what it is given.
        options: of the runtime, in place of this module's.
    """
    report = SoakReport()
    settings: dict[str, Any] = {
        "max_requests": SLOTS,
        "max_context": MAX_CONTEXT,
        "ladder": Ladder.powers_of_two(ROWS),
        "block_tokens": BLOCK_TOKENS,
        "kv_blocks": int(SLOTS * MAX_CONTEXT // BLOCK_TOKENS * SHARE_OF_BLOCKS),
        "keep_logits": True,
        "debug": DebugOptions(
            addresses=False, guards=False, finite=False,
            shadow_every=max(1, plan.replays // max(1, plan.shadows)),
        ),
    }  # fmt: skip
    with DecodeRuntime(model, **{**settings, **options}) as runtime:
        runtime.capture(progress=False)
        with Readings(runtime.device) as readings:
            try:
                _live(runtime, plan, readings, report, progress)
                _count(runtime, report)
            except Exception as error:
                report.failures.append(f"{type(error).__name__}: {error}")
                traceback.print_exc()
            report.readings = readings.taken
            report.garbage = readings.garbage
    report.failures += _of_memory(report)
    return report


def _live(
    runtime: DecodeRuntime,
    plan: Soak,
    readings: Readings,
    report: SoakReport,
    progress: Callable[[SoakReport], None],
) -> None:
    life = Life(runtime, plan.seed)
    start = time.perf_counter()
    end = start + 60 * plan.minutes if plan.minutes is not None else float("inf")
    reading_every = max(1, plan.replays // max(1, plan.readings))
    next_reading = reading_every
    try:
        while life.replays < plan.replays and time.perf_counter() < end and report.ok:
            life.event()
            if sum(life.events.values()) % REREAD_EVERY == 0 and life.slots:
                _reread(runtime, life, plan, report)
            most = plan.replays - life.replays
            if life.replays >= next_reading and life.slots:
                next_reading = life.replays + reading_every
                readings.take(life, most)
            else:
                life.burst(most)
            _note(runtime, life, report, time.perf_counter() - start)
            progress(report)
    finally:
        _note(runtime, life, report, time.perf_counter() - start)


def _reread(runtime: DecodeRuntime, life: Life, plan: Soak, report: SoakReport) -> None:
    try:
        found = reread(runtime, life.any_slot())
    except BlocksExhausted:
        return
    report.rereads += 1
    report.reread_error = max(report.reread_error, found.error)
    # Written so that a NaN fails.
    if not found.error <= plan.tolerance:
        report.failures.append(
            f"after {life.replays} replays a request of {found.length} tokens, read again from "
            f"them, has logits that differ by {found.error:.2g} of the largest "
            f"(at most {plan.tolerance:g})"
        )


def _note(runtime: DecodeRuntime, life: Life, report: SoakReport, seconds: float) -> None:
    assert runtime.debug is not None
    report.replays = life.replays
    report.seconds = seconds
    report.events = dict(life.events)
    report.buckets = {str(key): use.replays for key, use in runtime.counters.buckets.items()}
    report.shadows = runtime.debug.checks["shadow"]


def _count(runtime: DecodeRuntime, report: SoakReport) -> None:
    """Every step that was asked for was a replay."""
    uses = runtime.counters.buckets.values()
    replays, eager = sum(use.replays for use in uses), sum(use.eager_runs for use in uses)
    if replays != report.replays + report.rereads or eager:
        report.failures.append(
            f"{report.replays + report.rereads} replays were asked for, {replays} ran, "
            f"and {eager} steps ran eagerly in their place"
        )


def _of_memory(report: SoakReport) -> list[str]:
    failures = []
    if report.garbage:
        failures.append(f"steps left {report.garbage} objects for the collector")
    report.growth = growth(report.readings)
    for name, grown in (report.growth or {}).items():
        if grown > SLACK[name]:
            failures.append(f"{name} grew by {grown} since warm-up (at most {SLACK[name]})")
    return failures
