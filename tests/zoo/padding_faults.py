"""Faults of padding rows: they write where a request lives, or what they hold gets out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphcache import Batch, Field
from tests.toy import VOCAB, ToyDecoder
from tests.zoo.planted import Patch, fault, scratched, served

Made = tuple[Any, dict[str, Any]]


@fault("padding-hits-last-slot", 1, line="keys[batch.slots.long()] = 0.5")
def padding_index_as_an_index(device: torch.device, patch: Patch) -> Made:
    """-1 indexes a view without the scratch row, and so the last slot."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        keys = batch.state.pool["layer1.k"][:-1, 0, 0, 0]
        keys[batch.slots.long()] = 0.5
        return logits

    return served(toy, step), {}


@fault("padding-hits-last-slot", 1, line="keys[wrapped] = 0.5")
def padding_wrapped_around(device: torch.device, patch: Patch) -> Made:
    """A remainder turns -1 into the last slot, and no index is out of range."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        keys = batch.state.pool["layer1.k"][:, 0, 0, 0]
        wrapped = batch.slots.long() % batch.state.max_requests
        keys[wrapped] = 0.5
        return logits

    return served(toy, step), {}


@fault("padding-hits-slot-0", 12, line="slots.clamp(min=0)")
def padding_clamped_to_slot_0(device: torch.device, patch: Patch) -> Made:
    """Padding is clamped into range, and the range begins with a slot."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        slots = batch.slots.long()
        batch.state.pool["layer1.v"][slots.clamp(min=0), 0, 0] = 0.25
        return logits

    return served(toy, step), {}


@fault("padding-aliases-live-slot", 4, line="pool[slots] = 0.125")
def padding_aliases_a_parked_request(device: torch.device, patch: Patch) -> Made:
    """Padding rows borrow a slot in the middle, which somebody has."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        slots = torch.where(batch.slots < 0, 2, batch.slots).long()
        pool = batch.state.pool["layer1.k"][:, 1, 0]
        pool[slots] = 0.125
        return logits

    return served(toy, step), {}


@fault("stale-padding-row", 5, line="[rows, 0, place]")
def rows_of_the_batch_before(device: torch.device, patch: Patch) -> Made:
    """The step keeps rows of its own and fills in those that run: padding keeps the last batch's
    slots, whose windows are written on."""
    toy = ToyDecoder(device=device)
    kept = torch.full((4,), 4, dtype=torch.int64, device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        rows = kept[: batch.rows]
        rows.copy_(torch.where(batch.slots < 0, rows, batch.slots.long()))
        place = batch.positions.long() % 6
        window = batch.state.pool["layer1.k"]
        window[rows, 0, place] = window[rows, 0, place] * 0.5
        return logits

    return served(toy, step), {}


@fault("nan-from-padding", 6)
def mean_over_all_rows(device: torch.device, patch: Patch) -> Made:
    """Rows are centred on the mean of the batch, padding and its scratch bias included."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch) + batch.state.pool["bias"][scratched(batch)]
        return logits - logits.mean()

    return served(toy, step, fields=(Field("bias", (VOCAB,), torch.float32),)), {}


@fault("nan-from-padding", 6)
def masked_by_a_product(device: torch.device, patch: Patch) -> Made:
    """Padding is masked with 0 before a sum over the batch, and 0 * NaN is NaN."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        there = (batch.slots >= 0).float()
        bias = batch.state.pool["bias"][scratched(batch)]
        common = (bias * there[:, None]).sum(0)
        return toy(batch) + 0.0 * common

    return served(toy, step, fields=(Field("bias", (VOCAB,), torch.float32),)), {}


@fault("sentinel-is-a-slot", 3)
def zero_for_nobody(device: torch.device, patch: Patch) -> Made:
    """Slot 0 stands for padding in the step, and for a request everywhere else."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        return torch.where(batch.slots[:, None] > 0, toy(batch), 0.0)

    return served(toy, step), {}


@fault("writes-foreign-slot", 4, line="[neighbours, 0, 0] = 0.5")
def the_next_slot(device: torch.device, patch: Patch) -> Made:
    """Every row that runs writes to its neighbour, too."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        neighbours = torch.where(batch.slots < 0, 4, (batch.slots + 1) % 4).long()
        batch.state.pool["layer1.k"][neighbours, 0, 0] = 0.5
        return logits

    return served(toy, step), {}


@fault("writes-foreign-memory", 4, line="table[scratched(batch), -1] = 0")
def a_block_table_rewritten(device: torch.device, patch: Patch) -> Made:
    """The step changes who owns which block, which only the host may."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        batch.state.blocks.table[scratched(batch), -1] = 0
        return logits

    return served(toy, step), {}


@fault("writes-foreign-memory", 2)
def an_operation_that_lies(device: torch.device, patch: Patch) -> Made:
    """An operation writes to a weight and says that it writes nothing."""
    toy = ToyDecoder(device=device)
    uses = torch.zeros(1, device=device)

    @torch.library.custom_op("zoo::counted", mutates_args=())
    def counted(logits: Tensor, uses: Tensor) -> Tensor:
        uses += 1
        return logits.clone()

    def step(batch: Batch) -> Tensor:
        logits: Tensor = counted(toy(batch), uses)
        return logits

    return served(toy, step), {}
