"""decode_attention against float64 loops over each slot's history: the CPU operation, the kernel
under the interpreter and on a GPU. Caches lie in memory that is NaN wherever nothing was written.
"""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache.errors import SchemaError
from graphcache.ops.decode_attention import WorkspaceNotReady, decode_attention
from graphcache.ops.kv_append import kv_append
from tests.kernel_build import needs_loop_interpreter
from tests.ops.kv_cases import Layout, Step, Store, append_by_hand, random_layout, random_runs

module = importlib.import_module("graphcache.ops.decode_attention")
ROOT = Path(__file__).parents[2]
Attend = Callable[..., Tensor]

SMOLLM2 = Layout(9, 3, 64, 64, rows=64, width=80, slots=64)
LLAMA_1B = Layout(32, 8, 64, 64, rows=64, width=80, slots=64)
WIDE_HEADS = Layout(16, 4, 128, 128, rows=64, width=80, slots=64)
WIDER_HEADS = Layout(8, 4, 256, 256, rows=64, width=80, slots=64)
UNEQUAL = Layout(8, 8, 192, 128, rows=16, width=320, slots=64)
MQA = Layout(71, 1, 64, 64, rows=16, width=320, slots=64)
WINDOWED = Layout(64, 8, 64, 64, rows=131, window=128, sinks=True, slots=64)
CAPPED = Layout(8, 4, 256, 256, rows=4099, window=4096, softcap=50.0, slots=64)
SHAPES = {
    "smollm2": SMOLLM2,
    "llama-1b": LLAMA_1B,
    "d128": WIDE_HEADS,
    "d256": WIDER_HEADS,
    "dk192-dv128": UNEQUAL,
    "mqa": MQA,
    "window-sinks": WINDOWED,
    "softcap": CAPPED,
}
CONTEXTS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 1000]
CONTEXTS += [2047, 2048, 2049, 4095, 4096, 4097, 5000]
TOLERANCE = {torch.float32: (2e-5, 1e-5), torch.bfloat16: (1e-2, 1.6e-2)}


def attend(operation: Attend, store: Store, step: Step) -> Tensor:
    lay = store.layout
    return operation(
        step.q,
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


def assert_close(got: Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    absolute, relative = TOLERANCE[dtype]
    np.testing.assert_allclose(got.double().cpu().numpy(), expected, relative, absolute)


def check_random_steps(operation: Attend, seed: int, **fixed: object) -> None:
    """Steps of q_len 1..4 with shorter runs and padding; only the output is written."""
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, **fixed)
    store = Store(layout, np.random.default_rng(seed))
    most = 2 * layout.rows if layout.window and not layout.width else layout.context - 12
    for slot in range(layout.slots):
        store.fill(slot, int(rng.integers(0, max(1, most))))
    for q_len in rng.permutation([1, 2, 3, 4])[:2].tolist():
        runs = random_runs(rng, layout.slots, q_len)
        runs = [
            (slot, 0 if not layout.window and store.lengths[slot] > most else count)
            for slot, count in runs
        ]
        if layout.width:
            runs = [
                (slot, min(count, layout.context - store.lengths[slot])) for slot, count in runs
            ]
        step = store.step(runs, q_len)
        append_by_hand(store, step)
        before = store.pool.arena.clone()
        out = attend(operation, store, step)
        assert torch.equal(store.pool.arena, before)
        assert not out[step.slots < 0].any()
        assert_close(out, store.attention(step), layout.dtype)


def check_many_splits(operation: Attend) -> None:
    """Contexts of several splits, more than are added at once too; edges of blocks and splits."""
    for heads, kv_heads, v_dim, softcap in ((6, 2, 16, 3.0), (16, 1, 64, 0.0)):
        layout = Layout(heads, kv_heads, 16, v_dim, 1000, sinks=True, softcap=softcap, slots=7)
        store = Store(layout, np.random.default_rng(1))
        for slot, length in enumerate((0, 127, 128, 255, 256, 511, 998)):
            store.fill(slot, length)
        step = store.step([(slot, 1) for slot in range(7)] + [(0, 0)], 1)
        step.q *= 3
        append_by_hand(store, step)
        assert_close(attend(operation, store, step), store.attention(step), torch.float32)


def check_group_tiles(operation: Attend) -> None:
    """More heads to a K/V head than one tile takes, and rows that end within a block of keys."""
    for heads in (20, 70):
        layout = Layout(heads, 1, 16, 8, rows=7, width=60, window=333, slots=3)
        store = Store(layout, np.random.default_rng(heads))
        for slot, length in enumerate((5, 400, 140)):
            store.fill(slot, length)
        step = store.step([(2, 1), (0, 2), (1, 2)], 2)
        append_by_hand(store, step)
        assert_close(attend(operation, store, step), store.attention(step), torch.float32)


def check_each_token_alone(operation: Attend, store: Store, step: Step) -> None:
    """Bit for bit: alone or in a batch, at other rows, and as a column of a longer run."""
    together = attend(operation, store, step)
    tokens = step.slots.shape[0]
    shuffled = torch.from_numpy(np.random.default_rng(0).permutation(tokens)).to(step.q.device)
    single = replace(
        step,
        q=step.q[shuffled],
        slots=step.slots[shuffled],
        positions=step.positions[shuffled],
        q_len=1,
    )
    assert torch.equal(attend(operation, store, single), together[shuffled])
    for token in range(0, tokens, max(1, tokens // 16)):
        own = slice(token, token + 1)
        alone = replace(
            step, q=step.q[own], slots=step.slots[own], positions=step.positions[own], q_len=1
        )
        assert torch.equal(attend(operation, store, alone), together[own])


def check_later_tokens_do_not_matter(operation: Attend, device: str = "cpu") -> None:
    """A token whose own row is NaN leaves the earlier tokens of its run as they were."""
    for width in (0, 3):
        layout = Layout(4, 2, 16, 16, rows=32, width=width, window=0 if width else 28, slots=2)
        store = Store(layout, np.random.default_rng(2), device)
        store.fill(0, 30)
        step = store.step([(0, 4), (1, 3)], 4)
        append_by_hand(store, step)
        before = attend(operation, store, step)
        for slot, position in ((0, 33), (1, 2)):
            index, row = store.place(slot, position)
            store.k_cache[index, :, row] = math.nan
            store.v_cache[index, :, row] = math.nan
        after = attend(operation, store, step)
        bad = [3, 6]
        good = [t for t in range(8) if t not in bad]
        assert after[bad].isnan().all()
        assert torch.equal(after[good], before[good])


def interpreted(*arguments: Any) -> Tensor:
    out: Tensor = module.kernel.launch(*arguments)
    for counters in module.counters._COUNTERS.values():
        assert not counters.any()
    return out


@pytest.mark.parametrize("seed", range(40))
def test_against_loops(seed: int) -> None:
    check_random_steps(decode_attention, seed)


def test_many_splits() -> None:
    check_many_splits(decode_attention)


def test_group_tiles() -> None:
    check_group_tiles(decode_attention)


def check_small_tokens_alone(operation: Attend) -> None:
    for layout in (
        Layout(4, 2, 16, 16, rows=300, slots=16),
        Layout(4, 1, 16, 24, rows=16, width=12, window=20, sinks=True, slots=16),
    ):
        store = Store(layout, np.random.default_rng(4))
        for slot in range(16):
            store.fill(slot, 11 * slot)
        step = store.step([(slot, 1 + slot % 3) for slot in range(16)], 3)
        append_by_hand(store, step)
        check_each_token_alone(operation, store, step)


def test_each_token_alone() -> None:
    check_small_tokens_alone(decode_attention)


def test_later_tokens_do_not_matter() -> None:
    check_later_tokens_do_not_matter(decode_attention)


def test_half_precision() -> None:
    """The reference computes in fp32 whatever the cache holds, and rounds once."""
    for dtype in (torch.bfloat16, torch.float16):
        layout = Layout(4, 2, 16, 16, rows=16, width=4, dtype=dtype)
        store = Store(layout, np.random.default_rng(6))
        store.fill(2, 40)
        step = store.step([(2, 1)], 1)
        append_by_hand(store, step)
        out = attend(decode_attention, store, step)
        assert out.dtype == dtype
        expected = torch.from_numpy(store.attention(step))
        assert (out.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_strided_queries() -> None:
    layout = Layout(4, 2, 16, 16, rows=32)
    store = Store(layout, np.random.default_rng(7))
    store.fill(1, 9)
    step = store.step([(1, 2), (0, 1)], 2)
    append_by_hand(store, step)
    by_head = replace(step, q=step.q.transpose(0, 1).contiguous().transpose(0, 1))
    out = attend(decode_attention, store, by_head)
    assert out.is_contiguous()
    assert torch.equal(out, attend(decode_attention, store, step))


def test_after_the_append() -> None:
    """With kv_append before it, a token's own row is seen."""
    layout = Layout(4, 2, 16, 16, rows=11, window=8)
    store = Store(layout, np.random.default_rng(8))
    store.fill(0, 25)
    step = store.step([(0, 4), (3, 2)], 4)
    caches = store.k_cache, store.v_cache
    kv_append(step.k, step.v, *caches, step.slots, step.positions, 4)
    out = attend(decode_attention, store, step)
    append_by_hand(store, step)
    assert_close(out, store.attention(step), torch.float32)


def _plain() -> list[Any]:
    store = Store(Layout(4, 2, 8, 8, rows=4, width=2, sinks=True), np.random.default_rng(0))
    step = store.step([(0, 2), (1, 1)], 2)
    caches = [store.k_cache, store.v_cache]
    return [step.q, *caches, step.slots, step.positions, 2, 0.3, store.table, 0, 0.0, store.sinks]


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        (0, lambda q: q.double()),
        (0, lambda q: q[:, :3]),
        (0, lambda q: q[:3]),
        (0, lambda q: q[..., :7]),
        (0, lambda q: q[0]),
        (1, lambda cache: cache.double()),
        (2, lambda cache: cache.half()),
        (3, lambda slots: slots.long()),
        (4, lambda positions: positions.long()),
        (5, lambda q_len: 3),
        (7, lambda table: table.long()),
        (8, lambda window: -1),
        (9, lambda softcap: -1.0),
        (10, lambda sinks: sinks.double()),
        (10, lambda sinks: sinks[:2]),
    ],
)
def test_refuses_what_it_can_not_serve(argument: int, change: Callable[[Any], Any]) -> None:
    arguments = _plain()
    decode_attention(*arguments)
    arguments[argument] = change(arguments[argument])
    with pytest.raises(SchemaError, match="decode_attention: "):
        decode_attention(*arguments)


def test_traces_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(6, 4, 16, dtype=torch.bfloat16)
        k_cache, v_cache = torch.empty(3, 2, 32, 16), torch.empty(3, 2, 32, 24)
        index = torch.empty(6, dtype=torch.int32)
        out = decode_attention(q, k_cache, v_cache, index, index, 2, 0.25)
    assert out.shape == (6, 4, 24) and out.dtype == torch.bfloat16


def test_counters_grow_outside_captures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(module.counters, "_COUNTERS", {})
    monkeypatch.setattr(module.counters, "_OUTGROWN", [])
    on_cpu = torch.device("cpu")
    first = module.counters.counters_of(on_cpu, 10)
    assert first.numel() == module.counters.COUNTERS and not first.any()
    assert module.counters.counters_of(on_cpu, module.counters.COUNTERS) is first
    second = module.counters.counters_of(on_cpu, module.counters.COUNTERS + 1)
    assert second.numel() > module.counters.COUNTERS
    assert [held is first for held in module.counters._OUTGROWN] == [True]

    stream = SimpleNamespace(device_index=0, cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(WorkspaceNotReady, match="needs 10 counters on this stream and has 0"):
        module.counters.counters_of(torch.device("cuda"), 10)
    module.counters._COUNTERS[0, 7] = first
    assert module.counters.counters_of(torch.device("cuda"), 10) is first
    with pytest.raises(WorkspaceNotReady):
        module.counters.counters_of(torch.device("cuda"), module.counters.COUNTERS + 1)


def test_splits_follow_from_the_schema() -> None:
    """Neither the batch nor q_len enters the plan, and no context has more splits than it."""
    pytest.importorskip("triton")
    for layout in SHAPES.values():
        caches = [
            torch.empty(9, layout.kv_heads, layout.rows, dim, device="meta", dtype=torch.bfloat16)
            for dim in (layout.k_dim, layout.v_dim)
        ]
        table = torch.empty(9, layout.width, device="meta") if layout.width else None
        plans = [
            module.kernel.tiling(
                torch.empty(tokens, layout.heads, layout.k_dim, dtype=torch.bfloat16),
                *caches,
                table,
                layout.window,
            )
            for tokens in (1, 64)
        ]
        assert plans[0] == plans[1]
        block, most = plans[0]["BLOCK_N"], plans[0]["SPLITS"]
        for position in range(layout.context):
            first = max(0, position - layout.window + 1) if layout.window else 0
            blocks = position // block + 1 - first // block
            per_split = max(-(-blocks // most), plans[0]["MIN_BLOCKS"])
            assert -(-blocks // per_split) <= most


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
    + [(shape, torch.float32) for shape in ("smollm2", "d128", "window-sinks")],
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
    signature = dict.fromkeys(("q", "k_cache", "v_cache", "sinks", "out"), f"*{name}")
    signature |= dict.fromkeys(("slots", "positions", "table", "counters"), "*i32")
    signature |= {"partials": "*fp32", "stats": "*fp32", "factor": "fp32", "cap": "fp32"}
    strides = ("q_token", "q_head", "k_cache", "v_cache", "table")
    signature |= {f"{each}_stride": "i32" for each in strides}
    kernel = module.kernel._decode_attention_kernel
    assert build_for_sm90(kernel, signature, plan, **options).startswith(b"\x7fELF")


def gpu_store(layout: Layout, lengths: list[int], keep_history: bool = False) -> Store:
    """On the device, slot i at lengths[i], as far as the layout has room for it."""
    room = max(0, layout.context - 4) if layout.width or not layout.window else 10**9
    store = Store(layout, np.random.default_rng(11), "cuda", keep_history)
    for slot, length in enumerate(lengths):
        store.fill(slot, min(length, room))
    return store


def on_cpu(store: Store, step: Step) -> Tensor:
    """The CPU operation on copies of the same memory."""
    lay = store.layout
    host = Store(replace(lay, sinks=False), np.random.default_rng(0))
    host.pool.arena.copy_(store.pool.arena)
    host.sinks = None if store.sinks is None else store.sinks.cpu()
    if store.table is not None:
        host.table = store.table.cpu()
    inputs = (step.q, step.k, step.v, step.slots, step.positions)
    host.layout = lay
    return attend(decode_attention, host, Step(*(each.cpu() for each in inputs), step.q_len))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_against_the_cpu(shape: str, dtype: torch.dtype) -> None:
    layout = replace(SHAPES[shape], dtype=dtype, slots=len(CONTEXTS) + 1)
    store = gpu_store(layout, [length - 1 for length in CONTEXTS])
    runs = [(slot, 1 + slot % 2) for slot in range(len(CONTEXTS))] + [(0, 0)]
    step = store.step(runs, 2)
    append_by_hand(store, step)
    before = store.pool.arena.clone()
    out = attend(decode_attention, store, step)
    assert torch.equal(store.pool.arena, before)
    assert not out[step.slots < 0].any()
    assert_close(out, on_cpu(store, step).double().numpy(), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_against_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng)
    store = gpu_store(layout, rng.integers(0, layout.context, layout.slots).tolist(), True)
    runs = random_runs(rng, layout.slots, 4)
    if layout.width or not layout.window:
        runs = [(slot, min(n, layout.context - store.lengths[slot])) for slot, n in runs]
    step = store.step(runs, 4)
    append_by_hand(store, step)
    assert_close(attend(decode_attention, store, step), store.attention(step), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_on_each_token_alone(shape: str, dtype: torch.dtype) -> None:
    layout = replace(SHAPES[shape], dtype=dtype)
    lengths = np.random.default_rng(3).integers(0, 3000, 64).tolist()
    store = gpu_store(layout, lengths)
    for q_len in (1, 4):
        step = store.step([(slot, 1 + slot % q_len) for slot in range(64)], q_len)
        append_by_hand(store, step)
        check_each_token_alone(decode_attention, store, step)


@pytest.mark.gpu
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_with_queries_of_another_dtype(q_dtype: torch.dtype) -> None:
    other = {torch.bfloat16: torch.float32, torch.float32: torch.bfloat16}[q_dtype]
    store = gpu_store(replace(SMOLLM2, dtype=other, slots=4), [0, 100, 1000, 3000], True)
    step = store.step([(slot, 1) for slot in range(4)], 1)
    append_by_hand(store, step)
    step.q = step.q.to(q_dtype)
    out = attend(decode_attention, store, step)
    assert out.dtype == q_dtype
    assert_close(out, store.attention(step), q_dtype)


@pytest.mark.gpu
def test_later_tokens_do_not_matter_to_the_kernel() -> None:
    check_later_tokens_do_not_matter(decode_attention, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_partial_results_arrive_in_any_order(rows: int) -> None:
    """Launched many times over: the same bits, and every counter back at 0."""
    store = gpu_store(replace(SMOLLM2, dtype=torch.bfloat16), [5000 - 70 * n for n in range(rows)])
    step = store.step([(slot, 1) for slot in range(rows)], 1)
    append_by_hand(store, step)
    first = attend(decode_attention, store, step)
    for _ in range(20):
        outs = [attend(decode_attention, store, step) for _ in range(50)]
        assert all(torch.equal(out, first) for out in outs)
    torch.cuda.synchronize()
    assert all(not counters.any() for counters in module.counters._COUNTERS.values())


@pytest.mark.gpu
def test_the_kernel_in_a_graph() -> None:
    """Replays read slots, positions and table as they are then, and equal eager bit for bit."""
    store = gpu_store(replace(SMOLLM2, dtype=torch.bfloat16, slots=9), [0] * 9)
    static = store.step([(0, 0)] * 8, 2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(decode_attention, store, static)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = attend(decode_attention, store, static)
    rng = np.random.default_rng(5)
    for _ in range(8):
        for slot in range(9):
            store.fill(slot, store.lengths[slot] + int(rng.integers(0, 500)))
        step = store.step(random_runs(rng, 9, 2), 2)
        append_by_hand(store, step)
        for name in ("q", "slots", "positions"):
            getattr(static, name).copy_(getattr(step, name))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, attend(decode_attention, store, step))


@pytest.mark.gpu
def test_a_capture_without_a_warm_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.counters, "_COUNTERS", {})
    store = gpu_store(replace(SMOLLM2, dtype=torch.bfloat16, slots=2), [10, 10])
    step = store.step([(0, 1)], 1)
    append_by_hand(store, step)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with pytest.raises(WorkspaceNotReady), torch.cuda.graph(graph, stream=stream):
        step.q.clone()
        attend(decode_attention, store, step)
    assert not torch.cuda.is_current_stream_capturing()
    assert attend(decode_attention, store, step).isfinite().all()


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_elements() -> None:
    """Slots so far apart that 32 bits would wrap round into the wrong one."""
    stride = 3 * 2**29
    memory = torch.zeros(2 * stride + 2**17, dtype=torch.bfloat16, device="cuda")
    k_cache, v_cache = (
        memory.as_strided((3, 2, 256, 64), (stride, 256 * 64, 64, 1), offset)
        for offset in (0, 2**16)
    )
    v_cache[2] = 3.0
    q = torch.ones(1, 2, 64, dtype=torch.bfloat16, device="cuda")
    slots, positions = (torch.tensor([n], dtype=torch.int32, device="cuda") for n in (2, 200))
    assert (decode_attention(q, k_cache, v_cache, slots, positions, 1, 0.1) == 3).all()


if __name__ == "__main__":
    for seed in range(5):
        check_random_steps(interpreted, seed)
    check_small_tokens_alone(interpreted)
    check_many_splits(interpreted)
    check_group_tiles(interpreted)
    check_later_tokens_do_not_matter(interpreted)
    print("done")
