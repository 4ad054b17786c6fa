"""`rotate_heads`: reference and kernel against an oracle in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache.errors import SchemaError
from graphcache.ops import rotate_heads as module
from graphcache.ops.absorb import Rotation
from graphcache.ops.rotate_heads import rotate_heads
from tests import entry_oracle as oracle
from tests.kernel_build import build_for_sm90
from tests.ops.absorb_cases import run_in_interpreter

EPS = 1e-3
SHAPES = [(1, 1, 8, 8), (3, 5, 24, 8), (2, 3, 64, 16), (4, 2, 128, 64), (2, 64, 512, 64)]
BOUNDS = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Of an element, relative to the largest of its vector: half a unit in the last place."""


def make(tokens: int, heads: int, dim: int, rope_dim: int, dtype: torch.dtype) -> tuple:
    """Queries that are a slice of something wider, their rotation, and the angles' positions."""
    rng = np.random.default_rng(dim)
    wide = torch.from_numpy(rng.standard_normal((tokens, heads + 1, dim + 3))).to(dtype)
    positions = rng.integers(0, 5000, tokens)
    angle = positions[:, None] * oracle.inverse_frequencies(rope_dim).astype(np.float64)
    parts = (torch.from_numpy(f(angle).astype(np.float32)) for f in (np.cos, np.sin))
    return wide[:, 1:, :dim], Rotation(*parts), positions


def check(found: Tensor, q: Tensor, rope_dim: int, positions: np.ndarray, norm: bool) -> None:
    vectors = q.double().cpu().numpy()
    if norm:
        vectors = oracle.rmsnorm(vectors, np.ones(q.shape[2]), EPS)
    frequencies = oracle.inverse_frequencies(rope_dim)
    expected = oracle.rotate(vectors, positions[:, None], frequencies)
    assert (found.dtype, found.is_contiguous()) == (q.dtype, True)
    error = np.abs(found.double().cpu().numpy() - expected)
    # 1e-5: the angle's cosine and sine are float32.
    bound = (BOUNDS[q.dtype] + 1e-5) * np.abs(expected).max(-1, keepdims=True)
    assert (error <= bound).all(), error.max()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_oracle(shape, dtype, norm, device) -> None:
    q, rotation, positions = make(*shape, dtype)
    on_device = Rotation(*(part.to(device) for part in rotation))
    found = rotate_heads(q.to(device), on_device, norm=norm, eps=EPS)
    check(found, q, shape[3], positions, norm)


def interpreted() -> None:
    for shape in SHAPES[:4]:
        for norm in (False, True):
            q, rotation, positions = make(*shape, torch.float32)
            check(module._launch(q, *rotation, norm, EPS), q, shape[3], positions, norm)


def test_the_kernel_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_in_interpreter(interpreted)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_kernel_builds_for_an_h200(dtype: str) -> None:
    pytest.importorskip("triton")
    signature = {
        "q": f"*{dtype}", "cos": "*fp32", "sin": "*fp32", "out": f"*{dtype}", "eps": "fp32",
        "token_stride": "i32", "head_stride": "i32",
    }  # fmt: skip
    constants = {"HEADS": 64, "WIDTH": 512, "ROPE_DIM": 64, "BLOCK": 512, "NORM": True}
    cubin = build_for_sm90(module._rotate_heads_kernel, signature, constants)
    assert cubin.startswith(b"\x7fELF")


def test_no_tokens() -> None:
    empty = torch.empty(0, 4)
    assert rotate_heads(torch.empty(0, 3, 8), Rotation(empty, empty)).shape == (0, 3, 8)


def test_bad_input_is_refused() -> None:
    q, (cos, sin), _ = make(3, 2, 24, 8, torch.float32)
    for queries in (q[0], q.double(), q.int(), q.transpose(1, 2)):
        with pytest.raises(SchemaError, match=r"q must be \[T, H, D\]"):
            rotate_heads(queries, Rotation(cos, sin))
    for pair in ((cos[:2], sin[:2]), (cos.double(), sin), (cos, sin.T), (cos.repeat(1, 4), sin)):
        with pytest.raises(SchemaError, match="cos and sin must be"):
            rotate_heads(q, Rotation(*pair))
