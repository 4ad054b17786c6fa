"""Decoders small enough to build in milliseconds, and the files they are loaded from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 262


def tiny_config(**changes: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**settings, **changes})


def tiny_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama whose weights are large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


V4_PATTERN = [
    "sliding_attention",
    "sliding_attention",
    *["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
]
V4_YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def tiny_v4_config(**changes: Any) -> Any:
    """A DeepSeek-V4 of 6 layers, window 16, blocks of 4 and 16 tokens, entries of 64 dims."""
    from transformers import DeepseekV4Config

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(V4_PATTERN),
        "layer_types": V4_PATTERN,
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 16,
        },
        "sliding_window": 16,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 108,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1024,
        "rope_parameters": V4_YARN,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return DeepseekV4Config(**{**settings, **changes})


def tiny_v4_model(seed: int = 0, **changes: Any) -> Any:
    """A random DeepSeek-V4 in float32, none of whose parts is neutral: norms, sinks, biases."""
    from transformers import DeepseekV4ForCausalLM

    generator = torch.Generator().manual_seed(seed)
    model = DeepseekV4ForCausalLM(tiny_v4_config(**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.2, generator=generator)
            if "norm" in name:
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                drawn = torch.rand(buffer.shape[0], experts, generator=generator)
                buffer.copy_(drawn.argsort(1)[:, : buffer.shape[1]])
            elif name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2, generator=generator)
    return model


def tiny_mamba2_config(**changes: Any) -> Any:
    """A Mamba-2 of 3 layers: 8 heads of 8 in 2 groups, states of 16, a convolution of 4 taps."""
    from transformers import Mamba2Config

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return Mamba2Config(**{**settings, **changes})


def tiny_mamba2_model(seed: int = 0, **changes: Any) -> Any:
    """A random Mamba-2 in float32 that forgets slowly enough for its state to decide its answers.

    Steps lie around softplus(-2), rates between 0.1 and 1 a step.
    """
    from transformers import Mamba2ForCausalLM

    torch.manual_seed(seed)
    model = Mamba2ForCausalLM(tiny_mamba2_config(**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.2)
            if "norm" in name or name.endswith(".D"):
                parameter.add_(1)
            elif name.endswith("dt_bias"):
                parameter.sub_(2)
            elif name.endswith("A_log"):
                parameter.uniform_(-2.3, 0)
            elif "conv1d" in name:
                parameter.mul_(2)
    return model


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    extra: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write `model` as GGUF, in float32, with a tokenizer of bytes and two words.

    Args:
        path: of the file.
        model: whose weights are written.
        extra: tensors to add by name.
        without: names of the model's weights to leave out.
    """
    import gguf

    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", "<pad>", *_byte_characters(), "hi", "ho"])
    writer.add_token_types([3, 3, 3, 3] + [1] * 258)
    writer.add_token_merges(["h i", "h o"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(3)
    writer.add_chat_template("{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}")
    for name, tensor in model.state_dict().items():
        weight = tensor.float().numpy()
        if name.endswith("q_proj.weight"):
            weight = _interleaved(weight, heads)
        elif name.endswith("k_proj.weight"):
            weight = _interleaved(weight, kv_heads)
        if name not in without:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(weight))
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order of rotary dims that llama.cpp keeps: pairs side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{parts[part]}.weight"


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    stand_in = {byte: chr(byte) for byte in plain}
    stand_in.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return [stand_in[byte] for byte in range(256)]
