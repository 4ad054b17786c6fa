"""Mamba-2: conv and recurrent state by slot, against `generate` of the same model.

The oracle is `transformers` alone: one prompt at a time, its cache, its scan in chunks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import DecodeRuntime, Ladder, verify
from graphcache import Batch
from graphcache.errors import RewindTooFar, SchemaError, UnsupportedModel
from graphcache.models import load_model
from graphcache.models.families import read_schemas
from graphcache.models.mamba2 import Mamba2Decoder
from graphcache.probes import probing
from tests.books import audit, poison, refused
from tests.models.serving import own_answer
from tests.models.tiny import VOCAB, tiny_mamba2_config, tiny_mamba2_model, tiny_model
from tests.test_generate_equality import answers
from tests.toy import BACKENDS, device_of

LENGTHS = (1, 60, 7, 33, 2, 16, 3, 4, 5)
COUNTS = (40, 12, 30, 24, 9, 33, 20, 20, 20)
LAYERS = 3


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(backend: str) -> Any:
    return tiny_mamba2_model().to(device_of(backend))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def make_runtime(model: Any, backend: str, **options: Any) -> DecodeRuntime:
    """A captured runtime whose state held NaN before any request came."""
    settings: dict[str, Any] = {"max_requests": 4, "max_context": 128, "nvtx": False}
    runtime = DecodeRuntime(load_model(model), backend=backend, **{**settings, **options})
    poison(runtime.state)
    runtime.capture(progress=False)
    return runtime


@pytest.mark.shows("answers", family="mamba2")
@pytest.mark.parametrize("chunk", [1, 3, 24, 512])
def test_answers_are_those_of_generate(backend: str, model: Any, chunk: int) -> None:
    requests = list(zip(prompts(), COUNTS, strict=True))
    expected = [own_answer(copy.deepcopy(model), *request) for request in requests]
    assert max(map(len, expected)) > 30
    assert len({token for answer in expected for token in answer}) > 20
    with make_runtime(model, backend, ladder=Ladder([1, 2, 4]), prefill_chunk=chunk) as runtime:
        assert answers(runtime, requests, at_once=3, turn=4) == expected
        assert sum(use.eager_runs for use in runtime.counters.buckets.values()) == 0
        audit(runtime.state)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_groups": 1, "use_bias": True},
        {"n_groups": 8, "use_conv_bias": False},
        {"conv_kernel": 2, "residual_in_fp32": False},
        {"state_size": 11, "num_heads": 4, "head_dim": 16, "tie_word_embeddings": True},
    ],
)
def test_other_configs(backend: str, changes: dict[str, Any]) -> None:
    model = tiny_mamba2_model(seed=1, **changes).to(device_of(backend))
    requests = list(zip(prompts(), COUNTS, strict=True))[:4]
    expected = [own_answer(copy.deepcopy(model), *request) for request in requests]
    with make_runtime(model, backend) as runtime:
        assert answers(runtime, requests, at_once=4, turn=3) == expected


@pytest.mark.shows("replays", family="mamba2")
def test_replays_equal_eager_steps_bit_for_bit(backend: str, model: Any) -> None:
    """Of two forks one goes on by a replay, the other eagerly at the same bucket."""
    options = {"ladder": Ladder([1, 3]), "max_requests": 6, "keep_logits": True}
    with make_runtime(model, backend, **options) as runtime:
        slots = [runtime.admit(prompt) for prompt in prompts()[1:4]]
        for count in (3, 1, 2, 3, 3):
            asked = slots[:count]
            twins = [runtime.fork(slot) for slot in asked]
            assert torch.equal(
                logits_of(runtime, twins, eager=False), logits_of(runtime, asked, eager=True)
            )
            for slot, twin in zip(asked, twins, strict=True):
                assert torch.equal(*(recurrent(runtime, each) for each in (slot, twin)))
                runtime.retire(twin)


def logits_of(runtime: DecodeRuntime, slots: list[int], *, eager: bool) -> Tensor:
    result = runtime.step(slots, eager=eager)
    result.tokens()
    return result.logits.clone()


def recurrent(runtime: DecodeRuntime, slot: int) -> Tensor:
    """All bytes that the model keeps for a slot."""
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    row = runtime.state.slots.row_of(slot)
    fields = [runtime.state.pool[name][row] for name in runtime.state.fields]
    return torch.cat([field.flatten().view(torch.uint8) for field in fields])


def test_verify_finds_nothing(backend: str, model: Any) -> None:
    report = verify(load_model(model), backend=backend)
    assert report.findings == () and report.trials == report.asked, report


def test_a_fork_goes_on_by_itself(backend: str, model: Any) -> None:
    reference = copy.deepcopy(model)
    with make_runtime(model, backend) as runtime:
        told = prompts()[3]
        slot = runtime.admit(told, stop=(), max_tokens=60)
        for _ in range(5):
            told = told + runtime.step([slot]).tokens()
        fork = runtime.fork(slot)
        assert torch.equal(recurrent(runtime, fork), recurrent(runtime, slot))
        other = [*told, 9, 8]
        runtime.extend(fork, [9, 8], max_tokens=30)
        pairs = [runtime.step([fork, slot]).tokens() for _ in range(12)]
        for ours, text in zip(zip(*pairs, strict=True), (other, told), strict=True):
            expected = own_answer(reference, text, 12)
            assert list(ours)[: len(expected)] == expected
        assert not torch.equal(recurrent(runtime, fork), recurrent(runtime, slot))


def test_a_rewind_is_refused_and_a_checkpoint_restored(backend: str, model: Any) -> None:
    with make_runtime(model, backend) as runtime:
        slot = runtime.admit(prompts()[1], stop=(), max_tokens=50)
        runtime.step([slot]).tokens()
        with runtime.checkpoint(slot) as kept:
            before = recurrent(runtime, slot)
            first = [runtime.step([slot]).tokens()[0] for _ in range(8)]
            with refused(runtime, RewindTooFar, match="folded into layer0.conv, layer0.state"):
                runtime.rewind(slot, 30)
            runtime.retire(slot)
            for text in prompts()[:3]:
                runtime.step([runtime.admit(text)]).tokens()
            again = runtime.restore(kept)
        assert torch.equal(recurrent(runtime, again), before)
        assert [runtime.step([again]).tokens()[0] for _ in range(8)] == first


def test_state_is_of_fixed_size_and_the_context_without_limit(model: Any, backend: str) -> None:
    decoder = load_model(model)
    assert decoder.schemas == () and decoder.max_context is None
    shapes = {field.name: (field.shape, field.dtype) for field in decoder.fields}
    assert len(shapes) == 2 * LAYERS
    assert shapes["layer2.conv"] == ((3, 64 + 2 * 2 * 16), torch.float32)
    assert shapes["layer0.state"] == ((8, 8, 16), torch.float32)
    assert all(field.accumulates for field in decoder.fields)
    with pytest.raises(SchemaError, match="max_context is needed"):
        DecodeRuntime(decoder, max_requests=1, backend=backend)
    with DecodeRuntime(decoder, max_requests=1, max_context=4096, backend=backend) as runtime:
        assert runtime.state.blocks is None


def test_in_bfloat16_the_recurrent_state_stays_in_float32(model: Any, backend: str) -> None:
    decoder = load_model(model, dtype=torch.bfloat16)
    assert {field.dtype for field in decoder.fields} == {torch.bfloat16, torch.float32}
    options = {"keep_logits": True, "max_context": 64, "nvtx": False}
    reference = copy.deepcopy(model)
    with DecodeRuntime(decoder, max_requests=2, backend=backend, **options) as runtime:
        runtime.capture(progress=False)
        prompt = prompts()[3]
        logits = logits_of(runtime, [runtime.admit(prompt)], eager=False)
        assert logits.dtype == torch.bfloat16
        with torch.no_grad():
            own = reference(torch.tensor([prompt], device=reference.device)).logits[0, -1]
        error = (logits[0, :VOCAB].float() - own.float()).norm() / own.float().norm()
        assert error < 0.05


class Probed:
    def __init__(self) -> None:
        self.shapes: dict[str, torch.Size] = {}

    def take(self, name: str, tensor: Tensor) -> None:
        self.shapes[name] = tensor.shape


def test_scopes_and_probes_of_a_step(model: Any, backend: str) -> None:
    probed = Probed()
    with make_runtime(model, backend) as runtime:
        slot = runtime.admit([5])
        with probing(probed):
            runtime.step([slot], eager=True).tokens()
    for index in range(LAYERS):
        for inner in ("output", "mixer / output"):
            (shape,) = (
                shape
                for name, shape in probed.shapes.items()
                if name.endswith(f"layer {index} / {inner}")
            )
            assert shape == (1, 32)


def test_a_step_of_several_tokens_a_row_is_refused() -> None:
    decoder = Mamba2Decoder(tiny_mamba2_model())
    with DecodeRuntime(decoder, max_requests=2, max_context=32, backend="tape") as runtime:
        slots = torch.zeros(2, dtype=torch.int32)
        batch = Batch(slots, torch.tensor([0, 1], dtype=torch.int32), slots, 2, runtime.state)
        before = runtime.state.pool.arena.clone()
        with pytest.raises(SchemaError, match="one token a row, not 2"):
            decoder.decode(batch)
        assert torch.equal(runtime.state.pool.arena, before)


def test_a_model_by_itself_runs_as_before() -> None:
    model = tiny_mamba2_model()
    expected = own_answer(copy.deepcopy(model), prompts()[3], 20)
    load_model(model)
    assert own_answer(model, prompts()[3], 20) == expected


def test_a_folder_is_loaded(tmp_path: Any) -> None:
    model = tiny_mamba2_model()
    model.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, device="cpu")
    assert isinstance(decoder, Mamba2Decoder) and decoder.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.equal(decoder.named_tensors()[name], parameter), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_step_limit": (0.0, 0.1)}, r"limited to 0.0..0.1 are not served"),
        ({"time_step_limit": (0.01, float("inf"))}, "config.time_step_limit"),
        ({"hidden_act": "gelu"}, "followed by 'gelu' is not served"),
        ({"conv_kernel": 1}, "a convolution of 1 taps"),
        ({"n_groups": 3}, "8 heads don't make n_groups=3 even groups"),
    ],
)
def test_what_is_not_served_is_named_before_memory_is_taken(
    changes: dict[str, Any], message: str
) -> None:
    config = tiny_mamba2_config(**changes)
    with pytest.raises(UnsupportedModel, match=message):
        read_schemas(config, torch.float32)


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="built Mamba2ForCausalLM, got LlamaForCausalLM"):
        Mamba2Decoder(tiny_model())
    with pytest.raises(UnsupportedModel, match="got Mamba2Model"):
        Mamba2Decoder(tiny_mamba2_model().backbone)
    with pytest.raises(UnsupportedModel, match="has no option row_format"):
        load_model(tiny_mamba2_model(), row_format=None)
