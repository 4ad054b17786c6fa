"""What the step does while it runs in Python: its operations, and memory that is not state's.

Whatever the step writes outside the state it is tried on is kept as it was before the first write,
so that it can be put back; what it only reads is known by a checksum.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import CaptureError, SourceLine
from ..ladder import Bucket
from ..source import user_line
from ..watch import storage_key, tensors_in, written_tensors
from .trace import Entry, Trace

__all__ = ["BoundState", "Witness", "Written"]


MOST_COPIED_BYTES = 1 << 24
"""Memory that is only read is copied up to this size; of larger ones a sum is kept."""


class BoundState(CaptureError):
    """The step was about to use the state of another runtime."""


class Written:
    """A tensor outside the state that the step writes.

    Attributes:
        tensor: as it was first seen.
        memory: all of its storage, as bytes.
        original: the bytes before the first write; None when a graph was being captured then.
        entry: the operation that first wrote it; None for one of a prefill.
    """

    def __init__(self, tensor: Tensor, entry: Entry | None) -> None:
        self.tensor = tensor
        self.entry = entry
        # Seen in the midst of a run: what is done here is no part of the step.
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self.memory = bytes_of_storage(tensor)
            self.original = None if _in_capture(tensor) else self.memory.clone()

    @property
    def source(self) -> SourceLine | None:
        """The user's line that first wrote it."""
        return None if self.entry is None else self.entry.source

    def __str__(self) -> str:
        at = f", written at {self.source}" if self.source is not None else ""
        return f"a tensor of shape {list(self.tensor.shape)}, {self.tensor.dtype}{at}"


def bytes_of_storage(tensor: Tensor) -> Tensor:
    """[n] uint8, all memory behind a tensor."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


class Read:
    """A tensor outside the state that the step only reads, as far as its operations show.

    Attributes:
        tensor: as it was first seen.
        copy: of its memory as it was then; None where it is large, or a graph was being captured.
        total: of its bytes then, [1] int64; None in a capture.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self.memory = bytes_of_storage(tensor)
            unseen = _in_capture(tensor)
            small = self.memory.numel() <= MOST_COPIED_BYTES
            self.copy = self.memory.clone() if small and not unseen else None
            self.total = None if unseen else _total(self.memory)

    def has_changed(self) -> bool:
        """Whether its memory is other than it was. Waits for the device."""
        return self.total is not None and not torch.equal(self.total, _total(self.memory))


def _total(memory: Tensor) -> Tensor:
    """[2] int64: of all bytes, and of its words where it has whole ones."""
    whole = memory.numel() // 8 * 8
    words = memory[:whole].view(torch.int64)
    # A plain sum is blind to an exchange of words; neighbours' products are not.
    mixed = (words[:-1] * 31 + words[1:]).square().sum() if words.numel() > 1 else words.sum()
    return torch.stack([words.sum(), mixed, memory[whole:].sum(dtype=torch.int64)])


def _in_capture(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class Witness:
    """Watches runs of the step and of prefills.

    Args:
        own: tensors of the runtime that it is tried on.
        forbidden: tensors that it must not reach.

    Attributes:
        captured: of each bucket, the run that was captured.
        last: the newest run.
        written: what runs write outside `own`, by storage.
        read: what they use besides, by storage.
        escaped: operations whose results outlived the newest run.
    """

    def __init__(self, own: Iterable[Tensor], forbidden: Iterable[Tensor]) -> None:
        self._own = {storage_key(tensor) for tensor in own}
        self._forbidden = {storage_key(tensor) for tensor in forbidden}
        self._capturing = False
        self.captured: dict[Bucket, Trace] = {}
        self.last = Trace()
        self.written: dict[int, Written] = {}
        self.read: dict[int, Read] = {}
        self.escaped: list[Entry] = []

    def around(self, key: Bucket, step: Callable[[], None]) -> Callable[[], None]:
        """The step of a bucket, watched."""

        # Its name tells where the stack of a step begins: see `capture.verify.trace`.
        def watched_step() -> None:
            with self.running() as trace:
                step()
            if self._capturing:
                # A ladder runs each step several times; the last one is what was captured.
                self.captured[key] = trace

        return watched_step

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Runs within are rehearsals and captures."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    @contextmanager
    def prefilling(self) -> Iterator[None]:
        """A prefill: only what it touches is of interest."""
        with _Touching(self):
            yield

    @contextmanager
    def running(self) -> Iterator[Trace]:
        """A run of the step."""
        mode = _Watching(self)
        gc.callbacks.append(mode.collecting)
        try:
            with mode:
                yield mode.trace
        finally:
            gc.callbacks.remove(mode.collecting)
            self.last = mode.trace
            self.escaped = mode.alive()

    def put_back(self) -> list[str]:
        """Give all that the step wrote its first content; returns what could not be."""
        for written in self.written.values():
            if written.original is not None:
                written.memory.copy_(written.original)
        return [str(written) for written in self.written.values() if written.original is None]

    def changed_unseen(self) -> list[tuple[Read, bool]]:
        """What changed without an operation that shows it, and whether it was put back."""
        changed = [read for read in self.read.values() if read.has_changed()]
        for read in changed:
            if read.copy is not None:
                read.memory.copy_(read.copy)
        return [(read, read.copy is not None) for read in changed]

    def sees(self, tensor: Tensor, entry: Entry | None, *, writes: bool) -> None:
        """A run uses a tensor that it has not made."""
        key = storage_key(tensor)
        if key in self._forbidden:
            raise BoundState("the step uses another runtime's state", source=user_line())
        if key in self._own or key in self.written:
            return
        if writes:
            self.written[key] = Written(tensor, entry)
            self.read.pop(key, None)
        else:
            if key not in self.read:
                self.read[key] = Read(tensor)


class _Touching(TorchDispatchMode):
    """Shows the witness every tensor that was not made within."""

    def __init__(self, witness: Witness) -> None:
        TorchDispatchMode.__init__(self)
        self._witness = witness
        self.made: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = {storage_key(tensor): tensor for tensor in tensors_in(args, kwargs)}
        written = {storage_key(tensor) for tensor in written_tensors(func, args, kwargs)}
        entry = self.began(func, args, kwargs)
        for key, tensor in given.items():
            if key not in self.made:
                self._witness.sees(tensor, entry, writes=key in written)
        result = func(*args, **kwargs)
        fresh = {storage_key(tensor): tensor for tensor in tensors_in(result)}
        fresh = {key: tensor for key, tensor in fresh.items() if key not in given}
        self.made.update(fresh)
        self.ended(fresh)
        return result

    def began(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry | None:
        """An operation is about to run."""
        return None

    def ended(self, fresh: Mapping[int, Tensor]) -> None:
        """It has run; `fresh` is what it made, by storage."""


class _Watching(_Touching):
    """Writes down a run of the step besides."""

    def __init__(self, witness: Witness) -> None:
        _Touching.__init__(self, witness)
        self.trace = Trace()
        self._refs: list[tuple[StorageWeakRef, Entry]] = []

    def began(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        entry = self.trace.add(func, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            self.made.add(storage_key(args[0]))
        return entry

    def ended(self, fresh: Mapping[int, Tensor]) -> None:
        self.trace.add_made(fresh)
        entry = self.trace.entries[-1]
        self._refs += [(StorageWeakRef(t.untyped_storage()), entry) for t in fresh.values()]

    def collecting(self, phase: str, info: Mapping[str, int]) -> None:
        """The collector begins or ends."""
        if phase == "start" and not self.trace.collected:
            self.trace.collected = True
            self.trace.collected_at = user_line()

    def alive(self) -> list[Entry]:
        """The operations whose results are still held, now that the run is over."""
        return [entry for ref, entry in self._refs if not ref.expired()]
