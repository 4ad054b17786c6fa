"""What the tests of `capture` share: small models, oracles in plain loops, and state as bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from capture import DecodeRuntime
from graphcache import Batch, Field, FinishReason
from graphcache.models import StepFunction
from tests.toy import VOCAB, ToyDecoder, device_of

BLOCK_TOKENS = 16
CONTEXT = 64

CALLS: dict[str, Callable[[DecodeRuntime, int], Any]] = {
    "step": lambda runtime, slot: runtime.step([slot]),
    "step of none": lambda runtime, slot: runtime.step([]),
    "admit": lambda runtime, slot: runtime.admit([1]),
    "open": lambda runtime, slot: runtime.open(),
    "extend": lambda runtime, slot: runtime.extend(slot, [1]),
    "retire": lambda runtime, slot: runtime.retire(slot),
    "fork": lambda runtime, slot: runtime.fork(slot),
    "rewind": lambda runtime, slot: runtime.rewind(slot, 0),
    "checkpoint": lambda runtime, slot: runtime.checkpoint(slot),
    "tokens_of": lambda runtime, slot: runtime.tokens_of(slot),
    "capture": lambda runtime, slot: runtime.capture(progress=False),
}
"""What a host may ask of a runtime, by name."""


def toy_runtime(backend: str, toy: ToyDecoder | None = None, **options: Any) -> DecodeRuntime:
    """A runtime of a toy decoder with one full and one windowed layer."""
    toy = toy or ToyDecoder(device=device_of(backend))
    settings: dict[str, Any] = {
        "max_requests": 4,
        "max_context": CONTEXT,
        "block_tokens": BLOCK_TOKENS,
        "backend": backend,
    }
    return DecodeRuntime(toy.model(), **{**settings, **options})


def captured(runtime: DecodeRuntime) -> DecodeRuntime:
    runtime.capture(progress=False)
    return runtime


def sync(runtime: DecodeRuntime) -> None:
    """Let all device work end, so that the default stream may read what it left."""
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)


def bits(runtime: DecodeRuntime) -> dict[str, Tensor]:
    """All state that requests can own, as bytes on the host. Scratch may hold anything."""
    sync(runtime)
    state = runtime.state
    taken = {"arena": state.pool.arena[:-1].cpu().clone()}
    if state.blocks is not None:
        taken["blocks"] = state.blocks.pool.arena[:-1].cpu().clone()
        taken["table"] = state.blocks.table.cpu().clone()
    return taken


def everything(runtime: DecodeRuntime) -> dict[str, Tensor]:
    """`bits`, scratch rows, and what steps and host exchange."""
    taken = bits(runtime)
    state, mailbox = runtime.state, runtime._mailbox
    taken["scratch"] = state.pool.arena[-1].cpu().clone()
    if state.blocks is not None:
        taken["scratch block"] = state.blocks.pool.arena[-1].cpu().clone()
    for name in ("ring_tokens", "ring_reasons", "word", "counter"):
        taken[name] = getattr(mailbox, name).cpu().clone()
    return taken


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same, bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def books(runtime: DecodeRuntime) -> dict[str, Any]:
    """What the host keeps of slots and blocks: who has which, what is free and what rests."""
    slots, blocks = runtime.state.slots, runtime.state.blocks
    kept: dict[str, Any] = {
        "free": list(slots._free),
        "resting": list(slots._quarantine),
        "generations": list(slots._generation),
        "phases": list(slots._phase),
        "live": slots.live,
    }
    if blocks is not None:
        kept |= {
            "free blocks": list(blocks._free),
            "resting blocks": list(blocks._quarantine),
            "users": list(blocks._users),
            "owned": [list(owned) for owned in blocks._owned],
        }
    return kept


class ToyOracle:
    """A toy decoder's next logits from the whole history: no cache, no slots, no windows kept."""

    def __init__(self, toy: ToyDecoder) -> None:
        self.toy = toy
        self.weights = {"embedding": toy.embedding, "places": toy.places, "head": toy.head}
        self.weights = {name: tensor.cpu().double() for name, tensor in self.weights.items()}
        self.layers = [{n: w.cpu().double() for n, w in layer.items()} for layer in toy.layers]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[vocab] float64 after the last of `tokens`."""
        toy = self.toy
        ids = torch.tensor(list(tokens))
        hidden = self.weights["embedding"][ids] + self.weights["places"][: len(ids)]
        for weights, window in zip(self.layers, toy.windows, strict=True):
            q, k, v = (
                (hidden @ weights[name].T).view(len(ids), -1, toy.head_dim) for name in "qkv"
            )
            attended = torch.zeros(len(ids), toy.heads, toy.head_dim, dtype=torch.float64)
            for t in range(len(ids)):
                first = 0 if window is None else max(0, t - window + 1)
                for head in range(toy.heads):
                    shared = head // (toy.heads // toy.kv_heads)
                    scores = k[first : t + 1, shared] @ q[t, head] / math.sqrt(toy.head_dim)
                    attended[t, head] = scores.softmax(0) @ v[first : t + 1, shared]
            hidden = hidden + attended.flatten(1) @ weights["o"].T
        return hidden[-1] @ self.weights["head"].T

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """The greedy answer of `count` tokens."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]


class Chain:
    """A model of no layers whose greedy answer is known: after t comes `following[t]`.

    Args:
        device: where it runs.
        following: the next token by token; None for `(3 * t + 1) % VOCAB`.
        broken: tokens whose logits are not a number.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        following: Sequence[int] | None = None,
        broken: Iterable[int] = (),
    ) -> None:
        self.following = list(following or ((3 * t + 1) % VOCAB for t in range(VOCAB)))
        table = torch.zeros(VOCAB, VOCAB)
        table[torch.arange(VOCAB), torch.tensor(self.following)] = 8.0
        for token in broken:
            table[token] = float("nan")
        self.table = table.to(device)
        self.device = torch.device(device)
        self.runs = 0
        self.before: Callable[[Batch], None] = lambda _: None

    def __call__(self, batch: Batch) -> Tensor:
        self.runs += 1
        self.before(batch)
        return self.table[batch.tokens.long()]

    def model(self, **options: Any) -> StepFunction:
        return StepFunction(self, VOCAB, device=self.device, **options)

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.following[tokens[-1]])
        return tokens[len(prompt) :]


def chain_runtime(
    backend: str, chain: Chain | None = None, *, model: dict[str, Any] | None = None, **options: Any
) -> DecodeRuntime:
    chain = chain or Chain(device_of(backend))
    settings: dict[str, Any] = {"max_requests": 4, "max_context": CONTEXT, "backend": backend}
    return DecodeRuntime(chain.model(**(model or {})), **{**settings, **options})


BIAS = Field("bias", (VOCAB,), torch.float32)


def biased(chain: Chain) -> Callable[[Batch], Tensor]:
    """The chain's step with a bias by slot added to its logits."""

    def step(batch: Batch) -> Tensor:
        bias = batch.state.pool["bias"]
        # Padding reads scratch, whose bias nobody uses.
        row = torch.where(batch.slots < 0, batch.state.max_requests, batch.slots)
        return chain(batch) + bias[row.long()]

    return step


def decode(runtime: DecodeRuntime, slot: int, count: int) -> list[int]:
    """`count` steps of one slot."""
    return [runtime.step([slot]).tokens()[0] for _ in range(count)]


def until_done(
    runtime: DecodeRuntime, slot: int, most: int = 200
) -> tuple[list[int], FinishReason]:
    """A slot's tokens up to its end, and why it ended."""
    tokens = []
    for _ in range(most):
        result = runtime.step([slot])
        tokens.append(result.tokens()[0])
        if result.reasons[0] is not FinishReason.NONE:
            return tokens, result.reasons[0]
    raise AssertionError(f"no end after {most} steps")
