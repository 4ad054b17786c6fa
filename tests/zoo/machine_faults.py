"""Faults of the machine: capture, threads, finalizers, waits, ladders, ends, memory."""

from __future__ import annotations

import gc
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import DecodeRuntime, Ladder
from capture.ladder import Bucket, Refusal
from capture.runtime import DecodeRuntime as Runtime
from capture.tape import TapeStep
from graphcache import Batch, DecodeState
from graphcache.ops._triton import jit, tl
from tests.toy import ToyDecoder
from tests.zoo.planted import Patch, fault, served

Made = tuple[Any, dict[str, Any]]


@fault("capture-changes-state", 2, backends=("tape",))
def a_rehearsal_that_writes(device: torch.device, patch: Patch) -> Made:
    """The step writes to slot 1 through numpy memory: no rehearsal can put that back."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        memory = host_memory(batch.state.pool["layer1.k"].untyped_storage().data_ptr())
        memory[batch.state.pool.row_stride_bytes + 1000] += 1
        return toy(batch)

    def host_memory(address: int) -> Any:
        import ctypes

        return (ctypes.c_uint8 * 100000).from_address(address)

    return served(toy, step), {}


@fault("capture-changes-state", 2, line="fork_slots")
def a_fork_at_capture(device: torch.device, patch: Patch) -> Made:
    """Pairs to fork are live slots when the step is rehearsed."""
    toy = ToyDecoder(device=device)
    pairs = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)

    def step(batch: Batch) -> Tensor:
        batch.state.fork_slots(pairs[0], pairs[1])
        return toy(batch)

    return served(toy, step), {}


@fault("other-thread", 18)
def a_matrix_product_elsewhere(device: torch.device, patch: Patch) -> Made:
    """Half of the step runs on a pool of threads, which nobody records."""
    toy = ToyDecoder(device=device)
    pool = ThreadPoolExecutor(1)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        scale = pool.submit(lambda: _slowly(batch.positions.float())).result()
        return logits + scale[:, None]

    return served(toy, step), {}


def _slowly(x: Tensor) -> Tensor:
    for _ in range(50):
        x = x + 0.01
    return x


@fault("other-thread", 18)
def a_worker_that_writes(device: torch.device, patch: Patch) -> Made:
    """A thread of the model's own fills in a bias while the step waits for it."""
    toy = ToyDecoder(device=device)
    bias = torch.zeros(4, 1, device=device)
    asked: queue.Queue[Tensor] = queue.Queue()
    done: queue.Queue[None] = queue.Queue()

    def work() -> None:
        while True:
            positions = asked.get()
            bias[: len(positions), 0].copy_(_slowly(positions.float()))
            done.put(None)

    threading.Thread(target=work, daemon=True).start()

    def step(batch: Batch) -> Tensor:
        asked.put(batch.positions)
        done.get()
        return toy(batch) + bias[: batch.rows]

    return served(toy, step), {}


@fault("other-thread", 18, backends=("cuda_graph",))
def a_capture_that_minds_others(device: torch.device, patch: Patch) -> Made:
    """Captures refuse what any thread does to the device meanwhile."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def capture_begin(self: Any, pool: Any, capture_error_mode: str) -> None:
        begin(self, pool=pool, capture_error_mode="global")

    patch.setattr(torch.cuda.CUDAGraph, "capture_begin", capture_begin)
    return served(ToyDecoder(device=device)), {}


@fault("other-thread", 18)
def another_way_in_company(device: torch.device, patch: Patch) -> Made:
    """The step does something else while there are threads that were not there before."""
    toy = ToyDecoder(device=device)
    known = set(threading.enumerate())

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        return logits if known.issuperset(threading.enumerate()) else logits + 0.0

    return served(toy, step), {}


@fault("other-thread", 18, backends=("tape",))
def an_operation_that_shares(device: torch.device, patch: Patch) -> Made:
    """An operation is less exact while there are threads to share processors with."""
    toy = ToyDecoder(device=device)
    known = set(threading.enumerate())

    @torch.library.custom_op("zoo::shared", mutates_args=())
    def shared(logits: Tensor) -> Tensor:
        alone = known.issuperset(threading.enumerate())
        return logits.clone() if alone else logits.bfloat16().float()

    def step(batch: Batch) -> Tensor:
        logits: Tensor = shared(toy(batch))
        return logits

    return served(toy, step), {}


@fault("finalizer-in-capture", 19, line="gc.collect(0)")
def collecting_in_the_step(device: torch.device, patch: Patch) -> Made:
    """The step runs the collector, and so any finalizer there is."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        gc.collect(0)
        return toy(batch)

    return served(toy, step), {}


class _Dying:
    """Zeroes a tensor when it goes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __del__(self) -> None:
        self.tensor.zero_()


@fault("finalizer-in-capture", 19, line="self.tensor.zero_()")
def an_object_dropped_by_the_step(device: torch.device, patch: Patch) -> Made:
    """The step's last reference to an object goes, whose finalizer runs an operation."""
    toy = ToyDecoder(device=device)
    tensor = torch.zeros(1, device=device)

    def step(batch: Batch) -> Tensor:
        dying = _Dying(tensor)
        del dying
        return toy(batch)

    return served(toy, step), {}


@fault("waits-in-step", 20, line="torch.cuda.synchronize()")
def waiting_for_the_device(device: torch.device, patch: Patch) -> Made:
    """The step synchronizes, to be safe."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        torch.cuda.synchronize()
        return logits

    return served(toy, step), {}


@fault("step-raises", 20, line="raise ValueError")
def raising_at_some_buckets(device: torch.device, patch: Patch) -> Made:
    """The step does not know what to do with two rows."""
    toy = ToyDecoder(device=device)

    def step(batch: Batch) -> Tensor:
        if batch.rows == 2:
            raise ValueError("two rows")
        return toy(batch)

    return served(toy, step), {}


class _Gap(Ladder):
    """Forgets its largest bucket."""

    def bucket_for(self, rows: int, q_len: int = 1) -> Bucket | Refusal:
        found = super().bucket_for(rows, q_len)
        if isinstance(found, Bucket) and found.rows == self.ceiling:
            return super().bucket_for(self.ceiling + 1, q_len)
        return found


@fault("ladder-gap", 21)
def a_ladder_without_its_ceiling(device: torch.device, patch: Patch) -> Made:
    """The largest batch is refused."""
    return served(ToyDecoder(device=device)), {"ladder": _Gap([1, 2, 3])}


@fault("teardown", 22)
def a_close_that_raises(device: torch.device, patch: Patch) -> Made:
    """Captures are dropped before the runtime's own books allow it."""

    def free(self: Runtime) -> None:
        raise RuntimeError("a graph is in use")

    patch.setattr(Runtime, "_free", free)
    return served(ToyDecoder(device=device)), {}


@fault("teardown", 22)
def a_batch_kept_for_ever(device: torch.device, patch: Patch) -> Made:
    """The step keeps its batch, and with it all state after the runtime's end."""
    toy = ToyDecoder(device=device)
    kept: list[Batch] = []

    def step(batch: Batch) -> Tensor:
        kept[:] = [batch]
        return toy(batch)

    return served(toy, step), {"without": ("held-output",)}


@fault("memory-misjudged", 23)
def state_at_half_its_size(device: torch.device, patch: Patch) -> Made:
    """The library reports half of what the state takes."""
    bytes_of = DecodeState.memory_bytes
    patch.setattr(DecodeState, "memory_bytes", lambda self: bytes_of(self) // 2)
    return served(ToyDecoder(device=device)), {}


@fault("memory-misjudged", 23, backends=("tape",))
def captures_that_cost_nothing(device: torch.device, patch: Patch) -> Made:
    """The library reports no memory for what captures make."""
    make = TapeStep.__init__

    def made_of_nothing(self: TapeStep, *args: Any) -> None:
        make(self, *args)
        self.device_bytes = 0

    patch.setattr(TapeStep, "__init__", made_of_nothing)
    return served(ToyDecoder(device=device)), {}


@fault("allocates-in-replay", 23)
def a_tensor_kept_by_each_replay(device: torch.device, patch: Patch) -> Made:
    """The library keeps a tensor for every step that it submits."""
    kept: list[Tensor] = []
    submit = Runtime._submit

    def submitted(self: Runtime, number: int, eager: bool) -> Any:
        kept.append(torch.zeros(8, device=device))
        return submit(self, number, eager)

    patch.setattr(Runtime, "_submit", submitted)
    return served(ToyDecoder(device=device)), {}


@fault("allocates-in-replay", 23, backends=("tape",))
def an_operation_that_keeps(device: torch.device, patch: Patch) -> Made:
    """An operation remembers a copy of all that it was ever given."""
    toy = ToyDecoder(device=device)
    kept: list[Tensor] = []

    @torch.library.custom_op("zoo::kept", mutates_args=())
    def keeping(logits: Tensor) -> Tensor:
        kept.append(logits.clone())
        return logits.clone()

    def step(batch: Batch) -> Tensor:
        logits: Tensor = keeping(toy(batch))
        return logits

    return served(toy, step), {}


@fault("not-capturable", 20, line="kernel[(1,)]")
def a_bare_kernel(device: torch.device, patch: Patch) -> Made:
    """A kernel is launched outside any operation: nobody sees what it writes."""
    pytest.importorskip("triton")
    toy = ToyDecoder(device=device)
    kernel = jit(_add_one)

    def step(batch: Batch) -> Tensor:
        logits = toy(batch)
        kernel[(1,)](logits, 16)
        return logits

    return served(toy, step), {}


def _add_one(x, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)
    tl.store(x + at, tl.load(x + at) + 1)


@fault("bound-state", 15, line="runtimes[0].state")
def the_state_of_another_runtime(device: torch.device, patch: Patch) -> Made:
    """The step goes to the runtime it was written for, whoever runs it."""
    toy = ToyDecoder(device=device)
    runtimes: list[DecodeRuntime] = []

    def step(batch: Batch) -> Tensor:
        if runtimes:
            runtimes[0].state.pool["layer1.k"][scratch, 0, 0] = 1.0
        return toy(batch)

    scratch = torch.full((1,), 4, device=device)
    runtime = DecodeRuntime(
        served(toy, step),
        max_requests=4,
        max_context=64,
        backend="cuda_graph" if device.type == "cuda" else "tape",
    )
    runtimes.append(runtime)
    return runtime, {}
