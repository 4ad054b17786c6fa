"""window_append: reference against an oracle, kernel against reference, both against canaries.

The kernel runs under Triton's interpreter in a child process, with values that cast to e4m3
exactly (the interpreter's own cast is wrong for others), is compiled for an H200 here, and is
compared bit for bit at every boundary between two codes on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from graphcache.errors import SchemaError
from graphcache.ops import window_append as module
from graphcache.ops.window_append import window_append
from graphcache.pool import Field, StatePool
from graphcache.rows import Fp8TokenRow
from tests.kernel_build import build_for_sm90
from tests.test_pool import lazy_zeros
from tests.window_oracle import MIDPOINTS, TABLE, Memory, encode

DTYPES = [torch.float32, torch.bfloat16]
NAMES = ("swa_fp8", "swa_rope", "swa_inv", "swa_pos")


def _ints(values: list[int] | np.ndarray) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def _pool(
    slots: int, rows: int, width: int, rope_dim: int, device: str = "cpu", filler: int = 5
) -> StatePool:
    """The window's fields among others, as a slot-major arena has them."""
    fields = Fp8TokenRow(width, rope_dim).fields("swa", rows)
    tags = Field("swa_pos", (rows,), torch.int32, initial=-1, reset=True)
    other = Field("other", (filler,), torch.uint8)
    return StatePool([other, *fields, tags], slots, device)


def _state(pool: StatePool) -> tuple[torch.Tensor, ...]:
    return tuple(pool[name] for name in NAMES)


def _guarded(pool: StatePool) -> tuple[torch.Tensor, ...]:
    """The state without the pool's first row: where a kernel's raw -1 would land."""
    return tuple(pool[name][1:] for name in NAMES)


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
    memory = Memory(7, rows, width, rope_dim)
    for _ in range(6):
        slots, positions = _runs(rng, 6, rows, q_len, 5)
        entries = torch.from_numpy(rng.standard_normal((len(slots), width)).astype(np.float32))
        entries = (entries * 10 ** rng.uniform(-6, 5)).to(dtype)
        entries[slots < 0] = torch.nan
        window_append(entries, *_state(pool), slots, positions, q_len)
        for first in range(0, len(slots), q_len):
            count = int((slots[first : first + q_len] >= 0).sum())
            run = [encode(e, rope_dim) for e in entries[first : first + count].float().numpy()]
            memory.write_run(int(slots[first]), int(positions[first]), run)
    fp8, rope, inv, pos = _state(pool)
    assert (fp8.numpy()[:6] == memory.fp8[:6]).all()
    assert (rope.view(torch.uint16).numpy()[:6] == memory.rope[:6]).all()
    assert (inv.numpy()[:6] == memory.inv[:6]).all()
    assert (pos.numpy()[:6] == memory.pos[:6]).all()


@pytest.mark.parametrize("q_len", [1, 2, 6])
def test_padding_never_lands_anywhere(q_len: int) -> None:
    """Neither in the last row, which torch takes -1 for, nor in the guard before the first slot."""
    pool = _pool(3, 4, 24, 8)
    pool.arena.random_(0, 256)
    before = pool.arena.clone()
    entries = torch.full((6, 24), torch.nan)
    window_append(entries, *_guarded(pool), _ints([-1] * 6), _ints([0] * 6), q_len)
    assert torch.equal(pool.arena, before)


def test_only_owned_rows_change() -> None:
    pool = _pool(8, 4, 24, 8)
    pool.arena.random_(0, 256)
    before = pool.arena.clone()
    slots, positions = _ints([2, 2, 7, -1]), _ints([5, 6, 3, 0])
    window_append(torch.randn(4, 24), *_state(pool), slots, positions, 2)
    expected = StatePool(pool.fields.values(), 8, "cpu")
    expected.arena.copy_(before)
    for slot, row in ((2, 1), (2, 2), (7, 3)):
        for name in NAMES:
            expected[name][slot, row] = pool[name][slot, row]
    assert torch.equal(pool.arena, expected.arena)


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
    window_append(torch.randn(q_len, 24), *_state(pool), slots, positions, q_len)
    assert torch.equal(pool.arena[0], before)
    assert sorted(pool["swa_pos"][1].tolist()) == list(range(q_len - 4, q_len))


def test_entries_may_be_a_strided_view() -> None:
    wide = torch.randn(6, 100)
    pools = [_pool(6, 4, 24, 8) for _ in range(2)]
    slots, positions = _ints(list(range(6))), _ints([9] * 6)
    window_append(wide[:, 40:64], *_state(pools[0]), slots, positions, 1)
    window_append(wide[:, 40:64].contiguous(), *_state(pools[1]), slots, positions, 1)
    assert torch.equal(pools[0].arena, pools[1].arena)


def test_no_tokens_is_no_work() -> None:
    pool = _pool(2, 4, 24, 8)
    before = pool.arena.clone()
    window_append(torch.zeros(0, 24), *_state(pool), _ints([]), _ints([]), 1)
    assert torch.equal(pool.arena, before)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"entries": torch.zeros(4, 24, dtype=torch.float64)}, "float64"),
        ({"entries": torch.zeros(4, 24, dtype=torch.float16)}, "float16"),
        ({"entries": torch.zeros(4, 32)}, r"\[tokens, 24\]"),
        ({"entries": torch.zeros(24)}, r"\[tokens, 24\]"),
        ({"entries": torch.zeros(24, 4).t()}, "contiguous last axis"),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, "slots must be"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots must be"),
        ({"slots": torch.zeros(8, dtype=torch.int32)[::2]}, "slots must be"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, "positions must be"),
        ({"positions": torch.zeros(4, 1, dtype=torch.int32)}, "positions must be"),
        ({"q_len": 3}, "q_len=3"),
        ({"q_len": 0}, "q_len=0"),
        ({"swa_inv": torch.zeros(3, 4, dtype=torch.float64)}, "state is"),
        ({"swa_fp8": torch.zeros(3, 4, 16, dtype=torch.int8)}, "state is"),
        ({"swa_inv": torch.zeros(3, 5)}, "slots and rows"),
        ({"swa_inv": torch.zeros(4, 3).t()}, "contiguous within a slot"),
        ({"swa_rope": torch.zeros(3, 4, 16, dtype=torch.bfloat16)[..., ::2]}, "contiguous within"),
        ({"swa_fp8": torch.zeros(3, 4, 32, dtype=torch.uint8)[..., :16]}, "contiguous within"),
        ({"swa_pos": torch.zeros(3, dtype=torch.int32)}, "axes"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(change, says) -> None:
    pool = _pool(2, 4, 24, 8)
    before = pool.arena.clone()
    given = dict(zip(NAMES, _state(pool), strict=True)) | {
        "entries": torch.ones(4, 24),
        "slots": _ints([0, 1, 0, 1]),
        "positions": _ints([0, 0, 1, 1]),
        "q_len": 1,
    }
    with pytest.raises(SchemaError, match=says):
        window_append(**given | change)
    assert torch.equal(pool.arena, before)


def test_registration_is_sound() -> None:
    pool = _pool(3, 4, 24, 8)
    arguments = (torch.randn(4, 24), *_state(pool), _ints([0, 1, -1, 2]), _ints([3, 4, 0, 9]), 1)
    torch.library.opcheck(
        torch.ops.graphcache.window_append.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )


# The interpreter: these functions run in a child, whose Triton interprets.


def _exact_entries(rng: np.random.Generator, count: int, width: int, rope_dim: int) -> torch.Tensor:
    """Rows whose scale is a power of two and whose values are e4m3 times that."""
    codes = rng.integers(0, 256, (count, width))
    codes[codes & 0x7F == 0x7F] = 0x80
    codes[:, rng.integers(0, width - rope_dim)] = 0x7E
    return torch.from_numpy((TABLE[codes] * 2.0 ** rng.integers(-9, 30, (count, 1))).astype("f4"))


def interpreted_cases() -> None:
    rng = np.random.default_rng(0)
    for rows, width, rope_dim in ((4, 24, 8), (5, 56, 8), (3, 512, 64), (1, 40, 24)):
        for q_len in (1, 3, rows, rows + 1, 2 * rows + 3):
            for dtype in DTYPES:
                _compare_interpreted(rng, rows, width, rope_dim, q_len, dtype)
    _interpreted_far_slots()


def _compare_interpreted(rng, rows, width, rope_dim, q_len, dtype) -> None:
    for slots, positions in (_runs(rng, 5, rows, q_len, 4), _covered_run(rows, q_len)):
        _compare_batch(rng, rows, width, rope_dim, q_len, dtype, slots, positions)


def _compare_batch(rng, rows, width, rope_dim, q_len, dtype, slots, positions) -> None:
    kernel, reference = (_pool(6, rows, width, rope_dim) for _ in range(2))
    kernel.arena.random_(0, 256)
    reference.arena.copy_(kernel.arena)
    wide = torch.full((len(slots), width + 8), 3.0, dtype=dtype)
    entries = wide[:, 8:]
    entries.copy_(_exact_entries(rng, len(slots), width, rope_dim))
    entries[slots < 0] = torch.nan
    if slots[0] >= 0:
        entries[0] = 0
    module._launch(entries, *_guarded(kernel), slots, positions, q_len)
    module._reference(entries, *_guarded(reference), slots, positions, q_len)
    assert torch.equal(kernel.arena, reference.arena), (rows, width, q_len, dtype)


def _interpreted_far_slots() -> None:
    """A slot whose bytes begin past 2**31 floats from the first."""
    zeros, torch.zeros = torch.zeros, lazy_zeros
    pool = _pool(257, 2, 24, 8, filler=2**25)
    torch.zeros = zeros
    assert 256 * pool["swa_inv"].stride(0) > 2**31
    entries = _exact_entries(np.random.default_rng(1), 2, 24, 8)
    slots, positions = _ints([256, 64]), _ints([3, 3])
    module._launch(entries, *_state(pool), slots, positions, 1)
    expected = Fp8TokenRow(24, 8).encode(entries)
    for index, slot in enumerate((256, 64)):
        assert torch.equal(pool["swa_fp8"][slot, 1], expected.fp8[index])
        assert torch.equal(pool["swa_rope"][slot, 1], expected.rope[index])
        assert pool["swa_inv"][slot, 1] == expected.inv[index]
        assert pool["swa_pos"][slot, 1] == 3
    assert (pool["swa_pos"] >= 0).sum() == 2


def test_the_kernel_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    call = "from tests.ops.test_window_append import interpreted_cases as run; run(); print('done')"
    child = subprocess.run(
        [sys.executable, "-c", call],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.endswith("done\n")


@pytest.mark.parametrize("entry_type", ["*fp32", "*bf16"])
@pytest.mark.parametrize("outruns", [False, True])
def test_the_kernel_builds_for_an_h200(entry_type: str, outruns: bool) -> None:
    pytest.importorskip("triton")
    strides = ("entry", "fp8", "rope", "inv", "pos")
    signature = {
        "entries": entry_type,
        "swa_fp8": "*u8",
        "swa_rope": "*bf16",
        "swa_inv": "*fp32",
        "swa_pos": "*i32",
        "slots": "*i32",
        "positions": "*i32",
        "q_len": "i32",
    } | {f"{name}_stride": "i64" for name in strides}
    constexprs = {
        "RING_ROWS": 128,
        "WIDTH": 512,
        "ROPE_DIM": 64,
        "FP8_BLOCK": 512,
        "ROPE_BLOCK": 64,
        "OUTRUNS": outruns,
    }
    kernel = module._window_append_kernel
    assert build_for_sm90(kernel, signature, constexprs, num_warps=1).startswith(b"\x7fELF")


# A GPU: bit for bit.


def _same_on_both(
    entries: torch.Tensor,
    rope_dim: int,
    rows: int,
    slots: torch.Tensor,
    positions: torch.Tensor,
    q_len: int,
    max_slots: int,
) -> None:
    """Run on GPU and CPU over the same junk and compare all bytes."""
    host = _pool(max_slots + 1, rows, entries.shape[1], rope_dim)
    host.arena.random_(0, 256)
    device = _pool(max_slots + 1, rows, entries.shape[1], rope_dim, "cuda")
    device.arena.copy_(host.arena)
    window_append(entries, *_guarded(host), slots, positions, q_len)
    moved = (x.to("cuda") for x in (slots, positions))
    window_append(entries.to("cuda"), *_guarded(device), *moved, q_len)
    for name in NAMES:
        mine, theirs = device[name].cpu().contiguous(), host[name].contiguous()
        differs = (mine.view(torch.uint8) != theirs.view(torch.uint8)).sum()
        assert not differs, f"{name}: {differs} bytes differ"
    assert torch.equal(device.arena.cpu(), host.arena)


def _one_row_each(entries: torch.Tensor, rope_dim: int = 64) -> None:
    count = len(entries)
    positions = torch.zeros(count, dtype=torch.int32)
    _same_on_both(entries, rope_dim, 1, _ints(list(range(count))), positions, 1, count)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_boundary_is_the_references(dtype: torch.dtype) -> None:
    """Values within 4 ulp of every midpoint of two codes, at thousands of scales of all sizes."""
    rng = np.random.default_rng(4)
    exponents = np.concatenate([rng.uniform(-4, 4, 3000), rng.uniform(-7, 38, 3000)])
    amax = (rng.uniform(1, 10, 6000) * 10.0 ** (exponents - 1)).astype(np.float32)
    inv = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
    ulps = np.arange(-4, 5)
    entries = np.empty((6000, 512), np.float32)
    for index in range(6000):
        middle = rng.permutation(MIDPOINTS).astype(np.float32)[:, None] * inv[index]
        near = (middle.view(np.int32) + ulps).view(np.float32).ravel()
        near = near[np.abs(near) <= amax[index]][:511]
        entries[index] = rng.uniform(-1, 1, 512) * amax[index]
        entries[index, : len(near)] = near * rng.choice([-1, 1], len(near))
        entries[index, 447] = amax[index] * rng.choice([-1, 1])
    _one_row_each(torch.from_numpy(entries).to(dtype))


@pytest.mark.gpu
def test_every_code_at_unit_scale_is_itself_on_the_device() -> None:
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F])
    entries = torch.zeros(2, 512)
    entries[0, : len(codes)] = torch.from_numpy(TABLE[codes])
    entries[1, : len(codes)] = entries[0, : len(codes)] * 2**20
    pool = _pool(2, 1, 512, 64, "cuda")
    slots, positions = _ints([0, 1]).cuda(), _ints([0, 0]).cuda()
    window_append(entries.cuda(), *_state(pool), slots, positions, 1)
    stored = pool["swa_fp8"][:2, 0, : len(codes)].cpu().numpy()
    assert (stored == codes).all()
    assert pool["swa_inv"][:2, 0].tolist() == [1, 2**20]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bf16_pattern_is_the_references(dtype: torch.dtype) -> None:
    """All 65536 patterns, denormals, infinities and NaN too; the rotated part stays finite."""
    bits = np.random.default_rng(5).permutation(np.tile(np.arange(65536, dtype=np.uint16), 7))
    body = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(-1, 448).to(dtype)
    _one_row_each(torch.cat([body, torch.randn(len(body), 64).to(dtype)], 1))
    bits &= 0xBFFF  # finite rows alone, up to 2
    body = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(-1, 448).to(dtype)
    _one_row_each(torch.cat([body, torch.randn(len(body), 64).to(dtype)], 1))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_on_the_device(bad: float) -> None:
    entries = torch.randn(8, 512)
    for index in range(7):
        entries[index, index * 64] = bad
    entries[7, 3] = -0.0
    _one_row_each(entries)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "rope_dim"), [(24, 8), (56, 8), (512, 64), (576, 64), (1088, 64)]
)
@pytest.mark.parametrize("q_len", [1, 3, 8, 9, 40])
def test_the_kernel_on_the_device(dtype, width, rope_dim, q_len) -> None:
    rng = np.random.default_rng(q_len)
    for batch in (1, 5, 32):
        slots, positions = _runs(rng, 32, 8, q_len, batch)
        wide = torch.randn(len(slots), width + 8).to(dtype)
        entries = wide[:, 8:]
        entries[slots < 0] = torch.nan
        _same_on_both(entries, rope_dim, 8, slots, positions, q_len, 32)


@pytest.mark.gpu
def test_slots_past_two_to_the_31_elements_on_the_device() -> None:
    pool = _pool(257, 2, 24, 8, "cuda", filler=2**25)
    assert 256 * pool["swa_inv"].stride(0) > 2**31
    entries = torch.randn(2, 24)
    slots, positions = _ints([256, 64]).cuda(), _ints([3, 3]).cuda()
    window_append(entries.cuda(), *_state(pool), slots, positions, 1)
    expected = Fp8TokenRow(24, 8).encode(entries)
    assert torch.equal(pool["swa_fp8"][[256, 64], 1].cpu(), expected.fp8)
    assert torch.equal(pool["swa_inv"][[256, 64], 1].cpu(), expected.inv)
    assert (pool["swa_pos"] >= 0).sum() == 2


@pytest.mark.gpu
def test_an_append_is_one_node_and_replays_with_other_slots() -> None:
    pool, host = _pool(8, 4, 512, 64, "cuda"), _pool(8, 4, 512, 64)
    entries = torch.randn(8, 512, device="cuda")
    slots, positions = (torch.full((8,), v, dtype=torch.int32, device="cuda") for v in (-1, 0))

    def step() -> None:
        window_append(entries, *_state(pool), slots, positions, 1)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        step()
    assert _node_count(graph.raw_cuda_graph()) == 1
    graph.instantiate()
    for position in range(9):
        order = torch.randperm(8).int()
        order[5:] = -1
        values, place = torch.randn(8, 512), torch.full((8,), position, dtype=torch.int32)
        entries.copy_(values)
        slots.copy_(order)
        positions.copy_(place)
        graph.replay()
        window_append(values, *_state(host), order, place, 1)
        torch.cuda.synchronize()
        assert torch.equal(pool.arena.cpu(), host.arena)


def _node_count(graph: int) -> int:
    driver = pytest.importorskip("cuda.bindings.driver")
    get: Callable[..., tuple] = driver.cuGraphGetNodes
    error, _, count = get(driver.CUgraph(graph))
    assert error == driver.CUresult.CUDA_SUCCESS
    return count
