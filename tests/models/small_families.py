"""A random decoder of every served kind that keeps K and V, each of a few thousand weights.

Windows are of 8 tokens, so that rings wrap many times; weights are large enough that attention is
far from uniform and greedy answers do not repeat one token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 262
WINDOW = 8

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _with(**changes: Any) -> dict[str, Any]:
    return {**COMMON, **changes}


SMALL: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON)),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**_with(
            head_dim=16, use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED
        ))
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_with(head_dim=16, norm_topk_prob=True, **EXPERTS))
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_with(sliding_window=WINDOW))),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**_with(
            head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW, layer_types=MIXED,
            attn_logit_softcapping=3.0, final_logit_softcapping=10.0,
        ))
    ),
    "gemma3_text": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**_with(
            head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW, layer_types=MIXED
        ))
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**_with(
            head_dim=16, sliding_window=WINDOW, layer_types=MIXED, num_local_experts=4,
            num_experts_per_tok=2,
        ))
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_with(sliding_window=WINDOW))),
    "gpt_neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**{k: v for k, v in COMMON.items() if k != "num_key_value_heads"})
    ),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**_with(
            num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=24, qk_nope_head_dim=16,
            qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
            n_group=2, topk_group=1, n_shared_experts=1, moe_intermediate_size=24,
            first_k_dense_replace=1,
        ))
    ),
}  # fmt: skip


def small_model(model_type: str, seed: int = 3) -> PreTrainedModel:
    """A random model of one kind, with eager attention: the one that knows all of them."""
    torch.manual_seed(seed)
    model = SMALL[model_type]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.2)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    model.set_attn_implementation("eager")
    return model
