"""The backend of CUDA graphs: torch records, the driver launches.

All buckets share one memory pool and one stream. Graphs are instantiated by torch and launched
through cuda-python: torch's own `replay()` does more on the host than the launch costs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from .errors import CaptureError, DeviceLost, UnsupportedDriver
from .host_view import host_view
from .lint import Lint
from .source import line_of_error
from .watch import StepWatch

__all__ = ["CudaGraphBackend", "CudaGraphStep"]


class CudaGraphStep:
    """A captured step; see `capture.backend.CapturedStep`.

    Attributes:
        exec: the driver's handle of the instantiated graph.
    """

    def __init__(
        self, graph: Any, stream: Any, external: dict[int, Tensor], device_bytes: int, driver: Any
    ) -> None:
        # The torch graph owns the memory that the kernels write; `external` is what they read.
        self._graph = graph
        self.external = external
        self.device_bytes = device_bytes
        self.exec = driver.CUgraphExec(graph.raw_cuda_graph_exec())
        raw = driver.CUgraph(graph.raw_cuda_graph())
        self.nodes = int(_call(driver, driver.cuGraphGetNodes(raw))[-1])
        self.replay = _launcher(driver, self.exec, stream)

    def close(self) -> None:
        self._graph.reset()
        self.external = {}


def _launcher(driver: Any, graph_exec: Any, stream: Any) -> Callable[[], None]:
    launch = driver.cuGraphLaunch
    success = driver.CUresult.CUDA_SUCCESS

    def replay() -> None:
        results = launch(graph_exec, stream)
        if results[0] != success:
            _call(driver, results)

    return replay


class _PinnedBuffer:
    def __init__(self, target: Tensor, stream: Any, driver: Any) -> None:
        self._source = torch.empty(target.numel(), dtype=target.dtype, pin_memory=True)
        self._target = target
        self.view = host_view(self._source)
        self._driver = driver
        self._to = driver.CUdeviceptr(target.data_ptr())
        self._from = self._source.data_ptr()
        self._stream = stream

    def send(self, count: int) -> None:
        driver = self._driver
        size = count * self._source.itemsize
        _call(driver, driver.cuMemcpyHtoDAsync(self._to, self._from, size, self._stream))


class CudaGraphBackend:
    """Captures into CUDA graphs, and launches them on a stream of its own.

    Args:
        device: a CUDA device.

    Attributes:
        stream: where captures, replays and everything in `context()` go.

    Raises:
        UnsupportedDriver: when cuda-python or the driver lacks what is needed.
    """

    name = "cuda_graph"
    # The first run compiles and makes workspaces, the second settles what the first has chosen.
    rehearsals = 2

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise UnsupportedDriver(
                f"launching graphs needs the package cuda-python, which failed to import: {error}"
            ) from error
        self._driver: Any = driver
        self._device = torch.device("cuda", device.index or 0)
        self.stream = torch.cuda.Stream(self._device)
        # Weights and inputs made so far, on whatever stream, are complete for all that follows.
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        self._stream = driver.CUstream(self.stream.cuda_stream)
        self._pool = torch.cuda.graph_pool_handle()
        self._idle_results = (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY)

    def context(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def capture(self, step: Callable[[], None]) -> CudaGraphStep:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        watch = StepWatch(preserve=False)
        free_before = torch.cuda.mem_get_info(self._device)[0]
        collecting = gc.isenabled()
        # No finalizer of some collected cycle may run inside a capture.
        gc.disable()
        try:
            with torch.no_grad(), self.context():
                self._record(graph, step, watch)
            graph.instantiate()
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the step raised {type(error).__name__} during capture: {error}",
                source=line_of_error(error),
            ) from error
        finally:
            if collecting:
                gc.enable()
        taken = free_before - torch.cuda.mem_get_info(self._device)[0]
        return CudaGraphStep(graph, self._stream, watch.external, max(0, taken), self._driver)

    def _record(self, graph: Any, step: Callable[[], None], watch: StepWatch) -> None:
        # thread_local: what other threads do with CUDA meanwhile is no concern of this capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            with watch, Lint():
                step()
        except BaseException:
            # Ending an invalid capture raises once more; it frees the stream all the same.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()

    def host_buffer(self, target: Tensor) -> _PinnedBuffer:
        return _PinnedBuffer(target, self._stream, self._driver)

    def synchronize(self) -> None:
        _call(self._driver, self._driver.cuStreamSynchronize(self._stream))

    def idle(self) -> bool:
        (result,) = self._driver.cuStreamQuery(self._stream)
        if result not in self._idle_results:
            _call(self._driver, (result,))
        return bool(result == self._driver.CUresult.CUDA_SUCCESS)

    def close(self) -> None:
        """The pool and the stream go with their last user."""


def _call(driver: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """A driver call's results, or the error it reports as `DeviceLost`."""
    if results[0] != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(results[0])
        name = text.decode() if isinstance(text, bytes) else str(text)
        raise DeviceLost(
            f"CUDA reported {results[0].name}: {name}. State on the device is lost; close this "
            "runtime, and start a new process if the error stays"
        )
    return results
