"""Memory told before capture, and measured after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from capture import CaptureError, CaptureReport, DecodeRuntime, Ladder, plan_memory
from capture.memory_plan import SAMPLES, MemoryPlan, _sampled
from capture.report import BucketCost
from graphcache import Batch, DecodeState, Field
from graphcache.errors import InvalidRequest, SchemaError, UnsupportedModel
from graphcache.models import DeepseekV4Decoder, StepFunction, load_model
from tests.capture.support import BIAS, Chain, biased, decode
from tests.entry_toy import EntryDecoder
from tests.models.small_families import SMALL, small_model
from tests.models.tiny import tiny_mamba2_model, tiny_model, tiny_v4_model
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

both = pytest.mark.parametrize("backend", BACKENDS)
MIB = 1024 * 1024
OPTIONS: dict[str, Any] = {"max_requests": 6, "max_context": 48, "block_tokens": 16}


def toy_model(backend: str) -> StepFunction:
    return ToyDecoder(device=device_of(backend)).model()


def entry_model(backend: str) -> StepFunction:
    return EntryDecoder(5, device_of(backend)).model()


def chain_model(backend: str) -> StepFunction:
    chain = Chain(device_of(backend))
    return StepFunction(biased(chain), VOCAB, fields=(BIAS,), device=chain.device)


def llama(backend: str) -> Any:
    return load_model(tiny_model().to(device_of(backend)))


def family(model_type: str) -> Callable[[str], Any]:
    return lambda backend: load_model(small_model(model_type).to(device_of(backend)))


def deepseek_v4(backend: str) -> Any:
    # Served with releases of transformers that have it.
    pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    return DeepseekV4Decoder(tiny_v4_model().to(device_of(backend)))


FAMILIES: dict[str, Callable[[str], Any]] = {
    **{name: family(name) for name in SMALL},
    "mamba2": lambda backend: load_model(tiny_mamba2_model().to(device_of(backend))),
    "deepseek_v4": deepseek_v4,
}
"""Tiny decoders of every kind that is served."""
MODELS = {"toy": toy_model, "entries": entry_model, "chain": chain_model, "llama": llama}


def captured_as_planned(
    backend: str, model: Any, **options: Any
) -> tuple[MemoryPlan, CaptureReport, DecodeRuntime]:
    plan = plan_memory(model, backend=backend, **options)
    runtime = DecodeRuntime(model, backend=backend, **options)
    return plan, runtime.capture(progress=False, plan=plan), runtime


# --- state and weights, to the byte ---------------------------------------------------------------


@both
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("debug", [False, True])
def test_state_and_weights_are_exact(backend: str, name: str, debug: bool) -> None:
    plan, report, runtime = captured_as_planned(
        backend, MODELS[name](backend), debug=debug, **OPTIONS
    )
    with runtime:
        assert plan.state.total_bytes == runtime.state.memory_bytes() == report.state_bytes
        assert plan.weight_bytes == report.weight_bytes > 0
        assert plan.buckets == runtime.ladder.buckets and plan.backend == backend
        # A trial leaves nothing behind that a step could stumble over.
        slot = runtime.admit([1, 2, 3])
        assert all(token >= 0 for token in decode(runtime, slot, 4))


@both
def test_weights_are_those_that_were_made(backend: str) -> None:
    """Against the sizes that the model was built with: tied matrices count once."""
    model = llama(backend)
    config = model.model.config
    width, inner, layers = (
        config.hidden_size, config.intermediate_size, config.num_hidden_layers,
    )  # fmt: skip
    head = width // config.num_attention_heads
    kv = config.num_key_value_heads * head
    layer = 2 * width * width + 2 * width * kv + 3 * width * inner + 2 * width
    tied = config.tie_word_embeddings
    floats = layers * layer + (1 if tied else 2) * config.vocab_size * width + width
    frequencies = sum(t.numel() for t in dict(model.model.named_buffers()).values())
    plan = plan_memory(model, backend=backend, **OPTIONS)
    mask = 1  # the decoder's own, of one element
    assert plan.weight_bytes == 4 * (floats + frequencies) + mask


def test_a_tensor_named_twice_counts_once() -> None:
    class Tied(nn.Module):
        schemas, vocab_size, max_context = (), VOCAB, 64

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(VOCAB, VOCAB))
            self.register_buffer("again", self.table.data)
            self.register_buffer("part", self.table.data[:3])
            self.elsewhere = nn.Parameter(torch.empty(5, device="meta"))

        def prefill(self, batch: Batch) -> None:
            return None

        def decode(self, batch: Batch) -> torch.Tensor:
            return self.table[batch.tokens.long()]

    assert plan_memory(Tied(), max_requests=2).weight_bytes == 4 * VOCAB * VOCAB


# --- what fits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_blocks", [None, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_slots_that_fit_fit_and_one_more_does_not(name: str, kv_blocks: int | None) -> None:
    """Against states that are made."""
    model = MODELS[name]("tape")
    if name == "chain":
        kv_blocks = None
    options = {"max_context": 48, "block_tokens": 16, "kv_blocks": kv_blocks}
    ladder = Ladder([1, 2])

    def needed(slots: int) -> int:
        state = DecodeState(
            model.schemas, max_requests=slots, vocab_size=VOCAB, device="cpu",
            fields=model.fields, **options,
        )  # fmt: skip
        return state.memory_bytes() + plan.capture_bytes + plan.prefill_bytes

    plan = plan_memory(model, max_requests=3, ladder=ladder, **options)
    assert plan.slots_that_fit is None and plan.fits is None
    for target in (1, 3, 10):
        exact = needed(target)
        for budget, most in ((exact, target), (exact - 1, target - 1), (exact + 1, target)):
            plan = plan_memory(model, max_requests=3, ladder=ladder, budget_bytes=budget, **options)
            assert plan.slots_that_fit == most
            assert plan.fits is (most >= 3)
            assert plan.needed_bytes == needed(3)
    assert plan_memory(model, max_requests=2, budget_bytes=1, **options).slots_that_fit == 0


# --- captures, estimated and measured -------------------------------------------------------------


LADDERS = {
    "every": Ladder.every(12),
    "uneven": Ladder([1, 2, 3, 5, 8, 13, 21, 22]),
    "few": Ladder([2, 7]),
    "one": Ladder([5]),
}


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("name", MODELS)
def test_the_tapes_estimate_is_what_its_recordings_take(name: str, ladder: str) -> None:
    options = {**OPTIONS, "max_requests": 24, "ladder": LADDERS[ladder]}
    _, report, runtime = captured_as_planned("tape", MODELS[name]("tape"), **options)
    with runtime:
        assert report.taken_bytes == report.device_bytes > 0
        assert report.estimate_error == pytest.approx(0, abs=0.001)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tapes_estimate_of_every_family(name: str) -> None:
    options = {**OPTIONS, "block_tokens": None, "ladder": Ladder([1, 2, 3, 5])}
    _, report, runtime = captured_as_planned("tape", FAMILIES[name]("tape"), **options)
    with runtime:
        assert report.taken_bytes == report.device_bytes > 0
        assert report.estimate_error == pytest.approx(0, abs=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("ladder", ["uneven", "few"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_estimate_of_every_family_on_a_gpu(name: str, ladder: str) -> None:
    model = FAMILIES[name]("cuda_graph")
    options = {**OPTIONS, "block_tokens": None, "max_requests": 24, "ladder": LADDERS[ladder]}
    plan, report, runtime = captured_as_planned("cuda_graph", model, **options)
    with runtime:
        print(f"{name}, {ladder}: {report.memory_line}")
        off = abs(plan.capture_bytes - report.taken_bytes)
        assert off <= max(0.1 * report.taken_bytes, 4 * MIB)


@pytest.mark.gpu
@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("name", [*MODELS, "smollm2 shape"])
def test_the_estimate_is_within_a_tenth_on_a_gpu(name: str, ladder: str) -> None:
    """Or within what a driver hands out at a time, for models that take hardly more."""
    if name == "smollm2 shape":
        from profiles.subjects import smollm2_shape

        model = smollm2_shape("cuda")
    else:
        model = MODELS[name]("cuda_graph")
    options = {**OPTIONS, "max_requests": 24, "ladder": LADDERS[ladder]}
    plan, report, runtime = captured_as_planned("cuda_graph", model, **options)
    with runtime:
        assert report.estimate_error is not None
        print(f"{name}, {ladder}: {report.memory_line}")
        off = abs(plan.capture_bytes - report.taken_bytes)
        assert off <= max(0.1 * report.taken_bytes, 4 * MIB)
        assert plan.budget_bytes is not None and plan.fits


@pytest.mark.gpu
def test_what_fits_on_a_gpu_can_be_made_and_stepped() -> None:
    """With all of a budget spent on slots, prefill and steps still find what they need."""
    options: dict[str, Any] = {"max_context": 512, "block_tokens": 16, "ladder": Ladder([1, 4])}
    model = llama("cuda_graph")
    options["max_context"] = min(512, model.max_context)
    budget = 512 * MIB
    plan = plan_memory(model, max_requests=4, budget_bytes=budget, **options)
    slots = plan.slots_that_fit
    assert slots is not None and slots > 4
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    with DecodeRuntime(model, max_requests=slots, **options) as runtime:
        runtime.capture(progress=False)
        slot = runtime.admit(range(4, 20))
        decode(runtime, slot, 3)
        taken = before - torch.cuda.mem_get_info()[0]
        # The driver's pieces, and torch's, are of some MiB each.
        assert taken <= budget + 8 * MIB


@pytest.mark.gpu
def test_capturing_again_takes_no_more() -> None:
    model = llama("cuda_graph")
    with DecodeRuntime(model, backend="cuda_graph", **OPTIONS) as runtime:
        runtime.capture(progress=False)
        runtime.capture(progress=False)
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        for _ in range(5):
            runtime.capture(progress=False)
        torch.cuda.synchronize()
        assert before - torch.cuda.mem_get_info()[0] <= 2 * MIB


def test_a_trial_touches_a_few_buckets_only() -> None:
    for sizes in ([4], [1, 2], list(range(1, 6)), list(range(1, 65)), [1, 2, 4, 8, 16, 32, 64]):
        tried = list(_sampled(Ladder(sizes)))
        assert tried == sorted(set(tried)) and set(tried) <= set(sizes)
        assert len(tried) == min(len(sizes), SAMPLES)
        assert tried[0] == sizes[0] and tried[-2:] == sizes[-2:]
    chain = Chain()
    plan_memory(chain.model(), max_requests=64, max_context=8, ladder=Ladder.every(64))
    # Each tried bucket rehearsed and captured, and one prefill chunk.
    assert chain.runs == 2 * SAMPLES + 1


# --- what it says ---------------------------------------------------------------------------------


def test_a_plan_says_what_and_how_much() -> None:
    model = toy_model("tape")
    text = str(plan_memory(model, budget_bytes=2**30, **OPTIONS))
    plan = plan_memory(model, budget_bytes=2**30, **OPTIONS)
    assert "memory planned (tape)" in text
    assert f"fits up to {plan.slots_that_fit} slots at this context" in text
    for size in (plan.weight_bytes, plan.state.arena_bytes, plan.capture_bytes, plan.total_bytes):
        assert f"{size / MIB:.1f}" in text
    assert "fits" not in str(plan_memory(model, **OPTIONS))


def test_the_report_says_how_far_off_the_plan_was() -> None:
    cost = BucketCost(Ladder([1]).buckets[0], nodes=1, capture_ms=1.0, device_bytes=MIB)

    def report(**numbers: Any) -> CaptureReport:
        return CaptureReport("tape", (cost,), 7 * MIB, weight_bytes=3 * MIB, **numbers)

    plain = report(taken_bytes=2 * MIB)
    assert plain.estimate_error is None
    assert str(plain).endswith("weights 3.0 MiB, state 7.0 MiB, captures 2.0 MiB")
    assert "estimate_error" not in plain.as_json()
    planned = report(taken_bytes=4 * MIB, planned_bytes=5 * MIB)
    assert planned.estimate_error == planned.as_json()["estimate_error"] == 0.25
    assert planned.as_json()["planned_capture_bytes"] == 5 * MIB
    assert str(planned).endswith("captures 4.0 MiB, planned 5.0 (+25.0%)")
    assert report(planned_bytes=0).estimate_error == 0
    assert report(planned_bytes=1).estimate_error == math.inf
    assert report(planned_bytes=1).as_json()["estimate_error"] is None


@both
@pytest.mark.parametrize("captures", [1, 2])
def test_the_error_is_that_of_the_runtime_that_was_planned(backend: str, captures: int) -> None:
    """From measured and planned bytes, in the object and in print."""
    model = toy_model(backend)
    plan = plan_memory(model, backend=backend, **OPTIONS)
    with DecodeRuntime(model, backend=backend, **OPTIONS) as runtime:
        for _ in range(captures):
            report = runtime.capture(progress=False, plan=plan)
        assert report.planned_bytes == plan.capture_bytes > 0
        assert report.estimate_error == plan.capture_bytes / report.taken_bytes - 1
        assert f"planned {plan.capture_bytes / MIB:.1f}" in str(report)
        assert f"({report.estimate_error:+.1%})" in str(report)
        assert runtime.capture(progress=False).estimate_error is None


# --- what is refused ------------------------------------------------------------------------------


def test_the_plan_of_another_runtime() -> None:
    model = toy_model("tape")
    plan = plan_memory(model, **OPTIONS)
    others: list[dict[str, Any]] = [{"max_requests": 7}, {"ladder": Ladder([1])}, {"debug": True}]
    for changed in others:
        with DecodeRuntime(model, **{**OPTIONS, **changed}) as runtime:
            with pytest.raises(InvalidRequest, match="the plan is of another runtime"):
                runtime.capture(progress=False, plan=plan)
            assert runtime.report is None


def test_what_can_not_be_planned() -> None:
    with pytest.raises(UnsupportedModel):
        plan_memory(object(), max_requests=1)
    with pytest.raises(SchemaError, match="max_context is needed"):
        plan_memory(toy_model("tape"), max_requests=1)
    with pytest.raises(SchemaError, match="lies above max_requests=2"):
        plan_memory(toy_model("tape"), max_requests=2, max_context=8, ladder=Ladder([3]))

    def reads(batch: Batch) -> torch.Tensor:
        return torch.ones(batch.rows, VOCAB) * int(batch.tokens[0])

    with pytest.raises(CaptureError, match="the host reads a value"):
        plan_memory(StepFunction(reads, VOCAB), max_requests=1, max_context=8)


def test_fields_of_the_model_are_part_of_a_row() -> None:
    wide = Field("mask", (100,), torch.int64)
    chain = Chain()
    plain = plan_memory(chain.model(), **OPTIONS)
    masked = plan_memory(chain.model(fields=(wide,)), **OPTIONS)
    assert masked.state.row_bytes - plain.state.row_bytes >= 800 - 256
