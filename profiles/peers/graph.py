"""A function captured into a CUDA graph; on the CPU, the function."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["captured"]

WARM_UPS = 3


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What replays `step` on the current stream.

    The graph is captured as torch's own documentation does it; the step runs a few times before.
    """
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay
