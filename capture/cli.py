"""The command `graphcache`: text from captured steps, what capturing takes, what a machine has."""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from graphcache import FinishReason, GraphCacheError
from graphcache.errors import UnsupportedPlatform

from .diff.command import diff
from .environment import Finding, inspect_environment
from .ladder import Ladder
from .memory_plan import plan_memory
from .quiet import silence_libraries
from .report import MIB, bucket_table
from .result import StepResult
from .runtime import DecodeRuntime

__all__ = ["app", "main", "run_app", "silence_libraries"]

Model = Annotated[
    str, typer.Option(help='"smollm2", a local transformers folder, or a .gguf file.')
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the steps by torch's Inductor before capture.")
]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Decode steps of language models, captured once and replayed.",
)
console = Console()
messages = Console(stderr=True)


def main() -> None:
    """Run the command."""
    run_app(app)


def run_app(command: Callable[[], object]) -> None:
    """Run a command; errors of the library end it with one line and exit code 1."""
    try:
        command()
    except GraphCacheError as error:
        # One line however long: a terminal wraps it, and a log keeps it whole.
        said = f"[bold red]{type(error).__name__}[/]: {escape(str(error))}"
        messages.print(said, soft_wrap=True, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        messages.print("stopped")
        sys.exit(130)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Versions, device, what the driver can do, and what is missing and what that costs."""
    findings = inspect_environment()
    if as_json:
        print(json.dumps({f.name: {"value": f.value, "note": f.note} for f in findings}, indent=2))
        return
    console.print(_finding_table(findings))


@app.command()
def generate(
    model: Model = "smollm2",
    prompt: Annotated[
        list[str] | None, typer.Option(help="A user's message; may be repeated.")
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="A file with one message a line.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of each answer.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=_finite, help="0 for greedy.")
    ] = 0.0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Prompts as they are, without the chat template.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Prompt i draws with seed + i.")] = 0,
    device: Device = "auto",
    compile: Compile = False,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Most prompts decoded at once; others wait.")
    ] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Answer prompts, all in one batch, from captured steps.

    A prompt is a user's turn where the model's tokenizer has a chat template; without one, or with
    --raw, it is the text that the answer goes on from.
    """
    prompts = _read_prompts(prompt, prompts_file)
    quiet = as_json or not messages.is_terminal
    silence_libraries()
    from graphcache.models import load_model

    started = time.perf_counter()
    with messages.status("loading weights", spinner="dots"):
        decoder: Any = load_model(model, device=device, compile=compile)
    load_s = time.perf_counter() - started
    encode = decoder.encode if raw else decoder.encode_chat
    ids = [encode(text) for text in prompts]
    slots = min(max_requests, len(prompts))
    context = max(map(len, ids)) + max_tokens + 1
    if decoder.max_context is not None:
        context = min(decoder.max_context, context)
    with DecodeRuntime(
        decoder,
        max_requests=slots,
        max_context=context,
        ladder=Ladder.powers_of_two(slots),
    ) as runtime:
        report = runtime.capture(progress=not quiet)
        answers = _Answers(decoder, prompts, shown=not as_json)
        with answers:
            started = time.perf_counter()
            _decode(runtime, ids, answers, max_tokens, temperature, seed)
            decode_s = time.perf_counter() - started
        count = sum(len(tokens) for tokens in answers.tokens)
        rate = count / decode_s
        if as_json:
            print(json.dumps(_as_json(runtime, answers, load_s, decode_s, rate), indent=2))
            return
        console.print()
        console.print(bucket_table(report, runtime.counters))
        console.print(
            f"{count} tokens in {decode_s:.2f} s: [bold]{rate:.1f} tokens/s[/] with prefill, "
            f"{report.backend} on {decoder.device}, weights loaded in {load_s:.1f} s; "
            f"{report.memory_line}"
        )


@app.command("capture")
def capture_ladder(
    model: Model = "smollm2",
    max_requests: Annotated[int, typer.Option(min=1, help="Requests decoded at once.")] = 8,
    max_context: Annotated[
        int | None,
        typer.Option(min=2, help="Most tokens of a request; 2048, or the model's if fewer."),
    ] = None,
    device: Device = "auto",
    compile: Compile = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Capture a model's ladder, powers of two up to --max-requests, and report what it took."""
    silence_libraries()
    from graphcache.models import load_model

    with messages.status("loading weights", spinner="dots"):
        decoder: Any = load_model(model, device=device, compile=compile)
    if max_context is None:
        max_context = min(2048, decoder.max_context)
    with DecodeRuntime(decoder, max_requests=max_requests, max_context=max_context) as runtime:
        report = runtime.capture(progress=not as_json and messages.is_terminal)
    if as_json:
        print(json.dumps({"device": str(decoder.device), **report.as_json()}, indent=2))
        return
    console.print(bucket_table(report))
    console.print(
        f"{len(report.buckets)} steps in {report.total_ms / 1e3:.2f} s on {decoder.device}; "
        f"{report.memory_line}"
    )


@app.command()
def plan(
    model: Model = "smollm2",
    max_requests: Annotated[int, typer.Option(min=1, help="Requests decoded at once.")] = 64,
    max_context: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of a request; the model's by default.")
    ] = None,
    budget_mib: Annotated[
        int | None, typer.Option(min=1, help="MiB for all but the weights; what is free on a GPU.")
    ] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What memory serving a model takes, and how many requests fit, before any is served."""
    silence_libraries()
    from graphcache.models import load_model

    with messages.status("loading weights, capturing a few buckets", spinner="dots"):
        planned = plan_memory(
            load_model(model, device=device),
            max_requests=max_requests,
            max_context=max_context,
            budget_bytes=None if budget_mib is None else budget_mib * MIB,
        )
    if as_json:
        print(json.dumps(planned.as_json(), indent=2))
        return
    console.print(planned.table())


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def profile(context: typer.Context) -> None:
    """Run a workload under Nsight Systems, and name what its replays ran by scope."""
    # Measurement is a floor above and not part of an installed package: looked up when asked for.
    try:
        command = importlib.import_module("profiles.nsys.profile")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "profiles":
            raise
        raise UnsupportedPlatform(
            "graphcache profile needs the folder profiles/ of a checkout, which an installed "
            "package does not have: run it there"
        ) from None
    command.app(context.args, prog_name="graphcache profile")


app.command()(diff)


def _decode(
    runtime: DecodeRuntime,
    prompts: list[list[int]],
    answers: _Answers,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> None:
    """Admit prompts as slots come free, and step those that run, one step ahead of the reader."""
    waiting = list(range(len(prompts)))[::-1]
    running: dict[int, int] = {}

    def take(result: StepResult) -> bool:
        """Hand on a step's tokens and retire who has finished; whether anyone has."""
        before = len(running)
        for slot, token, reason in zip(result.slots, result.tokens(), result.reasons, strict=True):
            if slot not in running:
                continue
            if token >= 0:
                answers.put(running[slot], token)
            if reason is not FinishReason.NONE:
                answers.finish(running.pop(slot), reason)
                runtime.retire(slot)
        return len(running) < before

    ahead: StepResult | None = None
    while waiting or running:
        if ahead is None:
            while waiting and len(running) < runtime.state.max_requests:
                index = waiting.pop()
                slot = runtime.admit(
                    prompts[index],
                    max_tokens=max_tokens,
                    temperature=temperature,
                    seed=seed + index,
                )
                running[slot] = index
            ahead = runtime.step(list(running))
        # The device decodes the next tokens while these are printed; slots that finish in
        # `current` yield nothing in the step ahead.
        current, ahead = ahead, runtime.step(ahead.slots)
        if take(current):
            take(ahead)
            ahead = None


class _Answers:
    """Answers as they grow: streamed for one prompt, side by side on a terminal, else when done."""

    def __init__(self, decoder: Any, prompts: list[str], *, shown: bool) -> None:
        from graphcache.models import TextStream

        self.prompts = prompts
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.texts = [""] * len(prompts)
        self.reasons: list[FinishReason] = [FinishReason.NONE] * len(prompts)
        self._streams = [TextStream(decoder.decode_text) for _ in prompts]
        self._shown = shown
        self._live: Live | None = None
        if shown and len(prompts) > 1 and console.is_terminal:
            self._live = Live(console=console, refresh_per_second=12, vertical_overflow="visible")

    def __enter__(self) -> _Answers:
        if self._live is not None:
            self._live.start()
        elif self._shown and len(self.prompts) == 1:
            console.print(f"[bold]{escape(self.prompts[0])}[/]")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()

    def put(self, index: int, token: int) -> None:
        """The next token of an answer."""
        self.tokens[index].append(token)
        self._add(index, self._streams[index].put(token))

    def finish(self, index: int, reason: FinishReason) -> None:
        """An answer has ended."""
        self.reasons[index] = reason
        self._add(index, self._streams[index].end())
        if not self._shown or self._live is not None:
            return
        if len(self.prompts) == 1:
            console.print()
        else:
            console.print(f"\n[bold]{escape(self.prompts[index])}[/]\n{escape(self.texts[index])}")

    def _add(self, index: int, text: str) -> None:
        self.texts[index] += text
        if not self._shown or not text:
            return
        if self._live is not None:
            self._live.update(self._table())
        elif len(self.prompts) == 1:
            console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(show_lines=True, expand=True)
        table.add_column("prompt", ratio=1)
        table.add_column("answer", ratio=3)
        for prompt, text in zip(self.prompts, self.texts, strict=True):
            table.add_row(Text(prompt), Text(text))
        return table


def _as_json(
    runtime: DecodeRuntime, answers: _Answers, load_s: float, decode_s: float, rate: float
) -> dict[str, Any]:
    report = runtime.report
    assert report is not None
    told = report.as_json()
    for bucket, cost in zip(told["buckets"], report.buckets, strict=True):
        use = runtime.counters.buckets[cost.bucket]
        bucket.update(replays=use.replays, padding_rows=use.padding_rows)
    return {
        "answers": [
            {"prompt": p, "text": t, "tokens": ids, "finish_reason": r.name.lower()}
            for p, t, ids, r in zip(
                answers.prompts, answers.texts, answers.tokens, answers.reasons, strict=True
            )
        ],
        "device": str(runtime.device),
        "load_s": load_s,
        "decode_s": decode_s,
        "tokens_per_s": rate,
        **told,
    }


def _read_prompts(prompt: list[str] | None, prompts_file: Path | None) -> list[str]:
    prompts = list(prompt or [])
    if prompts_file is not None:
        try:
            lines = prompts_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"can't read {prompts_file}: {error}") from None
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise typer.BadParameter("give at least one --prompt, or a --prompts-file with lines")
    if any(not text.strip() for text in prompts):
        raise typer.BadParameter("a prompt is empty")
    return prompts


def _finding_table(findings: list[Finding]) -> Table:
    table = Table(show_header=False, box=None)
    for finding in findings:
        mark = "[green]+[/]" if finding.present else "[yellow]-[/]"
        table.add_row(mark, finding.name, escape(finding.value), f"[dim]{escape(finding.note)}[/]")
    return table


if __name__ == "__main__":
    main()
