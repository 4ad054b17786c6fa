"""Tails and compressed entries of absorb: reference against histories, kernel against reference.

The oracle (`tests.entry_oracle`) pools whole histories in float64 and knows no ring. Under Triton's
interpreter the kernel computes in float32, and in the packed formats entries whose every value is
exact (the interpreter's casts are wrong for others); on a GPU it runs in every format at
DeepSeek-V4's dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from graphcache.errors import SchemaError
from graphcache.ops.absorb import Compressor, Rotation, TailParts, absorb
from graphcache.rows import RowFormat, Rows
from tests.entry_oracle import Layer
from tests.kernel_build import build_for_sm90
from tests.ops.absorb_cases import (
    Layout,
    Memory,
    State,
    Step,
    captured,
    check_close,
    kernel_on_cpu,
    launch_of,
    make_step,
    run_in_interpreter,
    step_of,
)

FORMATS = list(RowFormat)
FP32, BF16, FP8, MODEL1 = RowFormat.FP32, RowFormat.BF16, RowFormat.FP8, RowFormat.MODEL1
KINDS = [(0, 1), (0, 2), (0, 4), (0, 8), (0, 6), (1, 1), (1, 2), (1, 4), (1, 8), (1, 3)]
"""Overlap and m."""


def _case(
    layout: Layout, seed: int = 0, device: str = "cpu"
) -> tuple[State, Memory, np.random.Generator]:
    state = State(layout, layout.params(seed), device)
    return state, Memory(state), np.random.default_rng(seed)


def _random_steps(
    layout: Layout,
    steps: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Memory:
    """Slots in any order with runs of 0..q tokens, rows of padding; checked after every step."""
    state, memory, rng = _case(layout, seed, device)
    q_len = layout.step_width
    for _ in range(steps):
        lengths = memory.lengths()
        runs = [
            (int(slot), lengths[slot], int(rng.integers(0, q_len + 1)))
            for slot in rng.permutation(layout.slots)[: rng.integers(1, layout.slots + 1)]
        ]
        runs.insert(int(rng.integers(0, len(runs) + 1)), (-1, 0, 0))
        step = make_step(rng, state.params, runs, q_len, dtype)
        state.absorb(step)
        memory.record(step)
        memory.check(state)
    return memory


@pytest.mark.parametrize("q_len", [1, 2, 3, 4])
@pytest.mark.parametrize(("overlap", "m"), KINDS)
def test_random_steps_leave_what_histories_say(overlap: int, m: int, q_len: int) -> None:
    layout = Layout(m, overlap, q_len, index_dim=16 * overlap, width=3 * (5 if m < 3 else 2))
    memory = _random_steps(layout, max(8, 12 * m // q_len), seed=m)
    assert max(memory.lengths()) >= 2 * m, "blocks were completed"


@pytest.mark.parametrize("tail_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row_format", FORMATS)
def test_every_row_format_and_tail(row_format: RowFormat, tail_dtype: torch.dtype) -> None:
    index_format = FP8 if row_format is MODEL1 else row_format
    layout = Layout(
        2, 1, 2, dim=512, rope_dim=64, row_format=row_format, index_dim=128,
        index_format=index_format, tail_dtype=tail_dtype, slots=3,
    )  # fmt: skip
    _random_steps(layout, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tail_dtype", [torch.float32, torch.bfloat16])
def test_projections_may_come_in_half_precision(dtype, tail_dtype) -> None:
    _random_steps(Layout(4, 1, 3, index_dim=16, tail_dtype=tail_dtype), 12, dtype=dtype)


@pytest.mark.parametrize(("overlap", "m"), KINDS)
def test_slots_change_hands_without_a_wipe_and_drafts_are_rejected(overlap: int, m: int) -> None:
    """A prompt shorter than m behind a longer one, and entries over rows of rejected drafts."""
    layout = Layout(m, overlap, 3, slots=2, width=6, block_entries=4)
    state, memory, rng = _case(layout, seed=m)
    for _ in range(60):
        for slot in range(2):
            if memory.lengths()[slot] > 3 * m + 4 or rng.random() < 0.05:
                memory.layers[slot] = Layer(state.params)
        lengths = memory.lengths()
        runs = [(slot, lengths[slot], int(rng.integers(1, 4))) for slot in range(2)]
        step = make_step(rng, state.params, runs, 3)
        state.absorb(step)
        memory.record(step)
        memory.check(state)
        for slot, first, count in runs:
            memory.layers[slot].truncate(first + int(rng.integers(0, count + 1)))


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_first_block_has_no_previous_block(overlap: int) -> None:
    """Whatever the ring holds, NaN or the block before it of an earlier request."""
    layout = Layout(4, overlap, slots=1)
    state, memory, rng = _case(layout)
    for request in range(2):
        for position in range(8):
            step = make_step(rng, state.params, [(0, position, 1)], 1)
            state.absorb(step)
            memory.record(step)
            memory.check(state)
        assert np.isfinite(state.read()["entries"][memory.place(0, 0)]).all(), request
        memory.layers[0] = Layer(state.params)


@pytest.mark.parametrize("first", [0, 3, 4, 7])
def test_a_run_that_crosses_a_boundary_emits_from_ring_and_input(first: int) -> None:
    """4 tokens at a time, a block's rows partly those of earlier steps and partly of this one."""
    layout = Layout(4, 1, 4, slots=1, index_dim=16)
    state, memory, rng = _case(layout)
    runs = [(0, 0, first)] if first else []
    for run in [*runs, (0, first, 4), (0, first + 4, 4)]:
        for start in range(run[1], run[1] + run[2], 4):
            part = (0, start, min(4, run[1] + run[2] - start))
            step = make_step(rng, state.params, [part], 4)
            state.absorb(step)
            memory.record(step)
            memory.check(state)


def test_a_step_wider_than_a_block_emits_several_entries() -> None:
    for overlap in (0, 1):
        state, memory, rng = _case(Layout(1, overlap, 4, slots=2))
        step = make_step(rng, state.params, [(1, 0, 4), (0, 0, 3)], 4)
        state.absorb(step)
        memory.record(step)
        memory.check(state)
        written = np.isfinite(state.read()["entries"]).all(-1)
        assert written.sum() == 7


@pytest.mark.parametrize("fill", [0, 170, 255])
def test_a_token_that_completes_no_block_writes_no_entry(fill: int) -> None:
    state, _, rng = _case(Layout(4, 1, 3, index_dim=16))
    for arena in state.arenas:
        arena.fill_(fill)
    step = make_step(rng, state.params, [(3, 4, 3), (1, 8, 2), (-1, 0, 0), (0, 13, 2)], 3)
    state.absorb(step)
    assert (state.blocks.arena == fill).all()
    assert (state.window.positions[[3, 1, 0]] >= 4).any(1).all()


def test_only_owned_rows_and_entries_change() -> None:
    """All bytes of all rings and blocks, but those that the batch's tokens own."""
    state, _, rng = _case(Layout(4, 1, 2, index_dim=16))
    for arena in state.arenas:
        arena.copy_(torch.from_numpy(rng.integers(0, 64, arena.shape).astype(np.uint8)))
    before = [arena.clone() for arena in state.arenas]
    step = make_step(rng, state.params, [(2, 6, 2), (-1, 0, 0), (0, 3, 1)], 2)
    state.absorb(step)
    after = [arena.clone() for arena in state.arenas]
    assert not any(map(torch.equal, before, after))
    for arena, old in zip(state.arenas, before, strict=True):
        arena.copy_(old)
    _copy_owned(state, after, [(2, 6), (2, 7), (0, 3)], [(2, 1), (0, 0)])
    assert all(map(torch.equal, state.arenas, after))


def _copy_owned(
    state: State,
    source: list[torch.Tensor],
    tokens: list[tuple[int, int]],
    entries: list[tuple[int, int]],
) -> None:
    """Take over from other arenas the rows of tokens (slot, position) and entries (slot, index)."""
    twin = State(state.layout, state.params)
    for arena, given in zip(twin.arenas, source, strict=True):
        arena.copy_(given)
    for (mine, theirs), positions in (
        (([*state.window.rows.parts(), state.window.positions],
          [*twin.window.rows.parts(), twin.window.positions]), tokens),
        (([*state.tails()[""], *state.tails()["index "]],
          [*twin.tails()[""], *twin.tails()["index "]]), tokens),
    ):  # fmt: skip
        for part, other in zip(mine, theirs, strict=True):
            for slot, position in positions:
                row = position % part.shape[1]
                part[slot, row] = other[slot, row]
    for kind in state.tails():
        for slot, index in entries:
            block, row = Memory(state).place(slot, index)
            kept = zip(state.entries(kind).parts(), twin.entries(kind).parts(), strict=True)
            for part, other in kept:
                part[block, row] = other[block, row]


@pytest.mark.parametrize("q_len", [1, 2, 6])
def test_padding_alone_changes_nothing(q_len: int) -> None:
    layout = Layout(2, 1, 6, index_dim=16)
    _pad_only(State(layout, layout.params()), q_len)


def _pad_only(state: State, q_len: int) -> None:
    rng = np.random.default_rng(0)
    for arena in state.arenas:
        arena.copy_(torch.from_numpy(rng.integers(0, 256, arena.shape).astype(np.uint8)))
    before = [arena.clone() for arena in state.arenas]
    step = make_step(rng, state.params, [(-1, 0, 0)] * (6 // q_len), q_len)
    # A padding row's position is 0; another one, which would complete a block, changes nothing.
    for position in (0, state.layout.compression - 1):
        step["positions"].fill_(position)
        state.absorb(step)
        state.absorb_chunk(step)
    assert all(map(torch.equal, state.arenas, before))


# Chunks.


def _chunks_and_steps(
    layout: Layout, chunks: list[int], before: int, device: str = "cpu"
) -> tuple[State, State, list[Rows]]:
    """The same tokens of one slot: some by single steps in both, then in chunks and one by one."""
    params = layout.params()
    whole, single = State(layout, params, device), State(layout, params, device)
    rng = np.random.default_rng(5)
    total = before + sum(chunks)
    tokens = make_step(rng, params, [(1, 0, total)], total).tokens
    asides = []
    for position in range(total):
        step = step_of(params, tokens[position : position + 1], [1], [position], 1)
        single.absorb(step)
        if position < before:
            whole.absorb(step)
    start = before
    for count in chunks:
        places = list(range(start, start + count))
        step = step_of(params, tokens[start : start + count], [1] * count, places, count)
        asides.append(whole.absorb_chunk(step))
        start += count
    return whole, single, asides


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("chunks", [[21], [1, 20], [5, 5, 11], [2, 16, 3], [13, 8]])
@pytest.mark.parametrize(("overlap", "m"), [(0, 1), (0, 4), (0, 8), (1, 1), (1, 2), (1, 4), (1, 3)])
def test_chunks_leave_what_single_steps_leave(overlap, m, chunks, before) -> None:
    layout = Layout(m, overlap, index_dim=16 * overlap, width=10)
    whole, single, _ = _chunks_and_steps(layout, chunks, before)
    assert all(map(torch.equal, whole.arenas, single.arenas))


@pytest.mark.parametrize("row_format", FORMATS)
def test_a_chunk_gives_its_window_rows_as_a_ring_would_hold_them(row_format: RowFormat) -> None:
    layout = Layout(4, 1, dim=512, rope_dim=64, row_format=row_format, window=30, width=2)
    whole, single, asides = _chunks_and_steps(layout, [9, 12], 2)
    assert all(map(torch.equal, whole.arenas, single.arenas))
    start = 2
    for rows in asides:
        for part, ring in zip(rows.parts(), single.window.rows.parts(), strict=True):
            assert torch.equal(part[0], ring[1, start : start + part.shape[1]])
        start += rows.values.shape[1]


def test_emit_and_write_are_each_alone() -> None:
    layout = Layout(2, 1, 2, index_dim=16)
    params = layout.params()
    step = make_step(np.random.default_rng(0), params, [(2, 0, 2)], 2)
    for emit, write in ((False, False), (False, True), (True, False), (True, True)):
        state = State(layout, params)
        state.absorb(step, emit=emit, write=write)
        found = state.read()
        for name, part in found.items():
            expected = emit if name.endswith("entries") else write or name == "window"
            assert np.isfinite(part).any() == expected, (name, emit, write)


# Storage.


def test_inputs_may_be_strided_views() -> None:
    """As slices of one projection are."""
    layout = Layout(2, 1, 2, index_dim=16)
    params = layout.params()
    plain, strided = State(layout, params), State(layout, params)
    step = make_step(np.random.default_rng(0), params, [(2, 0, 2), (1, 2, 2)], 2)
    plain.absorb(step)
    wide = torch.cat([step[name] for name in ("kv", "c", "z", "index_c", "index_z")], 1)
    cuts = wide.split([24, 48, 48, 32, 32], 1)
    views = dict(zip(("kv", "c", "z", "index_c", "index_z"), cuts, strict=True))
    assert not views["c"].is_contiguous()
    strided.absorb(Step(2, step.tokens, step.tensors | views))
    assert all(map(torch.equal, plain.arenas, strided.arenas))


def test_bias_and_norm_may_be_bf16() -> None:
    layout = Layout(2, 1)
    rounded = layout.params()
    compressor = rounded.compressor
    half = {
        name: torch.from_numpy(getattr(compressor, name)).bfloat16()
        for name in ("bias", "norm_weight")
    }
    compressor = replace(compressor, **{name: w.float().numpy() for name, w in half.items()})
    rounded = replace(rounded, compressor=compressor)
    state = State(layout, rounded)
    memory = Memory(state)
    for position in range(4):
        step = make_step(np.random.default_rng(position), rounded, [(0, position, 1)], 1)
        given = state.arguments(step)["compressor"]
        weights = {"bias": half["bias"], "norm": half["norm_weight"]}
        state.absorb(step, compressor=given._replace(**weights))
        memory.record(step)
        memory.check(state)


def test_a_tokens_bits_do_not_depend_on_the_batch_around_it() -> None:
    _alone_and_together(Layout(2, 1, 2, index_dim=16, tail_dtype=torch.bfloat16))


def _alone_and_together(layout: Layout, device: str = "cpu") -> None:
    params = layout.params()
    together, alone = State(layout, params, device), State(layout, params, device)
    rng = np.random.default_rng(2)
    _fill(rng, [together, alone])
    runs = [(int(s), int(rng.integers(0, 30)), layout.step_width) for s in range(layout.slots)]
    step = make_step(rng, params, [(-1, 0, 0), *runs], layout.step_width)
    before = together.blocks.arena.clone()
    together.absorb(step)
    for index in reversed(range(len(runs) + 1)):
        alone.absorb(step.row(index))
    assert all(map(torch.equal, together.arenas, alone.arenas))
    assert not torch.equal(together.blocks.arena, before)


def _fill(rng: np.random.Generator, states: list[State]) -> None:
    """The same random tails in all of them, so that any position may come next."""
    for rings in zip(*map(_rings, states), strict=True):
        values = torch.from_numpy(rng.standard_normal(rings[0].shape).astype(np.float32))
        for ring in rings:
            ring.copy_(values)


def _rings(state: State) -> list[torch.Tensor]:
    return [ring for tail in state.tails().values() for ring in tail if ring is not None]


# What is refused.


@pytest.mark.parametrize(
    ("overlap", "m", "wide"), [(0, 4, 1), (1, 4, 1), (1, 4, 3), (0, 1, 2), (1, 1, 4)]
)
def test_a_step_wider_than_the_tail_is_laid_out_for_is_refused(overlap, m, wide) -> None:
    """The window could take it: only the last rows of a longer run stay in the ring."""
    layout = Layout(m, overlap, wide, index_dim=16 * overlap)
    params = layout.params()
    state = State(layout, params)
    before = [arena.clone() for arena in state.arenas]
    step = make_step(np.random.default_rng(0), params, [(0, 0, wide + 1)], wide + 1)
    rows = (1 + overlap) * m + wide
    with pytest.raises(SchemaError, match=rf"needs {rows} rows .* step_width={wide + 1}"):
        state.absorb(step)
    assert all(map(torch.equal, state.arenas, before))
    state.absorb_chunk(step)
    state.absorb(make_step(np.random.default_rng(0), params, [(1, 0, wide)], wide))


def _with(part: str, **change: object) -> Callable[[dict], dict]:
    return lambda given: {part: given[part]._replace(**change)}


def _tail(**change: object) -> Callable[[dict], dict]:
    def changed(given: dict) -> dict:
        compressor = given["compressor"]
        return {"compressor": compressor._replace(tail=compressor.tail._replace(**change))}

    return changed


def _f(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda given: {"compressor": None}, "an index compressor goes with a compressor"),
        (lambda given: {"block_rotation": None}, "needs block_rotation"),
        (lambda given: {"block_rotation": Rotation(_f(3, 4), _f(3, 4))}, "cos and sin"),
        (lambda given: {"table": None}, "needs table"),
        (lambda given: {"table": given["table"].long()}, "needs table"),
        (lambda given: {"table": given["table"][0]}, "needs table"),
        (lambda given: {"table": given["table"].t().contiguous().t()}, "contiguous rows"),
        (_with("compressor", norm=_f(20)), "compressor.bias must be"),
        (_with("compressor", norm=_f(24, dtype=torch.int32)), "compressor.norm must be"),
        (_with("compressor", bias=_f(2, 24)), r"compressor.bias must be \[m, 48\]"),
        (_with("compressor", bias=_f(48, 2).t()), r"compressor.bias must be \[m, 48\]"),
        (_with("compressor", bias=_f(0, 48)), r"compressor.bias must be \[m, 48\]"),
        (_with("compressor", values=_f(4, 24)), r"values and gates must be \[4, 48\]"),
        (_with("compressor", gates=_f(3, 48)), r"values and gates must be \[4, 48\]"),
        (_with("compressor", gates=_f(4, 48, dtype=torch.bfloat16)), "of one dtype"),
        (_with("compressor", gates=_f(4, 50)[:, :48]), "with strides"),
        (_with("compressor", gates=_f(48, 4).t()), "with strides"),
        (_with("compressor", entries=Rows(_f(9, 3, 16))), "compressor.entries are"),
        (_with("compressor", entries=Rows(_f(9, 3, 24).half().double())), "compressor.entries"),
        (_tail(values=_f(5, 5, 16)), "compressor.tail must be"),
        (_tail(gates=_f(5, 6, 24)), "compressor.tail must be"),
        (_tail(gates=_f(5, 5, 24).bfloat16()), "compressor.tail must be"),
        (_tail(previous_values=_f(5, 5, 48)[..., :24]), "compressor.tail must be"),
        (_tail(values=_f(5, 5, 24).half()), "compressor.tail must be"),
        (_with("index", bias=_f(1, 32)), "index must share m"),
        (_with("index", entries=Rows(_f(9, 4, 16))), "index must share"),
        (_with("index", norm=_f(8)), "index.bias must be"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(change, says) -> None:
    layout = Layout(2, 1, 2, index_dim=16)
    state = State(layout, layout.params())
    before = [arena.clone() for arena in state.arenas]
    step = make_step(np.random.default_rng(0), state.params, [(0, 0, 2), (1, 0, 2)], 2)
    given = state.arguments(step)
    with pytest.raises(SchemaError, match=says):
        state.absorb(step, **change(given))
    assert all(map(torch.equal, state.arenas, before))
    state.absorb(step)


def test_an_index_compressor_has_the_layers_overlap_and_tail_rows() -> None:
    layout = Layout(2, 1, 2, index_dim=16)
    state = State(layout, layout.params())
    step = make_step(np.random.default_rng(0), state.params, [(0, 0, 2), (1, 0, 2)], 2)
    index: Compressor = state.arguments(step)["index"]
    longer = TailParts(*(_f(5, 6, 16) for _ in range(4)))
    alone = index._replace(
        values=_f(4, 16), gates=_f(4, 16), bias=_f(2, 16), tail=TailParts(*index.tail[:2])
    )
    for wrong in (index._replace(tail=longer), alone):
        with pytest.raises(SchemaError, match="index must share m, overlap, tail rows"):
            state.absorb(step, index=wrong)


def test_registration_is_sound() -> None:
    layout = Layout(2, 1, 2, index_dim=16, row_format=FP8, index_format=FP8)
    state = State(layout, layout.params())
    step = make_step(np.random.default_rng(0), state.params, [(0, 0, 2), (1, 0, 2)], 2)
    given = state.arguments(step)

    def flat(parts: Compressor) -> list[list[torch.Tensor]]:
        return [list(parts[:4]), list(parts.tail), parts.entries.parts()]

    torch.library.opcheck(
        torch.ops.graphcache.absorb.default,
        (
            given["entries"], given["norm"], *given["rotation"], 1e-6,
            state.window.rows.parts(), state.window.positions, step["slots"], step["positions"], 2,
            *flat(given["compressor"]), *flat(given["index"]), *given["block_rotation"],
            state.table, True, True,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


# The interpreter: these functions run in a child, whose Triton interprets.


def _on_both(layout: Layout, step: Step, seed: int = 0, chunk: bool = False) -> None:
    """Kernel and reference over the same random tails, where the interpreter is exact."""
    kernel, reference = (State(layout, layout.params()) for _ in range(2))
    _fill(np.random.default_rng(seed), [kernel, reference])
    with kernel_on_cpu():
        mine = kernel.absorb_chunk(step) if chunk else kernel.absorb(step)
    theirs = reference.absorb_chunk(step) if chunk else reference.absorb(step)
    assert torch.equal(kernel.window.positions, reference.window.positions)
    if chunk:
        check_close(mine.values.numpy(), theirs.values.numpy(), FP32)
    expected = reference.read()
    for name, part in kernel.read().items():
        if name.endswith(("window", "entries")):
            check_close(part, expected[name], FP32, name)
        else:
            assert np.array_equal(part, expected[name]), name
    assert np.isfinite(expected["entries"]).any(), "blocks are completed"


def _interpreted_steps(overlap: int) -> None:
    rng = np.random.default_rng(0)
    for m in (1, 2, 4, 8, 3):
        for q_len in (1, 4):
            layout = Layout(m, overlap, q_len, index_dim=16 * overlap)
            places = (0, max(0, m - q_len), 2 * m - 1, 3 * m)
            runs = [(slot, places[slot], q_len) for slot in (2, 0, 3, 1)]
            runs[1] = (0, places[0], max(1, q_len - 1))
            if m > q_len:
                runs[3] = (1, m - 1, q_len)
            step = make_step(rng, layout.params(), [runs[0], (-1, 0, 0), *runs[1:]], q_len)
            _on_both(layout, step)


def interpreted_overlap() -> None:
    _interpreted_steps(1)


def interpreted_no_overlap() -> None:
    _interpreted_steps(0)


def interpreted_chunks() -> None:
    rng = np.random.default_rng(1)
    for overlap, m, first in ((1, 4, 5), (0, 4, 0), (1, 1, 2), (0, 8, 7)):
        layout = Layout(m, overlap, index_dim=16 * overlap)
        step = make_step(rng, layout.params(), [(2, first, 19)], 19)
        _on_both(layout, step, chunk=True)


def interpreted_long_blocks() -> None:
    """More rows than are read at a time, and not a multiple of that."""
    rng = np.random.default_rng(2)
    for overlap, m in ((0, 128), (0, 19), (1, 18)):
        layout = Layout(m, overlap, 2, block_entries=2, width=3)
        step = make_step(rng, layout.params(), [(2, m - 2, 2), (0, 2 * m - 1, 2)], 2)
        _on_both(layout, step)


def interpreted_batches() -> None:
    with kernel_on_cpu():
        _alone_and_together(Layout(2, 1, 2, index_dim=16))


def interpreted_formats() -> None:
    """Values of 1 throughout a block, no eps and no turn: an entry is the norm's weight."""
    for row_format in FORMATS:
        for tail_dtype in (torch.float32, torch.bfloat16):
            wide = row_format is MODEL1
            layout = Layout(
                2, 1, 2, dim=512 if wide else 24, rope_dim=64 if wide else 8, slots=2,
                row_format=row_format, index_dim=64, tail_dtype=tail_dtype,
                index_format=FP8 if wide else row_format,
            )  # fmt: skip
            _exact_on_both(layout)


def _exact_on_both(layout: Layout) -> None:
    rng = np.random.default_rng(3)
    params = layout.params()
    kernel, reference = State(layout, params), State(layout, params)
    step = _exact_step(rng, layout, [(1, 0, 2), (0, 2, 2), (-1, 0, 0)])
    for state in (kernel, reference):
        for ring in _rings(state):
            ring.fill_(1.0)
        given = state.arguments(step)
        exact = {
            name: given[name]._replace(
                norm=_exact_weight(given[name].norm), bias=torch.ones_like(given[name].bias) / 4
            )
            for name in ("compressor", "index")
        }
        options = {"norm": None, "eps": 0.0} | exact
        if state is kernel:
            with kernel_on_cpu():
                state.absorb(step, **options)
        else:
            state.absorb(step, **options)
    assert all(map(torch.equal, kernel.arenas, reference.arenas)), layout
    written = np.isfinite(reference.read()["entries"]).all(-1)
    assert written.sum() == 2
    codes = np.abs(reference.read()["entries"][written])
    assert len(np.unique(codes)) > 10


def _exact_weight(norm: torch.Tensor) -> torch.Tensor:
    """Values of e4m3 and of bf16, the largest of them in every tile of 64."""
    weight = 1 + torch.arange(len(norm)) % 8 / 8
    weight = weight * 2.0 ** (torch.arange(len(norm)) % 5 - 6)
    weight[::16] = 448 * 2.0**-8
    return weight


def _exact_step(rng: np.random.Generator, layout: Layout, runs: list[tuple[int, int, int]]) -> Step:
    step = make_step(rng, layout.params(), runs, 2)
    real = step["slots"] >= 0
    for name in ("kv", "c", "index_c"):
        step[name][real] = 1.0
    # With the bias as the rings' gates: a weight is one in two or in four.
    for name in ("z", "index_z"):
        step[name][real] = 0.75
    step["kv"][real, ::3] = 0.375
    step["kv"][real, ::16] = 448.0
    for cos, sin in (("cos", "sin"), ("block_cos", "block_sin")):
        step[cos][real], step[sin][real] = 1.0, 0.0
    return step


def interpreted_far_state() -> None:
    with kernel_on_cpu():
        _check_far_state("cpu")


def _check_far_state(device: str) -> None:
    """Slots and blocks whose bytes begin past 2**31 elements from the first, and near ones."""
    layout = Layout(2, 1, slots=2)
    params = layout.params()
    near, other = State(layout, params, device), State(layout, params, device)
    _fill(np.random.default_rng(0), [near, other])
    block, row = Memory(near).place(1, 1)
    near_tail, near_entries = near.tails()[""], near.entries()
    spread = _Spread(device)
    tail = TailParts(*map(spread.slots, near_tail))
    entries = Rows(spread.slots(near_entries.values))
    for ring, like in zip(tail, near_tail, strict=True):
        ring[256] = like[1]
    step = make_step(np.random.default_rng(0), params, [(1, 3, 1)], 1)
    near.absorb(step)
    moved = Step(1, step.tokens, step.tensors | {"slots": torch.tensor([256], dtype=torch.int32)})
    compressor: Compressor = other.arguments(moved.to(device))["compressor"]
    other.absorb(
        moved,
        window=Rows(torch.zeros(1, 1, layout.dim, device=device)),
        table=torch.full((257, 12), 256, dtype=torch.int32, device=device),
        compressor=compressor._replace(tail=tail, entries=entries),
    )
    for ring, like in zip(tail, near_tail, strict=True):
        assert torch.equal(ring[256], like[1])
    assert torch.equal(entries.values[256, row], near_entries.values[block, row])
    assert entries.values[256, row].any()


class _Spread:
    """Tensors of 257 slots, side by side, the last slot past 2**31 elements from the first."""

    def __init__(self, device: str) -> None:
        self.stride, self.used = 2**23 + 16, 0
        count = 257 * self.stride
        # numpy's pages come into being when touched.
        on_cpu = torch.from_numpy(np.zeros(count, np.float32)) if device == "cpu" else None
        self.memory = torch.zeros(count, device=device) if on_cpu is None else on_cpu

    def slots(self, like: torch.Tensor) -> torch.Tensor:
        shape = (257, *like.shape[1:])
        spread = self.memory.as_strided(shape, (self.stride, *like.stride()[1:]), self.used)
        self.used += like[0].numel()
        assert self.used < self.stride and 256 * self.stride > 2**31
        return spread


@pytest.mark.parametrize(
    "cases",
    [
        interpreted_overlap,
        interpreted_no_overlap,
        interpreted_chunks,
        interpreted_long_blocks,
        interpreted_batches,
        interpreted_formats,
        interpreted_far_state,
    ],
)
def test_the_kernel_under_the_interpreter(cases: Callable[[], None]) -> None:
    pytest.importorskip("triton")
    run_in_interpreter(cases)


V4 = {"dim": 512, "rope_dim": 64, "slots": 2, "width": 3}
CSA = Layout(4, 1, index_dim=128, **V4)
HCA = Layout(128, 0, **V4)
BUILDS = {
    "fp8": replace(CSA, row_format=FP8, index_format=FP8),
    "model1, bf16 tail": replace(
        CSA, row_format=MODEL1, index_format=FP8, tail_dtype=torch.bfloat16
    ),
    "bf16": replace(CSA, row_format=BF16, index_format=BF16),
    "fp32": CSA,
    "no overlap": replace(HCA, compression=8, row_format=FP8),
}


def _builds(layout: Layout, q_len: int, dtype: torch.dtype, strides: str, **options) -> None:
    params = layout.params()
    state = State(layout, params)
    step = make_step(np.random.default_rng(0), params, [(0, 0, q_len)], q_len, dtype)
    if options.get("write") is False:
        parts = layout.schema.row.encode(torch.zeros(1, q_len, layout.dim))
        options["window"] = parts
    kernel, signature, constants, warps = launch_of(lambda: state.absorb(step, **options), strides)
    assert build_for_sm90(kernel, signature, constants, num_warps=warps).startswith(b"\x7fELF")


@pytest.mark.parametrize("layout", BUILDS.values(), ids=BUILDS)
def test_the_kernel_builds_for_an_h200(layout: Layout) -> None:
    """A step, and both calls of a chunk."""
    pytest.importorskip("triton")
    _builds(layout, 1, torch.float32, "i64")
    _builds(layout, 400, torch.bfloat16, "i32", write=False)
    _builds(layout, 400, torch.bfloat16, "i32", emit=False)


def test_the_kernel_builds_for_an_h200_with_long_blocks() -> None:
    pytest.importorskip("triton")
    _builds(replace(HCA, row_format=MODEL1), 1, torch.float32, "i32")


# A GPU.


def _ordered(bits: torch.Tensor, sign: int) -> torch.Tensor:
    """Codes of sign and magnitude as integers in the order of their values."""
    magnitude = bits.int() & (sign - 1)
    return torch.where((bits.int() & sign) != 0, -magnitude, magnitude)


def _check_steps(found: torch.Tensor, expected: torch.Tensor, sign: int, what: str) -> None:
    """Codes are equal, but for at most 1 in 100 that lies one step away."""
    step = (_ordered(found, sign) - _ordered(expected, sign)).abs()
    assert step.max() <= 1, f"{what}: {int(step.max())} steps apart"
    assert (step != 0).sum() <= max(1, expected.numel() // 100), what


def _check_rows(found: Rows, expected: Rows, what: str) -> None:
    for name, mine, theirs in zip(Rows._fields, found, expected, strict=True):
        if mine is None:
            continue
        mine, theirs = mine.cpu().contiguous(), theirs.contiguous()
        if mine.dtype == torch.bfloat16:
            # A rotation may cancel: a value near 0 is then many steps off, and yet not far.
            near = (mine.float() - theirs.float()).abs() < 1e-5
            near |= mine.isnan() & theirs.isnan()
            bits = [part.view(torch.int16).masked_fill(near, 0) for part in (mine, theirs)]
            _check_steps(*bits, 0x8000, f"{what} {name}")
        elif name == "values" and mine.dtype == torch.uint8:
            _check_steps(mine, theirs, 0x80, f"{what} {name}")
        elif mine.dtype == torch.uint8:
            assert torch.equal(mine, theirs), f"{what} {name}"
        else:
            tolerance = (
                {"rtol": 1e-6, "atol": 0} if name == "scales" else {"rtol": 1e-5, "atol": 1e-5}
            )
            torch.testing.assert_close(mine, theirs, equal_nan=True, **tolerance)


def _check_devices(device: State, host: State) -> None:
    """Rings of tails and tags equal, rows and entries but for rounding."""
    assert torch.equal(device.window.positions.cpu(), host.window.positions)
    _check_rows(device.window.rows, host.window.rows, "window")
    for kind, tail in device.tails().items():
        _check_rows(device.entries(kind), host.entries(kind), f"{kind}entries")
        for mine, theirs in zip(tail, host.tails()[kind], strict=True):
            if mine is not None:
                # As bytes: what was never written is NaN.
                mine, theirs = mine.cpu().contiguous(), theirs.contiguous()
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tail_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("kind", [CSA, HCA], ids=["m=4 overlap", "m=128"])
def test_the_kernel_at_v4_dims_on_the_device(kind, row_format, q_len, tail_dtype, dtype) -> None:
    index_format = FP8 if row_format is MODEL1 else row_format
    layout = replace(
        kind, row_format=row_format, index_format=index_format, step_width=q_len,
        tail_dtype=tail_dtype, slots=8, window=128, block_entries=5,
    )  # fmt: skip
    params = layout.params()
    host, device = State(layout, params), State(layout, params, "cuda")
    rng = np.random.default_rng(0)
    _fill(rng, [host, device])
    before = host.blocks.arena.clone()
    m = layout.compression
    for first in (0, m - q_len, 3 * m - 1):
        for shift in range(min(4, m)):
            runs = [(s, first + shift * (s % 2), int(rng.integers(1, q_len + 1))) for s in range(8)]
            runs.insert(3, (-1, 0, 0))
            step = make_step(rng, params, [runs[i] for i in rng.permutation(9)], q_len, dtype)
            device.absorb(step)
            host.absorb(step)
            _check_devices(device, host)
    assert not torch.equal(host.blocks.arena, before)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 2, 4])
@pytest.mark.parametrize(("overlap", "m"), KINDS)
def test_random_steps_on_the_device_leave_what_histories_say(overlap, m, q_len) -> None:
    layout = Layout(m, overlap, q_len, index_dim=16 * overlap, width=3 * (5 if m < 3 else 2))
    _random_steps(layout, max(8, 12 * m // q_len), seed=m, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("row_format", FORMATS)
def test_formats_on_the_device_against_histories(row_format: RowFormat) -> None:
    index_format = FP8 if row_format is MODEL1 else row_format
    layout = Layout(
        2, 1, 2, dim=512, rope_dim=64, row_format=row_format, index_dim=128,
        index_format=index_format, slots=3,
    )  # fmt: skip
    _random_steps(layout, 6, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [[21], [5, 5, 11], [2, 16, 3]])
@pytest.mark.parametrize("row_format", FORMATS)
def test_chunks_on_the_device_leave_what_single_steps_leave(row_format, chunks) -> None:
    """Bit for bit: where a row is read from makes no difference."""
    for kind in (replace(CSA, width=3), replace(HCA, compression=8)):
        index_format = FP8 if row_format is MODEL1 else row_format
        layout = replace(kind, row_format=row_format, index_format=index_format)
        whole, single, _ = _chunks_and_steps(layout, chunks, 3, "cuda")
        assert all(map(torch.equal, whole.arenas, single.arenas))


@pytest.mark.gpu
@pytest.mark.parametrize("row_format", FORMATS)
def test_batch_independence_on_the_device(row_format: RowFormat) -> None:
    for kind in (replace(CSA, slots=7), replace(HCA, slots=7, compression=8)):
        index_format = FP8 if row_format is MODEL1 else row_format
        layout = replace(
            kind, row_format=row_format, index_format=index_format, step_width=2, width=30
        )
        _alone_and_together(layout, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("row_format", FORMATS)
def test_padding_alone_changes_nothing_on_the_device(row_format: RowFormat) -> None:
    index_format = FP8 if row_format is MODEL1 else row_format
    layout = replace(CSA, row_format=row_format, index_format=index_format, step_width=2)
    _pad_only(State(layout, layout.params(), "cuda"), 2)


@pytest.mark.gpu
def test_slots_past_two_to_the_31_elements_on_the_device() -> None:
    _check_far_state("cuda")


@pytest.mark.gpu
def test_a_step_is_one_node_and_replays_with_other_slots() -> None:
    layout = replace(CSA, row_format=FP8, index_format=FP8, slots=6, width=4)
    params = layout.params()
    device, host = State(layout, params, "cuda"), State(layout, params)
    rng = np.random.default_rng(0)
    inputs = make_step(rng, params, [(-1, 0, 0)] * 6, 1).to("cuda")
    # What a graph reads must outlive it.
    arguments = device.arguments(inputs)
    graph = captured(lambda: absorb(**arguments), nodes=1)
    for position in range(13):
        order = rng.permutation(6)
        runs = [(int(slot), position, 1) for slot in order[:5]] + [(-1, 0, 0)]
        if position % 4 != 3:
            # All keep in step, for every position is to be absorbed by every slot.
            runs[5] = (int(order[5]), position, 1)
        step = make_step(rng, params, runs, 1)
        for name, part in step.tensors.items():
            inputs[name].copy_(part)
        graph.replay()
        host.absorb(step)
        torch.cuda.synchronize()
        _check_devices(device, host)
