"""StatePool: one allocation, row-major; layout, resets, copies, and rows past 2**31 elements."""

from __future__ import annotations

import math
import mmap
import resource

import numpy as np
import pytest
import torch

from graphcache.errors import SchemaError, UnsupportedPlatform
from graphcache.pool import Field, StatePool

FIELDS = (
    Field("ring", (5, 3), torch.bfloat16),
    Field("tags", (5,), torch.int32, initial=-1, reset=True),
    Field("codes", (7,), torch.uint8),
    Field("scale", (5,), torch.float32, initial=1),
    Field("seed", (), torch.int64),
    Field("sums", (2, 2), torch.float32, reset=True),
)


def _pool(rows: int = 4) -> StatePool:
    return StatePool(FIELDS, rows, "cpu")


def _fill(pool: StatePool, seed: int = 0) -> np.ndarray:
    """Random bytes everywhere; returns a copy of them."""
    generator = torch.Generator().manual_seed(seed)
    pool.arena.random_(0, 256, generator=generator)
    return pool.arena.numpy().copy()


def _address(tensor: torch.Tensor, pool: StatePool) -> int:
    return tensor.data_ptr() - pool.arena.data_ptr()


def test_views_have_a_scratch_row_and_start_as_declared() -> None:
    pool = _pool()
    assert pool.rows == pool.scratch_row == 4
    for field in FIELDS:
        view = pool[field.name]
        assert view.shape == (5, *field.shape)
        assert view.dtype == field.dtype
        assert (view == field.initial).all()


def test_a_row_is_one_aligned_range_and_fields_do_not_overlap() -> None:
    pool = _pool()
    stride = pool.row_stride_bytes
    assert stride % 256 == 0
    owner = np.full(stride, "", dtype=object)
    for field in FIELDS:
        start = _address(pool[field.name][0], pool)
        small = field.row_bytes < 16
        assert start % (field.dtype.itemsize if small else 16) == 0
        stop = start + math.prod(field.shape) * field.dtype.itemsize
        assert stop <= stride
        assert pool.byte_range(field.name) == (start, stop)
        assert not any(owner[start:stop])
        owner[start:stop] = field.name
        for row in range(5):
            assert _address(pool[field.name][row], pool) == row * stride + start
            assert pool[field.name][row].is_contiguous()
    last = max(index for index in range(stride) if owner[index])
    assert stride - last <= 256


def test_scalars_of_a_row_share_a_sector() -> None:
    names = [f"scalar{index}" for index in range(6)]
    dtypes = [torch.int32, torch.int64, torch.float32, torch.int32, torch.int32, torch.int32]
    fields = [Field(name, (), dtype) for name, dtype in zip(names, dtypes, strict=True)]
    pool = StatePool(fields, 2, "cpu")
    starts = [_address(pool[name][1], pool) - pool.row_stride_bytes for name in names]
    assert starts == [0, 8, 16, 20, 24, 28]


def test_fields_with_a_reset_rule_come_first() -> None:
    pool = _pool()
    first = {name: _address(pool[name][0], pool) for name in (f.name for f in FIELDS)}
    resets = [first[f.name] for f in FIELDS if f.reset]
    others = [first[f.name] for f in FIELDS if not f.reset]
    assert max(resets) < min(others)


def test_views_and_arena_are_one_memory() -> None:
    pool = _pool()
    pool["tags"][2, 3] = 0x01020304
    start = _address(pool["tags"][2, 3], pool)
    assert pool.arena.flatten()[start : start + 4].tolist() == [4, 3, 2, 1]


def test_reset_row_touches_reset_fields_of_that_row_only() -> None:
    pool = _pool()
    before = _fill(pool)
    pool.reset_row(2)
    assert (pool["tags"][2] == -1).all() and (pool["sums"][2] == 0).all()
    after = pool.arena.numpy()
    changed = {tuple(index) for index in np.argwhere(before != after)}
    assert {row for row, _ in changed} == {2}
    last_reset = max(_address(pool[f.name][0], pool) + f.row_bytes for f in FIELDS if f.reset)
    assert all(byte < last_reset for _, byte in changed)


def test_reset_does_not_depend_on_what_scratch_holds() -> None:
    pool = _pool()
    _fill(pool)
    pool.reset_row(0)
    assert (pool["tags"][0] == -1).all() and (pool["sums"][0] == 0).all()


def test_a_pool_with_nothing_to_reset() -> None:
    pool = StatePool([Field("ring", (4,), torch.float32)], 2, "cpu")
    before = _fill(pool)
    pool.reset_row(1)
    assert (pool.arena.numpy() == before).all()


def test_copy_row_copies_all_that_a_row_owns_and_nothing_else() -> None:
    pool = _pool()
    before = _fill(pool)
    pool.copy_row(1, 3)
    after = pool.arena.numpy()
    assert (after[3] == before[1]).all()
    assert (after[[0, 1, 2, 4]] == before[[0, 1, 2, 4]]).all()


def test_row_view_reads_a_row_that_was_taken_out() -> None:
    pool = _pool()
    _fill(pool)
    taken = pool.arena[3].clone()
    expected = {f.name: pool[f.name][3].clone() for f in FIELDS}
    pool.arena.zero_()
    for name, value in expected.items():
        view = pool.row_view(name, taken)
        assert view.shape == value.shape and view.dtype == value.dtype
        assert (
            (view.view(torch.uint8) == value.view(torch.uint8)).all()
            if value.dim()
            else (view == value)
        )


def test_memory_counts_scratch_and_alignment() -> None:
    pool = _pool()
    assert pool.memory_bytes() == 5 * pool.row_stride_bytes
    assert pool.memory_bytes() == pool.arena.untyped_storage().nbytes()


def test_fingerprint_is_the_layouts() -> None:
    def of(*fields: Field, rows: int = 4) -> str:
        return StatePool(fields, rows, "cpu").fingerprint

    a, b = Field("a", (4,), torch.float32), Field("b", (4,), torch.float32)
    assert of(a, b) == of(a, b) == of(a, b, rows=9)
    different = {
        of(a, b),
        of(b, a),
        of(a),
        of(a, Field("c", (4,), torch.float32)),
        of(a, Field("b", (2, 2), torch.float32)),
        of(a, Field("b", (4,), torch.int32)),
        of(Field("a", (4,), torch.float32, reset=True), b),
    }
    assert len(different) == 7


def test_wrong_descriptions_are_refused() -> None:
    with pytest.raises(SchemaError, match="a name"):
        Field("", (4,), torch.float32)
    with pytest.raises(SchemaError, match="empty shape"):
        Field("a", (4, 0), torch.float32)
    with pytest.raises(SchemaError, match="at least one field"):
        StatePool([], 4, "cpu")
    with pytest.raises(SchemaError, match="named twice: tags"):
        StatePool([*FIELDS, Field("tags", (), torch.int32)], 4, "cpu")
    for rows in (0, -1):
        with pytest.raises(SchemaError, match="at least one row"):
            _pool(rows)


def lazy_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch.zeros for CPU bytes whose pages come into being when touched."""
    assert dtype == torch.uint8 and device.type == "cpu"
    no_reserve = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    pages = mmap.mmap(-1, math.prod(shape), flags=flags)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_rows_past_two_to_the_31_elements(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of 2 or 8 GiB, of which a few pages exist: torch.zeros would touch them all."""
    wide = 2**24
    fields = [
        Field("ring", (wide,), dtype),
        Field("tag", (), torch.int32, initial=-1, reset=True),
    ]
    before = _resident_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lazy_zeros)
        pool = StatePool(fields, 129, "cpu")
    ring, tag = pool["ring"], pool["tag"]
    far = 128
    assert far * ring.stride(0) >= 2**31
    assert pool.memory_bytes() > 2**31 * dtype.itemsize

    ring[far, :4] = torch.tensor([1, 2, 3, 4], dtype=dtype)
    tag[far] = 7
    pool.copy_row(far, 0)
    pool.reset_row(far)
    assert ring[far, :4].tolist() == [1, 2, 3, 4]
    assert tag[far] == -1
    assert ring[0, :4].tolist() == [1, 2, 3, 4] and tag[0] == 7
    assert not ring[1:far, :4].any()
    assert (tag[1:] == -1).all()
    index = torch.tensor([far, far], dtype=torch.int64)
    assert ring[index, torch.tensor([0, 3])].tolist() == [1, 4]
    # A row touched may bring in a huge page of 2 MiB.
    assert _resident_bytes() - before < 2**30


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_on_the_device() -> None:
    pool = StatePool([Field("ring", (2**24,), torch.float32)], 129, "cuda")
    ring = pool["ring"]
    assert 129 * ring.stride(0) > 2**31
    ring[128, 5] = 3
    pool.copy_row(128, 1)
    assert ring[1, 5] == 3 and ring[128, 5] == 3
    assert ring.count_nonzero() == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(UnsupportedPlatform, match="no CUDA device for 'cuda'; use device='cpu'"):
        StatePool([Field("x", (1,), torch.float32)], 1)
