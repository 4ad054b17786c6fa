"""Checks around capture itself: what it may change, what may run in it, and what it took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ..errors import CaptureError, SourceLine
from ..ladder import Bucket, Ladder
from ..report import CaptureReport
from ..source import line_of_error
from .case import Case, Request
from .compare import changed, differing
from .fill import fill
from .hazards import hazard_of
from .report import Finding
from .stage import Stage
from .threads import Busy
from .witness import BoundState

__all__ = [
    "capture_alone",
    "capture_beside_others",
    "held_outputs",
    "ladder_gap",
    "refused",
    "replay_beside_others",
]

TOLERATED_BYTES = 4096


def capture_alone(stage: Stage) -> tuple[CaptureReport | None, list[Finding]]:
    """Capture while all slots are taken, and look at what that did.

    Returns:
        The report, None where nothing could be captured; and findings.
    """
    case = _everyone(stage)
    stage.admit(case)
    fill(stage.state, Case((), ()), ())
    before = stage.snapshot()
    try:
        report = stage.capture()
    except BoundState:
        raise
    except CaptureError as error:
        return None, [refused(error), *_changed_by_capture(stage, before.state)]
    found = [*_changed_by_capture(stage, before.state), *_in_captures(stage)]
    return report, [*found, *_memory(stage, report)]


def capture_beside_others(stage: Stage, alone: CaptureReport) -> list[Finding]:
    """Capture again while another thread uses the device: the same must come of it."""
    try:
        with Busy(stage.runtime.device):
            beside = stage.capture()
    except CaptureError as error:
        return [_finding("other-thread", error.source, f"beside a busy thread: {error}")]
    nodes = [cost.nodes for cost in alone.buckets], [cost.nodes for cost in beside.buckets]
    if nodes[0] != nodes[1]:
        said = f"captures of {nodes[0]} operations became {nodes[1]} beside a busy thread"
        return [_finding("other-thread", None, said)]
    return []


def replay_beside_others(stage: Stage) -> Finding | None:
    """Whether replays of the smallest and the largest bucket are others beside a busy thread."""
    requests = stage.crowd(stage.ladder.ceiling, 2)
    case = Case(requests, ((0,), tuple(range(len(requests)))))
    scene = stage.scene(case)
    alone = stage.run(scene)
    stage.restore(scene.before)
    with Busy(stage.runtime.device):
        beside = stage.run(scene)
    found = differing(case, beside, alone, ("beside a busy thread, the replay", "alone, it"))
    if found is None:
        return None
    return Finding(
        "other-thread", found.where, found.detail, case.in_words(stage.ladder),
        tensor=found.tensor, slot=found.slot, row=found.row,
    )  # fmt: skip


def refused(error: CaptureError) -> Finding:
    """A finding for a capture that was refused or failed."""
    source = error.source
    if source is None and error.__cause__ is not None:
        source = line_of_error(error.__cause__)
    said = str(error).split("\n  at ")[0]
    return _finding(hazard_of(error), source, said)


def ladder_gap(ladder: Ladder) -> Finding | None:
    """Whether some batch up to the ceiling has no bucket that is captured for it."""
    for rows in range(1, ladder.ceiling + 1):
        bucket = ladder.bucket_for(rows, ladder.q_len)
        if not isinstance(bucket, Bucket) or bucket.rows < rows or bucket not in ladder.buckets:
            said = f"the ladder answers {bucket} for {rows} rows; its ceiling is {ladder.ceiling}"
            return Finding("ladder-gap", f"{ladder!r}", said)
    over = ladder.bucket_for(ladder.ceiling + 1, ladder.q_len)
    if isinstance(over, Bucket):
        said = f"the ladder answers {over} for {ladder.ceiling + 1} rows, over its ceiling"
        return Finding("ladder-gap", f"{ladder!r}", said)
    return None


def held_outputs(stage: Stage) -> Finding | None:
    """Whether what a step makes outlives it, in two eager runs after everything is warm."""
    request = Request(key=5, row=0, length=0)
    case = Case((request,), ((0,),) * 3)
    scene = stage.scene(case)
    held: list[set[SourceLine | None]] = []
    for step in range(len(case.batches)):
        stage.step(scene, step, eager=True).tokens()
        held.append({entry.source for entry in stage.witness.escaped})
    always = held[1] & held[2]
    if not always:
        return None
    source = min(always, key=str)
    return _finding("held-output", source, "it is still held when the step has returned")


def _everyone(stage: Stage) -> Case:
    rows = range(stage.rows if stage.rows <= 8 else 8)
    return Case(tuple(Request(key=row, row=row, length=row % 3) for row in rows), ())


def _changed_by_capture(stage: Stage, before: Mapping[str, Tensor]) -> Iterator[Finding]:
    found = changed(stage.state, before, stage.snapshot().state)
    if found is not None:
        yield Finding(
            "capture-changes-state", found.where, f"while the ladder was captured, {found.detail}",
            tensor=found.tensor, slot=found.slot,
        )  # fmt: skip


def _in_captures(stage: Stage) -> Iterator[Finding]:
    """Finalizers and collections inside of what was captured."""
    for key, trace in stage.witness.captured.items():
        dying = next((entry for entry in trace.entries if entry.in_finalizer), None)
        if dying is not None:
            said = f"{dying.name} was run by a finalizer in the capture of {key} rows"
            yield _finding("finalizer-in-capture", dying.source, said)
            return
        if trace.collected:
            said = f"the collector ran in the capture of {key} rows"
            yield _finding("finalizer-in-capture", trace.collected_at, said)
            return


def _memory(stage: Stage, report: CaptureReport) -> Iterator[Finding]:
    if report.backend == "tape":
        for cost in report.buckets:
            made = stage.witness.captured[cost.bucket].made_bytes
            if abs(made - cost.device_bytes) > TOLERATED_BYTES:
                said = f"a capture of {cost.bucket} rows reports {cost.device_bytes} bytes"
                yield _finding("memory-misjudged", None, f"{said}, and its tensors take {made}")
                return
    state = sum(t.numel() * t.itemsize for t in stage.state.named_tensors().values())
    if state != report.state_bytes:
        said = f"state is reported as {report.state_bytes} bytes, and its tensors take {state}"
        yield _finding("memory-misjudged", None, said)


def _finding(hazard: str, source: SourceLine | None, detail: str) -> Finding:
    where = str(source) if source is not None else "the capture"
    return Finding(hazard, where, detail, source=source)
