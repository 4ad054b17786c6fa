"""What tests have shown of a family on a machine: written by a run, read by the page."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

__all__ = ["KINDS", "Shown", "read_shown", "write_shown"]

KINDS = {
    "answers": "transformers' own answers",
    "replays": "replay = eager, bit for bit",
    "near": "as near to fp32 as transformers",
    "compiled": "compiled",
}
"""What the mark `shows` may name, and the column's heading."""

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Shown:
    """A test that bears the mark `shows`, as it ended.

    Attributes:
        family: key of `FAMILIES`.
        kind: key of `KINDS`.
        dtype: "fp32" or "bf16", of the weights.
        held: whether it passed.
    """

    family: str
    kind: str
    dtype: str
    held: bool

    @classmethod
    def of(cls, item: pytest.Item, mark: pytest.Mark, *, held: bool) -> Shown:
        """From `shows(kind, family=, dtype=)`; what it does not name are the test's parameters."""
        (kind,) = mark.args
        if kind not in KINDS:
            raise ValueError(f"shows({kind!r}): it is one of {', '.join(KINDS)}")
        given: dict[str, Any] = {"dtype": torch.float32}
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            given |= item.callspec.params
        given |= mark.kwargs
        return cls(given["family"], kind, DTYPES[given["dtype"]], held)


def write_shown(path: Path, shown: Iterable[Shown]) -> None:
    """Write a run's findings; what two tests show holds only if both passed."""
    held: dict[tuple[str, str, str], bool] = {}
    for each in shown:
        key = (each.family, each.kind, each.dtype)
        held[key] = held.get(key, True) and each.held
    lines = [asdict(Shown(*key, held=passed)) for key, passed in sorted(held.items())]
    written = {"machine": _machine(), "shown": lines}
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def read_shown(path: Path) -> tuple[dict[str, str], list[Shown]] | None:
    """The machine and its findings; None when it has none yet."""
    if not path.exists():
        return None
    written = json.loads(path.read_text(encoding="utf-8"))
    return written["machine"], [Shown(**line) for line in written["shown"]]


def _machine() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "describe", "--always"], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
    }
