"""A failing case made as small as it gets while it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .case import Case, Request

__all__ = ["shrunk"]

MOST_TRIES = 120


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The smallest case found that still fails: fewer steps, rows and requests, shorter lengths.

    Args:
        case: that fails.
        fails: runs a case.
    """
    tries = 0
    while True:
        for smaller in _smaller(case):
            tries += 1
            if tries > MOST_TRIES:
                return case
            if fails(smaller):
                case = smaller
                break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases one change away, the most that can be saved first."""
    for step in range(len(case.batches)):
        if len(case.batches) > 1:
            yield replace(case, batches=case.batches[:step] + case.batches[step + 1 :])
    for step, batch in enumerate(case.batches):
        for row in range(len(batch)):
            if len(batch) > 1:
                rest = batch[:row] + batch[row + 1 :]
                yield replace(case, batches=(*case.batches[:step], rest, *case.batches[step + 1 :]))
    for index in range(len(case.requests)):
        if not any(index in batch for batch in case.batches):
            yield _without(case, index)
    for index, request in enumerate(case.requests):
        for plainer in _plainer(request):
            requests = (*case.requests[:index], plainer, *case.requests[index + 1 :])
            yield replace(case, requests=requests)


def _plainer(request: Request) -> Iterator[Request]:
    if request.finished:
        yield replace(request, finished=False)
    if request.temperature:
        yield replace(request, temperature=0.0)
    for length in sorted({0, request.length // 2, request.length - 1}):
        if 0 <= length < request.length:
            yield replace(request, length=length)


def _without(case: Case, index: int) -> Case:
    requests = case.requests[:index] + case.requests[index + 1 :]
    batches = tuple(tuple(other - (other > index) for other in batch) for batch in case.batches)
    return Case(requests, batches)
