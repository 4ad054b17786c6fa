"""prefill_attention against float64 loops over each slot's history: the CPU operation, the kernel
under the interpreter and on a GPU. Caches lie in memory that is NaN wherever nothing was written.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache.errors import SchemaError
from graphcache.ops.decode_attention import decode_attention
from graphcache.ops.kv_append import kv_append
from graphcache.ops.prefill_attention import prefill_attention
from tests.kernel_build import needs_loop_interpreter
from tests.ops.kv_cases import (
    Layout,
    Step,
    Store,
    product_by_columns,
    random_layout,
    random_runs,
    remember_by_hand,
)

module = importlib.import_module("graphcache.ops.prefill_attention")
append_module = importlib.import_module("graphcache.ops.kv_append")
ROOT = Path(__file__).parents[2]
Attend = Callable[..., Tensor]

SHAPES = {
    "smollm2": Layout(9, 3, 64, 64, rows=64, width=80),
    "llama-1b": Layout(32, 8, 64, 64, rows=64, width=80),
    "d128": Layout(16, 4, 128, 128, rows=64, width=80),
    "d256": Layout(8, 4, 256, 256, rows=64, width=80),
    "dk192-dv128": Layout(8, 8, 192, 128, rows=16, width=320),
    "window-sinks": Layout(64, 8, 64, 64, rows=131, window=128, sinks=True),
    "softcap": Layout(8, 4, 256, 256, rows=4099, window=4096, softcap=50.0),
}
TOLERANCE = {torch.float32: (2e-5, 1e-5), torch.bfloat16: (1e-2, 1.6e-2)}


def attend(operation: Attend, store: Store, step: Step) -> Tensor:
    lay = store.layout
    return operation(
        step.q,
        step.k,
        step.v,
        store.k_cache,
        store.v_cache,
        step.slots,
        step.positions,
        step.q_len,
        lay.scale,
        store.table,
        lay.window,
        lay.softcap,
        store.sinks,
    )


def append(store: Store, step: Step, operation: Callable[..., None] = kv_append) -> None:
    caches = store.k_cache, store.v_cache
    operation(step.k, step.v, *caches, step.slots, step.positions, step.q_len, store.table)


def assert_close(got: Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    absolute, relative = TOLERANCE[dtype]
    np.testing.assert_allclose(got.double().cpu().numpy(), expected, relative, absolute)


def check_chunk(operation: Attend, store: Store, step: Step) -> None:
    """Right against the history, nothing but the output written, zeros at padding."""
    remember_by_hand(store, step)
    before = store.pool.arena.clone()
    out = attend(operation, store, step)
    assert torch.equal(store.pool.arena, before)
    assert not out[step.slots < 0].any()
    assert_close(out, store.attention(step), store.layout.dtype)


def check_random_chunks(
    operation: Attend,
    seed: int,
    device: str = "cpu",
    writes: Callable[..., None] = kv_append,
    longest: int = 40,
    **fixed: object,
) -> None:
    """Chunk after chunk on live slots, longer than rings too, with shorter runs and padding."""
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, **fixed)
    store = Store(layout, np.random.default_rng(seed), device)
    lasts = layout.window and not layout.width
    for slot in range(layout.slots):
        store.fill(slot, int(rng.integers(0, 2 * layout.rows if lasts else layout.context)))
    for _ in range(2):
        q_len = int(rng.integers(1, longest))
        runs = random_runs(rng, layout.slots, q_len)
        if not lasts:
            runs = [(slot, min(n, layout.context - store.lengths[slot])) for slot, n in runs]
        step = store.step(runs, q_len)
        check_chunk(operation, store, step)
        append(store, step, writes)


def check_edges_of_tiles(operation: Attend) -> None:
    """Chunks that begin and end on, before and after the edges of tiles, blocks and the window."""
    for window, rows, width in ((0, 64, 4), (70, 16, 16), (70, 72, 0)):
        layout = Layout(2, 1, 16, 24, rows, width, window, sinks=True, slots=6)
        store = Store(layout, np.random.default_rng(window))
        starts, counts = (0, 1, 63, 64, 65, 128), (66, 64, 1, 65, 63, 0)
        for slot, start in enumerate(starts):
            store.fill(slot, start)
        check_chunk(operation, store, store.step(list(enumerate(counts)), 66))


def check_chunks_of_any_length(
    operation: Attend, writes: Callable[..., None], layout: Layout, tokens: int, device: str = "cpu"
) -> None:
    """The same prompt whole and cut in several ways: the same bits."""
    prompts = Store(layout, np.random.default_rng(3), device, keep_history=False)
    whole = prompts.step([(0, tokens)], tokens)
    outs = []
    for cuts in ([tokens], [1, 64, 7], [100, 28, 30], [tokens - 1]):
        store = Store(layout, np.random.default_rng(3), device, keep_history=False)
        store.sinks = prompts.sinks
        parts, begin = [], 0
        for length in [*cuts, tokens - sum(cuts)]:
            own = slice(begin, begin + length)
            part = store.step([(0, length)], max(1, length))
            for name in ("q", "k", "v"):
                getattr(part, name)[:length] = getattr(whole, name)[own]
            if length:
                parts.append(attend(operation, store, part))
                append(store, part, writes)
            store.lengths[0] += length
            begin += length
        outs.append(torch.cat(parts))
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


@pytest.mark.parametrize("seed", range(40))
def test_against_loops(seed: int) -> None:
    check_random_chunks(prefill_attention, seed)


def test_edges_of_tiles() -> None:
    check_edges_of_tiles(prefill_attention)


def test_agrees_with_decode() -> None:
    """What a chunk computes from its input, decode computes from the cache after the append."""
    for layout in (
        Layout(6, 2, 16, 8, rows=8, width=6, dtype=torch.bfloat16, softcap=3.0, sinks=True),
        Layout(6, 2, 16, 8, rows=40, window=21),
    ):
        store = Store(layout, np.random.default_rng(4))
        store.fill(3, 17)
        step = store.step([(3, 20), (1, 13)], 20)
        # Rows in fp32 are rounded to the cache before they are attended to.
        step.q, step.k, step.v = step.q.float(), step.k.float() * 1.01, step.v.float() * 1.01
        chunk = attend(prefill_attention, store, step)
        append(store, step)
        by_step = decode_attention(
            step.q,
            store.k_cache,
            store.v_cache,
            step.slots,
            step.positions,
            20,
            layout.scale,
            store.table,
            layout.window,
            layout.softcap,
            store.sinks,
        )
        torch.testing.assert_close(chunk, by_step, rtol=1e-5, atol=1e-6)


def test_half_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        layout = Layout(4, 2, 16, 16, rows=16, width=4, dtype=dtype)
        store = Store(layout, np.random.default_rng(6))
        store.fill(2, 20)
        step = store.step([(2, 9)], 12)
        remember_by_hand(store, step)
        out = attend(prefill_attention, store, step)
        assert out.dtype == dtype
        expected = torch.from_numpy(store.attention(step))
        assert (out.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


def _by_head(step: Step) -> Step:
    """The step with inputs laid out by head, as transformers gives them."""
    q, k, v = (
        each.transpose(0, 1).contiguous().transpose(0, 1) for each in (step.q, step.k, step.v)
    )
    return replace(step, q=q, k=k, v=v)


def test_strided_inputs() -> None:
    store = Store(Layout(4, 2, 16, 16, rows=32), np.random.default_rng(7))
    store.fill(1, 9)
    step = store.step([(1, 5), (0, 2)], 5)
    out = attend(prefill_attention, store, _by_head(step))
    assert out.is_contiguous()
    assert torch.equal(out, attend(prefill_attention, store, step))


def _plain() -> list[Any]:
    store = Store(Layout(4, 2, 8, 8, rows=4, width=2, sinks=True), np.random.default_rng(0))
    step = store.step([(0, 2), (1, 1)], 2)
    caches = [store.k_cache, store.v_cache]
    index = [step.slots, step.positions]
    return [step.q, step.k, step.v, *caches, *index, 2, 0.3, store.table, 0, 0.0, store.sinks]


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        (0, lambda q: q.double()),
        (0, lambda q: q[:, :3]),
        (1, lambda k: k.double()),
        (1, lambda k: k[:, :1]),
        (2, lambda v: v[:3]),
        (2, lambda v: v[..., :7]),
        (3, lambda cache: cache.double()),
        (5, lambda slots: slots.long()),
        (6, lambda positions: positions.long()),
        (7, lambda q_len: 3),
        (9, lambda table: table.long()),
        (10, lambda window: -1),
        (11, lambda softcap: -1.0),
        (12, lambda sinks: sinks[:2]),
    ],
)
def test_refuses_what_it_can_not_serve(argument: int, change: Callable[[Any], Any]) -> None:
    arguments = _plain()
    prefill_attention(*arguments)
    arguments[argument] = change(arguments[argument])
    with pytest.raises(SchemaError, match="prefill_attention: "):
        prefill_attention(*arguments)


def test_traces_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = torch.empty(6, 4, 16, dtype=torch.bfloat16), torch.empty(6, 2, 16)
        v = torch.empty(6, 2, 24)
        k_cache, v_cache = torch.empty(3, 2, 32, 16), torch.empty(3, 2, 32, 24)
        index = torch.empty(6, dtype=torch.int32)
        out = prefill_attention(q, k, v, k_cache, v_cache, index, index, 2, 0.25)
    assert out.shape == (6, 4, 24) and out.dtype == torch.bfloat16


@needs_loop_interpreter
def test_the_kernel_interpreted() -> None:
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert child.stdout == "done\n"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.bfloat16) for shape in SHAPES]
    + [(shape, torch.float32) for shape in ("smollm2", "window-sinks")],
)
def test_the_kernel_builds_for_an_h200(shape: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from tests.kernel_build import build_for_sm90

    layout = SHAPES[shape]
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    q = torch.empty(1, layout.heads, layout.k_dim, dtype=dtype, device="meta")
    caches = [
        torch.empty(9, layout.kv_heads, layout.rows, dim, dtype=dtype, device="meta")
        for dim in (layout.k_dim, layout.v_dim)
    ]
    table = torch.empty(9, layout.width, device="meta") if layout.width else None
    plan = module.kernel.tiling(q, *caches, table, layout.window)
    options = {"num_warps": plan.pop("num_warps"), "num_stages": plan.pop("num_stages")}
    plan |= {"HAS_SINKS": layout.sinks, "SOFTCAP": layout.softcap > 0}
    kernel = module.kernel._prefill_attention_kernel
    tensors = ("q", "k", "v", "k_cache", "v_cache", "sinks", "out")
    signature = dict.fromkeys(tensors, f"*{name}")
    signature |= dict.fromkeys(("slots", "positions", "table"), "*i32")
    signature |= {"factor": "fp32", "cap": "fp32", "q_len": "i32"}
    signature |= {each: "i32" for each in kernel.arg_names if each.endswith("stride")}
    assert build_for_sm90(kernel, signature, plan, **options).startswith(b"\x7fELF")


def on_cpu(store: Store, step: Step) -> Tensor:
    """The CPU operation on copies of the same memory."""
    host = Store(store.layout, np.random.default_rng(0))
    host.pool.arena.copy_(store.pool.arena)
    host.sinks = None if store.sinks is None else store.sinks.cpu()
    host.table = None if store.table is None else store.table.cpu()
    inputs = (step.q, step.k, step.v, step.slots, step.positions)
    return attend(prefill_attention, host, Step(*(each.cpu() for each in inputs), step.q_len))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_against_the_cpu(shape: str, dtype: torch.dtype) -> None:
    layout = replace(SHAPES[shape], dtype=dtype, slots=8)
    store = Store(layout, np.random.default_rng(0), "cuda", keep_history=False)
    for slot, length in enumerate((0, 1, 63, 64, 700, 2049, 4000, 300)):
        store.fill(slot, min(length, layout.context - 301) if not layout.window else length)
    runs = [(7, 300), (6, 299), (0, 256), (3, 64), (5, 65), (1, 1), (4, 63), (2, 0)]
    step = store.step(runs, 300)
    before = store.pool.arena.clone()
    out = attend(prefill_attention, store, step)
    assert torch.equal(store.pool.arena, before)
    assert not out[step.slots < 0].any()
    assert_close(out, on_cpu(store, step).double().numpy(), dtype)
    assert torch.equal(attend(prefill_attention, store, _by_head(step)), out)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_against_loops(seed: int) -> None:
    check_random_chunks(prefill_attention, seed, "cuda", longest=150)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_on_chunks_of_any_length(shape: str, dtype: torch.dtype) -> None:
    layout = replace(SHAPES[shape], dtype=dtype, slots=2)
    check_chunks_of_any_length(prefill_attention, kv_append, layout, 400, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_on_each_row_alone(dtype: torch.dtype) -> None:
    """Bit for bit: a row alone, and in a batch of others, at another row."""
    layout = replace(SHAPES["smollm2"], dtype=dtype, slots=8)
    store = Store(layout, np.random.default_rng(1), "cuda", keep_history=False)
    for slot in range(8):
        store.fill(slot, 150 * slot)
    step = store.step([(slot, 70 - 9 * slot) for slot in range(8)], 70)
    together = attend(prefill_attention, store, step)
    for row in (0, 3, 7):
        own = slice(70 * row, 70 * row + 70)
        parts = {n: getattr(step, n)[own] for n in ("q", "k", "v", "slots", "positions")}
        assert torch.equal(attend(prefill_attention, store, replace(step, **parts)), together[own])


@pytest.mark.gpu
def test_the_kernel_compiles_once_for_every_chunk_length() -> None:
    layout = replace(SHAPES["smollm2"], dtype=torch.bfloat16)
    store = Store(layout, np.random.default_rng(1), "cuda", keep_history=False)
    kernel = module.kernel._prefill_attention_kernel
    attend(prefill_attention, store, store.step([(0, 5)], 5))
    (caches,) = kernel.device_caches.values()
    compiled = len(caches[0])
    for q_len in (1, 2, 16, 48, 129):
        attend(prefill_attention, store, store.step([(1, q_len)], q_len))
    assert len(caches[0]) == compiled


@pytest.mark.gpu
def test_the_kernel_in_a_graph() -> None:
    """A replay reads slots, positions and table as they are then."""
    layout = replace(SHAPES["smollm2"], dtype=torch.bfloat16, slots=4)
    store = Store(layout, np.random.default_rng(2), "cuda", keep_history=False)
    static = store.step([(0, 0), (0, 0)], 40)
    attend(prefill_attention, store, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(prefill_attention, store, static)
    for runs in ([(1, 40), (3, 7)], [(2, 33), (1, 40)]):
        step = store.step(runs, 40)
        for name in ("q", "k", "v", "slots", "positions"):
            getattr(static, name).copy_(getattr(step, name))
        graph.replay()
        assert torch.equal(out, attend(prefill_attention, store, step))
        append(store, step)
        for slot, count in runs:
            store.lengths[slot] += count


if __name__ == "__main__":
    for seed in range(5):
        check_random_chunks(module.kernel.launch, seed, writes=append_module._launch)
    check_edges_of_tiles(module.kernel.launch)
    np.matmul = product_by_columns  # type: ignore[assignment]
    small = Layout(3, 1, 16, 16, rows=140, window=40, sinks=True, slots=2)
    check_chunks_of_any_length(module.kernel.launch, append_module._launch, small, 160)
    print("done")
