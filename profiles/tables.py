"""Results as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from .results import Failed, Gate, Padding, PeerRun, Ratio, Skipped

__all__ = [
    "gate_table", "left_out_table", "padding_table", "peer_table", "ratio_table",
    "roofline_table", "stack_table",
]  # fmt: skip


def ratio_table(ratios: list[Ratio]) -> Table:
    table = Table(title="ratios, medians of one run (p99 in brackets)", title_justify="left")
    for heading in ("", "what", "batch", "us", "floor us", "ratio", "goal", ""):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for ratio in ratios:
        table.add_row(
            ratio.name,
            f"{ratio.what}, {ratio.model}" if ratio.model else ratio.what,
            str(ratio.batch),
            *_subject_and_floor(ratio),
            f"{ratio.value:.3f}",
            f"{'' if ratio.at_most else '>= '}{ratio.goal:.2f}" if ratio.goal else "",
            {None: "", True: "ok", False: "missed"}[ratio.met],
        )
    return table


def _subject_and_floor(ratio: Ratio) -> tuple[str, str]:
    if ratio.unit != "us":
        return f"{ratio.subject_us:.1f} {ratio.unit}", f"{ratio.floor_us:.1f} {ratio.unit}"
    return (
        f"{ratio.subject_us:.2f} ({ratio.subject_p99_us:.1f})",
        f"{ratio.floor_us:.2f} ({ratio.floor_p99_us:.1f})",
    )


def roofline_table(rooflines: list[Any]) -> Table:
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


def stack_table(stacks: list[Any]) -> Table:
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


def gate_table(gates: list[Gate]) -> Table:
    table = Table(title="gates", title_justify="left")
    for heading in ("what", "batch", "held", "detail"):
        table.add_column(heading)
    for gate in gates:
        table.add_row(gate.name, str(gate.batch), "yes" if gate.held else "NO", gate.detail)
    return table


def peer_table(peers: list[PeerRun]) -> Table:
    table = Table(title="peers, same weights, greedy (p99 in brackets)", title_justify="left")
    for heading in ("peer", "batch", "period us", "host us", "outputs"):
        table.add_column(heading, justify="left" if heading in ("peer", "outputs") else "right")
    for run in peers:
        times = [
            f"{us:.1f} ({p99:.0f})" if us else ""
            for us, p99 in (
                (run.period_us, run.period_p99_us),
                (run.host_us, run.host_p99_us),
            )
        ]
        outputs = run.agreement if run.agrees else f"DIFFER: {run.agreement}"
        table.add_row(run.peer, str(run.batch), *times, outputs)
    return table


def padding_table(lines: list[Padding]) -> Table:
    title = "rows that are padding, batches of all sizes alike"
    table = Table(title=title, title_justify="left")
    for heading in ("ladder", "to", "graphs", "padding"):
        table.add_column(heading)
    for line in lines:
        table.add_row(line.ladder, str(line.ceiling), str(line.graphs), f"{line.share:.1%}")
    return table


def left_out_table(skipped: list[Skipped], failed: list[Failed]) -> Table:
    table = Table(title="not measured", title_justify="left")
    for heading in ("what", "why"):
        table.add_column(heading)
    for line in skipped:
        table.add_row(line.what, line.why)
    for failure in failed:
        table.add_row(failure.what, f"FAILED: {failure.error}")
    return table
