"""K and V in blocks: who has which, what is copied and when, and what an error leaves behind.

Blocks are filled with numbers that say who wrote what where, so that a block too few copied, or one
shared that is written, shows as a wrong number.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphcache import BlockStore, Field
from graphcache.errors import BlocksExhausted, SchemaError
from graphcache.uploads import Uploads
from tests.step_clock import HandClock
from tests.toy import BACKENDS, device_of

CPU = torch.device("cpu")


def make_store(
    blocks: int = 8,
    block_tokens: int = 4,
    slots: int = 3,
    context: int = 24,
    device: torch.device = CPU,
) -> tuple[BlockStore, HandClock]:
    clock = HandClock()
    store = BlockStore(
        [
            Field("layer0.k", (1, block_tokens, 8), torch.float32),
            Field("layer0.v", (1, block_tokens, 16), torch.float32),
            Field("layer3.k", (2, block_tokens, 8), torch.bfloat16),
            Field("layer3.v", (2, block_tokens, 8), torch.bfloat16),
        ],
        max_requests=slots,
        max_context=context,
        block_tokens=block_tokens,
        num_blocks=blocks,
        device=device,
        clock=clock,
        uploads=Uploads(device, 4096),
    )
    for name in store.pool.fields:
        store.pool[name].fill_(float("nan"))
    return store, clock


def write(store: BlockStore, row: int, position: int, value: float) -> None:
    """As an append does: through the device's table."""
    block = int(store.table[row, position // store.block_tokens])
    for name in store.pool.fields:
        store.pool[name][block, :, position % store.block_tokens] = value


def read(store: BlockStore, row: int, length: int) -> list[float]:
    """What the slot's first positions hold, the same in every layer's K and V."""
    seen = []
    for position in range(length):
        block = int(store.table[row, position // store.block_tokens])
        values = {
            float(value)
            for name in store.pool.fields
            for value in store.pool[name][block, :, position % store.block_tokens].flatten()
        }
        assert len(values) == 1, f"layers disagree at position {position}: {values}"
        seen.append(values.pop())
    return seen


def books(store: BlockStore) -> dict[str, Any]:
    """All that an error must leave as it was."""
    return {
        "owned": [list(store.blocks_of(row)) for row in range(len(store._owned))],
        "users": list(store._users),
        "free": sorted([*store._free, *(block for _, block in store._quarantine)]),
        "table": store.table.clone(),
        "bytes": store.pool.arena.clone(),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


def test_layout() -> None:
    store, _ = make_store(blocks=5, block_tokens=4, slots=3, context=22)
    assert store.pool["layer0.k"].shape == (6, 1, 4, 8)
    assert store.pool["layer0.v"].shape == (6, 1, 4, 16)
    assert store.pool["layer3.k"].shape == (6, 2, 4, 8)
    assert store.table.shape == (4, 6)
    assert store.table.dtype == torch.int32
    assert (store.table == 5).all(), "without reservation every entry is the scratch block"
    row_bytes = 4 * (4 * 8 + 4 * 16 + 2 * 2 * 8 * 2)
    assert store.memory_bytes() == 6 * -(-row_bytes // 256) * 256 + 4 * 6 * 4


@pytest.mark.parametrize(("blocks", "block_tokens"), [(0, 4), (4, 0), (-1, 4), (4, -2)])
def test_sizes_that_can_not_be(blocks: int, block_tokens: int) -> None:
    with pytest.raises(SchemaError, match="at least 1"):
        BlockStore(
            [Field("k", (8,), torch.float32)],
            max_requests=4,
            max_context=22,
            block_tokens=block_tokens,
            num_blocks=blocks,
            device="cpu",
            clock=HandClock(),
            uploads=Uploads(torch.device("cpu"), 1024),
        )


@pytest.mark.parametrize(
    ("tokens", "count"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
)
def test_reserve_takes_what_the_tokens_need(tokens: int, count: int) -> None:
    store, _ = make_store()
    store.reserve(1, tokens)
    owned = list(store.blocks_of(1))
    assert len(owned) == count == store.blocks_for(tokens)
    assert store.table[1].tolist() == owned + [8] * (6 - count)
    assert (store.table[[0, 2, 3]] == 8).all()
    assert store.free_blocks == 8 - count


def test_reserving_more_keeps_what_is_there_and_less_changes_nothing() -> None:
    store, _ = make_store()
    store.reserve(0, 5)
    before = store.blocks_of(0)
    write(store, 0, 2, 7.0)
    store.reserve(0, 8)
    assert store.blocks_of(0) == before
    store.reserve(0, 3)
    assert store.blocks_of(0) == before
    store.reserve(0, 9)
    assert store.blocks_of(0)[:2] == before
    assert len(store.blocks_of(0)) == 3
    assert float(store.pool["layer0.k"][before[0], 0, 2, 0]) == 7.0


def test_scratch_is_never_handed_out() -> None:
    store, _ = make_store(blocks=6)
    store.reserve(0, 24)
    assert sorted(store.blocks_of(0)) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(BlocksExhausted):
        store.reserve(1, 1)


def test_fork_shares_full_blocks_and_copies_the_partly_filled_one() -> None:
    store, _ = make_store(blocks=9)
    store.reserve(0, 14)
    for position in range(10):
        write(store, 0, position, float(position))
    store.fork(0, 2, length=10, tokens=13)
    parent, child = store.blocks_of(0), store.blocks_of(2)
    assert child[:2] == parent[:2]
    assert not set(child[2:]) & set(parent)
    assert read(store, 2, 10) == list(range(10))
    write(store, 0, 10, 100.0)
    write(store, 2, 10, 200.0)
    assert read(store, 0, 11) == [*range(10), 100.0]
    assert read(store, 2, 11) == [*range(10), 200.0]


def test_fork_at_the_edge_of_a_block_copies_nothing() -> None:
    store, _ = make_store(blocks=5)
    store.reserve(0, 9)
    for position in range(8):
        write(store, 0, position, float(position))
    before = store.pool.arena.clone()
    store.fork(0, 1, length=8, tokens=9)
    assert torch.equal(before.view(torch.uint8), store.pool.arena.view(torch.uint8))
    assert store.blocks_of(1)[:2] == store.blocks_of(0)[:2]
    assert store.blocks_of(1)[2] != store.blocks_of(0)[2]


def test_fork_of_nothing() -> None:
    store, _ = make_store()
    store.fork(0, 1, length=0, tokens=0)
    assert store.blocks_of(1) == ()
    assert (store.table == 8).all()


def test_a_fork_of_a_request_with_less_room_than_tokens_still_has_them() -> None:
    """A request may have been extended with a smaller budget than it holds."""
    store, _ = make_store()
    store.reserve(0, 10)
    for position in range(10):
        write(store, 0, position, float(position))
    store.fork(0, 1, length=10, tokens=3)
    assert read(store, 1, 10) == list(range(10))


@pytest.mark.parametrize("who", [0, 1], ids=["parent", "child"])
@pytest.mark.parametrize("length", range(11))
def test_rewind_into_shared_blocks_then_append_to_both(who: int, length: int) -> None:
    store, _ = make_store(blocks=12)
    store.reserve(0, 12)
    for position in range(10):
        write(store, 0, position, float(position))
    store.fork(0, 1, length=10, tokens=12)
    store.rewind(who, length)
    for position in range(length, 12):
        write(store, who, position, 100.0 + position)
    other = 1 - who
    for position in range(10, 12):
        write(store, other, position, 200.0 + position)
    went_back = [*range(length), *(100.0 + position for position in range(length, 12))]
    assert read(store, who, 12) == went_back
    assert read(store, other, 12) == [*range(10), 210.0, 211.0]
    for index in range(length // 4, 3):
        assert store._users[store.blocks_of(who)[index]] == 1


def test_rewind_of_a_request_alone_changes_nothing() -> None:
    store, _ = make_store()
    store.reserve(0, 12)
    before = books(store)
    for length in (0, 3, 4, 11, 12):
        store.rewind(0, length)
    assert same(before, books(store))


def test_rewind_keeps_the_reservation() -> None:
    store, _ = make_store(blocks=8)
    store.reserve(0, 14)
    store.fork(0, 1, length=8, tokens=14)
    store.rewind(1, 2)
    assert len(store.blocks_of(1)) == 4
    assert not set(store.blocks_of(0)) & set(store.blocks_of(1))


def test_held_blocks_outlive_their_slot_and_can_be_adopted_more_than_once() -> None:
    store, clock = make_store(blocks=12)
    store.reserve(0, 10)
    for position in range(7):
        write(store, 0, position, float(position))
    held = store.hold(0, 7)
    assert held[0] == store.blocks_of(0)[0]
    assert held[1] != store.blocks_of(0)[1]
    for position in range(7, 10):
        write(store, 0, position, 50.0)
    store.release(0)
    clock.submit()
    clock.complete()
    for row in (1, 2):
        store.adopt(row, held, length=7, tokens=9)
        write(store, row, 7, 100.0 + row)
    assert read(store, 1, 8) == [*range(7), 101.0]
    assert read(store, 2, 8) == [*range(7), 102.0]
    store.drop(held)
    assert read(store, 1, 8) == [*range(7), 101.0]
    assert store._users[held[0]] == 2
    assert store._users[held[1]] == 0


def test_a_slot_that_goes_back_behind_its_checkpoint_leaves_the_checkpoint_alone() -> None:
    store, _ = make_store(blocks=12)
    store.reserve(0, 10)
    for position in range(9):
        write(store, 0, position, float(position))
    held = store.hold(0, 9)
    store.rewind(0, 2)
    for position in range(2, 10):
        write(store, 0, position, 77.0)
    store.adopt(1, held, length=9, tokens=10)
    assert read(store, 1, 9) == list(range(9))
    assert read(store, 0, 10) == [0.0, 1.0, *[77.0] * 8]


def test_a_block_rests_until_its_last_user_is_gone_and_the_steps_are_done() -> None:
    store, clock = make_store(blocks=2)
    store.reserve(0, 4)
    held = store.hold(0, 4)
    (block,) = held
    clock.submit(3)
    store.release(0)
    assert store.free_blocks == 1, "a checkpoint has it still"
    clock.submit(2)
    store.drop(held)
    assert store.free_blocks == 2
    store.reserve(1, 4)
    assert store.blocks_of(1) != (block,), "the free block comes first"
    clock.complete(4)
    store.reserve(2, 4)
    assert clock.waited == [5], "step 5 was submitted before the block was dropped"
    assert store.blocks_of(2) == (block,)


def test_waits_only_for_as_many_resting_blocks_as_are_needed() -> None:
    store, clock = make_store(blocks=4, slots=4)
    for row in range(4):
        store.reserve(row, 4)
    for row in range(3):
        clock.submit()
        store.release(row)
    store.reserve(0, 8)
    assert clock.waited == [1, 2]
    store.reserve(1, 4)
    assert clock.waited == [1, 2, 3]


def test_a_released_block_is_not_written_by_the_next_owner_before_its_steps_are_done() -> None:
    """The steps in flight of a retired request read its blocks."""
    store, clock = make_store(blocks=2)
    store.reserve(0, 8)
    clock.submit()
    store.release(0)
    with pytest.raises(BlocksExhausted):
        store.reserve(1, 12)
    assert clock.waited == [], "an error does not wait"
    store.reserve(1, 8)
    assert clock.waited == [1]


def _reserve(store: BlockStore) -> None:
    store.reserve(2, 9)


def _reserve_more(store: BlockStore) -> None:
    store.reserve(0, 24)


def _fork(store: BlockStore) -> None:
    store.fork(0, 2, length=10, tokens=20)


def _rewind(store: BlockStore) -> None:
    store.rewind(1, 0)


def _adopt(store: BlockStore) -> None:
    store.adopt(2, list(store.blocks_of(0)), length=10, tokens=20)


@pytest.mark.parametrize(
    "act",
    [_reserve, _reserve_more, _fork, _rewind, _adopt],
    ids=lambda act: act.__name__.strip("_"),
)
def test_exhaustion_leaves_everything_as_it_was(act: Any) -> None:
    store, clock = make_store(blocks=7)
    store.reserve(0, 12)
    for position in range(10):
        write(store, 0, position, float(position))
    store.fork(0, 1, length=10, tokens=15)
    clock.submit(2)
    assert store.free_blocks == 2
    before = books(store)
    if act is _rewind:
        store.reserve(2, 4)
        before = books(store)
    with pytest.raises(BlocksExhausted, match=r"\d+ blocks of 4 tokens are needed and [0-9]"):
        act(store)
    assert same(before, books(store))
    assert clock.waited == []


def test_asking_for_blocks_takes_none() -> None:
    """What rests counts as free, and is not waited for."""
    store, clock = make_store(blocks=4)
    store.reserve(0, 8)
    clock.submit()
    store.release(0)
    before = books(store)
    store.check_free(4)
    with pytest.raises(BlocksExhausted, match="5 blocks of 4 tokens are needed and 4 of 4"):
        store.check_free(5)
    assert same(before, books(store))
    assert clock.waited == []


def test_exhaustion_of_a_hold() -> None:
    store, _ = make_store(blocks=3)
    store.reserve(0, 12)
    before = books(store)
    with pytest.raises(BlocksExhausted):
        store.hold(0, 10)
    assert same(before, books(store))
    assert store.hold(0, 8) == list(store.blocks_of(0)[:2]), "full blocks alone need none"


def test_the_error_says_what_to_do() -> None:
    store, _ = make_store(blocks=3)
    with pytest.raises(
        BlocksExhausted,
        match=r"5 blocks of 4 tokens are needed and 3 of 3 are free.*max_tokens.*kv_blocks",
    ):
        store.reserve(0, 20)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_the_device(backend: str) -> None:
    """Tables and copies arrive in the order of the stream, without waiting."""
    device = device_of(backend)
    store, _ = make_store(blocks=12, device=device)
    store.reserve(0, 10)
    for position in range(10):
        write(store, 0, position, float(position))
    store.fork(0, 1, length=10, tokens=12)
    store.rewind(0, 5)
    for position in range(5, 10):
        write(store, 0, position, 100.0)
    write(store, 1, 10, 200.0)
    assert read(store, 0, 10) == [*range(5), *[100.0] * 5]
    assert read(store, 1, 11) == [*range(10), 200.0]
    assert store.table.device.type == device.type


class Blocks(RuleBasedStateMachine):
    """Requests that reserve, write, fork, go back and leave, against lists of numbers."""

    @initialize(blocks=st.integers(2, 16), block_tokens=st.integers(1, 5), slots=st.integers(2, 4))
    def start(self, blocks: int, block_tokens: int, slots: int) -> None:
        self.store, self.clock = make_store(blocks, block_tokens, slots, context=20)
        self.blocks, self.size, self.slots = blocks, block_tokens, slots
        self.lines: dict[int, list[float]] = {}
        self.room: dict[int, int] = {}
        self.held: list[tuple[list[int], list[float]]] = []
        self.count = 0.0

    def users(self) -> Counter[int]:
        users = Counter(block for row in self.lines for block in self.store.blocks_of(row))
        users.update(block for blocks, _ in self.held for block in blocks)
        return users

    def need(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def attempt(self, needed: int, act: Any) -> bool:
        """Do it, or have it refused with nothing changed, as the free blocks allow."""
        if needed <= self.blocks - len(self.users()):
            act()
            return True
        before = books(self.store)
        with pytest.raises(BlocksExhausted):
            act()
        assert same(before, books(self.store))
        return False

    def free_rows(self) -> list[int]:
        return [row for row in range(self.slots) if row not in self.lines]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.lines)))

    @precondition(lambda self: self.free_rows())
    @rule(tokens=st.integers(1, 20))
    def admit(self, tokens: int) -> None:
        row = self.free_rows()[0]
        if self.attempt(self.need(tokens), lambda: self.store.reserve(row, tokens)):
            self.lines[row], self.room[row] = [], tokens

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def reserve(self, data: st.DataObject, tokens: int) -> None:
        row = self.pick(data)
        needed = self.need(tokens) - len(self.store.blocks_of(row))
        if self.attempt(needed, lambda: self.store.reserve(row, tokens)):
            self.room[row] = max(self.room[row], tokens)

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), count=st.integers(1, 7))
    def append(self, data: st.DataObject, count: int) -> None:
        row = self.pick(data)
        line = self.lines[row]
        for _ in range(min(count, self.room[row] - len(line))):
            self.count += 1
            # bfloat16 is exact to 256.
            write(self.store, row, len(line), self.count % 256)
            line.append(self.count % 256)
        self.clock.submit()

    @precondition(lambda self: self.lines and self.free_rows())
    @rule(data=st.data(), tokens=st.integers(0, 20))
    def fork(self, data: st.DataObject, tokens: int) -> None:
        source, target = self.pick(data), self.free_rows()[0]
        line = self.lines[source]
        needed = self.need(max(tokens, len(line))) - len(line) // self.size
        if self.attempt(needed, lambda: self.store.fork(source, target, len(line), tokens)):
            self.lines[target], self.room[target] = list(line), max(tokens, len(line))

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        row = self.pick(data)
        length = data.draw(st.integers(0, len(self.lines[row])))
        users = self.users()
        behind = self.store.blocks_of(row)[length // self.size :]
        needed = sum(users[block] > 1 for block in behind)
        if self.attempt(needed, lambda: self.store.rewind(row, length)):
            del self.lines[row][length:]

    @precondition(lambda self: self.lines and len(self.held) < 3)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        row = self.pick(data)
        line = self.lines[row]
        blocks: list[int] = []
        needed = self.need(len(line)) - len(line) // self.size
        if self.attempt(needed, lambda: blocks.extend(self.store.hold(row, len(line)))):
            self.held.append((blocks, list(line)))

    @precondition(lambda self: self.held and self.free_rows())
    @rule(data=st.data(), tokens=st.integers(0, 20))
    def adopt(self, data: st.DataObject, tokens: int) -> None:
        blocks, line = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        row = self.free_rows()[0]
        needed = self.need(max(tokens, len(line))) - len(line) // self.size
        if self.attempt(needed, lambda: self.store.adopt(row, blocks, len(line), tokens)):
            self.lines[row], self.room[row] = list(line), max(tokens, len(line))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        blocks, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.store.drop(blocks)

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = self.pick(data)
        del self.lines[row], self.room[row]
        self.store.release(row)
        assert self.store.blocks_of(row) == ()

    @precondition(lambda self: self.clock.done < self.clock.submitted)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.clock.complete(data.draw(st.integers(self.clock.done + 1, self.clock.submitted)))

    @invariant()
    def everyone_reads_their_own(self) -> None:
        if not hasattr(self, "store"):
            return
        store, users = self.store, self.users()
        assert {block: n for block, n in enumerate(store._users) if n} == dict(users)
        resting = [block for _, block in store._quarantine]
        assert sorted([*store._free, *resting, *users]) == list(range(self.blocks))
        for row, line in self.lines.items():
            owned = list(store.blocks_of(row))
            assert store.table[row].tolist()[: len(owned)] == owned
            assert set(store.table[row].tolist()[len(owned) :]) <= {self.blocks}
            assert len(owned) >= self.need(self.room[row])
            assert read(store, row, len(line)) == line
            for index, block in enumerate(owned):
                assert users[block] == 1 or (index + 1) * self.size <= len(line)


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
