"""kv_append: the CPU operation against plain loops, the kernel against the same loops."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache.errors import SchemaError
from graphcache.ops.kv_append import kv_append
from tests.ops.kv_cases import Layout, Step, Store, append_by_hand, random_layout, random_runs

module = importlib.import_module("graphcache.ops.kv_append")
ROOT = Path(__file__).parents[2]
Append = Callable[[Store, Step], None]


def public(store: Store, step: Step) -> None:
    kv_append(
        step.k,
        step.v,
        store.k_cache,
        store.v_cache,
        step.slots,
        step.positions,
        step.q_len,
        store.table,
    )


def kernel(store: Store, step: Step) -> None:
    module._launch(
        step.k,
        step.v,
        store.k_cache,
        store.v_cache,
        step.slots,
        step.positions,
        step.q_len,
        store.table,
    )


def fused(step: Step) -> None:
    """Make k and v views of one tensor, as a fused projection gives them."""
    tokens, heads, k_dim = step.k.shape
    both = torch.cat([step.k.flatten(1), step.v.flatten(1)], 1)
    step.k = both[:, : heads * k_dim].view(tokens, heads, k_dim)
    step.v = both[:, heads * k_dim :].view(tokens, heads, -1)


def heads_first(step: Step) -> None:
    """Make k and v views of tensors by head, as transformers gives them."""
    step.k = step.k.transpose(0, 1).contiguous().transpose(0, 1)
    step.v = step.v.transpose(0, 1).contiguous().transpose(0, 1)


def check_random_steps(append: Append, seed: int, device: str = "cpu", **fixed: object) -> None:
    """Three steps on one store, and all of its memory compared after each with loops."""
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, **fixed)
    tested, by_hand = (Store(layout, np.random.default_rng(seed), device) for _ in range(2))
    for slot in range(layout.slots):
        length = int(rng.integers(0, 2 * layout.rows if not layout.width else layout.context // 2))
        tested.fill(slot, length)
        by_hand.fill(slot, length)
    for _ in range(3):
        long = not layout.width and rng.random() < 0.3
        q_len = int(rng.integers(1, 2 * layout.rows + 2 if long else 5))
        runs = random_runs(rng, layout.slots, q_len)
        if layout.width:
            runs = [
                (slot, min(count, layout.context - tested.lengths[slot])) for slot, count in runs
            ]
        step, same = tested.step(runs, q_len), by_hand.step(runs, q_len)
        rng.choice([fused, heads_first, lambda step: None])(step)
        append(tested, step)
        append_by_hand(by_hand, same)
        tested.lengths = list(by_hand.lengths)
        assert torch.equal(tested.pool.arena, by_hand.pool.arena)


def check_long_run(append: Append, device: str = "cpu") -> None:
    """Runs longer than the ring, full and short: the last positions stay, none is written twice."""
    layout = Layout(heads=2, kv_heads=2, k_dim=8, v_dim=16, rows=5, window=3)
    for q_len, counts in ((12, (12, 5, 6, 0)), (5, (5, 4, 1, 0)), (6, (6, 5, 2, 1))):
        rng = np.random.default_rng(q_len)
        store = Store(layout, rng, device)
        store.fill(1, 3)
        step = store.step([(slot, count) for slot, count in enumerate(counts)], q_len)
        append(store, step)
        for slot, count in enumerate(counts):
            start = store.lengths[slot]
            for column in range(count):
                row = (start + column) % 5
                token = slot * q_len + column
                lasts = column + 5 >= count
                assert torch.equal(store.k_cache[slot, :, row], step.k[token]) == lasts
                assert torch.equal(store.v_cache[slot, :, row], step.v[token]) == lasts
            if count < 5 and start == 0:
                assert store.k_cache[slot, :, count:].isnan().all()
        assert store.k_cache[4:].isnan().all() and store.v_cache[4:].isnan().all()


def check_outrun_tokens_write_nothing(device: str = "cpu") -> None:
    """Only the programs of tokens that a later one outruns: in any order they must not race it."""
    layout = Layout(heads=2, kv_heads=2, k_dim=8, v_dim=16, rows=5, window=3)
    for count in (12, 9, 6):
        store = Store(layout, np.random.default_rng(0), device)
        step = store.step([(1, count)], 12)
        outrun = count - 5
        caches, index = (store.k_cache, store.v_cache), (step.slots, step.positions)
        module._launch(step.k[:outrun], step.v[:outrun], *caches, *index, 12, None)
        assert store.k_cache.isnan().all() and store.v_cache.isnan().all()
        module._launch(step.k[: outrun + 1], step.v[: outrun + 1], *caches, *index, 12, None)
        assert torch.equal(store.k_cache[1, :, outrun % 5], step.k[outrun])


def check_padding_only(append: Append, device: str = "cpu") -> None:
    """A batch of padding changes not a byte, scratch included."""
    for width in (0, 3):
        layout = Layout(heads=3, kv_heads=3, k_dim=8, v_dim=8, rows=4, width=width)
        store = Store(layout, np.random.default_rng(0), device)
        before = store.pool.arena.clone()
        append(store, store.step([(0, 0), (1, 0)], 3))
        assert torch.equal(store.pool.arena, before)


def check_cast(append: Append, cache: torch.dtype, rows: torch.dtype, device: str = "cpu") -> None:
    """Rows are rounded to the cache's dtype as torch rounds them."""
    layout = Layout(heads=2, kv_heads=2, k_dim=16, v_dim=8, rows=8, dtype=cache)
    store = Store(layout, np.random.default_rng(5), device)
    step = store.step([(0, 4), (3, 2)], 4)
    step.k = torch.randn(8, 2, 16, dtype=torch.float64).to(rows).to(device)
    step.v = torch.randn(8, 2, 8, dtype=torch.float64).to(rows).to(device)
    append(store, step)
    assert torch.equal(store.k_cache[0, :, :4].transpose(0, 1), step.k[:4].to(cache))
    assert torch.equal(store.v_cache[3, :, :2].transpose(0, 1), step.v[4:6].to(cache))


@pytest.mark.parametrize("seed", range(40))
def test_against_loops(seed: int) -> None:
    check_random_steps(public, seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_loops_in_half(dtype: torch.dtype) -> None:
    check_random_steps(public, 100, dtype=dtype)


def test_runs_longer_than_the_ring() -> None:
    check_long_run(public)


def test_padding_changes_nothing() -> None:
    check_padding_only(public)


@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_to_the_cache(cache: torch.dtype, rows: torch.dtype) -> None:
    check_cast(public, cache, rows)


def _plain() -> tuple[list[Tensor | int | None], Store]:
    store = Store(Layout(2, 2, 8, 8, rows=4, width=2), np.random.default_rng(0))
    step = store.step([(0, 2), (1, 1)], 2)
    caches = [store.k_cache, store.v_cache]
    return [step.k, step.v, *caches, step.slots, step.positions, 2, store.table], store


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        (0, lambda k: k.double()),
        (1, lambda v: v.double()),
        (0, lambda k: k[:, :1]),
        (1, lambda v: v[:3]),
        (0, lambda k: k.transpose(1, 2).contiguous().transpose(1, 2)),
        (2, lambda cache: cache.double()),
        (3, lambda cache: cache.bfloat16()),
        (2, lambda cache: cache[:, :, ::2]),
        (3, lambda cache: cache[:, :1]),
        (4, lambda slots: slots.long()),
        (5, lambda positions: positions.long()),
        (5, lambda positions: positions[:2]),
        (6, lambda q_len: 3),
        (6, lambda q_len: 0),
        (7, lambda table: table.long()),
        (7, lambda table: table[:, ::2]),
    ],
)
def test_refuses_what_it_can_not_serve(
    argument: int, change: Callable[[Tensor | int | None], Tensor | int]
) -> None:
    arguments, store = _plain()
    before = store.pool.arena.clone()
    arguments[argument] = change(arguments[argument])
    with pytest.raises(SchemaError, match="kv_append: "):
        kv_append(*arguments)  # type: ignore[arg-type]
    assert torch.equal(store.pool.arena, before)


def test_declares_what_it_writes() -> None:
    schema = torch.ops.graphcache.kv_append.default._schema
    written = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    assert written == ["k_cache", "v_cache"]


def test_the_kernel_interpreted() -> None:
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert child.stdout == "done\n"


@pytest.mark.parametrize("cache", ["bf16", "fp32"])
@pytest.mark.parametrize("rows", ["bf16", "fp32"])
@pytest.mark.parametrize(("has_table", "outruns"), [(False, False), (False, True), (True, False)])
def test_the_kernel_builds_for_an_h200(
    cache: str, rows: str, has_table: bool, outruns: bool
) -> None:
    pytest.importorskip("triton")
    from tests.kernel_build import build_for_sm90

    compiled = module._kv_append_kernel
    tensors = {"k": rows, "v": rows, "k_cache": cache, "v_cache": cache}
    signature = {name: f"*{dtype}" for name, dtype in tensors.items()}
    signature |= dict.fromkeys(("slots", "positions", "table"), "*i32")
    signature |= {name: "i32" for name in compiled.arg_names if name.endswith("stride")}
    constexprs = {
        "HEADS": 3,
        "ROWS": 16,
        "K_DIM": 64,
        "V_DIM": 40,
        "K_BLOCK": 64,
        "V_BLOCK": 64,
        "HEAD_BLOCK": 4,
        "HAS_TABLE": has_table,
        "OUTRUNS": outruns,
    }
    signature["q_len"] = "i32"
    assert build_for_sm90(compiled, signature, constexprs, num_warps=1).startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(5))
def test_the_kernel_against_loops(seed: int, dtype: torch.dtype) -> None:
    check_random_steps(public, seed, "cuda", dtype=dtype)


@pytest.mark.gpu
def test_the_kernel_on_long_runs_and_padding() -> None:
    check_long_run(public, "cuda")
    check_outrun_tokens_write_nothing("cuda")
    check_padding_only(public, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_rounds_to_the_cache(cache: torch.dtype, rows: torch.dtype) -> None:
    check_cast(public, cache, rows, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kv_heads", "k_dim", "v_dim"), [(3, 64, 64), (8, 128, 128), (8, 256, 256), (16, 192, 128)]
)
@pytest.mark.parametrize("width", [0, 4])
def test_the_kernel_at_models_shapes(kv_heads: int, k_dim: int, v_dim: int, width: int) -> None:
    """Shapes that take one program a token, and several."""
    rows = 16 if width else 40
    layout = Layout(kv_heads, kv_heads, k_dim, v_dim, rows, width, slots=64, dtype=torch.bfloat16)
    tested, by_hand = (Store(layout, np.random.default_rng(3), "cuda") for _ in range(2))
    runs = [(slot, 1 + slot % 4) for slot in range(0, 64, 2)]
    public(tested, tested.step(runs, 4))
    append_by_hand(by_hand, by_hand.step(runs, 4))
    assert torch.equal(tested.pool.arena, by_hand.pool.arena)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_elements() -> None:
    """Slots so far apart that 32 bits would wrap round into the wrong one."""
    stride = 3 * 2**29
    memory = torch.zeros(2 * stride + 4096, dtype=torch.bfloat16, device="cuda")
    k_cache, v_cache = (
        memory.as_strided((3, 2, 4, 8), (stride, 32, 8, 1), offset) for offset in (0, 1024)
    )
    k, v = (torch.full((1, 2, 8), value, dtype=torch.bfloat16, device="cuda") for value in (1, 2))
    slots, positions = (torch.tensor([n], dtype=torch.int32, device="cuda") for n in (2, 1))
    kv_append(k, v, k_cache, v_cache, slots, positions, 1)
    assert (k_cache[2, :, 1] == 1).all() and (v_cache[2, :, 1] == 2).all()
    assert int(memory.count_nonzero()) == 32


@pytest.mark.gpu
def test_the_kernel_in_a_graph() -> None:
    """A replay reads slots, positions and table as they are then."""
    layout = Layout(2, 2, 64, 64, rows=4, width=4, slots=6, dtype=torch.bfloat16)
    tested, by_hand = (Store(layout, np.random.default_rng(9), "cuda") for _ in range(2))
    static = tested.step([(0, 0)] * 4, 2)
    by_hand.step([(0, 0)] * 4, 2)
    public(tested, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        public(tested, static)
    rng = np.random.default_rng(1)
    for _ in range(5):
        runs = random_runs(rng, 5, 2)
        step, same = tested.step(runs, 2), by_hand.step(runs, 2)
        for name in ("k", "v", "slots", "positions"):
            getattr(static, name).copy_(getattr(step, name))
        graph.replay()
        append_by_hand(by_hand, same)
        tested.lengths = list(by_hand.lengths)
        assert torch.equal(tested.pool.arena, by_hand.pool.arena)


if __name__ == "__main__":
    for seed in range(12):
        check_random_steps(kernel, seed)
    check_long_run(kernel)
    check_outrun_tokens_write_nothing()
    check_padding_only(kernel)
    print("done")
