"""Where two outcomes, or two times of one state, differ: tensor, slot and row."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcache import DecodeState, StatePool

from .case import Case
from .stage import Outcome

__all__ = ["Difference", "changed", "differing", "differing_state", "same_bits"]


@dataclass(frozen=True)
class Difference:
    """The first difference found.

    Attributes:
        tensor: its name.
        step: of the case, from 0; None where it is of no one step.
        row: of the batch, or None.
        slot: the slot's row, or None.
        detail: what it was and is.
        ran: slots that ran in that step, where that matters.
    """

    tensor: str
    step: int | None
    row: int | None
    slot: int | None
    detail: str
    ran: tuple[int, ...] = ()

    @property
    def where(self) -> str:
        """In words."""
        parts = [self.tensor]
        if self.slot is not None:
            parts.append(f"slot {self.slot}")
        if self.row is not None:
            parts.append(f"row {self.row} of the batch")
        if self.step is not None:
            parts.append(f"step {self.step + 1}")
        return ", ".join(parts)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, whatever is not a number included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_as_bytes(one), _as_bytes(other))


def differing(
    case: Case, one: Outcome, other: Outcome, names: tuple[str, str]
) -> Difference | None:
    """The first step and row in which two runs of a case gave something else.

    Args:
        case: that was run.
        one, other: what it gave.
        names: what to call them.
    """
    for step in range(len(case.batches)):
        for row, index in enumerate(case.batches[step]):
            request = case.requests[index]
            ended = step and _ended_before(case, one, step, index)
            if not (request.finished or ended):
                a, b = one.logits[step][row], other.logits[step][row]
                if not same_bits(a, b):
                    return Difference("logits", step, row, request.row, _values(a, b, names))
            for tensor, a_of, b_of in (
                ("token", one.tokens, other.tokens), ("reason", one.reasons, other.reasons)
            ):  # fmt: skip
                got, expected = a_of[step][row], b_of[step][row]
                if got != expected:
                    said = f"{names[0]} gave {got}, {names[1]} {expected}"
                    return Difference(tensor, step, row, request.row, said)
    return None


def differing_state(
    state: DecodeState, one: Outcome, other: Outcome, names: tuple[str, str]
) -> Difference | None:
    """The first byte of state in which two runs ended otherwise; scratch may hold anything."""
    found = changed(state, one.after.state, other.after.state)
    if found is None:
        return None
    said = f"{names[0]} and {names[1]} left it otherwise: {found.detail}"
    return Difference(found.tensor, None, None, found.slot, said)


def changed(
    state: DecodeState,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    owned: Collection[int] = (),
) -> Difference | None:
    """The first byte that changed and belongs neither to an owned slot nor to scratch.

    Args:
        state: whose copies the others are.
        before, after: as `DecodeState.named_tensors` names them.
        owned: rows of slots.
    """
    blocks: set[int] = set()
    if state.blocks is not None:
        blocks = {block for row in owned for block in state.blocks.blocks_of(row)}
    for name, tensor in before.items():
        here = after[name]
        if name == "block tables":
            if not torch.equal(tensor, here):
                slot = int((tensor != here).any(1).nonzero()[0])
                return Difference(name, None, None, slot, "a block table was changed")
            continue
        pool = state.pool if name == "state arena" else _block_pool(state)
        mine = owned if name == "state arena" else blocks
        place = _first_byte(tensor, here, mine)
        if place is not None:
            return _place_in(state, name, pool, place, tensor, here)
    return None


def _first_byte(before: Tensor, after: Tensor, owned: Collection[int]) -> tuple[int, int] | None:
    if torch.equal(before[:-1], after[:-1]):
        return None
    other = (before != after)[:-1]
    if owned:
        other[sorted(owned)] = False
    places = other.nonzero()
    return (int(places[0, 0]), int(places[0, 1])) if len(places) else None


def _place_in(
    state: DecodeState, name: str, pool: StatePool, place: tuple[int, int], old: Tensor, new: Tensor
) -> Difference:
    row, byte = place
    field = next(
        (f for f in pool.fields if pool.byte_range(f)[0] <= byte < pool.byte_range(f)[1]), "padding"
    )
    slot = row if pool is state.pool else _owner_of(state, row)
    count = int((old[row] != new[row]).sum())
    block = "" if pool is state.pool else f" of block {row}"
    said = f"{count} bytes{block} changed, the first of field {field!r}"
    return Difference(f"{name}, field {field}", None, None, slot, said)


def _owner_of(state: DecodeState, block: int) -> int | None:
    blocks = state.blocks
    assert blocks is not None
    owners = (row for row in range(state.max_requests) if block in blocks.blocks_of(row))
    return next(owners, None)


def _block_pool(state: DecodeState) -> StatePool:
    assert state.blocks is not None
    return state.blocks.pool


def _ended_before(case: Case, outcome: Outcome, step: int, index: int) -> bool:
    """Whether a request had finished before a step."""
    return any(
        outcome.reasons[earlier][case.batches[earlier].index(index)]
        for earlier in range(step)
        if index in case.batches[earlier]
    )


def _values(one: Tensor, other: Tensor, names: tuple[str, str]) -> str:
    at = int((_as_bytes(one.contiguous()[:, None]) != _as_bytes(other.contiguous()[:, None]))
             .any(1).int().argmax())  # fmt: skip
    count = int((one != other).sum())
    return (
        f"{count} of {one.shape[0]} values differ, the first at {at}: {names[0]} gave "
        f"{float(one[at]):.6g}, {names[1]} {float(other[at]):.6g}"
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
