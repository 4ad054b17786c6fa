"""R9: a ladder's capture beside a plain loop of `torch.cuda.graph`, in time and in device bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from capture import DecodeRuntime, Ladder
from graphcache import PAD_SLOT

from ..results import Ratio
from .padding import LADDERS

__all__ = ["capture_ratio"]

CEILING = 256
CONTEXT = 512
WARM_UPS = 2
GOAL = 0.7
MIB = 2.0**20


def capture_ratio(model: Any) -> Iterator[Ratio]:
    """Of 35 buckets up to 256 rows, the same steps captured both ways.

    The plain loop captures as torch's documentation does: each graph in a pool of its own, warmed
    up twice, from the smallest to the largest.
    """
    sizes = LADDERS["vLLM's"](CEILING)
    runtime = DecodeRuntime(model, max_requests=CEILING, max_context=CONTEXT, ladder=Ladder(sizes))
    with runtime:
        plain_s, plain_bytes = _plain_loop(runtime)
        torch.cuda.empty_cache()
        before = _used()
        started = time.perf_counter()
        runtime.capture(progress=False)
        ours_s, ours_bytes = time.perf_counter() - started, _used() - before
    for what, unit, mine, theirs in (
        (f"time to capture {len(sizes)} buckets / a plain loop", "us", ours_s * 1e6, plain_s * 1e6),
        (
            f"device memory of {len(sizes)} buckets / of a plain loop", "MiB",
            ours_bytes / MIB, plain_bytes / MIB,
        ),
    ):  # fmt: skip
        # A plain loop that took no memory has nothing to be compared with.
        value = mine / theirs if theirs else float(mine > 0)
        yield Ratio(
            "R9", what, CEILING, value, GOAL, mine, mine, theirs, theirs, unit=unit
        )  # fmt: skip


def _plain_loop(runtime: DecodeRuntime) -> tuple[float, int]:
    """Seconds and bytes of all graphs, each kept until all are made."""
    backend: Any = runtime._backend
    graphs = []
    # Kernels are compiled for both: the first run of all is the loop's, and is not counted.
    with backend.context(), torch.no_grad():
        runtime._inputs.requested.fill_(PAD_SLOT)
        for key in runtime.ladder.buckets:
            runtime._step.of(key)()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = _used()
    started = time.perf_counter()
    with torch.no_grad():
        for key in runtime.ladder.buckets:
            step = runtime._step.of(key)
            with backend.context():
                for _ in range(WARM_UPS):
                    step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=backend.stream):
                step()
            graphs.append(graph)
    torch.cuda.synchronize()
    took, taken = time.perf_counter() - started, _used() - before
    # What these steps counted is none of the runtime's own: it starts from where the device is.
    runtime._clock.submitted = runtime._mailbox.completed()
    return took, taken


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
