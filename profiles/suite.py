"""What a run of `profiles.bench` measures, in order; each line by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from .journal import Journal
from .peers import PEERS
from .ratios.beside_peers import PeerBench
from .ratios.captures import capture_ratio
from .ratios.floor import Ceilings, measured_ceilings, step_floor
from .ratios.gates import step_gates
from .ratios.padding import padding_of_ladders
from .ratios.scans import recurrent_ratio
from .ratios.steps import append_ratios, step_ratios
from .results import Failed, PeerRun, Ratio, Record
from .subjects import CONTEXT, llama_shape, smollm2_shape, two_layers

__all__ = ["run", "subject"]

BATCHES = (1, 8, 64)
CONTEXTS = (256, 1024, 4000)
CPU_CONTEXT = 100
CPU_REPLAYS = 100
NO_SUBJECT = {
    "R8": "there is no device loop yet",
    "R10": "there is no optimal ladder yet; what the others pad is given",
    "R5, JAX while_loop": "a decoder in JAX on these weights is not written",
}
NEEDS_GPU = (
    "R1, R1b, R3, R4, R4b, R5, R6, R7, R9, R11, R12",
    "times of every ratio are of CUDA graphs, and there is no CUDA GPU",
)


def subject() -> str:
    """In words."""
    if torch.cuda.is_available():
        return f"Llama of SmolLM2-135M's shape, random bf16 weights, {CONTEXT} tokens before"
    return f"Llama of two small layers on the tape, float32, {CPU_CONTEXT} tokens before"


def run(journal: Journal, quick: bool) -> None:
    """Everything that this machine can do."""
    journal.measure("padding of ladders", padding_of_ladders)
    if torch.cuda.is_available():
        _on_gpu(journal, quick)
    else:
        _on_tape(journal)
    for what, why in NO_SUBJECT.items():
        journal.skip(what, why)


def _on_gpu(journal: Journal, quick: bool) -> None:
    model = smollm2_shape("cuda")
    batches = (8,) if quick else BATCHES
    journal.measure("R6, appends", append_ratios)
    journal.measure("R7", lambda: [recurrent_ratio()])
    for batch in batches:
        journal.measure(f"R1, R1b, R3, R12 at batch {batch}", partial(step_ratios, model, batch))
        journal.measure(f"gates at batch {batch}", partial(step_gates, model, batch))
        _peers(journal, model, batch, CONTEXT, quick)
    ceilings: list[Ceilings] = []

    def measure_ceilings() -> Iterable[Record]:
        ceilings.append(measured_ceilings())
        return ()

    journal.measure("ceilings of the device", measure_ceilings)
    if ceilings:
        for batch in batches:
            for context in (CONTEXT,) if quick else CONTEXTS:
                _floor(journal, model, "135M", batch, context, ceilings[0])
    if quick:
        journal.skip("R4 at 1B and 8B, R9", "left out by --quick")
        return
    journal.measure("R9", partial(capture_ratio, model))
    for size in ("1B", "8B"):
        torch.cuda.empty_cache()
        if ceilings:
            journal.measure(f"R4 at {size}", partial(_floor_of, size, ceilings[0]))


def _on_tape(journal: Journal) -> None:
    torch.set_num_threads(1)
    model = two_layers("cpu")
    for batch in BATCHES[:2]:
        journal.measure(
            f"gates at batch {batch}, on the tape",
            partial(step_gates, model, batch, CPU_CONTEXT, CPU_REPLAYS),
        )
    _peers(journal, model, 3, CPU_CONTEXT, quick=False)
    journal.skip(*NEEDS_GPU)


def _peers(journal: Journal, model: Any, batch: int, context: int, quick: bool) -> None:
    timed = model.device.type == "cuda"
    at = f"batch {batch}"

    def all_of_them() -> Iterator[Record]:
        with PeerBench(model, batch, context, timed=timed) as bench:
            yield from bench.ours()
            for kind in PEERS:
                if quick and kind.compiles:
                    journal.skip(f"R5, {kind.name} at {at}", "left out by --quick: it compiles")
                    continue
                # A failure of one is no failure of the next.
                journal.measure(f"R5, {kind.name} at {at}", partial(bench.beside, kind))

    journal.measure(f"R5 at {at}", all_of_them)
    for line in journal.records(PeerRun):
        if line.batch == batch and not line.agrees:
            journal.keep(Failed(f"outputs of {line.peer} at {at}", line.agreement))


def _floor(
    journal: Journal, model: Any, label: str, batch: int, context: int, ceilings: Ceilings
) -> None:
    def measured() -> Iterator[Record]:
        for record in step_floor(model, label, batch, context, ceilings):
            # The ratio is of the context that all others have; the other contexts are for plots.
            if not isinstance(record, Ratio) or context == CONTEXT:
                yield record

    journal.measure(f"R4 at {label}, batch {batch}, {context} tokens", measured)


def _floor_of(size: str, ceilings: Ceilings) -> Iterator[Record]:
    yield from step_floor(llama_shape(size), size, 1, CONTEXT, ceilings)
