"""Where trials run: a runtime of their own, set up as a case says, run, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphcache import FinishReason

from ..report import CaptureReport
from ..result import StepResult
from ..runtime import DecodeRuntime
from .case import Case, Request, prompt_of
from .witness import Witness

__all__ = ["Outcome", "Scene", "Snapshot", "Stage"]


@dataclass(frozen=True)
class Snapshot:
    """All that a step may change, at one time.

    Attributes:
        state: by name, copies of the tensors behind all state.
        outside: by storage, copies of what the step writes outside it.
    """

    state: Mapping[str, Tensor]
    outside: Mapping[int, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What the steps of a case gave.

    Attributes:
        tokens: of each step, by row.
        reasons: likewise.
        logits: likewise, [rows, V].
        after: state behind the last step.
    """

    tokens: Sequence[Sequence[int]]
    reasons: Sequence[Sequence[int]]
    logits: Sequence[Tensor]
    after: Snapshot


@dataclass(frozen=True)
class Scene:
    """A case, set up.

    Attributes:
        case: whose requests were admitted.
        handles: theirs, in order.
        before: everything as it was then.
    """

    case: Case
    handles: Sequence[int]
    before: Snapshot


class Stage:
    """A runtime for trials.

    Args:
        model: whose step is tried.
        options: of the runtime.
        fields: what requests are admitted with, taken in turn by their key.
        forbidden: tensors that the step must not reach.

    Attributes:
        runtime: on which trials run.
        witness: sees what the step's Python does.
    """

    def __init__(
        self,
        model: Any,
        options: Mapping[str, Any],
        fields: Sequence[Mapping[str, object]] = (),
        forbidden: Iterable[Tensor] = (),
    ) -> None:
        self.runtime = DecodeRuntime(model, keep_logits=True, nvtx=False, **options)
        self.state = self.runtime.state
        self.ladder = self.runtime.ladder
        self.rows = self.state.max_requests
        self._fields = list(fields)
        self._handles: dict[int, int] = {}
        self.witness = Witness(self._own(), forbidden)
        for key, bucket in self.runtime._captures.buckets.items():
            bucket.step = self.witness.around(key, bucket.step)

    def _own(self) -> list[Tensor]:
        runtime, mailbox = self.runtime, self.runtime._mailbox
        return [
            *self.state.named_tensors().values(), runtime._inputs.requested, mailbox.counter,
            mailbox.ring_tokens, mailbox.ring_reasons, mailbox.word,
        ]  # fmt: skip

    # --- setting up ------------------------------------------------------------------------------

    @contextmanager
    def working(self) -> Iterator[None]:
        """Device work within goes in the order of the runtime's stream, without gradients."""
        with self.runtime._backend.context(), torch.no_grad():
            yield

    def capture(self) -> CaptureReport:
        """Capture the ladder."""
        with self.witness.capturing():
            return self.runtime.capture(progress=False)

    def admit(self, case: Case, *, leave: int = 0) -> list[int]:
        """Set up a case's requests; returns their handles. All other rows are taken, too.

        Args:
            case: whose requests.
            leave: rows to leave free, the last ones.
        """
        self.clear()
        by_row = {request.row: request for request in case.requests}
        spare = [row for row in reversed(range(self.rows)) if row not in by_row][:leave]
        steps = len(case.batches)
        for row in range(self.rows):
            request = by_row.get(row)
            handle = self._open() if request is None else self._admit(request, steps)
            if self.adopt(handle) != row:
                raise AssertionError(f"row {row} was to be taken, got {handle}")
        for row in spare:
            self.runtime.retire(self._handles.pop(row))
        for request in case.requests:
            if request.finished:
                self.state.done[request.row].fill_(int(FinishReason.STOP))
        return [self._handles[request.row] for request in case.requests]

    def crowd(self, rows: int, steps: int) -> tuple[Request, ...]:
        """New requests in the first `rows` slots, or in as many as the blocks suffice for."""
        blocks = self.state.blocks
        rows = min(rows, self.rows)
        if blocks is not None:
            rows = min(rows, blocks.num_blocks // blocks.blocks_for(steps + 2))
        return tuple(Request(key=row, row=row, length=0) for row in range(rows))

    def scene(self, case: Case, *, leave: int = 0, history: bool = False) -> Scene:
        """Set up a case, and remember how.

        Args:
            case: to be set up.
            leave: rows to leave free.
            history: leave what earlier steps wrote outside the state as it is.
        """
        if not history:
            self.witness.put_back()
        return Scene(case, self.admit(case, leave=leave), self.snapshot())

    def clear(self) -> None:
        """Retire everyone, so that rows are handed out in order from 0 on."""
        while self.state.slots.live < self.rows:
            self.adopt(self._open())
        for row in range(self.rows):
            self.runtime.retire(self._handles.pop(row))

    def adopt(self, handle: int) -> int:
        """Retire a handle, made by a fork or a restore, with all others. Returns its row."""
        row = self.state.slots.row_of(handle)
        self._handles[row] = handle
        return row

    def _open(self) -> int:
        return self.runtime.open(stop=())

    def _admit(self, request: Request, steps: int) -> int:
        fields = self._fields[request.key % len(self._fields)] if self._fields else None
        with self.witness.prefilling():
            return self.runtime.admit(
                prompt_of(request, self.state.vocab_size),
                max_tokens=steps + 2,
                temperature=request.temperature,
                seed=request.key,
                stop=(),
                fields=fields,
            )

    # --- running ---------------------------------------------------------------------------------

    def run(self, scene: Scene, *, eager: bool = False, late: bool = True) -> Outcome:
        """Run a case's steps from here.

        Args:
            scene: whose case.
            eager: the step's Python instead of its captures.
            late: read tokens a step late, as servers do, and not at once.
        """
        results, logits = [], []
        for step in range(len(scene.case.batches)):
            result = self.step(scene, step, eager=eager)
            logits.append(result.logits.clone())
            results.append(result)
            if step or not late:
                results[step - late].tokens()
        return Outcome(
            [result.tokens() for result in results],
            [[int(reason) for reason in result.reasons] for result in results],
            logits,
            self.snapshot(),
        )

    def step(self, scene: Scene, step: int, *, eager: bool = False) -> StepResult:
        """Submit one step of a case."""
        asked = [scene.handles[index] for index in scene.case.batches[step]]
        return self.runtime.step(asked, eager=eager)

    def snapshot(self) -> Snapshot:
        """All that a step may change, as it is now."""
        return Snapshot(
            {name: tensor.clone() for name, tensor in self.state.named_tensors().items()},
            {key: written.memory.clone() for key, written in self.witness.written.items()},
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Put everything back as it was."""
        for name, tensor in self.state.named_tensors().items():
            tensor.copy_(snapshot.state[name])
        for key, written in self.witness.written.items():
            # What was first written since had its first content until then.
            content = snapshot.outside.get(key, written.original)
            if content is not None:
                written.memory.copy_(content)

    def close(self) -> None:
        """Free captures and state."""
        self.runtime.close()
