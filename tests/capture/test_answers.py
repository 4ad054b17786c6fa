"""How an answer ends, and from what its tokens are drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from capture import DecodeRuntime
from graphcache import Batch, FinishReason
from graphcache.models import StepFunction
from tests.capture.support import (
    BIAS,
    Chain,
    biased,
    captured,
    chain_runtime,
    decode,
    until_done,
)
from tests.toy import BACKENDS, VOCAB, device_of

both = pytest.mark.parametrize("backend", BACKENDS)


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
