"""Requests on the state of entry layers, each beside its whole history; without a runtime.

Memory starts as NaN and no slot is ever wiped. What a token brings to the layers is drawn when it
is absorbed, so a draft that is rejected and the token that takes its place have nothing in common.
Every token's attention is compared with `tests.entry_oracle`, every write with where it may go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache import AttentionType, Batch, Checkpoint, DecodeState, LayerCacheSchema
from graphcache.entry_layer import CompressorInputs, EntryInputs, EntryLayer, IndexInputs
from graphcache.errors import RewindTooFar
from graphcache.ops.absorb import Rotation
from graphcache.rows import RowFormat, Rows
from tests.entry_oracle import (
    Bf16,
    Fp8Token,
    Fp32,
    Layer,
    LayerParams,
    Model1,
    Token,
    random_params,
    random_token,
)
from tests.entry_oracle import (
    RowFormat as OracleRow,
)
from tests.step_clock import HandClock

__all__ = ["EntryRequests", "Story", "fill_with_nan", "params_of"]

HEADS, INDEX_HEADS = 2, 3

NAN_BYTE = 0xFF
"""Repeated, it is NaN in every format: float32, bfloat16, e4m3 and E8M0."""

OUTPUT_ERROR = {
    RowFormat.FP32: 2e-5,
    RowFormat.BF16: 0.02,
    RowFormat.FP8: 0.15,
    RowFormat.MODEL1: 0.15,
}
"""Largest root mean square error of an output, whose rows are of size 1.

Where float32 and float64 fall to different sides of a rounding boundary, an element differs by a
whole code. That is rare: `TYPICAL_ERROR` bounds the median.
"""
TYPICAL_ERROR = {
    RowFormat.FP32: 2e-6,
    RowFormat.BF16: 4e-3,
    RowFormat.FP8: 2e-6,
    RowFormat.MODEL1: 2e-6,
}
ROW_ERROR = {
    RowFormat.FP32: 2e-5,
    RowFormat.BF16: 2**-7,
    RowFormat.FP8: 2**-3,
    RowFormat.MODEL1: 2**-3,
}
"""Of a stored value: a code, relative."""
SCORE_GAP = {RowFormat.FP32: 1e-4, RowFormat.BF16: 0.02, RowFormat.FP8: 0.02}
"""Selections are compared where scores at the border differ by more, relative, or not at all."""


def fill_with_nan(state: DecodeState) -> None:
    """NaN in all rows and blocks, scratch too; fields with a reset rule stay as they are."""
    pools = [state.pool] if state.blocks is None else [state.pool, state.blocks.pool]
    for pool in pools:
        for name, entry in pool.fields.items():
            if name.startswith("layer") and not entry.reset:
                pool.arena[:, slice(*pool.byte_range(name))] = NAN_BYTE


def _oracle_row(row_format: RowFormat, rope_dim: int) -> OracleRow:
    if row_format is RowFormat.FP8:
        return Fp8Token(rope_dim)
    if row_format is RowFormat.MODEL1:
        return Model1(rope_dim)
    return Bf16() if row_format is RowFormat.BF16 else Fp32()


def params_of(schema: LayerCacheSchema, random: np.random.Generator) -> LayerParams:
    """A layer of random weights that keeps what the schema says."""
    indexer = schema.indexer
    return random_params(
        random,
        window=schema.swa_window_size,
        compression=schema.compression or None,
        overlap=int(schema.attn_type is AttentionType.CSA),
        top_k=None if indexer is None else indexer.top_k,
        heads=HEADS,
        dim=schema.entry_head_dim,
        rope_dim=schema.rope_dim,
        index_heads=INDEX_HEADS,
        index_dim=16 if indexer is None else indexer.head_dim,
        row=_oracle_row(schema.row_format, schema.rope_dim),
        index_row=None if indexer is None else _oracle_row(indexer.row_format, 0),
        tail=Bf16() if schema.tail_dtype == torch.bfloat16 else Fp32(),
    )


@dataclass
class Story:
    """A request as its caller knows it: numbers, and its history in every layer."""

    histories: list[Layer]
    vectors: np.random.Generator
    """What its next tokens bring is drawn from here."""
    max_tokens: int | None
    length: int = 0
    """Tokens absorbed and kept."""
    high: int = 0
    """One past the highest position ever absorbed."""
    floor: int = 0
    limit: int = 0
    done: bool = False
    live: bool = False
    pending: range = range(0)
    """Positions of its prompt that are to be absorbed."""
    promised: int | None = None
    """A rewind to here or less far must be granted."""

    def copy(self, vectors: np.random.Generator) -> Story:
        """The same story, to go on differently; where a prompt was not complete, by `extend`."""
        histories = [history.copy() for history in self.histories]
        return replace(self, histories=histories, vectors=vectors, pending=range(0))

    def go_back(self, length: int) -> None:
        """Forget what came after the first `length` tokens."""
        self.length = length
        for history in self.histories:
            history.truncate(length)


class Absorbed(NamedTuple):
    """One token in every layer: what it brings, and what its attention must be (None: unknown)."""

    tokens: list[Token]
    outputs: list[np.ndarray | None]


@dataclass
class Seen:
    """What was compared."""

    errors: list[float] = field(default_factory=list)
    ambiguous: int = 0
    refused: int = 0
    granted: int = 0
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    """By slot, the outputs [q, H, d] of its newest tokens, one for each layer."""


class EntryRequests:
    """A state of entry layers, and beside it each request's story.

    Args:
        schemas: of the layers; all of one promise.
        seed: of weights and tokens.
        block_tokens: a multiple of every compression.
        slots, context: of the state.
        copies: blocks are enough for so many checkpoints of whole contexts.
        device: of the state.
        rounding: of q, kv and index_q: `Bf16()` for inputs in bfloat16.

    Attributes:
        ring_rows: of each layer's window and tail, by which rewinds are judged.
    """

    def __init__(
        self,
        schemas: Sequence[LayerCacheSchema],
        *,
        seed: int,
        block_tokens: int,
        slots: int = 3,
        context: int = 48,
        copies: int = 2,
        device: str = "cpu",
        rounding: OracleRow | None = None,
    ) -> None:
        self.schemas, self.slots, self.context = tuple(schemas), slots, context
        self.q, self.k = schemas[0].step_width, schemas[0].rewind
        self.device = device
        self.random = np.random.default_rng(seed)
        self.params = [params_of(schema, self.random) for schema in schemas]
        self.rounding = rounding
        self.dtype = torch.bfloat16 if isinstance(rounding, Bf16) else torch.float32
        self.clock = HandClock()
        self.state = self.make_state(block_tokens, copies)
        self.layers: list[EntryLayer] = list(self.state.layers)  # type: ignore[arg-type]
        self.ring_rows = [(len(layer.cache.swa_pos[0]), _tail_rows(layer)) for layer in self.layers]
        self.stories: dict[int, Story] = {}
        self.saved: list[tuple[Checkpoint, Story]] = []
        self.seen = Seen()

    def make_state(self, block_tokens: int, copies: int) -> DecodeState:
        """Memory full of NaN."""
        state = DecodeState(
            self.schemas,
            max_requests=self.slots,
            max_context=self.context,
            vocab_size=2,
            device=self.device,
            block_tokens=block_tokens,
            kv_blocks=(self.slots + copies) * -(-self.context // block_tokens),
            clock=self.clock,
        )
        fill_with_nan(state)
        return state

    def row(self, handle: int) -> int:
        return self.state.slots.row_of(handle)

    # --- a request's life -------------------------------------------------------------------------

    def open(self, max_tokens: int | None = None, seed: int | None = None) -> int:
        """A slot without tokens.

        Args:
            max_tokens: budget of an answer.
            seed: of what its tokens bring; None for one of its own.
        """
        vectors = self.random.spawn(1)[0] if seed is None else np.random.default_rng(seed)
        handle = self.state.open(max_tokens=max_tokens, stop=())
        self.stories[handle] = Story([Layer(params) for params in self.params], vectors, max_tokens)
        return handle

    def extend(self, handle: int, count: int, max_tokens: int | None = None) -> None:
        """Put `count` tokens behind those a slot has; `chunk` absorbs them."""
        story = self.stories[handle]
        budget = story.max_tokens if max_tokens is None else max_tokens
        present = story.length + 1 if story.limit else 0
        total = present + count
        story.limit = min(self.context, total + (self.context if budget is None else budget))
        story.done, story.live = False, False
        story.pending = self.state.append_tokens(handle, [0] * count, max_tokens)
        assert story.pending == range(story.length, total - 1)
        self._complete(handle)

    def admit(self, count: int, chunk: int = 1 << 20, **options: int | None) -> int:
        """A live request of `count` tokens."""
        handle = self.open(**options)
        self.extend(handle, count)
        while self.stories[handle].pending:
            self.chunk({handle: min(chunk, len(self.stories[handle].pending))})
        return handle

    def chunk(self, runs: dict[int, int], padding: Iterable[int] = ()) -> None:
        """Absorb the next pending tokens of some slots, in one chunk.

        Args:
            runs: tokens by slot.
            padding: indices of empty rows.
        """
        taken = {handle: self.stories[handle].pending[:count] for handle, count in runs.items()}
        self._attend(self._chunk_of(taken, self._lines(runs, padding)), list(runs))
        for handle, positions in taken.items():
            story = self.stories[handle]
            self.state.absorbed(handle, positions)
            self._grow(story, len(positions), len(positions))
            story.pending = story.pending[len(positions) :]
            self._complete(handle)

    def step(
        self, runs: dict[int, tuple[int, int]], q_len: int, padding: Iterable[int] = ()
    ) -> None:
        """One step.

        Args:
            runs: tokens and how many of them are accepted, by slot.
            q_len: tokens a row.
            padding: indices of empty rows.
        """
        lines = self._lines(runs, padding)
        asked = self._ints(
            [
                -1 if line is None or column >= runs[line][0] else self.row(line)
                for line in lines
                for column in range(q_len)
            ]
        )
        # Whatever is said of an empty row must be of no effect.
        accepted = self._ints([q_len if line is None else runs[line][1] for line in lines])
        batch = self.state.begin(asked, q_len)
        absorbed = self._attend(batch, list(runs))
        self.clock.submit()
        emitted, _ = self.state.advance(torch.zeros_like(asked), batch, asked, accepted)
        for handle, (count, accept) in runs.items():
            story = self.stories[handle]
            run = 0 if story.done else min(count, self.context - story.length)
            assert absorbed[handle] == run
            kept = min(accept, run, story.limit - 1 - story.length) if run else 0
            line = lines.index(handle)
            assert emitted.view(-1, q_len)[line].tolist() == [0] * kept + [-1] * (q_len - kept)
            if run:
                self._grow(story, run, kept)
                story.done = bool(kept) and story.length + 1 >= story.limit

    def retire(self, handle: int) -> None:
        """Without wiping."""
        self.state.retire(handle)
        del self.stories[handle]

    # --- copies and ways back ---------------------------------------------------------------------

    def fork(self, handle: int, seed: int | None = None) -> int:
        """A second request, whose tokens to come are others, or those of `seed`."""
        vectors = self.random.spawn(1)[0] if seed is None else np.random.default_rng(seed)
        forked = self.state.fork(handle)
        self.stories[forked] = self.stories[handle].copy(vectors)
        return forked

    def may_rewind(self, handle: int, length: int) -> bool:
        """Whether what the next token needs is still there, by the fields and the rings' rows."""
        row = self.row(handle)
        high, floor = int(self.state.high[row]), int(self.state.floor[row])
        if length < floor:
            return False
        for schema, (window_rows, tail_rows) in zip(self.schemas, self.ring_rows, strict=True):
            starts = [(max(0, length - schema.swa_window_size + 1), window_rows)]
            if schema.compression:
                starts.append((_tail_start(schema, length), tail_rows))
            if any(start < length and start < high - rows for start, rows in starts):
                return False
        return True

    def rewind(self, handle: int, length: int) -> bool:
        """Granted or refused by the rule; what was promised must be granted."""
        story, may = self.stories[handle], self.may_rewind(handle, length)
        if story.promised is not None and length >= story.promised:
            assert may, "a promised rewind was refused"
        before = self.state.pool.arena.clone()
        if not may:
            with pytest.raises(RewindTooFar):
                self.state.rewind(handle, length)
            assert torch.equal(before, self.state.pool.arena), "a refused rewind wrote something"
            self.seen.refused += 1
            return False
        try:
            self.state.rewind(handle, length)
        except RewindTooFar as error:
            raise AssertionError("a rewind was refused that the rule allows") from error
        story.go_back(length)
        story.promised = None
        story.done = length + 1 >= story.limit
        story.pending = range(length, story.pending.stop) if story.pending else story.pending
        self.seen.granted += 1
        return True

    def checkpoint(self, handle: int, *, to_host: bool) -> None:
        taken = self.state.checkpoint(handle)
        if to_host:
            taken.to_host()
        self.saved.append((taken, self.stories[handle].copy(self.random)))

    def restore(self, index: int) -> int:
        taken, story = self.saved[index]
        handle = self.state.restore(taken)
        self.stories[handle] = story.copy(self.random.spawn(1)[0])
        return handle

    def release(self, index: int) -> None:
        taken, _ = self.saved.pop(index)
        taken.release()

    @property
    def whole(self) -> int:
        """Lengths at which no compressor is in the middle of a block are multiples of this."""
        return math.lcm(*(schema.compression or 1 for schema in self.schemas))

    def keep_minimum(self, handle: int) -> None:
        """Leave a slot of `whole` blocks no more than the minimal form of a checkpoint has.

        That is the window's last W-1 rows and, with overlap, the previous stream of the last m
        tokens; all else becomes NaN.
        """
        story, row = self.stories[handle], self.row(handle)
        assert story.length % self.whole == 0
        for layer in self.layers:
            window, tail = layer.schema.swa_window_size, layer.cache.tail
            kept = range(max(0, story.length - window + 1), story.length)
            for part in layer.cache.swa.parts():
                _lose(part[row], kept)
            if tail is None:
                continue
            for rings in (tail, layer.cache.index_tail):
                for name, ring in () if rings is None else rings._asdict().items():
                    block = layer.schema.compression if name.startswith("previous") else 0
                    if ring is not None:
                        _lose(ring[row], range(max(0, story.length - block), story.length))
        story.floor = story.high = story.length
        story.promised = None
        self.state.floor[row] = self.state.high[row] = story.length

    # --- what memory must hold --------------------------------------------------------------------

    def check(self, handle: int) -> None:
        """Scalars, and every row that a token to come may read."""
        story, row, state = self.stories[handle], self.row(handle), self.state
        fields = [int(part[row]) for part in (state.len, state.high, state.floor, state.limit)]
        wanted = [story.length, story.high, story.floor, story.limit]
        assert fields == wanted, "lengths are wrong"
        assert bool(state.done[row]) == story.done
        for layer, history in zip(self.layers, story.histories, strict=True):
            cache, length = layer.cache, story.length
            assert int(cache.swa_head[row]) == length % cache.swa_pos.shape[1]
            if cache.tail_len is not None:
                assert int(cache.tail_len[row]) == length % layer.schema.compression
            if length:
                self._check_window(layer, history, row)
                self._check_entries(layer, history, row)
                _check_tails(layer, history, row)

    def check_all(self) -> None:
        """Every request's memory, and how exact the outputs were on the whole."""
        for handle in self.stories:
            self.check(handle)
        assert not self.state.len[-1], "scratch has a length"
        if self.seen.errors:
            typical = max(TYPICAL_ERROR[schema.row_format] for schema in self.schemas)
            assert np.median(self.seen.errors) < typical
            assert self.seen.ambiguous <= 3 + len(self.seen.errors) // 10

    def _check_window(self, layer: EntryLayer, history: Layer, row: int) -> None:
        schema, length, tags = layer.schema, len(history), layer.cache.swa_pos[row]
        count = min(length, schema.swa_window_size - 1)
        for position, wanted in zip(
            range(length - count, length), history.window()[len(history.window()) - count :],
            strict=True,
        ):  # fmt: skip
            at = position % len(tags)
            assert int(tags[at]) == position
            _same_row(layer.schema.row, layer.cache.swa, row, at, wanted, schema.row_format)

    def _check_entries(self, layer: EntryLayer, history: Layer, row: int) -> None:
        schema = layer.schema
        stored: list[tuple[Rows | None, Sequence[np.ndarray], LayerCacheSchema | object]] = []
        if layer.entries is not None:
            stored.append((layer.entries, history.entries(), schema))
        if layer.keys is not None:
            stored.append((layer.keys, history.keys(), schema.indexer))
        for rows, wanted, kind in stored:
            for index, entry in enumerate(wanted):
                block, at = divmod(index, rows.values.shape[1])
                place = int(layer.table[row, block])
                _same_row(kind.row, rows, place, at, entry, kind.row_format)

    # --- private ----------------------------------------------------------------------------------

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _there(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _rotation(self, inv_freq: np.ndarray, positions: np.ndarray, used: np.ndarray) -> Rotation:
        angle = positions[:, None].astype(np.float64) * inv_freq
        turns = (np.where(used[:, None], turn(angle), np.nan) for turn in (np.cos, np.sin))
        return Rotation(*(self._there(turn.astype(np.float32)) for turn in turns))

    @staticmethod
    def _lines(runs: Iterable[int], padding: Iterable[int]) -> list[int | None]:
        """The batch's rows in order: slots, and None for empty ones."""
        lines: list[int | None] = list(runs)
        for index in padding:
            lines.insert(index, None)
        return lines

    def _complete(self, handle: int) -> None:
        if not self.stories[handle].pending:
            self.state.complete_prefill(handle)
            self.stories[handle].live = True

    def _chunk_of(self, taken: dict[int, range], lines: list[int | None]) -> Batch:
        if len(lines) == 1:
            [(handle, positions)] = taken.items()
            return self.state.prefill_batch(handle, positions)
        q_len = max(map(len, taken.values()))
        slots = np.full((len(lines), q_len), -1, np.int32)
        positions = np.zeros_like(slots)
        for line, handle in enumerate(lines):
            if handle is not None:
                count = len(taken[handle])
                slots[line, :count], positions[line, :count] = self.row(handle), taken[handle]
        flat = [self._there(part.ravel()) for part in (slots, positions)]
        return Batch(*flat, torch.zeros_like(flat[0]), q_len, self.state, prefill=True)

    def _grow(self, story: Story, run: int, kept: int) -> None:
        """A run was written, and its first tokens are kept."""
        end, length = story.length + run, story.length + kept
        raised, story.high = end > story.high, max(story.high, end)
        story.go_back(length)
        story.promised = max(story.floor, length - self.k, 0) if raised and kept else None

    def _attend(self, batch: Batch, handles: list[int]) -> dict[int, int]:
        """Absorb a batch in every layer and compare all that comes of it; tokens by slot."""
        by_row = {self.row(handle): handle for handle in handles}
        owners = [by_row.get(slot) for slot in batch.slots.tolist()]
        absorbed: list[Absorbed | None] = []
        for owner, position in zip(owners, batch.positions.tolist(), strict=True):
            absorbed.append(None if owner is None else self._draw(self.stories[owner], position))
        tokens = {h: [t for t, owner in enumerate(owners) if owner == h] for h in handles}
        self.seen.outputs |= {handle: [] for handle in handles}
        for index in range(len(self.layers)):
            out = self._attend_layer(index, batch, absorbed)
            for handle in handles:
                self.seen.outputs[handle].append(out[tokens[handle]])
        return {handle: len(tokens[handle]) for handle in handles}

    def _draw(self, story: Story, position: int) -> Absorbed:
        tokens: list[Token] = []
        outputs: list[np.ndarray | None] = []
        for schema, history in zip(self.schemas, story.histories, strict=True):
            assert len(history) == position, "a token at a position that is not its story's next"
            tokens.append(random_token(story.vectors, history.params, self.rounding))
            history.append(tokens[-1])
            # Past the answer's budget there are no blocks, and a draft is never taken.
            known = position < story.limit - 1 and not self._ambiguous(schema, history)
            outputs.append(history.output() if known else None)
        return Absorbed(tokens, outputs)

    def _ambiguous(self, schema: LayerCacheSchema, history: Layer) -> bool:
        """Whether rounding decides which entries are selected."""
        if schema.indexer is None or len(history.entries()) <= schema.indexer.top_k:
            return False
        scores = np.sort(history.scores())[::-1]
        last, next_one = scores[schema.indexer.top_k - 1 :][:2]
        gap = SCORE_GAP[schema.indexer.row_format] * np.abs(scores).max()
        close = bool(0 < last - next_one < gap)
        self.seen.ambiguous += close
        return close

    def _attend_layer(self, index: int, batch: Batch, absorbed: list[Absorbed | None]) -> Tensor:
        layer, params = self.layers[index], self.params[index]
        query, inputs = self._inputs(index, batch, absorbed)
        before = [part.clone() for part, _ in self._places(layer, batch)]
        out = layer.attend(
            query,
            inputs,
            batch,
            scale=params.norm_weight.shape[0] ** -0.5,
            sinks=self._there(params.sink),
        )
        for old, (new, written) in zip(before, self._places(layer, batch), strict=True):
            _check_writes(old, new, written)
        self._compare(self.schemas[index], out, absorbed)
        return out

    def _compare(
        self, schema: LayerCacheSchema, out: Tensor, absorbed: list[Absorbed | None]
    ) -> None:
        index = self.schemas.index(schema)
        for got, token in zip(out.float().cpu().numpy(), absorbed, strict=True):
            if token is None:
                assert (got == 0).all(), "padding gave something else than zeros"
                continue
            wanted = token.outputs[index]
            if wanted is not None:
                error = float(np.sqrt(np.square(got - wanted).mean()))
                assert error <= OUTPUT_ERROR[schema.row_format], "a read was wrong"
                self.seen.errors.append(error)

    def _inputs(
        self, index: int, batch: Batch, absorbed: list[Absorbed | None]
    ) -> tuple[Tensor, EntryInputs]:
        """What the layer is given; NaN wherever it must not look."""
        params, schema = self.params[index], self.schemas[index]
        given: dict[str, Tensor] = {}
        for name, shape in params.shapes.items():
            if shape is not None:
                nothing = np.full(shape, np.nan, np.float32)
                rows = [nothing if a is None else getattr(a.tokens[index], name) for a in absorbed]
                dtype = self.dtype if name in ("q", "kv", "index_q") else torch.float32
                given[name] = self._there(np.stack(rows)).to(dtype)
        real, positions = (batch.slots >= 0).cpu().numpy(), batch.positions.cpu().numpy()
        m = schema.compression
        compressor = indexer = block_rotation = None
        if params.compressor is not None:
            completes = real & ((positions + 1) % m == 0)
            block_rotation = self._rotation(params.inv_freq, positions + 1 - m, completes)
            weights = (params.compressor.bias, params.compressor.norm_weight)
            compressor = CompressorInputs(given["c"], given["z"], *map(self._there, weights))
        if params.indexer is not None:
            keys = params.indexer.compressor
            weights = (keys.bias, keys.norm_weight)
            indexer = IndexInputs(
                given["index_q"],
                given["index_weights"],
                CompressorInputs(given["index_c"], given["index_z"], *map(self._there, weights)),
            )
        return given["q"], EntryInputs(
            given["kv"],
            self._there(params.norm_weight),
            self._rotation(params.inv_freq, positions, real),
            block_rotation,
            compressor,
            indexer,
            params.eps,
        )

    def _places(self, layer: EntryLayer, batch: Batch) -> list[tuple[Tensor, list[tuple]]]:
        """Every tensor of a layer by rows, and the rows of it that the batch may write."""
        cache, m = layer.cache, layer.schema.compression
        pairs = zip(batch.slots.tolist(), batch.positions.tolist(), strict=True)
        tokens = [(slot, position) for slot, position in pairs if slot >= 0]
        tails = [part for tail in (cache.tail, cache.index_tail) if tail for part in tail]
        places = [
            (ring, [(slot, position % ring.shape[1]) for slot, position in tokens])
            for ring in (*cache.swa.parts(), cache.swa_pos, *tails)
            if ring is not None
        ]
        for rows in (layer.entries, layer.keys):
            for part in () if rows is None else rows.parts():
                held = part.shape[1]
                completed = [(s, p // m) for s, p in tokens if (p + 1) % m == 0]
                written = [(int(layer.table[s, i // held]), i % held) for s, i in completed]
                places.append((part, written))
        return places


def _tail_rows(layer: EntryLayer) -> int:
    return 0 if layer.cache.tail_ka is None else layer.cache.tail_ka.shape[1]


def _tail_start(schema: LayerCacheSchema, length: int) -> int:
    """First position that the open block of `length` tokens reads."""
    overlap = int(schema.attn_type is AttentionType.CSA)
    return max(0, (length // schema.compression - overlap) * schema.compression)


def _bits(tensor: Tensor) -> Tensor:
    """[rows, n, .] integers that are equal where bytes are."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    whole = tensor.contiguous().view(sizes[tensor.element_size()])
    return whole.reshape(*tensor.shape[:2], -1)


def _check_writes(before: Tensor, after: Tensor, written: list[tuple[int, int]]) -> None:
    """Nothing has changed but the rows named, and scratch, which is last."""
    changed = (_bits(before) != _bits(after)).any(2)
    for place in written:
        changed[place] = False
    assert not changed[:-1].any(), "a row was written that no token of the batch owns"


def _lose(ring: Tensor, kept: range) -> None:
    """NaN in a slot's ring [R, ...], but for the rows of some positions."""
    rows = {position % ring.shape[0] for position in kept}
    lost = [row for row in range(ring.shape[0]) if row not in rows]
    if ring.dtype == torch.uint8:
        ring[lost] = NAN_BYTE
    else:
        ring[lost] = torch.nan


def _same_row(
    kind: object, rows: Rows, place: int, at: int, wanted: np.ndarray, row_format: RowFormat
) -> None:
    """A stored row is what the oracle has stored, to a code."""
    parts = Rows(*(None if part is None else part[place, at] for part in rows))
    got = kind.decode(parts).cpu().numpy()
    error = ROW_ERROR[row_format]
    assert np.allclose(got, wanted, rtol=error, atol=error / 16), "a stored row is wrong"


def _check_tails(layer: EntryLayer, history: Layer, row: int) -> None:
    """Values and gates of all positions that a block to come reads."""
    cache, params = layer.cache, history.params
    for tail, compressor, names in (
        (cache.tail, params.compressor, ("c", "z")),
        (cache.index_tail, params.indexer and params.indexer.compressor, ("index_c", "index_z")),
    ):
        if tail is None or compressor is None:
            continue
        length, m, width = len(history), compressor.compression, compressor.dim
        streams = [(tail.values, tail.gates, length // m * m, slice(-width, None))]
        if tail.previous_values is not None and tail.previous_gates is not None:
            start = _tail_start(layer.schema, length)
            streams.append((tail.previous_values, tail.previous_gates, start, slice(0, width)))
        for values, gates, start, columns in streams:
            for position in range(start, length):
                token, at = history.tokens[position], position % values.shape[1]
                c = getattr(token, names[0])
                z = getattr(token, names[1]) + compressor.bias[position % m]
                for ring, wanted in ((values, c), (gates, z)):
                    kept = compressor.tail.roundtrip(wanted[columns])
                    got = ring[row, at].float().cpu().numpy()
                    assert (got == kept).all(), "a tail row is wrong"
