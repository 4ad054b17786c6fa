"""What a step touches outside itself: the tensors it holds by address, and what it overwrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import CaptureError
from .source import user_line

__all__ = ["StepWatch", "leaves_of", "storage_key", "tensors_in", "written_tensors"]

# A step is watched while it runs on padding rows, where these write nothing (their tests show it).
# What they may write is the bulk of all state, too much to keep a copy of.
SAFE_AT_PADDING = frozenset(
    {
        "graphcache::kv_append",
        "graphcache::absorb",
        "graphcache::conv_update",
        "graphcache::scan_update",
        "graphcache::advance",
        "graphcache::fork_slots",
        "graphcache::write_slots",
    }
)
# Whose slots are not those of the batch: a step brings them, and they must be padding by then.
PAIRED = "graphcache::fork_slots"


def tensors_in(*trees: Any) -> list[Tensor]:
    """Every tensor among arguments or results, lists included."""
    return [leaf for leaf in leaves_of(trees) if isinstance(leaf, Tensor)]


def leaves_of(tree: Any) -> Iterator[Any]:
    """What an operation's arguments or results hold, in their order.

    They hold no other containers than these, for which torch's own walk is five times slower.
    """
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves_of(item)
    elif isinstance(tree, Mapping):
        yield from leaves_of(list(tree.values()))
    else:
        yield tree


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory, as long as either lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes."""
    if not func._schema.is_mutable:
        return []
    named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
    named.update(kwargs)
    return tensors_in(
        [
            named.get(argument.name)
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    )


class StepWatch(TorchDispatchMode):
    """A context around a run of a step.

    Args:
        preserve: keep a copy of whatever the step overwrites, for `restore`.
        padding: all its rows are padding. Otherwise the state's own operations overwrite rows of
            slots, which their owner must keep a copy of.

    Attributes:
        external: the first tensor seen on each storage that existed before the step: what a
            capture of it holds by address.
        forks: whether the step forks slots.
    """

    def __init__(self, *, preserve: bool, padding: bool = True) -> None:
        TorchDispatchMode.__init__(self)
        self.external: dict[int, Tensor] = {}
        self.forks = False
        self._preserve = preserve
        self._padding = padding
        self._made: set[int] = set()
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._saved_places: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = {storage_key(tensor): tensor for tensor in tensors_in(args, kwargs)}
        for key, tensor in given.items():
            if key not in self._made:
                self.external.setdefault(key, tensor)
        if func.name() == PAIRED:
            self.forks = True
            if self._preserve and self._padding:
                _check_pairs(*args[1:3])
        if self._preserve and func.name() not in SAFE_AT_PADDING:
            for tensor in written_tensors(func, args, kwargs):
                self._save(tensor)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            key = storage_key(tensor)
            if key not in given and key not in self.external:
                self._made.add(key)
        return result

    def restore(self) -> None:
        """Put back all that was overwritten, on the current stream."""
        while self._saved:
            tensor, saved = self._saved.pop()
            tensor.copy_(saved)
        self._saved_places.clear()

    def _save(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        place = (key, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key in self._made or place in self._saved_places:
            return
        self._saved_places.add(place)
        self._saved.append((tensor, tensor.detach().clone()))


def _check_pairs(slot_in: Tensor, slot_out: Tensor) -> None:
    # Modes are off in here, but not the net over Python's methods, to which this is a host read.
    with torch._C.DisableTorchFunction():
        live = bool(((slot_in >= 0) & (slot_out >= 0)).any())
    if live:
        raise CaptureError(
            "fork_slots was given slots while the step was rehearsed: it would fork them. Fill "
            "slot_out with -1 before capture; each replay reads it anew",
            operation=PAIRED,
            source=user_line(),
        )
