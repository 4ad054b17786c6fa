"""Forks, rewinds and checkpoints of requests, against answers from the whole history."""

from __future__ import annotations

from typing import Any

import pytest

from capture import DecodeRuntime
from graphcache import FinishReason
from graphcache.errors import (
    LayoutMismatch,
    RewindTooFar,
    SlotPrefilling,
    StaleSlot,
)
from tests.capture.support import (
    Chain,
    ToyOracle,
    captured,
    chain_runtime,
    decode,
    toy_runtime,
    until_done,
)
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

both = pytest.mark.parametrize("backend", BACKENDS)


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
