"""`python -m profiles.soak`: a great many replays on this machine, and what they left behind."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from capture.quiet import silence_libraries
from graphcache.models import load_model

from ..bench import describe_machine
from ..subjects import two_layers
from .readings import SLACK
from .run import Soak, SoakReport, soak

MODELS: dict[str, tuple[Callable[[str], Any], float]] = {
    "two-layers": (two_layers, 1e-3),
    "smollm2": (lambda device: load_model("smollm2", device=device), 0.1),
}
"""Each with the tolerance of its dtype: float32, bfloat16."""
PROGRESS_S = 5.0


def main(
    model: Annotated[
        str, typer.Option(help='"two-layers", of random weights, or "smollm2".')
    ] = "two-layers",
    replays: Annotated[int, typer.Option(min=1)] = 1_000_000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu (on the tape) or cuda.")] = "auto",
    minutes: Annotated[float | None, typer.Option(min=0.0, help="End by then.")] = None,
    shadows: Annotated[
        int, typer.Option(min=1, help="Steps that also run eagerly, evenly spread.")
    ] = 1000,
    output: Annotated[Path | None, typer.Option(help="Write JSON here too.")] = None,
) -> None:
    """Requests come, go, fork and rewind at random; exits 1 if a step, or memory, went wrong."""
    if model not in MODELS:
        raise typer.BadParameter(f"{model!r} is neither {' nor '.join(MODELS)}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    silence_libraries()
    torch.set_num_threads(1)
    make, tolerance = MODELS[model]
    plan = Soak(replays, seed=seed, shadows=shadows, minutes=minutes, tolerance=tolerance)
    with tqdm(total=replays, unit="replay", mininterval=PROGRESS_S, dynamic_ncols=True) as bar:

        def progress(report: SoakReport) -> None:
            events = sum(report.events.values())
            bar.set_postfix_str(f"{events} events, {report.shadows} shadows", refresh=False)
            bar.update(report.replays - bar.n)

        report = soak(make(device), plan, progress)
    Console(width=100).print(_table(report, plan, f"{model} on {device}, seed {seed}"))
    if output is not None:
        machine = describe_machine() if device == "cuda" else {"cpu": platform.machine()}
        results = {
            "machine": machine, "model": model, "plan": asdict(plan), "ok": report.ok,
            **asdict(report), "slack": SLACK,
        }  # fmt: skip
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    raise typer.Exit(0 if report.ok else 1)


def _table(report: SoakReport, plan: Soak, title: str) -> Table:
    table = Table(title=f"soak: {title}", title_justify="left", show_header=False)
    table.add_row("replays", f"{report.replays:,} of {plan.replays:,}")
    us = report.seconds * 1e6 / max(1, report.replays)
    table.add_row("time", f"{report.seconds:.1f} s, {us:.1f} us a replay with all that is between")
    for bucket, count in report.buckets.items():
        table.add_row(f"bucket {bucket}", f"{count:,}")
    for event, count in report.events.items():
        table.add_row(event, f"{count:,}")
    table.add_row("eager shadows", f"{report.shadows:,}")
    table.add_row("requests reread", f"{report.rereads:,}, error at most {report.reread_error:.2g}")
    table.add_row("left for the collector", f"{report.garbage:,} objects")
    if report.growth is None:
        table.add_row("growth", "too few readings to tell")
    for name, grown in (report.growth or {}).items():
        table.add_row(f"growth, {name}", f"{grown:,} (at most {SLACK[name]:,})")
    for failure in report.failures:
        table.add_row("[bold]FAILED[/bold]", failure)
    table.add_row("", "ok" if report.ok else "FAILED")
    return table


if __name__ == "__main__":
    typer.run(main)
