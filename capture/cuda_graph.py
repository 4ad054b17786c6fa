"""The backend of CUDA graphs: torch records, the driver launches.

All buckets share one memory pool and one stream. Graphs are instantiated by torch and launched
through cuda-python: torch's own `replay()` does more on the host than the launch costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from graphcache.scopes import listening

from .backend import instantiating, recording
from .errors import DeviceLost, UnsupportedDriver
from .graph_nodes import NodeCounter, describe_nodes
from .host_view import host_view
from .lint import Lint
from .spans import Node, Span, SpanRecorder
from .watch import StepWatch

__all__ = ["CudaGraphBackend", "CudaGraphStep"]


class _Stream:
    """A stream as the driver sees it, usable from any thread.

    Args:
        stream: torch's.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise UnsupportedDriver(
                f"launching graphs needs the package cuda-python, which failed to import: {error}"
            ) from error
        self.driver: Any = driver
        self.handle = driver.CUstream(stream.cuda_stream)
        self.success = driver.CUresult.CUDA_SUCCESS
        self._no_context = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
        self._context = self.call(driver.cuCtxGetCurrent)[0]

    def call(self, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
        """Call the driver; return what it gives besides its result.

        Raises:
            DeviceLost: when it reports an error.
        """
        results = function(*arguments)
        return self.checked(results, function, arguments)

    def checked(
        self,
        results: tuple[Any, ...],
        function: Callable[..., tuple[Any, ...]],
        arguments: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """What a call gave besides its result; on a thread new to CUDA, that of a second call."""
        if results[0] == self._no_context:
            self.driver.cuCtxSetCurrent(self._context)
            results = function(*arguments)
        if results[0] != self.success:
            _, text = self.driver.cuGetErrorString(results[0])
            name = text.decode() if isinstance(text, bytes) else str(text)
            raise DeviceLost(
                f"CUDA reported {results[0].name}: {name}. State on the device is lost; close "
                "this runtime, and start a new process if the error stays"
            )
        return results[1:]

    def launcher(self, graph_exec: Any) -> Callable[[], None]:
        """A function that launches a graph, with as little between as Python allows."""
        launch = self.driver.cuGraphLaunch
        success = self.success
        handle = self.handle

        def replay() -> None:
            results = launch(graph_exec, handle)
            if results[0] != success:
                self.checked(results, launch, (graph_exec, handle))

        return replay


class CudaGraphStep:
    """A captured step; see `capture.backend.CapturedStep`.

    Attributes:
        exec: the driver's handle of the instantiated graph.
    """

    def __init__(
        self,
        graph: Any,
        stream: _Stream,
        external: Mapping[int, Tensor],
        device_bytes: int,
        spans: tuple[Span, ...],
    ) -> None:
        driver = stream.driver
        # The torch graph owns the memory that the kernels write; the aliases keep what they read,
        # even when the tensors themselves are given other memory.
        self._graph = graph
        self._aliases = [tensor.detach() for tensor in external.values()]
        self.external = external
        self.device_bytes = device_bytes
        self.spans = spans
        self._stream = stream
        self.exec = driver.CUgraphExec(graph.raw_cuda_graph_exec())
        self._raw = driver.CUgraph(graph.raw_cuda_graph())
        self.nodes = int(stream.call(driver.cuGraphGetNodes, self._raw)[-1])
        self.replay = stream.launcher(self.exec)
        self.is_open = True

    def describe(self) -> tuple[tuple[Node, ...], bool]:
        return describe_nodes(self._stream.driver, self._stream.call, self._raw)

    def close(self) -> None:
        self.is_open = False
        self._graph.reset()
        self._aliases = []
        self.external = {}


class _PinnedBuffer:
    def __init__(self, target: Tensor, stream: _Stream) -> None:
        self._source = torch.empty(target.numel(), dtype=target.dtype, pin_memory=True)
        self._target = target
        self.view = host_view(self._source)
        self._stream = stream
        self._copy = stream.driver.cuMemcpyHtoDAsync
        self._to = stream.driver.CUdeviceptr(target.data_ptr())
        self._from = self._source.data_ptr()
        self._itemsize = self._source.itemsize

    def send(self, count: int) -> None:
        stream = self._stream
        arguments = (self._to, self._from, count * self._itemsize, stream.handle)
        results = self._copy(*arguments)
        if results[0] != stream.success:
            stream.checked(results, self._copy, arguments)


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
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self.stream = torch.cuda.Stream(self._device)
        # Weights and inputs made so far, on whatever stream, are complete for all that follows.
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        self._driver_stream = _Stream(self.stream)
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: list[CudaGraphStep] = []
        self._captured = False

    def context(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def capture(self, step: Callable[[], None]) -> CudaGraphStep:
        self._steps = [captured for captured in self._steps if captured.is_open]
        if not self._steps:
            # A pool dies with the last graph that used it, and its handle with it.
            self._pool = torch.cuda.graph_pool_handle()
            if self._captured:
                # What the last ladder's pool had would be kept for nobody.
                torch.cuda.empty_cache()
        self._captured = True
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        watch = StepWatch(preserve=False)
        free_before = torch.cuda.mem_get_info(self._device)[0]
        with recording():
            with torch.no_grad(), self.context():
                spans = self._record(graph, step, watch)
            try:
                with instantiating():
                    graph.instantiate()
                    taken = max(0, free_before - torch.cuda.mem_get_info(self._device)[0])
                    captured = CudaGraphStep(
                        graph, self._driver_stream, watch.external, taken, spans
                    )
            except BaseException:
                # Now, and not when whoever holds the error lets go of its frames.
                with suppress(RuntimeError):
                    graph.reset()
                raise
        self._steps.append(captured)
        return captured

    def host_buffer(self, target: Tensor) -> _PinnedBuffer:
        return _PinnedBuffer(target, self._driver_stream)

    def synchronize(self) -> None:
        stream = self._driver_stream
        stream.call(stream.driver.cuStreamSynchronize, stream.handle)

    def idle(self) -> bool:
        stream = self._driver_stream
        query = stream.driver.cuStreamQuery
        results = query(stream.handle)
        if results[0] == stream.driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        stream.checked(results, query, (stream.handle,))
        return True

    def close(self) -> None:
        """The pool and the stream go with their last user."""
        self._steps = []

    def _record(self, graph: Any, step: Callable[[], None], watch: StepWatch) -> tuple[Span, ...]:
        scopes = SpanRecorder(NodeCounter(self._driver_stream.driver, self._driver_stream.handle))
        # thread_local: what other threads do with CUDA meanwhile is no concern of this capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            with watch, Lint(recorded=torch.cuda.is_current_stream_capturing), listening(scopes):
                step()
            spans = scopes.spans()
        except BaseException:
            # Ending an invalid capture raises once more; it frees the stream all the same.
            with suppress(RuntimeError):
                self._end(graph)
                graph.reset()
            raise
        self._end(graph)
        return spans

    def _end(self, graph: Any) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._clean_up_after_invalid_capture()
            raise

    def _clean_up_after_invalid_capture(self) -> None:
        """Do what torch leaves undone when a capture was invalid.

        It raises before it tells its allocator and its generator that the capture is over
        (pytorch#180395): allocations would go on into a pool without an owner, and random
        operations would be refused for good.
        """
        index = self._device.index
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        self._pool = torch.cuda.graph_pool_handle()
