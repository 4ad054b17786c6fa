"""A run's book: every result is on disk as soon as it is there; a failure ends one line only."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from .results import Failed, Record, Skipped

__all__ = ["Journal"]

R = TypeVar("R", bound=Record)


class Journal:
    """Collects what a run measures.

    Args:
        head: what stands before the results: machine and subject.
        output: file that is written anew after every result; None for no file.
        say: told of each measurement as it begins.

    Attributes:
        failed: whether anything raised.
    """

    def __init__(
        self, head: dict[str, Any], output: Path | None, say: Callable[[str], None]
    ) -> None:
        self._head = head
        self._output = output
        self._say = say
        self._started = time.perf_counter()
        self._kept: dict[str, list[Record]] = defaultdict(list)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def measure(self, what: str, measured: Callable[[], Iterable[Record]]) -> None:
        """Run one measurement and keep what it gives, line by line.

        What it raises is kept as its failure, with what it had given before.
        """
        self._say(what)
        try:
            for record in measured():
                self.keep(record)
        except Exception as error:
            traceback.print_exc()
            self.keep(Failed(what, f"{type(error).__name__}: {error}"))

    def skip(self, what: str, why: str) -> None:
        """Note what is not measured."""
        self.keep(Skipped(what, why))

    def keep(self, record: Record) -> None:
        """Keep a line, and write the file."""
        self._kept[type(record).key].append(record)  # type: ignore[attr-defined]
        self._write()

    def records(self, kind: type[R]) -> list[R]:
        """All lines of a kind so far."""
        return list(self._kept[kind.key])  # type: ignore[attr-defined, arg-type]

    @property
    def failed(self) -> bool:
        """Whether anything raised, or differed."""
        return bool(self._kept[Failed.key])

    def as_json(self) -> dict[str, Any]:
        """The results file."""
        lines = {key: [r.as_json() for r in kept] for key, kept in self._kept.items() if kept}
        seconds = round(time.perf_counter() - self._started, 1)
        return {**self._head, "seconds": seconds, "ratios": [], "gates": [], **lines}

    def _write(self) -> None:
        if self._output is None:
            return
        # Renamed into place: a run that is killed leaves the last whole file.
        part = self._output.with_name(self._output.name + ".part")
        part.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        os.replace(part, self._output)
