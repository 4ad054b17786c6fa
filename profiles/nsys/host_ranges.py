"""Which ranges were open on a thread at a time, and what they say of a capture or a replay."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from capture.ranges import CAPTURE, REPLAY
from capture.spans import ScopePath

from .export import Range

__all__ = ["HostRanges", "Made", "made_in"]


@dataclass(frozen=True)
class Made:
    """Where in a capture something was made.

    Attributes:
        bucket: the captured bucket's name, or None outside a bucket's capture.
        path: the scopes open then.
    """

    bucket: str | None
    path: ScopePath


class HostRanges:
    """Ranges by thread. Those of one thread nest.

    Args:
        ranges: in the order of their start, the outer first.

    Attributes:
        by_thread: the ranges of each thread.
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.by_thread: dict[int, list[Range]] = defaultdict(list)
        for found in ranges:
            self.by_thread[found.thread].append(found)
        self._starts = {
            thread: [found.start for found in mine] for thread, mine in self.by_thread.items()
        }
        self._outer = {thread: _outer_of(mine) for thread, mine in self.by_thread.items()}

    def open_at(self, thread: int, time: int) -> list[Range]:
        """Ranges open at a time, the outermost first."""
        mine = self.by_thread.get(thread)
        if mine is None:
            return []
        index = bisect_right(self._starts[thread], time) - 1
        stack = []
        while index >= 0:
            if mine[index].end >= time:
                stack.append(mine[index])
            index = self._outer[thread][index]
        return stack[::-1]

    def replayed_rows(self, thread: int, time: int) -> int | None:
        """Rows of the bucket that the host was launching, or None."""
        for found in self.open_at(thread, time):
            if found.name == REPLAY and found.payload is not None:
                return found.payload
        return None


def made_in(ranges: Iterable[Range]) -> Made:
    """The bucket that was being captured, and the scopes inside; of ranges from the outermost."""
    bucket: str | None = None
    path: list[str] = []
    for found in ranges:
        if found.name.startswith(f"{CAPTURE} "):
            if bucket is None:
                bucket = found.name.removeprefix(f"{CAPTURE} ")
                # What was open around the capture, a profile's window say, is no scope of the step.
                path.clear()
            # Else a graph captured by itself before, with a bucket of its own; the outer replays.
        else:
            path.append(found.name)
    return Made(bucket, tuple(path))


def _outer_of(ranges: list[Range]) -> list[int]:
    """For each range the index of the one around it, or -1."""
    outer = []
    stack: list[int] = []
    for index, found in enumerate(ranges):
        while stack and ranges[stack[-1]].end <= found.start:
            stack.pop()
        outer.append(stack[-1] if stack else -1)
        stack.append(index)
    return outer
