"""Pictures come from the results file alone, and what is missing has a name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from profiles import plots
from profiles.plots import PlotsUnavailable, draw, main
from profiles.ratios.padding import padding_of_ladders
from profiles.results import PeerRun, ResultsError, StepTime

app = Typer()
app.command()(main)


def results() -> dict[str, Any]:
    steps = [
        StepTime(batch, context, 1000.0 + batch * context / 40, 0.0, 63.0 + batch * context / 200,
                 700, "135M")
        for batch in (1, 8, 64)
        for context in (256, 1024, 4000)
    ]  # fmt: skip
    peers = [
        PeerRun(name, "", batch, 1024, "", True, 0.0, 0.0, us, us)
        for batch in (1, 8)
        for name, us in (("graphcache", 6.0), ("raw launch", 4.0), ("eager torch", 40000.0))
    ]
    return {
        "machine": {"gpu": "Some GPU", "torch": "2.11.0", "commit": "abc"},
        "steps": [step.as_json() for step in steps],
        "peers": [peer.as_json() for peer in peers],
        "padding": [line.as_json() for line in padding_of_ladders()],
    }


def test_each_picture_is_drawn_from_the_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, folder = tmp_path / "results.json", tmp_path / "plots"
    file.write_text(json.dumps(results()))
    said = CliRunner().invoke(app, ["--results", str(file), "--output", str(folder)])
    assert said.exit_code == 0, said.output
    assert sorted(path.name for path in folder.iterdir()) == [
        "host.png", "latency.png", "padding.png",
    ]  # fmt: skip
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in folder.iterdir())


def test_a_line_of_each_context_and_its_floor_are_in_the_picture() -> None:
    pytest.importorskip("matplotlib")
    steps = [StepTime(**step) for step in results()["steps"]]
    figure = plots._draw_latency(plots._pyplot(), steps)
    (axis,) = figure.axes
    drawn = [list(line.get_ydata()) for line in axis.get_lines()]
    for context in (256, 1024, 4000):
        mine = [step for step in steps if step.context == context]
        assert [step.us for step in mine] in drawn
        assert [step.floor_us for step in mine] in drawn
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels == ["256 tokens", "1024 tokens", "4000 tokens", "bytes read / bandwidth"]


def test_a_picture_without_lines_is_named_and_not_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = {"machine": {}, "padding": results()["padding"]}
    drawn = draw(written, tmp_path)
    assert drawn["padding"] == tmp_path / "padding.png"
    assert drawn["latency"] is None and drawn["host"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["padding.png"]


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotsUnavailable, match=r"pip install 'graphcache-runtime\[plots\]'"):
        draw(results(), tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


def test_lines_of_another_make_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ResultsError, match="a padding has no colour"):
        draw({**results(), "padding": [{"colour": "red"}]}, tmp_path / "plots")
    assert not (tmp_path / "plots").exists()
