"""`graphcache diff`: the first scope where two runs part."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..quiet import silence_libraries
from .compare import compare
from .run import ProbeRun, record

__all__ = ["diff"]

SUFFIX = ".safetensors"
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
CHOICES = {"run": ("replay", "eager"), "device": None, "dtype": tuple(DTYPES)}
QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class Subject:
    """A model and how to run it, as a side of the command names it."""

    model: str
    run: str = "replay"
    device: str = "auto"
    dtype: str | None = None

    @classmethod
    def of(cls, words: str) -> Subject:
        """Of `MODEL,run=eager,device=cpu,dtype=float32`; all but the model may be left out.

        Raises:
            typer.BadParameter: for another key or value.
        """
        model, *settings = words.split(",")
        found: dict[str, str] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            if key not in CHOICES:
                raise typer.BadParameter(
                    f"{setting!r} in {words!r} is no setting; there are {', '.join(CHOICES)}"
                )
            choices = CHOICES[key]
            if not value or (choices is not None and value not in choices):
                known = "a device" if choices is None else " or ".join(choices)
                raise typer.BadParameter(f"{setting!r} in {words!r}: {key} is {known}")
            found[key] = value
        return cls(model, **found)

    def __str__(self) -> str:
        parts = [self.model, f"run={self.run}"]
        parts += [] if self.device == "auto" else [f"device={self.device}"]
        parts += [] if self.dtype is None else [f"dtype={self.dtype}"]
        return ",".join(parts)


Side = Subject | ProbeRun


def diff(
    left: Annotated[
        str,
        typer.Argument(
            help="MODEL[,run=replay|eager][,device=D][,dtype=T], or a file that --save wrote."
        ),
    ] = "smollm2",
    right: Annotated[
        str | None, typer.Argument(help="Likewise; left out, the left side's model run eagerly.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="A user's message.")] = None,
    ids: Annotated[
        str | None, typer.Option(help="Token ids in place of a message: 1,15,7.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="How many steps; 8 by default.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Most |left - right| / |right|. Else equal bits where device and dtype are the "
            "same, and where not 1e-4 (float32), 2e-2 (float16) or 1e-1 (bfloat16).",
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Keep what the left side's probes saw here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Find the first scope in which two runs of a model part. Exit code 1 when they do.

    Both sides see the same tokens: those that the left one draws, or a file's.
    """
    silence_libraries()
    mine, theirs = _side(left), _side(right)
    if theirs is None:
        if not isinstance(mine, Subject):
            raise typer.BadParameter("a file needs something to be compared with: name a model")
        theirs = Subject(mine.model, "eager", mine.device, mine.dtype)
    assert mine is not None
    kept = next((side for side in (mine, theirs) if isinstance(side, ProbeRun)), None)
    if kept is not None and (prompt is not None or ids is not None or steps is not None):
        raise typer.BadParameter("a file has its own prompt and steps: leave out those options")
    if save is not None and isinstance(mine, ProbeRun):
        raise typer.BadParameter("--save keeps the left side, which is a file already")
    runner = _Runner(prompt, ids, steps or 8)
    one = mine if isinstance(mine, ProbeRun) else runner.run(mine, kept)
    if save is not None:
        one.save(save)
    other = theirs if isinstance(theirs, ProbeRun) else runner.run(theirs, one)
    found = compare(one, other, tolerance)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        console = Console()
        console.print(found.table())
        console.print(found.verdict, highlight=False, markup=False, soft_wrap=True)
    if found.first is not None:
        raise typer.Exit(1)


def _side(words: str | None) -> Side | None:
    if words is None:
        return None
    return ProbeRun.load(words) if words.endswith(SUFFIX) else Subject.of(words)


class _Runner:
    """Records subjects; a model that both sides name is loaded once."""

    def __init__(self, prompt: str | None, ids: str | None, steps: int) -> None:
        if prompt is not None and ids is not None:
            raise typer.BadParameter("give a --prompt or --ids, not both")
        if prompt is not None and not prompt.strip():
            raise typer.BadParameter("the prompt is empty")
        self._prompt = prompt or QUESTION
        self._ids = None if ids is None else _numbers(ids)
        self._steps = steps
        self._loaded: dict[tuple[str, str, str | None], Any] = {}

    def run(self, subject: Subject, follow: ProbeRun | None) -> ProbeRun:
        """Record a subject; it takes the tokens of the run that it follows, if there is one."""
        model = self._load(subject)
        if follow is not None:
            prompt, steps = list(follow.prompt), len(follow.steps)
        else:
            prompt = model.encode_chat(self._prompt) if self._ids is None else self._ids
            steps = self._steps
        return record(
            model, prompt, steps=steps, eager=subject.run == "eager", name=str(subject),
            taken=None if follow is None else follow.taken,
        )  # fmt: skip

    def _load(self, subject: Subject) -> Any:
        from graphcache.models import load_model

        key = (subject.model, subject.device, subject.dtype)
        if key not in self._loaded:
            dtype = None if subject.dtype is None else DTYPES[subject.dtype]
            self._loaded[key] = load_model(subject.model, device=subject.device, dtype=dtype)
        return self._loaded[key]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--ids are numbers with commas between, got {text!r}") from None
