"""Each check of `verify` is needed: without it, some fault of the zoo is not found by its name.

That the fault is found with the check, `test_zoo` shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from capture import verify
from capture.pointers import PointerLedger
from capture.verify import capturing, generate, lives, replays, run, thresholds
from capture.verify.case import Case
from capture.verify.fill import Area
from capture.verify.stage import Stage
from capture.verify.witness import Witness
from tests.toy import device_of
from tests.zoo.planted import FAULTS, Patch
from tests.zoo.test_zoo import SETTINGS, TRIALS

SwitchOff = Callable[[Patch], None]


@dataclass(frozen=True)
class Check:
    """A check, and faults that it alone finds.

    Attributes:
        name: what it checks.
        off: leaves it out.
        faults: of the zoo.
    """

    name: str
    off: SwitchOff
    faults: tuple[str, ...]


def _never(owner: Any, name: str, nothing: object = None) -> SwitchOff:
    """A check that finds nothing."""
    return lambda patch: patch.setattr(owner, name, lambda *_, **__: nothing)


def _without(check: Any) -> SwitchOff:
    """Trials that leave out a check of theirs."""
    kept = tuple(entry for entry in run._CHECKS if entry[0] is not check)
    assert len(kept) == len(run._CHECKS) - 1
    return lambda patch: patch.setattr(run, "_CHECKS", kept)


def _lives_without(check: Callable[..., Any]) -> SwitchOff:
    return _never(lives, check.__name__)


def _cases(change: Callable[[Case], Case]) -> SwitchOff:
    """Trials whose cases are plainer."""

    def off(patch: Patch) -> None:
        case = generate.Generator.case
        patch.setattr(generate.Generator, "case", lambda self: change(case(self)))

    return off


def _in_order(case: Case) -> Case:
    """Slots in the order of the batch's rows."""
    steps = tuple(tuple(range(len(batch))) for batch in case.batches)
    return replace(case.moved(range(len(case.requests))), batches=steps)


def _first_bucket(patch: Patch) -> None:
    case = generate.Generator.case

    def first(self: generate.Generator) -> Case:
        self._made = 0
        return replace(made := case(self), batches=made.batches[:1])

    patch.setattr(generate.Generator, "case", first)


def _at_once(patch: Patch) -> None:
    stage_run = Stage.run
    patch.setattr(Stage, "run", lambda self, scene, **kw: stage_run(self, scene, **kw | _NOT_LATE))


_NOT_LATE = {"late": False}


def _same_company(patch: Patch) -> None:
    patch.setattr(lives, "COMPANIES", lives.COMPANIES[:1])


def _no_poison(*left: Area) -> SwitchOff:
    """Poison in all areas but some."""

    def off(patch: Patch) -> None:
        areas = [each for each in Area if each not in left]
        entry = (lambda s, scene: replays.with_poison(s, scene, areas), replays.poison_reached)
        patch.setattr(run, "_CHECKS", (*run._CHECKS[:-1], entry))

    return off


def _short_contexts(patch: Patch) -> None:
    patch.setattr(generate, "thresholds", lambda state: [0, 1, 2, 3])


def _no_block_ends(patch: Patch) -> None:
    patch.setattr(thresholds, "MOST_BLOCKS", 0)


def _no_splits(patch: Patch) -> None:
    patch.setattr(thresholds, "MOST_SPLITS", 0)


CHECKS = (
    Check("replays equal eager steps", _without(replays.replay_differs),
          ("a_counter_in_python", "a_tensor_made_anew", "fresh_after_a_prompt")),
    Check("at every bucket", _first_bucket, ("a_counter_in_one_bucket",)),
    Check("slots permuted", _cases(_in_order), ("rows_taken_for_slots",)),
    Check("rings wrap", _short_contexts, ("read_before_it_is_overwritten",)),
    Check("blocks end", _no_block_ends, ("the_next_row_at_a_blocks_end",)),
    Check("contexts are shared", _no_splits, ("the_second_share_of_a_context",)),
    Check("NaN in scratch", _no_poison(Area.SCRATCH), ("masked_by_a_product",)),
    # Of a neighbour that runs, it is the ring that holds NaN.
    Check("NaN in other slots", _no_poison(Area.OTHERS, Area.RING), ("a_neighbours_keys",)),
    Check("NaN outside windows", _no_poison(Area.RING), ("read_before_it_is_overwritten",)),
    Check("NaN past lengths", _no_poison(Area.BLOCKS), ("a_whole_block_summed",)),
    Check("one bucket after another",
          _cases(lambda case: replace(case, batches=case.batches[:1])),
          ("rows_of_the_batch_before",)),
    Check("tokens held", _at_once, ("tokens_in_one_place",)),
    Check("tensors held", _never(run, "held_outputs"), ("the_last_logits_kept",)),
    Check("draws", _never(run, "draws"), ("nobodys_seed", "seeded_by_the_row")),
    Check("canaries", _without(replays.foreign_write),
          ("the_next_slot", "padding_wrapped_around", "a_block_table_rewritten")),
    Check("canaries outside the state", _never(Witness, "changed_unseen", ()),
          ("an_operation_that_lies",)),
    Check("addresses", _never(PointerLedger, "check"), ("a_workspace_that_grows",)),
    Check("allocations", _never(run, "allocations"),
          ("a_tensor_kept_by_each_replay", "an_operation_that_keeps")),
    Check("captures beside a thread", _never(run, "capture_beside_others", ()),
          ("another_way_in_company",)),
    Check("replays beside a thread", _never(run, "replay_beside_others"),
          ("an_operation_that_shares",)),
    Check("captures change nothing", _never(capturing, "_changed_by_capture", ()),
          ("a_rehearsal_that_writes",)),
    Check("finalizers", _never(capturing, "_in_captures", ()),
          ("an_object_dropped_by_the_step",)),
    Check("memory reported", _never(capturing, "_memory", ()), ("captures_that_cost_nothing",)),
    Check("the ladder's ceiling", _never(run, "ladder_gap"), ("a_ladder_without_its_ceiling",)),
    Check("in other slots", _lives_without(lives._slots), ("a_bias_by_slots_number",)),
    Check("after others", _lives_without(lives._reuse), ("a_table_by_slot_of_ones_own",)),
    Check("forks", _lives_without(lives._forks), ("a_fork_that_forgets",)),
    Check("checkpoints", _lives_without(lives._checkpoints), ("a_checkpoint_that_forgets",)),
    Check("rewinds", _lives_without(lives._rewinds), ("a_rewind_that_does_nothing",)),
    Check("in other company", _same_company, ("rows_normed_together",)),
    Check("the end", _never(run, "closed"), ("a_close_that_raises",)),
    Check("memory given back", _never(run, "given_back"), ("a_batch_kept_for_ever",)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        pytest.param(check, fault, id=f"{check.name}-{fault}")
        for check in CHECKS
        for fault in check.faults
    ],
)
def test_a_check_that_is_left_out_misses_a_fault(check: Check, fault: str, patch: Patch) -> None:
    specimen = next(each for each in FAULTS if each.name == fault)
    model, options = specimen.make(device_of("tape"), patch)
    check.off(patch)
    report = verify(model, trials=TRIALS, seed=1, backend="tape", **{**SETTINGS, **options})
    assert specimen.hazard not in {finding.hazard for finding in report.findings}, report


@pytest.fixture
def patch() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield patch
