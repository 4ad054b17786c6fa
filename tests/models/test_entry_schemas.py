"""Schemas from configs of the DeepSeek-V4 family: V4-Flash, V4-Pro, V4.1, MTP, and bad ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_v4_config

from graphcache import AttentionType, DecodeState, KVLayerSchema, RowFormat
from graphcache.errors import SchemaError, UnsupportedModel
from graphcache.layout import block_tokens_for
from graphcache.models import read_entry_schemas
from tests.entry_requests import EntryRequests

pytest.importorskip("transformers.models.deepseek_v4")

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
MIB = 1 << 20
KIND = {
    SWA: "sliding_attention",
    CSA: "compressed_sparse_attention",
    HCA: "heavily_compressed_attention",
}
RATIO = {SWA: 0, CSA: 4, HCA: 128}

# Both have a window of 128, entries of 512 with 64 rotated, 64 index heads of 128.
FLASH_PATTERN = [SWA, SWA] + [CSA, HCA] * 20 + [CSA]
PRO_PATTERN = [HCA, HCA] + [CSA, HCA] * 29 + [CSA]
FLASH = {
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_topk": 512,
}
PRO = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "o_lora_rank": 1024,
    "index_topk": 1024,
}
MODELS = [
    pytest.param(FLASH, FLASH_PATTERN, (2, 21, 20), id="flash"),
    pytest.param(PRO, PRO_PATTERN, (0, 30, 31), id="pro"),
]


def _transformers(numbers: dict[str, int], pattern: list[AttentionType]) -> Any:
    from transformers import DeepseekV4Config

    return DeepseekV4Config(**numbers, layer_types=[KIND[kind] for kind in pattern])


def _written(numbers: dict[str, Any], ratios: list[Any], **changes: Any) -> dict[str, Any]:
    """As the model's own config.json has it: ratios by layer, those that draft last."""
    return {
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "num_nextn_predict_layers": 1,
        "compress_ratios": ratios,
        **numbers,
        **changes,
    }


@pytest.mark.parametrize(("numbers", "pattern", "counts"), MODELS)
def test_both_configs_give_the_layers_of_the_report(
    numbers: dict[str, int], pattern: list[AttentionType], counts: tuple[int, int, int]
) -> None:
    schemas = read_entry_schemas(_transformers(numbers, pattern))
    assert [schema.attn_type for schema in schemas] == pattern
    assert tuple(pattern.count(kind) for kind in (SWA, CSA, HCA)) == counts
    for schema in schemas:
        assert schema.compression == RATIO[schema.attn_type]
        assert (schema.entry_head_dim, schema.rope_dim, schema.swa_window_size) == (512, 64, 128)
        assert (schema.swa_rows, schema.row_format) == (128, RowFormat.FP8)
        assert schema.tail_buffer_size == {SWA: 0, CSA: 8, HCA: 128}[schema.attn_type]
        assert schema.tail_dtype == torch.float32
        if schema.attn_type is CSA:
            found = schema.indexer
            assert (found.heads, found.head_dim, found.top_k) == (64, 128, numbers["index_topk"])
            assert found.row_format is RowFormat.FP8
        else:
            assert schema.indexer is None
    ratios = [RATIO[kind] for kind in pattern]
    assert read_entry_schemas(_written(numbers, [*ratios, 0])) == schemas


# A window's row: 448 codes, 64 rotated in bf16, inverse scale, position.
WINDOW_BYTES = 128 * (448 + 2 * 64 + 4 + 4)
# Values and gates in float32. CSA: rows of two blocks, in two streams, and the indexer's.
HCA_TAIL_BYTES = 128 * 2 * 512 * 4
CSA_TAIL_BYTES = 8 * 2 * 2 * (512 + 128) * 4
# Codes, rotated dims and inverse scale; the indexer's keys are all codes.
ENTRY_BYTES = 448 + 2 * 64 + 4
KEY_BYTES = 128 + 4


def _layer_bytes(fields: dict[str, Any]) -> int:
    return sum(field.row_bytes for name, field in fields.items() if name.startswith("layer"))


@pytest.mark.parametrize(
    ("numbers", "pattern", "mib"),
    [
        pytest.param(FLASH, FLASH_PATTERN, (3.1, 11.6, 14.7), id="flash"),
        pytest.param(PRO, PRO_PATTERN, (4.3, 17.8, 22.2), id="pro"),
    ],
)
def test_bytes_of_a_request(
    numbers: dict[str, int], pattern: list[AttentionType], mib: tuple[float, float, float]
) -> None:
    windows = len(pattern) * WINDOW_BYTES
    tails = pattern.count(HCA) * HCA_TAIL_BYTES + pattern.count(CSA) * CSA_TAIL_BYTES
    assert tuple(round(part / MIB, 1) for part in (windows, tails, windows + tails)) == mib

    context, block_tokens = 1024, 256
    state = DecodeState(
        read_entry_schemas(_transformers(numbers, pattern)),
        max_requests=1,
        max_context=context,
        vocab_size=129280,
        device="cpu",
        block_tokens=block_tokens,
        kv_blocks=1,
    )
    assert _layer_bytes(state.pool.fields) == windows + tails
    # Besides the layers a slot has its tokens, and scalars and alignment below a hundredth.
    beyond = state.pool.row_stride_bytes - (windows + tails) - 4 * context
    assert 0 < beyond < (windows + tails) / 100
    assert state.pool.arena.shape == (2, state.pool.row_stride_bytes)

    csa, hca = pattern.count(CSA), pattern.count(HCA)
    block = csa * block_tokens // 4 * (ENTRY_BYTES + KEY_BYTES)
    block += hca * block_tokens // 128 * ENTRY_BYTES
    assert _layer_bytes(state.blocks.pool.fields) == block


LAYERS = st.lists(
    st.tuples(st.sampled_from([SWA, CSA, HCA]), st.integers(1, 130)), min_size=1, max_size=12
)


@given(pattern=LAYERS, step_width=st.integers(1, 4), rewind=st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_any_pattern_is_read_as_written(
    pattern: list[tuple[AttentionType, int]], step_width: int, rewind: int
) -> None:
    """Of ratios by layer, whichever are named CSA's; each layer's own, not its kind's."""
    csa = sorted({ratio for kind, ratio in pattern if kind is CSA})
    ratios = [0 if kind is SWA else ratio for kind, ratio in pattern]
    schemas = read_entry_schemas(
        _written({}, ratios, num_hidden_layers=len(pattern), index_topk=9),
        csa_ratios=csa,
        step_width=step_width,
        rewind=rewind,
    )
    for schema, ratio in zip(schemas, ratios, strict=True):
        kind = SWA if ratio == 0 else CSA if ratio in csa else HCA
        reach = {SWA: 0, CSA: 2 * ratio, HCA: ratio}[kind]
        slack = step_width - 1 + max(0, rewind - 1)
        assert (schema.attn_type, schema.compression) == (kind, ratio)
        assert schema.swa_rows == 128 + slack
        assert schema.tail_buffer_size == (reach + slack if reach else 0)
        assert (schema.indexer is not None) == (kind is CSA)
    assert len(schemas) == len(pattern)


@given(kinds=st.lists(st.sampled_from([SWA, CSA, HCA]), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_any_pattern_of_types_is_read_as_transformers_has_it(kinds: list[AttentionType]) -> None:
    config = tiny_v4_config(num_hidden_layers=len(kinds), layer_types=[KIND[k] for k in kinds])
    schemas = read_entry_schemas(config)
    assert [(s.attn_type, s.compression) for s in schemas] == [
        (kind, {SWA: 0, CSA: 4, HCA: 16}[kind]) for kind in kinds
    ]


def test_options_reach_every_layer() -> None:
    schemas = read_entry_schemas(
        tiny_v4_config(),
        row_format=RowFormat.BF16,
        index_format=RowFormat.FP32,
        tail_dtype=torch.bfloat16,
        step_width=3,
        rewind=5,
    )
    for schema in schemas:
        assert (schema.row_format, schema.tail_dtype) == (RowFormat.BF16, torch.bfloat16)
        assert (schema.step_width, schema.rewind, schema.swa_rows) == (3, 5, 16 + 2 + 4)
    assert {s.indexer.row_format for s in schemas if s.indexer} == {RowFormat.FP32}


# --- V4.1 and the layers that draft ---------------------------------------------------------------


def test_ratios_of_v4_1() -> None:
    schemas = read_entry_schemas(_written({}, [0, 1, 2, 0], num_hidden_layers=4, index_topk=64))
    assert [(s.attn_type, s.compression) for s in schemas] == [
        (SWA, 0),
        (CSA, 1),
        (CSA, 2),
        (SWA, 0),
    ]
    assert [s.tail_buffer_size for s in schemas] == [0, 2, 4, 0]
    assert block_tokens_for(schemas) == 64
    # Which ratios compress without overlap is the caller's to say.
    plain = read_entry_schemas(
        _written({}, [0, 1, 2], num_hidden_layers=3, index_topk=64), csa_ratios=(1,)
    )
    assert [s.attn_type for s in plain] == [SWA, CSA, HCA]


def test_v4_1_attends_as_the_oracle_says() -> None:
    """Layers of ratio 0, 1 and 2, and one that drafts, over prefill, steps, a fork and a rewind."""
    small = {
        "head_dim": 24,
        "qk_rope_head_dim": 8,
        "sliding_window": 3,
        "index_n_heads": 3,
        "index_head_dim": 16,
        "index_topk": 3,
        "num_hidden_layers": 3,
    }
    schemas = read_entry_schemas(
        _written({}, [0, 1, 2, 8], **small),
        row_format=RowFormat.FP32,
        index_format=RowFormat.FP32,
        drafting=True,
        step_width=2,
        rewind=3,
    )
    assert len(schemas) == 4
    requests = EntryRequests(schemas, seed=1, block_tokens=8)
    first = requests.admit(9, chunk=4)
    for _ in range(5):
        requests.step({first: (2, 2)}, 2)
    second = requests.fork(first)
    assert requests.rewind(first, 16)
    for _ in range(4):
        requests.step({first: (2, 1), second: (1, 1)}, 2, padding=[1])
    requests.check_all()
    assert len(requests.seen.errors) >= 4 * (8 + 10 + 4 * 3)


@pytest.mark.parametrize(("ratio", "kind"), [(0, SWA), (4, CSA), (128, HCA)])
def test_the_layer_that_drafts_comes_last_and_only_when_asked_for(
    ratio: int, kind: AttentionType
) -> None:
    written = _written(FLASH, [*(RATIO[kind] for kind in FLASH_PATTERN), ratio])
    plain = read_entry_schemas(written)
    drafting = read_entry_schemas(written, drafting=True)
    assert drafting[:-1] == plain and len(plain) == 43
    assert (drafting[-1].attn_type, drafting[-1].compression) == (kind, ratio)


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "at_least", "tokens"),
    [([0], 64, 64), ([4, 128], 64, 128), ([4, 16], 64, 64), ([3, 4], 64, 72), ([4, 128], 129, 256)],
)
def test_blocks_that_every_layer_fills(ratios: list[int], at_least: int, tokens: int) -> None:
    numbers = {"num_hidden_layers": len(ratios), "index_topk": 64}
    schemas = (*read_entry_schemas(_written(numbers, ratios)), KVLayerSchema(2, 8, 8))
    assert block_tokens_for(schemas, at_least) == tokens
    state = DecodeState(schemas, max_requests=1, max_context=300, vocab_size=9, device="cpu")
    assert state.blocks is not None
    assert state.blocks.block_tokens == block_tokens_for(schemas)


def test_blocks_that_a_layer_does_not_fill_are_refused() -> None:
    schemas = read_entry_schemas(tiny_v4_config())
    for block_tokens in (4, 24, 100):
        with pytest.raises(SchemaError, match=rf"block_tokens={block_tokens} must be a multiple"):
            DecodeState(
                schemas,
                max_requests=1,
                max_context=64,
                vocab_size=9,
                device="cpu",
                block_tokens=block_tokens,
            )


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"compress_ratios": [0, -4]}, "at least 0"),
        ({"compress_ratios": [0, 4.5]}, "whole number, got 4.5"),
        ({"compress_ratios": [0, "4"]}, "whole number, got '4'"),
        ({"compress_ratios": [4]}, "1 compression ratios for 2 layers"),
        ({"compress_ratios": None}, "no compress_ratios"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "'full_attention'"),
        ({"layer_types": ["sliding_attention"]}, "1 layer types for 2 layers"),
        ({"layer_types": [KIND[SWA], KIND[HCA]]}, "no compression rate for 'heavily"),
        ({"layer_types": [KIND[SWA], KIND[HCA]], "compress_rates": {KIND[HCA]: 0}}, "compression"),
        ({"layer_types": [KIND[SWA], KIND[CSA]], "compress_rates": {KIND[CSA]: 2.5}}, "2.5"),
        ({"head_dim": None}, "no head_dim"),
        ({"head_dim": 510}, "multiple of 16"),
        ({"head_dim": 512.0}, "head_dim in the config is a whole number"),
        ({"qk_rope_head_dim": 63}, "rope_dim of 8"),
        ({"qk_rope_head_dim": 60}, "rope_dim of 8"),
        ({"qk_rope_head_dim": 512}, "rope_dim must lie between"),
        ({"qk_rope_head_dim": 576}, "rope_dim must lie between"),
        ({"qk_rope_head_dim": None}, "no partial_rotary_factor"),
        ({"qk_rope_head_dim": None, "partial_rotary_factor": 2.0}, "rope_dim must lie between"),
        ({"index_head_dim": 100}, "multiple of 16"),
        ({"index_head_dim": 48}, "48 dims can't rotate 64"),
        ({"index_topk": 0}, "top_k must be at least 1"),
        ({"sliding_window": 0}, "swa_window_size"),
    ],
)
def test_configs_that_cannot_be_laid_out_are_refused_by_name(
    changes: dict[str, Any], part: str
) -> None:
    good = _written({}, [0, 4, 0], num_hidden_layers=2, index_topk=64)
    read_entry_schemas(good)
    with pytest.raises(UnsupportedModel, match=part):
        read_entry_schemas(good | changes)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"row_format": "fp8"}, "row_format is a RowFormat, got 'fp8'"),
        ({"index_format": None}, "index_format is a RowFormat"),
        ({"index_format": RowFormat.MODEL1}, "MODEL1 is a row of attention entries"),
        ({"tail_dtype": torch.float16}, "tail_dtype is float32 or bfloat16"),
        ({"step_width": 0}, "step_width must be at least 1"),
        ({"step_width": 1.5}, "step_width is an int"),
        ({"rewind": -1}, "rewind must be at least 0"),
        ({"rewind": True}, "rewind is an int"),
        ({"drafting": True}, "don't list the layers that draft"),
    ],
)
def test_options_that_cannot_be_met_are_refused_by_name(options: dict[str, Any], part: str) -> None:
    with pytest.raises(UnsupportedModel, match=part):
        read_entry_schemas(tiny_v4_config(), **options)


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(64, 16), (512, 128), (576, 64)])
def test_model1_has_its_own_dims_only(head_dim: int, rope_dim: int) -> None:
    config = tiny_v4_config(head_dim=head_dim, qk_rope_head_dim=rope_dim, index_head_dim=128)
    with pytest.raises(UnsupportedModel, match="MODEL1 row is defined for entries of 512"):
        read_entry_schemas(config, row_format=RowFormat.MODEL1)
    whole = tiny_v4_config(head_dim=512, qk_rope_head_dim=64, index_head_dim=128)
    assert read_entry_schemas(whole, row_format=RowFormat.MODEL1)[0].row.row_bytes == 584
