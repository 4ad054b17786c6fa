"""R4 and R4b: a step's time by the bytes that it must read and the nodes that it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..ceilings import measured_bandwidth, measured_node_gap
from ..peers import Ours
from ..results import Ratio, Record, StepTime
from ..timing import Sample
from .beside_peers import peer_prompts

__all__ = ["Ceilings", "kv_bytes", "measured_ceilings", "step_floor", "weight_bytes"]

Ceilings = tuple[float, float]
"""Bytes a second, and microseconds a node."""

STEPS = 100
SETTLE = 8
GOALS = {"8B": (0.95, 0.9), "1B": (0.9, 0.78)}


def measured_ceilings() -> Ceilings:
    """Of this device."""
    return measured_bandwidth().best, measured_node_gap()


def weight_bytes(model: Any) -> int:
    """Weights that a step reads: all but an embedding that is no head, read a row a token."""
    decoder = model.model
    head = decoder.get_output_embeddings().weight
    embedding = decoder.get_input_embeddings().weight
    once = {p.data_ptr(): p.numel() * p.itemsize for p in decoder.parameters()}
    if embedding.data_ptr() != head.data_ptr():
        del once[embedding.data_ptr()]
    return sum(once.values())


def kv_bytes(model: Any, batch: int, context: int) -> int:
    """K and V that a step reads of `batch` rows with `context` tokens each."""
    token: int = sum(
        schema.kv_heads * (schema.k_head_dim + schema.v_head_dim) * schema.dtype.itemsize
        for schema in model.schemas
    )
    return batch * context * token


def step_floor(
    model: Any, label: str, batch: int, context: int, ceilings: Ceilings
) -> Iterator[Record]:
    """A step's time, and R4 and R4b at batch 1.

    Args:
        model: a `TransformersDecoder` on a GPU.
        label: its size, as in the goals.
        batch, context: rows, and tokens of each.
        ceilings: of this device, from this run.
    """
    bandwidth, gap_us = ceilings
    ours = Ours(model)
    ours.prepare(peer_prompts(model, batch, context), STEPS)
    try:
        period = Sample.of(ours.decode(STEPS).times_ns[SETTLE:])
        nodes = ours.nodes
    finally:
        ours.close()
        torch.cuda.empty_cache()
    read_us = (weight_bytes(model) + kv_bytes(model, batch, context)) / bandwidth * 1e6
    yield StepTime(batch, context, period.median_us, period.p99_us, read_us, nodes, label)
    if batch != 1:
        return
    whole, bare = GOALS.get(label, (0.0, 0.0))
    floor_us = read_us + nodes * gap_us
    for name, what, goal, least in (
        ("R4", "(bytes / bandwidth + nodes x gap) / step", whole, floor_us),
        ("R4b", "bytes / bandwidth / step", bare, read_us),
    ):
        yield Ratio(
            name, what, batch, least / period.median_us, goal, period.median_us, period.p99_us,
            least, least, at_most=False, model=label,
        )  # fmt: skip
