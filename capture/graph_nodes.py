"""What the driver tells of a graph's nodes, while it is being captured and afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .spans import Node

__all__ = ["NodeCounter", "chain_of", "describe_nodes"]

# A call of the driver that returns what it gives besides its result, or raises.
Call = Callable[..., tuple[Any, ...]]


class NodeCounter:
    """How many nodes the capture under way on a stream has recorded.

    Args:
        driver: cuda-python's.
        stream: the driver's handle of the capturing stream.
    """

    def __init__(self, driver: Any, stream: Any) -> None:
        # Where there are two, the older refuses streams whose last launch was a dependent one.
        name = "cuStreamGetCaptureInfo"
        self._info = getattr(driver, f"{name}_v3", None) or getattr(driver, name)
        self._nodes = driver.cuGraphGetNodes
        self._success = driver.CUresult.CUDA_SUCCESS
        self._active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        self._stream = stream
        self._count = 0

    def __call__(self) -> int:
        """Nodes so far; of a capture that has become invalid, as many as were seen last.

        Whoever ends an invalid capture gets its error; raising another here would hide that.
        """
        info = self._info(self._stream)
        if info[0] == self._success and info[1] == self._active:
            counted = self._nodes(info[3])
            if counted[0] == self._success:
                self._count = int(counted[-1])
        return self._count


def describe_nodes(driver: Any, call: Call, graph: Any) -> tuple[tuple[Node, ...], bool]:
    """A graph's nodes, and whether they are a chain. In its order if they are.

    Takes a few microseconds a node.

    Args:
        driver: cuda-python's.
        call: calls a function of it.
        graph: the driver's handle.
    """
    handles = _all(call, driver.cuGraphGetNodes, graph)
    edges = _edges(call, driver.cuGraphGetEdges, graph)
    ordered = chain_of([int(handle) for handle in handles], edges)
    if ordered is not None:
        by_address = {int(handle): handle for handle in handles}
        handles = [by_address[address] for address in ordered]
    inner = [_describe(driver, call, handle) for handle in handles]
    linear = ordered is not None and all(inside for _, inside in inner)
    return tuple(node for node, _ in inner), linear


def chain_of(nodes: list[int], edges: list[tuple[int, int]]) -> list[int] | None:
    """The nodes in the order of a chain, or None if they are not one."""
    following = dict(edges)
    roots = set(nodes).difference(following.values())
    if not nodes:
        return []
    if len(edges) != len(nodes) - 1 or len(roots) != 1:
        return None
    chain = [roots.pop()]
    while chain[-1] in following:
        chain.append(following[chain[-1]])
    return chain if len(chain) == len(nodes) else None


def _all(call: Call, query: Any, graph: Any) -> list[Any]:
    count = int(call(query, graph)[-1])
    return list(call(query, graph, count)[0]) if count else []


def _edges(call: Call, query: Any, graph: Any) -> list[tuple[int, int]]:
    count = int(call(query, graph)[-1])
    if not count:
        return []
    given = call(query, graph, count)
    return [(int(a), int(b)) for a, b in zip(given[0], given[1], strict=True)]


def _describe(driver: Any, call: Call, node: Any) -> tuple[Node, bool]:
    """A node, and whether what is inside it is a chain."""
    (number,) = call(driver.cuGraphNodeGetType, node)
    kind = driver.CUgraphNodeType(number).name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    if kind == "kernel":
        return Node(kind, _symbol(driver, call, node)), True
    if kind == "graph":
        (child,) = call(driver.cuGraphChildGraphNodeGetGraph, node)
        inside, linear = describe_nodes(driver, call, child)
        return Node(kind, inside=inside), linear
    return Node(kind), True


def _symbol(driver: Any, call: Call, node: Any) -> str:
    (parameters,) = call(driver.cuGraphKernelNodeGetParams, node)
    function, kernel = parameters.func, parameters.kern
    if int(function):
        (name,) = call(driver.cuFuncGetName, function)
    elif int(kernel):
        (name,) = call(driver.cuKernelGetName, kernel)
    else:
        return ""
    return name.decode() if isinstance(name, bytes) else str(name)
