"""`python -m profiles.debug_cost`: what each check of debug mode adds to a step on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from capture import DecodeRuntime, Ladder
from capture.debug import DebugOptions
from capture.quiet import silence_libraries

from .subjects import smollm2_shape, two_layers
from .timing import Sample, alternate, timed

__all__ = ["measure"]

MODES: dict[str, bool | DebugOptions] = {
    "off": False,
    "addresses": DebugOptions(guards=False, finite=False, shadow_every=0),
    "guards": DebugOptions(addresses=False, finite=False, shadow_every=0),
    "finite": DebugOptions(addresses=False, guards=False, shadow_every=0),
    "a shadow each step": DebugOptions(addresses=False, guards=False, finite=False, shadow_every=1),
    "all, a shadow each 64 steps": True,
}


def measure(model: Any, rows: int, count: int) -> dict[str, Sample]:
    """Host time from a step asked for to its tokens read, by mode; taken in turn."""
    with ExitStack() as stack:
        subjects = [stack.enter_context(_subject(model, rows, mode)) for mode in MODES.values()]
        return dict(zip(MODES, alternate(count, *subjects), strict=True))


@contextmanager
def _subject(model: Any, rows: int, mode: bool | DebugOptions) -> Iterator[Callable[[], int]]:
    with DecodeRuntime(
        model, max_requests=rows, max_context=1024, ladder=Ladder([rows]), debug=mode
    ) as runtime:
        runtime.capture(progress=False)
        slots = [runtime.admit(range(1, 100 + row)) for row in range(rows)]
        yield lambda: timed(lambda: runtime.step(slots).tokens())


def main(
    model: Annotated[str, typer.Option(help='"toy" or "smollm2" (its shape).')] = "toy",
    rows: Annotated[int, typer.Option(min=1)] = 8,
    count: Annotated[int, typer.Option(min=1, help="Steps of each mode.")] = 200,
) -> None:
    """Print a table of medians."""
    silence_libraries()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    subject = {"toy": two_layers, "smollm2": smollm2_shape}[model](device)
    samples = measure(subject, rows, count)
    off = samples["off"].median_us
    table = Table(title=f"a step of {rows} slots, {model} on {device}", title_justify="left")
    for heading in ("debug mode", "us (p99)", "more than off, us", "times off"):
        table.add_column(heading, justify="right")
    for name, sample in samples.items():
        us = sample.median_us
        table.add_row(name, f"{us:.1f} ({sample.p99_us:.1f})", f"{us - off:.1f}", f"{us / off:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
