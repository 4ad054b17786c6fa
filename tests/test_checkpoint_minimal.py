"""The minimal checkpoint: less than a slot's row, and a request goes on from it all the same.

Whatever it leaves out is NaN when it is restored, and every free row and block with it. What comes
after is held against whole histories in float64 (`tests.entry_requests`, `ToyOracle`).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from capture import DecodeRuntime
from graphcache import AttentionType, Checkpoint, DecodeState, Field, KVLayerSchema
from graphcache import LayerCacheSchema as Schema
from graphcache.errors import InvalidRequest, LayoutMismatch, RewindTooFar, StaleSlot
from graphcache.kept import merged, pack, unpack
from graphcache.rows import RowFormat
from graphcache.schema import IndexerSchema
from graphcache.slots import SlotPhase
from tests.books import audit
from tests.capture.support import ToyOracle, decode, sync
from tests.entry_requests import EntryRequests, Story
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ALL_ONES = 0xFF
"""NaN in every format; as int32 it is -1, a length, a token and a reason that nobody has."""


def lose_what_nobody_owns(state: DecodeState) -> None:
    """All free rows and blocks, scratch too, become `ALL_ONES`; what padding must not see stays."""
    free = [
        row
        for row, phase in enumerate(state.slots._phase)
        if phase in (SlotPhase.FREE, SlotPhase.QUARANTINED)
    ]
    state.pool.arena[[*free, state.max_requests]] = ALL_ONES
    state.len[state.max_requests] = 0
    if state.blocks is not None:
        resting = [block for _, block in state.blocks._quarantine]
        unused = [*state.blocks._free, *resting, state.blocks.num_blocks]
        state.blocks.pool.arena[unused] = ALL_ONES


@dataclass(frozen=True)
class Layout:
    """A layer each of window only, HCA, CSA that sees all and CSA that selects."""

    window: int = 5
    hca: int = 8
    csa: int = 4
    indexed: int = 2
    q: int = 1
    k: int = 0
    blocks: int = 1
    row_format: RowFormat = RowFormat.FP32
    tail_dtype: torch.dtype = torch.float32
    dims: tuple[int, int] = (24, 8)
    context: int = 48

    def world(self, seed: int, device: str = "cpu", **options: Any) -> EntryRequests:
        keys = RowFormat.FP8 if self.row_format is RowFormat.MODEL1 else self.row_format
        index = IndexerSchema(3, max(16, self.dims[1]), 3, row_format=keys)
        schemas = [
            self._schema(AttentionType.SWA),
            self._schema(AttentionType.HCA, compression=self.hca),
            self._schema(AttentionType.CSA, compression=self.csa),
            self._schema(AttentionType.CSA, compression=self.indexed, indexer=index),
        ]
        tokens = self.blocks * max(self.hca, self.csa, self.indexed)
        return EntryRequests(
            schemas, seed=seed, block_tokens=tokens, context=self.context, device=device, **options
        )

    def _schema(self, kind: AttentionType, **options: Any) -> Schema:
        return Schema(
            kind, self.window, *self.dims, step_width=self.q, rewind=self.k,
            row_format=self.row_format, tail_dtype=self.tail_dtype, **options,
        )  # fmt: skip


LAYOUTS = {
    "plain": Layout(),
    "promise": Layout(q=3, k=3),
    "window of one": Layout(window=1, q=2),
    "window of a block": Layout(window=8, hca=4, csa=1, indexed=4, k=2),
    "long window": Layout(window=16, hca=2, csa=8, indexed=1, blocks=3),
    "fp8": Layout(q=2, row_format=RowFormat.FP8),
    "bf16": Layout(k=3, row_format=RowFormat.BF16, tail_dtype=torch.bfloat16),
    "model1": Layout(q=2, row_format=RowFormat.MODEL1, dims=(512, 64), context=32),
}


def take(world: EntryRequests, handle: int, *, to_host: bool) -> tuple[Checkpoint, Story]:
    taken = world.state.checkpoint(handle, minimal=True)
    assert taken.minimal
    if to_host:
        assert taken.to_host() is taken
    return taken, world.stories[handle].copy(world.random)


def restore(world: EntryRequests, saved: tuple[Checkpoint, Story]) -> int:
    """Onto memory in which nothing of the request is left."""
    taken, story = saved
    world.clock.complete()
    lose_what_nobody_owns(world.state)
    handle = world.state.restore(taken)
    restored = world.stories[handle] = story.copy(world.random.spawn(1)[0])
    restored.floor = restored.high = restored.length
    restored.promised = None
    return handle


def go_on(world: EntryRequests, handles: list[int], turns: int) -> None:
    """Steps of as many tokens as the layers take, partly accepted; all memory compared."""
    for turn in range(turns):
        runs = {}
        for index, handle in enumerate(handles):
            count = 1 + (turn + index) % world.q
            runs[handle] = (count, count - (turn % 3 == 2 and count > 1))
        world.step(runs, world.q)
        world.check_all()


# --- entry layers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_request_goes_on_as_if_nothing_had_happened(
    name: str, to_host: bool, device: str
) -> None:
    """At every length at which the form exists, reached by a prompt and by steps."""
    layout = LAYOUTS[name]
    world = layout.world(seed=1, device=device)
    for blocks in range(0, (layout.context - 10) // world.whole + 1):
        length = blocks * world.whole
        stepped = min(length, 1 + blocks % 2)
        handle = world.admit(length + 1 - stepped)
        for _ in range(stepped):
            world.step({handle: (1, 1)}, 1)
        assert world.stories[handle].length == length
        saved = take(world, handle, to_host=to_host)
        go_on(world, [handle], 2)
        world.retire(handle)
        restored = restore(world, saved)
        world.check(restored)
        go_on(world, [restored], 9)
        world.retire(restored)
        saved[0].release()
    audit(world.state)


@pytest.mark.parametrize("seed", range(10))
def test_in_any_history(seed: int) -> None:
    """Taken after rejected drafts and rewinds, restored more than once, into slots of others."""
    choose = random.Random(seed)
    world = choose.choice([*LAYOUTS.values()][:7]).world(seed, slots=4, copies=3)
    kept: list[tuple[Checkpoint, Story]] = []
    restored = 0
    for _ in range(80):
        live = sorted(world.stories)
        ready = [h for h in live if not world.stories[h].length % world.whole]
        room = len(live) < world.slots
        can = ["admit"] * (2 * (len(live) < 3)) + ["restore"] * (4 * room * bool(kept))
        can += ["fork"] * (room and bool(live))
        can += ["take"] * (4 * len(ready) if len(kept) < 3 else 0) + ["release"] * bool(kept)
        can += ["rewind", "rewind", *["step"] * 6, *["retire"] * (1 if room else 5)] * bool(live)
        act = choose.choice(can)
        if act == "admit":
            blocks = choose.randint(0, world.context // 2 // world.whole)
            world.admit(choose.choice([blocks * world.whole, choose.randint(0, 20)]) + 1)
        elif act == "take":
            kept.append(take(world, choose.choice(ready), to_host=choose.random() < 0.5))
        elif act == "restore":
            restore(world, choose.choice(kept))
            restored += 1
        elif act == "release":
            kept.pop(choose.randrange(len(kept)))[0].release()
        elif act == "retire":
            world.retire(choose.choice(live))
        elif act == "fork":
            world.fork(choose.choice(live))
        elif act == "rewind":
            handle = choose.choice(live)
            world.rewind(handle, max(0, world.stories[handle].length - choose.randint(0, 4)))
        else:
            runs = {}
            for handle in choose.sample(live, choose.randint(1, len(live))):
                count = choose.randint(1, world.q)
                runs[handle] = (count, choose.randint(0, count))
            world.step(runs, world.q, padding=[0] * choose.randint(0, 1))
        world.check_all()
        audit(world.state, [taken for taken, _ in kept])
    assert restored > 1


def test_it_is_a_copy() -> None:
    """What its slot does later, and what is restored from it, leave it as it was."""
    world = Layout(q=2, k=1).world(seed=5, slots=4)
    handle = world.admit(9)
    saved = take(world, handle, to_host=False)
    go_on(world, [handle], 4)
    handles = [restore(world, saved), restore(world, saved)]
    go_on(world, [handle, *handles], 6)
    handles.append(restore(world, saved))
    go_on(world, handles, 6)
    saved[0].release()
    with pytest.raises(StaleSlot, match="was released"):
        world.state.restore(saved[0])
    audit(world.state)


def test_nothing_before_it_can_be_gone_back_to() -> None:
    """Back to it, as often as the rings allow; behind it, never."""
    world = Layout(q=2, k=3).world(seed=2)
    handle = world.admit(20)
    assert world.rewind(handle, 16)
    saved = take(world, handle, to_host=False)
    assert world.rewind(handle, 15), "the slot itself has it all"
    world.retire(handle)
    restored = restore(world, saved)
    before = world.state.pool.arena.clone()
    for length in (15, 8, 0):
        with pytest.raises(RewindTooFar, match="nothing before 16 is kept"):
            world.state.rewind(restored, length)
    assert torch.equal(before, world.state.pool.arena)
    assert world.rewind(restored, 16)
    for steps in (1, 3, 2):
        go_on(world, [restored], steps)
        # Farther than the promise the rule alone decides; behind the floor nothing is granted.
        world.rewind(restored, max(16, world.stories[restored].length - 3))
        assert not world.rewind(restored, 15)
        go_on(world, [restored], 1)


def test_window_rows_that_are_not_kept_name_no_position() -> None:
    """Tags of an earlier request, such as a kernel that goes by them would believe."""
    world = Layout(window=6, q=2, k=4).world(seed=4)
    handle = world.admit(17)
    saved = take(world, handle, to_host=False)
    world.retire(handle)
    world.clock.complete()
    for layer in world.layers:
        layer.cache.swa_pos[:-1] = 16
    row = world.row(world.state.restore(saved[0]))
    for layer in world.layers:
        tags = layer.cache.swa_pos[row].tolist()
        assert sorted(tag for tag in tags if tag >= 0) == [11, 12, 13, 14, 15]


def test_its_forks_and_checkpoints_have_its_floor() -> None:
    world = Layout(q=2, k=3).world(seed=3, slots=4)
    handle = world.admit(17)
    restored = restore(world, take(world, handle, to_host=True))
    go_on(world, [restored], 1)
    forked = world.fork(restored)
    world.checkpoint(restored, to_host=True)
    again = world.restore(0)
    for each in (forked, again):
        assert world.stories[each].floor == 16
        assert not world.rewind(each, 15)
    go_on(world, [forked, again], 5)


@pytest.mark.parametrize(
    ("length", "says"),
    [(1, "0 and 8"), (7, "0 and 8"), (9, "8 and 16"), (12, "8 and 16"), (18, "16 and 24")],
)
def test_other_lengths_are_refused(length: int, says: str) -> None:
    world = Layout().world(seed=0)
    handle = world.admit(length + 1)
    free = world.state.blocks.free_blocks
    before = world.state.pool.arena.clone()
    with pytest.raises(InvalidRequest, match=f"multiples of 8 tokens.*absorbed {length}.*{says}"):
        world.state.checkpoint(handle, minimal=True)
    assert world.state.blocks.free_blocks == free
    assert torch.equal(before, world.state.pool.arena)
    assert world.state.checkpoint(handle).kept is None


def test_between_two_turns_and_before_the_first() -> None:
    """A slot without tokens, and one whose prompt is not complete: both go on by `extend`."""
    world = Layout().world(seed=7)
    empty, growing = world.open(), world.open()
    world.extend(growing, 20)
    world.chunk({growing: 8})
    saved = [take(world, handle, to_host=False) for handle in (empty, growing)]
    for handle in (empty, growing):
        world.retire(handle)
    for each in saved:
        handle = restore(world, each)
        assert world.state.slots.phase(handle) is SlotPhase.PREFILLING
        world.extend(handle, 5)
        while world.stories[handle].pending:
            world.chunk({handle: 2})
        go_on(world, [handle], 6)


def flash_schemas() -> list[Schema]:
    """DeepSeek-V4-Flash: 2 layers of window only, then CSA and HCA in turn."""
    index = IndexerSchema(64, 128, 512)
    kinds: list[dict[str, Any]] = [
        {"attn_type": AttentionType.CSA, "compression": 4, "indexer": index},
        {"attn_type": AttentionType.HCA, "compression": 128},
    ]
    plain = {"attn_type": AttentionType.SWA}
    return [
        Schema(swa_window_size=128, entry_head_dim=512, rope_dim=64, **kind)
        for kind in (plain, plain, *(kinds[index % 2] for index in range(41)))
    ]


def test_how_much_smaller_it_is() -> None:
    """At V4-Flash's dims: windows but for a row, and 4 rows of CSA's previous streams."""
    state = DecodeState(
        flash_schemas(), max_requests=1, max_context=512, vocab_size=10, device="cpu",
        block_tokens=128,
    )  # fmt: skip
    slot = state.open()
    state.absorbed(slot, state.append_tokens(slot, [1] * 257))
    state.complete_prefill(slot)
    whole, minimal = state.checkpoint(slot), state.checkpoint(slot, minimal=True)
    blocks = 2 * state.blocks.pool.row_stride_bytes
    assert whole.memory_bytes() == state.pool.row_stride_bytes + blocks
    entry = 448 + 2 * 64 + 4 + 4
    rows = 43 * 127 * entry + 21 * 4 * 2 * (512 + 128) * 4
    scalars = 4 * 257 + 4 * (9 + 8) + 4 * (43 + 41) + 8
    assert rows + scalars - 8 <= minimal.memory_bytes() - blocks <= rows + scalars + 16
    assert whole.row_bytes.numel() > 4 * minimal.row_bytes.numel()
    for checkpoint in (whole, minimal):
        held = checkpoint.memory_bytes()
        checkpoint.to_host()
        assert checkpoint.memory_bytes() == held
        assert checkpoint.row_bytes.numel() + checkpoint.block_bytes.numel() == held
        checkpoint.release()


@pytest.mark.parametrize("seed", range(30))
def test_ranges_say_the_same_bytes(seed: int) -> None:
    """Touching, overlapping, one within another: merged, packed and put back as a set has them."""
    choose = random.Random(seed)
    pairs = [sorted(choose.sample(range(60), 2)) for _ in range(choose.randint(1, 12))]
    ranges = merged((start, stop) for start, stop in pairs)
    wanted = sorted({byte for start, stop in pairs for byte in range(start, stop)})
    assert [byte for start, stop in ranges for byte in range(start, stop)] == wanted
    assert all(one[1] < other[0] for one, other in itertools.pairwise(ranges))
    row, target = torch.arange(60).byte(), torch.full((60,), ALL_ONES).byte()
    packed = pack(row, ranges)
    assert packed.tolist() == wanted
    unpack(packed, ranges, target)
    assert target.tolist() == [byte if byte in wanted else ALL_ONES for byte in range(60)]


# --- layers of K and V ----------------------------------------------------------------------------

WINDOWS: list[tuple[int | None, ...]] = [(None,), (None, 6), (5,), (3, None, 8), (1, 4)]
PROMPT = [5, 9, 2, 44, 17, 3, 8, 1, 30, 12, 41, 7, 23]


def kv_runtime(toy: ToyDecoder, backend: str, rewind: int = 0) -> DecodeRuntime:
    model = toy.model(stop_tokens=())
    schemas = tuple(replace(schema, rewind=rewind) for schema in toy.schemas)
    return DecodeRuntime(
        replace(model, schemas=schemas), max_requests=3, max_context=40, backend=backend,
        block_tokens=4, prefill_chunk=5,
    )  # fmt: skip


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same", "other"])
@pytest.mark.parametrize("rewind", [0, 4])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ordinary_decoder_goes_on(
    backend: str, windows: tuple[int | None, ...], rewind: int, elsewhere: bool
) -> None:
    """At any length, in the same runtime and in another."""
    toy = ToyDecoder(windows, device=device_of(backend))
    oracle = ToyOracle(toy)
    with kv_runtime(toy, backend, rewind) as runtime, kv_runtime(toy, backend, rewind) as other:
        for each in (runtime, other):
            each.capture(progress=False)
        for length in (1, 3, 8, 13):
            slot = runtime.admit(PROMPT[:length])
            said = decode(runtime, slot, 4)
            taken = runtime.checkpoint(slot, minimal=True)
            assert taken.minimal and taken.length == length + 3
            if elsewhere:
                taken.to_host()
            decode(runtime, slot, 3)
            runtime.retire(slot)
            there = other if elsewhere else runtime
            sync(runtime), sync(other)
            with there._backend.context():
                lose_what_nobody_owns(there.state)
            restored = there.restore(taken)
            assert there.tokens_of(restored) == PROMPT[:length] + said
            assert there.length_of(restored) == length + 3
            assert said + decode(there, restored, 9) == oracle.answer(PROMPT[:length], 13)
            with pytest.raises(RewindTooFar):
                there.rewind(restored, length + 2)
            there.retire(restored)
            taken.release()
            audit(there.state)


def test_layers_in_blocks_have_nothing_in_the_row() -> None:
    """A full decoder's minimal checkpoint: scalars, its tokens, its blocks."""
    state = DecodeState(
        [KVLayerSchema(2, 16, 8)] * 3, max_requests=2, max_context=400, vocab_size=VOCAB,
        device="cpu", block_tokens=8,
    )  # fmt: skip
    slot = state.open()
    state.absorbed(slot, state.append_tokens(slot, PROMPT))
    taken = state.checkpoint(slot, minimal=True)
    scalars = 4 * (8 + 8) + 8
    assert taken.row_bytes.numel() <= scalars + 4 * 13 + 8
    assert taken.memory_bytes() == taken.row_bytes.numel() + 2 * 3 * 8 * 2 * (16 + 8) * 2


def test_options_fields_and_draws_go_along() -> None:
    """Everything of a request that is not in a layer, byte for byte as in a whole checkpoint."""
    fields = [
        Field("adapter", (), torch.int32, initial=-1),
        Field("bias", (3, 5), torch.float32),
        Field("layer9", (2,), torch.uint8, initial=9),
    ]
    state = DecodeState(
        [KVLayerSchema(1, 8, 8, window=4)], max_requests=4, max_context=20, vocab_size=VOCAB,
        device="cpu", fields=fields,
    )  # fmt: skip
    slot = state.open(
        max_tokens=9, temperature=0.75, top_k=7, top_p=0.5, seed=12345678901, stop=[4, 8],
        fields={"adapter": 17, "bias": torch.arange(15.0).view(3, 5), "layer9": [3, 200]},
    )  # fmt: skip
    state.absorbed(slot, state.append_tokens(slot, [1, 2, 3, 4, 5, 6]))
    state.complete_prefill(slot)
    for name in ("layer0.k", "layer0.v"):
        state.pool[name].copy_(torch.randn(state.pool[name].shape))
    copies = [state.checkpoint(slot), state.checkpoint(slot, minimal=True)]
    lose_what_nobody_owns(state)
    whole, minimal = (state.slots.row_of(state.restore(taken)) for taken in copies)
    names = ("done", "limit", "temperature", "top_k", "top_p", "seed", "stop", "len")
    for name in (*names, *(field.name for field in fields)):
        assert torch.equal(state.pool[name][whole], state.pool[name][minimal]), name
    assert state.tokens[minimal, :6].tolist() == [1, 2, 3, 4, 5, 6]
    assert state._rows[whole].options == state._rows[minimal].options
    assert [int(state.floor[row]) for row in (whole, minimal)] == [0, 5]
    for name in ("layer0.k", "layer0.v"):
        rings = state.pool[name]
        for position in (2, 3, 4):
            assert torch.equal(rings[whole, :, position % 4], rings[minimal, :, position % 4])
        assert rings[minimal, :, 1].isnan().all(), "more rows than a token to come reads"


def test_another_layout_is_refused() -> None:
    """Also where the bytes kept would be as many: a window of 3 in 4 rows, and one of 4."""

    def state(**changes: Any) -> DecodeState:
        options: dict[str, Any] = {"max_requests": 2, "max_context": 20, "vocab_size": 9}
        schema = KVLayerSchema(1, 8, 8, **{"window": 4, **changes})
        return DecodeState([schema], device="cpu", **options)

    here = state()
    slot = here.open()
    here.absorbed(slot, here.append_tokens(slot, [1, 2, 3]))
    taken = here.checkpoint(slot, minimal=True).to_host()
    for changes in ({"window": 3, "rewind": 2}, {"dtype": torch.float16}, {"window": 5}):
        other = state(**changes)
        with pytest.raises(LayoutMismatch):
            other.restore(taken)
        assert other.slots.live == 0
    assert state().restore(taken)
