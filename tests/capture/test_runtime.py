"""Requests are admitted in parts or whole, stepped together and retired; capture and its report."""

from __future__ import annotations

from typing import Any

import pytest

from capture import Bucket, DecodeRuntime, Ladder
from capture.errors import (
    NotCaptured,
)
from graphcache.errors import (
    InvalidRequest,
    SlotPrefilling,
    StaleSlot,
)
from tests.capture.support import (
    Chain,
    ToyOracle,
    bits,
    chain_runtime,
    decode,
    differing,
    toy_runtime,
)
from tests.toy import BACKENDS, VOCAB, ToyDecoder

both = pytest.mark.parametrize("backend", BACKENDS)


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


@both
def test_a_request_that_can_not_be(chained: DecodeRuntime) -> None:
    slot = chained.admit([2, 3])
    with pytest.raises(InvalidRequest, match="has absorbed 1"):
        chained.rewind(slot, 2)
