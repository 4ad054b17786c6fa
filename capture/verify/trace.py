"""One run of a step as the list of its operations, and where two runs part.

A capture keeps what Python decided while it ran: which operations, with which numbers, on which
memory. So the run that was captured, held against a run now, shows what has been frozen, with the
line that did it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..errors import SourceLine
from ..source import line_of_frames
from ..watch import leaves_of, storage_key, tensors_in

__all__ = ["Entry", "Parting", "Trace", "Why", "first_parting"]

MOST_FRAMES = 80
BEGINS = "watched_step"
"""The function that runs the step under watch: lines of its callers are not the step's."""
MOST_VALUES = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation.

    Attributes:
        name: of the operation.
        values: its arguments that are no tensors, as text.
        places: of its tensors: shape, strides, offset, dtype and whose memory.
        frames: the stack, innermost first: file, line and function.
    """

    name: str
    values: tuple[str, ...]
    places: tuple[Any, ...]
    frames: tuple[tuple[str, int, str], ...] = field(compare=False)

    @property
    def source(self) -> SourceLine | None:
        """The user's line."""
        return line_of_frames([(file, line) for file, line, _ in self.frames])

    @property
    def in_finalizer(self) -> bool:
        """Whether it was run by an object that was being destroyed."""
        return any(
            function == "__del__" or file.endswith(("/weakref.py", "\\weakref.py"))
            for file, _, function in self.frames
        )


class Why(Enum):
    """How two runs part."""

    BRANCH = "another operation"
    VALUE = "another number"
    PLACE = "other memory"


@dataclass(frozen=True)
class Parting:
    """The first operation in which two runs differ.

    Attributes:
        why: how.
        source: the user's line, or None.
        detail: of both runs, in words.
    """

    why: Why
    source: SourceLine | None
    detail: str


class Trace:
    """The operations of a run, as they come.

    Attributes:
        entries: so far.
        made: of each storage that the run made, by key, the entry that made it.
        made_bytes: of all that it made.
        collected: whether the collector ran meanwhile, and the user's line that it ran in.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.made: dict[int, int] = {}
        self.made_bytes = 0
        self.collected = False
        self.collected_at: SourceLine | None = None

    def add(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """An operation is about to run."""
        values = tuple(_shown(leaf) for leaf in leaves_of((args, kwargs)))
        if func is torch.ops.aten.lift_fresh.default:
            # A tensor made of Python data: what it holds are numbers of Python's.
            self.made[storage_key(args[0])] = len(self.entries)
            values = (_held(args[0]),)
        places = tuple(self._place(tensor) for tensor in tensors_in(args, kwargs))
        entry = Entry(func.name(), values, places, _frames())
        self.entries.append(entry)
        return entry

    def add_made(self, fresh: Mapping[int, Tensor]) -> None:
        """It has run; `fresh` is what it made, by storage."""
        for key, tensor in fresh.items():
            self.made[key] = len(self.entries) - 1
            self.made_bytes += tensor.untyped_storage().nbytes()

    def _place(self, tensor: Tensor) -> tuple[Any, ...]:
        maker = self.made.get(storage_key(tensor))
        memory = ("made", maker) if maker is not None else ("at", _address(tensor))
        return (
            memory, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype
        )  # fmt: skip


def first_parting(captured: Trace, now: Trace) -> Parting | None:
    """Where a run now leaves the one that was captured; None where it doesn't."""
    for then, here in zip(captured.entries, now.entries, strict=False):
        if then.name != here.name:
            said = f"{then.name} ran at capture where {here.name} runs now"
            return Parting(Why.BRANCH, _line_of_branch(captured, then, now, here), said)
        if then.values != here.values:
            was, now_is = _different(then.values, here.values)
            said = f"{then.name} was captured with {was}, and has {now_is} now"
            return Parting(Why.VALUE, here.source, said)
        if then.places != here.places:
            was, now_is = _different(then.places, here.places)
            if was[1:] != now_is[1:]:
                said = f"{then.name} was captured on {_form(was)}, and works on {_form(now_is)} now"
                return Parting(Why.VALUE, here.source, said)
            said = f"{then.name} was captured on other memory than it works on now: {_form(was)}"
            return Parting(Why.PLACE, here.source, said)
    counts = len(captured.entries), len(now.entries)
    if counts[0] != counts[1]:
        longer = captured if counts[0] > counts[1] else now
        extra = longer.entries[min(counts)]
        when = "at capture" if longer is captured else "now"
        return Parting(Why.BRANCH, extra.source, f"{extra.name} runs {when} only")
    return None


def _line_of_branch(captured: Trace, then: Entry, now: Trace, here: Entry) -> SourceLine | None:
    """The line that only one of two runs has, if one has."""
    for entry, other in ((here, now), (then, captured)):
        others = {each.source for each in (captured if other is now else now).entries}
        if entry.source is not None and entry.source not in others:
            return entry.source
    return here.source or then.source


def _different(then: Sequence[Any], now: Sequence[Any]) -> tuple[Any, Any]:
    return next((a, b) for a, b in zip(then, now, strict=False) if a != b)


def _form(place: tuple[Any, ...]) -> str:
    return f"a tensor of shape {list(place[1])}, {place[4]}"


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return ""
    return "a generator" if isinstance(leaf, torch.Generator) else repr(leaf)


def _held(made: Tensor) -> str:
    if made.numel() > MOST_VALUES or made.device.type != "cpu":
        return ""
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        return repr(made.tolist())


def _address(tensor: Tensor) -> int:
    pointer: int = tensor.untyped_storage().data_ptr()
    return pointer


def _frames() -> tuple[tuple[str, int, str], ...]:
    frames: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(4)
    while frame is not None and len(frames) < MOST_FRAMES:
        code = frame.f_code
        if code.co_name == BEGINS:
            break
        frames.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(frames)
