"""Whether a request's state is still what its tokens imply: they are read again in a fresh slot."""

from __future__ import annotations

from dataclasses import dataclass

from capture import DecodeRuntime

__all__ = ["Reread", "reread"]


@dataclass(frozen=True)
class Reread:
    """A request beside another that was given its tokens as a prompt.

    Attributes:
        length: tokens.
        error: the most by which the next token's logits differ, as a share of the largest; a NaN
            where either holds one.
    """

    length: int
    error: float


def reread(runtime: DecodeRuntime, slot: int) -> Reread:
    """Step a request together with its reread twin, which is retired again.

    Steps write state token by token and prefill many at once: the two agree in numbers, not in
    bits. State that many steps have spoiled little by little shows here, though each of them was
    like its eager run.

    Args:
        runtime: with `keep_logits=True`, a free slot, and a bucket of two rows.
        slot: a handle that has not finished.

    Raises:
        BlocksExhausted: before anything is written.
    """
    tokens = runtime.tokens_of(slot)
    twin = runtime.admit(tokens, max_tokens=1, seed=0)
    try:
        result = runtime.step([slot, twin])
        result.tokens()
        one, other = result.logits.float().cpu()
    finally:
        runtime.retire(twin)
    largest = float(one.abs().max())
    return Reread(len(tokens), float((one - other).abs().max()) / max(largest, 1e-30))
