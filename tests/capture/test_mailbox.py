"""The ring through which tokens come back, and the wait for a step: no hang, no busy host."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch

from capture.errors import DeviceLost
from capture.mailbox import DEPTH, Arrival, Mailbox
from tests.toy import BACKENDS, device_of

CPU = torch.device("cpu")


class Device:
    """What the mailbox asks, and how often it was asked."""

    def __init__(self, *, idle: bool = False) -> None:
        self.is_idle = idle
        self.asked = 0
        self.fault: Exception | None = None
        self.when_asked: Callable[[], None] = lambda: None

    def __call__(self) -> bool:
        self.asked += 1
        if self.fault is not None:
            raise self.fault
        idle = self.is_idle
        self.when_asked()
        return idle


@pytest.fixture
def machine() -> Device:
    return Device()


@pytest.fixture
def mailbox(machine: Device) -> Mailbox:
    return Mailbox(4, 4, CPU, machine)


def complete(mailbox: Mailbox, step: int) -> None:
    mailbox.word.fill_(step)


def later(seconds: float, action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


# --- the ring -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_of_any_width_are_read_back(backend: str) -> None:
    device = device_of(backend)
    mailbox = Mailbox(6, 3, device, Device())
    chooser = random.Random(0)
    history: list[tuple[list[int], list[int]]] = []
    assert mailbox.completed() == 0
    for step in range(1, 30):
        rows = chooser.randint(1, 3)
        tokens = [chooser.randrange(-1, 1000) for _ in range(2 * rows)]
        reasons = [chooser.randrange(5) for _ in range(rows)]
        history.append((tokens, reasons))
        mailbox.publish(
            torch.tensor(tokens, dtype=torch.int32).to(device),
            torch.tensor(reasons, dtype=torch.int32).to(device),
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert mailbox.completed() == step
        for back in range(min(step, DEPTH)):
            expected, why = history[step - 1 - back]
            assert mailbox.read(step - back, len(expected), len(why)) == (expected, why)


def test_two_unread_steps_and_the_one_asked_for_have_places_of_their_own() -> None:
    assert DEPTH >= 3


def test_what_is_read_is_the_callers(mailbox: Mailbox) -> None:
    one = torch.ones(4, dtype=torch.int32)
    mailbox.publish(one, one)
    tokens, reasons = mailbox.read(1, 4, 4)
    for _ in range(DEPTH):
        mailbox.publish(one * 7, one * 7)
    assert (tokens, reasons) == ([1] * 4, [1] * 4)


# --- the wait -------------------------------------------------------------------------------------


def test_a_step_that_is_complete_is_not_waited_for(mailbox: Mailbox, machine: Device) -> None:
    complete(mailbox, 5)
    machine.fault = DeviceLost("not to be asked")
    for step in (5, 3):
        assert mailbox.wait(step) is Arrival.BEFORE
        assert mailbox.wait(step, expected_ns=2**62, timeout=0) is Arrival.BEFORE
    assert machine.asked == 0


@pytest.mark.parametrize("early_ms", [-50, 0, 5])
def test_a_step_is_seen_when_it_completes(mailbox: Mailbox, early_ms: int) -> None:
    expected = time.perf_counter_ns() + (30 + early_ms) * 1_000_000
    later(0.03, lambda: complete(mailbox, 1))
    start = time.perf_counter()
    arrival = mailbox.wait(1, expected)
    assert 0.02 < time.perf_counter() - start < 1
    assert arrival is (Arrival.OVERSLEPT if early_ms > 0 else Arrival.SEEN)


def test_a_step_far_ahead_of_its_time_is_noticed(mailbox: Mailbox) -> None:
    """A guess of how long it takes may be wrong by any factor."""
    later(0.03, lambda: complete(mailbox, 1))
    start = time.perf_counter()
    assert mailbox.wait(1, time.perf_counter_ns() + 3600 * 10**9) is Arrival.OVERSLEPT
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("expected_in_s", [0, 3600])
@pytest.mark.parametrize("timeout", [-1.0, 0, 0.0004, 0.02])
def test_a_timeout(mailbox: Mailbox, timeout: float, expected_in_s: int) -> None:
    expected = time.perf_counter_ns() + expected_in_s * 10**9
    start = time.perf_counter()
    with pytest.raises(TimeoutError, match=f"step 3 has not completed after {timeout} s"):
        mailbox.wait(3, expected, timeout)
    assert timeout <= time.perf_counter() - start < max(0, timeout) + 0.5
    complete(mailbox, 3)
    assert mailbox.wait(3, expected, timeout) is Arrival.BEFORE


@pytest.mark.parametrize("timeout", [None, math.inf, 1e9])
def test_no_timeout_to_speak_of(mailbox: Mailbox, timeout: float | None) -> None:
    later(0.02, lambda: complete(mailbox, 1))
    mailbox.wait(1, timeout=timeout)


def test_an_older_step_is_enough_for_itself_only(mailbox: Mailbox) -> None:
    complete(mailbox, 2)
    mailbox.wait(2)
    with pytest.raises(TimeoutError):
        mailbox.wait(3, timeout=0.002)
    complete(mailbox, 9)
    mailbox.wait(3)


# --- a device that fails --------------------------------------------------------------------------


@pytest.mark.parametrize("expected_in_s", [0, 3600])
def test_the_device_is_asked_every_millisecond(
    mailbox: Mailbox, machine: Device, expected_in_s: int
) -> None:
    start = time.perf_counter()
    with pytest.raises(TimeoutError):
        mailbox.wait(1, time.perf_counter_ns() + expected_in_s * 10**9, timeout=0.1)
    waited_ms = (time.perf_counter() - start) * 1000
    assert 10 < machine.asked <= waited_ms + 1


@pytest.mark.parametrize("expected_in_s", [0, 3600])
def test_a_fault_ends_the_wait(mailbox: Mailbox, machine: Device, expected_in_s: int) -> None:
    def fail() -> None:
        machine.fault = DeviceLost("CUDA reported CUDA_ERROR_ILLEGAL_ADDRESS")

    later(0.02, fail)
    start = time.perf_counter()
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        mailbox.wait(1, time.perf_counter_ns() + expected_in_s * 10**9)
    assert time.perf_counter() - start < 1


def test_a_stream_that_ran_dry_ends_the_wait(mailbox: Mailbox, machine: Device) -> None:
    complete(mailbox, 6)

    def run_dry() -> None:
        machine.is_idle = True

    later(0.02, run_dry)
    start = time.perf_counter()
    with pytest.raises(DeviceLost, match=r"step 8 never came \(the newest is 6\); close this run"):
        mailbox.wait(8)
    assert time.perf_counter() - start < 1


def test_a_step_that_completes_as_the_stream_runs_dry_is_no_loss(
    mailbox: Mailbox, machine: Device
) -> None:
    """Between the last look at the step's number and the look at the stream, it completed."""
    machine.is_idle = True
    machine.when_asked = lambda: complete(mailbox, 1)
    assert mailbox.wait(1) is not Arrival.BEFORE


def test_who_polls_with_short_timeouts_hears_of_a_loss(mailbox: Mailbox, machine: Device) -> None:
    with pytest.raises(TimeoutError):
        mailbox.wait(1, timeout=0)
    machine.is_idle = True
    with pytest.raises(DeviceLost, match="never came"):
        mailbox.wait(1, timeout=0)
    machine.fault = DeviceLost("CUDA reported CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(DeviceLost, match="LAUNCH_FAILED"):
        mailbox.wait(1, timeout=0.0001)


# --- a host that waits ----------------------------------------------------------------------------


@pytest.mark.parametrize("expected_in_s", [-1, 0, 3600])
def test_other_threads_run_meanwhile(mailbox: Mailbox, expected_in_s: int) -> None:
    done = threading.Event()

    def work() -> None:
        total = 0
        for index in range(200_000):
            total += index
        done.set()

    thread = threading.Thread(target=work)
    with pytest.raises(TimeoutError):
        thread.start()
        mailbox.wait(1, time.perf_counter_ns() + expected_in_s * 10**9, timeout=0.4)
    assert done.is_set()
    thread.join()


def test_waiting_before_a_step_is_due_takes_no_processor(mailbox: Mailbox) -> None:
    due = time.perf_counter_ns() + 10**9
    start, used = time.perf_counter(), time.thread_time()
    with pytest.raises(TimeoutError):
        mailbox.wait(1, due, timeout=0.2)
    assert time.thread_time() - used < 0.25 * (time.perf_counter() - start)
