"""The adapter against transformers' own forward, with a full history in place of pools."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from history_store import History, make_batch
from tiny import VOCAB, tiny_config, tiny_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphcache import scopes
from graphcache.errors import UnsupportedModel
from graphcache.models.transformers_decoder import TransformersDecoder


def _sequences(seed: int, lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def _own_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.fixture
def reference() -> Any:
    return tiny_model()


@pytest.fixture
def decoder(reference: Any) -> TransformersDecoder:
    return TransformersDecoder(copy.deepcopy(reference))


def test_packed_rows_equal_the_models_own_forward(
    reference: Any, decoder: TransformersDecoder
) -> None:
    """Prefill in chunks, one and several rows at a time, then steps of one and of two tokens."""
    sequences = _sequences(1, [17, 9, 12])
    state = History(3)
    decoder.prefill(make_batch(state, [(4, 0, sequences[0][:5])], 5, prefill=True))
    decoder.prefill(
        make_batch(
            state, [(4, 5, sequences[0][5:9]), (0, 0, sequences[1][:2])], q_len=4, prefill=True
        )
    )
    lengths = {4: 9, 0: 2, 2: 0}
    own = {slot: _own_logits(reference, sequences[i]) for i, slot in enumerate((4, 0, 2))}
    tokens = {4: sequences[0], 0: sequences[1], 2: sequences[2]}
    for q_len, order in [(1, [2, 4, 0]), (1, [0, -1, 2]), (2, [4, 0, -1, 2]), (2, [2, 4, 0])]:
        rows = [
            (slot, lengths[slot], tokens[slot][lengths[slot] : lengths[slot] + q_len])
            if slot >= 0
            else (-1, 0, [])
            for slot in order
        ]
        logits = decoder.decode(make_batch(state, rows, q_len))
        assert logits.shape == (len(order) * q_len, VOCAB)
        assert logits.dtype == torch.float32
        assert logits.isfinite().all()
        for index, slot in enumerate(order):
            if slot < 0:
                continue
            got = logits[index * q_len : (index + 1) * q_len]
            expected = own[slot][lengths[slot] : lengths[slot] + q_len]
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
            lengths[slot] += q_len


def test_what_attention_is_asked(decoder: TransformersDecoder) -> None:
    state = History(3)
    decoder.decode(make_batch(state, [(0, 0, [5])], 1))
    how = {"scale": 8**-0.5, "window": 0, "softcap": 0.0, "sinks": None}
    assert [layer.asked for layer in state.layers] == [[how]] * 3


def test_attention_takes_q_k_v_by_token(decoder: TransformersDecoder) -> None:
    shapes = []

    class Layer:
        def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
            shapes.append((q.shape, k.shape, v.shape, q.stride(-1), k.stride(-1), v.stride(-1)))
            return torch.zeros_like(q)

    state = History(0)
    state.layers = [Layer()] * 3  # type: ignore[list-item]
    decoder.decode(make_batch(state, [(0, 0, [5]), (1, 3, [7])], 1))
    assert shapes == [((2, 4, 8), (2, 2, 8), (2, 2, 8), 1, 1, 1)] * 3


def test_prefill_has_no_head(decoder: TransformersDecoder) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the head ran")

    decoder.model.lm_head.register_forward_pre_hook(refuse)
    assert decoder.prefill(make_batch(History(3), [(0, 0, [5, 6])], 2, prefill=True)) is None
    with pytest.raises(AssertionError, match="the head ran"):
        decoder.decode(make_batch(History(3), [(0, 0, [5])], 1))


def test_no_graph_of_gradients(decoder: TransformersDecoder) -> None:
    logits = decoder.decode(make_batch(History(3), [(0, 0, [5])], 1))
    assert not logits.requires_grad
    assert not logits.is_inference()


class _NoHostReads(TorchDispatchMode):
    """Fails on what waits for the device, gives shapes by data, or moves or recasts ids."""

    FORBIDDEN = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "is_nonzero")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        assert not any(name.startswith(word) for word in self.FORBIDDEN), name
        assert name != "index" or all(
            index is None or index.dtype != torch.bool for index in args[1]
        ), "boolean indexing"
        if name in ("_to_copy", "copy_"):
            target = kwargs.get("device") or args[0].device
            assert torch.device(target) == args[0].device, "a copy to another device"
            assert kwargs.get("dtype") != torch.int64, "ids were recast"
        return func(*args, **kwargs)


class _NoPythonReads(TorchFunctionMode):
    """Fails on reads of a CPU tensor that never reach dispatch."""

    FORBIDDEN = ("tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "item")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert getattr(func, "__name__", "") not in self.FORBIDDEN, func.__name__
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("positions", [[0, 1, 2, 3], [9, 2, 0, 40]])
def test_no_host_sync(decoder: TransformersDecoder, positions: list[int]) -> None:
    class Layer:
        def attend(self, q: Tensor, *_: Any, **__: Any) -> Tensor:
            return torch.ones_like(q)

    state = History(0)
    state.layers = [Layer()] * 3  # type: ignore[list-item]
    batch = make_batch(state, [(i, p, [5 + i]) for i, p in enumerate(positions)], 1)
    assert batch.tokens.dtype == batch.positions.dtype == torch.int32
    with _NoPythonReads(), _NoHostReads():  # type: ignore[no-untyped-call]
        decoder.prefill(batch)
        decoder.decode(batch)


def test_a_model_still_runs_by_itself(reference: Any, decoder: TransformersDecoder) -> None:
    prompt = torch.tensor([_sequences(3, [7])[0]])
    expected = reference.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    got = decoder.model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert got.tolist() == expected.tolist()


def test_attributes(decoder: TransformersDecoder) -> None:
    assert [schema.dtype for schema in decoder.schemas] == [torch.float32] * 3
    assert {(s.kv_heads, s.k_head_dim, s.v_head_dim, s.window) for s in decoder.schemas} == {
        (2, 8, 8, None)
    }
    assert decoder.vocab_size == VOCAB
    assert decoder.max_context == 64
    assert decoder.device == torch.device("cpu")
    assert decoder.fields == ()
    assert decoder.tokenizer is None
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        decoder.encode("text")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(None, 2, (2,)), (7, 2, (7,)), ([7, 9], 2, (7, 9)), (None, [3, 4], (3, 4)), (None, None, ())],
)
def test_stop_tokens(generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = generation
    model.config.eos_token_id = config
    assert TransformersDecoder(model).stop_tokens == expected


def test_named_tensors_are_the_live_ones(decoder: TransformersDecoder) -> None:
    named = decoder.named_tensors()
    assert named["model.rotary_emb.inv_freq"] is decoder.model.model.rotary_emb.inv_freq
    before = named["lm_head.weight"].data_ptr()
    decoder.model.lm_head.weight.data = decoder.model.lm_head.weight.data.clone()
    assert decoder.named_tensors()["lm_head.weight"].data_ptr() != before
    pointers = {tensor.data_ptr() for tensor in decoder.named_tensors().values()}
    assert {p.data_ptr() for p in decoder.model.parameters()} < pointers


class _Heard:
    def __init__(self) -> None:
        self.open: list[str] = []
        self.paths: list[str] = []

    def push(self, name: str) -> None:
        self.open.append(name)
        self.paths.append("/".join(self.open))

    def pop(self) -> None:
        self.open.pop()


EXPECTED_SCOPES = [
    path
    for layer in range(3)
    for path in (f"layer {layer}", f"layer {layer}/attention", f"layer {layer}/mlp")
]


def test_scopes_of_a_step(decoder: TransformersDecoder) -> None:
    heard = _Heard()
    TransformersDecoder(decoder.model)  # a second adapter of the model names nothing twice
    with scopes.listening(heard), scopes.scope("step"):
        decoder.decode(make_batch(History(3), [(0, 0, [5])], 1))
    assert heard.paths == ["step", *(f"step/{path}" for path in EXPECTED_SCOPES)]
    assert heard.open == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_raises_leaves_no_scope_open(
    decoder: TransformersDecoder, error: type[BaseException]
) -> None:
    class Layer:
        def attend(self, *_: Any, **__: Any) -> Tensor:
            raise error

    state = History(3)
    state.layers[1] = Layer()  # type: ignore[call-overload]
    heard = _Heard()
    with scopes.listening(heard), scopes.scope("step"):
        with pytest.raises(error):
            decoder.decode(make_batch(state, [(0, 0, [5])], 1))
        assert heard.open == ["step"]
        heard.paths.clear()
        decoder.decode(make_batch(History(3), [(0, 0, [5])], 1))
    assert heard.paths == [f"step/{path}" for path in EXPECTED_SCOPES]
    assert scopes.path() == ()


def _without_head() -> Any:
    return tiny_model().model


def _quantised() -> Any:
    model = tiny_model()
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return model


def _with_int8() -> Any:
    model = tiny_model()
    weight = model.lm_head.weight.data.to(torch.int8)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


def _unbuilt() -> Any:
    with torch.device("meta"):
        return tiny_model()


def _mixed() -> Any:
    model = tiny_model()
    model.lm_head.to(torch.bfloat16)
    return model


def _of_another_kind() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16))


def _encoder_decoder() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
    )


def _rope(rope_type: str, **more: Any) -> Any:
    return tiny_model(
        rope_parameters={"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, **more}
    )


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (_of_another_kind, "model_type 'gpt2'"),
        (_encoder_decoder, "encoder-decoder"),
        (_without_head, "no language head"),
        (_quantised, "quantised by 'bitsandbytes'"),
        (_with_int8, "lm_head.weight is torch.int8"),
        (_unbuilt, "not built"),
        (_mixed, "one dtype"),
        (lambda: _rope("dynamic"), "'dynamic'"),
        (
            lambda: _rope(
                "longrope",
                short_factor=[1.0] * 4,
                long_factor=[2.0] * 4,
                original_max_position_embeddings=32,
            ),
            "'longrope'",
        ),
        (lambda: tiny_model(is_causal=False), "causal"),
        (lambda: tiny_model(alibi=True), "ALiBi"),
        (lambda: tiny_model().double(), "float64"),
        (lambda: tiny_model(num_attention_heads=8), "multiple of 8"),
        (lambda: tiny_config(), "LlamaConfig"),
        (lambda: None, "NoneType"),
    ],
)
def test_unserved_models_are_refused_by_name(build: Any, part: str) -> None:
    model = build()
    with pytest.raises(UnsupportedModel, match=part):
        TransformersDecoder(model)
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    assert implementation != "graphcache"


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_rope_of_fixed_frequencies_is_served(rope_type: str) -> None:
    reference = _rope(rope_type, original_max_position_embeddings=32)
    decoder = TransformersDecoder(copy.deepcopy(reference))
    tokens = _sequences(5, [6])[0]
    state = History(3)
    decoder.prefill(make_batch(state, [(0, 0, tokens[:5])], 5, prefill=True))
    logits = decoder.decode(make_batch(state, [(0, 5, tokens[5:])], 1))
    torch.testing.assert_close(logits[0], _own_logits(reference, tokens)[5], atol=1e-5, rtol=0)
