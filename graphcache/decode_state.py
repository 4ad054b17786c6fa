"""All that requests own, in all layers, at fixed addresses: what a step reads and writes.

A request's window rings, scalars, token history and sampling parameters are one row of one arena
(`StatePool`); full-attention K and V and compressed entries lie in blocks outside it
(`BlockStore`), as they grow with length. The host decides who is admitted; how long a request is,
its next token and whether it has finished are kept on the device only, where steps read and write
them.

Device work of every method is in the order of the current stream.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .batch import Batch
from .block_store import BlockStore
from .checkpoint import Checkpoint
from .control import Control, Lengths, control_fields
from .errors import ContextFull, InvalidRequest, LayoutMismatch, RewindTooFar, SchemaError
from .finish import FinishReason
from .kept import ByteRange, KeptRows, merged, pack
from .layout import (
    LayerSchema,
    block_fields,
    block_tokens_for,
    derived_modulus,
    make_layers,
    slot_fields,
)
from .ops.advance import advance
from .ops.begin_step import begin_step
from .ops.fork_slots import fork_slots
from .ops.sample import sample
from .pool import Field, StatePool
from .request import (
    RequestOptions,
    check_max_tokens,
    check_tokens,
    draw_seed,
    field_value,
)
from .rings import check_rewind, rings_of
from .slots import NoSteps, SlotManager, SlotPhase, StepClock
from .uploads import Uploads

__all__ = ["DecodeState"]


@dataclass
class _Row:
    """What the host remembers of a request."""

    options: RequestOptions
    high: int = 0
    """`high` as of the last time it was read or written; steps move the device's on."""
    fresh: bool = True
    """No tokens yet: all lengths are 0, without asking the device."""


class DecodeState:
    """State of up to `max_requests` requests. S1 = max_requests + 1 rows, the last one scratch.

    Args:
        schemas: of the layers, in order.
        max_requests: slots.
        max_context: most tokens of a request, prompt and answer.
        vocab_size: token ids lie below it.
        device: of all state.
        fields: what a model keeps by slot besides; set by `open(fields=)`, else at its initial.
        block_tokens: tokens in a block, a multiple of every compression; None for the first that
            is, from 64 on.
        kv_blocks: blocks; None for as many as `max_requests` full contexts take.
        stop_tokens: ids that end an answer unless a request names its own.
        clock: of the steps that run on this state.
        guarded: have guard rows around arena and blocks, see `StatePool`.

    Attributes:
        pool: the arena; `pool[name]` is a field by slot.
        blocks: K and V of the layers without a window, and compressed entries; None where there
            are none.
        layers: by index, what a layer's attention calls.
        fields: those that the model declares, by name.
        slots: who has which row.
        len, high, floor, done, limit: [S1] int32, see the glossary in the README.
        tokens: [S1, max_context] int32: each request's tokens; the pending one is
            `tokens[slot, len]`.

    Raises:
        SchemaError: when the state can't be laid out.
    """

    def __init__(
        self,
        schemas: Sequence[LayerSchema],
        *,
        max_requests: int,
        max_context: int,
        vocab_size: int,
        device: torch.device | str = "cuda",
        fields: Iterable[Field] = (),
        block_tokens: int | None = None,
        kv_blocks: int | None = None,
        stop_tokens: Sequence[int] = (),
        clock: StepClock | None = None,
        guarded: bool = False,
    ) -> None:
        if max_context < 2:
            raise SchemaError(
                f"max_context must be at least 2, a prompt and an answer; got {max_context}"
            )
        if vocab_size < 1:
            raise SchemaError(f"vocab_size must be at least 1, got {vocab_size}")
        self.schemas = tuple(schemas)
        self.max_requests = max_requests
        self.max_context = max_context
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.stop_tokens = tuple(stop_tokens)
        self.clock = clock or NoSteps()
        self.slots = SlotManager(max_requests, self.clock)
        self.rings = rings_of(self.schemas, max_context)
        # Without a reset a recycled slot would keep what the earlier request had there.
        self.fields = {field.name: replace(field, reset=True) for field in fields}
        modulus = derived_modulus(self.schemas)
        if block_tokens is None:
            block_tokens = block_tokens_for(self.schemas)
        # Before any memory is taken: it may refuse.
        grows = block_fields(self.schemas, block_tokens)
        # Of a row, what belongs to no layer; the tokens apart.
        self._scalars = [field.name for field in control_fields(len(modulus))]
        self._scalars += self.fields
        self.pool = StatePool(
            slot_fields(self.schemas, self.fields.values(), max_context),
            max_requests,
            self.device,
            guarded=guarded,
        )
        self._uploads = Uploads(self.device, max(4096, 4 * max_context))
        self._control = Control(self.pool, self._uploads, modulus)
        self.blocks = self._make_blocks(grows, block_tokens, kv_blocks, guarded)
        self.layers = make_layers(self.schemas, self.pool, self.blocks, self._control.derived)

        self.len = self.pool["len"]
        self.high = self.pool["high"]
        self.floor = self.pool["floor"]
        self.done = self.pool["done"]
        self.limit = self.pool["limit"]
        self.tokens = self.pool["tokens"]
        self._rows: dict[int, _Row] = {}

    # --- inside a step ---------------------------------------------------------------------------

    def begin(self, requested: Tensor, q_len: int = 1) -> Batch:
        """The batch of a step: who takes part, where, and with which tokens. One node.

        Args:
            requested: [T] int32 rows asked for, -1 for padding.
            q_len: tokens a row.
        """
        slots, positions, tokens = begin_step(requested, self.len, self.done, self.tokens, q_len)
        return Batch(slots, positions, tokens, q_len, self)

    def sample(self, logits: Tensor, batch: Batch) -> Tensor:
        """Draw a token for each row by its slot's parameters; the default sampler. Two nodes.

        Args:
            logits: [T, V], V >= vocab_size.
            batch: whose logits these are.

        Returns:
            [T] int32, -1 at padding and where the logits are not finite.
        """
        return sample(
            logits, batch.slots, batch.positions, self.pool["temperature"], self.pool["top_k"],
            self.pool["top_p"], self.pool["seed"], self.vocab_size,
        )  # fmt: skip

    def advance(
        self, sampled: Tensor, batch: Batch, requested: Tensor, accepted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take the sampled tokens, move lengths on, finish who has finished. One node.

        Args:
            sampled: [T] int32.
            batch: of the step.
            requested: [T] int32, as given to `begin`.
            accepted: [rows] int32, how many tokens of each row are taken; None for all.

        Returns:
            emitted [T] int32 (-1 where none), and reasons [rows] int32, `FinishReason`s.
        """
        return advance(
            sampled, accepted, requested, batch.slots, batch.q_len, self.len, self.high,
            self.done, self.tokens, self.limit, self.pool["stop"], self.vocab_size,
            self._control.derived, self._control.modulus,
        )  # fmt: skip

    def fork_slots(self, slot_in: Tensor, slot_out: Tensor) -> None:
        """Make each `slot_out[i]` go on from where `slot_in[i]` is; a fork inside a step. One node.

        Copies the whole row, `len`, `high`, `floor`, `done`, `limit` and tokens included, and the
        blocks with tokens that the two do not share. What `slot_out` keeps is the seed of its draws
        and its block table. A pair with -1 in it does nothing; a replay reads the pairs anew.

        The host must have seen to it that

        - both are live slots, and no slot is `slot_out` of two pairs, or both in and out;
        - `slot_out` has blocks for as many positions as `slot_in`: opened or forked with a budget
          that ends no earlier;
        - where `slot_out` has another block than `slot_in`, nobody else uses it: what a third slot
          or a checkpoint shares with it would be overwritten. `rewind(slot_out, 0)` makes all its
          blocks its own.

        To be called before the step's layers absorb anything, or after `advance`, and not between
        `begin` and `advance` of a step in which `slot_out` runs. A capture rehearses the step:
        every pair must have a -1 then. Runs on the current stream without synchronizing.

        Args:
            slot_in: [N] int32, contiguous: rows to go on from, -1 for none.
            slot_out: [N] int32, contiguous: rows that become them, -1 for none.

        Raises:
            SchemaError: for other dtypes or shapes.
        """
        blocks = self.blocks
        if blocks is None:
            self._copy_rows(slot_in, slot_out)
            return
        fork_slots(
            self.pool.arena, slot_in, slot_out, kept=self.pool.byte_range("seed"),
            blocks=blocks.pool.arena, table=blocks.table, length=self.len,
            block_tokens=blocks.block_tokens,
        )  # fmt: skip

    # --- a request's life ------------------------------------------------------------------------

    def open(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Iterable[int] | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> int:
        """Take a slot for a request without tokens yet, and return its handle.

        Waits only when all free slots still rest from earlier steps.

        Args:
            max_tokens, temperature, top_k, top_p, seed: see `RequestOptions`.
            stop: ids that end the answer; None for the model's.
            fields: values for fields that the model declares.

        Raises:
            InvalidRequest: before a slot is taken.
            SlotsExhausted: when every slot belongs to a request.
        """
        options = RequestOptions.checked(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
            stop=self.stop_tokens if stop is None else stop, vocab_size=self.vocab_size,
        )  # fmt: skip
        values = self._check_fields(fields or {})
        handle = self.slots.admit()
        row = self.slots.row_of(handle)
        self.pool.reset_row(row)
        self._control.write_options(row, options)
        for name, value in values.items():
            self._uploads.copy(self.pool[name][row], value)
        self._rows[row] = _Row(options)
        return handle

    def check_prompt(self, tokens: Iterable[int], max_tokens: int | None) -> list[int]:
        """The ids of a new request's prompt, if it can be admitted once a slot is free.

        Raises:
            InvalidRequest, ContextFull, BlocksExhausted.
        """
        ids = self._check_ids(tokens)
        limit = self._limit_for(len(ids), check_max_tokens(max_tokens))
        if self.blocks is not None:
            self.blocks.check_free(self.blocks.blocks_for(limit - 1))
        return ids

    def append_tokens(
        self, handle: int, tokens: Iterable[int], max_tokens: int | None = None
    ) -> range:
        """Put tokens behind those a slot has, and reserve what its answer may need.

        Ends the slot's being done, and leaves it prefilling: the positions returned are to be
        absorbed, then `complete_prefill` makes it live.

        Args:
            handle: of the slot.
            tokens: at least one id.
            max_tokens: most new tokens from here on; None for what the slot was opened with.

        Returns:
            Positions whose tokens are not absorbed yet, without the last token, which a step takes.

        Raises:
            InvalidRequest, ContextFull, BlocksExhausted, InvalidSlot, StaleSlot: before anything
                is written.
        """
        row = self.slots.whole_row_of(handle)
        known = self._rows[row]
        ids = self._check_ids(tokens)
        options = known.options
        if max_tokens is not None:
            options = RequestOptions.checked(
                **{**vars(options), "max_tokens": max_tokens}, vocab_size=self.vocab_size
            )
        length, high, present = 0, 0, 0
        if not known.fresh:
            length, high, _, _ = self._lengths(row)
            present = length + 1
        total = present + len(ids)
        limit = self._limit_for(total, options.max_tokens)
        if self.blocks is not None:
            self.blocks.reserve(row, limit - 1)
        self._uploads.copy(self.tokens[row, present:total], np.array(ids, dtype=np.int32))
        self._control.write(row, done=0, limit=limit)
        known.high, known.fresh = high, False
        self.slots.mark_prefilling(row)
        return range(length, total - 1)

    def prefill_batch(self, handle: int, positions: range) -> Batch:
        """The batch of a prefill chunk: one row of `len(positions)` tokens."""
        row = self.slots.row_of(handle)
        count = len(positions)
        return Batch(
            torch.full((count,), row, dtype=torch.int32, device=self.device),
            torch.arange(positions.start, positions.stop, dtype=torch.int32, device=self.device),
            self.tokens[row, positions.start : positions.stop],
            count,
            self,
            prefill=True,
        )

    def absorbed(self, handle: int, positions: range) -> None:
        """Record that the tokens at `positions` are in the layers' state."""
        row = self.slots.row_of(handle)
        known = self._rows[row]
        known.high = max(known.high, positions.stop)
        self._control.write_length(row, positions.stop, known.high)

    def complete_prefill(self, handle: int) -> None:
        """Steps may take the slot from now on."""
        self.slots.mark_live(self.slots.row_of(handle))

    def mark_torn(self, handle: int) -> None:
        """A prefill or a step failed midway: some layers have absorbed what others have not."""
        self.slots.mark_torn(self.slots.row_of(handle))

    def retire(self, handle: int) -> None:
        """End a request. Its slot and blocks rest until the steps submitted so far are done.

        Raises:
            InvalidSlot, StaleSlot: for what is not a live handle.
        """
        row = self.slots.retire(handle)
        del self._rows[row]
        if self.blocks is not None:
            self.blocks.release(row)

    def fork(self, handle: int, seed: int | None = None) -> int:
        """A second request that goes on from where this one is; returns its handle.

        Waits for the steps submitted so far. Full blocks are shared, all else is copied.

        Args:
            handle: of the slot to copy.
            seed: of the fork's draws; None for one of its own.

        Raises:
            SlotsExhausted, BlocksExhausted, InvalidSlot, StaleSlot, InvalidRequest: before
                anything is written.
        """
        row = self.slots.whole_row_of(handle)
        known = self._rows[row]
        options = RequestOptions.checked(
            **{**vars(known.options), "seed": draw_seed() if seed is None else seed},
            vocab_size=self.vocab_size,
        )
        length, _, _, limit = self._lengths(row)
        forked = self.slots.admit()
        target = self.slots.row_of(forked)
        try:
            if self.blocks is not None:
                self.blocks.fork(row, target, length, max(limit - 1, 0))
        except Exception:
            self.slots.retire(forked)
            raise
        # The store has shared or copied the blocks.
        self._copy_rows(*(self._row_on_device(each) for each in (row, target)))
        self._control.write(target, seed=options.seed)
        self._rows[target] = _Row(options, fresh=known.fresh)
        if self.slots.phase(handle) is SlotPhase.LIVE:
            self.slots.mark_live(target)
        return forked

    def rewind(self, handle: int, length: int) -> None:
        """Take a slot back to its first `length` absorbed tokens; the next one becomes pending.

        Waits for the steps submitted so far. Clears nothing: what lies behind is overwritten. A
        slot that had finished runs again, unless its budget leaves no token; `extend` renews it.

        Args:
            handle: of the slot.
            length: at most the slot's present length.

        Raises:
            RewindTooFar: when rows that are needed have been overwritten, or a field accumulates
                and `length` is not the present one.
            BlocksExhausted, InvalidSlot, StaleSlot, InvalidRequest: like it, before anything is
                written.
        """
        row = self.slots.whole_row_of(handle)
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise InvalidRequest(f"a length is an int of at least 0, got {length!r}")
        current, high, floor, limit = self._lengths(row)
        if length > current or not limit:
            raise InvalidRequest(
                f"can't rewind to {length} tokens: slot {handle} has absorbed {current}"
            )
        if length < current:
            self._check_nothing_accumulates(length)
        check_rewind(length, high, floor, self.rings)
        if self.blocks is not None:
            self.blocks.rewind(row, length)
        spent = length + 1 >= limit
        ended = FinishReason.CONTEXT if limit == self.max_context else FinishReason.LENGTH
        self._control.write(row, done=int(ended if spent else FinishReason.NONE))
        self._control.write_length(row, length, high)

    def checkpoint(self, handle: int, *, minimal: bool = False) -> Checkpoint:
        """All that a slot owns, kept until it is released; the slot goes on as before.

        Waits for the steps submitted so far. Full blocks are shared, all else is copied.

        The minimal form leaves out what no token to come reads: rows of rings that only a rewind,
        or a step of many tokens, would need. A slot restored from it can't be rewound to before it.
        It exists where no compressed entry is half complete: at multiples of every compression.

        Args:
            handle: of the slot.
            minimal: the minimal form.

        Raises:
            InvalidRequest: for the minimal form at another length.
            BlocksExhausted, InvalidSlot, StaleSlot.
        """
        row = self.slots.whole_row_of(handle)
        known = self._rows[row]
        length, _, _, limit = self._lengths(row)
        kept = None
        if minimal:
            self._check_boundary(handle, length)
            kept = self._kept_bytes(length)
        source = self.pool.arena[row]
        row_bytes = source.clone() if kept is None else pack(source, kept)
        held = self.blocks.hold(row, length) if self.blocks is not None else []
        return Checkpoint(
            row_bytes=row_bytes,
            options=known.options,
            length=length,
            limit=limit,
            live=self.slots.phase(handle) is SlotPhase.LIVE,
            fingerprint=self.fingerprint,
            store=self.blocks,
            held=held,
            kept=kept,
        )

    def restore(self, checkpoint: Checkpoint) -> int:
        """Admit a request in exactly the state of a checkpoint; returns its handle.

        From a minimal one, `floor` and `high` become its length.

        Raises:
            LayoutMismatch: for a checkpoint of another layout.
            SlotsExhausted, BlocksExhausted: before anything is written.
        """
        if checkpoint.fingerprint != self.fingerprint:
            raise LayoutMismatch(
                "the checkpoint is of another layout of state: schemas, fields, block_tokens and "
                "max_context must be equal where it was taken and where it is restored"
            )
        checkpoint.check()
        handle = self.slots.admit()
        row = self.slots.row_of(handle)
        try:
            if self.blocks is not None:
                checkpoint.give_blocks(self.blocks, row)
        except Exception:
            self.slots.retire(handle)
            raise
        if checkpoint.minimal:
            # Tags of window rows that are not kept must not name positions.
            self.pool.reset_row(row)
        checkpoint.copy_row(self.pool.arena[row])
        if checkpoint.minimal:
            length = checkpoint.length
            self._control.write(row, len=length, high=length, floor=length)
        self._rows[row] = _Row(checkpoint.options, fresh=not checkpoint.limit)
        if checkpoint.live:
            self.slots.mark_live(row)
        return handle

    # --- accounts --------------------------------------------------------------------------------

    @property
    def accumulates(self) -> bool:
        """Whether a field folds all tokens into itself, so that no step can be run twice."""
        return any(field.accumulates for field in self.fields.values())

    @property
    def fingerprint(self) -> str:
        """Equal where a checkpoint of one state can be restored into another."""
        layout = (
            self.pool.fingerprint,
            self.schemas,
            self.vocab_size,
            self.blocks and (self.blocks.pool.fingerprint, self.blocks.block_tokens),
        )
        return hashlib.sha256(repr(layout).encode()).hexdigest()

    def memory_bytes(self) -> int:
        """Bytes of arena, blocks and tables."""
        blocks = self.blocks.memory_bytes() if self.blocks is not None else 0
        return self.pool.memory_bytes() + blocks

    def named_tensors(self) -> dict[str, Tensor]:
        """The allocations behind all state, whose addresses captured steps hold."""
        tensors = {"state arena": self.pool.arena}
        if self.blocks is not None:
            tensors["K/V blocks"] = self.blocks.pool.arena
            tensors["block tables"] = self.blocks.table
        return tensors

    def length_of(self, handle: int) -> int:
        """Tokens that a slot has absorbed; waits for what the current stream was given so far."""
        return self._lengths(self.slots.row_of(handle))[0]

    def tokens_of(self, handle: int) -> list[int]:
        """All tokens of a slot, the pending one last; waits for the current stream."""
        row = self.slots.row_of(handle)
        length, _, _, limit = self._lengths(row)
        tokens: list[int] = self.tokens[row, : length + 1].tolist() if limit else []
        return tokens

    # --- private ---------------------------------------------------------------------------------

    def _make_blocks(
        self, fields: Sequence[Field], block_tokens: int, kv_blocks: int | None, guarded: bool
    ) -> BlockStore | None:
        if not fields:
            return None
        return BlockStore(
            fields,
            max_requests=self.max_requests,
            max_context=self.max_context,
            block_tokens=block_tokens,
            num_blocks=kv_blocks,
            device=self.device,
            clock=self.clock,
            uploads=self._uploads,
            guarded=guarded,
        )

    def _check_ids(self, tokens: Iterable[int]) -> list[int]:
        ids = check_tokens(tokens, self.vocab_size)
        if not ids:
            raise InvalidRequest("no tokens: give at least one, a step needs one to start from")
        return ids

    def _limit_for(self, total: int, max_tokens: int | None) -> int:
        """Tokens at which a request of `total` tokens ends."""
        if total >= self.max_context:
            raise ContextFull(
                f"{total} tokens leave no room for an answer in a context of {self.max_context}; "
                "shorten the prompt, or make the runtime with a larger max_context"
            )
        budget = self.max_context if max_tokens is None else max_tokens
        return min(total + budget, self.max_context)

    def _check_fields(self, fields: Mapping[str, object]) -> dict[str, np.ndarray]:
        values = {}
        for name, value in fields.items():
            field = self.fields.get(name)
            if field is None:
                known = ", ".join(sorted(self.fields)) or "none"
                raise InvalidRequest(f"the model declares no field {name!r}; it declares {known}")
            values[name] = field_value(field, value)
        return values

    def _check_nothing_accumulates(self, length: int) -> None:
        if self.accumulates:
            names = sorted(name for name, field in self.fields.items() if field.accumulates)
            raise RewindTooFar(
                f"can't rewind to {length} tokens: all tokens absorbed are folded into "
                f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}, where none can be "
                "taken out again. Fork or take a checkpoint before going on, or admit the prompt "
                "again"
            )

    def _row_on_device(self, row: int) -> Tensor:
        return torch.full((1,), row, dtype=torch.int32, device=self.device)

    def _copy_rows(self, slot_in: Tensor, slot_out: Tensor) -> None:
        """Copy all that slots own but their blocks; seeds stay."""
        fork_slots(self.pool.arena, slot_in, slot_out, kept=self.pool.byte_range("seed"))

    def _check_boundary(self, handle: int, length: int) -> None:
        every = math.lcm(*(layer.boundary for layer in self.layers))
        if length % every:
            below = length // every * every
            raise InvalidRequest(
                f"a minimal checkpoint exists at multiples of {every} tokens, and slot {handle} "
                f"has absorbed {length}: the nearest are {below} and {below + every}. Rewind, "
                "step on, or take a whole checkpoint"
            )

    def _kept_bytes(self, length: int) -> tuple[ByteRange, ...]:
        """What a minimal checkpoint at `length` has of a row."""
        ranges = [self.pool.byte_range(name) for name in self._scalars]
        kept = [KeptRows(self.tokens, range(length + 1))]
        for layer in self.layers:
            kept += layer.kept_rows(length)
        for rows in kept:
            ranges += rows.byte_ranges()
        return merged(ranges)

    def _lengths(self, row: int) -> Lengths:
        """The slot's lengths once the steps submitted so far have completed."""
        self.clock.wait(self.clock.submitted)
        return self._control.read(row)
