"""conv_update: reference and kernel against plain loops over each slot's whole history."""

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
from graphcache.ops.conv_update import conv_update
from tests.kernel_build import build_for_sm90, needs_loop_interpreter
from tests.ops.absorb_cases import run_in_interpreter
from tests.ops.run_cases import draw, random_runs, slots_of

module = importlib.import_module("graphcache.ops.conv_update")
Conv = Callable[..., Tensor]
SLOTS = 5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def by_hand(seen: list[np.ndarray], weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """The output at the last of all inputs that a slot has seen, in float64."""
    taps = weight.shape[1]
    total = np.zeros(weight.shape[0]) if bias is None else bias.copy()
    for back in range(min(taps, len(seen))):
        total += seen[-1 - back] * weight[:, taps - 1 - back]
    return total / (1 + np.exp(-total))


def check_requests(
    conv: Conv,
    seed: int,
    *,
    taps: int = 4,
    channels: int = 7,
    q_len: int = 1,
    has_bias: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Steps of random runs: outputs against each slot's history, and every byte of the pool."""
    rng = np.random.default_rng(seed)
    fields = [
        Field("other", (3,), torch.uint8),
        Field("conv", (taps - 1, channels), dtype, reset=True),
    ]
    pool = StatePool(fields, SLOTS, device)
    weight = draw(rng, channels, taps, dtype=dtype, device=device)
    bias = draw(rng, channels, dtype=dtype, device=device) if has_bias else None
    weights, biases = numbers(weight), None if bias is None else numbers(bias)
    seen: list[list[np.ndarray]] = [[] for _ in range(SLOTS)]
    # What padding reads is never to be seen.
    pool["conv"][SLOTS] = torch.nan
    for _ in range(4):
        runs = random_runs(rng, SLOTS, q_len)
        slots = slots_of(runs, q_len, device)
        wide = draw(rng, len(slots), channels + 3, dtype=dtype, device=device)
        x = wide[:, 2 : 2 + channels]
        x[slots < 0] = torch.nan
        expected_arena = pool.arena.clone()
        out = conv(x, pool["conv"], weight, bias, slots, q_len)
        assert out.shape == x.shape and out.dtype == dtype
        expected = torch.zeros(len(slots), channels, dtype=torch.float64)
        for row, (slot, count) in enumerate(runs):
            for token in range(row * q_len, row * q_len + count):
                seen[slot].append(numbers(x[token]))
                expected[token] = torch.from_numpy(by_hand(seen[slot], weights, biases))
            if count:
                last = np.zeros((taps - 1, channels))
                for back, inputs in enumerate(reversed(seen[slot][1 - taps :])):
                    last[taps - 2 - back] = inputs
                kept = torch.from_numpy(last).to(dtype).to(device)
                start, end = pool.byte_range("conv")
                expected_arena[slot, start:end] = kept.flatten().view(torch.uint8)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.double().cpu(), expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(pool.arena, expected_arena)


def numbers(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.double().cpu().numpy()
    return array


def check_any_lengths(conv: Conv, device: str = "cpu") -> None:
    """A run in pieces gives what it gives as a whole, bit for bit."""
    rng = np.random.default_rng(0)
    x = draw(rng, 40, 70, dtype=torch.float32, device=device)
    weight = draw(rng, 70, 4, dtype=torch.float32, device=device)
    results = []
    for pieces in ((40,), (1,) * 40, (17, 1, 2, 20), (3, 37)):
        state = torch.zeros(2, 3, 70, device=device)
        out = [
            conv(piece, state, weight, None, slots_of([(1, len(piece))], len(piece), device), n)
            for piece, n in zip(x.split(pieces), pieces, strict=True)
        ]
        results.append((torch.cat(out), state))
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(state, results[0][1])
    assert torch.equal(results[0][1][1], x[37:]) and not results[0][1][0].any()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("q_len", [1, 2, 3, 9, 40])
@pytest.mark.parametrize("taps", [2, 4, 5])
def test_against_histories(taps: int, q_len: int, has_bias: bool) -> None:
    check_requests(conv_update, taps, taps=taps, q_len=q_len, has_bias=has_bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_histories_in_half(dtype: torch.dtype) -> None:
    check_requests(conv_update, 7, q_len=5, dtype=dtype)


def test_runs_in_pieces() -> None:
    check_any_lengths(conv_update)


def test_no_rows() -> None:
    x, slots = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int32)
    assert conv_update(x, torch.zeros(2, 3, 4), torch.ones(4, 4), None, slots, 1).shape == (0, 4)


def interpreted() -> None:
    for seed, (taps, q_len) in enumerate(((4, 1), (2, 1), (4, 3), (3, 40))):
        check_requests(module._launch, seed, taps=taps, q_len=q_len, has_bias=seed % 2 == 0)
    check_requests(module._launch, 9, channels=300, q_len=2)
    check_any_lengths(module._launch)


@needs_loop_interpreter
def test_the_kernel_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_in_interpreter(interpreted)


@pytest.mark.parametrize("x", ["bf16", "fp32"])
@pytest.mark.parametrize(("tokens", "channels"), [(1, 256), (16, 64)])
def test_the_kernel_builds_for_an_h200(x: str, tokens: int, channels: int) -> None:
    pytest.importorskip("triton")
    names = ("x", "state", "weight", "bias", "out")
    signature = dict.fromkeys(names, f"*{x}") | {"slots": "*i32"}
    signature |= dict.fromkeys(("q_len", "channels", "x_stride", "state_stride"), "i32")
    constants = {
        "TAPS": 4, "HAS_BIAS": True, "TOKENS": tokens, "CHANNELS": channels, "KEPT_BLOCK": 4,
    }  # fmt: skip
    cubin = build_for_sm90(module._conv_update_kernel, signature, constants)
    assert cubin.startswith(b"\x7fELF")


def test_it_declares_what_it_writes() -> None:
    schema = torch.ops.graphcache.conv_update.default._schema
    assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == ["state"]


@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        (0, lambda x: x.double(), "x must be"),
        (0, lambda x: x.repeat(1, 2)[:, ::2], "x must be"),
        (0, lambda x: x.bfloat16(), "state must be .* torch.bfloat16"),
        (1, lambda state: state[:, :2], r"state must be \[S1, 3, 6\]"),
        (1, lambda state: state.transpose(1, 2).contiguous().mT, "state must be"),
        (2, lambda weight: weight[:, :1], "K at least 2"),
        (2, lambda weight: weight[:4], r"weight must be \[6, K\]"),
        (2, lambda weight: weight.double(), "weight must be float32"),
        (3, lambda bias: bias[:2], r"bias must be \[6\]"),
        (4, lambda slots: slots.long(), r"slots must be \[4\] int32"),
        (4, lambda slots: slots[:2], r"slots must be \[4\] int32"),
        (5, lambda q_len: 3, "no rows of q_len=3"),
        (5, lambda q_len: 0, "no rows of q_len=0"),
    ],
)
def test_bad_input_is_refused(argument: int, change: Callable[[Any], Any], message: str) -> None:
    slots = torch.tensor([0, 0, 2, -1], dtype=torch.int32)
    state = torch.ones(3, 3, 6)
    arguments: list[Any] = [torch.ones(4, 6), state, torch.ones(6, 4), torch.ones(6), slots, 2]
    arguments[argument] = change(arguments[argument])
    with pytest.raises(SchemaError, match=message):
        conv_update(*arguments)
    assert (state == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [7, 256, 3328])
@pytest.mark.parametrize("q_len", [1, 3, 40])
def test_the_kernel_against_histories(q_len: int, channels: int, dtype: torch.dtype) -> None:
    check_requests(conv_update, q_len, channels=channels, q_len=q_len, dtype=dtype, device="cuda")


@pytest.mark.gpu
def test_the_kernel_on_runs_in_pieces() -> None:
    check_any_lengths(conv_update, "cuda")


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_elements() -> None:
    """Slots so far apart that 32 bits would wrap round into the wrong one."""
    stride = 3 * 2**29
    memory = torch.zeros(2 * stride + 64, dtype=torch.bfloat16, device="cuda")
    state = memory.as_strided((3, 3, 8), (stride, 8, 1))
    slots = torch.tensor([2], dtype=torch.int32, device="cuda")
    x = torch.full((1, 8), 3, dtype=torch.bfloat16, device="cuda")
    conv_update(x, state, torch.ones(8, 4, device="cuda"), None, slots, 1)
    assert (state[2, 2] == 3).all() and int(memory.count_nonzero()) == 8
