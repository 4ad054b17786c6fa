"""NVTX ranges: what the host opens around each part of a step, and a step's scopes at capture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nvtx import _lib as nvtx_lib

from capture import CaptureError, DecodeRuntime, Ladder
from capture.debug import DebugOptions
from capture.errors import BatchTooLarge, DeviceLost, StepsOutstanding
from capture.ranges import DOMAIN, Ranges
from graphcache import Batch
from graphcache.models import StepFunction
from graphcache.scopes import scope
from tests.capture.support import Chain, chain_runtime
from tests.toy import BACKENDS, VOCAB, device_of

both = pytest.mark.parametrize("backend", BACKENDS)
Event = tuple[str, int | None] | str


class Tool:
    """A domain as an attached tool makes it; writes down what is opened and closed."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.made: list[tuple[str, int | None]] = []

    def get_event_attributes(
        self, message: str, payload: int | None = None
    ) -> tuple[str, int | None]:
        self.made.append((message, payload))
        return (message, payload)

    def push_range(self, attributes: tuple[str, int | None]) -> None:
        assert attributes in self.made
        self.events.append(attributes)

    def pop_range(self) -> None:
        self.events.append("-")

    def take(self) -> list[Event]:
        taken, self.events = self.events, []
        return taken

    @property
    def depth(self) -> int:
        return sum(-1 if event == "-" else 1 for event in self.events)


class NoTool(nvtx_lib.DummyDomain):  # type: ignore[misc]
    """The domain without a tool; nothing of it is to be called."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called with no tool attached")


# Addresses alone are checked without waiting for a step.
ADDRESSES = DebugOptions(guards=False, finite=False, shadow_every=0)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Tool:
    made = Tool()
    monkeypatch.setattr("capture.ranges.nvtx.get_domain", lambda name: {DOMAIN: made}[name])
    return made


@pytest.fixture
def runtime(backend: str, tool: Tool) -> Iterator[DecodeRuntime]:
    with chain_runtime(backend, ladder=Ladder([1, 3]), debug=ADDRESSES) as made:
        made.capture(progress=False)
        tool.take()
        yield made


@both
def test_a_step_is_prepare_replay_drain_with_its_rows(runtime: DecodeRuntime, tool: Tool) -> None:
    slots = [runtime.admit([token]) for token in (1, 2)]
    assert tool.take() == []
    result = runtime.step(slots)
    assert tool.take() == [("prepare", 3), "-", ("replay", 3), "-"]
    result.tokens()
    assert tool.take() == [("drain", None), "-"]
    result.tokens()
    assert tool.take() == []
    runtime.step(slots[:1])
    assert tool.take() == [("prepare", 1), "-", ("replay", 1), "-"]


@both
def test_a_steady_step_prepares_nothing(runtime: DecodeRuntime, tool: Tool) -> None:
    slots = [runtime.admit([token]) for token in (1, 2)]
    runtime.step(slots).tokens()
    tool.take()
    for _ in range(3):
        runtime.step(slots).tokens()
    assert tool.take() == [("replay", 3), "-", ("drain", None), "-"] * 3


@both
def test_attributes_are_made_once(backend: str, tool: Tool) -> None:
    with chain_runtime(backend, ladder=Ladder([1, 3])) as runtime:
        made = len(tool.made)
        assert sorted(tool.made, key=str) == [
            ("drain", None), ("prepare", 1), ("prepare", 3), ("replay", 1), ("replay", 3),
        ]  # fmt: skip
        runtime.capture(progress=False)
        scopes = set(tool.made[made:])
        assert len(tool.made) == made + len(scopes)
        made = len(tool.made)
        runtime.capture(progress=False)
        for count in (1, 2, 1):
            runtime.step([runtime.admit([5]) for _ in range(count)]).tokens()
        assert len(tool.made) == made


@both
def test_scopes_are_heard_inside_their_buckets_capture(backend: str, tool: Tool) -> None:
    """Rehearsals are not captures, and eager steps neither."""
    chain = Chain(device_of(backend))

    def step(batch: Batch) -> torch.Tensor:
        with scope("layer 0"), scope("attention"):
            logits = chain(batch)
        return logits

    model = StepFunction(step, VOCAB, device=chain.device)
    options: dict[str, Any] = {"max_requests": 2, "max_context": 16, "backend": backend}
    with DecodeRuntime(model, **options) as runtime:
        runtime.step([runtime.admit([1])], eager=True).tokens()
        assert tool.take() == [
            ("prepare", 1), "-", ("replay", 1), "-", ("drain", None), "-",
        ]  # fmt: skip
        runtime.capture(progress=False)
        once = [
            ("begin", None), "-",
            ("model", None), ("layer 0", None), ("attention", None), "-", "-", "-",
            ("sample", None), "-", ("advance", None), "-", "-",
        ]  # fmt: skip
        assert tool.take() == [("capture 2", None), *once, ("capture 1", None), *once]
        runtime.step([runtime.admit([1])]).tokens()
        assert tool.take() == [("prepare", 1), "-", ("replay", 1), "-", ("drain", None), "-"]


@both
def test_a_capture_that_fails_closes_what_it_opened(backend: str, tool: Tool) -> None:
    chain = Chain(device_of(backend))
    with chain_runtime(backend, chain, ladder=Ladder([2])) as runtime:

        def before(batch: Batch) -> None:
            if chain.runs == runtime._backend.rehearsals + 1:
                raise ValueError

        chain.before = before
        with pytest.raises(CaptureError):
            runtime.capture(progress=False)
        assert tool.take() == [("capture 2", None), ("begin", None), "-", ("model", None), "-", "-"]


@both
def test_ranges_are_closed_whatever_happens(
    runtime: DecodeRuntime, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = runtime.admit([1])
    results = [runtime.step([slot]), runtime.step([slot])]
    tool.take()
    with pytest.raises(StepsOutstanding):
        runtime.step([slot])
    with pytest.raises(BatchTooLarge):
        for result in results:
            result.tokens()
        tool.take()
        runtime.step([slot] * 4)
    assert tool.take() == []

    def late(*_: Any) -> None:
        raise TimeoutError

    pending = runtime.step([slot])
    with monkeypatch.context() as patch:
        patch.setattr(runtime._mailbox, "wait", late)
        with pytest.raises(TimeoutError):
            pending.tokens(timeout=0)
    assert tool.depth == 0

    def lost(*_: Any) -> None:
        raise DeviceLost("gone")

    bucket = runtime._buckets[runtime.ladder.buckets[0]]
    assert bucket.captured is not None
    pending.tokens()
    tool.take()
    with monkeypatch.context() as patch:
        patch.setattr(bucket.captured, "replay", lost)
        with pytest.raises(DeviceLost):
            runtime.step([slot])
    assert tool.take() == [("replay", 1), "-"]


@both
def test_a_copy_that_fails_closes_its_range(
    runtime: DecodeRuntime, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise DeviceLost("gone")

    slot = runtime.admit([1])
    monkeypatch.setattr(runtime._inputs, "send", lost)
    with pytest.raises(DeviceLost):
        runtime.step([slot])
    assert tool.take() == [("prepare", 1), "-"]


@both
def test_nothing_is_called_when_no_tool_listens(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.ranges.nvtx.get_domain", lambda name: object.__new__(NoTool))
    with chain_runtime(backend) as runtime:
        runtime.capture(progress=False)
        slots = [runtime.admit([token]) for token in (1, 2)]
        for asked in (slots, slots[:1]):
            runtime.step(asked).tokens()
            runtime.step(asked, eager=True).tokens()


@both
def test_ranges_can_be_turned_off(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError("no domain is needed")

    monkeypatch.setattr("capture.ranges.nvtx.get_domain", refuse)
    with chain_runtime(backend, nvtx=False) as runtime:
        runtime.capture(progress=False)
        runtime.step([runtime.admit([1])]).tokens()
        assert not runtime._ranges.listening


def test_without_a_tool_this_process_does_not_listen() -> None:
    """The real library says so by the kind of its domain."""
    ranges = Ranges()
    assert not ranges.listening
    assert ranges.attributes("replay", 3) is None
    ranges.push("scope")
    ranges.pop()


def test_a_range_without_rows_has_no_payload(tool: Tool) -> None:
    ranges = Ranges()
    assert ranges.listening
    assert ranges.attributes("drain") is ranges.attributes("drain")
    assert ranges.attributes("replay", 0) == ("replay", 0)
    ranges.push("layer 3")
    ranges.pop()
    assert tool.take() == [("layer 3", None), "-"]
