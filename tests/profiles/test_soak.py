"""A short soak passes on a right model, and each thing that it looks for fails it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from capture import DecodeRuntime, Ladder
from graphcache import Batch
from graphcache.models import StepFunction
from profiles.soak import Soak, SoakReport, soak
from profiles.soak.__main__ import main
from profiles.soak.readings import SLACK, Reading, growth
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

SMALL: dict[str, Any] = {
    "max_requests": 5, "max_context": 64, "block_tokens": 16, "kv_blocks": 5,
    "ladder": Ladder([2, 4]),
}  # fmt: skip
PLAN = Soak(replays=600, seed=3, shadows=60, readings=20)

both = pytest.mark.parametrize("backend", BACKENDS)


def toy_soak(backend: str = "tape", step: Any = None, plan: Soak = PLAN) -> SoakReport:
    toy = ToyDecoder((None, None), device_of(backend))
    model = StepFunction(step or toy, VOCAB, schemas=toy.schemas, device=toy.device, chunk=toy)
    return soak(model, plan, backend=backend, **SMALL)


@both
def test_a_right_model_passes(backend: str) -> None:
    report = toy_soak(backend)
    assert report.ok and report.replays == 600
    assert report.shadows >= 60 and report.rereads > 0
    kinds = {"admitted", "forked", "rewound", "retired", "refused for want of blocks"}
    assert set(report.events) == kinds and min(report.events.values()) >= 3
    assert min(report.buckets.values()) > 0
    assert len(report.readings) > 4 and report.growth is not None


def test_the_same_seed_lives_the_same_life() -> None:
    one, same, other = (toy_soak(plan=replace(PLAN, seed=seed)) for seed in (1, 1, 2))
    assert (one.events, one.buckets) == (same.events, same.buckets)
    assert one.events != other.events


def test_a_value_frozen_at_capture_fails() -> None:
    toy = ToyDecoder((None, None))
    runs = [0]

    def step(batch: Batch) -> torch.Tensor:
        runs[0] += 1
        return toy(batch) + torch.full((VOCAB,), float(runs[0]))

    report = toy_soak(step=step)
    assert not report.ok and report.replays < 600
    assert report.failures[0].startswith("DebugFault: step 1 replayed gave another line of logits")


def test_state_that_is_spoiled_between_shadows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    step = DecodeRuntime.step

    def spoiling(runtime: DecodeRuntime, slots: Any, **options: Any) -> Any:
        assert runtime.state.blocks is not None
        for layer in (0, 1):
            runtime.state.blocks.pool[f"layer{layer}.k"].mul_(1.01)
        return step(runtime, slots, **options)

    monkeypatch.setattr(DecodeRuntime, "step", spoiling)
    report = toy_soak()
    assert "read again from them, has logits that differ by" in report.failures[0]


@pytest.mark.parametrize(
    ("leak", "found"),
    [
        (lambda kept: kept.append([kept]), "objects grew by"),
        (lambda kept: kept.append(bytearray(1 << 17)), "rss_bytes grew by"),
        (lambda kept: (lambda cycle: cycle.append(cycle))([]), "objects for the collector"),
    ],
)
def test_a_leak_of_every_step_fails(
    monkeypatch: pytest.MonkeyPatch, leak: Callable[[list[Any]], object], found: str
) -> None:
    step, kept = DecodeRuntime.step, list[Any]()

    def leaking(runtime: DecodeRuntime, slots: Any, **options: Any) -> Any:
        leak(kept)
        return step(runtime, slots, **options)

    monkeypatch.setattr(DecodeRuntime, "step", leaking)
    report = toy_soak(plan=replace(PLAN, replays=1500, shadows=1))
    assert any(found in failure for failure in report.failures)


def test_growth_is_of_the_last_tenth_over_the_first() -> None:
    flat = [Reading(n, 100, 200, 300, 400, 5) for n in range(20)]
    assert growth(flat) == dict.fromkeys(SLACK, 0)
    # A peak between is none, and neither is one that all later readings share from warm-up on.
    flat[10] = replace(flat[10], used_bytes=10**9)
    flat[1] = replace(flat[1], rss_bytes=500)
    assert growth(flat) == {**dict.fromkeys(SLACK, 0), "rss_bytes": -100}
    leaking = [replace(each, allocated_bytes=512 * each.replays) for each in flat]
    assert (growth(leaking) or {})["allocated_bytes"] == 512 * (18 - 1)
    assert growth(flat[:3]) is None


def test_the_command_says_how_it_went(tmp_path: Path) -> None:
    app = Typer()
    app.command()(main)
    written = tmp_path / "deep" / "soak.json"
    arguments = ["--replays", "120", "--shadows", "3", "--device", "cpu", "--output", str(written)]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    found = json.loads(written.read_text())
    assert found["ok"] and found["replays"] == 120 and not found["failures"]
    assert "120 of 120" in ran.output
    limited = CliRunner().invoke(app, [*arguments, "--minutes", "0"])
    assert limited.exit_code == 0 and "0 of 120" in limited.output
    assert CliRunner().invoke(app, ["--model", "none"]).exit_code == 2


def test_the_command_fails_when_a_step_did(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such step")

    monkeypatch.setattr(DecodeRuntime, "step", broken)
    app = Typer()
    app.command()(main)
    ran = CliRunner().invoke(app, ["--replays", "50", "--device", "cpu"])
    assert ran.exit_code == 1
    assert "RuntimeError: no such step" in ran.output
