"""Names of what makes a captured step wrong, with what each means and what to do instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..errors import CaptureError
from ..rules import Rule
from ..watch import PAIRED

__all__ = ["HAZARDS", "Hazard", "hazard_of"]


@dataclass(frozen=True)
class Hazard:
    """A kind of fault.

    Attributes:
        name: what findings call it.
        meaning: what goes wrong.
        instead: what to do.
    """

    name: str
    meaning: str
    instead: str


_PADDING: Final = (
    "Turn padding into the scratch row, torch.where(slots < 0, max_requests, slots), or leave it "
    "out of the write; never clamp it"
)
_DEVICE: Final = "Keep the value on the device, or fix it before capture"
_STATE: Final = (
    "Keep what belongs to a request in the layers' state or in a declared Field: admission, fork "
    "and rewind know of nothing else"
)
_FIXED: Final = "Make tensors before capture, in their full size, and write into them in place"

_ALL: Final = (
    Hazard("padding-hits-last-slot", "a padding row wrote to the last slot: -1 was an index",
           _PADDING),
    Hazard("padding-hits-slot-0", "a padding row wrote to slot 0: -1 was clamped to it", _PADDING),
    Hazard("padding-aliases-live-slot", "a padding row wrote to a slot that has a request",
           _PADDING),
    Hazard("stale-padding-row", "a padding row wrote where an earlier batch had a slot",
           "Read who takes part from the batch in every step: its padding is -1 each time"),
    Hazard("nan-from-padding", "what scratch holds reached a row that runs",
           "Let no operation mix rows, and mask padding with torch.where, not with a product: "
           "0 * NaN is NaN"),
    Hazard("writes-foreign-slot", "a row that runs wrote to another slot",
           "Write to the batch's slots only"),
    Hazard("writes-foreign-memory", "a step wrote memory that is not a request's",
           "Write to the state of the batch's slots, or to tensors of your own in plain sight"),
    Hazard("reads-foreign-slot", "a row read what belongs to another slot",
           "Read the batch's slots only"),
    Hazard("reads-past-length", "a row read its slot's memory where nothing has been written yet",
           "Mask by position: rows at or past len[slot] hold what an earlier request left"),
    Hazard("window-off-by-one", "a row read its ring outside the window",
           "A step writes its own row first; row p of a ring is valid iff pos - window < p <= pos"),
    Hazard("rows-mix", "a row's logits depend on the other rows of the batch",
           "Reduce within a row only"),
    Hazard("depends-on-slot", "the slot's number itself changed the result",
           "Use a slot's number to address its state, and for nothing else"),
    Hazard("sentinel-is-a-slot", "one slot is treated as if it were padding",
           "Padding is PAD_SLOT, -1, and nothing else"),
    Hazard("recycled-slot", "a new request found what the slot's last one had left", _STATE),
    Hazard("partial-fork", "a fork or a restored checkpoint goes on otherwise than its source",
           _STATE),
    Hazard("partial-rewind", "after a rewind the same steps gave something else", _STATE),
    Hazard("hidden-state", "a result depends on steps of other requests before", _STATE),
    Hazard("capture-changes-state", "capturing changed what live requests own",
           "Write to the slots of the batch only; while a step is rehearsed they are padding"),
    Hazard("frozen-value", "a number from Python was fixed at capture", _DEVICE),
    Hazard("frozen-branch", "a branch in Python was decided at capture",
           "Choose with torch.where, or let the bucket decide: rows and q_len are fixed in it"),
    Hazard("frozen-random", "random numbers don't move on from replay to replay",
           "Draw as state.sample does: from the slot's seed and the position"),
    Hazard("draws-depend-on-row", "a request's draws depend on its row or bucket",
           "Key draws by the slot's seed and the position"),
    Hazard("moved-address", "a tensor lies elsewhere than at capture", _FIXED),
    Hazard("held-output", "a tensor made by the step outlives it; later replays overwrite it",
           "Copy what is to last into memory made before capture"),
    Hazard("memory-misjudged", "captures took other memory than they reported",
           "Make what a step needs before capture, through torch"),
    Hazard("allocates-in-replay", "replays took memory", _FIXED),
    Hazard("other-thread", "work on another thread broke the capture or is missing in it",
           "Do all of a step's work on the thread that runs it"),
    Hazard("finalizer-in-capture", "a finalizer ran inside a capture",
           "Collect and drop things outside the step"),
    Hazard("waits-in-step", "the step makes the host wait, or copies between devices", _DEVICE),
    Hazard("size-depends-on-data", "a tensor's size depends on data, and was fixed at capture",
           "Use a mask and torch.where, topk with a fixed k, or nonzero_static"),
    Hazard("not-capturable", "the step has something that can't be captured", _DEVICE),
    Hazard("step-raises", "the step raised an error", "Mend the step; the case says when"),
    Hazard("not-repeatable", "the step itself, run twice from one state, gave two results",
           "Use deterministic operations, and read no memory before it is written"),
    Hazard("replay-differs", "a replay gave something else than the step",
           "Look at what the step does besides torch's operations: raw kernels, other libraries"),
    Hazard("bound-state", "the step uses the state of another runtime",
           "Take the state from batch.state"),
    Hazard("ladder-gap", "a batch within the ladder's ceiling is not replayed",
           "Let bucket_for serve every size from 1 to the ceiling with a bucket that is captured"),
    Hazard("teardown", "closing failed, took too long, or left memory behind",
           "Free captures before what they point to, and keep no batch or state after a step"),
)  # fmt: skip

HAZARDS: Final = {hazard.name: hazard for hazard in _ALL}
"""By name."""

_OF_RULE: Final = {
    Rule.HOST_READ: "frozen-value",
    Rule.DATA_DEPENDENT: "size-depends-on-data",
    Rule.CROSSES_DEVICES: "waits-in-step",
    Rule.FROZEN_DATA: "frozen-value",
    Rule.RANDOM: "frozen-random",
    Rule.HOST_DRAW: "frozen-random",
    Rule.WAITS: "waits-in-step",
    Rule.OTHER_STREAM: "other-thread",
    Rule.UNSEEN_KERNEL: "not-capturable",
    Rule.MOVES: "moved-address",
    Rule.BAD_INDEX: "padding-hits-last-slot",
    Rule.PADDING_SLOT: "padding-hits-last-slot",
}


def hazard_of(error: CaptureError) -> str:
    """The name of the hazard that stopped a capture."""
    if error.operation is None:
        return "waits-in-step" if "captur" in str(error.__cause__ or "") else "step-raises"
    if error.operation == PAIRED:
        return "capture-changes-state"
    if error.rule is None:
        return "not-capturable"
    if error.rule is Rule.HOST_READ and "__bool__" in error.operation:
        return "frozen-branch"
    return _OF_RULE[error.rule]
