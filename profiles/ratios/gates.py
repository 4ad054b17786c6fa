"""What must hold in the same run as the times, or the times count for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..results import Gate
from ..subjects import CONTEXT, make_runtime

__all__ = ["Gate", "step_gates"]

REPLAYS = 1000
COMPARED = 20


def step_gates(
    model: Any, batch: int, context: int = CONTEXT, replays: int = REPLAYS
) -> Iterator[Gate]:
    """Replay equals eager, nothing foreign is touched, nothing is allocated (on a GPU)."""
    yield _replay_equals_eager(model, batch, context)
    yield from _steady(model, batch, context, replays)


def _replay_equals_eager(model: Any, batch: int, context: int) -> Gate:
    runtime, slots = make_runtime(model, batch, context=context, keep_logits=True)
    with runtime:
        different = 0
        for index in range(COMPARED):
            asked = slots[: max(1, batch - index % 3)]
            for slot in asked:
                runtime.rewind(slot, context)
            replayed = runtime.step(asked)
            first = (replayed.tokens(), replayed.logits.clone())
            for slot in asked:
                runtime.rewind(slot, context)
            run = runtime.step(asked, eager=True)
            tokens = run.tokens()
            different += tokens != first[0] or not torch.equal(run.logits, first[1])
        detail = f"{different} of {COMPARED} steps differ"
        return Gate("replay is bit-equal to eager at the same bucket", batch, not different, detail)


def _steady(model: Any, batch: int, context: int, replays: int) -> Iterator[Gate]:
    runtime, slots = make_runtime(model, batch + 1, context=context)
    cuda = model.device.type == "cuda"
    with runtime:
        bystander, stepping = slots[-1], slots[:batch]
        row = runtime.state.slots.row_of(bystander)
        arena, blocks = runtime.state.pool.arena, runtime.state.blocks
        assert blocks is not None
        owned = list(blocks.blocks_of(row))
        before = (arena[row].clone(), blocks.pool.arena[owned].clone())
        runtime.step(stepping).tokens()
        free, allocations = _memory() if cuda else (0, 0)
        for _ in range(replays):
            runtime.step(stepping).tokens()
        free_after, allocations_after = _memory() if cuda else (0, 0)
        same = torch.equal(arena[row], before[0]) and torch.equal(
            blocks.pool.arena[owned], before[1]
        )
        yield Gate(
            "a slot that does not step keeps its bytes", batch, same,
            f"{before[0].numel() + before[1].numel()} bytes compared after {replays} replays",
        )  # fmt: skip
        if not cuda:
            return
        made, change = allocations_after - allocations, free - free_after
        yield Gate(
            "no allocation, free memory unchanged", batch, made == 0 and change == 0,
            f"{made} allocations, {change} bytes over {replays} replays",
        )  # fmt: skip


def _memory() -> tuple[int, int]:
    """Free bytes of the device, and allocations made so far."""
    made: int = torch.cuda.memory_stats()["allocation.all.allocated"]
    return torch.cuda.mem_get_info()[0], made
