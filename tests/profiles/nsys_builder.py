"""Builds SQLite exports as Nsight Systems writes them, from a process played through.

The tables and columns are those of an export of nsys 2025.3; a table exists only when it has a row.
Each kernel's name says the scope it was launched in, so that a test knows where it belongs without
asking what it tests.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROCESS = 0x1000000 * 4242
THREAD = PROCESS + 17
DOMAIN = 1

SCHEMA = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "NVTX_EVENTS": (
        "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, "
        "category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, "
        "textId INTEGER, domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, "
        "doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL, "
        "jsonTextId INTEGER, jsonText TEXT"
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, "
        "globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, "
        "returnValue INTEGER NOT NULL, callchainId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
        "contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, "
        "globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, "
        "mangledName INTEGER, launchType INTEGER, registersPerThread INTEGER NOT NULL, "
        "gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, "
        "blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, "
        "gridId INTEGER NOT NULL, graphNodeId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
        "contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, "
        "globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, "
        "srcKind INTEGER, dstKind INTEGER, graphNodeId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
        "contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, "
        "globalPid INTEGER, value INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
        "contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, "
        "correlationId INTEGER, globalPid INTEGER, graphId INTEGER NOT NULL, "
        "graphExecId INTEGER NOT NULL"
    ),
    "CUDA_GRAPH_NODE_EVENTS": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, "
        "globalTid INTEGER, nameId INTEGER NOT NULL, graphNodeId INTEGER NOT NULL, "
        "originalGraphNodeId INTEGER"
    ),
    "CUDA_GRAPH_EVENTS": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, "
        "globalTid INTEGER, nameId INTEGER NOT NULL, graphId INTEGER, originalGraphId INTEGER, "
        "graphExecId INTEGER"
    ),
}


@dataclass
class Node:
    """A graph's node as a process made it; `name` is the scope it belongs to."""

    number: int
    kind: str
    name: str
    inside: list[Node] = field(default_factory=list)


@dataclass
class Graph:
    number: int
    nodes: list[Node] = field(default_factory=list)


class Process:
    """Plays a process under nsys, row by row. The clock goes on by itself.

    Args:
        mode: "node" or "graph".
    """

    def __init__(self, mode: str = "node", thread: int = THREAD) -> None:
        self.mode = mode
        self.thread = thread
        self.clock = 1000
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMA}
        self.strings: dict[str, int] = {}
        self.truth: list[tuple[str, str, int]] = []
        """Kind, scope and duration of each activity inside a replay."""
        self._ids = iter(range(1 << 32, 1 << 33))
        self._correlations = iter(range(100, 1 << 20))
        self.domain("graphcache", DOMAIN)

    # --- the host -----------------------------------------------------------------------------

    def tick(self, nanoseconds: int = 10) -> int:
        self.clock += nanoseconds
        return self.clock

    def add(self, table: str, **row: Any) -> None:
        self.rows[table].append(row)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def domain(self, name: str, number: int) -> None:
        self.add(
            "NVTX_EVENTS", start=0, eventType=75, text=name, globalTid=self.thread, domainId=number
        )

    @contextmanager
    def range(
        self, name: str, payload: int | None = None, *, domain: int = DOMAIN, ends: bool = True
    ) -> Iterator[None]:
        start = self.tick()
        yield
        self.add(
            "NVTX_EVENTS", start=start, end=self.tick() if ends else None, eventType=59,
            textId=self.string(name), globalTid=self.thread, domainId=domain, int64Value=payload,
        )  # fmt: skip

    def call(self, name: str, correlation: int | None = None) -> int:
        correlation = next(self._correlations) if correlation is None else correlation
        start = self.tick()
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=self.tick(5), eventClass=0,
            globalTid=self.thread, correlationId=correlation, nameId=self.string(name),
            returnValue=0,
        )  # fmt: skip
        return correlation

    # --- graphs -------------------------------------------------------------------------------

    def graph(self) -> Graph:
        return Graph(next(self._ids))

    def node(self, graph: Graph, kind: str, name: str, original: Node | None = None) -> Node:
        """A node comes to be, captured or cloned."""
        made = Node(next(self._ids), kind, name)
        if self.mode == "node":
            self.add(
                "CUDA_GRAPH_NODE_EVENTS", start=self.tick(), end=self.clock, eventClass=0,
                globalTid=self.thread, nameId=self.string("Graph Node Creation"),
                graphNodeId=made.number, originalGraphNodeId=original and original.number,
            )  # fmt: skip
        graph.nodes.append(made)
        return made

    def clone_into(self, graph: Graph, other: Graph, scope: str | None = None) -> None:
        """Every node of a graph, cloned: by instantiation, or as a child graph in `scope`."""
        for node in other.nodes:
            name = node.name if scope is None else f"{scope}/{node.name}"
            self.node(graph, node.kind, name, node)

    def instantiate(self, graph: Graph) -> Graph:
        made = self.graph()
        start = self.tick()
        self.clone_into(made, graph)
        self.add(
            "CUDA_GRAPH_EVENTS", start=start, end=self.clock, eventClass=0, globalTid=self.thread,
            nameId=self.string("Graph Instantiation"), graphId=graph.number,
            graphExecId=made.number,
        )  # fmt: skip
        return made

    def launch(
        self, graph: Graph, rows: int | None = None, *, at: int | None = None, stream: int = 7,
        gap: int = 100, took: int = 1000, times: int = 1,
    ) -> int:  # fmt: skip
        """Launch a graph; on the device its nodes run one after the other from `at` on."""
        if rows is None:
            correlation = self.call("cuGraphLaunch")
        else:
            with self.range("replay", rows):
                correlation = self.call("cuGraphLaunch")
        start = time = self.clock + 50 if at is None else at
        for _ in range(times):
            for index, node in enumerate(graph.nodes):
                time += gap if index else 0
                end = time + took * (index + 1)
                self._activity(node, time, end, correlation, stream)
                time = end
        if self.mode == "graph":
            self.add(
                "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=start, end=time, deviceId=0, contextId=1,
                streamId=stream, correlationId=correlation, globalPid=PROCESS, graphId=1,
                graphExecId=graph.number,
            )  # fmt: skip
        self.clock = max(self.clock, time) if at is None else self.clock
        return time

    def eager(self, name: str, took: int = 500) -> None:
        """A kernel outside every graph."""
        correlation = self.call("cudaLaunchKernel")
        self._activity(Node(0, "kernel", name), self.clock, self.clock + took, correlation, 7)
        self.clock += took

    def _activity(self, node: Node, start: int, end: int, correlation: int, stream: int) -> None:
        if node.number and self.mode == "graph":
            return
        if node.number:
            self.truth.append((node.kind, node.name, end - start))
        row: dict[str, Any] = {
            "start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": stream,
            "correlationId": correlation, "globalPid": PROCESS, "graphNodeId": node.number or None,
        }  # fmt: skip
        if node.kind == "kernel":
            names = {
                "shortName": self.string(f"k_{node.name}"),
                "demangledName": self.string(f"k_{node.name}(float*)"),
                "mangledName": self.string(symbol_of(node.name)),
            }
            sizes = dict.fromkeys(
                ("registersPerThread", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"), 1
            )
            self.add("CUPTI_ACTIVITY_KIND_KERNEL", **row, **names, **sizes, gridId=1)
        elif node.kind == "memcpy":
            self.add("CUPTI_ACTIVITY_KIND_MEMCPY", **row, bytes=4, copyKind=8)
        else:
            self.add("CUPTI_ACTIVITY_KIND_MEMSET", **row, value=0, bytes=4)

    # --- the file -----------------------------------------------------------------------------

    def save(self, path: Path, *, without: tuple[str, ...] = (), since: int = 0) -> Path:
        """Write the export; host rows before `since` were not in the profiled window."""
        tables = dict(self.rows)
        tables["StringIds"] = [{"id": i, "value": text} for text, i in self.strings.items()]
        with closing(sqlite3.connect(path)) as connection, connection:
            for name, rows in tables.items():
                kept = [r for r in rows if r.get("start", since) >= since or r.get("end") is None]
                # Every export has the table of strings, others only when they have a row.
                if (not kept and name != "StringIds") or name in without:
                    continue
                connection.execute(f"CREATE TABLE {name} ({SCHEMA[name]})")
                for row in kept:
                    columns = ", ".join(f'"{column}"' for column in row)
                    marks = ", ".join("?" * len(row))
                    connection.execute(
                        f"INSERT INTO {name} ({columns}) VALUES ({marks})", list(row.values())
                    )
        return path


def symbol_of(scope: str) -> str:
    """The mangled name of the kernel that runs in a scope."""
    return f"_Z{len(scope) + 2}k_{scope}Pf"


STEP = (
    ("kernel", "begin"),
    ("kernel", "model/layer 0/append"),
    ("kernel", "model/layer 0/attend"),
    ("memset", "model/layer 0/attend"),
    ("kernel", "model/layer 0"),
    ("kernel", "model/layer 1/append"),
    ("memcpy", "model/layer 1"),
    ("kernel", "sample"),
)


def capture(process: Process, bucket: str, step: tuple[tuple[str, str], ...] = STEP) -> Graph:
    """Capture and instantiate a step as the runtime does: ranges for the bucket and its scopes."""
    graph = process.graph()
    with process.range(f"capture {bucket}"):
        _record(process, graph, [(scope.split("/"), kind, scope) for kind, scope in step])
        return process.instantiate(graph)


def _record(process: Process, graph: Graph, nodes: list[tuple[list[str], str, str]]) -> None:
    while nodes:
        path, kind, scope = nodes[0]
        if not path:
            process.node(graph, kind, scope)
            nodes = nodes[1:]
            continue
        count = 1
        while count < len(nodes) and nodes[count][0][:1] == path[:1]:
            count += 1
        with process.range(path[0]):
            _record(process, graph, [(p[1:], k, s) for p, k, s in nodes[:count]])
        nodes = nodes[count:]
