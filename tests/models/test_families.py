"""Every kind of decoder that is served, against its own `generate`: greedy, token for token.

The oracle is `transformers` alone: one prompt at a time, its cache, its eager attention.
"""

from __future__ import annotations

import copy
from statistics import median
from typing import Any

import pytest
import torch

from capture import DecodeRuntime, Ladder
from graphcache.errors import UnsupportedModel
from graphcache.models import load_model
from graphcache.models.families import FAMILIES, family_of
from tests.books import audit, poison
from tests.models.serving import assert_replays_are_eager_steps, own_answer, requests
from tests.models.small_families import SMALL, WINDOW, small_model
from tests.test_generate_equality import answers
from tests.toy import BACKENDS, device_of

each_family = pytest.mark.parametrize("family", sorted(SMALL))
both = pytest.mark.parametrize("backend", BACKENDS)


def test_each_family_that_keeps_k_and_v_is_here() -> None:
    assert sorted(SMALL) == sorted(set(FAMILIES) - {"deepseek_v4", "mamba2"})


@pytest.mark.shows("answers")
@both
@each_family
def test_answers_are_those_of_generate(backend: str, family: str) -> None:
    torch.set_num_threads(1)
    model = small_model(family).to(device_of(backend))
    expected = [own_answer(copy.deepcopy(model), *request) for request in requests()]
    # Past several windows and blocks, and no answer that repeats one token.
    assert max(map(len, expected)) > 3 * WINDOW
    assert len({token for answer in expected for token in answer}) > 20
    with DecodeRuntime(
        load_model(model), max_requests=4, max_context=128, ladder=Ladder([1, 2, 4]),
        backend=backend, block_tokens=16, prefill_chunk=24, nvtx=False,
    ) as runtime:  # fmt: skip
        poison(runtime.state)
        runtime.capture(progress=False)
        assert answers(runtime, requests(), at_once=3, turn=4) == expected
        assert sum(use.eager_runs for use in runtime.counters.buckets.values()) == 0
        audit(runtime.state)


@pytest.mark.shows("replays")
@both
@each_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_replays_equal_eager_steps_bit_for_bit(
    backend: str, family: str, dtype: torch.dtype
) -> None:
    decoder = load_model(small_model(family).to(device_of(backend)), dtype=dtype)
    with DecodeRuntime(
        decoder, max_requests=3, max_context=64, ladder=Ladder([1, 3]), backend=backend,
        block_tokens=16, keep_logits=True, nvtx=False,
    ) as runtime:  # fmt: skip
        poison(runtime.state)
        runtime.capture(progress=False)
        assert_replays_are_eager_steps(runtime, rounds=3)


@pytest.mark.shows("near")
@both
@each_family
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_logits_are_as_near_to_fp32_as_transformers_own(
    backend: str, family: str, dtype: torch.dtype
) -> None:
    exact = small_model(family).to(device_of(backend))
    rounded = load_model(copy.deepcopy(exact), dtype=dtype).model
    own = copy.deepcopy(rounded)
    own.set_attn_implementation("eager")
    ours: list[float] = []
    theirs: list[float] = []
    with DecodeRuntime(
        load_model(rounded), max_requests=3, max_context=128, ladder=Ladder([3]), backend=backend,
        block_tokens=16, keep_logits=True, nvtx=False,
    ) as runtime:  # fmt: skip
        runtime.capture(progress=False)
        texts = [list(prompt) for prompt, _ in requests()[1:4]]
        slots = [runtime.admit(text, max_tokens=30) for text in texts]
        for _ in range(20):
            result = runtime.step(slots)
            tokens, logits = result.tokens(), result.logits.clone()
            for text, token, row in zip(texts, tokens, logits, strict=True):
                if token < 0:
                    continue
                ids = torch.tensor([text], device=row.device)
                with torch.no_grad():
                    wanted = exact(ids).logits[0, -1]
                    given = own(ids).logits[0, -1].float()
                ours.append(float((row.float() - wanted).abs().mean()))
                theirs.append(float((given - wanted).abs().mean()))
                text.append(token)
    assert len(ours) > 30 and float(wanted.std()) > 0.5
    assert median(ours) < 1.5 * median(theirs)


@each_family
def test_a_model_by_itself_runs_as_before(family: str) -> None:
    model = small_model(family)
    prompt, count = requests()[3]
    expected = own_answer(copy.deepcopy(model), prompt, count)
    load_model(model)
    assert own_answer(model, prompt, count) == expected


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer 0 is of type 'chunked_att"),
        ("gemma2", {"sliding_window": None}, "layer 0 slides, and config.sliding_window is None"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention that looks ahead"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "'longrope' depend on the batch"),
        ("llama", {"model_type": "mamba"}, "no adapter serves model_type 'mamba'; served: deepse"),
    ],
)
def test_what_is_missing_is_named(model_type: str, change: dict[str, Any], message: str) -> None:
    model = small_model(model_type)
    for name, value in change.items():
        object.__setattr__(model.config, name, value)
    with pytest.raises(UnsupportedModel, match=message):
        family_of(model.config).schemas(model.config, torch.float32)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(model)
