"""Times, taken the same way everywhere: medians with p99, and ratios within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Sample", "alternate", "graph_node_us", "repeated", "timed"]


@dataclass(frozen=True)
class Sample:
    """Times of one thing, in microseconds."""

    median_us: float
    p99_us: float
    count: int

    @classmethod
    def of(cls, times_ns: Sequence[int]) -> Sample:
        """Of times in nanoseconds."""
        ordered = sorted(times_ns)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return cls(statistics.median(ordered) / 1e3, p99 / 1e3, len(ordered))


def alternate(count: int, *subjects: Callable[[], int], warm_up: int = 10) -> list[Sample]:
    """Time subjects in turn, so that drift falls on all alike.

    Args:
        count: times of each.
        subjects: each runs once and returns nanoseconds of what is to be timed.
        warm_up: runs of each that are not counted.
    """
    for _ in range(warm_up):
        for subject in subjects:
            subject()
    times: list[list[int]] = [[] for _ in subjects]
    for _ in range(count):
        for kept, subject in zip(times, subjects, strict=True):
            kept.append(subject())
    return [Sample.of(kept) for kept in times]


def timed(work: Callable[[], Any]) -> int:
    """Nanoseconds of host time that `work` takes."""
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start


def graph_node_us(nodes: Callable[[], int], repeats: int = 50) -> tuple[float, float]:
    """GPU microseconds a node, median and p99, of work captured into one graph and replayed.

    Args:
        nodes: enqueues the work and returns how many nodes that is.
        repeats: replays timed, each with events of its own.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        nodes()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        count = nodes()
        graph.capture_end()
        times = []
        for index in range(repeats + 5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if index >= 5:
                times.append(round(start.elapsed_time(end) * 1e6))
    sample = Sample.of(times)
    graph.reset()
    return sample.median_us / count, sample.p99_us / count


def repeated(work: Callable[[int], None], times: int) -> Callable[[], int]:
    """`work(0) .. work(times - 1)` as what `graph_node_us` takes."""

    def nodes() -> int:
        for index in range(times):
            work(index)
        return times

    return nodes
