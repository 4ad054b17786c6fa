"""State that grows with a request, in blocks that can be shared between requests.

That is K and V of full attention, and compressed entries. A block holds what belongs to
`block_tokens` tokens of every such layer. A slot's blocks stand in its row of the block
table, `[max_requests + 1, width]` on the device, whose width never changes. All blocks that a
request may come to need are reserved when it is admitted, so a running step never lacks one and in
steady state no table changes. Blocks shared by a fork are full and never written; whoever would
write into one gets a copy first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from .errors import BlocksExhausted, SchemaError
from .pool import Field, StatePool
from .slots import StepClock
from .uploads import Uploads

__all__ = ["BlockStore", "table_width"]


def table_width(max_context: int, block_tokens: int) -> int:
    """Blocks that a full context takes: entries of a table's row."""
    return -(-max_context // block_tokens)


class BlockStore:
    """Blocks of the fields given, their tables, and who uses which block.

    Args:
        fields: what a block holds, of all layers; see `layout.block_fields`.
        max_requests: slots; row `max_requests` of the table is scratch's.
        max_context: most tokens of a slot; fixes the table's width.
        block_tokens: tokens in a block.
        num_blocks: blocks that can be handed out, one scratch block comes after them; None for as
            many as `max_requests` slots of `max_context` tokens take.
        device: of blocks and tables.
        clock: of the steps that read blocks.
        uploads: carries table rows to the device.
        guarded: see `StatePool`.

    Attributes:
        pool: a row for each block.
        table: [max_requests + 1, width] int32 block ids; the scratch block where none is reserved.
        block_tokens, num_blocks: as given.
    """

    def __init__(
        self,
        fields: Iterable[Field],
        *,
        max_requests: int,
        max_context: int,
        block_tokens: int,
        num_blocks: int | None,
        device: torch.device,
        clock: StepClock,
        uploads: Uploads,
        guarded: bool = False,
    ) -> None:
        if block_tokens < 1:
            raise SchemaError(f"block_tokens must be at least 1, got {block_tokens}")
        width = table_width(max_context, block_tokens)
        if num_blocks is None:
            num_blocks = max_requests * width
        if num_blocks < 1:
            raise SchemaError(f"the number of blocks must be at least 1, got {num_blocks}")
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.pool = StatePool(fields, num_blocks, device, guarded=guarded)
        self.table = torch.full(
            (max_requests + 1, width), num_blocks, dtype=torch.int32, device=device
        )
        self._clock = clock
        self._uploads = uploads
        self._owned: list[list[int]] = [[] for _ in range(max_requests)]
        self._users = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._quarantine: deque[tuple[int, int]] = deque()
        self._given_back: deque[list[int]] = deque()

    @property
    def free_blocks(self) -> int:
        """Blocks nobody uses, those in quarantine included."""
        return len(self._free) + len(self._quarantine)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def reserve(self, row: int, tokens: int) -> None:
        """See to it that the slot has blocks for its first `tokens` positions.

        Raises:
            BlocksExhausted: before anything is changed.
        """
        owned = self._owned[row]
        missing = self.blocks_for(tokens) - len(owned)
        if missing > 0:
            self._set_table(row, owned + self._take(missing))

    def fork(self, source: int, target: int, length: int, tokens: int) -> None:
        """Give slot `target` what blocks hold of `source`, and blocks of its own to go on with.

        Full blocks are shared, the partly filled one is copied on the current stream.

        Args:
            source: row to copy from.
            target: row without blocks.
            length: tokens that `source` has absorbed.
            tokens: positions for which `target` must have blocks.

        Raises:
            BlocksExhausted: before anything is changed.
        """
        self._set_table(target, self._share(self._owned[source], length, tokens))

    def rewind(self, row: int, length: int) -> None:
        """Make the slot's blocks its own from position `length` on, as it will write there.

        What it reserved stays reserved; shared blocks past `length` are given up for fresh ones,
        and the one that `length` lies in is copied, on the current stream.

        Raises:
            BlocksExhausted: before anything is changed.
        """
        owned = self._owned[row]
        first = length // self.block_tokens
        shared = [index for index in range(first, len(owned)) if self._users[owned[index]] > 1]
        if not shared:
            return
        fresh = self._take(len(shared))
        if shared[0] == first and length % self.block_tokens:
            self.pool.copy_row(owned[first], fresh[0])
        given_up = [owned[index] for index in shared]
        renewed = list(owned)
        for index, block in zip(shared, fresh, strict=True):
            renewed[index] = block
        self._set_table(row, renewed)
        self.drop(given_up)

    def release(self, row: int) -> None:
        """Give up all blocks of a retired slot."""
        blocks, self._owned[row] = self._owned[row], []
        self.drop(blocks)

    def hold(self, row: int, length: int) -> list[int]:
        """Blocks with the slot's first `length` tokens, kept until `drop`; for checkpoints.

        Full blocks are shared, the partly filled one is copied on the current stream.

        Raises:
            BlocksExhausted: before anything is changed.
        """
        return self._share(self._owned[row], length, length)

    def adopt(self, row: int, held: list[int], length: int, tokens: int) -> None:
        """Give a slot without blocks the tokens of held blocks; `held` stays held.

        Raises:
            BlocksExhausted: before anything is changed.
        """
        self._set_table(row, self._share(held, length, tokens))

    def drop(self, blocks: list[int]) -> None:
        """End one use of each block; a block without users rests until steps are done with it."""
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._quarantine.append((self._clock.submitted, block))

    def give_back(self, blocks: list[int]) -> None:
        """`drop` from any thread: done when blocks are next taken."""
        self._given_back.append(blocks)

    def check_free(self, count: int) -> None:
        """Raise unless `count` blocks can be taken, now or once steps in flight are done.

        Raises:
            BlocksExhausted.
        """
        self._reclaim()
        if count > self.free_blocks:
            raise BlocksExhausted(
                f"{count} blocks of {self.block_tokens} tokens are needed and {self.free_blocks} "
                f"of {self.num_blocks} are free; retire a request, ask for fewer max_tokens, "
                "or make the runtime with more kv_blocks"
            )

    def blocks_of(self, row: int) -> tuple[int, ...]:
        """The slot's blocks, in the order of their positions."""
        return tuple(self._owned[row])

    def memory_bytes(self) -> int:
        """Bytes of blocks and tables."""
        return self.pool.memory_bytes() + self.table.numel() * self.table.itemsize

    def _share(self, blocks: list[int], length: int, tokens: int) -> list[int]:
        full = length // self.block_tokens
        fresh = self._take(max(self.blocks_for(tokens), self.blocks_for(length)) - full)
        if length % self.block_tokens:
            self.pool.copy_row(blocks[full], fresh[0])
        for block in blocks[:full]:
            self._users[block] += 1
        return blocks[:full] + fresh

    def _take(self, count: int) -> list[int]:
        self.check_free(count)
        while len(self._free) < count:
            self._clock.wait(self._quarantine[0][0])
            self._reclaim()
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        return taken

    def _reclaim(self) -> None:
        while self._given_back:
            self.drop(self._given_back.popleft())
        completed = self._clock.completed() if self._quarantine else 0
        while self._quarantine and self._quarantine[0][0] <= completed:
            self._free.append(self._quarantine.popleft()[1])

    def _set_table(self, row: int, blocks: list[int]) -> None:
        self._owned[row] = blocks
        entries = np.full(self.table.shape[1], self.num_blocks, dtype=np.int32)
        entries[: len(blocks)] = blocks
        self._uploads.copy(self.table[row], entries)
