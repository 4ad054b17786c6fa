"""Which request owns which row: handles, and rows that must rest before they are used again.

A handle is an int, `generation << 20 | row`, so that a request that was retired can't be mistaken
for the one that has its row now. A retired row is in *quarantine* until the last step that may
have read it has completed on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Final, Protocol

from .errors import (
    InvalidSlot,
    PrefillFailed,
    SchemaError,
    SlotPrefilling,
    SlotsExhausted,
    StaleSlot,
)

__all__ = ["NoSteps", "SlotManager", "SlotPhase", "StepClock"]

ROW_BITS: Final = 20
ROW_MASK: Final = (1 << ROW_BITS) - 1


class StepClock(Protocol):
    """How far the steps that use the state have come; steps are numbered from 1."""

    @property
    def submitted(self) -> int:
        """The newest step given to the device."""

    def completed(self) -> int:
        """The newest step known to have completed. Never waits."""

    def wait(self, step: int) -> None:
        """Return once `step` has completed."""


class NoSteps:
    """The clock of state that no step runs on yet."""

    submitted = 0

    def completed(self) -> int:
        return 0

    def wait(self, step: int) -> None:
        return None


class SlotPhase(Enum):
    """Where a row is in its life. Whether a live slot has finished is known on the device."""

    FREE = "free"
    PREFILLING = "prefilling"
    LIVE = "live"
    TORN = "torn"
    QUARANTINED = "quarantined"


class SlotManager:
    """Hands out rows 0..max_requests-1; the scratch row, which comes after, is never among them.

    Args:
        max_requests: rows.
        clock: of the steps that read the rows.
    """

    def __init__(self, max_requests: int, clock: StepClock) -> None:
        if not 1 <= max_requests < ROW_MASK:
            raise SchemaError(
                f"max_requests must lie in 1..{ROW_MASK - 1}, got {max_requests}: "
                f"a handle keeps the row in {ROW_BITS} bits"
            )
        self.max_requests = max_requests
        self.clock = clock
        # Generations start at 1, so that a bare row number is never a valid handle.
        self._generation = [1] * max_requests
        self._phase = [SlotPhase.FREE] * max_requests
        # The handle that steps may name a row by, -1 where they may not: one comparison of lists
        # tells a good batch.
        self._steppable = [-1] * max_requests
        self._free = deque(range(max_requests))
        self._quarantine: deque[tuple[int, int]] = deque()

    def admit(self) -> int:
        """Take a free row and return its handle, in the phase `PREFILLING`.

        With nothing but quarantined rows left, waits for the step that the oldest rests for.

        Raises:
            SlotsExhausted: when every row belongs to a request.
        """
        self._reclaim()
        if not self._free and self._quarantine:
            self.clock.wait(self._quarantine[0][0])
            self._reclaim()
        if not self._free:
            raise SlotsExhausted(
                f"all {self.max_requests} slots are taken; retire a request, "
                "or make the runtime with a larger max_requests"
            )
        row = self._free.popleft()
        self._phase[row] = SlotPhase.PREFILLING
        return self._generation[row] << ROW_BITS | row

    def retire(self, handle: int) -> int:
        """End a handle; its row rests until all steps submitted so far have completed.

        Raises:
            InvalidSlot, StaleSlot: for what is not a live handle.
        """
        row = self.row_of(handle)
        self._generation[row] += 1
        self._phase[row] = SlotPhase.QUARANTINED
        self._steppable[row] = -1
        self._quarantine.append((self.clock.submitted, row))
        return row

    def mark_live(self, row: int) -> None:
        """The row's prompt is complete: steps may take it."""
        self._phase[row] = SlotPhase.LIVE
        self._steppable[row] = self._generation[row] << ROW_BITS | row

    def mark_prefilling(self, row: int) -> None:
        """The row's prompt is growing: steps may not take it."""
        self._phase[row] = SlotPhase.PREFILLING
        self._steppable[row] = -1

    def mark_torn(self, row: int) -> None:
        """The row's prefill or step failed midway: it can only be retired."""
        self._phase[row] = SlotPhase.TORN
        self._steppable[row] = -1

    def phase(self, handle: int) -> SlotPhase:
        """`PREFILLING`, `LIVE` or `TORN`."""
        return self._phase[self.row_of(handle)]

    def row_of(self, handle: int) -> int:
        """The row that a handle stands for.

        Raises:
            InvalidSlot: for what never was a handle of this manager.
            StaleSlot: for the handle of a retired request.
        """
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise InvalidSlot(
                f"a slot is the int that admit() returned, got {handle!r} "
                f"of type {type(handle).__name__}"
            )
        row, generation = handle & ROW_MASK, handle >> ROW_BITS
        if handle < 0 or row >= self.max_requests or generation < 1:
            raise InvalidSlot(
                f"{handle} is no slot handle: pass what admit(), open(), fork() or restore() "
                f"returned (row {row} of {self.max_requests}, generation {generation})"
            )
        current = self._generation[row]
        if generation > current:
            raise InvalidSlot(f"{handle} is no slot handle: row {row} never had it")
        if generation < current or self._phase[row] is SlotPhase.FREE:
            raise StaleSlot(f"slot {handle} was retired; its row {row} may serve another request")
        return row

    def rows_to_step(self, handles: Sequence[int]) -> list[int]:
        """The rows of handles that steps may take, in their order.

        Raises:
            InvalidSlot, StaleSlot: as `row_of`.
            SlotPrefilling: when a prompt is not complete.
            PrefillFailed: when a prefill or a step raised midway.
        """
        steppable = self._steppable
        try:
            rows = [handle & ROW_MASK for handle in handles]
            if list(map(steppable.__getitem__, rows)) == handles:
                return rows
        except (TypeError, IndexError):
            pass
        return [self._row_to_step(handle) for handle in handles]

    def whole_row_of(self, handle: int) -> int:
        """The row of a handle whose layers agree.

        Raises:
            InvalidSlot, StaleSlot: as `row_of`.
            PrefillFailed: when a prefill or a step of it raised midway.
        """
        row = self.row_of(handle)
        if self._phase[row] is SlotPhase.TORN:
            raise PrefillFailed(
                f"a prefill or an eager step of slot {handle} failed midway, so its layers "
                "disagree; retire it"
            )
        return row

    def _row_to_step(self, handle: int) -> int:
        row = self.whole_row_of(handle)
        if self._phase[row] is SlotPhase.PREFILLING:
            raise SlotPrefilling(
                f"slot {handle} is still prefilling: give it its last tokens with extend() first"
            )
        return row

    @property
    def live(self) -> int:
        """Rows that belong to a request."""
        return self.max_requests - len(self._free) - len(self._quarantine)

    def _reclaim(self) -> None:
        completed = self.clock.completed() if self._quarantine else 0
        while self._quarantine and self._quarantine[0][0] <= completed:
            _, row = self._quarantine.popleft()
            self._phase[row] = SlotPhase.FREE
            self._free.append(row)
