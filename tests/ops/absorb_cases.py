"""State of one entry layer for `absorb`, batches for it, and what memory must hold after them.

Expectations come from `tests.entry_oracle`: whole histories in float64. Memory starts as NaN, which
every format reads as NaN, so a comparison of all rows shows a row that should not be there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache.entry_layer import EntryLayer
from graphcache.ops import absorb as module
from graphcache.ops.absorb import Compressor, Rotation, TailParts, WindowParts, absorb
from graphcache.pool import StatePool
from graphcache.rows import Row, RowFormat, Rows
from graphcache.schema import AttentionType, IndexerSchema, LayerCacheSchema
from graphcache.state_cache import StateCachePool
from tests import entry_oracle as oracle

NAN_BYTE = 255
"""Memory full of it reads as NaN in every format, and as -1 in int32."""


@dataclass(frozen=True)
class Layout:
    """One layer; `compression` 0 for a window only, `index_dim` 0 for no indexer."""

    compression: int = 0
    overlap: int = 0
    step_width: int = 1
    window: int = 5
    dim: int = 24
    rope_dim: int = 8
    row_format: RowFormat = RowFormat.FP32
    index_dim: int = 0
    index_format: RowFormat = RowFormat.FP32
    tail_dtype: torch.dtype = torch.float32
    block_entries: int = 3
    slots: int = 4
    width: int = 12

    @property
    def schema(self) -> LayerCacheSchema:
        compressed = AttentionType.CSA if self.overlap else AttentionType.HCA
        indexer = IndexerSchema(1, self.index_dim, 1, self.index_format) if self.index_dim else None
        return LayerCacheSchema(
            compressed if self.compression else AttentionType.SWA,
            self.window,
            self.dim,
            self.rope_dim,
            compression=self.compression,
            step_width=self.step_width,
            tail_dtype=self.tail_dtype,
            row_format=self.row_format,
            indexer=indexer,
        )

    def params(self, seed: int = 0) -> oracle.LayerParams:
        """Random weights, and the formats as the oracle knows them."""
        return oracle.random_params(
            np.random.default_rng(seed),
            # Every row of the ring is compared, not only those that a read may see.
            window=self.schema.swa_rows,
            compression=self.compression or None,
            overlap=self.overlap,
            top_k=1 if self.index_dim else None,
            heads=1,
            dim=self.dim,
            rope_dim=self.rope_dim,
            index_heads=1,
            index_dim=self.index_dim,
            row=_oracle_row(self.row_format, self.rope_dim),
            index_row=_oracle_row(self.index_format, 0),
            tail=oracle.Fp32() if self.tail_dtype == torch.float32 else oracle.Bf16(),
        )


def _oracle_row(row_format: RowFormat, rope_dim: int) -> oracle.RowFormat:
    return {
        RowFormat.FP32: oracle.Fp32(),
        RowFormat.BF16: oracle.Bf16(),
        RowFormat.FP8: oracle.Fp8Token(rope_dim),
        RowFormat.MODEL1: oracle.Model1(rope_dim),
    }[row_format]


@dataclass
class Step:
    """One call's tokens: rows of one slot each, runs of at most q_len; NaN at padding.

    Attributes:
        tokens: by token, None at padding.
        tensors: `slots`, `positions`, `cos`, `sin`, and an input for each part of a token that the
            layer has; with compression `block_cos` and `block_sin`.
    """

    q_len: int
    tokens: list[oracle.Token | None]
    tensors: dict[str, Tensor]

    def to(self, device: str) -> Step:
        moved = {name: part.to(device) for name, part in self.tensors.items()}
        return Step(self.q_len, self.tokens, moved)

    def row(self, index: int) -> Step:
        """One row of the batch, as a batch."""
        at = slice(index * self.q_len, (index + 1) * self.q_len)
        cut = {name: part[at].clone() for name, part in self.tensors.items()}
        return Step(self.q_len, self.tokens[at], cut)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def make_step(
    rng: np.random.Generator,
    params: oracle.LayerParams,
    runs: Iterable[tuple[int, int, int]],
    q_len: int,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Random inputs in `dtype` for rows of (slot, first position, tokens)."""
    slots: list[int] = []
    positions: list[int] = []
    tokens: list[oracle.Token | None] = []
    for slot, first, count in runs:
        for column in range(q_len):
            real = slot >= 0 and column < count
            slots.append(slot if real else -1)
            positions.append(first + column if real else 0)
            tokens.append(random_token(rng, params, dtype) if real else None)
    return step_of(params, tokens, slots, positions, q_len, dtype)


def random_token(
    rng: np.random.Generator, params: oracle.LayerParams, dtype: torch.dtype = torch.float32
) -> oracle.Token:
    """A token whose parts lose nothing in `dtype`."""
    token = oracle.random_token(rng, params)
    rounded = {
        part.name: torch.from_numpy(value).to(dtype).float().numpy()
        for part in fields(token)
        if (value := getattr(token, part.name)) is not None
    }
    return oracle.Token(**rounded)


def step_of(
    params: oracle.LayerParams,
    tokens: list[oracle.Token | None],
    slots: list[int],
    positions: list[int],
    q_len: int,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """The batch of these tokens; None for padding."""
    tensors = {
        "slots": torch.tensor(slots, dtype=torch.int32),
        "positions": torch.tensor(positions, dtype=torch.int32),
    }
    for name in ("kv", "c", "z", "index_c", "index_z"):
        shape = params.shapes[name]
        if shape is not None:
            hole = np.full(shape, np.nan, np.float32)
            parts = [hole if token is None else getattr(token, name) for token in tokens]
            tensors[name] = torch.from_numpy(np.stack(parts)).to(dtype)
    place = np.array(positions)
    tensors["cos"], tensors["sin"] = _rotation(place, params.inv_freq)
    if params.compressor is not None:
        m = params.compressor.compression
        # NaN for all but the token that completes a block: only that one has use for it.
        first = np.where((place + 1) % m == 0, place + 1 - m, np.nan)
        tensors["block_cos"], tensors["block_sin"] = _rotation(first, params.inv_freq)
    return Step(q_len, tokens, tensors)


def _rotation(positions: np.ndarray, inv_freq: np.ndarray) -> tuple[Tensor, Tensor]:
    angle = positions[:, None].astype(np.float64) * inv_freq
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return torch.from_numpy(cos), torch.from_numpy(sin)


class State:
    """A layer's tensors on a device. A slot's worth of memory lies before the first slot.

    Attributes:
        cache, blocks: the storage; slot s is row s + 1 of `cache`. `blocks` is None without
            compression.
        table: [slots + 1, width], blocks in no order.
    """

    def __init__(self, layout: Layout, params: oracle.LayerParams, device: str = "cpu") -> None:
        self.layout, self.params, self.device = layout, params, device
        self.cache = StateCachePool(layout.schema, layout.slots + 1, device)
        self.cache.pool.arena.fill_(NAN_BYTE)
        self.blocks: StatePool | None = None
        count = layout.slots * layout.width
        if layout.compression:
            block_tokens = layout.compression * layout.block_entries
            block = EntryLayer.block_fields(layout.schema, "", block_tokens)
            self.blocks = StatePool(block, count, device)
            self.blocks.arena.fill_(NAN_BYTE)
        order = np.random.default_rng(0).permutation(count).reshape(layout.slots, layout.width)
        table = np.concatenate([order, np.full((1, layout.width), count)]).astype(np.int32)
        self.table = torch.from_numpy(table).to(device)

    @property
    def arenas(self) -> list[Tensor]:
        """All of the memory."""
        return [self.cache.pool.arena, *([self.blocks.arena] if self.blocks else [])]

    @property
    def window(self) -> WindowParts:
        rows, positions = self.cache.window_parts
        return WindowParts(Rows(*(None if p is None else p[1:] for p in rows)), positions[1:])

    def tails(self) -> dict[str, TailParts]:
        """By kind: of entries "", of the index keys "index "."""
        found = {"": self.cache.tail, "index ": self.cache.index_tail}
        return {
            kind: TailParts(*(None if ring is None else ring[1:] for ring in tail))
            for kind, tail in found.items()
            if tail is not None
        }

    def entries(self, kind: str = "") -> Rows:
        """Of all blocks, compressed entries or index keys."""
        assert self.blocks is not None
        name = "keys" if kind else "entries"
        return self.row(kind).view(self.blocks, name, self.layout.block_entries)

    def row(self, kind: str = "") -> Row:
        schema = self.layout.schema
        if not kind:
            return schema.row
        assert schema.indexer is not None
        return schema.indexer.row

    def arguments(self, step: Step) -> dict[str, object]:
        """Of a call for tokens that are on this device."""
        params = self.params
        arguments: dict[str, object] = {
            "entries": step["kv"],
            "window": self.window,
            "slots": step["slots"],
            "positions": step["positions"],
            "q_len": step.q_len,
            "norm": self._weight(params.norm_weight),
            "rotation": Rotation(step["cos"], step["sin"]),
            "eps": params.eps,
        }
        if params.compressor is not None:
            arguments |= {
                "compressor": self._compressor(step["c"], step["z"], params.compressor, ""),
                "block_rotation": Rotation(step["block_cos"], step["block_sin"]),
                "table": self.table,
            }
        if params.indexer is not None:
            arguments["index"] = self._compressor(
                step["index_c"], step["index_z"], params.indexer.compressor, "index "
            )
        return arguments

    def absorb(self, step: Step, **options: object) -> None:
        """One call, with every weight there is."""
        absorb(**self.arguments(step.to(self.device)) | options)

    def absorb_chunk(self, step: Step) -> Rows:
        """As a prefill does: emit with the window's rows aside, then write; returns those rows."""
        tokens = step["kv"].shape[0]
        aside = Rows(
            *(
                None if part is None else part.new_zeros((1, tokens, *part.shape[2:]))
                for part in self.window.rows
            )
        )
        self.absorb(step, window=aside, write=False)
        self.absorb(step, emit=False)
        return aside

    def read(self) -> dict[str, np.ndarray]:
        """Every row of slots and blocks, by name, decoded; scratch left out."""
        found = {"window": self.layout.schema.row.decode(self.window.rows)[:-1]}
        for kind, tail in self.tails().items():
            found[f"{kind}entries"] = self.row(kind).decode(self.entries(kind))[:-1]
            for name, ring in zip(TailParts._fields, tail, strict=True):
                if ring is not None:
                    found[kind + name] = ring[:-1].float()
        return {name: part.cpu().numpy() for name, part in found.items()}

    def _weight(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.float32)).to(self.device)

    def _compressor(
        self, values: Tensor, gates: Tensor, params: oracle.Compressor, kind: str
    ) -> Compressor:
        bias, norm = self._weight(params.bias), self._weight(params.norm_weight)
        return Compressor(values, gates, bias, norm, self.tails()[kind], self.entries(kind))


class Memory:
    """What every row must hold, and the history of each slot.

    Attributes:
        layers: a history by slot.
        parts: as `State.read`.
        tags: [slots, R].
    """

    def __init__(self, state: State) -> None:
        layout = self.layout = state.layout
        self.params, self.table = state.params, state.table.cpu().numpy()
        self.rows = layout.schema.swa_rows
        self.layers = [oracle.Layer(self.params) for _ in range(layout.slots)]
        self.parts = {name: np.full_like(part, np.nan) for name, part in state.read().items()}
        self.tags = np.full((layout.slots, self.rows), -1, np.int32)

    def lengths(self) -> list[int]:
        return [len(layer) for layer in self.layers]

    def record(self, step: Step) -> None:
        """Take a batch into history and memory."""
        slots, positions = step["slots"].tolist(), step["positions"].tolist()
        for slot, position, token in zip(slots, positions, step.tokens, strict=True):
            if token is None:
                continue
            layer = self.layers[slot]
            assert position == len(layer)
            layer.append(token)
            self.parts["window"][slot, position % self.rows] = layer.window()[-1]
            self.tags[slot, position % self.rows] = position
            for kind, compressor in self._compressors():
                self._write_tail(kind, compressor, slot, position, token)
                if (position + 1) % compressor.compression == 0:
                    entry = (layer.keys() if kind else layer.entries())[-1]
                    place = self.place(slot, position // compressor.compression)
                    self.parts[f"{kind}entries"][place] = entry

    def place(self, slot: int, index: int) -> tuple[int, int]:
        """Block and row of a slot's entry."""
        entries = self.layout.block_entries
        return int(self.table[slot, index // entries]), index % entries

    def check(self, state: State) -> None:
        assert (state.window.positions[:-1].cpu().numpy() == self.tags).all()
        found = state.read()
        assert set(found) == set(self.parts)
        for name, expected in self.parts.items():
            if not name.endswith(("window", "entries")):
                # A tail row is stored as it is given: nothing is computed but a sum.
                assert np.array_equal(found[name], expected, equal_nan=True), name
                continue
            row_format = self.layout.row_format
            if name.startswith("index"):
                row_format = self.layout.index_format
            check_close(found[name], expected, row_format, name)

    def _compressors(self) -> Iterator[tuple[str, oracle.Compressor]]:
        if self.params.compressor is not None:
            yield "", self.params.compressor
        if self.params.indexer is not None:
            yield "index ", self.params.indexer.compressor

    def _write_tail(
        self, kind: str, weights: oracle.Compressor, slot: int, position: int, token: oracle.Token
    ) -> None:
        c, z = (token.index_c, token.index_z) if kind else (token.c, token.z)
        z = z + weights.bias[position % weights.compression]
        for name, part in (("values", c), ("gates", z)):
            ring = self.parts[kind + name]
            row = position % ring.shape[1]
            kept = weights.tail.roundtrip(part.astype(np.float32))
            ring[slot, row] = kept[-weights.dim :]
            if weights.overlap:
                self.parts[f"{kind}previous_{name}"][slot, row] = kept[: weights.dim]


STEP = {
    RowFormat.BF16: 2.0**-7,
    RowFormat.FP8: 2.0**-3,
    RowFormat.MODEL1: 2.0**-3,
}
"""From a value of a format to the next one, relative to the smaller."""


def check_close(
    found: np.ndarray, expected: np.ndarray, row_format: RowFormat, what: str = ""
) -> None:
    """Two computations of the same rows [..., d]: equal but for rounding in float32.

    That may turn a stored value into the next one of its format: in at most 1 of 100 places.
    """
    assert (np.isnan(found) == np.isnan(expected)).all(), f"{what}: other rows are written"
    found, expected = np.nan_to_num(found), np.nan_to_num(expected)
    differs = ~np.isclose(found, expected, rtol=1e-5, atol=1e-5)
    if row_format is RowFormat.FP32:
        assert not differs.any(), what
        return
    least_step = np.abs(expected).max(-1, keepdims=True, initial=0) * 2.0**-8 / 448
    step = np.abs(expected) * STEP[row_format] * 1.001 + least_step
    assert (np.abs(found - expected) <= np.where(differs, step, np.inf)).all(), what
    assert differs.sum() <= max(1, 0.01 * np.count_nonzero(expected)), what


# The kernel on a machine without a GPU.


@contextmanager
def kernel_on_cpu() -> Iterator[None]:
    """`absorb` launches its kernel whatever the device, as where Triton interprets."""
    operation = module._op
    module._op = module.kernel.launch
    try:
        yield
    finally:
        module._op = operation


def run_in_interpreter(function: Callable[[], None]) -> None:
    """Run a function of a test module beside this file in a child whose Triton interprets."""
    place = f"tests.ops.{function.__module__.rpartition('.')[2]}"
    call = f"from {place} import {function.__name__} as run; run(); print('done')"
    child = subprocess.run(
        [sys.executable, "-c", call],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.endswith("done\n")


class _Recorder:
    """Stands for the kernel and keeps what it was launched with."""

    def __getitem__(self, grid: tuple[int, ...]) -> _Recorder:
        return self

    def __call__(self, *given: Any, **constants: Any) -> None:
        self.given, self.constants = given, constants


_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}


def launch_of(call: Callable[[], None], strides: str = "i32") -> tuple[Any, ...]:
    """The kernel, the types of its arguments, its constants and its warps, as `call` launches it.

    Args:
        call: calls `absorb` on CPU tensors; nothing runs.
        strides: type of integers: "i64" as where slots lie more than 2**31 elements apart.
    """
    kernel, recorder = module.kernel._absorb_kernel, _Recorder()
    module.kernel._absorb_kernel = recorder
    try:
        with kernel_on_cpu():
            call()
    finally:
        module.kernel._absorb_kernel = kernel
    signature = {}
    for name, given in zip(kernel.arg_names, recorder.given, strict=False):
        if isinstance(given, Tensor):
            signature[name] = _TYPES[given.dtype]
        else:
            signature[name] = "fp32" if isinstance(given, float) else strides
    signature["q_len"] = "i32"
    constants = dict(recorder.constants)
    warps = constants.pop("num_warps")
    assert set(signature) | set(constants) == set(kernel.arg_names)
    return kernel, signature, constants, warps


# On a GPU.


def captured(step: Callable[[], None], nodes: int) -> torch.cuda.CUDAGraph:
    """The step as a graph of so many nodes, ready to be replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        step()
    assert _node_count(graph.raw_cuda_graph()) == nodes
    graph.instantiate()
    return graph


def _node_count(graph: int) -> int:
    driver = pytest.importorskip("cuda.bindings.driver")
    get: Callable[..., tuple[Any, ...]] = driver.cuGraphGetNodes
    error, _, count = get(driver.CUgraph(graph))
    assert error == driver.CUresult.CUDA_SUCCESS
    return int(count)
