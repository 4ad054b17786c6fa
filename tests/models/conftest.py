"""Keeps what tests show of each family, in the file that $GRAPHCACHE_FAMILIES names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.families_shown import Shown, write_shown

VARIABLE = "GRAPHCACHE_FAMILIES"
_shown = pytest.StashKey[list[Shown]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_shown] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment, misc]
    if report.when == "call" and not report.skipped:
        for mark in item.iter_markers("shows"):
            item.config.stash[_shown].append(Shown.of(item, mark, held=report.passed))
    return report  # type: ignore[return-value]


def pytest_sessionfinish(session: pytest.Session) -> None:
    shown, file = session.config.stash[_shown], os.environ.get(VARIABLE)
    if shown and file:
        write_shown(Path(file), shown)
