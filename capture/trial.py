"""A ladder captured on state of a single slot, to see what it takes, and dropped again."""

from __future__ import annotations

from typing import Any

import torch

from graphcache import DecodeState

from .backend import Backend
from .batch import StepBatch
from .captures import Captures
from .ladder import Bucket, Ladder
from .mailbox import Mailbox
from .memory import DeviceMemory, weight_bytes
from .pointers import tensors_of_model
from .ranges import Ranges
from .report import Counters
from .step import DecodeStep, Sampler

__all__ = ["Trial"]


class Trial:
    """What `DecodeRuntime` makes, around state of one slot. A context manager that frees it.

    Args:
        model: whose steps.
        backend: of its own; closed at the end.
        ladder: buckets to capture.
        max_context, block_tokens, sampler, keep_logits: as the runtime's.
    """

    def __init__(
        self,
        model: Any,
        backend: Backend,
        ladder: Ladder,
        max_context: int,
        block_tokens: int | None,
        sampler: Sampler | None,
        *,
        keep_logits: bool,
    ) -> None:
        self._model = model
        self._backend = backend
        self._device = torch.device(getattr(model, "device", "cpu"))
        self._memory = DeviceMemory(self._device)
        with backend.context():
            self._state = DecodeState(
                model.schemas,
                max_requests=1,
                max_context=max_context,
                vocab_size=model.vocab_size,
                device=self._device,
                fields=getattr(model, "fields", ()),
                block_tokens=block_tokens,
            )
            tokens = ladder.buckets[-1].tokens
            self._inputs = StepBatch(tokens, self._device, backend)
            self._mailbox = Mailbox(tokens, ladder.ceiling, self._device, backend.idle)
        self._step = DecodeStep(
            model, self._state, self._inputs, self._mailbox, sampler or self._state.sample,
            keep_logits=keep_logits,
        )  # fmt: skip
        self._captures = Captures(
            ladder, self._step.of, backend, Ranges(enabled=False), Counters(),
            lambda: {**tensors_of_model(model), **self._state.named_tensors()},
        )  # fmt: skip
        self._before = self._memory.used()

    def capture(self) -> tuple[int, dict[Bucket, int]]:
        """Bytes that capturing took in all, and what each recording took.

        Raises:
            CaptureError.
        """
        with self._backend.context(), torch.no_grad():
            costs = self._captures.capture(progress=False)
            self._backend.synchronize()
        each = {cost.bucket: cost.device_bytes for cost in costs}
        return max(self._memory.used() - self._before, sum(each.values())), each

    def weight_bytes(self) -> int:
        """Of the model's tensors; to be asked while its steps are captured."""
        own = [*self._state.named_tensors().values(), self._inputs.requested]
        own += [self._mailbox.counter, *([] if self._step.logits is None else [self._step.logits])]
        return weight_bytes(self._model, self._device, self._captures.pointers.held(), own)

    def drop(self) -> int:
        """Free the captures; bytes that stay taken all the same."""
        self._captures.drop()
        self._memory.release()
        return max(0, self._memory.used() - self._before)

    def prefill(self, chunk: int) -> int:
        """Bytes that absorbing one chunk of a prompt takes."""
        before = self._memory.used()
        with self._backend.context(), torch.no_grad():
            slot = self._state.open()
            positions = self._state.append_tokens(slot, [0] * (chunk + 1))
            self._model.prefill(self._state.prefill_batch(slot, positions))
            self._backend.synchronize()
        return max(0, self._memory.used() - before)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self._captures.drop()
        self._backend.close()
        self._memory.release()
