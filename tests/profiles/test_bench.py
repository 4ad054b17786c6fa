"""The benchmark's own arithmetic, and what it says on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from profiles.bench import app
from profiles.peers import PEERS
from profiles.peers.static_peers import Eager, GptFast
from profiles.results import Failed, Gate, PeerRun, Ratio, Skipped, read_results, records
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


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")


@without_gpu
def test_without_a_gpu_it_runs_what_the_tape_can_and_says_what_it_skipped(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    result = CliRunner().invoke(app, ["--quick", "--output", str(file)])
    assert result.exit_code == 0, result.output
    written = read_results(file)
    gates, peers = records(Gate, written), records(PeerRun, written)
    assert gates and all(gate.held for gate in gates)
    assert {run.peer for run in peers} == {kind.name for kind in PEERS} - {"HF continuous batching"}
    assert all(run.agrees and not run.period_us for run in peers)
    assert not records(Ratio, written)
    skipped = {line.what: line.why for line in records(Skipped, written)}
    assert "no CUDA GPU" in skipped["R1, R1b, R3, R4, R4b, R5, R6, R7, R9, R11, R12"]
    assert "no device loop yet" in skipped["R8"] and "no optimal ladder yet" in skipped["R10"]
    assert "no CUDA GPU" in " ".join(result.output.split())


@without_gpu
def test_a_peer_that_fails_ends_neither_the_run_nor_goes_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    def wrong(self: Eager) -> list[int]:
        return [token + 1 for token in self._reader.read()]

    monkeypatch.setattr(GptFast, "_made", fail)
    monkeypatch.setattr(Eager, "tokens", wrong)
    file = tmp_path / "results.json"
    result = CliRunner().invoke(app, ["--quick", "--output", str(file)])
    assert result.exit_code == 1
    failed = {line.what: line.error for line in records(Failed, read_results(file))}
    assert failed["R5, gpt-fast's pattern at batch 3"] == "RuntimeError: out of luck"
    assert "parts at step 0" in failed["outputs of eager torch at batch 3"]
    assert len(failed) == 2
    assert "raw launch" in {run.peer for run in records(PeerRun, read_results(file))}


@without_gpu
def test_without_a_gpu_layers_of_deepseek_v4_are_not_measured() -> None:
    result = CliRunner().invoke(app, ["dsv4"])
    assert result.exit_code == 0
    said = " ".join(result.output.split())
    assert "Skipped: R6, the rooflines and the stack of attention." in said
