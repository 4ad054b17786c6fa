"""What tests of decoders serve: requests, transformers' own answers, replays beside eager steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from capture import DecodeRuntime
from tests.models.tiny import VOCAB

__all__ = ["assert_replays_are_eager_steps", "logits_of", "own_answer", "requests"]

LENGTHS = (1, 60, 7, 33, 2, 16)
COUNTS = (40, 12, 30, 24, 9, 33)


def requests() -> list[tuple[list[int], int]]:
    """Prompts of 1 to 60 tokens, each with the tokens that its answer may have."""
    generator = torch.Generator().manual_seed(8)
    return [
        (torch.randint(3, VOCAB, (length,), generator=generator).tolist(), count)
        for length, count in zip(LENGTHS, COUNTS, strict=True)
    ]


def own_answer(model: Any, prompt: list[int], count: int) -> list[int]:
    """What `generate` of the same model answers, greedily and alone."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        told = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
    answer: list[int] = told[0, len(prompt) :].tolist()
    return answer


def logits_of(runtime: DecodeRuntime, slots: list[int], *, eager: bool) -> Tensor:
    """One step's, copied."""
    result = runtime.step(slots, eager=eager)
    result.tokens()
    return result.logits.clone()


def assert_replays_are_eager_steps(runtime: DecodeRuntime, rounds: int = 1) -> None:
    """Each replay has the bits of the eager step that was taken back before it.

    Args:
        runtime: captured for 3 rows at least, its rows free, of a model that can rewind.
        rounds: steps of each batch.
    """
    # A rewind takes a slot that has finished back to work, so none may finish.
    slots = [runtime.admit(prompt, max_tokens=30, stop=()) for prompt, _ in requests()[2:5]]
    for asked in (slots, slots[1:2], slots[:2], slots[::-1]):
        for _ in range(rounds):
            kept = [runtime.checkpoint(slot) for slot in asked]
            eager = logits_of(runtime, asked, eager=True)
            for slot, held in zip(asked, kept, strict=True):
                runtime.rewind(slot, held.length)
                held.release()
            assert torch.equal(logits_of(runtime, asked, eager=False), eager)
