"""Debug mode: each step looked at before and after, and some of them run twice.

Five checks. Addresses: what captures point to is where it was. Guards: the rows before and after
each arena, which belong to nobody, are as they were. Finite: the logits of slots that ran are
numbers. And every so many steps: foreign, whatever belongs to slots outside the batch is as it was,
and shadow, the step's Python run eagerly on the same state gives the same bits.

A step that is looked at is waited for, so that what goes wrong is named in the step where it did.
With neither guards nor finite only steps with a shadow are: the others are submitted as ever.
Without debug mode none of this exists: a step asks once whether it is on.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcache import DecodeState
from graphcache.errors import SchemaError
from graphcache.pool import GUARD, StatePool

from .backend import Backend
from .errors import DebugFault
from .mailbox import Mailbox
from .pointers import PointerLedger
from .result import StepResult
from .shadow import Outcome, Shadow
from .step import DecodeStep

__all__ = ["VARIABLE", "DebugOptions", "DebugWatch"]

VARIABLE = "GRAPHCACHE_DEBUG"
_ON = ("1", "on", "true", "yes")
_OFF = ("", "0", "off", "false", "no")


@dataclass(frozen=True)
class DebugOptions:
    """Which checks debug mode makes.

    Args:
        addresses: before each step. A microsecond for ten tensors, and the listing of the model's.
        guards: after each step; state is allocated with two rows more. Four small kernels.
        finite: after each step; logits are kept. Three small kernels.
        shadow_every: compare the first step with an eager run of it, and every so-manieth after
            it; 0 for none. An eager step and a pass over all state, and memory for a copy of what
            the batch's slots own.

    Raises:
        SchemaError: for a negative `shadow_every`.
    """

    addresses: bool = True
    guards: bool = True
    finite: bool = True
    shadow_every: int = 64

    def __post_init__(self) -> None:
        if self.shadow_every < 0:
            raise SchemaError(f"shadow_every must be at least 0, got {self.shadow_every}")

    @classmethod
    def chosen(cls, debug: bool | DebugOptions | None) -> DebugOptions | None:
        """The options that `debug` stands for; None for off.

        Args:
            debug: None asks the environment variable `GRAPHCACHE_DEBUG`.

        Raises:
            SchemaError: when the variable is neither on nor off.
        """
        if isinstance(debug, DebugOptions):
            return debug
        if debug is None:
            said = os.environ.get(VARIABLE, "").strip().lower()
            if said not in _ON + _OFF:
                raise SchemaError(f"{VARIABLE}={said!r} is neither on nor off: set it to 1 or 0")
            debug = said in _ON
        return cls() if debug else None


class DebugWatch:
    """Checks a runtime's steps. Belongs to the thread that steps.

    Args:
        options: which checks.
        state: guarded, if guards are to be checked.
        step: keeps its logits, if they are to be checked.
        mailbox: of the steps.
        backend: likewise.
        pointers: what captures point to.

    Attributes:
        checks: how often each check was made, by name.
    """

    def __init__(
        self,
        options: DebugOptions,
        state: DecodeState,
        step: DecodeStep,
        mailbox: Mailbox,
        backend: Backend,
        pointers: PointerLedger,
    ) -> None:
        self.checks: Counter[str] = Counter()
        self._options = options
        self._state = state
        self._step = step
        self._mailbox = mailbox
        self._backend = backend
        self._pointers = pointers
        self._shadow = Shadow(state, step, mailbox, backend)
        self._steps = 0
        self._ran: Tensor | None = None
        self._expected: Outcome | None = None

    def check_addresses(self) -> None:
        """Before anything of a step is written.

        Raises:
            PointerMoved.
        """
        if self._options.addresses:
            self.checks["addresses"] += 1
            self._pointers.check()

    def before(
        self, step: Callable[[], None], number: int, slots: Sequence[int], eager: bool
    ) -> None:
        """When a step's inputs have been sent, and before it runs.

        Args:
            step: its Python.
            number: of the step.
            slots: handles.
            eager: it will be an eager step itself, so there is nothing to compare.
        """
        every = self._options.shadow_every
        due = bool(every) and self._steps % every == 0
        self._steps += 1
        self._expected = None
        if not (due or self._options.finite):
            return
        rows = [self._state.slots.row_of(slot) for slot in slots]
        with self._backend.context(), torch.no_grad():
            on_device = torch.tensor(rows, device=self._state.device)
            self._ran = self._state.done[on_device] == 0
            if due:
                self._expected = self._shadow.run(step, number, rows, eager=eager)

    def after(self, result: StepResult) -> None:
        """When a step was submitted: wait for it, if it is to be looked at, and look.

        Raises:
            DebugFault: the step's tokens have been read, and later steps can be asked for.
            DeviceLost: when the device has failed.
        """
        options = self._options
        if not (options.guards or options.finite or self._expected is not None):
            return
        result.tokens()
        with self._backend.context(), torch.no_grad():
            # What the host has been told may still have been in the making beside it.
            self._backend.synchronize()
            if options.guards:
                self._check_guards(result)
            if options.finite:
                self._check_finite(result)
            expected, self._expected = self._expected, None
            if expected is not None:
                self._check_shadow(result, expected)

    # --- private ---------------------------------------------------------------------------------

    def _check_guards(self, result: StepResult) -> None:
        self.checks["guards"] += 1
        pools = {"state arena": self._state.pool}
        if self._state.blocks is not None:
            pools["K/V blocks"] = self._state.blocks.pool
        guards = [(n, p, where, g) for n, p in pools.items() for where, g in p.guards.items()]
        damaged = torch.stack([(guard != GUARD).any() for *_, guard in guards]).tolist()
        for (name, pool, where, guard), bad in zip(guards, damaged, strict=True):
            if bad:
                raise self._guard_fault(result, name, pool, where, guard)

    def _guard_fault(
        self, result: StepResult, name: str, pool: StatePool, where: str, guard: Tensor
    ) -> DebugFault:
        places = (guard != GUARD).nonzero().flatten().tolist()
        field = pool.layout.field_at(4 * places[0]) or "no field"
        # So that the next step is judged by what it does itself.
        guard.fill_(GUARD)
        return DebugFault(
            f"step {result.number} wrote {4 * len(places)} bytes {where} of the {name}, where "
            f"{field} of a row would lie: an index is -1, or past the last row. Padding is given "
            "the scratch row, torch.where(slots < 0, max_requests, slots)",
            check="guards", step=result.number, slots=tuple(result.slots),
        )  # fmt: skip

    def _check_finite(self, result: StepResult) -> None:
        self.checks["finite"] += 1
        logits = self._step.logits
        assert logits is not None and self._ran is not None
        given = logits[: len(result.slots), : self._state.vocab_size]
        # A token may be ruled out by -inf, as long as one is left.
        wrong = given.isnan() | (given == torch.inf) | (given == -torch.inf).all(1, keepdim=True)
        bad = (self._ran & wrong.any(1)).tolist()
        if not any(bad):
            return
        slots = tuple(slot for slot, is_bad in zip(result.slots, bad, strict=True) if is_bad)
        row = bad.index(True)
        token = int(wrong[row].nonzero()[0])
        raise DebugFault(
            f"step {result.number} gave logits that are not finite to slots {list(slots)}: for the "
            f"first of them, {float(given[row, token])} for token {token}",
            check="finite", step=result.number, slots=slots,
        )  # fmt: skip

    def _check_shadow(self, result: StepResult, expected: Outcome) -> None:
        if expected.foreign is not None:
            self.checks["foreign"] += 1
            for where in self._shadow.changed_foreign(expected):
                raise DebugFault(
                    f"step {result.number} changed {where}, which belongs to no slot of its batch",
                    check="foreign", step=result.number, slots=tuple(result.slots),
                )  # fmt: skip
        if expected.eager is None:
            return
        self.checks["shadow"] += 1
        for where in self._shadow.differing(result.number, expected):
            raise DebugFault(
                f"step {result.number} replayed gave another {where} than the same step run "
                "eagerly: something of it was frozen at capture, or draws by itself",
                check="shadow", step=result.number, slots=tuple(result.slots),
            )  # fmt: skip
