"""Two decodes agree up to rounding, and not beyond."""

from __future__ import annotations

import torch

from profiles.agreement import agreement

OURS = [[0, 2], [1, 2]]


def logits(second_best: float) -> list[torch.Tensor]:
    step = torch.zeros((2, 4), dtype=torch.bfloat16)
    step[:, 3] = second_best
    steps = [step.clone(), step.clone()]
    for values, tokens in zip(steps, OURS, strict=True):
        for row, token in enumerate(tokens):
            values[row, token] = 8.0
    return steps


def test_the_same_tokens_agree() -> None:
    found = agreement(OURS, logits(0.0), OURS)
    assert found.held and not found.parted
    assert str(found) == "2 steps of 2 rows, all tokens the same"


def test_a_row_may_part_between_equals_and_is_not_compared_beyond() -> None:
    found = agreement(OURS, logits(7.9), [[3, 2], [0, 2]])
    assert found.held and found.parted == 1 and "rounding" in str(found)


def test_a_row_that_parts_for_a_worse_token_is_named() -> None:
    found = agreement(OURS, logits(7.0), [[0, 2], [1, 3]])
    assert not found.held
    assert "row 1 parts at step 1: token 3, whose logit lies 1 below the best" in str(found)


def test_other_numbers_of_steps_or_rows_do_not_agree() -> None:
    assert not agreement(OURS, logits(0.0), OURS[:1]).held
    assert not agreement(OURS, logits(0.0), [[0], [1]]).held
