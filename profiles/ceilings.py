"""What this device can do at most, measured in the run that refers to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphcache.ops._triton import jit, tl

from .timing import graph_node_us, repeated

__all__ = ["Bandwidth", "measured_bandwidth", "measured_node_gap", "measured_product_rate"]

COPIED_BYTES = 1 << 30
BLOCK = 8192
SIDE = 8192
TINY_NODES = 1000


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second, read plus write, of the same copy made in two ways.

    Attributes:
        node: by a copy node of a graph, which the driver may give to a copy engine.
        kernel: by a kernel on all multiprocessors.
    """

    node: float
    kernel: float

    @property
    def best(self) -> float:
        """The faster of the two: the ceiling."""
        return max(self.node, self.kernel)


@jit
def _copy_kernel(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets))


def measured_bandwidth() -> Bandwidth:
    """Of copies of 1 GiB, each node over the same two buffers, far larger than the L2 cache.

    `Tensor.copy_` between like tensors is captured as a copy node. Such nodes can run on the copy
    engines, which do not reach what the multiprocessors do: no measure for a step made of kernels.
    """
    source = torch.zeros(COPIED_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.zeros_like(source)
    grid = (source.numel() // BLOCK,)

    def by_node(_: int) -> None:
        target.copy_(source)

    def by_kernel(_: int) -> None:
        _copy_kernel[grid](source, target, BLOCK=BLOCK, num_warps=8)

    node_us, _ = graph_node_us(repeated(by_node, 4), 10)
    kernel_us, _ = graph_node_us(repeated(by_kernel, 4), 10)
    moved = 2 * COPIED_BYTES
    return Bandwidth(moved / node_us * 1e6, moved / kernel_us * 1e6)


def measured_product_rate() -> float:
    """Operations a second of a bf16 product of two matrices of 8192 x 8192."""
    a, b = (torch.randn((SIDE, SIDE), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)

    def multiply(_: int) -> None:
        torch.mm(a, b, out=product)

    product_us, _ = graph_node_us(repeated(multiply, 2), 10)
    return 2 * SIDE**3 / product_us * 1e6


def measured_node_gap() -> float:
    """Microseconds that a node of a graph takes which does next to nothing."""
    tiny = torch.zeros(64, device="cuda")

    def touch(_: int) -> None:
        torch.neg(tiny, out=tiny)

    gap_us, _ = graph_node_us(repeated(touch, TINY_NODES), 20)
    return gap_us
