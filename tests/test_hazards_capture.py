"""What broke real engines' captures: each of these must be impossible here, or a named error.

Hazards 13 to 17: values frozen at capture, silently wrong. Hazards 18 to 22: capture itself, its
failures and its end. What only CUDA can do wrong carries the mark `gpu`; the rest runs on both
backends.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import CaptureError, DecodeRuntime, Ladder
from capture.backend import choose_backend
from capture.errors import BatchTooLarge, NotCaptured, PointerMoved
from capture.ladder import RefusalReason
from graphcache import Batch, DecodeState
from graphcache.models import StepFunction
from graphcache.ops._triton import jit, tl
from tests.books import audit, poison, settle, snapshot
from tests.history_oracle import TIE, FullHistory
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

PROMPTS = [[5, 9, 33, 2, 7], [44], [17, 3, 3, 8, 21, 50, 6, 1], [12, 60], [4, 4, 4, 9],
           [58, 2, 30], [7, 19, 26, 40, 11, 13, 1], [20, 35]]  # fmt: skip


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def make_runtime(backend: str, model: Any, **options: Any) -> DecodeRuntime:
    settings: dict[str, Any] = {
        "max_requests": 4, "max_context": 64, "block_tokens": 4, "nvtx": False
    }  # fmt: skip
    return DecodeRuntime(model, backend=backend, **{**settings, **options})


def toy_model(
    toy: ToyDecoder, decode: Callable[[Batch], Tensor] | None = None, **options: Any
) -> StepFunction:
    """A toy decoder with a step that may do something wrong, and a prefill that does not."""
    return StepFunction(
        decode or toy, VOCAB, schemas=toy.schemas, device=toy.device, chunk=toy, **options
    )


def follow(
    runtime: DecodeRuntime, oracle: FullHistory, told: dict[int, list[int]], slots: list[int]
) -> None:
    """One step, each token the likeliest after its request's whole history."""
    for slot, token in zip(slots, runtime.step(slots).tokens(), strict=True):
        oracle.check_greedy(told[slot], token)
        told[slot].append(token)


def answers_right(runtime: DecodeRuntime, oracle: FullHistory, steps: int = 6) -> None:
    """New requests get the right answers."""
    told = {runtime.admit(prompt, stop=()): list(prompt) for prompt in PROMPTS[:3]}
    slots = list(told)
    for turn in range(steps):
        follow(runtime, oracle, told, slots[turn % 3 :] + slots[: turn % 3])
    follow(runtime, oracle, told, slots[1:2])
    for slot in slots:
        runtime.retire(slot)


# --- 13: block numbers and slots frozen -----------------------------------------------------------


def test_13_a_loop_over_slots_on_the_host_is_refused(backend: str) -> None:
    """It would gather the blocks of whoever was there at capture (TensorRT-LLM#17110)."""
    toy = ToyDecoder((None,), device_of(backend))

    def decode(batch: Batch) -> Tensor:
        blocks = [batch.state.blocks.table[slot] for slot in batch.slots.tolist()]
        return toy(batch) + 0 * torch.stack(blocks).sum()

    runtime = make_runtime(backend, toy_model(toy, decode))
    with pytest.raises(CaptureError, match=r"Tensor.tolist\(\) can't be captured") as caught:
        runtime.capture(progress=False)
    assert caught.value.operation == "Tensor.tolist()"
    source = caught.value.source
    assert source is not None
    assert Path(source.file).name == "test_hazards_capture.py"
    assert "batch.slots.tolist()" in source.text
    assert runtime.report is None


@pytest.mark.parametrize("windows", [(None,), (4,), (None, 4)])
def test_13_one_permutation_at_capture_and_another_at_replay(
    backend: str, windows: tuple[int | None, ...]
) -> None:
    """Captured with slots 2, 0, 1 in the batch; then other requests, other blocks, other orders."""
    device = device_of(backend)
    toy = ToyDecoder(windows, device)
    oracle = FullHistory(toy)
    machine = choose_backend(backend, device)
    with machine.context():
        state = DecodeState(
            toy.schemas, max_requests=3, max_context=40, vocab_size=VOCAB, device=device,
            block_tokens=2, kv_blocks=24,
        )  # fmt: skip
        requested = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
        kept = torch.zeros(3, VOCAB, device=device)

    def step() -> None:
        batch = state.begin(requested)
        logits = toy(batch)
        kept.copy_(logits)
        state.advance(state.sample(logits, batch), batch, requested)

    def put(prompt: list[int]) -> int:
        slot = state.open(max_tokens=5, stop=())
        positions = state.append_tokens(slot, prompt)
        if positions:
            toy(state.prefill_batch(slot, positions))
            state.absorbed(slot, positions)
        state.complete_prefill(slot)
        return slot

    with machine.context(), torch.no_grad():
        poison(state)
        told = {put(prompt): list(prompt) for prompt in PROMPTS[:3]}
        for _ in range(machine.rehearsals):
            step()
        captured = machine.capture(step)
        machine.synchronize()
        for slot in list(told):
            state.retire(slot)
        told = {put(prompt): list(prompt) for prompt in (PROMPTS[4], PROMPTS[6], PROMPTS[5])}
        rows = {state.slots.row_of(slot): slot for slot in told}
        for order in ([1, 2, 0], [0, 1, 2], [2, -1, 0], [-1, 1, -1]):
            requested.copy_(torch.tensor(order, dtype=torch.int32))
            captured.replay()
            machine.synchronize()
            for line, row in enumerate(order):
                if row < 0:
                    continue
                slot = rows[row]
                expected = oracle.next_logits(told[slot])
                got = kept[line].cpu().double()
                torch.testing.assert_close(got, torch.from_numpy(expected), atol=TIE / 4, rtol=0)
                told[slot] = state.tokens_of(slot)
    captured.close()
    machine.close()


# --- 14: what only the first token does -----------------------------------------------------------


def test_14_a_branch_on_the_first_token_is_refused(backend: str) -> None:
    """A capture would hold the reset of the state, and run it ever after (ik_llama.cpp#1393)."""
    toy = ToyDecoder((4,), device_of(backend))

    def decode(batch: Batch) -> Tensor:
        if batch.positions[0] == 0:
            batch.state.pool["layer0.k"].zero_()
        return toy(batch)

    with pytest.raises(CaptureError, match=r"__bool__.*torch.where") as caught:
        make_runtime(backend, toy_model(toy, decode)).capture(progress=False)
    assert caught.value.source is not None
    assert "batch.positions[0] == 0" in caught.value.source.text


@pytest.mark.parametrize("when", ["fresh", "in mid-sequence", "both"])
def test_14_captured_on_fresh_slots_and_replayed_in_mid_sequence(backend: str, when: str) -> None:
    """And the other way round: captured in mid-sequence, replayed for fresh slots."""
    toy = ToyDecoder((None, 5), device_of(backend))
    oracle = FullHistory(toy)
    runtime = make_runtime(backend, toy_model(toy))
    poison(runtime.state)
    if when in ("fresh", "both"):
        runtime.capture(progress=False)
    told = {runtime.admit(prompt, stop=()): list(prompt) for prompt in PROMPTS[:2]}
    for _ in range(9):
        for slot, token in zip(told, runtime.step(list(told), eager=True).tokens(), strict=True):
            told[slot].append(token)
    if when in ("in mid-sequence", "both"):
        runtime.capture(progress=False)
    for _ in range(5):
        follow(runtime, oracle, told, list(told))
    told |= {runtime.admit(prompt, stop=()): list(prompt) for prompt in PROMPTS[2:4]}
    for _ in range(9):
        follow(runtime, oracle, told, list(told)[::-1])


# --- 15: workspaces that grow, tensors that move --------------------------------------------------


class WithWorkspace:
    """A toy decoder that passes its logits through a workspace of its own.

    Args:
        toy: the decoder.
        rows: of the workspace, to begin with.
    """

    def __init__(self, toy: ToyDecoder, rows: int) -> None:
        self.toy = toy
        self.space = torch.zeros(rows, VOCAB, device=toy.device)
        self.grow: Callable[[int], None] = lambda rows: None

    def decode(self, batch: Batch) -> Tensor:
        self.grow(batch.rows)
        rows = self.space[: batch.rows]
        rows.copy_(self.toy(batch))
        return rows


def test_15_a_workspace_that_grows_while_the_ladder_is_captured(backend: str) -> None:
    """The captures before would go on using memory that was given back."""
    model = WithWorkspace(ToyDecoder((None,), device_of(backend)), 4)
    seen: list[int] = []

    def grow(rows: int) -> None:
        seen.append(rows)
        if rows == 1:
            model.space.data = torch.zeros(8, VOCAB, device=model.space.device)

    model.grow = grow
    runtime = make_runtime(backend, toy_model(model.toy, model.decode))
    with pytest.raises((PointerMoved, CaptureError)):
        runtime.capture(progress=False)
    assert seen[0] == 4, "the largest comes first"
    with pytest.raises(NotCaptured):
        runtime.step([runtime.admit([1])])
    model.grow = lambda rows: None
    runtime.capture(progress=False)
    answers_right(runtime, FullHistory(model.toy))


@pytest.mark.parametrize("debug", [False, True])
def test_15_a_workspace_that_grows_after_capture(backend: str, debug: bool) -> None:
    """Found at admission; before every replay too, in debug mode. Captured anew, all is well."""
    model = WithWorkspace(ToyDecoder((None,), device_of(backend)), 4)
    runtime = make_runtime(backend, toy_model(model.toy, model.decode), debug=debug)
    runtime.capture(progress=False)
    slot = runtime.admit([3, 9], stop=())
    runtime.step([slot]).tokens()
    before = snapshot(runtime.state)
    model.space.data = torch.zeros(8, VOCAB, device=model.space.device)
    with pytest.raises(PointerMoved, match=r"moved since capture.*capture\(\) again"):
        runtime.admit([1])
    if debug:
        with pytest.raises(PointerMoved):
            runtime.step([slot])
    after = snapshot(runtime.state)
    for name in before:
        assert torch.equal(before[name], after[name]), name
    runtime.capture(progress=False)
    runtime.step([slot]).tokens()
    answers_right(runtime, FullHistory(model.toy))


def test_15_state_that_moves_after_capture(backend: str) -> None:
    runtime = make_runtime(backend, toy_model(ToyDecoder((None, 4), device_of(backend))))
    runtime.capture(progress=False)
    blocks = runtime.state.blocks
    assert blocks is not None
    for owner, name, says in (
        (runtime.state.pool, "arena", "state arena"),
        (blocks.pool, "arena", "K/V blocks"),
        (blocks, "table", "block tables"),
    ):
        kept = getattr(owner, name)
        setattr(owner, name, kept.clone())
        with pytest.raises(PointerMoved, match=says):
            runtime.admit([1])
        setattr(owner, name, kept)
    runtime.admit([1])


@pytest.mark.gpu
def test_15_attentions_counters_do_not_grow_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step captured on a stream where it never ran would make them inside the capture."""
    device = torch.device("cuda")
    machine = choose_backend("cuda_graph", device)
    toy = ToyDecoder((None,), device)
    with machine.context():
        state = DecodeState(
            toy.schemas, max_requests=2, max_context=2048, vocab_size=VOCAB, device=device
        )
        requested = torch.full((2,), -1, dtype=torch.int32, device=device)
    ran_elsewhere = torch.full((2,), -1, dtype=torch.int32, device=device)
    toy(state.begin(ran_elsewhere))
    torch.cuda.synchronize()
    module = importlib.import_module("graphcache.ops.decode_attention")
    monkeypatch.setattr(module.counters, "_COUNTERS", {})
    with pytest.raises(CaptureError, match=r"WorkspaceNotReady.*before capture"):
        machine.capture(lambda: toy(state.begin(requested)))
    with machine.context():
        toy(state.begin(requested))
    machine.capture(lambda: toy(state.begin(requested))).replay()
    machine.synchronize()


# --- 16: outputs that a later bucket takes for its own --------------------------------------------


def test_16_outputs_are_nobody_elses(backend: str) -> None:
    """Captured largest first in one pool, replayed in shuffled order, all outputs held.

    What a step makes, buckets share: an output that is to last is written to memory made before.
    """
    device = device_of(backend)
    machine = choose_backend(backend, device)
    rng = random.Random(3)
    sizes = [16, 11, 8, 4, 2, 1]
    with machine.context():
        source = torch.randn(16, 33, device=device)
        matrix = torch.randn(33, 33, device=device)
        outputs = {
            rows: [
                torch.zeros(rows, 33, device=device),
                torch.zeros(rows, device=device),
                torch.zeros(rows, dtype=torch.int64, device=device),
            ]
            for rows in sizes
        }

    def step_of(rows: int) -> Callable[[], None]:
        def step() -> None:
            hidden = source[:rows] @ matrix
            hidden = torch.relu(hidden) + hidden.sum(1, keepdim=True)
            made = (hidden, hidden.amax(1), (hidden @ matrix).argmax(1))
            for output, value in zip(outputs[rows], made, strict=True):
                output.copy_(value)

        return step

    steps = {rows: step_of(rows) for rows in sizes}
    captured = {}
    for rows in sizes:
        with machine.context():
            for _ in range(machine.rehearsals):
                steps[rows]()
        captured[rows] = machine.capture(steps[rows])
        gc.collect()
    for turn in range(4):
        with machine.context():
            source.copy_(torch.randn(16, 33, generator=torch.Generator().manual_seed(turn)))
            expected = {}
            for rows in sizes:
                steps[rows]()
                expected[rows] = [tensor.clone() for tensor in outputs[rows]]
        for rows in rng.sample(sizes, len(sizes)):
            captured[rows].replay()
            with machine.context():
                torch.empty(50000, device=device).fill_(float("nan"))
        machine.synchronize()
        for rows in sizes:
            for one, other in zip(outputs[rows], expected[rows], strict=True):
                assert torch.equal(one, other), f"an output of {rows} rows was overwritten"
    for step in captured.values():
        step.close()


@pytest.mark.parametrize("seed", range(3))
def test_16_buckets_in_any_order_give_what_eager_steps_give(backend: str, seed: int) -> None:
    """Bit for bit at the same bucket, tokens and logits, results held and read late."""
    rng = random.Random(seed)
    toy = ToyDecoder((None, 5), device_of(backend))
    twins = [
        make_runtime(
            backend, toy_model(toy), max_requests=8, keep_logits=True,
            ladder=Ladder([1, 2, 3, 5, 8]),
        )
        for _ in range(2)
    ]  # fmt: skip
    twins[0].capture(progress=False)
    for runtime in twins:
        poison(runtime.state)
    slots = [
        [
            runtime.admit(prompt, stop=(), temperature=0.0 if i % 2 else 2.0, seed=i)
            for i, prompt in enumerate(PROMPTS)
        ]
        for runtime in twins
    ]
    held = []
    for _ in range(25):
        asked = rng.sample(range(8), rng.randint(1, 8))
        replayed = twins[0].step([slots[0][i] for i in asked])
        eager = twins[1].step([slots[1][i] for i in asked], eager=True)
        assert torch.equal(replayed.logits, eager.logits)
        held.append((replayed, eager))
        if rng.random() < 0.3:
            gc.collect()
        if len(held) > 1:
            replayed, eager = held[-2]
            assert replayed.tokens() == eager.tokens()
            assert replayed.reasons == eager.reasons
    use = twins[0].counters.buckets.values()
    assert sum(bucket.replays for bucket in use) == 25
    assert sum(bucket.eager_runs for bucket in use) == 0
    for i in range(8):
        assert twins[0].tokens_of(slots[0][i]) == twins[1].tokens_of(slots[1][i])


# --- 17: frozen seeds -----------------------------------------------------------------------------


def flat_model(device: torch.device) -> StepFunction:
    """Every token as likely as any other, so that draws alone decide."""
    flat = torch.zeros(8, VOCAB, device=device)
    return StepFunction(lambda batch: flat[: batch.rows] + 0.0, VOCAB, device=device)


def draws(runtime: DecodeRuntime, seed: int, count: int, companions: int = 0) -> list[int]:
    """What a request draws, in a batch with others and not in the first row."""
    others = [
        runtime.admit([1, 2], temperature=1.0, seed=900 + i, stop=()) for i in range(companions)
    ]
    slot = runtime.admit([1, 2], temperature=1.0, seed=seed, stop=())
    batch = [*others, slot]
    drawn = [runtime.step(batch).tokens()[-1] for _ in range(count)]
    for handle in batch:
        runtime.retire(handle)
    return drawn


def test_17_a_thousand_replays_draw_a_thousand_numbers(backend: str) -> None:
    """Evenly spread; the same again from the same seed; others from another."""
    runtime = make_runtime(backend, flat_model(device_of(backend)), max_context=1100)
    runtime.capture(progress=False)
    drawn = draws(runtime, seed=7, count=1000)
    counts = torch.bincount(torch.tensor(drawn), minlength=VOCAB).double()
    chi_square = float(((counts - 1000 / VOCAB) ** 2 / (1000 / VOCAB)).sum())
    assert 25 < chi_square < 120, f"{VOCAB - 1} degrees of freedom: {chi_square}"
    pairs = {(drawn[i], drawn[i + 1]) for i in range(999)}
    assert len(pairs) > 800, "draws repeat in a cycle"
    assert draws(runtime, seed=7, count=300) == drawn[:300]
    other = draws(runtime, seed=8, count=300)
    assert sum(one == two for one, two in zip(drawn, other, strict=False)) < 20


@pytest.mark.parametrize("companions", [1, 2, 7])
def test_17_draws_do_not_depend_on_row_or_bucket(backend: str, companions: int) -> None:
    runtime = make_runtime(backend, flat_model(device_of(backend)), max_requests=8)
    runtime.capture(progress=False)
    alone = draws(runtime, seed=41, count=50)
    assert draws(runtime, seed=41, count=50, companions=companions) == alone


def test_17_draws_survive_a_new_capture_and_a_way_back(backend: str) -> None:
    """They are a function of seed and position: the same place draws the same number."""
    runtime = make_runtime(backend, flat_model(device_of(backend)))
    runtime.capture(progress=False)
    expected = draws(runtime, seed=3, count=30)
    slot = runtime.admit([1, 2], temperature=1.0, seed=3, stop=())
    assert [runtime.step([slot]).tokens()[0] for _ in range(12)] == expected[:12]
    runtime.capture(progress=False)
    assert [runtime.step([slot]).tokens()[0] for _ in range(6)] == expected[12:18]
    runtime.rewind(slot, 6)
    assert [runtime.step([slot]).tokens()[0] for _ in range(25)] == expected[5:30]


@pytest.mark.parametrize(
    "draw",
    [
        lambda logits: torch.multinomial(logits.softmax(-1), 1)[:, 0].int(),
        lambda logits: (logits + torch.rand_like(logits)).argmax(-1).int(),
        lambda logits: (logits - torch.empty_like(logits).exponential_().log()).argmax(-1).int(),
    ],
    ids=["multinomial", "rand_like", "exponential_"],
)
def test_17_the_frameworks_random_numbers_are_refused(
    backend: str, draw: Callable[[Tensor], Tensor]
) -> None:
    model = flat_model(device_of(backend))
    runtime = make_runtime(backend, model, sampler=lambda logits, batch: draw(logits))
    with pytest.raises(CaptureError, match="random state, which a replay does not move") as caught:
        runtime.capture(progress=False)
    assert caught.value.source is not None
    assert Path(caught.value.source.file).name == "test_hazards_capture.py"


# --- 18: what other threads do meanwhile ----------------------------------------------------------


def _busy_elsewhere(device: torch.device, stop: threading.Event, done: list[int]) -> None:
    """Allocations, pinned and not, copies both ways, kernels and waits, on a stream of its own."""
    on_gpu = device.type == "cuda"
    stream = torch.cuda.Stream(device) if on_gpu else None
    size = 1 << 16
    while not stop.is_set():
        with torch.cuda.stream(stream):
            host = torch.arange(size, dtype=torch.float32, pin_memory=on_gpu)
            there = host.to(device, non_blocking=True)
            back = (there * 2).cpu()
            assert int(back[-1]) == 2 * (size - 1)
            assert float(there.sum()) > 0
        if stream is not None:
            torch.empty(size + 4096 * len(done), device=device)
            event = torch.cuda.Event()
            event.record(stream)
            event.synchronize()
        done.append(1)


def test_18_another_threads_work_meanwhile(backend: str) -> None:
    """It neither breaks the capture nor gets into it (vllm#48053)."""
    device = device_of(backend)
    toy = ToyDecoder((None, 5), device)
    runtime = make_runtime(backend, toy_model(toy))
    plain = runtime.capture(progress=False)
    stop = threading.Event()
    done: list[int] = []
    failed: list[BaseException] = []

    def busy() -> None:
        try:
            _busy_elsewhere(device, stop, done)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        reports = [runtime.capture(progress=False) for _ in range(3)]
        answers_right(runtime, FullHistory(toy))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed
    assert done
    for report in reports:
        assert [cost.nodes for cost in report.buckets] == [cost.nodes for cost in plain.buckets]
    answers_right(runtime, FullHistory(toy))


# --- 19: finalizers inside a capture --------------------------------------------------------------


class Dropped:
    """Garbage in a cycle, which only the collector finds.

    Args:
        owned: goes with it.
        log: gets whether it went inside a capture.
        inside: whether one is running.
    """

    def __init__(self, owned: object, log: list[bool], inside: list[bool]) -> None:
        self.me = self
        self.owned, self.log, self.inside = owned, log, inside

    def __del__(self) -> None:
        self.log.append(self.inside[0])


def _garbage_for_the_collector() -> None:
    """Enough of it that the collector would run, were it not off."""
    for _ in range(20000):
        cycle: list[object] = []
        cycle.append(cycle)


def _add_one(pointer):  # type: ignore[no-untyped-def]
    tl.store(pointer, tl.load(pointer) + 1)


def _graph_and_kernel() -> list[object]:
    """What must not be destroyed inside a capture; nothing much without a GPU."""
    if not torch.cuda.is_available():
        return []
    tensor = torch.zeros(1, dtype=torch.int32, device="cuda")
    # Made anew, so that nobody else keeps the compiled kernel.
    add_one: Any = jit(_add_one)
    kernel = add_one[(1,)](tensor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    return [graph, kernel, add_one, tensor]


@pytest.fixture
def _collecting() -> Iterator[None]:
    """The collector is on, as in any program, and eager."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(500, 5, 5)
    gc.enable()
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("_collecting")
def test_19_no_finalizer_runs_inside_a_capture(backend: str) -> None:
    """Garbage made at capture is collected after it: a graph and a kernel among it
    (pytorch#161037)."""
    toy = ToyDecoder((None,), device_of(backend))
    rehearsals = choose_backend(backend, toy.device).rehearsals
    owned = [_graph_and_kernel() for _ in range(3)] if backend == "cuda_graph" else [[]] * 3
    runs, inside = [0], [False]
    log: list[bool] = []

    def decode(batch: Batch) -> Tensor:
        runs[0] += 1
        capturing = runs[0] % (rehearsals + 1) == 0
        if capturing:
            assert not gc.isenabled()
            inside[0] = True
            Dropped(owned.pop(), log, inside)
        _garbage_for_the_collector()
        logits = toy(batch)
        inside[0] = False
        return logits

    runtime = make_runtime(backend, toy_model(toy, decode))
    runtime.capture(progress=False)
    assert gc.isenabled()
    gc.collect()
    assert log == [False] * 3
    answers_right(runtime, FullHistory(toy))


def test_19_the_collector_is_as_it_was(backend: str) -> None:
    """On again after a capture, after one that failed; off still, if it was off."""
    toy = ToyDecoder((None,), device_of(backend))
    rehearsals = choose_backend(backend, toy.device).rehearsals
    runs, wrong = [0], [False]

    def decode(batch: Batch) -> Tensor:
        runs[0] += 1
        if wrong[0] and runs[0] % (rehearsals + 1) == 0:
            raise ValueError("now")
        return toy(batch)

    runtime = make_runtime(backend, toy_model(toy, decode), ladder=Ladder([2]))
    try:
        for enabled in (True, False):
            (gc.enable if enabled else gc.disable)()
            for wrong[0] in (False, True):
                runs[0] = 0
                if wrong[0]:
                    with pytest.raises(CaptureError, match=r"ValueError.*now"):
                        runtime.capture(progress=False)
                else:
                    runtime.capture(progress=False)
                assert gc.isenabled() is enabled
    finally:
        gc.enable()


@pytest.mark.gpu
def test_19_a_graph_and_a_kernel_dropped_by_the_step_itself() -> None:
    """Destroyed at once, by their last reference: the capture holds, or fails by name and leaves
    everything usable."""
    toy = ToyDecoder((None,), "cuda")
    held = [_graph_and_kernel() for _ in range(8)]

    def decode(batch: Batch) -> Tensor:
        if torch.cuda.is_current_stream_capturing() and held:
            held.pop().clear()
        return toy(batch)

    runtime = make_runtime("cuda_graph", toy_model(toy, decode))
    try:
        runtime.capture(progress=False)
    except CaptureError:
        held.clear()
        runtime.capture(progress=False)
    answers_right(runtime, FullHistory(toy))


# --- 20: a step that waits, or raises, in mid-capture ---------------------------------------------


def _usable_after(runtime: DecodeRuntime, toy: ToyDecoder, mend: Callable[[], None]) -> None:
    """After a failed capture: eager steps, then a capture, then replays, all right."""
    oracle = FullHistory(toy)
    told = {runtime.admit(prompt, stop=()): list(prompt) for prompt in PROMPTS[:3]}
    with pytest.raises(NotCaptured):
        runtime.step(list(told))
    mend()
    for _ in range(3):
        for slot, token in zip(told, runtime.step(list(told), eager=True).tokens(), strict=True):
            oracle.check_greedy(told[slot], token)
            told[slot].append(token)
    runtime.capture(progress=False)
    for _ in range(4):
        follow(runtime, oracle, told, list(told))
    for slot in told:
        runtime.retire(slot)
    audit(runtime.state)


@pytest.mark.parametrize("bucket", [0, 1, 2], ids=["largest", "middle", "smallest"])
@pytest.mark.parametrize("how", ["raises", "reads", "interrupted"])
def test_20_a_step_that_fails_in_mid_capture_only(backend: str, how: str, bucket: int) -> None:
    """The rehearsals pass. A named error with the user's line; nothing captured; state untouched;
    stream, pool and eager steps usable; the next capture succeeds (vllm#11587)."""
    toy = ToyDecoder((None, 5), device_of(backend))
    rehearsals = choose_backend(backend, toy.device).rehearsals
    runs, broken = [0], [False]

    def decode(batch: Batch) -> Tensor:
        runs[0] += 1
        logits = toy(batch)
        if broken[0] and runs[0] == (bucket + 1) * (rehearsals + 1):
            if how == "raises":
                raise ZeroDivisionError("midway")
            if how == "interrupted":
                raise KeyboardInterrupt
            logits = logits * float(logits.sum())
        return logits

    runtime = make_runtime(backend, toy_model(toy, decode))
    slot = runtime.admit(PROMPTS[2], stop=())
    for _ in range(4):
        runtime.step([slot], eager=True).tokens()
    runs[0], broken[0] = 0, True
    before = snapshot(runtime.state)
    with pytest.raises(KeyboardInterrupt if how == "interrupted" else CaptureError) as caught:
        runtime.capture(progress=False)
    after = snapshot(runtime.state)
    for name in before:
        assert torch.equal(before[name][:-1], after[name][:-1]), name
    if how != "interrupted":
        source = caught.value.source
        assert source is not None
        assert Path(source.file).name == "test_hazards_capture.py"
        assert ("ZeroDivisionError" if how == "raises" else "float(logits.sum())") in source.text
    assert runtime.report is None
    runtime.retire(slot)
    _usable_after(runtime, toy, lambda: broken.__setitem__(0, False))


@pytest.mark.gpu
@pytest.mark.parametrize("bucket", [0, 2], ids=["largest", "smallest"])
@pytest.mark.parametrize("how", ["device", "stream", "event", "driver", "free"])
def test_20_a_wait_that_torch_does_not_see(how: str, bucket: int) -> None:
    """It makes the capture invalid, which torch reports only when the capture ends."""
    from cuda.bindings import driver
    from cuda.bindings import runtime as cuda

    toy = ToyDecoder((None, 5), "cuda")
    broken, captures = [True], [0]

    def decode(batch: Batch) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            captures[0] += 1
            if broken[0] and captures[0] == bucket + 1:
                stream = torch.cuda.current_stream()
                if how == "device":
                    cuda.cudaDeviceSynchronize()
                elif how == "stream":
                    cuda.cudaStreamSynchronize(stream.cuda_stream)
                elif how == "driver":
                    driver.cuStreamQuery(driver.CUstream(stream.cuda_stream))
                elif how == "free":
                    _, pointer = cuda.cudaMalloc(1 << 20)
                    cuda.cudaFree(pointer)
                else:
                    event = torch.cuda.Event()
                    event.record(stream)
                    event.query()
        return toy(batch)

    runtime = make_runtime("cuda_graph", toy_model(toy, decode))
    slot = runtime.admit(PROMPTS[2], stop=())
    runtime.step([slot], eager=True).tokens()
    before = snapshot(runtime.state)
    try:
        runtime.capture(progress=False)
    except CaptureError:
        assert runtime.report is None
        assert not torch.cuda.is_current_stream_capturing()
        with runtime._backend.context():
            assert not torch.cuda.is_current_stream_capturing()
            torch.cuda.current_stream().synchronize()
            assert float(torch.rand(64, device="cuda").sum()) > 0
        after = snapshot(runtime.state)
        for name in before:
            assert torch.equal(before[name][:-1], after[name][:-1]), name
        runtime.retire(slot)
        _usable_after(runtime, toy, lambda: broken.__setitem__(0, False))
    else:
        # A driver may allow some of these in a capture of this thread: then all must be well.
        assert how in ("free", "driver", "event", "stream")
        runtime.retire(slot)
        answers_right(runtime, FullHistory(toy))


# --- 21: the largest batch ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ladder", "ceiling"),
    [
        (Ladder([1, 2], ceiling=5), 5),
        (Ladder.powers_of_two(6), 6),
        (Ladder.every(5), 5),
        (Ladder([7]), 7),
    ],
)
def test_21_every_batch_up_to_the_ceiling_is_replayed(
    backend: str, ladder: Ladder, ceiling: int
) -> None:
    """The ceiling is always captured; over it the answer is an error that is counted, never a
    silent eager step (sglang#33483)."""
    toy = ToyDecoder((5,), device_of(backend))
    oracle = FullHistory(toy)
    assert ladder.buckets[-1].rows == ladder.ceiling == ceiling
    runtime = make_runtime(backend, toy_model(toy), max_requests=8, ladder=ladder)
    report = runtime.capture(progress=False)
    assert [cost.bucket for cost in report.buckets] == sorted(ladder.buckets, reverse=True)
    told = {runtime.admit(prompt, stop=()): list(prompt) for prompt in PROMPTS}
    slots = list(told)
    for rows in range(1, ceiling + 1):
        follow(runtime, oracle, told, slots[:rows])
    padding = 0
    for rows in range(1, ceiling + 1):
        padding += min(b.rows for b in ladder.buckets if b.rows >= rows) - rows
    use = runtime.counters.buckets.values()
    assert sum(bucket.replays for bucket in use) == ceiling
    assert sum(bucket.eager_runs for bucket in use) == 0
    assert sum(bucket.padding_rows for bucket in use) == padding
    before = snapshot(runtime.state)
    for count in range(1, 4):
        for eager in (False, True):
            with pytest.raises(BatchTooLarge, match=f"asked for 8 rows.*ceiling is {ceiling}"):
                runtime.step(slots, eager=eager)
        assert runtime.counters.refusals == {RefusalReason.OVER_CEILING: 2 * count}
    after = snapshot(runtime.state)
    for name in before:
        assert torch.equal(before[name], after[name])
    follow(runtime, oracle, told, slots[-ceiling:])


# --- 22: the end ----------------------------------------------------------------------------------

CHILD = """
import sys
import torch
torch.set_num_threads(1)
from capture import DecodeRuntime, Ladder
from tests.toy import ToyDecoder, device_of

how, backend = sys.argv[1:]
toy = ToyDecoder((None, 5), device_of(backend))
runtimes = []
for _ in range(2):
    runtime = DecodeRuntime(
        toy.model(), max_requests=4, max_context=64, backend=backend, ladder=Ladder([1, 2, 4])
    )
    runtime.capture(progress=False)
    slots = [runtime.admit([3, 1, 4], stop=()), runtime.admit([1, 5], stop=())]
    runtime.step(slots).tokens()
    runtimes.append(runtime)
unread = [runtime.step(slots) for runtime in runtimes]
print("alive", flush=True)
if how == "dropped in the wrong order":
    state, captured = runtimes[0].state, list(runtimes[0]._buckets.values())
    del toy, slots, runtimes, runtime
    del state
    del captured
    print(unread[0].tokens(), flush=True)
elif how == "by an error":
    with runtimes[0]:
        raise SystemExit(7)
elif how == "closed twice":
    for runtime in (*runtimes, *runtimes):
        runtime.close()
elif how == "in a cycle":
    runtimes.append(runtimes)
"""


ENDS = ["left alive", "dropped in the wrong order", "by an error", "closed twice", "in a cycle"]


@pytest.mark.parametrize(
    ("backend", "how"),
    # A process each: without a GPU two of them show what there is to see.
    [("tape", "dropped in the wrong order"), ("tape", "by an error")]
    + [pytest.param("cuda_graph", how, marks=pytest.mark.gpu) for how in ENDS],
)
def test_22_a_process_ends_with_graphs_alive(backend: str, how: str) -> None:
    """With steps unread and captures in globals; no hang, no crash (pytorch#115388)."""
    root = Path(__file__).parents[1]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, how, backend],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == (7 if how == "by an error" else 0), child.stderr
    assert "alive" in child.stdout
    for sign in ("Traceback", "terminate called", "CUDA error", "Segmentation", "ignored in"):
        assert sign not in child.stderr, child.stderr


def test_22_captures_go_before_what_they_point_to(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing frees every capture while weights, state and inputs are still there."""
    toy = ToyDecoder((None,), device_of(backend))
    runtime = make_runtime(backend, toy_model(toy))
    runtime.capture(progress=False)
    runtime.step([runtime.admit([1, 2], stop=())])
    order: list[str] = []
    for bucket in runtime._buckets.values():
        captured = bucket.captured
        assert captured is not None
        close = captured.close

        def closing(close: Callable[[], None] = close) -> None:
            order.append("capture")
            close()

        monkeypatch.setattr(captured, "close", closing)
    clear, shut = runtime._captures.pointers.clear, runtime._backend.close
    monkeypatch.setattr(
        runtime._captures.pointers, "clear", lambda: (order.append("tensors"), clear())[1]
    )
    monkeypatch.setattr(runtime._backend, "close", lambda: (order.append("backend"), shut())[1])
    runtime.close()
    assert order == ["capture"] * 3 + ["tensors", "backend"]
    runtime.close()
    assert order.count("backend") == 1
    settle(runtime.state)
