"""Faults put on purpose into rings, compressor, attention and blocks: `drive` must find every one.

A fault is one change: to a line of a torch reference, to a schema's row count, or to what a copy
carries. The machine of `tests.test_entry_state` fails for one of a few seeds with the fault, and
for none of them without it. Kernels are not concerned: they are held against these references.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import graphcache.ops
from graphcache import DecodeState, LayerCacheSchema
from graphcache.block_store import BlockStore
from graphcache.entry_layer import EntryLayer
from graphcache.errors import GraphCacheError
from graphcache.ops.absorb import Compressor, TailParts
from graphcache.rings import TailRing, WindowRing
from tests.entry_requests import EntryRequests
from tests.test_entry_state import (
    Chooser,
    Layout,
    Seeded,
    admit,
    checkpoint,
    chunk,
    drive,
    fork,
    fork_and_go_back,
    restore,
    rewind,
    rewind_as_promised,
    step,
)

Patch = pytest.MonkeyPatch
Action = Callable[[EntryRequests, Chooser], None]

LAYOUT = Layout(window=5, hca=2, csa=4, indexed=2, q=3, k=2, blocks=2)
PROMISING = Layout(window=5, hca=1, csa=1, indexed=1, q=1, k=2)
NARROW = Layout(window=1, hca=2, csa=8, indexed=2, q=3, k=2)
LONG_BLOCKS = Layout(window=5, hca=8, csa=8, indexed=8, q=3, k=2)
SEEDS = range(12)
ACTIONS = 16


# --- how a fault is put in ------------------------------------------------------------------------


def _operations() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(graphcache.ops.__path__, "graphcache.ops."):
        yield importlib.import_module(found.name)


def function_of(name: str) -> FunctionType:
    """The function of that name that an operation's module defines, whichever that is."""
    defined = [
        function
        for module in _operations()
        if isinstance(function := vars(module).get(name), FunctionType)
        and function.__module__ == module.__name__
    ]
    assert len(defined) == 1, f"{len(defined)} functions are called {name}"
    return defined[0]


def edited(function: FunctionType, *edits: tuple[str, str]) -> FunctionType:
    """The function with other text in some places, each of which must be there once."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edits:
        found = source.count(old)
        assert found == 1, f"the fault's place is gone: {old!r} is {found} times in {function}"
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source, function.__globals__, made)
    changed: FunctionType = made[function.__name__]
    return changed


def put_for(patch: Patch, function: FunctionType, other: Callable[..., Any]) -> None:
    """Put another function in a function's place, wherever the library has imported it."""
    for module in [module for name, module in sys.modules.items() if name.startswith("graphcache")]:
        for name, value in list(vars(module).items()):
            if value is function:
                patch.setattr(module, name, other)


def edit(name: str, *edits: tuple[str, str]) -> Callable[[Patch], None]:
    """A fault in a function that references call."""

    def put(patch: Patch) -> None:
        function = function_of(name)
        put_for(patch, function, edited(function, *edits))

    return put


def edit_method(owner: type, name: str, *edits: tuple[str, str]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, edited(getattr(owner, name), *edits))


def edit_operation(name: str, *edits: tuple[str, str]) -> Callable[[Patch], None]:
    """A fault in the reference of an operation, which takes the registered one's place."""

    def put(patch: Patch) -> None:
        module = importlib.import_module(f"graphcache.ops.{name}")
        patch.setattr(module, "_op", edited(getattr(module.reference, name), *edits))

    return put


def wrap(
    name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[Patch], None]:
    """A fault around a function that references call."""

    def put(patch: Patch) -> None:
        function = function_of(name)
        put_for(patch, function, make(function))

    return put


def all_of(*faults: Callable[[Patch], None]) -> Callable[[Patch], None]:
    def put(patch: Patch) -> None:
        for fault in faults:
            fault(patch)

    return put


def nothing(patch: Patch) -> None:
    """The layout's schema is the fault."""


# --- faults that are more than a line -------------------------------------------------------------


class ShortWindow(LayerCacheSchema):
    """A window's ring of one row fewer."""

    @property
    def swa_rows(self) -> int:
        return super().swa_rows - 1


class ShortTail(LayerCacheSchema):
    """A tail's rings of one row fewer."""

    @property
    def tail_buffer_size(self) -> int:
        return max(0, super().tail_buffer_size - 1)


def swapped_streams(tail_rows: Callable[..., Any]) -> Callable[..., Any]:
    """What the projection says of the current stream is taken for the previous one's."""

    def swapped(parts: Compressor, positions: Tensor) -> list[Tensor]:
        width = parts.norm.shape[0]
        return [rows.roll(width, dims=1) for rows in tail_rows(parts, positions)]

    return swapped


def without_previous_block(emit: Callable[..., Any]) -> Callable[..., Any]:
    def alone(parts: Compressor, *batch: Any) -> None:
        emit(parts._replace(tail=TailParts(*parts.tail[:2])), *batch)

    return alone


def emit_to_slot_0(emit: Callable[..., Any]) -> Callable[..., Any]:
    """Rows that complete no block, padding too, write slot 0's first entry."""

    def clamped(
        parts: Compressor, cos: Tensor, sin: Tensor, eps: float, table: Tensor, slots: Tensor,
        positions: Tensor, q_len: int,
    ) -> None:  # fmt: skip
        emit(parts, cos, sin, eps, table, slots, positions, q_len)
        if ((slots < 0) | ((positions + 1) % parts.bias.shape[0] != 0)).any():
            for stored in parts.entries.parts():
                stored[table[0, 0], 0] = 1

    return clamped


def padding_is_the_last_slot(patch: Patch) -> None:
    """-1 as an index, in a pool whose last row is a request's."""
    module = importlib.import_module("graphcache.ops.absorb")
    names = list(inspect.signature(module.reference.absorb).parameters)

    def absorbing(*given: Any) -> None:
        arguments = dict(zip(names, given, strict=True))
        slots = arguments["slots"]
        if arguments["tags"] is not None:
            last = arguments["tags"].shape[0] - 2
            arguments["slots"] = torch.where(slots < 0, last, slots)
        module.reference.absorb(**arguments)

    patch.setattr(module, "_op", absorbing)


def one_selected_less(patch: Patch) -> None:
    module = importlib.import_module("graphcache.ops.index_select")
    patch.setattr(
        module, "_op", lambda *given: module.reference.index_select(*given[:-1], given[-1] - 1)
    )


def leaves_out(copy: str, part: str) -> Callable[[Patch], None]:
    """Of the slot that `copy` fills, fields with `part` in their names stay what they were."""

    def put(patch: Patch) -> None:
        method = getattr(DecodeState, copy)

        def partial(self: DecodeState, *given: Any) -> int:
            kept = {name: self.pool[name].clone() for name in self.pool.fields if part in name}
            handle: int = method(self, *given)
            row = self.slots.row_of(handle)
            for name, rows in kept.items():
                self.pool[name][row] = rows[row]
            return handle

        patch.setattr(DecodeState, copy, partial)

    return put


def shared_partly_filled_block(patch: Patch) -> None:
    """A fork has the very block that the other one goes on writing to."""

    def share(self: BlockStore, blocks: list[int], length: int, tokens: int) -> list[int]:
        held = self.blocks_for(length)
        fresh = self._take(max(self.blocks_for(tokens), held) - held)
        for block in blocks[:held]:
            self._users[block] += 1
        return blocks[:held] + fresh

    patch.setattr(BlockStore, "_share", share)


def rewind_does_nothing(patch: Patch) -> None:
    checked = edited(DecodeState.rewind, ("check_rewind(", "return check_rewind("))
    patch.setattr(DecodeState, "rewind", checked)


def rewind_to_anywhere(patch: Patch) -> None:
    patch.setattr("graphcache.decode_state.check_rewind", lambda *_: None)


def rewind_keeps_shared_blocks(patch: Patch) -> None:
    patch.setattr(BlockStore, "rewind", lambda self, row, length: None)


# --- the faults -----------------------------------------------------------------------------------

READ = "a read was wrong|a stored row is wrong"
"""Of attention's output, or of an entry."""
TAIL = "a tail row is wrong"
WRITTEN = f"a row was written that no token of the batch owns|{READ}"
REFUSED = "a promised rewind was refused"
GRANTED = "DID NOT RAISE"
"""A rewind that the rule forbids."""

_LAST_ROWS = "[:, :-ring_rows] &= slots.view(-1, q_len)[:, ring_rows:] < 0"
_WRITTEN_FIRST = "self._absorb(inputs, batch, emit=False) or self._absorb_chunk("
_FROM, _FROM_BEFORE = "max(0, position - m + 1 - back)", "position - m + 1 - back"
_OLD_GATE = "read_gates.append(ring_gates[slot, x % ring_rows])"
_MASKED_GATE = f"{_OLD_GATE[:-1]} if x >= 0 else torch.full([width], -torch.inf))"
_BIASED_GATE = f"{_OLD_GATE[:-1]} + parts.bias[x % m, columns])"
_PHASE = "positions.long() % parts.bias.shape[0]"
_NEXT_PHASE = "(positions.long() + 1) % parts.bias.shape[0]"
_RING_PHASE = "positions.long() % parts.tail.values.shape[1] % parts.bias.shape[0]"
_VISIBLE, _VISIBLE_LATE = "(position + 1) // compression", "position // compression"
_SINK = " + torch.exp(sink - top)"
_TURNED_BACK = "_rotated_back(mixed, cos[token], sin[token])"


@dataclass(frozen=True)
class Fault:
    put: Callable[[Patch], None]
    says: str
    """How the machine finds it: part of what it says."""
    layout: Layout = LAYOUT
    favoured: tuple[Action, ...] = ()
    """Actions that the fault shows in."""


FAULTS = {
    # Rings.
    "a window's ring has a row less": Fault(
        nothing, READ, replace(LAYOUT, k=0, schema=ShortWindow)
    ),
    "a window's ring has a row less than was promised": Fault(
        nothing, REFUSED, replace(PROMISING, schema=ShortWindow),
        (step, rewind_as_promised, rewind_as_promised),
    ),
    "a tail's rings have a row less than was promised": Fault(
        nothing, REFUSED, replace(PROMISING, schema=ShortTail),
        (step, rewind_as_promised, rewind_as_promised),
    ),
    "rewinds are counted from len": Fault(
        edit_method(DecodeState, "rewind", ("(length, high, floor", "(length, current, floor")),
        GRANTED, favoured=(step, rewind),
    ),
    "rewinds are trusted at any distance": Fault(rewind_to_anywhere, GRANTED, favoured=(rewind,)),
    "rewinds do nothing": Fault(
        rewind_does_nothing, "lengths are wrong|not its story's next", favoured=(rewind,)
    ),
    "a rewind takes no account of the block before": Fault(
        edit_method(TailRing, "needed", (" - self.overlap", "")), GRANTED, NARROW, (rewind,)
    ),
    "a rewind takes the window for a token shorter": Fault(
        edit_method(WindowRing, "needed", ("self.window + 1", "self.window + 2")),
        GRANTED, LONG_BLOCKS, (rewind, step),
    ),
    "of a long chunk the first rows land": Fault(
        edit("written", (_LAST_ROWS, "[:, ring_rows:] = False")), READ, favoured=(admit, chunk)
    ),
    "a chunk is written before it is read": Fault(
        edit_method(EntryLayer, "attend", ("self._absorb_chunk(", _WRITTEN_FIRST)),
        READ, favoured=(admit, chunk),
    ),
    # The compressor.
    "rows before position 0 are read": Fault(edit("emit_entries", (_FROM, _FROM_BEFORE)), READ),
    "values are not masked where gates are": Fault(
        edit("emit_entries", (_FROM, _FROM_BEFORE), (_OLD_GATE, _MASKED_GATE)), READ
    ),
    "streams are swapped": Fault(wrap("_tail_rows", swapped_streams), READ),
    "the block before is left out": Fault(wrap("emit_entries", without_previous_block), READ),
    "an entry is turned by its block's last position": Fault(
        edit_operation("absorb", ("(parts, block_cos, block_sin,", "(parts, cos, sin,")), READ
    ),
    "the bias is added at read": Fault(
        all_of(
            edit("append_tail", ("_tail_rows(parts, positions)", "parts.values, parts.gates")),
            edit("emit_entries", (_OLD_GATE, _BIASED_GATE)),
        ),
        TAIL,
    ),
    "the bias is added twice": Fault(edit("emit_entries", (_OLD_GATE, _BIASED_GATE)), READ),
    "the bias is of the next token's phase": Fault(edit("_tail_rows", (_PHASE, _NEXT_PHASE)), READ),
    "the bias goes by the ring's row": Fault(edit("_tail_rows", (_PHASE, _RING_PHASE)), READ),
    "rows that do not emit are clamped to slot 0": Fault(
        wrap("emit_entries", emit_to_slot_0), WRITTEN
    ),
    # Padding.
    "padding is the last slot": Fault(padding_is_the_last_slot, WRITTEN),
    "padding attends": Fault(
        edit_operation("entry_attention", ("if slot < 0:", "if slot < -1:")),
        "padding gave something else than zeros",
    ),
    # Attention and selection.
    "an entry is seen a token late": Fault(
        all_of(
            edit_operation("entry_attention", (_VISIBLE, _VISIBLE_LATE)),
            edit_operation("index_select", (_VISIBLE, _VISIBLE_LATE)),
        ),
        READ,
    ),
    "the indexer sees an entry a token late": Fault(
        edit_operation("index_select", (_VISIBLE, _VISIBLE_LATE)), READ
    ),
    "the window is a token too long": Fault(
        edit_operation("entry_attention", ("- window_size + 1)", "- window_size)")), READ
    ),
    "the sink is left out": Fault(edit_operation("entry_attention", (_SINK, "")), READ),
    "the output is not turned back": Fault(
        edit_operation("entry_attention", (_TURNED_BACK, "mixed")), READ
    ),
    "one entry less is selected": Fault(one_selected_less, READ),
    # Copies, and blocks that are shared.
    "a fork leaves out the tails": Fault(leaves_out("fork", "tail_"), f"{READ}|{TAIL}"),
    "a fork leaves out the index tails": Fault(leaves_out("fork", "index_tail_"), f"{READ}|{TAIL}"),
    "a fork leaves out the windows": Fault(leaves_out("fork", "swa"), READ),
    "a checkpoint leaves out the tails": Fault(
        leaves_out("restore", "tail_"), f"{READ}|{TAIL}",
        favoured=(checkpoint, restore, restore, step),
    ),
    "a fork does not copy the partly filled block": Fault(
        edit_method(BlockStore, "_share", ("self.pool.copy_row(blocks[full], fresh[0])", "pass")),
        READ, favoured=(fork, step),
    ),
    "a fork shares the partly filled block": Fault(
        shared_partly_filled_block, READ, favoured=(fork, step)
    ),
    "a rewind does not copy the block it ends in": Fault(
        edit_method(BlockStore, "rewind", ("self.pool.copy_row(owned[first], fresh[0])", "pass")),
        READ, replace(LAYOUT, k=4), (fork_and_go_back,),
    ),
    "a rewind keeps blocks that are shared": Fault(
        rewind_keeps_shared_blocks, READ, replace(LAYOUT, k=4), (fork_and_go_back,)
    ),
}  # fmt: skip


def _complaint(layout: Layout, seed: int, favoured: tuple[Action, ...]) -> str | None:
    """What the machine has to say; None if all is well."""
    try:
        drive(layout.world(seed), Seeded(seed), ACTIONS, favoured)
    except (AssertionError, pytest.fail.Exception, GraphCacheError) as error:
        return str(error)
    return None


@cache
def _complaint_without_fault(layout: Layout, seed: int, favoured: tuple[Action, ...]) -> str | None:
    return _complaint(layout, seed, favoured)


@pytest.mark.parametrize("name", FAULTS)
def test_the_machine_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    for seed in SEEDS:
        sound = replace(fault.layout, schema=LayerCacheSchema)
        assert _complaint_without_fault(sound, seed, fault.favoured) is None
        with monkeypatch.context() as patch:
            fault.put(patch)
            complaint = _complaint(fault.layout, seed, fault.favoured)
        if complaint is not None:
            assert re.search(fault.says, complaint), f"found by chance: {complaint}"
            return
    pytest.fail("the machine finds nothing wrong")
