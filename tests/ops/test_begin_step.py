"""begin_step: the CPU operation against plain loops, the kernel against the same loops."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphcache.errors import SchemaError
from graphcache.ops.begin_step import begin_step
from graphcache.pool import Field, StatePool

module = importlib.import_module("graphcache.ops.begin_step")
ROOT = Path(__file__).parents[2]
SLOTS, CONTEXT = 9, 12

Operation = Callable[..., tuple[Tensor, Tensor, Tensor]]


def make_pool(slots: int, context: int, device: str = "cpu") -> StatePool:
    fields = [
        Field("before", (5,), torch.uint8, initial=171),
        Field("length", (), torch.int32),
        Field("done", (), torch.int32),
        Field("tokens", (context,), torch.int32),
        Field("after", (3,), torch.int32, initial=-7),
    ]
    return StatePool(fields, slots, device)


def fill(pool: StatePool, rng: random.Random, context: int) -> None:
    """Random state, with lengths up to the context and more often near its end."""
    for slot in range(pool.rows):
        near_end = rng.random() < 0.4
        pool["length"][slot] = rng.randint(context - 3, context) if near_end else rng.randint(0, 4)
        pool["done"][slot] = rng.choice([0, 0, 0, 1, 2, 3, 4])
    pool["tokens"].copy_(torch.arange(pool["tokens"].numel()).view_as(pool["tokens"]) + 1000)


def random_rows(rng: random.Random, rows: int, q_len: int, slots: int) -> list[int]:
    """Each row a slot of its own for a run of random length, or padding."""
    names = rng.sample(range(slots), rows)
    requested = []
    for name in names:
        run = rng.randint(0, q_len)
        requested += [name] * run + [-1] * (q_len - run)
    return requested


def expected(requested: list[int], pool: StatePool, q_len: int) -> list[tuple[int, int, int]]:
    length, done = pool["length"].tolist(), pool["done"].tolist()
    tokens = pool["tokens"].tolist()
    result = []
    for start in range(0, len(requested), q_len):
        open_ = True
        for column in range(q_len):
            slot = requested[start + column]
            if slot < 0 or done[slot] != 0 or length[slot] + column >= len(tokens[0]):
                open_ = False
            if open_:
                position = length[slot] + column
                result.append((slot, position, tokens[slot][position]))
            else:
                result.append((-1, 0, 0))
    return result


def check(
    operation: Operation, pool: StatePool, requested: list[int], q_len: int, device: str = "cpu"
) -> None:
    asked = torch.tensor(requested, dtype=torch.int32, device=device)
    arena = pool.arena.clone()
    outputs = operation(asked, pool["length"], pool["done"], pool["tokens"], q_len)
    for output in outputs:
        assert output.dtype == torch.int32
        assert output.shape == asked.shape
    got = list(zip(*(output.tolist() for output in outputs), strict=True))
    assert got == expected(requested, pool, q_len)
    assert torch.equal(pool.arena, arena)
    assert asked.tolist() == requested


def check_random(operation: Operation, device: str = "cpu", cases: int = 60) -> None:
    rng = random.Random(5)
    for case in range(cases):
        q_len = 1 + case % 4
        pool = make_pool(SLOTS, CONTEXT, device)
        fill(pool, rng, CONTEXT)
        requested = random_rows(rng, rng.randint(1, SLOTS), q_len, SLOTS)
        check(operation, pool, requested, q_len, device)


def check_chunk(operation: Operation, device: str = "cpu") -> None:
    """Chunks longer than one block of columns: whole, short, and cut by the context."""
    context = 2500
    pool = make_pool(4, context, device)
    fill(pool, random.Random(6), context)
    for slot, (length, done) in enumerate([(0, 0), (37, 0), (1400, 0), (3, 1)]):
        pool["length"][slot] = length
        pool["done"][slot] = done
    for q_len in (15, 16, 17, 300, 1500):
        rows = [0] * q_len + [1] * (q_len - 9) + [-1] * 9 + [2] * q_len + [3] * q_len
        check(operation, pool, rows, q_len, device)


def check_hole(operation: Operation, device: str = "cpu") -> None:
    """What follows the first column that can't run does not run either, however far."""
    pool = make_pool(SLOTS, CONTEXT, device)
    check(operation, pool, [2, -1, 2, 2, 3, 3, 3, 3], 4, device)
    pool = make_pool(2, 2000, device)
    check(operation, pool, [1] * 100 + [-1] + [1] * 1399, 1500, device)


CHECKS = [check_random, check_chunk, check_hole]


@pytest.mark.parametrize("checks", CHECKS)
def test_reference(checks: Callable[[Operation], None]) -> None:
    checks(begin_step)


def test_finished_and_full_slots_become_padding() -> None:
    pool = make_pool(4, 8)
    pool["tokens"].fill_(5)
    pool["length"].copy_(torch.tensor([0, 7, 8, 3, 0]))
    pool["done"][3] = 1
    slots, positions, tokens = begin_step(
        torch.tensor([0, 1, 2, 3, -1], dtype=torch.int32),
        pool["length"],
        pool["done"],
        pool["tokens"],
        1,
    )
    assert slots.tolist() == [0, 1, -1, -1, -1]
    assert positions.tolist() == [0, 7, 0, 0, 0]
    assert tokens.tolist() == [5, 5, 0, 0, 0]


def test_no_rows() -> None:
    pool = make_pool(4, 8)
    none = torch.empty(0, dtype=torch.int32)
    outputs = begin_step(none, pool["length"], pool["done"], pool["tokens"], 2)
    assert [output.shape[0] for output in outputs] == [0, 0, 0]


def test_refusals() -> None:
    pool = make_pool(4, 8)
    asked = torch.zeros(4, dtype=torch.int32)
    length, done, tokens = pool["length"], pool["done"], pool["tokens"]
    with pytest.raises(SchemaError, match="requested must be int32"):
        begin_step(asked.long(), length, done, tokens, 1)
    with pytest.raises(SchemaError, match="tokens must be int32"):
        begin_step(asked, length, done, tokens.double(), 1)
    with pytest.raises(SchemaError, match="q_len=3"):
        begin_step(asked, length, done, tokens, 3)
    with pytest.raises(SchemaError, match="q_len=0"):
        begin_step(asked, length, done, tokens, 0)
    with pytest.raises(SchemaError, match=r"\[S1\]"):
        begin_step(asked, length[1:], done, tokens, 1)
    with pytest.raises(SchemaError, match="contiguous"):
        begin_step(asked, length, done, tokens[:, ::2], 1)


def test_traces_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        asked = torch.empty(6, dtype=torch.int32)
        by_slot = torch.empty(3, dtype=torch.int32)
        outputs = begin_step(asked, by_slot, by_slot, torch.empty(3, 8, dtype=torch.int32), 2)
    assert [(o.shape, o.dtype) for o in outputs] == [((6,), torch.int32)] * 3


def test_kernel_interpreted() -> None:
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert child.stdout.split() == [each.__name__ for each in CHECKS]


@pytest.mark.parametrize("block", [module.SHORT_BLOCK, module.LONG_BLOCK])
def test_kernel_builds(block: int) -> None:
    pytest.importorskip("triton")
    from kernel_build import build_for_sm90

    kernel = module._begin_step_kernel
    signature = {
        name: "*i32" if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
        if name != "BLOCK"
    }
    assert build_for_sm90(kernel, signature, {"BLOCK": block}, num_warps=1)


@pytest.mark.gpu
@pytest.mark.parametrize("checks", CHECKS)
def test_kernel(checks: Callable[..., None]) -> None:
    checks(begin_step, "cuda")


@pytest.mark.gpu
def test_kernel_in_a_graph() -> None:
    """A replay reads state and slots as they are then, not as they were at capture."""
    rng = random.Random(8)
    pool = make_pool(SLOTS, CONTEXT, "cuda")
    asked = torch.full((8,), -1, dtype=torch.int32, device="cuda")
    arguments = (asked, pool["length"], pool["done"], pool["tokens"], 2)
    begin_step(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = begin_step(*arguments)
    for _ in range(20):
        fill(pool, rng, CONTEXT)
        requested = random_rows(rng, 4, 2, SLOTS)
        asked.copy_(torch.tensor(requested))
        graph.replay()
        got = list(zip(*(output.tolist() for output in outputs), strict=True))
        assert got == expected(requested, pool, 2)


if __name__ == "__main__":
    for each in CHECKS:
        each(module._launch)
        print(each.__name__)
