"""The scalars of a slot: where it is, when it ends, how its tokens are drawn.

They lie side by side at the front of a row, so that the host writes or reads all of them with one
copy. Steps move `len`, `high` and `done` on; the host writes them only between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .ops.advance import STOP_TOKENS
from .pool import Field, StatePool
from .request import RequestOptions
from .uploads import Uploads

__all__ = ["Control", "Lengths", "control_fields"]


class Lengths(NamedTuple):
    """What the host may ask of a slot, in tokens."""

    len: int
    high: int
    floor: int
    limit: int


def control_fields(derived: int) -> list[Field]:
    """The fields, in the order in which they are to lie.

    Args:
        derived: how many scalars of layers are `len % rows` of some ring.
    """
    fields = [
        Field("len", (), torch.int32, reset=True),
        Field("high", (), torch.int32, reset=True),
        Field("floor", (), torch.int32, reset=True),
        Field("done", (), torch.int32, reset=True),
        Field("limit", (), torch.int32, reset=True),
        Field("temperature", (), torch.float32, reset=True),
        Field("top_k", (), torch.int32, reset=True),
        Field("top_p", (), torch.float32, initial=1, reset=True),
        Field("seed", (), torch.int64, reset=True),
        Field("stop", (STOP_TOKENS,), torch.int32, initial=-1, reset=True),
    ]
    if derived:
        fields.append(Field("derived", (derived,), torch.int32, reset=True))
    return fields


class Control:
    """Reads and writes a pool's control fields, in the order of the current stream.

    Args:
        pool: laid out with `control_fields` first.
        uploads: carries values to the device.
        modulus: rows of the ring behind each derived scalar.

    Attributes:
        derived: [S1, n] int32, `len % modulus`; None for no such scalars.
        modulus: [n] int32 on the device; likewise.
    """

    def __init__(self, pool: StatePool, uploads: Uploads, modulus: Sequence[int]) -> None:
        self._pool = pool
        self._uploads = uploads
        self._modulus = np.array(modulus, dtype=np.int32)
        self.derived = pool["derived"] if len(modulus) else None
        self.modulus = (
            torch.tensor(modulus, dtype=torch.int32, device=pool.device) if len(modulus) else None
        )

    def write(self, row: int, **values: object) -> None:
        """Write fields that lie side by side, named in their order: one copy."""
        names = list(values)
        start = self._pool.byte_range(names[0])[0]
        packed = np.zeros(self._pool.byte_range(names[-1])[1] - start, dtype=np.uint8)
        for name, value in values.items():
            first, past = self._pool.byte_range(name)
            element = torch.as_tensor(value, dtype=self._pool.fields[name].dtype)
            packed[first - start : past - start] = element.view(-1).view(torch.uint8).numpy()
        self._uploads.copy(self._pool.arena[row, start : start + packed.size], packed)

    def write_options(self, row: int, options: RequestOptions) -> None:
        """Write all that a request's options say about its draws and its end."""
        stop = np.full(STOP_TOKENS, -1, dtype=np.int32)
        stop[: len(options.stop)] = options.stop
        self.write(
            row,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            stop=stop,
        )

    def write_length(self, row: int, length: int, high: int) -> None:
        """Set a slot's length, and with it all that is derived from it."""
        self.write(row, len=length, high=high)
        if self.derived is not None:
            self._uploads.copy(self.derived[row], length % self._modulus)

    def read(self, row: int) -> Lengths:
        """The slot's lengths as they are on the device; waits for the current stream."""
        end = self._pool.byte_range("limit")[1]
        scalars = self._pool.arena[row, :end].view(torch.int32).tolist()
        return Lengths(scalars[0], scalars[1], scalars[2], scalars[4])
