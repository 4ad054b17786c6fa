"""A decode step as a list of compiled pieces and this package's operations, in order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from .. import scopes
from ..errors import GraphCacheError, UnsupportedModel, UnsupportedPlatform
from ..ops.run_compiled import CompiledPiece

__all__ = ["Program", "build_program"]

NAMESPACE = "graphcache"
SCOPE = "graphcache_scope"
OPTIONS = {"triton.cudagraphs": False}
"""The runtime captures; a graph inside a graph can't be."""

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""How torch calls operations that are nothing but others."""

Values: TypeAlias = dict[fx.Node, Any]


@dataclass
class _Part:
    """Nodes of the trace that run together: many as a compiled piece, or one as it is.

    Attributes:
        nodes: in order.
        alone: whether it runs as it is.
        inputs, outputs: of a piece: what it takes from outside, what is used outside.
        piece: compiled.
        scope: names of the scopes that all of it lies in, below those around the step.
        spent: values that nothing after it needs.
    """

    nodes: list[fx.Node]
    alone: bool
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    piece: CompiledPiece | None = None
    scope: tuple[str, ...] = ()
    spent: list[fx.Node] = field(default_factory=list)

    def run(self, values: Values) -> None:
        if self.piece is not None:
            given = self.piece([values[node] for node in self.inputs])
            values.update(zip(self.outputs, given, strict=True))
            return
        for node in self.nodes:
            args = map_arg(node.args, values.__getitem__)
            kwargs = map_arg(node.kwargs, values.__getitem__)
            target: Any = node.target
            values[node] = target(*args, **kwargs)


class Program:
    """A traced step, compiled. Holds the tensors outside it that it reads and writes.

    Args:
        inputs: of the trace.
        constants: tensors that the step took from outside.
        parts: in order.
        output: what it returns.
    """

    def __init__(
        self, inputs: list[fx.Node], constants: Values, parts: list[_Part], output: fx.Node
    ) -> None:
        self._inputs = inputs
        self._constants = constants
        self._parts = parts
        self._output = output

    def run(self, *given: Tensor) -> Tensor:
        """Run it on the current stream without synchronizing."""
        values = {**self._constants, **dict(zip(self._inputs, given, strict=True))}
        for part in self._parts:
            with _scopes(part.scope):
                part.run(values)
            for node in part.spent:
                del values[node]
        result: Tensor = values[self._output]
        return result


def build_program(
    step: Callable[..., Tensor],
    given: Sequence[Tensor],
    outer_scopes: int = 0,
    known: dict[str, CompiledPiece] | None = None,
) -> Program:
    """Trace a step without running it, cut it at this package's operations, compile the pieces.

    Args:
        step: of tensors, to a tensor.
        given: of the shapes to trace for.
        outer_scopes: how many scopes are open around it.
        known: pieces compiled before, by what they are alike in; those compiled now are added.

    Raises:
        UnsupportedModel: naming what can't be traced or compiled.
        UnsupportedPlatform: when the compiler fails.
    """
    trace = _trace(step, given, outer_scopes)
    graph = trace.graph
    constants: Values = {
        node: operator.attrgetter(str(node.target))(trace)
        for node in graph.find_nodes(op="get_attr")
    }
    (output,) = graph.output_node().all_input_nodes
    parts = _cut(graph)
    owner = {node: part for part in parts for node in part.nodes}
    for part in parts:
        for node in part.nodes:
            _check_writes(node, part, owner)
    known = {} if known is None else known
    for part in parts:
        part.scope = _shared(node.meta.get(SCOPE, ()) for node in part.nodes)
        if not part.alone:
            _find_edges(part, owner)
            part.piece = _compile(part, known)
    _find_spent(parts, output)
    return Program(graph.find_nodes(op="placeholder"), constants, parts, output)


def _trace(
    step: Callable[..., Tensor], given: Sequence[Tensor], outer_scopes: int
) -> fx.GraphModule:
    def scoped(*inputs: Tensor) -> Tensor:
        mode = get_proxy_mode()
        assert mode is not None
        tracer: Any = mode.tracer
        create = tracer.create_node

        def create_in_scope(*args: Any, **kwargs: Any) -> fx.Node:
            node: fx.Node = create(*args, **kwargs)
            node.meta[SCOPE] = scopes.path()[outer_scopes:]
            return node

        tracer.create_node = create_in_scope
        try:
            with _Refusals():
                return step(*inputs)
        finally:
            tracer.create_node = create

    depth = len(scopes.path())
    try:
        return make_fx(scoped, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    except GraphCacheError:
        raise
    except Exception as error:  # torch's and the model's, of no common base
        told = UnsupportedModel(f"the step can't be traced to be compiled: {_brief(error)}")
        # The way to the model's line.
        raise told.with_traceback(error.__traceback__) from error
    finally:
        scopes.reset(depth)


class _Refusals(TorchDispatchMode):
    """Raises at the operation, and so with the model's line, where one can't be compiled."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Below autograd, where a step is traced, operations made of others arrive whole.
        if func.namespace == "aten" and func.has_kernel_for_dispatch_key(COMPOSITE):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if func.namespace != NAMESPACE:
            # Tracing may carry out a write to a tensor that is there.
            for written in _written(func, args):
                if isinstance(written, Tensor) and not isinstance(written, FakeTensor):
                    raise _write_refused(func, "lies outside the step")
        # Attention is tagged as random for its dropout, which a decoder has not.
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func):
            raise UnsupportedModel(
                f"{func} can't be compiled: every replay would draw the same numbers"
            )
        if torch.Tag.data_dependent_output in func.tags:
            raise _read_refused(func)
        result = func(*args, **(kwargs or {}))
        if _is_unknown(result):
            raise _read_refused(func)
        return result


def _written(func: Any, args: Sequence[Any]) -> list[Any]:
    """What an operation writes of its arguments."""
    given = zip(func._schema.arguments, args, strict=False)
    return [value for a, value in given if a.alias_info is not None and a.alias_info.is_write]


def _cut(graph: fx.Graph) -> list[_Part]:
    """Runs of nodes to compile, and the operations between them."""
    parts: list[_Part] = []
    apart: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        # What picks from an operation's results goes with it.
        alone = _is_ours(node) or (node.target is operator.getitem and node.args[0] in apart)
        if alone:
            apart.add(node)
            parts.append(_Part([node], alone=True))
        elif parts and not parts[-1].alone:
            parts[-1].nodes.append(node)
        else:
            parts.append(_Part([node], alone=False))
    for part in parts:
        # Nothing to compile: views of what is there.
        part.alone = part.alone or all(map(_is_view, part.nodes))
    return parts


def _find_edges(part: _Part, owner: dict[fx.Node, _Part]) -> None:
    taken = chain.from_iterable(node.all_input_nodes for node in part.nodes)
    part.inputs = [node for node in dict.fromkeys(taken) if owner.get(node) is not part]
    part.outputs = [
        node
        for node in part.nodes
        if any(user.op == "output" or owner[user] is not part for user in node.users)
    ]


def _find_spent(parts: list[_Part], output: fx.Node) -> None:
    """Let values go where they are last used: their memory serves those that come after."""
    seen = {output}
    for part in reversed(parts):
        made = part.nodes if part.piece is None else part.outputs
        used = chain.from_iterable(node.all_input_nodes for node in part.nodes)
        taken = part.inputs if part.piece is not None else used
        values = [node for node in dict.fromkeys(chain(made, taken)) if node not in seen]
        part.spent = values
        seen.update(values)


def _compile(part: _Part, known: dict[str, CompiledPiece]) -> CompiledPiece:
    like = _likeness(part)
    if like in known:
        return known[like]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in part.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)
    for node in part.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in part.outputs))
    examples = [node.meta["val"] for node in part.inputs]
    try:
        function: Any = torch._inductor.compile(fx.GraphModule({}, graph), examples, OPTIONS)
    except Exception as error:  # the compiler's, of no common base
        raise UnsupportedPlatform(
            f"a piece of the step can't be compiled here: {_brief(error)}; use the model uncompiled"
        ) from error
    known[like] = CompiledPiece(function, [node.meta["val"] for node in part.outputs])
    return known[like]


def _likeness(part: _Part) -> str:
    """Equal for pieces that are alike but for the tensors they are given: those of other layers."""
    names = {node: f"%{number}" for number, node in enumerate(chain(part.inputs, part.nodes))}
    lines = [
        f"{val.dtype} {val.device} {tuple(val.shape)} {val.stride()} {val.storage_offset() % 16}"
        for val in (node.meta["val"] for node in part.inputs)
    ]
    for node in part.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: _Name(names[n]))
        lines.append(f"{node.target} {args} {kwargs}")
    lines.append(" ".join(names[node] for node in part.outputs))
    return "\n".join(lines)


class _Name(str):
    __slots__ = ()
    __repr__ = str.__str__


def _is_ours(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == NAMESPACE


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or not schema.returns:
        return False
    return all(result.alias_info is not None for result in schema.returns)


def _origin(node: fx.Node) -> fx.Node:
    """Whose memory a value is, through views and what was written in place."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        shares = node.target is operator.getitem or (
            schema is not None and any(result.alias_info for result in schema.returns)
        )
        if not shares or not node.all_input_nodes:
            break
        node = node.all_input_nodes[0]
    return node


def _check_writes(node: fx.Node, part: _Part, owner: dict[fx.Node, _Part]) -> None:
    """A compiled piece writes what it made; this package's operations write what they were given.

    Anything else would depend on who shares memory with whom, which a compiler may change.
    """
    if not hasattr(node.target, "_schema"):
        return
    for value in _written(node.target, node.args):
        for written in _nodes_in(value):
            made_by = owner.get(_origin(written))
            if made_by is not (None if part.alone else part):
                whose = "the step made" if part.alone else "lies outside its piece of the step"
                raise _write_refused(node.target, whose)


def _write_refused(operation: object, whose: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{operation} can't be compiled: it writes a tensor that {whose}; state is written by "
        "Batch.write and by layers"
    )


def _read_refused(operation: object) -> UnsupportedModel:
    return UnsupportedModel(
        f"{operation} can't be compiled: the host reads a value or a size from a tensor"
    )


def _is_unknown(value: Any) -> bool:
    """Whether a number, or the size of a tensor, is known only when the step runs."""
    if isinstance(value, list | tuple):
        return any(map(_is_unknown, value))
    if isinstance(value, Tensor):
        return not all(isinstance(size, int) for size in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(value, found.append)
    return found


def _shared(paths: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    first, *others = paths
    for other in others:
        same = [a == b for a, b in zip(first, other, strict=False)]
        first = first[: same.index(False) if False in same else len(same)]
    return first


@contextmanager
def _scopes(names: tuple[str, ...]) -> Iterator[None]:
    depth = len(scopes.path())
    for name in names:
        scopes.open_scope(name)
    try:
        yield
    finally:
        scopes.reset(depth)


def _brief(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else 'no message'}"
