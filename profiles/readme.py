"""`python -m profiles.readme`: the README's numbers, written from a results file between two marks.

With `--check` it writes nothing, and fails when the README says something else.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from .results import Gate, Ratio, ResultsError, read_results, records

__all__ = ["main", "numbers", "with_numbers"]

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = Path(__file__).parent / "results" / "h200.json"

BEGIN = "<!-- numbers: written by `python -m profiles.readme` from profiles/results/h200.json -->"
END = "<!-- end of numbers -->"


def main(
    readme: Annotated[Path, typer.Option(help="The page that has the marks.")] = README,
    results: Annotated[Path, typer.Option(help="What `profiles.bench` wrote.")] = RESULTS,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if stale.")] = False,
) -> None:
    """Put the numbers of a results file into the README."""
    try:
        before = readme.read_text(encoding="utf-8")
        after = with_numbers(before, numbers(read_results(results)))
    except (OSError, ResultsError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if check and before != after:
        typer.echo(f"{readme} does not show {results}: run `python -m profiles.readme`", err=True)
        raise typer.Exit(1)
    if not check:
        readme.write_text(after, encoding="utf-8")


def with_numbers(page: str, written: str) -> str:
    """The page with `written` between its marks.

    Raises:
        ResultsError: unless the page has both marks, each once and in order.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in tail or END in head + tail:
        raise ResultsError(f"the page needs the lines {BEGIN!r} and {END!r}, each once")
    return f"{head}{BEGIN}\n{written}\n{END}{tail}"


def numbers(written: dict[str, Any]) -> str:
    """What a results file holds, as Markdown."""
    ratios, gates = records(Ratio, written), records(Gate, written)
    parts = [_machine(written), _ratio_table(ratios), _gates(gates)]
    return "\n\n".join(part for part in parts if part)


def _machine(written: dict[str, Any]) -> str:
    machine = written["machine"]
    versions = ", ".join(
        f"{name} {machine[name].partition('+')[0]}"
        for name in ("torch", "triton", "transformers", "python")
        if name in machine
    )
    commit = machine.get("commit", "unknown")
    return _wrapped(
        f"{machine.get('gpu', 'an unknown GPU')}, CUDA {machine.get('driver_cuda', 'unknown')}, "
        f"{versions}, commit `{commit}`. {written.get('subject', '')}."
    )


def _ratio_table(ratios: list[Ratio]) -> str:
    """A line for each ratio, a column for each batch."""
    batches = sorted({ratio.batch for ratio in ratios})
    lines = _in_order((ratio.name, ratio.what, ratio.model) for ratio in sorted(ratios, key=_place))
    rows = [["", "ratio", *(f"batch {batch}" for batch in batches), "goal"]]
    for line in lines:
        mine = {r.batch: r for r in ratios if (r.name, r.what, r.model) == line}
        name, what, model = line
        rows.append(
            [
                name,
                f"{what}, {model}" if model else what,
                *(_value(mine[batch]) if batch in mine else "" for batch in batches),
                _goal(next(iter(mine.values()))),
            ]
        )
    return _table(rows)


def _place(ratio: Ratio) -> tuple[int, str]:
    """R1, R1b, R3, ..., R12."""
    number = "".join(letter for letter in ratio.name if letter.isdigit())
    return int(number or 0), ratio.name


def _value(ratio: Ratio) -> str:
    missed = ", missed" if ratio.met is False else ""
    return f"**{_figures(ratio.value)}** ({_figures(ratio.subject_us)} {ratio.unit}{missed})"


def _goal(ratio: Ratio) -> str:
    if not ratio.goal:
        return ""
    return f"{'<=' if ratio.at_most else '>='} {ratio.goal:g}"


def _gates(gates: list[Gate]) -> str:
    if not gates:
        return ""
    rows = [["gate", "held at batch", "detail"]]
    for name in _in_order(gate.name for gate in gates):
        mine = [gate for gate in gates if gate.name == name]
        batches = [f"{g.batch}" if g.held else f"**not at {g.batch}**" for g in mine]
        rows.append([name, ", ".join(batches), "; ".join(_in_order(g.detail for g in mine))])
    return _table(rows)


def _figures(value: float) -> str:
    """Four figures at most; near 1, thousandths."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.3f}" if abs(value - 1) < 0.1 else f"{value:.2f}"


def _in_order(things: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(things))


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|" for row in lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    typer.run(main)
