"""`python -m profiles.plots`: pictures of a results file, drawn from that file alone.

A step's time by batch and context with its floor, the host's time by peer, and padding by ladder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .results import Padding, PeerRun, ResultsError, StepTime, read_results, records

__all__ = ["PlotsUnavailable", "draw", "main"]

RESULTS = Path(__file__).parent / "results" / "h200.json"
OURS = "graphcache"
OWN_COLOR, PEER_COLOR, FLOOR_COLOR = "#d1495b", "#5b7a99", "#777777"
CONTEXT_COLORS = ("#2a9d8f", "#d1495b", "#3d5a80", "#e9a23b", "#7b5ea7")


class PlotsUnavailable(Exception):
    """matplotlib is missing; says how to get it."""


def main(
    results: Annotated[Path, typer.Option(help="What `profiles.bench` wrote.")] = RESULTS,
    output: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("plots"),
) -> None:
    """Draw what a results file holds; say which picture it has no lines for."""
    try:
        written = read_results(results)
        drawn = draw(written, output)
    except (ResultsError, PlotsUnavailable) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    for name, path in drawn.items():
        typer.echo(f"{path}" if path else f"no {name} picture: {results} has no lines for it")


def draw(written: Mapping[str, Any], folder: Path) -> dict[str, Path | None]:
    """Write one PNG for each picture that the results have lines for; None for the others.

    Raises:
        PlotsUnavailable: without matplotlib, before anything is written.
        ResultsError: for lines that can't be read, likewise.
    """
    pyplot = _pyplot()
    pictures: dict[str, tuple[list[Any], Callable[[Any, list[Any]], Any]]] = {
        "latency": (records(StepTime, written), _draw_latency),
        "host": ([run for run in records(PeerRun, written) if run.host_us], _draw_host),
        "padding": (records(Padding, written), _draw_padding),
    }
    drawn: dict[str, Path | None] = {}
    for name, (lines, picture) in pictures.items():
        if not lines:
            drawn[name] = None
            continue
        folder.mkdir(parents=True, exist_ok=True)
        figure = picture(pyplot, lines)
        path = drawn[name] = folder / f"{name}.png"
        figure.text(0.005, 0.005, _caption(written), fontsize=7, color=FLOOR_COLOR)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
    return drawn


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise PlotsUnavailable(
            f"pictures need matplotlib ({error}); pip install 'graphcache-runtime[plots]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _caption(written: Mapping[str, Any]) -> str:
    machine = written["machine"]
    parts = (machine.get("gpu"), f"torch {machine.get('torch')}", f"commit {machine.get('commit')}")
    return ", ".join(str(part) for part in parts if part)


def _draw_latency(pyplot: Any, lines: list[StepTime]) -> Any:
    """One panel a model: batches along, a line for each context, its floor dashed below."""
    models = [model for model in dict.fromkeys(x.model for x in lines) if _batches(lines, model)]
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(2.5 + 3.5 * len(models), 4.6), squeeze=False, layout="constrained"
    )
    figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))
    for axis, model in zip(axes[0], models, strict=True):
        mine = [line for line in lines if line.model == model]
        for color, context in zip(
            CONTEXT_COLORS * 9, sorted({line.context for line in mine}), strict=False
        ):
            points = sorted(
                (line for line in mine if line.context == context), key=lambda line: line.batch
            )
            batches = [line.batch for line in points]
            label = f"{context} tokens"
            axis.plot(batches, [line.us for line in points], "o-", color=color, label=label)
            axis.plot(
                batches, [line.floor_us for line in points], "_--", color=color, linewidth=1,
                markersize=12,
            )  # fmt: skip
        axis.plot([], [], "_--", color=FLOOR_COLOR, label="bytes read / bandwidth")
        ticks = sorted({line.batch for line in mine})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        steps = _round_steps(min(x.floor_us for x in mine), max(x.us for x in mine))
        axis.set_yticks(steps, [f"{step:g}" for step in steps])
        axis.set_xlabel("batch")
        axis.set_ylabel("us a step")
        axis.set_title(f"Llama {model}")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    return figure


def _batches(lines: list[StepTime], model: str) -> bool:
    """Whether there is a line to draw, or nothing but points."""
    alone = len({line.model for line in lines}) == 1
    return alone or len({line.batch for line in lines if line.model == model}) > 1


def _round_steps(least: float, most: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from one at or below `least` to one at or above `most`."""
    steps = [digit * 10.0**power for power in range(-1, 9) for digit in (1, 2, 5)]
    first = max((step for step in steps if step <= least), default=steps[0])
    last = min((step for step in steps if step >= most), default=steps[-1])
    return [step for step in steps if first <= step <= last]


def _draw_host(pyplot: Any, lines: list[PeerRun]) -> Any:
    """Bars by peer, a panel for each batch, the longest first."""
    batches = sorted({line.batch for line in lines})
    peers = {line.peer for line in lines}
    height = 1.4 + 0.42 * len(peers)
    figure, axes = pyplot.subplots(
        1, len(batches), figsize=(3.2 + 3.0 * len(batches), height), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    most = max(line.host_us for line in lines)
    order = sorted(peers, key=lambda peer: max(line.host_us for line in lines if line.peer == peer))
    for axis, batch in zip(axes[0], batches, strict=True):
        mine = {line.peer: line.host_us for line in lines if line.batch == batch}
        shown = [mine.get(peer, 0.0) for peer in order]
        colors = [OWN_COLOR if peer == OURS else PEER_COLOR for peer in order]
        axis.barh(range(len(order)), shown, color=colors, log=True)
        for place, us in enumerate(shown):
            if us:
                axis.text(
                    us * 1.1,
                    place,
                    f"{us:,.3g}" if us < 1000 else f"{us:,.0f}",
                    va="center",
                    fontsize=8,
                )
        axis.set_yticks(range(len(order)), order)
        axis.set_xlim(1, most * 8)
        axis.set_title(f"batch {batch}")
        axis.set_xlabel("host us a step, device idle")
    return figure


def _draw_padding(pyplot: Any, lines: list[Padding]) -> Any:
    """Share of padding by how many graphs a ladder takes."""
    figure, axis = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    names = [f"{line.ladder}\n{line.graphs} graphs" for line in lines]
    shares = [100 * line.share for line in lines]
    bars = axis.bar(names, shares, color=PEER_COLOR, width=0.6)
    axis.bar_label(bars, [f"{share:.1f}%" for share in shares], padding=2)
    axis.set_ylabel("padding, % of a step's rows")
    axis.set_ylim(0, max(shares) * 1.15 + 0.1)
    axis.set_title(f"Batches of 1 to {lines[0].ceiling}, all sizes alike")
    return figure


if __name__ == "__main__":
    typer.run(main)
