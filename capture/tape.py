"""The backend that runs anywhere: a step as a list of operations with their tensors.

Recording runs the step once and writes down every operation that makes or writes memory, with the
very tensors it had. A replay runs them again into the same memory. Python's control flow and
numbers are gone by then, as in a graph; so a step that a graph would freeze wrongly, the tape
freezes wrongly too, and a test without a GPU can see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from graphcache.scopes import listening

from .backend import instantiating, recording
from .errors import DeviceLost
from .host_view import host_view
from .lint import Lint
from .spans import Node, Span, SpanRecorder
from .watch import StepWatch, storage_key, tensors_in

__all__ = ["TapeBackend", "TapeStep"]

# Their output is not defined before someone writes it: running them again does nothing.
_MAKE_NOTHING = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided,
                 torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided}  # fmt: skip


class _Operation:
    __slots__ = ("args", "func", "kwargs", "outputs")

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: list[Tensor | None],
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.outputs = outputs

    def run(self) -> None:
        results = tensors_in(self.func(*self.args, **self.kwargs))
        for recorded, result in zip(self.outputs, results, strict=True):
            if recorded is not None:
                recorded.copy_(result)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.operations: list[_Operation] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = {storage_key(tensor) for tensor in tensors_in(args, kwargs)}
        result = func(*args, **kwargs)
        # A view, or an operation that had nothing to copy: its output is memory seen already.
        outputs = [t if storage_key(t) not in given else None for t in tensors_in(result)]
        fresh = [tensor for tensor in outputs if tensor is not None]
        self.made.extend(fresh)
        if func._schema.is_mutable or (fresh and func.overloadpacket not in _MAKE_NOTHING):
            # Aliases: a tensor given other memory later must not take the recording with it.
            given_args, given_kwargs = tree_map(_alias, (args, dict(kwargs)))
            self.operations.append(_Operation(func, given_args, given_kwargs, outputs))
        return result


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


class TapeStep:
    """A recorded step; see `capture.backend.CapturedStep`."""

    def __init__(
        self, recorder: _Recorder, external: Mapping[int, Tensor], spans: tuple[Span, ...]
    ) -> None:
        self._operations = recorder.operations
        self._external = dict(external)
        self.spans = spans
        self.nodes = len(recorder.operations)
        self.device_bytes = sum(
            {storage_key(t): t.untyped_storage().nbytes() for t in recorder.made}.values()
        )

    @property
    def external(self) -> Mapping[int, Tensor]:
        """What the recording holds besides what it made, by storage."""
        return self._external

    @torch.no_grad()
    def replay(self) -> None:
        try:
            for operation in self._operations:
                operation.run()
        except BaseException as error:
            raise DeviceLost(f"a replay failed midway, state is undefined: {error}") from error

    def describe(self) -> tuple[tuple[Node, ...], bool]:
        return tuple(Node("operation", op.func.name()) for op in self._operations), True

    def close(self) -> None:
        self._operations = []
        self._external = {}


class _TapeBuffer:
    def __init__(self, target: Tensor) -> None:
        self._source = torch.empty_like(target, device="cpu")
        self._target = target
        self.view = host_view(self._source)

    def send(self, count: int) -> None:
        self._target[:count].copy_(self._source[:count])


class TapeBackend:
    """Records operations and runs them again, at once and in the caller's thread.

    Args:
        device: of the steps' tensors.
    """

    name = "tape"
    rehearsals = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def capture(self, step: Callable[[], None]) -> TapeStep:
        recorder = _Recorder()
        watch = StepWatch(preserve=True)
        scopes = SpanRecorder(lambda: len(recorder.operations))
        with recording(), torch.no_grad():
            try:
                with watch, recorder, Lint(), listening(scopes):
                    step()
                spans = scopes.spans()
            finally:
                watch.restore()
            with instantiating():
                for tensor in recorder.made:
                    _poison(tensor)
                return TapeStep(recorder, watch.external, spans)

    def host_buffer(self, target: Tensor) -> _TapeBuffer:
        return _TapeBuffer(target)

    def synchronize(self) -> None:
        """Every replay is done when it returns."""

    def idle(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is kept."""


def _poison(tensor: Tensor) -> None:
    """What a step makes is undefined until the first replay, as after a CUDA capture."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
