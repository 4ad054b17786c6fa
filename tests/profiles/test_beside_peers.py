"""R5 is a peer's step by ours, and only of a peer that gives the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from profiles.peers import Decoded, Ours, Peer, PeerUnavailable
from profiles.ratios import beside_peers
from profiles.ratios.beside_peers import PeerBench
from profiles.ratios.floor import kv_bytes, step_floor, weight_bytes
from profiles.results import PeerRun, Ratio, Skipped
from profiles.subjects import two_layers

STEP_NS = 5_000_000_000
HOST_NS = 7_000


class Slow(Peer):
    """Our tokens, and times of a slow machine."""

    name = "slow"
    host = "sleeps"
    closed = 0

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        self._ours = Ours(self.hosted)
        self._ours.prepare(prompts, steps)

    def decode(self, steps: int) -> Decoded:
        type(self).asked_last = steps  # type: ignore[attr-defined]
        return Decoded(self._ours.decode(steps).tokens, [STEP_NS] * steps)

    def host_ns(self) -> int:
        return HOST_NS

    def close(self) -> None:
        type(self).closed += 1


class Wrong(Slow):
    name = "wrong"

    def decode(self, steps: int) -> Decoded:
        decoded = super().decode(steps)
        return Decoded([[0 for _ in step] for step in decoded.tokens], decoded.times_ns)


class Missing(Slow):
    name = "missing"

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        raise PeerUnavailable("needs what is not here")


@pytest.fixture(scope="module")
def model() -> Any:
    return two_layers("cpu")


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_peers, "STEPS", 40)
    monkeypatch.setattr(beside_peers, "ROUNDS", 1)
    monkeypatch.setattr(beside_peers, "HOST_COUNT", 12)


@pytest.mark.usefixtures("few_steps")
def test_a_peer_that_agrees_is_timed_with_as_many_steps_as_a_round_takes(model: Any) -> None:
    with PeerBench(model, 2, 40) as bench:
        run, r5, r1 = bench.beside(Slow)
        (own, r11) = bench.ours()
    assert isinstance(run, PeerRun) and isinstance(r5, Ratio) and isinstance(r1, Ratio)
    assert isinstance(own, PeerRun) and isinstance(r11, Ratio)
    assert run.agrees and (run.period_us, run.host_us) == (STEP_NS / 1e3, HOST_NS / 1e3)
    assert (r5.name, r5.subject_us, r5.goal, r5.at_most) == ("R5", STEP_NS / 1e3, 1.0, False)
    assert r5.value == r5.subject_us / r5.floor_us and r5.met
    assert r1.name == "R1" and r1.value == HOST_NS / 1e3 / r1.floor_us
    assert Slow.asked_last == 24  # type: ignore[attr-defined]
    assert own.peer == "graphcache" and own.period_us > 0
    assert r11.value == own.period_p99_us / own.period_us


@pytest.mark.usefixtures("few_steps")
def test_a_peer_with_other_tokens_is_not_timed_and_closed(model: Any) -> None:
    closed = Wrong.closed
    with PeerBench(model, 2, 40) as bench:
        (run,) = bench.beside(Wrong)
    assert isinstance(run, PeerRun)
    assert not run.agrees and "parts at step 0" in run.agreement and not run.period_us
    assert Wrong.closed == closed + 1


@pytest.mark.usefixtures("few_steps")
def test_a_peer_that_is_not_here_is_skipped_by_name(model: Any) -> None:
    with PeerBench(model, 2, 40) as bench:
        (line,) = bench.beside(Missing)
    assert line == Skipped("R5, missing at batch 2", "needs what is not here")


def test_a_steps_floor_is_its_bytes_by_the_bandwidth_and_its_nodes(model: Any) -> None:
    # Two layers of width 64, feed-forward 128, two K/V heads of 16; the embedding is no head.
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert weight_bytes(model) == 4 * (2 * layer + 64 + 512 * 64)
    assert kv_bytes(model, 3, 40) == 3 * 40 * 2 * 2 * (16 + 16) * 4
    time, r4, r4b = step_floor(model, "toy", 1, 40, (1e9, 2.0))
    assert isinstance(r4, Ratio) and isinstance(r4b, Ratio)
    least = (weight_bytes(model) + kv_bytes(model, 1, 40)) / 1e9 * 1e6
    assert r4b.floor_us == pytest.approx(least)
    assert r4.floor_us == pytest.approx(least + 2.0 * time.nodes)  # type: ignore[attr-defined]
    assert (r4.name, r4b.name, r4.at_most) == ("R4", "R4b", False)
