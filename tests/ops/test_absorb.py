"""The window's part of absorb: reference against an oracle, kernel against reference, canaries.

Without norm and rotation a row is stored as its format's `encode` has it, bit for bit. The kernel
runs under Triton's interpreter in a child process, with values that cast to e4m3 exactly (the
interpreter's own cast is wrong for others), is compiled for an H200 here, and is compared bit for
bit at every boundary between two codes on a GPU. `test_absorb_compressed` has the other parts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from graphcache.errors import SchemaError
from graphcache.ops.absorb import Rotation, WindowParts, absorb
from graphcache.pool import Field, StatePool
from graphcache.rows import RowFormat, Rows, row_of
from tests.entry_oracle import inverse_frequencies, rmsnorm, rotate
from tests.kernel_build import build_for_sm90
from tests.ops.absorb_cases import (
    Layout,
    Memory,
    State,
    captured,
    check_close,
    kernel_on_cpu,
    launch_of,
    make_step,
    run_in_interpreter,
)
from tests.window_oracle import MIDPOINTS, TABLE, encode
from tests.window_oracle import Memory as WindowMemory

FP8, MODEL1 = RowFormat.FP8, RowFormat.MODEL1
FORMATS = list(RowFormat)
DTYPES = [torch.float32, torch.bfloat16]


def _ints(values: list[int] | np.ndarray) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def _pool(
    slots: int,
    rows: int,
    width: int,
    rope_dim: int,
    row_format: RowFormat = FP8,
    device: str = "cpu",
    filler: int = 5,
) -> StatePool:
    """The window's fields among others, as a slot-major arena has them."""
    fields = row_of(row_format, width, rope_dim).fields("swa", rows)
    tags = Field("swa_pos", (rows,), torch.int32, initial=-1, reset=True)
    other = Field("other", (filler,), torch.uint8)
    return StatePool([other, *fields, tags], slots, device)


def _window(
    pool: StatePool,
    width: int = 24,
    rope_dim: int = 8,
    row_format: RowFormat = FP8,
    first: int = 0,
) -> WindowParts:
    """The window from row `first` of the pool on: with 1, a kernel's raw -1 lands in the pool."""
    tags = pool["swa_pos"]
    rows = row_of(row_format, width, rope_dim).view(pool, "swa", tags.shape[1])
    return WindowParts(Rows(*(None if p is None else p[first:] for p in rows)), tags[first:])


def _runs(
    rng: np.random.Generator, slots: int, rows: int, q_len: int, batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of distinct slots, runs of 0..q_len tokens at random lengths."""
    chosen = rng.permutation(slots)[:batch]
    slot, position = np.full((batch, q_len), -1), np.zeros((batch, q_len), int)
    for index, name in enumerate(chosen):
        count = rng.integers(0, q_len + 1)
        slot[index, :count] = name
        position[index, :count] = rng.integers(0, 5 * rows) + np.arange(count)
    return _ints(slot.ravel()), _ints(position.ravel())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 3, 4, 11])
@pytest.mark.parametrize(("rows", "width", "rope_dim"), [(4, 24, 8), (5, 56, 8), (1, 24, 8)])
def test_the_reference_writes_what_the_oracle_writes(dtype, q_len, rows, width, rope_dim) -> None:
    rng = np.random.default_rng(q_len)
    pool = _pool(6, rows, width, rope_dim)
    memory = WindowMemory(7, rows, width, rope_dim)
    for _ in range(6):
        slots, positions = _runs(rng, 6, rows, q_len, 5)
        entries = torch.from_numpy(rng.standard_normal((len(slots), width)).astype(np.float32))
        entries = (entries * 10 ** rng.uniform(-6, 5)).to(dtype)
        entries[slots < 0] = torch.nan
        absorb(entries, _window(pool, width, rope_dim), slots, positions, q_len)
        for first in range(0, len(slots), q_len):
            count = int((slots[first : first + q_len] >= 0).sum())
            run = [encode(e, rope_dim) for e in entries[first : first + count].float().numpy()]
            memory.write_run(int(slots[first]), int(positions[first]), run)
    assert (pool["swa_fp8"].numpy()[:6] == memory.fp8[:6]).all()
    assert (pool["swa_rope"].view(torch.uint16).numpy()[:6] == memory.rope[:6]).all()
    assert (pool["swa_inv"].numpy()[:6] == memory.inv[:6]).all()
    assert (pool["swa_pos"].numpy()[:6] == memory.pos[:6]).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("row_format", FORMATS)
def test_a_row_of_every_format_is_what_it_encodes_to(row_format, dtype) -> None:
    pool = _pool(3, 4, 512, 64, row_format)
    window = _window(pool, 512, 64, row_format)
    entries = (torch.randn(3, 512) * torch.tensor([[1e-3], [1.0], [100.0]])).to(dtype)
    absorb(entries, window, _ints([2, 0, 1]), _ints([5, 6, 7]), 1)
    expected = row_of(row_format, 512, 64).encode(entries.float())
    for token, (slot, row) in enumerate(((2, 1), (0, 2), (1, 3))):
        for stored, encoded in zip(window.rows.parts(), expected.parts(), strict=True):
            assert torch.equal(stored[slot, row], encoded[token])
        assert window.positions[slot, row] == 5 + token


@pytest.mark.parametrize("q_len", [1, 2, 6])
@pytest.mark.parametrize("row_format", FORMATS)
def test_padding_never_lands_anywhere(row_format: RowFormat, q_len: int) -> None:
    """Neither in the last row, which torch takes -1 for, nor in the guard before the first slot."""
    pool = _pool(3, 4, 512, 64, row_format)
    pool.arena.random_(0, 256)
    before = pool.arena.clone()
    entries = torch.full((6, 512), torch.nan)
    window = _window(pool, 512, 64, row_format, first=1)
    absorb(entries, window, _ints([-1] * 6), _ints([0] * 6), q_len)
    assert torch.equal(pool.arena, before)


def test_only_owned_rows_change() -> None:
    pool = _pool(8, 4, 24, 8)
    pool.arena.random_(0, 256)
    before = pool.arena.clone()
    slots, positions = _ints([2, 2, 7, -1]), _ints([5, 6, 3, 0])
    absorb(torch.randn(4, 24), _window(pool), slots, positions, 2)
    expected = StatePool(pool.fields.values(), 8, "cpu")
    expected.arena.copy_(before)
    for slot, row in ((2, 1), (2, 2), (7, 3)):
        for name in set(pool.fields) - {"other"}:
            expected[name][slot, row] = pool[name][slot, row]
    assert torch.equal(pool.arena, expected.arena)
    assert not torch.equal(pool.arena, before)


def _covered_run(rows: int, q_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A row whose first tokens are of slot 0 and last `rows` of slot 1, which no step sends.

    A token that must be skipped, for another comes `rows` after it, is not hidden by that one's
    write.
    """
    slots = [0] * (q_len - rows) + [1] * min(rows, q_len)
    return _ints(slots), _ints(list(range(q_len)))


@pytest.mark.parametrize("q_len", [5, 6, 9])
def test_a_token_that_is_overtaken_in_the_ring_is_not_written_at_all(q_len: int) -> None:
    pool = _pool(2, 4, 24, 8)
    before = pool.arena[0].clone()
    slots, positions = _covered_run(4, q_len)
    absorb(torch.randn(q_len, 24), _window(pool), slots, positions, q_len)
    assert torch.equal(pool.arena[0], before)
    assert sorted(pool["swa_pos"][1].tolist()) == list(range(q_len - 4, q_len))


def test_entries_may_be_a_strided_view() -> None:
    wide = torch.randn(6, 100)
    pools = [_pool(6, 4, 24, 8) for _ in range(2)]
    slots, positions = _ints(list(range(6))), _ints([9] * 6)
    absorb(wide[:, 40:64], _window(pools[0]), slots, positions, 1)
    absorb(wide[:, 40:64].contiguous(), _window(pools[1]), slots, positions, 1)
    assert torch.equal(pools[0].arena, pools[1].arena)


def test_no_tokens_is_no_work() -> None:
    pool = _pool(2, 4, 24, 8)
    before = pool.arena.clone()
    absorb(torch.zeros(0, 24), _window(pool), _ints([]), _ints([]), 1)
    assert torch.equal(pool.arena, before)


# Norm, rotation, and rows kept aside.


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("q_len", [1, 3, 11])
@pytest.mark.parametrize("row_format", FORMATS)
def test_entries_are_normed_then_rotated_then_stored(row_format, q_len, dtype) -> None:
    wide = row_format is MODEL1
    dims = {"dim": 512, "rope_dim": 64} if wide else {"dim": 24, "rope_dim": 8}
    layout = Layout(row_format=row_format, step_width=min(q_len, 3), slots=3, **dims)
    params = layout.params()
    state = State(layout, params)
    memory, rng = Memory(state), np.random.default_rng(q_len)
    for _ in range(2 if wide else 6):
        runs = [(slot, memory.lengths()[slot], int(rng.integers(0, q_len + 1))) for slot in (2, 0)]
        step = make_step(rng, params, [*runs, (-1, 0, 0)], q_len, dtype)
        state.absorb(step)
        memory.record(step)
        memory.check(state)


@pytest.mark.parametrize("norm_dtype", DTYPES)
def test_norm_and_rotation_are_each_optional(norm_dtype: torch.dtype) -> None:
    """And the rotation may turn fewer dims than the last ones that a format keeps apart."""
    rng = np.random.default_rng(0)
    entries = rng.standard_normal((4, 24)).astype(np.float32) * 3
    weight = torch.from_numpy(rng.standard_normal(24).astype(np.float32)).to(norm_dtype)
    inv_freq, positions = inverse_frequencies(6), np.arange(4) + 50
    angle = torch.from_numpy(positions[:, None] * inv_freq.astype(np.float64))
    rotation = Rotation(angle.cos().float(), angle.sin().float())
    for norm in (None, weight):
        for turned in (None, rotation):
            pool = _pool(4, 3, 24, 8, RowFormat.FP32)
            absorb(
                torch.from_numpy(entries),
                _window(pool, row_format=RowFormat.FP32),
                _ints([0, 1, 2, 3]),
                _ints(positions),
                1,
                norm=norm,
                rotation=turned,
                eps=0.25,
            )
            expected = entries
            if norm is not None:
                expected = rmsnorm(expected, weight.float().numpy(), 0.25)
            if turned is not None:
                expected = rotate(expected, positions, inv_freq)
            stored = pool["swa"][range(4), positions % 3].numpy()
            assert np.abs(stored - expected).max() < 1e-5


@pytest.mark.parametrize("row_format", FORMATS)
def test_rows_kept_aside_lie_in_the_order_of_their_tokens(row_format: RowFormat) -> None:
    """The same bytes that a ring would hold; padding leaves its row as it was."""
    layout = Layout(row_format=row_format, dim=512, rope_dim=64, step_width=3, slots=3)
    params = layout.params()
    state = State(layout, params)
    step = make_step(np.random.default_rng(1), params, [(2, 0, 3), (-1, 0, 0), (0, 0, 2)], 3)
    parts = layout.schema.row.encode(torch.full((1, 9, 512), 3.0))
    before = Rows(*(None if part is None else part.clone() for part in parts))
    arenas = [arena.clone() for arena in state.arenas]
    state.absorb(step, window=parts)
    assert all(map(torch.equal, state.arenas, arenas)), "the ring is left alone"
    state.absorb(step)
    kept = zip(parts.parts(), before.parts(), state.window.rows.parts(), strict=True)
    for aside, old, ring in kept:
        for token, slot in enumerate(step["slots"].tolist()):
            expected = old[0, token] if slot < 0 else ring[slot, step["positions"][token]]
            assert torch.equal(aside[0, token], expected)


def _alone_and_together(layout: Layout, device: str = "cpu") -> None:
    """Whether a row's bits depend on the rows around it."""
    params = layout.params()
    together, alone = State(layout, params, device), State(layout, params, device)
    rng = np.random.default_rng(2)
    runs = [(slot, 0, layout.step_width) for slot in rng.permutation(layout.slots)]
    step = make_step(rng, params, [(-1, 0, 0), *runs], layout.step_width)
    together.absorb(step)
    for index in reversed(range(len(runs) + 1)):
        alone.absorb(step.row(index))
    assert all(map(torch.equal, together.arenas, alone.arenas))
    assert (together.window.positions >= 0).sum() == layout.slots * layout.step_width


@pytest.mark.parametrize("row_format", FORMATS)
def test_a_tokens_bits_do_not_depend_on_the_batch_around_it(row_format: RowFormat) -> None:
    _alone_and_together(Layout(row_format=row_format, dim=512, rope_dim=64, step_width=2))


# What is refused.


def _f(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


CODES, ROPE, INV = _f(3, 4, 16, dtype=torch.uint8), _f(3, 4, 8, dtype=torch.bfloat16), _f(3, 4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"entries": _f(4, 24, dtype=torch.float64)}, "float64"),
        ({"entries": _f(4, 32)}, r"of width 32, got \[3, 4, 16\] and 8"),
        ({"entries": _f(24)}, r"entries are \[T, D\]"),
        ({"entries": _f(24, 4).t()}, "contiguous last axis"),
        ({"slots": _f(4, dtype=torch.int64)}, "slots must be"),
        ({"slots": _f(3, dtype=torch.int32)}, "slots must be"),
        ({"slots": _f(8, dtype=torch.int32)[::2]}, "slots must be"),
        ({"positions": _f(4, dtype=torch.int64)}, "positions must be"),
        ({"positions": _f(4, 1, dtype=torch.int32)}, "positions must be"),
        ({"q_len": 3}, "q_len=3"),
        ({"q_len": 0}, "q_len=0"),
        ({"norm": _f(23)}, r"norm must be \[24\]"),
        ({"norm": _f(24, dtype=torch.int32)}, "norm must be"),
        ({"norm": _f(48)[::2]}, "norm must be"),
        ({"rotation": Rotation(_f(3, 4), _f(3, 4))}, r"cos and sin must be \[4, rope_dim / 2\]"),
        ({"rotation": Rotation(_f(4, 13), _f(4, 13))}, "cos and sin"),
        ({"rotation": Rotation(_f(4, 4), _f(4, 4, dtype=torch.bfloat16))}, "cos and sin"),
        ({"rotation": Rotation(_f(4, 8)[:, ::2], _f(4, 4))}, "cos and sin"),
        ({"rotation": Rotation(_f(4), _f(4, 4))}, "cos and sin"),
        ({"rows": Rows(CODES, ROPE, INV.double())}, "scales of float32 or uint8"),
        ({"rows": Rows(CODES.char(), ROPE, INV)}, "uint8 codes"),
        ({"rows": Rows(CODES, ROPE.float(), INV)}, "rotated dims in bfloat16"),
        ({"rows": Rows(CODES, ROPE, _f(3, 5))}, r"are \[N, R, ...\]"),
        ({"rows": Rows(CODES, ROPE, _f(4, 4))}, r"are \[N, R, ...\]"),
        ({"rows": Rows(CODES, _f(3, 4, 16, dtype=torch.bfloat16)[..., ::2], INV)}, "contiguous"),
        ({"rows": Rows(CODES[0], ROPE[0], INV[0])}, r"are \[N, R, ...\]"),
        ({"rows": Rows(_f(3, 4, 24), ROPE)}, "without scales"),
        ({"rows": Rows(_f(3, 4, 24, dtype=torch.float64))}, "without scales"),
        ({"rows": Rows(CODES, None, INV)}, "of width 24"),
        ({"tags": _f(3, dtype=torch.int32)}, r"positions must be \[3, 4\] int32"),
        ({"tags": _f(3, 4, dtype=torch.int64)}, r"positions must be \[3, 4\] int32"),
        ({"tags": _f(3, 5, dtype=torch.int32)}, r"positions must be \[3, 4\] int32"),
        ({"tags": _f(4, 3, dtype=torch.int32).t()}, "contiguous within a slot"),
        ({"window": Rows(CODES, ROPE, INV)}, r"kept aside are \[1, 4, ...\]"),
        ({"window": Rows(CODES[:1, :3], ROPE[:1, :3], INV[:1, :3])}, r"kept aside are \[1, 4"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(change, says) -> None:
    pool = _pool(2, 4, 24, 8)
    before = pool.arena.clone()
    window = _window(pool)
    change = dict(change)
    rows, tags = change.pop("rows", window.rows), change.pop("tags", window.positions)
    given = {
        "entries": torch.ones(4, 24),
        "window": WindowParts(rows, tags),
        "slots": _ints([0, 1, 0, 1]),
        "positions": _ints([0, 0, 1, 1]),
        "q_len": 1,
    }
    with pytest.raises(SchemaError, match=says):
        absorb(**given | change)
    assert torch.equal(pool.arena, before)


@pytest.mark.parametrize("row_format", FORMATS)
def test_registration_is_sound(row_format: RowFormat) -> None:
    pool = _pool(3, 4, 512, 64, row_format)
    window = _window(pool, 512, 64, row_format)
    rotation = torch.ones(4, 32), torch.zeros(4, 32)
    torch.library.opcheck(
        torch.ops.graphcache.absorb.default,
        (
            torch.randn(4, 512), torch.ones(512), *rotation, 1e-6, window.rows.parts(),
            window.positions, _ints([0, 1, -1, 2]), _ints([3, 4, 0, 9]), 1,
            [], [], [], [], [], [], None, None, None, True, True,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


# The interpreter: these functions run in a child, whose Triton interprets.


def _exact_entries(rng: np.random.Generator, count: int, width: int, rope_dim: int) -> torch.Tensor:
    """Rows whose scale is a power of two and whose values are e4m3 times that."""
    codes = rng.integers(0, 256, (count, width))
    codes[codes & 0x7F == 0x7F] = 0x80
    codes[:, rng.integers(0, width - rope_dim)] = 0x7E
    return torch.from_numpy((TABLE[codes] * 2.0 ** rng.integers(-9, 30, (count, 1))).astype("f4"))


def interpreted_rings() -> None:
    rng = np.random.default_rng(0)
    for rows, width, rope_dim in ((4, 24, 8), (5, 56, 8), (1, 40, 24)):
        for q_len in (1, 3, rows, rows + 1, 2 * rows + 3):
            for dtype in DTYPES:
                for batch in (_runs(rng, 5, rows, q_len, 4), _covered_run(rows, q_len)):
                    _compare(rng, rows, width, rope_dim, q_len, dtype, FP8, *batch)


def interpreted_formats() -> None:
    rng = np.random.default_rng(0)
    for row_format in FORMATS:
        for q_len in (1, 5):
            batch = _runs(rng, 5, 3, q_len, 4)
            _compare(rng, 3, 512, 64, q_len, torch.float32, row_format, *batch)


def _compare(rng, rows, width, rope_dim, q_len, dtype, row_format, slots, positions) -> None:
    kernel, reference = (_pool(6, rows, width, rope_dim, row_format) for _ in range(2))
    kernel.arena.random_(0, 256)
    reference.arena.copy_(kernel.arena)
    wide = torch.full((len(slots), width + 8), 3.0, dtype=dtype)
    entries = wide[:, 8:]
    entries.copy_(_exact_entries(rng, len(slots), width, rope_dim))
    entries[slots < 0] = torch.nan
    if slots[0] >= 0:
        entries[0] = 0
    with kernel_on_cpu():
        window = _window(kernel, width, rope_dim, row_format, first=1)
        absorb(entries, window, slots, positions, q_len)
    window = _window(reference, width, rope_dim, row_format, first=1)
    absorb(entries, window, slots, positions, q_len)
    assert torch.equal(kernel.arena, reference.arena), (row_format, rows, width, q_len, dtype)


def interpreted_norm_and_rotation() -> None:
    for q_len, aside in ((1, False), (3, False), (7, False), (3, True)):
        layout = Layout(step_width=2)
        params = layout.params()
        kernel, reference = State(layout, params), State(layout, params)
        rng = np.random.default_rng(q_len)
        step = make_step(rng, params, [(2, 9, q_len), (-1, 0, 0), (0, 4, q_len - 1)], q_len)
        options, rows = ({}, {}) if not aside else (
            {"window": Rows(torch.full((1, 3 * q_len, 24), 7.0))} for _ in range(2)
        )  # fmt: skip
        with kernel_on_cpu():
            kernel.absorb(step, **options)
        reference.absorb(step, **rows)
        assert torch.equal(kernel.window.positions, reference.window.positions)
        check_close(kernel.read()["window"], reference.read()["window"], RowFormat.FP32)
        if aside:
            found, expected = options["window"].values[0], rows["window"].values[0]
            check_close(found.numpy(), expected.numpy(), RowFormat.FP32)
            assert (found[step["slots"] < 0] == 7).all()


def interpreted_batches() -> None:
    with kernel_on_cpu():
        _alone_and_together(Layout(step_width=2))


def interpreted_far_slots() -> None:
    """A slot whose bytes begin past 2**31 floats from the first."""
    pool = _pool(257, 2, 24, 8, filler=2**25)
    assert 256 * pool["swa_inv"].stride(0) > 2**31
    entries = _exact_entries(np.random.default_rng(1), 2, 24, 8)
    with kernel_on_cpu():
        absorb(entries, _window(pool), _ints([256, 64]), _ints([3, 3]), 1)
    _check_far(pool, entries)


def _check_far(pool: StatePool, entries: torch.Tensor) -> None:
    expected = row_of(FP8, 24, 8).encode(entries)
    for stored, encoded in zip(_window(pool).rows.parts(), expected.parts(), strict=True):
        assert torch.equal(stored[[256, 64], 1].cpu(), encoded)
    assert (pool["swa_pos"][[256, 64], 1] == 3).all()
    assert (pool["swa_pos"] >= 0).sum() == 2


@pytest.mark.parametrize(
    "cases",
    [
        interpreted_rings,
        interpreted_formats,
        interpreted_norm_and_rotation,
        interpreted_batches,
        interpreted_far_slots,
    ],
)
def test_the_kernel_under_the_interpreter(cases: Callable[[], None]) -> None:
    pytest.importorskip("triton")
    run_in_interpreter(cases)


@pytest.mark.parametrize("strides", ["i32", "i64"])
@pytest.mark.parametrize("q_len", [1, 7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_format", FORMATS)
def test_the_kernel_builds_for_an_h200(row_format, dtype, q_len, strides) -> None:
    """A step, and a run longer than the ring; with norm and rotation and, in bf16, without."""
    pytest.importorskip("triton")
    layout = Layout(row_format=row_format, dim=512, rope_dim=64, slots=1)
    params = layout.params()
    state = State(layout, params)
    step = make_step(np.random.default_rng(0), params, [(0, 0, q_len)], q_len, dtype)
    plain = {"norm": None, "rotation": None} if dtype == torch.bfloat16 else {}
    kernel, signature, constants, warps = launch_of(lambda: state.absorb(step, **plain), strides)
    assert constants["W_OUTRUNS"] == (q_len > 5)
    assert build_for_sm90(kernel, signature, constants, num_warps=warps).startswith(b"\x7fELF")


# A GPU: bit for bit.


def _same_on_both(
    entries: torch.Tensor,
    rope_dim: int,
    rows: int,
    slots: torch.Tensor,
    positions: torch.Tensor,
    q_len: int,
    max_slots: int,
    row_format: RowFormat = FP8,
) -> None:
    """Run on GPU and CPU over the same junk and compare all bytes."""
    width = entries.shape[1]
    host = _pool(max_slots + 1, rows, width, rope_dim, row_format)
    host.arena.random_(0, 256)
    device = _pool(max_slots + 1, rows, width, rope_dim, row_format, "cuda")
    device.arena.copy_(host.arena)
    window = _window(host, width, rope_dim, row_format, first=1)
    absorb(entries, window, slots, positions, q_len)
    window = _window(device, width, rope_dim, row_format, first=1)
    absorb(entries.to("cuda"), window, slots.to("cuda"), positions.to("cuda"), q_len)
    for name in host.fields:
        mine, theirs = device[name].cpu().contiguous(), host[name].contiguous()
        differs = (mine.view(torch.uint8) != theirs.view(torch.uint8)).sum()
        assert not differs, f"{name}: {differs} bytes differ"
    assert torch.equal(device.arena.cpu(), host.arena)


def _one_row_each(entries: torch.Tensor, rope_dim: int = 64, row_format: RowFormat = FP8) -> None:
    count = len(entries)
    positions = torch.zeros(count, dtype=torch.int32)
    slots = _ints(list(range(count)))
    _same_on_both(entries, rope_dim, 1, slots, positions, 1, count, row_format)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_format", [FP8, MODEL1])
def test_every_code_boundary_is_the_references(row_format, dtype) -> None:
    """Values within 4 ulp of every midpoint of two codes, at thousands of scales of all sizes."""
    rng = np.random.default_rng(4)
    exponents = np.concatenate([rng.uniform(-4, 4, 3000), rng.uniform(-7, 38, 3000)])
    amax = (rng.uniform(1, 10, 6000) * 10.0 ** (exponents - 1)).astype(np.float32)
    scale = np.maximum(amax / np.float32(448), np.float32(1e-4))
    if row_format is MODEL1:
        scale = np.exp2(np.ceil(np.log2(scale)))
    ulps = np.arange(-4, 5)
    entries = np.empty((6000, 512), np.float32)
    for index in range(6000):
        middle = rng.permutation(MIDPOINTS).astype(np.float32)[:, None] * scale[index]
        near = (middle.view(np.int32) + ulps).view(np.float32).ravel()
        near = near[np.abs(near) <= amax[index]][:511]
        entries[index] = rng.uniform(-1, 1, 512) * amax[index]
        entries[index, : len(near)] = near * rng.choice([-1, 1], len(near))
        # A maximum in every tile: one scale for the row in both formats.
        entries[index, 63::64] = amax[index] * rng.choice([-1, 1], 8)
    _one_row_each(torch.from_numpy(entries).to(dtype), row_format=row_format)


@pytest.mark.gpu
def test_model1_scales_about_every_power_of_two_are_the_references() -> None:
    """Maxima within 3 ulp of 448 times a power of two, and about the floor of 1e-4."""
    powers = np.float32(448) * np.exp2(np.arange(-30, 118)).astype(np.float32)
    centre = np.concatenate([powers, np.float32(448e-4) * np.ones(8, np.float32)])
    maxima = (centre[:, None].view(np.int32) + np.arange(-3, 4)).view(np.float32).ravel()
    rng = np.random.default_rng(6)
    entries = rng.uniform(-1, 1, (len(maxima), 512)).astype(np.float32) * maxima[:, None]
    entries[:, 17::64] = maxima[:, None]
    entries[:, 448:] = 1
    _one_row_each(torch.from_numpy(entries), row_format=MODEL1)


@pytest.mark.gpu
def test_every_code_at_unit_scale_is_itself_on_the_device() -> None:
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F])
    entries = torch.zeros(2, 512)
    entries[0, : len(codes)] = torch.from_numpy(TABLE[codes])
    entries[1, : len(codes)] = entries[0, : len(codes)] * 2**20
    pool = _pool(2, 1, 512, 64, device="cuda")
    slots, positions = _ints([0, 1]).cuda(), _ints([0, 0]).cuda()
    absorb(entries.cuda(), _window(pool, 512, 64), slots, positions, 1)
    stored = pool["swa_fp8"][:2, 0, : len(codes)].cpu().numpy()
    assert (stored == codes).all()
    assert pool["swa_inv"][:2, 0].tolist() == [1, 2**20]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_format", [FP8, MODEL1])
def test_every_bf16_pattern_is_the_references(row_format, dtype) -> None:
    """All 65536 patterns, denormals, infinities and NaN too; the rotated part stays finite."""
    bits = np.random.default_rng(5).permutation(np.tile(np.arange(65536, dtype=np.uint16), 7))
    for kept in (0xFFFF, 0xBFFF):  # of the second, finite rows alone, up to 2
        body = torch.from_numpy((bits & kept).view(np.int16)).view(torch.bfloat16)
        body = body.view(-1, 448).to(dtype)
        entries = torch.cat([body, torch.randn(len(body), 64).to(dtype)], 1)
        _one_row_each(entries, row_format=row_format)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("row_format", [FP8, MODEL1])
def test_a_row_that_is_not_finite_on_the_device(row_format: RowFormat, bad: float) -> None:
    entries = torch.randn(8, 512)
    for index in range(7):
        entries[index, index * 64] = bad
    entries[7, 3] = -0.0
    _one_row_each(entries, row_format=row_format)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(
    ("width", "rope_dim", "row_format"),
    [
        (24, 8, FP8), (56, 8, FP8), (512, 64, FP8), (576, 64, FP8), (1088, 64, FP8),
        (128, 0, FP8), (512, 64, MODEL1), (24, 8, RowFormat.BF16), (512, 64, RowFormat.BF16),
        (512, 64, RowFormat.FP32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("q_len", [1, 3, 8, 9, 40])
def test_the_kernel_on_the_device(dtype, width, rope_dim, row_format, q_len) -> None:
    rng = np.random.default_rng(q_len)
    for batch in (1, 5, 32):
        slots, positions = _runs(rng, 32, 8, q_len, batch)
        wide = torch.randn(len(slots), width + 8).to(dtype)
        entries = wide[:, 8:]
        entries[slots < 0] = torch.nan
        _same_on_both(entries, rope_dim, 8, slots, positions, q_len, 32, row_format)


@pytest.mark.gpu
@pytest.mark.parametrize("row_format", FORMATS)
def test_batch_independence_on_the_device(row_format: RowFormat) -> None:
    _alone_and_together(Layout(row_format=row_format, dim=512, rope_dim=64, step_width=2), "cuda")


@pytest.mark.gpu
def test_slots_past_two_to_the_31_elements_on_the_device() -> None:
    pool = _pool(257, 2, 24, 8, device="cuda", filler=2**25)
    assert 256 * pool["swa_inv"].stride(0) > 2**31
    entries = torch.randn(2, 24)
    slots, positions = _ints([256, 64]).cuda(), _ints([3, 3]).cuda()
    absorb(entries.cuda(), _window(pool), slots, positions, 1)
    _check_far(pool, entries)


@pytest.mark.gpu
def test_an_append_is_one_node_and_replays_with_other_slots() -> None:
    pool, host = _pool(8, 4, 512, 64, device="cuda"), _pool(8, 4, 512, 64)
    entries = torch.randn(8, 512, device="cuda")
    slots, positions = (torch.full((8,), v, dtype=torch.int32, device="cuda") for v in (-1, 0))

    def step() -> None:
        absorb(entries, _window(pool, 512, 64), slots, positions, 1)

    graph = captured(step, nodes=1)
    for position in range(9):
        order = torch.randperm(8).int()
        order[5:] = -1
        values, place = torch.randn(8, 512), torch.full((8,), position, dtype=torch.int32)
        entries.copy_(values)
        slots.copy_(order)
        positions.copy_(place)
        graph.replay()
        absorb(values, _window(host, 512, 64), order, place, 1)
        torch.cuda.synchronize()
        assert torch.equal(pool.arena.cpu(), host.arena)
