"""Whether every tensor that captured steps hold by address is still where it was.

A graph holds raw addresses. Moving a model, or giving a parameter new data, leaves replays reading
the old memory: no error, old weights. So addresses are written down at capture and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .errors import PointerMoved

__all__ = ["PointerLedger", "tensors_of_model"]


def tensors_of_model(model: object) -> dict[str, Tensor]:
    """A model's tensors by name, as they are now."""
    named = getattr(model, "named_tensors", None)
    if named is not None:
        tensors: dict[str, Tensor] = named()
        return tensors
    if isinstance(model, nn.Module):
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {}


class PointerLedger:
    """Addresses and sizes of tensors, by name and by the objects that a step touched.

    Args:
        named: gives the tensors that are known by name, as they are whenever it is called.
    """

    def __init__(self, named: Callable[[], Mapping[str, Tensor]]) -> None:
        self._named = named
        self._by_name: dict[str, tuple[int, int]] = {}
        self._by_owner: list[tuple[Tensor, int, int]] = []
        self._known: set[int] = set()

    def record(self) -> None:
        """Write down where everything named is now."""
        self._by_name = {name: _place(tensor) for name, tensor in self._named().items()}

    def hold(self, tensors: Mapping[int, Tensor]) -> None:
        """Keep the tensors that a step touched, by storage, and write down where they are."""
        for key, tensor in tensors.items():
            if key not in self._known:
                self._known.add(key)
                self._by_owner.append((tensor, *_place(tensor)))

    def held(self) -> list[Tensor]:
        """The tensors that steps touched."""
        return [tensor for tensor, _, _ in self._by_owner]

    def clear(self) -> None:
        """Let go of everything, once no capture needs it."""
        self._by_name, self._by_owner, self._known = {}, [], set()

    def check(self) -> None:
        """Raise unless everything is where it was. Reads addresses only, a microsecond for ten.

        Raises:
            PointerMoved: naming the tensor.
        """
        now = self._named()
        for name, (pointer, size) in self._by_name.items():
            tensor = now.get(name)
            if tensor is None:
                raise PointerMoved(f"{name} is gone since capture; {_ADVICE}")
            if tensor.data_ptr() != pointer or _bytes(tensor) != size:
                raise PointerMoved(_moved(name, pointer, size, tensor))
        for tensor, pointer, size in self._by_owner:
            if tensor.data_ptr() != pointer or _bytes(tensor) != size:
                name = f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}"
                raise PointerMoved(_moved(name, pointer, size, tensor))


_ADVICE = "captured steps still read the old memory: call capture() again"


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _moved(name: str, pointer: int, size: int, tensor: Tensor) -> str:
    return (
        f"{name} has moved since capture: was {size} bytes at {pointer:#x}, "
        f"is {_bytes(tensor)} bytes at {tensor.data_ptr():#x}; {_ADVICE}"
    )
