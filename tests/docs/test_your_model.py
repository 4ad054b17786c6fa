"""The code of docs/your_model.md, as it stands there, against its own plain decoder."""

from __future__ import annotations

import contextlib
import random
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from capture import CaptureError, DecodeRuntime, Ladder
from graphcache import Batch
from graphcache.errors import PrefillFailed, RewindTooFar
from graphcache.models import compiled
from tests.books import audit, refused
from tests.toy import BACKENDS, device_of

PAGE = Path(__file__).parents[2] / "docs" / "your_model.md"
SLOTS = 4
CONTEXT = 256


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the page's code defines; in a file, so that errors can show its lines."""
    path = tmp_path_factory.mktemp("page") / "your_model.py"
    path.write_text("\n\n".join(blocks("python")), "utf-8")
    return runpy.run_path(str(path), run_name="your_model")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@contextlib.contextmanager
def serving(page: dict[str, Any], backend: str, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A plain decoder with attention and memories that matter, and a captured runtime of it."""
    torch.manual_seed(3)
    decoder = page["Decoder"]()
    for layer in decoder.layers:
        nn.init.normal_(layer.project.weight, std=0.25)
        nn.init.normal_(layer.output.weight, std=0.25)
    decoder.to(device_of(backend))
    settings: dict[str, Any] = {"max_requests": SLOTS, "block_tokens": 8, "prefill_chunk": 7}
    model = page["CapturedDecoder"](decoder)
    with DecodeRuntime(model, backend=backend, **{**settings, **options}) as runtime:
        runtime.capture(progress=False)
        yield decoder, runtime


def test_the_page_is_as_long_as_it_says() -> None:
    plain, captured = (
        sum(bool(line.strip()) for line in block.splitlines()) for block in blocks("python")[:2]
    )
    assert plain <= 60
    assert captured <= 40


def test_the_page_runs_and_prints_what_it_shows(
    page: dict[str, Any], backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page["run"](device_of(backend).type)
    assert capsys.readouterr().out == blocks("text")[0]


def test_the_page_bans_what_a_request_bans(page: dict[str, Any], backend: str) -> None:
    told = page["run_biased"](device_of(backend).type)
    assert len(told) == 5 and all(90 <= token < 96 for token in told)


def test_requests_come_and_go(page: dict[str, Any], backend: str) -> None:
    """Admitted, retired, forked, extended, restored: each text's next token is the plain one's."""
    chooser = random.Random(5)
    served = serving(page, backend, max_requests=SLOTS + 1, ladder=Ladder([1, 2, 4]))
    with served as (decoder, runtime):
        texts: dict[int, list[int]] = {}
        kept: list[tuple[Any, list[int]]] = []

        def draw(most: int) -> list[int]:
            return [chooser.randrange(96) for _ in range(chooser.randint(1, most))]

        for turn in range(60):
            action = chooser.choice(["admit", "step", "step", "fork", "extend", "retire", "keep"])
            if action == "admit" and len(texts) < SLOTS:
                prompt = draw(30)
                texts[runtime.admit(prompt)] = prompt
            elif not texts:
                continue
            elif action == "fork" and len(texts) < SLOTS:
                source = chooser.choice(list(texts))
                texts[runtime.fork(source)] = list(texts[source])
            elif action == "extend":
                slot, more = chooser.choice(list(texts)), draw(12)
                runtime.extend(slot, more)
                texts[slot] += more
            elif action == "keep":
                slot = chooser.choice(list(texts))
                kept.append((runtime.checkpoint(slot, minimal=turn % 2 == 0), list(texts[slot])))
            elif action == "retire":
                slot = chooser.choice(list(texts))
                runtime.retire(slot)
                del texts[slot]
                if kept:
                    checkpoint, text = kept.pop(0)
                    texts[runtime.restore(checkpoint)] = text
                    checkpoint.release()
            asked = chooser.sample(list(texts), chooser.randint(0, len(texts)))
            for slot, token in zip(asked, runtime.step(asked).tokens(), strict=True):
                assert token == decoder.answer(texts[slot], 1)[0]
                texts[slot].append(token)
        assert max(map(len, texts.values())) > 30
        assert sum(use.padding_rows for use in runtime.counters.buckets.values()) > 0
        audit(runtime.state, [checkpoint for checkpoint, _ in kept])


def test_replay_is_bit_equal_to_eager_at_the_same_bucket(
    page: dict[str, Any], backend: str
) -> None:
    with serving(page, backend, keep_logits=True, ladder=Ladder([4])) as (_, runtime):
        slots = [runtime.admit([5, 6, 7, index]) for index in range(3)]
        for _ in range(5):
            checkpoints = [runtime.checkpoint(slot) for slot in slots]
            replayed = runtime.step(slots)
            first = (replayed.tokens(), replayed.logits.clone())
            for slot in slots:
                runtime.retire(slot)
            slots = [runtime.restore(checkpoint) for checkpoint in checkpoints]
            eager = runtime.step(slots, eager=True)
            assert eager.tokens() == first[0]
            assert torch.equal(eager.logits, first[1])


def test_a_recycled_slot_starts_with_an_empty_memory(page: dict[str, Any], backend: str) -> None:
    with serving(page, backend, max_requests=1) as (decoder, runtime):
        for prompt in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1], [44, 2]):
            slot = runtime.admit(prompt)
            told = [runtime.step([slot]).tokens()[0] for _ in range(4)]
            assert told == decoder.answer(prompt, 4)
            runtime.retire(slot)


def test_rewind_is_refused_before_anything_is_written(page: dict[str, Any], backend: str) -> None:
    with serving(page, backend) as (decoder, runtime):
        slot = runtime.admit([8, 9, 10, 11])
        told = runtime.step([slot]).tokens()
        for length in (0, 1, 3):
            with refused(runtime, RewindTooFar, "folded into memory0, memory1"):
                runtime.rewind(slot, length)
        # To where it is: nothing has to be forgotten.
        runtime.rewind(slot, 4)
        assert runtime.step([slot]).tokens() == decoder.answer([8, 9, 10, 11, *told], 1)


def test_padding_and_finished_requests_keep_their_memory(
    page: dict[str, Any], backend: str
) -> None:
    with serving(page, backend, ladder=Ladder([4])) as (decoder, runtime):
        state = runtime.state
        # Whatever padding reads is not a number.
        with runtime._backend.context():
            state.pool["memory0"][-1] = state.pool["memory1"][-1] = float("nan")
        bystander, ended = runtime.admit([1, 2]), runtime.admit([3, 4], max_tokens=1)
        going = runtime.admit([5])
        runtime.step([ended]).tokens()
        rows = [state.slots.row_of(slot) for slot in (bystander, ended)]
        before = state.pool["memory0"][rows].clone()
        told = [runtime.step([ended, going]).tokens() for _ in range(6)]
        assert [token for _, token in told] == decoder.answer([5], 6)
        assert torch.equal(state.pool["memory0"][rows], before)


def test_an_eager_step_that_fails_midway_is_not_run_again(
    page: dict[str, Any], backend: str
) -> None:
    """Its first layer's memory holds the token already: a second run would fold it in twice."""
    with serving(page, backend) as (decoder, runtime):
        slot, other = runtime.admit([1, 2, 3]), runtime.admit([1, 2, 3])
        last = decoder.layers[1].output
        handle = last.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runtime.step([slot], eager=True)
        handle.remove()
        for again in (lambda: runtime.step([slot]), lambda: runtime.fork(slot)):
            with pytest.raises(PrefillFailed, match=r"failed midway.*retire"):
                again()
        assert runtime.step([other]).tokens() == decoder.answer([1, 2, 3], 1)
        runtime.retire(slot)
        audit(runtime.state)


def test_the_page_s_model_compiled_answers_the_same(
    page: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut into pieces, fields and all; each piece runs as it is, without waiting for a compiler."""
    pieces: list[Any] = []
    monkeypatch.setattr("torch._inductor.compile", lambda piece, *_: pieces.append(piece) or piece)
    decoder = page["Decoder"]().to(device_of(backend))
    model = compiled(page["CapturedDecoder"](decoder))
    with DecodeRuntime(model, max_requests=2, backend=backend) as runtime:
        runtime.capture(progress=False)
        prompts = [[1, 2, 3], [4] * 20]
        slots = [runtime.admit(prompt) for prompt in prompts]
        steps = [runtime.step(slots).tokens() for _ in range(9)]
    assert pieces
    assert [list(told) for told in zip(*steps, strict=True)] == [
        decoder.answer(prompt, 9) for prompt in prompts
    ]


def test_a_step_that_can_not_be_captured_names_the_page_s_line(
    page: dict[str, Any], backend: str
) -> None:
    class Peeking(page["CapturedDecoder"]):  # type: ignore[misc]
        def decode(self, batch: Batch) -> torch.Tensor:
            logits: torch.Tensor = super().decode(batch)
            return logits * float(logits.max())

    model = Peeking(page["Decoder"]().to(device_of(backend)))
    with DecodeRuntime(model, max_requests=1, backend=backend) as runtime:
        with pytest.raises(CaptureError, match=r"test_your_model\.py"):
            runtime.capture(progress=False)
