"""Faults of what a capture freezes: numbers, branches, addresses, draws, outputs."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphcache import Batch
from graphcache.models import StepFunction
from tests.toy import VOCAB, ToyDecoder
from tests.zoo.planted import Patch, fault, served

Made = tuple[Any, dict[str, Any]]


@fault("frozen-value", 13, line="batch.slots.tolist()")
def slots_as_a_list(device: torch.device, patch: Patch) -> Made:
    """A loop on the host gathers the blocks of whoever is there at capture."""
    toy = ToyDecoder((None,), device)

    def step(batch: Batch) -> Tensor:
        blocks = [batch.state.blocks.table[slot] for slot in batch.slots.tolist()]
        return toy(batch) + 0 * torch.stack(blocks).sum()

    return served(toy, step), {}


@fault("frozen-value", 13, line="toy(batch) * float(calls[0])")
def a_counter_in_python(device: torch.device, patch: Patch) -> Made:
    """Logits are scaled by how often the step has run."""
    toy = ToyDecoder(device=device)
    calls = [0]

    def step(batch: Batch) -> Tensor:
        calls[0] += 1
        return toy(batch) * float(calls[0])

    return served(toy, step), {}


@fault("frozen-value", 13, line="logits * float(calls[0])")
def a_counter_in_one_bucket(device: torch.device, patch: Patch) -> Made:
    """Only the largest bucket scales its logits by how often the step has run."""
    toy = ToyDecoder(device=device)
    calls = [0]

    def step(batch: Batch) -> Tensor:
        calls[0] += 1
        logits = toy(batch)
        return logits * float(calls[0]) if batch.rows == 4 else logits

    return served(toy, step), {}


@fault("frozen-value", 13, line="* (1 + batch.state.slots.live)")
def the_hosts_books(device: torch.device, patch: Patch) -> Made:
    """The step asks the host how many prompts it has absorbed."""
    toy = ToyDecoder(device=device)
    absorbed = [0]

    def chunk(batch: Batch) -> None:
        absorbed[0] += 1
        toy(batch)

    def step(batch: Batch) -> Tensor:
        return toy(batch) + 0.5 * absorbed[0] * (1 + batch.state.slots.live)

    return StepFunction(step, VOCAB, schemas=toy.schemas, device=device, chunk=chunk), {}


@fault("frozen-value", 13, line="view[0]", backends=("tape",))
def a_view_of_host_memory(device: torch.device, patch: Patch) -> Made:
    """Lengths are read through numpy memory, which no operation shows."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        arena = batch.state.pool.arena.detach()
        view = arena_view(arena)
        return toy(batch) + float(view[0])

    def arena_view(arena: Tensor) -> np.ndarray:
        import ctypes

        memory = (ctypes.c_int32 * 4).from_address(arena.data_ptr())
        return np.frombuffer(memory, dtype=np.int32)

    return served(toy, step), {}


@fault("frozen-branch", 14, line="batch.positions[0] == 0")
def reset_on_the_first_token(device: torch.device, patch: Patch) -> Made:
    """A branch on the position resets the state: a capture holds it ever after."""
    toy = ToyDecoder((4,), device)

    def step(batch: Batch) -> Tensor:
        if batch.positions[0] == 0:
            batch.state.pool["layer0.k"].zero_()
        return toy(batch)

    return served(toy, step), {}


@fault("frozen-branch", 14, line="logits * 2")
def fresh_after_a_prompt(device: torch.device, patch: Patch) -> Made:
    """A flag of Python's, set by a prefill, chooses what the next step does."""
    toy = ToyDecoder(device=device)
    fresh = [False]

    def chunk(batch: Batch) -> None:
        fresh[0] = True
        toy(batch)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        if fresh[0]:
            fresh[0] = False
            logits = logits * 2
        return logits

    return StepFunction(step, VOCAB, schemas=toy.schemas, device=device, chunk=chunk), {}


@fault("moved-address", 15, line="bias[0]")
def a_tensor_made_anew(device: torch.device, patch: Patch) -> Made:
    """A prefill replaces the tensor that steps read."""
    toy = ToyDecoder(device=device)
    bias = [torch.zeros(VOCAB, device=device)]
    absorbed = [0]

    def chunk(batch: Batch) -> None:
        absorbed[0] += 1
        bias[0] = torch.full((VOCAB,), 0.5 * absorbed[0], device=device)
        toy(batch)

    def step(batch: Batch) -> Tensor:
        return toy(batch) + bias[0]

    return StepFunction(step, VOCAB, schemas=toy.schemas, device=device, chunk=chunk), {}


@fault("moved-address", 15)
def a_workspace_that_grows(device: torch.device, patch: Patch) -> Made:
    """Longer prompts give the workspace other memory."""
    toy = ToyDecoder(device=device)
    space = torch.zeros(4, VOCAB, device=device)
    longest = [0]

    def chunk(batch: Batch) -> None:
        if batch.q_len > longest[0] + 30:
            longest[0] = batch.q_len
            space.data = torch.zeros(4 + batch.q_len, VOCAB, device=device)
        toy(batch)

    def step(batch: Batch) -> Tensor:
        rows = space[: batch.rows]
        rows.copy_(toy(batch))
        return rows

    return StepFunction(step, VOCAB, schemas=toy.schemas, device=device, chunk=chunk), {}


@fault("moved-address", 15, line="space.resize_")
def a_workspace_resized_by_the_step(device: torch.device, patch: Patch) -> Made:
    """The step itself gives its workspace other memory."""
    toy = ToyDecoder(device=device)
    space = torch.zeros(1, VOCAB, device=device)

    def step(batch: Batch) -> Tensor:
        space.resize_(batch.rows, VOCAB)
        space.copy_(toy(batch))
        return space + 0.0

    return served(toy, step), {}


@fault("held-output", 16, line="logits = toy(batch) + 0.0")
def the_last_logits_kept(device: torch.device, patch: Patch) -> Made:
    """Somebody reads the last step's logits later, from memory that buckets share."""
    toy = ToyDecoder(device=device)
    kept: dict[str, Tensor] = {}

    def step(batch: Batch) -> Tensor:
        logits = toy(batch) + 0.0
        kept["logits"] = logits
        return logits * 1.0

    return served(toy, step), {}


@fault("held-output", 16)
def tokens_in_one_place(device: torch.device, patch: Patch) -> Made:
    """The ring through which tokens come back has one place: the next step's overwrite them."""
    patch.setattr("capture.mailbox.DEPTH", 1)
    return served(ToyDecoder(device=device)), {}


@fault("replay-differs", 13, backends=("tape",))
def a_bias_written_by_numpy(device: torch.device, patch: Patch) -> Made:
    """Python writes into memory that operations read: each run of the step, and no replay."""
    toy = ToyDecoder(device=device)
    bias = torch.zeros(4, 1)
    memory = bias.numpy()

    def step(batch: Batch) -> Tensor:
        memory[: batch.rows, 0] = (words_of(batch.slots) + 1) * 0.25
        logits = toy(batch) + bias[: batch.rows]
        memory[:] = 0.0
        return logits

    def words_of(slots: Tensor) -> np.ndarray:
        import ctypes

        memory = (ctypes.c_int32 * len(slots)).from_address(slots.data_ptr())
        return np.frombuffer(memory, dtype=np.int32)

    return served(toy, step), {}


@fault("replay-differs", 13, backends=("cuda_graph",))
def a_number_inside_an_operation(device: torch.device, patch: Patch) -> Made:
    """What an operation does depends on a number of Python's that no argument shows."""
    toy = ToyDecoder(device=device)
    absorbed = [0]

    @torch.library.custom_op("zoo::plus_absorbed", mutates_args=())
    def plus_absorbed(logits: Tensor) -> Tensor:
        return logits + float(absorbed[0])

    def chunk(batch: Batch) -> None:
        absorbed[0] += 1
        toy(batch)

    def step(batch: Batch) -> Tensor:
        logits: Tensor = plus_absorbed(toy(batch))
        return logits

    return StepFunction(step, VOCAB, schemas=toy.schemas, device=device, chunk=chunk), {}


@fault("not-repeatable", 17)
def an_operation_with_a_clock(device: torch.device, patch: Patch) -> Made:
    """An operation adds another number each time that it runs, from state of its own."""
    toy = ToyDecoder(device=device)
    ticks = itertools.count()

    @torch.library.custom_op("zoo::plus_ticks", mutates_args=())
    def plus_ticks(logits: Tensor) -> Tensor:
        return logits + float(next(ticks))

    def step(batch: Batch) -> Tensor:
        logits: Tensor = plus_ticks(toy(batch))
        return logits

    return served(toy, step), {}


@fault("frozen-random", 17, line="random.random()")
def pythons_random_numbers(device: torch.device, patch: Patch) -> Made:
    """Noise from Python's generator: one number, replayed for ever."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        return toy(batch) + random.random()

    return served(toy, step), {}


@fault("frozen-random", 17, line="np.random.rand()")
def numpys_random_numbers(device: torch.device, patch: Patch) -> Made:
    """Noise from numpy's generator."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        return toy(batch) + float(np.random.rand())

    return served(toy, step), {}


@fault("frozen-random", 17, line="torch.rand_like")
def the_frameworks_random_numbers(device: torch.device, patch: Patch) -> Made:
    """A sampler on the framework's generator, which a replay does not move."""
    toy = ToyDecoder(device=device)

    def sampler(logits: Tensor, batch: Batch) -> Tensor:
        noise = -torch.rand_like(logits).log().neg().log()
        return (logits + noise).argmax(-1).int()

    return served(toy), {"sampler": sampler}


def _noise(seeds: Tensor, places: Tensor) -> Tensor:
    """[T, VOCAB] from whole numbers [T]: a hash, good enough to draw with."""
    ids = torch.arange(VOCAB, device=seeds.device)
    mixed = (seeds[:, None] * 7919 + places[:, None] * 104729 + ids * 15485863) % 1000003
    mixed = (mixed * 48271 + 11) % 1000003
    uniform = ((mixed * 69621 + 7) % 1000003 + 1).float() / 1000005
    return -(-uniform.log()).log()


def _sampled(logits: Tensor, batch: Batch, seeds: Tensor, places: Tensor) -> Tensor:
    slots = torch.where(batch.slots < 0, batch.state.max_requests, batch.slots).long()
    temperature = batch.state.pool["temperature"][slots][:, None]
    drawn = (logits / temperature.clamp(min=1e-6) + _noise(seeds, places)).argmax(-1)
    token = torch.where(temperature[:, 0] > 0, drawn, logits.argmax(-1))
    return torch.where(batch.slots < 0, -1, token).int()


@fault("frozen-random", 17)
def the_same_offset_each_time(device: torch.device, patch: Patch) -> Made:
    """A counter-based generator whose counter is a constant: each step draws the same."""
    toy = ToyDecoder(device=device)

    def sampler(logits: Tensor, batch: Batch) -> Tensor:
        slots = torch.where(batch.slots < 0, batch.state.max_requests, batch.slots).long()
        return _sampled(logits, batch, batch.state.pool["seed"][slots], torch.zeros_like(slots))

    return served(toy), {"sampler": sampler}


@fault("frozen-random", 17)
def nobodys_seed(device: torch.device, patch: Patch) -> Made:
    """Draws move on with the position, and are the same for every seed."""
    toy = ToyDecoder(device=device)

    def sampler(logits: Tensor, batch: Batch) -> Tensor:
        places = batch.positions.long()
        return _sampled(logits, batch, torch.full_like(places, 5), places)

    return served(toy), {"sampler": sampler}


@fault("draws-depend-on-row", 17)
def seeded_by_the_row(device: torch.device, patch: Patch) -> Made:
    """Draws are keyed by the row of the batch."""
    toy = ToyDecoder(device=device)

    def sampler(logits: Tensor, batch: Batch) -> Tensor:
        slots = torch.where(batch.slots < 0, batch.state.max_requests, batch.slots).long()
        rows = torch.arange(batch.rows, device=slots.device)
        seeds = batch.state.pool["seed"][slots] + 1000 * rows
        return _sampled(logits, batch, seeds, batch.positions.long())

    return served(toy), {"sampler": sampler}


@fault("size-depends-on-data", 13, line="nonzero()")
def rows_that_run_by_nonzero(device: torch.device, patch: Patch) -> Made:
    """Only the rows that run are worked on; how many, capture decides."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        rows = (batch.slots >= 0).nonzero()[:, 0]
        return logits.index_add(0, rows, logits[rows])

    return served(toy, step), {}
