"""Row formats against a table of the 256 codes, and their layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphcache.errors import SchemaError
from graphcache.pool import StatePool
from graphcache.rows import Fp8TokenRow, Model1Row, PlainRow, RowFormat, Rows, row_of
from tests.entry_oracle import Fp8Token, Model1, model1_block, model1_used
from tests.window_oracle import MAGNITUDES, MIDPOINTS, TABLE, encode, from_bf16, to_bf16, to_e4m3

FORMAT = Fp8TokenRow(width=24, rope_dim=8)
MODEL1 = Model1Row()


def _ulps(values: np.ndarray, steps: int) -> np.ndarray:
    return (values.astype(np.float32).view(np.int32) + steps).view(np.float32)


def _row(rows: Rows, index: int) -> Rows:
    return Rows(*(None if part is None else part[index] for part in rows))


def _codes(count: int, rope: torch.Tensor) -> Rows:
    """One row of zeros."""
    return Rows(torch.zeros(count, dtype=torch.uint8), rope, torch.ones(()))


def _bits(rope: torch.Tensor) -> np.ndarray:
    return rope.contiguous().view(torch.uint16).numpy()


def _encode_with_unit_scale(values: np.ndarray) -> np.ndarray:
    """Codes of values within +-448, the row's maximum pinned to 448."""
    entry = np.zeros((len(values), 24), np.float32)
    entry[:, 0], entry[:, 1] = 448, values
    rows = FORMAT.encode(torch.from_numpy(entry))
    assert (rows.scales == 1).all()
    return rows.values[:, 1].numpy()


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
        assert (rows.values[index].numpy() == expected.fp8).all()
        assert (_bits(rows.rope[index]) == expected.rope).all()
        assert rows.scales[index].numpy() == expected.inv
        assert (FORMAT.decode(_row(rows, index)).numpy() == expected.decode()).all()


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
        assert (row.encode(torch.from_numpy(entry)).values.numpy() == expected.fp8).all()
        differs += (to_e4m3(entry[:-8] * (np.float32(1) / inv)) != expected.fp8).sum()
    assert differs > 100


def test_the_largest_value_is_stored_as_448_and_zeros_as_zero() -> None:
    generator = np.random.default_rng(2)
    entries = generator.standard_normal((300, 24)).astype(np.float32)
    rows = FORMAT.encode(torch.from_numpy(entries))
    largest = np.abs(entries[:, :16]).argmax(1)
    assert (rows.values.numpy()[np.arange(300), largest] & 0x7F == 0x7E).all()
    zero = FORMAT.encode(torch.zeros(24))
    assert zero.scales == torch.tensor(1e-4) / 448
    assert not FORMAT.decode(zero).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_reads_as_nan_and_its_neighbour_does_not(bad: float) -> None:
    entries = torch.ones(2, 24)
    entries[0, 5] = bad
    rows = FORMAT.encode(entries)
    assert (rows.values[0] == 0x7F).all() and rows.scales[0].isnan()
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
    assert rows.values.shape == (3, 5, 16) and rows.rope.shape == (3, 5, 8)
    assert rows.scales.shape == (3, 5)
    assert torch.equal(rows.values[2, 4], FORMAT.encode(entries[2, 4]).values)
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
    assert stored.values.dtype == dtype
    assert stored.rope is None and stored.scales is None and len(stored.parts()) == 1
    assert torch.equal(row.decode(stored), values.to(dtype).float())


def test_plain_bf16_rounds_to_nearest_even() -> None:
    values = np.random.default_rng(3).standard_normal(4000).astype(np.float32)
    halfway = (to_bf16(values).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([values, halfway])
    row = PlainRow(8000, torch.bfloat16)
    stored = row.encode(torch.from_numpy(values))
    assert (stored.values.view(torch.uint16).numpy() == to_bf16(values)).all()
    assert (row.decode(stored).numpy() == from_bf16(to_bf16(values))).all()


def test_without_rotated_dims_all_values_share_the_scale() -> None:
    """The rows of index keys."""
    row, oracle = Fp8TokenRow(16, 0), Fp8Token(0)
    entries = (
        np.random.default_rng(7).standard_normal((200, 16))
        * 10.0 ** np.arange(-6, 4)[np.arange(200) % 10, None]
    )
    entries[0] = 0
    entries[1, 15] = 1e6  # the last value counts
    entries = entries.astype(np.float32)
    rows = row.encode(torch.from_numpy(entries))
    assert rows.rope is None
    for index, entry in enumerate(entries):
        expected = oracle.encode(entry)
        assert (rows.values[index].numpy() == expected.fp8).all()
        assert rows.scales[index].numpy() == expected.inv
        assert (row.decode(_row(rows, index)).numpy() == expected.decode()).all()
    assert row.row_bytes == 16 + 4
    fields = row.fields("keys", 3)
    assert [(f.name, f.shape) for f in fields] == [("keys_fp8", (3, 16)), ("keys_inv", (3,))]
    view = row.view(StatePool(fields, 2, "cpu"), "keys", 3)
    assert view.values.shape == (3, 3, 16) and view.rope is None and view.scales.shape == (3, 3)


def _spread(count: int, seed: int) -> np.ndarray:
    """Entries [count, 512] whose tiles are of sizes apart, some zero, some on the scale's floor."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.uniform(-9, 30, (count, 8)).repeat(64, axis=1)
    entries = rng.standard_normal((count, 512)) * size
    entries[:, 448:] = rng.standard_normal((count, 64))
    entries[rng.random((count, 512)) < 0.05] = -0.0
    entries[0, :64], entries[1, :64] = 0, 0
    return entries.astype(np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_model1_rows_equal_the_oracle_bit_for_bit(dtype: torch.dtype) -> None:
    oracle = Model1(64)
    given = torch.from_numpy(_spread(300, 8)).to(dtype)
    rows = MODEL1.encode(given)
    assert rows.values.shape == (300, 448) and rows.scales.shape == (300, 7)
    for index, entry in enumerate(given.float().numpy()):
        codes, rope, exponents = oracle.encode(entry)
        assert (rows.values[index].numpy() == codes).all()
        assert (_bits(rows.rope[index]) == rope).all()
        assert (rows.scales[index].numpy() == exponents + 127).all()
        assert (MODEL1.decode(_row(rows, index)).numpy() == oracle.roundtrip(entry)).all()


def test_model1_scales_are_rounded_up_to_a_power_of_two_exactly() -> None:
    """Maxima at 448 times a power of two and one ulp to each side; a float32 logarithm fails."""
    maxima = np.float32(448) * 2.0 ** np.arange(-12, 20).astype(np.float32)
    entries = np.zeros((3 * len(maxima), 512), np.float32)
    for group, steps in enumerate((-1, 0, 1)):
        entries[group * len(maxima) : (group + 1) * len(maxima), 5] = _ulps(maxima, steps)
    scales = MODEL1.encode(torch.from_numpy(entries)).scales[:, 0].numpy().astype(int)
    below, exact, above = scales.reshape(3, -1) - 127
    assert (below == np.arange(-12, 20)).all() and (exact == np.arange(-12, 20)).all()
    assert (above == np.arange(-11, 21)).all()


def test_a_model1_scale_has_a_floor() -> None:
    """max(amax / 448, 1e-4), and 2**-13 is the power of two above 1e-4."""
    entries = torch.zeros(4, 512)
    entries[1, 3], entries[2, 3], entries[3, 3] = 1e-30, 448e-4, 448 * 2.0**-13 * 1.01
    assert MODEL1.encode(entries).scales[:, 0].tolist() == [114, 114, 114, 115]
    assert not MODEL1.decode(MODEL1.encode(entries))[0].any()


def test_model1_codes_go_to_the_even_code_at_midpoints() -> None:
    lower = np.arange(len(MIDPOINTS))
    for steps, expected in ((-1, lower), (0, lower + lower % 2), (1, lower + 1)):
        entry = np.zeros(512, np.float32)
        entry[::64] = 448 * 2.0**5
        used = np.flatnonzero(np.arange(448) % 64)[: len(MIDPOINTS)]
        entry[used] = _ulps(MIDPOINTS, steps) * np.float32(2**5)
        assert (MODEL1.encode(torch.from_numpy(entry)).values.numpy()[used] == expected).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_model1_tile_that_is_not_finite_reads_as_nan_and_its_neighbours_do_not(
    bad: float,
) -> None:
    entries = torch.ones(2, 512)
    entries[0, 2 * 64 + 9] = bad
    rows = MODEL1.encode(entries)
    assert (rows.values[0, 128:192] == 0x7F).all()
    assert rows.scales[0].tolist() == [119, 119, 0xFF, 119, 119, 119, 119]
    decoded = MODEL1.decode(rows)
    assert decoded[0, 128:192].isnan().all()
    decoded[0, 128:192] = 1
    assert (decoded == 1).all()
    entries = torch.ones(1, 512)
    entries[0, 500] = bad
    decoded = MODEL1.decode(MODEL1.encode(entries))
    assert (decoded[0, :500] == 1).all() and not decoded[0, 500].isfinite()


def test_the_sizes_of_model1_blocks_by_hand() -> None:
    assert MODEL1.row_bytes == 584 and MODEL1.tiles == 7
    by_hand = {1: 2 * 576, 2: 3 * 576, 64: 65 * 576, 71: 72 * 576, 72: 73 * 576, 73: 75 * 576}
    assert {rows: MODEL1.block_bytes(rows) for rows in by_hand} == by_hand
    (field,) = MODEL1.fields("swa", 64)
    assert (field.name, field.shape, field.dtype) == ("swa_packed", (65 * 576,), torch.uint8)
    assert not field.initial and not field.reset


def test_rows_are_read_from_a_block_placed_by_hand() -> None:
    block = torch.arange(3 * 576, dtype=torch.int64).mul(7).remainder(251).to(torch.uint8)
    rows = MODEL1.view_of(block.unsqueeze(0), 2)
    assert rows.values.shape == (1, 2, 448)
    assert rows.rope.shape == (1, 2, 64) and rows.scales.shape == (1, 2, 7)
    for row in range(2):
        start = row * 576
        assert torch.equal(rows.values[0, row], block[start : start + 448])
        low, high = block[start + 448 : start + 576 : 2], block[start + 449 : start + 576 : 2]
        assert (_bits(rows.rope[0, row]) == low.numpy() + 256 * high.numpy().astype(int)).all()
        scales = 2 * 576 + row * 8
        assert torch.equal(rows.scales[0, row], block[scales : scales + 7])


@pytest.mark.parametrize("count", [1, 3, 64, 72])
def test_rows_written_through_views_make_the_block_that_flashmla_reads(count: int) -> None:
    pool = StatePool(MODEL1.fields("e", count), 2, "cpu")
    entries = _spread(2 * count, 9).reshape(2, count, 512)
    junk = np.random.default_rng(0).integers(0, 256, MODEL1.block_bytes(count)).astype(np.uint8)
    pool["e_packed"][:] = torch.from_numpy(junk)
    view = MODEL1.view(pool, "e", count)
    for target, source in zip(
        view.parts(), MODEL1.encode(torch.from_numpy(entries)).parts(), strict=True
    ):
        target[:2] = source
    used = model1_used(count)
    for block in range(2):
        expected = np.where(used, model1_block(entries[block]), junk)
        assert (pool["e_packed"][block].numpy() == expected).all()
    assert (pool["e_packed"][2].numpy() == junk).all()
    read = MODEL1.decode(Rows(*(part[:2] for part in view))).numpy()
    expected = [[Model1(64).roundtrip(entry) for entry in block] for block in entries]
    assert (read == np.array(expected)).all()


@pytest.mark.parametrize(("width", "rope_dim"), [(512, 0), (512, 128), (576, 64), (24, 8)])
def test_a_model1_row_of_other_dims_is_refused(width: int, rope_dim: int) -> None:
    with pytest.raises(SchemaError, match=f"512 with 64 .* got {width} and {rope_dim}"):
        Model1Row(width, rope_dim)


def test_each_format_has_its_row() -> None:
    assert row_of(RowFormat.FP8, 24, 8) == Fp8TokenRow(24, 8)
    assert row_of(RowFormat.FP8, 16, 0) == Fp8TokenRow(16, 0)
    assert row_of(RowFormat.MODEL1, 512, 64) == MODEL1
    assert row_of(RowFormat.BF16, 24, 8) == PlainRow(24, torch.bfloat16)
    assert row_of(RowFormat.FP32, 24, 8) == PlainRow(24, torch.float32)
    with pytest.raises(SchemaError, match="MODEL1"):
        row_of(RowFormat.MODEL1, 24, 8)


@pytest.mark.parametrize("row_format", list(RowFormat))
def test_what_fields_lay_out_view_gives_back(row_format: RowFormat) -> None:
    """Every format reads through the views of a pool what was written through them."""
    row = row_of(row_format, 512, 64)
    pool = StatePool([*row.fields("a", 5), *row.fields("b", 5)], 3, "cpu")
    encoded = row.encode(torch.from_numpy(_spread(20, 10)).view(4, 5, 512) * 1e-20)
    view = row.view(pool, "a", 5)
    for target, source in zip(view.parts(), encoded.parts(), strict=True):
        assert target.dtype == source.dtype and target.shape == source.shape
        target.copy_(source)
    again = row.view(pool, "a", 5)
    assert torch.equal(row.decode(again), row.decode(encoded))
    assert not row.decode(row.view(pool, "b", 5)).any()
    parts = sum(f.row_bytes for f in row.fields("a", 5))
    assert 5 * row.row_bytes <= parts < 5 * row.row_bytes + 576


def test_wrong_descriptions_and_inputs_are_refused() -> None:
    for width, rope_dim in ((24, 24), (24, 25), (8, -1)):
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
    with pytest.raises(SchemaError, match="float16"):
        MODEL1.encode(torch.zeros(512, dtype=torch.float16))
    for call in (
        lambda: FORMAT.encode(torch.zeros(2, 23)),
        lambda: MODEL1.encode(torch.zeros(2, 448)),
        lambda: MODEL1.decode(_codes(512, torch.zeros(64))),
        lambda: PlainRow(8, torch.float32).encode(torch.zeros(9)),
        lambda: PlainRow(8, torch.float32).decode(Rows(torch.zeros(9))),
        lambda: FORMAT.decode(_codes(15, torch.zeros(8))),
        lambda: FORMAT.decode(_codes(16, torch.zeros(9))),
    ):
        with pytest.raises(SchemaError, match="width"):
            call()


@pytest.mark.parametrize("given", ["fp8", None, torch.float32])
def test_what_is_no_format_is_refused(given: object) -> None:
    with pytest.raises(SchemaError, match=r"row_format is one of RowFormat\.FP8, .*, got"):
        row_of(given, 24, 8)  # type: ignore[arg-type]
