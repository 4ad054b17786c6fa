"""Faults in a request's life: what it reads of its own, and what copies and ways back leave out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphcache import Batch, Checkpoint, DecodeState, Field
from graphcache.models import StepFunction
from tests.toy import VOCAB, ToyDecoder
from tests.zoo.planted import Patch, fault, scratched, served

Made = tuple[Any, dict[str, Any]]


@fault("reads-past-length", 7)
def the_row_before_the_first(device: torch.device, patch: Patch) -> Made:
    """An empty slot has no token before this one, and the step reads it all the same."""
    toy = ToyDecoder((None,), device)

    def step(batch: Batch) -> Tensor:
        store = batch.state.blocks
        before = (batch.positions.long() - 1) % store.block_tokens
        block = store.table[scratched(batch), 0].long()
        return toy(batch) + 1e-3 * store.pool["layer0.k"][block, 0, before].sum(1, keepdim=True)

    return served(toy, step), {}


@fault("reads-past-length", 7)
def a_whole_block_summed(device: torch.device, patch: Patch) -> Made:
    """A sum over a block's rows, written or not, instead of up to the length."""
    toy = ToyDecoder((None,), device)

    def step(batch: Batch) -> Tensor:
        store = batch.state.blocks
        logits = toy(batch)
        block = store.table[scratched(batch), 0].long()
        return logits + 1e-3 * store.pool["layer0.v"][block, 0].sum((1, 2))[:, None]

    return served(toy, step), {}


@fault("window-off-by-one", 8)
def read_before_it_is_overwritten(device: torch.device, patch: Patch) -> Made:
    """The ring's next row, which holds the token that has just left the window, is read first."""
    toy = ToyDecoder((6,), device)

    def step(batch: Batch) -> Tensor:
        ring = batch.state.pool["layer0.k"]
        place = batch.positions.long() % ring.shape[2]
        full = (batch.positions >= ring.shape[2])[:, None]
        oldest = ring[scratched(batch), 0, place].sum(1, keepdim=True)
        return toy(batch) + torch.where(full, oldest, 0.0) * 1e-3

    return served(toy, step), {}


@fault("reads-past-length", 7)
def the_next_row_at_a_blocks_end(device: torch.device, patch: Patch) -> Made:
    """Where a token begins a block, the row after its own is read, which nothing has written."""
    toy = ToyDecoder((None,), device)

    def step(batch: Batch) -> Tensor:
        store, at = batch.state.blocks, batch.positions.long()
        block = store.table[scratched(batch), at // store.block_tokens].long()
        after = store.pool["layer0.k"][block, 0, 1].sum(1, keepdim=True)
        begins = ((at > 0) & (at % store.block_tokens == 0))[:, None]
        return toy(batch) + torch.where(begins, after, 0.0) * 1e-3

    return served(toy, step), {}


@fault("reads-past-length", 7)
def the_second_share_of_a_context(device: torch.device, patch: Patch) -> Made:
    """After 128 keys attention is shared, and a new share's first rows read one row too many."""
    toy = ToyDecoder((None,), device)

    def step(batch: Batch) -> Tensor:
        store, at = batch.state.blocks, batch.positions.long()
        block = store.table[scratched(batch), at // store.block_tokens].long()
        within = at % store.block_tokens
        last = store.block_tokens - 1
        after = store.pool["layer0.k"][block, 0, (within + 1).clamp(max=last)]
        begun = ((at >= 128) & (at < 136) & (within < last))[:, None]
        return toy(batch) + torch.where(begun, after.sum(1, keepdim=True), 0.0) * 1e-3

    return served(toy, step), {"max_context": 160}


@fault("reads-foreign-slot", 13)
def rows_taken_for_slots(device: torch.device, patch: Patch) -> Made:
    """The number of a row in the batch is used as if it were its slot's."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        keys = batch.state.pool["layer1.k"][: batch.rows, 0, 0]
        mine = torch.where(batch.slots[:, None] < 0, 0.0, keys)
        return toy(batch) + 1e-3 * mine.sum(1, keepdim=True)

    return served(toy, step), {}


@fault("reads-foreign-slot", 4)
def a_neighbours_keys(device: torch.device, patch: Patch) -> Made:
    """Each row looks at the slot after its own."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        neighbour = torch.where(batch.slots < 0, 4, (batch.slots + 1) % 4).long()
        return logits + 1e-3 * batch.state.pool["layer1.k"][neighbour, 0].sum((1, 2))[:, None]

    return served(toy, step), {}


@fault("rows-mix", 6)
def rows_normed_together(device: torch.device, patch: Patch) -> Made:
    """Logits are scaled by the largest of the whole batch."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        return logits / logits.abs().max()

    return served(toy, step), {}


@fault("depends-on-slot", 13)
def a_bias_by_slots_number(device: torch.device, patch: Patch) -> Made:
    """The slot's number enters the logits."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        return toy(batch) + 0.01 * batch.slots.clamp(min=0)[:, None] * torch.arange(
            VOCAB, device=device
        )

    return served(toy, step), {}


def _with_memory(toy: ToyDecoder, memory: Tensor) -> StepFunction:
    """Each slot's steps add to a line of a table that the library knows nothing of."""

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        slots = scratched(batch)
        line = memory[slots] * 0.5 + logits
        memory[slots] = line
        return logits + 0.1 * line

    return served(toy, step)


@fault("recycled-slot", 9)
def a_table_by_slot_of_ones_own(device: torch.device, patch: Patch) -> Made:
    """What a step keeps by slot outside the state, nobody resets at admission."""
    toy = ToyDecoder(device=device)
    return _with_memory(toy, torch.zeros(5, VOCAB, device=device)), {}


@fault("partial-fork", 10)
def a_table_that_forks_leave_out(device: torch.device, patch: Patch) -> Made:
    """What a step keeps by slot outside the state begins anew with a request, and no fork
    copies it."""
    toy = ToyDecoder(device=device)
    memory = torch.zeros(5, VOCAB, device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        slots = scratched(batch)
        before = torch.where((batch.positions == 0)[:, None], 0.0, memory[slots])
        memory[slots] = before * 0.5 + logits
        return logits + 0.1 * before

    return served(toy, step), {}


def _counting(toy: ToyDecoder) -> StepFunction:
    """A declared field that steps add to."""

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        sums = batch.state.pool["sums"]
        slots = scratched(batch)
        line = sums[slots] * 0.5 + logits
        sums[slots] = line
        return logits + 0.1 * line

    return served(toy, step, fields=(Field("sums", (VOCAB,), torch.float32),))


@fault("partial-fork", 10)
def a_fork_that_forgets(device: torch.device, patch: Patch) -> Made:
    """The library's fork copies nothing but scalars and tokens."""

    def copy_rows(self: DecodeState, slot_in: Tensor, slot_out: Tensor) -> None:
        for name in ("len", "high", "floor", "done", "limit", "tokens"):
            self.pool[name][slot_out.long()] = self.pool[name][slot_in.long()]

    patch.setattr(DecodeState, "_copy_rows", copy_rows)
    return served(ToyDecoder(device=device)), {}


@fault("partial-fork", 10)
def a_checkpoint_that_forgets(device: torch.device, patch: Patch) -> Made:
    """The library's restored requests have none of their rings."""
    restore = DecodeState.restore

    def restored(self: DecodeState, checkpoint: Checkpoint) -> int:
        handle = restore(self, checkpoint)
        self.pool["layer1.k"][self.slots.row_of(handle)] = 0.0
        return handle

    patch.setattr(DecodeState, "restore", restored)
    return served(ToyDecoder(device=device)), {}


@fault("partial-rewind", 11)
def sums_that_stay_after_a_rewind(device: torch.device, patch: Patch) -> Made:
    """A field adds up, and a rewind takes nothing away."""
    return _counting(ToyDecoder(device=device)), {}


@fault("partial-rewind", 11)
def a_rewind_that_does_nothing(device: torch.device, patch: Patch) -> Made:
    """The library's rewind checks its arguments and returns."""
    patch.setattr(DecodeState, "rewind", lambda self, handle, length: None)
    return served(ToyDecoder(device=device)), {}


@fault("recycled-slot", 9)
def an_admission_without_reset(device: torch.device, patch: Patch) -> Made:
    """A model's field is not reset when its row is handed out again."""
    patch.setattr("graphcache.decode_state.replace", lambda field, **_: field)
    return _counting(ToyDecoder(device=device)), {"without": ("partial-rewind",)}


@fault("hidden-state", 9)
def a_running_mean_of_everything(device: torch.device, patch: Patch) -> Made:
    """Statistics over all requests so far enter the logits."""
    toy = ToyDecoder(device=device)
    mean = torch.zeros(VOCAB, device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        there = (batch.slots >= 0)[:, None]
        mean.mul_(0.9).add_(torch.where(there, logits, 0.0).sum(0) * 0.1)
        return logits + mean

    return served(toy, step), {}
