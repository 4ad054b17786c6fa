"""What a run has measured is on disk at once, and one failure is one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from profiles.journal import Journal
from profiles.results import Gate, Record, read_results, records

HEAD = {"machine": {"gpu": "none"}, "subject": "nothing"}


def gate(name: str) -> Gate:
    return Gate(name, 1, True, "")


def test_a_run_that_is_killed_leaves_what_it_had(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.json"
    journal = Journal(HEAD, file, lambda what: None)
    assert read_results(file)["gates"] == []

    def killed() -> Iterator[Record]:
        yield gate("first")
        assert records(Gate, read_results(file)) == [gate("first")]
        yield gate("second")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        journal.measure("two gates", killed)
    assert records(Gate, read_results(file)) == [gate("first"), gate("second")]
    assert list(file.parent.iterdir()) == [file]


def test_a_failure_is_noted_and_the_next_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    told: list[str] = []
    journal = Journal(HEAD, file, told.append)

    def fails() -> Iterator[Record]:
        yield gate("before")
        raise ValueError("no such thing")

    assert not journal.failed
    journal.measure("what fails", fails)
    journal.measure("what goes on", lambda: [gate("after")])
    journal.skip("what is missing", "it is not here")
    assert journal.failed
    written = json.loads(file.read_text())
    assert written["failed"] == [{"what": "what fails", "error": "ValueError: no such thing"}]
    assert written["skipped"] == [{"what": "what is missing", "why": "it is not here"}]
    assert [line["name"] for line in written["gates"]] == ["before", "after"]
    assert told == ["what fails", "what goes on"]
