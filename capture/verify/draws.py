"""Checks of random numbers: they move on with the position, follow the seed, and nothing else.

At a temperature this high logits hardly matter, so that draws are all that decides.
"""

from __future__ import annotations

from typing import Final

from .case import Case, Request
from .report import Finding
from .stage import Stage

__all__ = ["draws"]

HOT: Final = 1e9
STEPS: Final = 12
LEAST_VOCABULARY: Final = 8


def draws(stage: Stage) -> Finding | None:
    """Whether a sampler that draws, draws as it should; one that never draws is left alone."""
    if stage.state.vocab_size < LEAST_VOCABULARY or stage.state.max_context < STEPS + 4:
        return None
    once = _drawn(stage, key=21)
    if once == _drawn(stage, key=21, temperature=0.0):
        return None
    if len(set(once)) == 1:
        said = f"{STEPS} replays at {STEPS} positions all drew token {once[0]}"
        return _finding(stage, "frozen-random", said)
    if once != _drawn(stage, key=21):
        said = "the same seed at the same positions drew other tokens when it was replayed again"
        return _finding(stage, "frozen-random", said)
    if once == _drawn(stage, key=22):
        said = f"two seeds drew the same {STEPS} tokens"
        return _finding(stage, "frozen-random", said)
    for row, companions in ((stage.rows - 1, 0), (stage.rows - 1, stage.ladder.ceiling - 1)):
        elsewhere = _drawn(stage, key=21, row=row, companions=companions)
        if elsewhere != once:
            said = f"slot {row} with {companions} companions drew {elsewhere}, slot 0 alone {once}"
            return _finding(stage, "draws-depend-on-row", said)
    return None


def _drawn(
    stage: Stage, *, key: int, temperature: float = HOT, row: int = 0, companions: int = 0
) -> list[int]:
    """What a request draws, in the last row of its batch."""
    others = [Request(500 + r, r, 1) for r in range(stage.rows) if r != row][:companions]
    # The prompt is the same for every seed, and its draws are those of the seed.
    request = Request(key, row, 0, temperature)
    case = Case((*others, request), (tuple(range(len(others) + 1)),) * STEPS)
    return [tokens[-1] for tokens in stage.run(stage.scene(case)).tokens]


def _finding(stage: Stage, name: str, said: str) -> Finding:
    case = Case((Request(21, 0, 0, HOT),), ((0,),) * STEPS)
    return Finding(name, "the sampler", said, case.in_words(stage.ladder), tensor="token")
