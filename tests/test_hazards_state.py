"""What broke real engines' state: each of these must be impossible here, or a named error.

Hazards 1 to 11: padding, sentinels, recycled slots, windows, copies and ways back. Silent wrong
answers come first. Everything runs on both backends; memory that nobody wrote is NaN wherever a
test can bear it.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

import capture.batch
import graphcache.batch
from capture import DecodeRuntime, Ladder
from graphcache import PAD_SLOT, Field, FinishReason, KVLayerSchema
from graphcache.errors import InvalidRequest, InvalidSlot, RewindTooFar, SlotsExhausted
from tests.books import audit, changed_bytes, poison, refused, settle, snapshot, table_of
from tests.entry_toy import EntryDecoder
from tests.history_oracle import FullHistory
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of
from tests.wide_steps import WideSteps

PROMPTS = [[5, 9, 33, 2, 7], [44], [17, 3, 3, 8, 21, 50, 6, 1], [12, 60], [4, 4, 4, 9],
           [58, 2, 30], [7, 19, 26, 40, 11, 13, 1], [20, 35]]  # fmt: skip


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


class Served:
    """A runtime of a toy decoder, its oracle, and the tokens of its requests."""

    def __init__(
        self,
        backend: str,
        windows: tuple[int | None, ...] = (None, 6),
        *,
        slots: int = 4,
        toy: ToyDecoder | None = None,
        nan: bool = True,
        capture: bool = True,
        **options: Any,
    ) -> None:
        self.toy = toy or ToyDecoder(windows, device_of(backend))
        self.oracle = FullHistory(self.toy)
        settings: dict[str, Any] = {
            "max_requests": slots,
            "max_context": 48,
            "ladder": Ladder.powers_of_two(slots),
            "block_tokens": 4,
            "nvtx": False,
        }
        self.runtime = DecodeRuntime(
            self.toy.model(fields=(Field("adapter", (3,), torch.int32),)),
            backend=backend,
            **{**settings, **options},
        )
        self.state = self.runtime.state
        if nan:
            poison(self.state)
        if capture:
            self.runtime.capture(progress=False)
        self.told: dict[int, list[int]] = {}

    def admit(self, prompt: list[int], **options: Any) -> int:
        slot = self.runtime.admit(prompt, **{"stop": (), **options})
        self.told[slot] = list(prompt)
        return slot

    def admit_all(self) -> list[int]:
        return [self.admit(PROMPTS[index]) for index in range(self.state.max_requests)]

    def row(self, slot: int) -> int:
        return self.state.slots.row_of(slot)

    def length(self, slot: int) -> int:
        settle(self.state)
        return self.state.length_of(slot)

    def step(self, slots: list[int], times: int = 1) -> None:
        """Every token the likeliest after its request's own history."""
        for _ in range(times):
            for slot, token in zip(slots, self.runtime.step(slots).tokens(), strict=True):
                self.oracle.check_greedy(self.told[slot], token)
                self.told[slot].append(token)

    def owned_bytes(self, slots: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Which bytes of arena and blocks a step of `slots` may write, scratch left out."""
        state, blocks = self.state, self.state.blocks
        settle(state)
        arena = np.zeros(state.pool.arena.shape, dtype=bool)
        cells = np.zeros((0, 0) if blocks is None else blocks.pool.arena.shape, dtype=bool)
        for slot in slots:
            row, position = self.row(slot), len(self.told[slot]) - 1
            for name in ("len", "high", "done"):
                arena[row, slice(*state.pool.byte_range(name))] = True
            start = state.pool.byte_range("tokens")[0] + 4 * (position + 1)
            arena[row, start : start + 4] = True
            for name in state.pool.fields:
                if name.startswith("layer"):
                    _mark_row(arena[row], state.pool, name, position)
            if blocks is not None:
                block = table_of(state, row)[position // blocks.block_tokens]
                for name in blocks.pool.fields:
                    _mark_row(cells[block], blocks.pool, name, position)
        return arena, cells


def _mark_row(line: np.ndarray, pool: Any, name: str, position: int) -> None:
    """Row `position % rows` of every head of a [heads, rows, dim] field."""
    field, start = pool.fields[name], pool.byte_range(name)[0]
    heads, rows, dim = field.shape
    width = dim * field.dtype.itemsize
    for head in range(heads):
        first = start + (head * rows + position % rows) * width
        line[first : first + width] = True


def _step_changes_only_owned(served: Served, slots: list[int]) -> None:
    """A step writes the rows of its own slots' new positions, and nothing else but scratch."""
    state = served.state
    arena, cells = served.owned_bytes(slots)
    before = snapshot(state)
    served.step(slots)
    after = snapshot(state)
    changed = changed_bytes(before["state arena"], after["state arena"])[:-1]
    assert not (changed & ~arena[:-1]).any(), "a step wrote into a row it does not own"
    for slot in slots:
        assert changed[served.row(slot)].any()
    if state.blocks is not None:
        changed = changed_bytes(before["K/V blocks"], after["K/V blocks"])[:-1]
        assert not (changed & ~cells[:-1]).any(), "a step wrote into a block it does not own"
        assert torch.equal(before["block tables"], after["block tables"])


# --- 1: padding used as an index ------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None, 6), (None,), (6,)])
@pytest.mark.parametrize("active", [[0], [3], [1, 2], [2, 0, 3], [3, 2, 1, 0]])
def test_1_padding_writes_no_slot(
    backend: str, windows: tuple[int | None, ...], active: list[int]
) -> None:
    """Every slot is live, the last one too, where a raw -1 would lead."""
    served = Served(backend, windows, ladder=Ladder([4]))
    slots = served.admit_all()
    for turn in range(9):
        order = active[turn % len(active) :] + active[: turn % len(active)]
        _step_changes_only_owned(served, [slots[index] for index in order])


def test_1_a_replay_of_padding_alone_writes_nothing(backend: str) -> None:
    served = Served(backend)
    slots = [served.admit(PROMPTS[index], max_tokens=1) for index in range(4)]
    served.step(slots)
    before = snapshot(served.state)
    for asked in (slots, slots[2:], slots[:1], slots[::-1][:3]):
        result = served.runtime.step(asked)
        assert result.tokens() == [-1] * len(asked)
        assert result.reasons == [FinishReason.LENGTH] * len(asked)
    after = snapshot(served.state)
    assert torch.equal(before["state arena"][:-1], after["state arena"][:-1])
    assert torch.equal(before["K/V blocks"][:-1], after["K/V blocks"][:-1])
    assert int(served.state.len[-1]) == 0


# --- 2: capture into rows that requests may own ---------------------------------------------------


@pytest.mark.parametrize("windows", [(None, 6), (6,)])
def test_2_capture_leaves_every_row_as_it_was(
    backend: str, windows: tuple[int | None, ...]
) -> None:
    """Live, resting and free rows, bit for bit; and requests go on as if nothing had been."""
    served = Served(backend, windows, capture=False)
    slots = [served.admit(PROMPTS[index]) for index in range(3)]
    served.runtime.retire(slots.pop(1))
    before = snapshot(served.state)
    served.runtime.capture(progress=False)
    for tensors in (snapshot(served.state),):
        for name, tensor in tensors.items():
            assert torch.equal(before[name][:-1], tensor[:-1]), name
    served.step(slots, 8)
    before = snapshot(served.state)
    served.runtime.capture(progress=False)
    after = snapshot(served.state)
    for name, tensor in after.items():
        assert torch.equal(before[name][:-1], tensor[:-1]), name
    served.step(slots, 8)
    audit(served.state)


# --- 3: a sentinel that is also a slot ------------------------------------------------------------


def test_3_scratch_is_nobodys(backend: str) -> None:
    served = Served(backend, kv_blocks=13)
    slots = [served.admit(PROMPTS[index], max_tokens=4) for index in range(4)]
    state = served.state
    rows = {served.row(slot) for slot in slots}
    assert rows == {0, 1, 2, 3}
    assert state.pool.scratch_row == 4 == state.len.shape[0] - 1
    with pytest.raises(SlotsExhausted):
        served.runtime.admit([1], max_tokens=1)
    served.runtime.extend(slots[1], [9], max_tokens=21)
    assert state.blocks is not None
    used = [block for row in rows for block in table_of(state, row)]
    assert sorted(used) == list(range(13)), "every block is used, and scratch's is not among them"
    scratch_handle = served.state.slots._generation[0] << 20 | state.pool.scratch_row
    for wrong in (PAD_SLOT, state.pool.scratch_row, scratch_handle, *rows):
        with refused(served.runtime, InvalidSlot):
            served.runtime.step([wrong])
        with refused(served.runtime, InvalidSlot):
            served.runtime.retire(wrong)


def test_3_one_sentinel() -> None:
    assert capture.batch.PAD_SLOT is graphcache.batch.PAD_SLOT is PAD_SLOT
    assert PAD_SLOT == -1


# --- 4 and 5: padding that aliases a live, or a departed, request ---------------------------------


def test_4_a_parked_request_is_left_alone(backend: str) -> None:
    """All slots live, three of four active, each parked in turn: bytes stay, and so does its
    answer."""
    served = Served(backend)
    slots = served.admit_all()
    for parked in slots:
        active = [slot for slot in slots if slot != parked]
        before = snapshot(served.state)["state arena"][served.row(parked)]
        for _ in range(3):
            _step_changes_only_owned(served, active)
        assert torch.equal(before, snapshot(served.state)["state arena"][served.row(parked)])
        served.step([parked], 2)


@pytest.mark.parametrize("windows", [(3, 6), (None, 3)])
def test_5_a_batch_of_eight_then_five(backend: str, windows: tuple[int | None, ...]) -> None:
    """What departed requests had in rings and blocks is untouched until someone is admitted."""
    served = Served(backend, windows, slots=8)
    slots = served.admit_all()
    served.step(slots, 7)
    departed = [slots[index] for index in (1, 4, 7)]
    rows = [served.row(slot) for slot in departed]
    blocks = [b for row in rows for b in table_of(served.state, row)] if None in windows else []
    for slot in departed:
        slots.remove(slot)
        served.runtime.retire(slot)
    before = snapshot(served.state)
    served.step(slots, 9)
    after = snapshot(served.state)
    assert torch.equal(before["state arena"][rows], after["state arena"][rows])
    if blocks:
        assert torch.equal(before["K/V blocks"][blocks], after["K/V blocks"][blocks])
    newcomers = [served.admit(PROMPTS[index]) for index in (2, 0, 6)]
    assert sorted(served.row(slot) for slot in newcomers) == sorted(rows)
    served.step([*newcomers, *slots], 9)


# --- 6: NaN from padding --------------------------------------------------------------------------


@pytest.mark.parametrize("scratch", [float("nan"), float("inf"), 0.0])
def test_6_padding_that_is_not_finite_reaches_nobody(backend: str, scratch: float) -> None:
    """A padding row's token is 0: its embedding is NaN, so all of the row is, through every layer;
    scratch rows hold what they may."""
    toy = ToyDecoder((None, 6), device_of(backend))
    toy.embedding[0] = float("nan")
    toy.head[0] = 0.0
    served = Served(backend, toy=toy, nan=False, slots=8, ladder=Ladder([8]))
    state = served.state
    assert state.blocks is not None
    for pool in (state.pool, state.blocks.pool):
        for name in pool.fields:
            if name.startswith("layer"):
                pool[name][-1] = scratch
    settle(state)
    served.runtime.capture(progress=False)
    slots = [served.admit(PROMPTS[index]) for index in range(3)]
    for order in ([0, 1, 2], [2], [1, 0]):
        served.step([slots[index] for index in order], 8)
        settle(state)
        ring = served.runtime._mailbox.ring_tokens
        emitted = ring[served.runtime._clock.submitted % ring.shape[0]]
        assert emitted[len(order) : 8].tolist() == [-1] * (8 - len(order))
    for pool in (state.pool, state.blocks.pool):
        for name in pool.fields:
            if name.startswith("layer"):
                assert pool[name][:-1].isfinite().all(), f"{name} of a real row is not finite"


# --- 7: lengths at capture ------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None, 6), (None,), (6,)])
def test_7_capture_at_lengths_zero_one_and_the_most(
    backend: str, windows: tuple[int | None, ...]
) -> None:
    """What a slot's length is when its step is captured must not matter, at either end."""
    context = 20
    served = Served(backend, windows, slots=6, max_context=context, capture=False)
    none, one = served.admit([31]), served.admit([31, 8])
    last = served.admit([(3 * index) % VOCAB for index in range(context - 1)])
    full = served.admit([(5 * index) % VOCAB for index in range(context - 1)])
    result = served.runtime.step([full], eager=True)
    assert result.reasons == [FinishReason.CONTEXT]
    fresh = served.runtime.open()
    settle(served.state)
    assert served.state.len[:5].tolist() == [0, 1, context - 2, context - 1, 0]
    before = snapshot(served.state)
    served.runtime.capture(progress=False)
    after = snapshot(served.state)
    for name in before:
        assert torch.equal(before[name][:-1], after[name][:-1]), name
    result = served.runtime.step([none, last, full, one])
    assert result.reasons == [0, FinishReason.CONTEXT, FinishReason.CONTEXT, 0]
    for slot, token in zip((none, last, one), np.array(result.tokens())[[0, 1, 3]], strict=True):
        served.oracle.check_greedy(served.told[slot], int(token))
        served.told[slot].append(int(token))
    assert result.tokens()[2] == -1
    served.step([one, none], 12)
    served.runtime.extend(fresh, [9, 1, 30])
    served.told[fresh] = [9, 1, 30]
    served.step([fresh, one, none], 3)


# --- 8: windows off by one ------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 20])
def test_8_a_window_through_two_wraps(backend: str, window: int, prompt: int) -> None:
    """From prompts shorter than the window, as long, and longer, in chunks that are not."""
    served = Served(
        backend, (window, None), slots=2, max_context=64, prefill_chunk=5, ladder=Ladder([2])
    )
    slot = served.admit([(7 * index + 1) % VOCAB for index in range(prompt)])
    while len(served.told[slot]) < min(62, prompt + 2 * window + 3):
        served.step([slot])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("windows", "q", "k"),
    [
        ((1,), 1, 0), ((1, 4), 2, 1), ((3,), 2, 0), ((3, None), 4, 5), ((5,), 3, 2),
        ((8, 3), 4, 2), ((8, None, 5), 3, 3), ((6,), 1, 5), ((7,), 4, 0),
    ],
)  # fmt: skip
def test_8_and_11_wide_steps_partial_accepts_and_repeated_rewinds(
    backend: str, windows: tuple[int | None, ...], q: int, k: int, seed: int
) -> None:
    """Drafts that are rejected overwrite rows too: what may be gone back to counts from them."""
    rng = random.Random(1000 * seed + 10 * q + k)
    wide = WideSteps(windows, q, k, device_of(backend))
    slots = [wide.admit(PROMPTS[index]) for index in rng.sample(range(8), 3)]
    for _ in range(16):
        runs = {}
        for slot in rng.sample(slots, rng.randint(1, 3)):
            count = rng.randint(1, q)
            runs[slot] = (count, rng.randint(0, count))
        wide.step(runs, q, padding=[rng.randint(0, len(runs))] * rng.randint(0, 1))
        while rng.random() < 0.4:
            slot = rng.choice(slots)
            length = wide.stories[slot].length
            back = rng.randint(0, 2 * k + 4)
            wide.rewind(slot, max(0, length - back))
            if rng.random() < 0.3 and length < 70:
                wide.extend(slot, rng.sample(range(VOCAB), rng.randint(1, 4)))


def test_11_how_far_back_counts_from_the_highest_position_ever_written(backend: str) -> None:
    """After a way back and a short new turn, rows of the old continuation are still overwritten."""
    wide = WideSteps([8], 1, 5, device_of(backend))
    slot = wide.admit([(3 * index + 1) % VOCAB for index in range(21)])
    assert wide.rewind(slot, 15)
    wide.extend(slot, [44])
    assert not wide.rewind(slot, 12)
    wide.step({slot: (1, 1)}, 1)
    assert wide.rewind(slot, 15)
    wide.step({slot: (1, 1)}, 1)


class OneRowShort(KVLayerSchema):
    """A ring with one row fewer than its promise needs."""

    def ring_rows(self, max_context: int) -> int:
        return super().ring_rows(max_context) - 1


@pytest.mark.parametrize(
    ("window", "q", "k"), list(itertools.product([3, 8], [1, 2, 4], [0, 1, 3]))
)
def test_8_one_row_fewer_breaks_a_read_or_a_promise(
    backend: str, window: int, q: int, k: int
) -> None:
    """The same widest step and promised rewind: right with R rows, never with R - 1."""

    def widest_step_and_rewind(schema: type[KVLayerSchema]) -> None:
        wide = WideSteps([window], q, k, device_of(backend), schema)
        slot = wide.admit([(3 * index + 2) % VOCAB for index in range(2 * window)])
        for _ in range(window + 1):
            wide.step({slot: (1, 1)}, 1)
        wide.step({slot: (q, 1)}, q)
        assert wide.rewind(slot, wide.stories[slot].length - k)
        wide.step({slot: (1, 1)}, 1)

    widest_step_and_rewind(KVLayerSchema)
    what = "a read was wrong" if k <= 1 else "a promised rewind was refused"
    with pytest.raises(AssertionError, match=what):
        widest_step_and_rewind(OneRowShort)


# --- 9: recycled slots ----------------------------------------------------------------------------


def _reset_fields(served: Any, slot: int) -> dict[str, Any]:
    state = served.state
    settle(state)
    row = state.slots.row_of(slot)
    return {
        name: state.pool[name][row].tolist()
        for name, field in state.pool.fields.items()
        if field.reset
    }


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_9_a_recycled_slot_is_as_good_as_new(backend: str, temperature: float) -> None:
    """The request before had every option set, wrapped its rings and was rewound. The next has
    none, and must equal a request in a pool nobody used: scalars, tokens and draws."""
    used, fresh = (Served(backend, (None, 6, 3), slots=1) for _ in range(2))
    before = used.admit(
        list(range(1, 22)), max_tokens=9, temperature=0.8, top_k=3, top_p=0.7, seed=77,
        stop=range(8), fields={"adapter": [4, 5, 6]},
    )  # fmt: skip
    for _ in range(7):
        used.runtime.step([before]).tokens()
    used.runtime.rewind(before, used.length(before))
    used.runtime.retire(before)
    options = {"temperature": temperature, "seed": 5}
    slots = [served.admit([9, 30, 2], **options) for served in (used, fresh)]
    answers = []
    for served, slot in zip((used, fresh), slots, strict=True):
        start = _reset_fields(served, slot)
        assert start["adapter"] == [0, 0, 0]
        assert start["stop"] == [-1] * 8
        assert (start["top_k"], start["top_p"], start["done"]) == (0, 1.0, 0)
        tokens = [served.runtime.step([slot]).tokens()[0] for _ in range(30)]
        answers.append((start, tokens, _reset_fields(served, slot)))
    assert answers[0] == answers[1]


def test_9_a_recycled_ring_starts_at_its_own_beginning(backend: str) -> None:
    """The window of entries keeps its next row as a scalar: the phase of TensorRT-LLM#14509."""
    toy = EntryDecoder(5, device_of(backend), rewind=3)

    def served() -> DecodeRuntime:
        runtime = DecodeRuntime(
            toy.model(), max_requests=2, max_context=64, backend=backend, nvtx=False
        )
        layer: Any = runtime.state.layers[0].cache
        layer.swa_inv.fill_(float("nan"))
        layer.swa_rope.fill_(float("nan"))
        settle(runtime.state)
        runtime.capture(progress=False)
        return runtime

    used, fresh = served(), served()
    for _ in range(2):
        slot = used.admit([(11 * index) % VOCAB for index in range(17)], stop=())
        for _ in range(4):
            used.step([slot]).tokens()
        used.retire(slot)
    answers = []
    for runtime in (used, fresh):
        slot = runtime.admit([8, 30, 41], stop=())
        tokens, heads = [], []
        for _ in range(20):
            tokens += runtime.step([slot]).tokens()
            settle(runtime.state)
            layer: Any = runtime.state.layers[0].cache
            row = runtime.state.slots.row_of(slot)
            heads.append(int(layer.swa_head[row]))
            assert heads[-1] == runtime.length_of(slot) % layer.rows
        answers.append((tokens, heads, layer.swa_pos[row].tolist()))
    assert answers[0] == answers[1]


# --- 10: copies that leave something out ----------------------------------------------------------


def _all_of(served: Served, slot: int) -> dict[str, Any]:
    """Everything a slot owns: every field of its row, and K and V of each absorbed position."""
    state = served.state
    settle(state)
    row = state.slots.row_of(slot)
    owned: dict[str, Any] = {
        name: state.pool[name][row].cpu().contiguous().view(-1).view(torch.uint8).tolist()
        for name in state.pool.fields
    }
    if state.blocks is not None:
        size = state.blocks.block_tokens
        for position in range(int(state.len[row])):
            block = table_of(state, row)[position // size]
            for name in state.blocks.pool.fields:
                line = state.blocks.pool[name][block, :, position % size]
                owned[f"{name} at {position}"] = line.tolist()
    return owned


@pytest.mark.parametrize("length", [1, 4, 5, 8, 13])
@pytest.mark.parametrize("how", ["fork", "restore", "restore from host", "move", "move from host"])
def test_10_a_copy_carries_everything(backend: str, how: str, length: int) -> None:
    """Rows, scalars, options, the model's fields, tokens and blocks; then both go their ways."""
    served, other = Served(backend, kv_blocks=48), Served(backend, kv_blocks=48)
    parent = served.admit(
        [(5 * index + 3) % VOCAB for index in range(length)],
        max_tokens=30, temperature=0.0, top_k=7, top_p=0.9, seed=11, fields={"adapter": [7, 8, 9]},
    )  # fmt: skip
    served.step([parent], 3)
    there = served
    if how == "fork":
        child = served.runtime.fork(parent, seed=11)
    else:
        there = other if "move" in how else served
        with served.runtime.checkpoint(parent) as checkpoint:
            if "host" in how:
                checkpoint.to_host()
            child = there.runtime.restore(checkpoint)
    assert _all_of(served, parent) == _all_of(there, child)
    there.told[child] = list(served.told[parent])
    for serving, slot, token in ((served, parent, 19), (there, child, 43)):
        serving.runtime.extend(slot, [token, token + 1])
        serving.told[slot] += [token, token + 1]
        serving.step([slot], 2)
    if there is served:
        served.step([child, parent], 6)
    else:
        served.step([parent], 6)
        there.step([child], 6)
    audit(there.state)


def test_10_a_fork_draws_by_the_same_rules(backend: str) -> None:
    """With its parent's seed it draws what its parent draws; with none given, something else."""
    served = Served(backend, slots=4)
    options = {"temperature": 3.0, "top_k": 20, "top_p": 0.95}
    parent = served.admit([3, 8, 1], seed=9, **options)
    served.runtime.step([parent]).tokens()
    twin, stranger = served.runtime.fork(parent, seed=9), served.runtime.fork(parent)
    drawn: list[list[int]] = [
        served.runtime.step([parent, twin, stranger]).tokens() for _ in range(25)
    ]
    ours, twins, strangers = (list(line) for line in zip(*drawn, strict=True))
    assert ours == twins
    assert ours != strangers


def test_10_a_fork_in_mid_prompt(backend: str) -> None:
    served = Served(backend, prefill_chunk=3)
    slot = served.runtime.open(stop=())
    served.runtime.extend(slot, [5, 1, 9, 30, 22, 7], final=False)
    child = served.runtime.fork(slot)
    for mine, rest in ((slot, [4, 2]), (child, [50])):
        served.runtime.extend(mine, rest)
        served.told[mine] = [5, 1, 9, 30, 22, 7, *rest]
    served.step([child, slot], 8)


def test_10_a_copy_of_entries(backend: str) -> None:
    """A window of FP8 entries, its tags and its next row."""
    toy = EntryDecoder(5, device_of(backend))
    runtime = DecodeRuntime(
        toy.model(), max_requests=4, max_context=64, backend=backend, nvtx=False
    )
    runtime.capture(progress=False)
    parent = runtime.admit([4, 19, 2, 33, 7, 7, 40], stop=())
    for _ in range(6):
        runtime.step([parent]).tokens()
    with runtime.checkpoint(parent) as checkpoint:
        copies = [runtime.fork(parent), runtime.restore(checkpoint)]
    layer: Any = runtime.state.layers[0].cache
    for _ in range(9):
        tokens = runtime.step([parent, *copies]).tokens()
        assert tokens == [tokens[0]] * 3
        settle(runtime.state)
        rows = [runtime.state.slots.row_of(slot) for slot in (parent, *copies)]
        for name in ("swa_pos", "swa_head", "swa_fp8", "swa_inv"):
            lines = getattr(layer, name)[rows]
            assert (lines == lines[:1]).all(), name


# --- 11: rewinds that do nothing, or go too far ---------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (None, 12), (12, 9)])
@pytest.mark.parametrize("back", [0, 1, 2, 4, 5, 8])
def test_11_what_was_rewound_is_gone(
    backend: str, windows: tuple[int | None, ...], back: int
) -> None:
    """Another continuation then, against its own history: nothing of the first may be seen."""
    served = Served(backend, windows)
    slots = [served.admit(PROMPTS[2]), served.admit(PROMPTS[6])]
    served.step(slots, 3 if windows[-1] == 12 and back > 3 else 9)
    slot = slots[0]
    length = served.length(slot) - back
    kept = len(served.told[slot]) - back
    rows = [window for window in windows if window is not None]
    if any(max(0, length - window + 1) < length + back - window for window in rows):
        with refused(served.runtime, RewindTooFar):
            served.runtime.rewind(slot, length)
        served.step(slots, 2)
        return
    served.runtime.rewind(slot, length)
    served.told[slot] = served.told[slot][:kept]
    assert served.runtime.tokens_of(slot) == served.told[slot]
    served.runtime.extend(slot, [51, 3])
    served.told[slot] += [51, 3]
    served.step(slots[::-1], 9)


@pytest.mark.parametrize("who", ["parent", "child", "both"])
def test_11_fork_then_rewind_either_side_and_append_to_both(backend: str, who: str) -> None:
    """At every place in shared blocks, at their edges, and before them."""
    for back in range(11):
        served = Served(backend, (None,), slots=2, ladder=Ladder([2]))
        parent = served.admit([(3 * index + 1) % VOCAB for index in range(10)])
        served.step([parent], 1)
        child = served.runtime.fork(parent)
        served.told[child] = list(served.told[parent])
        pair = {"parent": parent, "child": child}
        for name in ("parent", "child"):
            if who in (name, "both"):
                served.runtime.rewind(pair[name], 10 - back)
                served.told[pair[name]] = served.told[pair[name]][: 11 - back]
                audit(served.state)
        for slot, token in ((parent, 20), (child, 30)):
            served.runtime.extend(slot, [token, token + 1, token + 2])
            served.told[slot] += [token, token + 1, token + 2]
        served.step([child, parent], 5)
        audit(served.state)
        served.runtime.close()


def test_11_a_rewind_beyond_the_present_is_refused(backend: str) -> None:
    served = Served(backend)
    slot = served.admit(PROMPTS[2])
    served.step([slot], 2)
    length = served.length(slot)
    for wrong in (length + 1, 10**6, -1, True, 2.0, None, "3"):
        with refused(served.runtime, InvalidRequest):
            served.runtime.rewind(slot, wrong)  # type: ignore[arg-type]
    fresh = served.runtime.open()
    with refused(served.runtime, InvalidRequest):
        served.runtime.rewind(fresh, 0)
    served.step([slot], 2)


def test_11_a_refusal_says_what_is_missing(backend: str) -> None:
    served = Served(backend)
    slot = served.admit([(3 * index + 1) % VOCAB for index in range(20)])
    with refused(
        served.runtime, RewindTooFar, "ring of 6 rows, written up to position 18, keeps positions "
        "from 13 on, and 5 is needed",
    ):  # fmt: skip
        served.runtime.rewind(slot, 10)
    served.step([slot], 4)


@pytest.mark.parametrize("windows", [(None,), (6,)])
def test_11_a_spent_budget_stays_spent(backend: str, windows: tuple[int | None, ...]) -> None:
    """Nothing is reserved beyond the budget: going on there would write blocks of nobody's."""
    served = Served(backend, windows, nan=False)
    slots = [served.admit(PROMPTS[3], max_tokens=3), served.admit(PROMPTS[7], max_tokens=3)]
    served.step(slots, 3)
    assert served.runtime.step(slots).reasons == [FinishReason.LENGTH] * 2
    for slot in slots:
        served.runtime.rewind(slot, served.length(slot))
    before = snapshot(served.state)
    result = served.runtime.step(slots)
    assert result.tokens() == [-1, -1]
    assert result.reasons == [FinishReason.LENGTH] * 2
    after = snapshot(served.state)
    for name in before:
        assert torch.equal(before[name], after[name]), f"{name} was written, scratch perhaps"
    for slot in slots:
        served.runtime.rewind(slot, served.length(slot) - 1)
        served.told[slot].pop()
    served.step(slots)
    assert served.runtime.step(slots).tokens() == [-1, -1]
