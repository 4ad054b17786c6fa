"""Scopes of a replay whose capture lies outside the profile, from the spans saved at capture.

In a graph that is one chain the n-th kernel of a launch is the n-th kernel node, the n-th copy the
n-th copy node. Names are compared where there are any, so that spans of another capture are seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from capture.spans import BucketSpans, Node, ScopePath, SpanMap

from .export import Activity

__all__ = ["Matched", "SavedSpans"]

KINDS = ("kernel", "memcpy", "memset")


@dataclass(frozen=True)
class Matched:
    """What spans say of one replay.

    Attributes:
        bucket: the bucket's name; several with "or" between when they can't be told apart.
        paths: of each activity; None where the spans say nothing.
        refusal: why there are no paths, or "".
    """

    bucket: str | None
    paths: tuple[ScopePath | None, ...]
    refusal: str = ""


class _Candidate:
    """A bucket's nodes that show in a profile, by kind."""

    def __init__(self, spans: BucketSpans) -> None:
        self.bucket = spans.bucket
        self.name = str(spans.bucket)
        self.linear = spans.linear
        self.nodes: dict[str, list[tuple[str, ScopePath]]] = {kind: [] for kind in KINDS}
        for node, path in _leaves(spans.nodes, spans.paths()):
            self.nodes[node.kind].append((node.name, path))

    def mismatch(self, replay: Sequence[Activity]) -> str:
        """How a replay's kernels differ from this bucket's; "" if they don't."""
        kernels = [activity for activity in replay if activity.kind == "kernel"]
        nodes = self.nodes["kernel"]
        for index, (activity, (symbol, _)) in enumerate(zip(kernels, nodes, strict=False)):
            if not _same_kernel(symbol, activity):
                return f"kernel {index} is {activity.name}, and was {symbol} in bucket {self.name}"
        if len(kernels) != len(nodes):
            return f"{len(kernels)} kernels ran, and bucket {self.name} has {len(nodes)}"
        return ""

    def paths(self, replay: Sequence[Activity]) -> tuple[ScopePath | None, ...]:
        """The scope of each activity; None for kinds of which there are not as many as nodes."""
        scopes: dict[str, Iterator[ScopePath]] = {}
        for kind in KINDS:
            count = sum(activity.kind == kind for activity in replay)
            if count == len(self.nodes[kind]):
                scopes[kind] = iter([path for _, path in self.nodes[kind]])
        return tuple(
            next(scopes[activity.kind]) if activity.kind in scopes else None for activity in replay
        )


class SavedSpans:
    """Finds the bucket that a replay is of.

    Args:
        maps: as saved; of several captures when a profile spans several.
    """

    def __init__(self, maps: Iterable[SpanMap]) -> None:
        self._candidates = [_Candidate(bucket) for spans in maps for bucket in spans.buckets]

    def __bool__(self) -> bool:
        return bool(self._candidates)

    def match(self, replay: Sequence[Activity], rows: int | None) -> Matched:
        """The scopes of a replay's activities.

        Args:
            replay: in the order of their start.
            rows: of the bucket, where the launch tells; None to find it by the kernels.
        """
        nothing = (None,) * len(replay)
        asked = [c for c in self._candidates if rows is None or c.bucket.rows == rows]
        if not asked:
            return Matched(None, nothing, f"no spans of a bucket of {rows} rows were given")
        faults = {candidate: candidate.mismatch(replay) for candidate in asked}
        fitting = [candidate for candidate, fault in faults.items() if not fault]
        if not fitting:
            return Matched(None, nothing, faults[asked[0]])
        name = " or ".join(dict.fromkeys(candidate.name for candidate in fitting))
        if not all(candidate.linear for candidate in fitting):
            return Matched(
                name, nothing, f"the graph of bucket {name} forks: the order of its nodes is open"
            )
        paths = {candidate.paths(replay) for candidate in fitting}
        if len(paths) > 1:
            return Matched(name, nothing, f"buckets {name} run the same kernels in other scopes")
        return Matched(name, paths.pop())


def _leaves(nodes: Sequence[Node], paths: Sequence[ScopePath]) -> Iterator[tuple[Node, ScopePath]]:
    """Nodes that show in a profile; those of a child graph have the scope of its node."""
    for node, path in zip(nodes, paths, strict=True):
        if node.inside:
            yield from _leaves(node.inside, [path] * len(node.inside))
        elif node.kind in KINDS:
            yield node, path


def _same_kernel(symbol: str, activity: Activity) -> bool:
    if not symbol or symbol == activity.symbol:
        return True
    # Exports without mangled names have the short one, which is part of the symbol.
    return activity.symbol == activity.name and activity.name in symbol
