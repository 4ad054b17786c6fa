"""`python -m profiles.nsys EXPORT.sqlite`: a profile's replays by scope and bucket."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from capture import SpanMap
from capture.errors import SpansError

from . import summary
from .attribute import Attribution, Replay, attribute
from .export import read_export
from .icicle import icicle
from .summary import bucket_times, fold_numbers, replay_table, scope_table
from .timeline import timeline

__all__ = ["load_spans", "report", "show"]


def report(
    export: Annotated[Path, typer.Argument(help="What nsys export --type sqlite wrote.")],
    spans: Annotated[
        list[Path] | None,
        typer.Option(
            help="Spans saved at capture, or a folder of them: for a capture outside the profile."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
    bucket: Annotated[str | None, typer.Option(help="Show this bucket only.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Deepest scopes to show.")] = None,
    unfold: Annotated[
        bool, typer.Option("--unfold", help='Show each layer, not all as "layer *".')
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--icicle", help="Write an icicle as SVG here.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--timeline", help="Write a trace for Perfetto here.")
    ] = None,
) -> None:
    """Name every kernel of every replay in an export of Nsight Systems by its scope."""
    found = attribute(read_export(export), load_spans(spans or ()))
    if bucket is not None:
        found.replays = _only(found, bucket)
    show(found, as_json=as_json, depth=depth, unfold=unfold)
    if picture is not None and found.mode == "node":
        picture.write_text(icicle(found), encoding="utf-8")
    if trace is not None:
        trace.write_text(json.dumps(timeline(found)) + "\n", encoding="utf-8")


def show(
    found: Attribution, *, as_json: bool = False, depth: int | None = None, unfold: bool = False
) -> None:
    """Print a profile's tables, or its JSON."""
    if as_json:
        print(json.dumps(summary.as_json(found), indent=2))
        return
    console = Console()
    buckets = bucket_times(found, tuple if unfold else fold_numbers)
    console.print(replay_table(buckets))
    if found.mode == "node":
        console.print(scope_table(buckets, depth))
        console.print(f"{100 * found.attributed_share:.1f}% of device time in replays has a scope")
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def load_spans(places: Iterable[Path]) -> list[SpanMap]:
    """Spans of files, and of every file in folders.

    Raises:
        SpansError: for a file that holds none, or a folder without any.
    """
    maps = []
    for place in places:
        files = sorted(place.glob("*.json")) if place.is_dir() else [place]
        if not files:
            raise SpansError(f"{place} has no spans: run with GRAPHCACHE_SPANS={place} set")
        maps += [SpanMap.load(file) for file in files]
    return maps


def _only(found: Attribution, bucket: str) -> list[Replay]:
    kept = [replay for replay in found.replays if replay.bucket == bucket]
    if not kept:
        names = ", ".join(dict.fromkeys(replay.bucket for replay in found.replays))
        raise typer.BadParameter(f"no replay of bucket {bucket}; there are {names}")
    return kept
