"""A request's state, taken out of its slot: to go back to, or to move."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .block_store import BlockStore
from .errors import StaleSlot
from .kept import ByteRange, unpack
from .request import RequestOptions

__all__ = ["Checkpoint"]


@dataclass(eq=False)
class Checkpoint:
    """What `DecodeState.checkpoint` took. Holds its blocks until `release`; a context manager.

    Belongs to the thread that its runtime belongs to.

    Attributes:
        row_bytes: [row_stride_bytes] uint8: the slot's row of the arena, tokens included. Of a
            minimal checkpoint [sum of `kept`], those ranges of it.
        options: of the request.
        length: tokens absorbed.
        limit: tokens at which the request's budget ends; 0 for a request without tokens.
        live: its prompt was complete.
        fingerprint: of the layout it fits.
        store: where the held blocks are; None once on the host, or without such layers.
        held: blocks of K and V, shared with whoever uses them too.
        block_bytes: [blocks, block_bytes] uint8 on the host, once `to_host` was called.
        kept: ranges of the row's bytes that a minimal checkpoint has; None for a whole row.
    """

    row_bytes: Tensor
    options: RequestOptions
    length: int
    limit: int
    live: bool
    fingerprint: str
    store: BlockStore | None
    held: list[int]
    block_bytes: Tensor | None = None
    kept: tuple[ByteRange, ...] | None = None
    released: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # Whoever reads this on another stream must know when it was written.
        self._taken: torch.cuda.Event | None = None
        if self.row_bytes.is_cuda:
            self._taken = torch.cuda.Event()
            self._taken.record()

    @property
    def minimal(self) -> bool:
        """Whether it has only what is needed to go on from its length."""
        return self.kept is not None

    def memory_bytes(self) -> int:
        """Bytes it holds, on the device or the host; blocks that others use too are counted."""
        blocks = 0 if self.block_bytes is None else self.block_bytes.numel()
        if self.store is not None:
            blocks += len(self.held) * self.store.pool.row_stride_bytes
        return self.row_bytes.numel() + blocks

    def to_host(self) -> Checkpoint:
        """Copy everything to host memory and give up the blocks; waits for the copies.

        The result can be restored into another state of the same layout. Returns itself.
        """
        self.check()
        self._wait()
        if self.store is not None:
            self.block_bytes = self.store.pool.arena[self.held].cpu()
            self._drop()
        self.row_bytes = self.row_bytes.cpu()
        return self

    def give_blocks(self, store: BlockStore, row: int) -> None:
        """Give the slot `row` of `store` this checkpoint's K and V.

        Raises:
            BlocksExhausted: before anything is changed.
        """
        self._wait()
        tokens = max(self.limit - 1, self.length)
        if self.store is store:
            store.adopt(row, self.held, self.length, tokens)
            return
        source = self.block_bytes
        if source is None and self.store is not None:
            source = self.store.pool.arena[self.held]
        store.reserve(row, tokens)
        if source is not None:
            for index, block in enumerate(store.blocks_of(row)[: len(source)]):
                store.pool.arena[block].copy_(source[index])
            if source.is_cuda:
                # The other store may reuse its blocks as soon as they are released.
                torch.cuda.current_stream(source.device).synchronize()

    def copy_row(self, target: Tensor) -> None:
        """Copy the slot's row to `target` [row_stride_bytes], on the current stream.

        Of a minimal checkpoint only what it has: the rest of `target` stays as it is.
        """
        self._wait()
        if self.kept is None:
            target.copy_(self.row_bytes)
        else:
            unpack(self.row_bytes.to(target.device), self.kept, target)
        if self.row_bytes.is_cuda:
            self.row_bytes.record_stream(torch.cuda.current_stream(self.row_bytes.device))

    def check(self) -> None:
        """Raise if it can't be restored any more.

        Raises:
            StaleSlot: once it was released.
        """
        if self.released:
            raise StaleSlot("this checkpoint was released; take a new one")

    def release(self) -> None:
        """Give up the blocks; the checkpoint can't be restored any more. Harmless when repeated."""
        self._drop()
        self.released = True

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _drop(self) -> None:
        if self.store is not None:
            self.store.drop(self.held)
        self.store, self.held = None, []

    def _wait(self) -> None:
        if self._taken is not None:
            self._taken.synchronize()

    def __del__(self) -> None:
        # May run on any thread, at any time: the store takes the blocks back at its next turn.
        with suppress(AttributeError):
            if self.store is not None:
                self.store.give_back(self.held)
