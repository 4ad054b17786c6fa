"""What the lint refuses, by name; each name is a section of docs/hazards.md."""

from __future__ import annotations

from enum import Enum

__all__ = ["PAGE", "Rule"]

PAGE = "docs/hazards.md"


class Rule(Enum):
    """Why an operation can't be captured. The value is the advice that the error gives."""

    HOST_READ = (
        "the host reads a value from the device: a replay runs no Python, so the value would stay "
        "as it was at capture, and the wait breaks the capture. Keep it on the device: index with "
        "tensors, choose with torch.where, or pass a Python number fixed before capture"
    )
    DATA_DEPENDENT = (
        "its output's size depends on data: the captured kernels have sizes fixed. Use a mask and "
        "torch.where, topk with a fixed k, or nonzero_static"
    )
    CROSSES_DEVICES = (
        "it copies between devices: a copy to the host makes it wait, and a copy from pageable "
        "memory can't be captured and would repeat old values. Make the tensor on the device "
        "before capture"
    )
    FROZEN_DATA = (
        "it turns Python data into a tensor inside the step: every replay would use the data of "
        "the capture. Make the tensor before capture and keep it, or derive it on the device"
    )
    RANDOM = (
        "it draws from the framework's random state, which a replay does not move: every replay "
        "would draw the same numbers. Draw from a counter kept by slot, as graphcache's sampler "
        "does"
    )
    HOST_DRAW = (
        "it draws a random number on the host: every replay would use the number of the capture. "
        "Draw from a counter kept by slot, as graphcache's sampler does"
    )
    WAITS = (
        "it waits for the device, or asks it how far it has come, which breaks a capture. Leave it "
        "out of the step"
    )
    OTHER_STREAM = (
        "it goes to a stream that takes no part in the capture: it ran once, now, and no replay "
        "would run it. Let that stream wait for the step's stream before, and the step's stream "
        "for it after"
    )
    UNSEEN_KERNEL = (
        "a kernel launched outside any operation is seen by nobody: what it writes while a step is "
        "rehearsed is not put back, and what it reads is not kept. Make an operation of it with "
        "torch.library.triton_op, naming what it mutates"
    )
    MOVES = (
        "it gives a tensor other memory: captured kernels keep the addresses they had. Make the "
        "tensor in its full size before capture, and write into it"
    )
    BAD_INDEX = (
        "rows of padding have slot -1, which as an index is the last row of a tensor, whoever owns "
        "it, or memory that is nobody's. Give them a row that belongs to no request: "
        "torch.where(slots < 0, max_requests, slots), in a tensor of max_requests + 1 rows"
    )

    PADDING_SLOT = (
        "a row of padding has slot -1 and writes nothing; with another it writes to a request that "
        "is not in the batch. Pass batch.slots as they are"
    )

    @property
    def section(self) -> str:
        """Where the rule is explained, with wrong and right code."""
        return f"{PAGE}#{self.name.lower().replace('_', '-')}"
