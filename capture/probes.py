"""Buffers that keep what a step's probes saw, so that the host can read the latest replay's values.

What a step makes is overwritten by the next one, and shared by all buckets; so each probe copies
its tensor to memory made before capture. One memory serves a probe in all buckets: only the latest
step's values are to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from graphcache.probes import probing

from .backend import is_recording
from .errors import ProbeError
from .ladder import Bucket

__all__ = ["ProbeBuffers"]


class ProbeBuffers:
    """Listens to the probes of a runtime's steps.

    Args:
        patterns: shell patterns of the names to keep, "*" for all.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = tuple(patterns)
        self._memory: dict[str, Tensor] = {}
        self._buffers: dict[tuple[Bucket, str], Tensor] = {}
        self._run: dict[str, Tensor] = {}
        self._bucket: Bucket | None = None
        # What a bucket's capture writes, and what its Python wrote when it ran last.
        self._captured: dict[Bucket, dict[str, Tensor]] = {}
        self._eager: dict[Bucket, dict[str, Tensor]] = {}

    @classmethod
    def of(cls, asked: bool | Iterable[str]) -> ProbeBuffers | None:
        """For all probes, for those that match a pattern, or None when off."""
        if asked is True:
            return cls(("*",))
        if not asked:
            return None
        return cls((asked,) if isinstance(asked, str) else asked)

    def around(
        self, step_of: Callable[[Bucket], Callable[[], None]]
    ) -> Callable[[Bucket], Callable[[], None]]:
        """The steps of a ladder, with their probes kept."""

        def probed_of(key: Bucket) -> Callable[[], None]:
            step = step_of(key)

            def probed() -> None:
                self._bucket, self._run = key, {}
                with probing(self):
                    step()
                kept = self._captured if is_recording() else self._eager
                kept[key] = self._run

            return probed

        return probed_of

    def take(self, name: str, tensor: Tensor) -> None:
        """Copy a probe's tensor to its buffer, on the current stream.

        Raises:
            ProbeError: while a capture records, when rehearsals have not seen this probe, or saw it
                with another shape.
        """
        name = self._unused(name)
        if any(fnmatchcase(name, pattern) for pattern in self._patterns):
            buffer = self._run[name] = self._buffer(name, tensor)
            buffer.copy_(tensor)

    def values(self, bucket: Bucket, *, eager: bool) -> dict[str, Tensor]:
        """Copies on the host of the values of a bucket's latest run, in the order of its probes.

        Waits for the current stream.
        """
        kept = (self._eager if eager else self._captured).get(bucket, {})
        return {name: buffer.detach().to("cpu", copy=True) for name, buffer in kept.items()}

    def _unused(self, name: str) -> str:
        """The name, with a number from its second use in a step on."""
        count, numbered = 1, name
        while numbered in self._run:
            count += 1
            numbered = f"{name} ({count})"
        return numbered

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        assert self._bucket is not None
        key = (self._bucket, name)
        buffer = self._buffers.get(key)
        if buffer is not None and _alike(buffer, tensor):
            return buffer
        if is_recording():
            was = "no rehearsal reached it" if buffer is None else f"it had {_form(buffer)} before"
            raise ProbeError(
                f"probe {name!r} with {_form(tensor)}: {was}. A step must probe the same tensors "
                "each time it runs, since a buffer can't be made inside a capture"
            )
        buffer = self._buffers[key] = self._carve(name, tensor)
        return buffer

    def _carve(self, name: str, tensor: Tensor) -> Tensor:
        wanted = tensor.numel() * tensor.itemsize
        memory = self._memory.get(name)
        if memory is None or memory.numel() < wanted or memory.device != tensor.device:
            # Buffers of what it replaces keep that alive as long as captures write there.
            memory = torch.zeros(max(wanted, 1), dtype=torch.uint8, device=tensor.device)
            self._memory[name] = memory
        return memory[:wanted].view(tensor.dtype).view(tensor.shape)


def _alike(buffer: Tensor, tensor: Tensor) -> bool:
    return (
        buffer.shape == tensor.shape
        and buffer.dtype == tensor.dtype
        and buffer.device == tensor.device
    )


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
