"""What a request gets does not depend on who else is in the batch, on its row, or on the bucket.

For our own operations that is a promise to the last bit. Matrix products of libraries promise
nothing of the kind, so the decoder here multiplies each row by itself: what is left are our
operations, and they must give the same bits.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import DecodeRuntime, Ladder
from graphcache import Batch
from graphcache.ops.decode_attention import decode_attention
from graphcache.ops.prefill_attention import prefill_attention
from graphcache.ops.sample import sample
from tests.books import poison
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

PROMPTS = [[5, 9, 33, 2, 7], [44], [17, 3, 3, 8, 21, 50, 6, 1], [12, 60], [4, 4, 4, 9],
           [58, 2, 30], [7, 19, 26, 40, 11, 13, 1], [20, 35]]  # fmt: skip
BUCKETS = [1, 2, 3, 8, 17, 64]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


class RowByRow(ToyDecoder):
    """The toy decoder with every product taken a row at a time."""

    def __call__(self, batch: Batch) -> Tensor:
        hidden = self.embedding[batch.tokens.long()] + self.places[batch.positions.long()]
        for index, weights in enumerate(self.layers):
            layer: Any = batch.state.layers[index]
            attended = layer.attend(
                _rows(hidden, weights["q"]).view(-1, self.heads, self.head_dim),
                _rows(hidden, weights["k"]).view(-1, self.kv_heads, self.head_dim),
                _rows(hidden, weights["v"]).view(-1, self.kv_heads, self.head_dim),
                batch,
                scale=self.head_dim**-0.5,
            )
            hidden = hidden + _rows(attended.flatten(1), weights["o"])
        return _rows(hidden, self.head)


def _rows(hidden: Tensor, weight: Tensor) -> Tensor:
    # A copy of each: a product may round differently at another alignment.
    return torch.cat([row.clone() @ weight.T for row in hidden.split(1)])


Answer = tuple[list[int], list[Tensor]]


def make_runtime(backend: str, **options: Any) -> DecodeRuntime:
    toy = RowByRow((None, 6), device_of(backend))
    settings: dict[str, Any] = {
        "max_requests": 8, "max_context": 64, "block_tokens": 4, "keep_logits": True,
        "nvtx": False, "ladder": Ladder([1, 2, 4, 8]),
    }  # fmt: skip
    runtime = DecodeRuntime(toy.model(), backend=backend, **{**settings, **options})
    poison(runtime.state)
    runtime.capture(progress=False)
    return runtime


def answer(
    runtime: DecodeRuntime,
    prompt: list[int],
    options: dict[str, Any],
    steps: int,
    companions: int = 0,
    rng: random.Random | None = None,
) -> Answer:
    """Tokens and logits of one request, at any row among companions that come and go."""
    rng = rng or random.Random(0)

    def other() -> int:
        return runtime.admit(
            rng.choice(PROMPTS), temperature=rng.choice([0.0, 1.3]), seed=rng.randrange(99), stop=()
        )

    others = [other() for _ in range(companions)]
    slot = runtime.admit(prompt, stop=(), **options)
    tokens, logits = [], []
    for step in range(steps):
        if others and step % 3 == 2:
            runtime.retire(others.pop(rng.randrange(len(others))))
            others.insert(rng.randrange(len(others) + 1), other())
        batch = rng.sample(others, rng.randint(0, len(others))) if step % 2 else list(others)
        row = rng.randint(0, len(batch))
        result = runtime.step([*batch[:row], slot, *batch[row:]])
        logits.append(result.logits[row].cpu().clone())
        tokens.append(result.tokens()[row])
    for handle in (*others, slot):
        runtime.retire(handle)
    return tokens, logits


def same(one: Answer, two: Answer) -> bool:
    return one[0] == two[0] and all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 12},
        {"temperature": 2.0, "seed": 5, "top_k": 9},
        {"temperature": 1.4, "seed": 6, "top_p": 0.8},
        {"temperature": 1.4, "seed": 7, "top_p": 0.9, "top_k": 30},
    ],
    ids=lambda options: "_".join(options) or "greedy",
)
def test_a_request_alone_and_in_company(backend: str, options: dict[str, Any]) -> None:
    """Tokens and the bits of its logits, in batches of 1 to 8, at every row, in any slot and
    blocks."""
    runtime = make_runtime(backend)
    alone = answer(runtime, PROMPTS[2], options, steps=24)
    assert len(set(alone[0])) > 3
    for companions in (1, 3, 7):
        rng = random.Random(companions)
        assert same(alone, answer(runtime, PROMPTS[2], options, 24, companions, rng))
    # Bits may depend on the schema, to which a block's size belongs; tokens may not.
    other = make_runtime(backend, ladder=Ladder([5, 8]), block_tokens=16)
    assert answer(other, PROMPTS[2], options, 24, 4, random.Random(1))[0] == alone[0]


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_a_prompt_in_chunks_of_any_length(backend: str, chunk: int) -> None:
    """The same tokens; from our kernels the same bits, too."""
    prompt = [(7 * index + 3) % VOCAB for index in range(23)]
    whole = answer(make_runtime(backend), prompt, {}, steps=12)
    got = answer(make_runtime(backend, prefill_chunk=chunk), prompt, {}, steps=12)
    assert got[0] == whole[0]
    if backend == "cuda_graph":
        assert same(got, whole)


# --- our operations by themselves -----------------------------------------------------------------


def _cache(
    device: torch.device, slots: int, rows: int, table: bool, dtype: torch.dtype
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(slots + rows)
    heads, dim, size = 3, 32, 16
    width = rows // size
    count, inner = (slots * width + 1, size) if table else (slots + 1, rows)
    k, v = (torch.randn(count, heads, inner, dim, generator=generator) for _ in range(2))
    order = torch.randperm(slots * width, generator=generator).view(slots, width)
    scratch = torch.full((1, width), slots * width)
    blocks = torch.cat([order, scratch]).to(device, torch.int32) if table else None
    return {"k_cache": k.to(device, dtype), "v_cache": v.to(device, dtype), "table": blocks}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("table", "window"), [(True, 0), (True, 100), (False, 200), (False, 7)])
def test_decode_attention(backend: str, table: bool, window: int, dtype: torch.dtype) -> None:
    """Contexts that take one split and many; each token at some row of every bucket."""
    device = device_of(backend)
    slots, rows = 8, 1024
    cache = _cache(device, slots, rows, table, dtype)
    q = torch.randn(slots, 9, 32, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    last = torch.tensor([0, 1, 15, 127, 128, 300, 777, 1023], dtype=torch.int32, device=device)
    how: dict[str, Any] = {"scale": 0.2, "window": window, "softcap": 20.0, **cache}
    rng = random.Random(2)

    def attend(asked: list[int]) -> Tensor:
        index = torch.tensor(asked, dtype=torch.int32, device=device)
        real = index.clamp(min=0).long()
        position = torch.where(index >= 0, last[real], 0)
        return decode_attention(q[real], how["k_cache"], how["v_cache"], index, position, 1,
                                how["scale"], how["table"], window, how["softcap"])  # fmt: skip

    alone = torch.cat([attend([slot]) for slot in range(slots)])
    assert alone.isfinite().all()
    for bucket in BUCKETS[1:]:
        asked = rng.sample(range(slots), min(bucket, slots)) + [-1] * max(0, bucket - slots)
        rng.shuffle(asked)
        out = attend(asked)
        for row, slot in enumerate(asked):
            expected = alone[slot] if slot >= 0 else torch.zeros_like(out[row])
            assert torch.equal(out[row], expected), f"slot {slot} at row {row} of {bucket}"


def test_prefill_attention(backend: str) -> None:
    """A prompt's chunk by itself, and as one row of several, with padding behind it."""
    device = device_of(backend)
    cache = _cache(device, 4, 256, True, torch.float32)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(3, 20, heads, 32, generator=generator).to(device) for heads in (9, 3, 3))
    starts, lengths = [40, 0, 129], [20, 7, 13]

    def attend(chosen: list[int], q_len: int) -> Tensor:
        slots = torch.full((len(chosen), q_len), -1, dtype=torch.int32)
        positions = torch.zeros(len(chosen), q_len, dtype=torch.int32)
        for row, index in enumerate(chosen):
            slots[row, : lengths[index]] = index
            run = torch.arange(starts[index], starts[index] + lengths[index])
            positions[row, : lengths[index]] = run.int()
        parts = [tensor[chosen, :q_len].flatten(0, 1).contiguous() for tensor in (q, k, v)]
        out = prefill_attention(
            *parts, cache["k_cache"], cache["v_cache"], slots.flatten().to(device),
            positions.flatten().to(device), q_len, 0.2, cache["table"],
        )  # fmt: skip
        return out.unflatten(0, (len(chosen), q_len))

    for chosen in ([0, 1, 2], [2, 0], [1, 2, 0]):
        together = attend(chosen, 20)
        for row, index in enumerate(chosen):
            alone = attend([index], 20)[0]
            here = slice(lengths[index])
            assert torch.equal(together[row, here], alone[here])


@pytest.mark.parametrize("vocabulary", [61, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sample(backend: str, dtype: torch.dtype, vocabulary: int) -> None:
    """Greedy, plain draws and filtered ones side by side; each the same in every bucket."""
    device = device_of(backend)
    slots = 8
    logits = torch.randn(slots, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    logits = logits.to(device, dtype)

    def by_slot(values: list[float], kind: torch.dtype) -> Tensor:
        return torch.tensor([*values, 0], dtype=kind, device=device)

    temperature = by_slot([0, 1, 1, 2, 0.5, 1, 3, 0], torch.float32)
    top_k = by_slot([0, 0, 5, 0, 0, 40, 0, 3], torch.int32)
    top_p = by_slot([1, 1, 1, 0.9, 1, 0.5, 0.99, 0.2], torch.float32)
    seed = by_slot([2**40 + slot for slot in range(slots)], torch.int64)
    rng = random.Random(1)

    def draw(asked: list[int], position: int) -> list[int]:
        index = torch.tensor(asked, dtype=torch.int32, device=device)
        places = torch.where(index >= 0, index + position, 0).int()
        tokens = sample(
            logits[index.clamp(min=0).long()], index, places, temperature, top_k, top_p, seed,
            vocabulary - 3,
        )  # fmt: skip
        return tokens.tolist()

    seen = set()
    for position in range(6):
        alone = [draw([slot], position)[0] for slot in range(slots)]
        assert all(0 <= token < vocabulary - 3 for token in alone)
        seen.add(tuple(alone))
        for bucket in BUCKETS[1:]:
            asked = rng.sample(range(slots), min(bucket, slots)) + [-1] * max(0, bucket - slots)
            rng.shuffle(asked)
            expected = [alone[slot] if slot >= 0 else -1 for slot in asked]
            assert draw(asked, position) == expected
    assert len(seen) == 6
