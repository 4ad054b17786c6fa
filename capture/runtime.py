"""Capture a model's step once per batch size, then replay it for whichever slots are asked for.

The host's part of a step is small on purpose. While the batch stays the same it compares a list
with the last one, launches a graph and returns; the new tokens come back through memory that the
device writes and the host polls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphcache import PAD_SLOT, Checkpoint, DecodeState
from graphcache.errors import DuplicateSlot, InvalidRequest, SchemaError

from .backend import choose_backend
from .batch import StepBatch
from .captures import BucketStep, Captures
from .checks import check_ladder, check_model, context_of
from .debug import DebugOptions, DebugWatch
from .errors import (
    BatchTooLarge,
    DeviceLost,
    NotCaptured,
    ProbeError,
    RuntimeBusy,
    RuntimeClosed,
    StepsOutstanding,
)
from .ladder import Ladder, Refusal
from .mailbox import Arrival, Mailbox
from .memory import DeviceMemory, weight_bytes
from .pointers import tensors_of_model
from .probes import ProbeBuffers
from .ranges import DRAIN, Ranges
from .report import CaptureReport, Counters
from .result import StepResult
from .spans import SpanMap, save_if_asked
from .step import DecodeStep, Sampler

if TYPE_CHECKING:
    from .memory_plan import MemoryPlan

__all__ = ["DecodeRuntime"]

CLOSE_TIMEOUT_S = 10.0


class _Clock:
    """Steps as the state sees them; see `graphcache.slots.StepClock`."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.submitted = 0
        self.completed = mailbox.completed
        self._wait = mailbox.wait

    def wait(self, step: int) -> None:
        self._wait(step)


class DecodeRuntime:
    """A model's decode step, captured; its requests, admitted and stepped.

    Belongs to one thread at a time: a call from another while it works raises `RuntimeBusy`.
    All device work goes to one stream of its own, and no method waits for more than that stream.
    A context manager: leaving it closes it.

    Args:
        model: anything with `schemas`, `vocab_size`, `prefill(batch)` and `decode(batch)`, see
            `graphcache.models.DecodeModel`.
        max_requests: slots.
        max_context: most tokens of a request; None for the model's.
        ladder: batch sizes to capture; None for powers of two up to `max_requests`.
        backend: "cuda_graph", "tape", or "auto" for what suits the model's device.
        block_tokens: tokens in a block of what grows with length; None for 64, or the next number
            that every layer's compressed entries fill evenly.
        kv_blocks: blocks; None for as many as `max_requests` full contexts take.
        sampler: captured `(logits [T, V], batch) -> tokens [T] int32`; None for the state's.
        prefill_chunk: most prompt tokens absorbed by one run of the model.
        keep_logits: copy each step's logits to a buffer, for `StepResult.logits`.
        debug: look at every step before and after, see `capture.debug`; None asks the environment
            variable GRAPHCACHE_DEBUG. Steps are waited for then. Off, it costs nothing.
        nvtx: open ranges where a tool listens.
        probes: keep what the step's probes see, for `probed()`: True for all, or shell patterns of
            names; costs a copy each. Off, nothing of them is captured.

    Attributes:
        state: what the requests own.
        sampler: as given.
        counters: what has run, and what was refused.
        report: of the last `capture()`, or None.
        debug: what debug mode has checked, or None when it is off.

    Raises:
        UnsupportedModel: when the model lacks a part of the contract.
        SchemaError, UnsupportedDriver, CaptureError: when state or backend can't be made.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_requests: int,
        max_context: int | None = None,
        ladder: Ladder | None = None,
        backend: str = "auto",
        block_tokens: int | None = None,
        kv_blocks: int | None = None,
        sampler: Sampler | None = None,
        prefill_chunk: int = 512,
        keep_logits: bool = False,
        debug: bool | DebugOptions | None = None,
        nvtx: bool = True,
        probes: bool | Iterable[str] = False,
    ) -> None:
        check_model(model)
        if prefill_chunk < 1:
            raise SchemaError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        self.model = model
        self.device = torch.device(getattr(model, "device", "cpu"))
        self.ladder = ladder or Ladder.powers_of_two(max_requests)
        check_ladder(self.ladder, max_requests)
        self._backend = choose_backend(backend, self.device)
        self._prefill_chunk = prefill_chunk
        checks = DebugOptions.chosen(debug)
        self._lock = threading.Lock()
        self._closed = False
        self._lost: str | None = None
        with self._backend.context():
            tokens = self.ladder.buckets[-1].tokens
            self._mailbox = Mailbox(tokens, self.ladder.ceiling, self.device, self._backend.idle)
            self._clock = _Clock(self._mailbox)
            self.state = DecodeState(
                model.schemas,
                max_requests=max_requests,
                max_context=context_of(model, max_context),
                vocab_size=model.vocab_size,
                device=self.device,
                fields=getattr(model, "fields", ()),
                block_tokens=block_tokens,
                kv_blocks=kv_blocks,
                stop_tokens=getattr(model, "stop_tokens", ())[:8],
                clock=self._clock,
                guarded=checks is not None and checks.guards,
            )
            self._inputs = StepBatch(tokens, self.device, self._backend)
        self.sampler = sampler
        self._keep_logits = keep_logits
        self._step = DecodeStep(
            model,
            self.state,
            self._inputs,
            self._mailbox,
            sampler or self.state.sample,
            keep_logits=keep_logits or (checks is not None and checks.finite),
        )
        self._ranges = Ranges(enabled=nvtx)
        self._listening = self._ranges.listening
        self._drain = self._ranges.attributes(DRAIN)
        self.counters = Counters()
        self._probes = ProbeBuffers.of(probes)
        self._eager_at = 0
        step_of = self._step.of if self._probes is None else self._probes.around(self._step.of)
        self._captures = Captures(
            self.ladder, step_of, self._backend, self._ranges, self.counters,
            _Named(model, self.state, self._inputs),
        )  # fmt: skip
        self._buckets = self._captures.buckets
        self.debug: DebugWatch | None = None
        if checks is not None:
            self.debug = DebugWatch(
                checks, self.state, self._step, self._mailbox, self._backend,
                self._captures.pointers,
            )  # fmt: skip
        # Which bucket serves so many slots, as far as it has been asked for.
        self._serving: dict[int, BucketStep] = {}
        self.report: CaptureReport | None = None

        # The batch last sent: to compare with, and to hand out.
        self._asked: list[int] = []
        self._asked_slots: tuple[int, ...] = ()
        self._epoch = 0
        self._asked_epoch = -1
        self._bucket: BucketStep | None = None
        self._newer: StepResult | None = None
        self._older: StepResult | None = None
        self._last_done_ns = 0

    # --- capture ---------------------------------------------------------------------------------

    def capture(self, *, progress: bool = True, plan: MemoryPlan | None = None) -> CaptureReport:
        """Rehearse and capture every bucket, the largest first. Live requests are left as they are.

        Waits for the steps submitted so far. Called again, it captures anew.

        Args:
            progress: show a bar with bucket and memory.
            plan: of a runtime like this one, for the report to compare with.

        Raises:
            InvalidRequest: for the plan of another runtime.
            CaptureError: with the user's line. Nothing stays captured then; state, device and
                eager steps can be used as before.
            DeviceLost: when that is why it failed.
            PointerMoved: when a tensor moved while the ladder was captured.
            SpansError: when $GRAPHCACHE_SPANS names a folder that can't be written to; the ladder
                is captured by then.
        """
        with self._at_work():
            if plan is not None:
                plan.check_meant_for(self.ladder, self.state)
            self._clock.wait(self._clock.submitted)
            self._inputs.requested.fill_(PAD_SLOT)
            self._asked_epoch = -1
            self.report = None
            memory = DeviceMemory(self.device)
            used = memory.used()
            costs = self._captures.capture(progress=progress)
            taken = memory.used() - used + (plan.retained_bytes if plan is not None else 0)
            self.report = CaptureReport(
                backend=self._backend.name,
                buckets=costs,
                state_bytes=self.state.memory_bytes(),
                weight_bytes=self._weight_bytes(),
                taken_bytes=max(taken, sum(cost.device_bytes for cost in costs)),
                planned_bytes=None if plan is None else plan.capture_bytes,
            )
            save_if_asked(self._captures.spans)
            return self.report

    def spans(self) -> SpanMap:
        """Which nodes of a replay belong to which scope of the step, by bucket.

        Asks the driver for every node, some microseconds each; waits for no step.

        Raises:
            NotCaptured: before `capture()`.
        """
        with self._at_work():
            return self._captures.spans()

    def _weight_bytes(self) -> int:
        held = self._captures.pointers.held()
        own = [*self.state.named_tensors().values(), self._inputs.requested, self._mailbox.counter]
        if self._step.logits is not None:
            own.append(self._step.logits)
        return weight_bytes(self.model, self.device, held, own)

    # --- steps -----------------------------------------------------------------------------------

    def step(self, slots: Sequence[int], *, eager: bool = False) -> StepResult:
        """Give each slot its next token: one replay. Returns before it has run.

        Sends nothing to the device while `slots` stays the same, one copy when it changes. Up to
        two results may be unread.

        Args:
            slots: handles, each once; none is a no-op. Finished slots may be among them: they
                yield -1.
            eager: run the step's Python instead of its capture, at the same bucket.

        Raises:
            BatchTooLarge, DuplicateSlot, InvalidSlot, StaleSlot, SlotPrefilling, NotCaptured,
            StepsOutstanding, PointerMoved (in debug mode): before anything is written.
            DebugFault: in debug mode, after the step.
            DeviceLost: when the device has failed.
        """
        if not self._lock.acquire(False):
            raise RuntimeBusy(_BUSY)
        try:
            if type(slots) is not list:
                slots = list(slots)
            if not slots:
                self._check_usable()
                return StepResult(0, (), None, 0, 0)
            older = self._older
            if older is not None and not older.is_read:
                self._make_room(older)
            if self.debug is not None:
                return self._step_watched(self.debug, slots, eager)
            number = self._clock.submitted + 1
            if slots != self._asked or self._epoch != self._asked_epoch:
                self._prepare(slots, number, eager)
            return self._submit(number, eager)
        finally:
            self._lock.release()

    def _submit(self, number: int, eager: bool) -> StepResult:
        bucket = self._bucket
        assert bucket is not None
        captured = bucket.captured
        if captured is None and not eager:
            raise NotCaptured(_NOT_CAPTURED)
        self._clock.submitted = number
        if self._listening:
            self._ranges.open(bucket.replay)
        try:
            if eager or captured is None:
                with self._backend.context(), torch.no_grad(), _device_errors():
                    bucket.step()
                bucket.use.eager_runs += 1
                self._eager_at = number
            else:
                captured.replay()
                bucket.use.replays += 1
        except BaseException as error:
            self._recount(error)
            raise
        finally:
            if self._listening:
                self._ranges.close()
        bucket.use.padding_rows += bucket.key.rows - len(self._asked)
        now = time.perf_counter_ns()
        newer = self._newer
        start = now if newer is None or newer.is_read else max(now, newer.expected_ns)
        result = StepResult(number, self._asked_slots, self, now, start + bucket.duration_ns)
        self._older, self._newer = newer, result
        return result

    def _step_watched(self, watch: DebugWatch, slots: list[int], eager: bool) -> StepResult:
        watch.check_addresses()
        number = self._clock.submitted + 1
        if slots != self._asked or self._epoch != self._asked_epoch:
            self._prepare(slots, number, eager)
        bucket = self._bucket
        assert bucket is not None
        if bucket.captured is None and not eager:
            raise NotCaptured(_NOT_CAPTURED)
        try:
            with _device_errors():
                watch.before(bucket.step, number, self._asked_slots, eager)
            result = self._submit(number, eager)
            with _device_errors():
                watch.after(result)
        except DeviceLost as error:
            self._lose(error)
            raise
        return result

    def _recount(self, error: BaseException) -> None:
        """A step ended by an exception: whether the device has counted it, the device knows."""
        self._asked_epoch = -1
        if isinstance(error, DeviceLost):
            self._lost = str(error)
            return
        try:
            self._backend.synchronize()
        except DeviceLost as lost:
            self._lost = str(lost)
        submitted, self._clock.submitted = self._clock.submitted, self._mailbox.completed()
        if self._clock.submitted < submitted and self.state.accumulates:
            # Run again, the step would fold its tokens twice into the layers that it reached.
            for slot in self._asked:
                self.state.mark_torn(slot)

    def _make_room(self, older: StepResult) -> None:
        newer = self._newer
        if newer is not None and not newer.is_read:
            raise StepsOutstanding(
                f"the tokens of steps {older.number} and {newer.number} are unread; call tokens() "
                "on the older result before asking for another step"
            )
        # The newer step was read, so the older is complete: keep what would be overwritten.
        older.tokens()

    def _prepare(self, asked: list[int], number: int, eager: bool) -> None:
        """Validate a new batch and send its rows."""
        self._check_usable()
        bucket = self._serving.get(len(asked)) or self._look_up(len(asked))
        rows = self.state.slots.rows_to_step(asked)
        if len(set(rows)) != len(rows):
            twice = next(handle for handle in asked if asked.count(handle) > 1)
            raise DuplicateSlot(f"slot {twice} is asked for more than once in one step")
        if bucket.captured is None and not eager:
            raise NotCaptured(_NOT_CAPTURED)
        if self._listening:
            self._ranges.open(bucket.prepare)
        try:
            self._inputs.send(rows, bucket.key, number)
        except DeviceLost as error:
            self._lose(error)
            raise
        finally:
            if self._listening:
                self._ranges.close()
        # A copy: the caller's list may change under its name.
        self._asked = asked.copy()
        self._asked_slots = tuple(asked)
        self._bucket, self._asked_epoch = bucket, self._epoch

    def _look_up(self, count: int) -> BucketStep:
        key = self.ladder.bucket_for(count, self.ladder.q_len)
        if isinstance(key, Refusal):
            self.counters.refusals[key.reason] += 1
            raise BatchTooLarge(
                f"{key}; step fewer slots at a time, or make the runtime with a larger ladder"
            )
        bucket = self._serving[count] = self._buckets[key]
        return bucket

    def collect(self, result: StepResult, timeout: float | None) -> tuple[list[int], list[int]]:
        """For `StepResult.tokens`: wait for a step and read what it gave."""
        if self._lost is not None and self._mailbox.completed() < result.number:
            raise DeviceLost(self._lost)
        if self._listening:
            self._ranges.open(self._drain)
        try:
            arrival = self._mailbox.wait(result.number, result.expected_ns, timeout)
        except DeviceLost as error:
            self._lose(error)
            raise
        finally:
            if self._listening:
                self._ranges.close()
        self._learn_duration(result, arrival)
        count = len(result.slots)
        return self._mailbox.read(result.number, count, count)

    def _learn_duration(self, result: StepResult, arrival: Arrival) -> None:
        """Let the next wait for this bucket begin to poll shortly before the step is done."""
        now = time.perf_counter_ns()
        bucket = self._bucket
        if bucket is not None and result.slots is self._asked_slots:
            if arrival is Arrival.SEEN:
                took = now - max(result.submitted_ns, self._last_done_ns)
                known = bucket.duration_ns
                bucket.duration_ns = took if not known else (3 * known + took) // 4
            elif arrival is Arrival.OVERSLEPT:
                bucket.duration_ns //= 2
        self._last_done_ns = now

    def logits_of(self, result: StepResult) -> Tensor:
        """For `StepResult.logits`."""
        logits = self._step.logits
        if not self._keep_logits or logits is None:
            raise NotCaptured("logits are not kept; make the runtime with keep_logits=True")
        if result is not self._newer:
            raise NotCaptured(f"the logits of step {result.number} were overwritten by a later one")
        self._mailbox.wait(result.number)
        return logits[: len(result.slots)]

    def probed(self) -> dict[str, Tensor]:
        """What each probe saw in the latest step, by name, in the order in which they ran.

        Waits for the steps submitted, and copies to the host. Rows are those of the step's bucket,
        padding included. A name probed twice in a step ends in " (2)" the second time.

        Raises:
            ProbeError: when probes are off, or no step has run.
        """
        with self._at_work():
            if self._probes is None:
                raise ProbeError("probes are off; make the runtime with probes=True")
            number = self._clock.submitted
            if self._bucket is None or not number:
                raise ProbeError("no step has run yet; probes hold the latest step's values")
            self._clock.wait(number)
            return self._probes.values(self._bucket.key, eager=self._eager_at == number)

    # --- a request's life ------------------------------------------------------------------------

    def admit(
        self,
        tokens: Iterable[int],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Iterable[int] | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> int:
        """Admit a request with its prompt: `open`, then `extend`. Returns the slot's handle.

        Raises:
            InvalidRequest, ContextFull, BlocksExhausted, SlotsExhausted, PointerMoved: before
                anything is written. Whatever the model raises in its prefill; the slot is given
                back then.
        """
        with self._at_work():
            tokens = self.state.check_prompt(tokens, max_tokens)
            slot = self._open(
                max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                seed=seed, stop=stop, fields=fields,
            )  # fmt: skip
            try:
                self._extend(slot, tokens, None, final=True)
            except BaseException:
                self.state.retire(slot)
                raise
            return slot

    def open(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Iterable[int] | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> int:
        """Take a slot for a request without tokens yet; see `DecodeState.open`.

        Raises:
            InvalidRequest, SlotsExhausted, PointerMoved: before anything is written.
        """
        with self._at_work():
            return self._open(
                max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                seed=seed, stop=stop, fields=fields,
            )  # fmt: skip

    def extend(
        self,
        slot: int,
        tokens: Iterable[int],
        *,
        max_tokens: int | None = None,
        final: bool = True,
    ) -> None:
        """Put tokens behind a slot's: a prompt, a part of one, or the next turn of a chat.

        Absorbs what was pending and all but the last new token, which the next step takes. A
        slot that had finished runs again. A slot that has stepped waits for the steps submitted.

        Args:
            slot: its handle.
            tokens: at least one id.
            max_tokens: most new tokens from here on; None for what the slot was opened with.
            final: steps may take the slot; False while more of the prompt is to come.

        Raises:
            InvalidRequest, ContextFull, BlocksExhausted, InvalidSlot, StaleSlot: before anything
                is written.
            PrefillFailed: when an earlier prefill of the slot raised midway.
        """
        with self._at_work():
            self._extend(slot, tokens, max_tokens, final=final)

    def retire(self, slot: int) -> None:
        """End a request. Its row and blocks serve others once submitted steps are done.

        Raises:
            InvalidSlot, StaleSlot.
        """
        with self._at_work():
            self.state.retire(slot)
            self._epoch += 1

    def fork(self, slot: int, *, seed: int | None = None) -> int:
        """A second request that goes on from here; see `DecodeState.fork`."""
        with self._at_work():
            self._check_pointers()
            self._epoch += 1
            return self.state.fork(slot, seed)

    def rewind(self, slot: int, length: int) -> None:
        """Take a slot back to its first `length` absorbed tokens; see `DecodeState.rewind`."""
        with self._at_work():
            self._epoch += 1
            self.state.rewind(slot, length)

    def checkpoint(self, slot: int, *, minimal: bool = False) -> Checkpoint:
        """All that a slot owns, to be restored later; see `DecodeState.checkpoint`."""
        with self._at_work():
            return self.state.checkpoint(slot, minimal=minimal)

    def restore(self, checkpoint: Checkpoint) -> int:
        """Admit a request in a checkpoint's state; see `DecodeState.restore`."""
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidRequest(f"restore takes what checkpoint() returned, got {checkpoint!r}")
        with self._at_work():
            self._check_pointers()
            self._epoch += 1
            return self.state.restore(checkpoint)

    def length_of(self, slot: int) -> int:
        """Tokens that a slot has absorbed; waits for the steps submitted."""
        with self._at_work():
            return self.state.length_of(slot)

    def tokens_of(self, slot: int) -> list[int]:
        """All tokens of a slot, prompt first, pending one last; waits for the steps submitted."""
        with self._at_work():
            return self.state.tokens_of(slot)

    def close(self) -> None:
        """Wait for the steps submitted, then free captures, before what they point to.

        Harmless when repeated. Tokens of steps that have completed can still be read.

        Raises:
            RuntimeBusy: while another thread is at work.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeBusy(_BUSY)
        try:
            if not self._closed:
                self._closed = True
                self._asked_epoch = -1
                self._free()
        finally:
            self._lock.release()

    def _free(self) -> None:
        if self._lost is None:
            try:
                self._mailbox.wait(self._clock.submitted, timeout=CLOSE_TIMEOUT_S)
                self._backend.synchronize()
            except TimeoutError:
                # Still running: what it uses must outlive it.
                _abandoned.append(self)
                return
            except DeviceLost as error:
                self._lost = str(error)
        for result in (self._older, self._newer):
            if result is not None and not result.is_read and self._lost is None:
                result.tokens()
        self._captures.drop()
        with suppress(RuntimeError):
            self._backend.close()
        # Results point here: without these a closed runtime is freed with its last reference.
        self._older = self._newer = self._bucket = None

    def __enter__(self) -> DecodeRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- private ---------------------------------------------------------------------------------

    def _open(self, **options: Any) -> int:
        self._check_pointers()
        self._epoch += 1
        return self.state.open(**options)

    def _extend(
        self, slot: int, tokens: Iterable[int], max_tokens: int | None, *, final: bool
    ) -> None:
        positions = self.state.append_tokens(slot, tokens, max_tokens)
        self._epoch += 1
        try:
            for start in range(positions.start, positions.stop, self._prefill_chunk):
                chunk = range(start, min(start + self._prefill_chunk, positions.stop))
                self.model.prefill(self.state.prefill_batch(slot, chunk))
                self.state.absorbed(slot, chunk)
        except BaseException:
            self.state.mark_torn(slot)
            raise
        if final:
            self.state.complete_prefill(slot)

    def _check_pointers(self) -> None:
        if self.report is not None:
            self._captures.pointers.check()

    def _lose(self, error: DeviceLost) -> None:
        """Remember that the device is lost; the steady path, too, must come to look."""
        self._lost = str(error)
        self._asked_epoch = -1

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeClosed("this runtime is closed; make a new one")
        if self._lost is not None:
            raise DeviceLost(self._lost)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise RuntimeBusy(_BUSY)
        try:
            self._check_usable()
            with self._backend.context(), torch.no_grad(), _device_errors():
                yield
        except DeviceLost as error:
            self._lose(error)
            raise
        finally:
            self._lock.release()


_abandoned: list[DecodeRuntime] = []
"""Runtimes closed while a step would not end; kept, since the device still uses their memory."""


class _Named:
    """Tensors that captures hold, by name, as they are whenever it is called."""

    def __init__(self, model: Any, state: DecodeState, inputs: StepBatch) -> None:
        self._model = model
        self._state = state
        self._inputs = inputs

    def __call__(self) -> dict[str, Tensor]:
        return {
            **tensors_of_model(self._model),
            **self._state.named_tensors(),
            "step inputs": self._inputs.requested,
        }


_BUSY = "the runtime is at work for another thread; it belongs to one thread at a time"
_NOT_CAPTURED = "nothing is captured; call capture() first, or step(slots, eager=True)"


@contextmanager
def _device_errors() -> Iterator[None]:
    """Errors of the device that torch reports, as `DeviceLost`."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLost(f"the device failed: {error}; close this runtime") from error
