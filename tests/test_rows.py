"""Row formats against a table of the 256 codes, and their layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphcache.errors import SchemaError
from graphcache.rows import Fp8TokenRow, Fp8TokenRows, PlainRow
from tests.window_oracle import MAGNITUDES, MIDPOINTS, TABLE, encode, from_bf16, to_bf16, to_e4m3

FORMAT = Fp8TokenRow(width=24, rope_dim=8)


def _ulps(values: np.ndarray, steps: int) -> np.ndarray:
    return (values.astype(np.float32).view(np.int32) + steps).view(np.float32)


def _encode_with_unit_scale(values: np.ndarray) -> np.ndarray:
    """Codes of values within +-448, the row's maximum pinned to 448."""
    entry = np.zeros((len(values), 24), np.float32)
    entry[:, 0], entry[:, 1] = 448, values
    rows = FORMAT.encode(torch.from_numpy(entry))
    assert (rows.inv == 1).all()
    return rows.fp8[:, 1].numpy()


def test_every_finite_code_survives_a_round_trip() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F])
    assert (_encode_with_unit_scale(TABLE[codes].astype(np.float32)) == codes).all()


def test_midpoints_go_to_the_even_code_and_their_neighbours_do_not() -> None:
    lower = np.arange(len(MIDPOINTS))
    for sign, bit in ((1, 0), (-1, 0x80)):
        exact = _encode_with_unit_scale(sign * MIDPOINTS.astype(np.float32))
        assert (exact == lower + lower % 2 + bit).all()
        below, above = _ulps(MIDPOINTS, -1), _ulps(MIDPOINTS, 1)
        assert (_encode_with_unit_scale(sign * below) == lower + bit).all()
        assert (_encode_with_unit_scale(sign * above) == lower + 1 + bit).all()


def test_the_oracle_rounds_to_the_nearest_code() -> None:
    values = np.random.default_rng(0).uniform(-448, 448, 500).astype(np.float32)
    distance = np.abs(TABLE[to_e4m3(values)] - values)
    nearest = np.abs(MAGNITUDES[None] - np.abs(values)[:, None].astype(np.float64)).min(1)
    assert (distance == nearest).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_rows_equal_the_oracle_bit_for_bit(dtype: torch.dtype) -> None:
    generator = np.random.default_rng(1)
    exponents = generator.uniform(-44, 38, (400, 1))
    entries = generator.standard_normal((400, 24)) * 10 ** exponents.clip(-40, 37)
    entries[::7, 3], entries[1::7, 4] = 0.0, -0.0
    entries[5] = 0
    given = torch.from_numpy(entries.astype(np.float32)).to(dtype)
    rows = FORMAT.encode(given)
    for index, entry in enumerate(given.float().numpy()):
        expected = encode(entry, 8)
        assert (rows.fp8[index].numpy() == expected.fp8).all()
        assert (rows.rope[index].view(torch.uint16).numpy() == expected.rope).all()
        assert rows.inv[index].numpy() == expected.inv
        assert (
            FORMAT.decode(Fp8TokenRows(*(p[index] for p in rows))).numpy() == expected.decode()
        ).all()


def test_boundaries_are_those_of_the_true_quotient() -> None:
    """Values within 4 ulp of a midpoint times inv: multiplying by a reciprocal differs there."""
    generator = np.random.default_rng(6)
    row = Fp8TokenRow(len(MIDPOINTS) * 9 + 1 + 8, 8)
    differs = 0
    for amax in generator.uniform(0.001, 1000, 40).astype(np.float32):
        inv = amax / np.float32(448)
        near = [_ulps(MIDPOINTS.astype(np.float32) * inv, steps) for steps in range(-4, 5)]
        entry = np.concatenate([[amax], *near, np.zeros(8)]).astype(np.float32)
        expected = encode(entry, 8)
        assert (row.encode(torch.from_numpy(entry)).fp8.numpy() == expected.fp8).all()
        differs += (to_e4m3(entry[:-8] * (np.float32(1) / inv)) != expected.fp8).sum()
    assert differs > 100


def test_the_largest_value_is_stored_as_448_and_zeros_as_zero() -> None:
    generator = np.random.default_rng(2)
    entries = generator.standard_normal((300, 24)).astype(np.float32)
    rows = FORMAT.encode(torch.from_numpy(entries))
    largest = np.abs(entries[:, :16]).argmax(1)
    assert (rows.fp8.numpy()[np.arange(300), largest] & 0x7F == 0x7E).all()
    zero = FORMAT.encode(torch.zeros(24))
    assert zero.inv == torch.tensor(1e-4) / 448
    assert not FORMAT.decode(zero).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_reads_as_nan_and_its_neighbour_does_not(bad: float) -> None:
    entries = torch.ones(2, 24)
    entries[0, 5] = bad
    rows = FORMAT.encode(entries)
    assert (rows.fp8[0] == 0x7F).all() and rows.inv[0].isnan()
    decoded = FORMAT.decode(rows)
    assert decoded[0, :16].isnan().all() and (decoded[0, 16:] == 1).all()
    assert (decoded[1] == 1).all()


def test_a_bad_value_in_the_rotated_part_stays_there() -> None:
    entry = torch.ones(24)
    entry[20] = float("nan")
    decoded = FORMAT.decode(FORMAT.encode(entry))
    assert decoded.isnan().nonzero().tolist() == [[20]]


def test_leading_axes_are_free() -> None:
    entries = torch.randn(3, 5, 24)
    rows = FORMAT.encode(entries)
    assert rows.fp8.shape == (3, 5, 16) and rows.rope.shape == (3, 5, 8)
    assert rows.inv.shape == (3, 5)
    assert torch.equal(rows.fp8[2, 4], FORMAT.encode(entries[2, 4]).fp8)
    assert FORMAT.decode(rows).shape == entries.shape


def test_bytes_and_fields_of_the_seed() -> None:
    row = Fp8TokenRow(512, 64)
    assert row.row_bytes == 448 + 128 + 4
    fields = row.fields("swa", 128)
    assert [(f.name, f.shape, f.dtype, f.initial) for f in fields] == [
        ("swa_fp8", (128, 448), torch.uint8, 0),
        ("swa_rope", (128, 64), torch.bfloat16, 0),
        ("swa_inv", (128,), torch.float32, 1),
    ]
    assert sum(f.row_bytes for f in fields) == 128 * row.row_bytes
    assert not any(f.reset for f in fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_rows(dtype: torch.dtype) -> None:
    row = PlainRow(40, dtype)
    assert row.row_bytes == 40 * dtype.itemsize
    (field,) = row.fields("k", 7)
    assert (field.name, field.shape, field.dtype) == ("k", (7, 40), dtype)
    values = torch.randn(2, 40)
    stored = row.encode(values)
    assert stored.dtype == dtype
    assert torch.equal(row.decode(stored), values.to(dtype).float())


def test_plain_bf16_rounds_to_nearest_even() -> None:
    values = np.random.default_rng(3).standard_normal(4000).astype(np.float32)
    halfway = (to_bf16(values).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([values, halfway])
    row = PlainRow(8000, torch.bfloat16)
    stored = row.encode(torch.from_numpy(values))
    assert (stored.view(torch.uint16).numpy() == to_bf16(values)).all()
    assert (row.decode(stored).numpy() == from_bf16(to_bf16(values))).all()


def test_wrong_descriptions_and_inputs_are_refused() -> None:
    for width, rope_dim in ((24, 0), (24, 24), (24, 25), (8, -1)):
        with pytest.raises(SchemaError, match="rope_dim"):
            Fp8TokenRow(width, rope_dim)
    with pytest.raises(SchemaError, match="at least one value"):
        PlainRow(0, torch.float32)
    with pytest.raises(SchemaError, match="float64"):
        PlainRow(8, torch.float64)
    with pytest.raises(SchemaError, match="float64"):
        FORMAT.encode(torch.zeros(24, dtype=torch.float64))
    with pytest.raises(SchemaError, match="float64"):
        PlainRow(8, torch.float32).encode(torch.zeros(8, dtype=torch.float64))
    for call in (
        lambda: FORMAT.encode(torch.zeros(2, 23)),
        lambda: PlainRow(8, torch.float32).encode(torch.zeros(9)),
        lambda: PlainRow(8, torch.float32).decode(torch.zeros(9)),
        lambda: FORMAT.decode(
            Fp8TokenRows(torch.zeros(15, dtype=torch.uint8), torch.zeros(8), torch.ones(()))
        ),
    ):
        with pytest.raises(SchemaError, match="width"):
            call()
