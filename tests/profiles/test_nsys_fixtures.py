"""Real exports of a step whose scopes are known by construction, read as any other.

`tests/fixtures/make.py` makes them on a machine with a GPU; what is not there is skipped.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import DecodeRuntime, SpanMap
from graphcache.models import StepFunction
from profiles.nsys import (
    Attribution,
    EmptyProfile,
    SpansMismatch,
    TornExport,
    attribute,
    read_export,
)
from profiles.nsys.tool import Nsys
from tests.fixtures import make, workload
from tests.profiles.nsys_builder import Process, capture

FOLDER = Path(make.__file__).parent


def truth_of(name: str) -> dict[str, Any]:
    place = FOLDER / "truth.json"
    known = json.loads(place.read_text()) if place.exists() else {"cases": {}}
    if name not in known["cases"] or not (FOLDER / f"{name}.sqlite").exists():
        pytest.skip(f"no {name}.sqlite: python -m tests.fixtures.make tests/fixtures, on a GPU")
    found: dict[str, Any] = known["cases"][name]
    return found


def read(name: str, spans: str | None = None) -> Attribution:
    maps = [] if spans is None else [SpanMap.load(FOLDER / spans)]
    return attribute(read_export(FOLDER / f"{name}.sqlite"), maps)


def check(found: Attribution, truth: dict[str, Any], scope_of: str) -> None:
    """Every activity of every replay lies where the workload launched it."""
    elsewhere = {tuple(path.split("/")) for path in truth["elsewhere"]}
    replays = [replay for replay in found.replays if replay.bucket in truth["parts"]]
    assert [replay.bucket for replay in replays] == truth["replays"]
    for replay in replays:
        ran = [
            (activity.kind, activity.name if activity.name.startswith("k_") else "", path)
            for activity, path in zip(replay.activities, replay.paths, strict=True)
            if path not in elsewhere
        ]
        parts = truth["parts"][replay.bucket]
        known = [(part["kind"], part["symbol"], tuple(part[scope_of].split("/"))) for part in parts]
        assert ran == known
    assert found.attributed_share == 1


@pytest.mark.parametrize("name", ["node", "children"])
def test_every_activity_lies_in_the_scope_that_launched_it(name: str) -> None:
    truth = truth_of(name)
    check(read(name), truth, "path")


def test_saved_spans_serve_where_the_capture_is_outside() -> None:
    truth = truth_of("outside")
    check(read("outside", "outside.spans.json"), truth, "saved")
    without = read("outside")
    assert without.attributed_share == 0 and "--spans FILE" in without.notes[0]


def test_spans_of_another_capture_are_refused() -> None:
    truth_of("outside")
    saved = SpanMap.load(FOLDER / "outside.spans.json")
    wide = next(bucket for bucket in saved.buckets if bucket.bucket.rows == 4)
    with pytest.raises(SpansMismatch):
        attribute(
            read_export(FOLDER / "outside.sqlite"),
            [SpanMap(saved.backend, (type(wide)(wide.bucket, wide.nodes[1:], (), True),))],
        )


def test_graph_mode_has_the_same_replays() -> None:
    truth = truth_of("graph")
    found = read("graph")
    assert found.mode == "graph"
    assert [replay.bucket for replay in found.replays] == truth["replays"]
    assert all(replay.duration > 0 for replay in found.replays)


def test_a_profile_without_replays_is_refused() -> None:
    assert truth_of("empty")["replays"] == []
    with pytest.raises(EmptyProfile, match="kernels, copies and memsets ran"):
        read("empty")


@pytest.mark.parametrize("name", ["node", "children", "outside"])
def test_sums_are_those_of_nsys_stats(name: str) -> None:
    truth = truth_of(name)
    export = read_export(FOLDER / f"{name}.sqlite")
    launches: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for activity in export.activities:
        if activity.kind == "kernel":
            launches[activity.name] += 1
            times[activity.name] += activity.duration
    assert {row["name"]: row["launches"] for row in truth["stats"]} == launches
    assert {row["name"]: row["time_ns"] for row in truth["stats"]} == times


@pytest.mark.parametrize("keep", [0.1, 0.6])
def test_a_real_export_cut_short_is_refused(keep: float, tmp_path: Path) -> None:
    truth_of("node")
    whole = (FOLDER / "node.sqlite").read_bytes()
    torn = tmp_path / "torn.sqlite"
    torn.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(TornExport):
        read_export(torn)


def test_fixtures_are_small_and_name_no_machine() -> None:
    exports = sorted(FOLDER.glob("*.sqlite"))
    if not exports:
        pytest.skip("no exports: python -m tests.fixtures.make tests/fixtures, on a GPU")
    for export in exports:
        assert export.stat().st_size <= make.MOST_BYTES
        with closing(sqlite3.connect(export)) as connection:
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            tables = {name for (name,) in connection.execute(query)}
        assert tables <= make.KEPT.keys()


# --- what makes them ------------------------------------------------------------------------------


@pytest.mark.parametrize("child", [False, True])
def test_the_truth_is_that_of_a_recorded_step(child: bool) -> None:
    """The tape records the workload's step: its scopes are those that the truth names."""
    step = workload.Step(torch.device("cpu"), child=child)
    model = StepFunction(step, workload.VOCAB)
    options: dict[str, Any] = {"max_requests": 4, "max_context": 64, "ladder": workload.LADDER}
    with DecodeRuntime(model, backend="tape", **options) as runtime:
        runtime.capture(progress=False)
        spans = runtime.spans()
    for bucket in spans.buckets:
        found = list(zip(bucket.nodes, bucket.paths(), strict=True))
        ours = ["/".join(path) for node, path in found if "launch_part" in node.name]
        parts = workload.truth_of(bucket.bucket.rows, child=child)
        # The tape has one node for what is a child graph on a GPU.
        saved = [part["saved"] for part in parts]
        assert ours == [
            path for i, path in enumerate(saved) if "call" not in path or path not in saved[:i]
        ]
        others = {"/".join(path) for node, path in found if "launch_part" not in node.name}
        assert others <= set(workload.ELSEWHERE)


def test_the_workload_replays_what_it_says() -> None:
    known = workload.work(torch.device("cpu"), child=False, eager=False, window="")
    assert known["replays"] == ["4", "1", "4", "1", "1", "4"]
    assert {len(parts) for parts in known["parts"].values()} == {9, 11}
    assert workload.work(torch.device("cpu"), child=False, eager=True, window="")["replays"] == []


def test_kernels_have_names_of_their_own() -> None:
    paths = {
        path
        for parts in (workload.PARTS, workload.WIDE, workload.CHILD, workload.INNER)
        for kind, path in parts
        if kind == "kernel"
    }
    assert len({workload.symbol_of(path) for path in paths}) == len(paths)
    assert all(workload.symbol_of(path).isidentifier() for path in paths)


def test_shrinking_keeps_what_is_read(tmp_path: Path) -> None:
    process = Process()
    graph = capture(process, "8")
    process.call("cudaMalloc")
    for _ in range(3):
        process.launch(graph, rows=8)
    process.string("HOSTNAME=somewhere")
    export = process.save(tmp_path / "whole.sqlite")
    with closing(sqlite3.connect(export)) as connection, connection:
        connection.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)")
        connection.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('host', 'somewhere')")
        connection.execute("CREATE INDEX one ON TARGET_INFO_SYSTEM_ENV (name)")
        connection.execute("CREATE VIEW seen AS SELECT * FROM TARGET_INFO_SYSTEM_ENV")
        connection.execute("CREATE INDEX two ON CUPTI_ACTIVITY_KIND_KERNEL (start)")
    small = tmp_path / "small.sqlite"
    make.shrink(export, small)
    whole, kept = attribute(read_export(export)), attribute(read_export(small))
    assert kept.replays == whole.replays and kept.attributed_share == 1
    content = small.read_bytes()
    assert b"somewhere" not in content and b"cudaMalloc" not in content
    assert len(content) < export.stat().st_size


def test_sums_are_read_from_what_nsys_prints(tmp_path: Path) -> None:
    table = 'Time (%),Total Time (ns),Instances,Name\n50.0,123,4,"k, a"\n50.0,120,2,b\n'
    tool = tmp_path / "nsys"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\nProcessing [x.sqlite]...\n\n{table}\nEND\n")
    tool.chmod(0o755)
    assert make.stats_of(Nsys(tool), tmp_path / "x.sqlite") == [
        {"name": "k, a", "launches": 4, "time_ns": 123},
        {"name": "b", "launches": 2, "time_ns": 120},
    ]
    tool.write_text("#!/bin/sh\necho SKIPPED: no kernels\n")
    with pytest.raises(RuntimeError, match="SKIPPED: no kernels"):
        make.stats_of(Nsys(tool), tmp_path / "x.sqlite")
