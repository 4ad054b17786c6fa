"""scan_update: reference and kernel against the recurrence, token by token in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache import Field, StatePool
from graphcache.errors import SchemaError
from graphcache.ops.scan_update import scan_update
from tests.kernel_build import build_for_sm90, needs_loop_interpreter
from tests.ops.absorb_cases import run_in_interpreter
from tests.ops.run_cases import draw, random_runs, slots_of

module = importlib.import_module("graphcache.ops.scan_update")
Scan = Callable[..., Tensor]
SLOTS = 4
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""Of an output, by the sum of the magnitudes that make it up."""


def numbers(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.double().cpu().numpy()
    return array


class Weights:
    """What a layer has by head. Biases from where softplus is its argument to where it is exp."""

    def __init__(self, rng: np.random.Generator, heads: int, dtype: torch.dtype, device: str):
        self.a_log = torch.log(torch.arange(1, heads + 1).double()).to(dtype).to(device)
        self.d = draw(rng, heads, dtype=dtype, device=device)
        self.dt_bias = torch.linspace(-9, 24, heads).to(dtype).to(device)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.a_log, self.d, self.dt_bias


def inputs_of(
    rng: np.random.Generator,
    tokens: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, ...]:
    """x, dt, b and c as slices of two projections."""
    heads, dim, groups, size = shape
    parts = [heads * dim, groups * size, groups * size]
    x, b, c = draw(rng, tokens, sum(parts) + 3, dtype=dtype, device=device)[:, 1:-2].split(parts, 1)
    dt = draw(rng, tokens, heads + 5, dtype=dtype, device=device)[:, 5:]
    b, c = (each.unflatten(1, (groups, size)) for each in (b, c))
    return x.unflatten(1, (heads, dim)), dt, b, c


def check_requests(
    scan: Scan,
    seed: int,
    *,
    shape: tuple[int, int, int, int] = (4, 6, 2, 5),
    q_len: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Steps of random runs: outputs, the states of all slots, and every other byte of the pool."""
    rng = np.random.default_rng(seed)
    heads, dim, groups, size = shape
    fields = [
        Field("other", (3,), torch.uint8),
        Field("state", (heads, dim, size), torch.float32),
    ]
    pool = StatePool(fields, SLOTS, device)
    weights = Weights(rng, heads, dtype, device)
    a_log, d, dt_bias = (numbers(each) for each in weights.all())
    states = np.zeros((SLOTS, heads, dim, size))
    group = np.arange(heads) // (heads // groups)
    pool["state"][SLOTS] = torch.nan
    for _ in range(3):
        runs = random_runs(rng, SLOTS, q_len)
        slots = slots_of(runs, q_len, device)
        given = inputs_of(rng, len(slots), shape, dtype, device)
        for each in given:
            each[slots < 0] = torch.nan
        before = pool.arena.clone()
        out = scan(*given, pool["state"], *weights.all(), slots, q_len)
        assert out.shape == given[0].shape and out.dtype == dtype
        x, dt, b, c = (numbers(each) for each in given)
        expected, summed = np.zeros(x.shape), np.zeros(x.shape)
        for row, (slot, count) in enumerate(runs):
            for t in range(row * q_len, row * q_len + count):
                step = np.logaddexp(0, dt[t] + dt_bias)
                fade = np.exp(-np.exp(a_log) * step)[:, None, None]
                outer = (step[:, None] * x[t])[:, :, None] * b[t][group][:, None, :]
                states[slot] = fade * states[slot] + outer
                terms, skipped = states[slot] * c[t][group][:, None, :], d[:, None] * x[t]
                expected[t] = terms.sum(-1) + skipped
                summed[t] = np.abs(terms).sum(-1) + np.abs(skipped)
        assert (np.abs(numbers(out) - expected) <= TOLERANCE[dtype] * summed).all()
        torch.testing.assert_close(
            pool["state"][:-1].double().cpu(), torch.from_numpy(states), atol=1e-4, rtol=2e-5
        )
        stepped = [slot for slot, count in runs if count]
        start, end = pool.byte_range("state")
        before[stepped, start:end] = pool.arena[stepped, start:end]
        assert torch.equal(pool.arena, before)


def check_any_lengths(scan: Scan, device: str = "cpu") -> None:
    """A run in pieces, alone or beside others, leaves what it leaves as a whole, bit for bit."""
    rng = np.random.default_rng(1)
    shape = (4, 24, 2, 16)
    given = inputs_of(rng, 21, shape, torch.float32, device)
    weights = Weights(rng, 4, torch.float32, device).all()
    results = []
    for pieces in ((21,), (1,) * 21, (9, 1, 11), (4, 17)):
        state = torch.zeros(3, 4, 24, 16, device=device)
        out = []
        for at, n in zip(np.cumsum((0, *pieces)), pieces, strict=False):
            piece = [each[at : at + n] for each in given]
            slots = slots_of([(1, n)], n, device)
            if n == 9:
                piece = [torch.cat((torch.ones_like(each), each)) for each in piece]
                slots = slots_of([(0, 5), (1, n)], n, device)
            out.append(scan(*piece, state, *weights, slots, n)[-n:])
        results.append((torch.cat(out), state[1]))
    for told, state in results[1:]:
        assert torch.equal(told, results[0][0]) and torch.equal(state, results[0][1])


def check_small_steps(scan: Scan, device: str = "cpu") -> None:
    """softplus keeps its digits where exp(v) is far below 1."""
    heads = 16
    bias = torch.linspace(-30, 21, heads, device=device)
    nothing, one = torch.zeros(heads, device=device), torch.ones(1, heads, 1, device=device)
    state = torch.zeros(1, heads, 1, 1, device=device)
    key = torch.ones(1, 1, 1, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    scan(one, nothing[None], key, key, state, nothing, nothing, bias, slots, 1)
    exact = torch.from_numpy(np.logaddexp(0, numbers(bias)))
    torch.testing.assert_close(state.double().cpu().flatten(), exact, atol=0, rtol=1e-5)


@pytest.mark.parametrize("q_len", [1, 2, 9])
@pytest.mark.parametrize("shape", [(4, 6, 2, 5), (3, 8, 1, 16), (4, 4, 4, 3)])
def test_against_the_recurrence(shape: tuple[int, int, int, int], q_len: int) -> None:
    check_requests(scan_update, q_len, shape=shape, q_len=q_len)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_the_recurrence_in_half(dtype: torch.dtype) -> None:
    check_requests(scan_update, 7, q_len=5, dtype=dtype)


def test_runs_in_pieces() -> None:
    check_any_lengths(scan_update)


def test_small_steps() -> None:
    check_small_steps(scan_update)


def test_no_rows() -> None:
    none = torch.zeros(0, 4, 2)
    weight, slots = torch.zeros(4), torch.zeros(0, dtype=torch.int32)
    state = torch.zeros(2, 4, 2, 2)
    out = scan_update(none, none[..., 0], none, none, state, *[weight] * 3, slots, 1)
    assert out.shape == (0, 4, 2)


def interpreted() -> None:
    for seed, (shape, q_len) in enumerate((((4, 6, 2, 5), 1), ((3, 8, 1, 16), 3))):
        check_requests(module._launch, seed, shape=shape, q_len=q_len)
    check_requests(module._launch, 3, shape=(2, 5, 1, 2048), q_len=2)
    check_any_lengths(module._launch)
    check_small_steps(module._launch)


@needs_loop_interpreter
def test_the_kernel_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_in_interpreter(interpreted)


@pytest.mark.parametrize("x", ["bf16", "fp32"])
@pytest.mark.parametrize(("dim", "size"), [(64, 128), (48, 80)])
def test_the_kernel_builds_for_an_h200(x: str, dim: int, size: int) -> None:
    pytest.importorskip("triton")
    kernel = module._scan_update_kernel
    signature = dict.fromkeys(("x", "dt", "b", "c", "a_log", "d", "dt_bias", "out"), f"*{x}")
    signature |= {"state": "*fp32", "slots": "*i32", "q_len": "i32"}
    signature |= {name: "i32" for name in kernel.arg_names if name.endswith("stride")}
    constants = {
        "HEADS": 8, "SHARED": 4, "DIM": dim, "STATE": size, "DIM_BLOCK": 32, "STATE_BLOCK": 128,
    }  # fmt: skip
    assert build_for_sm90(kernel, signature, constants).startswith(b"\x7fELF")


def test_it_declares_what_it_writes() -> None:
    schema = torch.ops.graphcache.scan_update.default._schema
    assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == ["state"]


@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        (0, lambda x: x.double(), "x must be"),
        (0, lambda x: x.flatten(1), r"x must be \[T, H, P\]"),
        (0, lambda x: x.mT.contiguous().mT, "x must be"),
        (1, lambda dt: dt[:2], r"dt must be \[4, 4\]"),
        (2, lambda b: b.repeat(1, 2, 1)[:, :3], "4 heads are no multiple of 3 groups"),
        (3, lambda c: c[:, :1], r"c must be \[4, 2, 5\]"),
        (4, lambda state: state.bfloat16(), "state must be .* float32"),
        (4, lambda state: state.mT.contiguous().mT, "state must be"),
        (5, lambda a_log: a_log[:2], r"a_log must be \[4\]"),
        (6, lambda d: d.double(), "d must be"),
        (7, lambda bias: bias.repeat(2)[::2], "dt_bias must be"),
        (8, lambda slots: slots.long(), r"slots must be \[4\] int32"),
        (9, lambda q_len: 3, "no rows of q_len=3"),
    ],
)
def test_bad_input_is_refused(argument: int, change: Callable[[Any], Any], message: str) -> None:
    state = torch.ones(3, 4, 6, 5)
    arguments: list[Any] = [
        torch.ones(4, 4, 6), torch.ones(4, 4), torch.ones(4, 2, 5), torch.ones(4, 2, 5), state,
        torch.ones(4), torch.ones(4), torch.ones(4),
        torch.tensor([0, 0, 2, -1], dtype=torch.int32), 2,
    ]  # fmt: skip
    arguments[argument] = change(arguments[argument])
    with pytest.raises(SchemaError, match=message):
        scan_update(*arguments)
    assert (state == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 6, 2, 5), (24, 64, 1, 128), (8, 48, 4, 80)])
@pytest.mark.parametrize("q_len", [1, 3, 20])
def test_the_kernel_against_the_recurrence(
    q_len: int, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    check_requests(scan_update, q_len, shape=shape, q_len=q_len, dtype=dtype, device="cuda")


@pytest.mark.gpu
def test_the_kernel_on_runs_in_pieces_and_small_steps() -> None:
    check_any_lengths(scan_update, "cuda")
    check_small_steps(scan_update, "cuda")


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_elements() -> None:
    """Slots so far apart that 32 bits would wrap round into the wrong one."""
    stride = 3 * 2**29
    memory = torch.zeros(2 * stride + 64, device="cuda")
    state = memory.as_strided((3, 2, 2, 2), (stride, 4, 2, 1))
    slots = torch.tensor([2], dtype=torch.int32, device="cuda")
    one = torch.ones(1, 2, 2, device="cuda")
    weight = torch.ones(2, device="cuda")
    scan_update(one, one[..., 0], one, one, state, weight, weight, weight, slots, 1)
    assert (state[2] > 0).all() and int(memory.count_nonzero()) == 8
