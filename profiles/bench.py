"""`python -m profiles.bench`: ratios and gates on this machine's GPU, as tables and as JSON.

Without a command it measures a whole decode step; `dsv4` measures DeepSeek-V4's layers.
"""

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

import graphcache
from capture.quiet import silence_libraries

from . import suite
from .journal import Journal
from .results import Failed, Gate, Padding, PeerRun, Ratio, Skipped
from .tables import (
    gate_table,
    left_out_table,
    padding_table,
    peer_table,
    ratio_table,
    roofline_table,
    stack_table,
)  # fmt: skip

BATCHES = (1, 8, 64)

CONTEXTS = (4096, 65536, 1048576)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Output = Annotated[Path | None, typer.Option(help="Write JSON here too.")]


@app.callback(invoke_without_command=True)
def main(
    command: typer.Context,
    output: Output = None,
    quick: Annotated[bool, typer.Option(help="Batch 8 only, nothing that compiles.")] = False,
) -> None:
    """Measure all ratios but R6 of DeepSeek-V4's layers, and the gates, beside all peers.

    The file is written anew after each result. What raises is noted, the rest goes on, and the exit
    code is 1. Without a GPU it runs what the tape can.
    """
    if command.invoked_subcommand is not None:
        return
    silence_libraries()
    console = Console(width=118)
    head = {"machine": describe_machine(), "subject": suite.subject()}
    journal = Journal(head, output, lambda what: console.print(f"[dim]{what}[/dim]"))
    suite.run(journal, quick)
    console.print(ratio_table(journal.records(Ratio)))
    console.print(gate_table(journal.records(Gate)))
    console.print(peer_table(journal.records(PeerRun)))
    console.print(padding_table(journal.records(Padding)))
    console.print(left_out_table(journal.records(Skipped), journal.records(Failed)))
    if output is not None:
        console.print(f"written to {output}")
    if journal.failed:
        raise typer.Exit(1)


@app.command()
def dsv4(
    output: Output = None,
    quick: Annotated[bool, typer.Option(help="Batch 8, 4096 tokens of context.")] = False,
    layers: Annotated[int, typer.Option(help="Of the stack, from the first on.")] = 43,
) -> None:
    """Measure R6, rooflines and the whole stack of attention at DeepSeek-V4-Flash's dims."""
    from .dsv4.ratios import entry_rooflines, entry_update_ratios, measured_ceilings
    from .dsv4.stack import stack_times

    console = _need_gpu("R6, the rooflines and the stack of attention")
    started = time.perf_counter()
    batches, contexts = ((8,), CONTEXTS[:1]) if quick else (BATCHES, CONTEXTS)
    bandwidth, products = measured_ceilings()
    ceilings = (bandwidth.best, products)
    ratios = list(entry_update_ratios())
    rooflines = list(entry_rooflines(contexts, batches, ceilings))
    stacks = list(stack_times(layers, contexts, batches))
    console.print(
        f"measured: {bandwidth.kernel / 1e12:.2f} TB/s read plus write by a kernel, "
        f"{bandwidth.node / 1e12:.2f} by a copy node, "
        f"{ceilings[1] / 1e12:.0f} TFLOP/s bf16"
    )
    console.print(ratio_table(ratios))
    console.print(roofline_table(rooflines))
    console.print(stack_table(stacks))
    results = {
        "machine": describe_machine(),
        "subject": "DeepSeek-V4-Flash's attention, random bf16 weights and random state",
        "seconds": round(time.perf_counter() - started, 1),
        "bytes_a_second": ceilings[0],
        "bytes_a_second_of_a_copy_node": bandwidth.node,
        "bf16_operations_a_second": ceilings[1],
        "ratios": [ratio.as_json() for ratio in ratios],
        "rooflines": [roofline.as_json() for roofline in rooflines],
        "stacks": [stack.as_json() for stack in stacks],
    }
    _write(results, output, console)


def _need_gpu(skipped: str) -> Console:
    console = Console(width=118)
    if not torch.cuda.is_available():
        console.print(
            "No CUDA GPU: every ratio is of work in a CUDA graph, so nothing was measured. "
            f"Skipped: {skipped}."
        )
        raise typer.Exit(0)
    silence_libraries()
    return console


def _write(results: dict[str, Any], output: Path | None, console: Console) -> None:
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {output}")


def describe_machine() -> dict[str, Any]:
    """Device and versions that a result depends on."""
    import transformers
    import triton

    return {
        **_describe_device(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "graphcache": graphcache.__version__,
        "commit": _commit(),
    }


def _describe_device() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"gpu": "none", "cpu": platform.machine()}
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    name = torch.cuda.get_device_name()
    return {"gpu": name, "driver_cuda": f"{version // 1000}.{version % 1000 // 10}"}


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return described.stdout.strip() or "unknown"


if __name__ == "__main__":
    app()
