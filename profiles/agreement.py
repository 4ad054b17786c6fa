"""Whether a peer decodes the same tokens, where rounding may part two equal candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Agreement", "agreement", "tolerance_of"]

SHARE = {torch.float32: 1e-4, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
"""By how much of the largest logit two ways to compute it may differ. A deep model's logits in
bfloat16 lie up to a sixtieth from those in float32, and one of two ways may err either way."""


def tolerance_of(logits: Tensor) -> float:
    """For logits of a step."""
    return SHARE[logits.dtype] * float(logits.float().abs().max())


@dataclass(frozen=True)
class Agreement:
    """Of two greedy decodes.

    Attributes:
        steps, rows: compared.
        parted: rows that came to different tokens.
        held: whether each of them parted between candidates as good as each other.
        detail: where they didn't.
    """

    steps: int
    rows: int
    parted: int
    held: bool
    detail: str = ""

    def __str__(self) -> str:
        if not self.held:
            return self.detail
        if not self.parted:
            return f"{self.steps} steps of {self.rows} rows, all tokens the same"
        return (
            f"{self.steps} steps of {self.rows} rows, tokens the same but for {self.parted} rows, "
            "which parted between logits no farther apart than rounding"
        )


def agreement(
    ours: Sequence[Sequence[int]], logits: Sequence[Tensor], theirs: Sequence[Sequence[int]]
) -> Agreement:
    """Compare tokens by step, then by row.

    A row is compared up to where it parts: what follows has another past.

    Args:
        ours: tokens [steps][rows].
        logits: [rows, V] of each of those steps.
        theirs: tokens [steps][rows].
    """
    steps, rows = len(ours), len(ours[0])
    if len(theirs) != steps or any(len(step) != rows for step in theirs):
        given = f"{len(theirs)} steps" if len(theirs) != steps else "other rows"
        return Agreement(steps, rows, rows, False, f"{given}, expected {steps} of {rows} rows")
    parted = 0
    for row in range(rows):
        for step in range(steps):
            mine, other = ours[step][row], theirs[step][row]
            if mine == other:
                continue
            parted += 1
            values = logits[step][row].float()
            gap, allowed = float(values[mine] - values[other]), tolerance_of(logits[step])
            if gap > allowed:
                detail = (
                    f"row {row} parts at step {step}: token {other}, whose logit lies {gap:.3g} "
                    f"below the best; {allowed:.3g} is allowed"
                )
                return Agreement(steps, rows, parted, False, detail)
            break
    return Agreement(steps, rows, parted, True)
