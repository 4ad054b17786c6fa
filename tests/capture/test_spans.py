"""Spans of a captured step: which nodes each scope recorded, on both backends, and their file."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from capture import Bucket, CaptureError, DecodeRuntime, SpanMap
from capture.backend import choose_backend
from capture.errors import NotCaptured, SpansError
from capture.graph_nodes import NodeCounter, chain_of
from capture.spans import FOLDER_VARIABLE, BucketSpans, Node, Span, SpanRecorder
from graphcache import Batch
from graphcache.errors import UnbalancedScopes
from graphcache.models import StepFunction
from graphcache.scopes import close_scope, open_scope, scope
from tests.capture.support import Chain, chain_runtime, toy_runtime
from tests.toy import BACKENDS, VOCAB, device_of

both = pytest.mark.parametrize("backend", BACKENDS)


def captured_spans(backend: str, step: Any) -> tuple[tuple[Span, ...], tuple[Node, ...], bool]:
    """A bare step's spans, its nodes, and whether they are a chain."""
    machine = choose_backend(backend, device_of(backend))
    with machine.context():
        step()  # kernels are loaded now
    captured = machine.capture(step)
    spans, (nodes, linear) = captured.spans, captured.describe()
    captured.close()
    return spans, nodes, linear


def names_inside(spans: tuple[Span, ...], nodes: tuple[Node, ...]) -> dict[str, list[str]]:
    return {
        "/".join(span.path): [node.name for node in nodes[span.first : span.end]] for span in spans
    }


@both
def test_each_scope_has_the_nodes_it_recorded(backend: str) -> None:
    """Operations that no two scopes share, so that a name tells where a node came from."""
    x = torch.rand(64, device=device_of(backend))

    def step() -> None:
        y = x.sin()
        with scope("outer"):
            y = y.cos()
            with scope("inner"):
                y = y.tanh().exp()
            with scope("empty"):
                pass
            y = y.log1p()
        x.copy_(y.erf())

    spans, nodes, linear = captured_spans(backend, step)
    assert linear
    found = names_inside(spans, nodes)
    assert list(found) == ["outer", "outer/inner", "outer/empty"]
    assert found["outer/empty"] == []
    for names, wanted in (
        (found["outer"], ("cos", "tanh", "exp", "log1p")),
        (found["outer/inner"], ("tanh", "exp")),
    ):
        assert len(names) == len(wanted)
        assert all(word in name for word, name in zip(wanted, names, strict=True))
    everything = [node.name for node in nodes if node.kind in ("kernel", "operation")]
    assert "sin" in everything[0] and len(everything) >= 6


@both
def test_every_bucket_has_the_scopes_of_the_whole_step(backend: str) -> None:
    with toy_runtime(backend, max_requests=4) as runtime:
        with pytest.raises(NotCaptured):
            runtime.spans()
        runtime.capture(progress=False)
        spans = runtime.spans()
    assert spans.backend == backend
    assert [bucket.bucket for bucket in spans.buckets] == [Bucket(1), Bucket(2), Bucket(4)]
    wanted = {
        ("begin",), ("model",), ("model", "append"), ("model", "attend"), ("sample",), ("advance",),
    }  # fmt: skip
    for bucket in spans.buckets:
        assert {span.path for span in bucket.spans} == wanted
        # Two layers, each with its own two scopes.
        assert [span.path for span in bucket.spans].count(("model", "append")) == 2
        assert () not in bucket.paths(), "a node outside all scopes"
        assert bucket.linear and len(bucket.nodes) == len(bucket.paths())
        appended = [
            node for node, path in zip(bucket.nodes, bucket.paths(), strict=True)
            if path == ("model", "append")
        ]  # fmt: skip
        assert len(appended) == 2 and all("kv_append" in node.name for node in appended)


@both
@pytest.mark.parametrize("fault", ["left open", "closed twice"])
def test_unbalanced_scopes_are_refused_with_the_users_line(backend: str, fault: str) -> None:
    chain = Chain(device_of(backend))

    def step(batch: Batch) -> Tensor:
        with scope("head"):
            logits = chain(batch)
            open_scope("stray") if fault == "left open" else close_scope()
        return logits

    model = StepFunction(step, VOCAB, device=chain.device)
    with DecodeRuntime(model, max_requests=1, max_context=16, backend=backend) as runtime:
        with pytest.raises(CaptureError, match=r"UnbalancedScopes.*'head'") as refused:
            runtime.capture(progress=False)
        assert refused.value.source is not None and refused.value.source.file == __file__
        with pytest.raises(NotCaptured):
            runtime.spans()


@both
def test_a_bare_step_that_leaves_a_scope_open_is_refused(backend: str) -> None:
    x = torch.ones(4, device=device_of(backend))

    def step() -> None:
        open_scope("stray")
        x.mul_(2)

    machine = choose_backend(backend, x.device)
    with pytest.raises(CaptureError, match=r"UnbalancedScopes.*'stray'"):
        machine.capture(step)
    close_scope()
    again = machine.capture(lambda: None)
    assert again.spans == ()
    again.close()
    assert torch.equal(x.cpu(), torch.ones(4))


def test_a_capture_that_fails_inside_a_scope_tells_its_own_error() -> None:
    def step() -> None:
        open_scope("stray")
        raise ZeroDivisionError("mine")

    with pytest.raises(CaptureError, match="ZeroDivisionError"):
        choose_backend("tape", torch.device("cpu")).capture(step)
    close_scope()


# --- recorded on a GPU ----------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_child_graph_is_one_node_with_nodes_inside() -> None:
    x = torch.rand(64, device="cuda")
    x.sin(), x.cos(), x.tanh()
    inner = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(inner):
        x.copy_(x.cos().tanh())

    def step() -> None:
        with scope("before"):
            x.sin_()
        with scope("child"):
            inner.replay()
        with scope("after"):
            x.sin_()

    spans, nodes, linear = captured_spans("cuda_graph", step)
    assert linear
    (child,) = [node for node in nodes if node.kind == "graph"]
    paths = BucketSpans(Bucket(1), nodes, spans, linear).paths()
    assert paths[nodes.index(child)] == ("child",)
    kernels = [node.name for node in child.inside if node.kind == "kernel"]
    assert "cos" in kernels[0] and "tanh" in kernels[1]
    assert paths[0] == ("before",) and paths[-1] == ("after",)


@pytest.mark.gpu
def test_a_step_that_forks_is_not_a_chain() -> None:
    x, y = torch.rand(64, device="cuda"), torch.rand(64, device="cuda")
    side = torch.cuda.Stream()

    def step() -> None:
        with scope("both"):
            side.wait_stream(torch.cuda.current_stream())
            x.sin_()
            with torch.cuda.stream(side):
                y.cos_()
            torch.cuda.current_stream().wait_stream(side)
            x.add_(y)

    spans, nodes, linear = captured_spans("cuda_graph", step)
    assert not linear
    names = names_inside(spans, nodes)["both"]
    assert sum("sin" in name for name in names) == 1 and sum("cos" in name for name in names) == 1


@pytest.mark.gpu
def test_copies_and_fills_are_nodes_of_their_kind() -> None:
    x = torch.rand(1 << 20, device="cuda")
    y = torch.empty_like(x)

    def step() -> None:
        with scope("copy"):
            y.copy_(x)
        with scope("fill"):
            x.zero_()

    spans, nodes, linear = captured_spans("cuda_graph", step)
    kinds = {
        "/".join(span.path): [node.kind for node in nodes[span.first : span.end]] for span in spans
    }
    assert linear and kinds["copy"] == ["memcpy"] and kinds["fill"] in (["memset"], ["kernel"])


# --- the parts ------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_chain_is_found_in_any_order(count: int, chooser: random.Random) -> None:
    nodes = chooser.sample(range(1000), count)
    edges = list(pairwise(nodes))
    shuffled = chooser.sample(nodes, count)
    assert chain_of(shuffled, chooser.sample(edges, len(edges))) == nodes
    if count > 2:
        assert chain_of(shuffled, edges[1:]) is None
        # The last two nodes both follow the third last.
        assert chain_of(shuffled, [*edges[:-1], (nodes[-3], nodes[-1])]) is None


def test_a_counter_of_a_capture_that_has_failed_keeps_its_number() -> None:
    state = SimpleNamespace(error=0, status=1, nodes=0)
    driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUstreamCaptureStatus=SimpleNamespace(CU_STREAM_CAPTURE_STATUS_ACTIVE=1),
        cuStreamGetCaptureInfo=lambda stream: (state.error, state.status, 7, "graph", []),
        cuGraphGetNodes=lambda graph: (0, None, state.nodes),
    )
    counter = NodeCounter(driver, "stream")
    state.nodes = 3
    assert counter() == 3
    state.nodes, state.status = 9, 2
    assert counter() == 3
    state.status, state.error = 1, 901
    assert counter() == 3
    state.error = 0
    assert counter() == 9


class Step:
    """A random nest of scopes and operations; knows each operation's path by itself."""

    def __init__(self, chooser: random.Random) -> None:
        self.operations: list[tuple[str, ...]] = []
        self.recorder = SpanRecorder(lambda: len(self.operations))
        self.chooser = chooser
        self.run(())

    def run(self, path: tuple[str, ...]) -> None:
        for _ in range(self.chooser.randrange(4)):
            if self.chooser.random() < 0.6 and len(path) < 4:
                name = self.chooser.choice("abc")
                self.recorder.push(name)
                self.run((*path, name))
                self.recorder.pop()
            else:
                self.operations.append(path)


@given(st.randoms(use_true_random=False))
def test_paths_are_those_under_which_operations_ran(chooser: random.Random) -> None:
    step = Step(chooser)
    nodes = tuple(Node("operation", "x") for _ in step.operations)
    bucket = BucketSpans(Bucket(1), nodes, step.recorder.spans(), True)
    assert list(bucket.paths()) == step.operations


def test_an_open_scope_is_named_by_its_path() -> None:
    recorder = SpanRecorder(lambda: 0)
    recorder.push("layer 3")
    recorder.push("attention")
    with pytest.raises(UnbalancedScopes, match="'layer 3 / attention'"):
        recorder.spans()


# --- the file -------------------------------------------------------------------------------------


SPANS = SpanMap(
    "cuda_graph",
    (
        BucketSpans(
            Bucket(4, 2),
            (
                Node("kernel", "_Z3foo"),
                Node("graph", inside=(Node("memset"), Node("kernel", "bar"))),
                Node("memcpy"),
            ),
            (Span(("a",), 0, 3), Span(("a", "b é"), 1, 2), Span(("empty",), 3, 3)),
            False,
        ),
    ),
)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    SPANS.save(tmp_path / "spans.json")
    assert SpanMap.load(tmp_path / "spans.json") == SPANS


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "can't read spans"),
        (b"\xff\xfe", "can't read spans"),
        (b"{", "can't read spans"),
        (b"[]", "holds no spans"),
        (b'{"buckets": []}', "holds no spans"),
        (b'{"graphcache_spans": 99}', "version 99"),
        (b'{"graphcache_spans": 1}', "torn"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "spans.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpansError, match=says):
        SpanMap.load(path)


@pytest.mark.parametrize("place", [(0, 99, "names"), (0, 4, "span"), (2, 1, "span")])
def test_torn_numbers_are_refused(tmp_path: Path, place: tuple[int, int, str]) -> None:
    path = tmp_path / "spans.json"
    SPANS.save(path)
    saved = json.loads(path.read_text())
    first, end, what = place
    if what == "names":
        saved["buckets"][0]["nodes"][0] = [end, first]
    else:
        saved["buckets"][0]["spans"][0][-2:] = [first, end]
    path.write_text(json.dumps(saved))
    with pytest.raises(SpansError, match="torn"):
        SpanMap.load(path)


def test_every_capture_is_saved_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with chain_runtime("tape") as runtime:
        runtime.capture(progress=False)
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "deep" / "spans"))
        runtime.capture(progress=False)
        runtime.capture(progress=False)
        saved = sorted((tmp_path / "deep" / "spans").glob("*.json"))
        assert len(saved) == 2
        assert SpanMap.load(saved[0]) == SpanMap.load(saved[1]) == runtime.spans()
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
        with pytest.raises(SpansError, match="can't be written"):
            runtime.capture(progress=False)
        assert runtime.step([runtime.admit([1])]).tokens()
