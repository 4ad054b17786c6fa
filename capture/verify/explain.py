"""Why a replay gave something else than the step: what was frozen, and on which line."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .case import Case
from .compare import Difference, differing, differing_state
from .fill import fill
from .replays import late_tokens_differ
from .report import Finding
from .stage import Outcome, Scene, Stage
from .threads import OtherThreads
from .trace import Parting, Trace, Why, first_parting

__all__ = ["explained"]

FROZEN = {Why.VALUE: "frozen-value", Why.BRANCH: "frozen-branch", Why.PLACE: "moved-address"}


def explained(stage: Stage, case: Case, found: Difference) -> Finding:
    """A finding for a case in which replay and step part.

    Args:
        stage: where it was found.
        case: as small as it gets.
        found: the difference in it.
    """
    # Set up anew: what a prefill leaves in Python is part of the case.
    scene = stage.scene(case)
    drawn = _random_states()
    with OtherThreads() as others:
        once, first = _traced(stage, scene)
    moved = _random_states() != drawn
    again, second = _traced(stage, scene)
    parting = _frozen(stage, case, first)
    if parting is None or parting.why is Why.PLACE:
        if others.worked:
            return _finding(stage, "other-thread", case, found, None, _at_work(others))
    if _other(stage, case, once, again):
        # The step differs from itself: whatever it takes from Python moves on by itself.
        by_itself = next(filter(None, map(first_parting, first, second)), parting)
        if moved:
            return _finding(stage, "frozen-random", case, found, by_itself, _DRAWS)
        if by_itself is None:
            return _finding(stage, "not-repeatable", case, found, None, "")
        parting = by_itself
    if parting is None:
        held = late_tokens_differ(stage, scene) if found.tensor != "logits" else None
        if held is not None:
            return _finding(stage, "held-output", case, held, None, "")
        return _finding(stage, "replay-differs", case, found, None, "")
    return _finding(stage, FROZEN[parting.why], case, found, parting, "")


_DRAWS = "the step draws from Python's, numpy's or torch's random state of the host"


def _at_work(others: OtherThreads) -> str:
    return f"while the step ran, other threads worked: {', '.join(others.worked)}"


def _traced(stage: Stage, scene: Scene) -> tuple[Outcome, list[Trace]]:
    """An eager run, and the trace of each step."""
    stage.restore(scene.before)
    fill(stage.state, scene.case, ())
    traces, results, logits = [], [], []
    for step in range(len(scene.case.batches)):
        result = stage.step(scene, step, eager=True)
        traces.append(stage.witness.last)
        logits.append(result.logits.clone())
        results.append((result.tokens(), [int(reason) for reason in result.reasons]))
    outcome = Outcome(
        [tokens for tokens, _ in results], [r for _, r in results], logits, stage.snapshot()
    )
    return outcome, traces


def _frozen(stage: Stage, case: Case, traces: Sequence[Trace]) -> Parting | None:
    for batch, trace in zip(case.batches, traces, strict=True):
        key = stage.ladder.bucket_for(len(batch), stage.ladder.q_len)
        captured = stage.witness.captured.get(key)  # type: ignore[arg-type]
        parting = None if captured is None else first_parting(captured, trace)
        if parting is not None:
            return parting
    return None


def _other(stage: Stage, case: Case, one: Outcome, other: Outcome) -> bool:
    names = ("once", "again")
    return (
        differing(case, one, other, names) is not None
        or differing_state(stage.state, one, other, names) is not None
    )


def _random_states() -> tuple[Any, ...]:
    """Of the host's global generators."""
    numpy_state: Any = np.random.get_state(legacy=False)
    torch_state = bytes(torch.get_rng_state().numpy().tobytes())
    return random.getstate(), repr(numpy_state["state"]), torch_state


def _finding(
    stage: Stage, hazard: str, case: Case, found: Difference, parting: Parting | None, extra: str
) -> Finding:
    source = None if parting is None else parting.source
    why = parting.detail if parting is not None else ""
    detail = "; ".join(part for part in (extra, why, f"{found.where}: {found.detail}") if part)
    return Finding(
        hazard,
        str(source) if source is not None else found.where,
        detail,
        case.in_words(stage.ladder),
        source=source,
        tensor=found.tensor,
        slot=found.slot,
        row=found.row,
    )
