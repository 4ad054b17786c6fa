"""The DeepSeek-V4 adapter against transformers' own forward, through captured steps.

Logits are compared where the indexer's top-k covers all entries. Below that scores tie at zero, and
ties break either way, so the selection is compared by itself, where scores are distinct.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny import V4_PATTERN, V4_YARN, VOCAB, tiny_model, tiny_v4_config, tiny_v4_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from capture import DecodeRuntime, Ladder, cli
from graphcache import Batch, DecodeState, RowFormat, entry_layer
from graphcache.entry_layer import EntryLayer
from graphcache.errors import ContextFull, SchemaError, UnsupportedModel, UnsupportedPlatform
from graphcache.models import DeepseekV4Decoder, read_entry_schemas
from graphcache.models.families import check_device, read_schemas
from tests.capture.support import bits, captured, differing, sync
from tests.toy import BACKENDS, device_of

v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

EXACT = {"row_format": RowFormat.FP32, "index_format": RowFormat.FP32}
SMALL_TOP_K = 4


def _texts(seed: int, lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


class Forced:
    """A sampler that gives each slot the token its text has next.

    Args:
        device: of the steps.
        slots, context: of the state.
    """

    def __init__(self, device: torch.device, slots: int, context: int) -> None:
        self.texts = torch.zeros((slots + 1, context + 1), dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        row = torch.where(batch.slots < 0, len(self.texts) - 1, batch.slots).long()
        following = self.texts[row, batch.positions.long() + 1]
        return torch.where(batch.slots < 0, -1, following)

    def put(self, row: int, text: list[int]) -> None:
        self.texts[row, : len(text)] = torch.tensor(text, dtype=torch.int32)


# --- against transformers -------------------------------------------------------------------------

PROMPTS, ANSWER, CONTEXT = [1, 3, 5, 37, 130], 300, 448
CLEAR_SEED = 56
"""Of weights and texts of which no expert's choice hangs on rounding."""


class _Gaps:
    """The least distance, over all tokens, between an expert that is chosen and one that isn't."""

    def __init__(self, model: Any) -> None:
        self.least = float("inf")
        for module in model.modules():
            if isinstance(module, v4.DeepseekV4TopKRouter):
                module.register_forward_hook(self._look)

    def _look(self, router: Any, _: Any, out: tuple[Tensor, ...]) -> None:
        scores = router.score_fn(out[0]) + router.e_score_correction_bias
        best = scores.topk(router.top_k + 1, dim=-1).values
        self.least = min(self.least, float((best[:, -2] - best[:, -1]).min()))


@pytest.mark.shows("answers", family="deepseek_v4")
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_gives_transformers_logits(backend: str) -> None:
    """Prompts of 1 to 130 tokens in one batch, 300 further tokens each, entries in float32."""
    device = device_of(backend)
    reference = tiny_v4_model(CLEAR_SEED)
    decoder = DeepseekV4Decoder(copy.deepcopy(reference).to(device), **EXACT)
    gaps = _Gaps(reference)
    texts = _texts(CLEAR_SEED, [n + ANSWER for n in PROMPTS])
    forced = Forced(device, len(texts), CONTEXT)
    with DecodeRuntime(
        decoder,
        max_requests=len(texts),
        max_context=CONTEXT,
        ladder=Ladder([len(texts)]),
        backend=backend,
        sampler=forced,
        prefill_chunk=48,
        keep_logits=True,
    ) as runtime:
        # The indexer is asked, and takes all there is.
        assert [index for index, layer in enumerate(runtime.state.layers) if layer.selects] == [
            2,
            4,
        ]
        runtime.capture(progress=False)
        slots = [runtime.admit(t[:n], stop=()) for t, n in zip(texts, PROMPTS, strict=True)]
        for slot, text in zip(slots, texts, strict=True):
            forced.put(runtime.state.slots.row_of(slot), text)
        sync(runtime)
        steps = []
        for _ in range(ANSWER):
            result = runtime.step(slots)
            result.tokens()
            steps.append(result.logits.cpu().clone())
        (use,) = runtime.counters.buckets.values()
        assert (use.replays, use.eager_runs) == (ANSWER, 0)
    got = torch.stack(steps, 1)
    for text, count, logits in zip(texts, PROMPTS, got, strict=True):
        with torch.no_grad():
            own = reference(torch.tensor([text])).logits[0, count - 1 : -1]
        assert own.std() > 1
        torch.testing.assert_close(logits, own, atol=1e-4, rtol=0)
    assert gaps.least > 1e-4


class _Asked(NamedTuple):
    """What a layer was given, and what its indexer chose, for every token in order."""

    hidden: Tensor
    selected: Tensor


@contextmanager
def _watching(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[_Asked]]]:
    """Every call of the layers that select."""
    seen: dict[int, list[_Asked]] = {}
    selections: list[Tensor] = []
    select = entry_layer.index_select

    def spy(*args: Any) -> Tensor:
        selections.append(select(*args))
        return selections[-1]

    def watched(index: int, attention: Any) -> Any:
        def call(hidden: Tensor, *rest: Any) -> Tensor:
            before = len(selections)
            out: Tensor = attention(hidden, *rest)
            if len(selections) > before:
                asked = _Asked(hidden.cpu().clone(), selections[-1].cpu().clone())
                seen.setdefault(index, []).append(asked)
            return out

        return call

    monkeypatch.setattr(entry_layer, "index_select", spy)
    layers = decoder._layers
    decoder._layers = [watched(index, layer) for index, layer in enumerate(layers)]
    yield seen
    decoder._layers = layers


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_selection_is_transformers_own(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A top-k of 4 of up to 24 entries: what each token's indexer chose of the same inputs.

    Where the last score chosen and the first left out differ by less than rounding may, either
    choice is right; those tokens are few, and not compared.
    """
    reference = tiny_v4_model(2, index_topk=SMALL_TOP_K)
    decoder = DeepseekV4Decoder(copy.deepcopy(reference).to(device_of(backend)), **EXACT)
    (text,) = _texts(5, [98])
    with DecodeRuntime(
        decoder, max_requests=1, max_context=128, backend=backend, prefill_chunk=23
    ) as runtime:
        with _watching(decoder, monkeypatch) as seen:
            slot = runtime.admit(text[:60], stop=())
            for _ in range(38):
                runtime.step([slot], eager=True).tokens()
    assert list(seen) == [2, 4]
    compared = skipped = 0
    for index, calls in seen.items():
        hidden = torch.cat([call.hidden for call in calls]).unsqueeze(0)
        selected = torch.cat([call.selected for call in calls])
        picked, scores = _transformers_choice(reference, index, hidden)
        for t in range(hidden.shape[1]):
            n = (t + 1) // 4
            ours = selected[t][selected[t] >= 0].tolist()
            ranked = scores[t, :n].sort(descending=True).values
            if n > SMALL_TOP_K:
                gap = float(ranked[SMALL_TOP_K - 1] - ranked[SMALL_TOP_K])
                if gap <= 1e-4 * float(ranked.abs().max()):
                    skipped += 1
                    continue
            assert ours == sorted(picked[t][picked[t] >= 0].tolist())
            compared += n > SMALL_TOP_K
    assert compared > 130
    assert skipped < compared / 10


@torch.no_grad()
def _transformers_choice(model: Any, index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Entries [T, k] that transformers' indexer picks, -1 where none, and all scores [T, n]."""
    attention = model.model.layers[index].self_attn
    indexer = attention.compressor.indexer
    scores: list[Tensor] = []
    hook = indexer.scorer.register_forward_hook(lambda *call: scores.append(call[2]))
    residual = attention.q_a_norm(attention.q_a_proj(hidden))
    places = torch.arange(hidden.shape[1]).unsqueeze(0)
    picked = indexer(hidden, residual, places, None, index)
    hook.remove()
    return picked[0], scores[0][0]


# --- formats --------------------------------------------------------------------------------------

WIDE = {
    "num_hidden_layers": 2,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "num_attention_heads": 2,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 64,
}
"""Dims that every format has rows for."""
ROPE = 64
CHUNK, STEPS = 50, 20
CODED = [RowFormat.BF16, RowFormat.FP8, RowFormat.MODEL1]


class _Attended(NamedTuple):
    """A token of one layer: query [H, d], the rows seen [n, d], the angles' cos and sin, output."""

    query: Tensor
    rows: Tensor
    turn: Tensor
    out: Tensor


@torch.no_grad()
def _history(
    model: Any, index: int, row_format: RowFormat, hidden: Tensor, monkeypatch: pytest.MonkeyPatch
) -> list[_Attended]:
    """A layer on one history in a format: a chunk, then steps, of which each is told."""
    decoder = DeepseekV4Decoder(model, row_format=row_format)
    state = DecodeState(
        decoder.schemas,
        max_requests=2,
        max_context=96,
        vocab_size=VOCAB,
        device=hidden.device,
        block_tokens=16,
    )
    handle = state.open()
    state.append_tokens(handle, [0] * (len(hidden) + 1))
    calls: list[tuple[Tensor, Tensor]] = []
    attend = EntryLayer.attend

    def spy(self: EntryLayer, query: Tensor, *args: Any, **how: Any) -> Tensor:
        calls.append((query, attend(self, query, *args, **how)))
        return calls[-1][1]

    told = []
    with monkeypatch.context() as patched:
        patched.setattr(EntryLayer, "attend", spy)
        for start, stop in [(0, CHUNK), *((t, t + 1) for t in range(CHUNK, len(hidden)))]:
            batch = state.prefill_batch(handle, range(start, stop))
            if start:
                batch = Batch(batch.slots, batch.positions, batch.tokens, 1, state)
            turns = _rotations(decoder, batch)
            layer: Any = state.layers[index]
            decoder._layers[index](hidden[start:stop], turns, batch, layer)
            if start:
                query, out = calls[-1]
                turn = torch.complex(
                    turns.compressed.cos[0].double(), turns.compressed.sin[0].double()
                )
                rows = _rows_seen(layer, batch).double()
                told.append(_Attended(query[0].double(), rows, turn, out[0].double()))
    return told


def _rotations(decoder: Any, batch: Batch) -> Any:
    from graphcache.models.deepseek_v4 import Rotations

    return Rotations(decoder.model.model.rotary_emb, batch.positions, decoder._compressions)


def _rows_seen(layer: EntryLayer, batch: Batch) -> Tensor:
    """What lies in the window and in the blocks for the batch's one token, decoded."""
    window, valid = layer.cache.read_window(batch.slots, batch.positions)
    count = (int(batch.positions[0]) + 1) // layer.schema.compression
    index = torch.arange(count, device=window.device)
    held = layer.entries.values.shape[1]
    block = layer.table[batch.slots[0].long(), index // held].long()
    kept = layer.entries.map(lambda part: part[block, index % held])
    return torch.cat([window[0][valid[0]], layer.schema.row.decode(kept)])


def _half_ulp(rows: Tensor, row_format: RowFormat) -> Tensor:
    """Most that storing may move each value of rows [n, d] by.

    Rounding to nearest with p bits of significand moves a value by at most 2^-p of itself: e4m3
    has p = 4, bfloat16 p = 8. Below its smallest normal 2^-6, e4m3 has steps of 2^-9, so half of
    one is 2^-10 of the scale. That is amax / 448 of the row (FP8), or a power of two less than
    twice that of each 64 values (MODEL1), amax at least 1e-4.
    """
    size = rows.abs()
    if row_format is RowFormat.BF16:
        return size * 2**-8
    body, rotated = size[:, :-ROPE], size[:, -ROPE:]
    if row_format is RowFormat.FP8:
        scale = body.amax(1, keepdim=True).clamp(min=1e-4) / 448
    else:
        tiles = body.unflatten(1, (-1, 64))
        scale = 2 * (tiles.amax(2, keepdim=True) / 448).clamp(min=1e-4)
        scale = scale.expand_as(tiles).flatten(1)
    coded = torch.maximum(body * 2**-4, (scale * 2**-10).expand_as(body))
    return torch.cat([coded, rotated * 2**-8], 1)


def _attention(told: _Attended, scale: float, sinks: Tensor) -> Tensor:
    """Attention over the rows seen, rotated back, in float64: [H, d]."""
    logits = torch.cat([scale * told.query @ told.rows.T, sinks.unsqueeze(1)], 1)
    mixed = logits.softmax(1)[:, :-1] @ told.rows
    turned = torch.view_as_complex(mixed[:, -ROPE:].unflatten(1, (-1, 2)).contiguous())
    back = torch.view_as_real(turned * told.turn.conj()).flatten(1)
    return torch.cat([mixed[:, :-ROPE], back], 1)


def _output_bound(told: _Attended, moved: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """Most that attention's output [H, d] may move by when each row moves by at most `moved`.

    With rows k_j, logits s_j = scale q.k_j, weights w_j, the sink being a row of zeros whose logit
    does not move, and out = sum_j w_j k_j:

        |ds_j| <= e_j = scale |q|.moved_j
        w'_j / w_j lies in [exp(-e_j) / sum w exp(e), exp(e_j) / sum w exp(-e)] = 1 -+ r_j
        out' - out = sum_j (w'_j - w_j)(k_j - out) + sum_j w'_j dk_j      (weights sum to 1)
        |out' - out| <= sum_j w_j r_j |k_j - out| + sum_j w_j (1 + r_j) moved_j

    Rotating back mixes pairs of dims with factors of at most 1, so there the two of a pair add up.
    """
    heads = told.query.shape[0]
    zeros = torch.zeros_like(told.rows[:1])
    rows, moved = torch.cat([told.rows, zeros]), torch.cat([moved, zeros])
    logits = scale * told.query @ rows.T
    logits[:, -1] = sinks
    w = logits.softmax(1)
    e = scale * told.query.abs() @ moved.T
    above = e.exp() / (w * (-e).exp()).sum(1, keepdim=True) - 1
    below = 1 - (-e).exp() / (w * e.exp()).sum(1, keepdim=True)
    r = torch.maximum(above, below)
    bound = torch.stack(
        [
            (w[h] * r[h]) @ (rows - w[h] @ rows).abs() + (w[h] * (1 + r[h])) @ moved
            for h in range(heads)
        ]
    )
    pairs = bound[:, -ROPE:].unflatten(1, (-1, 2)).sum(2, keepdim=True).expand(-1, -1, 2)
    return torch.cat([bound[:, :-ROPE], pairs.flatten(1)], 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("index", [0, 1], ids=["csa", "hca"])
@pytest.mark.parametrize("row_format", CODED, ids=lambda row: row.value)
def test_a_format_moves_a_layers_output_no_more_than_its_rounding_can(
    row_format: RowFormat, index: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same history in float32 and in the format: rows by half an ulp, outputs by what follows.

    The bound of the output is for the worst signs, which rounding never has all at once, so the
    output is also held against attention over the very rows that were kept. Float32's own rounding
    is 2e-6 of a row, whose values are of size 1, and 1e-4 of an output.
    """
    model = tiny_v4_model(3, **WIDE).to(device)
    hidden = torch.randn(
        CHUNK + STEPS, model.config.hidden_size, generator=torch.Generator().manual_seed(7)
    ).to(device)
    exact = _history(model, index, RowFormat.FP32, hidden, monkeypatch)
    kept = _history(model, index, row_format, hidden, monkeypatch)
    attention = model.model.layers[index].self_attn
    sinks = attention.sinks.detach().double()
    assert len(exact) == len(kept) == STEPS
    moved_at_all = 0.0
    for one, other in zip(exact, kept, strict=True):
        assert torch.equal(one.query, other.query)
        half_ulp = _half_ulp(one.rows, row_format)
        moved = (other.rows - one.rows).abs()
        assert (moved <= half_ulp + 2e-6).all()
        moved_at_all = max(moved_at_all, float(((moved - 2e-6) / half_ulp).max()))
        bound = _output_bound(one, half_ulp, attention.scaling, sinks)
        assert ((other.out - one.out).abs() <= bound + 1e-4).all()
        wanted = _attention(other, attention.scaling, sinks)
        torch.testing.assert_close(other.out, wanted, atol=1e-4, rtol=0)
    # Some value does lie near the middle of two codes: the rows' bound is no larger than need be.
    assert moved_at_all > 0.9


@torch.no_grad()
def _logits(decoder: DeepseekV4Decoder, text: list[int], steps: int) -> Tensor:
    """[len(text), V]: chunks of 40 tokens, then so many steps."""
    state = DecodeState(
        decoder.schemas,
        max_requests=1,
        max_context=len(text) + 2,
        vocab_size=VOCAB,
        device=decoder.device,
    )
    handle = state.open()
    state.append_tokens(handle, [*text, 0])
    chunked = len(text) - steps
    parts = []
    for start in range(0, chunked, 40):
        positions = range(start, min(start + 40, chunked))
        parts.append(decoder.decode(state.prefill_batch(handle, positions)))
    for position in range(chunked, len(text)):
        batch = state.prefill_batch(handle, range(position, position + 1))
        parts.append(
            decoder.decode(Batch(batch.slots, batch.positions, batch.tokens, 1, batch.state))
        )
    return torch.cat(parts).float().cpu()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("changes", "row_format", "error", "agreeing"),
    [
        pytest.param(WIDE, RowFormat.BF16, 0.01, 0.97, id="bf16"),
        pytest.param(WIDE, RowFormat.FP8, 0.1, 0.85, id="fp8"),
        pytest.param(WIDE, RowFormat.MODEL1, 0.1, 0.85, id="model1"),
        pytest.param({}, RowFormat.FP8, 0.2, 0.7, id="fp8, 6 layers"),
    ],
)
def test_logits_stay_close_in_every_format(
    changes: dict[str, Any], row_format: RowFormat, error: float, agreeing: float, device: str
) -> None:
    """The typical token's error over the size of logits, and how often the greedy choice is kept.

    Of random weights, whose choices are closer than a trained model's. Rounding to nearest leaves
    a value of e4m3 an error of 0.027 in the mean square (2^-4 / sqrt(3), over significands of all
    sizes). Measured on the CPU over three seeds: 0.0030 to 0.0036 (BF16), 0.045 to 0.052 (FP8 and
    MODEL1, 2 layers) and 0.076 to 0.091 (FP8, 6 layers, where experts are chosen anew); greedy
    choices kept 0.99, 0.91 and 0.85. The limits are twice that.
    """
    model = tiny_v4_model(1, **changes).to(device)
    exact = DeepseekV4Decoder(model, **EXACT)
    index_format = RowFormat.BF16 if row_format is RowFormat.BF16 else RowFormat.FP8
    coded = DeepseekV4Decoder(model, row_format=row_format, index_format=index_format)
    (text,) = _texts(4, [200])
    wanted, got = _logits(exact, text, 40), _logits(coded, text, 40)
    by_token = (got - wanted).square().mean(1).sqrt() / wanted.std()
    assert 0 < by_token.median() < error
    assert (got.argmax(1) == wanted.argmax(1)).float().mean() >= agreeing


# --- captured steps -------------------------------------------------------------------------------


def _runtime(backend: str, rows: int, **options: Any) -> DecodeRuntime:
    """A layer of each kind, default formats, a top-k that leaves entries out, and one bucket."""
    few = {"num_hidden_layers": 3, "layer_types": V4_PATTERN[1:4], "index_topk": SMALL_TOP_K}
    decoder = DeepseekV4Decoder(tiny_v4_model(6, **few).to(device_of(backend)), rewind=6)
    settings = {"max_requests": 4, "max_context": 128, "block_tokens": 16, "keep_logits": True}
    return DecodeRuntime(decoder, ladder=Ladder([rows]), backend=backend, **{**settings, **options})


@pytest.mark.shows("replays", family="deepseek_v4")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replay_is_bit_equal_to_eager_at_the_same_bucket(backend: str) -> None:
    """Steps of 3 slots in a bucket of 4, over ends of blocks and both rings' ends, beside a slot
    that takes no part; logits at every step, and all state in the end."""
    prompts = _texts(8, [1, 14, 45, 30])
    with captured(_runtime(backend, 4)) as replayed, _runtime(backend, 4) as eager:
        asked = []
        for runtime in (replayed, eager):
            slots = [
                runtime.admit(p, stop=(), temperature=1.0, seed=i) for i, p in enumerate(prompts)
            ]
            asked.append(slots[:3])
        for step in range(40):
            one = replayed.step(asked[0])
            other = eager.step(asked[1], eager=True)
            assert one.tokens() == other.tokens()
            assert torch.equal(one.logits, other.logits), f"step {step}"
        assert differing(bits(replayed), bits(eager)) == []
        lengths = [replayed.length_of(slot) for slot in asked[0]]
        assert lengths == [40, 53, 84]


PROMPT = 30
ALIGNED, UNALIGNED = 48, 46
"""Lengths: where entries of both kinds and a block of the store end, and where nothing does."""
DRAW = {"stop": (), "temperature": 1.0, "seed": 5}


class _Life:
    """One request's tokens, and the logits that each of its later ones was drawn from."""

    def __init__(self, runtime: DecodeRuntime) -> None:
        self.runtime = runtime
        (self.prompt,) = _texts(11, [PROMPT])

    def admit(self) -> int:
        return self.runtime.admit(self.prompt, **DRAW)

    def reach(self, length: int, *slots: int) -> list[Tensor]:
        """Step until `length` tokens are absorbed; logits of each step, [rows, V]."""
        logits = []
        while self.runtime.length_of(slots[0]) < length:
            result = self.runtime.step(list(slots))
            result.tokens()
            logits.append(result.logits.cpu().clone())
        return logits

    def tokens(self, slot: int) -> list[int]:
        return self.runtime.tokens_of(slot)


END = 62


def _undisturbed(runtime: DecodeRuntime) -> tuple[list[int], Tensor]:
    """Tokens of a request nothing happens to, and the logits of each step, from the prompt on."""
    life = _Life(runtime)
    slot = life.admit()
    logits = torch.stack([step[0] for step in life.reach(END, slot)])
    tokens = life.tokens(slot)
    runtime.retire(slot)
    assert len(set(tokens[PROMPT:])) > 20
    return tokens, logits


def _same(got: list[Tensor], row: int, wanted: Tensor, length: int) -> None:
    """Logits of the steps from `length` on."""
    after = wanted[length - PROMPT + 1 :]
    torch.testing.assert_close(torch.stack([step[row] for step in got]), after, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [ALIGNED, UNALIGNED])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fork_and_a_rewind_go_on_as_if_nothing_had_happened(backend: str, length: int) -> None:
    """A fork that draws alike says the same. Then fork past `length`, where a block is shared by
    then, take both back there, and let them go on differently: what each says is what it would."""
    with captured(_runtime(backend, 2)) as runtime:
        tokens, logits = _undisturbed(runtime)
        life = _Life(runtime)
        slot = life.admit()
        life.reach(length, slot)
        twin = runtime.fork(slot, seed=DRAW["seed"])
        other = runtime.fork(slot, seed=DRAW["seed"] + 1)
        _same(life.reach(END, slot, twin), 1, logits, length)
        assert life.tokens(slot) == life.tokens(twin) == tokens
        other_logits = torch.stack([step[0] for step in life.reach(END, other)])
        other_tokens = life.tokens(other)
        assert other_tokens != tokens
        for handle in (slot, twin, other):
            runtime.retire(handle)

        slot = life.admit()
        life.reach(length + 4, slot)
        other = runtime.fork(slot, seed=DRAW["seed"] + 1)
        for handle in (slot, other):
            runtime.rewind(handle, length)
        steps = life.reach(END, slot, other)
        _same(steps, 0, logits, length)
        torch.testing.assert_close(
            torch.stack([step[1] for step in steps]), other_logits, atol=1e-4, rtol=0
        )
        assert (life.tokens(slot), life.tokens(other)) == (tokens, other_tokens)


@pytest.mark.parametrize("length", [ALIGNED, UNALIGNED])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_is_restored_over_what_others_left(backend: str, length: int) -> None:
    """Into a slot that others used, and into another runtime; from the device and from the host."""
    runtime = captured(_runtime(backend, 2, kv_blocks=48))
    second = captured(_runtime(backend, 2))
    with runtime, second:
        tokens, logits = _undisturbed(runtime)
        life = _Life(runtime)
        slot = life.admit()
        life.reach(length, slot)
        kept, on_host = runtime.checkpoint(slot), runtime.checkpoint(slot).to_host()
        life.reach(END, slot)
        assert life.tokens(slot) == tokens
        runtime.retire(slot)
        for other in _texts(12, [50, 40, 33]):
            runtime.admit(other, stop=())
        restored = runtime.restore(kept)
        steps = life.reach(END, restored)
        _same(steps, 0, logits, length)
        assert life.tokens(restored) == tokens
        elsewhere = _Life(second)
        second.admit(life.prompt[:7], stop=())
        moved = second.restore(on_host)
        _same(elsewhere.reach(END, moved), 0, logits, length)
        assert elsewhere.tokens(moved) == tokens


# --- the adapter ----------------------------------------------------------------------------------


def test_attributes() -> None:
    model = tiny_v4_model()
    decoder = DeepseekV4Decoder(model, row_format=RowFormat.BF16, step_width=2, rewind=3)
    assert decoder.model is model and not model.training
    assert decoder.schemas == read_entry_schemas(
        model.config, row_format=RowFormat.BF16, step_width=2, rewind=3
    )
    assert (decoder.vocab_size, decoder.max_context, decoder.stop_tokens) == (VOCAB, 1024, (2,))
    assert (decoder.device, decoder.dtype) == (torch.device("cpu"), torch.float32)
    assert decoder.fields == () and decoder.tokenizer is None
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        decoder.encode("text")


def test_the_model_by_itself_runs_and_is_saved_as_before(tmp_path: Path) -> None:
    reference, model = tiny_v4_model(1), tiny_v4_model(1)
    DeepseekV4Decoder(model)
    tokens = torch.tensor(_texts(1, [50]))
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens).logits, reference(tokens).logits, atol=1e-5, rtol=0
        )
    model.save_pretrained(tmp_path / "after")
    again = v4.DeepseekV4ForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_two_adapters_of_a_model_share_its_gathered_weights() -> None:
    model = tiny_v4_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    places = [
        {
            name: tensor.data_ptr()
            for name, tensor in DeepseekV4Decoder(model).named_tensors().items()
        }
        for _ in range(2)
    ]
    assert places[0] == places[1]
    named = DeepseekV4Decoder(model).named_tensors()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert named[name].data_ptr() == parameter.data_ptr()


def test_sinks_of_a_model_cast_as_a_whole_are_float32_again() -> None:
    decoder = DeepseekV4Decoder(tiny_v4_model().to(torch.bfloat16))
    assert decoder.dtype == torch.bfloat16
    assert _logits(decoder, _texts(2, [21])[0], 3).isfinite().all()


def test_transformers_is_imported_when_a_model_is_adapted() -> None:
    code = (
        "import sys, graphcache, graphcache.models, graphcache.models.deepseek_v4\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what is refused ------------------------------------------------------------------------------


def _as_built(change: Callable[[Any], None]) -> Callable[[], Any]:
    def build() -> Any:
        model = tiny_v4_model()
        change(model)
        return model

    return build


def _set(name: str, value: Any) -> Callable[[], Any]:
    return _as_built(lambda model: setattr(model.config, name, value))


def _int8(model: Any) -> None:
    weight = model.lm_head.weight.data.to(torch.int8)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)


def _half_an_expert(model: Any) -> None:
    model.model.layers[1].mlp.shared_experts.half()


def _unbuilt() -> Any:
    with torch.device("meta"):
        return v4.DeepseekV4ForCausalLM(tiny_v4_config())


def _rope(**changes: Any) -> Callable[[], Any]:
    return lambda: tiny_v4_model(rope_parameters={**V4_YARN, **changes})


def _whole_heads_rotated() -> Any:
    """Nested parameters without the factor: transformers then rotates all dims of a head."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    return tiny_v4_model(rope_parameters={"main": dict(plain), "compress": dict(plain)})


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (tiny_model, "expected a built DeepseekV4ForCausalLM, got LlamaForCausalLM"),
        (lambda: tiny_v4_model().model, "got DeepseekV4Model"),
        (tiny_v4_config, "got DeepseekV4Config"),
        (lambda: None, "got NoneType"),
        (_unbuilt, "not built"),
        (_set("quantization_config", {"quant_method": "fp8"}), "quantised by 'fp8'"),
        (_as_built(_int8), "quantised weights are not served: lm_head.weight is torch.int8"),
        (lambda: tiny_v4_model().half(), "float16"),
        (lambda: tiny_v4_model().double(), "float64"),
        (_as_built(_half_an_expert), r"layers.1.mlp.shared_experts.*float16"),
        (lambda: tiny_v4_model(head_dim=72, o_groups=2), "multiple of 16"),
        (_set("qk_rope_head_dim", 15), "rope_dim of 8"),
        (lambda: tiny_v4_model(qk_rope_head_dim=12), "rope_dim of 8"),
        (lambda: tiny_v4_model(partial_rotary_factor=1.25), "rope_dim must lie between"),
        (lambda: tiny_v4_model(o_groups=3), "4 heads of 64 don't make o_groups=3"),
        (_rope(rope_type="dynamic", factor=2.0), "'dynamic'"),
        (_whole_heads_rotated, r"rope_parameters\['main'\] rotates 64 dims"),
        (_set("compress_rates", {V4_PATTERN[2]: 4, V4_PATTERN[3]: 0}), "compression >= 1"),
        (_set("layer_types", ["full_attention"] * 6), "'full_attention'"),
    ],
)
def test_unserved_models_are_refused_by_name_and_left_as_they_were(build: Any, part: str) -> None:
    model = build()
    before = _places(model)
    with pytest.raises(UnsupportedModel, match=part):
        DeepseekV4Decoder(model)
    assert _places(model) == before


def _places(model: Any) -> Any:
    """Where the weights lie, and what runs the experts."""
    if not isinstance(model, torch.nn.Module) or any(p.is_meta for p in model.parameters()):
        return None
    tensors = {name: p.untyped_storage().data_ptr() for name, p in model.named_parameters()}
    return tensors, model.config._experts_implementation


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"row_format": RowFormat.MODEL1}, "MODEL1 row is defined for entries of 512"),
        ({"row_format": "fp8"}, "row_format is a RowFormat"),
        ({"index_format": RowFormat.MODEL1}, "MODEL1 is a row of attention entries"),
        ({"tail_dtype": torch.float16}, "tail_dtype is float32 or bfloat16"),
        ({"step_width": 0}, "step_width"),
        ({"rewind": -1}, "rewind"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], part: str) -> None:
    model = tiny_v4_model()
    before = _places(model)
    with pytest.raises(UnsupportedModel, match=part):
        DeepseekV4Decoder(model, **options)
    assert _places(model) == before


BF16 = {"row_format": RowFormat.BF16, "index_format": RowFormat.BF16}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "fp8"),
        ({**BF16, "row_format": RowFormat.MODEL1}, "model1"),
        ({**BF16, "index_format": RowFormat.FP8}, "fp8"),
        ({**BF16, "row_format": RowFormat.FP8}, "fp8"),
        (BF16, None),
        (EXACT, None),
    ],
)
def test_a_device_without_e4m3_keeps_no_coded_rows(
    options: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    schemas = read_entry_schemas(tiny_v4_config(**WIDE), **options)
    capability = (8, 6)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    check_device(schemas, torch.device("cpu"))
    if said is None:
        check_device(schemas, torch.device("cuda", 0))
        return
    with pytest.raises(UnsupportedPlatform, match=rf"rows in {said} need.*8\.9.*has 8\.6.*BF16"):
        check_device(schemas, torch.device("cuda", 0))
    capability = (8, 9)
    check_device(schemas, torch.device("cuda", 0))


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(UnsupportedPlatform, match="run on cpu and cuda, not on xpu"):
        check_device(read_entry_schemas(tiny_v4_config(), **EXACT), torch.device("xpu"))
    plain = read_schemas(tiny_model().config, torch.float32)
    check_device(plain, torch.device("xpu"))


def test_a_transformers_without_the_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    model = tiny_v4_model()

    class Older:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "transformers", Older())
    with pytest.raises(UnsupportedPlatform, match=r"pip install 'transformers>=5\.17"):
        DeepseekV4Decoder(model)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    DeepseekV4Decoder(model)


def test_a_runtime_that_does_not_fit_the_model_is_refused() -> None:
    decoder = DeepseekV4Decoder(tiny_v4_model())
    with pytest.raises(SchemaError, match="max_context=1025 is beyond the model's 1024"):
        DecodeRuntime(decoder, max_requests=1, max_context=1025)
    for block_tokens in (4, 24, 100):
        with pytest.raises(SchemaError, match="must be a multiple of every layer's compression"):
            DecodeRuntime(decoder, max_requests=1, max_context=64, block_tokens=block_tokens)
    with DecodeRuntime(decoder, max_requests=1, max_context=64, block_tokens=16) as runtime:
        assert runtime.state.blocks.table.shape == (2, 4)
        with pytest.raises(ContextFull, match="context of 64"):
            runtime.admit(_texts(1, [64])[0])
        slot = runtime.admit(_texts(1, [63])[0], stop=())
        runtime.step([slot], eager=True).tokens()
        with pytest.raises(ContextFull):
            runtime.extend(slot, [5])


def test_the_plain_adapter_refuses_the_model() -> None:
    from graphcache.models.transformers_decoder import TransformersDecoder

    model = tiny_v4_model()
    with pytest.raises(UnsupportedModel, match="'deepseek_v4' has an adapter of its own"):
        TransformersDecoder(model)
    assert model.config._attn_implementation != "graphcache"


# --- the command ----------------------------------------------------------------------------------


def test_the_command_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks are as long as the longest compression needs, which is more than most models' 64."""
    rates = {V4_PATTERN[2]: 4, V4_PATTERN[3]: 128}
    few = {"num_hidden_layers": 3, "layer_types": V4_PATTERN[1:4], "compress_rates": rates}
    tiny_v4_model(**few).save_pretrained(tmp_path)
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--device", "cpu", "--max-tokens", "9", "--json"]
    prompts = [word for text in ("w5 w6 w7", "w8") for word in ("--prompt", text)]
    monkeypatch.setattr(sys, "argv", ["graphcache", "generate", *arguments, *prompts])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    for answer in answers:
        assert answer["finish_reason"] == "length" or answer["tokens"][-1] == 2
        assert len(answer["tokens"]) == 9 or answer["tokens"][-1] == 2
    assert len(answers) == 2
