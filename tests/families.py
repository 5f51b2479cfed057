"""Tiny random models of every supported family, made by transformers and saved as it saves them."""

from pathlib import Path

COMMON = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
SLIDING = ["sliding_attention", "full_attention"] * 2
GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
        "rope_theta": 150000.0,
    },
}
DEEPSEEK_MIXTURE = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama3-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 500.0,
            }
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 10000.0,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-raw-router": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "layer_types": SLIDING,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 8, "pad_token_id": 0, "partial_rotary_factor": 0.5}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "glm4-moe": (
        "Glm4Moe",
        DEEPSEEK_MIXTURE | {"head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    ),
    "glm4-moe-lite": ("Glm4MoeLite", DEEPSEEK_MIXTURE | LATENT | {"q_lora_rank": 12}),
    "deepseek-v3": (
        "DeepseekV3",
        DEEPSEEK_MIXTURE
        | LATENT
        | {
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "original_max_position_embeddings": 32,
                "rope_theta": 10000.0,
            },
        },
    ),
    "gpt-oss-variant": (  # clamps that many numbers meet
        "GptOss",
        GPT_OSS
        | {
            "swiglu_limit": 0.5,
            "swiglu_alpha": 1.1,
            "attention_bias": False,
            "layer_types": SLIDING[::-1],
            "tie_word_embeddings": True,
        },
    ),
}


def save_family(family: str, folder: Path, **more):
    """Writes the family's tiny model, with `more` in its config, to a folder and returns transformers' own model of it
    (float32, eager)."""
    import torch
    import transformers

    kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **(COMMON | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | changes | more)
    )
    config._attn_implementation = "eager"
    model_class = "Gemma3ForCausalLM" if kind == "Gemma3Text" else f"{kind}ForCausalLM"
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():  # norms and biases are born as ones and zeros, which would hide mistakes
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer))
    model.save_pretrained(folder)
    return model
