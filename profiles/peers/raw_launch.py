"""The floor: a captured step launched by the driver, again and again, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .paged import PagedDecoder
from .peer import Decoded, Peer, PeerUnavailable

__all__ = ["RawLaunch"]

WARM_UPS = 3


class RawLaunch(Peer):
    """Tokens and positions are carried in the graph, and read when all steps are done."""

    name = "raw launch"
    host = "cuGraphLaunch from cuda-python"

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        rows = len(prompts)
        self._start = len(prompts[0]) - 1
        self._decoder: Any = PagedDecoder(self.hosted, rows, len(prompts[0]) + steps + 1)
        self._decoder.prefill([prompt[:-1] for prompt in prompts])
        self._pending = torch.tensor([p[-1] for p in prompts], dtype=torch.int64).to(self.device)
        self._tokens = self._pending.clone()
        with torch.device(self.device):
            self._positions = torch.zeros(rows, dtype=torch.int32)
            self._count = torch.zeros(1, dtype=torch.int64)
            self._made = torch.zeros((steps + WARM_UPS + 1, rows), dtype=torch.int64)
        self._rewind()
        self._launch: Any = self._captured() if self.device.type == "cuda" else self._body
        self._rewind()

    @torch.no_grad()
    def _body(self) -> None:
        # A captured step's tensors stay where they are: the last one made is every replay's.
        self._logits: Any = self._decoder.logits(
            self._decoder.hidden(self._tokens, self._positions)
        )
        self._tokens.copy_(self._logits.argmax(-1))
        self._made.index_copy_(0, self._count, self._tokens.unsqueeze(0))
        self._count += 1
        self._positions += 1

    def _captured(self) -> Any:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise PeerUnavailable(f"needs cuda-python: {error}") from error
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._body()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self._graph, stream=stream):
            self._body()
        self._graph.instantiate()
        executable = driver.CUgraphExec(self._graph.raw_cuda_graph_exec())
        handle = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        launch = driver.cuGraphLaunch

        def launched() -> None:
            (result,) = launch(executable, handle)
            if result != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"cuGraphLaunch: {result.name}")

        return launched

    def _rewind(self) -> None:
        self._tokens.copy_(self._pending)
        self._positions.fill_(self._start)
        self._count.zero_()

    def decode(self, steps: int) -> Decoded:
        self._rewind()
        self._synchronize()
        start = time.perf_counter_ns()
        for _ in range(steps):
            self._launch()
        tokens = self._made[:steps].tolist()
        return Decoded(tokens, [(time.perf_counter_ns() - start) // steps])

    def host_ns(self) -> int:
        self._rewind()
        self._synchronize()
        start = time.perf_counter_ns()
        self._launch()
        took = time.perf_counter_ns() - start
        self._synchronize()
        return took

    def logits(self) -> Tensor:
        logits: Tensor = self._logits
        return logits

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        self._decoder = self._launch = self._logits = None
