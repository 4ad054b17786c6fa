"""DeepSeek-V4-Flash's layers: their updates by a line a row, their attention by its roofline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from graphcache import AttentionType, DecodeState, LayerCacheSchema
from graphcache.ops.absorb import absorb
from graphcache.ops.entry_attention import entry_attention
from graphcache.ops.index_select import index_select

from ..ceilings import Bandwidth, measured_bandwidth, measured_product_rate
from ..ratios.steps import Ratio, line_nodes
from ..timing import graph_node_us, repeated
from .subjects import (
    DIM,
    HEADS,
    INDEX_DIM,
    INDEX_HEADS,
    TOP_K,
    WINDOW,
    compressor_of,
    flash_schemas,
    long_state,
    rotations,
    step_batch,
)

__all__ = ["Roofline", "entry_rooflines", "entry_update_ratios", "measured_ceilings"]

UPDATES = 120
ATTENTIONS = 20
MOST_NODES = 128
MOST_LAYERS = 16
SELECTIONS = 8
PAST_L2_BYTES = 160 << 20
ROWS = 64


@dataclass(frozen=True)
class Roofline:
    """An operation's time beside the least that its bytes and products allow.

    Attributes:
        what: in words.
        batch: tokens.
        context: tokens of each slot.
        us, p99_us: measured.
        least_us: max(bytes / bandwidth, operations / rate), both measured in the same run.
        share: least_us / us.
        goal: the share aimed at; 0 where none is set.
    """

    what: str
    batch: int
    context: int
    us: float
    p99_us: float
    least_us: float
    share: float
    goal: float

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)


def measured_ceilings() -> tuple[Bandwidth, float]:
    """Bandwidth of a device copy, and operations a second of a bf16 product."""
    return measured_bandwidth(), measured_product_rate()


def entry_update_ratios() -> Iterator[Ratio]:
    """R6: norm, rotation, quantisation and append; then with tails, emission and an indexer."""
    schemas = flash_schemas(6)
    state, handles = long_state(schemas, ROWS, 4096)
    batch = step_batch(state, handles)
    own, block4, block128 = rotations(batch.positions, -3, -127)
    entries = torch.randn((ROWS, DIM), device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(DIM, device="cuda")
    shared: dict[str, Any] = {"norm": norm, "rotation": own, "table": state.blocks.table}  # type: ignore[union-attr]
    kinds = {
        AttentionType.SWA: ("window append with norm and rotation", 1, 1.2),
        AttentionType.HCA: ("window, tail and emission, HCA (m = 128)", 2, 2.0),
        AttentionType.CSA: ("window, tails and emission, CSA with indexer", 3, 2.0),
    }
    for kind, (what, parts, goal) in kinds.items():
        layers: list[Any] = [each for each in state.layers if each.schema.attn_type is kind]
        given: list[dict[str, Any]] = []
        for layer in layers:
            arguments = dict(shared)
            if layer.schema.compression:
                arguments["compressor"] = compressor_of(layer, ROWS, index=False)
                arguments["block_rotation"] = block4 if kind is AttentionType.CSA else block128
            if layer.schema.indexer is not None:
                arguments["index"] = compressor_of(layer, ROWS, index=True)
            given.append(arguments)

        def update(index: int, layers: Any = layers, given: Any = given) -> None:
            number = index % len(layers)
            window = layers[number].cache.window_parts
            absorb(entries, window, batch.slots, batch.positions, 1, **given[number])

        subject = graph_node_us(repeated(update, UPDATES))
        warps = 4 if parts > 1 else 1
        floor = graph_node_us(line_nodes(ROWS * parts, warps))
        yield Ratio(
            "R6", f"{what} / one line a program", ROWS, subject[0] / floor[0], goal,
            subject[0], subject[1], floor[0], floor[1],
        )  # fmt: skip


def entry_rooflines(
    contexts: tuple[int, ...], batches: tuple[int, ...], ceilings: tuple[float, float]
) -> Iterator[Roofline]:
    """Attention of each kind of layer, and the indexer's selection."""
    swa, _, csa, hca = flash_schemas(4)
    slots = max(batches)
    for context in contexts:
        for schema in (swa, csa, hca):
            state, handles = long_state((schema,) * _copies(schema, slots, context), slots, context)
            for batch in batches:
                yield _attention(state, _groups(handles, batch), context, ceilings)
            if schema.indexer is not None:
                for batch in batches:
                    yield _selection(state, _groups(handles, batch), context, ceilings)
            del state
            torch.cuda.empty_cache()


def _copies(schema: LayerCacheSchema, slots: int, context: int) -> int:
    """Layers whose rows together are far more than the L2 cache holds."""
    rows = WINDOW + (context // schema.compression if schema.compression else 0)
    return min(MOST_LAYERS, -(-PAST_L2_BYTES // (rows * slots * schema.row.row_bytes)))


def _groups(handles: list[int], batch: int) -> list[list[int]]:
    """Batches that take turns, so that each finds its rows in memory, not in the cache."""
    return [handles[start : start + batch] for start in range(0, len(handles), batch)]


def _attention(
    state: DecodeState, groups: list[list[int]], context: int, ceilings: tuple[float, float]
) -> Roofline:
    layers: list[Any] = list(state.layers)
    schema = layers[0].schema
    tokens = len(groups[0])
    batches = [step_batch(state, group) for group in groups]
    rotation = [rotations(batch.positions)[0] for batch in batches]
    query = torch.randn((tokens, HEADS, DIM), device="cuda", dtype=torch.bfloat16)
    sinks = torch.zeros(HEADS, device="cuda")
    seen = WINDOW
    visible = context // schema.compression if schema.compression else 0
    selections: list[Any] = [None]
    if schema.indexer is not None and layers[0].selects:
        seen += min(visible, TOP_K)
        selections = [_spread(tokens, min(visible, TOP_K), visible) for _ in range(SELECTIONS)]
    else:
        seen += visible

    def attend(index: int) -> None:
        layer = layers[index // len(groups) % len(layers)]
        group = index % len(groups)
        arguments: dict[str, Any] = {}
        if schema.compression:
            arguments = {
                "entries": layer.entries,
                "table": layer.table,
                "compression": schema.compression,
                "selected": selections[index % len(selections)],
            }
        batch = batches[group]
        entry_attention(
            query, layer.cache.swa, batch.slots, batch.positions, 1, window=WINDOW,
            scale=DIM**-0.5, sinks=sinks, rotation=rotation[group], **arguments,
        )  # fmt: skip

    us, p99 = graph_node_us(repeated(attend, _turns(groups, layers)), 20)
    rows = seen * tokens
    moved = rows * schema.row.row_bytes + 2 * query.nbytes
    operations = rows * HEADS * DIM * 4
    least = max(moved / ceilings[0], operations / ceilings[1]) * 1e6
    goal = 0.45 if tokens >= 64 else 0.0
    what = f"attention, {schema.attn_type.name}, {seen} rows"
    return Roofline(what, tokens, context, us, p99, least, least / us, goal)


def _turns(groups: list[list[int]], layers: list[Any]) -> int:
    return max(ATTENTIONS, min(MOST_NODES, len(groups) * len(layers)))


def _spread(tokens: int, count: int, visible: int) -> torch.Tensor:
    """`count` of `visible` entries for each token, ascending, in no order that a cache likes."""
    chosen = [torch.randperm(visible, device="cuda")[:count].sort().values for _ in range(tokens)]
    return torch.stack(chosen).int()


def _selection(
    state: DecodeState, groups: list[list[int]], context: int, ceilings: tuple[float, float]
) -> Roofline:
    layers: list[Any] = list(state.layers)
    schema = layers[0].schema
    tokens = len(groups[0])
    batches = [step_batch(state, group) for group in groups]
    query = torch.randn((tokens, INDEX_HEADS, INDEX_DIM), device="cuda", dtype=torch.bfloat16)
    weights = torch.rand((tokens, INDEX_HEADS), device="cuda")
    for layer in layers:
        # Distinct scores: equal keys would tie.
        layer.keys.scales.uniform_(0.5, 1.0)

    def select(index: int) -> None:
        layer = layers[index // len(groups) % len(layers)]
        batch = batches[index % len(groups)]
        index_select(
            query, weights, layer.keys.values, layer.keys.scales, layer.table, batch.slots,
            batch.positions, schema.compression, TOP_K,
        )  # fmt: skip

    us, p99 = graph_node_us(repeated(select, _turns(groups, layers)), 20)
    rows = context // schema.compression * tokens
    moved = rows * (schema.indexer.row.row_bytes + 8)
    operations = rows * INDEX_HEADS * INDEX_DIM * 2
    least = max(moved / ceilings[0], operations / ceilings[1]) * 1e6
    what = f"selection of {TOP_K} of {context // schema.compression}"
    return Roofline(what, tokens, context, us, p99, least, least / us, 0.0)
