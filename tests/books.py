"""A runtime's books, audited from outside; and ways to put its memory in a bad state first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capture import DecodeRuntime
from graphcache import Checkpoint, DecodeState
from graphcache.slots import SlotPhase

__all__ = [
    "audit",
    "blocks_in_use",
    "changed_bytes",
    "poison",
    "refused",
    "settle",
    "snapshot",
    "table_of",
]


def settle(state: DecodeState) -> None:
    """Let everything sent to the device be done, whoever sent it."""
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)


def poison(state: DecodeState, value: float = float("nan")) -> None:
    """Fill K and V of every ring and block, scratch too. Control fields stay as they are."""
    settle(state)
    for name in state.pool.fields:
        if name.startswith("layer"):
            state.pool[name].fill_(value)
    if state.blocks is not None:
        for name in state.blocks.pool.fields:
            state.blocks.pool[name].fill_(value)
    settle(state)


def snapshot(state: DecodeState) -> dict[str, Tensor]:
    """Every byte of state, on the host."""
    settle(state)
    return {name: tensor.cpu().clone() for name, tensor in state.named_tensors().items()}


def changed_bytes(before: Tensor, after: Tensor) -> np.ndarray:
    """[rows, bytes] bool: which bytes of an arena differ."""
    return (before.view(torch.uint8) != after.view(torch.uint8)).numpy()


def table_of(state: DecodeState, row: int) -> list[int]:
    """A slot's blocks as the device's table has them, without the scratch block."""
    assert state.blocks is not None
    settle(state)
    line = state.blocks.table[row].tolist()
    used = [block for block in line if block != state.blocks.num_blocks]
    assert line[: len(used)] == used, "a gap in a block table"
    return used


def _live_rows(state: DecodeState) -> list[int]:
    nobodys = (SlotPhase.FREE, SlotPhase.QUARANTINED)
    return [row for row, phase in enumerate(state.slots._phase) if phase not in nobodys]


def blocks_in_use(state: DecodeState, held: Iterable[Checkpoint] = ()) -> Counter[int]:
    """How many use each block: tables of live slots, and checkpoints."""
    users: Counter[int] = Counter()
    for row in _live_rows(state):
        if state.blocks is not None:
            users.update(state.blocks.blocks_of(row))
    for checkpoint in held:
        users.update(checkpoint.held)
    return users


def audit(state: DecodeState, held: Iterable[Checkpoint] = ()) -> None:
    """Slots and blocks add up, and no block is shared where someone may write."""
    settle(state)
    _audit_slots(state)
    if state.blocks is None:
        return
    store, users = state.blocks, blocks_in_use(state, held)
    assert {b: n for b, n in enumerate(store._users) if n} == dict(users), "wrong use counts"
    resting = [block for _, block in store._quarantine]
    everyone = sorted([*store._free, *resting, *users])
    assert everyone == list(range(store.num_blocks)), "a block was lost, or is in two places"
    assert store.free_blocks == store.num_blocks - len(users)
    lengths = state.len.tolist()
    for row in _live_rows(state):
        owned = list(store.blocks_of(row))
        # Only rows that have tokens are ever looked up.
        if owned:
            assert table_of(state, row) == owned, "a table differs from the books"
        for index, block in enumerate(owned):
            written_up_to = (index + 1) * store.block_tokens
            if written_up_to > lengths[row]:
                assert users[block] == 1, f"block {block} is shared, and slot row {row} writes it"
    scratch = store.table[state.max_requests].tolist()
    assert set(scratch) == {store.num_blocks}


def _audit_slots(state: DecodeState) -> None:
    slots = state.slots
    resting = [row for _, row in slots._quarantine]
    assert sorted([*slots._free, *resting, *_live_rows(state)]) == list(range(state.max_requests))
    assert slots.live == len(_live_rows(state)) == len(state._rows)
    assert int(state.len[state.max_requests]) == 0, "scratch has a length"


@contextmanager
def refused(runtime: DecodeRuntime, error: Any, match: str | None = None) -> Iterator[None]:
    """The block must raise `error`, and leave every request as it was."""
    state = runtime.state
    before, rows = snapshot(state), _live_rows(state)
    users, phases = blocks_in_use(state), list(state.slots._phase)
    with pytest.raises(error, match=match):
        yield
    after = snapshot(state)
    assert _live_rows(state) == rows
    assert [state.slots._phase[row] for row in rows] == [phases[row] for row in rows]
    assert torch.equal(before["state arena"][rows], after["state arena"][rows])
    if state.blocks is not None:
        assert blocks_in_use(state) == users
        used = sorted(users)
        assert torch.equal(before["K/V blocks"][used], after["K/V blocks"][used])
        assert torch.equal(before["block tables"][rows], after["block tables"][rows])
