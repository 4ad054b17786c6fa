"""Which nodes of a captured step each of its scopes holds, for tools that see a replay's nodes.

A replay runs no Python, so its nodes bear no names but their kernels'. What a capture knew is kept
here: a scope is a span of nodes, in the order in which they were recorded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphcache.errors import UnbalancedScopes

from .errors import SpansError
from .ladder import Bucket

__all__ = ["BucketSpans", "Node", "ScopePath", "Span", "SpanMap", "SpanRecorder", "save_if_asked"]

ScopePath = tuple[str, ...]

VERSION = 1

FOLDER_VARIABLE = "GRAPHCACHE_SPANS"
"""Names a folder: every capture writes its spans there."""


@dataclass(frozen=True)
class Span:
    """A scope of a captured step.

    Attributes:
        path: names of the scopes, outermost first.
        first: its first node.
        end: one past its last node; `first` when the scope recorded nothing.
    """

    path: ScopePath
    first: int
    end: int


@dataclass(frozen=True)
class Node:
    """A recorded operation.

    Attributes:
        kind: "kernel", "memcpy", "memset", "graph" (a child graph) and so on; "operation" on the
            tape.
        name: a kernel's symbol or an operation's name; empty for others.
        inside: nodes of a child graph.
    """

    kind: str
    name: str = ""
    inside: tuple[Node, ...] = ()


class SpanRecorder:
    """A scope listener that notes how many nodes there were when a scope opened and closed.

    Args:
        recorded: nodes recorded so far; never decreases.
    """

    def __init__(self, recorded: Callable[[], int]) -> None:
        self._recorded = recorded
        self._open: list[tuple[ScopePath, int]] = []
        self._places: list[int] = []
        self._spans: list[Span | None] = []

    def push(self, name: str) -> None:
        """A scope was opened."""
        outer = self._open[-1][0] if self._open else ()
        self._open.append(((*outer, name), self._recorded()))
        self._places.append(len(self._spans))
        self._spans.append(None)

    def pop(self) -> None:
        """The innermost scope was closed."""
        path, first = self._open.pop()
        self._spans[self._places.pop()] = Span(path, first, self._recorded())

    def spans(self) -> tuple[Span, ...]:
        """All scopes in the order in which they were opened.

        Raises:
            UnbalancedScopes: when one is still open.
        """
        if self._open:
            path = " / ".join(self._open[-1][0])
            raise UnbalancedScopes(
                f"the step ended with scope {path!r} open: close_scope() is missing"
            )
        return tuple(span for span in self._spans if span is not None)


@dataclass(frozen=True)
class BucketSpans:
    """The scopes of one bucket's captured step.

    Attributes:
        bucket: its key.
        nodes: of a replay, in the order in which they run when `linear`, else as recorded.
        spans: scopes in the order in which they were opened, the outer before the inner.
        linear: each node depends on the one before it, and on nothing else.
    """

    bucket: Bucket
    nodes: tuple[Node, ...]
    spans: tuple[Span, ...]
    linear: bool

    def paths(self) -> tuple[ScopePath, ...]:
        """The innermost scope of each node; () outside all scopes."""
        paths: list[ScopePath] = [()] * len(self.nodes)
        for span in self.spans:
            paths[span.first : span.end] = [span.path] * (span.end - span.first)
        return tuple(paths)


@dataclass(frozen=True)
class SpanMap:
    """The scopes of a captured ladder.

    Attributes:
        backend: "cuda_graph" or "tape".
        buckets: from the smallest.
    """

    backend: str
    buckets: tuple[BucketSpans, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; `load` reads it."""
        names: dict[str, int] = {}
        saved = {
            "graphcache_spans": VERSION,
            "backend": self.backend,
            "buckets": [_bucket_to_json(bucket, names) for bucket in self.buckets],
            # Filled by the line before: kernels' symbols are long and come again and again.
            "names": list(names),
        }
        Path(path).write_text(json.dumps(saved, separators=(",", ":")) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SpanMap:
        """Read what `save` wrote.

        Raises:
            SpansError: for a file that is missing, not of this kind, or of another version.
        """
        try:
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise SpansError(f"can't read spans from {path}: {error}") from None
        version = saved.get("graphcache_spans") if isinstance(saved, dict) else None
        if version != VERSION:
            found = "no spans" if version is None else f"spans of version {version}"
            raise SpansError(
                f"{path} holds {found}, not spans of version {VERSION}; save them anew with "
                "DecodeRuntime.spans().save(path)"
            )
        try:
            buckets = tuple(_bucket_of_json(b, saved["names"]) for b in saved["buckets"])
            return cls(str(saved["backend"]), buckets)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise SpansError(f"the spans in {path} are torn: {error!r}; save them anew") from None


def save_if_asked(spans: Callable[[], SpanMap]) -> None:
    """Write a capture's spans into the folder that $GRAPHCACHE_SPANS names, if it names one.

    Raises:
        SpansError: when the folder can't be written to.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    try:
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        number = len(list(place.glob(f"spans-{os.getpid()}-*.json")))
        spans().save(place / f"spans-{os.getpid()}-{number}.json")
    except OSError as error:
        raise SpansError(
            f"${FOLDER_VARIABLE} names {folder}, where spans can't be written: {error}"
        ) from error


def _bucket_to_json(bucket: BucketSpans, names: dict[str, int]) -> dict[str, Any]:
    return {
        "rows": bucket.bucket.rows,
        "q_len": bucket.bucket.q_len,
        "linear": bucket.linear,
        "nodes": _nodes_to_json(bucket.nodes, names),
        "spans": [[*_numbers(span.path, names), span.first, span.end] for span in bucket.spans],
    }


def _nodes_to_json(nodes: Iterable[Node], names: dict[str, int]) -> list[list[Any]]:
    return [
        [*_numbers((node.kind, node.name), names), *([inside] if inside else [])]
        for node in nodes
        for inside in [_nodes_to_json(node.inside, names)]
    ]


def _numbers(words: Iterable[str], names: dict[str, int]) -> list[int]:
    return [names.setdefault(word, len(names)) for word in words]


def _bucket_of_json(saved: Any, names: list[str]) -> BucketSpans:
    nodes = _nodes_of_json(saved["nodes"], names)
    spans = []
    for *path, first, end in saved["spans"]:
        if not 0 <= first <= end <= len(nodes):
            raise ValueError(f"a span of nodes {first} to {end} of {len(nodes)}")
        spans.append(Span(tuple(names[word] for word in path), first, end))
    bucket = Bucket(int(saved["rows"]), int(saved["q_len"]))
    return BucketSpans(bucket, nodes, tuple(spans), bool(saved["linear"]))


def _nodes_of_json(saved: Any, names: list[str]) -> tuple[Node, ...]:
    return tuple(
        Node(names[kind], names[name], _nodes_of_json(rest[0], names) if rest else ())
        for kind, name, *rest in saved
    )
