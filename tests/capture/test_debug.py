"""Debug mode: what it finds, that it finds nothing where nothing is wrong, and that off is free."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import DecodeRuntime, Ladder
from capture.debug import VARIABLE, DebugOptions
from capture.errors import DebugFault, DeviceLost
from graphcache import Batch, FinishReason
from graphcache.errors import SchemaError
from graphcache.models import StepFunction
from tests.capture.support import (
    BIAS,
    CONTEXT,
    Chain,
    ToyOracle,
    biased,
    bits,
    books,
    captured,
    chain_runtime,
    decode,
    differing,
    everything,
    toy_runtime,
)
from tests.entry_toy import EntryDecoder
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

both = pytest.mark.parametrize("backend", BACKENDS)
EACH = DebugOptions(shadow_every=1)


def watched(backend: str, decode: Callable[[Batch], Tensor], **options: Any) -> DecodeRuntime:
    """A toy decoder's runtime whose step may do something more, captured, each step shadowed."""
    toy = ToyDecoder(device=device_of(backend))
    model = StepFunction(
        lambda batch: decode(batch) + toy(batch), VOCAB, schemas=toy.schemas, device=toy.device,
        chunk=toy, fields=(BIAS,),
    )  # fmt: skip
    settings: dict[str, Any] = {"max_requests": 4, "max_context": CONTEXT, "block_tokens": 16}
    return captured(DecodeRuntime(model, backend=backend, debug=EACH, **{**settings, **options}))


def found(runtime: DecodeRuntime, slots: list[int]) -> DebugFault:
    """What a step is blamed for. The next one can be asked for."""
    with pytest.raises(DebugFault) as caught:
        runtime.step(slots)
    assert caught.value.step == runtime._clock.submitted == runtime._mailbox.completed()
    return caught.value


# --- nothing wrong, nothing found -----------------------------------------------------------------


def serve(runtime: DecodeRuntime, seed: int) -> list[Any]:
    """Requests that come and go, fork and rewind; all that their steps gave."""
    chooser = random.Random(seed)
    slots: list[int] = []
    given: list[Any] = []
    for turn in range(24):
        kind = chooser.choice(["admit", "admit", "retire", "fork", "rewind"])
        if kind == "admit" and len(slots) < 4:
            prompt = [chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 20))]
            options: dict[str, Any] = {"temperature": chooser.choice([0.0, 0.9]), "seed": turn}
            slots.append(runtime.admit(prompt, max_tokens=chooser.choice([3, 20]), **options))
        elif kind == "fork" and 0 < len(slots) < 4:
            slots.append(runtime.fork(chooser.choice(slots), seed=turn))
        elif kind == "retire" and len(slots) > 1:
            runtime.retire(slots.pop(chooser.randrange(len(slots))))
        elif kind == "rewind" and slots:
            slot = chooser.choice(slots)
            runtime.rewind(slot, runtime.length_of(slot))
        for _ in range(2):
            asked = chooser.sample(slots, chooser.randint(0, len(slots)))
            result = runtime.step(asked)
            given.append((result.tokens(), result.reasons))
    return given


@both
@pytest.mark.parametrize("every", [1, 3, 0])
def test_a_right_model_is_left_alone_and_answers_as_ever(backend: str, every: int) -> None:
    """Whatever debug mode did, state, books and mailbox are what they are without it."""
    toy = ToyDecoder(device=device_of(backend))
    with (
        captured(toy_runtime(backend, toy, debug=False)) as plain,
        captured(toy_runtime(backend, toy, debug=DebugOptions(shadow_every=every))) as runtime,
    ):
        assert serve(runtime, 5) == serve(plain, 5)
        assert books(runtime) == books(plain)
        assert differing(everything(runtime), everything(plain)) == []
        steps = sum(use.replays for use in runtime.counters.buckets.values())
        assert steps == sum(use.replays for use in plain.counters.buckets.values())
        assert sum(use.eager_runs for use in runtime.counters.buckets.values()) == 0
        assert runtime.debug is not None
        shadows = -(-steps // every) if every else 0
        counted = {name: runtime.debug.checks[name] for name in runtime.debug.checks}
        expected = {"addresses": steps, "guards": steps, "finite": steps}
        assert counted == expected | ({"foreign": shadows, "shadow": shadows} if every else {})


@both
def test_entries_and_fields_of_a_model(backend: str) -> None:
    device = device_of(backend)
    settings: dict[str, Any] = {"max_requests": 3, "max_context": 32, "backend": backend}
    with captured(DecodeRuntime(EntryDecoder(5, device).model(), debug=EACH, **settings)) as one:
        slots = [one.admit([token, 3, 4]) for token in range(2)]
        for _ in range(12):
            one.step(slots)
    chain = Chain(device)
    model = StepFunction(biased(chain), VOCAB, fields=(BIAS,), device=device)
    with captured(DecodeRuntime(model, debug=EACH, **settings)) as other:
        bias = [0.0] * VOCAB
        bias[17] = 100.0
        slots = [other.admit([3]), other.admit([3], fields={"bias": bias})]
        assert other.step(slots).tokens() == [chain.following[3], 17]


@both
def test_tensors_of_the_steps_own_are_written_once_a_step(backend: str) -> None:
    """The shadow's writes are taken back, those of torch's own operations too."""
    count = torch.zeros(1, device=device_of(backend))

    def step(batch: Batch) -> Tensor:
        count.add_(1)
        return count * 0

    with watched(backend, step) as runtime:
        slot = runtime.admit([1, 2])
        decode(runtime, slot, 5)
        assert count.item() == 5


@both
def test_a_step_that_forks_slots_is_not_blamed_for_it(backend: str) -> None:
    """The slot it forks onto may be in no batch."""
    device = device_of(backend)
    pair = [torch.full((1,), -1, dtype=torch.int32, device=device) for _ in range(2)]

    def step(batch: Batch) -> Tensor:
        if not batch.prefill:
            batch.state.fork_slots(*pair)
        return torch.zeros(1, device=device)

    with watched(backend, step) as runtime:
        one, other = runtime.admit([1, 2, 3]), runtime.admit([4, 5, 6])
        rows = [runtime.state.slots.row_of(slot) for slot in (one, other)]
        with runtime._backend.context():
            for tensor, row in zip(pair, rows, strict=True):
                tensor.fill_(row)
        runtime.step([one])
        with runtime._backend.context():
            for tensor in pair:
                tensor.fill_(-1)
        assert runtime.tokens_of(other) == [1, 2, 3]


@both
def test_eager_steps_before_capture_are_looked_at_too(backend: str) -> None:
    toy = ToyDecoder(device=device_of(backend))
    with toy_runtime(backend, toy, debug=EACH) as runtime:
        slot = runtime.admit([4, 5])
        answer = [runtime.step([slot], eager=True).tokens()[0] for _ in range(4)]
        assert answer == ToyOracle(toy).answer([4, 5], 4)
        assert runtime.debug is not None
        assert runtime.debug.checks["foreign"] == 4 and runtime.debug.checks["shadow"] == 0


# --- guards ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("pool", ["state arena", "K/V blocks"])
@pytest.mark.parametrize("end", [0, -1])
def test_a_write_past_either_end(backend: str, pool: str, end: int) -> None:
    device = device_of(backend)
    wrong = torch.zeros(1, dtype=torch.uint8, device=device)

    def step(batch: Batch) -> Tensor:
        state = batch.state
        assert state.blocks is not None
        whole = {"state arena": state.pool, "K/V blocks": state.blocks.pool}[pool]._whole
        if not batch.prefill:
            # Rows that have a slot write where slot -1, or one past scratch, would lie.
            place = whole[end, 8:10]
            place.copy_(torch.where((batch.slots >= 0).any() & (wrong > 0), 1, place))
        return torch.zeros(1, device=device)

    with watched(backend, step) as runtime:
        slot = runtime.admit([1, 2])
        given = runtime.step([slot]).tokens()
        with runtime._backend.context():
            wrong.fill_(1)
        fault = found(runtime, [slot])
        assert (fault.check, fault.slots) == ("guards", (slot,))
        where = "before the first row" if end == 0 else "after the scratch row"
        assert f"wrote 4 bytes {where} of the {pool}" in str(fault)
        field = "floor" if pool == "state arena" else "layer0.k"
        assert f"where {field} of a row would lie" in str(fault)
        with runtime._backend.context():
            wrong.fill_(0)
        given += runtime.step([slot]).tokens()
        told = runtime.tokens_of(slot)
        assert told[2:3] + told[4:] == given and len(told) == 5


@both
def test_guards_are_there_in_debug_mode_only_and_are_counted(backend: str) -> None:
    with toy_runtime(backend) as plain, toy_runtime(backend, debug=True) as guarded:
        state, other = plain.state, guarded.state
        assert state.blocks is not None and other.blocks is not None
        assert not state.pool.guards and not state.blocks.pool.guards
        rows = 2 * (state.pool.row_stride_bytes + state.blocks.pool.row_stride_bytes)
        assert other.memory_bytes() == state.memory_bytes() + rows
        assert other.fingerprint == state.fingerprint


# --- logits that are not finite -------------------------------------------------------------------


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(backend: str, bad: float) -> None:
    chain = Chain(device_of(backend))
    chain.table[chain.following[2], 40] = bad
    # Padding has token 0, and so has a slot that has ended: what it gives nobody reads.
    chain.table[0] = bad
    with captured(chain_runtime(backend, chain, debug=True)) as runtime:
        slot, other = runtime.admit([2]), runtime.admit([50])
        assert runtime.step([other, slot]).tokens()[1] == chain.following[2]
        fault = found(runtime, [other, slot])
        assert (fault.check, fault.slots) == ("finite", (slot,))
        assert f"for the first of them, {bad} for token 40" in str(fault)
        # It has ended, and what has ended is not blamed again.
        result = runtime.step([slot, other])
        assert result.reasons == [FinishReason.NOT_FINITE, FinishReason.NONE]


@both
def test_a_token_may_be_ruled_out_but_not_all_of_them(backend: str) -> None:
    chain = Chain(device_of(backend))
    chain.table[2, 40:] = -torch.inf
    chain.table[3] = -torch.inf
    with captured(chain_runtime(backend, chain, debug=True)) as runtime:
        slot = runtime.admit([2])
        runtime.step([slot])
        assert found(runtime, [runtime.admit([3])]).check == "finite"


@both
def test_a_sampler_that_looks_away_does_not_hide_it(backend: str) -> None:
    chain = Chain(device_of(backend), broken=[2])

    def sampler(logits: Tensor, batch: Batch) -> Tensor:
        return torch.where(batch.slots < 0, -1, 5).int()

    with captured(chain_runtime(backend, chain, debug=True, sampler=sampler)) as runtime:
        assert found(runtime, [runtime.admit([2])]).check == "finite"


# --- shadows --------------------------------------------------------------------------------------


@both
def test_a_number_frozen_at_capture(backend: str) -> None:
    """The user counts steps in Python; a replay can't."""
    count = [0]

    def step(batch: Batch) -> Tensor:
        count[0] += not batch.prefill
        return torch.full((1,), 1e-3 * count[0], device=device_of(backend))

    with watched(backend, step) as runtime:
        slot = runtime.admit([1, 2])
        fault = found(runtime, [slot])
        assert fault.check == "shadow"
        assert "replayed gave another line of logits" in str(fault)
        assert "frozen at capture" in str(fault)


@both
def test_a_frozen_slot_shows_in_what_is_written(backend: str) -> None:
    """A write by a row number of the capture's, to a field that no logits depend on."""
    row = [3]

    def step(batch: Batch) -> Tensor:
        scaled = batch.state.pool["bias"][row[0], :2] + 1
        batch.state.pool["bias"][row[0], :2] = torch.where((batch.slots >= 0).any(), scaled, 0)
        return torch.zeros(1, device=device_of(backend))

    with watched(backend, step) as runtime:
        slot = runtime.admit([1, 2])
        row[0] = runtime.state.slots.row_of(slot)
        fault = found(runtime, [slot])
        # The replay wrote a parked row; that is found first.
        assert fault.check == "foreign" and "row 3 of the state arena" in str(fault)
        others = [runtime.admit([3]) for _ in range(3)]
        fault = found(runtime, [slot, *others])
        assert fault.check == "shadow"
        assert f"another bias in slot row {row[0]} (byte " in str(fault)


@both
def test_a_parked_slot_is_nobody_elses(backend: str) -> None:
    """Eager and replay do the same, and both are wrong."""
    blame: list[int] = []

    def step(batch: Batch) -> Tensor:
        if blame:
            batch.state.pool["temperature"][blame[0]] += (batch.slots >= 0).any()
        return torch.zeros(1, device=device_of(backend))

    with watched(backend, step) as runtime:
        slots = [runtime.admit([token]) for token in (1, 2, 3)]
        runtime.step(slots[:1])
        blame.append(runtime.state.slots.row_of(slots[2]))
        runtime.capture(progress=False)
        runtime.step(slots[1:])
        fault = found(runtime, slots[:2])
        assert (fault.check, fault.slots) == ("foreign", tuple(slots[:2]))
        assert f"changed row {blame[0]} of the state arena" in str(fault)


@both
def test_a_write_to_a_parked_slot_that_repeats_itself(backend: str) -> None:
    """The shadow writes what the replay writes again: it is seen against what was there before."""
    device = device_of(backend)
    target = torch.full((1,), -1, dtype=torch.int32, device=device)

    def step(batch: Batch) -> Tensor:
        if not batch.prefill:
            layer: Any = batch.state.layers[1]
            rows = torch.ones(1, 4, 16, device=device)
            first = torch.zeros(1, dtype=torch.int32, device=device)
            other = Batch(target, first, first, 1, batch.state)
            layer.attend(rows, rows[:, :2], rows[:, :2], other, scale=1.0)
        return torch.zeros(1, device=device)

    with watched(backend, step) as runtime:
        parked, slot = runtime.admit([1, 2, 3]), runtime.admit([4, 5])
        runtime.step([slot])
        row = runtime.state.slots.row_of(parked)
        with runtime._backend.context():
            target.fill_(row)
        fault = found(runtime, [slot])
        assert fault.check == "foreign" and f"row {row} of the state arena" in str(fault)


@both
def test_shadows_are_sampled(backend: str) -> None:
    runs = []
    chain = Chain(device_of(backend))
    chain.before = lambda batch: runs.append(batch.rows)
    options = DebugOptions(shadow_every=4)
    with captured(chain_runtime(backend, chain, debug=options)) as runtime:
        slot = runtime.admit([2])
        before = len(runs)
        for count in range(1, 10):
            runtime.step([slot])
            assert len(runs) - before == -(-count // 4)


@both
def test_an_error_of_the_step_in_its_shadow_leaves_state_as_it_was(backend: str) -> None:
    chain = Chain(device_of(backend))
    with captured(chain_runtime(backend, chain, debug=EACH)) as runtime:
        slot = runtime.admit([2])

        def before(batch: Batch) -> None:
            batch.state.pool["temperature"].add_(1)
            raise ZeroDivisionError("in the shadow")

        chain.before = before
        saved = everything(runtime), books(runtime)
        with pytest.raises(ZeroDivisionError):
            runtime.step([slot])
        assert differing(saved[0], everything(runtime)) == [] and saved[1] == books(runtime)
        chain.before = lambda _: None
        assert decode(runtime, slot, 3) == chain.answer([2], 3)


@both
def test_a_device_lost_in_a_shadow(backend: str) -> None:
    chain = Chain(device_of(backend))
    runtime = captured(chain_runtime(backend, chain, debug=EACH))
    slot = runtime.admit([2])

    def before(batch: Batch) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    chain.before = before
    for call in (lambda: runtime.step([slot]), lambda: runtime.admit([1])):
        with pytest.raises(DeviceLost, match="unspecified launch failure"):
            call()
    runtime.close()


# --- on and off -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "on"),
    [(None, False), ("", False), ("0", False), ("off", False), ("No", False), ("false", False),
     ("1", True), ("on", True), ("TRUE", True), (" yes ", True)],
)  # fmt: skip
def test_the_environment_switches_it(
    monkeypatch: pytest.MonkeyPatch, said: str | None, on: bool
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if said is not None:
        monkeypatch.setenv(VARIABLE, said)
    for debug, expected in ((None, on), (True, True), (False, False), (EACH, True)):
        with chain_runtime("tape", debug=debug) as runtime:
            assert (runtime.debug is not None) is expected
    with chain_runtime("tape") as runtime:
        assert (runtime.debug is not None) is on


def test_what_the_environment_can_not_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "maybe")
    with pytest.raises(SchemaError, match="GRAPHCACHE_DEBUG='maybe' is neither on nor off"):
        chain_runtime("tape")
    chain_runtime("tape", debug=False).close()
    with pytest.raises(SchemaError, match="shadow_every must be at least 0, got -1"):
        DebugOptions(shadow_every=-1)


def test_checks_may_be_left_out() -> None:
    options = DebugOptions(addresses=False, guards=False, finite=False, shadow_every=0)
    with captured(chain_runtime("tape", debug=options)) as runtime:
        assert not runtime.state.pool.guards
        slot = runtime.admit([2])
        decode(runtime, slot, 3)
        assert runtime.debug is not None and not runtime.debug.checks
        assert runtime._step.logits is None


def test_addresses_alone_wait_for_no_step() -> None:
    options = DebugOptions(guards=False, finite=False, shadow_every=0)
    with captured(chain_runtime("tape", debug=options)) as runtime:
        slot = runtime.admit([2])
        assert [runtime.step([slot]).is_read for _ in range(2)] == [False, False]
        assert runtime.debug is not None and runtime.debug.checks == {"addresses": 2}


@both
def test_shadows_alone_wait_for_their_own_steps_only(backend: str) -> None:
    options = DebugOptions(addresses=False, guards=False, finite=False, shadow_every=3)
    with captured(toy_runtime(backend, debug=options)) as runtime:
        slot = runtime.admit([2])
        results = [runtime.step([slot]) for _ in range(3)]
        assert [result.is_read for result in results] == [True, False, False]
        tokens = [result.tokens()[0] for result in results[:2]]
        # The next shadow runs while the step before it is unread, which keeps its tokens.
        results.append(runtime.step([slot]))
        assert results[3].is_read and not results[2].is_read
        tokens += [result.tokens()[0] for result in results[2:]]
        assert runtime.debug is not None and runtime.debug.checks["shadow"] == 2
    with captured(toy_runtime(backend, debug=False)) as plain:
        assert decode(plain, plain.admit([2]), 4) == tokens


def calls_of(run: Callable[[], Any]) -> list[str]:
    """Every function that is called, of Python and of C, with its file."""
    calls: list[str] = []

    def profile(frame: Any, event: str, called: Any) -> None:
        if event == "call":
            calls.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
        elif event == "c_call":
            calls.append(f"{Path(frame.f_code.co_filename).name}:{called.__name__}")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@both
def test_off_is_free(backend: str) -> None:
    """A steady step asks nothing of what debug mode is made of."""
    rooms = ("debug.py", "shadow.py", "pointers.py")

    def of_debug_mode(calls: list[str]) -> list[str]:
        return [call for call in calls if call.startswith(rooms)]

    with (
        captured(chain_runtime(backend, debug=False)) as plain,
        captured(chain_runtime(backend, debug=True)) as runtime,
    ):
        for each, expected in ((plain, False), (runtime, True)):
            slot = each.admit([2])
            each.step([slot]).tokens()
            calls = calls_of(lambda each=each, slot=slot: each.step([slot]))
            assert "runtime.py:_submit" in calls
            assert bool(of_debug_mode(calls)) is expected
        nodes = [sum(cost.nodes for cost in each.report.buckets) for each in (plain, runtime)]
        # Debug mode keeps the logits: one copy a bucket.
        assert nodes[1] == nodes[0] + len(plain.ladder.buckets)


def test_a_fault_changes_nothing_that_later_steps_see() -> None:
    """The step itself was whole: its tokens are in the request."""
    chain = Chain(broken=[chain_token := Chain().following[2]])
    with captured(chain_runtime("tape", chain, debug=True)) as runtime:
        slot, other = runtime.admit([2]), runtime.admit([9])
        runtime.step([slot, other])
        found(runtime, [slot, other])
        assert runtime.tokens_of(slot) == [2, chain_token]
        assert runtime.tokens_of(other) == [9, *chain.answer([9], 2)]
        taken = bits(runtime)
        assert runtime.step([]).tokens() == []
        assert differing(taken, bits(runtime)) == []
        assert decode(runtime, other, 2) == chain.answer([9], 4)[2:]


@both
def test_debug_and_ladders(backend: str) -> None:
    """Padding rows of a wide bucket are nobody's fault."""
    toy = ToyDecoder(device=device_of(backend))
    with captured(toy_runtime(backend, toy, debug=EACH, ladder=Ladder([4]))) as runtime:
        slots = [runtime.admit([5, 6, 7]), runtime.admit([1])]
        got = [runtime.step(slots[: 1 + turn % 2]).tokens()[0] for turn in range(6)]
        assert got == ToyOracle(toy).answer([5, 6, 7], 6)
