"""What a request asks for, checked before anything is written."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from .errors import InvalidRequest
from .ops.advance import STOP_TOKENS
from .pool import Field

__all__ = ["RequestOptions", "check_max_tokens", "check_tokens", "draw_seed", "field_value"]


def draw_seed() -> int:
    """A seed that no other request has."""
    return secrets.randbits(63)


def _as_int(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise InvalidRequest(f"{name} must be an int, got {value!r}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequest(f"{name} must be an int, got {value!r}") from None


def _as_float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {value!r}")
    return float(value)


def check_tokens(tokens: Iterable[int], vocab_size: int, what: str = "token id") -> list[int]:
    """The ids as a list of ints.

    Raises:
        InvalidRequest: for an id that is no int or outside the vocabulary.
    """
    try:
        given = list(tokens)
    except TypeError:
        raise InvalidRequest(f"expected {what}s in a list, got {tokens!r}") from None
    checked = [_as_int(what, token) for token in given]
    for index, token in enumerate(checked):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{what} {token} (at index {index}) is outside the vocabulary 0..{vocab_size - 1}"
            )
    return checked


def check_max_tokens(max_tokens: int | None) -> int | None:
    """The budget of an answer, None for no limit of its own.

    Raises:
        InvalidRequest: for what is no int, or below 1.
    """
    if max_tokens is None:
        return None
    checked = _as_int("max_tokens", max_tokens)
    if checked < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {checked}")
    return checked


def field_value(field: Field, value: object) -> np.ndarray:
    """A value for a field of one slot, as its bytes; a number fills the field.

    Raises:
        InvalidRequest: for a value that the field can't hold exactly enough.
    """
    try:
        given = torch.as_tensor(value, device="cpu")
        exact = given.to(field.dtype).broadcast_to(field.shape).contiguous()
        if not field.dtype.is_floating_point and not bool((given == exact).all()):
            raise ValueError(f"{value!r} would be changed to {exact.tolist()}")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidRequest(
            f"field {field.name!r} takes {field.dtype} of shape {field.shape}: {error}"
        ) from None
    return exact.view(-1).view(torch.uint8).numpy()


@dataclass(frozen=True)
class RequestOptions:
    """How a request's answer is drawn and when it ends.

    Args:
        max_tokens: most new tokens after each `extend`; None for as many as the context has room.
        temperature: of the logits; 0 for greedy.
        top_k: draw among the k most likely; 0 for all.
        top_p: draw among the most likely that hold this much probability; 1 for all.
        seed: of the draws, in 0..2**63-1.
        stop: up to 8 ids that end the answer.

    Raises:
        InvalidRequest: for a value out of range or of a wrong type.
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: tuple[int, ...]

    @classmethod
    def checked(
        cls,
        *,
        max_tokens: int | None,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int | None,
        stop: Iterable[int],
        vocab_size: int,
    ) -> RequestOptions:
        """The options, or an error that names the first wrong one."""
        max_tokens = check_max_tokens(max_tokens)
        temperature = _as_float("temperature", temperature)
        if not (math.isfinite(temperature) and temperature >= 0):
            raise InvalidRequest(f"temperature must be finite and not negative, got {temperature}")
        top_k = _as_int("top_k", top_k)
        if not 0 <= top_k < 2**31:
            raise InvalidRequest(f"top_k must be 0 (off) or positive, got {top_k}")
        top_p = _as_float("top_p", top_p)
        if not 0 < top_p <= 1:
            raise InvalidRequest(f"top_p must lie above 0 and not above 1, got {top_p}")
        seed = draw_seed() if seed is None else _as_int("seed", seed)
        if not 0 <= seed < 2**63:
            raise InvalidRequest(f"seed must lie in 0..2**63-1, got {seed}")
        stop = tuple(check_tokens(stop, vocab_size, "stop token"))
        if len(stop) > STOP_TOKENS:
            raise InvalidRequest(f"at most {STOP_TOKENS} stop tokens, got {len(stop)}")
        return cls(max_tokens, temperature, top_k, top_p, seed, stop)
