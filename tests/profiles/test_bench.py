"""The benchmark's own arithmetic, and what it says on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from profiles.bench import app
from profiles.results import Ratio
from profiles.timing import Sample, alternate


def test_a_sample_is_median_and_p99_in_microseconds() -> None:
    sample = Sample.of([1000 * i for i in range(1, 101)])
    assert sample == Sample(median_us=50.5, p99_us=100.0, count=100)


def test_subjects_are_timed_in_turn() -> None:
    order: list[str] = []

    def subject(name: str, took: int) -> int:
        order.append(name)
        return took

    first, second = alternate(3, lambda: subject("a", 10), lambda: subject("b", 20), warm_up=1)
    assert order == ["a", "b"] * 4
    assert (first.median_us, second.median_us) == (0.01, 0.02)
    assert first.count == 3


def test_a_ratio_is_of_medians() -> None:
    ratio = Ratio.of("R0", "this / that", 8, 2.0, Sample(6.0, 9.0, 5), Sample(4.0, 5.0, 5))
    assert ratio.value == 1.5
    assert ratio.as_json()["floor_p99_us"] == 5.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize(
    ("command", "skipped"),
    [
        ([], "Skipped: R1, R1b, R3, R6, R7, R12 and the gates."),
        (["dsv4"], "Skipped: R6, the rooflines and the stack of attention."),
    ],
)
def test_without_a_gpu_it_says_what_was_not_measured(command: list[str], skipped: str) -> None:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    said = " ".join(result.output.split())
    assert "nothing was measured" in said and skipped in said
