"""index_select against plain loops in float64: the CPU operation, the kernels under the interpreter
and on a GPU.

Most inputs are small integers, keys with scales that are powers of two: every score is exact in
float32, whatever the order of its sum, equal scores are many, and the selection has one right
answer. For other numbers an answer is right if no entry left out scores higher than one selected,
but for the rounding of a sum.

Memory is NaN wherever nothing was written, or holds lures: entries that nobody may see yet, with
keys so large that they would be selected.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache.errors import SchemaError
from graphcache.ops.index_select import index_select
from graphcache.pool import Field, StatePool
from tests.kernel_build import needs_loop_interpreter
from tests.window_oracle import TABLE, to_e4m3

module = importlib.import_module("graphcache.ops.index_select")
ROOT = Path(__file__).parents[2]
Select = Callable[..., Tensor]

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.uint8
NAN_BYTE = 255
"""Memory full of it reads as NaN in float32, bfloat16 and e4m3."""
NO_BLOCK = 2**30
"""A block that there is none of: whoever follows it fails."""


@dataclass(frozen=True)
class Layout:
    """A layer's index entries: `width` blocks of `rows` a slot; an entry stands for m tokens."""

    heads: int
    dim: int
    rows: int
    width: int
    top_k: int
    m: int = 4
    q_dtype: torch.dtype = FP32
    key_dtype: torch.dtype = FP32
    slots: int = 4

    @property
    def capacity(self) -> int:
        return self.rows * self.width


def random_layout(rng: np.random.Generator) -> Layout:
    rows, width = int(rng.choice([1, 3, 5, 16, 32, 64])), int(rng.integers(1, 9))
    return Layout(
        heads=int(rng.integers(1, 20)),
        dim=int(rng.choice([1, 8, 20, 32])),
        rows=rows,
        width=width,
        top_k=int(rng.integers(1, rows * width + 3)),
        m=int(rng.choice([1, 2, 4, 7])),
    )


class Store:
    """Blocks in poisoned memory, and what each slot wrote to them as `keys`, [n, dim] float64."""

    def __init__(self, layout: Layout, rng: np.random.Generator, device: str = "cpu") -> None:
        self.layout, self.rng, self.device = layout, rng, device
        fields = [
            Field("before", (5,), torch.uint8),
            Field("values", (layout.rows, layout.dim), layout.key_dtype),
            Field("between", (3,), torch.uint8),
            Field("scales", (layout.rows,), torch.float32),
        ]
        self.pool = StatePool(fields, layout.slots * layout.width, device)
        self.pool.arena.fill_(NAN_BYTE)
        self.values = self.pool["values"]
        self.scales = self.pool["scales"] if layout.key_dtype == FP8 else None
        # On a GPU a read through NO_BLOCK would end every later test too.
        absent = NO_BLOCK if device == "cpu" else layout.slots * layout.width
        shape = layout.slots + 1, layout.width
        self.table = torch.full(shape, absent, dtype=torch.int32, device=device)
        self.free_blocks = rng.permutation(layout.slots * layout.width).tolist()
        self.reserved = [0] * layout.slots
        self.keys = [np.zeros((0, layout.dim)) for _ in range(layout.slots)]

    def reserve(self, slot: int, entries: int) -> None:
        while self.reserved[slot] * self.layout.rows < entries:
            self.table[slot, self.reserved[slot]] = self.free_blocks.pop()
            self.reserved[slot] += 1

    def write(self, slot: int, first: int, keys: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Store entries from `first` on; the keys as they are read back, in float64."""
        self.reserve(slot, first + len(keys))
        entry = torch.arange(first, first + len(keys))
        block = self.table[slot].cpu()[entry // self.layout.rows].long().to(self.device)
        at = block, (entry % self.layout.rows).to(self.device)
        if self.scales is None:
            stored = torch.from_numpy((keys * scales[:, None]).astype(np.float32))
            self.values[at] = stored.to(self.device, self.values.dtype)
            return stored.to(self.values.dtype).double().numpy()
        codes = np.where(np.isnan(keys), 0x7F, to_e4m3(np.nan_to_num(keys).astype(np.float32)))
        self.values[at] = torch.from_numpy(codes.astype(np.uint8)).to(self.device)
        self.scales[at] = torch.from_numpy(scales.astype(np.float32)).to(self.device)
        return TABLE[codes] * scales.astype(np.float32).astype(np.float64)[:, None]

    def append(self, slot: int, keys: np.ndarray, scales: np.ndarray | None = None) -> None:
        """Let the slot absorb entries [n, dim]."""
        scales = np.ones(len(keys)) if scales is None else scales
        read = self.write(slot, len(self.keys[slot]), keys, scales)
        self.keys[slot] = np.concatenate([self.keys[slot], read])

    def fill(self, slot: int, entries: int, exact: bool = True) -> None:
        """Let the slot come to have `entries` random entries."""
        shape = entries - len(self.keys[slot]), self.layout.dim
        if exact:
            keys = self.rng.integers(-3, 4, shape).astype(np.float64)
            self.append(slot, keys, 2.0 ** self.rng.integers(-1, 3, shape[0]))
        else:
            keys = self.rng.normal(size=shape) * 20
            self.append(slot, keys, np.exp(self.rng.normal(size=shape[0])))

    def lure(self, slot: int) -> None:
        """Large keys in the rest of the slot's last block, which nobody may see."""
        written, end = len(self.keys[slot]), self.reserved[slot] * self.layout.rows
        keys = self.rng.choice([-256.0, 256.0], (end - written, self.layout.dim))
        self.write(slot, written, keys, np.full(end - written, 8.0))


@dataclass
class Step:
    """One call's tokens."""

    q: Tensor
    weights: Tensor
    slots: Tensor
    positions: Tensor


def make_step(store: Store, tokens: list[tuple[int, int]], exact: bool = True) -> Step:
    """Tokens of (slot, position); slot -1 is padding, whose inputs are NaN."""
    lay, rng = store.layout, store.rng
    shape = len(tokens), lay.heads, lay.dim
    q = rng.integers(-2, 3, shape) if exact else rng.normal(size=shape)
    weights = rng.integers(-4, 9, shape[:2]) if exact else rng.normal(size=shape[:2])
    step = Step(
        torch.from_numpy(q).to(lay.q_dtype),
        torch.from_numpy(weights).float(),
        torch.tensor([slot for slot, _ in tokens], dtype=torch.int32),
        torch.tensor([position for _, position in tokens], dtype=torch.int32),
    )
    step.q[step.slots < 0] = torch.nan
    step.weights[step.slots < 0] = torch.nan
    return on(store.device, step)


def on(device: str, step: Step) -> Step:
    return Step(*(each.to(device) for each in vars(step).values()))


def last_position(store: Store, entries: int) -> int:
    """A position at which `entries` are visible."""
    m = store.layout.m
    return max(0, entries * m - 1 + int(store.rng.integers(0, m if entries else max(1, m - 1))))


def select(operation: Select, store: Store, step: Step) -> Tensor:
    """One call, which must write nothing but its output."""
    before = store.pool.arena.clone()
    out = operation(
        step.q, step.weights, store.values, store.scales, store.table, step.slots, step.positions,
        store.layout.m, store.layout.top_k,
    )  # fmt: skip
    assert torch.equal(store.pool.arena, before)
    assert out.dtype == torch.int32 and out.shape == (len(step.slots), store.layout.top_k)
    return out


def scores_of(store: Store, step: Step, token: int) -> np.ndarray:
    """[n] float64 of the entries that the token sees; every head in turn."""
    slot, n = int(step.slots[token]), (int(step.positions[token]) + 1) // store.layout.m
    keys = store.keys[slot][:n]
    assert len(keys) == n, "the token would see entries that nobody wrote"
    score = np.zeros(n)
    with np.errstate(invalid="ignore"):
        for head in range(store.layout.heads):
            query = step.q[token, head].double().cpu().numpy()
            score += float(step.weights[token, head]) * np.maximum(keys @ query, 0.0)
    return score


def right_answer(score: np.ndarray, top_k: int) -> list[int]:
    """Numbers before NaN, higher before lower, lower indices before higher ones."""

    def rank(entry: int) -> tuple[bool, float, int]:
        nan = bool(np.isnan(score[entry]))
        return nan, 0.0 if nan else -score[entry], entry

    best = sorted(sorted(range(len(score)), key=rank)[:top_k])
    return best + [-1] * (top_k - len(best))


def assert_right(out: Tensor, store: Store, step: Step) -> None:
    for token, got in enumerate(out.tolist()):
        if step.slots[token] < 0:
            assert got == [-1] * store.layout.top_k
        else:
            expected = right_answer(scores_of(store, step, token), store.layout.top_k)
            assert got == expected, f"token {token}"


def assert_right_but_for_rounding(out: Tensor, store: Store, step: Step) -> None:
    """No entry left out beats a selected one by more than float32 sums may be off."""
    top_k, differing = store.layout.top_k, 0
    for token, got in enumerate(out.tolist()):
        score = scores_of(store, step, token)
        expected = right_answer(score, top_k)
        chosen = [entry for entry in got if entry >= 0]
        assert chosen == sorted(set(chosen)) and got.count(-1) == expected.count(-1)
        assert got[len(chosen) :] == [-1] * (top_k - len(chosen))
        if len(score) > top_k:
            left_out = np.delete(score, chosen)
            assert left_out.max() - score[chosen].min() <= 1e-5 * np.abs(score).max()
        differing += len(set(chosen) - set(expected))
    assert differing <= 0.01 * out.numel(), "the rule excuses too much"


def check_random_steps(operation: Select, seed: int, device: str = "cpu", **fixed: Any) -> None:
    """Runs of several tokens a slot, slots of all lengths, padding in between."""
    rng = np.random.default_rng(seed)
    layout = replace(random_layout(rng), **fixed)
    store = Store(layout, rng, device)
    tokens: list[tuple[int, int]] = []
    for slot in rng.permutation(layout.slots).tolist():
        # With m = 1 the first token completes an entry already.
        n = int(rng.integers(layout.m == 1, layout.capacity + 1))
        store.fill(slot, n)
        if rng.random() < 0.5:
            store.lure(slot)
        newest = last_position(store, n)
        count = int(rng.integers(1, 4))
        tokens += [(slot, max(0, newest - back)) for back in reversed(range(count))]
        tokens += [(-1, 0)] * int(rng.integers(0, 3))
    step = make_step(store, tokens)
    assert_right(select(operation, store, step), store, step)


def check_edges(operation: Select, device: str = "cpu") -> None:
    """None visible, one, all, one more than are selected; ends of tiles and blocks."""
    for top_k in (1, 16, 63, 64):
        counts = [0, 1, top_k - 1, top_k, top_k + 1, 63, 64, 65, 127, 128, 129, 159, 160]
        layout = Layout(3, 8, rows=40, width=4, top_k=top_k, m=2, slots=len(counts))
        store = Store(layout, np.random.default_rng(top_k), device)
        for slot, n in enumerate(counts):
            store.fill(slot, n)
            store.lure(slot)
        tokens = [(slot, last_position(store, n)) for slot, n in enumerate(counts)]
        step = make_step(store, tokens)
        assert_right(select(operation, store, step), store, step)


def with_scores(scores: np.ndarray, top_k: int, device: str = "cpu") -> tuple[Store, Step]:
    """A slot whose entries have exactly these scores, any float32: relu(x) - relu(-x) is x."""
    layout = Layout(2, 1, rows=64, width=-(-len(scores) // 64), top_k=top_k, m=1, slots=1)
    store = Store(layout, np.random.default_rng(0), device)
    store.append(0, scores.astype(np.float32).astype(np.float64)[:, None])
    one = torch.tensor([[1.0, -1.0]])
    index = torch.zeros(1, dtype=torch.int32)
    step = Step(one[:, :, None], one, index, torch.full_like(index, len(scores) - 1))
    return store, on(device, step)


def check_scores(
    operation: Select, scores: np.ndarray, top_ks: list[int], device: str = "cpu"
) -> None:
    for top_k in top_ks:
        store, step = with_scores(scores, top_k, device)
        expected = right_answer(scores.astype(np.float32), top_k)
        assert select(operation, store, step).tolist() == [expected]


def check_ties(operation: Select, device: str = "cpu") -> None:
    """The first of equals; both zeros are equal."""
    rng = np.random.default_rng(1)
    for value in (0.0, 1.5, -2.0):
        check_scores(operation, np.full(130, value), [1, 7, 129], device)
    check_scores(operation, np.where(np.arange(150) % 3 == 0, 0.0, -0.0), [1, 20], device)
    check_scores(operation, rng.integers(-2, 3, 300).astype(float), [1, 30, 100, 299], device)
    few = np.full(400, -1.0)
    few[[17, 301, 399]] = 5.0
    check_scores(operation, few, [2, 3, 4, 17], device)


def check_any_float(operation: Select, device: str = "cpu") -> None:
    """Infinities, NaN of either sign, the largest and the smallest numbers, any bits at all."""
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**32, 500, dtype=np.uint64).astype(np.uint32).view(np.float32)
    # Some devices take the smallest numbers for zero.
    usual = np.where(np.abs(bits) < 1.2e-38, 0.0, np.where(np.isnan(bits), np.nan, bits))
    extremes = [np.inf, -np.inf, np.nan, -np.nan, 3.4e38, -3.4e38, 1.2e-38, -1.2e-38, 0.0, -0.0]
    usual[rng.permutation(500)[:200]] = np.tile(extremes, 20)
    check_scores(operation, usual, [1, 19, 20, 21, 250, 419, 440, 499], device)


def check_nan(operation: Select, device: str = "cpu") -> None:
    """Selected last, and the first of them first; selected all the same where there is room."""
    scores = np.full(100, np.nan)
    scores[[3, 50, 99]] = [-np.inf, 2.0, -1.0]
    check_scores(operation, scores, [1, 2, 3, 4, 10, 99, 100, 120], device)
    check_scores(operation, np.full(90, np.nan), [1, 30], device)
    # A single NaN in a key, or in its scale, and the heads that do not need it.
    for key_dtype in (FP32, FP8) if operation is index_select else (FP32,):
        layout = Layout(3, 8, 16, 5, top_k=60, key_dtype=key_dtype, slots=1)
        store = Store(layout, np.random.default_rng(3), device)
        keys = np.ones((64, 8))
        keys[[0, 9], [0, 7]] = np.nan
        scales = np.ones(64)
        scales[[1, 63]] = np.nan
        store.append(0, keys, scales)
        step = make_step(store, [(0, 64 * 4)])
        step.weights.fill_(1.0)
        step.q.fill_(1.0)
        step.q[:, 1].fill_(0.0)
        assert select(operation, store, step).tolist() == [[*range(2, 9), *range(10, 63)]]


def check_many(operation: Select, device: str = "cpu") -> None:
    """Entries by the thousand: more groups than are wanted and fewer, more tiles than one."""
    rng = np.random.default_rng(4)
    for n, top_ks in (
        (1025, [512]),
        (5000, [100, 312, 313]),
        (9300, [580, 1500]),
    ):
        check_scores(operation, rng.normal(size=n), top_ks, device)
    # Ascending: the last lanes hold all that is wanted, and so do the last groups.
    check_scores(operation, np.arange(9000.0), [500], device)
    # Nearly everything is equal, so that nearly everything is a candidate.
    equal = np.zeros(9000)
    equal[rng.permutation(9000)[:20]] = rng.normal(size=20)
    check_scores(operation, equal, [300], device)


def check_more_selected_than_lanes(operation: Select, device: str = "cpu") -> None:
    scores = np.random.default_rng(5).normal(size=module.select.MOST_LANES + 900)
    check_scores(operation, scores, [module.select.MOST_LANES + 200], device)


def check_each_token_alone(operation: Select, store: Store, step: Step) -> None:
    """The same alone and in a batch, and at other rows."""
    together = select(operation, store, step)
    tokens = len(step.slots)
    order = torch.from_numpy(np.random.default_rng(0).permutation(tokens)).to(store.device)
    shuffled = Step(*(each[order] for each in vars(step).values()))
    assert torch.equal(select(operation, store, shuffled), together[order])
    for token in range(0, tokens, max(1, tokens // 16)):
        own = slice(token, token + 1)
        alone = Step(*(each[own] for each in vars(step).values()))
        assert torch.equal(select(operation, store, alone), together[own])


def check_small_tokens_alone(operation: Select) -> None:
    store = Store(Layout(3, 16, 16, 10, top_k=20, slots=6), np.random.default_rng(6))
    for slot in range(6):
        store.fill(slot, 10 + 30 * slot, exact=False)
    tokens = [(slot, last_position(store, 10 + 30 * slot)) for slot in range(6)]
    step = make_step(store, [*tokens, (-1, 0), *tokens[::-1]], exact=False)
    assert_right_but_for_rounding(
        select(operation, store, Step(*(each[:6] for each in vars(step).values()))), store, step
    )
    check_each_token_alone(operation, store, step)


def check_strides(operation: Select, device: str = "cpu") -> None:
    """Queries by head, weights in a wider row, entries whose rows lie outermost."""
    store = Store(Layout(4, 8, 16, 6, top_k=30), np.random.default_rng(7), device)
    store.fill(0, 90)
    store.fill(3, 96)
    step = make_step(store, [(3, 96 * 4), (0, 90 * 4), (-1, 0)])
    expected = select(operation, store, step)
    assert_right(expected, store, step)
    step.q = step.q.transpose(0, 1).contiguous().transpose(0, 1)
    step.weights = torch.cat([torch.full_like(step.weights, 9), step.weights], 1)[:, 4:]
    store.values = store.values.transpose(0, 1).contiguous().transpose(0, 1)
    store.table = torch.cat([torch.full_like(store.table, 0), store.table], 1)[:, 6:]
    assert torch.equal(select(operation, store, step), expected)


CHECKS = [
    check_edges,
    check_ties,
    check_any_float,
    check_nan,
    check_many,
    check_more_selected_than_lanes,
    check_strides,
]


@pytest.mark.parametrize("seed", range(40))
def test_against_loops(seed: int) -> None:
    check_random_steps(index_select, seed)


@pytest.mark.parametrize("check", CHECKS)
def test_the_operation(check: Callable[[Select], None]) -> None:
    check(index_select)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("q_dtype", "key_dtype"), [(BF16, FP8), (FP32, FP8), (BF16, BF16), (FP32, BF16), (BF16, FP32)]
)
def test_other_dtypes_against_loops(
    q_dtype: torch.dtype, key_dtype: torch.dtype, seed: int
) -> None:
    check_random_steps(index_select, seed, q_dtype=q_dtype, key_dtype=key_dtype)


@pytest.mark.parametrize("key_dtype", [FP8, BF16, FP32])
def test_numbers_that_are_not_exact(key_dtype: torch.dtype) -> None:
    layout = Layout(16, 32, 32, 20, top_k=100, key_dtype=key_dtype, slots=3)
    store = Store(layout, np.random.default_rng(8))
    for slot, n in enumerate((90, 101, 600)):
        store.fill(slot, n, exact=False)
    step = make_step(store, [(0, 360), (1, 404), (2, 2400)], exact=False)
    assert_right_but_for_rounding(select(index_select, store, step), store, step)


def test_every_code_of_a_key() -> None:
    """A key of one dimension is its code's value."""
    layout = Layout(2, 1, 64, 4, top_k=40, m=1, key_dtype=FP8, slots=1)
    store = Store(layout, np.random.default_rng(9))
    store.append(0, TABLE[:, None])
    one = torch.tensor([[1.0, -1.0]])
    index = torch.zeros(1, dtype=torch.int32)
    step = Step(one[:, :, None], one, index, index + 255)
    assert_right(select(index_select, store, step), store, step)


def test_each_token_alone() -> None:
    check_small_tokens_alone(index_select)


def test_no_tokens() -> None:
    store = Store(Layout(3, 8, 16, 2, top_k=5), np.random.default_rng(0))
    none = torch.zeros(0, dtype=torch.int32)
    step = Step(torch.zeros(0, 3, 8), torch.zeros(0, 3), none, none)
    assert select(index_select, store, step).shape == (0, 5)


def _plain() -> dict[str, Any]:
    store = Store(Layout(3, 8, 4, 3, top_k=5, key_dtype=FP8), np.random.default_rng(0))
    store.fill(1, 10)
    step = make_step(store, [(1, 40), (-1, 0)])
    given = {"key_values": store.values, "key_scales": store.scales, "table": store.table}
    return vars(step) | given | {"compression": 4, "top_k": 5}


@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("q", lambda q: q.double(), "q must be"),
        ("q", lambda q: q[0], "q must be"),
        ("q", lambda q: q.repeat(1, 1, 2)[..., ::2], "q must be"),
        ("q", lambda q: q[:1], "weights must be"),
        ("q", lambda q: q[..., :7], "key_values must be"),
        ("weights", lambda weights: weights.bfloat16(), "weights must be"),
        ("weights", lambda weights: weights[:, :2], "weights must be"),
        ("weights", lambda weights: weights.T.contiguous().T, "weights must be"),
        ("key_values", lambda values: values.view(torch.int8), "key_values with scales"),
        ("key_values", lambda values: values.float(), "key_values with scales"),
        ("key_values", lambda values: values[0], "key_values must be"),
        ("key_values", lambda values: values.mT.contiguous().mT, "key_values must be"),
        ("key_scales", lambda scales: None, "key_values without scales"),
        ("key_scales", lambda scales: scales.double(), "key_scales must be"),
        ("key_scales", lambda scales: scales[:, :3], "key_scales must be"),
        ("table", lambda table: table.long(), "table must be"),
        ("table", lambda table: table[0], "table must be"),
        ("table", lambda table: table[:, :0], "table must be"),
        ("table", lambda table: table.T.contiguous().T, "table must be"),
        ("slots", lambda slots: slots.long(), "slots must be"),
        ("slots", lambda slots: slots[:1], "slots must be"),
        ("positions", lambda positions: positions.long(), "positions must be"),
        ("positions", lambda positions: positions.repeat(2)[::2], "positions must be"),
        ("compression", lambda m: 0, "compression and top_k"),
        ("top_k", lambda top_k: 0, "compression and top_k"),
    ],
)
def test_refuses_what_it_can_not_serve(
    argument: str, change: Callable[[Any], Any], message: str
) -> None:
    arguments = _plain()
    index_select(**arguments)
    arguments[argument] = change(arguments[argument])
    with pytest.raises(SchemaError, match=f"index_select: {message}"):
        index_select(**arguments)


def test_traces_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        index = torch.empty(6, dtype=torch.int32)
        out = index_select(
            torch.empty(6, 3, 16, dtype=BF16), torch.empty(6, 3), torch.empty(9, 4, 16), None,
            torch.empty(3, 2, dtype=torch.int32), index, index, 4, 7,
        )  # fmt: skip
    assert (out.shape, out.dtype) == ((6, 7), torch.int32)


def interpreted(*arguments: Any) -> Tensor:
    """The kernels, with scratch full of what would be selected if it were read unwritten."""
    plain = Tensor.new_empty

    def filled(*of: Any, **how: Any) -> Tensor:
        made = plain(*of, **how)
        return made.fill_(2**31 - 1) if made.dtype == torch.int32 else made

    Tensor.new_empty = filled  # type: ignore[method-assign]
    try:
        out: Tensor = module.kernel.launch(*arguments)
    finally:
        Tensor.new_empty = plain  # type: ignore[method-assign]
    return out


@needs_loop_interpreter
def test_the_kernels_interpreted() -> None:
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert child.stdout == "done\n"


FLASH = Layout(64, 128, rows=64, width=4096, top_k=512, q_dtype=BF16, key_dtype=FP8)
SHAPES = {
    "flash": FLASH,
    "pro": replace(FLASH, top_k=1024),
    "small-blocks": replace(FLASH, rows=16, width=16384),
    "bf16": replace(FLASH, key_dtype=BF16),
    "fp32": replace(FLASH, q_dtype=FP32, key_dtype=FP32),
    "fp32-q": replace(FLASH, q_dtype=FP32),
    "many-heads": replace(FLASH, heads=128, dim=256, q_dtype=FP32, key_dtype=FP32),
    "odd": replace(FLASH, heads=5, dim=24, rows=7, top_k=3),
}
TYPES = {BF16: "*bf16", FP32: "*fp32", FP8: "*u8"}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_score_kernel_builds_for_an_h200(shape: str) -> None:
    pytest.importorskip("triton")
    from tests.kernel_build import build_for_sm90

    lay = SHAPES[shape]
    q = torch.empty(1, lay.heads, lay.dim, dtype=lay.q_dtype, device="meta")
    values = torch.empty(9, lay.rows, lay.dim, dtype=lay.key_dtype, device="meta")
    scales = torch.empty(9, lay.rows, device="meta") if lay.key_dtype == FP8 else None
    plan = module.score.score_plan(q, values, scales, lay.m, lay.top_k)
    options = {"num_warps": plan.pop("num_warps"), "num_stages": plan.pop("num_stages")}
    kernel = module.score.score_kernel
    signature = {"q": TYPES[lay.q_dtype], "key_values": TYPES[lay.key_dtype]}
    signature |= dict.fromkeys(("weights", "key_scales"), "*fp32")
    signature |= dict.fromkeys(("table", "slots", "positions", "keys", "maxima"), "*i32")
    sizes = {name: "i32" for name in kernel.arg_names if name not in signature | plan}
    assert build_for_sm90(kernel, signature | sizes, plan, **options).startswith(b"\x7fELF")


@pytest.mark.parametrize("top_k", [1, 512, 1024, 9000])
@pytest.mark.parametrize("has_scores", [True, False])
def test_the_select_kernel_builds_for_an_h200(top_k: int, has_scores: bool) -> None:
    pytest.importorskip("triton")
    from tests.kernel_build import build_for_sm90

    plan = module.select.select_plan(4, top_k, has_scores)
    num_warps = plan.pop("num_warps")
    kernel = module.select.select_kernel
    signature = {name: "*i32" for name in kernel.arg_names if name not in plan}
    signature["capacity"] = "i32"
    assert build_for_sm90(kernel, signature, plan, num_warps).startswith(b"\x7fELF")


LENGTHS = [0, 1, 511, 512, 513, 575, 1000, 1024, 1025, 4097, 8192, 8193, 16384, 20001, 70000]


def gpu_store(layout: Layout, lengths: list[int], exact: bool) -> Store:
    # Scratch comes from memory that is full of what would be selected.
    torch.full((2**26,), 2**31 - 1, dtype=torch.int32, device="cuda")
    store = Store(replace(layout, slots=len(lengths)), np.random.default_rng(11), "cuda")
    for slot, n in enumerate(lengths):
        store.fill(slot, n, exact)
    return store


def on_cpu(store: Store, step: Step) -> Tensor:
    """The CPU operation on copies of the same memory."""
    scales = None if store.scales is None else store.scales.cpu()
    here = on("cpu", step)
    return index_select(
        here.q, here.weights, store.values.cpu(), scales, store.table.cpu(), here.slots,
        here.positions, store.layout.m, store.layout.top_k,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_the_kernels(check: Callable[..., None]) -> None:
    check(index_select, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("q_dtype", "key_dtype"), [(BF16, FP8), (FP32, FP8), (BF16, BF16), (FP32, FP32), (BF16, FP32)]
)
def test_the_kernels_against_loops(q_dtype: torch.dtype, key_dtype: torch.dtype, seed: int) -> None:
    check_random_steps(index_select, seed, "cuda", q_dtype=q_dtype, key_dtype=key_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("shape", ["flash", "pro", "small-blocks", "bf16", "fp32", "fp32-q", "odd"])
def test_the_kernels_against_the_cpu(shape: str, exact: bool) -> None:
    """Exact scores: the same selection. Others: right, and nearly always the same."""
    layout = replace(SHAPES[shape], width=-(-70000 // SHAPES[shape].rows))
    store = gpu_store(layout, LENGTHS, exact)
    tokens = [(slot, last_position(store, n)) for slot, n in enumerate(LENGTHS)]
    tokens += [(slot, max(0, position - 1)) for slot, position in tokens[-3:]]
    step = make_step(store, tokens, exact)
    out = select(index_select, store, step)
    if exact:
        assert torch.equal(out.cpu(), on_cpu(store, step))
    else:
        assert_right_but_for_rounding(out.cpu(), store, on("cpu", step))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["flash", "small-blocks", "bf16", "fp32"])
def test_the_kernels_on_each_token_alone(shape: str) -> None:
    layout = replace(SHAPES[shape], width=-(-12000 // SHAPES[shape].rows))
    lengths = np.random.default_rng(3).integers(0, 12000, 16).tolist()
    store = gpu_store(layout, lengths, exact=False)
    tokens = [(slot, last_position(store, n)) for slot, n in enumerate(lengths)]
    tokens += [(-1, 0)] + [(slot, max(0, position - 1)) for slot, position in tokens]
    check_each_token_alone(index_select, store, make_step(store, tokens, exact=False))


@pytest.mark.gpu
def test_every_launch_selects_the_same() -> None:
    store = gpu_store(replace(FLASH, width=320), [20000 - 300 * slot for slot in range(64)], False)
    tokens = [(slot, (20000 - 300 * slot) * 4) for slot in range(64)]
    step = make_step(store, tokens, exact=False)
    first = select(index_select, store, step)
    for _ in range(10):
        outs = [select(index_select, store, step) for _ in range(20)]
        assert all(torch.equal(out, first) for out in outs)


@pytest.mark.gpu
def test_the_kernels_in_a_graph() -> None:
    """Replays read slots, positions and table as they are then, and equal eager."""
    store = gpu_store(replace(FLASH, width=160), [0] * 9, exact=False)
    static = make_step(store, [(-1, 0)] * 16, exact=False)
    select(index_select, store, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    lay = store.layout
    with torch.cuda.graph(graph):
        out = index_select(
            static.q, static.weights, store.values, store.scales, store.table, static.slots,
            static.positions, lay.m, lay.top_k,
        )  # fmt: skip
    rng = np.random.default_rng(5)
    for turn in range(6):
        tokens: list[tuple[int, int]] = [(-1, 0)] * turn
        for slot in range(9):
            n = len(store.keys[slot]) + int(rng.integers(0, 1700))
            store.fill(slot, n, exact=False)
            tokens.append((slot, last_position(store, n)))
        tokens = (tokens + [(-1, 0)] * 16)[:16]
        step = make_step(store, [tokens[at] for at in rng.permutation(16)], exact=False)
        for name, value in vars(step).items():
            getattr(static, name).copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, select(index_select, store, step))


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_elements() -> None:
    """Blocks so far apart that 32 bits would wrap round into the wrong one."""
    stride = 3 * 2**29
    memory = torch.zeros(2 * stride + 2**17, dtype=BF16, device="cuda")
    values = memory.as_strided((3, 64, 128), (stride, 128, 1))
    values[2, 40:] = 1.0
    index = torch.zeros(1, dtype=torch.int32, device="cuda")
    q = torch.ones(1, 16, 128, dtype=BF16, device="cuda")
    weights = torch.ones(1, 16, device="cuda")
    table = torch.full((2, 1), 2, dtype=torch.int32, device="cuda")
    out = index_select(q, weights, values, None, table, index, index + 63, 1, 24)
    assert out.tolist() == [list(range(40, 64))]


if __name__ == "__main__":
    for seed in range(14):
        # So few that a program takes several tiles.
        module.kernel.PROGRAMS = 40 if seed < 8 else 396
        check_random_steps(interpreted, seed)
    for check in CHECKS:
        check(interpreted)
    check_small_tokens_alone(interpreted)
    print("done")
