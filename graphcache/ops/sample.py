"""Sampling: greedy, or by temperature with top-k and top-p, each slot with its own parameters.

A draw is the Gumbel-max trick with noise from Philox keyed by (seed of the slot, position): a
function of the request alone, so it does not depend on the row, on the bucket, or on the other
requests of the batch, and a replayed graph draws anew because the position has moved. Two nodes:
one over (vocabulary split, row), one over rows. A padding row gives -1 and is otherwise ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SchemaError
from ._library import register
from ._triton import jit, tl, triton
from .philox import philox

__all__ = ["sample"]

LARGE_VOCABULARY = 65536
SMALL_BLOCK, LARGE_BLOCK = 2048, 4096
"""Ids in a split of the vocabulary, up to a large one and above."""
DRAWS = 512
"""Ids whose noise is computed together."""
GROUP = 128
"""Ids whose maximum is kept, for rows with filters."""
TILE = 16
"""Groups searched together."""
REFERENCE_ELEMENTS = 1 << 20
"""Logits that the reference works on at once."""

# Low bits of an f32 key that logits of a narrower type share: no search need look at them.
_SHARED_KEY_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
_MAX_RATE = torch.finfo(torch.float32).max


def _reference(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    vocab_size: int,
) -> Tensor:
    token = torch.full_like(slots, -1)
    rows = (slots >= 0).nonzero().squeeze(1)
    x = logits[rows, :vocab_size].float()
    finite = ~(x.isnan() | (x == torch.inf)).any(1) & (x > -torch.inf).any(1)
    rows, x = rows[finite], x[finite]
    token[rows] = x.argmax(1).int()

    slot = slots[rows].long()
    drawn = (temperature[slot] > 0).nonzero().squeeze(1)
    for some in drawn.split(max(1, REFERENCE_ELEMENTS // vocab_size)):
        s, line = slot[some, None], x[some]
        shifted = line - line.amax(1, keepdim=True)
        rate = (1 / temperature[s]).clamp(max=_MAX_RATE)
        position = positions[rows[some], None].long()
        word = philox(seed[s], (torch.arange(vocab_size), position, 0, 0))[0]
        uniform = ((word >> 9).float() + 0.5) * 2.0**-23
        score = shifted * rate - (-uniform.log()).log()
        least = _threshold(line, shifted, rate, top_k[s].long(), top_p[s])
        token[rows[some]] = score.masked_fill(line < least, -torch.inf).argmax(1).int()
    return token


def _threshold(line: Tensor, shifted: Tensor, rate: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """The least logit of each row that top-k and then top-p keep; -inf for no filter."""
    size = line.shape[1]
    least = torch.full_like(rate, -torch.inf)
    rows = (((k > 0) & (k < size)) | (p < 1)).nonzero()[:, 0]
    rate, k, p = rate[rows], k[rows], p[rows]
    value, order = line[rows].sort(1, descending=True)
    kth = torch.where((k > 0) & (k < size), value.gather(1, (k - 1).clamp(0, size - 1)), -torch.inf)
    weight = (shifted[rows].gather(1, order).double() * rate.double()).exp()
    mass = weight.masked_fill(value < kth, 0).cumsum(1)
    last = (mass >= p.double() * mass[:, -1:]).int().argmax(1, keepdim=True)
    least[rows] = torch.where(p < 1, value.gather(1, last), kth)
    return least


@jit
def _order(x):  # type: ignore[no-untyped-def]
    """f32 as int32 keys in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _pack(score, ids):  # type: ignore[no-untyped-def]
    """Score over id in one int64: its maximum is the best score and, of equals, the lowest id."""
    return (_order(score).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@jit
def _packed_id(packed):  # type: ignore[no-untyped-def]
    return (0x7FFFFFFF - (packed & 0xFFFFFFFF)).to(tl.int32)


@jit
def _packed_score(packed):  # type: ignore[no-untyped-def]
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _load_logits(line_ptr, ids, width, vocab_size):  # type: ignore[no-untyped-def]
    """Logits as f32: +inf for NaN, one kind of zero, -inf past the vocabulary."""
    # Masked by the width, which divides by 16 more often than the vocabulary: wide loads need it.
    x = tl.load(line_ptr + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    x = tl.where(ids < vocab_size, x, float("-inf"))
    return tl.where(x == 0.0, 0.0, x)


@jit
def _rate(temperature):  # type: ignore[no-untyped-def]
    return tl.minimum(1.0 / temperature, 3.4028234663852886e38)


@jit
def _score(x, top, rate, seed, ids, position):  # type: ignore[no-untyped-def]
    word, _, _, _ = tl.philox(seed, ids, position, 0, 0)
    uniform = ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return (x - top) * rate - tl.log(-tl.log(uniform))


@jit
def _split_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    best_ptr,
    peak_ptr,
    mass_ptr,
    maxima_ptr,
    logits_stride,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    seed_stride,
    width,
    vocab_size,
    splits,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """One program for each split of the vocabulary and row.

    A greedy row leaves the split's best, and NaN for its peak, by which the next kernel knows it
    without waiting for its parameters. A row without filters leaves its best draw, relative to
    its peak. A row with filters leaves its peak, its mass, and the maximum of each group of ids.
    """
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    line_ptr = logits_ptr + row * logits_stride
    ids = split * BLOCK + tl.arange(0, BLOCK)
    x = _load_logits(line_ptr, ids, width, vocab_size)
    at = row * splits + split
    if slot >= 0:
        temperature = tl.load(temperature_ptr + slot * temperature_stride)
        if temperature > 0:
            k = tl.load(top_k_ptr + slot * top_k_stride)
            p = tl.load(top_p_ptr + slot * top_p_stride)
            rate = _rate(temperature)
            peak = tl.max(x, axis=0)
            tl.store(peak_ptr + at, peak)
            shift = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
            if ((k > 0) & (k < vocab_size)) | (p < 1):
                tl.store(mass_ptr + at, tl.sum(tl.exp((x - shift) * rate), axis=0))
                maxima = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), axis=1)
                group = at * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
                tl.store(maxima_ptr + group, maxima)
            else:
                seed = tl.load(seed_ptr + slot * seed_stride)
                position = tl.load(positions_ptr + row)
                best = tl.full([DRAWS], -0x8000000000000000, tl.int64)
                # Read again by parts: noise for a whole split at once would take so many
                # registers that greedy rows would pay for it.
                for part in range(0, BLOCK, DRAWS):
                    some = split * BLOCK + part + tl.arange(0, DRAWS)
                    y = _load_logits(line_ptr, some, width, vocab_size)
                    score = _score(y, shift, rate, seed, some, position)
                    best = tl.maximum(best, _pack(score, some))
                tl.store(best_ptr + at, tl.max(best, axis=0))
        else:
            tl.store(best_ptr + at, tl.max(_pack(x, ids), axis=0))
            tl.store(peak_ptr + at, float("nan"))


@jit
def _tile(  # type: ignore[no-untyped-def]
    line_ptr, list_ptr, start, count, width, vocab_size, TILE: tl.constexpr, GROUP: tl.constexpr
):
    """Ids and logits of the listed groups from `start`; -inf past the list's end."""
    entry = start + tl.arange(0, TILE)
    group = tl.load(list_ptr + entry, mask=entry < count, other=0x7FFFFFF // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return ids, _load_logits(line_ptr, ids, width, vocab_size)


@jit
def _reach(  # type: ignore[no-untyped-def]
    line_ptr,
    list_ptr,
    count,
    width,
    vocab_size,
    key,
    top,
    rate,
    COUNTING: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """How many of the listed logits are at or above `key`, or how much they weigh."""
    total = tl.zeros([TILE, GROUP], tl.float32)
    start = 0
    # Not a range: Triton 3.6 interprets none with a run-time bound under numpy 2.4.
    while start < count:
        _, x = _tile(line_ptr, list_ptr, start, count, width, vocab_size, TILE, GROUP)
        above = (_order(x) >> SHIFT) >= key
        if COUNTING:
            total += tl.where(above, 1.0, 0.0)
        else:
            total += tl.where(above, tl.exp((x - top) * rate), 0.0)
        start += TILE
    return tl.sum(tl.sum(total, axis=1), axis=0)


@jit
def _search(  # type: ignore[no-untyped-def]
    line_ptr,
    list_ptr,
    count,
    width,
    vocab_size,
    low,
    high,
    target,
    top,
    rate,
    COUNTING: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The largest key in [low, high) that reaches the target; that `low` does is taken as given."""
    # As many steps as there are bits in a key, whatever is reached: all threads of a program leave
    # the loop together. The barrier keeps a step's sums apart from the next one's.
    for _ in range(33 - SHIFT):
        key = (low + high) >> 1
        reached = _reach(
            line_ptr, list_ptr, count, width, vocab_size, key, top, rate, COUNTING, TILE, GROUP,
            SHIFT,
        )  # fmt: skip
        low = tl.where(reached >= target, key, low)
        high = tl.where(reached >= target, high, key)
        tl.debug_barrier()
    return low


@jit
def _filtered(  # type: ignore[no-untyped-def]
    line_ptr,
    maxima_ptr,
    list_ptr,
    width,
    vocab_size,
    groups,
    top,
    total,
    rate,
    k,
    p,
    seed,
    position,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Draw among the logits at or above the threshold that the filters set.

    The maxima of the groups are themselves logits, so a key at which they alone reach the target
    lies no higher than the threshold, and a group whose maximum is below that key holds nothing
    that is kept. The groups that remain, few unless the distribution is flat, are listed, and
    only they are searched for the threshold itself.
    """
    k_on = (k > 0) & (k < vocab_size)
    target = tl.where(k_on, k.to(tl.float32), p * total)
    high = (_order(top) >> SHIFT).to(tl.int64) + 1
    low = (_order(tl.full([], float("-inf"), tl.float32)) >> SHIFT).to(tl.int64)

    group = tl.arange(0, GROUPS)
    maxima = tl.load(maxima_ptr + group, mask=group < groups, other=float("-inf"))
    value = tl.where(k_on, 1.0, tl.exp((maxima - top) * rate))
    maxima_key = _order(maxima) >> SHIFT
    ceiling = high
    for _ in range(33 - SHIFT):
        key = (low + ceiling) >> 1
        reached = tl.sum(tl.where(maxima_key >= key, value, 0.0), axis=0)
        low = tl.where(reached >= target, key, low)
        ceiling = tl.where(reached >= target, ceiling, key)
        tl.debug_barrier()

    listed = (group < groups) & (maxima_key >= low)
    place = tl.cumsum(listed.to(tl.int32), axis=0) - 1
    tl.store(list_ptr + place, group, mask=listed)
    count = tl.sum(listed.to(tl.int32), axis=0)
    # Every thread of the program reads what the others have listed.
    tl.debug_barrier()

    if k_on:
        low = _search(
            line_ptr, list_ptr, count, width, vocab_size, low, high, target, top, rate, True,
            TILE, GROUP, SHIFT,
        )  # fmt: skip
        if p < 1:
            total = _reach(
                line_ptr, list_ptr, count, width, vocab_size, low, top, rate, False, TILE, GROUP,
                SHIFT,
            )  # fmt: skip
    if p < 1:
        low = _search(
            line_ptr, list_ptr, count, width, vocab_size, low, high, p * total, top, rate, False,
            TILE, GROUP, SHIFT,
        )  # fmt: skip

    best = tl.full([TILE, GROUP], -0x8000000000000000, tl.int64)
    start = 0
    while start < count:
        ids, x = _tile(line_ptr, list_ptr, start, count, width, vocab_size, TILE, GROUP)
        score = _score(x, top, rate, seed, ids, position)
        score = tl.where((_order(x) >> SHIFT) >= low, score, float("-inf"))
        best = tl.maximum(best, _pack(score, ids))
        start += TILE
    return _packed_id(tl.max(tl.max(best, axis=1), axis=0))


@jit
def _token_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    best_ptr,
    peak_ptr,
    mass_ptr,
    maxima_ptr,
    list_ptr,
    token_ptr,
    logits_stride,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    seed_stride,
    width,
    vocab_size,
    splits,
    groups,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """One program a row: the best of its splits, or the draw among what its filters keep."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    split = tl.arange(0, SPLITS)
    at = row * splits + split
    inside = split < splits
    # Fetched before it is known what the row left, so that a greedy row waits only once.
    best = tl.load(best_ptr + at, mask=inside, other=-0x8000000000000000)
    peaks = tl.load(peak_ptr + at, mask=inside, other=float("-inf"))
    token = -1
    if slot >= 0:
        if tl.max((peaks != peaks).to(tl.int32), axis=0) > 0:
            winner = tl.max(best, axis=0)
            if tl.abs(_packed_score(winner)) < float("inf"):
                token = _packed_id(winner)
        else:
            top = tl.max(peaks, axis=0)
            if tl.abs(top) < float("inf"):
                rate = _rate(tl.load(temperature_ptr + slot * temperature_stride))
                k = tl.load(top_k_ptr + slot * top_k_stride)
                p = tl.load(top_p_ptr + slot * top_p_stride)
                if ((k > 0) & (k < vocab_size)) | (p < 1):
                    mass = tl.load(mass_ptr + at, mask=inside, other=0.0)
                    total = tl.sum(mass * tl.exp((peaks - top) * rate), axis=0)
                    seed = tl.load(seed_ptr + slot * seed_stride)
                    position = tl.load(positions_ptr + row)
                    token = _filtered(
                        logits_ptr + row * logits_stride, maxima_ptr + row * groups,
                        list_ptr + row * groups, width, vocab_size, groups, top, total, rate, k,
                        p, seed, position, TILE, GROUP, GROUPS, SHIFT,
                    )  # fmt: skip
                else:
                    score = _packed_score(best) + (peaks - top) * rate
                    score = tl.where(inside, score, float("-inf"))
                    token = _packed_id(tl.max(_pack(score, _packed_id(best)), axis=0))
    tl.store(token_ptr + row, token)


def _launch(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    vocab_size: int,
) -> Tensor:
    rows = logits.shape[0]
    token = torch.empty_like(slots)
    if not rows:
        return token
    block = _block(vocab_size)
    splits = -(-vocab_size // block)
    groups = splits * (block // GROUP)
    best = logits.new_empty((rows, splits), dtype=torch.int64)
    peak = logits.new_empty((rows, splits), dtype=torch.float32)
    mass = logits.new_empty((rows, splits), dtype=torch.float32)
    maxima = logits.new_empty((rows, groups), dtype=torch.float32)
    listed = logits.new_empty((rows, groups), dtype=torch.int32)
    given = (logits, slots, positions, temperature, top_k, top_p, seed)
    sizes = (
        # The stride of a single row may be anything, and loads are laid out by what divides it.
        logits.stride(0) if rows > 1 else logits.shape[1],
        *(parameter.stride(0) for parameter in (temperature, top_k, top_p, seed)),
        logits.shape[1],
        vocab_size,
        splits,
    )
    _split_kernel[(splits, rows)](
        *given,
        best,
        peak,
        mass,
        maxima,
        *sizes,
        BLOCK=block,
        GROUP=GROUP,
        DRAWS=min(block, DRAWS),
        num_warps=4,
    )
    _token_kernel[(rows,)](
        *given,
        best,
        peak,
        mass,
        maxima,
        listed,
        token,
        *sizes,
        groups,
        SPLITS=triton.next_power_of_2(splits),
        TILE=TILE,
        GROUP=GROUP,
        GROUPS=triton.next_power_of_2(groups),
        SHIFT=_SHARED_KEY_BITS[logits.dtype],
        num_warps=8,
    )
    return token


def _block(vocab_size: int) -> int:
    """Ids in a split: a function of the vocabulary only, so results do not depend on the batch."""
    if vocab_size > LARGE_VOCABULARY:
        return LARGE_BLOCK
    return max(GROUP, min(SMALL_BLOCK, int(triton.next_power_of_2(vocab_size))))


def _fake(logits: Tensor, slots: Tensor, *_: object) -> Tensor:
    return torch.empty_like(slots)


_op = register(
    "sample(Tensor logits, Tensor slots, Tensor positions, Tensor temperature, Tensor top_k,"
    " Tensor top_p, Tensor seed, int vocab_size) -> Tensor",
    reference=_reference,
    kernel=_launch,
    fake=_fake,
)


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    vocab_size: int,
) -> Tensor:
    """Draw one token a row from its logits, by its slot's parameters. Two nodes.

    Runs on the current stream without synchronizing, and writes nothing but its output.

    With `temperature` 0 the token is the largest logit's, the lowest id of equals. Otherwise it is
    the argmax of `(logit - largest) / temperature + g(id)` over the ids that the filters keep,
    where `g = -log(-log(u))`, `u = ((w >> 9) + 0.5) * 2**-23`, and w is word 0 of Philox4x32-10
    with key `seed` and counter (id, position, 0, 0). Top-k keeps every logit that is at least the
    k-th largest, equals of it too. Top-p then keeps, of what top-k kept, the logits at or above
    the largest logit t at which the probability of `logit >= t` reaches p.

    Args:
        logits: [R, V] float32, bfloat16 or float16, contiguous within a row. V may exceed
            `vocab_size`: the ids past it are never drawn, nor looked at.
        slots: [R] int32, contiguous; -1 for padding.
        positions: [R] int32, contiguous: of the token that was absorbed; keys the draw.
        temperature: [S1] float32 by slot, any stride, finite; 0 for greedy.
        top_k: [S1] int32 by slot, any stride; 0 for no filter.
        top_p: [S1] float32 by slot, any stride; 1 or more for no filter.
        seed: [S1] int64 by slot, any stride.
        vocab_size: ids that are tokens.

    Returns:
        [R] int32 token ids; -1 for padding, and where the logits are not finite: a NaN or +inf
        among the tokens, or nothing but -inf.

    Raises:
        SchemaError: for other dtypes or shapes, float64 logits among them.
    """
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise SchemaError(
            f"sample: logits must be float32, bfloat16 or float16, got {logits.dtype}"
        )
    if logits.dim() != 2 or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise SchemaError(
            f"sample: logits must be [R, V] with contiguous rows, got {list(logits.shape)} "
            f"with strides {logits.stride()}"
        )
    if not 1 <= vocab_size <= logits.shape[1]:
        raise SchemaError(f"sample: vocab_size must be in 1..{logits.shape[1]}, got {vocab_size}")
    for name, tensor in (("slots", slots), ("positions", positions)):
        if (
            tensor.dtype != torch.int32
            or tensor.shape != logits.shape[:1]
            or not tensor.is_contiguous()
        ):
            raise SchemaError(
                f"sample: {name} must be contiguous int32 [{logits.shape[0]}], "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("seed", seed, torch.int64),
    ):
        if tensor.dtype != dtype or tensor.shape != temperature.shape or tensor.dim() != 1:
            raise SchemaError(
                f"sample: {name} must be {dtype} [S1], got {tensor.dtype} {list(tensor.shape)}"
            )
    token: Tensor = _op(
        logits, slots, positions, temperature, top_k, top_p, seed, vocab_size
    )  # fmt: skip
    return token
