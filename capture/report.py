"""What capture cost, and what replay did since."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from .ladder import Bucket, RefusalReason

__all__ = ["BucketCost", "BucketUse", "CaptureReport", "Counters", "bucket_table", "rendered"]

MIB = 1024 * 1024


@dataclass(frozen=True)
class BucketCost:
    """What capturing one bucket took.

    Attributes:
        bucket: its key.
        nodes: operations a replay runs.
        capture_ms: from its first run to its captured step.
        device_bytes: device memory it took, shared memory counted where it was taken first.
    """

    bucket: Bucket
    nodes: int
    capture_ms: float
    device_bytes: int


@dataclass(frozen=True)
class CaptureReport:
    """What capturing a ladder took, largest bucket first.

    Attributes:
        backend: "cuda_graph" or "tape".
        buckets: each bucket's cost.
        state_bytes: all state, pools and blocks.
        weight_bytes: of the model's tensors.
        taken_bytes: device memory that went in all: recordings, and what rehearsals left, as
            kernels, workspaces and the allocator's reserve; what a trial had taken before counts.
        planned_bytes: what a plan had foreseen of it; None without a plan.
    """

    backend: str
    buckets: tuple[BucketCost, ...]
    state_bytes: int
    weight_bytes: int = 0
    taken_bytes: int = 0
    planned_bytes: int | None = None

    @property
    def total_ms(self) -> float:
        """Time of all captures."""
        return sum(cost.capture_ms for cost in self.buckets)

    @property
    def device_bytes(self) -> int:
        """Device memory of all captures."""
        return sum(cost.device_bytes for cost in self.buckets)

    @property
    def estimate_error(self) -> float | None:
        """By how much the plan was off, as a share of what was taken; None without a plan."""
        if self.planned_bytes is None:
            return None
        if not self.taken_bytes:
            return 0.0 if not self.planned_bytes else math.inf
        return self.planned_bytes / self.taken_bytes - 1

    @property
    def memory_line(self) -> str:
        """Where device memory went, in a sentence."""
        line = (
            f"weights {self.weight_bytes / MIB:.1f} MiB, state {self.state_bytes / MIB:.1f} MiB, "
            f"captures {self.taken_bytes / MIB:.1f} MiB"
        )
        if self.planned_bytes is None or self.estimate_error is None:
            return line
        return f"{line}, planned {self.planned_bytes / MIB:.1f} ({self.estimate_error:+.1%})"

    def as_json(self) -> dict[str, Any]:
        """For programs, in bytes and ms; the plan's error is a share of what was taken."""
        told: dict[str, Any] = {
            "backend": self.backend,
            "state_bytes": self.state_bytes,
            "weight_bytes": self.weight_bytes,
            "capture_bytes": self.taken_bytes,
            "buckets": [
                {
                    "rows": cost.bucket.rows,
                    "q_len": cost.bucket.q_len,
                    "nodes": cost.nodes,
                    "capture_ms": cost.capture_ms,
                    "device_bytes": cost.device_bytes,
                }
                for cost in self.buckets
            ],
        }
        error = self.estimate_error
        if error is not None:
            told["planned_capture_bytes"] = self.planned_bytes
            # JSON knows no infinity.
            told["estimate_error"] = error if math.isfinite(error) else None
        return told

    def __str__(self) -> str:
        return f"{rendered(bucket_table(self))}\n{self.memory_line}"


@dataclass
class BucketUse:
    """How often a bucket ran, and how many of its rows were padding."""

    replays: int = 0
    eager_runs: int = 0
    padding_rows: int = 0


@dataclass
class Counters:
    """What a runtime has done.

    Attributes:
        buckets: use by bucket.
        refusals: batches that no bucket served, by reason.
    """

    buckets: dict[Bucket, BucketUse] = field(default_factory=dict)
    refusals: Counter[RefusalReason] = field(default_factory=Counter)

    @property
    def padding_share(self) -> float:
        """Padding rows by all rows run."""
        run = sum(b.rows * (u.replays + u.eager_runs) for b, u in self.buckets.items())
        padding = sum(use.padding_rows for use in self.buckets.values())
        return padding / run if run else 0.0


def bucket_table(report: CaptureReport, counters: Counters | None = None) -> Table:
    """Costs by bucket, and their use where counters are given."""
    table = Table(title=f"captured steps ({report.backend})", title_justify="left")
    for heading in ("rows", "nodes", "capture ms", "MiB"):
        table.add_column(heading, justify="right")
    if counters is not None:
        for heading in ("replays", "padding rows"):
            table.add_column(heading, justify="right")
    for cost in sorted(report.buckets, key=lambda cost: cost.bucket):
        cells = [
            str(cost.bucket),
            str(cost.nodes),
            f"{cost.capture_ms:.1f}",
            f"{cost.device_bytes / MIB:.1f}",
        ]
        if counters is not None:
            use = counters.buckets.get(cost.bucket, BucketUse())
            cells += [str(use.replays), str(use.padding_rows)]
        table.add_row(*cells)
    return table


def rendered(table: Table) -> str:
    """A table as text."""
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()
