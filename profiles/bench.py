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
from rich.table import Table

import graphcache
from capture.cli import silence_libraries

from .gates import step_gates
from .ratios import append_ratios, step_ratios
from .recurrent_ratio import recurrent_ratio
from .results import Gate, Ratio
from .subjects import CONTEXT, smollm2_shape

BATCHES = (1, 8, 64)

CONTEXTS = (4096, 65536, 1048576)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Output = Annotated[Path | None, typer.Option(help="Write JSON here too.")]


@app.callback(invoke_without_command=True)
def main(
    command: typer.Context,
    output: Output = None,
    quick: Annotated[bool, typer.Option(help="The step at batch 8 only.")] = False,
) -> None:
    """Measure R1, R1b, R3, R6, R12 and the gates on a decoder of SmolLM2-135M's shape, and R7 on
    state of Mamba-2 2.7B's."""
    if command.invoked_subcommand is not None:
        return
    console = _need_gpu("R1, R1b, R3, R6, R7, R12 and the gates")
    started = time.perf_counter()
    model = smollm2_shape("cuda")
    ratios: list[Ratio] = list(append_ratios())
    gates: list[Gate] = []
    ratios.append(recurrent_ratio())
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
    _write(results, output, console)


@app.command()
def dsv4(
    output: Output = None,
    quick: Annotated[bool, typer.Option(help="Batch 8, 4096 tokens of context.")] = False,
    layers: Annotated[int, typer.Option(help="Of the stack, from the first on.")] = 43,
) -> None:
    """Measure R6, rooflines and the whole stack of attention at DeepSeek-V4-Flash's dims."""
    from .entry_ratios import entry_rooflines, entry_update_ratios, measured_ceilings
    from .entry_stack import stack_times

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
    console.print(_ratio_table(ratios))
    console.print(_roofline_table(rooflines))
    console.print(_stack_table(stacks))
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
            f"{ratio.goal:.2f}" if ratio.goal else "",
            {None: "", True: "ok", False: "missed"}[ratio.met],
        )
    return table


def _roofline_table(rooflines: list[Any]) -> Table:
    table = Table(title="by the roofline, medians of one run (p99 in brackets)")
    table.title_justify = "left"
    for heading in ("what", "batch", "context", "us", "least us", "share", "goal", ""):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for roofline in rooflines:
        table.add_row(
            roofline.what,
            str(roofline.batch),
            str(roofline.context),
            f"{roofline.us:.2f} ({roofline.p99_us:.1f})",
            f"{roofline.least_us:.2f}",
            f"{roofline.share:.2f}",
            f"{roofline.goal:.2f}" if roofline.goal else "",
            ("ok" if roofline.share >= roofline.goal else "under") if roofline.goal else "",
        )
    return table


def _stack_table(stacks: list[Any]) -> Table:
    table = Table(title="one step of the whole stack of attention, us", title_justify="left")
    headings = ("batch", "context", "layers", "nodes", "ours", "plain torch", "by ours",
                "transformers", "by ours", "MiB a slot", "and entries")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for stack in stacks:
        peers = []
        for us in (stack.torch_us, stack.modules_us):
            peers += [f"{us:.0f}", f"{us / stack.ours_us:.1f}"] if us else ["", ""]
        table.add_row(
            str(stack.batch), str(stack.context), str(stack.layers), str(stack.nodes),
            f"{stack.ours_us:.0f}", *peers,
            f"{stack.slot_bytes / 2**20:.1f}", f"{stack.entry_bytes / 2**20:.1f}",
        )  # fmt: skip
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
