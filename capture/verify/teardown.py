"""Whether a runtime ends well: closed in time, captures first, and its memory given back."""

from __future__ import annotations

import gc
import threading

from torch.multiprocessing.reductions import StorageWeakRef

from .report import Finding
from .stage import Stage

__all__ = ["closed", "given_back"]

TIMEOUT_S = 30.0


def closed(stage: Stage) -> Finding | None:
    """Close a stage. On a thread of its own, so that one that hangs does not hang its caller."""
    raised: list[BaseException] = []

    def close() -> None:
        try:
            stage.close()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=close, name="verify-close", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if thread.is_alive():
        return _finding(f"close() has not returned after {TIMEOUT_S:.0f} s")
    if raised:
        return _finding(f"close() raised {type(raised[0]).__name__}: {raised[0]}")
    if any(bucket.captured is not None for bucket in stage.runtime._captures.buckets.values()):
        return _finding("captures are left after close()")
    return None


def given_back(arena: StorageWeakRef) -> Finding | None:
    """Whether the state's memory is gone once nobody here holds it any more."""
    if not arena.expired():
        # What holds it may be garbage that nobody has collected yet.
        gc.collect()
    if arena.expired():
        return None
    return _finding("the state's memory is still held after close(): the step keeps batch or state")


def _finding(said: str) -> Finding:
    return Finding("teardown", "the runtime's end", said)
