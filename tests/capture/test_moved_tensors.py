"""Tensors that captures hold by address, and that lie elsewhere afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureError, DecodeRuntime
from capture.errors import (
    NotCaptured,
    PointerMoved,
)
from graphcache import Batch
from graphcache.models import StepFunction
from tests.capture.support import (
    bits,
    books,
    captured,
    decode,
    differing,
    toy_runtime,
)
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

both = pytest.mark.parametrize("backend", BACKENDS)


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
