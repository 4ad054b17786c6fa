"""The greedy answers of real modelling code, stepped here, are those of its own `generate`.

Token for token in float32: prompts of different lengths in one batch, requests coming and going.
`transformers` answers each prompt alone, with its own cache and its own attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from capture import DecodeRuntime, Ladder
from graphcache.errors import WeightsError
from graphcache.models import load_model
from tests.books import audit, poison
from tests.models.tiny import VOCAB, tiny_model
from tests.toy import BACKENDS, device_of

CHATS = [
    ("What is the capital of France?", 14),
    ("Hi", 20),
    ("List three colours, and nothing else, please.", 9),
]
PLAIN = ("Once", 16)


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def smollm2(backend: str) -> Iterator[Any]:
    try:
        yield load_model("smollm2", device=device_of(backend), dtype=torch.float32)
    except WeightsError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(str(error))


def own_answer(decoder: Any, prompt: list[int], count: int) -> list[int]:
    """What the model's own `generate` says, alone, with the attention it came with."""
    model = decoder.model
    ours = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        ids = torch.tensor([prompt], device=decoder.device)
        with torch.no_grad():
            told = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                num_beams=1,
                eos_token_id=list(decoder.stop_tokens) or None,
                pad_token_id=0,
            )
    finally:
        model.set_attn_implementation(ours)
    answer: list[int] = told[0, len(prompt) :].tolist()
    return answer


def answers(
    runtime: DecodeRuntime, requests: list[tuple[list[int], int]], at_once: int, turn: int
) -> list[list[int]]:
    """All requests' answers, at most `at_once` in a batch whose order changes every `turn` steps.

    Requests come at every other step, and whoever has finished leaves: lengths always differ.
    """
    told: list[list[int]] = [[] for _ in requests]
    waiting = list(range(len(requests)))
    running: dict[int, int] = {}
    step = 0
    while waiting or running:
        if waiting and len(running) < at_once and (not running or step % 2 == 0):
            index = waiting.pop(0)
            prompt, count = requests[index]
            running[runtime.admit(prompt, max_tokens=count)] = index
        slots = list(running)
        shift = (step // turn) % len(slots)
        slots = slots[shift:] + slots[:shift]
        result = runtime.step(slots)
        for slot, token, reason in zip(slots, result.tokens(), result.reasons, strict=True):
            told[running[slot]].append(token)
            if reason:
                del running[slot]
                runtime.retire(slot)
        step += 1
    return told


def test_smollm2s_answers(backend: str, smollm2: Any) -> None:
    requests = [(smollm2.encode_chat(text), count) for text, count in CHATS]
    requests.insert(2, (smollm2.encode(PLAIN[0]), PLAIN[1]))
    lengths = [len(prompt) for prompt, _ in requests]
    assert len(set(lengths)) > 2
    expected = [own_answer(smollm2, prompt, count) for prompt, count in requests]
    with DecodeRuntime(
        smollm2, max_requests=4, max_context=128, ladder=Ladder([1, 2, 4]), backend=backend,
        block_tokens=16, prefill_chunk=24,
    ) as runtime:  # fmt: skip
        poison(runtime.state)
        runtime.capture(progress=False)
        got = answers(runtime, requests, at_once=3, turn=4)
        assert got == expected
        assert "Paris" in smollm2.decode_text(got[0])
        assert sum(use.eager_runs for use in runtime.counters.buckets.values()) == 0
        audit(runtime.state)


@pytest.fixture(scope="module")
def tiny(backend: str) -> tuple[Any, list[tuple[list[int], int]], list[list[int]]]:
    """A random Llama of a few thousand weights, prompts of 1 to 60 tokens, its own answers."""
    torch.set_num_threads(1)
    model = tiny_model(seed=5, max_position_embeddings=160).to(device_of(backend))
    decoder = load_model(model)
    generator = torch.Generator().manual_seed(8)
    lengths = [1, 60, 2, 17, 33, 16, 59, 5, 31]
    counts = [70, 64, 12, 33, 64, 1, 20, 90, 47]
    requests = [
        (torch.randint(3, VOCAB, (length,), generator=generator).tolist(), count)
        for length, count in zip(lengths, counts, strict=True)
    ]
    return decoder, requests, [own_answer(decoder, prompt, n) for prompt, n in requests]


@pytest.mark.parametrize("at_once", [4, 7])
@pytest.mark.parametrize(
    ("block_tokens", "chunk"), [(1, 7), (3, 64), (16, 16), (32, 1), (64, 33), (200, 5)]
)
def test_a_tiny_llamas_answers(
    backend: str, tiny: Any, block_tokens: int, chunk: int, at_once: int
) -> None:
    decoder, requests, expected = tiny
    assert max(len(answer) for answer in expected) > 60
    with DecodeRuntime(
        decoder, max_requests=7, max_context=130, backend=backend, block_tokens=block_tokens,
        kv_blocks=at_once * -(-130 // block_tokens), prefill_chunk=chunk, nvtx=False,
    ) as runtime:  # fmt: skip
        poison(runtime.state)
        runtime.capture(progress=False)
        assert answers(runtime, requests, at_once, turn=5) == expected
        audit(runtime.state)


def test_a_conversation_goes_on_as_one_prompt(backend: str, tiny: Any) -> None:
    """Turns put behind an answer, on the slot that gave it and on a fork of it."""
    decoder, requests, _ = tiny
    with DecodeRuntime(
        decoder, max_requests=2, max_context=130, backend=backend, block_tokens=4, nvtx=False
    ) as runtime:
        poison(runtime.state)
        runtime.capture(progress=False)
        told = list(requests[4][0])
        slot = runtime.admit(told, stop=(), max_tokens=9)
        for turn in (requests[7][0], requests[2][0], requests[0][0]):
            for _ in range(9):
                told += runtime.step([slot]).tokens()
            told += turn
            fork = runtime.fork(slot)
            runtime.extend(fork, turn, max_tokens=9)
            runtime.retire(slot)
            slot = fork
            assert runtime.tokens_of(slot) == told
        ours = [runtime.step([slot]).tokens()[0] for _ in range(9)]
        assert ours[: len(own_answer(decoder, told, 9))] == own_answer(decoder, told, 9)
