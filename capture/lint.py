"""What in a step can't be captured, found by running it once, with the user's line.

A capture records kernels, not Python. Whatever the host reads from a tensor is read once and stays
as it was; whatever waits for the device breaks the capture. Two nets catch both: one under the
dispatcher, which every operation passes, and one over Python's tensor methods, for reads that on a
CPU never reach the dispatcher. What reaches neither, `guards` catch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import CaptureError
from .guards import guards
from .indices import first_outside, slot_of_padding
from .rules import Rule
from .source import user_line

__all__ = ["Lint"]

_READS = {
    getattr(Tensor, name): (f"Tensor.{name}()", Rule.HOST_READ)
    for name in (
        "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__",
        "__repr__", "cpu", "item", "numpy", "tolist",
    )
}  # fmt: skip
# Where to cut is read past the dispatcher.
_SPLITS = (torch.tensor_split, Tensor.tensor_split)
_MAKERS = {
    torch.tensor: ("torch.tensor", Rule.FROZEN_DATA),
    torch.as_tensor: ("torch.as_tensor", Rule.FROZEN_DATA),
    Tensor.new_tensor: ("Tensor.new_tensor", Rule.FROZEN_DATA),
}
_aten = torch.ops.aten
_HOST_READS = {
    _aten._local_scalar_dense, _aten.item, _aten.is_nonzero, _aten.equal, _aten.allclose,
    _aten._linalg_check_errors,
}  # fmt: skip
_DATA_DEPENDENT = {
    _aten.nonzero, _aten.argwhere, _aten.masked_select, _aten._unique, _aten._unique2,
    _aten.unique_dim, _aten.unique_consecutive, _aten.repeat_interleave, _aten.bincount,
    _aten._to_sparse,
}  # fmt: skip
_MOVES = {_aten.resize_, _aten.resize_as_, _aten.set_}
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class Lint:
    """A context: operations run as ever, and the first that can't be captured raises.

    Args:
        values: look at the values of indices too, which waits for the device at each: for a
            rehearsal, whose rows are all padding, never for a capture.
        recorded: whether what the current stream is given now is being recorded; None outside a
            capture.

    Raises:
        CaptureError: naming the operation, the user's line, and what to do instead.
    """

    def __init__(self, *, values: bool = False, recorded: Callable[[], bool] | None = None) -> None:
        self._values = values
        self._recorded = recorded
        self._stack = ExitStack()

    def __enter__(self) -> Lint:
        self._stack.enter_context(guards.set(_refuse))
        self._stack.enter_context(_DispatchNet(self._values, self._recorded))
        self._stack.enter_context(_FunctionNet())
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.__exit__(*details)


def _refuse(operation: str, rule: Rule, found: str = "") -> None:
    raise CaptureError(
        f"{operation} can't be captured: {found}{rule.value}. See {rule.section}",
        operation=operation,
        source=user_line(),
        rule=rule,
    )


class _FunctionNet(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            _refuse(*_READS[func])
        if func in _SPLITS and any(isinstance(t, Tensor) for t in (*args[1:], *kwargs.values())):
            _refuse("torch.tensor_split", Rule.HOST_READ)
        if func is Tensor.to and _to_host(args[1:], kwargs) and args[0].device.type == "cpu":
            # On a CPU this copies nothing and so passes the dispatcher unseen.
            _refuse("Tensor.to('cpu')", Rule.HOST_READ)
        if func in _MAKERS and not _is_constant(func, args, kwargs):
            _refuse(*_MAKERS[func])
        return func(*args, **kwargs)


def _to_host(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    # On a CPU `x.to(other.device)` names the CPU too, and is right: only the word itself is not.
    named = (kwargs.get("device"), *args)
    return any(isinstance(t, str) and t.split(":")[0] == "cpu" for t in named)


def _is_constant(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """A number makes a CPU scalar that kernels take by value; a tensor is not Python data."""
    data = kwargs.get("data", args[-1] if args else None)
    if isinstance(data, Tensor):
        return True
    # Made on another device the number is copied there, from pageable memory.
    device = kwargs.get("device") or (args[0].device if func is Tensor.new_tensor else "cpu")
    number = isinstance(data, bool | int | float | complex | np.generic)
    return number and torch.device(device).type == "cpu"


class _DispatchNet(TorchDispatchMode):
    def __init__(self, values: bool, recorded: Callable[[], bool] | None) -> None:
        TorchDispatchMode.__init__(self)
        self._values = values
        self._recorded = recorded

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if self._recorded is not None and not self._recorded():
            _refuse(str(func), Rule.OTHER_STREAM)
        if packet in _HOST_READS:
            _refuse(str(func), Rule.HOST_READ)
        if packet is _aten.lift_fresh and args[0].dim():
            _refuse("a list or array as a tensor", Rule.FROZEN_DATA)
        if packet in _DATA_DEPENDENT and kwargs.get("output_size") is None:
            _refuse(str(func), Rule.DATA_DEPENDENT)
        if _is_boolean_index(packet, args):
            _refuse(str(func), Rule.DATA_DEPENDENT)
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(
            func, args, kwargs
        ):
            _refuse(str(func), Rule.RANDOM)
        if packet in _MOVES:
            _refuse(str(func), Rule.MOVES)
        if packet is _aten.copy_ and _crosses(args[1], args[0]):
            _refuse(str(func), Rule.CROSSES_DEVICES)
        if packet in _INDEXED and any(_crosses(t, args[0]) for t in _moved(args)):
            _refuse(str(func), Rule.CROSSES_DEVICES)
        if self._values:
            outside = first_outside(packet, args)
            if outside is not None:
                _refuse(str(func), Rule.BAD_INDEX, f"{outside}; ")
            slot = slot_of_padding(func, args)
            if slot is not None:
                _refuse(str(func), Rule.PADDING_SLOT, f"a row of padding is given slot {slot}; ")
        guards.operations += 1
        try:
            result = func(*args, **kwargs)
        finally:
            guards.operations -= 1
        if packet is _aten._to_copy and _crosses(args[0], result):
            _refuse(str(func), Rule.CROSSES_DEVICES)
        return result


def _crosses(source: Tensor, target: Tensor) -> bool:
    if source.device.type == target.device.type:
        return False
    # A pinned source that the caller keeps can be captured. A CPU scalar can't be copied either:
    # it goes by value only as an operand.
    return not (source.device.type == "cpu" and source.is_pinned())


def _indices(args: tuple[Any, ...]) -> list[Tensor]:
    return [index for index in args[1] if index is not None]


def _moved(args: tuple[Any, ...]) -> list[Tensor]:
    """What indexing brings to the tensor's device: indices, and values unless they fill a mask."""
    return _indices(args) + ([] if _is_masked_fill(args) else list(args[2:3]))


def _is_masked_fill(args: tuple[Any, ...]) -> bool:
    """Whether this is `y[mask] = number`, which has a fixed size."""
    indices = _indices(args)
    value = args[2] if len(args) > 2 else None
    return (
        len(indices) == 1
        and indices[0].dtype in (torch.bool, torch.uint8)
        and value is not None
        and value.numel() == 1
        and value.device.type == "cpu"
    )


def _is_boolean_index(packet: Any, args: tuple[Any, ...]) -> bool:
    if packet not in _INDEXED or _is_masked_fill(args):
        return False
    return any(index.dtype in (torch.bool, torch.uint8) for index in _indices(args))


def _draws_nothing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Attention is tagged as random for its dropout; without dropout it draws nothing."""
    if "attention" not in str(func):
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return not any(given.get(name) for name in ("dropout_p", "dropout"))
