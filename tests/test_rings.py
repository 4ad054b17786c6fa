"""The rewind rule and the ring sizes, against rings that are simulated row by row."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from graphcache.errors import RewindTooFar
from graphcache.rings import (
    Ring,
    TailRing,
    WindowRing,
    check_rewind,
    rewind_is_exact,
    rings_of,
    still_holds,
)
from graphcache.schema import AttentionType, KVLayerSchema, LayerCacheSchema, ring_rows


@dataclass
class Simulated:
    """A slot whose ring is a dict of rows, beside the whole history of what it absorbed.

    A row holds (position, version), so that a draft that was rejected differs from the token that
    took its place.
    """

    ring: Ring
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    history: list[int] = field(default_factory=list)
    high: int = 0
    version: int = 0

    def reads(self, position: int) -> range:
        """Positions that the token at `position` looks at, its own included."""
        if isinstance(self.ring, WindowRing):
            return range(max(0, position - self.ring.window + 1), position + 1)
        block, ring = position // self.ring.compression, self.ring
        if (position + 1) % ring.compression:
            return range(position, position + 1)
        return range(max(0, (block - ring.overlap) * ring.compression), position + 1)

    def step(self, tokens: int, accepted: int) -> bool:
        """Write `tokens`, read for each, keep `accepted`; False when a read was wrong."""
        first = len(self.history)
        versions = list(range(self.version + 1, self.version + 1 + tokens))
        self.version += tokens
        for column, version in enumerate(versions):
            self.rows[(first + column) % self.ring.rows] = (first + column, version)
        self.high = max(self.high, first + tokens)
        seen = self.history + versions
        right = all(
            self.rows.get(position % self.ring.rows) == (position, seen[position])
            for column in range(tokens)
            for position in self.reads(first + column)
        )
        del self.history[first:]
        self.history += versions[:accepted]
        return right

    def intact(self, length: int) -> bool:
        """Whether every row that any token after a rewind to `length` can read is right."""
        period = 1 if isinstance(self.ring, WindowRing) else self.ring.compression
        wanted = {p for ahead in range(period) for p in self.reads(length + ahead) if p < length}
        return all(self.rows.get(p % self.ring.rows) == (p, self.history[p]) for p in wanted)

    def grants(self, length: int) -> bool:
        return rewind_is_exact(length, self.high, 0, [self.ring])


RINGS = [
    pytest.param(lambda rows, window=window: WindowRing(rows, window), window, id=f"window{window}")
    for window in (1, 3, 5, 8, 16)
] + [
    pytest.param(
        lambda rows, m=m, ov=ov: TailRing(rows, m, ov), (1 + ov) * m, id=f"tail{m}overlap{ov}"
    )
    for m in (1, 2, 4, 8)
    for ov in (0, 1)
]


def test_needed_ranges_written_out() -> None:
    assert [list(WindowRing(9, 4).needed(n)) for n in (0, 1, 3, 4, 7)] == [
        [],
        [0],
        [0, 1, 2],
        [1, 2, 3],
        [4, 5, 6],
    ]
    assert not any(WindowRing(9, 1).needed(n) for n in range(20))
    assert [list(TailRing(9, 4, 0).needed(n)) for n in (0, 3, 4, 6)] == [[], [0, 1, 2], [], [4, 5]]
    assert [list(TailRing(9, 4, 1).needed(n)) for n in (0, 3, 4, 6, 8)] == [
        [],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5],
        [4, 5, 6, 7],
    ]
    assert [list(TailRing(9, 1, 0).needed(n)) for n in (0, 5)] == [[], []]


def test_counting_from_length_instead_of_high_would_read_a_draft() -> None:
    """W=8, q=4, R=11: written to 44, one accepted (41), rewound by 4: row 30 holds 41."""
    slot = Simulated(WindowRing(11, 8))
    for _ in range(40):
        assert slot.step(1, 1)
    assert slot.step(4, 1)
    length = len(slot.history)
    assert (length, slot.high) == (41, 44)
    assert slot.rows[30 % 11][0] == 41
    assert rewind_is_exact(length - 4, length, 0, [slot.ring])
    assert not rewind_is_exact(length - 4, slot.high, 0, [slot.ring])
    assert not slot.intact(length - 4)


@pytest.mark.parametrize(("make", "read_window"), RINGS)
def test_a_granted_rewind_is_never_wrong(make, read_window) -> None:
    """Random steps, partial accepts, rewinds in a row; also with more rows than needed."""
    rng = random.Random(read_window)
    granted = refused = 0
    for _ in range(120):
        q, k = rng.randint(1, 4), rng.randint(0, 5)
        slot = Simulated(make(ring_rows(read_window, q, k) + rng.choice((0, 0, 1, 5))))
        for _ in range(60):
            tokens = rng.randint(1, q)
            assert slot.step(tokens, rng.randint(0, tokens))
            while rng.random() < 0.15:
                target = rng.randint(max(0, len(slot.history) - 12), len(slot.history))
                if slot.grants(target):
                    assert slot.intact(target)
                    del slot.history[target:]
                    granted += 1
                else:
                    refused += 1
    assert granted > 200 and (refused > 100 or read_window == 1)


@pytest.mark.parametrize(("make", "read_window"), RINGS)
def test_a_refused_first_rewind_would_have_been_wrong(make, read_window) -> None:
    """Before any rewind the rule refuses nothing that is still there."""
    rng = random.Random(read_window)
    refused = 0
    for _ in range(200):
        q = rng.randint(1, 4)
        slot = Simulated(make(ring_rows(read_window, q, rng.randint(0, 5))))
        for _ in range(rng.randint(1, 40)):
            tokens = rng.randint(1, q)
            slot.step(tokens, rng.randint(1, tokens))
        for target in range(len(slot.history) + 1):
            assert slot.grants(target) == slot.intact(target)
            refused += not slot.grants(target)
    assert refused or read_window == 1


def _broken_promises(make, rows: int, q: int, k: int) -> tuple[bool, bool]:
    """(a read was wrong, a promised rewind was refused), over every length, run and accept."""
    wrong = refused = False
    for length in range(40):
        for tokens in range(1, q + 1):
            for accepted in range(1, tokens + 1):
                slot = Simulated(make(rows))
                for _ in range(length):
                    wrong |= not slot.step(1, 1)
                wrong |= not slot.step(tokens, accepted)
                now = len(slot.history)
                refused |= not all(slot.grants(n) for n in range(max(0, now - k), now + 1))
    return wrong, refused


@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize("q", range(1, 5))
def test_ring_sizes_keep_the_promise_and_are_minimal(q: int, k: int) -> None:
    seen = set()
    for make, read_window in (
        (lambda rows: WindowRing(rows, 3), 3),
        (lambda rows: WindowRing(rows, 8), 8),
        (lambda rows: TailRing(rows, 4, 0), 4),
        (lambda rows: TailRing(rows, 4, 1), 8),
    ):
        rows = ring_rows(read_window, q, k)
        assert _broken_promises(make, rows, q, k) == (False, False)
        seen.add(_broken_promises(make, rows - 1, q, k))
    if k <= 1:
        assert all(wrong for wrong, _ in seen)
    else:
        assert all(refused for _, refused in seen)


@pytest.mark.parametrize("k", range(1, 6))
def test_a_step_that_accepts_nothing_leaves_one_token_less_of_the_promise(k: int) -> None:
    """The promise counts on the token that every step but a failed one keeps."""
    slot = Simulated(WindowRing(ring_rows(8, 3, k), 8))
    for _ in range(40):
        slot.step(1, 1)
    slot.step(3, 0)
    assert slot.grants(40 - (k - 1)) and slot.intact(40 - (k - 1))
    assert not slot.grants(40 - k) and not slot.intact(40 - k)


def test_nothing_below_the_floor() -> None:
    rings = [WindowRing(12, 8)]
    assert rewind_is_exact(30, 30, 30, rings)
    assert not rewind_is_exact(29, 30, 30, rings)
    assert rewind_is_exact(29, 30, 29, rings)
    assert not rewind_is_exact(-1, 30, 0, [])
    with pytest.raises(RewindTooFar, match="nothing before 30 is kept"):
        check_rewind(29, 30, 30, rings)


def test_every_ring_has_a_say() -> None:
    wide, narrow = WindowRing(20, 8), WindowRing(9, 8)
    assert still_holds(wide, 30, 35) and not still_holds(narrow, 30, 35)
    assert rewind_is_exact(30, 35, 0, [wide])
    assert not rewind_is_exact(30, 35, 0, [wide, narrow])
    check_rewind(30, 35, 0, [wide])
    with pytest.raises(
        RewindTooFar, match=r"ring of 9 rows.*position 34.*from 26 on.*23 is needed"
    ):
        check_rewind(30, 35, 0, [wide, narrow])


def test_back_to_nothing_is_always_exact() -> None:
    rings = [WindowRing(8, 8), TailRing(4, 4, 0), TailRing(8, 4, 1)]
    assert rewind_is_exact(0, 10_000, 0, rings)


def test_rings_of_layers_are_distinct_and_follow_the_schemas() -> None:
    promise = {"step_width": 3, "rewind": 4}
    swa = LayerCacheSchema(AttentionType.SWA, 8, 24, 8, **promise)
    csa = LayerCacheSchema(AttentionType.CSA, 8, 24, 8, compression=4, **promise)
    hca = LayerCacheSchema(AttentionType.HCA, 16, 24, 8, compression=32, **promise)
    full = KVLayerSchema(2, 8, 8)
    local = KVLayerSchema(2, 8, 8, window=30, dtype=torch.float32, **promise)
    extra = 3 - 1 + 3
    assert rings_of([swa, swa, csa, hca, full, local, local], max_context=1000) == (
        WindowRing(8 + extra, 8),
        TailRing(8 + extra, 4, 1),
        WindowRing(16 + extra, 16),
        TailRing(32 + extra, 32, 0),
        WindowRing(30 + extra, 30),
    )
    assert rings_of([full], 1000) == ()


def test_a_ring_as_long_as_the_context_rewinds_anywhere() -> None:
    (ring,) = rings_of([KVLayerSchema(2, 8, 8, window=30, step_width=2)], max_context=20)
    assert ring.rows == 20
    assert all(rewind_is_exact(n, 20, 0, [ring]) for n in range(21))
