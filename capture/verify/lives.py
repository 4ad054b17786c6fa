"""Checks of a request's life: wherever and whenever it lives, its steps give the same.

All replays are of the same buckets with the request in the same row of the batch, so results must
be equal bit for bit; only where companions change are logits compared as numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from graphcache.errors import GraphCacheError, RewindTooFar

from .case import Case, Request
from .compare import Difference, differing, same_bits
from .report import Finding
from .stage import Outcome, Scene, Snapshot, Stage

__all__ = ["lives"]

STEPS = 3
MOST_ROWS = 6
COMPANIES = (300, 400, 500, 600)
TOLERANCE = 1e-2
"""Of the largest logit: what companions may change, as libraries choose their kernels by shape."""


def lives(stage: Stage, lengths: Sequence[int], pristine: Snapshot) -> Finding | None:
    """The first finding, at some lengths; what comes after it would fail for the same reason.

    Args:
        stage: captured.
        lengths: of the requests.
        pristine: the stage before anything ran on it.
    """
    for length in lengths:
        request = Request(key=11 + length, row=0, length=length)
        for check in (_slots, _reuse, _forks, _checkpoints, _rewinds, _companions):
            found = check(stage, request, pristine)
            if found is not None:
                return found
    return None


def _alone(request: Request, steps: int = STEPS) -> Case:
    return Case((request,), ((0,),) * steps)


# --- where it lives -------------------------------------------------------------------------------


def _slots(stage: Stage, request: Request, _: Snapshot) -> Finding | None:
    """In whichever slot a request is, its steps give the same."""
    rows = _some_rows(stage.rows)
    outcomes = {}
    for row in rows:
        scene = stage.scene(_alone(replace(request, row=row)))
        outcomes[row] = (scene, stage.run(scene))
    usual = _most_usual([outcome for _, outcome in outcomes.values()])
    others = []
    for row, (scene, outcome) in outcomes.items():
        found = differing(scene.case, outcome, usual, ("here", "in other slots"))
        if found is not None:
            others.append((row, scene.case, found))
    if not others:
        return None
    row, case, found = others[0]
    only = len(others) == 1 and len(rows) > 2 and row in (0, stage.rows - 1)
    name = "sentinel-is-a-slot" if only else "depends-on-slot"
    return _finding(stage, name, case, replace(found, slot=row), "the same request, in two slots")


def _some_rows(rows: int) -> list[int]:
    edges = {0, 1, 2, rows // 2, rows - 2, rows - 1}
    return sorted(row for row in edges if 0 <= row < rows)[:MOST_ROWS]


def _most_usual(outcomes: Sequence[Outcome]) -> Outcome:
    """The one that most are equal to."""
    ids: Counter[int] = Counter()
    for outcome in outcomes:
        same = next(i for i, other in enumerate(outcomes) if _same(outcome, other))
        ids[same] += 1
    return outcomes[ids.most_common(1)[0][0]]


def _same(one: Outcome, other: Outcome) -> bool:
    return one.tokens == other.tokens and all(map(same_bits, one.logits, other.logits))


# --- who was there before -------------------------------------------------------------------------


def _reuse(stage: Stage, request: Request, pristine: Snapshot) -> Finding | None:
    """After other requests, in a slot that served one of them, all is as in fresh memory."""
    request = replace(request, row=min(1, stage.rows - 1))
    case = _alone(request)
    _wipe(stage, pristine)
    fresh = stage.run(stage.scene(case))
    for rows, name in (
        ([row for row in _some_rows(stage.rows) if row != request.row], "hidden-state"),
        ([request.row], "recycled-slot"),
    ):
        if not rows:
            continue
        _wipe(stage, pristine)
        _live_through(stage, rows, request.length)
        again = stage.run(stage.scene(case, history=True))
        found = differing(case, again, fresh, ("after others", "in fresh memory"))
        if found is not None:
            return _finding(stage, name, case, found, _written_outside(stage))
    return None


def _wipe(stage: Stage, pristine: Snapshot) -> None:
    """All memory as it was when the runtime was made."""
    stage.clear()
    stage.restore(pristine)


def _live_through(stage: Stage, rows: Sequence[int], length: int) -> None:
    """Requests live in some slots, step, and are retired."""
    longest = min(length + 7, stage.state.max_context - 2 - STEPS)
    blocks = stage.state.blocks
    if blocks is not None:
        share = blocks.num_blocks // len(rows) * blocks.block_tokens
        longest = min(longest, share - 2 - STEPS)
    requests = tuple(
        Request(key=900 + row, row=row, length=max(0, longest - row % 3)) for row in rows
    )
    size = min(len(rows), stage.ladder.ceiling)
    stage.run(stage.scene(Case(requests, (tuple(range(size)),) * STEPS)))
    stage.clear()


# --- its copies, and its way back -----------------------------------------------------------------


def _forks(stage: Stage, request: Request, _: Snapshot) -> Finding | None:
    def fork(handle: int) -> int:
        return stage.runtime.fork(handle, seed=request.key)

    return _copied(stage, request, fork, "a fork, stepped in its place")


def _checkpoints(stage: Stage, request: Request, _: Snapshot) -> Finding | None:
    def restored(handle: int) -> int:
        with stage.runtime.checkpoint(handle) as checkpoint:
            return stage.runtime.restore(checkpoint)

    return _copied(stage, request, restored, "restored from a checkpoint")


def _copied(stage: Stage, request: Request, copy: Callable[[int], int], how: str) -> Finding | None:
    """A copy goes on as its source does."""
    if stage.rows < 2:
        return None
    scene = stage.scene(_alone(request, 2 * STEPS), leave=1)
    # Some steps first: what they leave must be copied, too.
    for step in range(STEPS):
        stage.step(scene, step).tokens()
    here = Scene(_alone(request), scene.handles, stage.snapshot())
    try:
        handle = copy(scene.handles[0])
    except GraphCacheError:
        # A state that does not copy says so: nothing is silently left out.
        return None
    stage.adopt(handle)
    copied = Scene(here.case, [handle], stage.snapshot())
    expected = stage.run(here)
    # Its source has gone on meanwhile: what both write, each must have for itself.
    for key, content in copied.before.outside.items():
        stage.witness.written[key].memory.copy_(content)
    got = stage.run(copied)
    found = differing(here.case, got, expected, (how, "the source"))
    if found is None:
        return None
    return _finding(stage, "partial-fork", here.case, found, _written_outside(stage))


def _rewinds(stage: Stage, request: Request, _: Snapshot) -> Finding | None:
    """The same steps after a rewind give the same."""
    for steps in (1, STEPS):
        scene = stage.scene(_alone(request, steps))
        first = stage.run(scene)
        try:
            stage.runtime.rewind(scene.handles[0], request.length)
        except RewindTooFar:
            continue
        again = stage.run(scene)
        found = differing(scene.case, again, first, ("after a rewind", "before"))
        if found is not None:
            how = _written_outside(stage)
            return _finding(stage, "partial-rewind", scene.case, found, how)
    return None


# --- its company ----------------------------------------------------------------------------------


def _companions(stage: Stage, request: Request, _: Snapshot) -> Finding | None:
    """Whoever is in the other rows, a row's logits stay as they are."""
    bucket = next((b for b in stage.ladder.buckets if b.rows > 1), None)
    if bucket is None or stage.rows < 2:
        return None
    size = min(bucket.rows, stage.rows)
    case, results = Case((), ()), []
    for key in COMPANIES:
        others = tuple(Request(key + row, row, (key + row) % 5) for row in range(1, size))
        case = Case((request, *others), (tuple(range(size)),))
        results.append(stage.run(stage.scene(case)).logits[0][0].double())
    one = results[0]
    other = next((other for other in results if not _close(one, other)), None)
    if other is None:
        return None
    far = float((one - other).abs().nan_to_num(torch.inf).max())
    found = Difference("logits", 0, 0, request.row, f"other companions move them by {far:.3g}")
    return _finding(stage, "rows-mix", case, found, "")


def _close(one: Tensor, other: Tensor) -> bool:
    scale = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) or 1.0
    return bool(torch.allclose(one, other, rtol=0, atol=TOLERANCE * scale, equal_nan=True))


def _written_outside(stage: Stage) -> str:
    """What the step keeps outside the state: the likely reason."""
    written = [str(each) for each in stage.witness.written.values() if each.source is not None]
    return f"the step writes outside the state: {'; '.join(written)}" if written else ""


def _finding(stage: Stage, name: str, case: Case, found: Difference, extra: str) -> Finding:
    detail = "; ".join(part for part in (extra, f"{found.where}: {found.detail}") if part)
    return Finding(
        name, found.where, detail, case.in_words(stage.ladder),
        tensor=found.tensor, slot=found.slot, row=found.row,
    )  # fmt: skip
