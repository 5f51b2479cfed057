"""Hugging Face folders: what config.json means, and the whole model."""

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specjax.checkpoints.defaults import DEFAULTS
from specjax.checkpoints.safetensors_folder import SafetensorsFolder, read_json, same_name
from specjax.checkpoints.stacked_experts import StackedExperts, stored_types
from specjax.checkpoints.weights import CheckpointError, load_parameters
from specjax.models.config import (
    Activation,
    ClampedSwiGLU,
    Latent,
    LayerConfig,
    Rope,
    SigmoidRouter,
    TransformerConfig,
)
from specjax.models.transformer import Transformer

MIXTURES = ("qwen3_moe", "gpt_oss")
DEEPSEEK = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")  # mixtures with DeepSeek-V3's router
LATENT = ("deepseek_v3", "glm4_moe_lite")
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Gemma 3 with vision: the text model's tensors have these prefixes; those that see are left out.
TEXT_PREFIXES = ("language_model.", "model.language_model.")
VISION_PREFIXES = tuple(
    f"{model}{part}."
    for model in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)


def parse_config(raw: dict[str, Any], where: str = "config.json") -> TransformerConfig:
    """`TransformerConfig` of a config.json.

    Raises:
      CheckpointError: an architecture that is not supported, or fields that are missing or make no
        sense.
    """
    family = raw.get("model_type")
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method", "unknown")
        if (family, method) != ("gpt_oss", "mxfp4"):
            raise CheckpointError(
                f"{where}: of quantised safetensors, gpt_oss in mxfp4 alone is supported; got "
                f"quant_method {method!r} of model_type {family!r}; use the unquantised checkpoint "
                "or a GGUF file"
            )
    if family == "gemma3" and isinstance(raw.get("text_config"), dict):
        return parse_config({**raw["text_config"], "model_type": "gemma3_text"}, where)
    if family == "mimo":  # Qwen2 with an MTP module, which `load_head` reads
        return parse_config({**raw, "model_type": "qwen2"}, where)
    if family not in DEFAULTS:
        alone = str(family).startswith(("qwen3_next", "qwen3_5"))
        hint = "; of its folder the MTP module alone can be loaded, with load_head" if alone else ""
        raise CheckpointError(
            f"{where}: model_type must be one of {', '.join(sorted(DEFAULTS))}; got {family!r}{hint}"
        )
    fields = {"rms_norm_eps": 1e-6} | DEFAULTS[family] | raw
    if missing := [name for name in REQUIRED if fields.get(name) is None]:
        raise CheckpointError(f"{where}: missing fields {', '.join(missing)}")
    numbers = {name: fields[name] for name in REQUIRED}
    if wrong := {n: x for n, x in numbers.items() if not isinstance(x, int | float) or x <= 0}:
        raise CheckpointError(f"{where}: expected positive numbers, got {wrong}")
    try:
        return _config(family, fields)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def _config(family: str, c: dict[str, Any]) -> TransformerConfig:
    count, heads = int(c["num_hidden_layers"]), int(c["num_attention_heads"])
    head_dim = int(c.get("head_dim") or c["hidden_size"] // heads)
    latent, rotary = _latent(family, c), None
    if latent is not None:
        rotary = int(c["qk_rope_head_dim"])
        head_dim = latent.content_dim + rotary
    gemma = family.startswith("gemma")
    windows = _windows(family, c, count)
    ropes, rope_of_layer = _ropes(family, c, windows)
    parameters = c.get("rope_parameters") or {}
    # the newer place first: the older one may be no more than a default
    partial = parameters.get("partial_rotary_factor", c.get("partial_rotary_factor"))
    if latent is None and partial not in (None, 1):
        rotary = int(head_dim * float(partial))
    if c.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention: only causal models can be decoded from")
    gpt_oss = family == "gpt_oss"
    deepseek = family in DEEPSEEK
    counted = ("n_routed_experts",) if deepseek else ("num_local_experts", "num_experts")
    experts = next((int(c[name]) for name in counted if c.get(name)), 0)
    experts = experts if deepseek or family in MIXTURES else 0
    sparse = _sparse(family, c, count) if experts else [False] * count
    expert_size = "intermediate_size" if gpt_oss else "moe_intermediate_size"
    biased = bool(c.get("attention_bias")) and family not in ("mistral", "qwen2", "phi3")
    return TransformerConfig(
        family=family,
        vocab_size=int(c["vocab_size"]),
        hidden_size=int(c["hidden_size"]),
        mlp_size=int(c["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=heads if latent else int(c.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        layers=tuple(
            LayerConfig(
                window=windows[i],
                rope=rope_of_layer[i],
                experts=sparse[i],
            )
            for i in range(count)
        ),
        ropes=ropes,
        context_length=int(c["max_position_embeddings"]),
        rotary_dim=rotary,
        norm_eps=float(c["rms_norm_eps"]),
        tied=bool(c.get("tie_word_embeddings")),
        qkv_bias=biased or family == "qwen2",
        output_bias=biased and family != "glm4_moe",
        mlp_bias=family == "llama" and bool(c.get("mlp_bias")),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text")
        or (family == "glm4_moe" and bool(c.get("use_qk_norm"))),
        post_norms=gemma,
        sinks=gpt_oss,
        activation=_activation(family, c),
        embedding_scale=float(c["hidden_size"]) ** 0.5 if gemma else 1.0,
        attention_scale=_attention_scale(family, c, head_dim, ropes[0]),
        attention_softcap=c.get("attn_logit_softcapping") if family == "gemma2" else None,
        logit_softcap=c.get("final_logit_softcapping") if gemma else None,
        num_experts=experts,
        experts_per_token=int(c["num_experts_per_tok"]) if experts else 0,
        expert_size=int(c[expert_size]) if experts else 0,
        normalize_experts=gpt_oss or not experts or bool(c.get("norm_topk_prob")),
        router=SigmoidRouter(groups=int(c["n_group"] or 1), kept=int(c["topk_group"] or 1))
        if deepseek and experts
        else None,
        expert_factor=float(c["routed_scaling_factor"]) if deepseek else 1.0,
        shared_expert_size=int(c["n_shared_experts"] or 0) * int(c["moe_intermediate_size"])
        if deepseek
        else 0,
        expert_bias=gpt_oss,
        norm_offset=1.0 if gemma else 0.0,
        latent=latent,
    )


def _latent(family: str, c: dict[str, Any]) -> Latent | None:
    if family not in LATENT:
        return None
    rank = c["q_lora_rank"]
    return Latent(
        query_rank=None if rank is None else int(rank),
        rank=int(c["kv_lora_rank"]),
        content_dim=int(c["qk_nope_head_dim"]),
        value_dim=int(c["v_head_dim"]),
        interleaved=bool(c["rope_interleave"]),
    )


def _attention_scale(family: str, c: dict[str, Any], head_dim: int, rope: Rope) -> float | None:
    """Gemma's own, and DeepSeek's where yarn stretches the context: None is head_dim ** -0.5."""
    if family.startswith("gemma"):
        return float(c["query_pre_attn_scalar"]) ** -0.5
    if family not in LATENT or not rope.mscale_all_dim or rope.factor <= 1:
        return None
    return head_dim**-0.5 * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def _activation(family: str, c: dict[str, Any]) -> Activation:
    gemma = family.startswith("gemma")
    name = c["hidden_activation"] if gemma else c.get("hidden_act", "silu")
    known = ("silu",) if family == "gpt_oss" else tuple(ACTIVATIONS)
    if name not in known:
        raise ValueError(f"the activation must be one of {', '.join(known)}; got {name!r}")
    if family == "gpt_oss":
        return ClampedSwiGLU(limit=float(c["swiglu_limit"]), alpha=float(c["swiglu_alpha"]))
    return ACTIVATIONS[name]


def _sparse(family: str, c: dict[str, Any], count: int) -> list[bool]:
    """Which layers of a mixture of experts have them."""
    if family == "gpt_oss":
        return [True] * count
    if family in DEEPSEEK:
        only = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        for name, value in only.items():
            if c.get(name, value) != value:
                raise ValueError(
                    f"{name} must be {value!r} in a mixture of {family}, got {c[name]!r}"
                )
        kinds = c.get("mlp_layer_types") if family == "glm4_moe_lite" else None
        if kinds is None:
            return [i >= int(c["first_k_dense_replace"]) for i in range(count)]
        if len(kinds) != count or not all(kind in ("dense", "sparse") for kind in kinds):
            raise ValueError(
                f"mlp_layer_types must name {count} layers dense or sparse; got {kinds}"
            )
        return [kind == "sparse" for kind in kinds]
    dense, step = c.get("mlp_only_layers") or (), int(c["decoder_sparse_step"])
    return [i not in dense and (i + 1) % step == 0 for i in range(count)]


def _windows(family: str, c: dict[str, Any], count: int) -> list[int | None]:
    """Each layer's sliding window, as the family's network uses it."""
    window, types = c.get("sliding_window"), c.get("layer_types")
    qwen = family.startswith("qwen")
    if (
        family in ("llama", *DEEPSEEK)
        or window is None
        or (qwen and not c.get("use_sliding_window"))
    ):
        return [None] * count
    if family in ("mistral", "phi3", "qwen3_moe"):  # these do not read layer_types
        sliding = [True] * count
    elif types is not None:
        kinds = ("full_attention", "sliding_attention")
        if len(types) != count or not all(kind in kinds for kind in types):
            raise ValueError(
                f"layer_types must name {count} layers' kinds, each one of {', '.join(kinds)}; "
                f"got {types}"
            )
        sliding = [kind == "sliding_attention" for kind in types]
    elif qwen:
        sliding = [i >= int(c["max_window_layers"]) for i in range(count)]
    else:
        sliding = [(i + 1) % int(c["sliding_window_pattern"]) != 0 for i in range(count)]
    return [int(window) if s else None for s in sliding]


def _ropes(
    family: str, c: dict[str, Any], windows: list[int | None]
) -> tuple[tuple[Rope, ...], list[int]]:
    """The distinct rotary embeddings, and which of them each layer uses.

    Gemma 3 has another one in sliding layers.
    """
    silent, context = DEFAULTS[family], int(c["max_position_embeddings"])  # as is a null here
    theta = float(c.get("rope_theta") or silent.get("rope_theta", 10000.0))
    fields = c.get("rope_parameters") or c.get("rope_scaling") or silent.get("rope_scaling", {})
    if family != "gemma3_text":
        rope = _rope(fields, theta, context)
        if family == "phi3" and rope.kind != "default":
            raise ValueError(f"rope type of phi3 must be default, got {rope.kind!r}")
        return (rope,), [0] * len(windows)
    local = {"rope_theta": c["rope_local_base_freq"]}
    if "full_attention" in fields or "sliding_attention" in fields:
        local |= fields.get("sliding_attention") or {}
        fields = fields.get("full_attention") or {}
    ropes = (_rope(fields, theta, context), _rope(local, theta, context))
    return ropes, [0 if window is None else 1 for window in windows]


# Fields that a rope type reads: those it must have, those it may have.
ROPE_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": (
        {"factor"},
        {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
    ),
}
ROPE_COMMON = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
ROPE_COMMON |= {"partial_rotary_factor"}


def _rope(fields: dict[str, Any], theta: float, context: int) -> Rope:
    """One rotary embedding from `rope_scaling` or `rope_parameters`; both spellings of the type."""
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ROPE_FIELDS:
        raise ValueError(f"rope type must be one of {', '.join(ROPE_FIELDS)}; got {kind!r}")
    needed, optional = ROPE_FIELDS[kind]
    given = {name: value for name, value in fields.items() if value is not None}
    if missing := needed - given.keys():
        raise ValueError(f"rope type {kind}: missing fields {', '.join(sorted(missing))}")
    if unknown := given.keys() - ROPE_COMMON - needed - optional:
        raise ValueError(f"rope type {kind}: unknown fields {', '.join(sorted(unknown))}")
    numbers: dict[str, Any] = {
        name: float(value)
        for name, value in given.items()
        if name in needed | optional and name != "truncate"
    }
    scaled = kind in ("llama3", "yarn")
    return Rope(
        theta=float(given.get("rope_theta", theta)),
        kind=kind,
        original_length=int(
            given.get("original_max_position_embeddings", context) if scaled else 0
        ),
        truncate=bool(given.get("truncate", True)),
        **numbers,
    )


def _text_name(name: str) -> str | None:
    """The text model's name of a multimodal model's tensor; None for the parts that see."""
    if name.startswith(VISION_PREFIXES):
        return None
    for prefix in TEXT_PREFIXES:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
    return name


def load_folder(folder: Path, dtype: jnp.dtype) -> Transformer:
    """A Hugging Face folder as a `Transformer`.

    Raises:
      CheckpointError: see `parse_config`, `SafetensorsFolder`, `StackedExperts` and
        `load_parameters`.
    """
    raw = read_json(folder / "config.json")
    config = parse_config(raw, str(folder / "config.json"))
    vision = raw["model_type"] == "gemma3"
    if config.family == "gpt_oss":
        stored = SafetensorsFolder(folder, types=stored_types)
        file = StackedExperts(stored, config, str(folder))
    else:
        file = SafetensorsFolder(folder, rename=_text_name if vision else same_name)
    return load_parameters(config, file, dtype, str(folder))
