"""sample: the CPU operation and the kernels against an oracle in float64 with a Philox of its own.

Sums and logarithms in float32 round differently from place to place, so an answer is right if it
is one that the oracle would give with every score off by `SCORE_ERROR` and the probability that
top-p asks for off by `MASS_ERROR`. That is nearly always one token, and the tests see that it is.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphcache.errors import SchemaError
from graphcache.ops.philox import philox
from graphcache.ops.sample import sample
from graphcache.pool import Field, StatePool

module = importlib.import_module("graphcache.ops.sample")
ROOT = Path(__file__).parents[2]
SCORE_ERROR, MASS_ERROR = 2e-5, 1e-5
PARAMETERS = ("temperature", "top_k", "top_p", "seed")

Operation = Callable[..., Tensor]


def oracle_philox(key: int, counter: tuple[Any, ...]) -> tuple[Any, ...]:
    """Philox4x32-10 of Salmon et al. (SC11), on Python ints or on arrays of uint64."""
    mask = 0xFFFFFFFF
    x0, x1, x2, x3 = counter
    low, high = key & mask, (key >> 32) & mask
    for _ in range(10):
        left, right = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (
            (right >> 32) ^ x1 ^ low,
            right & mask,
            (left >> 32) ^ x3 ^ high,
            left & mask,
        )
        low, high = (low + 0x9E3779B9) & mask, (high + 0xBB67AE85) & mask
    return x0, x1, x2, x3


def oracle(
    line: np.ndarray, temperature: float, k: int, p: float, seed: int, position: int
) -> set[int]:
    """The tokens that are right for a row of logits: one, or those within error of it."""
    x = line.astype(np.float64)
    if np.isnan(x).any() or x.max() == np.inf or x.max() == -np.inf:
        return {-1}
    if temperature == 0:
        return {next(index for index, value in enumerate(x) if value == x.max())}
    size = len(x)
    ids = np.arange(size, dtype=np.uint64)
    zero = np.zeros(size, np.uint64)
    word = oracle_philox(seed, (ids, zero + np.uint64(position), zero, zero))[0]
    uniform = ((word >> np.uint64(9)).astype(np.float64) + 0.5) / 2**23
    shifted = (x - x.max()) / temperature
    score = shifted - np.log(-np.log(uniform))

    descending = np.sort(x)[::-1]
    survives = x >= descending[k - 1] if 0 < k < size else x > -np.inf
    right: set[int] = set()
    for slack in (-MASS_ERROR, MASS_ERROR) if p < 1 else (0,):
        kept = survives
        if p < 1:
            weight = np.where(survives, np.exp(shifted), 0)
            order = np.argsort(-x, kind="stable")
            share = np.cumsum(weight[order]) / weight.sum()
            reaching = [x[i] for i, s in zip(order, share, strict=True) if s >= p + slack]
            kept = survives & (x >= (reaching[0] if reaching else -np.inf))
        masked = np.where(kept, score, -np.inf)
        right |= set(np.flatnonzero(masked >= masked.max() - SCORE_ERROR).tolist())
    return right


def make_pool(parameters: list[tuple[float, int, float, int]], device: str = "cpu") -> StatePool:
    """A pool whose slots have these (temperature, top_k, top_p, seed)."""
    fields = [
        Field("before", (5,), torch.uint8, initial=171),
        Field("temperature", (), torch.float32),
        Field("top_k", (), torch.int32),
        Field("top_p", (), torch.float32, initial=1),
        Field("seed", (), torch.int64),
        Field("after", (3,), torch.int32, initial=-7),
    ]
    pool = StatePool(fields, len(parameters), device)
    for slot, values in enumerate(parameters):
        for name, value in zip(PARAMETERS, values, strict=True):
            pool[name][slot] = value
    return pool


def draw(
    operation: Operation,
    pool: StatePool,
    logits: Tensor,
    slots: list[int],
    positions: list[int],
    vocabulary: int | None = None,
) -> list[int]:
    """One call, which must write nothing."""
    device = pool.device
    arena, before = pool.arena.clone(), logits.clone()
    tokens = operation(
        logits,
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
        *(pool[name] for name in PARAMETERS),
        logits.shape[1] if vocabulary is None else vocabulary,
    )
    assert tokens.dtype == torch.int32
    assert torch.equal(pool.arena, arena)
    assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8))
    result: list[int] = tokens.tolist()
    return result


def check_rows(
    operation: Operation,
    pool: StatePool,
    logits: Tensor,
    slots: list[int],
    positions: list[int],
    vocabulary: int,
) -> None:
    got = draw(operation, pool, logits, slots, positions, vocabulary)
    settled = drawn = 0
    for row, slot in enumerate(slots):
        if slot < 0:
            assert got[row] == -1
            continue
        parameters = [pool[name][slot].item() for name in PARAMETERS]
        line = logits[row, :vocabulary].float().cpu().numpy()
        right = oracle(line, *parameters, positions[row])
        assert got[row] in right, f"row {row}, parameters {parameters}: {got[row]} not in {right}"
        settled += len(right) == 1
        drawn += 1
    assert settled >= 0.8 * drawn, "the rule excuses too much"


MIX = [
    # temperature, top_k, top_p, seed
    (0.0, 0, 1.0, 1),
    (0.0, 5, 0.5, 2),
    (1.0, 0, 1.0, 3),
    (0.7, 0, 1.0, -4),
    (1.0, 1, 1.0, 5),
    (1.0, 2, 1.0, 2**62 + 6),
    (1.3, 40, 1.0, 7),
    (1.0, 0, 0.9, 8),
    (0.8, 0, 0.3, -(2**63)),
    (1.0, 50, 0.95, 10),
    (2.0, 20, 0.8, 11),
    (1.0, 0, 1e-9, 12),
    (1.0, 0, 0.9999, 13),
    (1e-6, 0, 1.0, 14),
    (1e-6, 30, 0.5, 15),
    (1e3, 0, 1.0, 16),
    (1e3, 60, 0.99, 17),
    (5.0, 10**6, 2.0, 18),
    (1.0, -1, 0.0, 19),
    (1e3, 60, 0.2, 20),
    (4.0, 300, 0.4, 21),
]


def mixed(
    vocabulary: int, padded: int, dtype: torch.dtype, rows: int, device: str = "cpu"
) -> tuple[StatePool, Tensor, list[int], list[int]]:
    """Rows over every kind of parameters, padding among them, and NaN wherever none may look."""
    generator = torch.Generator().manual_seed(vocabulary + rows)
    logits = (torch.randn(rows, padded, generator=generator) * 4).to(dtype)
    logits[:, vocabulary:] = torch.nan
    slots = [row % (len(MIX) + 1) - 1 for row in range(rows)]
    for row, slot in enumerate(slots):
        if slot < 0:
            logits[row] = torch.nan
    positions = [(row * 37) % 1000 for row in range(rows)]
    return make_pool(MIX, device), logits.to(device), slots, positions


def check_mix(operation: Operation) -> None:
    for vocabulary, padded in ((7, 7), (2100, 2105)):
        pool, logits, slots, positions = mixed(vocabulary, padded, torch.float32, len(MIX) + 1)
        check_rows(operation, pool, logits, slots, positions, vocabulary)


def check_large_vocabulary(operation: Operation) -> None:
    vocabulary = module.kernel.LARGE_VOCABULARY + 1000
    chosen = [2, 9, -1, 0]
    pool, _, _, _ = mixed(8, 8, torch.float32, 1)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(chosen), vocabulary + 5, generator=generator) * 5
    check_rows(operation, pool, logits, chosen, [5] * len(chosen), vocabulary)


def check_flat(operation: Operation) -> None:
    """Equal logits: the filters keep all of them, by the rule for equals."""
    pool = make_pool([(1.0, 3, 1.0, 1), (1.0, 0, 0.1, 2), (1.0, 3, 0.1, 3), (1.0, 0, 1.0, 4)])
    rows = 16
    slots = [row % 4 for row in range(rows)]
    logits = torch.full((rows, 300), -2.5)
    got = draw(operation, pool, logits, slots, list(range(rows)))
    assert min(got) >= 0
    for slot in range(4):
        assert len(set(got[slot::4])) > 2
    check_rows(operation, pool, logits, slots, list(range(rows)), 300)


def check_ties(operation: Operation) -> None:
    """Equals of the k-th largest stay, equals of the top-p threshold stay, and no one else."""
    line = torch.full((6, 200), -30.0)
    line[:, 1:121:2] = 2.0
    line[:, 0:120:2] = 1.8
    pool = make_pool([(1.0, 2, 1.0, 1), (1.0, 61, 1.0, 2), (1.0, 0, 0.3, 3), (1.0, 0, 0.9, 4)])
    for slot, both in enumerate([False, True, False, True]):
        got = draw(operation, pool, line, [slot] * 6, list(range(6)))
        assert max(got) < 120
        assert len(set(got)) > 3
        assert {token % 2 for token in got} == ({0, 1} if both else {1})


def check_not_finite(operation: Operation) -> None:
    inf, nan = math.inf, math.nan
    rows = []
    for bad in (nan, inf):
        for place in (0, 150, 299):
            rows.append((torch.linspace(-5, 5, 300), place, bad, False))
    rows.append((torch.full((300,), -inf), 0, -inf, False))
    rows.append((torch.full((300,), -inf), 211, 1.5, True))
    rows.append((torch.full((300,), -inf), 3, -3.0e38, True))
    rows.append((torch.linspace(-1, 1, 300) * 3e38, 7, -3.4e38, True))
    logits = torch.stack([line for line, _, _, _ in rows])
    for row, (_, place, value, _) in enumerate(rows):
        logits[row, place] = value
    logits = torch.cat([logits, torch.full((len(rows), 12), nan)], 1)
    kinds = [
        (0.0, 0, 1.0),
        (1.0, 0, 1.0),
        (1.0, 5, 1.0),
        (1.0, 0, 0.9),
        (1e-6, 5, 0.9),
        (1e-6, 0, 1.0),
    ]
    pool = make_pool([(*kind, index) for index, kind in enumerate(kinds)])
    for slot in range(len(kinds)):
        got = draw(operation, pool, logits, [slot] * len(rows), [3] * len(rows), 300)
        for token, (_, place, _, good) in zip(got, rows, strict=True):
            assert (token >= 0) == good
            assert not good or token == place or place == 7
        assert got[-1] == 299
    # Whole splits of -inf beside one that has a token.
    logits = torch.full((len(kinds), 5000), -inf)
    logits[:, 2500] = -1.0
    assert draw(operation, pool, logits, list(range(len(kinds))), [0] * len(kinds)) == [2500] * 6


def check_greedy_ties(operation: Operation) -> None:
    pool = make_pool([(0.0, 0, 1.0, 1)])
    logits = torch.full((6, 5000), -4.0)
    for row, places in enumerate([(0, 1), (2047, 2048), (4999, 9), (130, 131, 4000), (8,)]):
        logits[row, list(places)] = 3.0
    logits[5] = -1.0
    logits[5, 40], logits[5, 4100] = -0.0, 0.0
    got = draw(operation, pool, logits, [0] * 6, [0] * 6)
    assert got == [0, 2047, 9, 130, 8, 40]


def check_independence(operation: Operation) -> None:
    """The same request draws the same token wherever it stands, and whoever stands beside it."""
    generator = torch.Generator().manual_seed(9)
    line = torch.randn(300, generator=generator)
    pool = make_pool([(1.0, 0, 1.0, 1), (1.0, 20, 0.9, 77), (1.0, 0, 1.0, 77), (1.0, 20, 0.9, 77)])
    alone = [
        draw(operation, pool, line.expand(3, 300).contiguous(), [slot] * 3, [3, 4, 5])
        for slot in range(4)
    ]
    assert alone[1] == alone[3]
    for rows in (1, 4):
        logits = torch.randn(rows, 300, generator=generator)
        for row in range(rows):
            slots = [(row + other) % 3 - 1 for other in range(rows)]
            logits[row], slots[row] = line, row % 4
            got = draw(operation, pool, logits, slots, [4] * rows)
            assert got[row] == alone[row % 4][1]


CHECKS = [
    check_mix,
    check_large_vocabulary,
    check_flat,
    check_ties,
    check_not_finite,
    check_greedy_ties,
    check_independence,
]

KNOWN_ANSWERS = [
    (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (2**64 - 1, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        0x299F31D0A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    key: int, counter: tuple[int, int, int, int], words: str
) -> None:
    """Random123's known-answer vectors."""
    expected = [int(word, 16) for word in words.split()]
    assert list(oracle_philox(key, counter)) == expected
    signed = torch.tensor(key - 2**64 if key >= 2**63 else key)
    assert [int(word) for word in philox(signed, counter)] == expected


def test_philox_of_many_counters() -> None:
    ids = torch.arange(100)
    words = philox(torch.tensor(-123456789), (ids, 2**31 + ids, 7, 0))
    for index in range(100):
        expected = oracle_philox(-123456789, (index, 2**31 + index, 7, 0))
        assert tuple(int(word[index]) for word in words) == expected


@pytest.mark.parametrize("checks", CHECKS)
def test_reference(checks: Callable[[Operation], None]) -> None:
    checks(sample)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reference_narrow_logits(dtype: torch.dtype) -> None:
    pool, logits, slots, positions = mixed(300, 320, dtype, 60)
    check_rows(sample, pool, logits, slots, positions, 300)


def chi_square(counts: Tensor, probability: Tensor) -> float:
    expected = probability.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("temperature", "k", "p", "kept"),
    [(1.0, 0, 1.0, 12), (0.6, 0, 1.0, 12), (2.0, 0, 1.0, 12), (1.0, 5, 1.0, 5), (1.0, 0, 0.8, 6)],
)
def test_draws_follow_the_distribution(temperature: float, k: int, p: float, kept: int) -> None:
    """Chi-square over positions of one request; the bound is passed once in a thousand."""
    line = torch.linspace(1.5, -1.2, 12)
    probability = (line / temperature).softmax(0)
    probability[kept:] = 0
    probability /= probability.sum()
    draws = 2500
    pool = make_pool([(temperature, k, p, 20251)])
    logits = line.expand(draws, 12).contiguous()
    got = draw(sample, pool, logits, [0] * draws, list(range(draws)))
    counts = torch.bincount(torch.tensor(got), minlength=12).double()
    assert counts[kept:].sum() == 0
    bound = {12: 31.26, 6: 20.52, 5: 18.47}[kept]
    assert chi_square(counts[:kept], probability[:kept]) < bound


def test_draws_of_seeds_follow_the_distribution() -> None:
    """The same, over requests at one position with seeds in a row."""
    draws = 2000
    line = torch.linspace(1.0, -1.0, 8)
    pool = make_pool([(1.0, 0, 1.0, seed) for seed in range(draws)])
    logits = line.expand(draws, 8).contiguous()
    got = draw(sample, pool, logits, list(range(draws)), [17] * draws)
    counts = torch.bincount(torch.tensor(got), minlength=8).double()
    assert chi_square(counts, line.softmax(0)) < 24.32


def test_positions_differ_and_reseeding_reproduces() -> None:
    count = 1000
    pool = make_pool([(1.0, 0, 1.0, 42), (1.0, 0, 1.0, 43)])
    logits = torch.zeros(count, 500)
    positions = list(range(count))
    first = draw(sample, pool, logits, [0] * count, positions)
    other = draw(sample, pool, logits, [1] * count, positions)
    assert sum(a == b for a, b in itertools.pairwise(first)) < 12
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 12
    assert len(set(first)) > 400
    pool["seed"][1] = 42
    assert draw(sample, pool, logits, [1] * count, positions) == first


def test_tiny_top_p_is_greedy_and_one_is_off() -> None:
    pool = make_pool([(1.0, 0, 1e-12, 5), (1.0, 0, 1.0, 5), (1.0, 0, 3.0, 5), (1.0, 100, 1.0, 5)])
    rows = 200
    logits = torch.randn(rows, 100, generator=torch.Generator().manual_seed(4))
    greedy, one, three, all_kept = (
        draw(sample, pool, logits, [slot] * rows, list(range(rows))) for slot in range(4)
    )
    assert greedy == logits.argmax(1).tolist()
    assert one == three == all_kept
    assert one != greedy


def test_extreme_temperatures() -> None:
    pool = make_pool([(1e-6, 0, 1.0, 5), (1e3, 0, 1.0, 6)])
    rows = 400
    line = torch.linspace(-40, 40, 50)
    line[10] = line[-1]
    logits = line.expand(rows, 50).contiguous()
    cold = draw(sample, pool, logits, [0] * rows, list(range(rows)))
    assert set(cold) == {10, 49}
    assert 150 < cold.count(10) < 250
    hot = draw(sample, pool, logits, [1] * rows, list(range(rows)))
    assert set(hot) == set(range(50))


def test_padded_vocabulary_is_never_drawn() -> None:
    pool = make_pool([(1e3, 0, 1.0, 5), (0.0, 0, 1.0, 6), (1e3, 0, 0.99, 7)])
    logits = torch.zeros(300, 12)
    logits[:, 10:] = 100.0
    for slot in range(3):
        got = draw(sample, pool, logits, [slot] * 300, list(range(300)), 10)
        assert max(got) <= 9


def test_no_rows() -> None:
    none = torch.empty(0, dtype=torch.int32)
    pool = make_pool([(1.0, 0, 1.0, 5)])
    assert sample(torch.empty(0, 9), none, none, *(pool[n] for n in PARAMETERS), 9).shape == (0,)


def test_refusals() -> None:
    pool = make_pool([(1.0, 0, 1.0, 5)])
    row = torch.zeros(2, dtype=torch.int32)
    good = {"logits": torch.zeros(2, 8), "slots": row, "positions": row, "vocab_size": 8}
    good |= {name: pool[name] for name in PARAMETERS}
    for change, message in [
        ({"logits": torch.zeros(2, 8).double()}, "float64"),
        ({"logits": torch.zeros(8)}, r"\[R, V\]"),
        ({"logits": torch.zeros(2, 16)[:, ::2]}, "contiguous rows"),
        ({"vocab_size": 9}, "vocab_size must be in"),
        ({"vocab_size": 0}, "vocab_size must be in"),
        ({"slots": row.long()}, "slots must be"),
        ({"positions": row[:1]}, "positions must be"),
        ({"temperature": pool["temperature"].double()}, "temperature must be"),
        ({"top_k": pool["top_k"].long()}, "top_k must be"),
        ({"top_p": pool["top_p"][:1]}, "top_p must be"),
        ({"seed": pool["seed"].int()}, "seed must be"),
    ]:
        with pytest.raises(SchemaError, match=message):
            sample(**(good | change))


def test_traces_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        row, real = torch.empty(3, dtype=torch.int32), torch.empty(5)
        tokens = sample(
            torch.empty(3, 9), row, row, real, torch.empty(5, dtype=torch.int32), real,
            torch.empty(5, dtype=torch.int64), 9,
        )  # fmt: skip
    assert (tokens.shape, tokens.dtype) == ((3,), torch.int32)


def test_kernel_interpreted() -> None:
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert child.stdout.split() == [each.__name__ for each in CHECKS]


def signature(kernel: Any, logits: str, constants: dict[str, int]) -> dict[str, str]:
    floats = ("temperature_ptr", "top_p_ptr", "peak_ptr", "mass_ptr", "maxima_ptr")
    types = dict.fromkeys(floats, "*fp32") | {"logits_ptr": logits}
    types |= {"seed_ptr": "*i64", "best_ptr": "*i64"}
    return {
        name: types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
        if name not in constants
    }


@pytest.mark.parametrize("logits", ["*bf16", "*fp32"])
@pytest.mark.parametrize("block", [128, 2048, 4096])
def test_split_kernel_builds(logits: str, block: int) -> None:
    pytest.importorskip("triton")
    from kernel_build import build_for_sm90

    kernel = module.kernel._split_kernel
    constants = {
        "BLOCK": block,
        "GROUP": module.kernel.GROUP,
        "DRAWS": min(block, module.kernel.DRAWS),
    }
    assert build_for_sm90(kernel, signature(kernel, logits, constants), constants)


@pytest.mark.parametrize(("logits", "shift"), [("*bf16", 16), ("*fp32", 0)])
@pytest.mark.parametrize(("splits", "groups"), [(1, 1), (64, 2048)])
def test_token_kernel_builds(logits: str, shift: int, splits: int, groups: int) -> None:
    pytest.importorskip("triton")
    from kernel_build import build_for_sm90

    kernel = module.kernel._token_kernel
    constants = {"SPLITS": splits, "TILE": module.kernel.TILE, "GROUP": module.kernel.GROUP}
    constants |= {"GROUPS": groups, "SHIFT": shift}
    assert build_for_sm90(kernel, signature(kernel, logits, constants), constants, num_warps=8)


VOCABULARIES = [(97, 97), (49152, 49152), (128256, 128256), (262144, 262208)]


def compare_with_reference(
    pool: StatePool, logits: Tensor, slots: list[int], positions: list[int], vocabulary: int
) -> None:
    """Kernel and CPU operation: equal for greedy rows, equal or both right for the others."""
    on_cpu = StatePool(pool.fields.values(), pool.rows, "cpu")
    on_cpu.arena.copy_(pool.arena)
    wanted = draw(sample, on_cpu, logits.cpu(), slots, positions, vocabulary)
    got = draw(sample, pool, logits, slots, positions, vocabulary)
    differ = [row for row in range(len(slots)) if got[row] != wanted[row]]
    assert len(differ) <= 0.05 * len(slots)
    for row in differ:
        parameters = [on_cpu[name][slots[row]].item() for name in PARAMETERS]
        line = logits[row, :vocabulary].float().cpu().numpy()
        assert parameters[0] > 0
        assert {got[row], wanted[row]} <= oracle(line, *parameters, positions[row])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocabulary", "padded"), VOCABULARIES)
def test_kernel(vocabulary: int, padded: int, dtype: torch.dtype) -> None:
    pool, logits, slots, positions = mixed(vocabulary, padded, dtype, 64, "cuda")
    compare_with_reference(pool, logits, slots, positions, vocabulary)


@pytest.mark.gpu
@pytest.mark.parametrize("checks", CHECKS)
def test_kernel_checks(checks: Callable[[Operation], None]) -> None:
    def on_gpu(*arguments: Any) -> Tensor:
        moved = (each.cuda() if isinstance(each, Tensor) else each for each in arguments)
        return sample(*moved).cpu()

    checks(on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize(("vocabulary", "padded"), VOCABULARIES)
def test_kernel_does_not_depend_on_the_batch(vocabulary: int, padded: int) -> None:
    pool, logits, slots, positions = mixed(vocabulary, padded, torch.bfloat16, 64, "cuda")
    whole = draw(sample, pool, logits, slots, positions, vocabulary)
    for rows in (1, 3, 32):
        for start in range(0, 64 - rows + 1, max(rows, 7)):
            some = slice(start, start + rows)
            part = logits[some].clone()
            got = draw(sample, pool, part, slots[some], positions[some], vocabulary)
            assert got == whole[some]


@pytest.mark.gpu
@pytest.mark.parametrize(("vocabulary", "padded"), VOCABULARIES)
@pytest.mark.parametrize("rows", [1, 64])
def test_kernel_in_a_graph(vocabulary: int, padded: int, rows: int) -> None:
    """A replay draws for the positions, slots and parameters of that moment."""
    pool, logits, slots, positions = mixed(vocabulary, padded, torch.bfloat16, 64, "cuda")
    static = logits[:rows].clone()
    row_slots = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    row_positions = torch.zeros(rows, dtype=torch.int32, device="cuda")
    arguments = (static, row_slots, row_positions, *(pool[n] for n in PARAMETERS), vocabulary)
    sample(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(*arguments)
    for turn in range(1, 20):
        now_slots = [slots[(row + turn) % 64] for row in range(rows)]
        now_positions = [positions[(row + turn) % 64] + turn for row in range(rows)]
        static.copy_(logits.roll(-turn, 0)[:rows])
        row_slots.copy_(torch.tensor(now_slots))
        row_positions.copy_(torch.tensor(now_positions))
        graph.replay()
        eager = draw(sample, pool, static, now_slots, now_positions, vocabulary)
        assert tokens.tolist() == eager


if __name__ == "__main__":
    for each in CHECKS:
        each(module.kernel.launch)
        print(each.__name__)
