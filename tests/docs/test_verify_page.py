"""The page on `verify`: its code prints what it shows, and every hazard is explained."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from capture.verify import HAZARDS

PAGE = Path(__file__).parents[2] / "docs" / "verify.md"


def block(language: str, begins: str) -> str:
    """The one block of the page that begins so."""
    found = re.findall(rf"^```{language}\n({re.escape(begins)}.*?)^```$", text(), re.M | re.S)
    assert len(found) == 1
    return str(found[0])


def text() -> str:
    return PAGE.read_text("utf-8")


def timeless(report: str) -> str:
    return re.sub(r"\d+\.\d s\)", "0.0 s)", report).strip()


def test_the_pages_code_prints_the_report_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Where it runs, its own name is all of its path.
    monkeypatch.chdir(tmp_path)
    calling = block("python", "from capture import verify")
    Path("model.py").write_text(block("python", "# model.py") + "\n\n" + calling, "utf-8")
    with pytest.raises(AssertionError):
        runpy.run_path("model.py")
    assert timeless(capsys.readouterr().out) == timeless(block("text", "StepFunction"))


def test_every_hazard_is_explained_as_the_report_explains_it() -> None:
    section = text().split("## What findings are called")[1]
    entries = [" ".join(entry.split()) for entry in re.split(r"^- |^#.*$", section, flags=re.M)]
    explained = [entry for entry in entries if entry.startswith("`")]
    expected = [f"`{h.name}`: {h.meaning}. {h.instead}." for h in HAZARDS.values()]
    assert explained == expected
