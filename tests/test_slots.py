"""Who has which row: handles, and rows that rest until the steps that read them are done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphcache import PAD_SLOT, SlotManager
from graphcache.errors import (
    InvalidSlot,
    PrefillFailed,
    SchemaError,
    SlotPrefilling,
    SlotsExhausted,
    StaleSlot,
)
from graphcache.slots import NoSteps, SlotPhase
from tests.step_clock import HandClock


def _full(slots: int) -> tuple[SlotManager, HandClock, list[int]]:
    clock = HandClock()
    manager = SlotManager(slots, clock)
    return manager, clock, [manager.admit() for _ in range(slots)]


def test_every_row_is_handed_out_and_scratch_never() -> None:
    manager, _, handles = _full(5)
    rows = [manager.row_of(handle) for handle in handles]
    assert sorted(rows) == [0, 1, 2, 3, 4]
    assert len(set(handles)) == 5
    assert manager.live == 5
    with pytest.raises(SlotsExhausted, match=r"all 5 slots are taken.*max_requests"):
        manager.admit()
    assert manager.live == 5


def test_a_row_rests_until_the_last_step_that_read_it() -> None:
    manager, clock, handles = _full(3)
    clock.submit(4)
    row = manager.retire(handles[1])
    clock.submit(3)
    assert manager.live == 2
    clock.complete(3)
    manager._reclaim()
    assert not manager._free
    clock.complete(4)
    assert manager.row_of(manager.admit()) == row
    assert clock.waited == []


def test_with_only_resting_rows_left_admission_waits_for_the_oldest_and_for_no_more() -> None:
    manager, clock, handles = _full(3)
    clock.submit(2)
    first = manager.retire(handles[2])
    clock.submit(5)
    manager.retire(handles[0])
    assert manager.row_of(manager.admit()) == first
    assert clock.waited == [2]
    assert clock.done == 2
    manager.admit()
    assert clock.waited == [2, 7]
    with pytest.raises(SlotsExhausted):
        manager.admit()


def test_a_free_row_is_taken_before_a_resting_one_is_waited_for() -> None:
    clock = HandClock()
    manager = SlotManager(2, clock)
    handle = manager.admit()
    clock.submit(9)
    manager.retire(handle)
    assert manager.row_of(manager.admit()) == 1
    assert clock.waited == []


def test_without_steps_nothing_has_to_rest() -> None:
    manager = SlotManager(1, NoSteps())
    seen = set()
    for _ in range(50):
        handle = manager.admit()
        assert manager.row_of(handle) == 0
        seen.add(handle)
        manager.retire(handle)
    assert len(seen) == 50


def test_a_handle_never_comes_back() -> None:
    manager, clock, handles = _full(2)
    seen = set(handles)
    for turn in range(200):
        manager.retire(handles.pop(turn % 2))
        clock.submit()
        clock.complete()
        handles.append(manager.admit())
        assert handles[-1] not in seen
        seen.add(handles[-1])


def test_a_stale_handle_is_refused_while_resting_when_free_and_when_reused() -> None:
    manager, clock, handles = _full(2)
    old = handles[0]
    clock.submit()
    row = manager.retire(old)
    calls = (manager.row_of, manager.retire, manager.phase, lambda h: manager.rows_to_step([h]))
    for call in calls:
        with pytest.raises(StaleSlot, match=f"slot {old} was retired.*row {row}"):
            call(old)
    clock.complete()
    manager._reclaim()
    for call in calls:
        with pytest.raises(StaleSlot):
            call(old)
    new = manager.admit()
    assert manager.row_of(new) == row
    manager.mark_live(row)
    for call in calls:
        with pytest.raises(StaleSlot):
            call(old)
    assert manager.rows_to_step([new]) == [row]
    assert manager.live == 2


@pytest.mark.parametrize(
    "wrong",
    [
        PAD_SLOT, 0, 1, 2, 3, -5, True, False, None, 1.0, 1048576.0, "0", "1048576", [0],
        1 << 20 | 3, 1 << 20 | 4, 1 << 20 | 0xFFFFF, 7 << 20, -(1 << 20), -(1 << 20) + 1, 1 << 70,
    ],
)  # fmt: skip
def test_what_never_was_a_handle(wrong: Any) -> None:
    """Bare rows, scratch's row, padding, later generations, other types."""
    manager, _, handles = _full(3)
    for handle in handles:
        manager.mark_live(manager.row_of(handle))
    for call in (manager.row_of, manager.retire, manager.phase):
        with pytest.raises(InvalidSlot):
            call(wrong)
    for batch in ([wrong], [handles[0], wrong], [wrong, handles[0]]):
        with pytest.raises(InvalidSlot):
            manager.rows_to_step(batch)
    assert manager.live == 3


def test_a_handle_says_what_to_do() -> None:
    manager, _, _ = _full(3)
    with pytest.raises(InvalidSlot, match=r"pass what admit\(\).*row 2 of 3, generation 0"):
        manager.row_of(2)
    with pytest.raises(InvalidSlot, match="of type str"):
        manager.row_of("a")  # type: ignore[arg-type]


def test_phases() -> None:
    manager, _, (one, other) = _full(2)
    row = manager.row_of(one)
    assert manager.phase(one) is SlotPhase.PREFILLING
    with pytest.raises(SlotPrefilling, match=f"slot {one} is still prefilling.*extend"):
        manager.rows_to_step([one])
    manager.mark_live(row)
    assert manager.phase(one) is SlotPhase.LIVE
    assert manager.rows_to_step([one]) == [row]
    with pytest.raises(SlotPrefilling, match=f"slot {other}"):
        manager.rows_to_step([one, other])
    manager.mark_prefilling(row)
    with pytest.raises(SlotPrefilling):
        manager.rows_to_step([one])


def test_a_torn_row_can_only_be_retired() -> None:
    manager, _, (one, other) = _full(2)
    row = manager.row_of(one)
    for handle in (one, other):
        manager.mark_live(manager.row_of(handle))
    manager.mark_torn(row)
    assert manager.phase(one) is SlotPhase.TORN
    for act in (lambda: manager.rows_to_step([other, one]), lambda: manager.whole_row_of(one)):
        with pytest.raises(PrefillFailed, match=f"slot {one} failed midway.*retire"):
            act()
    assert manager.whole_row_of(other) == manager.row_of(other)
    assert manager.live == 2
    manager.retire(one)
    again = manager.admit()
    assert manager.row_of(again) == row
    assert manager.whole_row_of(again) == row


def test_the_next_request_of_a_row_starts_over() -> None:
    """A row that was live when it was retired is prefilling when it is admitted again."""
    manager, _, (handle,) = _full(1)
    manager.mark_live(0)
    manager.retire(handle)
    again = manager.admit()
    assert manager.phase(again) is SlotPhase.PREFILLING
    with pytest.raises(SlotPrefilling):
        manager.rows_to_step([again])


@pytest.mark.parametrize("slots", [0, -1, 1 << 20, (1 << 20) - 1])
def test_a_number_of_slots_that_can_not_be(slots: int) -> None:
    with pytest.raises(SchemaError, match="max_requests"):
        SlotManager(slots, NoSteps())


def test_the_largest_number_of_slots_has_distinct_handles() -> None:
    manager = SlotManager((1 << 20) - 2, NoSteps())
    last = [manager.admit() for _ in range(manager.max_requests)][-1]
    assert manager.row_of(last) == (1 << 20) - 3
    manager.retire(last)
    with pytest.raises(StaleSlot):
        manager.row_of(last)


class Rows(RuleBasedStateMachine):
    """Any order of admissions, retirements and steps, against sets and numbers."""

    @initialize(slots=st.integers(1, 5))
    def start(self, slots: int) -> None:
        self.clock = HandClock()
        self.manager = SlotManager(slots, self.clock)
        self.free = list(range(slots))
        self.resting: list[tuple[int, int]] = []
        self.rows: dict[int, int] = {}
        self.phases: dict[int, SlotPhase] = {}
        self.gone: list[int] = []

    def _rested(self) -> None:
        self.free += [row for step, row in self.resting if step <= self.clock.done]
        self.resting = [(step, row) for step, row in self.resting if step > self.clock.done]

    @rule()
    def admit(self) -> None:
        self._rested()
        waits = len(self.clock.waited)
        if not self.free and not self.resting:
            with pytest.raises(SlotsExhausted):
                self.manager.admit()
            return
        oldest = [] if self.free else [min(step for step, _ in self.resting)]
        handle = self.manager.admit()
        assert self.clock.waited[waits:] == oldest
        self._rested()
        row = self.manager.row_of(handle)
        assert row in self.free, "a row was handed out that is taken or rests"
        assert handle not in self.rows and handle not in self.gone
        self.free.remove(row)
        self.rows[handle], self.phases[handle] = row, SlotPhase.PREFILLING

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.rows)))
        row = self.rows.pop(handle)
        assert self.manager.retire(handle) == row
        del self.phases[handle]
        self.resting.append((self.clock.submitted, row))
        self.gone.append(handle)

    @rule(steps=st.integers(1, 3))
    def submit(self, steps: int) -> None:
        self.clock.submit(steps)

    @precondition(lambda self: self.clock.done < self.clock.submitted)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.clock.complete(data.draw(st.integers(self.clock.done + 1, self.clock.submitted)))

    @precondition(lambda self: self.rows)
    @rule(
        data=st.data(),
        phase=st.sampled_from([SlotPhase.LIVE, SlotPhase.PREFILLING, SlotPhase.TORN]),
    )
    def change_phase(self, data: st.DataObject, phase: SlotPhase) -> None:
        handle = data.draw(st.sampled_from(sorted(self.rows)))
        mark = {
            SlotPhase.LIVE: self.manager.mark_live,
            SlotPhase.PREFILLING: self.manager.mark_prefilling,
            SlotPhase.TORN: self.manager.mark_torn,
        }
        mark[phase](self.rows[handle])
        self.phases[handle] = phase

    @rule(data=st.data())
    def ask_to_step(self, data: st.DataObject) -> None:
        """A batch of handles, good and bad: rows in order, or the first one's error."""
        known = [*self.rows, *self.gone, 0, PAD_SLOT, 99 << 20]
        batch = data.draw(st.lists(st.sampled_from(known), max_size=4))
        errors = {SlotPhase.PREFILLING: SlotPrefilling, SlotPhase.TORN: PrefillFailed}
        for handle in batch:
            phase = self.phases.get(handle)
            if phase is not SlotPhase.LIVE:
                error: Any = StaleSlot if handle in self.gone else InvalidSlot
                error = error if phase is None else errors[phase]
                with pytest.raises(error):
                    self.manager.rows_to_step(batch)
                return
        assert self.manager.rows_to_step(batch) == [self.rows[handle] for handle in batch]

    @invariant()
    def rows_add_up(self) -> None:
        if not hasattr(self, "manager"):
            return
        assert self.manager.live == len(self.rows)
        for handle, row in self.rows.items():
            assert self.manager.row_of(handle) == row
            assert self.manager.phase(handle) is self.phases[handle]
        for handle in self.gone:
            with pytest.raises(StaleSlot):
                self.manager.row_of(handle)


TestRows = Rows.TestCase
TestRows.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_handles_are_plain_ints() -> None:
    """So that comparing a list of them costs next to nothing."""
    _, _, handles = _full(3)
    assert all(type(handle) is int for handle in handles)
    manager = SlotManager(1, NoSteps())
    handle = manager.admit()
    manager.mark_live(0)
    with pytest.raises(InvalidSlot, match="int64"):
        manager.row_of(np.int64(handle))  # type: ignore[arg-type]
