"""`capture.verify` as its callers see it: what a finding says, and what verifying leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from capture import Ladder, verify
from capture.verify import Finding
from capture.verify.case import Case, Request
from capture.verify.shrink import shrunk
from graphcache import Batch
from graphcache.errors import InvalidRequest, UnsupportedModel
from tests.capture.support import bits, captured, toy_runtime
from tests.toy import BACKENDS, ToyDecoder, device_of
from tests.zoo import frozen_faults, padding_faults
from tests.zoo.planted import served

SETTINGS: dict[str, Any] = {"max_requests": 4, "max_context": 64, "block_tokens": 8}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def found_in(made: tuple[Any, dict[str, Any]], backend: str, seed: int) -> Finding:
    model, options = made
    report = verify(model, trials=8, seed=seed, backend=backend, **{**SETTINGS, **options})
    assert len(report.findings) == 1, report
    return report.findings[0]


# --- what a finding says --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_frozen_value_is_told_with_its_line_and_the_smallest_case(
    backend: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = frozen_faults.a_counter_in_python(device_of(backend), monkeypatch)
    finding = found_in(made, backend, seed)
    assert finding.hazard == "frozen-value"
    assert (finding.tensor, finding.row) == ("logits", 0)
    assert finding.case == f"step slot {finding.slot} (len 0) in a bucket of 1"
    assert finding.source is not None and finding.source.file == frozen_faults.__file__


@pytest.mark.parametrize("seed", range(3))
def test_a_write_by_padding_is_told_with_tensor_and_slot(
    backend: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = padding_faults.padding_aliases_a_parked_request(device_of(backend), monkeypatch)
    finding = found_in(made, backend, seed)
    assert finding.hazard == "padding-aliases-live-slot"
    assert (finding.tensor, finding.slot) == ("state arena, field layer1.k", 2)
    assert finding.case.count("slot ") == 1
    assert finding.source is not None and finding.source.text == "pool[slots] = 0.125"


def test_a_case_shrinks_to_what_still_fails() -> None:
    """Whatever has nothing to do with the failure goes: steps, rows, requests, lengths, heat."""
    requests = tuple(Request(key, key, 9 * key, 0.7, finished=key == 3) for key in range(4))
    case = Case(requests, ((0, 1, 2), (3, 2), (1, 0)))

    def fails(tried: Case) -> bool:
        return any(
            tried.requests[index].key == 2 and tried.requests[index].length >= 5
            for index in tried.batches[-1]
        )

    ends_with_it = Case(requests, (*case.batches, (2, 3)))
    assert fails(ends_with_it)
    assert shrunk(ends_with_it, fails) == Case((Request(2, 2, 5),), ((0,),))


def test_the_same_seed_tells_the_same(backend: str) -> None:
    def step(batch: Batch) -> Tensor:
        logits = ToyDecoder(device=device_of(backend))(batch)
        keys = batch.state.pool["layer1.k"]
        keys[(batch.slots.long() + 1) % 4, 0, 0] = 0.5
        return logits

    model = served(ToyDecoder(device=device_of(backend)), step)
    one, other, another = (
        verify(model, trials=4, seed=seed, backend=backend, **SETTINGS).findings
        for seed in (3, 3, 4)
    )
    assert [str(finding) for finding in one] == [str(finding) for finding in other]
    assert [finding.hazard for finding in one] == [finding.hazard for finding in another]


# --- what verifying leaves behind -----------------------------------------------------------------


def test_a_runtime_that_is_given_is_left_as_it_was(backend: str) -> None:
    """Its requests go on as if nobody had looked."""
    with toy_runtime(backend) as verified, toy_runtime(backend) as alone:
        runs = []
        for runtime in (verified, alone):
            captured(runtime)
            slots = [runtime.admit([3, 1, 4, 1, 5]), runtime.admit([9, 2])]
            runs.append([runtime.step(slots).tokens() for _ in range(3)])
            if runtime is verified:
                before, report = bits(runtime), verify(runtime, trials=3)
                assert report.ok, report
                assert {name: t.tolist() for name, t in before.items()} == {
                    name: t.tolist() for name, t in bits(runtime).items()
                }
                counted = [use.replays for use in runtime.counters.buckets.values()]
                assert sum(counted) == 3
            runs[-1] += [runtime.step(slots).tokens() for _ in range(3)]
        assert runs[0] == runs[1]


def test_what_a_step_writes_outside_the_state_is_put_back(backend: str) -> None:
    toy = ToyDecoder(device=device_of(backend))
    space = torch.full((4, toy.vocab), 7.0, device=toy.device)

    def step(batch: Batch) -> Tensor:
        space[: batch.rows].copy_(toy(batch))
        return space[: batch.rows] * 1.0

    report = verify(served(toy, step), trials=3, backend=backend, **SETTINGS)
    assert report.ok, report
    assert report.left_changed == ()
    assert bool((space == 7.0).all())


# --- what it is asked -----------------------------------------------------------------------------


def test_every_bucket_is_tried_however_few_trials_are_asked_for(backend: str) -> None:
    model = ToyDecoder(device=device_of(backend)).model()
    options = {**SETTINGS, "ladder": Ladder([1, 2, 3, 4])}
    report = verify(model, trials=1, backend=backend, **options)
    assert report.ok, report
    assert report.trials == report.asked == 4


def test_a_runtime_with_few_blocks_is_verified(backend: str) -> None:
    """Trials have blocks of their own, as many as they need."""
    with toy_runtime(backend, kv_blocks=4) as runtime:
        report = verify(runtime, trials=6)
    assert report.ok, report
    model = ToyDecoder(device=device_of(backend)).model()
    report = verify(model, trials=6, backend=backend, **{**SETTINGS, "kv_blocks": 8})
    assert report.ok, report


def test_a_hazard_that_does_not_matter_is_left_out(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = frozen_faults.a_counter_in_python(device_of(backend), monkeypatch)
    without = ("frozen-value",)
    assert verify(model, trials=2, backend=backend, without=without, **SETTINGS).ok


def test_bad_input_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyDecoder().model()
    with pytest.raises(InvalidRequest, match="trials must be at least 1, got 0"):
        verify(model, trials=0)
    with pytest.raises(InvalidRequest, match="no hazard is called 'frozen'"):
        verify(model, without=("frozen",))
    with pytest.raises(UnsupportedModel, match="takes a model or a DecodeRuntime, got int"):
        verify(3)
