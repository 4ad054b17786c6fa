"""What one layer keeps for a request, and how many rows that takes.

Two schemas, by what a row holds. `LayerCacheSchema` is a layer of the DeepSeek-V4 family: K and V
are one *entry*, kept in a sliding window, with a tail of tokens that await compression.
`KVLayerSchema` is a layer of an ordinary decoder: K and V by head, kept whole or in a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from .errors import SchemaError
from .rows import Row, RowFormat, row_of

__all__ = ["AttentionType", "IndexerSchema", "KVLayerSchema", "LayerCacheSchema", "ring_rows"]


class AttentionType(Enum):
    """What a layer attends to."""

    FULL = "full"
    """Every token of the request."""
    SWA = "swa"
    """The last tokens, a sliding window."""
    CSA = "csa"
    """A window, and the compressed entries an indexer selects (DeepSeek-V4)."""
    HCA = "hca"
    """A window, and every compressed entry (DeepSeek-V4)."""


def ring_rows(read_window: int, step_width: int = 1, rewind: int = 0) -> int:
    """Rows of a ring keyed by `position % rows` that is written before it is read.

    Args:
        read_window: tokens a read reaches back over, itself included.
        step_width: most tokens of one slot in one step (q).
        rewind: how far back a slot can always be rewound after a step that broke new ground (k).

    Minimal: with one row fewer, either a step reads an overwritten row or a promised rewind must
    be refused.
    """
    return read_window + step_width - 1 + max(0, rewind - 1)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SchemaError(message)


def _check_promise(step_width: int, rewind: int) -> None:
    _require(step_width >= 1, f"step_width must be at least 1, got {step_width}")
    _require(rewind >= 0, f"rewind must be at least 0, got {rewind}")


@dataclass(frozen=True)
class IndexerSchema:
    """What selects a CSA layer's entries: index keys with a compressor of their own.

    Args:
        heads: of index queries.
        head_dim: width of an index key, its rotated part included; a multiple of 16.
        top_k: most entries that a token attends to.
        row_format: of the keys; `FP8` quantises all dims, the rotated ones too.

    Raises:
        SchemaError: when the keys can't be laid out.
    """

    heads: int
    head_dim: int
    top_k: int
    row_format: RowFormat = RowFormat.FP8

    def __post_init__(self) -> None:
        _require(self.heads >= 1, f"an indexer needs at least 1 head, got {self.heads}")
        _require(self.top_k >= 1, f"top_k must be at least 1, got {self.top_k}")
        _require(
            self.head_dim >= 16 and self.head_dim % 16 == 0,
            f"an index key's head_dim must be a multiple of 16, got {self.head_dim}",
        )
        _require(
            self.row_format is not RowFormat.MODEL1,
            "index keys are kept as FP8, BF16 or FP32; MODEL1 is a row of attention entries",
        )
        row_of(self.row_format, self.head_dim, 0)

    @property
    def row(self) -> Row:
        """How a key is kept."""
        return row_of(self.row_format, self.head_dim, 0)


@dataclass(frozen=True)
class LayerCacheSchema:
    """A layer whose K and V are one entry: a sliding window, plus an uncompressed tail.

    Args:
        attn_type: `SWA`, `CSA` or `HCA`.
        swa_window_size: tokens in the window (W).
        entry_head_dim: width of an entry (d), its rotated part included.
        rope_dim: the last dims of an entry, which are rotated (r).
        compression: tokens in a compressed entry (m); 0 for a layer of window only.
        step_width: most tokens of one slot in one step (q).
        rewind: how far back a slot can always be rewound (k).
        tail_dtype: of the tail's rows.
        row_format: of the window's rows and of compressed entries.
        indexer: what selects a CSA layer's entries; None where tokens attend to all of them.

    Raises:
        SchemaError: when the layer can't be laid out.
    """

    attn_type: AttentionType
    swa_window_size: int
    entry_head_dim: int
    rope_dim: int
    compression: int = 0
    step_width: int = 1
    rewind: int = 0
    tail_dtype: torch.dtype = torch.float32
    row_format: RowFormat = RowFormat.FP8
    indexer: IndexerSchema | None = None

    def __post_init__(self) -> None:
        _require(
            self.attn_type in (AttentionType.SWA, AttentionType.CSA, AttentionType.HCA),
            f"an entry layer is SWA, CSA or HCA, got {self.attn_type}; "
            "a FULL layer keeps K and V by head: use KVLayerSchema",
        )
        _require(
            self.swa_window_size >= 1,
            f"swa_window_size must be at least 1, got {self.swa_window_size}",
        )
        _require(
            0 < self.rope_dim < self.entry_head_dim,
            f"rope_dim must lie between 0 and entry_head_dim={self.entry_head_dim}, "
            f"got {self.rope_dim}",
        )
        _require(
            (self.entry_head_dim - self.rope_dim) % 16 == 0 and self.rope_dim % 8 == 0,
            "the part without position (entry_head_dim - rope_dim) must be a multiple of 16 and "
            "rope_dim of 8, "
            f"got {self.entry_head_dim - self.rope_dim} and {self.rope_dim}",
        )
        _check_promise(self.step_width, self.rewind)
        _require(
            self.tail_dtype in (torch.float32, torch.bfloat16),
            f"tail_dtype is float32 or bfloat16, got {self.tail_dtype}",
        )
        if self.attn_type is AttentionType.SWA:
            _require(
                self.compression == 0,
                f"a SWA layer has no compressed entries, got compression={self.compression}",
            )
        else:
            _require(
                self.compression >= 1,
                f"a {self.attn_type.name} layer needs compression >= 1, got {self.compression}",
            )
        if self.indexer is not None:
            _require(
                self.attn_type is AttentionType.CSA,
                f"a {self.attn_type.name} layer selects nothing: only CSA has an indexer",
            )
            _require(
                self.indexer.head_dim >= self.rope_dim,
                f"index keys of {self.indexer.head_dim} dims can't rotate {self.rope_dim} of them",
            )
        row_of(self.row_format, self.entry_head_dim, self.rope_dim)

    @property
    def row(self) -> Row:
        """How an entry is kept, in the window and compressed."""
        return row_of(self.row_format, self.entry_head_dim, self.rope_dim)

    @property
    def swa_rows(self) -> int:
        """Rows of the window's ring; equal to the window with the default promise."""
        return ring_rows(self.swa_window_size, self.step_width, self.rewind)

    @property
    def overlap(self) -> int:
        """1 where a compressed block also sees the block before it (CSA), else 0."""
        return int(self.attn_type is AttentionType.CSA)

    @property
    def tail_buffer_size(self) -> int:
        """Rows of the tail's ring: the compressor's read window, and the promise; 0 for SWA."""
        if not self.compression:
            return 0
        return ring_rows((1 + self.overlap) * self.compression, self.step_width, self.rewind)


@dataclass(frozen=True)
class KVLayerSchema:
    """A layer that keeps K and V by head: whole (`window=None`) or in a sliding window.

    Args:
        kv_heads: heads of K and V.
        k_head_dim: width of a K row; a multiple of 8.
        v_head_dim: width of a V row; a multiple of 8. May differ from `k_head_dim`.
        window: tokens a query sees, itself included; None for all of them.
        dtype: of the rows: float32, bfloat16 or float16.
        step_width: most tokens of one slot in one step (q).
        rewind: how far back a slot can always be rewound (k); whole layers rewind anywhere.

    Raises:
        SchemaError: when the layer can't be laid out.
    """

    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    step_width: int = 1
    rewind: int = 0

    def __post_init__(self) -> None:
        _require(self.kv_heads >= 1, f"kv_heads must be at least 1, got {self.kv_heads}")
        for name in ("k_head_dim", "v_head_dim"):
            dim = getattr(self, name)
            _require(dim >= 8 and dim % 8 == 0, f"{name} must be a multiple of 8, got {dim}")
        _require(
            self.window is None or self.window >= 1,
            f"window must be None or at least 1, got {self.window}",
        )
        _require(
            self.dtype in (torch.float32, torch.bfloat16, torch.float16),
            f"dtype is float32, bfloat16 or float16, got {self.dtype}",
        )
        _check_promise(self.step_width, self.rewind)

    @property
    def attn_type(self) -> AttentionType:
        """`FULL` without a window, else `SWA`."""
        return AttentionType.FULL if self.window is None else AttentionType.SWA

    def ring_rows(self, max_context: int) -> int:
        """Rows of the window's ring; never more than a context has positions."""
        if self.window is None:
            raise SchemaError("a FULL layer lives in blocks and has no ring")
        return min(max_context, ring_rows(self.window, self.step_width, self.rewind))
