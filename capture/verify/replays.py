"""Checks that run random cases: replay against the step, and memory against its owner."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .case import Case, Request
from .compare import Difference, changed, differing, differing_state
from .fill import Area, fill
from .report import Finding
from .stage import Scene, Stage

__all__ = [
    "foreign_write",
    "late_tokens_differ",
    "name_of_write",
    "poison_reached",
    "replay_differs",
    "with_poison",
]

NAMES = ("the replay", "the step")


def replay_differs(stage: Stage, scene: Scene) -> Difference | None:
    """Whether replays and eager steps at the same buckets, from the same state, part.

    Replays' tokens are read a step late: that they are held must not matter.
    """
    case = scene.case
    stage.restore(scene.before)
    fill(stage.state, case, ())
    replayed = stage.run(scene)
    stage.restore(scene.before)
    fill(stage.state, case, ())
    eager = stage.run(scene, eager=True, late=False)
    return differing(case, replayed, eager, NAMES) or differing_state(
        stage.state, replayed, eager, NAMES
    )


def late_tokens_differ(stage: Stage, scene: Scene) -> Difference | None:
    """Whether tokens of replays are others when they are read a step late."""
    outcomes = []
    for late in (True, False):
        stage.restore(scene.before)
        fill(stage.state, scene.case, ())
        outcomes.append(stage.run(scene, late=late))
    one, other = outcomes
    return differing(scene.case, one, other, ("read a step late, the replay", "at once, it"))


def foreign_write(stage: Stage, scene: Scene) -> Difference | None:
    """Whether a replay changes a byte that none of its slots owns; the first such step."""
    case = scene.case
    stage.restore(scene.before)
    fill(stage.state, case, ())
    before, ended = stage.snapshot(), set[int]()
    for step in range(len(case.batches)):
        result = stage.step(scene, step)
        result.tokens()
        after = stage.snapshot()
        ran = [request.row for request in case.running(step) if request.row not in ended]
        found = changed(stage.state, before.state, after.state, ran)
        if found is not None:
            return replace(found, step=step, ran=tuple(ran))
        asked = (case.requests[index] for index in case.batches[step])
        ended |= {r.row for r, reason in zip(asked, result.reasons, strict=True) if reason}
        before = after
    return None


def name_of_write(stage: Stage, case: Case, found: Difference) -> str:
    """What to call a foreign write, by who did it and whom it hit.

    Args:
        stage: where it was found.
        case: as small as it gets.
        found: in that case.
    """
    step = found.step or 0
    if found.slot is None or found.tensor == "block tables":
        return "writes-foreign-memory"
    if _full(stage, case, found):
        return "writes-foreign-slot"
    if step and _departed(case, step, found.slot):
        return "stale-padding-row"
    if found.slot == 0:
        return "padding-hits-slot-0"
    if found.slot == stage.rows - 1:
        return "padding-hits-last-slot"
    return "padding-aliases-live-slot"


def _departed(case: Case, step: int, slot: int) -> bool:
    """Whether an earlier batch had the slot."""
    return any(slot == r.row for earlier in range(step) for r in case.running(earlier))


def _full(stage: Stage, case: Case, found: Difference) -> bool:
    """Whether rows that run, and not padding, write where they must not."""
    bucket = stage.ladder.bucket_for(len(case.batches[found.step or 0]))
    rows: int = getattr(bucket, "rows", 0)
    if len(found.ran) == rows:
        return True
    # The same requests, and others to fill the bucket: no padding is left then.
    running = [request for request in case.requests if request.row in found.ran]
    for reach in (range(stage.rows), reversed(range(stage.rows))):
        spare = [row for row in reach if row not in found.ran][: rows - len(running)]
        filled = [*running, *(Request(row, row, 0) for row in spare)]
        if len(filled) < rows or len(filled) == stage.rows:
            continue
        whole = Case(tuple(filled), (tuple(range(rows)),))
        if foreign_write(stage, stage.scene(whole)) is not None:
            return True
    return False


def with_poison(stage: Stage, scene: Scene, areas: Collection[Area]) -> Difference | None:
    """Whether replays give something else when areas that nobody may read hold NaN."""
    case = scene.case
    stage.restore(scene.before)
    fill(stage.state, case, ())
    clean = stage.run(scene)
    stage.restore(scene.before)
    fill(stage.state, case, areas)
    poisoned = stage.run(scene)
    return differing(case, poisoned, clean, ("with NaN there, the replay", "without, it"))


def poison_reached(stage: Stage, scene: Scene, found: Difference) -> Finding:
    """A finding for a case in which NaN has reached a row that runs."""
    case = scene.case
    area = next((area for area in Area if with_poison(stage, scene, [area])), Area.OTHERS)
    step = found.step or 0
    length = min((request.length for request in case.running(step)), default=0)
    name = {
        Area.SCRATCH: "nan-from-padding",
        Area.OTHERS: "reads-foreign-slot",
        Area.RING: "reads-past-length" if length == 0 else "window-off-by-one",
        Area.BLOCKS: "reads-past-length",
    }[area]
    return Finding(
        name,
        found.where,
        f"NaN was put into {area.value}; {found.detail}",
        case.in_words(stage.ladder),
        tensor=found.tensor,
        slot=found.slot,
        row=found.row,
    )
