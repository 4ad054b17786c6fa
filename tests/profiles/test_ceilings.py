"""The ceilings are of what they say: the kernel copies all of it."""

from __future__ import annotations

import pytest
import torch

from profiles import ceilings


@pytest.mark.gpu
def test_the_copy_kernel_copies_every_element() -> None:
    source = torch.arange(5 * ceilings.BLOCK, dtype=torch.float32, device="cuda")
    target = torch.full_like(source, -1)
    ceilings._copy_kernel[(5,)](source, target, BLOCK=ceilings.BLOCK, num_warps=8)
    assert torch.equal(source, target)


@pytest.mark.gpu
def test_bandwidth_is_the_faster_of_node_and_kernel() -> None:
    bandwidth = ceilings.measured_bandwidth()
    assert bandwidth.best == max(bandwidth.node, bandwidth.kernel) > 1e11
    assert 0.1 < ceilings.measured_node_gap() < 20
