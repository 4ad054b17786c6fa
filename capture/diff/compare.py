"""Two probed runs side by side, and the first scope where they part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from graphcache.probes import SEPARATOR

from ..errors import ProbeError
from .run import ProbeRun

__all__ = ["Comparison", "ProbeDifference", "compare"]

# Twice what rounding makes of SmolLM2: 5e-2 at its logits in bfloat16, float32 beside it.
TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class ProbeDifference:
    """One probe in both runs.

    Attributes:
        name: of the probe.
        relative_l2: |left - right| / |right|, the largest of all steps.
        parts_at: the first step, from 0, in which they part; None when they never do.
    """

    name: str
    relative_l2: float
    parts_at: int | None

    @property
    def scope(self) -> str:
        """The scope that the probe is in; "" outside all."""
        return self.name.rpartition(SEPARATOR)[0]


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common.

    Attributes:
        left, right: the runs.
        tolerance: of `relative_l2`; None where bits must agree.
        probes: in the order in which they ran.
    """

    left: ProbeRun
    right: ProbeRun
    tolerance: float | None
    probes: tuple[ProbeDifference, ...]

    @property
    def first(self) -> ProbeDifference | None:
        """The probe that parts before all others: in the earliest step, the first that ran."""
        apart = [probe for probe in self.probes if probe.parts_at is not None]
        return min(apart, key=lambda probe: probe.parts_at or 0, default=None)

    @property
    def demand(self) -> str:
        """What was asked of each probe."""
        if self.tolerance is None:
            return "bits must agree: same device and dtype"
        return f"relative L2 of at most {self.tolerance:g}"

    @property
    def verdict(self) -> str:
        """One line for people."""
        first = self.first
        if first is None:
            return f"the runs agree in {len(self.probes)} probes of {len(self.left.steps)} steps"
        return (
            f"the runs part first in scope {first.scope or first.name!r}, step {first.parts_at}: "
            f"probe {first.name!r}"
        )

    def table(self) -> Table:
        """Probes in the order in which they ran."""
        table = Table(
            title=f"{self.left.name} beside {self.right.name}; {self.demand}", title_justify="left"
        )
        table.add_column("probe")
        table.add_column("relative L2, at most", justify="right")
        table.add_column("parts at step", justify="right")
        for probe in self.probes:
            mark = "" if probe.parts_at is None else str(probe.parts_at)
            style = "bold red" if probe is self.first else None
            table.add_row(probe.name, f"{probe.relative_l2:.2e}", mark, style=style)
        return table

    def as_json(self) -> dict[str, Any]:
        """For `json.dump`. A relative L2 that is not a number or infinite is null."""
        first = self.first
        return {
            "left": self.left.describe(),
            "right": self.right.describe(),
            "tolerance": self.tolerance,
            "agree": first is None,
            "first": None if first is None else {"scope": first.scope, **_as_json(first)},
            "probes": [_as_json(probe) for probe in self.probes],
        }


def compare(left: ProbeRun, right: ProbeRun, tolerance: float | None = None) -> Comparison:
    """Compare two runs probe by probe.

    Args:
        left: the run in question.
        right: what it should be.
        tolerance: most |left - right| / |right| of a probe. None asks for equal bits where device
            and dtype are the same, and else for what the coarser dtype allows: 1e-4 for float32,
            2e-2 for float16, 1e-1 for bfloat16.

    Raises:
        ProbeError: when the runs took other tokens, or probed other names or shapes; for a
            tolerance that is no number.
    """
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise ProbeError(f"a tolerance is a number from 0 on, got {tolerance}")
    _check_same_inputs(left, right)
    if tolerance is None and (left.device, left.dtype) != (right.device, right.dtype):
        coarsest = max(TOLERANCES.values())
        tolerance = max(TOLERANCES.get(run.dtype, coarsest) for run in (left, right))
    names = list(left.steps[0])
    worst = dict.fromkeys(names, 0.0)
    parts_at: dict[str, int] = {}
    for number, (mine, theirs) in enumerate(zip(left.steps, right.steps, strict=True)):
        _check_same_probes(names, mine, theirs, number)
        for name in names:
            one, other = mine[name], theirs[name]
            distance = _relative_l2(one, other)
            worst[name] = max(worst[name], distance)
            agree = _same_bits(one, other) if tolerance is None else distance <= tolerance
            if not agree:
                parts_at.setdefault(name, number)
    probes = tuple(ProbeDifference(name, worst[name], parts_at.get(name)) for name in names)
    return Comparison(left, right, tolerance, probes)


def _check_same_inputs(left: ProbeRun, right: ProbeRun) -> None:
    if left.prompt != right.prompt:
        raise ProbeError(
            f"the runs have other prompts, of {len(left.prompt)} and {len(right.prompt)} tokens: "
            "what they saw can't be compared"
        )
    if not left.steps or not right.steps:
        raise ProbeError("a run of no steps can't be compared")
    # The last token taken has not been an input of any step.
    if len(left.steps) != len(right.steps) or left.taken[:-1] != right.taken[:-1]:
        raise ProbeError(
            f"the runs took other tokens, {list(left.taken)} and {list(right.taken)}: record one "
            "with taken= the other's tokens"
        )


def _check_same_probes(
    names: list[str], mine: dict[str, Tensor], theirs: dict[str, Tensor], number: int
) -> None:
    if list(mine) != names or list(theirs) != names:
        missing = [
            f"{name!r} on the {side} only"
            for one, other, side in ((mine, theirs, "left"), (theirs, mine, "right"))
            for name in one
            if name not in other
        ]
        raise ProbeError(
            f"the runs probed other things in step {number}: "
            f"{', '.join(missing[:4]) or 'in another order'}"
        )
    for name in names:
        if mine[name].shape != theirs[name].shape:
            raise ProbeError(
                f"probe {name!r} has shape {list(mine[name].shape)} on the left and "
                f"{list(theirs[name].shape)} on the right"
            )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _relative_l2(one: Tensor, other: Tensor) -> float:
    """|one - other| / |other|; infinite where one of them only is not a finite number."""
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, 0.0, one - other)
    if not apart.isfinite().all():
        return float("inf")
    distance = float(apart.norm())
    size = float(torch.where(other.isfinite(), other, 0.0).norm())
    if distance == 0:
        return 0.0
    return distance / size if size else float("inf")


def _as_json(probe: ProbeDifference) -> dict[str, Any]:
    finite = probe.relative_l2 != float("inf")
    return {
        "probe": probe.name,
        "relative_l2": probe.relative_l2 if finite else None,
        "parts_at": probe.parts_at,
    }
