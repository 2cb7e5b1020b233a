"""Mixtures of experts and others of transformers, small: `--model
tests.gpu.transformers_models:mixtral`.
"""

from typing import Any

import transformers
from torch import nn


def _made(name: str, **sizes: Any) -> nn.Module:
    usual = {
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "vocab_size": 32_000,
        "use_cache": False,
        "intermediate_size": 2816,
    }
    model = getattr(transformers, f"{name}ForCausalLM")
    return model(model.config_class(**usual | sizes))


def mixtral() -> nn.Module:
    return _made("Mixtral", intermediate_size=1024, num_key_value_heads=4)


def qwen3_moe() -> nn.Module:
    return _made(
        "Qwen3Moe",
        moe_intermediate_size=512,
        num_experts=16,
        num_experts_per_tok=4,
        num_key_value_heads=4,
    )


def deepseek_v3() -> nn.Module:
    return _made(
        "DeepseekV3",
        moe_intermediate_size=512,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        kv_lora_rank=256,
        q_lora_rank=512,
        first_k_dense_replace=1,
        num_key_value_heads=16,
    )


def gpt_oss() -> nn.Module:
    return _made(
        "GptOss",
        intermediate_size=1024,
        num_local_experts=8,
        num_experts_per_tok=2,
        num_key_value_heads=4,
    )


def gemma3() -> nn.Module:
    return _made(
        "Gemma3", num_attention_heads=4, num_key_value_heads=2, head_dim=256, sliding_window=512
    )
