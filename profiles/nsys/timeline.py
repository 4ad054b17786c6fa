"""A profile as a trace that Perfetto and Chrome open: scopes above the kernels that they launched.

On the device each stream has a track, on which a replay holds its scopes, and they hold what ran.
On the host each thread shows the library's ranges and its launches, with an arrow to the replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from capture.spans import ScopePath

from .attribute import Attribution, Replay
from .export import FOREVER, Activity
from .summary import UNKNOWN

__all__ = ["timeline"]

DEVICE, HOST = 1, 2
Event = dict[str, Any]


def timeline(attribution: Attribution) -> dict[str, Any]:
    """The trace as an object for `json.dump`; times in microseconds.

    Slices of a track nest. Where a kernel begins before the one ahead of it has ended, the earlier
    one is drawn up to there; its `duration_us` tells the truth.
    """
    tracks = _Tracks()
    events: list[Event] = []
    for number, replay in enumerate(attribution.replays):
        events += _replay_events(replay, number, tracks)
    for activity in attribution.outside:
        track = tracks.of(DEVICE, f"device {activity.device}, stream {activity.stream}, no graph")
        events.append(_slice(activity.name, activity.start, activity.end, track, "device"))
    events += _host_events(attribution, tracks)
    return {"displayTimeUnit": "ns", "traceEvents": [*tracks.names(), *events]}


class _Tracks:
    """Numbers for tracks, by name."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}
        self._free_at: dict[tuple[int, str], int] = {}

    def of(self, side: int, name: str) -> tuple[int, int]:
        """Process and thread of a track, as traces call them."""
        return side, self._numbers.setdefault((side, name), len(self._numbers) + 1)

    def free_from(self, name: str, start: int, end: int) -> tuple[int, int]:
        """A device track that is free at the time: replays in flight lie side by side."""
        lane, wanted = 1, name
        while self._free_at.get((DEVICE, wanted), 0) > start:
            lane += 1
            wanted = f"{name}, {lane}"
        self._free_at[DEVICE, wanted] = end
        return self.of(DEVICE, wanted)

    def names(self) -> Iterator[Event]:
        for side, name in ((DEVICE, "device"), (HOST, "host")):
            yield {"ph": "M", "name": "process_name", "pid": side, "tid": 0, "args": {"name": name}}
        for (side, name), number in self._numbers.items():
            yield {
                "ph": "M", "name": "thread_name", "pid": side, "tid": number,
                "args": {"name": name},
            }  # fmt: skip


def _replay_events(replay: Replay, number: int, tracks: _Tracks) -> Iterator[Event]:
    title = f"replay {replay.bucket}"
    if not replay.activities:
        track = tracks.free_from("replays", replay.start, replay.end)
        yield _slice(title, replay.start, replay.end, track, "replay")
        yield from _arrow(replay, number, track, tracks)
        return
    streams: dict[tuple[int, int], list[tuple[Activity, ScopePath]]] = {}
    for activity, path in zip(replay.activities, replay.paths, strict=True):
        key = (activity.device, activity.stream)
        streams.setdefault(key, []).append((activity, UNKNOWN if path is None else path))
    for place, ((device, stream), ran) in enumerate(streams.items()):
        start, end = ran[0][0].start, max(activity.end for activity, _ in ran)
        track = tracks.free_from(f"device {device}, stream {stream}", start, end)
        yield _slice(title, start, end, track, "replay")
        yield from _scope_slices(ran, track)
        if place == 0:
            yield from _arrow(replay, number, track, tracks)


def _scope_slices(ran: list[tuple[Activity, ScopePath]], track: tuple[int, int]) -> Iterator[Event]:
    """Slices of the scopes and of what ran in them, each inside the one around it."""
    opened: list[tuple[str, int]] = []
    busy_until = 0
    for index, (activity, path) in enumerate(ran):
        following = ran[index + 1] if index + 1 < len(ran) else None
        for name in path[len(opened) :]:
            opened.append((name, activity.start))
        end = activity.end if following is None else min(activity.end, following[0].start)
        busy_until = max(busy_until, end)
        yield _slice(
            activity.name, activity.start, end, track, activity.kind,
            duration_us=activity.duration / 1e3, scope=" / ".join(path),
        )  # fmt: skip
        kept = _common(path, following[1]) if following is not None else 0
        while len(opened) > kept:
            name, start = opened.pop()
            yield _slice(name, start, busy_until, track, "scope")


def _common(one: ScopePath, other: ScopePath) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def _arrow(replay: Replay, number: int, track: tuple[int, int], tracks: _Tracks) -> Iterator[Event]:
    """From the launch on the host to the replay."""
    call = replay.call
    if call is None:
        return
    host = tracks.of(HOST, _thread_name(call.thread))
    yield _slice(call.name, call.start, call.end, host, "launch")
    arrow = {"name": "launch", "cat": "launch", "id": number}
    yield {"ph": "s", "ts": call.start / 1e3, "pid": host[0], "tid": host[1], **arrow}
    yield {
        "ph": "f", "bp": "e", "ts": replay.start / 1e3, "pid": track[0], "tid": track[1], **arrow
    }  # fmt: skip


def _host_events(attribution: Attribution, tracks: _Tracks) -> Iterator[Event]:
    last = max((replay.end for replay in attribution.replays), default=0)
    for thread, ranges in attribution.ranges.by_thread.items():
        track = tracks.of(HOST, _thread_name(thread))
        for found in ranges:
            end = max(last, found.start) if found.end >= FOREVER else found.end
            rows = {} if found.payload is None else {"rows": found.payload}
            yield _slice(found.name, found.start, end, track, "host", **rows)


def _thread_name(thread: int) -> str:
    return f"thread {thread & 0xFFFFFF}"


def _slice(
    name: str, start: int, end: int, track: tuple[int, int], category: str, **args: Any
) -> Event:
    return {
        "ph": "X", "name": name, "cat": category, "ts": start / 1e3, "dur": (end - start) / 1e3,
        "pid": track[0], "tid": track[1], "args": args,
    }  # fmt: skip
