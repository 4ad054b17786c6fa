"""What a runtime asks of a model and its options, before anything is made."""

from __future__ import annotations

from typing import Any

from graphcache.errors import SchemaError, UnsupportedModel

from .ladder import Ladder

__all__ = ["check_ladder", "check_model", "context_of"]


def check_model(model: Any) -> None:
    """Raise unless a model has what steps need.

    Raises:
        UnsupportedModel.
    """
    missing = [
        name for name in ("schemas", "vocab_size", "prefill", "decode") if not hasattr(model, name)
    ]
    if missing:
        raise UnsupportedModel(
            f"{type(model).__name__} has no {', '.join(missing)}: a model needs schemas, "
            "vocab_size, prefill(batch) and decode(batch); wrap a bare function in "
            "graphcache.models.StepFunction, a transformers model with load_model"
        )


def check_ladder(ladder: Ladder, max_requests: int) -> None:
    """Raise unless a runtime of so many slots can step every bucket.

    Raises:
        SchemaError.
    """
    if ladder.ceiling > max_requests:
        raise SchemaError(
            f"the ladder's ceiling {ladder.ceiling} lies above max_requests={max_requests}"
        )
    if ladder.q_len != 1:
        raise SchemaError(
            f"a ladder of {ladder.q_len} tokens a row: accepting drafted tokens in a step comes "
            "in a later version; use q_len=1"
        )


def context_of(model: Any, asked: int | None) -> int:
    """The most tokens of a request: those asked for, or else the model's.

    Raises:
        SchemaError: for more than the model can place, or none known.
    """
    most = getattr(model, "max_context", None)
    if asked is None:
        if most is None:
            raise SchemaError("max_context is needed: the model names none of its own")
        return int(most)
    if most is not None and asked > most:
        raise SchemaError(f"max_context={asked} is beyond the model's {most}")
    return asked
