"""docs/families.md says what the families are, what they need, and what tests have shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from graphcache.models.families import FAMILIES
from tests.models.families_shown import Shown, read_shown, write_shown
from tests.models.families_table import BUILDERS, PAGE, RESULTS, needs, page


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text("utf-8") == page(), (
        "docs/families.md is stale: run `python -m tests.models.families_table`"
    )


def test_every_family_has_a_small_model() -> None:
    assert sorted(BUILDERS) == sorted(FAMILIES)


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("llama", ["nothing more"]),
        ("mistral", ["a window"]),
        ("gemma2", ["windows in some layers", "soft cap"]),
        ("gpt_oss", ["windows in some layers", "sinks", "experts"]),
        ("deepseek_v3", ["K and V of two widths", "latent attention expanded to heads", "experts"]),
    ],
)
def test_needs_are_read_off_the_model(family: str, told: list[str]) -> None:
    assert needs(family) == told


def test_what_was_not_shown_is_said(tmp_path: Path) -> None:
    cpu, gpu = tmp_path / "cpu.json", tmp_path / "gpu.json"
    told = page({"CPU": cpu, "H200": gpu})
    assert "CPU: not yet shown" in told and "H200: not yet shown" in told
    found = [
        Shown("llama", "answers", "fp32", True),
        Shown("llama", "replays", "fp32", True),
        Shown("llama", "replays", "bf16", True),
        Shown("llama", "replays", "bf16", False),
    ]
    write_shown(gpu, found)
    (row,) = (line for line in page({"CPU": cpu, "H200": gpu}).splitlines() if "`llama`" in line)
    assert row == (
        "| `llama` | nothing more | H200 fp32 | H200 **not in bf16**, fp32 | not yet shown | "
        "not yet shown |"
    )


def test_committed_results_are_of_the_machines_that_they_name() -> None:
    for device, path in RESULTS.items():
        told = read_shown(path)
        if told is not None:
            assert (device in told[0]["device"]) and told[1]
            assert json.loads(path.read_text())["machine"]["commit"] in PAGE.read_text()


@pytest.mark.shows("answers", family="llama")
def test_a_mark_is_read(request: pytest.FixtureRequest) -> None:
    (mark,) = request.node.iter_markers("shows")
    assert Shown.of(request.node, mark, held=True) == Shown("llama", "answers", "fp32", True)
    with pytest.raises(ValueError, match="it is one of answers"):
        Shown.of(request.node, pytest.mark.shows("wonders", family="llama").mark, held=True)
    mark = pytest.mark.shows("near", family="llama", dtype=torch.bfloat16).mark
    assert Shown.of(request.node, mark, held=False) == Shown("llama", "near", "bf16", False)
