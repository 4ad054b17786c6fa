"""Fields that fold all tokens into themselves: what a batch reads and writes, what is refused."""

from __future__ import annotations

import pytest
import torch

from graphcache import Batch, DecodeState, Field
from graphcache.errors import RewindTooFar, SchemaError

MEMORY = Field("memory", (2, 3), torch.float32, accumulates=True)
ADAPTER = Field("adapter", (), torch.int32, initial=7)


def make_state(*fields: Field) -> DecodeState:
    return DecodeState(
        (), max_requests=4, max_context=32, vocab_size=16, device="cpu", fields=fields
    )


def batch_of(state: DecodeState, slots: list[int], q_len: int = 1, prefill: bool = False) -> Batch:
    index = torch.tensor(slots, dtype=torch.int32)
    return Batch(index, torch.zeros_like(index), torch.zeros_like(index), q_len, state, prefill)


def test_a_batch_reads_and_writes_its_rows() -> None:
    state = make_state(MEMORY, ADAPTER)
    batch = batch_of(state, [2, -1, 0])
    values = torch.arange(18, dtype=torch.float64).view(3, 2, 3)
    batch.write("memory", values)
    assert torch.equal(state.pool["memory"][[2, 0]], values[[0, 2]].float())
    assert not state.pool["memory"][[1, 3, 4]].any()
    read = batch.read("memory")
    assert torch.equal(read[[0, 2]], values[[0, 2]].float()) and not read[1].any()
    assert batch.read("adapter").tolist() == [7, 0, 7]


def test_rows_of_several_tokens_have_one_state_each() -> None:
    state = make_state(MEMORY, ADAPTER)
    wide = batch_of(state, [3, 3, -1, 1, -1, -1, -1, -1, -1], q_len=3)
    state.pool["memory"][3], state.pool["memory"][1] = 3.0, 1.0
    assert wide.read("memory")[:, 0, 0].tolist() == [3.0, 1.0, 0.0]
    wide.write("adapter", torch.tensor([5, 6, 9]))
    assert state.pool["adapter"].tolist() == [7, 6, 7, 5, 7]
    chunk = batch_of(state, [2] * 5, q_len=5, prefill=True)
    chunk.write("memory", torch.ones(1, 2, 3))
    assert state.pool["memory"][2].tolist() == [[1.0] * 3] * 2


def test_a_step_of_several_tokens_a_row_may_not_accumulate() -> None:
    """Tokens that are not taken can't be taken out again."""
    state = make_state(MEMORY)
    before = state.pool.arena.clone()
    with pytest.raises(SchemaError, match="one token a row, not 2"):
        batch_of(state, [0, 0, 1, -1], q_len=2).write("memory", torch.ones(2, 2, 3))
    assert torch.equal(state.pool.arena, before)


def test_what_does_not_fit_is_refused() -> None:
    state = make_state(MEMORY)
    batch = batch_of(state, [0, 1])
    for name in ("memry", "len"):
        with pytest.raises(SchemaError, match=f"no field '{name}'; it declares memory"):
            batch.read(name)
        with pytest.raises(SchemaError, match="declares memory"):
            batch.write(name, torch.zeros(2))
    with pytest.raises(SchemaError, match="values must be"):
        batch.write("memory", torch.zeros(1, 2, 3))


def test_a_field_in_place_is_the_state_itself() -> None:
    state = make_state(MEMORY, ADAPTER)
    field = batch_of(state, [2, -1]).in_place("memory")
    assert field.shape == (5, 2, 3) and field.data_ptr() == state.pool["memory"].data_ptr()
    with pytest.raises(SchemaError, match="no field 'memry'; it declares adapter, memory"):
        batch_of(state, [2]).in_place("memry")
    wide = [2, 2, -1, -1]
    with pytest.raises(SchemaError, match="one token a row, not 2"):
        batch_of(state, wide, q_len=2).in_place("memory")
    assert batch_of(state, wide, q_len=4, prefill=True).in_place("memory").shape == (5, 2, 3)
    assert batch_of(state, wide, q_len=2).in_place("adapter").tolist() == [7] * 5


def run_to(state: DecodeState, slot: int, length: int) -> None:
    state.absorbed(slot, state.append_tokens(slot, [1] * (length + 1)))
    state.complete_prefill(slot)


def test_a_rewind_is_exact_or_refused() -> None:
    for fields, refuses in (((MEMORY, ADAPTER), True), ((ADAPTER,), False)):
        state = make_state(*fields)
        slot = state.open()
        run_to(state, slot, 9)
        assert state.accumulates is refuses
        state.rewind(slot, 9)
        if refuses:
            before = state.pool.arena.clone()
            for length in (8, 0):
                with pytest.raises(RewindTooFar, match="folded into memory, where"):
                    state.rewind(slot, length)
            assert torch.equal(state.pool.arena, before)
        else:
            state.rewind(slot, 4)
            assert state.length_of(slot) == 4


@pytest.mark.parametrize("minimal", [False, True])
def test_fork_and_checkpoint_carry_what_was_accumulated(minimal: bool) -> None:
    state = make_state(MEMORY)
    slot = state.open()
    run_to(state, slot, 5)
    row = state.slots.row_of(slot)
    state.pool["memory"][row] = torch.arange(6.0).view(2, 3)
    checkpoint = state.checkpoint(slot, minimal=minimal)
    fork = state.fork(slot)
    state.pool["memory"][row] = -1.0
    for other in (fork, state.restore(checkpoint)):
        kept = state.pool["memory"][state.slots.row_of(other)]
        assert torch.equal(kept, torch.arange(6.0).view(2, 3))


def test_a_layout_with_other_fields_is_another() -> None:
    plain = Field("memory", (2, 3), torch.float32)
    assert make_state(plain).fingerprint != make_state(MEMORY).fingerprint
