"""Hazards 8 to 12 where tokens are compressed: windows, tails, entries, and copies of all of them.

As `tests.test_hazards_state` for K and V. Every request is held against its whole history in
float64 at each token (`tests.entry_requests`), in memory that is NaN to begin with; what is asked
here besides is said test by test.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache import AttentionType, LayerCacheSchema
from graphcache.errors import SchemaError
from graphcache.rows import RowFormat
from graphcache.schema import IndexerSchema
from tests.books import audit, changed_bytes, snapshot, table_of
from tests.entry_requests import EntryRequests
from tests.test_entry_faults import ShortTail, ShortWindow, edited, function_of, put_for
from tests.test_entry_state import Layout, on_devices

LAYOUT = Layout(window=5, hca=2, csa=4, indexed=2, q=2, k=1)
FORMATS = [RowFormat.FP32, RowFormat.BF16, RowFormat.FP8, RowFormat.MODEL1]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def _of_format(layout: Layout, row_format: RowFormat) -> Layout:
    dims = (512, 64) if row_format is RowFormat.MODEL1 else layout.dims
    return replace(layout, row_format=row_format, dims=dims)


def _world(layout: Layout, seed: int, device: str, **options: Any) -> EntryRequests:
    """Of two layers, HCA and CSA that selects: they have every kind of ring and row."""
    return replace(layout, layers=(1, 3)).world(seed, device=device, **options)


def _grow(world: EntryRequests, handle: int, length: int) -> None:
    while world.stories[handle].length < length:
        world.step({handle: (1, 1)}, 1)


# --- 8: windows and tails off by one --------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "m", "q", "device"),
    on_devices([(*sizes, q) for sizes in [(3, 4), (5, 4), (4, 3)] for q in (1, 2, 3, 4)], every=5),
)
def test_8_windows_and_tails_through_two_wraps(window: int, m: int, q: int, device: str) -> None:
    """From prompts a token shorter than the window, as long, and a token longer."""
    layout = Layout(window, m, m, m, q, k=1)
    world = _world(layout, q, device)
    prompts = [window - 1, window, window + 1]
    handles = [world.admit(prompt, chunk=m) for prompt in prompts]
    end = max(prompts) + 2 * max(itertools.chain(*world.ring_rows)) + 1
    accepts = itertools.cycle([q, 1, q, max(1, q - 1)])
    while min(world.stories[handle].length for handle in handles) < end:
        world.step(dict.fromkeys(handles, (q, next(accepts))), q)
    world.check_all()


class Ring(NamedTuple):
    """A layer whose other rings are no shorter than this one."""

    kind: AttentionType
    window: int
    options: dict[str, Any]
    short: type[LayerCacheSchema]


INDEXER = IndexerSchema(3, 16, 3, RowFormat.FP32)
WINDOW = Ring(AttentionType.SWA, 5, {}, ShortWindow)
TAILS = {
    "plain": Ring(AttentionType.HCA, 1, {"compression": 4}, ShortTail),
    "overlap": Ring(AttentionType.CSA, 1, {"compression": 3}, ShortTail),
    "indexer": Ring(AttentionType.CSA, 1, {"compression": 2, "indexer": INDEXER}, ShortTail),
}
WRONG = "a read was wrong|a stored row is wrong"


def _one_layer(ring: Ring, q: int, k: int, *, short: bool) -> EntryRequests:
    """A request that has filled its rings."""
    schema = (ring.short if short else LayerCacheSchema)(
        ring.kind, ring.window, 24, 8, step_width=q, rewind=k, row_format=RowFormat.FP32,
        **ring.options,
    )  # fmt: skip
    world = EntryRequests([schema], seed=q, block_tokens=12, slots=1, context=96, copies=0)
    _grow(world, world.admit(2), max(world.ring_rows[0]) + 1)
    return world


def _widest_steps(world: EntryRequests) -> None:
    """At each phase of a block: the widest step, of which a token is taken, and the way back."""
    [handle] = world.stories
    for _ in range(world.schemas[0].compression or 1):
        start = world.stories[handle].length
        world.step({handle: (world.q, 1)}, world.q)
        assert world.rewind(handle, start + 1 - world.k)
        _grow(world, handle, start + 1)


def _any_rewind(patch: pytest.MonkeyPatch, world: EntryRequests) -> None:
    """Done, whatever rings still hold."""
    patch.setattr("graphcache.decode_state.check_rewind", lambda *_: None)
    patch.setattr(world, "may_rewind", lambda *_: True)


@pytest.mark.parametrize("q", [1, 3])
@pytest.mark.parametrize("ring", [WINDOW, *TAILS.values()], ids=["window", *TAILS])
def test_8_one_row_fewer_breaks_a_promise(
    ring: Ring, q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granted with R rows, refused with R - 1; and rightly so: done all the same, it misreads."""
    _widest_steps(_one_layer(ring, q, k=3, short=False))
    with pytest.raises(AssertionError, match="a promised rewind was refused"):
        _widest_steps(_one_layer(ring, q, k=3, short=True))
    short = _one_layer(ring, q, k=3, short=True)
    _any_rewind(monkeypatch, short)
    with pytest.raises(AssertionError, match=WRONG):
        _widest_steps(short)


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("q", [2, 4])
def test_8_one_row_fewer_breaks_a_read_of_the_window(q: int, k: int) -> None:
    _widest_steps(_one_layer(WINDOW, q, k, short=False))
    with pytest.raises(AssertionError, match=WRONG):
        _widest_steps(_one_layer(WINDOW, q, k, short=True))


def _tails_are_written_first(patch: pytest.MonkeyPatch) -> None:
    """The other order that rings allow, and no check of how long they are.

    All rows of a step go into the rings before any is read, and all are read from there.
    """
    append = function_of("append_tail")
    emit = edited(function_of("emit_entries"), ("if x >= run_start:", "if False:"))

    def write_and_emit(parts: Any, cos: Tensor, sin: Tensor, eps: float, *batch: Any) -> None:
        _, slots, positions, q_len = batch
        append(parts, slots, positions, q_len)
        emit(parts, cos, sin, eps, *batch)

    put_for(patch, function_of("emit_entries"), write_and_emit)
    put_for(patch, function_of("check_compressor"), lambda *_, **__: None)


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("q", [1, 3])
@pytest.mark.parametrize("ring", TAILS.values(), ids=TAILS)
def test_8_one_row_fewer_breaks_a_read_of_a_tail(
    ring: Ring, q: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R rows can be written first, as a kernel's programs may; R - 1 are refused for that."""
    with pytest.raises(SchemaError, match=r"a step of \d tokens a slot needs \d+ rows"):
        _widest_steps(_one_layer(ring, q, k, short=True))
    _tails_are_written_first(monkeypatch)
    _widest_steps(_one_layer(ring, q, k, short=False))
    with pytest.raises(AssertionError, match=WRONG):
        _widest_steps(_one_layer(ring, q, k, short=True))


# --- 9: recycled slots ----------------------------------------------------------------------------


def _entries(world: EntryRequests, handle: int) -> list[Tensor]:
    """Every byte of the compressed entries and index keys that a request's last token sees."""
    row, length, found = world.row(handle), world.stories[handle].length, []
    for layer in world.layers:
        for rows in (layer.entries, layer.keys):
            for part in () if rows is None else rows.parts():
                seen = part[layer.table[row].long()].flatten(0, 1)
                found.append(seen[: length // layer.schema.compression])
    return found


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


@pytest.mark.parametrize("row_format", FORMATS)
def test_9_a_recycled_slot_is_as_good_as_new(row_format: RowFormat, device: str) -> None:
    """Bit for bit, though nobody wiped it; also where a prompt is shorter than a block.

    Then the first block has no previous one, and the ring holds one of the earlier request.
    """
    layout = _of_format(LAYOUT, row_format)
    used = _world(layout, 3, device, slots=1, copies=0)
    earlier = used.admit(30, chunk=19)
    for prompt in (1, 3, 14, 4):
        used.retire(earlier)
        used.clock.complete()
        fresh = _world(layout, 3, device, slots=1, copies=0)
        both = [(world, world.open(seed=prompt)) for world in (used, fresh)]
        for world, handle in both:
            world.extend(handle, prompt)
        for number in range(5):
            for world, handle in both:
                if world.stories[handle].pending:
                    world.chunk({handle: min(5, len(world.stories[handle].pending))})
                else:
                    world.step({handle: (2, 1 + number % 2)}, 2)
            assert _same(*(world.seen.outputs[handle] for world, handle in both))
            assert _same(*(_entries(world, handle) for world, handle in both))
        [(_, earlier), _] = both


# --- 10: copies -----------------------------------------------------------------------------------


def _copied(world: EntryRequests, handle: int, how: str) -> int:
    if how == "fork":
        return world.fork(handle)
    world.checkpoint(handle, to_host=how == "restore from host")
    return world.restore(0)


@pytest.mark.parametrize("how", ["fork", "restore", "restore from host"])
@pytest.mark.parametrize("row_format", [RowFormat.FP32, RowFormat.FP8])
def test_10_a_copy_carries_everything(row_format: RowFormat, how: str, device: str) -> None:
    """At any length, into a slot and blocks that others have used: it goes on bit for bit alike."""
    world = _world(_of_format(LAYOUT, row_format), 1, device, slots=2, copies=1)
    earlier = world.admit(24)
    for length in (1, 7, 8, 15):
        world.retire(earlier)
        handle = world.admit(length + 1, chunk=9)
        copy = _copied(world, handle, how)
        if world.saved:
            world.release(0)
        rows = world.state.pool.arena[[world.row(handle), world.row(copy)]]
        rows[:, slice(*world.state.pool.byte_range("seed"))] = 0
        assert torch.equal(*rows)
        assert _same(_entries(world, handle), _entries(world, copy))
        for one in (handle, copy):
            world.stories[one].vectors = np.random.default_rng(length)
        for accepted in (2, 1, 2):
            for one in (handle, copy):
                world.step({one: (2, accepted)}, 2)
            assert _same(*(world.seen.outputs[one] for one in (handle, copy)))
        assert _same(_entries(world, handle), _entries(world, copy))
        world.check_all()
        world.retire(handle)
        earlier = copy


def test_10_a_fork_in_mid_prompt(device: str) -> None:
    """With a block half filled and tokens of the prompt to come, which are the fork's own."""
    world = _world(LAYOUT, 2, device)
    handle = world.open()
    world.extend(handle, 20)
    world.chunk({handle: 7})
    forked = world.fork(handle)
    world.chunk({handle: 3})
    world.extend(forked, 6)
    pair = [handle, forked]
    while any(world.stories[one].pending for one in pair):
        left = {one: len(world.stories[one].pending) for one in pair}
        world.chunk({one: min(4, count) for one, count in left.items() if count})
    for _ in range(5):
        world.step(dict.fromkeys(pair, (2, 2)), 2, padding=[1])
    world.check_all()
    audit(world.state)


# --- 11: ways back --------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["parent", "child", "both"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_11_fork_then_rewind_either_side_and_append_to_both(
    blocks: int, who: str, device: str
) -> None:
    """Both have gone on by themselves; back go they into blocks, to edges, and into shared ones."""
    layout = replace(LAYOUT, k=9, blocks=blocks)
    for back in (2, 3, 9):
        world = _world(layout, back, device)
        parent = world.admit(14)
        child = world.fork(parent)
        shared = table_of(world.state, world.row(parent))[0]
        assert shared == table_of(world.state, world.row(child))[0], "nothing is shared"
        world.step({parent: (2, 2), child: (2, 2)}, 2)
        world.check_all()
        for one in {"parent": [parent], "child": [child], "both": [parent, child]}[who]:
            assert world.rewind(one, 15 - back)
        world.step({parent: (1, 1)}, 1)
        world.check_all()
        for accepted in (1, 2, 2, 1):
            world.step({child: (2, accepted), parent: (2, 2)}, 2)
        world.check_all()
        audit(world.state)


def _worn(world: EntryRequests) -> int:
    """A request with drafts behind its length, after ways back and a prompt longer than a ring."""
    handle = world.admit(18)
    world.step({handle: (3, 3)}, 3)
    world.step({handle: (3, 1)}, 3)
    world.step({handle: (3, 2)}, 3)
    assert world.rewind(handle, world.stories[handle].length - 1)
    world.step({handle: (2, 1)}, 2)
    return handle


@pytest.mark.parametrize("seed", range(2))
def test_11_a_rewind_is_exact_or_refused(
    seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To every length there is: granted, it goes on as if nothing had been; else it must not."""
    layout = Layout(*((5, 8, 4, 8, 3, 2), (1, 2, 4, 4, 3, 2))[seed])
    world = _world(layout, seed, device)
    handle = _worn(world)
    length = world.stories[handle].length
    exact = []
    for back in range(length + 1):
        copy = world.fork(handle)
        if world.rewind(copy, length - back):
            exact.append(back)
            _grow(world, copy, length - back + world.whole)
        elif back < 12:
            with monkeypatch.context() as patch:
                _any_rewind(patch, world)
                world.rewind(copy, length - back)
                with pytest.raises(AssertionError, match=WRONG):
                    _grow(world, copy, length - back + world.whole)
        world.retire(copy)
        world.clock.complete()
    assert {0, 1, length} <= set(exact) and len(exact) < length // 2
    world.step({handle: (3, 3)}, 3)


# --- 12: rows that do not emit --------------------------------------------------------------------


@pytest.mark.parametrize("row_format", FORMATS)
def test_12_tokens_that_complete_no_block_write_none(row_format: RowFormat, device: str) -> None:
    """Not a byte of any block, scratch included; in steps and in chunks, whatever pads them."""
    layout = _of_format(Layout(window=5, hca=4, csa=2, indexed=2, q=3, k=0), row_format)
    world = _world(layout, 4, device)
    handles = [world.admit(prompt) for prompt in (9, 7, 3)]
    assert sorted(map(world.row, handles)) == [0, 1, 2], "slot 0 has a first entry"
    blocks = "K/V blocks"
    for q_len, padding in ((1, []), (1, [0, 2]), (3, [1, 3])):
        before = snapshot(world.state)[blocks]
        # Not taken, so that the next step is at the same positions.
        world.step(dict.fromkeys(handles, (1, 0)), q_len, padding)
        assert not changed_bytes(before, snapshot(world.state)[blocks]).any()
    for handle in handles:
        world.extend(handle, 1)
    before = snapshot(world.state)[blocks]
    world.chunk(dict.fromkeys(handles, 1), padding=[0])
    assert not changed_bytes(before, snapshot(world.state)[blocks]).any()

    # One that emits, among others that do not.
    world.step({handles[1]: (1, 1)}, 1)
    before = snapshot(world.state)[blocks]
    own = table_of(world.state, world.row(handles[2]))[0]
    world.step({handles[1]: (1, 1), handles[2]: (1, 1)}, 1, padding=[0, 1])
    changed = changed_bytes(before, snapshot(world.state)[blocks]).any(1)
    assert changed.nonzero()[0].tolist() == [own]
    world.check_all()
