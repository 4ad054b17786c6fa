"""What a step gives, when it can be read, and by whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from capture import Bucket, DecodeRuntime, Ladder
from capture.errors import (
    BatchTooLarge,
    NotCaptured,
    StepsOutstanding,
)
from capture.ladder import RefusalReason
from graphcache import FinishReason
from tests.capture.support import (
    Chain,
    ToyOracle,
    bits,
    captured,
    chain_runtime,
    decode,
    differing,
    toy_runtime,
)
from tests.toy import BACKENDS, VOCAB, ToyDecoder

both = pytest.mark.parametrize("backend", BACKENDS)


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
