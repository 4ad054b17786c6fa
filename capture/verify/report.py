"""What a verification found, and how it reads."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from ..errors import SourceLine
from .hazards import HAZARDS

__all__ = ["Finding", "VerifyReport"]

WIDTH = 96


@dataclass(frozen=True)
class Finding:
    """One thing that makes a step or its replays wrong.

    Attributes:
        hazard: its name, one of `capture.verify.HAZARDS`.
        where: the user's line if it is known, else tensor, slot and row.
        detail: what was seen.
        case: the smallest case in which it was seen; "" where none is needed.
        source: the user's line, or None.
        tensor, slot, row: where the difference was: a tensor's name, a slot's row, a row of the
            batch; None where there is none.
    """

    hazard: str
    where: str
    detail: str
    case: str = ""
    source: SourceLine | None = None
    tensor: str | None = None
    slot: int | None = None
    row: int | None = None

    def __str__(self) -> str:
        hazard = HAZARDS[self.hazard]
        lines = [f"{self.hazard}: {hazard.meaning}"]
        said = {"where": self.where, "seen": self.detail, "case": self.case}
        for label, text in {**said, "instead": hazard.instead}.items():
            if text:
                lines += _paragraph(label, text)
        return "\n".join(lines)


@dataclass(frozen=True)
class VerifyReport:
    """What `capture.verify` found.

    Attributes:
        subject: what was verified.
        backend: "cuda_graph" or "tape".
        findings: in the order of the checks; at most one of each hazard.
        trials: random cases run, of those asked for.
        asked: trials asked for, or as many as there are buckets.
        seed: of the cases.
        seconds: that it took.
        left_changed: tensors outside the state that could not be put back as they were.
    """

    subject: str
    backend: str
    findings: tuple[Finding, ...]
    trials: int
    asked: int
    seed: int
    seconds: float
    left_changed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        ran = (
            f"{self.trials} of {self.asked} trials on {self.backend}, seed {self.seed}, "
            f"{self.seconds:.1f} s"
        )
        parts = [f"{self.subject}: {self._verdict()} ({ran})"]
        for number, finding in enumerate(self.findings, 1):
            parts.append(textwrap.indent(f"{number}. {finding}", "  "))
        if self.left_changed:
            changed = ", ".join(self.left_changed)
            parts.append(f"  Left changed, for no copy of it was kept: {changed}")
        return "\n\n".join(parts)

    def _verdict(self) -> str:
        if self.ok:
            return "nothing found; it may be captured, and its replays are right"
        count = len(self.findings)
        return f"{count} finding{'s' if count > 1 else ''}; don't trust its replays"


def _paragraph(label: str, text: str) -> list[str]:
    first, rest = f"     {label:<9}", " " * 14
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
