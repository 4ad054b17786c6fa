"""The oracle of a DeepSeek-V4 layer against transformers' modules, torch's casts, and by hand."""

from __future__ import annotations

from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch

from tests.entry_oracle import (
    Bf16,
    Compressor,
    Fp8Token,
    Fp32,
    Indexer,
    Layer,
    LayerParams,
    Model1,
    RowFormat,
    Token,
    attend,
    inverse_frequencies,
    model1_block,
    model1_used,
    random_params,
    random_token,
    rmsnorm,
    rotate,
    unrotate,
)
from tests.window_oracle import encode

NO_ROPE = np.zeros(0, np.float32)
LAYER_TYPES = [
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
]


# The modules of transformers, with weights drawn here.


class Reference:
    """One of transformers' attention layers in float64, and what its projections make of a text."""

    def __init__(
        self, layer_type: str, *, length: int, compression: int, top_k: int, window: int = 5
    ) -> None:
        v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
        config = _config(layer_type, compression, top_k, window)
        self.module = v4.DeepseekV4Attention(config, 0).double().eval()
        _draw_weights(self.module)
        self.rotary = v4.DeepseekV4RotaryEmbedding(config)
        generator = torch.Generator().manual_seed(length)
        self.hidden = torch.randn(1, length, config.hidden_size, generator=generator).double()
        self.window = window
        make_mask = v4.create_sliding_window_causal_mask
        # Its name differs between transformers' releases.
        cache = ({"cache", "past_key_values"} & set(signature(make_mask).parameters)).pop()
        self._mask = partial(make_mask, attention_mask=None, **{cache: None})
        self.outputs, self.picked = self._forward()

    def params(self) -> LayerParams:
        module = self.module
        rope = _numpy(getattr(self.rotary, f"{module.rope_layer_type}_inv_freq"))
        compressor = indexer = None
        if module.compressor is not None:
            compressor = _compressor(module.compressor, rope)
            if hasattr(module.compressor, "indexer"):
                source = module.compressor.indexer
                indexer = Indexer(_compressor(source, rope), source.num_heads, source.index_topk)
        return LayerParams(
            window=self.window,
            norm_weight=_numpy(module.kv_norm.weight),
            inv_freq=rope,
            sink=_numpy(module.sinks),
            scale=module.scaling,
            compressor=compressor,
            indexer=indexer,
        )

    @torch.no_grad()
    def tokens(self, params: LayerParams) -> list[Token]:
        module, hidden = self.module, self.hidden
        residual = module.q_a_norm(module.q_a_proj(hidden))
        parts = {"q": module.q_b_norm(self._heads(module.q_b_proj(residual), params.sink))}
        parts["kv"] = module.kv_proj(hidden)
        if module.compressor is not None:
            parts["c"] = module.compressor.kv_proj(hidden)
            parts["z"] = module.compressor.gate_proj(hidden)
        if params.indexer is not None:
            indexer, scorer = module.compressor.indexer, module.compressor.indexer.scorer
            weights = scorer.weights_proj(hidden)
            parts["index_q"] = self._heads(indexer.q_b_proj(residual), weights[0, 0])
            parts["index_weights"] = weights * scorer.weights_scaling * scorer.softmax_scale
            parts["index_c"] = indexer.kv_proj(hidden)
            parts["index_z"] = indexer.gate_proj(hidden)
        arrays = {name: _numpy(part[0]) for name, part in parts.items()}
        place = np.arange(hidden.shape[1])[:, None]
        for name in arrays.keys() & {"q", "index_q"}:
            arrays[name] = rotate(arrays[name], place, params.inv_freq)
        return [
            Token(**{name: part[row] for name, part in arrays.items()}) for row in range(len(place))
        ]

    @staticmethod
    def _heads(q: torch.Tensor, heads: np.ndarray | torch.Tensor) -> torch.Tensor:
        return q.unflatten(-1, (len(heads), -1))

    @torch.no_grad()
    def _forward(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Attention [length, H, d] before the output projection, and the indexer's choice."""
        seen: dict[str, torch.Tensor] = {}
        module, length = self.module, self.hidden.shape[1]
        module.o_a_proj.register_forward_pre_hook(lambda _, args: seen.update(out=args[0]))
        if hasattr(module.compressor, "indexer"):
            module.compressor.indexer.register_forward_hook(
                lambda _, args, picked: seen.update(picked=picked)
            )
        place = torch.arange(length)[None]
        rope = {
            kind: self.rotary(self.hidden, position_ids=place, layer_type=kind)
            for kind in ("main", "compress")
        }
        mask = self._mask(config=module.config, inputs_embeds=self.hidden, position_ids=place)
        module(self.hidden, rope, place, mask)
        out = seen["out"].reshape(length, module.num_heads, module.head_dim)
        return _numpy(out), _numpy(seen["picked"][0]) if "picked" in seen else None


def _config(layer_type: str, compression: int, top_k: int, window: int) -> object:
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(
        num_hidden_layers=1,
        layer_types=[layer_type],
        compress_rates=dict.fromkeys(LAYER_TYPES[1:], compression),
        hidden_size=48,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=8,
        index_head_dim=16,
        index_topk=top_k,
        sliding_window=window,
    )
    config._attn_implementation = "eager"
    return config


def _draw_weights(module: torch.nn.Module) -> None:
    """Everything away from 0 and 1: biases, sinks and norm weights too."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in module.named_parameters():
        gain = weight.shape[-1] ** -0.5 if "proj" in name else 1.0
        drawn = torch.randn(weight.shape, generator=generator) * gain
        weight.data.copy_(1 + drawn / 4 if "norm" in name else drawn)


def _compressor(source: torch.nn.Module, rope: np.ndarray) -> Compressor:
    norm = source.kv_norm
    return Compressor(
        _numpy(source.position_bias), _numpy(norm.weight), rope, norm.variance_epsilon
    )


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
@pytest.mark.parametrize(
    ("compression", "length", "window"),
    [(4, 30, 5), (1, 12, 3), (2, 21, 1), (8, 31, 40), (8, 6, 4)],
)
def test_every_layer_type_attends_as_in_transformers(
    layer_type, compression, length, window
) -> None:
    shape = {"compression": compression, "length": length, "window": window}
    reference = Reference(layer_type, top_k=64, **shape)
    params = reference.params()
    layer = Layer(params)
    for token, expected in zip(reference.tokens(params), reference.outputs, strict=True):
        layer.append(token)
        np.testing.assert_allclose(layer.output(), expected, rtol=0, atol=5e-6)
    assert np.abs(reference.outputs).max() > 0.5


@pytest.mark.parametrize(("compression", "top_k"), [(4, 3), (2, 5), (1, 1)])
def test_the_indexer_picks_what_transformers_picks(compression, top_k) -> None:
    reference = Reference(LAYER_TYPES[1], compression=compression, top_k=top_k, length=48)
    params = reference.params()
    layer, compared = Layer(params), 0
    for place, token in enumerate(reference.tokens(params)):
        layer.append(token)
        ranked = np.sort(layer.scores())[::-1]
        if len(ranked) > top_k and ranked[top_k - 1] - ranked[top_k] < 1e-4:
            continue
        picked = reference.picked[place]
        assert layer.selected().tolist() == sorted(picked[picked >= 0].tolist())
        np.testing.assert_allclose(layer.output(), reference.outputs[place], rtol=0, atol=5e-6)
        compared += len(ranked) > top_k
    assert compared > 20


def test_frequencies_are_those_of_transformers() -> None:
    reference = Reference(LAYER_TYPES[0], compression=4, top_k=4, length=4)
    for kind, theta in [("main", 10000.0), ("compress", 160000.0)]:
        expected = _numpy(getattr(reference.rotary, f"{kind}_inv_freq"))
        np.testing.assert_allclose(inverse_frequencies(8, theta), expected, rtol=1e-6)


# By hand.


def _plain_compressor(**changes) -> Compressor:
    """d = 2, m = 2, no overlap, no bias, no rope, and a norm that only divides."""
    parts = {
        "bias": np.zeros((2, 2), np.float32),
        "norm_weight": np.ones(2, np.float32),
        "inv_freq": NO_ROPE,
        "eps": 0.0,
    }
    return Compressor(**(parts | changes))


def test_one_block_is_the_weighted_mean_of_its_tokens_by_channel() -> None:
    cs = np.array([[1, 4], [3, 8]], np.float32)
    zs = np.log(np.array([[1, 1], [3, 1]], np.float32))
    # Channel 0: 1/4 * 1 + 3/4 * 3 = 2.5; channel 1: (4 + 8) / 2 = 6.
    expected = np.array([2.5, 6]) / np.sqrt((2.5**2 + 6**2) / 2)
    (entry,) = _plain_compressor().entries(cs, zs)
    np.testing.assert_allclose(entry, expected, rtol=1e-6)


def test_the_bias_goes_by_the_place_in_the_block() -> None:
    bias = np.log(np.array([[1, 1], [3, 1]], np.float32))
    cs = np.array([[9, 9], [9, 9], [1, 4], [3, 8]], np.float32)
    expected = np.array([2.5, 6]) / np.sqrt((2.5**2 + 6**2) / 2)
    entries = _plain_compressor(bias=bias).entries(cs, np.zeros((4, 2), np.float32))
    np.testing.assert_allclose(entries[1], expected, rtol=1e-6)


def test_the_norm_has_its_eps_under_the_root_and_its_weight_after() -> None:
    np.testing.assert_allclose(
        rmsnorm(np.array([1.0, 5.0]), np.array([2.0, 3.0]), 3.0), [2 / 4, 15 / 4], rtol=1e-12
    )


def test_a_block_takes_the_previous_stream_of_the_block_before_and_the_first_has_none() -> None:
    compressor = _plain_compressor(bias=np.zeros((2, 4), np.float32))
    previous, current = [[1, 0], [2, 0], [70, 70], [70, 70]], [[0, 6], [0, 2], [4, 8], [8, 4]]
    cs = np.concatenate([previous, current], axis=1).astype(np.float32)
    first, second = compressor.entries(cs, np.zeros((4, 4), np.float32))
    # First: mean of (0, 6), (0, 2). Second: mean of (1, 0), (2, 0), (4, 8), (8, 4).
    np.testing.assert_allclose(first, [0, 2**0.5], rtol=1e-6)
    expected = np.array([15 / 4, 3]) / np.sqrt(((15 / 4) ** 2 + 3**2) / 2)
    np.testing.assert_allclose(second, expected, rtol=1e-6)


def test_an_incomplete_block_gives_no_entry() -> None:
    cs = np.ones((5, 2), np.float32)
    assert len(_plain_compressor().entries(cs, cs)) == 2
    assert _plain_compressor().entries(cs[:1], cs[:1]) == []


def test_an_entry_is_rotated_at_its_blocks_first_position() -> None:
    quarter = np.array([np.pi / 2], np.float32)
    compressor = _plain_compressor(inv_freq=quarter, bias=np.zeros((3, 2), np.float32))
    cs = np.tile(np.array([1, 0], np.float32), (6, 1))
    first, second = compressor.entries(cs, np.zeros_like(cs))
    # Three quarter turns take (1, 0) to (0, -1).
    np.testing.assert_allclose(first, [2**0.5, 0], atol=1e-6)
    np.testing.assert_allclose(second, [0, -(2**0.5)], atol=1e-6)


def test_rope_turns_neighbours_of_the_trailing_dims_and_back() -> None:
    x = np.array([7.0, 1, 0, 0, 1])
    turned = rotate(x, 1, np.array([np.pi / 2, np.pi]))
    np.testing.assert_allclose(turned, [7, 0, 1, 0, -1], atol=1e-12)
    np.testing.assert_allclose(unrotate(turned, 1, np.array([np.pi / 2, np.pi])), x, atol=1e-12)


def test_the_tail_rounds_c_and_the_biased_z() -> None:
    # In bf16 257 is 256; 256 + 1 too, so that both rows weigh the same.
    bias = np.array([[1, 1], [0, 0]], np.float32)
    zs = np.full((2, 2), 256, np.float32)
    cs = np.array([[257, 0], [0, 257]], np.float32)
    for tail, ratio in [(Fp32(), np.e), (Bf16(), 1.0)]:
        (entry,) = _plain_compressor(bias=bias, tail=tail).entries(cs, zs)
        np.testing.assert_allclose(entry[0] / entry[1], ratio, rtol=1e-5)
    mixed = np.array([[257, 256], [257, 256]], np.float32)
    (entry,) = _plain_compressor(tail=Bf16()).entries(mixed, zs)
    assert entry[0] == entry[1]


def test_with_no_row_the_sink_takes_all() -> None:
    assert (attend(np.ones((2, 3)), np.zeros((0, 3)), np.zeros(2), 1.0) == 0).all()


def test_the_sink_is_not_scaled_and_is_one_a_head() -> None:
    # Logits 0.5 * 2 ln 3 = ln 3 against sinks ln 1 and ln 9: shares 3/4 and 1/4.
    q = np.full((2, 1), 2 * np.log(3))
    got = attend(q, np.array([[1.0]]), np.log([1.0, 9.0]), 0.5)
    np.testing.assert_allclose(got, [[3 / 4], [1 / 4]], rtol=1e-12)


def test_ties_go_to_the_lower_index_and_the_selection_ascends() -> None:
    indexer = Indexer(_plain_compressor(), heads=1, top_k=3)
    assert indexer.select(np.array([0.0, 1, 0, 5, 0])).tolist() == [0, 1, 3]
    assert indexer.select(np.array([2.0, 1])).tolist() == [0, 1]
    assert indexer.select(np.zeros(0)).tolist() == []


def test_a_score_counts_no_negative_product_and_weights_may_be_negative() -> None:
    indexer = Indexer(_plain_compressor(), heads=2, top_k=1)
    q, weights = np.array([[1, 0], [0, 1]]), np.array([2, -3])
    keys = np.array([[5, -1], [-1, 1], [1, 1]])
    assert indexer.scores(q, weights, keys).tolist() == [10, -3, -1]


def _tiny_layer(window: int) -> Layer:
    """d = 1, m = 2, one head, no sink, no rope; norms turn every row into its sign."""
    one = np.ones(1, np.float32)
    compressor = Compressor(np.zeros((2, 1), np.float32), one, NO_ROPE, eps=0.0)
    sink = np.array([-np.inf])
    return Layer(LayerParams(window, one, NO_ROPE, sink, eps=0.0, compressor=compressor))


def test_a_token_sees_its_window_and_every_complete_block_its_own_included() -> None:
    layer = _tiny_layer(window=2)
    got = []
    for kv, c in [(1, -1), (1, -1), (-1, 1), (-1, 1), (1, 1)]:
        layer.append(Token(q=[[0]], kv=[kv], c=[c], z=[0]))
        got.append((layer.window().ravel().tolist(), layer.entries().ravel().tolist()))
    windows, entries = zip(*got, strict=True)
    assert windows == ([1], [1, 1], [1, -1], [-1, -1], [-1, 1])
    assert entries == ([], [-1], [-1], [-1, 1], [-1, 1])
    # q = 0 weighs the last token's four rows alike: -1, 1 and -1, 1.
    assert layer.output().item() == 0
    assert layer.output(selected=[1]).item() == pytest.approx(1 / 3)


# Formats.


def _samples(dim: int, count: int = 60) -> np.ndarray:
    """Entries of every size a format tells apart, zeros and a lone large value among them."""
    rng = np.random.default_rng(dim)
    sizes = 10 ** rng.uniform(-8, 6, (count, 1))
    entries = rng.standard_normal((count, dim)) * sizes
    entries[0], entries[1, 1:] = 0, 0
    entries[2] = 30 * rng.standard_normal(dim)
    entries[2, : dim // 2] *= 1e-3
    return entries.astype(np.float32)


def _torch_e4m3(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes = (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.float() * scale


def _torch_fp8_token(entry: torch.Tensor, rope_dim: int) -> torch.Tensor:
    body, rotated = entry.split([len(entry) - rope_dim, rope_dim])
    inv = body.abs().amax().clamp(min=1e-4) / 448
    return torch.cat([_torch_e4m3(body, inv), rotated.bfloat16().float()])


def _torch_model1(entry: torch.Tensor, rope_dim: int) -> torch.Tensor:
    body, rotated = entry.split([len(entry) - rope_dim, rope_dim])
    tiles = body.view(-1, 64)
    least = (tiles.abs().amax(1, keepdim=True) / 448).clamp(min=1e-4).double()
    scale = torch.exp2(least.log2().ceil()).float()
    assert torch.equal(scale, scale.to(torch.float8_e8m0fnu).float())
    return torch.cat([_torch_e4m3(tiles, scale).ravel(), rotated.bfloat16().float()])


@pytest.mark.parametrize(
    ("row", "dim", "twin"),
    [
        (Fp32(), 32, lambda entry: entry),
        (Bf16(), 32, lambda entry: entry.bfloat16().float()),
        (Fp8Token(8), 32, lambda entry: _torch_fp8_token(entry, 8)),
        (Fp8Token(64), 512, lambda entry: _torch_fp8_token(entry, 64)),
        (Fp8Token(0), 128, lambda entry: _torch_fp8_token(entry, 0)),
        (Model1(8), 136, lambda entry: _torch_model1(entry, 8)),
        (Model1(64), 512, lambda entry: _torch_model1(entry, 64)),
    ],
)
def test_a_format_reads_back_what_torchs_casts_do(row: RowFormat, dim, twin) -> None:
    for entry in _samples(dim):
        got = row.roundtrip(entry)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, twin(torch.from_numpy(entry)).numpy())


def test_the_token_row_is_the_windows() -> None:
    for entry in _samples(32):
        got, expected = Fp8Token(8).encode(entry), encode(entry, 8)
        np.testing.assert_array_equal(got.fp8, expected.fp8)
        np.testing.assert_array_equal(got.rope, expected.rope)
        assert got.inv == expected.inv


@pytest.mark.parametrize("power", [-12, 0, 10, 100])
def test_a_tiles_scale_is_the_least_power_of_two_that_holds_it(power) -> None:
    full = np.ldexp(np.float32(448), power)
    for largest, expected in [(full, power), (np.nextafter(full, np.float32(np.inf)), power + 1)]:
        entry = np.zeros(64, np.float32)
        entry[3] = -largest
        assert Model1(0).encode(entry)[2].tolist() == [expected]


def test_a_tile_of_zeros_has_the_floors_scale() -> None:
    # 2^-14 < 1e-4 < 2^-13.
    assert Model1(0).encode(np.zeros(64, np.float32))[2].tolist() == [-13]


def test_model1s_bytes_lie_where_the_format_says() -> None:
    entries = np.zeros((2, 512), np.float32)
    entries[0, 0] = 448  # tile 0 of token 0: scale 1, the largest code
    entries[0, 447] = -7  # tile 6 of token 0: scale 2^-6, the largest code with a sign
    entries[0, 448] = 1  # first rope dim: bf16 0x3F80
    entries[1, 64] = 896  # tile 1 of token 1: scale 2
    entries[1, 511] = -2  # last rope dim: bf16 0xC000
    expected = np.zeros(3 * 576, np.uint8)
    expected[[0, 447, 448, 449]] = 0x7E, 0xFE, 0x80, 0x3F
    expected[[576 + 64, 576 + 448 + 127]] = 0x7E, 0xC0
    expected[1152 : 1152 + 7] = 127, 114, 114, 114, 114, 114, 121
    expected[1160 : 1160 + 7] = 114, 128, 114, 114, 114, 114, 114
    np.testing.assert_array_equal(model1_block(entries), expected)


def test_model1s_pads_are_one_byte_a_token_and_the_blocks_end() -> None:
    used = model1_used(2)
    assert np.flatnonzero(~used).tolist() == [1159, 1167, *range(1168, 1728)]


@pytest.mark.parametrize(("count", "rows"), [(1, 2), (64, 65), (72, 73), (73, 75)])
def test_a_model1_block_is_a_multiple_of_a_rows_bytes(count, rows) -> None:
    assert len(model1_block(np.zeros((count, 512), np.float32))) == rows * 576
    assert len(model1_used(count)) == rows * 576


def test_a_model1_block_of_other_dims_is_refused() -> None:
    with pytest.raises(ValueError, match="512"):
        model1_block(np.zeros((1, 576), np.float32))


# Histories.

SHAPES = [
    {"window": 3},
    {"window": 1, "compression": 4, "overlap": 0},
    {"window": 4, "compression": 1, "overlap": 1, "top_k": 3},
    {"window": 5, "compression": 2, "overlap": 1, "top_k": 2, "tail": Bf16()},
    {"window": 8, "compression": 8, "overlap": 1, "row": Bf16()},
    {"window": 2, "compression": 4, "overlap": 0, "top_k": 1, "row": Fp8Token(8)},
    {"compression": 4, "overlap": 1, "top_k": 2, "row": Model1(8), "dim": 72},
    {"compression": 4, "overlap": 1, "top_k": 2, "index_row": Fp8Token(0), "rope_dim": 4},
]


def _replayed(layer: Layer) -> np.ndarray:
    """The output of a history told anew, nothing remembered."""
    fresh = Layer(layer.params)
    for token in layer.tokens:
        fresh.append(token)
    return fresh.output()


@pytest.mark.parametrize("shape", SHAPES)
def test_forks_and_rewound_histories_say_what_the_same_tokens_told_anew_say(shape) -> None:
    rng = np.random.default_rng(5)
    params = random_params(rng, **shape)
    layers = [Layer(params)]
    for _ in range(50):
        layer = layers[rng.integers(len(layers))]
        action = rng.random()
        if action < 0.15 and len(layer):
            layer.truncate(int(rng.integers(len(layer))))
        elif action < 0.3 and len(layers) < 4:
            layers.append(layer.copy())
        for _ in range(rng.integers(1, 6)):
            layer.append(random_token(rng, params))
        np.testing.assert_array_equal(layer.output(), _replayed(layer))
    assert max(map(len, layers)) > 20


def _answers(layer: Layer) -> dict[str, np.ndarray]:
    """The newest token's output with all entries that it sees, and its scores."""
    output = layer.output(np.arange(len(layer.entries())))
    return {"output": output} | ({"scores": layer.scores()} if layer.params.indexer else {})


@pytest.mark.parametrize("shape", SHAPES)
def test_every_input_of_a_random_layer_moves_its_answers(shape) -> None:
    """Else a comparison with this oracle could pass unnoticed."""
    rng = np.random.default_rng(6)
    params = random_params(rng, **shape)
    layer = Layer(params)
    for _ in range(16):
        layer.append(random_token(rng, params))
    before, newest = _answers(layer), vars(layer.tokens[-1])
    assert all(np.abs(answer).mean() > 0.05 for answer in before.values())
    for name in (name for name, part in newest.items() if part is not None):
        layer.truncate(15)
        layer.append(Token(**(newest | {name: vars(random_token(rng, params))[name]})))
        answer = "scores" if name.startswith("index") else "output"
        assert np.abs(_answers(layer)[answer] - before[answer]).max() > 1e-3, name


def test_a_small_top_k_leaves_entries_out() -> None:
    rng = np.random.default_rng(7)
    params = random_params(rng, compression=2, overlap=1, top_k=3)
    layer = Layer(params)
    for _ in range(20):
        layer.append(random_token(rng, params))
    scores, selected = layer.scores(), layer.selected()
    assert len(scores) == 10 and len(selected) == 3
    assert scores[selected].min() > np.delete(scores, selected).max()
    np.testing.assert_array_equal(layer.output(), layer.output(selected))
    assert np.abs(layer.output() - layer.output(np.arange(10))).max() > 1e-3


def test_a_token_keeps_its_values_when_the_callers_buffer_changes() -> None:
    kv = np.ones(1)
    token = Token(q=[[0]], kv=kv)
    kv[0] = 5
    assert token.kv == 1 and token.kv.dtype == np.float32


def test_tokens_of_other_shapes_are_refused() -> None:
    layer = _tiny_layer(window=2)
    with pytest.raises(ValueError, match="c must have shape"):
        layer.append(Token(q=[[0]], kv=[1], z=[0]))
    with pytest.raises(ValueError, match="index_q must have shape"):
        layer.append(Token(q=[[0]], kv=[1], c=[1], z=[0], index_q=[[1]]))
    with pytest.raises(ValueError, match="kv must have shape"):
        layer.append(Token(q=[[0]], kv=[1, 1], c=[1], z=[0]))
    assert len(layer) == 0


def test_a_history_is_not_truncated_to_more_than_it_has() -> None:
    layer = _tiny_layer(window=2)
    for length in (-1, 1):
        with pytest.raises(ValueError, match="truncate"):
            layer.truncate(length)


def test_index_keys_of_other_blocks_than_the_entries_are_refused() -> None:
    main, keys = _plain_compressor(), _plain_compressor(bias=np.zeros((3, 2), np.float32))
    parts = (2, np.ones(2), NO_ROPE, np.zeros(1))
    with pytest.raises(ValueError, match="same blocks"):
        LayerParams(*parts, compressor=main, indexer=Indexer(keys, 1, 1))
    with pytest.raises(ValueError, match="give a compressor"):
        LayerParams(*parts, indexer=Indexer(keys, 1, 1))
