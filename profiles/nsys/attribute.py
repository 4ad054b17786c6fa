"""Every kernel, copy and memset of every replay, with the scope it belongs to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from capture.spans import ScopePath, SpanMap

from .chain import NodeChain
from .errors import EmptyProfile, SpansMismatch
from .export import Activity, Call, Export, GraphRun
from .host_ranges import HostRanges, made_in
from .saved_spans import SavedSpans

__all__ = ["Attribution", "Replay", "attribute"]


@dataclass
class Replay:
    """One launch of a graph.

    Attributes:
        bucket: the name of the bucket, or of the graph where that is all that is known.
        call: the launch on the host, or None when it lies outside the profile.
        start, end: on the device, of the first activity and the last.
        activities: in the order of their start; none of a profile in graph mode.
        paths: the scope of each activity; () outside all scopes, None where it is not known.
        refusal: why scopes are not known, or "".
    """

    bucket: str
    call: Call | None
    start: int
    end: int
    activities: tuple[Activity, ...] = ()
    paths: tuple[ScopePath | None, ...] = ()
    refusal: str = ""

    @property
    def duration(self) -> int:
        """From its first activity's start to its last one's end, in nanoseconds."""
        return self.end - self.start

    def gaps(self) -> list[int]:
        """How long before each activity the replay had nothing to run, in nanoseconds."""
        gaps, busy_until = [], self.start
        for activity in self.activities:
            gaps.append(max(0, activity.start - busy_until))
            busy_until = max(busy_until, activity.end)
        return gaps


@dataclass
class Attribution:
    """What a profile holds.

    Attributes:
        mode: "node" or "graph", as nsys traced graphs.
        replays: in the order of their start on the device.
        outside: activities of no graph.
        ranges: of the host.
        notes: what a reader must know of these numbers.
    """

    mode: str
    replays: list[Replay]
    outside: list[Activity]
    ranges: HostRanges
    notes: list[str] = field(default_factory=list)

    @property
    def attributed_share(self) -> float:
        """Of the device time inside replays, the part in a known scope. 0 in graph mode."""
        known = total = 0
        for replay in self.replays:
            for activity, path in zip(replay.activities, replay.paths, strict=True):
                total += activity.duration
                known += activity.duration if path else 0
        return known / total if total else 0.0


def attribute(export: Export, spans: Iterable[SpanMap] = ()) -> Attribution:
    """Find the scope of everything that ran in a replay.

    Args:
        export: what was read of a profile.
        spans: as saved at capture, for replays whose capture lies outside the profile.

    Raises:
        EmptyProfile: when no graph was replayed in the profile.
        SpansMismatch: when spans were given, were needed, and fit no replay.
    """
    ranges = HostRanges(export.ranges)
    inside = defaultdict(list)
    outside = []
    for activity in export.activities:
        if activity.node is None:
            outside.append(activity)
        else:
            inside[activity.process, activity.correlation].append(activity)
    if inside:
        found = _Nodes(export, ranges, SavedSpans(spans)).replays(inside)
        found.outside = outside
        return found
    if export.graph_runs:
        replays = [_whole(run, export, ranges) for run in export.graph_runs]
        return Attribution("graph", replays, outside, ranges, [_GRAPH_MODE])
    raise EmptyProfile(_empty(outside))


class _Nodes:
    """Attributes replays of a profile in node mode."""

    def __init__(self, export: Export, ranges: HostRanges, saved: SavedSpans) -> None:
        self._export = export
        self._ranges = ranges
        self._saved = saved
        self._chain = NodeChain(export.nodes, ranges)
        self._refusals: Counter[str] = Counter()
        self._matched = 0

    def replays(self, inside: dict[tuple[int, int], list[Activity]]) -> Attribution:
        replays = [self._replay(key, activities) for key, activities in inside.items()]
        if self._saved and self._refusals and not self._matched:
            reason, _ = self._refusals.most_common(1)[0]
            raise SpansMismatch(
                f"the saved spans fit no replay of this profile: {reason}; save them from the run "
                "that is profiled, GRAPHCACHE_SPANS=FOLDER in its environment"
            )
        notes = [f"{reason} ({count} replays)" for reason, count in self._refusals.items()]
        notes += self._loop_notes(replays)
        replays.sort(key=lambda replay: replay.start)
        return Attribution("node", replays, [], self._ranges, notes)

    def _replay(self, key: tuple[int, int], activities: Sequence[Activity]) -> Replay:
        call = self._export.calls.get(key)
        made = [self._chain.origin(a.process, a.node or 0) for a in activities]
        paths: list[ScopePath | None] = [one.path if one else None for one in made]
        bucket = next((one.bucket for one in made if one and one.bucket), None)
        rows = self._ranges.replayed_rows(call.thread, call.start) if call else None
        refusal = ""
        if None in paths and self._saved:
            matched = self._saved.match(activities, rows)
            self._matched += not matched.refusal
            refusal = matched.refusal
            bucket = bucket or matched.bucket
            paths = [
                path if path is not None else saved
                for path, saved in zip(paths, matched.paths, strict=True)
            ]
        elif None in paths:
            refusal = _NO_CAPTURE
        if refusal:
            self._refusals[refusal] += 1
        if bucket is None:
            bucket = "unknown" if rows is None else str(rows)
        end = max(activity.end for activity in activities)
        return Replay(
            bucket, call, activities[0].start, end, tuple(activities), tuple(paths), refusal
        )

    def _loop_notes(self, replays: Sequence[Replay]) -> list[str]:
        repeated = 0
        for replay in replays:
            counted = Counter(activity.node for activity in replay.activities)
            repeated = max(repeated, *counted.values())
        if repeated > 1:
            return [
                f"some launches ran a node up to {repeated} times: loops on the device. Numbers "
                "are by launch, not by iteration"
            ]
        if self._export.has_conditional_nodes:
            return [_FIRST_ITERATION]
        return []


def _whole(run: GraphRun, export: Export, ranges: HostRanges) -> Replay:
    """A replay of a profile in graph mode."""
    call = export.calls.get((run.process, run.correlation))
    rows = ranges.replayed_rows(call.thread, call.start) if call else None
    made = export.graph_execs.get((run.process, run.graph_exec))
    captured = made_in(ranges.open_at(made.thread, made.start)).bucket if made else None
    bucket = captured or (f"graph {run.graph}" if rows is None else str(rows))
    return Replay(bucket, call, run.start, run.end)


def _empty(outside: Sequence[Activity]) -> str:
    ran = f"{len(outside)} kernels, copies and memsets" if outside else "nothing"
    return (
        f"no graph was replayed in this profile; {ran} ran on the device. Trace CUDA "
        "(nsys profile --trace=cuda,nvtx) and let the window hold some steps"
    )


_GRAPH_MODE = (
    "traced with --cuda-graph-trace=graph: whole replays only. For scopes trace with "
    "--cuda-graph-trace=node"
)
_NO_CAPTURE = (
    "the capture lies outside the profile and no spans were given: pass --spans FILE, which "
    "GRAPHCACHE_SPANS=FOLDER in the environment of the run saves"
)
_FIRST_ITERATION = (
    "graphs with conditional nodes were made: of a loop on the device only the first iteration is "
    "traced, so its launches show one step whatever they ran"
)
