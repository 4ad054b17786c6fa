"""One contract, two backends: what a capture and its replays promise, asked of both."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from capture import Bucket, CaptureError, DecodeRuntime, Ladder
from capture.errors import NotCaptured
from graphcache import Batch, KVLayerSchema
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
    everything,
    sync,
    toy_runtime,
)
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

SIZES = (1, 2, 5)
SLOTS = 5


def contract_runtime(backend: str, toy: ToyDecoder, **options: Any) -> DecodeRuntime:
    return toy_runtime(
        backend, toy, max_requests=SLOTS, ladder=Ladder(SIZES), keep_logits=True, **options
    )


def fill(runtime: DecodeRuntime, count: int, seed: int = 0) -> list[int]:
    """Admit `count` requests of different lengths and step each a few times, eagerly."""
    chooser = random.Random(seed)
    slots = []
    for index in range(count):
        prompt = [chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 20))]
        slots.append(runtime.admit(prompt, temperature=0.5 * (index % 2), seed=index))
        runtime.step([slots[-1]], eager=True).tokens()
    return slots


def poison_scratch(runtime: DecodeRuntime) -> None:
    """Whatever padding reads is not a number, and integers there are no row, token or block."""
    with runtime._backend.context():
        runtime.state.pool.arena[-1].fill_(0xFF)
        assert runtime.state.blocks is not None
        runtime.state.blocks.pool.arena[-1].fill_(0xFF)
        runtime.state.len[-1] = 0
        runtime.state.done[-1] = 0
    sync(runtime)


# --- capture leaves no trace ----------------------------------------------------------------------


def test_capture_leaves_all_state_untouched_bit_for_bit(backend: str) -> None:
    with contract_runtime(backend, ToyDecoder(device=device_of(backend))) as runtime:
        fill(runtime, SLOTS)
        # What no one has written yet must stay as it is too.
        blocks = runtime.state.blocks
        assert blocks is not None
        with runtime._backend.context():
            for block in blocks._free:
                blocks.pool.arena[block].fill_(0xAB)
        before, kept = everything(runtime), books(runtime)
        report = runtime.capture(progress=False)
        assert differing(before, everything(runtime)) == []
        assert books(runtime) == kept
        assert [cost.bucket.rows for cost in report.buckets] == [5, 2, 1]


def test_capture_with_results_unread_and_requests_in_mid_answer(backend: str) -> None:
    toy = ToyDecoder(device=device_of(backend))
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    expected = [ToyOracle(toy).answer(prompt, 6) for prompt in prompts]
    with captured(contract_runtime(backend, toy)) as runtime:
        slots = [runtime.admit(prompt) for prompt in prompts]
        got = [runtime.step(slots), runtime.step(slots)]
        runtime.capture(progress=False)
        tokens = [result.tokens() for result in got]
        runtime.capture(progress=False)
        tokens += [runtime.step(slots).tokens() for _ in range(4)]
    assert [list(row) for row in zip(*tokens, strict=True)] == expected


def test_a_step_that_writes_state_of_its_own(backend: str) -> None:
    """A user's tensors, written with torch operations, are as before capture too."""
    device = device_of(backend)
    counts = torch.zeros(SLOTS + 1, dtype=torch.int64, device=device)
    last = torch.full((4, VOCAB), float("nan"), device=device)
    chain = Chain(device)

    def step(batch: Batch) -> torch.Tensor:
        row = torch.where(batch.slots < 0, SLOTS, batch.slots).long()
        counts.index_add_(0, row, (batch.slots >= 0).long())
        logits = chain(batch)
        last[: logits.shape[0]].copy_(logits)
        last.view(-1)[0].add_(1)
        return logits

    model = StepFunction(step, VOCAB, device=device)
    with DecodeRuntime(
        model, max_requests=SLOTS, max_context=32, backend=backend, ladder=Ladder([1, 4])
    ) as runtime:
        before = [counts.cpu().clone(), last.view(torch.int32).cpu().clone()]
        runtime.capture(progress=False)
        sync(runtime)
        assert torch.equal(before[0], counts.cpu())
        assert torch.equal(before[1], last.view(torch.int32).cpu())
        slots = [runtime.admit([token]) for token in (1, 2, 3)]
        for asked in (slots, slots[:1], slots):
            runtime.step(asked).tokens()
        sync(runtime)
        assert counts.tolist()[:4] == [3, 2, 2, 0]


def test_capture_at_lengths_nobody_has(backend: str) -> None:
    """With every slot free, with one at length 0, and at the longest: the same capture."""
    toy = ToyDecoder(device=device_of(backend))
    oracle = ToyOracle(toy)
    long = [(7 * i) % VOCAB for i in range(62)]
    for prompts in ([], [[5]], [long]):
        with contract_runtime(backend, toy) as runtime:
            slots = [runtime.admit(prompt) for prompt in prompts]
            runtime.capture(progress=False)
            late = runtime.admit([8, 9])
            assert decode(runtime, late, 2) == oracle.answer([8, 9], 2)
            for slot, prompt in zip(slots, prompts, strict=True):
                assert decode(runtime, slot, 1) == oracle.answer(prompt, 1)


# --- replay is eager, bit for bit -----------------------------------------------------------------


class Pair:
    """Two runtimes of one model, given the same calls: one replays, the other runs Python."""

    def __init__(self, backend: str) -> None:
        toy = ToyDecoder(device=device_of(backend))
        self.replays = captured(contract_runtime(backend, toy))
        self.eager = contract_runtime(backend, toy)
        self.slots: list[int] = []

    def both(self, call: Callable[[DecodeRuntime], Any]) -> Any:
        one, other = call(self.replays), call(self.eager)
        assert one == other
        return one

    def step(self, asked: list[int]) -> list[int]:
        one = self.replays.step(asked)
        other = self.eager.step(asked, eager=True)
        assert one.tokens() == other.tokens()
        assert one.reasons == other.reasons
        logits = [result.logits.cpu().view(torch.int32) for result in (one, other)]
        live = [index for index, token in enumerate(one.tokens()) if token >= 0]
        assert torch.equal(logits[0][live], logits[1][live])
        return one.tokens()

    def check(self) -> None:
        assert differing(bits(self.replays), bits(self.eager)) == []
        assert books(self.replays) == books(self.eager)


@pytest.fixture
def pair(backend: str) -> Iterator[Pair]:
    made = Pair(backend)
    yield made
    made.replays.close()
    made.eager.close()


@pytest.mark.parametrize("seed", range(10))
def test_replay_equals_eager_over_random_admissions(pair: Pair, seed: int) -> None:
    chooser = random.Random(seed)
    for runtime in (pair.replays, pair.eager):
        poison_scratch(runtime)
    used = set()
    for turn in range(60):
        kind = chooser.choice(
            ["admit", "admit", "retire", "fork", "rewind", "extend", "checkpoint"]
        )
        if kind == "admit" and len(pair.slots) < SLOTS:
            prompt = [chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 24))]
            options: dict[str, Any] = {
                "seed": turn,
                "temperature": chooser.choice([0.0, 0.9]),
                "top_k": chooser.choice([0, 3]),
                "top_p": chooser.choice([1.0, 0.8]),
                "max_tokens": chooser.choice([None, 3, 8]),
                "stop": [7, 11],
            }
            pair.slots.append(pair.both(lambda r, p=prompt, o=options: r.admit(p, **o)))
        elif kind == "fork" and 0 < len(pair.slots) < SLOTS:
            source = chooser.choice(pair.slots)
            pair.slots.append(pair.both(lambda r, s=source, t=turn: r.fork(s, seed=t)))
        elif kind == "checkpoint" and 0 < len(pair.slots) < SLOTS:
            source = chooser.choice(pair.slots)

            def there_and_back(runtime: DecodeRuntime, slot: int = source) -> int:
                with runtime.checkpoint(slot) as taken:
                    return runtime.restore(taken)

            pair.slots.append(pair.both(there_and_back))
        elif kind == "retire" and len(pair.slots) > 1:
            gone = pair.slots.pop(chooser.randrange(len(pair.slots)))
            pair.both(lambda r, s=gone: r.retire(s))
        elif kind == "rewind" and pair.slots:
            slot = chooser.choice(pair.slots)
            length = pair.both(lambda r, s=slot: r.length_of(s))
            pair.both(lambda r, s=slot, n=length: r.rewind(s, n))
        elif kind == "extend" and pair.slots:
            slot = chooser.choice(pair.slots)
            if pair.both(lambda r, s=slot: len(r.tokens_of(s))) < 40:
                more = [chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 9))]
                pair.both(lambda r, s=slot, m=more: r.extend(s, m))
        # The buckets come in any order, and rows of a batch in any other.
        for _ in range(chooser.randint(0, 3)):
            asked = chooser.sample(pair.slots, chooser.randint(0, len(pair.slots)))
            if asked:
                used.add(pair.replays.ladder.bucket_for(len(asked)))
                pair.step(asked)
    pair.check()
    assert used == {Bucket(1), Bucket(2), Bucket(5)}


def test_buckets_in_shuffled_order_with_outputs_held(backend: str) -> None:
    """Captures share memory: no bucket's replay may disturb what another has given."""
    toy = ToyDecoder(device=device_of(backend))
    oracle = ToyOracle(toy)
    chooser = random.Random(3)
    prompts = [[index + 1, 2 * index + 1] for index in range(SLOTS)]
    with captured(contract_runtime(backend, toy)) as runtime:
        slots = [runtime.admit(prompt) for prompt in prompts]
        given: dict[int, list[int]] = {slot: [] for slot in slots}
        held = []
        for size in [5, 1, 2, 1, 5, 2, 2, 5, 1, 5] * 2:
            asked = chooser.sample(slots, size)
            held.append((asked, runtime.step(asked)))
            if len(held) > 1:
                held[-2][1].tokens()
        for asked, result in held:
            for slot, token in zip(asked, result.tokens(), strict=True):
                given[slot].append(token)
        for slot, prompt in zip(slots, prompts, strict=True):
            assert given[slot] == oracle.answer(prompt, len(given[slot]))


def test_padding_rows_touch_nothing(backend: str) -> None:
    """Three of five live slots step in a bucket of five: only they change."""
    with captured(contract_runtime(backend, ToyDecoder(device=device_of(backend)))) as runtime:
        slots = fill(runtime, SLOTS)
        poison_scratch(runtime)
        before = bits(runtime)
        asked = [slots[4], slots[0], slots[2]]
        tokens = runtime.step(asked).tokens()
        after = bits(runtime)
        assert all(0 <= token < VOCAB for token in tokens)
        assert torch.equal(before["table"], after["table"])
        rows = [runtime.state.slots.row_of(slot) for slot in slots]
        changed = [
            slot
            for slot, row in zip(slots, rows, strict=True)
            if not torch.equal(before["arena"][row], after["arena"][row])
        ]
        assert changed == [slots[0], slots[2], slots[4]]
        blocks = runtime.state.blocks
        assert blocks is not None
        for slot, row in zip(slots, rows, strict=True):
            for block in blocks.blocks_of(row):
                same = torch.equal(before["blocks"][block], after["blocks"][block])
                assert same or slot in asked


def test_steady_steps_send_nothing_and_a_changed_batch_one_copy(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with captured(contract_runtime(backend, ToyDecoder(device=device_of(backend)))) as runtime:
        slots = [runtime.admit([token]) for token in (1, 2, 3)]
        sent: list[int] = []
        for source in runtime._inputs._sources:
            send = source.send
            monkeypatch.setattr(source, "send", lambda n, s=send: (sent.append(n), s(n)))
        uploads: list[Any] = []
        copy = runtime.state._uploads.copy
        monkeypatch.setattr(
            runtime.state._uploads, "copy", lambda *a: (uploads.append(a), copy(*a))
        )
        for _ in range(4):
            runtime.step(slots).tokens()
        assert sent == [5]
        runtime.step(list(slots)).tokens()
        assert sent == [5]
        runtime.step(slots[:2]).tokens()
        assert sent == [5, 2]
        runtime.step(slots[1::-1]).tokens()
        assert sent == [5, 2, 2]
        assert uploads == []


# --- captures that fail ---------------------------------------------------------------------------


class Failing(Chain):
    """Fails at its k-th run, in a way of its choosing."""

    def __init__(self, backend: str, k: int, how: Callable[[Batch], Any]) -> None:
        super().__init__(device_of(backend))
        self.k = k
        self.how = how

    def __call__(self, batch: Batch) -> torch.Tensor:
        if self.runs + 1 == self.k:
            self.runs += 1
            self.how(batch)
        return super().__call__(batch)


def raises(batch: Batch) -> None:
    raise ValueError("the k-th run")


def waits(batch: Batch) -> None:
    batch.tokens.sum().item()


def draws(batch: Batch) -> None:
    torch.rand(2, device=batch.tokens.device)


def exits(batch: Batch) -> None:
    raise KeyboardInterrupt


def check_usable(runtime: DecodeRuntime, chain: Chain, slot: int, given: list[int]) -> None:
    """Eager steps, stream and the next capture work, and the request goes on undisturbed."""
    if runtime.device.type == "cuda":
        with runtime._backend.context():
            assert not torch.cuda.is_current_stream_capturing()
            assert (torch.ones(3, device=runtime.device) * 2).sum().item() == 6
        runtime._backend.synchronize()
    assert all(bucket.captured is None for bucket in runtime._buckets.values())
    with pytest.raises(NotCaptured):
        runtime.step([slot])
    given.append(runtime.step([slot], eager=True).tokens()[0])
    chain.k = -1
    report = runtime.capture(progress=False)
    assert len(report.buckets) == len(runtime.ladder.buckets)
    given.append(runtime.step([slot]).tokens()[0])


BUCKETS = 3


@pytest.mark.parametrize("how", [raises, waits, draws, exits], ids=lambda how: how.__name__)
@pytest.mark.parametrize("bucket", range(BUCKETS))
@pytest.mark.parametrize("phase", ["first rehearsal", "last rehearsal", "capture"])
def test_a_capture_that_fails(
    backend: str, phase: str, bucket: int, how: Callable[[Batch], Any]
) -> None:
    """Whichever run it is that fails; a fault that only the capture meets included."""
    chain = Failing(backend, -1, how)
    with chain_runtime(backend, chain, ladder=Ladder([1, 2, 4])) as runtime:
        slot = runtime.admit([5, 9])
        given = [runtime.step([slot], eager=True).tokens()[0]]
        rehearsals = runtime._backend.rehearsals
        within = {"first rehearsal": 1, "last rehearsal": rehearsals, "capture": rehearsals + 1}
        chain.k = chain.runs + bucket * (rehearsals + 1) + within[phase]
        before, kept = everything(runtime), books(runtime)
        expected = KeyboardInterrupt if how is exits else CaptureError
        with pytest.raises(expected) as caught:
            runtime.capture(progress=False)
        assert chain.runs == chain.k
        if isinstance(caught.value, CaptureError):
            source = caught.value.source
            assert source is not None
            assert (source.file, source.line) == (__file__, how.__code__.co_firstlineno + 1)
        assert differing(before, everything(runtime)) == []
        assert books(runtime) == kept
        assert runtime.report is None
        check_usable(runtime, chain, slot, given)
        assert given == chain.answer([5, 9], len(given))


def test_a_capture_that_fails_drops_the_ones_before(backend: str) -> None:
    """After a good capture, a second that fails leaves nothing captured: no mixture of the two."""
    chain = Failing(backend, -1, raises)
    with chain_runtime(backend, chain, ladder=Ladder([1, 2])) as runtime:
        slot = runtime.admit([1])
        runtime.capture(progress=False)
        given = [runtime.step([slot]).tokens()[0]]
        chain.k = chain.runs + runtime._backend.rehearsals + 2
        with pytest.raises(CaptureError):
            runtime.capture(progress=False)
        check_usable(runtime, chain, slot, given)
        assert given == chain.answer([1], len(given))


def test_many_failures_in_a_row(backend: str) -> None:
    chain = Failing(backend, -1, raises)
    with chain_runtime(backend, chain, ladder=Ladder([1, 3])) as runtime:
        slot = runtime.admit([2])
        for k in range(1, 2 * (runtime._backend.rehearsals + 1) + 1):
            chain.k = chain.runs + k
            with pytest.raises(CaptureError):
                runtime.capture(progress=False)
        given: list[int] = []
        check_usable(runtime, chain, slot, given)
        assert given == chain.answer([2], 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_at_padding_do_no_harm(backend: str, bad: float) -> None:
    """A model may make anything of padding rows: real rows and state don't see it."""
    chain = Chain(device_of(backend))

    def step(batch: Batch) -> torch.Tensor:
        return torch.where((batch.slots < 0)[:, None], bad, chain(batch))

    model = StepFunction(step, VOCAB, device=chain.device)
    options: dict[str, Any] = {"max_requests": 4, "max_context": 32, "ladder": Ladder([4])}
    with captured(DecodeRuntime(model, backend=backend, **options)) as runtime:
        slots = [runtime.admit([3]), runtime.admit([4])]
        got = [runtime.step(slots).tokens() for _ in range(3)]
        assert [row[0] for row in got] == chain.answer([3], 3)
        assert [row[1] for row in got] == chain.answer([4], 3)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda logits: logits[:, :-1], f"logits of {VOCAB - 1} ids for a vocabulary of {VOCAB}"),
        (lambda logits: logits[0], r"must return logits \[4, V\], got \[61\]"),
        (lambda logits: logits[:1].expand(2, -1), r"must return logits \[4, V\], got \[2, 61\]"),
        (lambda logits: None, r"must return logits \[4, V\], got NoneType"),
    ],
)
def test_a_model_that_returns_no_logits(backend: str, wrong: Any, says: str) -> None:
    chain = Chain(device_of(backend))
    model = StepFunction(lambda batch: wrong(chain(batch)), VOCAB, device=chain.device)
    options: dict[str, Any] = {"max_requests": 4, "max_context": 32, "ladder": Ladder([4])}
    with DecodeRuntime(model, backend=backend, **options) as runtime:
        with pytest.raises(CaptureError, match=says):
            runtime.capture(progress=False)


def test_fields_of_a_model_are_read_at_replay(backend: str) -> None:
    chain = Chain(device_of(backend))
    model = StepFunction(biased(chain), VOCAB, fields=(BIAS,), device=chain.device)
    bias = [0.0] * VOCAB
    bias[17] = 100.0
    options: dict[str, Any] = {"max_requests": 3, "max_context": 32}
    with captured(DecodeRuntime(model, backend=backend, **options)) as runtime:
        plain, pushed = runtime.admit([3]), runtime.admit([3], fields={"bias": bias})
        assert runtime.step([plain, pushed]).tokens() == [chain.following[3], 17]
        runtime.retire(pushed)
        again = runtime.admit([3])
        assert runtime.step([again]).tokens() == [chain.following[3]]


def test_a_windowed_model_without_blocks(backend: str) -> None:
    toy = ToyDecoder((4, 3), device=device_of(backend))
    assert all(isinstance(schema, KVLayerSchema) and schema.window for schema in toy.schemas)
    with captured(toy_runtime(backend, toy)) as runtime:
        assert runtime.state.blocks is None
        prompt = [5, 4, 3, 2, 1, 6, 7]
        slot = runtime.admit(prompt)
        assert decode(runtime, slot, 12) == ToyOracle(toy).answer(prompt, 12)
