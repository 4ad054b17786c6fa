"""advance: the CPU operation against plain loops, the kernel against the same loops."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphcache.errors import SchemaError
from graphcache.finish import FinishReason
from graphcache.ops.advance import advance
from graphcache.ops.begin_step import begin_step
from graphcache.pool import Field, StatePool

module = importlib.import_module("graphcache.ops.advance")
ROOT = Path(__file__).parents[2]
SLOTS, CONTEXT, VOCABULARY = 9, 12, 50
STATE = ("length", "high", "done", "tokens", "limit", "stop")

Operation = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class Case:
    """One call's arguments, as lists; state is in the pool."""

    pool: StatePool
    sampled: list[int]
    accepted: list[int] | None
    requested: list[int]
    slots: list[int]
    q_len: int
    modulus: list[int] | None


def make_pool(slots: int = SLOTS, derived: int = 3, device: str = "cpu") -> StatePool:
    fields = [
        Field("before", (5,), torch.uint8, initial=171),
        Field("length", (), torch.int32),
        Field("high", (), torch.int32),
        Field("done", (), torch.int32),
        Field("limit", (), torch.int32, initial=1000),
        Field("stop", (8,), torch.int32, initial=-1),
        Field("tokens", (CONTEXT,), torch.int32, initial=-9),
        Field("derived", (derived,), torch.int32, initial=-5),
        Field("after", (3,), torch.int32, initial=-7),
    ]
    return StatePool(fields, slots, device)


def random_case(rng: random.Random, q_len: int, device: str = "cpu") -> Case:
    moduli = rng.choice([None, [4], [7, 1, 3], [5, 128, 2, 3, 4, 5, 6, 7, 8]])
    pool = make_pool(derived=len(moduli or [1]), device=device)
    for slot in range(SLOTS):
        length = rng.choice([0, 1, 4, CONTEXT - 3, CONTEXT - 2, CONTEXT - 1, CONTEXT])
        pool["length"][slot] = length
        pool["high"][slot] = length + rng.choice([0, 0, 1, 4])
        pool["done"][slot] = rng.choice([0, 0, 0, 0, 1, 2, 3, 4])
        pool["limit"][slot] = rng.choice([1000, length + 1, length + 2, length + 3])
        stops = [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 1, 8]))]
        pool["stop"][slot] = torch.tensor((stops + [-1] * 8)[:8], dtype=torch.int32)

    requested, slots, sampled = [], [], []
    for name in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
        asked = rng.randint(0, q_len)
        room = CONTEXT - int(pool["length"][name])
        run = 0 if int(pool["done"][name]) else min(asked, room)
        requested += [name] * asked + [-1] * (q_len - asked)
        slots += [name] * run + [-1] * (q_len - run)
        stops = [token for token in pool["stop"][name].tolist() if token >= 0] or [3]
        for column in range(q_len):
            ordinary = rng.randrange(VOCABULARY)
            odd = rng.choice([-1, VOCABULARY, VOCABULARY - 1, 0, rng.choice(stops), 2**31 - 1])
            sampled.append(odd if rng.random() < 0.3 or column >= run else ordinary)
    rows = len(requested) // q_len
    accepted = None if rng.random() < 0.4 else [rng.randint(-1, q_len + 1) for _ in range(rows)]
    return Case(pool, sampled, accepted, requested, slots, q_len, moduli)


def expected(case: Case) -> tuple[list[int], list[int], dict[str, Any]]:
    """Emitted, reasons and state after the step, token by token as the contract tells it."""
    state = {name: case.pool[name].tolist() for name in (*STATE, "derived")}
    emitted = [-1] * len(case.requested)
    reasons = []
    for row in range(len(case.requested) // case.q_len):
        start = row * case.q_len
        slot = case.requested[start]
        if slot < 0:
            reasons.append(0)
            continue
        run = 0
        while run < case.q_len and case.slots[start + run] >= 0:
            run += 1
        if run > 0:
            length = state["length"][slot]
            state["high"][slot] = max(state["high"][slot], length + run)
            taken = run if case.accepted is None else min(max(case.accepted[row], 0), run)
            for column in range(taken):
                token = case.sampled[start + column]
                if not 0 <= token < VOCABULARY:
                    state["done"][slot] = 4
                    break
                if length + 1 + column < CONTEXT:
                    state["tokens"][slot][length + 1 + column] = token
                state["length"][slot] = length + column + 1
                emitted[start + column] = token
                total = length + column + 2
                if token in state["stop"][slot]:
                    state["done"][slot] = 1
                elif total >= CONTEXT:
                    state["done"][slot] = 3
                elif total >= state["limit"][slot]:
                    state["done"][slot] = 2
                if state["done"][slot]:
                    break
            for index, modulus in enumerate(case.modulus or []):
                state["derived"][slot][index] = state["length"][slot] % modulus
        reasons.append(state["done"][slot])
    return emitted, reasons, state


def call(operation: Operation, case: Case, dtype: torch.dtype = torch.int32) -> Any:
    device = case.pool.device

    def make(values: list[int] | None, dtype: torch.dtype = torch.int32) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=dtype, device=device)

    length, high, done, tokens, limit, stop = (case.pool[name] for name in STATE)
    return operation(
        make(case.sampled, dtype),
        make(case.accepted),
        make(case.requested),
        make(case.slots),
        case.q_len,
        length,
        high,
        done,
        tokens,
        limit,
        stop,
        VOCABULARY,
        None if case.modulus is None else case.pool["derived"],
        make(case.modulus),
    )


def check(operation: Operation, case: Case, dtype: torch.dtype = torch.int32) -> None:
    emitted, reasons, state = expected(case)
    wanted = StatePool(case.pool.fields.values(), case.pool.rows, "cpu")
    wanted.arena.copy_(case.pool.arena)
    for name, values in state.items():
        wanted[name].copy_(torch.tensor(values, dtype=torch.int32))
    got_emitted, got_reasons = call(operation, case, dtype)
    assert got_emitted.dtype == got_reasons.dtype == torch.int32
    assert got_emitted.tolist() == emitted
    assert got_reasons.tolist() == reasons
    assert torch.equal(case.pool.arena.cpu(), wanted.arena)


def check_random(operation: Operation, device: str = "cpu", cases: int = 160) -> None:
    rng = random.Random(11)
    for index in range(cases):
        check(operation, random_case(rng, 1 + index % 4, device))


def check_wide(operation: Operation, device: str = "cpu") -> None:
    """More columns than the kernel's least block, and token ids in int64."""
    rng = random.Random(12)
    for q_len in (11, 17):
        check(operation, random_case(rng, q_len, device), torch.int64)


CHECKS = [check_random, check_wide]


@pytest.mark.parametrize("checks", CHECKS)
def test_reference(checks: Callable[[Operation], None]) -> None:
    checks(advance)


def step(pool: StatePool, sampled: list[int], slot: int = 0, **others: Any) -> tuple[Any, Any]:
    """One row of one slot, run whole."""
    q_len = len(sampled)
    row = [slot] * q_len
    case = Case(pool, sampled, others.get("accepted"), row, row, q_len, others.get("modulus"))
    emitted, reasons = call(advance, case)
    return emitted.tolist(), FinishReason(reasons.item())


def test_stop_token_ends_a_run_and_is_emitted() -> None:
    pool = make_pool()
    pool["stop"][0, 5] = 7
    assert step(pool, [6, 7, 8]) == ([6, 7, -1], FinishReason.STOP)
    assert pool["length"][0] == 2
    assert pool["high"][0] == 3
    assert pool["tokens"][0, :4].tolist() == [-9, 6, 7, -9]


def test_budget_counts_prompt_and_answer() -> None:
    pool = make_pool()
    pool["length"][0] = 4
    pool["limit"][0] = 7
    assert step(pool, [1]) == ([1], FinishReason.NONE)
    assert step(pool, [2]) == ([2], FinishReason.LENGTH)
    assert pool["length"][0] == 6


def test_last_position_of_the_context_is_used() -> None:
    pool = make_pool()
    pool["length"][0] = CONTEXT - 3
    assert step(pool, [1, 2, 3]) == ([1, 2, -1], FinishReason.CONTEXT)
    assert pool["tokens"][0, -2:].tolist() == [1, 2]


def test_stop_comes_before_context_and_budget() -> None:
    pool = make_pool()
    pool["length"][0] = CONTEXT - 2
    pool["limit"][0] = CONTEXT
    pool["stop"][0, 0] = 3
    assert step(pool, [3]) == ([3], FinishReason.STOP)
    pool["done"][0] = 0
    pool["length"][0] = CONTEXT - 2
    assert step(pool, [4]) == ([4], FinishReason.CONTEXT)


@pytest.mark.parametrize("token", [-1, VOCABULARY, -(2**31)])
def test_token_outside_the_vocabulary_is_not_emitted(token: int) -> None:
    pool = make_pool()
    assert step(pool, [1, token, 2]) == ([1, -1, -1], FinishReason.NOT_FINITE)
    assert pool["length"][0] == 1
    assert pool["high"][0] == 3


def test_rejected_drafts_raise_high_only() -> None:
    pool = make_pool()
    pool["length"][0] = pool["high"][0] = 2
    got = step(pool, [1, 2, 3], accepted=[1], modulus=[2, 2, 2])
    assert got == ([1, -1, -1], FinishReason.NONE)
    assert (pool["length"][0], pool["high"][0], pool["derived"][0, 0]) == (3, 5, 1)
    assert step(pool, [4], accepted=[0]) == ([-1], FinishReason.NONE)
    assert (pool["length"][0], pool["high"][0]) == (3, 5)


def test_finished_slot_reports_its_reason_and_stays() -> None:
    pool = make_pool()
    pool["done"][2] = FinishReason.LENGTH
    arena = pool.arena.clone()
    emitted, reasons = call(advance, Case(pool, [5, 5], None, [2, -1], [-1, -1], 1, [3, 3, 3]))
    assert emitted.tolist() == [-1, -1]
    assert reasons.tolist() == [FinishReason.LENGTH, FinishReason.NONE]
    assert torch.equal(pool.arena, arena)


def test_refusals_write_nothing() -> None:
    pool = make_pool()
    row = torch.zeros(4, dtype=torch.int32)
    state = {name: pool[name] for name in STATE}
    good = {"sampled": row, "accepted": None, "requested": row, "slots": row, "q_len": 2}
    good |= state | {"vocab_size": VOCABULARY}
    good |= {"derived": pool["derived"], "modulus": torch.ones(3, dtype=torch.int32)}
    arena = pool.arena.clone()
    for change, message in [
        ({"sampled": row.double()}, "sampled must be int32"),
        ({"sampled": row[:2]}, "sampled must be contiguous"),
        ({"requested": row.long()}, "requested must be int32"),
        ({"slots": row.long()}, "slots must be int32"),
        ({"slots": torch.zeros(8, dtype=torch.int32)[::2]}, "slots must be contiguous"),
        ({"q_len": 3}, "q_len=3"),
        ({"accepted": row}, "accepted must be"),
        ({"accepted": row[:2].long()}, "accepted must be"),
        ({"length": pool["length"].double()}, "length must be int32"),
        ({"limit": pool["limit"][1:]}, "limit must be int32"),
        ({"stop": pool["stop"][:, :4]}, "stop must be int32"),
        ({"tokens": pool["tokens"][:, ::2]}, "rows of tokens"),
        ({"derived": None}, "go together"),
        ({"modulus": None}, "go together"),
        ({"modulus": torch.ones(2, dtype=torch.int32)}, "modulus"),
        ({"modulus": torch.ones(3)}, "must be int32"),
    ]:
        with pytest.raises(SchemaError, match=message):
            advance(**(good | change))
    assert torch.equal(pool.arena, arena)


def test_traces_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        row, by_slot = torch.empty(6, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        tokens, stop = (torch.empty(3, n, dtype=torch.int32) for n in (20, 8))
        emitted, reasons = advance(
            row, None, row, row, 2, by_slot, by_slot.clone(), by_slot.clone(), tokens, by_slot,
            stop, VOCABULARY,
        )  # fmt: skip
    assert (emitted.shape, reasons.shape) == ((6,), (3,))
    assert emitted.dtype == reasons.dtype == torch.int32


def test_declares_what_it_writes() -> None:
    schema = torch.ops.graphcache.advance.default._schema
    written = {each.name for each in schema.arguments if each.alias_info is not None}
    assert written == {"length", "high", "done", "tokens", "derived"}


def test_kernel_interpreted() -> None:
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert child.stdout.split() == [each.__name__ for each in CHECKS]


@pytest.mark.parametrize("sampled", ["*i32", "*i64"])
@pytest.mark.parametrize(("has_accepted", "derived"), [(False, 0), (True, 4)])
def test_kernel_builds(sampled: str, has_accepted: bool, derived: int) -> None:
    pytest.importorskip("triton")
    from kernel_build import build_for_sm90

    kernel = module._advance_kernel
    constants = {
        "HAS_ACCEPTED": has_accepted,
        "BLOCK": module.MIN_BLOCK,
        "STOPS": module.STOP_TOKENS,
        "DERIVED_BLOCK": derived,
        "REASON_STOP": 1,
        "REASON_LENGTH": 2,
        "REASON_CONTEXT": 3,
        "REASON_NOT_FINITE": 4,
    }
    signature = {
        name: "*i32" if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
        if name not in constants
    }
    assert build_for_sm90(kernel, signature | {"sampled_ptr": sampled}, constants, num_warps=1)


@pytest.mark.gpu
@pytest.mark.parametrize("checks", CHECKS)
def test_kernel(checks: Callable[..., None]) -> None:
    checks(advance, "cuda")


def one_step(pool: StatePool, requested: Tensor, modulus: Tensor) -> tuple[Tensor, Tensor]:
    """A step of a model whose next token is a function of token and position."""
    length, high, done, tokens, limit, stop = (pool[name] for name in STATE)
    slots, positions, token = begin_step(requested, length, done, tokens, 2)
    sampled = (token * 7 + positions + 3) % VOCABULARY
    return advance(
        sampled, None, requested, slots, 2, length, high, done, tokens, limit, stop,
        VOCABULARY, pool["derived"], modulus,
    )  # fmt: skip


def start_of_walk() -> tuple[StatePool, Tensor, Tensor]:
    pool = make_pool()
    pool["tokens"][:, 0] = torch.arange(SLOTS + 1, dtype=torch.int32)
    pool["stop"][3, 2] = 24
    pool["limit"][4] = 6
    requested = torch.tensor([[slot, slot] for slot in (5, 3, 0, -1, 4)], dtype=torch.int32)
    return pool, requested.view(-1), torch.tensor([4, 5, 1], dtype=torch.int32)


def test_slots_end_one_by_one_and_padding_rows_change_nothing() -> None:
    pool, requested, modulus = start_of_walk()
    others = [1, 2, 6, 7, 8, 9]
    before = pool.arena[others].clone()
    for _ in range(CONTEXT):
        _, reasons = one_step(pool, requested, modulus)
    assert reasons.tolist() == [3, 1, 3, 0, 2]
    assert pool["length"].tolist() == [11, 0, 0, 1, 5, 11, 0, 0, 0, 0]
    assert pool["derived"][4].tolist() == [1, 0, 0]
    assert torch.equal(pool.arena[others], before)


@pytest.mark.gpu
def test_kernel_in_a_graph() -> None:
    """Steps replayed on the device walk as steps of the CPU operation do."""
    cpu, requested, modulus = start_of_walk()
    gpu = make_pool(device="cuda")
    on_gpu = (gpu, requested.cuda(), modulus.cuda())
    one_step(*on_gpu)
    gpu.arena.copy_(cpu.arena)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = one_step(*on_gpu)
    assert torch.equal(gpu.arena.cpu(), cpu.arena)
    for _ in range(CONTEXT):
        graph.replay()
        for got, want in zip(outputs, one_step(cpu, requested, modulus), strict=True):
            assert torch.equal(got.cpu(), want)
        assert torch.equal(gpu.arena.cpu(), cpu.arena)


if __name__ == "__main__":
    for each in CHECKS:
        each(module._launch)
        print(each.__name__)
