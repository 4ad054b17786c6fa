"""Entry layers under any history of requests, against whole histories in float64.

Requests come, grow, step, fork, go back, rest in checkpoints and leave in any order, on memory that
starts as NaN and is never wiped (`tests.entry_requests`). The same machine must find every fault
that is put into rings, compressor, attention and blocks on purpose (`tests.test_entry_faults`).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphcache import AttentionType, LayerCacheSchema
from graphcache.rows import RowFormat
from graphcache.schema import IndexerSchema
from tests.books import audit
from tests.entry_requests import EntryRequests, Story

T = TypeVar("T")


# --- what a machine does --------------------------------------------------------------------------


class Chooser(Protocol):
    """Where a machine's choices come from."""

    def between(self, low: int, high: int) -> int:
        """One of low..high."""
        ...


class Seeded:
    """The same choices for the same seed."""

    def __init__(self, seed: int) -> None:
        self.between = random.Random(seed).randint


class Drawn:
    """Hypothesis chooses."""

    def __init__(self, data: st.DataObject) -> None:
        self.between = lambda low, high: data.draw(st.integers(low, high))


def one_of(choose: Chooser, options: Sequence[T]) -> T:
    return options[choose.between(0, len(options) - 1)]


def some_of(choose: Chooser, options: Sequence[T]) -> list[T]:
    """At least one, in any order."""
    left = list(options)
    return [left.pop(choose.between(0, len(left) - 1)) for _ in range(choose.between(1, len(left)))]


def padding(choose: Chooser, rows: int) -> list[int]:
    """Indices at which up to two empty rows are put among others."""
    return [choose.between(0, rows) for _ in range(choose.between(0, 2))]


def having(world: EntryRequests, kind: Callable[[Story], object]) -> list[int]:
    return sorted(handle for handle, story in world.stories.items() if kind(story))


def admit(world: EntryRequests, choose: Chooser) -> None:
    """Its prompt in chunks; the last of them may have to wait."""
    budget = one_of(choose, [None, None, choose.between(1, 12)])
    handle = world.open(budget)
    world.extend(handle, choose.between(1, one_of(choose, [3, 12, world.context - 1])))
    for _ in range(choose.between(0, 4)):
        left = len(world.stories[handle].pending)
        if left:
            world.chunk({handle: choose.between(1, left)})


def extend(world: EntryRequests, choose: Chooser) -> None:
    handle = one_of(choose, having(world, lambda story: story.length + 2 < world.context))
    room = world.context - world.stories[handle].length - 2
    budget = one_of(choose, [None, choose.between(1, 12)])
    world.extend(handle, choose.between(1, min(9, room)), budget)


def chunk(world: EntryRequests, choose: Chooser) -> None:
    """Of one or more slots at once, of different lengths."""
    handles = some_of(choose, having(world, lambda story: story.pending))
    runs = {h: choose.between(1, len(world.stories[h].pending)) for h in handles}
    world.chunk(runs, padding(choose, len(runs)))


def step(world: EntryRequests, choose: Chooser) -> None:
    """Tokens of which some, none or all are accepted."""
    q_len = choose.between(1, world.q)
    runs: dict[int, tuple[int, int]] = {}
    for handle in some_of(choose, having(world, lambda story: story.live)):
        count = choose.between(1, q_len)
        runs[handle] = (count, choose.between(0, count))
    world.step(runs, q_len, padding(choose, len(runs)))


def plain_steps(world: EntryRequests, choose: Chooser) -> None:
    """One token a slot, a few times."""
    runs = dict.fromkeys(some_of(choose, having(world, lambda story: story.live)), (1, 1))
    for _ in range(choose.between(2, 6)):
        world.step(runs, 1)


def fork(world: EntryRequests, choose: Chooser) -> None:
    world.fork(one_of(choose, sorted(world.stories)))


def rewind(world: EntryRequests, choose: Chooser) -> None:
    """As far as anyone likes, but mostly near."""
    handle = one_of(choose, sorted(world.stories))
    length = world.stories[handle].length
    farthest = one_of(choose, [min(length, 4), min(length, 4), length])
    world.rewind(handle, length - choose.between(0, farthest))


def rewind_as_promised(world: EntryRequests, choose: Chooser) -> None:
    handle = one_of(choose, having(world, lambda story: story.promised is not None))
    story = world.stories[handle]
    assert story.promised is not None
    assert world.rewind(handle, choose.between(story.promised, story.length))


def fork_and_go_back(world: EntryRequests, choose: Chooser) -> None:
    """Into what both share, either of them; then both go on and part."""
    parent = one_of(choose, having(world, lambda story: story.live and story.length))
    pair = [parent, world.fork(parent)]
    length = world.stories[parent].length
    world.rewind(one_of(choose, pair), choose.between(max(0, length - max(1, world.k)), length))
    for _ in range(choose.between(1, 4)):
        world.step(dict.fromkeys(some_of(choose, pair), (1, 1)), 1)


def checkpoint(world: EntryRequests, choose: Chooser) -> None:
    to_host = bool(choose.between(0, 1))
    world.checkpoint(one_of(choose, sorted(world.stories)), to_host=to_host)


def restore(world: EntryRequests, choose: Chooser) -> None:
    world.restore(choose.between(0, len(world.saved) - 1))


def release(world: EntryRequests, choose: Chooser) -> None:
    world.release(choose.between(0, len(world.saved) - 1))


def retire(world: EntryRequests, choose: Chooser) -> None:
    world.retire(one_of(choose, sorted(world.stories)))


def at_whole_blocks(world: EntryRequests) -> list[int]:
    return having(
        world, lambda story: story.live and story.length and not story.length % world.whole
    )


def keep_minimum(world: EntryRequests, choose: Chooser) -> None:
    world.keep_minimum(one_of(choose, at_whole_blocks(world)))


def time_passes(world: EntryRequests, choose: Chooser) -> None:
    """The device is done with some steps, and blocks and slots end their rest."""
    world.clock.complete(choose.between(world.clock.done, world.clock.submitted))


MOST_SAVED = 2

ACTIONS: dict[Callable[[EntryRequests, Chooser], None], Callable[[EntryRequests], object]] = {
    admit: lambda world: len(world.stories) < world.slots,
    extend: lambda world: having(world, lambda story: story.length + 2 < world.context),
    chunk: lambda world: having(world, lambda story: story.pending),
    step: lambda world: having(world, lambda story: story.live),
    plain_steps: lambda world: having(world, lambda story: story.live),
    fork: lambda world: world.stories and len(world.stories) < world.slots,
    rewind: lambda world: world.stories,
    rewind_as_promised: lambda world: having(world, lambda story: story.promised is not None),
    fork_and_go_back: lambda world: (
        len(world.stories) < world.slots and having(world, lambda s: s.live and s.length)
    ),
    checkpoint: lambda world: world.stories and len(world.saved) < MOST_SAVED,
    restore: lambda world: world.saved and len(world.stories) < world.slots,
    release: lambda world: world.saved,
    retire: lambda world: world.stories,
    keep_minimum: at_whole_blocks,
    time_passes: lambda world: world.clock.done < world.clock.submitted,
}
"""What may happen, and when it can."""

OFTEN = [step, step, step, plain_steps, chunk, chunk, admit, rewind_as_promised, fork_and_go_back]


def drive(
    world: EntryRequests,
    choose: Chooser,
    actions: int,
    favoured: Sequence[Callable[[EntryRequests, Chooser], None]] = (),
) -> None:
    """Random actions, some of them as likely as all others; all memory checked every few."""
    often = [*ACTIONS, *OFTEN]
    often += [action for action in favoured for _ in range(len(often) // len(favoured))]
    for number in range(actions):
        can = [action for action in often if ACTIONS[action](world)]
        one_of(choose, can)(world, choose)
        if number % 4 == 0:
            for handle in world.stories:
                world.check(handle)
    world.check_all()


# --- layouts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """One layer each of SWA, HCA, CSA that sees all and CSA that selects, or some of them."""

    window: int
    hca: int
    """Compression, likewise below."""
    csa: int
    indexed: int
    q: int
    k: int
    blocks: int = 1
    """Tokens in a block, in multiples of the least that holds whole entries."""
    row_format: RowFormat = RowFormat.FP32
    tail_dtype: torch.dtype = torch.float32
    dims: tuple[int, int] = (24, 8)
    top_k: int = 3
    schema: type[LayerCacheSchema] = LayerCacheSchema
    layers: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def schemas(self) -> list[LayerCacheSchema]:
        plain = self.row_format is RowFormat.MODEL1
        indexer = IndexerSchema(
            3,
            max(16, self.dims[1]),
            self.top_k,
            row_format=RowFormat.FP8 if plain else self.row_format,
        )
        schemas = [
            self._schema(AttentionType.SWA),
            self._schema(AttentionType.HCA, compression=self.hca),
            self._schema(AttentionType.CSA, compression=self.csa),
            self._schema(AttentionType.CSA, compression=self.indexed, indexer=indexer),
        ]
        return [schemas[layer] for layer in self.layers]

    @property
    def block_tokens(self) -> int:
        return self.blocks * math.lcm(self.hca, self.csa, self.indexed)

    def world(self, seed: int, **options: Any) -> EntryRequests:
        return EntryRequests(self.schemas, seed=seed, block_tokens=self.block_tokens, **options)

    def _schema(self, kind: AttentionType, **options: Any) -> LayerCacheSchema:
        return self.schema(
            kind,
            self.window,
            *self.dims,
            step_width=self.q,
            rewind=self.k,
            row_format=self.row_format,
            tail_dtype=self.tail_dtype,
            **options,
        )


FORMATS = [
    (RowFormat.FP32, torch.float32),
    (RowFormat.FP8, torch.float32),
    (RowFormat.FP32, torch.bfloat16),
    (RowFormat.BF16, torch.bfloat16),
    (RowFormat.FP8, torch.bfloat16),
]
"""Of rows, and of tails."""


def _layouts() -> list[Layout]:
    """Windows, ratios, widths of a step and promises, of any two of which every pair occurs."""
    ratios, layouts = [1, 2, 4, 8], []
    for a, b, c in itertools.product(range(4), repeat=3):
        row_format, tail_dtype = FORMATS[len(layouts) % len(FORMATS)]
        layout = Layout(
            window=[5, 1, 8, 16][a],
            hca=ratios[b],
            csa=ratios[(a + b + c) % 4],
            indexed=ratios[(b + c) % 4],
            q=1 + c,
            k=(a + b) % 4,
            blocks=1 + (a + 2 * b) % 3,
            row_format=row_format,
            tail_dtype=tail_dtype,
            # For time's sake.
            layers=[(1, 2, 3), (0, 1, 3)][(a + b // 2 + c) % 2],
        )
        layouts.append(layout)
    return layouts


LAYOUTS = _layouts()
LAYOUTS += [
    Layout(*sizes, row_format=RowFormat.MODEL1, tail_dtype=tail_dtype, dims=(512, 64))
    for sizes, tail_dtype in (
        ((5, 4, 2, 2, 2, 1), torch.float32),
        ((8, 2, 4, 1, 3, 2), torch.bfloat16),
    )
]


def on_devices(cases: Sequence[tuple[Any, ...]], every: int) -> list[Any]:
    """Each case on the CPU, and of every so many one on a GPU, for which kernels are compiled."""
    on_gpu = [pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in cases[::every]]
    return [(*case, "cpu") for case in cases] + on_gpu


@pytest.mark.parametrize(
    ("number", "device"), on_devices([(number,) for number in range(len(LAYOUTS))], every=13)
)
def test_a_layout_under_some_history(number: int, device: str) -> None:
    layout = LAYOUTS[number]
    world = layout.world(number, device=device)
    world.admit(layout.window + 2, chunk=9)
    drive(world, Seeded(number), 5)


class AnyHistory(RuleBasedStateMachine):
    """Every action in any order; memory is checked after each."""

    @initialize(
        window=st.sampled_from([5, 1, 8, 16]),
        hca=st.sampled_from([1, 2, 4, 8]),
        csa=st.sampled_from([1, 2, 4, 8]),
        indexed=st.sampled_from([1, 2, 4]),
        q=st.integers(1, 4),
        k=st.integers(0, 3),
        blocks=st.integers(1, 3),
        seed=st.integers(0, 999),
    )
    def start(self, seed: int, **layout: int) -> None:
        self.world = Layout(**layout).world(seed)

    @invariant()
    def memory_is_as_it_must_be(self) -> None:
        if hasattr(self, "world"):
            self.world.check_all()
            audit(self.world.state, [taken for taken, _ in self.world.saved])


def _as_rule(action: Callable[[EntryRequests, Chooser], None]) -> Callable[..., None]:
    def act(self: AnyHistory, data: st.DataObject) -> None:
        action(self.world, Drawn(data))

    act.__name__ = action.__name__
    return precondition(lambda self: ACTIONS[action](self.world))(rule(data=st.data())(act))


for _action in ACTIONS:
    setattr(AnyHistory, _action.__name__, _as_rule(_action))

TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
