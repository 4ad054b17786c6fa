"""What a DeepSeek-V4 attention layer must say, from a request's whole history in float64.

No rings, no slots, no blocks: every answer comes from the list of a request's tokens. Nothing here
comes from the library, and nothing uses torch. Formulas: DeepSeek-V4 report (arXiv 2606.19348),
eqs. 9-17 (compression with overlap, indexer) and 20-23 (without); names and the order of the
streams in a projection as in transformers' `modeling_deepseek_v4.py`.

Axes: d entry dims, r rope dims (the trailing ones), H heads, m tokens a block, ov 1 where a block
also sees the one before it and else 0, W tokens a window.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol

import numpy as np

from tests.window_oracle import TABLE, Encoded, from_bf16, to_bf16, to_e4m3

E4M3_MAX = np.float32(448)
AMAX_FLOOR = np.float32(1e-4)


class RowFormat(Protocol):
    """How an entry is stored."""

    def roundtrip(self, entry: np.ndarray) -> np.ndarray:
        """What is read back, [d] float32, of an entry [d] of finite float32."""
        ...


@dataclass(frozen=True)
class Fp32:
    """Loses nothing. Of any shape."""

    def roundtrip(self, entry: np.ndarray) -> np.ndarray:
        return np.array(entry, np.float32)


@dataclass(frozen=True)
class Bf16:
    """To nearest, ties to even. Of any shape."""

    def roundtrip(self, entry: np.ndarray) -> np.ndarray:
        return from_bf16(to_bf16(entry))


@dataclass(frozen=True)
class Fp8Token:
    """e4m3 under one inverse scale a token, the rope dims in bf16. Index keys have r = 0."""

    rope_dim: int

    def encode(self, entry: np.ndarray) -> Encoded:
        body, rotated = _split(entry, self.rope_dim)
        inv = np.maximum(np.abs(body).max(), AMAX_FLOOR) / E4M3_MAX
        return Encoded(_codes(body, inv), to_bf16(rotated), np.float32(inv))

    def roundtrip(self, entry: np.ndarray) -> np.ndarray:
        return self.encode(entry).decode()


@dataclass(frozen=True)
class Model1:
    """FlashMLA's MODEL1: e4m3 under a power of two for every `tile` dims, the rope dims in bf16."""

    rope_dim: int
    tile: int = 64

    def encode(self, entry: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """e4m3 codes [d-r] uint8, bf16 bits [r] uint16, exponents of the scales [tiles] int."""
        body, rotated = _split(entry, self.rope_dim)
        tiles = body.reshape(-1, self.tile)
        exponents = _ceil_log2(np.maximum(np.abs(tiles).max(1) / E4M3_MAX, AMAX_FLOOR))
        scale = np.ldexp(np.float32(1), exponents)[:, None]
        return _codes(tiles, scale).ravel(), to_bf16(rotated), exponents

    def roundtrip(self, entry: np.ndarray) -> np.ndarray:
        codes, rotated, exponents = self.encode(entry)
        scale = np.ldexp(np.float32(1), exponents).repeat(self.tile)
        return np.concatenate([TABLE[codes].astype(np.float32) * scale, from_bf16(rotated)])


def _split(entry: np.ndarray, rope_dim: int) -> tuple[np.ndarray, np.ndarray]:
    entry = entry.astype(np.float32)
    return entry[: len(entry) - rope_dim], entry[len(entry) - rope_dim :]


def _codes(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return to_e4m3(np.clip(values / scale, -E4M3_MAX, E4M3_MAX))


def _ceil_log2(values: np.ndarray) -> np.ndarray:
    # By the exponent's bits: a logarithm in float32 rounds just above a power of two down to it.
    mantissa, exponent = np.frexp(values)
    return np.where(mantissa == 0.5, exponent - 1, exponent)


MODEL1_DIM, MODEL1_ROPE_DIM = 512, 64
MODEL1_ROW_BYTES = 448 + 2 * 64
MODEL1_SCALES, MODEL1_SCALE_BYTES = 7, 8
E8M0_BIAS = 127


def model1_block(entries: np.ndarray) -> np.ndarray:
    """Bytes of a block of n MODEL1 rows, uint8; those that `model1_used` leaves out are 0.

    n rows of 448 e4m3 and 64 bf16, then n times 7 E8M0 scales and a pad, then padding to a multiple
    of the 576 bytes of a row.

    Args:
        entries: [n, 512] finite float32.
    """
    count, dim = entries.shape
    if dim != MODEL1_DIM:
        raise ValueError(f"a MODEL1 row has {MODEL1_DIM} dims, not {dim}")
    block = np.zeros(_model1_bytes(count), np.uint8)
    for token, entry in enumerate(entries):
        codes, rotated, exponents = Model1(MODEL1_ROPE_DIM).encode(entry)
        row = np.concatenate([codes, rotated.astype("<u2").view(np.uint8)])
        block[token * MODEL1_ROW_BYTES :][:MODEL1_ROW_BYTES] = row
        start = count * MODEL1_ROW_BYTES + token * MODEL1_SCALE_BYTES
        block[start:][:MODEL1_SCALES] = exponents + E8M0_BIAS
    return block


def model1_used(count: int) -> np.ndarray:
    """Which bytes of a block of `count` MODEL1 rows mean something, bool; the others are pads."""
    used = np.zeros(_model1_bytes(count), bool)
    used[: count * MODEL1_ROW_BYTES] = True
    scales = used[count * MODEL1_ROW_BYTES :][: count * MODEL1_SCALE_BYTES]
    scales.reshape(count, MODEL1_SCALE_BYTES)[:, :MODEL1_SCALES] = True
    return used


def _model1_bytes(count: int) -> int:
    size = count * (MODEL1_ROW_BYTES + MODEL1_SCALE_BYTES)
    return -(-size // MODEL1_ROW_BYTES) * MODEL1_ROW_BYTES


def inverse_frequencies(rope_dim: int, theta: float = 10000.0) -> np.ndarray:
    """[r/2] float32, without scaling."""
    return (theta ** -(np.arange(0, rope_dim, 2) / max(rope_dim, 1))).astype(np.float32)


def rotate(x: np.ndarray, positions: np.ndarray | int, inv_freq: np.ndarray) -> np.ndarray:
    """Interleaved rope: of x's trailing r dims, each even one with the odd one after it.

    Args:
        x: [..., d].
        positions: broadcast against x's axes without the last.
        inv_freq: [r/2], whose length gives r.

    Returns:
        [..., d] float64.
    """
    x = np.asarray(x, np.float64)
    head, tail = np.split(x, [x.shape[-1] - 2 * len(inv_freq)], axis=-1)
    angle = np.asarray(positions, np.float64)[..., None] * inv_freq
    turned = (tail[..., ::2] + 1j * tail[..., 1::2]) * np.exp(1j * angle)
    pairs = np.stack([turned.real, turned.imag], axis=-1)
    return np.concatenate([head, pairs.reshape(tail.shape)], axis=-1)


def unrotate(x: np.ndarray, positions: np.ndarray | int, inv_freq: np.ndarray) -> np.ndarray:
    """The inverse of `rotate`."""
    return rotate(x, -np.asarray(positions), inv_freq)


def rmsnorm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Over the last axis, float64."""
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    weight = np.exp(x - x.max(axis, keepdims=True))
    return weight / weight.sum(axis, keepdims=True)


def attend(q: np.ndarray, rows: np.ndarray, sink: np.ndarray, scale: float) -> np.ndarray:
    """Rows are keys and values at once; the sink takes its share and gives nothing.

    Args:
        q: [H, d].
        rows: [n, d]; n may be 0.
        sink: [H], a logit, never scaled.

    Returns:
        [H, d] float64.
    """
    rows = np.asarray(rows, np.float64).reshape(-1, q.shape[1])
    logits = scale * (np.asarray(q, np.float64) @ rows.T)
    share = softmax(np.concatenate([logits, sink[:, None]], axis=1), axis=1)
    return share[:, :-1] @ rows


@dataclass(frozen=True, eq=False)
class Compressor:
    """Turns every m tokens of a history into one entry.

    With overlap, of the (1+ov)*d columns the first d are the previous stream (what a token gives
    to the block after its own), the last d the current one. Without, there is only the current.

    Args:
        bias: [m, (1+ov)*d], added to z by position in the block.
        norm_weight: [d].
        inv_freq: [r/2]; an entry is rotated at its block's first position.
        row: format of an entry.
        tail: format of C and of Z + bias until their block is complete; `Fp32` or `Bf16`.
    """

    bias: np.ndarray
    norm_weight: np.ndarray
    inv_freq: np.ndarray
    eps: float = 1e-6
    row: RowFormat = Fp32()
    tail: RowFormat = Fp32()

    @property
    def compression(self) -> int:
        return len(self.bias)

    @property
    def dim(self) -> int:
        return len(self.norm_weight)

    @property
    def width(self) -> int:
        """(1+ov)*d: columns of C and Z."""
        return self.bias.shape[1]

    @property
    def overlap(self) -> int:
        return self.width // self.dim - 1

    def exact_entry(self, index: int, cs: np.ndarray, zs: np.ndarray) -> np.ndarray:
        """Entry `index` of histories cs, zs [n, width], before its format: [d] float64."""
        c, z = self._block(index, cs, zs, slice(self.overlap * self.dim, None))
        if self.overlap and index > 0:
            before_c, before_z = self._block(index - 1, cs, zs, slice(self.dim))
            c, z = np.concatenate([before_c, c]), np.concatenate([before_z, z])
        pooled = (softmax(z, axis=0) * c).sum(0)
        normed = rmsnorm(pooled, self.norm_weight, self.eps)
        return rotate(normed, index * self.compression, self.inv_freq)

    def entry(self, index: int, cs: np.ndarray, zs: np.ndarray) -> np.ndarray:
        """Entry `index` as it is read back: [d] float32."""
        return self.row.roundtrip(self.exact_entry(index, cs, zs).astype(np.float32))

    def entries(self, cs: np.ndarray, zs: np.ndarray) -> list[np.ndarray]:
        """One for every complete block."""
        return [self.entry(index, cs, zs) for index in range(len(cs) // self.compression)]

    def _block(
        self, index: int, cs: np.ndarray, zs: np.ndarray, stream: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """C and Z + bias of one block's tokens, [m, d] float64 each, as the tail keeps them."""
        tokens = slice(index * self.compression, (index + 1) * self.compression)
        z = self.tail.roundtrip((zs[tokens] + self.bias)[:, stream])
        c = self.tail.roundtrip(cs[tokens][:, stream])
        return c.astype(np.float64), z.astype(np.float64)


@dataclass(frozen=True, eq=False)
class Indexer:
    """Picks the `top_k` compressed entries that a token attends to.

    Args:
        compressor: of the index keys; dims of its own, the layer's m.
        heads: index heads.
    """

    compressor: Compressor
    heads: int
    top_k: int

    def scores(self, q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """[n] float64: sum over heads of weight * relu(q . key).

        Args:
            q: [heads, dim], rotated.
            weights: [heads], every scaling folded in.
            keys: [n, dim].
        """
        keys = np.asarray(keys, np.float64).reshape(-1, self.compressor.dim)
        products = np.asarray(q, np.float64) @ keys.T
        return np.asarray(weights, np.float64) @ np.maximum(products, 0)

    def select(self, scores: np.ndarray) -> np.ndarray:
        """Indices of the min(top_k, n) highest scores, ascending; ties go to the lower index."""
        return np.sort(np.argsort(-scores, kind="stable")[: self.top_k])


@dataclass(frozen=True, eq=False)
class LayerParams:
    """A layer's weights and formats, one for all of its requests.

    Args:
        window: W.
        norm_weight: [d], of the window's K.
        inv_freq: [r/2], of the window's K and of the output.
        sink: [H].
        scale: of the logits; d ** -0.5 where None.
        row: format of a row of the window.
        compressor: None for a layer that has only a window.
        indexer: None where all visible entries are attended to.
    """

    window: int
    norm_weight: np.ndarray
    inv_freq: np.ndarray
    sink: np.ndarray
    scale: float | None = None
    eps: float = 1e-6
    row: RowFormat = Fp32()
    compressor: Compressor | None = None
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        if self.indexer is not None:
            if self.compressor is None:
                raise ValueError("an indexer picks compressed entries: give a compressor")
            if self.indexer.compressor.compression != self.compressor.compression:
                raise ValueError("index keys and entries must stand for the same blocks")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """What a `Token`'s fields must be; None for those that the layer has no use for."""
        dim, main, indexer = len(self.norm_weight), self.compressor, self.indexer
        compressed = None if main is None else (main.width,)
        index_width = None if indexer is None else (indexer.compressor.width,)
        return {
            "q": (len(self.sink), dim),
            "kv": (dim,),
            "c": compressed,
            "z": compressed,
            "index_q": None if indexer is None else (indexer.heads, indexer.compressor.dim),
            "index_weights": None if indexer is None else (indexer.heads,),
            "index_c": index_width,
            "index_z": index_width,
        }


@dataclass(frozen=True, eq=False)
class Token:
    """What the projections make of one token; copied, as float32.

    Args:
        q: [H, d], normed and rotated at the token's position.
        kv: [d], neither normed nor rotated.
        c, z: [(1+ov)*d], without bias.
        index_q: [index heads, index d], rotated.
        index_weights: [index heads], every scaling folded in.
        index_c, index_z: [(1+ov) * index d], without bias.
    """

    q: np.ndarray
    kv: np.ndarray
    c: np.ndarray | None = None
    z: np.ndarray | None = None
    index_q: np.ndarray | None = None
    index_weights: np.ndarray | None = None
    index_c: np.ndarray | None = None
    index_z: np.ndarray | None = None

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if value is not None:
                object.__setattr__(self, part.name, np.array(value, np.float32))


class Layer:
    """One request's history in one layer. Entries are remembered by index until truncated."""

    def __init__(self, params: LayerParams) -> None:
        self.params = params
        self.tokens: list[Token] = []
        self._window: list[np.ndarray] = []
        self._entries: list[np.ndarray] = []
        self._keys: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: Token) -> None:
        for name, shape in self.params.shapes.items():
            value = getattr(token, name)
            got = None if value is None else value.shape
            if got != shape:
                raise ValueError(f"{name} must have shape {shape}, got {got}")
        self._window.append(self._window_row(token, len(self)))
        self.tokens.append(token)

    def truncate(self, length: int) -> None:
        """Forget every token from position `length` on."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot truncate {len(self)} tokens to {length}")
        del self.tokens[length:], self._window[length:]
        if self.params.compressor is not None:
            blocks = length // self.params.compressor.compression
            del self._entries[blocks:], self._keys[blocks:]

    def copy(self) -> Layer:
        """A history that goes on by itself."""
        twin = Layer(self.params)
        twin.tokens, twin._window = self.tokens.copy(), self._window.copy()
        twin._entries, twin._keys = self._entries.copy(), self._keys.copy()
        return twin

    def window(self) -> np.ndarray:
        """Rows of the newest min(W, n) tokens, oldest first, [., d] float32."""
        return np.stack(self._window[-self.params.window :])

    def entries(self) -> np.ndarray:
        """Compressed entries that the newest token may see, [(t+1)//m, d] float32."""
        if self.params.compressor is None:
            return np.zeros((0, len(self.params.norm_weight)), np.float32)
        return self._grow(self._entries, self.params.compressor, "c", "z")

    def keys(self) -> np.ndarray:
        """The index keys of `entries`, [(t+1)//m, index d] float32."""
        return self._grow(self._keys, self._indexer.compressor, "index_c", "index_z")

    def scores(self) -> np.ndarray:
        """The newest token's score of each of `entries`, [(t+1)//m] float64."""
        token = self.tokens[-1]
        return self._indexer.scores(token.index_q, token.index_weights, self.keys())

    def selected(self) -> np.ndarray:
        """Indices of the compressed entries that the newest token attends to, ascending."""
        if self.params.indexer is None:
            return np.arange(len(self.entries()))
        return self.params.indexer.select(self.scores())

    def output(self, selected: np.ndarray | None = None) -> np.ndarray:
        """The newest token's attention, [H, d] float64, unrotated at its position.

        Args:
            selected: entries to attend to in place of this layer's own selection.
        """
        params, token = self.params, self.tokens[-1]
        chosen = self.selected() if selected is None else np.asarray(selected, int)
        rows = np.concatenate([self.window(), self.entries()[chosen]])
        scale = token.q.shape[1] ** -0.5 if params.scale is None else params.scale
        return unrotate(attend(token.q, rows, params.sink, scale), len(self) - 1, params.inv_freq)

    @property
    def _indexer(self) -> Indexer:
        if self.params.indexer is None:
            raise ValueError("this layer has no indexer")
        return self.params.indexer

    def _window_row(self, token: Token, position: int) -> np.ndarray:
        params = self.params
        normed = rmsnorm(token.kv, params.norm_weight, params.eps)
        return params.row.roundtrip(rotate(normed, position, params.inv_freq).astype(np.float32))

    def _grow(self, known: list[np.ndarray], compressor: Compressor, c: str, z: str) -> np.ndarray:
        """Add to `known` the blocks completed since it was last asked for."""
        blocks = len(self) // compressor.compression
        if len(known) < blocks:
            cs = np.stack([getattr(token, c) for token in self.tokens])
            zs = np.stack([getattr(token, z) for token in self.tokens])
            known += [compressor.entry(i, cs, zs) for i in range(len(known), blocks)]
        return np.array(known, np.float32).reshape(blocks, compressor.dim)


def random_compressor(
    rng: np.random.Generator,
    *,
    compression: int,
    overlap: int,
    dim: int = 32,
    rope_dim: int = 8,
    row: RowFormat | None = None,
    tail: RowFormat | None = None,
    theta: float = 160000.0,
) -> Compressor:
    return Compressor(
        bias=_normal(rng, compression, (1 + overlap) * dim),
        norm_weight=1 + _normal(rng, dim) / 4,
        inv_freq=inverse_frequencies(rope_dim, theta),
        row=row or Fp32(),
        tail=tail or Fp32(),
    )


def random_params(
    rng: np.random.Generator,
    *,
    window: int = 8,
    compression: int | None = None,
    overlap: int = 0,
    top_k: int | None = None,
    heads: int = 4,
    dim: int = 32,
    rope_dim: int = 8,
    index_heads: int = 8,
    index_dim: int = 16,
    row: RowFormat | None = None,
    index_row: RowFormat | None = None,
    tail: RowFormat | None = None,
) -> LayerParams:
    """A layer of random weights.

    Args:
        compression: m; None for a layer that has only a window.
        top_k: None for a layer without an indexer.
        row: of the window and of the compressed entries; `Fp32` where None, as the two below.
        index_row: of the index keys.
        tail: of both compressors.
    """
    theta = 10000.0 if compression is None else 160000.0
    compressor = indexer = None
    if compression is not None:
        blocks = {"compression": compression, "overlap": overlap, "rope_dim": rope_dim}
        compressor = random_compressor(rng, dim=dim, row=row, tail=tail, theta=theta, **blocks)
        if top_k is not None:
            keys = random_compressor(
                rng, dim=index_dim, row=index_row, tail=tail, theta=theta, **blocks
            )
            indexer = Indexer(keys, index_heads, top_k)
    return LayerParams(
        window=window,
        norm_weight=1 + _normal(rng, dim) / 4,
        inv_freq=inverse_frequencies(rope_dim, theta),
        sink=_normal(rng, heads),
        row=row or Fp32(),
        compressor=compressor,
        indexer=indexer,
    )


def random_token(
    rng: np.random.Generator, params: LayerParams, rounding: RowFormat | None = None
) -> Token:
    """A token of sizes that `params` asks for.

    Args:
        rounding: of q, kv and index_q, which a model has in its own dtype; `Fp32` where None.
    """
    rounding = rounding or Fp32()
    gains = {"q": 2.0, "kv": 10 ** rng.uniform(-1, 1), "z": 2.0, "index_z": 2.0}
    parts = {}
    for name, shape in params.shapes.items():
        if shape is not None:
            value = gains.get(name, 1.0) * _normal(rng, *shape)
            parts[name] = rounding.roundtrip(value) if name in ("q", "kv", "index_q") else value
    return Token(**parts)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)
