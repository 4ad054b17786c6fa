"""Every activity of every replay gets the scope that launched it, whatever the profile holds."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture import Bucket, SpanMap
from capture.spans import BucketSpans, Span
from capture.spans import Node as SpanNode
from profiles.nsys import (
    Attribution,
    EmptyProfile,
    NotAnExport,
    SpansMismatch,
    TornExport,
    attribute,
    read_export,
)
from tests.profiles.nsys_builder import STEP, Process, capture, symbol_of

EIGHT = Bucket(8)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return tmp_path / "profile.sqlite"


def found_in(attribution: Attribution) -> Counter[tuple[str, str, int]]:
    """Kind, scope and duration of each activity, as `Process.truth` has them."""
    return Counter(
        (activity.kind, "/".join(path), activity.duration)
        for replay in attribution.replays
        for activity, path in zip(replay.activities, replay.paths, strict=True)
        if path is not None
    )


def spans_of(
    step: tuple[tuple[str, str], ...] = STEP, bucket: Bucket = EIGHT, linear: bool = True
) -> SpanMap:
    """Spans as a capture of the step saves them: one for each run of nodes of one scope."""
    nodes = tuple(
        SpanNode(kind, symbol_of(scope) if kind == "kernel" else "") for kind, scope in step
    )
    spans = tuple(
        Span(tuple(scope.split("/")), index, index + 1) for index, (_, scope) in enumerate(step)
    )
    return SpanMap("cuda_graph", (BucketSpans(bucket, nodes, spans, linear),))


# --- node mode ------------------------------------------------------------------------------------


def test_each_node_of_each_replay_has_its_scope(export: Path) -> None:
    process = Process()
    process.eager("prefill")
    graph = capture(process, "8")
    for _ in range(3):
        process.launch(graph, rows=8)
    found = attribute(read_export(process.save(export)))
    assert found.mode == "node" and found.notes == []
    assert found_in(found) == Counter(process.truth)
    assert found.attributed_share == 1
    assert [replay.bucket for replay in found.replays] == ["8"] * 3
    assert [activity.name for activity in found.outside] == ["k_prefill"]
    assert all(replay.gaps() == [0, *[100] * (len(STEP) - 1)] for replay in found.replays)
    assert found.replays[0].duration == sum(1000 * (i + 1) + 100 for i in range(len(STEP))) - 100


def test_buckets_are_told_by_their_capture_not_by_the_launch(export: Path) -> None:
    process = Process()
    graphs = {name: capture(process, name) for name in ("64", "8", "4 x 3")}
    for name in ("8", "64", "4 x 3", "8"):
        process.launch(graphs[name])
    found = attribute(read_export(process.save(export)))
    assert [replay.bucket for replay in found.replays] == ["8", "64", "4 x 3", "8"]
    assert found_in(found) == Counter(process.truth)


def test_replays_in_flight_together_keep_their_activities(export: Path) -> None:
    process = Process()
    graph, other = capture(process, "8"), capture(process, "1")
    start = process.clock + 1000
    process.launch(graph, rows=8, at=start, stream=7)
    process.launch(other, rows=1, at=start + 150, stream=9, took=700)
    found = attribute(read_export(process.save(export)))
    assert [len(replay.activities) for replay in found.replays] == [len(STEP)] * 2
    assert [{a.stream for a in replay.activities} for replay in found.replays] == [{7}, {9}]
    assert found_in(found) == Counter(process.truth)


def test_a_child_graphs_nodes_lie_in_the_scopes_around_its_call(export: Path) -> None:
    process = Process()
    inner = process.graph()
    with process.range("capture 1"), process.range("fused"):
        process.node(inner, "kernel", "fused")
        process.node(inner, "memset", "fused")
    graph = process.graph()
    with process.range("capture 8"):
        with process.range("begin"):
            process.node(graph, "kernel", "begin")
        with process.range("model"), process.range("layer 0"):
            process.clone_into(graph, inner, "model/layer 0")
        outer = process.instantiate(graph)
    process.launch(outer, rows=8)
    found = attribute(read_export(process.save(export)))
    assert found_in(found) == Counter(process.truth)
    assert found.replays[0].bucket == "8"
    assert ("model", "layer 0", "fused") in found.replays[0].paths


def test_a_captured_step_put_into_a_loop_keeps_its_scopes(export: Path) -> None:
    """The body of a loop is a clone, and the instantiated graph a clone of that."""
    process = Process()
    graph = process.graph()
    with process.range("capture 8"), process.range("model"):
        process.node(graph, "kernel", "model")
    process.call("cudaGraphConditionalHandleCreate_v12030")
    body = process.graph()
    process.clone_into(body, graph)
    process.launch(process.instantiate(body), rows=8)
    found = attribute(read_export(process.save(export)))
    assert found_in(found) == Counter(process.truth)
    (note,) = found.notes
    assert "only the first iteration is traced" in note


def test_a_loop_whose_iterations_are_traced_is_named(export: Path) -> None:
    process = Process()
    process.call("cuGraphConditionalHandleCreate")
    process.launch(capture(process, "8"), rows=8, times=3)
    found = attribute(read_export(process.save(export)))
    assert found_in(found) == Counter(process.truth)
    (note,) = found.notes
    assert "up to 3 times" in note


def test_ranges_of_other_domains_and_threads_are_no_scopes(export: Path) -> None:
    process, elsewhere = Process(), Process(thread=0x1000000 * 4242 + 99)
    process.domain("theirs", 2)
    elsewhere.clock = process.clock
    with process.range("theirs", domain=2), elsewhere.range("elsewhere"):
        graph = capture(process, "8")
        elsewhere.clock = process.clock
    process.launch(graph, rows=8)
    process.rows["NVTX_EVENTS"] += [
        {**row, "textId": None, "text": "elsewhere"}
        for row in elsewhere.rows["NVTX_EVENTS"] if row["eventType"] == 59
    ]  # fmt: skip
    assert found_in(attribute(read_export(process.save(export)))) == Counter(process.truth)


def test_a_window_around_the_capture_is_no_scope(export: Path) -> None:
    process = Process()
    with process.range("window"):
        graph = capture(process, "8")
        process.launch(graph, rows=8)
    found = attribute(read_export(process.save(export)))
    assert found_in(found) == Counter(process.truth)
    assert found.replays[0].bucket == "8"


def test_a_range_still_open_at_the_end_counts(export: Path) -> None:
    process = Process()
    graph = process.graph()
    with process.range("capture 8", ends=False), process.range("model", ends=False):
        process.node(graph, "kernel", "model")
        process.launch(process.instantiate(graph))
    assert found_in(attribute(read_export(process.save(export)))) == Counter(process.truth)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_any_step_is_attributed(
    tmp_path_factory: pytest.TempPathFactory, chooser: random.Random
) -> None:
    """Random trees of scopes, several buckets, replays that overlap."""
    process = Process()
    graphs = {}
    for bucket in chooser.sample([1, 2, 4, 8], chooser.randint(1, 3)):
        step = []
        for _ in range(chooser.randint(1, 12)):
            path = "/".join(chooser.choice("abc") for _ in range(chooser.randint(1, 4)))
            step.append((chooser.choice(["kernel", "kernel", "memcpy", "memset"]), path))
        graphs[bucket] = capture(process, str(bucket), tuple(step))
    start = process.clock
    for _ in range(chooser.randint(1, 5)):
        bucket = chooser.choice(list(graphs))
        process.launch(
            graphs[bucket], rows=bucket, at=start + chooser.randrange(20_000),
            stream=chooser.randrange(7, 10),
        )  # fmt: skip
    path = tmp_path_factory.mktemp("any") / "profile.sqlite"
    found = attribute(read_export(process.save(path)))
    assert found_in(found) == Counter(process.truth)


# --- the capture outside the window ---------------------------------------------------------------


def outside(export: Path, rows: int | None = 8) -> tuple[Process, Path]:
    """A profile that began after the capture."""
    process = Process()
    graph = capture(process, "8")
    since = process.clock
    for _ in range(2):
        process.launch(graph, rows=rows)
    process.clock += 100
    return process, process.save(export, since=since)


def test_without_spans_it_says_what_is_missing(export: Path) -> None:
    _, path = outside(export)
    found = attribute(read_export(path))
    assert [replay.bucket for replay in found.replays] == ["8", "8"]
    assert found.attributed_share == 0
    (note,) = found.notes
    assert "--spans FILE" in note and "(2 replays)" in note


@pytest.mark.parametrize("rows", [8, None])
def test_saved_spans_give_the_scopes(export: Path, rows: int | None) -> None:
    process, path = outside(export, rows)
    other = spans_of(STEP[:3], Bucket(4))
    found = attribute(read_export(path), [other, spans_of()])
    assert found_in(found) == Counter(process.truth)
    assert [replay.bucket for replay in found.replays] == ["8", "8"]
    assert found.notes == []


def test_a_child_graph_in_saved_spans(export: Path) -> None:
    process, path = outside(export)
    whole = spans_of().buckets[0]
    child = SpanNode("graph", inside=whole.nodes[1:4])
    nested = BucketSpans(
        Bucket(8), (whole.nodes[0], child, *whole.nodes[4:]),
        (Span(("begin",), 0, 1), Span(("called",), 1, 2), Span(("rest",), 2, 6)), True,
    )  # fmt: skip
    found = attribute(read_export(path), [SpanMap("cuda_graph", (nested,))])
    paths = found.replays[0].paths
    assert paths == (("begin",), *[("called",)] * 3, *[("rest",)] * 4)
    assert process.truth


def test_copies_that_are_not_as_many_as_their_nodes_stay_open(export: Path) -> None:
    _, path = outside(export)
    fewer = spans_of(tuple(node for node in STEP if node[0] != "memcpy"))
    (replay, _) = attribute(read_export(path), [fewer]).replays
    unknown = [a.kind for a, p in zip(replay.activities, replay.paths, strict=True) if p is None]
    assert unknown == ["memcpy"]


def test_spans_of_another_capture_are_refused_by_name(export: Path) -> None:
    _, path = outside(export)
    swapped = (STEP[1], STEP[0], *STEP[2:])
    with pytest.raises(SpansMismatch, match="kernel 0 is k_begin"):
        attribute(read_export(path), [spans_of(swapped)])
    with pytest.raises(SpansMismatch, match=r"6 kernels ran, and bucket 8 has 5"):
        attribute(read_export(path), [spans_of(STEP[:-1])])
    with pytest.raises(SpansMismatch, match="no spans of a bucket of 8 rows"):
        attribute(read_export(path), [spans_of(bucket=Bucket(4))])


def test_a_graph_that_forks_has_no_order_to_go_by(export: Path) -> None:
    _, path = outside(export)
    with pytest.raises(SpansMismatch, match="bucket 8 forks"):
        attribute(read_export(path), [spans_of(linear=False)])


def test_buckets_of_the_same_kernels(export: Path) -> None:
    process, path = outside(export, None)
    twins = [spans_of(bucket=Bucket(4)), spans_of()]
    found = attribute(read_export(path), twins)
    assert found_in(found) == Counter(process.truth)
    assert found.replays[0].bucket == "4 or 8"
    renamed = tuple((kind, scope.replace("model", "body")) for kind, scope in STEP)
    other = spans_of(renamed, Bucket(4)).buckets[0]
    same_kernels = BucketSpans(Bucket(4), spans_of().buckets[0].nodes, other.spans, True)
    with pytest.raises(SpansMismatch, match="buckets 4 or 8 run the same kernels"):
        attribute(read_export(path), [SpanMap("cuda_graph", (same_kernels,)), spans_of()])


def test_spans_are_not_asked_where_the_capture_is_known(export: Path) -> None:
    process = Process()
    process.launch(capture(process, "8"), rows=8)
    wrong = spans_of(STEP[:2])
    assert found_in(attribute(read_export(process.save(export)), [wrong])) == Counter(process.truth)


def test_an_export_without_mangled_names(export: Path) -> None:
    process, path = outside(export)
    export.unlink()
    for row in process.rows["CUPTI_ACTIVITY_KIND_KERNEL"]:
        row.pop("mangledName")
    starts = [row["start"] for row in process.rows["NVTX_EVENTS"] if row.get("int64Value")]
    path = process.save(export, since=min(starts))
    assert found_in(attribute(read_export(path), [spans_of()])) == Counter(process.truth)
    with pytest.raises(SpansMismatch):
        attribute(read_export(path), [spans_of((STEP[1], STEP[0], *STEP[2:]))])


# --- graph mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, None])
def test_graph_mode_has_whole_replays_by_bucket(export: Path, rows: int | None) -> None:
    process = Process("graph")
    graph = capture(process, "8")
    process.eager("prefill")
    process.launch(graph, rows=rows)
    process.launch(graph, rows=rows)
    found = attribute(read_export(process.save(export)))
    assert found.mode == "graph"
    assert [replay.bucket for replay in found.replays] == ["8", "8"]
    assert {replay.duration for replay in found.replays} == {36700}
    assert len(found.outside) == 1
    assert "--cuda-graph-trace=node" in found.notes[0]


def test_graph_mode_of_graphs_that_nobody_named(export: Path) -> None:
    process = Process("graph")
    process.launch(process.instantiate(process.graph()))
    (replay,) = attribute(read_export(process.save(export))).replays
    assert replay.bucket == "graph 1"


def test_a_replay_cut_by_the_windows_edge_is_left_out(export: Path) -> None:
    process = Process("graph")
    graph = capture(process, "8")
    process.launch(graph, rows=8)
    process.launch(graph, rows=8)
    process.rows["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"][0]["start"] = 0
    assert len(attribute(read_export(process.save(export))).replays) == 1


# --- files that are something else ----------------------------------------------------------------


def test_a_profile_without_replays_is_refused(export: Path, tmp_path: Path) -> None:
    process = Process()
    with pytest.raises(EmptyProfile, match="nothing ran on the device"):
        attribute(read_export(process.save(export)))
    process.eager("alone")
    with pytest.raises(EmptyProfile, match="1 kernels, copies and memsets ran"):
        attribute(read_export(process.save(tmp_path / "other.sqlite")))


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotAnExport, match="No such file"):
        read_export(tmp_path / "nowhere.sqlite")
    with pytest.raises(NotAnExport, match="can't read"):
        read_export(tmp_path)
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"\x12NVIDIA")
    with pytest.raises(NotAnExport, match="export the report first"):
        read_export(report)
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(NotAnExport, match="no SQLite file"):
        read_export(tmp_path / "empty.sqlite")


def test_a_foreign_database_is_refused(export: Path) -> None:
    process = Process()
    process.eager("x")
    with pytest.raises(NotAnExport, match="without the table StringIds"):
        read_export(process.save(export, without=("StringIds",)))


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.7, 0.95])
def test_a_truncated_export_is_refused(export: Path, tmp_path: Path, keep: float) -> None:
    process = Process()
    graph = capture(process, "8")
    for _ in range(200):
        process.launch(graph, rows=8)
    whole = process.save(export).read_bytes()
    torn = tmp_path / "torn.sqlite"
    torn.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(TornExport, match="is damaged"):
        read_export(torn)


def test_a_damaged_page_is_refused(export: Path, tmp_path: Path) -> None:
    process = Process()
    graph = capture(process, "8")
    for _ in range(200):
        process.launch(graph, rows=8)
    content = bytearray(process.save(export).read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 64] = b"\xff" * 64
    torn = tmp_path / "torn.sqlite"
    torn.write_bytes(bytes(content))
    with pytest.raises(TornExport):
        read_export(torn)
