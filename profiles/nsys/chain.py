"""From a node that ran to the node as captured, and so to the scope that recorded it.

Instantiating a graph clones its nodes, and so does putting a graph into another: each clone names
its original. The scopes open where a clone was made lie around those of its original, as a captured
call of a captured graph lies around what that graph does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .export import NodeEvent
from .host_ranges import HostRanges, Made, made_in

__all__ = ["NodeChain"]


class NodeChain:
    """Looks up nodes; remembers what it found.

    Args:
        nodes: by process and node.
        ranges: of the host, the scopes at capture among them.
    """

    def __init__(self, nodes: Mapping[tuple[int, int], NodeEvent], ranges: HostRanges) -> None:
        self._nodes = nodes
        self._ranges = ranges
        self._found: dict[tuple[int, int], Made | None] = {}

    def origin(self, process: int, node: int) -> Made | None:
        """Where a node was captured; None when that lies outside the profile."""
        key = (process, node)
        if key not in self._found:
            self._found[key] = self._look_up(process, node)
        return self._found[key]

    def _look_up(self, process: int, node: int) -> Made | None:
        links = list(self._links(process, node))
        # A scope that was open where both were made is one scope.
        opened = dict.fromkeys(
            found for link in links for found in self._ranges.open_at(link.thread, link.start)
        )
        made = made_in(opened)
        reached = bool(links) and links[-1].original is None
        if not made.path and (made.bucket is None or not reached):
            return None
        return made

    def _links(self, process: int, node: int | None) -> Iterator[NodeEvent]:
        """A node's event, its original's, and so on."""
        seen: set[int] = set()
        while node is not None and node not in seen:
            seen.add(node)
            event = self._nodes.get((process, node))
            if event is None:
                return
            yield event
            node = event.original
