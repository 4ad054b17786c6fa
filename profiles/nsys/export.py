"""The tables of an SQLite export as records: what ran on the device, and what the host did.

Times are nanoseconds since the profile began. Ids are unique in a process only, so they come with
their process: the upper part of what the export calls a global id.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capture.ranges import DOMAIN

from .errors import NotAnExport, TornExport

__all__ = ["Activity", "Call", "Export", "GraphRun", "NodeEvent", "Range", "read_export"]

MAGIC = b"SQLite format 3\0"
THREAD_BITS = 24
# Kinds of NVTX_EVENTS.
PUSH_POP, DOMAIN_CREATED = 59, 75
# A range that was still open when the profile ended.
FOREVER = 1 << 63

_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}


@dataclass(frozen=True, slots=True)
class Activity:
    """A kernel, copy or memset.

    Attributes:
        kind: "kernel", "memcpy" or "memset".
        name: of the kernel without its arguments; of others their kind.
        symbol: the kernel's mangled name, or its short one where the export has no other.
        start, end: on the device.
        process, device, stream: where it ran.
        correlation: the same as that of the call that launched it.
        node: of the graph it was launched by, or None.
    """

    kind: str
    name: str
    symbol: str
    start: int
    end: int
    process: int
    device: int
    stream: int
    correlation: int
    node: int | None

    @property
    def duration(self) -> int:
        """In nanoseconds."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class GraphRun:
    """A whole replay, of a profile in graph mode."""

    start: int
    end: int
    process: int
    stream: int
    correlation: int
    graph: int
    graph_exec: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the CUDA API on a thread."""

    name: str
    start: int
    end: int
    thread: int


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A graph node came to be.

    Attributes:
        start: when.
        thread: who made it.
        original: the node that it is a clone of, or None.
    """

    start: int
    thread: int
    original: int | None


@dataclass(frozen=True, slots=True)
class Range:
    """An NVTX range of the library's domain on a thread; `payload` is rows, or None."""

    name: str
    start: int
    end: int
    thread: int
    payload: int | None


@dataclass
class Export:
    """What of an export this package reads.

    Attributes:
        activities: in the order of their start.
        graph_runs: likewise; a profile in graph mode has these.
        calls: launches of graphs, by process and correlation.
        nodes: by process and node.
        graph_execs: when and by whom an instantiated graph was made, by process and its id.
        ranges: in the order of their start.
        has_conditional_nodes: somebody made a graph with a loop or a branch on the device.
    """

    activities: list[Activity] = field(default_factory=list)
    graph_runs: list[GraphRun] = field(default_factory=list)
    calls: dict[tuple[int, int], Call] = field(default_factory=dict)
    nodes: dict[tuple[int, int], NodeEvent] = field(default_factory=dict)
    graph_execs: dict[tuple[int, int], NodeEvent] = field(default_factory=dict)
    ranges: list[Range] = field(default_factory=list)
    has_conditional_nodes: bool = False


def process_of(global_id: int | None) -> int:
    """The process of a global id, of a thread or of a process."""
    return (global_id or 0) >> THREAD_BITS


def read_export(path: str | os.PathLike[str]) -> Export:
    """Read an SQLite export, `nsys export --type sqlite`.

    Raises:
        NotAnExport: for a file that is missing or something else.
        TornExport: for one that is damaged.
    """
    place = Path(path)
    _check_magic(place)
    try:
        with closing(
            sqlite3.connect(f"{place.resolve().as_uri()}?mode=ro", uri=True)
        ) as connection:
            return _Reader(connection, place).read()
    except sqlite3.DatabaseError as error:
        raise TornExport(
            f"{place} is damaged ({error}): export the report anew with "
            f"nsys export --type sqlite --force-overwrite true {place.with_suffix('.nsys-rep')}"
        ) from None


def _check_magic(place: Path) -> None:
    try:
        with place.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise NotAnExport(f"can't read {place}: {error.strerror}") from None
    if magic != MAGIC:
        hint = "export the report first: " if place.suffix == ".nsys-rep" else "make one with "
        raise NotAnExport(f"{place} is no SQLite file; {hint}nsys export --type sqlite REPORT")


class _Reader:
    def __init__(self, connection: sqlite3.Connection, place: Path) -> None:
        self._connection = connection
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self._tables = {name for (name,) in names}
        if "StringIds" not in self._tables:
            raise NotAnExport(
                f"{place} is an SQLite file without the table StringIds, which every export of "
                "Nsight Systems has"
            )
        self._strings: dict[int, str] = dict(connection.execute("SELECT id, value FROM StringIds"))

    def read(self) -> Export:
        activities = [*self._kernels(), *self._copies(), *self._memsets()]
        runs = sorted(self._graph_runs(), key=lambda run: run.start)
        launches = {(run.process, run.correlation) for run in runs}
        launches |= {(a.process, a.correlation) for a in activities if a.node is not None}
        return Export(
            sorted(activities, key=lambda activity: (activity.start, activity.end)),
            runs,
            self._calls(launches),
            self._node_events("CUDA_GRAPH_NODE_EVENTS", "graphNodeId", "originalGraphNodeId"),
            self._node_events("CUDA_GRAPH_EVENTS", "graphExecId", "originalGraphId"),
            self._ranges(),
            self._uses_conditional_nodes(),
        )

    def _rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Rows of a table, None for columns that this version doesn't have; none of no table."""
        if table not in self._tables:
            return
        have = {row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")}
        asked = ", ".join(f'"{name}"' if name in have else "NULL" for name in columns)
        yield from self._connection.execute(f"SELECT {asked} FROM {table}")

    def _text(self, number: int | None, default: str = "") -> str:
        return default if number is None else self._strings.get(number, default)

    def _kernels(self) -> Iterator[Activity]:
        for *where, short, demangled, mangled in self._rows(
            "CUPTI_ACTIVITY_KIND_KERNEL", *_PLACE, "shortName", "demangledName", "mangledName"
        ):
            name = self._text(short) or self._text(demangled, "kernel")
            yield _activity("kernel", name, self._text(mangled) or name, where)

    def _copies(self) -> Iterator[Activity]:
        for *where, kind in self._rows("CUPTI_ACTIVITY_KIND_MEMCPY", *_PLACE, "copyKind"):
            name = f"memcpy {_COPIES[kind]}" if kind in _COPIES else "memcpy"
            yield _activity("memcpy", name, "", where)

    def _memsets(self) -> Iterator[Activity]:
        for where in self._rows("CUPTI_ACTIVITY_KIND_MEMSET", *_PLACE):
            yield _activity("memset", "memset", "", list(where))

    def _graph_runs(self) -> Iterator[GraphRun]:
        for start, end, pid, stream, correlation, graph, graph_exec in self._rows(
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
            "start", "end", "globalPid", "streamId", "correlationId", "graphId", "graphExecId",
        ):  # fmt: skip
            # One that had begun or had not ended at the window's edge has no such time.
            if start and end and end >= start:
                yield GraphRun(
                    start, end, process_of(pid), stream, correlation or 0, graph, graph_exec
                )

    def _calls(self, launches: set[tuple[int, int]]) -> dict[tuple[int, int], Call]:
        calls = {}
        for start, end, thread, correlation, name in self._rows(
            "CUPTI_ACTIVITY_KIND_RUNTIME", "start", "end", "globalTid", "correlationId", "nameId"
        ):
            key = (process_of(thread), correlation or 0)
            if key in launches:
                calls[key] = Call(self._text(name), start, end, thread or 0)
        return calls

    def _node_events(
        self, table: str, column: str, original: str
    ) -> dict[tuple[int, int], NodeEvent]:
        events: dict[tuple[int, int], NodeEvent] = {}
        for start, thread, number, clone_of in self._rows(
            table, "start", "globalTid", column, original
        ):
            if number is None:
                continue
            key = (process_of(thread), number)
            # A clone may have two rows, of which one names its original.
            if key not in events or (events[key].original is None and clone_of):
                events[key] = NodeEvent(start, thread or 0, clone_of or None)
        return events

    def _ranges(self) -> list[Range]:
        rows = list(self._rows("NVTX_EVENTS", *_RANGE))
        ours = {
            (process_of(thread), domain)
            for _, _, kind, thread, domain, text, text_id, *_ in rows
            if kind == DOMAIN_CREATED and (text or self._text(text_id)) == DOMAIN
        }
        ranges = []
        for start, end, kind, thread, domain, text, text_id, *payloads in rows:
            if kind != PUSH_POP or (process_of(thread), domain) not in ours:
                continue
            payload = next((int(value) for value in payloads if value is not None), None)
            name = text or self._text(text_id)
            ranges.append(Range(name, start, FOREVER if end is None else end, thread, payload))
        return sorted(ranges, key=lambda r: (r.start, -r.end))

    def _uses_conditional_nodes(self) -> bool:
        calls = "cudaGraphConditionalHandleCreate", "cuGraphConditionalHandleCreate"
        names = {number for number, text in self._strings.items() if text.startswith(calls)}
        return any(name in names for (name,) in self._rows("CUPTI_ACTIVITY_KIND_RUNTIME", "nameId"))


_RANGE = (
    "start", "end", "eventType", "globalTid", "domainId", "text", "textId",
    "uint64Value", "int64Value", "uint32Value", "int32Value",
)  # fmt: skip
_PLACE = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId", "graphNodeId")


def _activity(kind: str, name: str, symbol: str, where: list[Any]) -> Activity:
    start, end, process, device, stream, correlation, node = where
    return Activity(
        kind, name, symbol, start, end, process_of(process), device, stream, correlation or 0,
        node or None,
    )  # fmt: skip
