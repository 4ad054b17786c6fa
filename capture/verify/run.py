"""The order of the checks, and what each contributes to the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeAlias

from torch.multiprocessing.reductions import StorageWeakRef

from graphcache.errors import InvalidRequest

from ..errors import CaptureError, DeviceLost, PointerMoved
from ..source import line_of_error
from .allocations import allocations
from .capturing import (
    capture_alone,
    capture_beside_others,
    held_outputs,
    ladder_gap,
    refused,
    replay_beside_others,
)
from .case import Case
from .compare import Difference
from .culprit import line_of_write
from .draws import draws
from .explain import explained
from .fill import Area
from .generate import Generator
from .hazards import HAZARDS
from .lives import lives
from .replays import foreign_write, name_of_write, poison_reached, replay_differs, with_poison
from .report import Finding, VerifyReport
from .shrink import shrunk
from .stage import Scene, Stage
from .subject import Subject, subject_of
from .teardown import closed, given_back
from .witness import BoundState

__all__ = ["verify"]

TRIALS_A_LIFE = 16
"""For so many trials, one more length at which requests' lives are tried."""

Check: TypeAlias = Callable[[Stage, Scene], Difference | None]
FindingOf: TypeAlias = Callable[[Stage, Scene, Difference], Finding]


def verify(
    step_or_runtime: Any,
    *,
    trials: int = 32,
    seed: int = 0,
    backend: str = "auto",
    fields: Sequence[Mapping[str, object]] = (),
    without: Collection[str] = (),
    **options: Any,
) -> VerifyReport:
    """Capture a model's step and try whether its replays are right.

    Everything runs on a runtime made for the trials, with memory of its own: a runtime that is
    given is not stepped, and neither its state nor its captures change. What the step writes
    outside the state, in tensors of the model, is put back; the report names what could not be.
    Objects of Python's that the step changes stay changed. Waits for the device often.

    Args:
        step_or_runtime: a model, as `DecodeRuntime` takes it, or a runtime of one.
        trials: random cases; at least one for each bucket is run, whatever is asked for.
        seed: of the cases.
        backend: "auto", "cuda_graph" or "tape", for a model.
        fields: values for the model's fields, which requests are admitted with in turn.
        without: names of hazards that are not looked for; see `HAZARDS`.
        options: of `DecodeRuntime`, for a model: `max_requests` (4), `max_context`, `ladder`,
            `block_tokens`, `kv_blocks`, `sampler`.

    Raises:
        UnsupportedModel: for what is neither model nor runtime.
        InvalidRequest: for fewer than 1 trial, or a hazard that has no such name.
        RuntimeBusy: when the runtime is at work for another thread.
        SchemaError, UnsupportedDriver, CaptureError: when a runtime can't be made.
    """
    if trials < 1:
        raise InvalidRequest(f"trials must be at least 1, got {trials}")
    unknown = sorted(set(without) - set(HAZARDS))
    if unknown:
        raise InvalidRequest(f"no hazard is called {unknown[0]!r}; there are {', '.join(HAZARDS)}")
    started = time.perf_counter()
    subject = subject_of(step_or_runtime, backend, options)
    with ExitStack() as stack:
        if subject.runtime is not None:
            stack.enter_context(subject.runtime._at_work())
        run = _Run(subject, fields, trials, seed, without)
        run.all_checks()
        run.tear_down()
    return VerifyReport(
        subject=subject.name,
        backend=run.backend,
        findings=tuple(run.findings.values()),
        trials=run.trials_run,
        asked=run.trials,
        seed=seed,
        seconds=time.perf_counter() - started,
        left_changed=tuple(run.left_changed),
    )


class _Run:
    """One verification.

    Args:
        subject: what is verified.
        fields: of requests.
        trials: random cases.
        seed: of the cases.
        without: hazards not looked for.
    """

    def __init__(
        self,
        subject: Subject,
        fields: Sequence[Mapping[str, object]],
        trials: int,
        seed: int,
        without: Collection[str],
    ) -> None:
        self.findings: dict[str, Finding] = {}
        self.trials_run = 0
        self.left_changed: list[str] = []
        self._subject = subject
        self._seed = seed
        self._without = frozenset(without)
        stage = Stage(subject.model, subject.options, fields, subject.forbidden())
        self.trials = max(trials, len(stage.ladder.buckets))
        self.backend = stage.runtime._backend.name
        self._stage: Stage | None = stage

    def all_checks(self) -> None:
        """Run them; tensors of the model's own are put back in any case."""
        stage = self._stage
        assert stage is not None
        try:
            with stage.working():
                self._checks(stage)
        except BoundState as error:
            self._add(Finding("bound-state", str(error.source), str(error), source=error.source))
        except PointerMoved as error:
            self._add(Finding("moved-address", "addresses", str(error)))
        except DeviceLost as error:
            self._add(Finding("replay-differs", "a replay", str(error)))
        finally:
            with stage.working():
                self._put_back(stage)

    def _put_back(self, stage: Stage) -> None:
        self.left_changed = stage.witness.put_back()
        for read, restored in stage.witness.changed_unseen():
            shape, dtype = list(read.tensor.shape), read.tensor.dtype
            name = f"a tensor of shape {shape}, {dtype}"
            self._add(Finding("writes-foreign-memory", name, _UNSEEN, tensor=name))
            if not restored:
                self.left_changed.append(name)

    def tear_down(self) -> None:
        """Close what trials ran on."""
        stage, self._stage = self._stage, None
        assert stage is not None
        arena = StorageWeakRef(stage.state.pool.arena.untyped_storage())
        self._add(closed(stage))
        del stage
        self._add(given_back(arena))

    def _checks(self, stage: Stage) -> None:
        runtime = self._subject.runtime
        if runtime is not None:
            runtime._check_pointers()
        stage.clear()
        pristine = stage.snapshot()
        self._add(ladder_gap(stage.ladder))
        report, found = capture_alone(stage)
        self._add(*found)
        if report is None:
            return
        self._add(*capture_beside_others(stage, report))
        self._add(held_outputs(stage))
        generator = Generator(stage.state, stage.ladder, self._seed)
        self._run_trials(stage, generator)
        if self.trials_run == self.trials:
            # Where trials fail, all that follows would fail for the same reason.
            self._add(replay_beside_others(stage))
            count = 2 + self.trials // TRIALS_A_LIFE
            self._add(lives(stage, generator.some_lengths(count), pristine))
            self._add(draws(stage))
            self._add(allocations(stage))

    def _run_trials(self, stage: Stage, generator: Generator) -> None:
        for _ in range(self.trials):
            scene = stage.scene(generator.case())
            failed = any(self._fails(stage, scene, *check) for check in _CHECKS)
            if failed:
                break
            self.trials_run += 1

    def _fails(self, stage: Stage, scene: Scene, check: Check, finding_of: FindingOf) -> bool:
        """Run a check on a case. What it finds is reported in the smallest case that shows it."""
        seen = _seen(stage, scene, check)
        if seen is None:
            return False

        def fails(case: Case) -> bool:
            return type(_seen(stage, stage.scene(case), check)) is type(seen)

        smallest = stage.scene(shrunk(scene.case, fails))
        again = _seen(stage, smallest, check)
        if again is None:
            scene = stage.scene(scene.case)
        else:
            scene, seen = smallest, again
        if isinstance(seen, Exception):
            finding = _raised(seen, scene.case.in_words(stage.ladder))
        else:
            finding = finding_of(stage, scene, seen)
        if again is None and finding.hazard == "replay-differs":
            # Set up anew, the case no longer shows it: what ran before has a part in it.
            finding = replace(finding, hazard="hidden-state")
        self._add(finding)
        return True

    def _add(self, *findings: Finding | None) -> None:
        for finding in findings:
            if finding is not None and finding.hazard not in self._without:
                self.findings.setdefault(finding.hazard, finding)


_UNSEEN = "it changed while trials ran, and no operation of the step is seen to write it"


def _of_replay(stage: Stage, scene: Scene, found: Difference) -> Finding:
    return explained(stage, scene.case, found)


def _of_write(stage: Stage, scene: Scene, found: Difference) -> Finding:
    source = line_of_write(stage, scene.case, found)
    return Finding(
        name_of_write(stage, scene.case, found),
        f"{found.where}, at {source}" if source is not None else found.where,
        found.detail,
        scene.case.in_words(stage.ladder),
        source=source,
        tensor=found.tensor,
        slot=found.slot,
    )


def _poison_everywhere(stage: Stage, scene: Scene) -> Difference | None:
    return with_poison(stage, scene, list(Area))


_CHECKS: tuple[tuple[Check, FindingOf], ...] = (
    (replay_differs, _of_replay),
    (foreign_write, _of_write),
    (_poison_everywhere, poison_reached),
)


def _seen(stage: Stage, scene: Scene, check: Check) -> Difference | Exception | None:
    """What a check finds, or what the step raises in it."""
    try:
        return check(stage, scene)
    except (BoundState, PointerMoved, DeviceLost):
        # Nothing more can be tried then.
        raise
    except Exception as error:
        return error


def _raised(error: Exception, case: str) -> Finding:
    if isinstance(error, CaptureError):
        return replace(refused(error), case=case)
    source = line_of_error(error)
    where = str(source) if source is not None else "the step"
    return Finding("step-raises", where, f"{type(error).__name__}: {error}", case, source=source)
