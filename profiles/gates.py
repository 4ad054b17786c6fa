"""What must hold in the same run as the times, or the times count for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .results import Gate
from .subjects import CONTEXT, make_runtime

__all__ = ["Gate", "step_gates"]

REPLAYS = 1000
COMPARED = 20


def step_gates(model: Any, batch: int) -> Iterator[Gate]:
    """Replay equals eager, nothing foreign is touched, nothing is allocated."""
    yield _replay_equals_eager(model, batch)
    yield from _steady(model, batch)


def _replay_equals_eager(model: Any, batch: int) -> Gate:
    runtime, slots = make_runtime(model, batch, keep_logits=True)
    with runtime:
        different = 0
        for index in range(COMPARED):
            asked = slots[: max(1, batch - index % 3)]
            for slot in asked:
                runtime.rewind(slot, CONTEXT)
            replayed = runtime.step(asked)
            first = (replayed.tokens(), replayed.logits.clone())
            for slot in asked:
                runtime.rewind(slot, CONTEXT)
            run = runtime.step(asked, eager=True)
            tokens = run.tokens()
            different += tokens != first[0] or not torch.equal(run.logits, first[1])
        detail = f"{different} of {COMPARED} steps differ"
        return Gate("replay is bit-equal to eager at the same bucket", batch, not different, detail)


def _steady(model: Any, batch: int) -> Iterator[Gate]:
    runtime, slots = make_runtime(model, batch + 1)
    with runtime:
        bystander, stepping = slots[-1], slots[:batch]
        row = runtime.state.slots.row_of(bystander)
        arena, blocks = runtime.state.pool.arena, runtime.state.blocks
        assert blocks is not None
        owned = list(blocks.blocks_of(row))
        before = (arena[row].clone(), blocks.pool.arena[owned].clone())
        runtime.step(stepping).tokens()
        free = torch.cuda.mem_get_info()[0]
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(REPLAYS):
            runtime.step(stepping).tokens()
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - allocations
        change = free - torch.cuda.mem_get_info()[0]
        same = torch.equal(arena[row], before[0]) and torch.equal(
            blocks.pool.arena[owned], before[1]
        )
        yield Gate(
            "a slot that does not step keeps its bytes", batch, same,
            f"{before[0].numel() + before[1].numel()} bytes compared after {REPLAYS} replays",
        )  # fmt: skip
        yield Gate(
            "no allocation, free memory unchanged", batch, made == 0 and change == 0,
            f"{made} allocations, {change} bytes over {REPLAYS} replays",
        )  # fmt: skip
