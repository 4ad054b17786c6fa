"""Small host values to the device: right bytes, in order, from sources the caller may reuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache import uploads as uploads_module
from graphcache.uploads import BUFFERS, Uploads
from tests.toy import BACKENDS, device_of

SLEEP_CYCLES = 200_000_000
"""A tenth of a second on any recent GPU: long after the host has gone on."""


@pytest.fixture(params=BACKENDS)
def device(request: pytest.FixtureRequest) -> torch.device:
    return device_of(request.param)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(7, dtype=np.int32),
        np.arange(40, dtype=np.int64).reshape(5, 8) - 20,
        np.linspace(-1, 1, 11, dtype=np.float32),
        np.arange(13, dtype=np.uint8),
        np.array([2**62 + 3], dtype=np.int64),
    ],
    ids=lambda values: f"{values.dtype}{list(values.shape)}",
)
def test_bytes_arrive(device: torch.device, values: np.ndarray) -> None:
    target = torch.full(values.shape, 99, dtype=torch.from_numpy(values).dtype, device=device)
    Uploads(device, 4096).copy(target, values)
    assert np.array_equal(target.cpu().numpy(), values)


def test_values_of_any_layout(device: torch.device) -> None:
    """Every other element, backwards, and by columns."""
    whole = np.arange(60, dtype=np.int32).reshape(6, 10)
    for values in (whole[::2, ::-3], whole.T, whole[::-1], np.broadcast_to(whole[0], (3, 10))):
        target = torch.zeros(values.shape, dtype=torch.int32, device=device)
        Uploads(device, 4096).copy(target, values)
        assert np.array_equal(target.cpu().numpy(), values)


def test_a_part_of_a_row_and_nothing_beside_it(device: torch.device) -> None:
    arena = torch.full((4, 32), 0xAA, dtype=torch.uint8, device=device)
    Uploads(device, 4096).copy(arena[2, 5:12], np.arange(7, dtype=np.uint8))
    expected = np.full((4, 32), 0xAA, dtype=np.uint8)
    expected[2, 5:12] = np.arange(7)
    assert np.array_equal(arena.cpu().numpy(), expected)


@pytest.mark.parametrize("buffer_bytes", [1, 16, 17, 100])
def test_what_is_larger_than_a_buffer_is_cut(device: torch.device, buffer_bytes: int) -> None:
    values = np.random.default_rng(0).integers(-(2**31), 2**31, 997).astype(np.int32)
    target = torch.zeros(997, dtype=torch.int32, device=device)
    Uploads(device, buffer_bytes).copy(target, values)
    assert np.array_equal(target.cpu().numpy(), values)


def test_the_callers_array_may_change_at_once(device: torch.device) -> None:
    uploads = Uploads(device, 256)
    values = np.zeros(16, dtype=np.int32)
    targets = torch.zeros(64, 16, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)
    for turn in range(64):
        values[:] = turn
        uploads.copy(targets[turn], values)
        values[:] = -1
    assert targets.cpu().tolist() == [[turn] * 16 for turn in range(64)]


def test_copies_arrive_in_the_order_of_the_calls(device: torch.device) -> None:
    uploads = Uploads(device, 64)
    target = torch.zeros(4, dtype=torch.int32, device=device)
    seen = []
    for turn in range(5 * BUFFERS):
        uploads.copy(target, np.full(4, turn, dtype=np.int32))
        seen.append(target.clone())
    assert [copy.cpu().tolist() for copy in seen] == [[turn] * 4 for turn in range(5 * BUFFERS)]


class _Events:
    """CUDA events of a device that is done with nothing unless it is waited for."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.made = 0

    def __call__(self) -> Any:
        events, number = self, self.made
        self.made += 1

        class Event:
            def record(self) -> None:
                events.log.append(("record", number))

            def synchronize(self) -> None:
                events.log.append(("wait", number))

        return Event()


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> tuple[Uploads, _Events]:
    """The way through pinned buffers, without a GPU: plain memory, and events that are written
    down."""
    events = _Events()
    monkeypatch.setattr(uploads_module.torch.cuda, "Event", events)
    plain = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return plain(*size, **options)

    monkeypatch.setattr(uploads_module.torch, "empty", empty)
    return Uploads(torch.device("cuda"), 32), events


def test_a_buffer_is_filled_again_only_after_its_last_copy(
    pinned: tuple[Uploads, _Events],
) -> None:
    uploads, events = pinned
    target = torch.zeros(8, dtype=torch.int32)
    for turn in range(2 * BUFFERS + 3):
        uploads.copy(target, np.full(8, turn, dtype=np.int32))
        assert target.tolist() == [turn] * 8
    first = [("record", buffer) for buffer in range(BUFFERS)]
    again = [entry for buffer in range(BUFFERS) for entry in (("wait", buffer), ("record", buffer))]
    assert events.log == first + again + again[:6]
    assert events.made == BUFFERS


def test_every_piece_takes_a_buffer(pinned: tuple[Uploads, _Events]) -> None:
    uploads, events = pinned
    values = np.arange(21, dtype=np.int32)
    target = torch.zeros(21, dtype=torch.int32)
    uploads.copy(target, values)
    assert target.tolist() == values.tolist()
    assert events.log == [("record", 0), ("record", 1), ("record", 2)]


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_what_the_device_is_doing() -> None:
    device = torch.device("cuda")
    uploads = Uploads(device, 64)
    target = torch.zeros(4, dtype=torch.int32, device=device)
    torch.cuda._sleep(1)
    uploads.copy(target, np.zeros(4, dtype=np.int32))
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(SLEEP_CYCLES)
    for turn in range(BUFFERS - 1):
        uploads.copy(target, np.full(4, turn, dtype=np.int32))
    done.record()
    assert not done.query()
    assert target.tolist() == [BUFFERS - 2] * 4


@pytest.mark.gpu
def test_copies_go_to_the_current_stream() -> None:
    """What another stream does meanwhile is not waited for, nor overtaken on this one."""
    device = torch.device("cuda")
    uploads = Uploads(device, 64)
    stream = torch.cuda.Stream()
    target = torch.zeros(4, dtype=torch.int32, device=device)
    # Loading a kernel would wait for the device: all are loaded before it is busy.
    torch.cuda._sleep(1)
    with torch.cuda.stream(stream):
        uploads.copy(target, np.zeros(4, dtype=np.int32))
        target.clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    with torch.cuda.stream(stream):
        uploads.copy(target, np.full(4, 5, dtype=np.int32))
        seen = target.clone()
    stream.synchronize()
    assert not torch.cuda.current_stream().query()
    assert seen.tolist() == [5] * 4
