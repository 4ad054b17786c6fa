"""read_slots and write_slots: reference and kernels against plain loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache import Field, StatePool
from graphcache.errors import SchemaError
from graphcache.ops import slot_rows as module
from graphcache.ops.slot_rows import read_slots, write_slots
from tests.kernel_build import build_for_sm90
from tests.ops.absorb_cases import run_in_interpreter

Read = Callable[[Tensor, Tensor], Tensor]
Write = Callable[[Tensor, Tensor, Tensor], None]

SLOTS = 6
CASES = [
    (torch.float32, (3, 5)),
    (torch.float32, (2100,)),
    (torch.bfloat16, (7,)),
    (torch.float16, (2, 2, 2)),
    (torch.int64, ()),
    (torch.int32, (4,)),
    (torch.uint8, (9,)),
    (torch.bool, (3,)),
    (torch.float8_e4m3fn, (16,)),
]


def random_bytes(rng: np.random.Generator, *shape: int) -> Tensor:
    # 0 and 1 are booleans too. Not `from_numpy`: of no rows it has strides of 0.
    return torch.tensor(rng.integers(0, 2, shape).tolist(), dtype=torch.uint8).reshape(shape)


def as_bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8).cpu()


def check(read: Read, write: Write, dtype: torch.dtype, shape: tuple, device: str = "cpu") -> None:
    """Rows out and in again, with every byte of the pool compared."""
    rng = np.random.default_rng(len(shape))
    fields = [Field("x", shape, dtype), Field("other", (5,), torch.uint8)]
    pool = StatePool(fields, SLOTS, device)
    arena = random_bytes(rng, *pool.arena.shape)
    for slots in ([2, -1, 0, 5], [-1, -1], [3], [], list(rng.permutation(SLOTS))):
        pool.arena.copy_(arena)
        asked = torch.tensor(slots, dtype=torch.int32, device=device)
        start, end = pool.byte_range("x")
        taken = read(pool["x"], asked)
        assert taken.shape == (len(slots), *shape) and taken.dtype == dtype
        by_hand = torch.zeros(len(slots), end - start, dtype=torch.uint8)
        for row, slot in enumerate(slots):
            if slot >= 0:
                by_hand[row] = arena[slot, start:end]
        assert torch.equal(as_bytes(taken).view(by_hand.shape), by_hand)

        put = random_bytes(rng, len(slots), end - start)
        values = put.to(device).view(dtype).view(len(slots), *shape)
        write(pool["x"], asked, values)
        expected = arena.clone()
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected[slot, start:end] = put[row]
        assert torch.equal(pool.arena.cpu(), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_against_loops(dtype: torch.dtype, shape: tuple, device: str) -> None:
    check(read_slots, write_slots, dtype, shape, device)


def interpreted() -> None:
    for dtype, shape in CASES[:-1]:
        check(module._read_launch, module._write_launch, dtype, shape)


def test_the_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_in_interpreter(interpreted)


@pytest.mark.parametrize("bits", ["u8", "i16", "i32", "i64"])
@pytest.mark.parametrize(
    ("kernel", "rows"), [(module._read_kernel, "out"), (module._write_kernel, "values")]
)
def test_the_kernels_build_for_an_h200(kernel: Any, rows: str, bits: str) -> None:
    pytest.importorskip("triton")
    signature = {
        "field": f"*{bits}", "slots": "*i32", rows: f"*{bits}", "field_stride": "i32",
        "elements": "i32",
    }  # fmt: skip
    assert build_for_sm90(kernel, signature, {"BLOCK": 2048}).startswith(b"\x7fELF")


def test_they_declare_what_they_write() -> None:
    def written(name: str) -> list[str]:
        schema = getattr(torch.ops.graphcache, name).default._schema
        return [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]

    assert written("read_slots") == []
    assert written("write_slots") == ["field"]


def test_bad_input_is_refused() -> None:
    pool = StatePool([Field("x", (3, 4), torch.float32)], SLOTS, "cpu")
    slots, values = torch.tensor([1, 2], dtype=torch.int32), torch.ones(2, 3, 4)
    for field in (pool["x"].transpose(1, 2), torch.zeros(()), pool["x"].cfloat().to(torch.cdouble)):
        with pytest.raises(SchemaError, match="whose rows are contiguous"):
            read_slots(field, slots)
    for wrong in (slots.long(), slots[None], slots.repeat(2)[::2]):
        with pytest.raises(SchemaError, match=r"slots must be \[rows\] int32"):
            write_slots(pool["x"], wrong, values)
    for bad in (values[:1], values.double(), values.transpose(1, 2), torch.ones(2, 4, 3).mT):
        with pytest.raises(SchemaError, match="values must be"):
            write_slots(pool["x"], slots, bad)
    assert not pool["x"].any()


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_elements() -> None:
    stride = 3 * 2**29
    memory = torch.zeros(2 * stride + 64, dtype=torch.bfloat16, device="cuda")
    field = memory.as_strided((3, 8), (stride, 1))
    slots = torch.tensor([2], dtype=torch.int32, device="cuda")
    write_slots(field, slots, torch.full((1, 8), 3, dtype=torch.bfloat16, device="cuda"))
    assert (read_slots(field, slots) == 3).all()
    assert int(memory.count_nonzero()) == 8
