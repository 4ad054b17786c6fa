"""The whole stack of V4-Flash's attention, one step of it: three ways to do the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from graphcache import Batch, DecodeState
from graphcache.models.deepseek_v4 import LayerAttention, Rotations
from graphcache.ops.absorb import Rotation

from ..timing import Sample
from .subjects import INDEX_DIM, TOP_K, WINDOW, flash_config, flash_schemas, long_state

__all__ = ["StackTimes", "kept_bytes", "stack_times"]

REPLAYS = 40
EAGER_STEPS = 8
EPS = 1e-6


@dataclass(frozen=True)
class StackTimes:
    """One step of the stack, in microseconds.

    Attributes:
        batch: slots.
        context: tokens of each.
        layers: of the stack.
        nodes: of our captured step.
        ours_us: captured, on this package's operations.
        torch_us: captured, the same on the same state in plain torch operations.
        modules_us: transformers' modules on their own caches, which can't be captured: their shapes
            grow with every step. 0 where their caches don't fit.
        slot_bytes: what a slot keeps whatever its length: windows, tails, scalars and tokens.
        entry_bytes: what it keeps besides: blocks of compressed entries and index keys for its
            context and the answer.
    """

    batch: int
    context: int
    layers: int
    nodes: int
    ours_us: float
    torch_us: float
    modules_us: float
    slot_bytes: int
    entry_bytes: int

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)


class Stack:
    """V4-Flash's attention layers with random weights, one after the other.

    Args:
        layers: how many, from the first on.
    """

    def __init__(self, layers: int) -> None:
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
            DeepseekV4Attention,
            DeepseekV4RotaryEmbedding,
        )

        self.config = flash_config(layers)
        self.config._attn_implementation = "eager"
        self.schemas = flash_schemas(layers)
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.rotary = DeepseekV4RotaryEmbedding(self.config)
            self.modules = [
                DeepseekV4Attention(self.config, index).to(torch.bfloat16).eval()
                for index in range(layers)
            ]
        for module in self.modules:
            for name, parameter in module.named_parameters():
                with torch.no_grad():
                    parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
            # As a loaded model has it.
            module.sinks.data = module.sinks.data.float()
        self.attentions = [
            LayerAttention(module, schema)
            for module, schema in zip(self.modules, self.schemas, strict=True)
        ]
        self.compressions = sorted({s.compression for s in self.schemas if s.compression})

    @torch.no_grad()
    def ours(self, hidden: Tensor, batch: Batch) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        turns = Rotations(self.rotary, batch.positions, self.compressions)
        for index, attention in enumerate(self.attentions):
            state: Any = batch.state.layers[index]
            hidden = hidden + attention(hidden, turns, batch, state)
        return hidden

    @torch.no_grad()
    def plain(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The same in torch's operations, on the same state."""
        turns = Rotations(self.rotary, batch.positions, self.compressions)
        for index, module in enumerate(self.modules):
            layer = PlainLayer(module, batch.state.layers[index])
            hidden = hidden + layer(hidden, turns, batch)
        return hidden

    @torch.no_grad()
    def theirs(self, hidden: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """The same by transformers' modules on transformers' cache; hidden [B, 1, hidden]."""
        embeddings = {
            kind: self.rotary(hidden, position_ids=positions, layer_type=kind)
            for kind in ("main", "compress")
        }
        for module in self.modules:
            out, _ = module(hidden, embeddings, positions, None, cache=cache)
            hidden = hidden + out
        return hidden


class PlainLayer:
    """One layer's step for one token a slot, as anyone would write it in torch."""

    def __init__(self, module: Any, layer: Any) -> None:
        self.module = module
        self.layer = layer

    def __call__(self, hidden: Tensor, turns: Rotations, batch: Batch) -> Tensor:
        module, layer = self.module, self.layer
        schema = layer.schema
        slot, position = batch.slots.long(), batch.positions.long()
        own = turns.compressed if schema.compression else turns.main
        low_rank = module.q_a_norm(module.q_a_proj(hidden))
        query = module.q_b_norm(module.q_b_proj(low_rank).view(len(slot), -1, 512))
        query = _turn(query, own)
        entry = _turn(module.kv_norm(module.kv_proj(hidden)).unsqueeze(1), own).squeeze(1)
        ring = position % schema.swa_rows
        encoded = schema.row.encode(entry)
        for part, value in zip(layer.cache.swa, encoded, strict=True):
            part[slot, ring] = value
        layer.cache.swa_pos[slot, ring] = batch.positions
        reach = position[:, None] + torch.arange(1 - WINDOW, 1, device=hidden.device)
        rows = [_read(schema.row, layer.cache.swa, slot[:, None], reach % schema.swa_rows)]
        seen = [reach >= 0]
        if schema.compression:
            kept, visible = self._compressed(hidden, low_rank, own, turns, batch)
            rows.append(kept)
            seen.append(visible)
        kv, mask = torch.cat(rows, 1), torch.cat(seen, 1)
        logits = torch.matmul(query, kv.transpose(1, 2)).float() * module.scaling
        logits = logits.masked_fill(~mask[:, None], -torch.inf)
        sink = module.sinks.view(1, -1, 1).expand(len(slot), -1, 1)
        weight = torch.cat((logits, sink), 2).softmax(2)[..., :-1].to(kv.dtype)
        mixed = torch.matmul(weight, kv)
        mixed = _turn(mixed, Rotation(own.cos, -own.sin))
        grouped = module.o_a_proj(mixed.view(len(slot), module.config.o_groups, -1))
        out: Tensor = module.o_b_proj(grouped.flatten(1))
        return out

    def _compressed(
        self, hidden: Tensor, low_rank: Tensor, own: Rotation, turns: Rotations, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        layer, module = self.layer, self.module.compressor
        schema, cache = layer.schema, layer.cache
        m = schema.compression
        slot, position = batch.slots.long(), batch.positions.long()
        start = turns.block[m]
        self._compress(hidden, module, cache.tail, schema.row, layer.entries, start, batch)
        count = (position + 1) // m
        held = layer.entries.values.shape[1]
        index = torch.arange(layer.table.shape[1] * held, device=hidden.device).expand(
            len(slot), -1
        )
        if schema.indexer is not None:
            indexer = module.indexer
            self._compress(
                hidden, indexer, cache.index_tail, schema.indexer.row, layer.keys, start, batch
            )
            keys = _read(
                schema.indexer.row, layer.keys,
                layer.table[slot][:, :, None].expand(-1, -1, held).flatten(1).long(), index % held,
            )  # fmt: skip
            query = _turn(indexer.q_b_proj(low_rank).view(len(slot), -1, INDEX_DIM), own)
            scores = F.relu(torch.matmul(query, keys.transpose(1, 2))).float()
            weights = indexer.scorer.weights_proj(hidden).float()
            total = (scores * weights.unsqueeze(2)).sum(1)
            total = total.masked_fill(index >= count[:, None], -torch.inf)
            index = total.topk(min(TOP_K, total.shape[1]), 1).indices
        place = layer.table[slot].gather(1, index // held).long()
        return _read(schema.row, layer.entries, place, index % held), index < count[:, None]

    def _compress(
        self, hidden: Tensor, module: Any, tail: Any, row: Any, stored: Any, start: Rotation,
        batch: Batch,
    ) -> None:  # fmt: skip
        slot, position = batch.slots.long(), batch.positions.long()
        m, width = module.position_bias.shape[0], module.kv_norm.weight.shape[0]
        values = module.kv_proj(hidden).float()
        gates = module.gate_proj(hidden).float() + module.position_bias.float()[position % m]
        ring_rows = tail.values.shape[1]
        at = position % ring_rows
        tail.values[slot, at] = values[:, -width:]
        tail.gates[slot, at] = gates[:, -width:]
        back = torch.arange(1 - m, 1, device=hidden.device)
        parts = [(tail.values, tail.gates, position[:, None] + back)]
        if tail.previous_values is not None:
            tail.previous_values[slot, at] = values[:, :width]
            tail.previous_gates[slot, at] = gates[:, :width]
            parts.append((tail.previous_values, tail.previous_gates, position[:, None] + back - m))
        read_values = torch.cat([v[slot[:, None], x % ring_rows] for v, _, x in parts], 1)
        read_gates = torch.cat(
            [g[slot[:, None], x % ring_rows].masked_fill((x < 0)[..., None], -torch.inf)
             for _, g, x in parts], 1,
        )  # fmt: skip
        pooled = (read_gates.softmax(1) * read_values).sum(1)
        entry = _turn(module.kv_norm(pooled).unsqueeze(1), start).squeeze(1)
        held = stored.values.shape[1]
        index = position // m
        # Rows that complete no block write the scratch block.
        scratch = stored.values.shape[0] - 1
        place = self.layer.table[slot, index // held].long()
        place = torch.where((position + 1) % m == 0, place, scratch)
        for part, value in zip(stored, row.encode(entry), strict=True):
            if part is not None:
                part[place, index % held] = value


def _turn(vectors: Tensor, rotation: Rotation) -> Tensor:
    """The last dims of [T, H, D] rotated in pairs."""
    width = 2 * rotation.cos.shape[1]
    last = vectors[..., -width:].float()
    c, s = rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1)
    even, odd = last[..., 0::2], last[..., 1::2]
    turned = torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2)
    return torch.cat((vectors[..., :-width], turned.to(vectors.dtype)), -1)


def _read(row: Any, rows: Any, place: Tensor, at: Tensor) -> Tensor:
    """Rows `at` of slots or blocks `place`, decoded to bfloat16."""
    picked = type(rows)(*(None if part is None else part[place, at] for part in rows))
    decoded: Tensor = row.decode(picked).bfloat16()
    return decoded


def stack_times(layers: int, contexts: tuple[int, ...], batches: tuple[int, ...]) -> Iterator[Any]:
    """Time one step of the stack at each context and batch that memory allows."""
    stack = Stack(layers)
    for context in contexts:
        for batch in batches:
            if not _fits(stack, context, batch):
                continue
            yield _times(stack, context, batch)
            torch.cuda.empty_cache()


def _fits(stack: Stack, context: int, batch: int) -> bool:
    entries = sum(
        context // s.compression * (s.row.row_bytes + (s.indexer.row.row_bytes if s.indexer else 0))
        for s in stack.schemas
        if s.compression
    )
    return batch * entries * 1.2 < torch.cuda.mem_get_info()[0] * 0.6


def _times(stack: Stack, context: int, batch: int) -> StackTimes:
    state, handles = long_state(stack.schemas, batch, context)
    rows = torch.tensor(
        [state.slots.row_of(handle) for handle in handles], dtype=torch.int32, device="cuda"
    )
    hidden = torch.randn((batch, stack.config.hidden_size), device="cuda", dtype=torch.bfloat16)

    ours_us, nodes = _captured_us(lambda: stack.ours(hidden, state.begin(rows)))
    # Every entry of every slot is decoded at once: what plain operations need memory for.
    plain_us = 0.0
    if context * batch <= 64 * 4096:
        plain_us, _ = _captured_us(lambda: stack.plain(hidden, state.begin(rows)))
    slot_bytes, entry_bytes = kept_bytes(state)
    modules_us = _modules_us(stack, context, batch) if context * batch <= 64 * 4096 else 0.0
    return StackTimes(
        batch, context, len(stack.schemas), nodes, ours_us, plain_us, modules_us,
        slot_bytes, entry_bytes,
    )  # fmt: skip


def kept_bytes(state: DecodeState) -> tuple[int, int]:
    """Bytes of one slot's row, and of the blocks that a full context takes; scratch in neither."""
    blocks = state.blocks
    if blocks is None:
        return state.pool.row_stride_bytes, 0
    count = blocks.blocks_for(state.max_context)
    return state.pool.row_stride_bytes, count * blocks.pool.row_stride_bytes


def _captured_us(step: Any) -> tuple[float, int]:
    """Median microseconds of a replay of the captured step, and its nodes."""
    from cuda.bindings import driver

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(capture_error_mode="thread_local")
        kept = step()
        graph.capture_end()
        graph.instantiate()
        nodes = int(driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph()))[-1])
        times = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(round(begin.elapsed_time(end) * 1e6))
    del kept
    graph.reset()
    return Sample.of(times).median_us, nodes


def _modules_us(stack: Stack, context: int, batch: int) -> float:
    """Median microseconds of an eager step of transformers' modules."""
    from transformers import DynamicCache

    cache = DynamicCache(config=stack.config)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    for layer, schema in zip(cache.layers, stack.schemas, strict=True):
        layer.keys = torch.randn((batch, 1, WINDOW - 1, 512), **make)
        layer.values, layer.is_initialized = layer.keys, True
        layer.dtype, layer.device = torch.bfloat16, layer.keys.device
        layer.cumulative_length = context
        if not schema.compression:
            continue
        names = {"compressor": 512, **({"indexer": INDEX_DIM} if schema.indexer else {})}
        for name, width in names.items():
            count = context // schema.compression
            columns = (1 + schema.overlap) * width
            layer.compressed_kv[name] = torch.randn((batch, count, width), **make)
            layer.entry_count[name] = count
            layer.buffer_kv[name] = torch.randn((batch, 0, columns), **make)
            layer.buffer_gate[name] = layer.buffer_kv[name]
            if schema.overlap:
                shape = (batch, schema.compression, width)
                layer.overlap_kv[name] = torch.randn(shape, **make)
                layer.overlap_gate[name] = torch.randn(shape, **make)
    hidden = torch.randn((batch, 1, stack.config.hidden_size), **make)
    times = []
    for step in range(EAGER_STEPS + 2):
        positions = torch.full((batch, 1), context + step, device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        stack.theirs(hidden, positions, cache)
        torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - begin)
    return Sample.of(times[2:]).median_us
