"""Time by scope and bucket: what an attribution adds up to."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from capture.spans import ScopePath
from profiles.timing import Sample

from .attribute import Attribution, Replay

__all__ = [
    "UNKNOWN",
    "BucketTime",
    "ScopeTime",
    "as_json",
    "bucket_order",
    "bucket_times",
    "fold_numbers",
    "replay_table",
    "scope_table",
]

UNKNOWN: ScopePath = ("?",)
"""The path of what could not be attributed."""


@dataclass(frozen=True)
class ScopeTime:
    """A scope of one bucket, with everything inside it, an average over replays.

    Attributes:
        bucket: the bucket's name.
        path: of the scope; () for the whole replay, ("?",) for what is in no known scope.
        time_us: device time of its kernels, copies and memsets.
        share: of the device time of the whole replay.
        launches: how many they are.
        gap_us: time before them in which the replay had nothing to run.
    """

    bucket: str
    path: ScopePath
    time_us: float
    share: float
    launches: float
    gap_us: float

    def as_json(self) -> dict[str, Any]:
        return {
            "path": list(self.path),
            "time_us": self.time_us,
            "share": self.share,
            "launches": self.launches,
            "gap_us": self.gap_us,
        }


@dataclass(frozen=True)
class BucketTime:
    """A bucket's replays: how many, and how long from the first start to the last end."""

    bucket: str
    replays: int
    median_us: float
    p99_us: float
    scopes: tuple[ScopeTime, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "bucket": self.bucket,
            "replays": self.replays,
            "median_us": self.median_us,
            "p99_us": self.p99_us,
            "scopes": [scope.as_json() for scope in self.scopes],
        }


class _Sums:
    """Nanoseconds, launches and gaps of a scope."""

    def __init__(self) -> None:
        self.time = self.launches = self.gap = 0

    def add(self, time: int, gap: int) -> None:
        self.time += time
        self.gap += gap
        self.launches += 1


def fold_numbers(path: ScopePath) -> ScopePath:
    """Layers as one: "layer 3" becomes "layer *"."""
    return tuple(re.sub(r"(?<=\s)\d+$", "*", name) for name in path)


def bucket_times(
    attribution: Attribution, rename: Callable[[ScopePath], ScopePath] = tuple
) -> list[BucketTime]:
    """Times by bucket, and in each by scope, in the order in which scopes first ran.

    Args:
        attribution: of a profile.
        rename: gives the path under which a scope is added up; `fold_numbers`, or as it is.
    """
    by_bucket: dict[str, list[Replay]] = defaultdict(list)
    for replay in attribution.replays:
        by_bucket[replay.bucket].append(replay)
    return [
        _bucket_time(bucket, replays, rename)
        for bucket, replays in sorted(by_bucket.items(), key=lambda item: bucket_order(item[0]))
    ]


def _bucket_time(
    bucket: str, replays: list[Replay], rename: Callable[[ScopePath], ScopePath]
) -> BucketTime:
    sums: dict[ScopePath, _Sums] = {}
    for replay in replays:
        for activity, path, gap in zip(replay.activities, replay.paths, replay.gaps(), strict=True):
            named = rename(path) if path else UNKNOWN
            for depth in range(len(named) + 1):
                sums.setdefault(named[:depth], _Sums()).add(activity.duration, gap)
    whole = sums.get((), _Sums())
    count = len(replays)
    scopes = tuple(
        ScopeTime(
            bucket, path, one.time / count / 1e3, one.time / whole.time if whole.time else 0.0,
            one.launches / count, one.gap / count / 1e3,
        )
        for path, one in _nested(sums)
    )  # fmt: skip
    took = Sample.of([replay.duration for replay in replays])
    return BucketTime(bucket, count, took.median_us, took.p99_us, scopes)


def _nested(sums: dict[ScopePath, _Sums]) -> list[tuple[ScopePath, _Sums]]:
    """Each scope before those inside it, otherwise in the order in which they came."""
    order = {path: place for place, path in enumerate(sums)}

    def place(path: ScopePath) -> list[int]:
        return [order[path[:depth]] for depth in range(1, len(path) + 1)]

    return [(path, sums[path]) for path in sorted(sums, key=place)]


def bucket_order(bucket: str) -> tuple[list[int], str]:
    """By rows, then by tokens a row: "8" before "64"."""
    return [int(number) for number in re.findall(r"\d+", bucket)] or [1 << 30], bucket


def as_json(attribution: Attribution) -> dict[str, Any]:
    """Everything, scopes unfolded; times in microseconds unless a name ends in `_ns`."""
    kernels: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    everything = [a for replay in attribution.replays for a in replay.activities]
    for activity in [*everything, *attribution.outside]:
        if activity.kind == "kernel":
            kernels[activity.name] += activity.duration
            launches[activity.name] += 1
    return {
        "mode": attribution.mode,
        "replays": len(attribution.replays),
        "attributed_share": attribution.attributed_share,
        "inside_replays_ns": sum(activity.duration for activity in everything),
        "outside_replays_ns": sum(activity.duration for activity in attribution.outside),
        "notes": attribution.notes,
        "buckets": [bucket.as_json() for bucket in bucket_times(attribution)],
        "kernels": [
            {"name": name, "launches": launches[name], "time_ns": time}
            for name, time in kernels.most_common()
        ],
    }


def replay_table(buckets: Iterable[BucketTime]) -> Table:
    """Whole replays by bucket."""
    table = Table(title="replays", title_justify="left")
    for heading in ("bucket", "replays", "median us", "p99 us"):
        table.add_column(heading, justify="right")
    for bucket in buckets:
        table.add_row(
            bucket.bucket, str(bucket.replays), f"{bucket.median_us:.1f}", f"{bucket.p99_us:.1f}"
        )
    return table


def scope_table(buckets: Iterable[BucketTime], depth: int | None = None) -> Table:
    """Scopes by bucket, each with all that lies inside it; averages over replays.

    Args:
        buckets: with their scopes.
        depth: deepest scopes shown; None for all.
    """
    table = Table(title="device time of a replay, by scope", title_justify="left")
    table.add_column("bucket", justify="right")
    table.add_column("scope")
    for heading in ("us", "share", "launches", "gaps us"):
        table.add_column(heading, justify="right")
    for bucket in buckets:
        for scope in bucket.scopes:
            if depth is not None and len(scope.path) > depth:
                continue
            name = "  " * len(scope.path) + (scope.path[-1] if scope.path else "replay")
            table.add_row(
                "" if scope.path else bucket.bucket,
                "  (in no known scope)" if scope.path == UNKNOWN else name,
                f"{scope.time_us:.2f}",
                f"{100 * scope.share:.1f}%",
                f"{scope.launches:.4g}",
                f"{scope.gap_us:.2f}",
                end_section=scope is bucket.scopes[-1],
            )
    return table
