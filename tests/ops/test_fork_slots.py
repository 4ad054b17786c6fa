"""fork_slots: the CPU operation against plain loops, the kernel against the same loops, and steps.

In a step it is held against an eager fork and against whole histories.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capture import CaptureError, DecodeRuntime, Ladder
from capture.backend import choose_backend
from graphcache import AttentionType, Batch, LayerCacheSchema
from graphcache.errors import SchemaError
from graphcache.models import StepFunction
from graphcache.ops.fork_slots import fork_slots
from graphcache.schema import IndexerSchema
from tests.capture.support import ToyOracle, bits, captured, decode, differing, sync
from tests.entry_requests import EntryRequests
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

module = importlib.import_module("graphcache.ops.fork_slots")
ROOT = Path(__file__).parents[2]
Pairs = Sequence[tuple[int, int]]


def ints(values: Any, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@dataclass
class Memory:
    """Slots and blocks full of random bytes. The last row of each is scratch."""

    arena: Tensor
    blocks: Tensor
    by_slot: Tensor
    """[S1, 3 + width] int32: a table and lengths that are strided views, as in a pool."""
    block_tokens: int

    @staticmethod
    def random(
        rng: np.random.Generator,
        *,
        row_bytes: int,
        block_bytes: int,
        width: int,
        block_tokens: int = 4,
        slots: int = 6,
        device: torch.device | str = "cpu",
    ) -> Memory:
        count = slots * width + 1
        numbers = rng.permutation(count - 1).reshape(slots, width)
        by_slot = np.full((slots + 1, 3 + width), count - 1)
        by_slot[:slots, 3:] = numbers
        by_slot[:slots, 1] = rng.integers(0, width * block_tokens + 1, slots)
        by_slot[slots, 1] = 0
        arena, blocks = (
            torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)).to(device)
            for shape in ((slots + 1, row_bytes), (count, block_bytes))
        )
        return Memory(arena, blocks, ints(by_slot, device), block_tokens)

    @property
    def table(self) -> Tensor:
        return self.by_slot[:, 3:]

    @property
    def length(self) -> Tensor:
        return self.by_slot[:, 1]

    def share(self, source: int, target: int, columns: int) -> None:
        """The first blocks of `target` are those of `source`."""
        self.table[target, :columns] = self.table[source, :columns]

    def after(self, pairs: Pairs, kept: tuple[int, int], blocks: bool = True) -> list[np.ndarray]:
        """Arena and blocks as they must be then, in loops over what they are now."""
        arena, store = (part.cpu().numpy() for part in (self.arena, self.blocks))
        table, length = (part.cpu().tolist() for part in (self.table, self.length))
        new_arena, new_store = arena.copy(), store.copy()
        for source, target in pairs:
            if source < 0 or target < 0:
                continue
            for byte in range(arena.shape[1]):
                if not kept[0] <= byte < kept[1]:
                    new_arena[target, byte] = arena[source, byte]
            for column, (theirs, own) in enumerate(
                zip(table[source], table[target], strict=True) if blocks else ()
            ):
                if column * self.block_tokens < length[source] and theirs != own:
                    new_store[own] = store[theirs]
        return [new_arena, new_store]

    def check(self, expected: list[np.ndarray]) -> None:
        for part, wanted in zip((self.arena, self.blocks), expected, strict=True):
            assert np.array_equal(part.cpu().numpy(), wanted)


Fork = Callable[[Memory, Pairs, tuple[int, int], bool], None]


def public(memory: Memory, pairs: Pairs, kept: tuple[int, int], blocks: bool) -> None:
    slot_in, slot_out = (ints([p[i] for p in pairs], memory.arena.device) for i in (0, 1))
    with_blocks: dict[str, Any] = {
        "blocks": memory.blocks,
        "table": memory.table,
        "length": memory.length,
        "block_tokens": memory.block_tokens,
    }
    fork_slots(memory.arena, slot_in, slot_out, kept=kept, **(with_blocks if blocks else {}))


def kernel(memory: Memory, pairs: Pairs, kept: tuple[int, int], blocks: bool) -> None:
    slot_in, slot_out = (ints([p[i] for p in pairs], memory.arena.device) for i in (0, 1))
    given = (memory.blocks, memory.table, memory.length, memory.block_tokens)
    module._launch(
        memory.arena, slot_in, slot_out, *kept, *(given if blocks else (None, None, None, 0))
    )


def random_pairs(rng: np.random.Generator, slots: int) -> list[tuple[int, int]]:
    """Some slots onto others, one onto more than one; some pairs with -1 on either side."""
    order = rng.permutation(slots).tolist()
    cut = int(rng.integers(1, slots))
    sources, targets = order[:cut], order[cut:]
    pairs = [(int(rng.choice(sources)), target) for target in targets]
    for index in range(len(pairs)):
        kind = rng.random()
        if kind < 0.3:
            pairs[index] = (-1, pairs[index][1]) if kind < 0.15 else (pairs[index][0], -1)
    pairs.insert(int(rng.integers(len(pairs) + 1)), (-1, -1))
    return pairs


def check_random_forks(fork: Fork, seed: int, device: str = "cpu") -> None:
    """Several launches on one memory, all of it compared after each."""
    rng = np.random.default_rng(seed)
    row_bytes = 16 * int(rng.integers(1, 40))
    memory = Memory.random(
        rng,
        row_bytes=row_bytes,
        block_bytes=16 * int(rng.integers(1, 40)),
        width=int(rng.integers(1, 12)),
        block_tokens=int(rng.integers(1, 9)),
        device=device,
    )
    width = memory.table.shape[1]
    for _ in range(3):
        pairs = random_pairs(rng, 6)
        for source, target in pairs:
            if source >= 0 and target >= 0:
                memory.share(source, target, int(rng.integers(0, width + 1)))
        memory.length[:6] = ints(rng.integers(0, width * memory.block_tokens + 1, 6), device)
        start, stop = sorted(4 * int(word) for word in rng.integers(0, row_bytes // 4 + 1, 2))
        blocks = rng.random() < 0.8
        expected = memory.after(pairs, (start, stop), blocks)
        fork(memory, pairs, (start, stop), blocks)
        memory.check(expected)


def check_padding_only(fork: Fork, device: str = "cpu") -> None:
    """Not a byte changes, scratch included; nor with no pairs at all."""
    rng = np.random.default_rng(0)
    memory = Memory.random(rng, row_bytes=48, block_bytes=32, width=3, device=device)
    before = [memory.arena.cpu().numpy().copy(), memory.blocks.cpu().numpy().copy()]
    for pairs in ([(-1, -1), (2, -1), (-1, 3)], []):
        fork(memory, pairs, (0, 8), True)
        memory.check(before)


def check_shared_blocks_are_left_alone(fork: Fork, device: str = "cpu") -> None:
    """Full blocks shared, the partly filled one copied, and none past the length."""
    rng = np.random.default_rng(1)
    memory = Memory.random(rng, row_bytes=64, block_bytes=64, width=5, device=device)
    memory.length[2] = 10
    memory.share(2, 4, 2)
    before = memory.blocks.clone()
    fork(memory, [(2, 4)], (0, 0), True)
    source, target = memory.table[2].tolist(), memory.table[4].tolist()
    changed = (memory.blocks != before).any(1).nonzero().flatten().tolist()
    assert changed == [target[2]]
    assert torch.equal(memory.blocks[target[2]], before[source[2]])


@contextmanager
def small_pieces() -> Iterator[None]:
    """Rows, blocks and tables of a few words take many programs and turns."""
    names = {"CHUNK_WORDS": 16, "MOST_ROW_PROGRAMS": 3, "MOST_SPLITS": 2, "MOST_COLUMNS": 4}
    saved = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)


# --- the operation by itself ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_against_loops(seed: int) -> None:
    check_random_forks(public, seed)


def test_padding_changes_nothing() -> None:
    check_padding_only(public)


def test_shared_blocks_are_left_alone() -> None:
    check_shared_blocks_are_left_alone(public)


def _plain() -> tuple[dict[str, Any], Memory]:
    rng = np.random.default_rng(0)
    memory = Memory.random(rng, row_bytes=64, block_bytes=64, width=3)
    return {
        "arena": memory.arena,
        "slot_in": ints([0, 1]),
        "slot_out": ints([2, -1]),
        "kept": (8, 16),
        "blocks": memory.blocks,
        "table": memory.table,
        "length": memory.length,
        "block_tokens": 4,
    }, memory


@pytest.mark.parametrize(
    ("argument", "change", "says"),
    [
        ("arena", lambda arena: arena.int(), "arena must be rows of bytes"),
        ("arena", lambda arena: arena[:, :32], "arena must be rows of bytes"),
        ("arena", lambda arena: arena.flatten(), "arena must be rows of bytes"),
        ("arena", lambda arena: arena[:, :40].contiguous(), "multiple of 16 bytes, got 40"),
        ("arena", lambda arena: arena.view(-1)[1:65].view(1, 64), "multiple of 16 bytes"),
        ("slot_in", lambda slots: slots.long(), r"slot_in and slot_out must be \[N\] int32"),
        ("slot_out", lambda slots: slots[:1], r"slot_in and slot_out must be \[N\] int32"),
        ("slot_out", lambda slots: slots.long(), r"slot_in and slot_out must be \[N\] int32"),
        ("slot_out", lambda slots: ints([2, 0, -1, 0])[::2], "slot_out must be contiguous"),
        ("kept", lambda kept: (8, 18), "multiples of 4"),
        ("kept", lambda kept: (16, 8), "multiples of 4"),
        ("kept", lambda kept: (60, 68), r"a range of 0\.\.64"),
        ("kept", lambda kept: (-4, 8), r"a range of 0\.\.64"),
        ("blocks", lambda blocks: None, "come together"),
        ("table", lambda table: None, "come together"),
        ("length", lambda length: None, "come together"),
        ("blocks", lambda blocks: blocks.view(torch.int32), "blocks must be rows of bytes"),
        ("blocks", lambda blocks: blocks[:, :24].contiguous(), "multiple of 16 bytes, got 24"),
        ("table", lambda table: table.long(), r"table must be \[7, width\] int32"),
        ("table", lambda table: table[:6], r"table must be \[7, width\] int32"),
        ("table", lambda table: table[:, ::2], "rows of the table must be contiguous"),
        ("length", lambda length: length.long(), r"length must be \[7\] int32"),
        ("length", lambda length: length[:6], r"length must be \[7\] int32"),
        ("block_tokens", lambda tokens: 0, "block_tokens must be at least 1"),
    ],
)
def test_refuses_what_it_can_not_serve(
    argument: str, change: Callable[[Any], Any], says: str
) -> None:
    arguments, memory = _plain()
    before = [memory.arena.numpy().copy(), memory.blocks.numpy().copy()]
    arguments[argument] = change(arguments[argument])
    with pytest.raises(SchemaError, match=f"fork_slots: .*{says}"):
        fork_slots(**arguments)
    memory.check(before)


def test_declares_what_it_writes() -> None:
    schema = torch.ops.graphcache.fork_slots.default._schema
    written = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    assert written == ["arena", "blocks"]


def test_the_kernel_interpreted() -> None:
    pytest.importorskip("triton")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    child = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=240
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert child.stdout == "done\n"


@pytest.mark.parametrize(
    "sizes",
    [
        # V4-Flash: 14.7 MiB of rings and a million tokens; blocks of 128 tokens.
        {"row": 19_500_032, "block": 610_304, "width": 8192, "tokens": 128},
        {"row": 256, "block": 256, "width": 1, "tokens": 1},
        {"row": 81_920, "block": 92_160, "width": 128, "tokens": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("kept", [(0, 0), (40, 48)])
def test_the_kernel_builds_for_an_h200(sizes: dict[str, int], kept: tuple[int, int]) -> None:
    pytest.importorskip("triton")
    from tests.kernel_build import build_for_sm90

    compiled = module._fork_slots_kernel
    row_words, block_words = sizes["row"] // 4, sizes["block"] // 4
    columns = 1 << (sizes["width"] - 1).bit_length()
    constexprs = {
        "ROW_WORDS": row_words,
        "KEEP_FROM": kept[0] // 4,
        "KEEP_TO": kept[1] // 4,
        "ROW_PROGRAMS": min(module.MOST_ROW_PROGRAMS, -(-row_words // module.CHUNK_WORDS)),
        "BLOCK_WORDS": block_words,
        "BLOCK_TOKENS": sizes["tokens"],
        "WIDTH": sizes["width"],
        "COLUMNS": min(module.MOST_COLUMNS, columns),
        "SPLITS": min(module.MOST_SPLITS, -(-block_words // module.CHUNK_WORDS)),
        "CHUNK": module.CHUNK_WORDS,
    }
    pointers = ("arena", "slot_in", "slot_out", "blocks", "table", "length")
    signature = dict.fromkeys(pointers, "*i32")
    signature |= dict.fromkeys(("table_stride", "length_stride"), "i32")
    assert build_for_sm90(compiled, signature, constexprs).startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_the_kernel_against_loops(seed: int) -> None:
    check_random_forks(public, seed, "cuda")
    with small_pieces():
        check_random_forks(public, seed, "cuda")


@pytest.mark.gpu
def test_the_kernel_on_padding_and_shared_blocks() -> None:
    check_padding_only(public, "cuda")
    check_shared_blocks_are_left_alone(public, "cuda")


@pytest.mark.gpu
def test_rows_and_blocks_past_two_to_the_31_bytes() -> None:
    """32 bits of a word's number would wrap round into the wrong row."""
    stride = 5 * 2**30
    arena = torch.zeros((3, stride), dtype=torch.uint8, device="cuda")
    arena[1] = 7
    fork_slots(arena, ints([1], "cuda"), ints([2], "cuda"), kept=(8, 16))
    assert not arena[0].any()
    assert (arena[2, :8] == 7).all() and not arena[2, 8:16].any() and (arena[2, 16:] == 7).all()
    del arena
    blocks = torch.zeros((3, stride), dtype=torch.uint8, device="cuda")
    blocks[1] = 9
    rows = torch.zeros((3, 16), dtype=torch.uint8, device="cuda")
    fork_slots(
        rows,
        ints([0], "cuda"),
        ints([1], "cuda"),
        blocks=blocks,
        table=ints([[1], [2], [0]], "cuda"),
        length=ints([1, 0, 0], "cuda"),
        block_tokens=4,
    )
    assert not blocks[0].any() and (blocks[2] == 9).all()


# --- recorded and replayed ------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replay_forks_whom_it_is_told_then(backend: str) -> None:
    """Pairs, lengths and table are those of the replay; recording writes nothing."""
    device = device_of(backend)
    rng = np.random.default_rng(4)
    memory = Memory.random(rng, row_bytes=4096, block_bytes=512, width=7, device=device)
    pairs = torch.empty((2, 7), dtype=torch.int32, device=device)
    pairs[0], pairs[1] = ints([3, 1, 0, 4, 2, 5, -1]), -1

    def step() -> None:
        fork_slots(
            memory.arena, pairs[0], pairs[1], kept=(48, 56), blocks=memory.blocks,
            table=memory.table, length=memory.length, block_tokens=memory.block_tokens,
        )  # fmt: skip

    chosen = choose_backend(backend, device)
    before = [memory.arena.cpu().numpy().copy(), memory.blocks.cpu().numpy().copy()]
    with chosen.context():
        step()
    recorded = chosen.capture(step)
    chosen.synchronize()
    memory.check(before)
    for _ in range(6):
        told = random_pairs(rng, 6)
        told += [(-1, -1)] * (7 - len(told))
        with chosen.context():
            pairs.copy_(ints(told).T)
            memory.length[:6] = ints(rng.integers(0, 29, 6), device)
            memory.table[:6] = ints(rng.permutation(42).reshape(6, 7), device)
        chosen.synchronize()
        expected = memory.after(told, (48, 56))
        recorded.replay()
        chosen.synchronize()
        memory.check(expected)
    recorded.close()
    chosen.close()


class Forking:
    """A toy decoder whose step first forks the pairs that the host has left for it."""

    def __init__(self, backend: str, windows: tuple[int | None, ...]) -> None:
        self.toy = ToyDecoder(windows, device=device_of(backend))
        self.pairs = torch.full((2, 2), -1, dtype=torch.int32, device=self.toy.device)

    def __call__(self, batch: Batch) -> Tensor:
        batch.state.fork_slots(self.pairs[0], self.pairs[1])
        return self.toy(batch)

    def runtime(self, backend: str) -> DecodeRuntime:
        model = StepFunction(
            self, VOCAB, schemas=self.toy.schemas, device=self.toy.device, chunk=self.toy
        )
        return DecodeRuntime(
            model, max_requests=5, max_context=64, backend=backend, block_tokens=4,
            ladder=Ladder([1, 2, 4]), prefill_chunk=5,
        )  # fmt: skip

    def leave(self, runtime: DecodeRuntime, *pairs: tuple[int, int]) -> None:
        """The next steps fork these slots."""
        rows = [(runtime.state.slots.row_of(a), runtime.state.slots.row_of(b)) for a, b in pairs]
        rows += [(-1, -1)] * (2 - len(rows))
        with runtime._backend.context():
            self.pairs.copy_(ints(rows).T)


PROMPT = [5, 9, 2, 44, 17, 3, 8, 1, 30, 12]
LAYERS: list[tuple[int | None, ...]] = [(None, 6), (4, 3)]


@pytest.mark.parametrize("windows", LAYERS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fork_in_a_step_equals_an_eager_one(
    backend: str, windows: tuple[int | None, ...]
) -> None:
    """Two forks in a captured step go on by their own draws, as eager ones with the same seeds."""
    forking = Forking(backend, windows)
    options: dict[str, Any] = {"temperature": 0.8, "stop": ()}
    with captured(forking.runtime(backend)) as runtime, forking.runtime(backend) as eager:
        there = [
            runtime.admit([index] * 13, seed=index, max_tokens=40, **options) for index in (21, 22)
        ]
        parent = runtime.admit(PROMPT, seed=3, max_tokens=40, **options)
        assert runtime.step(there).tokens()
        other = eager.admit(PROMPT, seed=3, max_tokens=40, **options)
        for _ in range(3):
            assert runtime.step([parent]).tokens() == eager.step([other], eager=True).tokens()
        forks = [eager.fork(other, seed=seed) for seed in (21, 22)]
        forking.leave(runtime, (parent, there[0]), (parent, there[1]))
        # The step in which they are forked is the parent's: they are where it was before.
        assert runtime.step([parent]).tokens() == eager.step([other], eager=True).tokens()
        forking.leave(runtime)
        answers = []
        for _ in range(12):
            one = runtime.step([there[1], parent, there[0]]).tokens()
            two = eager.step([forks[1], other, forks[0]], eager=True).tokens()
            assert one == two
            answers.append(one)
        assert len({tuple(column) for column in zip(*answers, strict=True)}) == 3, "all drew alike"
        sync(runtime), sync(eager)
        for mine, theirs in zip([*there, parent], [*forks, other], strict=True):
            rows = runtime.state.slots.row_of(mine), eager.state.slots.row_of(theirs)
            assert torch.equal(runtime.state.pool.arena[rows[0]], eager.state.pool.arena[rows[1]])
            assert runtime.tokens_of(mine) == eager.tokens_of(theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forks_that_are_told_different_things(backend: str) -> None:
    """Parent and forks are extended differently after a fork in a step, and rewound among it."""
    forking = Forking(backend, (None, 6))
    oracle = ToyOracle(forking.toy)
    with captured(forking.runtime(backend)) as runtime:
        parent = runtime.admit(PROMPT)
        child = runtime.fork(parent)
        grandchild = runtime.admit([1, 2])
        told = decode(runtime, parent, 3)
        forking.leave(runtime, (parent, child))
        told += decode(runtime, parent, 1)
        forking.leave(runtime, (child, grandchild))
        told += decode(runtime, parent, 1)
        forking.leave(runtime)
        assert told == oracle.answer(PROMPT, 5)
        history = PROMPT + told
        slots = {parent: history, child: history[:13], grandchild: history[:13]}
        assert [runtime.tokens_of(slot) for slot in slots] == list(slots.values())
        for number, slot in enumerate(slots):
            runtime.rewind(slot, runtime.length_of(slot) - 1)
            runtime.extend(slot, [40 + number, 7])
            slots[slot] = [*slots[slot][:-1], 40 + number, 7]
        for _ in range(6):
            result = runtime.step(list(slots)).tokens()
            for tokens, token in zip(slots.values(), result, strict=True):
                assert [token] == oracle.answer(tokens, 1)
                tokens.append(token)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_left_for_a_rehearsal_are_refused(backend: str) -> None:
    """They would be forked by the capture: nothing may be written then."""
    forking = Forking(backend, (None, 6))
    with forking.runtime(backend) as runtime:
        slots = [runtime.admit(PROMPT), runtime.admit([1, 2])]
        forking.leave(runtime, (slots[0], slots[1]))
        before = bits(runtime)
        with pytest.raises(CaptureError, match="Fill slot_out with -1 before capture") as caught:
            runtime.capture(progress=False)
        assert caught.value.source is not None
        assert caught.value.source.text == "batch.state.fork_slots(self.pairs[0], self.pairs[1])"
        assert differing(before, bits(runtime)) == []
        forking.leave(runtime)
        runtime.capture(progress=False)
        assert differing(before, bits(runtime)) == []
        assert decode(runtime, slots[0], 2) == ToyOracle(forking.toy).answer(PROMPT, 2)


# --- layers with compressed entries ---------------------------------------------------------------


def entry_world(seed: int, block_tokens: int) -> EntryRequests:
    """One layer each of window only, HCA, and CSA with an indexer."""
    promise: dict[str, int] = {"step_width": 2, "rewind": 2}
    schemas = [
        LayerCacheSchema(AttentionType.SWA, 5, 24, 8, **promise),
        LayerCacheSchema(AttentionType.HCA, 5, 24, 8, compression=4, **promise),
        LayerCacheSchema(
            AttentionType.CSA, 5, 24, 8, compression=2, indexer=IndexerSchema(3, 16, 3), **promise
        ),
    ]
    return EntryRequests(schemas, seed=seed, block_tokens=block_tokens)


@pytest.mark.parametrize("block_tokens", [4, 8])
@pytest.mark.parametrize("length", [1, 4, 7, 8, 9, 14])
def test_every_layers_state_goes_along(length: int, block_tokens: int) -> None:
    """Windows, tails, entries and keys: parent and forks against their whole histories."""
    world = entry_world(length, block_tokens)
    stranger = world.admit(11)
    parent = world.admit(length)
    shares = world.fork(parent)
    world.step({shares: (2, 1), stranger: (1, 1)}, 2)
    world.step({parent: (2, 2)}, 2)
    pairs = [(parent, shares), (parent, stranger)]
    slot_in, slot_out = (ints([world.row(pair[i]) for pair in pairs]) for i in (0, 1))
    world.state.fork_slots(slot_in, slot_out)
    for _, forked in pairs:
        world.stories[forked] = world.stories[parent].copy(world.random.spawn(1)[0])
    world.check_all()
    for turn in range(9):
        world.step({stranger: (2, 1 + turn % 2), parent: (1, 1), shares: (2, 2 - turn % 2)}, 2)
        if turn == 4:
            world.rewind(shares, world.stories[shares].length - 1)
        world.check_all()


if __name__ == "__main__":
    for seed in range(4):
        check_random_forks(kernel, seed)
    with small_pieces():
        for seed in range(12):
            check_random_forks(kernel, seed)
        check_padding_only(kernel)
        check_shared_blocks_are_left_alone(kernel)
    print("done")
