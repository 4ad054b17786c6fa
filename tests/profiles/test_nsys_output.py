"""What is shown of a profile: sums by scope and bucket, the icicle, the trace, the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from capture import Bucket, SpanMap
from capture.errors import SpansError
from capture.spans import BucketSpans, Span
from capture.spans import Node as SpanNode
from profiles.nsys import Attribution, attribute, read_export
from profiles.nsys.__main__ import app
from profiles.nsys.icicle import icicle
from profiles.nsys.summary import as_json, bucket_times, fold_numbers, replay_table, scope_table
from profiles.nsys.timeline import timeline
from tests.profiles.nsys_builder import STEP, Process, capture, symbol_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def process() -> Process:
    """Two buckets, three replays and one, two kernels outside."""
    process = Process()
    process.eager("prefill")
    eight, one = capture(process, "8"), capture(process, "1", STEP[:3])
    for _ in range(3):
        process.launch(eight, rows=8)
    process.launch(one, rows=1, took=500)
    process.eager("prefill", took=700)
    return process


@pytest.fixture
def found(process: Process, tmp_path: Path) -> Attribution:
    return attribute(read_export(process.save(tmp_path / "profile.sqlite")))


def shown(table: object) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


# --- sums -----------------------------------------------------------------------------------------


def test_a_scope_has_all_that_ran_inside_it(process: Process, found: Attribution) -> None:
    one, eight = bucket_times(found)
    assert (one.bucket, one.replays, eight.bucket, eight.replays) == ("1", 1, "8", 3)
    truth = process.truth[: len(STEP)]
    whole = sum(time for _, _, time in truth)
    for scope in eight.scopes:
        path = "/".join(scope.path)
        inside = [time for _, name, time in truth if not path or f"{name}/".startswith(f"{path}/")]
        assert scope.time_us == pytest.approx(sum(inside) / 1e3)
        assert scope.share == pytest.approx(sum(inside) / whole)
        assert scope.launches == len(inside)
    by_path = {scope.path: scope for scope in eight.scopes}
    assert by_path[()].gap_us == pytest.approx(0.1 * (len(STEP) - 1))
    assert by_path["begin",].gap_us == 0
    assert by_path["model", "layer 0", "append"].gap_us == pytest.approx(0.1)
    assert eight.median_us == pytest.approx((whole + 100 * (len(STEP) - 1)) / 1e3)


def test_scopes_come_in_the_order_in_which_they_ran(found: Attribution) -> None:
    paths = [scope.path for scope in bucket_times(found)[1].scopes]
    layer = ("model", "layer 0")
    assert paths == [
        (), ("begin",), ("model",), layer, (*layer, "append"), (*layer, "attend"),
        ("model", "layer 1"), ("model", "layer 1", "append"), ("sample",),
    ]  # fmt: skip


def test_layers_fold_into_one(found: Attribution) -> None:
    assert fold_numbers(("model", "layer 12", "mlp 3x", "step2")) == (
        "model", "layer *", "mlp 3x", "step2",
    )  # fmt: skip
    plain = {scope.path: scope for scope in bucket_times(found)[1].scopes}
    folded = {scope.path: scope for scope in bucket_times(found, fold_numbers)[1].scopes}
    both = [plain["model", f"layer {i}", "append"] for i in (0, 1)]
    one = folded["model", "layer *", "append"]
    assert one.time_us == pytest.approx(sum(scope.time_us for scope in both))
    assert one.launches == 2
    assert folded[()] == plain[()]


def test_tables(found: Attribution) -> None:
    text = shown(replay_table(bucket_times(found)))
    assert "3.2" in text and "36.7" in text
    text = shown(scope_table(bucket_times(found)))
    assert "layer 1" in text and "attend" in text and "100.0%" in text
    text = shown(scope_table(bucket_times(found), depth=1))
    assert "model" in text and "layer 1" not in text


def test_json_counts_every_kernel_once(process: Process, found: Attribution) -> None:
    told = json.loads(json.dumps(as_json(found)))
    assert (told["mode"], told["replays"], told["attributed_share"]) == ("node", 4, 1)
    assert told["inside_replays_ns"] == sum(time for _, _, time in process.truth)
    assert told["outside_replays_ns"] == 1200
    rows = process.rows["CUPTI_ACTIVITY_KIND_KERNEL"]
    assert sum(kernel["launches"] for kernel in told["kernels"]) == len(rows)
    assert sum(kernel["time_ns"] for kernel in told["kernels"]) == sum(
        row["end"] - row["start"] for row in rows
    )
    (prefill,) = [kernel for kernel in told["kernels"] if kernel["name"] == "k_prefill"]
    assert prefill == {"name": "k_prefill", "launches": 2, "time_ns": 1200}
    assert told["buckets"][1]["scopes"][0]["path"] == []


# --- the icicle -----------------------------------------------------------------------------------


def boxes_of(picture: str) -> list[tuple[str, float, float, float]]:
    """Title, left, top and width of each box."""
    space = "{http://www.w3.org/2000/svg}"
    return [
        (
            group.findtext(f"{space}title", ""),
            *(float(group.find(f"{space}rect").get(name)) for name in ("x", "y", "width")),  # type: ignore[union-attr, arg-type]
        )
        for group in ElementTree.fromstring(picture).iter(f"{space}g")
    ]


def test_boxes_are_as_wide_as_their_time_and_lie_under_their_scope(found: Attribution) -> None:
    boxes = boxes_of(icicle(found, "8"))
    (root,) = [box for box in boxes if box[0].startswith("replay:")]
    scopes = {scope.path: scope for scope in bucket_times(found)[1].scopes}
    for path in (("model",), ("begin",), ("sample",)):
        (box,) = [one for one in boxes if one[0].startswith(f"{path[-1]}:")]
        assert box[3] / root[3] == pytest.approx(scopes[path].share, abs=1e-4)
    for title, left, top, width in boxes:
        if top == root[2]:
            continue
        around = [b for b in boxes if b[2] == top - 20 and b[1] - 0.02 <= left]
        assert any(left + width <= b[1] + b[3] + 0.02 for b in around), title
    names = [title.split(":")[0] for title, *_ in boxes]
    assert names.count("append") == 2 and "k_sample" in names


def test_every_bucket_has_a_panel_and_names_are_escaped(tmp_path: Path) -> None:
    process = Process()
    for name in ("8", "64"):
        process.launch(capture(process, name, (("kernel", 'a<b>&"c"'),)))
    picture = icicle(attribute(read_export(process.save(tmp_path / "x.sqlite"))))
    assert picture.index("bucket 8:") < picture.index("bucket 64:")
    assert any(title.startswith('a<b>&"c":') for title, *_ in boxes_of(picture))


def test_what_has_no_scope_is_shown_as_that(tmp_path: Path) -> None:
    process = Process()
    process.launch(process.instantiate(_bare(process)))
    found = attribute(read_export(process.save(tmp_path / "x.sqlite")))
    assert found.attributed_share == 0
    assert any(title.startswith("?:") for title, *_ in boxes_of(icicle(found)))
    assert "(in no known scope)" in shown(scope_table(bucket_times(found)))


def _bare(process: Process) -> Any:
    graph = process.graph()
    process.node(graph, "kernel", "bare")
    return graph


# --- the trace ------------------------------------------------------------------------------------


def check_trace(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The parts that viewers need, and that slices of a track nest; the slices by track."""
    assert json.loads(json.dumps(trace)) == trace
    tracks = defaultdict(list)
    named = set()
    flows: dict[int, list[str]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"]))
            assert event["name"] in ("process_name", "thread_name") and event["args"]["name"]
            continue
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
        else:
            flows[event["id"]].append(event["ph"])
    assert set(tracks) <= named and {1, 2} <= {pid for pid, tid in named if tid == 0}
    assert all(kinds == ["s", "f"] for kinds in flows.values())
    for slices in tracks.values():
        stack: list[float] = []
        for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1] <= event["ts"] + 1e-6:
                stack.pop()
            end = event["ts"] + event["dur"]
            assert not stack or end <= stack[-1] + 1e-6, event
            stack.append(end)
    return tracks


def above(slices: list[dict[str, Any]], event: dict[str, Any]) -> list[str]:
    """Names of the slices around one, the widest first."""
    end = event["ts"] + event["dur"]
    around = [
        other for other in slices
        if other is not event and other["cat"] in ("replay", "scope")
        and other["ts"] - 1e-6 <= event["ts"] and end <= other["ts"] + other["dur"] + 1e-6
    ]  # fmt: skip
    return [other["name"] for other in sorted(around, key=lambda e: -e["dur"])]


def test_scopes_lie_above_their_kernels(found: Attribution) -> None:
    tracks = check_trace(timeline(found))
    kernels = 0
    for slices in tracks.values():
        for event in slices:
            if event["cat"] != "kernel":
                continue
            kernels += 1
            scope = event["name"].removeprefix("k_").split("/")
            replay, *names = above(slices, event)
            assert replay in ("replay 8", "replay 1")
            assert sorted(names) == sorted(scope) and event["args"]["scope"] == " / ".join(scope)
    assert kernels == 3 * 6 + 3


def test_the_host_has_its_ranges_and_an_arrow_to_each_replay(found: Attribution) -> None:
    trace = timeline(found)
    tracks = check_trace(trace)
    host = [e for (pid, _), slices in tracks.items() if pid == 2 for e in slices]
    assert [e["args"]["rows"] for e in host if e["name"] == "replay"] == [8, 8, 8, 1]
    assert sum(e["cat"] == "launch" for e in host) == 4
    assert sum(event["ph"] == "f" for event in trace["traceEvents"]) == 4
    outside = [e for s in tracks.values() for e in s if e["name"] == "k_prefill"]
    assert len(outside) == 2 and all(e["cat"] == "device" for e in outside)


def test_replays_in_flight_on_one_stream_lie_side_by_side(tmp_path: Path) -> None:
    process = Process()
    graph = capture(process, "8")
    start = process.clock + 1000
    for shift in (0, 500, 900):
        process.launch(graph, rows=8, at=start + shift)
    tracks = check_trace(timeline(attribute(read_export(process.save(tmp_path / "x.sqlite")))))
    replays = [t for t, slices in tracks.items() if any(e["cat"] == "replay" for e in slices)]
    assert len(replays) == 3


def test_kernels_that_overlap_are_drawn_up_to_the_next(tmp_path: Path) -> None:
    """As a launch that does not wait for its predecessor's end gives them."""
    process = Process()
    process.launch(capture(process, "8"), rows=8, gap=-300)
    found = attribute(read_export(process.save(tmp_path / "x.sqlite")))
    slices = [e for s in check_trace(timeline(found)).values() for e in s if e["cat"] == "kernel"]
    assert [e["args"]["duration_us"] for e in slices][:2] == [1.0, 2.0]
    assert slices[0]["dur"] == pytest.approx(0.7)
    assert found.replays[0].gaps() == [0] * len(STEP)


def test_a_trace_of_graph_mode_has_whole_replays(tmp_path: Path) -> None:
    process = Process("graph")
    graph = capture(process, "8")
    process.launch(graph, rows=8)
    process.launch(graph, rows=8)
    tracks = check_trace(timeline(attribute(read_export(process.save(tmp_path / "x.sqlite")))))
    replays = [e for s in tracks.values() for e in s if e["cat"] == "replay"]
    assert [e["dur"] for e in replays] == [36.7, 36.7]


# --- the command ----------------------------------------------------------------------------------


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_command(process: Process, tmp_path: Path) -> None:
    path = process.save(tmp_path / "profile.sqlite")
    done = run(
        path, "--json", "--icicle", tmp_path / "a.svg", "--timeline", tmp_path / "a.json",
    )  # fmt: skip
    assert done.exit_code == 0 and done.stderr == ""
    assert json.loads(done.stdout)["attributed_share"] == 1
    assert boxes_of((tmp_path / "a.svg").read_text())
    check_trace(json.loads((tmp_path / "a.json").read_text()))
    shown = run(path, "--bucket", 8)
    assert "layer *" in shown.stdout and "100.0% of device time" in shown.stdout
    done = run(path, "--bucket", 5)
    assert done.exit_code == 2 and "there are" in done.stderr


def test_the_command_with_spans_and_without(tmp_path: Path) -> None:
    process = Process()
    graph = capture(process, "8")
    since = process.clock
    process.launch(graph, rows=8)
    path = process.save(tmp_path / "profile.sqlite", since=since)
    nodes = tuple(SpanNode(kind, symbol_of(s) if kind == "kernel" else "") for kind, s in STEP)
    spans = tuple(Span(tuple(s.split("/")), i, i + 1) for i, (_, s) in enumerate(STEP))
    folder = tmp_path / "spans"
    folder.mkdir()
    assert isinstance(run(path, "--spans", folder).exception, SpansError)
    SpanMap("cuda_graph", (BucketSpans(Bucket(8), nodes, spans, True),)).save(folder / "a.json")
    assert json.loads(run(path, "--spans", folder, "--json").stdout)["attributed_share"] == 1
    bare = run(path)
    assert bare.exit_code == 0 and "note: the capture lies outside" in bare.stdout


def test_an_error_of_the_command_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "profiles.nsys", str(tmp_path / "nowhere.sqlite"), "--json"],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("NotAnExport:") and done.stderr.count("\n") == 1
