"""Padding by ladder, against a count by hand."""

from __future__ import annotations

import pytest

from capture import Ladder
from profiles.ratios.padding import LADDERS, padded_share, padding_of_ladders


def test_padding_is_the_mean_share_of_a_step() -> None:
    # Batches of 1, 2, 3, 4 run as 1, 2, 4, 4.
    assert padded_share(Ladder([1, 2, 4])) == pytest.approx(1 / 4 / 4)
    assert padded_share(Ladder.every(9)) == 0.0


def test_published_ladders_pad_what_is_published_of_them() -> None:
    lines = {line.ladder: line for line in padding_of_ladders(256)}
    assert (lines["powers of two"].graphs, lines["vLLM's"].graphs) == (9, 35)
    assert lines["powers of two"].share == pytest.approx(0.24, abs=0.005)
    assert lines["vLLM's"].share == pytest.approx(0.046, abs=0.0005)


def test_sglangs_ladder_is_vllms_with_one_more_small_size() -> None:
    vllms, sglangs = (LADDERS[name](256) for name in ("vLLM's", "SGLang's"))
    assert sorted(set(sglangs) - set(vllms)) == [12]
    assert LADDERS["SGLang's"](640)[-9:] == [448, 464, 480, 496, 512, 544, 576, 608, 640]
