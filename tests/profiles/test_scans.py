"""What R7 compares does the same work both ways."""

from __future__ import annotations

import pytest
import torch

from profiles.ratios.scans import MAMBA2_2_7B, Recurrence, ScanShape, recurrent_ratio

SMALL = ScanShape(heads=4, dim=6, groups=2, size=8)


@pytest.mark.parametrize(
    ("device", "shape"),
    [("cpu", SMALL), pytest.param("cuda", MAMBA2_2_7B, marks=pytest.mark.gpu)],
)
def test_in_place_and_gathered_leave_the_same_bits(device: str, shape: ScanShape) -> None:
    one, other = (Recurrence(shape, 5, 2, device) for _ in range(2))
    for index in range(6):
        assert torch.equal(one.in_place(index % 2), other.gathered(index % 2))
        assert one.pool["layer1.state"][:-1].any() == (index > 0)
    assert torch.equal(one.pool.arena[:-1], other.pool.arena[:-1])
    assert one.pool["layer0.state"][:-1].isfinite().all()


def test_a_slot_of_mamba2_2_7b_keeps_2_5_mib_a_layer() -> None:
    assert MAMBA2_2_7B.state_bytes == 80 * 64 * 128 * 4 == int(2.5 * 2**20)


@pytest.mark.gpu
def test_in_place_is_faster() -> None:
    ratio = recurrent_ratio()
    assert ratio.name == "R7" and 0 < ratio.value < 0.8
