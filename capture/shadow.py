"""A step run eagerly on the state that its replay will find, and all of it put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcache import DecodeState
from graphcache.pool import StatePool

from .backend import Backend
from .mailbox import Mailbox
from .step import DecodeStep
from .watch import StepWatch

__all__ = ["Outcome", "Shadow"]


@dataclass
class _Owned:
    """Rows of a pool that a batch's slots own, scratch last.

    Attributes:
        name: of the pool.
        pool: whose rows.
        rows: [n] int64.
        owners: of each row, in words.
    """

    name: str
    pool: StatePool
    rows: Tensor
    owners: list[str]

    def copied(self) -> Tensor:
        """[n, row_stride_bytes] uint8, a copy."""
        return self.pool.arena[self.rows]

    def sums(self) -> Tensor:
        """[rows of the pool] int64: equal as long as a row's bytes are; those owned are 0."""
        sums = self.pool.arena.view(torch.int64).sum(1)
        sums[self.rows] = 0
        return sums


@dataclass
class _Given:
    """What a step gave.

    Attributes:
        tokens, reasons: by slot of the batch.
        logits: those of slots that got a token; None where they are not kept.
        rows: the bytes of owned rows, by pool.
    """

    tokens: list[int]
    reasons: list[int]
    logits: Tensor | None
    rows: list[Tensor]


@dataclass
class Outcome:
    """What a step's replay is held against.

    Attributes:
        owned: whose rows are compared.
        eager: what the eager run gave; None when there was none.
        foreign: sums of everybody else's rows, by pool; None where a step may change them.
    """

    owned: list[_Owned]
    eager: _Given | None
    foreign: list[Tensor] | None


class Shadow:
    """Runs steps beside their replays.

    Args:
        state: what steps read and write.
        step: may keep its logits.
        mailbox: where tokens go.
        backend: whose stream steps run on.
    """

    def __init__(
        self, state: DecodeState, step: DecodeStep, mailbox: Mailbox, backend: Backend
    ) -> None:
        self._state = state
        self._step = step
        self._mailbox = mailbox
        self._backend = backend

    def run(
        self, step: Callable[[], None], number: int, rows: Sequence[int], *, eager: bool
    ) -> Outcome:
        """Run a step's Python, note what it gave, and put everything back as it was.

        Waits for the stream. To be called within the backend's context.

        Args:
            step: whose inputs have been sent.
            number: the step's.
            rows: of its slots.
            eager: don't run it: only note what belongs to others.
        """
        owned = list(self._owned(rows))
        foreign = [each.sums() for each in owned]
        if eager:
            return Outcome(owned, None, foreign)
        saved = [each.copied() for each in owned]
        watch = StepWatch(preserve=True, padding=False)
        try:
            with watch:
                step()
            self._backend.synchronize()
            given = self._given(number, owned)
        finally:
            # Host memory is written by kernels that must have run before it is put back.
            self._backend.synchronize()
            watch.restore()
            for each, before in zip(owned, saved, strict=True):
                each.pool.arena[each.rows] = before
        # A step that forks slots writes rows that are in no batch.
        return Outcome(owned, given, None if watch.forks else foreign)

    def changed_foreign(self, expected: Outcome) -> Iterator[str]:
        """What belongs to nobody in the batch and has changed, in words."""
        assert expected.foreign is not None
        for owned, before in zip(expected.owned, expected.foreign, strict=True):
            for row in (owned.sums() != before).nonzero().flatten().tolist():
                yield f"row {row} of the {owned.name}"

    def differing(self, number: int, expected: Outcome) -> Iterator[str]:
        """What the replay gave otherwise than the eager run, in words."""
        then = expected.eager
        assert then is not None
        now = self._given(number, expected.owned)
        if now.tokens != then.tokens:
            yield f"list of tokens, {now.tokens} and not {then.tokens},"
        if now.reasons != then.reasons:
            yield f"list of reasons, {now.reasons} and not {then.reasons},"
        if now.logits is not None and then.logits is not None:
            if not torch.equal(now.logits, then.logits):
                row = int((now.logits != then.logits).nonzero()[0, 0])
                yield f"line of logits (row {row} of those with a token)"
        for owned, one, other in zip(expected.owned, now.rows, then.rows, strict=True):
            if not torch.equal(one, other):
                row, byte = (one != other).nonzero()[0].tolist()
                field = owned.pool.layout.field_at(byte) or "padding"
                yield f"{field} in {owned.owners[row]} (byte {byte} of a row of the {owned.name})"

    # --- private ---------------------------------------------------------------------------------

    def _owned(self, rows: Sequence[int]) -> Iterator[_Owned]:
        state = self._state
        yield self._rows_of("state arena", state.pool, {row: f"slot row {row}" for row in rows})
        if state.blocks is not None:
            blocks = {
                block: f"block {index} of slot row {row}"
                for row in rows
                for index, block in enumerate(state.blocks.blocks_of(row))
            }
            yield self._rows_of("K/V blocks", state.blocks.pool, blocks)

    def _rows_of(self, name: str, pool: StatePool, owners: dict[int, str]) -> _Owned:
        # Scratch is written by padding: not compared, but put back.
        rows = torch.tensor([*owners, pool.scratch_row], device=pool.device)
        return _Owned(name, pool, rows, list(owners.values()))

    def _given(self, number: int, owned: Sequence[_Owned]) -> _Given:
        count = len(owned[0].owners)
        tokens, reasons = self._mailbox.read(number, count, count)
        logits = self._step.logits
        if logits is not None:
            # What padding makes of a slot that has finished, nobody reads.
            live = [index for index, token in enumerate(tokens) if token >= 0]
            logits = logits[live].view(torch.uint8)
        return _Given(tokens, reasons, logits, [each.copied()[:-1] for each in owned])
