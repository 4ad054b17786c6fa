"""The README's numbers are those of the results file, and a stale page is told from a fresh one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from profiles.readme import BEGIN, END, README, RESULTS, main, numbers, with_numbers
from profiles.results import Gate, Ratio, ResultsError, read_results, records

app = Typer()
app.command()(main)

PAGE = f"# A page\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n"


def ratio(**changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "name": "R1", "what": "this / that", "batch": 8, "value": 1.5, "goal": 2.0,
        "subject_us": 12.34, "subject_p99_us": 20.0, "floor_us": 8.0, "floor_p99_us": 9.0,
    }  # fmt: skip
    return given | changed


def results(**changed: Any) -> dict[str, Any]:
    machine = {"gpu": "Some GPU", "driver_cuda": "13.0", "torch": "2.11.0+cu130", "commit": "abc"}
    return {"machine": machine, "subject": "a model", "ratios": [ratio()], "gates": []} | changed


def row_with(text: str, page: str) -> str:
    (row,) = (line for line in page.splitlines() if text in line)
    return row


def test_the_readme_shows_what_was_measured() -> None:
    page = README.read_text(encoding="utf-8")
    assert with_numbers(page, numbers(read_results(RESULTS))) == page, (
        "the README's numbers are stale: run `python -m profiles.readme`"
    )


def test_every_ratio_and_gate_of_the_committed_results_is_in_the_readme() -> None:
    page, written = README.read_text(encoding="utf-8"), json.loads(RESULTS.read_text())
    for line in written["ratios"]:
        assert line["what"] in page
        assert any(f"**{line['value']:.{digits}f}" in page for digits in range(4))
    for line in written["gates"]:
        assert line["name"] in page
    assert written["machine"]["commit"] in page


def test_batches_become_columns_and_ratios_lines_in_their_order() -> None:
    shown = numbers(
        results(
            ratios=[
                ratio(name="R12", what="twelfth"),
                ratio(batch=64, value=1.75, subject_us=1234.5),
                ratio(),
                ratio(name="R3", what="third", batch=1, goal=0.0),
            ]
        )
    )
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    assert lines[0] == "| | ratio | batch 1 | batch 8 | batch 64 | goal |"
    assert lines[2] == "| R1 | this / that | | **1.50** (12.3 us) | **1.75** (1234 us) | <= 2 |"
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["R1", "R3", "R12"]
    assert row_with("third", shown).endswith("| |")


def test_a_missed_goal_and_a_gate_that_did_not_hold_are_named() -> None:
    shown = numbers(
        results(
            ratios=[
                ratio(value=2.5),
                ratio(name="R4", what="share", value=0.8, goal=0.9, at_most=False),
                ratio(name="R5", what="peer", value=3.0, goal=2.0, at_most=False),
            ],
            gates=[
                {"name": "held", "batch": 1, "held": True, "detail": "fine"},
                {"name": "torn", "batch": 1, "held": True, "detail": "fine"},
                {"name": "torn", "batch": 8, "held": False, "detail": "3 differ"},
            ],
        )
    )
    assert "missed" in row_with("this / that", shown)
    assert "missed" in row_with("share", shown) and ">= 0.9" in row_with("share", shown)
    assert "missed" not in row_with("peer", shown)
    assert row_with("torn", shown) == "| torn | 1, **not at 8** | fine; 3 differ |"
    assert row_with("| held |", shown) == "| held | 1 | fine |"


def test_writing_keeps_the_rest_of_the_page_and_may_be_repeated() -> None:
    once = with_numbers(PAGE, "new")
    assert once == PAGE.replace("old", "new")
    assert with_numbers(once, "new") == once


@pytest.mark.parametrize(
    "page", ["no marks", BEGIN, END, f"{END}\n{BEGIN}\n{END}", PAGE + PAGE, PAGE + END]
)
def test_a_page_without_its_marks_is_refused(page: str) -> None:
    with pytest.raises(ResultsError, match="each once"):
        with_numbers(page, "new")


def test_check_fails_on_a_stale_page_and_leaves_it(tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(PAGE)
    file.write_text(json.dumps(results()))
    options = ["--readme", str(page), "--results", str(file)]
    stale = CliRunner().invoke(app, [*options, "--check"])
    assert stale.exit_code == 1 and "run `python -m profiles.readme`" in stale.output
    assert page.read_text() == PAGE
    assert CliRunner().invoke(app, options).exit_code == 0
    assert "Some GPU" in page.read_text()
    assert CliRunner().invoke(app, [*options, "--check"]).exit_code == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist"),
        ("{", "is not JSON"),
        ("[]", "names no machine"),
        ('{"ratios": []}', "names no machine"),
    ],
)
def test_what_is_no_results_file_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "results.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ResultsError, match=said):
        read_results(file)


def test_lines_of_another_make_are_named() -> None:
    with pytest.raises(ResultsError, match="a ratio has no colour"):
        records(Ratio, {"ratios": [ratio(colour="red")]})
    with pytest.raises(ResultsError, match=r"a gate lacks something.*held"):
        records(Gate, {"gates": [{"name": "g", "batch": 1, "detail": ""}]})
