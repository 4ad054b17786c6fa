"""Probes: the values of the latest step by name, captured or eager, and nothing when off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from capture import Bucket, CaptureError, DecodeRuntime, Ladder, probe, scope
from capture.errors import ProbeError
from graphcache import Batch
from graphcache.models import StepFunction, load_model
from graphcache.probes import probing
from tests.capture.support import Chain, chain_runtime
from tests.models.tiny import tiny_model
from tests.toy import BACKENDS, VOCAB, device_of

both = pytest.mark.parametrize("backend", BACKENDS)


class Probed:
    """A step whose probes are known by its tokens and positions."""

    def __init__(self, backend: str) -> None:
        self.chain = Chain(device_of(backend))
        self.also: list[str] = []
        self.width = 1

    def __call__(self, batch: Batch) -> Tensor:
        with scope("first"):
            probe("tokens", batch.tokens)
            x = batch.tokens.float().unsqueeze(1) * 2
            probe("doubled", x)
        with scope("second"):
            probe("sum", (x[:, 0] + batch.positions).expand(self.width, -1))
            for name in self.also:
                probe(name, x)
        return self.chain(batch)

    def runtime(self, backend: str, **options: Any) -> DecodeRuntime:
        model = StepFunction(self, VOCAB, device=self.chain.device)
        settings = {"max_requests": 4, "max_context": 32, "ladder": Ladder([1, 4])}
        return DecodeRuntime(model, backend=backend, **{**settings, "probes": True, **options})


@both
@pytest.mark.parametrize("eager", [False, True])
def test_values_are_those_of_the_latest_step(backend: str, eager: bool) -> None:
    step = Probed(backend)
    with step.runtime(backend) as runtime:
        runtime.capture(progress=False)
        slots = [runtime.admit([7, token]) for token in (1, 2, 3)]
        pending = [1, 2, 3]
        for turn, count in enumerate((3, 1, 3, 3, 1)):
            runtime.step(slots[:count], eager=eager).tokens()
            found = runtime.probed()
            rows = 1 if count == 1 else 4
            assert list(found) == [
                "model / first / tokens", "model / first / doubled", "model / second / sum",
                "model / logits",
            ]  # fmt: skip
            tokens = found["model / first / tokens"]
            assert tokens.shape == (rows,) and tokens[:count].tolist() == pending[:count]
            doubled = found["model / first / doubled"]
            assert doubled.shape == (rows, 1) and doubled.dtype == torch.float32
            assert doubled[:count, 0].tolist() == [2.0 * token for token in pending[:count]]
            steps_before = [sum(c > i for c in (3, 1, 3, 3, 1)[:turn]) for i in range(count)]
            expected = [2.0 * t + 1 + b for t, b in zip(pending, steps_before, strict=False)]
            assert found["model / second / sum"][0, :count].tolist() == expected
            assert all(value.device.type == "cpu" for value in found.values())
            pending[:count] = [step.chain.following[token] for token in pending[:count]]


@both
def test_eager_and_captured_runs_agree_probe_by_probe(backend: str) -> None:
    with Probed(backend).runtime(backend) as runtime:
        runtime.capture(progress=False)
        slot = runtime.admit([3, 5])
        runtime.step([slot]).tokens()
        captured = runtime.probed()
        runtime.rewind(slot, 1)
        runtime.step([slot], eager=True).tokens()
        eager = runtime.probed()
        assert captured.keys() == eager.keys()
        assert all(torch.equal(captured[name], eager[name]) for name in captured)


@both
def test_off_nothing_is_captured(backend: str) -> None:
    step = Probed(backend)
    with step.runtime(backend, probes=False) as off, step.runtime(backend) as on:
        plain = off.capture(progress=False).buckets[0].nodes
        assert on.capture(progress=False).buckets[0].nodes > plain
        slot = off.admit([1])
        off.step([slot]).tokens()
        with pytest.raises(ProbeError, match="probes=True"):
            off.probed()
        bare = {bucket.bucket: len(bucket.nodes) for bucket in off.spans().buckets}
        assert bare[Bucket(4)] == plain


@both
def test_patterns_choose_probes(backend: str) -> None:
    for patterns, names in (
        ("*/ doubled", ["model / first / doubled"]),
        (["*second*", "*logits"], ["model / second / sum", "model / logits"]),
        (["nothing"], []),
    ):
        with Probed(backend).runtime(backend, probes=patterns) as runtime:
            runtime.capture(progress=False)
            runtime.step([runtime.admit([1])]).tokens()
            assert list(runtime.probed()) == names


@both
def test_a_name_used_twice_is_numbered(backend: str) -> None:
    step = Probed(backend)
    step.also = ["again", "again", "again"]
    with step.runtime(backend, probes=["*again*"]) as runtime:
        runtime.capture(progress=False)
        runtime.step([runtime.admit([4])]).tokens()
        found = runtime.probed()
        where = "model / second / again"
        assert list(found) == [where, f"{where} (2)", f"{where} (3)"]
        assert all(value.tolist() == [[8.0]] for value in found.values())


@both
def test_a_probe_that_rehearsals_did_not_reach_is_refused(backend: str) -> None:
    step = Probed(backend)
    with step.runtime(backend, ladder=Ladder([2])) as runtime:
        rehearsals = runtime._backend.rehearsals

        def late(_: Batch) -> None:
            if step.chain.runs == rehearsals + 1:
                probe("late", step.chain.table)

        step.chain.before = late
        with pytest.raises(CaptureError, match=r"ProbeError.*: probe 'model / late'.*no rehearsal"):
            runtime.capture(progress=False)
        runtime.capture(progress=False)
        runtime.step([runtime.admit([1])]).tokens()
        assert "model / late" not in runtime.probed()


@both
def test_a_shape_that_changes_while_it_is_captured_is_refused(backend: str) -> None:
    step = Probed(backend)
    with step.runtime(backend, ladder=Ladder([2])) as runtime:
        rehearsals = runtime._backend.rehearsals

        def wider(_: Batch) -> None:
            # Before the last run of the step, which is the capture.
            if step.chain.runs == rehearsals:
                step.width = 3

        step.chain.before = wider
        with pytest.raises(CaptureError, match=r"\[3, 2\] float32: it had \[1, 2\] float32"):
            runtime.capture(progress=False)


@both
def test_an_eager_run_of_another_shape_leaves_the_captures_buffer(backend: str) -> None:
    step = Probed(backend)
    with step.runtime(backend) as runtime:
        runtime.capture(progress=False)
        slot = runtime.admit([3])
        step.width = 50
        runtime.step([slot], eager=True).tokens()
        assert runtime.probed()["model / second / sum"].shape == (50, 1)
        token = runtime.tokens_of(slot)[-1]
        runtime.step([slot]).tokens()
        found = runtime.probed()["model / second / sum"]
        assert found.tolist() == [[2.0 * token + 1]]


@both
def test_before_any_step_there_is_nothing(backend: str) -> None:
    with Probed(backend).runtime(backend) as runtime:
        with pytest.raises(ProbeError, match="no step has run"):
            runtime.probed()
        runtime.capture(progress=False)
        runtime.admit([1])
        with pytest.raises(ProbeError, match="no step has run"):
            runtime.probed()


def test_values_are_copies() -> None:
    with Probed("tape").runtime("tape") as runtime:
        runtime.capture(progress=False)
        slot = runtime.admit([1])
        runtime.step([slot]).tokens()
        first = runtime.probed()["model / first / tokens"]
        runtime.step([slot]).tokens()
        assert first.tolist() == [1]


def test_a_listener_hears_only_inside_its_block() -> None:
    heard: list[str] = []

    class Listener:
        def take(self, name: str, tensor: Tensor) -> None:
            heard.append(name)

    listener = Listener()
    x = torch.ones(1)
    probe("before", x)
    with probing(listener), scope("layer 3"):
        probe("inside", x)
    probe("after", x)
    assert heard == ["layer 3 / inside"]


def test_a_transformers_decoder_shows_each_layers_parts() -> None:
    model = load_model(tiny_model())
    options: dict[str, Any] = {"max_requests": 1, "max_context": 32, "backend": "tape"}
    with DecodeRuntime(model, probes=True, **options) as runtime:
        runtime.capture(progress=False)
        runtime.step([runtime.admit([1, 2, 3])]).tokens()
        found = runtime.probed()
    layers = len(model.schemas)
    assert list(found) == [
        name
        for layer in range(layers)
        for name in (
            f"model / layer {layer} / attention / output",
            f"model / layer {layer} / mlp / output",
            f"model / layer {layer} / output",
        )
    ] + ["model / logits"]
    assert all(value.isfinite().all() for value in found.values())
    # What the residual stream takes from a layer's parts is in them.
    before = found["model / layer 0 / output"]
    after = found["model / layer 1 / output"]
    parts = [found[f"model / layer 1 / {part} / output"] for part in ("attention", "mlp")]
    torch.testing.assert_close(after, before + parts[0].view_as(after) + parts[1].view_as(after))


def test_chain_without_probes_keeps_its_logits() -> None:
    with chain_runtime("tape", probes=True) as runtime:
        runtime.capture(progress=False)
        slot = runtime.admit([5])
        runtime.step([slot]).tokens()
        assert list(runtime.probed()) == ["model / logits"]
