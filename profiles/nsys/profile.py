"""`graphcache profile`: run a workload under Nsight Systems, and name what its replays ran."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from capture import SpanMap
from capture.ranges import DOMAIN
from capture.spans import FOLDER_VARIABLE

from . import summary
from .attribute import Attribution, attribute
from .command import load_spans, show
from .export import read_export
from .icicle import icicle
from .timeline import timeline
from .tool import Nsys, find_nsys

__all__ = ["app", "profile"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
WINDOW_RANGE = "window"


class Mode(enum.StrEnum):
    """How replays are traced."""

    NODE = "node"
    GRAPH = "graph"
    BOTH = "both"


class Window(enum.StrEnum):
    """Which part of the run is traced."""

    ALL = "all"
    API = "api"
    NVTX = "nvtx"


WINDOWS = {
    Window.ALL: (),
    Window.API: ("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
    Window.NVTX: (
        "--capture-range=nvtx", f"--nvtx-capture={WINDOW_RANGE}@{DOMAIN}",
        "--capture-range-end=stop",
    ),
}  # fmt: skip


@app.command(context_settings={"allow_interspersed_args": False})
def profile(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Program and arguments, after --; else graphcache generate."),
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="node: every kernel by scope; graph: whole replays, cheap.")
    ] = Mode.NODE,
    output: Annotated[Path, typer.Option(help="A folder for reports and pictures.")] = Path(
        "profile"
    ),
    window: Annotated[
        Window,
        typer.Option(
            help="Trace all of the run; between torch.cuda.profiler.start() and stop(); or in the "
            f"first NVTX range '{WINDOW_RANGE}' of the domain {DOMAIN}."
        ),
    ] = Window.ALL,
    nsys: Annotated[Path | None, typer.Option(help="The nsys to use.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Deepest scopes to show.")] = None,
    unfold: Annotated[
        bool, typer.Option("--unfold", help='Show each layer, not all as "layer *".')
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Run a workload under Nsight Systems, and name what its replays ran by scope."""
    tool = find_nsys(nsys)
    tool.check()
    words = command or [sys.executable, "-m", "capture.cli", "generate", *_QUESTION]
    output.mkdir(parents=True, exist_ok=True)
    modes = [Mode.NODE, Mode.GRAPH] if mode is Mode.BOTH else [mode]
    found = {one.value: _measure(tool, words, output, one, window) for one in modes}
    if as_json:
        print(json.dumps({name: summary.as_json(one) for name, one in found.items()}, indent=2))
        return
    for one in found.values():
        show(one, depth=depth, unfold=unfold)
    console = Console()
    if len(found) == 2:
        console.print(_cost_of_nodes(found["node"], found["graph"]))
    console.print(f"written to {output}/", highlight=False)


def _measure(tool: Nsys, words: list[str], output: Path, mode: Mode, window: Window) -> Attribution:
    """One run, its export read, and the pictures of it."""
    spans = output / f"spans-{mode.value}"
    for old in spans.glob("*.json"):
        old.unlink()
    report = tool.profile(
        words, output / mode.value, mode=mode.value, options=WINDOWS[window],
        environment={FOLDER_VARIABLE: str(spans.resolve())},
    )  # fmt: skip
    found = attribute(read_export(tool.export(report)), _saved(spans))
    (output / f"{mode.value}.json").write_text(json.dumps(timeline(found)) + "\n", encoding="utf-8")
    if mode is Mode.NODE:
        (output / "icicle.svg").write_text(icicle(found), encoding="utf-8")
    return found


def _saved(folder: Path) -> list[SpanMap]:
    """Spans that the workload saved; none of a tape, whose replays are not on the device."""
    if not folder.exists():
        return []
    return [spans for spans in load_spans([folder]) if spans.backend == "cuda_graph"]


def _cost_of_nodes(node: Attribution, graph: Attribution) -> str:
    """What tracing every node does to a replay's time, by bucket."""
    whole = {bucket.bucket: bucket.median_us for bucket in summary.bucket_times(graph)}
    ratios = [
        f"{bucket.median_us / whole[bucket.bucket]:.2f} (bucket {bucket.bucket})"
        for bucket in summary.bucket_times(node)
        if whole.get(bucket.bucket)
    ]
    return f"a replay traced by node takes this many times as long as whole: {', '.join(ratios)}"


_QUESTION = ("--prompt", "What is the capital of France?", "--max-tokens", "32")
