"""How much memory a runtime will take, told before it is made.

State is arithmetic. What captures take is not: graphs, workspaces, kernels and the intermediate
results of a step depend on driver, library and model. So a plan makes a trial on the device: with
state of a single slot it captures the largest bucket, the next one and a few others, all on padding
rows, and drops them again. What lies between is interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from graphcache import DecodeState
from graphcache.errors import InvalidRequest
from graphcache.footprint import StateFootprint, state_footprint

from .backend import choose_backend
from .checks import check_ladder, check_model, context_of
from .debug import DebugOptions
from .ladder import Bucket, Ladder
from .memory import DeviceMemory
from .report import MIB, rendered
from .step import Sampler
from .trial import Trial

__all__ = ["MemoryPlan", "plan_memory"]

SAMPLES = 5
"""Buckets that a trial captures at most."""


@dataclass(frozen=True)
class MemoryPlan:
    """What a runtime will take of its device.

    Attributes:
        backend: "cuda_graph" or "tape".
        buckets: of its ladder.
        weight_bytes: of the model's tensors, which are there already.
        state: pools, blocks and tables, to the byte.
        kv_blocks: blocks asked for; None for full contexts.
        capture_bytes: estimate: captures, and what rehearsing them leaves: kernels, workspaces.
        retained_bytes: what of that the trial has left, and the capture will find.
        prefill_bytes: estimate: what absorbing one chunk of a prompt takes besides; 0 on a CPU.
        budget_bytes: what there is for all but the weights; None when it is not known.
    """

    backend: str
    buckets: tuple[Bucket, ...]
    weight_bytes: int
    state: StateFootprint
    kv_blocks: int | None
    capture_bytes: int
    retained_bytes: int
    prefill_bytes: int
    budget_bytes: int | None

    @property
    def needed_bytes(self) -> int:
        """All but the weights."""
        return self.state.total_bytes + self.capture_bytes + self.prefill_bytes

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.needed_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it fits the budget; None when that is not known."""
        return None if self.budget_bytes is None else self.needed_bytes <= self.budget_bytes

    @property
    def slots_that_fit(self) -> int | None:
        """The most slots of this context that the budget holds, with captures as planned.

        Each with blocks for a full context of its own, unless `kv_blocks` were given.
        """
        if self.budget_bytes is None:
            return None
        state = self.state
        one = state.slot_bytes
        if self.kv_blocks is not None:
            one = state.row_bytes + state.table_row_bytes
        fixed = self.needed_bytes - state.max_requests * one
        return max(0, (self.budget_bytes - fixed) // one)

    def check_meant_for(self, ladder: Ladder, state: DecodeState) -> None:
        """Raise unless this is the plan of a runtime with such a ladder and state.

        Raises:
            InvalidRequest.
        """
        if ladder.buckets != self.buckets or state.memory_bytes() != self.state.total_bytes:
            raise InvalidRequest(
                f"the plan is of another runtime: {len(self.buckets)} buckets and "
                f"{self.state.total_bytes} bytes of state, not {len(ladder.buckets)} and "
                f"{state.memory_bytes()}; give plan_memory the same arguments"
            )

    def __str__(self) -> str:
        return rendered(self.table())

    def as_json(self) -> dict[str, Any]:
        """For programs, in bytes."""
        return {
            "backend": self.backend,
            "buckets": [bucket.rows for bucket in self.buckets],
            "weight_bytes": self.weight_bytes,
            "slots_bytes": self.state.arena_bytes,
            "blocks_bytes": self.state.block_store_bytes,
            "capture_bytes": self.capture_bytes,
            "prefill_bytes": self.prefill_bytes,
            "total_bytes": self.total_bytes,
            "budget_bytes": self.budget_bytes,
            "slots_that_fit": self.slots_that_fit,
        }

    def table(self) -> Table:
        """For people, in MiB."""
        table = Table(title=f"memory planned ({self.backend})", title_justify="left")
        table.add_column("what")
        table.add_column("MiB", justify="right")
        table.add_column("")
        state = self.state
        rows = [
            ("weights", self.weight_bytes, "there already"),
            ("slots", state.arena_bytes, f"{state.max_requests} of {state.row_bytes} bytes"),
            ("blocks", state.block_store_bytes, f"{state.blocks} of {state.block_bytes} bytes"),
            ("captures", self.capture_bytes, f"{len(self.buckets)} buckets, estimated by a trial"),
            ("prefill", self.prefill_bytes, "one chunk, measured by a trial"),
            ("total", self.total_bytes, ""),
        ]
        for name, size, note in rows:
            table.add_row(name, f"{size / MIB:.1f}", note)
        if self.budget_bytes is not None:
            fits = f"fits up to {self.slots_that_fit} slots at this context"
            table.add_row("free for all but weights", f"{self.budget_bytes / MIB:.1f}", fits)
        return table


def plan_memory(
    model: Any,
    *,
    max_requests: int,
    max_context: int | None = None,
    ladder: Ladder | None = None,
    backend: str = "auto",
    block_tokens: int | None = None,
    kv_blocks: int | None = None,
    sampler: Sampler | None = None,
    prefill_chunk: int = 512,
    keep_logits: bool = False,
    debug: bool | DebugOptions | None = None,
    budget_bytes: int | None = None,
) -> MemoryPlan:
    """What a `DecodeRuntime` of the same arguments will take, before it is made.

    Makes state of one slot, captures up to five buckets of the ladder on padding rows, absorbs a
    chunk of a prompt, and frees it all. On a GPU it waits for the device and gives back what torch
    keeps in reserve, and what others allocate meanwhile is mistaken for its own.

    Args:
        model, max_requests, max_context, ladder, backend, block_tokens, kv_blocks, sampler,
            prefill_chunk, keep_logits, debug: as for `DecodeRuntime`.
        budget_bytes: what state, captures and prefill may take together; None for what is free on
            a GPU.

    Raises:
        UnsupportedModel, SchemaError, UnsupportedDriver: as `DecodeRuntime`.
        CaptureError: when the step can't be captured, or a single slot doesn't fit.
    """
    check_model(model)
    ladder = ladder or Ladder.powers_of_two(max_requests)
    check_ladder(ladder, max_requests)
    device = torch.device(getattr(model, "device", "cpu"))
    context = context_of(model, max_context)
    checks = DebugOptions.chosen(debug)
    state = state_footprint(
        model.schemas,
        max_requests=max_requests,
        max_context=context,
        fields=getattr(model, "fields", ()),
        block_tokens=block_tokens,
        kv_blocks=kv_blocks,
        guarded=checks is not None and checks.guards,
    )
    memory = DeviceMemory(device)
    memory.release()
    budget = memory.free() if budget_bytes is None else budget_bytes
    machine = choose_backend(backend, device)
    keep = keep_logits or (checks is not None and checks.finite)
    with Trial(
        model, machine, Ladder(_sampled(ladder)), context, block_tokens, sampler, keep_logits=keep
    ) as trial:
        taken, marginal = trial.capture()
        weights = trial.weight_bytes()
        retained = trial.drop()
        prefill = trial.prefill(min(prefill_chunk, context - 2))
    missing = [bucket for bucket in ladder.buckets if bucket not in marginal]
    return MemoryPlan(
        backend=machine.name,
        buckets=ladder.buckets,
        weight_bytes=weights,
        state=state,
        kv_blocks=kv_blocks,
        capture_bytes=taken + sum(_between(marginal, bucket) for bucket in missing),
        retained_bytes=retained,
        prefill_bytes=prefill,
        budget_bytes=budget,
    )


def _sampled(ladder: Ladder) -> Sequence[int]:
    """Sizes to try: the two largest, as only the largest pays for what is shared; the smallest, and
    some between."""
    sizes = [bucket.rows for bucket in ladder.buckets]
    if len(sizes) <= SAMPLES:
        return sizes
    last = len(sizes) - 2
    return [sizes[round(last * i / (SAMPLES - 2))] for i in range(SAMPLES - 1)] + sizes[-1:]


def _between(known: dict[Bucket, int], bucket: Bucket) -> int:
    """Linear in tokens between the two nearest that are known."""
    below = max(key for key in known if key < bucket)
    above = min(key for key in known if key > bucket)
    share = (bucket.tokens - below.tokens) / (above.tokens - below.tokens)
    return round(known[below] + share * (known[above] - known[below]))
