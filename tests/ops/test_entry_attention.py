"""`entry_attention`: reference and kernels against an oracle in float64, on memory full of NaN.

Under Triton's interpreter the kernel runs with float32 queries over float32 rows (its casts of e4m3
and bfloat16 are wrong for some values); on a GPU with both kinds of query over every format.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache.errors import SchemaError
from graphcache.ops import entry_attention as module
from graphcache.ops.absorb import Rotation
from graphcache.ops.entry_attention import entry_attention
from graphcache.rows import RowFormat, Rows
from tests.kernel_build import build_for_sm90, needs_loop_interpreter
from tests.ops.absorb_cases import run_in_interpreter
from tests.ops.entry_attention_cases import Batch, Case, make

FORMATS = [RowFormat.FP32, RowFormat.BF16, RowFormat.FP8, RowFormat.MODEL1]
V4 = {"dim": 512, "rope_dim": 64}

RUNS = ((3, 40, 1), (-1, 0, 0), (0, 0, 1), (4, 7, 1), (1, 17, 1))
SHAPES = {
    "all entries": Case(RUNS),
    "some selected": Case(RUNS, top_k=3),
    "window only": Case(RUNS, compression=0),
    "window of 1": Case(RUNS, window=1, ring=1, compression=1, width=20),
    "no entry yet": Case(((2, 0, 1), (1, 2, 1)), compression=4),
    "one head": Case(RUNS, heads=1),
    "many heads": Case(RUNS, heads=20),
    "other dims": Case(RUNS, dim=64, rope_dim=16),
    "several tokens": Case(((2, 15, 3), (-1, 0, 0), (0, 30, 4), (3, 0, 1)), q_len=4),
    "several tokens, selected": Case(((2, 15, 3), (0, 30, 4)), q_len=4, top_k=2),
    "a chunk": Case(((2, 0, 9), (1, 12, 7)), q_len=9, chunk=True),
    "a chunk, selected": Case(((2, 3, 6), (-1, 0, 0), (1, 12, 2)), q_len=6, chunk=True, top_k=2),
}
LONG = Case(((1, 700, 1), (0, 30, 1), (3, 383, 1)), compression=1, held=16, width=48)
"""Enough entries for several splits; in the others all fall to one."""


def run(batch: Batch) -> Tensor:
    return entry_attention(
        batch.q, batch.ring, batch.slots, batch.positions, batch.q_len, **batch.options
    )


def launched(batch: Batch) -> Tensor:
    """As `run`, with the kernels whatever the device."""
    operation = module._op
    module._op = module.kernel.launch
    try:
        return run(batch)
    finally:
        module._op = operation


def check(found: Tensor, batch: Batch, what: str = "") -> None:
    """Float32 throughout: rounding alone. With bfloat16 queries weights are rounded to 8 bits, and
    so is the result: each by 2^-9 of rows whose largest value is about 4.5.
    """
    error = np.abs(found.double().cpu().numpy() - batch.expected).max()
    bound = 2e-5 if found.dtype == torch.float32 else 2 * 2**-9 * 4.5
    assert error <= bound, (what, error)
    padding = batch.slots.cpu() < 0
    assert not found.cpu()[padding].any()


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_the_reference_against_the_oracle(case: Case, row_format: RowFormat) -> None:
    dims = V4 if row_format is RowFormat.MODEL1 else {}
    batch = make(replace(case, row_format=row_format, **dims))
    check(run(batch), batch)


def test_the_reference_over_many_entries() -> None:
    batch = make(LONG)
    check(run(batch), batch)


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_a_sink_that_takes_nothing_or_all(sink: float) -> None:
    batch = make(SHAPES["all entries"])
    batch.options["sinks"] = torch.full((3,), sink)
    found = run(batch)
    if sink > 0:
        assert not found.any()
    else:
        batch.options["sinks"] -= 1e4
        torch.testing.assert_close(found, run(batch), rtol=0, atol=0)
        assert found.isfinite().all()
        assert found.any()


# The interpreter: these functions run in a child, whose Triton interprets.


def interpreted_shapes() -> None:
    for name, case in SHAPES.items():
        batch = make(case)
        check(launched(batch), batch, name)


def interpreted_splits() -> None:
    batch = make(LONG)
    shape, _ = module.kernel.tiling(batch.q, batch.ring, 8, 5, 48 * 16, split=True)
    assert shape["SPLITS"] > 1
    whole = launched(batch)
    check(whole, batch)
    _check_alone(batch, whole)


def _check_alone(batch: Batch, whole: Tensor) -> None:
    """Each row has the same bits by itself."""
    for index in range(len(batch.slots) // batch.q_len):
        of = slice(index * batch.q_len, (index + 1) * batch.q_len)
        assert torch.equal(launched(batch.row(index)), whole[of])


@needs_loop_interpreter
@pytest.mark.parametrize("function", [interpreted_shapes, interpreted_splits])
def test_the_kernels_under_the_interpreter(function: Any) -> None:
    pytest.importorskip("triton")
    run_in_interpreter(function)


# Builds for an H200.


class _Recorder:
    def __getitem__(self, grid: tuple[int, ...]) -> _Recorder:
        return self

    def __call__(self, *given: Any, **constants: Any) -> None:
        self.given, self.constants = given, constants


TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}


def _build(batch: Batch, integers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {name: getattr(module.kernel, name) for name in ("_attend_kernel", "_add_kernel")}
    recorders = {name: _Recorder() for name in kernels}
    with monkeypatch.context() as patch:
        for name, recorder in recorders.items():
            patch.setattr(module.kernel, name, recorder)
        launched(batch)
    for name, kernel in kernels.items():
        recorder = recorders[name]
        if not hasattr(recorder, "given"):
            continue
        signature = {}
        for argument, given in zip(kernel.arg_names, recorder.given, strict=False):
            is_tensor, is_float = isinstance(given, Tensor), isinstance(given, float)
            signature[argument] = (
                TYPES[given.dtype] if is_tensor else "fp32" if is_float else integers
            )
        constants = dict(recorder.constants)
        warps = constants.pop("num_warps")
        cubin = build_for_sm90(kernel, signature, constants, num_warps=warps)
        assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("row_format", FORMATS)
def test_the_kernels_build_for_an_h200(row_format, monkeypatch) -> None:
    """V4-Flash's CSA with bfloat16 queries, and a chunk with float32 ones."""
    pytest.importorskip("triton")
    flash = Case(
        ((0, 9, 1),), heads=64, window=128, ring=128, compression=4, held=32, top_k=512, width=20,
        row_format=row_format, dtype=torch.bfloat16, **V4,
    )  # fmt: skip
    _build(make(flash), "i32", monkeypatch)
    chunk = replace(flash, q_len=2, chunk=True, top_k=0, dtype=torch.float32)
    _build(make(chunk), "i64", monkeypatch)


def test_traces_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    batch = make(SHAPES["some selected"])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        batch.q = mode.from_tensor(batch.q)
        found = run(batch)
    assert (found.shape, found.dtype) == (batch.q.shape, batch.q.dtype)


# What is refused.


def _with(batch: Batch, **changes: Any) -> Batch:
    batch.options |= changes
    return batch


def _plain(batch: Batch, rows: Rows) -> Rows:
    return Rows(torch.zeros(*rows.values.shape[:2], batch.q.shape[2], dtype=torch.bfloat16))


BAD = {
    "q must be": lambda b: setattr(b, "q", b.q.double()),
    "q must be [T, H, d]": lambda b: setattr(b, "q", b.q[0]),
    "slots must be": lambda b: setattr(b, "slots", b.slots.long()),
    "positions must be": lambda b: setattr(b, "positions", b.positions[:-1]),
    "don't make whole rows": lambda b: setattr(b, "q_len", 2),
    "sinks must be": lambda b: _with(b, sinks=b.options["sinks"][:-1]),
    "cos and sin must be": lambda b: _with(
        b, rotation=Rotation(*(part[:-1] for part in b.options["rotation"]))
    ),
    "ring": lambda b: setattr(b, "ring", Rows(b.ring.values[..., :-1])),
    "can't hold a window of 9": lambda b: _with(b, window=9),
    "own must be": lambda b: _with(b, own=b.ring),
    "entries need": lambda b: _with(b, table=None),
    "entries need a compression": lambda b: _with(b, compression=0),
    "share a format": lambda b: _with(
        b, entries=b.options["entries"].map(lambda part: part.new_zeros(part.shape).bfloat16())
    )
    and setattr(b, "ring", Rows(b.ring.values[..., :16].byte(), b.ring.values[..., 16:].bfloat16(),
                                b.ring.values[..., 0].contiguous())),
    "selected must be": lambda b: _with(b, selected=b.options["selected"].long()),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message: str) -> None:
    batch = make(SHAPES["some selected"])
    BAD[message](batch)
    with pytest.raises(SchemaError, match=r"entry_attention: .*" + message.replace("[", r"\[")):
        run(batch)


# A GPU.


def _flash(row_format: RowFormat, dtype: torch.dtype, **changes: Any) -> Case:
    runs = ((3, 700, 1), (-1, 0, 0), (0, 0, 1), (4, 131, 1), (1, 517, 1))
    case = Case(
        runs, window=128, ring=128, compression=4, held=32, heads=64, width=6, dtype=dtype,
        row_format=row_format, **V4,
    )  # fmt: skip
    return replace(case, **changes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row_format", FORMATS)
def test_the_kernels_on_the_device(row_format: RowFormat, dtype: torch.dtype) -> None:
    """Small shapes of every kind, and V4's dims with few and many rows, 64 and 128 heads."""
    dims = V4 if row_format is RowFormat.MODEL1 else {}
    cases = {name: replace(case, **dims) for name, case in SHAPES.items()}
    cases["splits"] = replace(LONG, **dims)
    cases["flash, all"] = _flash(row_format, dtype)
    cases["flash, selected"] = _flash(row_format, dtype, top_k=100)
    cases["pro"] = _flash(row_format, dtype, heads=128)
    cases["flash, long"] = _flash(
        row_format, dtype, runs=((0, 2600, 1), (2, 900, 1)), compression=1, width=82
    )
    for name, case in cases.items():
        batch = make(replace(case, row_format=row_format, dtype=dtype)).to("cuda")
        found = run(batch)
        check(found, batch, name)
        assert torch.equal(found, run(batch))
        for index in range(len(batch.slots) // batch.q_len):
            of = slice(index * batch.q_len, (index + 1) * batch.q_len)
            assert torch.equal(run(batch.row(index)), found[of]), name


@pytest.mark.gpu
def test_slots_past_two_to_the_31_elements() -> None:
    """A ring of the same rows whose slots lie far apart."""
    batch = make(_flash(RowFormat.FP8, torch.bfloat16)).to("cuda")
    near = run(batch)
    stride = (1 << 31) // 4 + 4096
    values = batch.ring.values
    far = torch.empty(stride * 5 + values[0].numel(), dtype=torch.uint8, device="cuda")
    moved = far.as_strided(values.shape, (stride, *values.stride()[1:]))
    moved.copy_(values)
    batch.ring = batch.ring._replace(values=moved)
    assert torch.equal(run(batch), near)
