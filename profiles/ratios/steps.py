"""The ratios: this library beside a floor, in one run on one device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from capture import DecodeRuntime
from graphcache.ops._triton import jit, tl
from graphcache.ops.absorb import WindowParts, absorb
from graphcache.ops.kv_append import kv_append
from graphcache.pool import Field, StatePool
from graphcache.rows import Fp8TokenRow

from ..results import Ratio
from ..subjects import CONTEXT, RawTwin, make_runtime
from ..timing import alternate, graph_node_us

__all__ = ["Ratio", "append_ratios", "line_nodes", "step_ratios"]

COUNT = 300
PERIOD_STEPS = 300
PERIOD_ROUNDS = 3


def step_ratios(model: Any, batch: int) -> Iterator[Ratio]:
    """R1, R1b, R3 and R12 of a whole step."""
    runtime, slots = make_runtime(model, batch)
    quiet, quiet_slots = make_runtime(model, batch, nvtx=False)
    with runtime, quiet:
        twin_runtime, twin_slots = make_runtime(model, batch)
        with twin_runtime:
            twin = RawTwin(twin_runtime, twin_slots)
            yield from _host_ratios(runtime, slots, twin, batch)
            yield _latency(runtime, slots, twin, batch)
            yield from _periods(runtime, slots, quiet, quiet_slots, twin, batch)
        yield _host_of_ranges(runtime, slots, quiet, quiet_slots, batch)


def _host_of_ranges(
    runtime: DecodeRuntime,
    slots: list[int],
    quiet: DecodeRuntime,
    quiet_slots: list[int],
    batch: int,
) -> Ratio:
    def host(stepped: DecodeRuntime, of: list[int]) -> int:
        start = time.perf_counter_ns()
        result = stepped.step(of)
        took = time.perf_counter_ns() - start
        result.tokens()
        return took

    for slot in slots:
        runtime.rewind(slot, CONTEXT)
    for slot in quiet_slots:
        quiet.rewind(slot, CONTEXT)
    on, off = alternate(COUNT, lambda: host(runtime, slots), lambda: host(quiet, quiet_slots))
    return Ratio(
        "R12", "host us a step that ranges add, without a tool", batch,
        on.median_us - off.median_us, 0.3, on.median_us, on.p99_us, off.median_us, off.p99_us,
    )  # fmt: skip


def _host_ratios(
    runtime: DecodeRuntime, slots: list[int], twin: RawTwin, batch: int
) -> Iterator[Ratio]:
    turned = slots[1:] + slots[:1] if batch > 1 else slots
    orders = [list(slots), list(turned)]

    def unchanged() -> int:
        start = time.perf_counter_ns()
        result = runtime.step(slots)
        took = time.perf_counter_ns() - start
        result.tokens()
        return took

    def changed() -> int:
        orders.reverse()
        if batch == 1:
            # One slot has no other order: let the runtime look at it anew.
            runtime._asked_epoch = -1
        start = time.perf_counter_ns()
        result = runtime.step(orders[0])
        took = time.perf_counter_ns() - start
        result.tokens()
        return took

    _rewind(runtime, slots, twin)
    same, raw = alternate(COUNT, unchanged, twin.launch_ns)
    yield Ratio.of(
        "R1", "host time of step(), batch unchanged / cuGraphLaunch", batch, 2.0, same, raw
    )
    _rewind(runtime, slots, twin)
    other, raw = alternate(COUNT, changed, twin.launch_ns)
    yield Ratio.of(
        "R1", "host time of step(), batch changed / cuGraphLaunch", batch, 4.0, other, raw
    )


def _latency(runtime: DecodeRuntime, slots: list[int], twin: RawTwin, batch: int) -> Ratio:
    def ours() -> int:
        start = time.perf_counter_ns()
        runtime.step(slots).tokens()
        return time.perf_counter_ns() - start

    _rewind(runtime, slots, twin)
    subject, floor = alternate(COUNT, ours, twin.to_token_ns)
    return Ratio.of("R1b", "step() to tokens() / polling a raw launch", batch, 1.3, subject, floor)


def _periods(
    runtime: DecodeRuntime,
    slots: list[int],
    quiet: DecodeRuntime,
    quiet_slots: list[int],
    twin: RawTwin,
    batch: int,
) -> Iterator[Ratio]:
    def ours() -> int:
        return _steady_period(runtime, slots)

    def without_ranges() -> int:
        return _steady_period(quiet, quiet_slots)

    def floor() -> int:
        twin.rewind()
        return twin.period_ns(PERIOD_STEPS)

    subject, silent, raw = alternate(PERIOD_ROUNDS, ours, without_ranges, floor, warm_up=1)
    yield Ratio.of(
        "R3", "steady period, tokens read / back-to-back launches", batch, 1.02, subject, raw
    )
    yield Ratio.of(
        "R12", "steady period, NVTX on without a tool / off", batch, 1.01, subject, silent
    )


def _steady_period(runtime: DecodeRuntime, slots: list[int]) -> int:
    """Time for each step while the caller reads every token, one step behind."""
    for slot in slots:
        runtime.rewind(slot, CONTEXT)
    behind = runtime.step(slots)
    behind.tokens()
    start = time.perf_counter_ns()
    behind = runtime.step(slots)
    for _ in range(PERIOD_STEPS - 1):
        ahead = runtime.step(slots)
        behind.tokens()
        behind = ahead
    behind.tokens()
    return (time.perf_counter_ns() - start) // PERIOD_STEPS


def _rewind(runtime: DecodeRuntime, slots: list[int], twin: RawTwin) -> None:
    for slot in slots:
        runtime.rewind(slot, CONTEXT)
    twin.rewind()


# --- R6: one node -------------------------------------------------------------------------------

NODES = 240
ROWS = 64


@jit
def _line_kernel(source, target, stride, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least a program can do for a row: load a line of 128 bytes and store it."""
    row = tl.program_id(0)
    offsets = tl.arange(0, WIDTH)
    tl.store(target + row * stride + offsets, tl.load(source + row * stride + offsets))


def append_ratios() -> Iterator[Ratio]:
    """R6: a layer's update as a node of a graph, by a node that moves one line a row."""
    device = torch.device("cuda")
    slots = torch.randperm(ROWS, dtype=torch.int32, device=device)
    positions = torch.randint(0, CONTEXT, (ROWS,), dtype=torch.int32, device=device)
    line = line_nodes(ROWS, 1)
    for what, nodes in (
        ("K/V append, 3 heads of 64 in bf16", _kv_nodes(slots, positions, device)),
        ("FP8 window append, 448 + 64", _window_nodes(slots, positions, device)),
    ):
        subject_us, subject_p99 = graph_node_us(nodes)
        floor_us, floor_p99 = graph_node_us(line)
        yield Ratio(
            "R6", f"{what} / one line a row", ROWS, subject_us / floor_us, 1.4,
            subject_us, subject_p99, floor_us, floor_p99,
        )  # fmt: skip


def line_nodes(programs: int, warps: int) -> Any:
    """Nodes of the line kernel, on as many programs as the subject has."""
    width = 64
    # As far apart as rows of state are, and more of them than the L2 cache holds.
    source = torch.zeros((NODES, programs, 4096), dtype=torch.bfloat16, device="cuda")
    target = torch.zeros_like(source)

    def nodes() -> int:
        for index in range(NODES):
            grid = (programs,)
            _line_kernel[grid](source[index], target[index], 4096, WIDTH=width, num_warps=warps)
        return NODES

    return nodes


def _kv_nodes(slots: torch.Tensor, positions: torch.Tensor, device: torch.device) -> Any:
    layers = 60
    width = -(-CONTEXT // 64)
    fields = [
        Field(f"{index}.{name}", (3, 64, 64), torch.bfloat16)
        for index in range(layers)
        for name in "kv"
    ]
    blocks = StatePool(fields, ROWS * width, device)
    table = torch.arange(ROWS * width, dtype=torch.int32, device=device).view(ROWS, width)
    table = torch.cat((table, torch.full_like(table[:1], ROWS * width)))
    k = torch.randn((layers, ROWS, 3, 64), dtype=torch.bfloat16, device=device)
    v = torch.randn_like(k)

    def nodes() -> int:
        for index in range(NODES):
            layer = index % layers
            kv_append(
                k[layer], v[layer], blocks[f"{layer}.k"], blocks[f"{layer}.v"], slots, positions,
                1, table,
            )  # fmt: skip
        return NODES

    return nodes


def _window_nodes(slots: torch.Tensor, positions: torch.Tensor, device: torch.device) -> Any:
    layers, window, dim, rope = 60, 128, 512, 64
    row = Fp8TokenRow(dim, rope)
    fields = [
        field
        for index in range(layers)
        for field in (
            *row.fields(f"{index}", window),
            Field(f"{index}.pos", (window,), torch.int32),
        )
    ]
    pool = StatePool(fields, ROWS, device)
    windows = [
        WindowParts(row.view(pool, f"{index}", window), pool[f"{index}.pos"])
        for index in range(layers)
    ]
    entries = torch.randn((layers, ROWS, dim), dtype=torch.bfloat16, device=device)

    def nodes() -> int:
        for index in range(NODES):
            layer = index % layers
            absorb(entries[layer], windows[layer], slots, positions, 1)
        return NODES

    return nodes
