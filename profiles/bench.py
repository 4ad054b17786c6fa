"""`python -m profiles.bench`: ratios and gates on this machine's GPU, as a table and as JSON."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import graphcache
from capture.cli import silence_libraries

from .gates import Gate, step_gates
from .ratios import Ratio, append_ratios, step_ratios
from .subjects import CONTEXT, smollm2_shape

BATCHES = (1, 8, 64)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    output: Annotated[Path | None, typer.Option(help="Write JSON here too.")] = None,
    quick: Annotated[bool, typer.Option(help="Batch 8 only.")] = False,
) -> None:
    """Measure R1, R1b, R3, R6, R12 and the gates on a decoder of SmolLM2-135M's shape."""
    console = Console(width=118)
    if not torch.cuda.is_available():
        console.print(
            "No CUDA GPU: every ratio compares with a CUDA graph's launch, so nothing was measured."
        )
        raise typer.Exit(0)
    silence_libraries()
    started = time.perf_counter()
    model = smollm2_shape("cuda")
    ratios: list[Ratio] = list(append_ratios())
    gates: list[Gate] = []
    for batch in (8,) if quick else BATCHES:
        ratios += step_ratios(model, batch)
        gates += step_gates(model, batch)
    results = {
        "machine": describe_machine(),
        "subject": f"Llama of SmolLM2-135M's shape, random bf16 weights, {CONTEXT} tokens before",
        "seconds": round(time.perf_counter() - started, 1),
        "ratios": [ratio.as_json() for ratio in ratios],
        "gates": [gate.as_json() for gate in gates],
    }
    console.print(_ratio_table(ratios))
    console.print(_gate_table(gates))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        console.print(f"written to {output}")


def describe_machine() -> dict[str, Any]:
    """Device and versions that a result depends on."""
    import transformers
    import triton
    from cuda.bindings import driver

    _, driver_version = driver.cuDriverGetVersion()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver_cuda": f"{driver_version // 1000}.{driver_version % 1000 // 10}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "graphcache": graphcache.__version__,
        "commit": _commit(),
    }


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return described.stdout.strip() or "unknown"


def _ratio_table(ratios: list[Ratio]) -> Table:
    table = Table(title="ratios, medians of one run (p99 in brackets)", title_justify="left")
    for heading in ("", "what", "batch", "us", "floor us", "ratio", "goal", ""):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for ratio in ratios:
        table.add_row(
            ratio.name,
            ratio.what,
            str(ratio.batch),
            f"{ratio.subject_us:.2f} ({ratio.subject_p99_us:.1f})",
            f"{ratio.floor_us:.2f} ({ratio.floor_p99_us:.1f})",
            f"{ratio.value:.3f}",
            f"{ratio.goal:.2f}",
            "ok" if ratio.value <= ratio.goal else "over",
        )
    return table


def _gate_table(gates: list[Gate]) -> Table:
    table = Table(title="gates", title_justify="left")
    for heading in ("what", "batch", "held", "detail"):
        table.add_column(heading)
    for gate in gates:
        table.add_row(gate.name, str(gate.batch), "yes" if gate.held else "NO", gate.detail)
    return table


if __name__ == "__main__":
    app()
