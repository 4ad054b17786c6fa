"""Compiled steps: cut at this package's operations, compiled once, captured as others are.

Most tests put a stand-in in the compiler's place that gives each piece back as it is: then steps
must have the bits of the model uncompiled. The real compiler runs for one family on a CPU, and for
all of them on a GPU.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import CaptureError, DecodeRuntime, Ladder
from graphcache import Batch, Field, scopes
from graphcache.errors import UnsupportedModel, UnsupportedPlatform
from graphcache.models import StepFunction, compiled, load_model
from graphcache.models.program import build_program
from graphcache.ops import run_compiled
from graphcache.probes import probe
from tests.books import audit, poison
from tests.models.serving import assert_replays_are_eager_steps, logits_of, own_answer, requests
from tests.models.small_families import SMALL, small_model
from tests.models.tiny import tiny_v4_model
from tests.test_generate_equality import answers
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

both = pytest.mark.parametrize("backend", BACKENDS)
FAMILIES = [*sorted(SMALL), "deepseek_v4"]


class StandIn:
    """In the compiler's place: counts pieces, and gives them back as they are."""

    def __init__(self) -> None:
        self.pieces: list[torch.fx.GraphModule] = []

    def __call__(self, piece: Any, examples: list[Tensor], options: dict[str, Any]) -> Any:
        assert options == {"triton.cudagraphs": False}
        self.pieces.append(piece)
        return piece


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    fake = StandIn()
    monkeypatch.setattr("torch._inductor.compile", fake)
    return fake


def built(family: str, backend: str) -> Any:
    model = tiny_v4_model() if family == "deepseek_v4" else small_model(family)
    return model.to(device_of(backend))


def runtime_of(model: Any, backend: str, **options: Any) -> DecodeRuntime:
    settings = {"max_requests": 3, "max_context": 128, "ladder": Ladder([1, 3]), "nvtx": False}
    return DecodeRuntime(model, backend=backend, keep_logits=True, **{**settings, **options})


def logits_along(model: Any, backend: str) -> list[Tensor]:
    """Logits of replays while slots come and go."""
    with runtime_of(model, backend) as runtime:
        runtime.capture(progress=False)
        prompts = [[token % runtime.state.vocab_size for token in p] for p, _ in requests()]
        slots = [runtime.admit(prompt, max_tokens=30) for prompt in prompts[1:4]]
        asked = [slots, slots[1:2], slots[:2], slots[::-1]] * 3
        found = [logits_of(runtime, some, eager=False) for some in asked]
        audit(runtime.state)
    return found


# --- with a stand-in ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@both
def test_a_step_in_pieces_has_the_bits_of_the_whole(
    stand_in: StandIn, family: str, backend: str
) -> None:
    torch.set_num_threads(1)
    decoder = load_model(built(family, backend))
    expected = logits_along(decoder, backend)
    assert not stand_in.pieces
    found = logits_along(compiled(decoder), backend)
    assert stand_in.pieces
    for mine, whole in zip(found, expected, strict=True):
        assert torch.equal(mine, whole)


def test_pieces_hold_all_but_our_operations_and_layers_share_them(stand_in: StandIn) -> None:
    with runtime_of(load_model(small_model("llama"), compile=True), "tape") as runtime:
        runtime.capture(progress=False)
        (_, three) = (bucket.nodes for bucket in runtime.spans().buckets)
    names = [node.name for node in three]
    per_layer = ["graphcache::kv_append", "graphcache::decode_attention"]
    piece = "graphcache::run_compiled"
    begin, end = names.index(piece), len(names) - names[::-1].index(piece)
    assert names[begin:end] == [piece, *[*per_layer, piece] * 3]
    assert all(name.startswith(("graphcache::", "aten::copy_")) for name in names)
    # The first, two between layers that are alike, the last: three for each of two buckets.
    assert len(stand_in.pieces) == 6


def test_nothing_is_compiled_twice_or_after_capture(stand_in: StandIn) -> None:
    model = load_model(small_model("llama"), compile=True)
    with runtime_of(model, "tape") as runtime:
        runtime.capture(progress=False)
        count = len(stand_in.pieces)
        slots = [runtime.admit([5, 6, 7], max_tokens=9) for _ in range(3)]
        runtime.step(slots).tokens()
        runtime.step(slots[:1], eager=True).tokens()
        runtime.capture(progress=False)
        runtime.step(slots).tokens()
        assert len(stand_in.pieces) == count
    held = len(run_compiled._pieces)
    assert held >= count
    # Pieces are the model's, whatever the state: a plan's trial pays for the runtime.
    with runtime_of(model, "tape", max_requests=4) as other:
        other.capture(progress=False)
    assert len(stand_in.pieces) == count
    programs = model.decode._programs
    assert len(programs) == 2
    del runtime, other, model
    gc.collect()
    assert not programs
    assert len(run_compiled._pieces) <= held - count


def test_operations_keep_their_scopes_and_pieces_what_they_share(stand_in: StandIn) -> None:
    with runtime_of(load_model(small_model("llama"), compile=True), "tape") as runtime:
        runtime.capture(progress=False)
        bucket = runtime.spans().buckets[0]
    spans = {span.path: bucket.nodes[span.first : span.end] for span in bucket.spans}
    for layer in range(3):
        path = ("model", f"layer {layer}", "attention")
        assert [node.name for node in spans[*path, "append"]] == ["graphcache::kv_append"]
        assert [node.name for node in spans[*path, "attend"]] == ["graphcache::decode_attention"]
    inside = [node.name for node in spans["model",]]
    assert inside.count("graphcache::run_compiled") == 4
    assert scopes.path() == ()


def test_the_model_itself_stays_as_it_was(stand_in: StandIn) -> None:
    decoder = load_model(small_model("llama"))
    twin = compiled(decoder)
    assert type(twin) is type(decoder) and twin.model is decoder.model
    assert twin.schemas == decoder.schemas and "decode" not in vars(decoder)
    logits_along(decoder, "tape")
    assert not stand_in.pieces


def toy_step(change: Callable[[Tensor, Batch], Tensor], **options: Any) -> StepFunction:
    """A toy decoder whose logits pass through `change`."""
    toy = ToyDecoder()

    def absorb(batch: Batch) -> None:
        toy(batch)

    return StepFunction(
        lambda batch: change(toy(batch), batch), VOCAB, schemas=toy.schemas,
        chunk=absorb, **options,
    )  # fmt: skip


def test_fields_are_read_and_written_between_pieces(stand_in: StandIn) -> None:
    def counted(logits: Tensor, batch: Batch) -> Tensor:
        count = batch.read("count") + 1
        batch.write("count", count)
        probe("count", count)
        return logits + count * torch.arange(VOCAB)

    model = toy_step(counted, fields=(Field("count", (1,), torch.float32, accumulates=True),))
    expected, found = (logits_along(either, "tape") for either in (model, compiled(model)))
    assert stand_in.pieces
    for mine, whole in zip(found, expected, strict=True):
        assert torch.equal(mine, whole)
    assert not torch.equal(found[0], found[4])


outside = torch.zeros(3)


def _writes_outside(logits: Tensor, batch: Batch) -> Tensor:
    outside.add_(1)
    return logits


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda logits, _: logits * logits.max().item(), "_local_scalar_dense.default can't be"),
        (lambda logits, _: logits + logits.nonzero().sum(), "nonzero.default can't be compiled"),
        (lambda logits, _: logits if logits.sum() > 0 else -logits, "the host reads a value"),
        (
            lambda logits, _: logits[torch.ones(3)],
            "the step can't be traced to be compiled: .*tensors used as ind",
        ),
        (lambda logits, _: logits + torch.rand_like(logits), "rand_like.default can't be compiled"),
        (
            _writes_outside,
            "add_.Tensor can't be compiled: it writes a tensor that lies outside the step",
        ),
    ],
)
def test_what_can_not_be_compiled_is_named_before_anything_is_written(
    stand_in: StandIn, change: Callable[[Tensor, Batch], Tensor], says: str
) -> None:
    model = compiled(toy_step(change))
    with runtime_of(model, "tape") as runtime:
        slot = runtime.admit([3, 4], max_tokens=5)
        with pytest.raises(UnsupportedModel, match=says):
            runtime.step([slot], eager=True)
        with pytest.raises(CaptureError, match=says) as refused:
            runtime.capture(progress=False)
    assert Path(__file__).name in str(refused.value.source)
    assert not stand_in.pieces
    assert not outside.any()


def test_what_a_piece_makes_it_may_write() -> None:
    def step(x: Tensor) -> Tensor:
        y = x * 2
        y[0].add_(1)
        return y.relu_()

    given = torch.randn(3, 4)
    assert torch.equal(build_program(step, [given]).run(given), step(given))


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such luck\nand more")

    monkeypatch.setattr("torch._inductor.compile", fails)
    with runtime_of(load_model(small_model("llama"), compile=True), "tape") as runtime:
        with pytest.raises(
            CaptureError, match=r"UnsupportedPlatform: .*no such luck; use the model"
        ):
            runtime.capture(progress=False)


def test_without_a_compiler_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedPlatform, match="C\\+\\+ compiler, and there is no 'no-such-com"):
        load_model("nowhere", device="cpu", compile=True)
    with pytest.raises(UnsupportedPlatform, match="use the model uncompiled"):
        compiled(toy_step(lambda logits, _: logits))


# --- with the compiler ----------------------------------------------------------------------------


def compiled_answers(family: str, backend: str, ladder: Ladder) -> None:
    model = built(family, backend)
    expected = [own_answer(copy.deepcopy(model), *request) for request in requests()]
    with runtime_of(
        load_model(model, compile=True), backend, ladder=ladder, prefill_chunk=24
    ) as runtime:
        poison(runtime.state)
        runtime.capture(progress=False)
        assert answers(runtime, requests(), at_once=3, turn=4) == expected
        assert_replays_are_eager_steps(runtime)
        audit(runtime.state)


@pytest.mark.shows("compiled", family="llama")
def test_a_compiled_family_answers_as_generate_does() -> None:
    torch.set_num_threads(1)
    compiled_answers("llama", "tape", Ladder([3]))


@pytest.mark.gpu
@pytest.mark.shows("compiled")
@pytest.mark.parametrize("family", sorted(SMALL))
def test_every_compiled_family_answers_as_generate_does(family: str) -> None:
    compiled_answers(family, "cuda_graph", Ladder([1, 3]))


@pytest.mark.gpu
@pytest.mark.shows("compiled", dtype=torch.bfloat16)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_compiled_family_in_bf16_replays_its_bits(family: str) -> None:
    model = load_model(built(family, "cuda_graph"), dtype=torch.bfloat16, compile=True)
    with runtime_of(model, "cuda_graph") as runtime:
        runtime.capture(progress=False)
        assert_replays_are_eager_steps(runtime)
