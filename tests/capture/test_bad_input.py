"""Bad input gets a named error that says what to do, before anything is written.

After each: the whole arena, block store, tables, rings and the host's books are as they were, the
requests that run go on with the right tokens, and new ones are admitted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import CaptureError, DecodeRuntime, Ladder
from capture.errors import (
    BatchTooLarge,
    DeviceLost,
    PointerMoved,
    StepsOutstanding,
    UnsupportedDriver,
)
from capture.ladder import RefusalReason
from graphcache import Batch, Checkpoint, GraphCacheError
from graphcache.errors import (
    BlocksExhausted,
    ContextFull,
    DuplicateSlot,
    InvalidRequest,
    InvalidSlot,
    LayoutMismatch,
    RewindTooFar,
    SchemaError,
    SlotPrefilling,
    SlotsExhausted,
    StaleSlot,
    UnsupportedModel,
    WeightsError,
)
from graphcache.models import StepFunction, load_model
from tests.capture.support import (
    BIAS,
    BLOCK_TOKENS,
    CONTEXT,
    Chain,
    ToyOracle,
    biased,
    books,
    captured,
    chain_runtime,
    differing,
    everything,
    toy_runtime,
)
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

LONG = [(3 * i) % VOCAB for i in range(20)]


@dataclass
class World:
    """Four slots: a short and a long request that run, a prompt in the making, one slot free.

    Five blocks: one, two and one of them reserved, one free. A ladder of one and two rows.
    """

    runtime: DecodeRuntime
    toy: ToyDecoder
    short: int
    long: int
    growing: int
    stale: int
    kept: Checkpoint | None = None
    in_flight: int = 0

    def take_last_block(self) -> None:
        """The last free block goes to a checkpoint."""
        self.kept = self.runtime.checkpoint(self.long)

    def take_last_slot(self) -> None:
        self.runtime.open()

    def leave_two_unread(self) -> None:
        self.unread = [self.runtime.step([self.short]) for _ in range(2)]
        self.in_flight = 2


@pytest.fixture
def world(backend: str) -> Iterator[World]:
    toy = ToyDecoder(device=device_of(backend))
    runtime = toy_runtime(backend, toy, max_requests=4, ladder=Ladder([1, 2]), kv_blocks=5)
    with runtime:
        runtime.capture(progress=False)
        stale = runtime.admit([1])
        runtime.retire(stale)
        short = runtime.admit([4, 5, 6], max_tokens=10)
        long = runtime.admit(LONG, max_tokens=10)
        growing = runtime.open(max_tokens=5)
        runtime.extend(growing, [9, 8], final=False)
        runtime.step([short, long]).tokens()
        blocks = runtime.state.blocks
        assert blocks is not None and blocks.free_blocks == 1
        yield World(runtime, toy, short, long, growing, stale)


@dataclass
class Case:
    """A call that is refused.

    Attributes:
        call: what is refused.
        error: its kind.
        says: what the message says, advice included.
        before: sets the stage.
    """

    call: Callable[[World], Any]
    error: type[GraphCacheError]
    says: str
    before: Callable[[World], None] = lambda world: None


def handle(row: int, generation: int) -> int:
    return generation << 20 | row


PASS_A_HANDLE = r"pass what admit\(\), open\(\), fork\(\) or restore\(\) returned"
RETIRE = r"retire a request, or make the runtime with a larger max_requests"
FEWER = r"retire a request, ask for fewer max_tokens, or make the runtime with more kv_blocks"
SHORTEN = r"leave no room for an answer in a context of 64; shorten the prompt, or make the runtime"

CASES: dict[str, Case] = {
    # steps
    "a batch over the ladder": Case(
        lambda w: w.runtime.step([w.short, w.long, w.growing]),
        BatchTooLarge,
        r"asked for 3 rows.*ceiling is 2; step fewer slots at a time, or make the runtime with a",
    ),
    "a stale handle": Case(
        lambda w: w.runtime.step([w.stale]), StaleSlot, r"was retired; its row 0 may serve another"
    ),
    "a stale handle among good ones": Case(
        lambda w: w.runtime.step([w.short, w.stale]), StaleSlot, r"was retired"
    ),
    "a slot twice": Case(
        lambda w: w.runtime.step([w.short, w.short]),
        DuplicateSlot,
        r"slot \d+ is asked for more than once in one step",
    ),
    "a bare row number": Case(lambda w: w.runtime.step([0]), InvalidSlot, PASS_A_HANDLE),
    "the scratch row": Case(lambda w: w.runtime.step([handle(4, 1)]), InvalidSlot, r"row 4 of 4.*"),
    "a row far out of range": Case(
        lambda w: w.runtime.step([handle(99, 1)]), InvalidSlot, PASS_A_HANDLE
    ),
    "the padding slot": Case(lambda w: w.runtime.step([-1]), InvalidSlot, PASS_A_HANDLE),
    "a handle of the future": Case(
        lambda w: w.runtime.step([handle(1, 900)]), InvalidSlot, r"row 1 never had it"
    ),
    "a handle of a row never used": Case(
        lambda w: w.runtime.step([handle(3, 7)]), InvalidSlot, r"row 3 never had it"
    ),
    "a float for a slot": Case(
        lambda w: w.runtime.step([1.0]), InvalidSlot, r"a slot is the int that admit\(\) returned"
    ),
    "a bool for a slot": Case(
        lambda w: w.runtime.step([True]), InvalidSlot, r"got True of type bool"
    ),
    "a string for a slot": Case(
        lambda w: w.runtime.step(["a"]), InvalidSlot, r"got 'a' of type str"
    ),
    "a slot that prefills": Case(
        lambda w: w.runtime.step([w.growing]),
        SlotPrefilling,
        r"still prefilling: give it its last tokens with extend\(\) first",
    ),
    "a slot without tokens": Case(
        lambda w: w.runtime.step([w.runtime.state.slots._generation[3] << 20 | 3]),
        SlotPrefilling,
        r"still prefilling",
        World.take_last_slot,
    ),
    "a third step with two unread": Case(
        lambda w: w.runtime.step([w.short]),
        StepsOutstanding,
        r"unread; call tokens\(\) on the older result before asking for another step",
        World.leave_two_unread,
    ),
    # admission
    "no slot left": Case(
        lambda w: w.runtime.admit([1], max_tokens=4),
        SlotsExhausted,
        rf"all 4 slots are taken; {RETIRE}",
        World.take_last_slot,
    ),
    "no slot left to open": Case(
        lambda w: w.runtime.open(), SlotsExhausted, RETIRE, World.take_last_slot
    ),
    "no slot left for a fork": Case(
        lambda w: w.runtime.fork(w.long), SlotsExhausted, RETIRE, World.take_last_slot
    ),
    "no blocks left": Case(
        lambda w: w.runtime.admit([1] * 30),
        BlocksExhausted,
        rf"4 blocks of {BLOCK_TOKENS} tokens are needed and 1 of 5 are free; {FEWER}",
    ),
    "no blocks left for the answer": Case(
        lambda w: w.runtime.admit([1], max_tokens=17), BlocksExhausted, rf"2 blocks of .*{FEWER}"
    ),
    "no blocks left to go on": Case(
        lambda w: w.runtime.extend(w.short, [1] * 30), BlocksExhausted, FEWER
    ),
    "no blocks left for a fork": Case(
        lambda w: w.runtime.fork(w.short), BlocksExhausted, FEWER, World.take_last_block
    ),
    "no blocks left for a checkpoint": Case(
        lambda w: w.runtime.checkpoint(w.short), BlocksExhausted, FEWER, World.take_last_block
    ),
    "no blocks left to restore": Case(
        lambda w: w.runtime.restore(w.kept), BlocksExhausted, FEWER, World.take_last_block
    ),
    "a prompt longer than the context": Case(
        lambda w: w.runtime.admit([1] * 65), ContextFull, rf"65 tokens {SHORTEN}"
    ),
    "a prompt that fills the context": Case(
        lambda w: w.runtime.admit([1] * CONTEXT), ContextFull, rf"64 tokens {SHORTEN}"
    ),
    "more than the context in turns": Case(
        lambda w: w.runtime.extend(w.long, [1] * 43), ContextFull, rf"64 tokens {SHORTEN}"
    ),
    "an empty prompt": Case(
        lambda w: w.runtime.admit([]), InvalidRequest, r"no tokens: give at least one"
    ),
    "an empty turn": Case(
        lambda w: w.runtime.extend(w.short, []), InvalidRequest, r"no tokens: give at least one"
    ),
    "a token beyond the vocabulary": Case(
        lambda w: w.runtime.admit([1, VOCAB]),
        InvalidRequest,
        r"token id 61 \(at index 1\) is outside the vocabulary 0\.\.60",
    ),
    "a negative token": Case(
        lambda w: w.runtime.admit([-1]), InvalidRequest, r"-1 \(at index 0\) is outside the vocab"
    ),
    "a token that int32 can't hold": Case(
        lambda w: w.runtime.admit([2**40]), InvalidRequest, r"outside the vocabulary"
    ),
    "a bad token in a turn": Case(
        lambda w: w.runtime.extend(w.short, [1, 2, 999]), InvalidRequest, r"999 \(at index 2\)"
    ),
    "a float token": Case(
        lambda w: w.runtime.admit([1.5]), InvalidRequest, r"token id must be an int, got 1\.5"
    ),
    "a bool token": Case(lambda w: w.runtime.admit([True]), InvalidRequest, r"got True"),
    "text for tokens": Case(
        lambda w: w.runtime.admit("hi"), InvalidRequest, r"token id must be an int, got 'h'"
    ),
    "nothing for tokens": Case(
        lambda w: w.runtime.admit(None), InvalidRequest, r"expected token ids in a list, got None"
    ),
    "one number for tokens": Case(
        lambda w: w.runtime.admit(7), InvalidRequest, r"expected token ids in a list, got 7"
    ),
    # handles elsewhere
    "twice retired": Case(lambda w: w.runtime.retire(w.stale), StaleSlot, r"was retired"),
    "extend of a stale handle": Case(
        lambda w: w.runtime.extend(w.stale, [1]), StaleSlot, r"was retired"
    ),
    "fork of a stale handle": Case(lambda w: w.runtime.fork(w.stale), StaleSlot, r"was retired"),
    "rewind of a stale handle": Case(
        lambda w: w.runtime.rewind(w.stale, 0), StaleSlot, r"was retired"
    ),
    "checkpoint of a stale handle": Case(
        lambda w: w.runtime.checkpoint(w.stale), StaleSlot, r"was retired"
    ),
    "tokens of a stale handle": Case(
        lambda w: w.runtime.tokens_of(w.stale), StaleSlot, r"was retired"
    ),
    "retire of no handle": Case(lambda w: w.runtime.retire(2), InvalidSlot, PASS_A_HANDLE),
    "fork of no handle": Case(lambda w: w.runtime.fork(None), InvalidSlot, r"got None"),
    # rewind
    "a rewind too far": Case(
        lambda w: w.runtime.rewind(w.long, 2),
        RewindTooFar,
        r"Rewind less far, fork before going on, or give the layers' schemas a larger `rewind`",
    ),
    "a rewind forwards": Case(
        lambda w: w.runtime.rewind(w.long, 22), InvalidRequest, r"has absorbed 20"
    ),
    "a negative rewind": Case(
        lambda w: w.runtime.rewind(w.long, -1), InvalidRequest, r"at least 0, got -1"
    ),
    "a rewind to no number": Case(
        lambda w: w.runtime.rewind(w.long, "3"), InvalidRequest, r"an int of at least 0, got '3'"
    ),
    # parameters
    "max_tokens of 0": Case(
        lambda w: w.runtime.admit([1], max_tokens=0), InvalidRequest, r"at least 1, got 0"
    ),
    "max_tokens of a turn": Case(
        lambda w: w.runtime.extend(w.short, [1], max_tokens=-2), InvalidRequest, r"at least 1"
    ),
    "max_tokens no number": Case(
        lambda w: w.runtime.admit([1], max_tokens=2.0), InvalidRequest, r"must be an int, got 2\.0"
    ),
    "a negative temperature": Case(
        lambda w: w.runtime.admit([1], max_tokens=4, temperature=-0.5),
        InvalidRequest,
        r"not negative, got -0\.5",
    ),
    "a temperature that is no number": Case(
        lambda w: w.runtime.admit([1], max_tokens=4, temperature=float("nan")),
        InvalidRequest,
        r"must be finite",
    ),
    "an infinite temperature": Case(
        lambda w: w.runtime.open(temperature=float("inf")), InvalidRequest, r"must be finite"
    ),
    "a negative top_k": Case(
        lambda w: w.runtime.admit([1], max_tokens=4, top_k=-1),
        InvalidRequest,
        r"0 \(off\) or positive, got -1",
    ),
    "top_p of 0": Case(
        lambda w: w.runtime.admit([1], max_tokens=4, top_p=0.0),
        InvalidRequest,
        r"above 0 and not above 1",
    ),
    "top_p above 1": Case(
        lambda w: w.runtime.admit([1], max_tokens=4, top_p=1.5),
        InvalidRequest,
        r"above 0 and not above 1",
    ),
    "a negative seed": Case(
        lambda w: w.runtime.admit([1], max_tokens=4, seed=-1),
        InvalidRequest,
        r"0\.\.2\*\*63-1, got -1",
    ),
    "a seed too large": Case(
        lambda w: w.runtime.fork(w.short, seed=2**63), InvalidRequest, r"0\.\.2\*\*63-1"
    ),
    "nine stop tokens": Case(
        lambda w: w.runtime.admit([1], max_tokens=4, stop=range(9)),
        InvalidRequest,
        r"at most 8 stop tokens",
    ),
    "a stop token beyond the vocabulary": Case(
        lambda w: w.runtime.admit([1], max_tokens=4, stop=[VOCAB]),
        InvalidRequest,
        r"stop token 61 .*outside",
    ),
    "a field nobody declares": Case(
        lambda w: w.runtime.admit([1], max_tokens=4, fields={"adapter": 3}),
        InvalidRequest,
        r"declares no field 'adapter'; it declares none",
    ),
}


def accounts(runtime: DecodeRuntime) -> dict[str, Any]:
    """The host's books; which of the free rows and blocks comes next is nobody's concern."""
    kept = books(runtime)
    taken: dict[str, Any] = {name: kept[name] for name in ("live", "users", "owned")}
    free = [*kept["free"], *(row for _, row in kept["resting"])]
    taken["rows"] = sorted(free)
    taken["blocks"] = sorted([*kept["free blocks"], *(b for _, b in kept["resting blocks"])])
    taken["phases"] = [None if r in free else phase for r, phase in enumerate(kept["phases"])]
    taken["generations"] = [
        None if row in free else generation for row, generation in enumerate(kept["generations"])
    ]
    return taken


def check_usable(world: World) -> None:
    """Every request goes on as if nothing had been asked, and others are served."""
    runtime, oracle = world.runtime, ToyOracle(world.toy)
    if world.in_flight:
        for result in world.unread:
            result.tokens()
    runtime.extend(world.growing, [7])
    histories = {world.short: [4, 5, 6], world.long: LONG, world.growing: [9, 8, 7]}
    counts = {world.short: 1 + world.in_flight, world.long: 1, world.growing: 0}
    for asked in ([world.short, world.long], [world.growing], [world.long, world.growing]):
        runtime.step(asked).tokens()
        for slot in asked:
            counts[slot] += 1
    for slot, history in histories.items():
        assert runtime.tokens_of(slot) == history + oracle.answer(history, counts[slot])
    for slot in histories:
        runtime.retire(slot)
    if world.kept is not None:
        world.kept.release()
    fresh = runtime.admit([3, 2, 1])
    assert runtime.step([fresh]).tokens() == oracle.answer([3, 2, 1], 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_before_anything_is_written(world: World, name: str) -> None:
    case = CASES[name]
    case.before(world)
    # Steps on their way must have landed before the picture is taken.
    world.runtime._clock.wait(world.runtime._clock.submitted)
    before, kept = everything(world.runtime), accounts(world.runtime)
    for _ in range(2):
        with pytest.raises(case.error, match=case.says) as caught:
            case.call(world)
        assert type(caught.value) is case.error
        assert differing(before, everything(world.runtime)) == []
        assert accounts(world.runtime) == kept
    check_usable(world)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_world_itself_is_usable(world: World) -> None:
    check_usable(world)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_no_slots_is_a_no_op(world: World) -> None:
    before, kept = everything(world.runtime), accounts(world.runtime)
    result = world.runtime.step([])
    assert result.tokens() == [] and result.reasons == []
    assert differing(before, everything(world.runtime)) == []
    assert accounts(world.runtime) == kept
    assert world.runtime.counters.refusals == {}
    check_usable(world)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_refused_batch_is_counted(world: World) -> None:
    for _ in range(3):
        with pytest.raises(BatchTooLarge):
            world.runtime.step([world.short, world.long, world.growing])
    assert world.runtime.counters.refusals == {RefusalReason.OVER_CEILING: 3}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_names_the_slot(world: World) -> None:
    for slot, error in (
        (world.stale, StaleSlot),
        (world.growing, SlotPrefilling),
    ):
        with pytest.raises(error, match=str(slot)):
            world.runtime.step([world.short, slot])
    with pytest.raises(DuplicateSlot, match=str(world.long)):
        world.runtime.step([world.long, world.long])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rewind_into_a_shared_block_without_a_free_one(backend: str) -> None:
    toy = ToyDecoder((None, None), device=device_of(backend))
    options: dict[str, Any] = {"kv_blocks": 4, "ladder": Ladder([1])}
    with captured(toy_runtime(backend, toy, **options)) as runtime:
        slot = runtime.admit(LONG, max_tokens=10)
        other = runtime.fork(slot)
        extra = runtime.admit([1], max_tokens=1)
        before, kept = everything(runtime), accounts(runtime)
        with pytest.raises(BlocksExhausted, match=FEWER):
            runtime.rewind(slot, 5)
        assert differing(before, everything(runtime)) == [] and accounts(runtime) == kept
        oracle = ToyOracle(toy)
        runtime.retire(extra)
        runtime.rewind(slot, 5)
        assert runtime.step([slot]).tokens() == oracle.answer(LONG[:6], 1)
        assert runtime.step([other]).tokens() == oracle.answer(LONG, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"weight": 1.0}, r"declares no field 'weight'; it declares bias"),
        ({"bias": [1.0, 2.0]}, r"field 'bias' takes torch.float32 of shape \(61,\)"),
        ({"bias": "loud"}, r"field 'bias' takes torch.float32 of shape \(61,\)"),
        ({"bias": None}, r"field 'bias' takes torch.float32 of shape \(61,\)"),
    ],
)
def test_fields_that_do_not_fit(backend: str, fields: dict[str, Any], says: str) -> None:
    chain = Chain(device_of(backend))
    model = StepFunction(biased(chain), VOCAB, fields=(BIAS,), device=chain.device)
    with DecodeRuntime(model, max_requests=2, max_context=16, backend=backend) as runtime:
        before, kept = everything(runtime), books(runtime)
        with pytest.raises(InvalidRequest, match=says):
            runtime.admit([1], fields=fields)
        assert differing(before, everything(runtime)) == [] and books(runtime) == kept


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_that_does_not_fit(world: World, backend: str) -> None:
    other = ToyDecoder((None, 5), device=device_of(backend))
    with toy_runtime(backend, other) as elsewhere:
        foreign = elsewhere.checkpoint(elsewhere.admit([1, 2]))
        before, kept = everything(world.runtime), books(world.runtime)
        with pytest.raises(LayoutMismatch, match=r"schemas, fields, block_tokens and max_context"):
            world.runtime.restore(foreign)
        foreign.release()
        assert differing(before, everything(world.runtime)) == []
        assert books(world.runtime) == kept
    check_usable(world)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_that_moved(world: World) -> None:
    head = world.toy.head
    old = head.data
    head.data = old.clone()
    before, kept = everything(world.runtime), books(world.runtime)
    with pytest.raises(PointerMoved, match=r"call capture\(\) again"):
        world.runtime.admit([1], max_tokens=4)
    assert differing(before, everything(world.runtime)) == [] and books(world.runtime) == kept
    world.runtime.capture(progress=False)
    check_usable(world)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_raises_in_mid_capture(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before, kept = everything(world.runtime), books(world.runtime)
    advance = world.runtime.state.advance
    runs = []

    def failing(*arguments: Any) -> Any:
        runs.append(None)
        if len(runs) == world.runtime._backend.rehearsals + 1:
            raise ZeroDivisionError("in mid-capture")
        return advance(*arguments)

    monkeypatch.setattr(world.runtime.state, "advance", failing)
    with pytest.raises(CaptureError, match=r"raised ZeroDivisionError.*in mid-capture"):
        world.runtime.capture(progress=False)
    assert differing(before, everything(world.runtime)) == [] and books(world.runtime) == kept
    world.runtime.capture(progress=False)
    check_usable(world)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lost_device(backend: str) -> None:
    chain = Chain(device_of(backend))
    runtime = captured(chain_runtime(backend, chain))

    def before(batch: Batch) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    chain.before = before
    with pytest.raises(DeviceLost, match=r"illegal memory access.*close this runtime"):
        runtime.admit([1, 2])
    runtime.close()
    chain.before = lambda _: None
    with captured(chain_runtime(backend, chain)) as fresh:
        assert fresh.step([fresh.admit([2])]).tokens() == chain.answer([2], 1)


# --- runtimes that can not be made ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_requests": 0}, GraphCacheError, r"at least 1, got 0|must lie in 1"),
        ({"max_requests": -3}, GraphCacheError, r"at least 1, got -3|must lie in 1"),
        ({"max_context": None}, SchemaError, r"max_context is needed"),
        ({"max_context": 1}, SchemaError, r"at least 2, a prompt and an answer; got 1"),
        ({"ladder": Ladder([8])}, SchemaError, r"ceiling 8 lies above max_requests=4"),
        ({"ladder": Ladder([2], q_len=3)}, SchemaError, r"use q_len=1"),
        ({"prefill_chunk": 0}, SchemaError, r"prefill_chunk must be at least 1, got 0"),
        ({"backend": "vulkan"}, CaptureError, r"choose auto, cuda_graph or tape"),
        ({"backend": "cuda_graph"}, UnsupportedDriver, r"CUDA graphs need a CUDA device"),
        ({"block_tokens": 0}, SchemaError, r"block_tokens .* at least 1"),
        ({"kv_blocks": 0}, SchemaError, r"number of blocks must be at least 1"),
    ],
)
def test_options_that_can_not_be(
    options: dict[str, Any], error: type[GraphCacheError], says: str
) -> None:
    good: dict[str, Any] = {"max_requests": 4, "max_context": 64, "backend": "tape"}
    with pytest.raises(error, match=says):
        DecodeRuntime(ToyDecoder().model(), **{**good, **options})


def test_a_context_beyond_the_models() -> None:
    class Short(Chain):
        schemas = ()
        vocab_size = VOCAB
        max_context = 16

        def prefill(self, batch: Batch) -> None: ...

        decode = Chain.__call__

    with pytest.raises(SchemaError, match=r"max_context=32 is beyond the model's 16"):
        DecodeRuntime(Short(), max_requests=1, max_context=32)
    with DecodeRuntime(Short(), max_requests=1) as runtime:
        assert runtime.state.max_context == 16


@pytest.mark.parametrize("model", [object(), lambda batch: None, torch.nn.Linear(2, 2), None])
def test_something_that_is_no_model(model: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"wrap a bare function in .*StepFunction"):
        DecodeRuntime(model, max_requests=1, max_context=8)


@pytest.mark.parametrize(
    ("config", "weights", "error", "says"),
    [
        (None, None, WeightsError, r"config\.json is missing"),
        ("{", None, WeightsError, r"config\.json can't be read"),
        ({"model_type": "mamba"}, None, UnsupportedModel, r"no adapter serves model_type 'mamba'"),
        ({"model_type": "llama"}, None, WeightsError, r"has no model\.safetensors"),
        ({"model_type": "llama"}, b"torn", WeightsError, r"not a whole safetensors file"),
    ],
)
def test_a_model_that_can_not_be_loaded(
    tmp_path: Path, config: Any, weights: bytes | None, error: type[GraphCacheError], says: str
) -> None:
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(error, match=says):
        load_model(tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"nowhere\.gguf: no such file"):
        load_model(tmp_path / "nowhere.gguf")
    with pytest.raises(WeightsError, match=r"give 'smollm2', a transformers folder, a \.gguf file"):
        load_model("smollm3")
