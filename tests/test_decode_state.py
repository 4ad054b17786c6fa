"""Requests on state that is never wiped, against whole histories in float64.

The machine lets requests come, grow, step, fork, go back, rest in checkpoints and leave in any
order, on memory that starts as NaN. Every token, every reason and the logits behind them come from
`tests.history_oracle`; after every action the books are audited (`tests.books`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from capture import DecodeRuntime, Ladder, StepResult
from graphcache import Checkpoint, DecodeState, Field, FinishReason, KVLayerSchema
from graphcache.errors import (
    BlocksExhausted,
    ContextFull,
    InvalidRequest,
    LayoutMismatch,
    PrefillFailed,
    RewindTooFar,
    SchemaError,
    SlotsExhausted,
    StaleSlot,
)
from tests.books import audit, blocks_in_use, poison, refused, table_of
from tests.entry_toy import EntryDecoder
from tests.history_oracle import TIE, FullHistory, RingRows, Story
from tests.step_clock import HandClock
from tests.toy import VOCAB, ToyDecoder

WINDOWS: list[tuple[int | None, ...]] = [(None,), (None, 6), (5,), (3, None, 8), (1, 4)]
STOP = 17
_toys = {windows: ToyDecoder(windows) for windows in WINDOWS}
_oracles = {windows: FullHistory(toy) for windows, toy in _toys.items()}


def _ladder(kind: str, ceiling: int) -> Ladder:
    if kind == "every":
        return Ladder.every(ceiling)
    return Ladder.powers_of_two(ceiling) if kind == "powers" else Ladder([ceiling])


class Requests(RuleBasedStateMachine):
    """A runtime on the tape, and beside it each request's story."""

    @initialize(
        windows=st.sampled_from([*WINDOWS, (None,)]),
        block_tokens=st.sampled_from([3, 4, 1, 2, 8, 64]),
        scarce=st.booleans(),
        slots=st.integers(2, 5),
        context=st.integers(12, 44),
        ladder=st.sampled_from(["every", "powers", "one"]),
        chunk=st.sampled_from([1, 2, 5, 64]),
        capture_late=st.booleans(),
        promise=st.sampled_from([0, 4]),
    )
    def start(
        self,
        windows: tuple[int | None, ...],
        block_tokens: int,
        scarce: bool,
        slots: int,
        context: int,
        ladder: str,
        chunk: int,
        capture_late: bool,
        promise: int,
    ) -> None:
        self.toy, self.oracle, self.promise = _toys[windows], _oracles[windows], promise
        self.context, self.block_tokens = context, block_tokens
        self.slots, self.has_blocks = slots, None in windows
        width = -(-context // block_tokens)
        self.kv_blocks = max(width, slots * width // 2) if scarce else slots * width
        self.runtime = self.make_runtime(ladder, chunk)
        poison(self.runtime.state)
        self.captured = not capture_late
        if self.captured:
            self.runtime.capture(progress=False)
        self.stories: dict[int, Story] = {}
        self.saved: list[tuple[Checkpoint, Story]] = []

    def make_runtime(self, ladder: str = "one", chunk: int = 64) -> DecodeRuntime:
        schemas = tuple(replace(schema, rewind=self.promise) for schema in self.toy.schemas)
        return DecodeRuntime(
            replace(self.toy.model(stop_tokens=(STOP,)), schemas=schemas),
            max_requests=self.slots,
            max_context=self.context,
            ladder=_ladder(ladder, self.slots),
            backend="tape",
            block_tokens=self.block_tokens,
            kv_blocks=self.kv_blocks,
            prefill_chunk=chunk,
            keep_logits=True,
            nvtx=False,
        )

    def teardown(self) -> None:
        if not hasattr(self, "runtime"):
            return
        self.steps_of([slot for slot in self.stories if self.stories[slot].live], times=3)
        for slot, story in self.stories.items():
            assert self.runtime.tokens_of(slot) == story.tokens
        self.runtime.close()

    # --- what the books say before an action ------------------------------------------------------

    def held(self) -> list[Checkpoint]:
        return [checkpoint for checkpoint, _ in self.saved]

    def room(self) -> int:
        return self.kv_blocks - len(blocks_in_use(self.runtime.state, self.held()))

    def blocks(self, tokens: int) -> int:
        return -(-max(tokens, 0) // self.block_tokens)

    def owned(self, slot: int) -> list[int]:
        state = self.runtime.state
        return list(state.blocks.blocks_of(state.slots.row_of(slot))) if state.blocks else []

    def enough(self, needed: int) -> bool:
        return not self.has_blocks or needed <= self.room()

    def copies(self, story: Story) -> int:
        """Blocks that a copy of a request takes, its answer's included."""
        most = max(self.blocks(story.limit - 1), self.blocks(story.length))
        return most - story.length // self.block_tokens

    def any_slot(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.stories)))

    def new_story(self, max_tokens: int | None, stop: tuple[int, ...]) -> Story:
        rings = [
            RingRows(min(self.context, window + max(0, self.promise - 1)), window)
            for window in set(self.toy.windows)
            if window is not None
        ]
        return Story(max_tokens=max_tokens, stop=stop, rings=rings)

    def limit_after(self, story: Story, count: int, max_tokens: int | None) -> int:
        budget = story.max_tokens if max_tokens is None else max_tokens
        total = len(story.tokens) + count
        return min(self.context, total + (self.context if budget is None else budget))

    def put(self, story: Story, tokens: list[int], limit: int, final: bool) -> None:
        story.tokens += tokens
        story.limit, story.reason, story.live = limit, 0, final
        story.absorb(len(story.tokens) - 1)

    # --- a request's life -------------------------------------------------------------------------

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        max_tokens=st.one_of(st.none(), st.integers(1, 12), st.integers(1, 40)),
        stops=st.booleans(),
    )
    def admit(self, prompt: list[int], max_tokens: int | None, stops: bool) -> None:
        stop = (STOP, prompt[0]) if stops else ()
        story = self.new_story(max_tokens, stop)
        limit = self.limit_after(story, len(prompt), None)
        options: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop}
        wrong: list[Any] = []
        if len(self.stories) == self.slots:
            wrong.append(SlotsExhausted)
        if len(prompt) >= self.context:
            wrong.append(ContextFull)
        if not self.enough(self.blocks(limit - 1)):
            wrong.append(BlocksExhausted)
        if not wrong:
            self.put(story, prompt, limit, final=True)
            self.stories[self.runtime.admit(prompt, **options)] = story
            return
        with refused(self.runtime, tuple(wrong)):
            self.runtime.admit(prompt, **options)

    @precondition(lambda self: len(self.stories) < self.slots)
    @rule(max_tokens=st.integers(1, 10))
    def open(self, max_tokens: int) -> None:
        slot = self.runtime.open(max_tokens=max_tokens)
        self.stories[slot] = self.new_story(max_tokens, (STOP,))
        assert self.runtime.tokens_of(slot) == []

    @precondition(lambda self: self.stories)
    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
        max_tokens=st.one_of(st.none(), st.integers(1, 10)),
        final=st.sampled_from([True, True, False]),
    )
    def extend(
        self, data: st.DataObject, tokens: list[int], max_tokens: int | None, final: bool
    ) -> None:
        slot = self.any_slot(data)
        story = self.stories[slot]
        limit = self.limit_after(story, len(tokens), max_tokens)
        options: dict[str, Any] = {"max_tokens": max_tokens, "final": final}
        if len(story.tokens) + len(tokens) >= self.context:
            error: Any = ContextFull
        elif not self.enough(self.blocks(limit - 1) - len(self.owned(slot))):
            error = BlocksExhausted
        else:
            self.runtime.extend(slot, tokens, **options)
            self.put(story, tokens, limit, final)
            return
        with refused(self.runtime, error):
            self.runtime.extend(slot, tokens, **options)

    @precondition(lambda self: self.stories)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        slot = self._leave(data)
        with pytest.raises(StaleSlot):
            self.runtime.step([slot], eager=True)

    # --- steps ------------------------------------------------------------------------------------

    def some_of(self, data: st.DataObject) -> list[int]:
        live = sorted(slot for slot, story in self.stories.items() if story.live)
        if not live:
            return []
        order = data.draw(st.permutations(live))
        return list(order[: data.draw(st.integers(1, len(order)))])

    def submit(self, slots: list[int]) -> tuple[StepResult, list[Story]]:
        result = self.runtime.step(slots, eager=not self.captured)
        return result, [self.stories[slot] for slot in slots]

    def read(self, submitted: tuple[StepResult, list[Story]], newest: bool = True) -> None:
        result, stories = submitted
        told = zip(stories, result.tokens(), result.reasons, strict=True)
        logits = result.logits if newest and stories else None
        for row, (story, token, reason) in enumerate(told):
            if not story.reason and logits is not None:
                expected = self.oracle.next_logits(story.tokens)
                assert np.allclose(logits[row].numpy(), expected, atol=TIE / 4)
            self.hear(story, token, reason)

    def hear(self, story: Story, token: int, reason: FinishReason) -> None:
        if not story.reason:
            self.oracle.check_greedy(story.tokens, token)
            story.absorb(len(story.tokens))
            story.tokens.append(token)
            if token in story.stop:
                story.reason = FinishReason.STOP
            elif len(story.tokens) >= self.context:
                story.reason = FinishReason.CONTEXT
            elif len(story.tokens) >= story.limit:
                story.reason = FinishReason.LENGTH
        else:
            assert token == -1
        assert reason == story.reason

    def steps_of(self, slots: list[int], times: int) -> None:
        """One batch again and again, two steps in flight."""
        waiting: list[tuple[StepResult, list[Story]]] = []
        for _ in range(times):
            waiting.append(self.submit(slots))
            if len(waiting) == 2:
                self.read(waiting.pop(0), newest=False)
        for submitted in waiting:
            self.read(submitted)

    @precondition(lambda self: self.stories)
    @rule(data=st.data(), times=st.integers(1, 9))
    def steps(self, data: st.DataObject, times: int) -> None:
        self.steps_of(self.some_of(data), times)

    @precondition(lambda self: self.stories)
    @rule(data=st.data(), leaves=st.booleans(), comes=st.booleans(), newer_first=st.booleans())
    def two_in_flight(
        self, data: st.DataObject, leaves: bool, comes: bool, newer_first: bool
    ) -> None:
        """Two batches unread while a request leaves and another takes a slot."""
        first, second = (self.submit(self.some_of(data)) for _ in range(2))
        if leaves:
            self._leave(data)
        if comes and len(self.stories) < self.slots and self.enough(self.blocks(6)):
            story = self.new_story(3, ())
            self.put(story, [5, 9, 2, 44], 7, final=True)
            self.stories[self.runtime.admit([5, 9, 2, 44], max_tokens=3, stop=())] = story
        if newer_first:
            second[0].tokens()
        self.read(first, newest=False)
        self.read(second)

    def _leave(self, data: st.DataObject) -> int:
        slot = self.any_slot(data)
        del self.stories[slot]
        self.runtime.retire(slot)
        return slot

    @rule()
    def capture(self) -> None:
        """Anew, with requests alive."""
        self.runtime.capture(progress=False)
        self.captured = True

    # --- copies and ways back ---------------------------------------------------------------------

    @precondition(lambda self: self.stories)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        slot = self.any_slot(data)
        story = self.stories[slot]
        wrong: list[Any] = [SlotsExhausted] * (len(self.stories) == self.slots)
        wrong += [BlocksExhausted] * (not self.enough(self.copies(story)))
        if not wrong:
            self.stories[self.runtime.fork(slot)] = story.copy()
            return
        with refused(self.runtime, tuple(wrong)):
            self.runtime.fork(slot)

    @precondition(lambda self: any(story.tokens for story in self.stories.values()))
    @rule(data=st.data(), far=st.booleans())
    def rewind(self, data: st.DataObject, far: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(s for s, y in self.stories.items() if y.tokens)))
        length = self.stories[slot].length
        self.try_rewind(slot, length - data.draw(st.integers(0, length if far else min(length, 4))))

    def try_rewind(self, slot: int, length: int) -> None:
        """Granted, or refused for the reason that the rings and the free blocks give."""
        story = self.stories[slot]
        users, owned = blocks_in_use(self.runtime.state, self.held()), self.owned(slot)
        shared = sum(users[block] > 1 for block in owned[length // self.block_tokens :])
        grants = [ring.grants(length, story.high) for ring in story.rings]
        if not all(grants):
            error: Any = RewindTooFar
        elif not self.enough(shared):
            error = BlocksExhausted
        else:
            self.runtime.rewind(slot, length)
            story.length, story.tokens = length, story.tokens[: length + 1]
            spent = len(story.tokens) >= story.limit
            ended = FinishReason.CONTEXT if story.limit == self.context else FinishReason.LENGTH
            story.reason = ended if spent else 0
            return
        with refused(self.runtime, error):
            self.runtime.rewind(slot, length)

    def _saved_one(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.saved) - 1))

    @precondition(lambda self: any(y.live and y.length > 1 for y in self.stories.values()))
    @rule(data=st.data(), both=st.booleans())
    def fork_and_go_back(self, data: st.DataObject, both: bool) -> None:
        """A fork; then it, or its parent, or both go back among what they share and go on."""
        parent = data.draw(
            st.sampled_from(sorted(s for s, y in self.stories.items() if y.live and y.length > 1))
        )
        forked = len(self.stories) < self.slots and self.enough(self.copies(self.stories[parent]))
        pair = [parent]
        if forked:
            child = self.runtime.fork(parent)
            self.stories[child] = self.stories[parent].copy()
            pair = data.draw(st.permutations([parent, child]))
        for slot in pair if both else pair[:1]:
            length = self.stories[slot].length
            self.try_rewind(slot, length - data.draw(st.integers(1, min(length, 9))))
        self.steps_of(list(pair), times=2)

    @precondition(lambda self: self.stories and len(self.saved) < 3)
    @rule(data=st.data(), to_host=st.booleans())
    def checkpoint(self, data: st.DataObject, to_host: bool) -> None:
        slot = self.any_slot(data)
        story = self.stories[slot]
        if not self.enough(self.blocks(story.length) - story.length // self.block_tokens):
            with refused(self.runtime, BlocksExhausted):
                self.runtime.checkpoint(slot)
            return
        store = self.runtime.state.blocks
        free = store and store.free_blocks
        checkpoint = self.runtime.checkpoint(slot)
        if to_host:
            assert checkpoint.to_host() is checkpoint
            assert (store and store.free_blocks) == free, "blocks were not given up"
        self.saved.append((checkpoint, story.copy()))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        checkpoint, story = self.saved[self._saved_one(data)]
        needed = self.blocks(max(story.limit - 1, story.length))
        if checkpoint.store is not None:
            needed = self.copies(story)
        wrong: list[Any] = [SlotsExhausted] * (len(self.stories) == self.slots)
        wrong += [BlocksExhausted] * (not self.enough(needed))
        if not wrong:
            self.stories[self.runtime.restore(checkpoint)] = story.copy()
            return
        with refused(self.runtime, tuple(wrong)):
            self.runtime.restore(checkpoint)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Into another runtime of the same layout, its memory NaN too."""
        checkpoint, story = self.saved[self._saved_one(data)]
        with self.make_runtime() as other:
            poison(other.state)
            slot = other.restore(checkpoint)
            there = story.copy()
            assert other.tokens_of(slot) == there.tokens
            if there.live:
                result = other.step([slot], eager=True)
                self.hear(there, result.tokens()[0], result.reasons[0])
            audit(other.state)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        checkpoint, _ = self.saved.pop(self._saved_one(data))
        checkpoint.release()
        checkpoint.release()
        if len(self.stories) < self.slots:
            with pytest.raises(StaleSlot):
                self.runtime.restore(checkpoint)

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "runtime"):
            return
        state = self.runtime.state
        audit(state, self.held())
        assert state.slots.live == len(self.stories)
        for slot, story in self.stories.items():
            row = state.slots.row_of(slot)
            assert int(state.len[row]) == story.length
            assert int(state.done[row]) == story.reason
            assert int(state.limit[row]) == story.limit


TestRequests = Requests.TestCase
TestRequests.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


# --- without a runtime: each rule by itself -------------------------------------------------------

FULL = KVLayerSchema(1, 8, 8, dtype=torch.float32)
SLIDING = KVLayerSchema(1, 8, 8, window=4, dtype=torch.float32)


def make_state(**changes: Any) -> DecodeState:
    settings: dict[str, Any] = {
        "schemas": (FULL, SLIDING),
        "max_requests": 3,
        "max_context": 20,
        "vocab_size": VOCAB,
        "device": "cpu",
        "block_tokens": 4,
    }
    return DecodeState(**{**settings, **changes})


def put(state: DecodeState, slot: int, tokens: list[int], **options: Any) -> None:
    """Prefill without a model."""
    state.absorbed(slot, state.append_tokens(slot, tokens, **options))
    state.complete_prefill(slot)


def test_a_prompt_is_laid_out_for_its_prefill() -> None:
    state = make_state()
    slot = state.open(max_tokens=5)
    positions = state.append_tokens(slot, [7, 8, 9, 10])
    assert positions == range(3)
    batch = state.prefill_batch(slot, range(1, 3))
    row = state.slots.row_of(slot)
    assert batch.prefill
    assert (batch.rows, batch.q_len) == (1, 2)
    assert batch.slots.tolist() == [row, row]
    assert batch.positions.tolist() == [1, 2]
    assert batch.tokens.tolist() == [8, 9]
    assert int(state.len[row]) == 0, "nothing is absorbed before it is said to be"
    state.absorbed(slot, range(0, 3))
    state.complete_prefill(slot)
    assert (state.length_of(slot), state.tokens_of(slot)) == (3, [7, 8, 9, 10])
    assert int(state.limit[row]) == 9
    assert len(table_of(state, row)) == 2, "8 of 9 tokens are ever absorbed"


def test_the_next_turn_absorbs_what_was_pending() -> None:
    state = make_state()
    slot = state.open(max_tokens=3)
    put(state, slot, [7, 8, 9])
    assert state.append_tokens(slot, [20, 21]) == range(2, 4)
    assert state.tokens[state.slots.row_of(slot), :5].tolist() == [7, 8, 9, 20, 21]
    assert int(state.limit[state.slots.row_of(slot)]) == 8


def test_one_token_needs_no_prefill() -> None:
    state = make_state()
    slot = state.open()
    assert state.append_tokens(slot, [7]) == range(0, 0)
    state.complete_prefill(slot)
    assert state.tokens_of(slot) == [7]


def test_a_budget_is_for_each_turn_and_ends_with_the_context() -> None:
    state = make_state()
    slot = state.open(max_tokens=2)
    row = state.slots.row_of(slot)
    for tokens, options, limit in [
        ([1, 2], {}, 4), ([3], {"max_tokens": 9}, 12), ([4], {}, 6), ([5], {"max_tokens": 99}, 20),
    ]:  # fmt: skip
        put(state, slot, tokens, **options)
        assert int(state.limit[row]) == limit
    endless = state.open()
    put(state, endless, [1])
    assert int(state.limit[state.slots.row_of(endless)]) == 20


@pytest.mark.parametrize("ready", [0, 5])
def test_what_reads_lengths_waits_for_the_steps_submitted(ready: int) -> None:
    """Fork, rewind, checkpoint, the next turn and questions; the first turn has none to ask."""
    clock = HandClock()
    state = make_state(clock=clock, max_requests=4)
    clock.submit(5)
    clock.complete(ready)
    expected = [] if ready == 5 else [5]
    slot = state.open()
    put(state, slot, [1, 2, 3])
    assert clock.waited == []
    for act in (
        lambda: state.fork(slot),
        lambda: state.rewind(slot, 2),
        lambda: state.checkpoint(slot),
        lambda: put(state, slot, [4]),
        lambda: state.length_of(slot),
        lambda: state.tokens_of(slot),
    ):
        clock.done, clock.waited = ready, []
        act()
        assert clock.waited == expected


def test_a_retired_requests_row_and_blocks_rest_until_its_steps_are_done() -> None:
    clock = HandClock()
    state = make_state(clock=clock, max_requests=1, kv_blocks=5)
    slot = state.open()
    put(state, slot, [1, 2, 3])
    assert state.blocks is not None
    old = set(state.blocks.blocks_of(0))
    clock.submit(2)
    state.retire(slot)
    clock.submit()
    assert state.blocks.free_blocks == 5
    again = state.open(max_tokens=1)
    assert clock.waited == [2]
    clock.done = 0
    put(state, again, [1])
    assert clock.waited == [2, 2]
    assert set(state.blocks.blocks_of(0)) <= old


def test_what_is_refused_takes_no_slot() -> None:
    state = make_state(fields=(Field("bias", (2,), torch.float32),))
    for options in (
        {"max_tokens": 0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"seed": -1},
        {"stop": [VOCAB]}, {"stop": range(9)}, {"fields": {"biases": 1}},
        {"fields": {"bias": [1.0, 2.0, 3.0]}}, {"fields": {"bias": "high"}},
    ):  # fmt: skip
        with pytest.raises(InvalidRequest):
            state.open(**options)
    assert state.slots.live == 0
    slot = state.open()
    assert state.slots.row_of(slot) == 0


def test_tokens_that_are_refused_leave_the_slot_as_it_was() -> None:
    state = make_state(kv_blocks=5)
    slot, other = state.open(max_tokens=2), state.open(max_tokens=9)
    put(state, slot, [1, 2, 3])
    put(state, other, [4])
    before = state.pool.arena.clone()
    for tokens, options, error in [
        ([], {}, InvalidRequest),
        ([VOCAB], {}, InvalidRequest),
        ([-1], {}, InvalidRequest),
        ([1.0], {}, InvalidRequest),
        ([True], {}, InvalidRequest),
        ([1], {"max_tokens": 0}, InvalidRequest),
        ([1] * 17, {}, ContextFull),
        ([1], {"max_tokens": 10}, BlocksExhausted),
    ]:
        with pytest.raises(error):
            state.append_tokens(slot, tokens, **options)  # type: ignore[arg-type]
        assert torch.equal(before, state.pool.arena)
        assert state.slots.rows_to_step([slot, other]) == [0, 1]
    audit(state)


def test_fields_of_a_model() -> None:
    """Set at admission, in any form that fits; reset for the next; copied with a slot."""
    fields = (
        Field("adapter", (), torch.int32, initial=-1),
        Field("bias", (2, 3), torch.float32),
        Field("allowed", (5,), torch.bool, initial=1),
    )
    state = make_state(fields=fields)
    bias = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    slot = state.open(fields={"adapter": 4, "bias": np.array(bias), "allowed": False})
    row = state.slots.row_of(slot)
    assert int(state.pool["adapter"][row]) == 4
    assert state.pool["bias"][row].tolist() == bias
    assert state.pool["allowed"][row].tolist() == [False] * 5
    target = state.slots.row_of(state.fork(slot))
    assert state.pool["bias"][target].tolist() == bias
    state.retire(slot)
    others = [state.open(fields={"bias": torch.tensor(7)}) for _ in range(2)]
    assert row in [state.slots.row_of(other) for other in others]
    for other in others:
        row = state.slots.row_of(other)
        assert int(state.pool["adapter"][row]) == -1
        assert state.pool["bias"][row].tolist() == [[7.0] * 3] * 2
        assert state.pool["allowed"][row].tolist() == [True] * 5
    assert int(state.pool["adapter"][-1]) == -1


def test_a_torn_slot_can_only_be_retired() -> None:
    state = make_state()
    slot, other = state.open(), state.open()
    put(state, slot, [1, 2, 3])
    put(state, other, [1, 2, 3])
    state.mark_torn(slot)
    for act in (
        lambda: state.fork(slot),
        lambda: state.rewind(slot, 0),
        lambda: state.checkpoint(slot),
        lambda: state.append_tokens(slot, [4]),
        lambda: state.slots.rows_to_step([other, slot]),
    ):
        with pytest.raises(PrefillFailed, match="retire"):
            act()
    audit(state)
    state.retire(slot)
    again = state.open()
    put(state, again, [5, 6])
    assert state.slots.rows_to_step([other, again])
    audit(state)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_tokens": 2},
        {"max_context": 24},
        {"schemas": (SLIDING, FULL)},
        {"schemas": (FULL, SLIDING, SLIDING)},
        {"schemas": (FULL, KVLayerSchema(1, 8, 8, window=4, dtype=torch.bfloat16))},
        {"schemas": (FULL, KVLayerSchema(1, 8, 8, window=3, rewind=2, dtype=torch.float32))},
        {"fields": (Field("adapter", (), torch.int32),)},
    ],
    ids=str,
)
def test_a_checkpoint_of_another_layout_is_refused(changes: dict[str, Any]) -> None:
    """Also where every tensor has the same size, as with a window of 3 kept in 4 rows."""
    state, other = make_state(), make_state(**changes)
    slot = state.open()
    put(state, slot, [1, 2, 3])
    checkpoint = state.checkpoint(slot).to_host()
    with pytest.raises(LayoutMismatch, match="block_tokens"):
        other.restore(checkpoint)
    assert other.slots.live == 0
    assert make_state(max_requests=7, kv_blocks=9).restore(checkpoint)


def test_a_checkpoint_is_a_copy() -> None:
    """What its slot does later, and what is restored from it, leave it as it was."""
    state = make_state()
    slot = state.open(seed=3)
    put(state, slot, [1, 2, 3, 4, 5, 6])
    poison(state, 1.0)
    with state.checkpoint(slot) as checkpoint:
        row = state.slots.row_of(slot)
        before = state.pool.arena[row].clone()
        put(state, slot, [9, 9])
        state.retire(slot)
        poison(state, 2.0)
        for _ in range(2):
            restored = state.restore(checkpoint)
            assert torch.equal(state.pool.arena[state.slots.row_of(restored)], before)
            assert state.tokens_of(restored) == [1, 2, 3, 4, 5, 6]
            put(state, restored, [7])
        audit(state, [checkpoint])
    audit(state)


def test_bytes_are_counted_to_the_last() -> None:
    state = make_state()
    row = 4 * 8 + 8 + 8 * 4 + 4 * 20 + 2 * 4 * 8 * 4
    assert state.pool.row_stride_bytes == -(-row // 256) * 256
    block = 2 * 4 * 8 * 4
    blocks = 3 * 5 + 1
    assert state.memory_bytes() == 4 * state.pool.row_stride_bytes + blocks * block + 4 * 5 * 4
    assert state.memory_bytes() == sum(
        tensor.numel() * tensor.itemsize for tensor in state.named_tensors().values()
    )


def test_layers_without_blocks_need_none() -> None:
    state = make_state(schemas=(SLIDING,))
    assert state.blocks is None
    assert list(state.named_tensors()) == ["state arena"]
    slot = state.open()
    put(state, slot, [1] * 19)
    assert state.tokens_of(state.fork(slot)) == [1] * 19


@pytest.mark.parametrize(
    "changes",
    [{"max_context": 1}, {"vocab_size": 0}, {"max_requests": 0}, {"block_tokens": 0},
     {"kv_blocks": 0}, {"fields": (Field("len", (), torch.int32),)}],
    ids=str,
)  # fmt: skip
def test_a_state_that_can_not_be(changes: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        make_state(**changes)


@pytest.mark.parametrize("rewind", [0, 4])
def test_scalars_derived_from_the_length_follow_it(rewind: int) -> None:
    """The next row of a ring of entries: after prefill, steps, rewinds, forks and restores."""
    toy = EntryDecoder(5, rewind=rewind)
    runtime = DecodeRuntime(
        toy.model(), max_requests=4, max_context=40, backend="tape", nvtx=False, prefill_chunk=3
    )
    runtime.capture(progress=False)
    layer: Any = runtime.state.layers[0].cache
    assert layer.rows == 5 + max(0, rewind - 1)

    def check(*slots: int) -> None:
        for slot in slots:
            row = runtime.state.slots.row_of(slot)
            assert int(layer.swa_head[row]) == runtime.length_of(slot) % layer.rows
        assert int(layer.swa_head[-1]) == 0

    slot = runtime.admit(list(range(1, 9)), stop=())
    check(slot)
    for _ in range(7):
        runtime.step([slot]).tokens()
        check(slot)
    runtime.rewind(slot, runtime.length_of(slot) - 1)
    check(slot)
    fork = runtime.fork(slot)
    runtime.step([fork]).tokens()
    check(slot, fork)
    with runtime.checkpoint(fork) as checkpoint:
        runtime.extend(fork, [3, 1, 4, 1, 5])
        check(slot, fork, runtime.restore(checkpoint))
