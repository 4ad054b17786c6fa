"""Slots stood in mid-request are as those that absorbed their tokens; what they take is V4's."""

from __future__ import annotations

import pytest
import torch

from graphcache import DecodeState
from profiles.dsv4.stack import kept_bytes
from profiles.dsv4.subjects import BLOCK_TOKENS, flash_schemas
from profiles.standing import standing_slots

CONTEXT = 4096
LENGTHS = (1, 127, 1024, 4000)
SCALARS = ("len", "high", "floor", "done", "limit", "derived")


def make_state(layers: int, slots: int) -> DecodeState:
    return DecodeState(
        flash_schemas(layers), max_requests=slots, max_context=CONTEXT, vocab_size=64,
        device="cpu", block_tokens=BLOCK_TOKENS,
    )  # fmt: skip


@pytest.fixture
def both() -> tuple[DecodeState, list[int], DecodeState, list[int]]:
    stood, absorbed = make_state(4, len(LENGTHS)), make_state(4, len(LENGTHS))
    long_way = []
    for length in LENGTHS:
        handle = absorbed.open()
        positions = absorbed.append_tokens(handle, [1] * (length + 1))
        assert positions == range(length)
        absorbed.absorbed(handle, positions)
        absorbed.complete_prefill(handle)
        long_way.append(handle)
    return stood, standing_slots(stood, LENGTHS), absorbed, long_way


def test_they_have_the_lengths_and_blocks_of_slots_that_absorbed_their_tokens(
    both: tuple[DecodeState, list[int], DecodeState, list[int]],
) -> None:
    stood, handles, absorbed, long_way = both
    assert [stood.length_of(handle) for handle in handles] == list(LENGTHS)
    for name in SCALARS:
        assert torch.equal(stood.pool[name], absorbed.pool[name]), name
    assert stood.blocks is not None and absorbed.blocks is not None
    assert torch.equal(stood.blocks.table, absorbed.blocks.table)
    assert long_way == handles


def test_steps_may_take_them(both: tuple[DecodeState, list[int], DecodeState, list[int]]) -> None:
    stood, handles, _, _ = both
    rows = stood.slots.rows_to_step(handles)
    batch = stood.begin(torch.tensor(rows, dtype=torch.int32))
    assert batch.positions.tolist() == list(LENGTHS)


def test_a_slot_of_v4_flash_keeps_14_7_mib_and_what_grows_besides() -> None:
    state = make_state(43, 1)
    slot_bytes, entry_bytes = kept_bytes(state)
    assert f"{slot_bytes / 2**20:.1f}" == "14.7"
    # By hand: 21 CSA layers with an entry and a key each 4 tokens, 20 HCA layers with one each 128.
    entry, key = 448 + 2 * 64 + 4, 128 + 4
    by_hand = 21 * CONTEXT // 4 * (entry + key) + 20 * CONTEXT // 128 * entry
    assert by_hand <= entry_bytes < by_hand * 1.01
