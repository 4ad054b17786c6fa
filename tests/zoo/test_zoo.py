"""Every fault of the zoo is found by name, and nothing is found where nothing is wrong."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest

from capture import CaptureError, verify
from capture.rules import Rule
from capture.verify.hazards import HAZARDS, hazard_of
from tests.toy import device_of
from tests.zoo.entries import ENTRIES
from tests.zoo.planted import FAULTS, UNUSUAL, Specimen

for _room in ("padding_faults", "frozen_faults", "life_faults", "machine_faults", "unusual_steps"):
    importlib.import_module(f"tests.zoo.{_room}")

TRIALS = 8
LEAST_FAULTS = 25
LEAST_UNUSUAL = 15
# Hazards that no step can be made to show on purpose, with the reason.
NOT_PLANTED: dict[str, str] = {}
SETTINGS = {"max_requests": 4, "max_context": 64, "block_tokens": 8}


def test_the_zoo_is_complete() -> None:
    """A fault for every entry and for every hazard, on the tape too; and enough that is right."""
    on_tape = [specimen for specimen in FAULTS if "tape" in specimen.backends]
    assert {number for specimen in on_tape for number in specimen.numbers} == set(ENTRIES)
    assert {specimen.hazard for specimen in FAULTS} == set(HAZARDS) - set(NOT_PLANTED)
    assert len(on_tape) >= LEAST_FAULTS
    assert len(UNUSUAL) >= LEAST_UNUSUAL
    names = Counter(specimen.name for specimen in [*FAULTS, *UNUSUAL])
    assert max(names.values()) == 1
    assert all(specimen.about for specimen in [*FAULTS, *UNUSUAL])


def _each(specimens: list[Specimen]) -> list[object]:
    return [
        pytest.param(
            specimen, backend, id=f"{specimen.name}-{backend}",
            marks=[pytest.mark.gpu] if backend == "cuda_graph" else [],
        )
        for specimen in specimens
        for backend in specimen.backends
    ]  # fmt: skip


@pytest.mark.parametrize(("specimen", "backend"), _each(FAULTS))
def test_a_planted_fault_is_found_by_name(
    specimen: Specimen, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = specimen.make(device_of(backend), monkeypatch)
    report = verify(model, trials=TRIALS, seed=1, backend=backend, **{**SETTINGS, **options})
    print(report)
    assert not report.ok
    found = {finding.hazard: finding for finding in report.findings}
    assert specimen.hazard in found, report
    finding = found[specimen.hazard]
    if specimen.line:
        assert finding.source is not None
        assert specimen.line in finding.source.text
        assert specimen.line in finding.where
    assert str(finding) in str(report).replace("\n  ", "\n")


@pytest.mark.parametrize(("specimen", "backend"), _each(UNUSUAL))
def test_an_unusual_step_that_is_right_passes(
    specimen: Specimen, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = specimen.make(device_of(backend), monkeypatch)
    report = verify(model, trials=TRIALS, seed=2, backend=backend, **{**SETTINGS, **options})
    assert report.ok, report
    assert report.trials == TRIALS
    assert report.left_changed == ()


@pytest.mark.parametrize("rule", Rule)
def test_every_rule_of_the_lint_has_a_hazards_name(rule: Rule) -> None:
    assert hazard_of(CaptureError("refused", operation="an operation", rule=rule)) in HAZARDS
