"""What a run measured, as it is written to JSON and read back. Needs neither torch nor a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from .timing import Sample

__all__ = [
    "Failed",
    "Gate",
    "Padding",
    "PeerRun",
    "Ratio",
    "Record",
    "ResultsError",
    "Skipped",
    "StepTime",
    "read_results",
]

R = TypeVar("R", bound="Record")


class ResultsError(Exception):
    """A results file that can't be read; says which, and what it lacks."""


class Record:
    """One line of a results file: a frozen dataclass that is written to JSON and read back."""

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls: type[R], written: Mapping[str, Any]) -> R:
        """Of a results file, which may be older: what it lacks has its default.

        Raises:
            ResultsError: for a name that isn't known, or one without default that is missing.
        """
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        foreign = sorted(set(written) - known)
        if foreign:
            raise ResultsError(f"a {cls.__name__.lower()} has no {', '.join(foreign)}")
        try:
            return cls(**written)
        except TypeError as error:
            raise ResultsError(f"a {cls.__name__.lower()} lacks something: {error}") from None


@dataclass(frozen=True)
class Ratio(Record):
    """Something timed against its floor.

    Attributes:
        name: as in the list of ratios.
        what: in words.
        batch: rows of the step.
        value: subject's median by the floor's, or the reverse, as `what` says.
        goal: the most it should be, or the least; 0 where none is set.
        subject_us, subject_p99_us, floor_us, floor_p99_us: what was timed.
        at_most: whether `goal` is the most it should be.
        model: whose step it is; empty for the run's own subject.
        unit: of subject and floor, where they are no times.
    """

    name: str
    what: str
    batch: int
    value: float
    goal: float
    subject_us: float
    subject_p99_us: float
    floor_us: float
    floor_p99_us: float
    at_most: bool = True
    model: str = ""
    unit: str = "us"

    key: ClassVar[str] = "ratios"

    @classmethod
    def of(
        cls, name: str, what: str, batch: int, goal: float, subject: Sample, floor: Sample
    ) -> Ratio:
        """Of two samples taken in one run."""
        return cls(
            name, what, batch, subject.median_us / floor.median_us, goal,
            subject.median_us, subject.p99_us, floor.median_us, floor.p99_us,
        )  # fmt: skip

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where none is set."""
        if not self.goal:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


@dataclass(frozen=True)
class Gate(Record):
    """A condition, and whether it held."""

    name: str
    batch: int
    held: bool
    detail: str

    key: ClassVar[str] = "gates"


@dataclass(frozen=True)
class PeerRun(Record):
    """A peer beside this library: whether its outputs are the same, then how long its steps take.

    Attributes:
        peer: its name.
        host: what it does on the host each step, in words.
        batch, context: rows, and tokens of each before the first step.
        agreement: of the outputs, in words.
        agrees: whether they are the same; times are taken only then.
        period_us, period_p99_us: from tokens to tokens; 0 where none was taken.
        host_us, host_p99_us: of one step, the device idle; 0 where it can't be had alone.
    """

    peer: str
    host: str
    batch: int
    context: int
    agreement: str
    agrees: bool
    period_us: float = 0.0
    period_p99_us: float = 0.0
    host_us: float = 0.0
    host_p99_us: float = 0.0

    key: ClassVar[str] = "peers"


@dataclass(frozen=True)
class StepTime(Record):
    """A step of this library beside its floor: bytes that it must read, by the bandwidth.

    Attributes:
        batch, context: rows, and tokens of each before.
        us, p99_us: the steady period.
        floor_us: weights and K/V read, by the measured bandwidth.
        nodes: of the graph.
        model: whose step it is.
    """

    batch: int
    context: int
    us: float
    p99_us: float
    floor_us: float
    nodes: int
    model: str

    key: ClassVar[str] = "steps"


@dataclass(frozen=True)
class Padding(Record):
    """The share of a step's rows that a ladder pads, mean over batches of 1 to its ceiling."""

    ladder: str
    graphs: int
    ceiling: int
    share: float

    key: ClassVar[str] = "padding"


@dataclass(frozen=True)
class Skipped(Record):
    """What was not measured, and why."""

    what: str
    why: str

    key: ClassVar[str] = "skipped"


@dataclass(frozen=True)
class Failed(Record):
    """What raised while it was measured."""

    what: str
    error: str

    key: ClassVar[str] = "failed"


def read_results(path: Path) -> dict[str, Any]:
    """A results file as it was written.

    Raises:
        ResultsError: when it is missing, or is none.
    """
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultsError(f"{path} does not exist; `python -m profiles.bench` writes it") from None
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path} is not JSON: {error}") from None
    if not isinstance(written, dict) or not isinstance(written.get("machine"), dict):
        raise ResultsError(f"{path} is no results file: it names no machine")
    return written


def records(kind: type[R], written: Mapping[str, Any]) -> list[R]:
    """All lines of a kind in a results file; none where it has none of them."""
    lines: Iterable[Mapping[str, Any]] = written.get(kind.key, ())  # type: ignore[attr-defined]
    return [kind.from_json(line) for line in lines]
