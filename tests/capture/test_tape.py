"""The tape freezes what a graph freezes, re-runs the rest, and recording leaves no trace.

What both backends promise is asked of both; what only the tape can show, of the tape.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capture import CaptureError
from capture.backend import Backend, CapturedStep, choose_backend
from capture.errors import DeviceLost, UnsupportedDriver
from capture.lint import Lint
from capture.tape import TapeBackend, TapeStep
from capture.watch import StepWatch
from graphcache.ops.publish import publish
from tests.toy import BACKENDS, device_of

CPU = torch.device("cpu")


@pytest.fixture(params=BACKENDS)
def machine(request: pytest.FixtureRequest) -> Backend:
    return choose_backend(request.param, device_of(request.param))


@pytest.fixture
def tape() -> TapeBackend:
    return TapeBackend(CPU)


def device(machine: Backend) -> torch.device:
    return torch.device("cuda" if machine.name == "cuda_graph" else "cpu")


def record(machine: Backend, step: Callable[[], Any]) -> CapturedStep:
    """Capture; on a GPU after a run that loads the kernels, whose writes are put back."""
    with torch.no_grad(), machine.context():
        if machine.name == "cuda_graph":
            watch = StepWatch(preserve=True)
            with suppress(Exception), watch:
                step()
            machine.synchronize()
            watch.restore()
        return machine.capture(step)


def replay(machine: Backend, capture: CapturedStep, times: int = 1) -> None:
    for _ in range(times):
        capture.replay()
    machine.synchronize()


def zeros(machine: Backend, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with machine.context():
        made = torch.zeros(shape, dtype=dtype, device=device(machine))
    machine.synchronize()
    return made


def values(machine: Backend, tensor: Tensor) -> list[Any]:
    machine.synchronize()
    listed: list[Any] = tensor.tolist()
    return listed


# --- frozen ---------------------------------------------------------------------------------------


def test_a_branch_is_taken_once_and_for_all(machine: Backend) -> None:
    y = zeros(machine, 2)
    flag = [True]

    def step() -> None:
        y.add_(1 if flag[0] else 100)
        if flag[0]:
            y.mul_(2)

    capture = record(machine, step)
    flag[0] = False
    replay(machine, capture)
    assert values(machine, y) == [2, 2]


def test_ints_floats_and_slices_are_those_of_the_capture(machine: Backend) -> None:
    y = zeros(machine, 6)
    at, step_size, factor = [1], [2], [0.5]

    def step() -> None:
        y[at[0] :: step_size[0]].add_(factor[0])

    capture = record(machine, step)
    at[0], step_size[0], factor[0] = 0, 1, 7.0
    replay(machine, capture, 2)
    assert values(machine, y) == [0, 1, 0, 1, 0, 1]


def test_a_python_counter_stands_still(machine: Backend) -> None:
    y = zeros(machine, 1)
    runs = []

    def step() -> None:
        runs.append(None)
        y.fill_(len(runs))

    capture = record(machine, step)
    before = len(runs)
    replay(machine, capture, 3)
    assert len(runs) == before
    assert values(machine, y) == [before]


def test_a_loop_runs_as_often_as_it_did(machine: Backend) -> None:
    y = zeros(machine, 1)
    rounds = [3]

    def step() -> None:
        for _ in range(rounds[0]):
            y.add_(1)

    capture = record(machine, step)
    rounds[0] = 10
    replay(machine, capture, 2)
    assert values(machine, y) == [6]


def test_a_rebound_name_is_not_seen(machine: Backend) -> None:
    """A step that looks a tensor up by name has, after capture, the tensor it had then."""
    y = zeros(machine, 2)
    names = {"weight": zeros(machine, 2)}

    def step() -> None:
        y.copy_(names["weight"] + 1)

    capture = record(machine, step)
    old = names["weight"]
    names["weight"] = zeros(machine, 2) + 50
    with machine.context():
        old.fill_(6)
    replay(machine, capture)
    assert values(machine, y) == [7, 7]


def test_data_is_read_at_replay(machine: Backend) -> None:
    x, index, out = (
        zeros(machine, 4),
        zeros(machine, 2, dtype=torch.int64),
        zeros(machine, 2),
    )
    capture = record(machine, lambda: out.copy_(x[index] * 2))
    for fill in (1.0, 2.0):
        with machine.context():
            x.copy_(torch.arange(4, device=x.device) + fill)
            index.copy_(torch.tensor([3, 1]).to(x.device))
        replay(machine, capture)
        assert values(machine, out) == [2 * (3 + fill), 2 * (1 + fill)]


def test_a_pass_through_state_goes_on_from_replay_to_replay(machine: Backend) -> None:
    token = zeros(machine, 3, dtype=torch.int64)
    history = zeros(machine, 3, 8, dtype=torch.int64)
    length = zeros(machine, 3, dtype=torch.int64)

    def step() -> None:
        token.copy_((token * 3 + 1) % 17)
        history.scatter_(1, length[:, None], token[:, None])
        length.add_(1)

    capture = record(machine, step)
    replay(machine, capture, 8)
    expected, value = [], 0
    for _ in range(8):
        value = (value * 3 + 1) % 17
        expected.append(value)
    assert values(machine, history) == [expected] * 3


# --- no trace -------------------------------------------------------------------------------------


def writes(y: Tensor, z: Tensor, out: Tensor) -> None:
    """Writes of every kind, some through views that overlap."""
    y.add_(1)
    y[0] = 5.0
    y[1:3].mul_(3)
    y.view(-1)[::2].sub_(2)
    y.t().copy_(torch.ones_like(y.t()))
    y.index_put_((torch.zeros(1, dtype=torch.int64, device=y.device),), z[1:2])
    y.scatter_(1, torch.zeros_like(y, dtype=torch.int64), 4.0)
    y.masked_fill_(y > 2, -1.0)
    torch.add(y, 1, out=out)
    torch._foreach_add_([y, z], 2.0)
    torch._foreach_copy_([z], [z * 2])
    z.unbind(0)[1].fill_(9)
    z.clamp_(max=100)
    y.zero_()
    y.fill_(float("nan"))


def bit_pattern(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().view(torch.uint8).cpu()


def test_what_the_step_writes_is_as_before_capture(machine: Backend) -> None:
    y, z, out = (zeros(machine, 3, 4) for _ in range(3))
    with machine.context():
        for index, tensor in enumerate((y, z, out)):
            tensor.copy_(torch.arange(12.0).reshape(3, 4).to(tensor.device) + index)
        y[2, 2] = float("nan")  # a payload of its own must come back too
    machine.synchronize()
    before = [bit_pattern(tensor) for tensor in (y, z, out)]
    record(machine, lambda: writes(y, z, out))
    machine.synchronize()
    assert all(map(torch.equal, before, (bit_pattern(t) for t in (y, z, out))))


def test_a_step_that_raises_midway_leaves_no_trace(machine: Backend) -> None:
    y, z, out = (zeros(machine, 3, 4) for _ in range(3))
    before = [bit_pattern(tensor) for tensor in (y, z, out)]

    def step() -> None:
        writes(y, z, out)
        raise ZeroDivisionError("here")

    with pytest.raises(CaptureError, match=r"ZeroDivisionError during capture: here") as caught:
        record(machine, step)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.source is not None and caught.value.source.file == __file__
    machine.synchronize()
    assert all(map(torch.equal, before, (bit_pattern(t) for t in (y, z, out))))
    capture = record(machine, lambda: y.add_(1))
    replay(machine, capture)
    assert values(machine, y) == [[1.0] * 4] * 3


def test_a_custom_operation_that_writes_is_undone_and_replayed(machine: Backend) -> None:
    pinned = device(machine).type == "cuda"
    tokens = torch.zeros(4, 2, dtype=torch.int32, pin_memory=pinned)
    reasons = torch.zeros(4, 1, dtype=torch.int32, pin_memory=pinned)
    word = torch.full((1,), 7, dtype=torch.int64, pin_memory=pinned)
    counter = zeros(machine, 1, dtype=torch.int64)
    emitted, why = (
        zeros(machine, 2, dtype=torch.int32),
        zeros(machine, 1, dtype=torch.int32),
    )
    with machine.context():
        counter.fill_(7)
        emitted.fill_(5)
        # Kernels are compiled before a capture.
        publish(emitted, why, counter, tokens, reasons, word)
        machine.synchronize()
        counter.fill_(7)
    word.fill_(7)
    tokens.zero_()
    capture = record(machine, lambda: publish(emitted, why, counter, tokens, reasons, word))
    machine.synchronize()
    assert (word.item(), values(machine, counter), tokens.any().item()) == (7, [7], False)
    replay(machine, capture, 2)
    assert (word.item(), values(machine, counter)) == (9, [9])
    assert tokens.tolist() == [[5, 5], [5, 5], [0, 0], [0, 0]]


def test_outputs_are_poisoned_until_the_first_replay(tape: TapeBackend) -> None:
    made: list[Tensor] = []
    x = torch.ones(3)

    def step() -> None:
        made.extend([x + 1, (x > 0).long(), x.double() * 2, x.to(torch.int16) + 1, x.half() + 1])

    capture = record(tape, step)
    floats, longs, doubles, shorts, halves = made
    assert floats.isnan().all() and doubles.isnan().all() and halves.isnan().all()
    assert (longs == torch.iinfo(torch.int64).max).all()
    assert (shorts == torch.iinfo(torch.int16).max).all()
    replay(tape, capture)
    assert [t.tolist() for t in made] == [[2] * 3, [1] * 3, [2] * 3, [2] * 3, [2] * 3]


def test_poison_spares_what_was_there_before(tape: TapeBackend) -> None:
    x = torch.arange(6.0)
    scalar = torch.tensor(3.0)
    seen: list[Tensor] = []

    def step() -> None:
        seen.extend([x.view(2, 3), x[1:], x.reshape(3, 2).t(), x.contiguous(), x.to(x.dtype)])
        seen.extend([x.detach(), x.expand(2, 6), *x.split(2), x.float(), scalar, x.real])

    record(tape, step)
    assert x.tolist() == [0, 1, 2, 3, 4, 5] and scalar.item() == 3
    assert all(tensor.isfinite().all() for tensor in seen)


# --- views, and operations that copy nothing ------------------------------------------------------


def test_views_take_no_node_and_write_through(machine: Backend) -> None:
    y = zeros(machine, 4, 6)

    def step() -> None:
        flat = y.view(-1)
        same = flat.contiguous().to(torch.float32).reshape(4, 6).detach()
        left, right = same.chunk(2, dim=1)
        left.t()[0].add_(1)
        right.unsqueeze(0).squeeze(0).narrow(1, 1, 1).mul_(0).add_(7)
        for row in same.unbind(0)[:2]:
            row[2].fill_(3)

    capture = record(machine, step)
    assert capture.nodes == 5
    assert not y.any()
    replay(machine, capture, 2)
    expected = [[2.0, 0, 0, 0, 7, 0] for _ in range(4)]
    for row in expected[:2]:
        row[2] = 3
    assert values(machine, y) == expected


def test_a_reshape_copies_where_it_must(machine: Backend) -> None:
    x, out = zeros(machine, 2, 3), zeros(machine, 6)
    capture = record(machine, lambda: out.copy_(x.t().reshape(-1)))
    with machine.context():
        x.copy_(torch.arange(6.0, device=x.device).view(2, 3))
    replay(machine, capture)
    assert values(machine, out) == [0, 3, 1, 4, 2, 5]


def test_memory_that_nobody_wrote_takes_no_node(tape: TapeBackend) -> None:
    out = torch.zeros(2)

    def step() -> None:
        y = torch.empty(2)
        y.fill_(3)
        out.copy_(y + torch.empty_like(y).copy_(y) + y.new_empty(2).copy_(y))

    capture = record(tape, step)
    assert capture.nodes == 6
    replay(tape, capture)
    assert out.tolist() == [9, 9]


def test_operations_with_many_outputs(machine: Backend) -> None:
    x = zeros(machine, 5)
    best, places = zeros(machine, 2), zeros(machine, 2, dtype=torch.int64)
    doubled, halved = zeros(machine, 5), zeros(machine, 5)

    def step() -> None:
        top = x.topk(2)
        best.copy_(top.values)
        places.copy_(top.indices)
        first, second = torch._foreach_mul([x, x], 2.0)
        doubled.copy_(first)
        halved.copy_(second / 4)

    capture = record(machine, step)
    for data in ([3.0, 9, 1, 5, 2], [1.0, 2, 3, 4, 5]):
        with machine.context():
            x.copy_(torch.tensor(data).to(x.device))
        replay(machine, capture)
        order = sorted(range(5), key=lambda i: -data[i])[:2]
        assert values(machine, places) == order
        assert values(machine, best) == [data[i] for i in order]
        assert values(machine, doubled) == [2 * v for v in data]
        assert values(machine, halved) == [v / 2 for v in data]


def test_an_output_that_goes_to_memory_given(machine: Backend) -> None:
    x, out = zeros(machine, 3), zeros(machine, 3)
    capture = record(machine, lambda: torch.add(x, 2, out=out))
    assert values(machine, out) == [0, 0, 0]
    with machine.context():
        x.fill_(5)
    replay(machine, capture)
    assert values(machine, out) == [7, 7, 7]


def test_a_result_kept_outside_follows_every_replay(machine: Backend) -> None:
    x = zeros(machine, 2)
    kept: list[Tensor] = []
    capture = record(machine, lambda: kept.append(x * 2))
    for value in (1.0, 4.0):
        with machine.context():
            x.fill_(value)
        replay(machine, capture)
        assert values(machine, kept[-1]) == [2 * value] * 2


# --- random programs ------------------------------------------------------------------------------

Program = list[tuple[int, int, int, int]]
OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a.add_(b),
    lambda a, b: a.mul_(0.5).sub_(b),
    lambda a, b: a.copy_(b.flip(0)),
    lambda a, b: a[1:].add_(b[:-1]),
    lambda a, b: torch.minimum(a, b, out=a),
    lambda a, b: a.view(-1)[::3].copy_(b.view(-1)[::3]),
    lambda a, b: a.index_add_(0, b[:, 0].abs().long() % 4, a + 0),
    lambda a, b: a.masked_fill_(b > a, 0.25),
    lambda a, b: a + b,
    lambda a, b: torch.where(a > b, a, b.t().contiguous().t()),
    lambda a, b: a.reshape(-1).view(4, 4).t(),
    lambda a, b: (a @ b).softmax(1),
    lambda a, b: a.sort(dim=1, descending=True).values,
    lambda a, b: torch.cat([a[:2], b[2:]]),
]


def run_program(program: Program, state: list[Tensor]) -> None:
    """Each line applies an operation to two tensors and keeps the result among those at hand."""
    at_hand = list(state)
    for operation, one, other, keep in program:
        a, b = at_hand[one % len(at_hand)], at_hand[other % len(at_hand)]
        result = OPERATIONS[operation](a, b)
        if result.shape == (4, 4) and keep:
            at_hand.append(result)
    state[0].copy_(at_hand[-1].clamp(-4, 4))


lines = st.tuples(
    st.integers(0, len(OPERATIONS) - 1), st.integers(0, 9), st.integers(0, 9), st.integers(0, 1)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(lines, min_size=1, max_size=12), st.integers(0, 1000))
def test_random_programs_replay_bit_for_bit(program: Program, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = [torch.randn(4, 4, generator=generator) for _ in range(3)]
    # No in-place operation may read and write overlapping parts of one tensor.
    program = [(o, a, b if o > 7 or a % 3 != b % 3 else b + 1, k) for o, a, b, k in program]
    program = [(o, a % 3, b % 3, k) if o <= 7 else (o, a, b, k) for o, a, b, k in program]
    twin = [tensor.clone() for tensor in state]
    before = [bit_pattern(tensor) for tensor in state]
    tape = TapeBackend(CPU)
    capture = record(tape, lambda: run_program(program, state))
    assert all(map(torch.equal, before, map(bit_pattern, state)))
    for _ in range(3):
        capture.replay()
        with torch.no_grad():
            run_program(program, twin)
        assert all(map(torch.equal, map(bit_pattern, state), map(bit_pattern, twin)))


# --- the machine ----------------------------------------------------------------------------------


def test_recording_is_refused_what_the_lint_refuses(machine: Backend) -> None:
    y = zeros(machine, 2)

    def step() -> None:
        y.add_(1)
        y.sum().item()

    with pytest.raises(CaptureError, match=r"Tensor\.item\(\) can't be captured"):
        record(machine, step)
    assert values(machine, y) == [0, 0]
    capture = record(machine, lambda: y.add_(1))
    replay(machine, capture)
    assert values(machine, y) == [1, 1]


def test_a_capture_holds_what_it_reads_and_close_lets_go(tape: TapeBackend) -> None:
    weight = torch.ones(2)
    alive = weakref.ref(weight)
    out = torch.zeros(2)
    made: list[weakref.ref[Tensor]] = []

    def step(weight: Tensor) -> None:
        product = weight * 3
        made.append(weakref.ref(product))
        out.copy_(product)

    capture = record(tape, functools.partial(step, weight))
    assert isinstance(capture, TapeStep)
    assert any(tensor is weight for tensor in capture.external.values())
    assert not any(tensor is made[0]() for tensor in capture.external.values())
    assert capture.device_bytes == 8
    del weight
    # The step is gone with the call above; only the capture knows the weight.
    replay(tape, capture)
    assert alive() is not None and made[0]() is not None
    assert out.tolist() == [3, 3]
    capture.close()
    gc.collect()
    assert alive() is None and made[0]() is None


def test_the_collector_rests_during_a_capture_and_only_then(machine: Backend) -> None:
    y = zeros(machine, 1)
    enabled: list[bool] = []

    def step() -> None:
        enabled.append(gc.isenabled())
        y.add_(1)

    def failing() -> None:
        step()
        raise ValueError

    assert gc.isenabled()
    record(machine, step)
    assert gc.isenabled()
    with pytest.raises(CaptureError):
        record(machine, failing)
    assert gc.isenabled()
    gc.disable()
    try:
        record(machine, step)
        assert not gc.isenabled()
    finally:
        gc.enable()
    # On a GPU each was run once before.
    assert (enabled if machine.name == "tape" else enabled[1::2]) == [False] * 3


def test_a_replay_that_fails_says_that_state_is_lost(tape: TapeBackend) -> None:
    index, out = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    capture = record(tape, lambda: out.copy_(torch.ones(3)[index]))
    index.fill_(7)
    with pytest.raises(DeviceLost, match=r"failed midway, state is undefined: .*out of bounds"):
        capture.replay()


def test_a_tensor_given_other_memory_leaves_the_capture_what_it_had(machine: Backend) -> None:
    """As in a graph, which holds addresses: the new data is not seen, and the old is kept alive."""
    weight, out = zeros(machine, 2), zeros(machine, 2)
    with machine.context():
        weight.fill_(3)
    capture = record(machine, lambda: out.copy_(weight * 2))
    weight.data = zeros(machine, 2) + 50
    fillers = [zeros(machine, 2) + 9 for _ in range(8)]
    replay(machine, capture)
    assert values(machine, out) == [6, 6] and len(fillers) == 8


def test_a_host_buffer_copies_its_front(machine: Backend) -> None:
    target = zeros(machine, 4, dtype=torch.int32)
    buffer = machine.host_buffer(target)
    for index in range(4):
        buffer.view[index] = index + 1
    buffer.send(2)
    assert values(machine, target) == [1, 2, 0, 0]
    buffer.view[0] = 9
    assert values(machine, target) == [1, 2, 0, 0]
    buffer.send(4)
    assert values(machine, target) == [9, 2, 3, 4]


def test_a_stream_without_work_is_idle(machine: Backend) -> None:
    machine.synchronize()
    assert machine.idle()
    machine.close()


def test_gradients_are_not_recorded(machine: Backend) -> None:
    weight = zeros(machine, 2).requires_grad_()
    out = zeros(machine, 2)
    capture = record(machine, lambda: out.copy_(weight + 1))
    replay(machine, capture)
    assert values(machine, out) == [1, 1] and not out.requires_grad


def test_choosing_a_backend() -> None:
    assert choose_backend("auto", CPU).name == "tape"
    assert choose_backend("tape", CPU).name == "tape"
    with pytest.raises(UnsupportedDriver, match="the model is on cpu"):
        choose_backend("cuda_graph", CPU)
    with pytest.raises(CaptureError, match=r"no backend 'graphs': choose auto, cuda_graph or tape"):
        choose_backend("graphs", CPU)


def test_lint_and_recording_leave_no_mode_behind(tape: TapeBackend) -> None:
    y = torch.zeros(2)
    record(tape, lambda: y.add_(1))
    with Lint():
        y.add_(1)
    y.add_(1)
    assert y.tolist() == [2, 2]
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
