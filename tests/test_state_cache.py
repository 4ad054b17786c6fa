"""StateCachePool against whole histories kept in dictionaries, and against the seed's description.

The oracle (`tests.window_oracle`) has its own e4m3, its own bf16 and its own idea of every byte.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphcache.batch import PAD_SLOT
from graphcache.errors import InvalidSlot, SchemaError
from graphcache.pool import Field, StatePool
from graphcache.rings import rewind_is_exact, rings_of
from graphcache.rows import RowFormat
from graphcache.schema import AttentionType, IndexerSchema, LayerCacheSchema
from graphcache.state_cache import StateCachePool
from tests.entry_oracle import Bf16, Fp8Token, Fp32, Model1
from tests.window_oracle import Encoded, Memory, Request, encode

WIDTH, ROPE_DIM = 24, 8
TAILS = ("tail_ka", "tail_za", "tail_kb", "tail_zb")
INDEX_TAILS = tuple(f"index_{name}" for name in TAILS)
CONTEXT = 10**6


def _schema(window: int, q: int = 1, k: int = 0) -> LayerCacheSchema:
    return LayerCacheSchema(AttentionType.SWA, window, WIDTH, ROPE_DIM, step_width=q, rewind=k)


def _compressed(attn_type: AttentionType, m: int, **options: object) -> LayerCacheSchema:
    return LayerCacheSchema(attn_type, 8, WIDTH, ROPE_DIM, compression=m, **options)


class OneRowShort(LayerCacheSchema):
    """A ring with one row fewer than the promise needs."""

    @property
    def swa_rows(self) -> int:
        return super().swa_rows - 1


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _poison(cache: StateCachePool) -> None:
    """NaN in every row of every slot, and junk in the tags."""
    cache.swa_fp8.fill_(0x7F)
    cache.swa_rope.fill_(torch.nan)
    cache.swa_inv.fill_(torch.nan)
    cache.swa_pos.fill_(123)
    cache.swa_head.fill_(77)


class Harness:
    """A cache, and beside it what it must hold and what each slot's request has seen."""

    def __init__(
        self, schema: LayerCacheSchema, slots: int, seed: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.schema, self.dtype, self.slots = schema, dtype, slots
        self.window, self.rows = schema.swa_window_size, schema.swa_rows
        self.rings = rings_of([schema], CONTEXT)
        self.cache = StateCachePool(schema, slots, "cpu")
        self.random = np.random.default_rng(seed)
        self.live: dict[int, Request] = {}
        self.memory = Memory(slots + 1, self.rows, WIDTH, ROPE_DIM)
        self.heads = np.zeros(slots + 1, np.int32)
        _poison(self.cache)
        for mine, name in ((self.memory.fp8, "fp8"), (self.memory.rope, "rope")):
            mine[:] = self._bits(name)
        self.memory.inv[:], self.memory.pos[:], self.heads[:] = np.nan, 123, 77

    def entries(self, count: int) -> torch.Tensor:
        scale = 10.0 ** self.random.integers(-6, 4, (count, 1))
        values = self.random.standard_normal((count, WIDTH)) * scale
        values[self.random.random((count, WIDTH)) < 0.1] = 0
        return torch.from_numpy(values.astype(np.float32)).to(self.dtype)

    def admit(self, slot: int, floor: int = 0) -> None:
        """`floor` > 0: restored from a minimal checkpoint, which keeps W - 1 rows."""
        self.cache.reset_slot(slot)
        self.memory.pos[slot], self.heads[slot] = -1, 0
        request = self.live[slot] = Request()
        if floor:
            first = max(0, floor - (self.window - 1))
            kept = [self._encode(entry) for entry in self.entries(floor - first)]
            request.history = dict(enumerate(kept, first))
            if kept:
                entries = torch.from_numpy(np.stack([row.decode() for row in kept]))
                self._append(slot, first, entries)
            request.length = request.high = request.floor = floor
            self._set_length(slot)

    def step(self, runs: list[tuple[int, int, int]], q_len: int, padding: list[int]) -> None:
        """Runs of (slot, tokens, accepted), a row each; `padding` are indices of empty rows."""
        rows: list[tuple[int, int, int] | None] = list(runs)
        for index in padding:
            rows.insert(index, None)
        total = len(rows) * q_len
        entries = self.entries(total)
        slots, positions = [PAD_SLOT] * total, [0] * total
        for index, run in enumerate(rows):
            for column in range(q_len):
                token = index * q_len + column
                if run and column < run[1]:
                    slots[token] = run[0]
                    positions[token] = self.live[run[0]].length + column
                else:
                    entries[token] = torch.nan
        self.cache.append(entries, _ints(slots), _ints(positions), q_len)
        for slot, position, entry in zip(slots, positions, entries, strict=True):
            if slot >= 0:
                row = self._encode(entry)
                self.live[slot].history[position] = row
                self.memory.write(slot, position, row)
        self.check_memory()
        self.check_reads(slots, positions)
        for slot, tokens, accepted in runs:
            self._advance(slot, tokens, accepted)

    def chunk(self, slot: int, tokens: int) -> None:
        """A prefill chunk: takes its own rows from its input, so nothing is read here."""
        entries = self.entries(tokens)
        request = self.live[slot]
        rows = [self._encode(entry) for entry in entries]
        request.history |= dict(enumerate(rows, request.length))
        self._append(slot, request.length, entries)
        self._advance(slot, tokens, tokens)
        self.check_memory()

    def rewind(self, slot: int, length: int) -> bool:
        """Granted or not by the rule; a promise must be granted."""
        request = self.live[slot]
        granted = rewind_is_exact(length, request.high, request.floor, self.rings)
        if request.promised is not None and length >= request.promised:
            assert granted, "a promised rewind was refused"
        if granted:
            request.length, request.promised = length, None
            self._forget_from(request, length)
            self._set_length(slot)
            self.check_needed(slot)
        return granted

    def fork(self, source: int, target: int) -> None:
        self.cache.pool.copy_row(source, target)
        self.live[target] = self.live[source].copy()
        self.memory.copy_slot(source, target)
        self.heads[target] = self.heads[source]

    def check_memory(self) -> None:
        """Every byte of every slot but scratch: owned rows changed, and nothing else did."""
        real = slice(0, self.slots)
        assert (self._bits("fp8")[real] == self.memory.fp8[real]).all()
        assert (self._bits("rope")[real] == self.memory.rope[real]).all()
        assert np.array_equal(self._bits("inv")[real], self.memory.inv[real], equal_nan=True)
        assert (self._bits("pos")[real] == self.memory.pos[real]).all()
        assert (self.cache.swa_head.numpy()[real] == self.heads[real]).all()

    def check_reads(self, slots: list[int], positions: list[int]) -> None:
        entries, valid = self.cache.read_window(_ints(slots), _ints(positions))
        assert entries.shape == (len(slots), self.window, WIDTH)
        assert entries.isfinite().all()
        for token, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            for column in range(self.window):
                wanted = position - self.window + 1 + column
                seen = slot >= 0 and wanted >= 0
                assert valid[token, column].item() == seen
                expected = self.live[slot].history[wanted].decode() if seen else np.zeros(WIDTH)
                assert (entries[token, column].numpy() == expected).all(), "a read was wrong"
                if seen:
                    # The stored tag says the same as arithmetic does.
                    assert self.cache.swa_pos[slot, wanted % self.rows] == wanted

    def check_needed(self, slot: int) -> None:
        """What the next token will look back at."""
        request = self.live[slot]
        if request.length == 0 or self.window == 1:
            return
        entries, _ = self.cache.read_window(_ints([slot]), _ints([request.length - 1]))
        for wanted in range(max(0, request.length - self.window + 1), request.length):
            column = wanted - request.length + self.window
            expected = request.history[wanted].decode()
            assert (entries[0, column].numpy() == expected).all(), "a read was wrong"

    def _advance(self, slot: int, tokens: int, accepted: int) -> None:
        request = self.live[slot]
        end = request.length + tokens
        request.length += accepted
        raised, request.high = end > request.high, max(request.high, end)
        if raised and accepted:
            request.promised = max(request.floor, request.length - self.schema.rewind)
        else:
            request.promised = None
        self._forget_from(request, request.length)
        self._set_length(slot)
        self.check_needed(slot)

    def _append(self, slot: int, first: int, entries: torch.Tensor) -> None:
        count = len(entries)
        positions = _ints(list(range(first, first + count)))
        self.cache.append(entries, _ints([slot] * count), positions, count)
        self.memory.write_run(slot, first, [self._encode(entry) for entry in entries])

    def _set_length(self, slot: int) -> None:
        length = self.live[slot].length
        self.cache.set_length(_ints([PAD_SLOT, slot]), _ints([5, length]))
        self.heads[slot] = length % self.rows

    @staticmethod
    def _forget_from(request: Request, length: int) -> None:
        for position in [p for p in request.history if p >= length]:
            del request.history[position]

    @staticmethod
    def _encode(entry: torch.Tensor) -> Encoded:
        return encode(entry.float().numpy(), ROPE_DIM)

    def _bits(self, name: str) -> np.ndarray:
        tensor = getattr(self.cache, f"swa_{name}")
        return (tensor.view(torch.uint16) if name == "rope" else tensor).numpy()


class AnyHistory(RuleBasedStateMachine):
    """Requests come, step, are rewound, forked and go, in any order; slots are never wiped."""

    @initialize(
        window=st.sampled_from([1, 3, 5, 8, 16]),
        q=st.integers(1, 4),
        k=st.integers(0, 5),
        slots=st.integers(2, 4),
        seed=st.integers(0, 999),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def start(self, window, q, k, slots, seed, dtype) -> None:
        self.q = q
        self.harness = Harness(_schema(window, q, k), slots, seed, dtype)
        self.harness.admit(0)

    def _slot(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.harness.live)))

    def _free(self) -> list[int]:
        return [s for s in range(self.harness.slots) if s not in self.harness.live]

    @precondition(lambda self: self._free())
    @rule(data=st.data(), floor=st.sampled_from([0, 0, 0, 2, 37]))
    def admit(self, data, floor) -> None:
        self.harness.admit(data.draw(st.sampled_from(self._free())), floor)

    @precondition(lambda self: len(self.harness.live) > 1)
    @rule(data=st.data())
    def retire(self, data) -> None:
        del self.harness.live[self._slot(data)]

    @rule(data=st.data())
    def step(self, data) -> None:
        order = data.draw(st.permutations(sorted(self.harness.live)))
        order = order[: data.draw(st.integers(1, len(order)))]
        q_len = data.draw(st.integers(1, self.q))
        runs = []
        for slot in order:
            tokens = data.draw(st.integers(1, q_len))
            runs.append((slot, tokens, data.draw(st.integers(0, tokens))))
        padding = data.draw(st.lists(st.integers(0, len(runs)), max_size=2))
        self.harness.step(runs, q_len, padding)

    @rule(data=st.data(), times=st.integers(1, 10))
    def plain_steps(self, data, times) -> None:
        slot = self._slot(data)
        for _ in range(times):
            self.harness.step([(slot, 1, 1)], 1, [])

    @rule(data=st.data(), tokens=st.integers(1, 40))
    def chunk(self, data, tokens) -> None:
        self.harness.chunk(self._slot(data), tokens)

    @rule(data=st.data(), back=st.integers(0, 12))
    def rewind(self, data, back) -> None:
        slot = self._slot(data)
        self.harness.rewind(slot, max(0, self.harness.live[slot].length - back))

    @rule(data=st.data(), back=st.integers(0, 5))
    def rewind_as_promised(self, data, back) -> None:
        slot = self._slot(data)
        request = self.harness.live[slot]
        if request.promised is not None:
            assert self.harness.rewind(slot, max(request.promised, request.length - back))

    @precondition(lambda self: self._free())
    @rule(data=st.data())
    def fork(self, data) -> None:
        self.harness.fork(self._slot(data), data.draw(st.sampled_from(self._free())))

    @invariant()
    def memory_is_as_it_must_be(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check_memory()


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    max_examples=150,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("window", [1, 3, 5, 8, 16])
def test_long_runs_wrap_many_times(window: int) -> None:
    rng = random.Random(window)
    for q, k in itertools.product((1, 2, 4), (0, 2, 5)):
        harness = Harness(_schema(window, q, k), 2, seed=window)
        harness.admit(1)
        while harness.live[1].length < 2 * harness.rows + 5:
            tokens = rng.randint(1, q)
            harness.step([(1, tokens, rng.randint(1, tokens))], q, [0])
            if rng.random() < 0.2 and harness.live[1].promised is not None:
                harness.rewind(1, harness.live[1].promised)


def _grow(harness: Harness, length: int) -> None:
    harness.admit(0)
    for _ in range(length):
        harness.step([(0, 1, 1)], 1, [])


@pytest.mark.parametrize(
    ("window", "q", "k"), list(itertools.product([3, 5, 8], [1, 2, 4], [0, 1, 2, 5]))
)
def test_one_row_fewer_breaks_a_read_or_a_promise(window: int, q: int, k: int) -> None:
    """The same widest step and the same promised rewind: right with R rows, not with R - 1."""

    def last_step_and_rewind(schema: LayerCacheSchema) -> None:
        harness = Harness(schema, 1, seed=0)
        _grow(harness, 2 * window + 6)
        harness.step([(0, q, 1)], q, [])
        assert harness.rewind(0, harness.live[0].length - k)
        harness.step([(0, 1, 1)], 1, [])

    last_step_and_rewind(_schema(window, q, k))
    short = OneRowShort(AttentionType.SWA, window, WIDTH, ROPE_DIM, step_width=q, rewind=k)
    assert short.swa_rows == _schema(window, q, k).swa_rows - 1
    what = "a read was wrong" if k <= 1 else "a promised rewind was refused"
    with pytest.raises(AssertionError, match=what):
        last_step_and_rewind(short)


def test_the_refusal_that_a_short_ring_forces_is_right() -> None:
    """W=8, q=2, k=4: with R - 1 rows the promised rewind, done all the same, reads a draft."""
    short = OneRowShort(AttentionType.SWA, 8, WIDTH, ROPE_DIM, step_width=2, rewind=4)
    harness = Harness(short, 1, seed=0)
    _grow(harness, 30)
    harness.step([(0, 2, 1)], 2, [])
    request = harness.live[0]
    request.length -= 4
    with pytest.raises(AssertionError, match="a read was wrong"):
        harness.check_needed(0)


def test_batch_of_eight_then_five_leaves_the_departed_alone() -> None:
    harness = Harness(_schema(8), 8, seed=3)
    for slot in range(8):
        harness.admit(slot)
    for _ in range(11):
        harness.step([(slot, 1, 1) for slot in range(8)], 1, [])
    departed = (1, 4, 7)
    before = {s: harness.cache.pool.arena[s].clone() for s in departed}
    for slot in departed:
        del harness.live[slot]
    for _ in range(11):
        harness.step([(slot, 1, 1) for slot in sorted(harness.live)], 1, [5, 5, 5])
    for slot in departed:
        assert torch.equal(harness.cache.pool.arena[slot], before[slot])


def test_a_batch_of_padding_alone_changes_no_slot() -> None:
    """All slots live, the last one too: a raw -1 would be its row."""
    cache = StateCachePool(_schema(4), 3, "cpu")
    cache.pool.arena.random_(0, 256)
    before = cache.pool.arena.clone()
    padding = _ints([PAD_SLOT] * 6)
    for q_len in (1, 2, 3, 6):
        entries = torch.full((6, WIDTH), torch.nan)
        cache.append(entries, padding, _ints([0] * 6), q_len)
        cache.set_length(padding, _ints([9] * 6))
    assert torch.equal(cache.pool.arena[:3], before[:3])
    assert cache.swa_head[3] == 0
    entries, valid = cache.read_window(padding, _ints([0] * 6))
    assert not valid.any() and not entries.any()


def test_a_reused_slot_reads_as_a_fresh_one() -> None:
    used, fresh = (Harness(_schema(8, 3, 2), 2, seed=7) for _ in range(2))
    used.admit(0)
    used.chunk(0, 29)
    used.random = np.random.default_rng(99)
    fresh.random = np.random.default_rng(99)
    for harness in (used, fresh):
        harness.admit(0)
        for _ in range(12):
            harness.step([(0, 2, 1)], 3, [])
    positions = _ints(list(range(5, 12)))
    slots = _ints([0] * 7)
    both = [harness.cache.read_window(slots, positions) for harness in (used, fresh)]
    assert torch.equal(both[0][0], both[1][0]) and torch.equal(both[0][1], both[1][1])


def test_chunks_leave_what_single_steps_leave() -> None:
    entries = torch.randn(50, WIDTH)
    whole, single = (StateCachePool(_schema(8, 2, 3), 2, "cpu") for _ in range(2))
    for start, stop in ((0, 3), (3, 40), (40, 50)):
        count = stop - start
        positions = _ints(list(range(start, stop)))
        whole.append(entries[start:stop], _ints([1] * count), positions, count)
    for position in range(50):
        single.append(entries[position : position + 1], _ints([1]), _ints([position]))
    assert torch.equal(whole.pool.arena, single.pool.arena)


def test_the_seeds_tensors() -> None:
    schema = LayerCacheSchema(AttentionType.SWA, 128, 512, 64)
    cache = StateCachePool(schema, 3, "cpu")
    expected = {
        "swa_fp8": ((4, 128, 448), torch.uint8, 0),
        "swa_rope": ((4, 128, 64), torch.bfloat16, 0),
        "swa_inv": ((4, 128), torch.float32, 1),
        "swa_pos": ((4, 128), torch.int32, -1),
        "swa_head": ((4,), torch.int32, 0),
    }
    for name, (shape, dtype, start) in expected.items():
        tensor = getattr(cache, name)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert (tensor == start).all()
    for name in ("tail_ka", "tail_za", "tail_kb", "tail_zb", "tail_len"):
        assert getattr(cache, name) is None
    assert (cache.window, cache.rows, cache.max_requests) == (128, 128, 3)
    assert cache.memory_bytes() == 4 * (128 * (448 + 2 * 64 + 4 + 4) + 4)


def test_reset_slot_resets_tags_and_head_of_that_slot_only() -> None:
    cache = StateCachePool(_schema(8), 3, "cpu")
    _poison(cache)
    before = cache.pool.arena.clone()
    cache.reset_slot(1)
    assert (cache.swa_pos[1] == -1).all() and cache.swa_head[1] == 0
    assert torch.equal(cache.pool.arena[[0, 2, 3]], before[[0, 2, 3]])
    assert (cache.swa_fp8[1] == 0x7F).all() and cache.swa_inv[1].isnan().all()


@pytest.mark.parametrize("slot", [-1, 3, 4, -4, 1.0, "1", None, True, torch.tensor(1)])
def test_reset_slot_refuses_what_is_no_slot(slot: object) -> None:
    cache = StateCachePool(_schema(8), 3, "cpu")
    cache.pool.arena.fill_(17)
    with pytest.raises(InvalidSlot):
        cache.reset_slot(slot)
    assert (cache.pool.arena == 17).all()


def _tails(cache: StateCachePool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the tails that there are."""
    rings = {name: getattr(cache, name) for name in TAILS + INDEX_TAILS}
    return {name: (tuple(t.shape), t.dtype) for name, t in rings.items() if t is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tails_of_each_kind_of_layer(dtype: torch.dtype) -> None:
    """HCA: the current stream; CSA: both, with rows for the block before; an indexer: as many."""
    HCA, CSA = AttentionType.HCA, AttentionType.CSA
    options = {"tail_dtype": dtype, "step_width": 2, "rewind": 3}
    indexer = IndexerSchema(2, 16, 4)
    hca, csa, selecting = (
        StateCachePool(schema, 3, "cpu")
        for schema in (
            _compressed(HCA, 6, **options),
            _compressed(CSA, 4, **options),
            _compressed(CSA, 4, indexer=indexer, **options),
        )
    )
    hca_rows, csa_rows = 6 + 1 + 2, 8 + 1 + 2
    assert _tails(hca) == dict.fromkeys(TAILS[:2], ((4, hca_rows, WIDTH), dtype))
    assert _tails(csa) == dict.fromkeys(TAILS, ((4, csa_rows, WIDTH), dtype))
    assert _tails(selecting) == _tails(csa) | dict.fromkeys(INDEX_TAILS, ((4, csa_rows, 16), dtype))
    for cache in (hca, csa, selecting):
        assert cache.tail_len.shape == (4,) and cache.tail_len.dtype == torch.int32
        for name in [*_tails(cache), "tail_len"]:
            assert not getattr(cache, name).any()


def test_tails_are_float32_unless_asked_otherwise() -> None:
    cache = StateCachePool(_compressed(AttentionType.HCA, 4), 3, "cpu")
    assert cache.tail_ka.dtype == cache.tail_za.dtype == torch.float32


def test_tails_come_as_the_parts_that_absorb_takes() -> None:
    schema = _compressed(AttentionType.CSA, 4, indexer=IndexerSchema(2, 16, 4))
    cache = StateCachePool(schema, 3, "cpu")
    for parts, names in ((cache.tail, TAILS), (cache.index_tail, INDEX_TAILS)):
        assert [part.data_ptr() for part in parts] == [
            getattr(cache, name).data_ptr() for name in names
        ]
    hca = StateCachePool(_compressed(AttentionType.HCA, 4), 3, "cpu")
    assert hca.tail.previous_values is None and hca.tail.previous_gates is None
    assert hca.index_tail is None
    swa = StateCachePool(_schema(8), 3, "cpu")
    assert swa.tail is None and swa.index_tail is None
    assert swa.window_parts.rows is swa.swa and swa.window_parts.positions is swa.swa_pos


def test_reset_slot_ends_the_open_block_and_wipes_no_row() -> None:
    cache = StateCachePool(_compressed(AttentionType.CSA, 4), 3, "cpu")
    cache.pool.arena.fill_(5)
    before = cache.pool.arena.clone()
    cache.reset_slot(1)
    assert cache.tail_len[1] == 0 and cache.swa_head[1] == 0 and (cache.swa_pos[1] == -1).all()
    for name in ("tail_len", "swa_head", "swa_pos"):
        cache.pool[name][1].fill_(0x05050505)
    assert torch.equal(cache.pool.arena, before)


@pytest.mark.parametrize(
    ("attn_type", "m", "indexer", "tail_bytes"),
    [
        (AttentionType.HCA, 6, None, 6 * 2 * WIDTH * 4),
        (AttentionType.CSA, 4, None, 8 * 4 * WIDTH * 4),
        (AttentionType.CSA, 4, IndexerSchema(2, 16, 4), 8 * 4 * (WIDTH + 16) * 4),
    ],
)
def test_memory_bytes_count_the_tails(attn_type, m, indexer, tail_bytes) -> None:
    schema = _compressed(attn_type, m, indexer=indexer)
    window = 8 * (WIDTH - ROPE_DIM + 2 * ROPE_DIM + 4 + 4)
    assert StateCachePool(schema, 3, "cpu").memory_bytes() == 4 * (window + tail_bytes + 4 + 4)


def test_moduli_are_of_head_and_tail_length() -> None:
    assert StateCachePool.moduli(_schema(8, 2)) == (9,)
    for attn_type in (AttentionType.CSA, AttentionType.HCA):
        assert StateCachePool.moduli(_compressed(attn_type, 4, step_width=3)) == (10, 4)


def test_set_length_sets_the_tail_length_too() -> None:
    cache = StateCachePool(_compressed(AttentionType.CSA, 4, step_width=3), 3, "cpu")
    cache.tail_len.fill_(77)
    cache.swa_head.fill_(77)
    cache.set_length(_ints([2, PAD_SLOT, 0]), _ints([23, 5, 8]))
    assert cache.swa_head.tolist() == [8, 77, 3, 0]
    assert cache.tail_len.tolist() == [0, 77, 3, 0]


def test_append_leaves_the_tail_alone() -> None:
    cache = StateCachePool(_compressed(AttentionType.CSA, 4), 3, "cpu")
    cache.append(torch.randn(3, WIDTH), _ints([0, 1, 2]), _ints([3, 4, 5]))
    assert (cache.swa_pos >= 0).sum() == 3
    assert not any(getattr(cache, name).any() for name in (*TAILS, "tail_len", "swa_head"))


def test_heads_may_be_columns_of_scalars_kept_elsewhere() -> None:
    schema = _compressed(AttentionType.HCA, 4)
    scalars = torch.full((4, 5), 9, dtype=torch.int32)
    pool = StatePool(StateCachePool.fields(schema, "a.", heads=False), 3, "cpu")
    assert not {"a.swa_head", "a.tail_len"} & set(pool.fields)
    cache = StateCachePool(schema, 3, pool=pool, prefix="a.", heads=scalars[:, 1:3])
    cache.set_length(_ints([2]), _ints([14]))
    assert scalars[2].tolist() == [9, 14 % 8, 14 % 4, 9, 9]
    cache.reset_slot(2)
    assert scalars[2].tolist() == [9, 0, 0, 9, 9]
    assert (scalars[[0, 1, 3]] == 9).all()


def test_heads_must_be_as_many_as_the_layer_has() -> None:
    for schema, count in ((_schema(8), 1), (_compressed(AttentionType.HCA, 4), 2)):
        pool = StatePool(StateCachePool.fields(schema, heads=False), 3, "cpu")
        for wrong in {0, 1, 2, 3} - {count}:
            heads = torch.zeros(4, wrong, dtype=torch.int32)
            with pytest.raises(SchemaError, match=rf"heads must be \[4, {count}\]"):
                StateCachePool(schema, 3, pool=pool, heads=heads)


FORMATS = {
    RowFormat.FP8: (Fp8Token(64), {"swa_fp8", "swa_rope", "swa_inv"}),
    RowFormat.MODEL1: (Model1(64), {"swa_packed"}),
    RowFormat.BF16: (Bf16(), {"swa"}),
    RowFormat.FP32: (Fp32(), {"swa"}),
}


@pytest.mark.parametrize("row_format", list(RowFormat))
def test_a_window_of_every_format_reads_back_what_the_format_keeps(row_format: RowFormat) -> None:
    oracle, names = FORMATS[row_format]
    schema = LayerCacheSchema(
        AttentionType.SWA, 3, 512, 64, step_width=2, rewind=2, row_format=row_format
    )
    cache = StateCachePool(schema, 3, "cpu")
    assert set(cache.pool.fields) == names | {"swa_pos", "swa_head"}
    seeds = (cache.swa_fp8, cache.swa_rope, cache.swa_inv)
    assert all((part is None) == (row_format is not RowFormat.FP8) for part in seeds)
    cache.pool.arena.fill_(255)
    rng = np.random.default_rng(11)
    history: dict[int, list[np.ndarray]] = {1: [], 2: []}
    slots = _ints([2, 2, PAD_SLOT, PAD_SLOT, 1, PAD_SLOT])
    counts = {2: 2, 1: 1}
    for _ in range(5):
        entries = rng.standard_normal((6, 512)) * 10.0 ** rng.integers(-5, 4, (6, 1))
        entries = torch.from_numpy(entries.astype(np.float32))
        entries[slots < 0] = torch.nan
        positions = _ints([len(history[2]), len(history[2]) + 1, 0, 0, len(history[1]), 0])
        cache.append(entries, slots, positions, 2)
        for slot, first in ((2, 0), (1, 4)):
            rows = entries[first : first + counts[slot]].numpy()
            history[slot] += [oracle.roundtrip(row) for row in rows]
        read, valid = cache.read_window(slots, positions)
        for token, (slot, position) in enumerate(
            zip(slots.tolist(), positions.tolist(), strict=True)
        ):
            for column in range(3):
                wanted = position - 2 + column
                seen = slot >= 0 and wanted >= 0
                assert valid[token, column].item() == seen
                expected = history[slot][wanted] if seen else np.zeros(512)
                assert (read[token, column].numpy() == expected).all()
    # Slot 0 never took part.
    assert (cache.pool.arena[0] == 255).all()


def _shared(max_requests: int = 3) -> tuple[StatePool, list[StateCachePool]]:
    """Two layers of different windows in one arena, their heads columns of one field."""
    schemas = [_schema(8), _schema(5, 2)]
    fields = [Field("heads", (2,), torch.int32, reset=True), Field("other", (9,), torch.uint8)]
    for index, schema in enumerate(schemas):
        fields += StateCachePool.fields(schema, f"layer{index}.", heads=False)
    pool = StatePool(fields, max_requests, "cpu")
    return pool, [
        StateCachePool(
            schema,
            max_requests,
            pool=pool,
            prefix=f"layer{index}.",
            heads=pool["heads"][:, index : index + 1],
        )
        for index, schema in enumerate(schemas)
    ]


def test_views_of_a_shared_arena_behave_as_a_pool_alone() -> None:
    pool, layers = _shared()
    pool.arena.random_(0, 256)
    for index, layer in enumerate(layers):
        alone = StateCachePool(layer.schema, 3, "cpu")
        entries = torch.randn(12, WIDTH)
        for cache in (layer, alone):
            cache.reset_slot(2)
            cache.append(entries, _ints([2] * 12), _ints(list(range(12))), 12)
            cache.set_length(_ints([2]), _ints([12]))
        assert pool["heads"][2, index] == 12 % layer.rows == alone.swa_head[2]
        reads = [c.read_window(_ints([2]), _ints([11])) for c in (layer, alone)]
        assert torch.equal(reads[0][0], reads[1][0]) and reads[0][1].all()
        assert layer.memory_bytes() == alone.memory_bytes()
        assert layer.swa_fp8.data_ptr() != alone.swa_fp8.data_ptr()
        assert layer.pool is pool


def test_layers_of_a_shared_arena_do_not_touch_each_other() -> None:
    pool, (first, second) = _shared()
    pool.arena.random_(0, 256)
    names = [n for n in pool.fields if not n.startswith("layer0.")]
    before = {name: pool[name].clone() for name in names}
    first.append(torch.randn(3, WIDTH), _ints([0, 1, 2]), _ints([5, 6, 7]))
    first.reset_slot(1)
    assert pool["heads"][1, 0] == 0
    before["heads"][1, 0] = 0
    for name in names:
        a, b = pool[name].contiguous(), before[name].contiguous()
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert second.rows == 6


def test_reset_row_of_the_arena_is_reset_slot_of_every_layer() -> None:
    pool, layers = _shared()
    pool.arena.fill_(5)
    pool.reset_row(1)
    for layer in layers:
        assert (layer.swa_pos[1] == -1).all() and layer.swa_head[1] == 0
        assert (layer.swa_fp8[1] == 5).all()


@pytest.mark.parametrize("m", [0, 4])
def test_reset_row_of_a_pool_alone_is_reset_slot(m: int) -> None:
    schema = _compressed(AttentionType.CSA, m) if m else _schema(8)
    one, other = (StateCachePool(schema, 3, "cpu") for _ in range(2))
    for cache in (one, other):
        cache.pool.arena.fill_(5)
    one.pool.reset_row(1)
    other.reset_slot(1)
    for name in one.pool.fields:
        assert torch.equal(one.pool[name], other.pool[name])


def test_a_pool_that_does_not_fit_is_refused() -> None:
    schema = _schema(8)
    pool = StatePool(StateCachePool.fields(schema, "a."), 3, "cpu")
    StateCachePool(schema, 3, pool=pool, prefix="a.")
    with pytest.raises(SchemaError, match="3 rows, not one for each of 4"):
        StateCachePool(schema, 4, pool=pool, prefix="a.")
    with pytest.raises(SchemaError, match=r"b\.swa_fp8"):
        StateCachePool(schema, 3, pool=pool, prefix="b.")
    with pytest.raises(SchemaError, match=r"a\.swa_fp8"):
        StateCachePool(_schema(8, 2), 3, pool=pool, prefix="a.")
    for heads in (
        torch.zeros(3, 1, dtype=torch.int32),
        torch.zeros(4, 1, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4, 1, dtype=torch.int32, device="meta"),
    ):
        with pytest.raises(SchemaError, match="heads must be"):
            StateCachePool(schema, 3, pool=pool, prefix="a.", heads=heads)
    with pytest.raises(SchemaError, match="at least one row"):
        StateCachePool(schema, 0, "cpu")


def test_entries_in_float64_are_refused_before_anything_is_written() -> None:
    cache = StateCachePool(_schema(8), 3, "cpu")
    before = cache.pool.arena.clone()
    with pytest.raises(SchemaError, match="float64"):
        cache.append(torch.zeros(1, WIDTH, dtype=torch.float64), _ints([0]), _ints([0]))
    assert torch.equal(cache.pool.arena, before)


@pytest.mark.gpu
def test_a_captured_step_appends_reads_and_sets_lengths() -> None:
    """Replayed over 40 positions and other slots than at capture; the CPU runs beside it."""
    schema = _schema(8, 2)
    device, host = StateCachePool(schema, 4, "cuda"), StateCachePool(schema, 4, "cpu")
    entries = torch.randn(6, WIDTH, device="cuda")
    slots, positions = (torch.full((6,), v, dtype=torch.int32, device="cuda") for v in (-1, 0))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        device.append(entries, slots, positions, 2)
        device.set_length(slots[::2].contiguous(), positions[::2] + 1)
        return device.read_window(slots, positions)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = step()
    for start in range(40):
        order = torch.randperm(4)[:2].tolist()
        row = _ints([order[0], order[0], -1, -1, order[1], -1])
        place = _ints([start, start + 1, 0, 0, start, 0])
        values = torch.randn(6, WIDTH)
        entries.copy_(values)
        slots.copy_(row)
        positions.copy_(place)
        graph.replay()
        host.append(values, row, place, 2)
        host.set_length(row[::2].contiguous(), place[::2] + 1)
        expected = host.read_window(row, place)
        torch.cuda.synchronize()
        assert torch.equal(outputs[0].cpu(), expected[0])
        assert torch.equal(outputs[1].cpu(), expected[1])
        assert torch.equal(device.pool.arena.cpu()[:4], host.pool.arena[:4])
