"""What capture cost and what replays did, as numbers and as a table."""

from __future__ import annotations

import dataclasses
import re

import pytest
from rich.console import Console

from capture import Bucket, CaptureReport, Ladder
from capture.ladder import RefusalReason
from capture.report import BucketCost, BucketUse, Counters, bucket_table

MIB = 1024 * 1024
COSTS = (
    BucketCost(Bucket(64), nodes=310, capture_ms=120.26, device_bytes=96 * MIB),
    BucketCost(Bucket(8), nodes=305, capture_ms=50.0, device_bytes=MIB // 2),
    BucketCost(Bucket(1), nodes=301, capture_ms=40.5, device_bytes=0),
)
REPORT = CaptureReport("cuda_graph", COSTS, state_bytes=7 * MIB)


def rows_of(text: str) -> list[list[str]]:
    """The cells of a table's rows that begin with a number."""
    cells = [re.split(r"\s*[│┃|]\s*", line.strip("│┃| ")) for line in text.splitlines()]
    return [row for row in cells if row[0].split(" ")[0].isdigit()]


def rendered(table: object) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_totals() -> None:
    assert REPORT.total_ms == pytest.approx(210.76)
    assert REPORT.device_bytes == 96 * MIB + MIB // 2
    assert REPORT.state_bytes == 7 * MIB
    empty = CaptureReport("tape", (), 0)
    assert (empty.total_ms, empty.device_bytes) == (0, 0)


def test_a_report_is_a_table_from_small_to_large() -> None:
    text = str(REPORT)
    assert "cuda_graph" in text and text == text.rstrip()
    assert rows_of(text) == [
        ["1", "301", "40.5", "0.0"],
        ["8", "305", "50.0", "0.5"],
        ["64", "310", "120.3", "96.0"],
    ]
    for heading in ("rows", "nodes", "capture ms", "MiB"):
        assert heading in text
    assert "replays" not in text


def test_a_table_with_counters() -> None:
    counters = Counters()
    counters.buckets[Bucket(8)] = BucketUse(replays=12, eager_runs=1, padding_rows=30)
    text = rendered(bucket_table(REPORT, counters))
    assert "replays" in text and "padding rows" in text
    assert rows_of(text) == [
        ["1", "301", "40.5", "0.0", "0", "0"],
        ["8", "305", "50.0", "0.5", "12", "30"],
        ["64", "310", "120.3", "96.0", "0", "0"],
    ]


def test_a_wide_bucket_is_named_by_rows_and_tokens() -> None:
    report = CaptureReport("tape", (BucketCost(Bucket(4, 3), 1, 1.0, 0),), 0)
    assert rows_of(str(report))[0][0] == "4 x 3"


def test_the_padding_share_counts_every_row_run() -> None:
    counters = Counters()
    assert counters.padding_share == 0
    for bucket in Ladder([1, 8]).buckets:
        counters.buckets[bucket] = BucketUse()
    assert counters.padding_share == 0
    counters.buckets[Bucket(8)] = BucketUse(replays=3, eager_runs=1, padding_rows=8)
    counters.buckets[Bucket(1)] = BucketUse(replays=8)
    assert counters.padding_share == 8 / (8 * 4 + 8)


def test_refusals_are_counted_by_reason() -> None:
    counters = Counters()
    counters.refusals[RefusalReason.OVER_CEILING] += 1
    counters.refusals[RefusalReason.OVER_CEILING] += 1
    assert counters.refusals[RefusalReason.OVER_CEILING] == 2
    assert counters.refusals[RefusalReason.EMPTY] == 0


def test_costs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        COSTS[0].nodes = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.buckets = ()  # type: ignore[misc]
