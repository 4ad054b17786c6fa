"""The face: requests admitted, extended, stepped, forked, rewound, kept and restored."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import Bucket, CaptureError, DecodeRuntime, Ladder
from capture.errors import (
    BatchTooLarge,
    DeviceLost,
    NotCaptured,
    PointerMoved,
    RuntimeBusy,
    RuntimeClosed,
    StepsOutstanding,
)
from capture.ladder import RefusalReason
from capture.tape import TapeBackend, TapeStep
from graphcache import Batch, FinishReason
from graphcache.errors import (
    InvalidRequest,
    LayoutMismatch,
    PrefillFailed,
    RewindTooFar,
    SlotPrefilling,
    StaleSlot,
)
from graphcache.models import StepFunction
from tests.capture.support import (
    BIAS,
    Chain,
    ToyOracle,
    biased,
    bits,
    books,
    captured,
    chain_runtime,
    decode,
    differing,
    toy_runtime,
    until_done,
)
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

both = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def toy(backend: str) -> ToyDecoder:
    return ToyDecoder(device=device_of(backend))


@pytest.fixture
def runtime(backend: str, toy: ToyDecoder) -> Iterator[DecodeRuntime]:
    with captured(toy_runtime(backend, toy)) as made:
        yield made


@pytest.fixture
def chain(backend: str) -> Chain:
    return Chain(device_of(backend))


@pytest.fixture
def chained(backend: str, chain: Chain) -> Iterator[DecodeRuntime]:
    with captured(chain_runtime(backend, chain)) as made:
        yield made


# --- admit, open, extend --------------------------------------------------------------------------


@both
def test_admit_and_step_answer_as_the_whole_history_does(
    runtime: DecodeRuntime, toy: ToyDecoder
) -> None:
    oracle = ToyOracle(toy)
    for prompt in ([4], [1, 2, 3], [(5 * i) % VOCAB for i in range(30)]):
        slot = runtime.admit(prompt)
        answer = decode(runtime, slot, 12)
        assert answer == oracle.answer(prompt, 12)
        assert runtime.tokens_of(slot) == [*prompt, *answer]
        runtime.retire(slot)


@both
def test_requests_come_and_go_in_one_batch(runtime: DecodeRuntime, toy: ToyDecoder) -> None:
    oracle = ToyOracle(toy)
    prompts = {runtime.admit([i + 1, i + 2]): [i + 1, i + 2] for i in range(3)}
    given: dict[int, list[int]] = {slot: [] for slot in prompts}
    for turn in range(14):
        if turn == 4:
            gone = next(iter(prompts))
            runtime.retire(gone)
            assert given.pop(gone) == oracle.answer(prompts.pop(gone), 4)
        if turn in (5, 7):
            prompt = [turn] * (turn + 3)
            slot = runtime.admit(prompt)
            prompts[slot], given[slot] = prompt, []
        asked = list(prompts)[:: -1 if turn % 2 else 1]
        for slot, token in zip(asked, runtime.step(asked).tokens(), strict=True):
            given[slot].append(token)
    for slot, prompt in prompts.items():
        assert given[slot] == oracle.answer(prompt, len(given[slot]))


@both
@pytest.mark.parametrize("cuts", [[1], [20], [1, 2, 3], [7, 8, 16], [16, 17], [19, 20]])
def test_extend_in_chunks_is_one_prompt(
    runtime: DecodeRuntime, toy: ToyDecoder, cuts: list[int]
) -> None:
    prompt = [(7 * i + 2) % VOCAB for i in range(21)]
    slot = runtime.open()
    for start, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        runtime.extend(slot, prompt[start:end], final=end == len(prompt))
    assert runtime.tokens_of(slot) == prompt
    assert decode(runtime, slot, 8) == ToyOracle(toy).answer(prompt, 8)


@both
def test_a_slot_that_is_not_final_can_not_step_yet(runtime: DecodeRuntime) -> None:
    empty, half, ready = runtime.open(), runtime.open(), runtime.admit([3])
    runtime.extend(half, [1, 2, 3], final=False)
    for slots in ([empty], [half], [ready, half]):
        with pytest.raises(SlotPrefilling, match=r"still prefilling: give it its last tokens"):
            runtime.step(slots)
    runtime.extend(half, [4])
    assert all(token >= 0 for token in runtime.step([ready, half]).tokens())


@both
def test_prefill_between_decode_steps(runtime: DecodeRuntime, toy: ToyDecoder) -> None:
    oracle = ToyOracle(toy)
    running, growing = runtime.admit([9, 8]), runtime.open()
    prompt = [(3 * i) % VOCAB for i in range(12)]
    given = []
    for token in prompt:
        runtime.extend(growing, [token], final=token == prompt[-1])
        given += runtime.step([running]).tokens()
    assert given == oracle.answer([9, 8], 12)
    assert decode(runtime, growing, 4) == oracle.answer(prompt, 4)


@both
def test_a_chat_goes_on_with_the_next_turn(runtime: DecodeRuntime, toy: ToyDecoder) -> None:
    oracle = ToyOracle(toy)
    slot = runtime.admit([1, 2, 3])
    history = [1, 2, 3, *decode(runtime, slot, 5)]
    for turn in ([10], [11, 12, 13, 14]):
        runtime.extend(slot, turn)
        history += turn
        answer = decode(runtime, slot, 4)
        assert answer == oracle.answer(history, 4)
        history += answer
    assert runtime.tokens_of(slot) == history


@both
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_prefill_chunks_of_any_length_leave_the_same_tokens(
    backend: str, toy: ToyDecoder, chunk: int
) -> None:
    prompt = [(11 * i + 5) % VOCAB for i in range(40)]
    lengths: list[int] = []
    model = toy.model(chunk=lambda batch: (lengths.append(batch.q_len), toy(batch))[0])
    options: dict[str, Any] = {"max_requests": 2, "max_context": 64, "block_tokens": 16}
    with DecodeRuntime(model, backend=backend, prefill_chunk=chunk, **options) as runtime:
        runtime.capture(progress=False)
        slot = runtime.admit(prompt)
        assert max(lengths) == min(chunk, 39) and sum(lengths) == 39
        assert runtime.tokens_of(slot) == prompt
        assert decode(runtime, slot, 20) == ToyOracle(toy).answer(prompt, 20)


@both
def test_retire_gives_the_row_to_others(runtime: DecodeRuntime, toy: ToyDecoder) -> None:
    oracle = ToyOracle(toy)
    for turn in range(9):
        prompt = [turn, turn + 1, turn + 2]
        slots = [runtime.admit(prompt) for _ in range(4)]
        assert runtime.step(slots).tokens() == oracle.answer(prompt, 1) * 4
        for slot in slots:
            runtime.retire(slot)
            with pytest.raises(StaleSlot):
                runtime.retire(slot)


@both
def test_a_steady_batch_is_looked_at_again_when_its_slots_have_changed(
    chained: DecodeRuntime, chain: Chain
) -> None:
    """The same list as last time says nothing of what has become of its slots since."""
    slots = [chained.admit([2]), chained.admit([3])]
    assert chained.step(slots).tokens() == chain.answer([2], 1) + chain.answer([3], 1)
    chained.extend(slots[0], [4], final=False)
    with pytest.raises(SlotPrefilling):
        chained.step(slots)
    chained.extend(slots[0], [5])
    assert chained.step(slots).tokens() == [*chain.answer([5], 1), chain.answer([3], 2)[1]]
    chained.retire(slots[1])
    with pytest.raises(StaleSlot):
        chained.step(slots)
    again = chained.admit([6])
    with pytest.raises(StaleSlot):
        chained.step(slots)
    assert chained.step([again]).tokens() == chain.answer([6], 1)


# --- the end of an answer -------------------------------------------------------------------------


@both
def test_max_tokens(chained: DecodeRuntime, chain: Chain) -> None:
    slot = chained.admit([2], max_tokens=3)
    assert until_done(chained, slot) == (chain.answer([2], 3), FinishReason.LENGTH)
    later = chained.step([slot])
    assert later.tokens() == [-1] and later.reasons == [FinishReason.LENGTH]
    assert chained.tokens_of(slot) == [2, *chain.answer([2], 3)]


@both
def test_max_tokens_of_one(chained: DecodeRuntime, chain: Chain) -> None:
    slot = chained.admit([2, 3, 4], max_tokens=1)
    assert until_done(chained, slot) == ([chain.following[4]], FinishReason.LENGTH)


@both
def test_extend_after_the_end_runs_again(chained: DecodeRuntime, chain: Chain) -> None:
    slot = chained.admit([2], max_tokens=3)
    first, _ = until_done(chained, slot)
    chained.extend(slot, [30])
    assert until_done(chained, slot) == (chain.answer([30], 3), FinishReason.LENGTH)
    chained.extend(slot, [31], max_tokens=2)
    assert until_done(chained, slot) == (chain.answer([31], 2), FinishReason.LENGTH)
    expected = [2, *first, 30, *chain.answer([30], 3), 31, *chain.answer([31], 2)]
    assert chained.tokens_of(slot) == expected


@both
def test_the_end_of_the_context(backend: str, chain: Chain) -> None:
    with captured(chain_runtime(backend, chain, max_context=10)) as runtime:
        slot = runtime.admit([1, 2, 3, 4])
        tokens, reason = until_done(runtime, slot)
        assert (tokens, reason) == (chain.answer([4], 6), FinishReason.CONTEXT)
        assert runtime.step([slot]).tokens() == [-1]
        assert len(runtime.tokens_of(slot)) == 10


@both
def test_a_budget_beyond_the_context_ends_with_it(backend: str, chain: Chain) -> None:
    with captured(chain_runtime(backend, chain, max_context=10)) as runtime:
        slot = runtime.admit([1, 2, 3, 4], max_tokens=1000)
        assert until_done(runtime, slot) == (chain.answer([4], 6), FinishReason.CONTEXT)


@both
def test_stop_tokens(chained: DecodeRuntime, chain: Chain) -> None:
    answer = chain.answer([2], 12)
    slot = chained.admit([2], stop=[answer[4]])
    assert until_done(chained, slot) == (answer[:5], FinishReason.STOP)
    last = chained.step([slot])
    assert last.tokens() == [-1] and last.reasons == [FinishReason.STOP]


@both
def test_eight_stop_tokens_each_of_which_stops(chained: DecodeRuntime, chain: Chain) -> None:
    answer = chain.answer([2], 9)
    assert len(set(answer)) == 9
    others = [token for token in range(VOCAB) if token not in answer]
    for place in range(8):
        stop = others[:8]
        stop[place] = answer[6]
        slot = chained.admit([2], stop=stop)
        assert until_done(chained, slot) == (answer[:7], FinishReason.STOP)
        chained.retire(slot)


@both
def test_stop_defaults_to_the_models_and_can_be_taken_away(backend: str, chain: Chain) -> None:
    answer = chain.answer([2], 12)
    with captured(chain_runtime(backend, chain, model={"stop_tokens": (answer[3],)})) as runtime:
        assert until_done(runtime, runtime.admit([2])) == (answer[:4], FinishReason.STOP)
        other = runtime.admit([2], stop=[answer[1]])
        assert until_done(runtime, other) == (answer[:2], FinishReason.STOP)
        none = runtime.admit([2], stop=[], max_tokens=12)
        assert until_done(runtime, none) == (answer, FinishReason.LENGTH)


@both
def test_a_stop_token_in_the_prompt_stops_nothing(chained: DecodeRuntime, chain: Chain) -> None:
    slot = chained.admit([2, 9, 2], stop=[9, 2], max_tokens=2)
    assert until_done(chained, slot)[0] == chain.answer([2], 2)


@both
def test_logits_that_are_not_finite(backend: str) -> None:
    chain = Chain(device_of(backend), broken=[Chain().answer([2], 3)[-1]])
    good = chain.answer([2], 3)
    with captured(chain_runtime(backend, chain)) as runtime:
        slot, other = runtime.admit([2]), runtime.admit([40])
        steps = [runtime.step([slot, other]).tokens() for _ in range(3)]
        assert [tokens[0] for tokens in steps] == good
        result = runtime.step([slot, other])
        assert result.tokens() == [-1, chain.answer([40], 4)[-1]]
        assert result.reasons == [FinishReason.NOT_FINITE, FinishReason.NONE]
        # The token without an answer is still pending; other tokens behind it make one.
        assert runtime.tokens_of(slot) == [2, *good]
        runtime.extend(slot, [5])
        assert runtime.step([slot]).tokens() == [chain.following[5]]


@both
def test_a_finished_slot_among_running_ones(chained: DecodeRuntime, chain: Chain) -> None:
    short, long = chained.admit([2], max_tokens=2), chained.admit([3])
    got = [chained.step([short, long]) for _ in range(1)]
    for _ in range(3):
        got[-1].tokens()
        got.append(chained.step([short, long]))
    tokens = [result.tokens() for result in got]
    assert [row[0] for row in tokens] == [*chain.answer([2], 2), -1, -1]
    assert [row[1] for row in tokens] == chain.answer([3], 4)
    ended = [result.reasons[0] for result in got]
    assert ended == [FinishReason.NONE] + [FinishReason.LENGTH] * 3
    assert {result.reasons[1] for result in got} == {FinishReason.NONE}


# --- sampling -------------------------------------------------------------------------------------


@both
def test_draws_depend_on_the_request_alone(runtime: DecodeRuntime) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 77}
    alone = decode(runtime, runtime.admit([1, 2], **options), 10)
    others = [runtime.admit([5], temperature=1.0, seed=n) for n in range(2)]
    slot = runtime.admit([1, 2], **options)
    crowded = []
    for turn in range(10):
        asked = [*others, slot] if turn % 3 else [slot, others[0]]
        result = runtime.step(asked)
        crowded.append(result.tokens()[asked.index(slot)])
    assert crowded == alone
    runtime.retire(slot)
    other_seed = runtime.admit([1, 2], temperature=1.5, seed=78)
    assert decode(runtime, other_seed, 10) != alone


@both
def test_requests_without_a_seed_draw_differently(runtime: DecodeRuntime) -> None:
    slots = [runtime.admit([1, 2], temperature=2.0) for _ in range(4)]
    answers = list(zip(*(runtime.step(slots).tokens() for _ in range(12)), strict=True))
    assert len(set(answers)) == 4


@both
def test_a_sampler_of_ones_own_is_captured(backend: str, chain: Chain) -> None:
    runs = []

    def least_likely(logits: Tensor, batch: Batch) -> Tensor:
        runs.append(batch.rows)
        return torch.where(batch.slots < 0, -1, logits.argmin(1)).int()

    with chain_runtime(backend, chain, sampler=least_likely) as runtime:
        runtime.capture(progress=False)
        count = len(runs)
        slot = runtime.admit([2], temperature=1.0)
        assert decode(runtime, slot, 3) == [0, 1 if chain.following[0] == 0 else 0, 0]
        assert len(runs) == count and set(runs) == {1, 2, 4}


@both
def test_fields_are_set_at_admission_and_reset_for_the_next(backend: str, chain: Chain) -> None:
    model = StepFunction(biased(chain), VOCAB, fields=(BIAS,), device=chain.device)
    bias = torch.zeros(VOCAB)
    bias[13] = 50
    with DecodeRuntime(model, max_requests=1, max_context=32, backend=backend) as runtime:
        runtime.capture(progress=False)
        for value, expected in ((bias, 13), (bias.tolist(), 13), (None, chain.following[2])):
            slot = runtime.admit([2], fields={} if value is None else {"bias": value})
            assert decode(runtime, slot, 1) == [expected]
            runtime.retire(slot)
        slot = runtime.open(fields={"bias": bias})
        runtime.extend(slot, [1, 2])
        assert decode(runtime, slot, 2) == [13, 13]


# --- results --------------------------------------------------------------------------------------


@both
def test_two_steps_may_be_unread(chained: DecodeRuntime, chain: Chain) -> None:
    slot = chained.admit([2])
    expected = chain.answer([2], 6)
    first, second = chained.step([slot]), chained.step([slot])
    before = bits(chained)
    with pytest.raises(StepsOutstanding, match=r"steps 1 and 2 are unread; call tokens\(\)"):
        chained.step([slot])
    with pytest.raises(StepsOutstanding):
        chained.step([slot], eager=True)
    assert differing(before, bits(chained)) == []
    assert first.tokens() == expected[:1]
    third = chained.step([slot])
    with pytest.raises(StepsOutstanding, match="steps 2 and 3"):
        chained.step([slot])
    assert [second.tokens(), third.tokens()] == [[token] for token in expected[1:3]]
    assert decode(chained, slot, 3) == expected[3:]


@both
def test_results_may_be_read_out_of_order_and_much_later(
    chained: DecodeRuntime, chain: Chain
) -> None:
    slot = chained.admit([2])
    results = []
    for _ in range(20):
        results.append(chained.step([slot]))
        results[-1].tokens() if len(results) % 2 == 0 else None
    assert [result.number for result in results] == list(range(1, 21))
    # The odd ones were never read by the caller.
    assert [result.tokens()[0] for result in results[::-1]] == chain.answer([2], 20)[::-1]
    assert all(result.tokens() is result.tokens() for result in results)


@both
def test_a_result_is_readable_after_its_slot_has_gone(chained: DecodeRuntime, chain: Chain) -> None:
    slot = chained.admit([2])
    result = chained.step([slot])
    chained.retire(slot)
    other = chained.admit([3])
    assert chained.step([other]).tokens() == chain.answer([3], 1)
    assert result.tokens() == chain.answer([2], 1)
    chained.close()
    assert result.tokens() == chain.answer([2], 1)
    assert result.reasons == [FinishReason.NONE]


@both
def test_a_result_unread_at_close_is_readable(chained: DecodeRuntime, chain: Chain) -> None:
    slot = chained.admit([2])
    results = [chained.step([slot]), chained.step([slot])]
    chained.close()
    assert [result.tokens()[0] for result in results] == chain.answer([2], 2)


@both
def test_a_step_of_no_slots_does_nothing(chained: DecodeRuntime, chain: Chain) -> None:
    slot = chained.admit([2])
    running = chained.step([slot])
    before = bits(chained)
    nothing = chained.step([])
    assert (nothing.tokens(), nothing.reasons, nothing.number, list(nothing.slots)) == (
        [], [], 0, [],
    )  # fmt: skip
    with pytest.raises(NotCaptured, match="no slots"):
        _ = nothing.logits
    assert differing(before, bits(chained)) == []
    assert running.tokens() == chain.answer([2], 1)
    assert decode(chained, slot, 2) == chain.answer([2], 3)[1:]
    one, two = chained.step([slot]), chained.step([slot])
    assert chained.step([]).tokens() == []
    assert [one.tokens()[0], two.tokens()[0]] == chain.answer([2], 5)[3:]


@both
def test_a_callers_list_is_its_own(chained: DecodeRuntime, chain: Chain) -> None:
    """Lists given to a step or taken from its result may be changed: the next step sees that."""
    slots = [chained.admit([token]) for token in (2, 3, 4)]
    asked = list(slots)
    first = chained.step(asked)
    asked.pop(1)
    assert list(first.slots) == slots
    assert first.tokens() == [chain.answer([token], 1)[0] for token in (2, 3, 4)]
    second = chained.step(asked)
    assert second.tokens() == [chain.answer([token], 2)[1] for token in (2, 4)]
    rest = list(first.slots) if isinstance(first.slots, tuple) else first.slots
    rest.pop(0)
    third = chained.step(rest)
    assert third.tokens() == [chain.answer([3], 2)[1], chain.answer([4], 3)[2]]
    again = list(third.slots) if isinstance(third.slots, tuple) else third.slots
    again.reverse()
    assert chained.step(again).tokens() == [chain.answer([4], 4)[3], chain.answer([3], 3)[2]]


@both
def test_any_sequence_of_handles_will_do(chained: DecodeRuntime, chain: Chain) -> None:
    slots = [chained.admit([2]), chained.admit([3])]
    expected = list(zip(chain.answer([2], 4), chain.answer([3], 4), strict=True))
    asked: list[Any] = [slots, tuple(slots), (slot for slot in slots), dict.fromkeys(slots)]
    assert [tuple(chained.step(given).tokens()) for given in asked] == expected


@both
def test_logits(backend: str, toy: ToyDecoder) -> None:
    with captured(toy_runtime(backend, toy, keep_logits=True)) as runtime:
        prompts = [[1, 2, 3], [9]]
        slots = [runtime.admit(prompt) for prompt in prompts]
        result = runtime.step(slots[::-1])
        logits = result.logits
        assert logits.shape == (2, VOCAB) and logits.device.type == runtime.device.type
        oracle = ToyOracle(toy)
        expected = torch.stack([oracle.logits(prompt) for prompt in prompts[::-1]])
        assert torch.allclose(logits.cpu().double(), expected, atol=1e-4)
        assert result.tokens() == expected.argmax(1).tolist()
        runtime.step(slots)
        with pytest.raises(NotCaptured, match="logits of step 1 were overwritten by a later one"):
            _ = result.logits


@both
def test_logits_are_there_when_the_tokens_are(
    backend: str, toy: ToyDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's number is published last: whoever has seen it may read all that the step left."""
    with toy_runtime(backend, toy, keep_logits=True) as runtime:
        order: list[str] = []
        for owner, name in ((runtime._mailbox, "publish"), (runtime._step, "_keep")):
            call = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *a, n=name, c=call: (order.append(n), c(*a)))
        runtime.step([runtime.admit([1])], eager=True).tokens()
        assert order == ["_keep", "publish"]


@both
def test_logits_are_kept_only_on_request(chained: DecodeRuntime) -> None:
    result = chained.step([chained.admit([2])])
    with pytest.raises(NotCaptured, match="make the runtime with keep_logits=True"):
        _ = result.logits


@both
def test_a_result_says_what_it_is(chained: DecodeRuntime, chain: Chain) -> None:
    slot = chained.admit([2])
    result = chained.step([slot])
    assert repr(result) == f"StepResult(number=1, slots=[{slot}], unread)"
    assert not result.is_read
    result.tokens()
    assert result.is_read
    assert repr(result) == f"StepResult(number=1, slots=[{slot}], tokens={chain.answer([2], 1)})"


@both
def test_counters(backend: str, chain: Chain) -> None:
    with chain_runtime(backend, chain, ladder=Ladder([1, 3])) as runtime:
        slots = [runtime.admit([token]) for token in (1, 2, 3)]
        runtime.step(slots[:2], eager=True).tokens()
        runtime.capture(progress=False)
        for count in (1, 2, 3, 2, 0, 1):
            runtime.step(slots[:count]).tokens()
        extra = runtime.admit([4])
        for _ in range(2):
            with pytest.raises(BatchTooLarge):
                runtime.step([*slots, extra])
        one, three = (runtime.counters.buckets[Bucket(rows)] for rows in (1, 3))
        assert (one.replays, one.eager_runs, one.padding_rows) == (2, 0, 0)
        assert (three.replays, three.eager_runs, three.padding_rows) == (3, 1, 3)
        assert runtime.counters.refusals == {RefusalReason.OVER_CEILING: 2}
        assert runtime.counters.padding_share == 3 / (2 * 1 + 4 * 3)


# --- capture --------------------------------------------------------------------------------------


@both
def test_the_report(backend: str, toy: ToyDecoder, capsys: pytest.CaptureFixture[str]) -> None:
    with toy_runtime(backend, toy, ladder=Ladder([1, 4])) as runtime:
        report = runtime.capture()
        shown = capsys.readouterr().err
        assert "capture" in shown and "2/2" in shown and "MiB" in shown
        assert report is runtime.report and report.backend == backend
        assert [cost.bucket for cost in report.buckets] == [Bucket(4), Bucket(1)]
        assert len({cost.nodes for cost in report.buckets}) == 1 and report.buckets[0].nodes > 10
        assert all(cost.capture_ms > 0 for cost in report.buckets)
        assert report.state_bytes == runtime.state.memory_bytes()
        runtime.capture(progress=False)
        assert capsys.readouterr().err == ""


@both
def test_a_step_before_capture(backend: str, chain: Chain) -> None:
    with chain_runtime(backend, chain) as runtime:
        slot = runtime.admit([2])
        before = bits(runtime)
        for _ in range(2):
            with pytest.raises(NotCaptured, match=r"call capture\(\) first, or step\(slots, eager"):
                runtime.step([slot])
        assert differing(before, bits(runtime)) == []
        assert decode_eagerly(runtime, slot, 2) == chain.answer([2], 2)
        with pytest.raises(NotCaptured):
            runtime.step([slot])
        runtime.capture(progress=False)
        mixed = [runtime.step([slot], eager=bool(n % 2)).tokens()[0] for n in range(4)]
        assert mixed == chain.answer([2], 6)[2:]


def decode_eagerly(runtime: DecodeRuntime, slot: int, count: int) -> list[int]:
    return [runtime.step([slot], eager=True).tokens()[0] for _ in range(count)]


# --- fork, rewind, checkpoint, restore ------------------------------------------------------------


@both
def test_a_fork_goes_its_own_way(runtime: DecodeRuntime, toy: ToyDecoder) -> None:
    oracle = ToyOracle(toy)
    slot = runtime.admit([(3 * i) % VOCAB for i in range(20)])
    history = runtime.tokens_of(slot) + decode(runtime, slot, 3)
    fork = runtime.fork(slot)
    runtime.extend(fork, [5, 6])
    answers = list(zip(*(runtime.step([slot, fork]).tokens() for _ in range(8)), strict=True))
    assert list(answers[0]) == oracle.answer(history, 8)
    assert list(answers[1]) == oracle.answer([*history, 5, 6], 8)


@both
def test_a_forks_draws_are_its_own(runtime: DecodeRuntime) -> None:
    slot = runtime.admit([1, 2], temperature=2.0, seed=5)
    same, fresh = runtime.fork(slot, seed=5), runtime.fork(slot)
    answers = zip(*(runtime.step([slot, same, fresh]).tokens() for _ in range(12)), strict=True)
    one, other, third = answers
    assert one == other != third


@both
def test_a_fork_of_a_prompt_in_the_making(runtime: DecodeRuntime, toy: ToyDecoder) -> None:
    """A prefix shared by prompts that end differently."""
    prefix = [(5 * i + 1) % VOCAB for i in range(18)]
    slot = runtime.open()
    runtime.extend(slot, prefix, final=False)
    forks = [runtime.fork(slot) for _ in range(3)]
    for index, fork in enumerate(forks):
        runtime.extend(fork, [index + 1])
    with pytest.raises(SlotPrefilling):
        runtime.step([slot])
    answers = zip(*(runtime.step(forks).tokens() for _ in range(5)), strict=True)
    for index, answer in enumerate(answers):
        assert list(answer) == ToyOracle(toy).answer([*prefix, index + 1], 5)


@both
def test_rewind_and_answer_again(runtime: DecodeRuntime, toy: ToyDecoder) -> None:
    prompt = [1, 2, 3]
    slot = runtime.admit(prompt)
    answer = decode(runtime, slot, 4)
    absorbed = runtime.length_of(slot)
    assert absorbed == 6
    runtime.rewind(slot, absorbed)
    assert runtime.tokens_of(slot) == [*prompt, *answer]
    assert decode(runtime, slot, 2) == ToyOracle(toy).answer(prompt, 6)[4:]
    # The windowed layer keeps no more than its window.
    with pytest.raises(RewindTooFar):
        runtime.rewind(slot, 1)


@both
def test_rewind_where_everything_is_kept(backend: str) -> None:
    toy = ToyDecoder((None, None), device=device_of(backend))
    with captured(toy_runtime(backend, toy)) as runtime:
        prompt = [(3 * i) % VOCAB for i in range(20)]
        slot = runtime.admit(prompt, max_tokens=10)
        answer, reason = until_done(runtime, slot)
        assert reason is FinishReason.LENGTH
        for length in (24, 20, 17, 3):
            runtime.rewind(slot, length)
            assert runtime.length_of(slot) == length
            history = (prompt + answer)[: length + 1]
            assert runtime.tokens_of(slot) == history
            count = 30 - length - 1
            answer_again, reason = until_done(runtime, slot)
            assert reason is FinishReason.LENGTH and len(answer_again) == count
            assert answer_again == ToyOracle(toy).answer(history, count)
            answer = (history + answer_again)[20:]


@both
@pytest.mark.parametrize("on_host", [False, True])
def test_a_checkpoint_goes_into_any_slot_of_any_runtime(
    backend: str, toy: ToyDecoder, on_host: bool
) -> None:
    prompt = [(7 * i + 1) % VOCAB for i in range(21)]
    options: dict[str, Any] = {"temperature": 1.2, "seed": 9, "max_tokens": 20, "stop": []}
    with (
        captured(toy_runtime(backend, toy)) as runtime,
        captured(toy_runtime(backend, toy)) as other,
    ):
        slot = runtime.admit(prompt, **options)
        start = decode(runtime, slot, 5)
        kept = runtime.checkpoint(slot)
        if on_host:
            assert kept.to_host() is kept
        rest, reason = until_done(runtime, slot)
        assert len(start + rest) == 20 and reason is FinishReason.LENGTH
        again = runtime.restore(kept)
        assert until_done(runtime, again) == (rest, reason)
        other.admit([1])
        moved = other.restore(kept)
        assert other.state.slots.row_of(moved) != runtime.state.slots.row_of(slot)
        assert other.tokens_of(moved) == [*prompt, *start]
        assert until_done(other, moved) == (rest, reason)
        runtime.retire(slot)
        kept.release()
        kept.release()
        with pytest.raises(StaleSlot, match="checkpoint was released"):
            runtime.restore(kept)


@both
def test_a_checkpoint_outlives_its_slot(runtime: DecodeRuntime, toy: ToyDecoder) -> None:
    prompt = [(7 * i + 1) % VOCAB for i in range(21)]
    slot = runtime.admit(prompt)
    with runtime.checkpoint(slot) as kept:
        decode(runtime, slot, 6)
        runtime.retire(slot)
        for _ in range(3):
            runtime.retire(runtime.admit([9] * 40))
        slot = runtime.restore(kept)
        assert decode(runtime, slot, 6) == ToyOracle(toy).answer(prompt, 6)
    assert kept.released


@both
def test_a_checkpoint_of_a_finished_slot(chained: DecodeRuntime, chain: Chain) -> None:
    slot = chained.admit([2], max_tokens=2)
    until_done(chained, slot)
    with chained.checkpoint(slot) as kept:
        again = chained.restore(kept)
    result = chained.step([again])
    assert result.tokens() == [-1] and result.reasons == [FinishReason.LENGTH]
    chained.extend(again, [7])
    assert until_done(chained, again) == (chain.answer([7], 2), FinishReason.LENGTH)


@both
def test_a_released_checkpoint_without_blocks(chained: DecodeRuntime) -> None:
    kept = chained.checkpoint(chained.admit([2]))
    kept.release()
    with pytest.raises(StaleSlot, match="checkpoint was released"):
        chained.restore(kept)


@both
def test_a_checkpoint_of_another_layout(backend: str, runtime: DecodeRuntime) -> None:
    kept = runtime.checkpoint(runtime.admit([2, 3]))
    with chain_runtime(backend) as other, pytest.raises(LayoutMismatch, match="must be equal"):
        other.restore(kept)


# --- ownership and end of life --------------------------------------------------------------------


class Blocking:
    """Lets a second thread look at a runtime while it is at work."""

    def __init__(self, chain: Chain) -> None:
        self.at_work, self.go = threading.Event(), threading.Event()
        chain.before = self.wait

    def wait(self, batch: Batch) -> None:
        self.at_work.set()
        assert self.go.wait(10)


CALLS: dict[str, Callable[[DecodeRuntime, int], Any]] = {
    "step": lambda runtime, slot: runtime.step([slot]),
    "step of none": lambda runtime, slot: runtime.step([]),
    "admit": lambda runtime, slot: runtime.admit([1]),
    "open": lambda runtime, slot: runtime.open(),
    "extend": lambda runtime, slot: runtime.extend(slot, [1]),
    "retire": lambda runtime, slot: runtime.retire(slot),
    "fork": lambda runtime, slot: runtime.fork(slot),
    "rewind": lambda runtime, slot: runtime.rewind(slot, 0),
    "checkpoint": lambda runtime, slot: runtime.checkpoint(slot),
    "tokens_of": lambda runtime, slot: runtime.tokens_of(slot),
    "capture": lambda runtime, slot: runtime.capture(progress=False),
}


@both
@pytest.mark.parametrize("work", ["admit", "capture", "eager step"])
def test_a_second_thread_is_told_so(backend: str, chain: Chain, work: str) -> None:
    with chain_runtime(backend, chain) as runtime:
        slot = runtime.admit([2])
        runtime.capture(progress=False)
        kept = runtime.checkpoint(slot)
        blocking = Blocking(chain)
        jobs: dict[str, Callable[[], Any]] = {
            "admit": lambda: runtime.admit([3, 4]),
            "capture": lambda: runtime.capture(progress=False),
            "eager step": lambda: runtime.step([slot], eager=True).tokens(),
        }
        failed: list[BaseException] = []

        def owner() -> None:
            try:
                jobs[work]()
            except BaseException as error:  # shown below
                failed.append(error)

        thread = threading.Thread(target=owner)
        thread.start()
        try:
            assert blocking.at_work.wait(10)
            for call in [*CALLS.values(), lambda r, s: r.restore(kept), lambda r, s: r.close()]:
                with pytest.raises(RuntimeBusy, match="belongs to one thread at a time"):
                    call(runtime, slot)
        finally:
            blocking.go.set()
            thread.join()
        assert failed == []
        # Then it is anyone's again.
        count = 2 if work == "eager step" else 1
        assert runtime.step([slot]).tokens() == chain.answer([2], count)[-1:]


@both
def test_a_runtime_may_change_hands(chained: DecodeRuntime, chain: Chain) -> None:
    slot = chained.admit([2])
    given: list[int] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: given.extend(decode(chained, slot, 2)))
        thread.start()
        thread.join()
    assert given == chain.answer([2], 6)


@both
def test_after_close_every_call_says_so(backend: str, chained: DecodeRuntime) -> None:
    slot = chained.admit([2])
    kept = chained.checkpoint(slot)
    chained.step([slot]).tokens()
    chained.close()
    chained.close()
    closed = {name: call for name, call in CALLS.items() if name != "step of none"}
    for call in [*closed.values(), lambda r, s: r.restore(kept)]:
        with pytest.raises(RuntimeClosed, match="make a new one"):
            call(chained, slot)
    with chain_runtime(backend) as other:
        assert other.step([other.admit([2])], eager=True).tokens() != [-1]


@both
def test_a_context_manager_closes_whatever_happens(backend: str) -> None:
    with pytest.raises(ZeroDivisionError), captured(chain_runtime(backend)) as runtime:
        slot = runtime.admit([2])
        raise ZeroDivisionError
    with pytest.raises(RuntimeClosed):
        runtime.step([slot])
    assert all(bucket.captured is None for bucket in runtime._buckets.values())


@both
def test_close_waits_for_steps_and_frees_captures(runtime: DecodeRuntime) -> None:
    slot = runtime.admit([2])
    results = [runtime.step([slot]), runtime.step([slot])]
    captures = [bucket.captured for bucket in runtime._buckets.values()]
    assert all(captures)
    runtime.close()
    assert runtime._mailbox.completed() == 2
    assert all(not capture.external for capture in captures if capture is not None)
    assert [result.tokens()[0] >= 0 for result in results] == [True, True]


@both
def test_runtimes_side_by_side(backend: str, toy: ToyDecoder) -> None:
    oracle = ToyOracle(toy)
    runtimes = [captured(toy_runtime(backend, toy)) for _ in range(3)]
    slots = [runtime.admit([index + 1]) for index, runtime in enumerate(runtimes)]
    given: list[list[int]] = [[], [], []]
    for turn in range(6):
        if turn == 3:
            runtimes[1].close()
        for index in (0, 2, 1):
            if index != 1 or turn < 3:
                given[index] += runtimes[index].step([slots[index]]).tokens()
    for index, answer in enumerate(given):
        assert answer == oracle.answer([index + 1], 3 if index == 1 else 6)
    for runtime in runtimes:
        runtime.close()


@both
def test_a_failed_prefill_spoils_its_slot_only(backend: str, chain: Chain) -> None:
    with captured(chain_runtime(backend, chain, prefill_chunk=2)) as runtime:
        other, slot = runtime.admit([3]), runtime.admit([2])
        fail_at = [2]

        def before(batch: Batch) -> None:
            fail_at[0] -= 1
            if not fail_at[0]:
                raise ValueError("a chunk in the middle")

        chain.before = before
        kept = books(runtime)
        with pytest.raises(ValueError, match="a chunk in the middle"):
            runtime.admit([1, 2, 3, 4, 5, 6])
        assert runtime.state.slots.live == kept["live"]
        fail_at[0] = 2
        with pytest.raises(ValueError, match="a chunk in the middle"):
            runtime.extend(slot, [1, 2, 3, 4, 5, 6])
        chain.before = lambda _: None
        with pytest.raises(PrefillFailed, match="retire it"):
            runtime.step([slot])
        for call in ("extend", "fork", "rewind", "checkpoint"):
            arguments: list[Any] = {"extend": [[1]], "rewind": [0]}.get(call, [])
            with pytest.raises(PrefillFailed, match="retire it"):
                getattr(runtime, call)(slot, *arguments)
        runtime.retire(slot)
        fresh = [runtime.admit([7, 8]) for _ in range(3)]
        tokens = runtime.step([other, *fresh]).tokens()
        assert tokens == chain.answer([3], 1) + chain.answer([8], 1) * 3


# --- garbage --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("ahead", [False, True])
def test_steps_leave_nothing_for_the_collector(backend: str, toy: ToyDecoder, ahead: bool) -> None:
    with captured(toy_runtime(backend, toy, max_context=512, max_requests=2)) as runtime:
        slots = [runtime.admit([1, 2]), runtime.admit([3])]

        def run(count: int) -> None:
            last = runtime.step(slots)
            for _ in range(count):
                if not ahead:
                    last.tokens()
                result = runtime.step(slots)
                last.tokens()
                last = result
            last.tokens()

        run(20)
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            run(300)
            grown = len(gc.get_objects()) - before
            found = gc.collect()
        finally:
            gc.enable()
        assert found == 0
        assert grown < 30  # a leak is one a step at least; the interpreter itself makes a few


@both
def test_a_changed_batch_leaves_nothing_either(chained: DecodeRuntime) -> None:
    slots = [chained.admit([token]) for token in range(4)]

    def run() -> None:
        for turn in range(12):
            asked = slots[: 1 + turn % 4]
            chained.step(asked).tokens()

    run()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(10):
            run()
        grown = len(gc.get_objects()) - before
        found = gc.collect()
    finally:
        gc.enable()
    assert found == 0
    assert grown < 12  # of 120 steps


# --- addresses ------------------------------------------------------------------------------------


class Linear(nn.Module):
    """A model as a module: its tensors are known by name."""

    schemas = ()
    vocab_size = VOCAB

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.body = nn.Linear(8, VOCAB, device=device)
        self.register_buffer("table", torch.randn(VOCAB, 8, device=device))
        # Made here, as making it draws random numbers; in a list, so as not to be a part.
        self.spare = [nn.Linear(8, VOCAB, device=device)]
        self.during: Callable[[], None] = lambda: None

    def prefill(self, batch: Batch) -> None:
        return None

    def decode(self, batch: Batch) -> Tensor:
        self.during()
        logits: Tensor = self.body(self.table[batch.tokens.long()])
        return logits


def new_data(model: Linear) -> None:
    model.body.weight.data = model.body.weight.data.clone()


def resized(model: Linear) -> None:
    model.table.resize_(VOCAB + 40, 8)


def smaller(model: Linear) -> None:
    model.body.weight.data = model.body.weight.data[:-1]


def rebound(model: Linear) -> None:
    model.body.weight = nn.Parameter(model.body.weight.detach().clone())


def buffer_rebound(model: Linear) -> None:
    model.table = model.table.clone()


def layer_replaced(model: Linear) -> None:
    model.body = model.spare[0]


def gone(model: Linear) -> None:
    model.body.bias = None


MOVES = {
    new_data: r"body\.weight has moved since capture: was 1952 bytes at 0x[0-9a-f]+, is 1952 bytes",
    resized: r"table has moved since capture: was 1952 bytes at 0x[0-9a-f]+, is 3232 bytes",
    smaller: r"body\.weight has moved since capture: was 1952 bytes at 0x[0-9a-f]+, is 1920 bytes",
    rebound: r"body\.weight has moved since capture",
    buffer_rebound: r"table has moved since capture",
    layer_replaced: r"body\.(weight|bias) has moved since capture",
    gone: r"body\.bias is gone since capture",
}
by_move = pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)


def module_runtime(backend: str, **options: Any) -> tuple[Linear, DecodeRuntime]:
    model = Linear(device_of(backend))
    settings: dict[str, Any] = {"max_requests": 3, "max_context": 32, "backend": backend}
    return model, DecodeRuntime(model, **{**settings, **options})


@both
@by_move
def test_a_tensor_that_moved_is_found_at_admission(
    backend: str, move: Callable[[Linear], None]
) -> None:
    model, runtime = module_runtime(backend)
    with runtime:
        slot = runtime.admit([1])  # before capture nothing is held
        runtime.capture(progress=False)
        kept = runtime.checkpoint(slot)
        move(model)
        before, owned = bits(runtime), books(runtime)
        advice = MOVES[move] + r".*call capture\(\) again"
        for call in (
            lambda: runtime.admit([1, 2]),
            lambda: runtime.open(),
            lambda: runtime.fork(slot),
            lambda: runtime.restore(kept),
        ):
            with pytest.raises(PointerMoved, match=advice):
                call()
        assert differing(before, bits(runtime)) == [] and books(runtime) == owned


@both
@by_move
def test_a_tensor_that_moved_is_found_before_every_replay_in_debug_mode(
    backend: str, move: Callable[[Linear], None]
) -> None:
    model, runtime = module_runtime(backend, debug=True)
    with runtime:
        slots = [runtime.admit([1]), runtime.admit([2])]
        runtime.capture(progress=False)
        runtime.step(slots).tokens()
        runtime.step(slots).tokens()
        move(model)
        before = bits(runtime)
        for asked in (slots, slots[:1], slots):
            with pytest.raises(PointerMoved, match=MOVES[move]):
                runtime.step(asked)
        assert differing(before, bits(runtime)) == []


@both
@by_move
def test_a_tensor_that_moves_during_capture(backend: str, move: Callable[[Linear], None]) -> None:
    model, runtime = module_runtime(backend)
    with runtime:
        slot = runtime.admit([1])
        before = bits(runtime)
        runs = [0]

        def during() -> None:
            runs[0] += 1
            if runs[0] == 3 * (runtime._backend.rehearsals + 1):  # the last run of the last bucket
                move(model)

        model.during = during
        with pytest.raises((PointerMoved, CaptureError)) as caught:
            runtime.capture(progress=False)
        # A move that also breaks the step is told as what broke it.
        assert isinstance(caught.value, PointerMoved) or move in (smaller, resized)
        assert runtime.report is None
        assert differing(before, bits(runtime)) == []
        with pytest.raises(NotCaptured):
            runtime.step([slot])


@both
def test_capture_again_takes_the_tensors_where_they_are(backend: str) -> None:
    model, runtime = module_runtime(backend, debug=True)
    with runtime:
        slot = runtime.admit([1])
        runtime.capture(progress=False)
        runtime.step([slot]).tokens()
        layer_replaced(model)
        with pytest.raises(PointerMoved):
            runtime.step([slot])
        token = runtime.tokens_of(slot)[-1]
        runtime.capture(progress=False)
        expected = int(model.body(model.table[token]).argmax())
        assert runtime.step([slot]).tokens() == [expected]
        runtime.admit([5])


@both
def test_what_a_function_holds_is_found_too(backend: str, toy: ToyDecoder) -> None:
    """A bare function has no named tensors: what its step was seen to read is held."""
    with captured(toy_runtime(backend, toy, debug=True)) as runtime:
        slot = runtime.admit([1])
        toy.head.data = toy.head.data.clone()
        with pytest.raises(PointerMoved, match=r"a tensor of shape \(61, 64\), torch.float32 has"):
            runtime.admit([1])
        with pytest.raises(PointerMoved):
            runtime.step([slot])


@both
@by_move
def test_a_module_wrapped_as_a_function_is_known_by_name(
    backend: str, move: Callable[[Linear], None]
) -> None:
    module = Linear(device_of(backend))
    module.forward = module.decode  # type: ignore[method-assign]
    model = StepFunction(module, VOCAB, device=module.device)
    with captured(DecodeRuntime(model, max_requests=1, max_context=16, backend=backend)) as runtime:
        move(module)
        with pytest.raises(PointerMoved, match=MOVES[move]):
            runtime.admit([1])


@both
def test_writing_in_place_moves_nothing(backend: str) -> None:
    model, runtime = module_runtime(backend, debug=True)
    with runtime:
        runtime.capture(progress=False)
        with torch.no_grad():
            model.body.weight.zero_()
            model.body.bias.zero_()
            model.body.bias[33] = 1
        slot = runtime.admit([1])
        assert decode(runtime, slot, 2) == [33, 33]


# --- a device that is slow, and one that is lost --------------------------------------------------


class HeldBackend(TapeBackend):
    """A tape whose replays wait until they are let go, as kernels queue on a stream."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.queue: list[Callable[[], None]] = []
        self.fault: str | None = None
        self.drops = False
        self.holds = False

    def capture(self, step: Callable[[], None]) -> TapeStep:
        made = super().capture(step)
        run = made.replay

        def replay() -> None:
            self._raise()
            if self.holds:
                self.queue.append(run)
            elif not self.drops:
                run()

        made.replay = replay  # type: ignore[method-assign]
        return made

    def let_go(self) -> None:
        self.holds = False
        while self.queue:
            self.queue[0]()
            del self.queue[0]

    def idle(self) -> bool:
        self._raise()
        return not self.queue

    def synchronize(self) -> None:
        self._raise()
        self.let_go()

    def _raise(self) -> None:
        if self.fault is not None:
            raise DeviceLost(self.fault)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldBackend:
    machine = HeldBackend()
    monkeypatch.setattr("capture.runtime.choose_backend", lambda *_: machine)
    monkeypatch.setattr("capture.runtime.CLOSE_TIMEOUT_S", 0.2)
    return machine


def test_a_timeout_then_success(held: HeldBackend) -> None:
    chain = Chain()
    with captured(chain_runtime("tape", chain)) as runtime:
        slot = runtime.admit([2])
        assert decode(runtime, slot, 2) == chain.answer([2], 2)
        held.holds = True
        results = [runtime.step([slot]), runtime.step([slot])]
        for result in (*results, results[0]):
            start = time.perf_counter()
            with pytest.raises(TimeoutError, match=r"step \d has not completed after 0.02 s"):
                result.tokens(timeout=0.02)
            assert 0.02 <= time.perf_counter() - start < 0.5
            assert not result.is_read
        with pytest.raises(TimeoutError):
            results[0].tokens(timeout=0)
        threading.Timer(0.05, held.let_go).start()
        assert results[1].tokens(timeout=5) == chain.answer([2], 4)[3:]
        assert results[0].tokens(timeout=0) == chain.answer([2], 4)[2:3]
        assert decode(runtime, slot, 1) == chain.answer([2], 5)[4:]


def let_go_soon(held: HeldBackend) -> threading.Event:
    """Let the held steps run in a moment; the event is set just before."""
    released = threading.Event()

    def let_go() -> None:
        released.set()
        held.let_go()

    threading.Timer(0.05, let_go).start()
    return released


def test_host_calls_wait_for_steps_that_are_on_their_way(held: HeldBackend) -> None:
    chain = Chain()
    with captured(chain_runtime("tape", chain)) as runtime:
        slot = runtime.admit([2])
        for call in (
            lambda: runtime.tokens_of(slot),
            lambda: runtime.extend(slot, [7]),
            lambda: runtime.fork(slot),
            lambda: runtime.checkpoint(slot),
            lambda: runtime.rewind(slot, runtime.length_of(slot)),
        ):
            held.holds = True
            result = runtime.step([slot])
            released = let_go_soon(held)
            call()
            assert released.is_set()
            assert result.tokens()[0] >= 0


def test_a_retired_row_rests_until_its_steps_are_done(held: HeldBackend) -> None:
    with captured(chain_runtime("tape", max_requests=2, ladder=Ladder([1]))) as runtime:
        first, second = runtime.admit([2]), runtime.admit([3])
        held.holds = True
        runtime.step([first])
        runtime.retire(first)
        released = let_go_soon(held)
        third = runtime.admit([4])
        assert released.is_set()
        rows = [runtime.state.slots.row_of(slot) for slot in (second, third)]
        assert rows == [1, 0]


def dry(machine: HeldBackend) -> None:
    machine.drops = True


def fault(machine: HeldBackend) -> None:
    machine.holds = True
    machine.fault = "CUDA reported CUDA_ERROR_ILLEGAL_ADDRESS"


def lose(call: Callable[[], Any]) -> DeviceLost:
    start = time.perf_counter()
    with pytest.raises(DeviceLost) as caught:
        call()
    assert time.perf_counter() - start < 2
    return caught.value


REST = [name for name in CALLS if name != "step of none"]


@pytest.mark.parametrize("how", [dry, fault], ids=lambda how: how.__name__)
@pytest.mark.parametrize("found_by", ["tokens", "retire and admit", "tokens_of", "capture"])
def test_a_lost_device_is_named_and_never_a_hang(
    held: HeldBackend, how: Callable[[HeldBackend], None], found_by: str
) -> None:
    runtime = captured(chain_runtime("tape", max_requests=1))
    slot = runtime.admit([2])
    kept = runtime.checkpoint(slot)
    runtime.step([slot]).tokens()
    held.holds = True
    if how is dry:
        how(held)
        held.holds = False
        result = runtime.step([slot])
    else:
        result = runtime.step([slot])
        how(held)
    finders: dict[str, Callable[[], Any]] = {
        "tokens": result.tokens,
        "retire and admit": lambda: (runtime.retire(slot), runtime.admit([1])),
        "tokens_of": lambda: runtime.tokens_of(slot),
        "capture": lambda: runtime.capture(progress=False),
    }
    error = lose(finders[found_by])
    expected = "step 2 never came" if how is dry else "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert expected in str(error)
    # From now on every call says the same, the steady step of the same list too.
    held.fault, held.drops = None, False
    for name in REST:
        error = lose(lambda name=name: CALLS[name](runtime, slot))
        assert expected in str(error)
    lose(lambda: runtime.step([slot], eager=True))
    lose(lambda: runtime.restore(kept))
    held.fault = "CUDA reported CUDA_ERROR_ILLEGAL_ADDRESS" if how is fault else None
    lose(lambda: result.tokens(timeout=1))
    start = time.perf_counter()
    runtime.close()
    runtime.close()
    assert time.perf_counter() - start < 2
    with pytest.raises(RuntimeClosed):
        runtime.admit([1])


def test_a_device_lost_at_a_launch(held: HeldBackend) -> None:
    runtime = captured(chain_runtime("tape"))
    slot = runtime.admit([2])
    good = runtime.step([slot])
    good.tokens()
    held.fault = "CUDA reported CUDA_ERROR_LAUNCH_FAILED"
    lose(lambda: runtime.step([slot]))
    held.fault = None
    for name in REST:
        error = lose(lambda name=name: CALLS[name](runtime, slot))
        assert "CUDA_ERROR_LAUNCH_FAILED" in str(error)
    assert good.tokens() == Chain().answer([2], 1)
    runtime.close()


def test_a_device_lost_at_a_copy(held: HeldBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = captured(chain_runtime("tape"))
    slot = runtime.admit([2])

    def send(count: int) -> None:
        raise DeviceLost("CUDA reported CUDA_ERROR_UNKNOWN")

    for source in runtime._inputs._sources:
        monkeypatch.setattr(source, "send", send)
    for _ in range(2):
        lose(lambda: runtime.step([slot]))
    lose(lambda: runtime.admit([2]))
    runtime.close()


@both
def test_a_failure_that_torch_reports_is_a_lost_device(backend: str, chain: Chain) -> None:
    runtime = captured(chain_runtime(backend, chain))
    slot = runtime.admit([2])

    def before(batch: Batch) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    chain.before = before
    with pytest.raises(DeviceLost, match=r"unspecified launch failure.*close this runtime"):
        runtime.admit([3, 4])
    chain.before = lambda _: None
    for name in REST:
        with pytest.raises(DeviceLost, match="unspecified launch failure"):
            CALLS[name](runtime, slot)
    runtime.close()


def test_close_of_a_device_that_never_answers_ends(held: HeldBackend) -> None:
    runtime = captured(chain_runtime("tape"))
    slot = runtime.admit([2])
    held.holds = True
    runtime.step([slot])
    start = time.perf_counter()
    runtime.close()
    assert time.perf_counter() - start < 2


@both
def test_a_request_that_can_not_be(chained: DecodeRuntime) -> None:
    slot = chained.admit([2, 3])
    with pytest.raises(InvalidRequest, match="has absorbed 1"):
        chained.rewind(slot, 2)
