"""Steps that look suspicious and are right: nothing may be found."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from capture import Ladder
from graphcache import Batch, Field
from graphcache.models import StepFunction
from graphcache.scopes import scope
from tests.entry_toy import EntryDecoder
from tests.toy import VOCAB, ToyDecoder
from tests.zoo.planted import Patch, scratched, served, unusual

Made = tuple[Any, dict[str, Any]]


@unusual
def an_ordinary_decoder(device: torch.device, patch: Patch) -> Made:
    """One full and one windowed layer, nothing else."""
    return served(ToyDecoder(device=device)), {}


@unusual
def windows_of_every_size(device: torch.device, patch: Patch) -> Made:
    """A window of one token, one that blocks do not divide, one longer than most prompts."""
    return served(ToyDecoder((1, 7, 40), device)), {"block_tokens": 5}


@unusual
def entries_in_fp8(device: torch.device, patch: Patch) -> Made:
    """A window of quantised entries, with tags and scales."""
    return EntryDecoder(device=device).model(), {}


@unusual
def no_layers_at_all(device: torch.device, patch: Patch) -> Made:
    """The next token follows from this one."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).to(device)
    return StepFunction(lambda batch: table[batch.tokens.long()], VOCAB, device=device), {}


@unusual
def a_workspace_made_at_the_first_run(device: torch.device, patch: Patch) -> Made:
    """Scratch memory is made lazily, in its full size, and written by every step."""
    toy = ToyDecoder(device=device)
    spaces: list[Tensor] = []

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        if not spaces:
            spaces.append(torch.zeros(4, VOCAB, device=device))
        rows = spaces[0][: batch.rows]
        rows.copy_(logits)
        return rows * 1.0

    return served(toy, step), {}


@unusual
def logits_in_one_buffer(device: torch.device, patch: Patch) -> Made:
    """The step returns a view of memory made before, the same for all buckets."""
    toy = ToyDecoder(device=device)
    space = torch.full((4, VOCAB), float("nan"), device=device)

    def step(batch: Batch) -> Tensor:
        torch.add(toy(batch), 1.0, out=space[: batch.rows])
        return space[: batch.rows]

    return served(toy, step), {}


@unusual
def counters_for_people(device: torch.device, patch: Patch) -> Made:
    """Python counts runs and rows, and no tensor ever sees the counts."""
    toy = ToyDecoder(device=device)
    runs: Counter[int] = Counter()

    def step(batch: Batch) -> Tensor:
        runs[batch.rows] += 1
        return toy(batch)

    return served(toy, step), {}


@unusual
def another_way_for_small_buckets(device: torch.device, patch: Patch) -> Made:
    """Python chooses by the bucket's rows, which no replay changes."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        if batch.rows <= 2:
            return logits.double().mul(0.5).float()
        return torch.where(logits > 0, logits, 0.1 * logits)

    return served(toy, step), {}


@unusual
def a_bias_by_slot(device: torch.device, patch: Patch) -> Made:
    """A declared field is read by slot, by padding from scratch, whatever lies there."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        return toy(batch) + batch.state.pool["bias"][scratched(batch)]

    fields = [{"bias": 0.5}, {}, {"bias": -2.0}]
    return served(toy, step, fields=(Field("bias", (VOCAB,), torch.float32),)), {"fields": fields}


@unusual
def adapters_by_number(device: torch.device, patch: Patch) -> Made:
    """A whole-numbered field chooses among weights: scratch must keep its first value."""
    toy = ToyDecoder(device=device)
    adapters = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)).to(device)

    def step(batch: Batch) -> Tensor:
        chosen = batch.state.pool["adapter"][scratched(batch)]
        return toy(batch) + adapters[chosen.long()]

    fields = [{"adapter": 2}, {"adapter": 1}, {}]
    return served(toy, step, fields=(Field("adapter", (), torch.int32),)), {"fields": fields}


@unusual
def a_ring_of_ones_own(device: torch.device, patch: Patch) -> Made:
    """A field holds a line for each position, written before it is read."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        lines, slots, at = batch.state.pool["lines"], scratched(batch), batch.positions.long()
        lines[slots, at] = logits[:, :4]
        return logits + lines[slots, at].sum(1, keepdim=True)

    return served(toy, step, fields=(Field("lines", (64, 4), torch.float32),)), {}


@unusual
def writes_scratch_on_purpose(device: torch.device, patch: Patch) -> Made:
    """Padding writes, each row of it, to the scratch row."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        batch.state.pool["mark"][scratched(batch)] = batch.positions.float()
        return toy(batch)

    return served(toy, step, fields=(Field("mark", (), torch.float32),)), {}


@unusual
def nan_where_nobody_looks(device: torch.device, patch: Patch) -> Made:
    """Padding divides zero by zero; no row that runs sees it."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        there = (batch.slots >= 0).float()[:, None]
        return toy(batch) * (there / there)

    return served(toy, step), {}


@unusual
def greedy_whatever_is_asked(device: torch.device, patch: Patch) -> Made:
    """A sampler without temperature: the same draw each time is right."""
    return served(ToyDecoder(device=device)), {
        "sampler": lambda logits, batch: logits.argmax(-1).int()
    }


@unusual
def a_mask_before_the_sampler(device: torch.device, patch: Patch) -> Made:
    """Some ids are forbidden, then the state's own sampler draws."""
    allowed = (torch.arange(VOCAB, device=device) % 3 != 1)[None]

    def sampler(logits: Tensor, batch: Batch) -> Tensor:
        return batch.state.sample(logits.masked_fill(~allowed, -math.inf), batch)

    return served(ToyDecoder(device=device)), {"sampler": sampler}


@unusual
def wider_than_the_vocabulary(device: torch.device, patch: Patch) -> Made:
    """Logits in bfloat16, padded to a round width with NaN."""
    toy = ToyDecoder(device=device)
    fill = torch.full((4, 3), float("nan"), device=device)

    def step(batch: Batch) -> Tensor:
        return torch.cat([toy(batch), fill[: batch.rows]], 1).bfloat16()

    return served(toy, step), {}


class _Normed(nn.Module):
    """A module with parameters, a buffer and scopes of its own."""

    def __init__(self, toy: ToyDecoder) -> None:
        super().__init__()
        self.toy = toy
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, VOCAB, device=toy.device))
        self.register_buffer("fifths", torch.arange(0, VOCAB, 5, device=toy.device))

    def forward(self, batch: Batch) -> Tensor:
        with scope("norm"):
            logits = self.toy(batch)
            logits = logits * torch.rsqrt(logits.square().mean(-1, keepdim=True) + 1e-6)
            logits = logits * self.gain
            logits[:, self.fifths] = 0.0
        return logits


@unusual
def a_module_of_torchs(device: torch.device, patch: Patch) -> Made:
    """Parameters that want gradients, a buffer as an index, scopes."""
    module = _Normed(ToyDecoder(device=device))
    return served(module.toy, module), {}


@unusual
def everything_in_place(device: torch.device, patch: Patch) -> Made:
    """Views of views, written in place, with a number that Python fixed before capture."""
    toy = ToyDecoder(device=device)
    half = 0.5

    def step(batch: Batch) -> Tensor:
        logits = toy(batch).clone()
        front = logits.view(batch.rows, -1)[:, : VOCAB // 2].t()
        front.mul_(half).add_(torch.tensor(0.25))
        return logits

    return served(toy, step), {}


@unusual
def one_bucket_for_all(device: torch.device, patch: Patch) -> Made:
    """Most rows are padding, most of the time."""
    return served(ToyDecoder(device=device)), {"ladder": Ladder([4])}


@unusual
def fewer_rows_than_slots(device: torch.device, patch: Patch) -> Made:
    """The ladder ends below the number of requests: they take turns."""
    return served(ToyDecoder(device=device)), {"ladder": Ladder([1, 3]), "max_requests": 6}


@unusual
def a_single_slot(device: torch.device, patch: Patch) -> Made:
    """One request at a time."""
    return served(ToyDecoder(device=device)), {"max_requests": 1}


@unusual
def an_error_that_is_caught(device: torch.device, patch: Patch) -> Made:
    """Python tries one way, fails, and takes the other, each time."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        try:
            return logits @ logits.new_zeros(VOCAB + 1, 2)
        except RuntimeError:
            return logits * 2

    return served(toy, step), {}
