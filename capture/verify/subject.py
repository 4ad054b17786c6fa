"""What is to be verified, as the model and options of a runtime of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphcache.errors import UnsupportedModel
from graphcache.layout import block_tokens_for

from ..runtime import DecodeRuntime

__all__ = ["Subject", "subject_of"]

REQUESTS = 4
LEAST_CONTEXT = 96
BLOCKS_A_REQUEST = 8
SHORT_TOKENS = 32
"""Of requests beside one that has a full context: no check needs more for all at once."""


@dataclass(frozen=True)
class Subject:
    """A step to verify.

    Attributes:
        name: of the model, for people.
        model: whose step it is.
        options: of a runtime for trials.
        runtime: the one that was given, or None.
    """

    name: str
    model: Any
    options: Mapping[str, Any]
    runtime: DecodeRuntime | None

    def forbidden(self) -> list[Tensor]:
        """Memory of the runtime given: trials must not reach it."""
        return [] if self.runtime is None else list(self.runtime.state.named_tensors().values())


def subject_of(step_or_runtime: Any, backend: str, options: Mapping[str, Any]) -> Subject:
    """A model, or what a runtime was made of.

    Args:
        step_or_runtime: a model as `DecodeRuntime` takes it, or a runtime.
        backend: for a model.
        options: of `DecodeRuntime`, for a model; a runtime has its own.

    Raises:
        UnsupportedModel: for what is neither.
    """
    given = dict(options)
    if isinstance(step_or_runtime, DecodeRuntime):
        runtime = step_or_runtime
        mine = {**_options_of(runtime), **given}
        return Subject(
            _name_of(runtime.model), runtime.model, _with_blocks(runtime.model, mine), runtime
        )
    model = step_or_runtime
    if not (hasattr(model, "decode") and hasattr(model, "schemas")):
        raise UnsupportedModel(
            f"verify takes a model or a DecodeRuntime, got {type(model).__name__}; wrap a function "
            "of a batch in graphcache.models.StepFunction(step, vocab_size, schemas=...)"
        )
    defaults = {"max_requests": REQUESTS, "max_context": _context_of(model), "backend": backend}
    return Subject(_name_of(model), model, _with_blocks(model, {**defaults, **given}), None)


def _options_of(runtime: DecodeRuntime) -> dict[str, Any]:
    """A runtime's own, with no more blocks than trials need."""
    state = runtime.state
    options: dict[str, Any] = {
        "max_requests": state.max_requests,
        "max_context": state.max_context,
        "ladder": runtime.ladder,
        "backend": runtime._backend.name,
        "sampler": runtime.sampler,
    }
    if state.blocks is not None:
        options["block_tokens"] = state.blocks.block_tokens
        options["kv_blocks"] = 0
    return options


def _with_blocks(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options with as many blocks as trials need, if they say how many: no step depends on it."""
    if options.get("kv_blocks") is None:
        return options
    tokens = options.get("block_tokens") or block_tokens_for(model.schemas)
    context, short = (-(-length // tokens) for length in (options["max_context"], SHORT_TOKENS))
    return {
        **options,
        "kv_blocks": context + max(short, BLOCKS_A_REQUEST) * options["max_requests"],
    }


def _context_of(model: Any) -> int:
    """Enough for every ring to wrap twice; no more than the model has."""
    windows = [
        getattr(schema, "window", getattr(schema, "swa_window_size", None)) or 0
        for schema in model.schemas
    ]
    most = getattr(model, "max_context", None)
    wanted = max([LEAST_CONTEXT, *(3 * window for window in windows)])
    return wanted if most is None else min(wanted, int(most))


def _name_of(model: Any) -> str:
    step = getattr(model, "step", None)
    inner = getattr(step, "__qualname__", None) or type(step).__name__
    kind = type(model).__name__
    return kind if step is None else f"{kind}({inner})"
