"""Hugging Face folders: config.json and (sharded) safetensors."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.checkpoints.weights import CheckpointError, load_parameters
from specjax.models.config import LayerConfig, Rope, TransformerConfig
from specjax.models.transformer import Transformer

# What a family's config class assumes where config.json is silent, and what its networks always do.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False, "head_dim": 128, "decoder_sparse_step": 1},
    "gemma2": {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "rms_norm_eps": 1e-6,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3_text": {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "phi3": {"sliding_window": None},
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def _rope(fields: dict[str, Any], theta: float, context: int) -> Rope:
    """One rotary embedding from `rope_scaling` or an entry of `rope_parameters`; both spellings of the type."""
    kind = fields.get("rope_type", fields.get("type", "default"))
    theta = float(fields.get("rope_theta", theta))
    original = int(fields.get("original_max_position_embeddings") or context)
    known = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
    known |= {"partial_rotary_factor"}
    match kind:
        case "default":
            allowed, rope = set(), Rope(theta=theta)
        case "linear":
            allowed = {"factor"}
            rope = Rope(theta=theta, kind="linear", factor=float(fields["factor"]))
        case "llama3":
            allowed = {"factor", "low_freq_factor", "high_freq_factor"}
            rope = Rope(
                theta=theta,
                kind="llama3",
                original_length=original,
                **{name: float(fields[name]) for name in allowed},
            )
        case "yarn":
            floats = {"factor", "beta_fast", "beta_slow", "attention_factor"}
            floats |= {"mscale", "mscale_all_dim"}
            allowed = floats | {"truncate"}
            given = {n: float(fields[n]) for n in floats if fields.get(n) is not None}
            rope = Rope(
                theta=theta,
                kind="yarn",
                original_length=original,
                truncate=bool(fields.get("truncate", True)),
                **given,
            )
        case _:
            raise CheckpointError(
                f"rope_type must be default, linear, llama3 or yarn, got {kind!r}"
            )
    if unknown := {n for n in fields.keys() - known - allowed if fields[n] is not None}:
        raise CheckpointError(f"rope type {kind}: unknown fields {sorted(unknown)}")
    return rope


def parse_config(raw: dict[str, Any], where: str = "config.json") -> TransformerConfig:
    """`TransformerConfig` of a config.json.

    Raises:
      CheckpointError: an architecture that is not supported, or a required field is missing.
    """
    family = raw.get("model_type", "")
    if family not in DEFAULTS:
        raise CheckpointError(
            f"{where}: model_type must be one of {', '.join(sorted(DEFAULTS))}; got {family!r}"
        )
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method", "unknown")
        raise CheckpointError(
            f"{where}: quantised safetensors are not supported, got quant_method {method!r}; "
            "use the unquantised checkpoint or a GGUF file"
        )
    given = {k: v for k, v in raw.items() if v is not None or k in ("sliding_window",)}
    c = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False} | DEFAULTS[family] | given
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    required += ("num_attention_heads",)
    if missing := [name for name in required if name not in c]:
        raise CheckpointError(f"{where}: missing fields {', '.join(missing)}")

    count = int(c["num_hidden_layers"])
    context = int(c.get("max_position_embeddings", 2048))
    heads = int(c["num_attention_heads"])
    head_dim = int(c.get("head_dim") or c["hidden_size"] // heads)
    gemma = family.startswith("gemma")
    windows = _windows(family, c, count)
    ropes, rope_of_layer = _ropes(family, c, windows, context)
    parameters = c.get("rope_parameters") or {}
    partial = float(c.get("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0)))
    activation = c.get("hidden_activation", c.get("hidden_act", "silu"))
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{where}: activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}"
        )
    experts = int(c.get("num_experts", c.get("num_local_experts", 0)))
    if family != "qwen3_moe":
        experts = 0
    dense = set(c.get("mlp_only_layers") or ())
    step = int(c.get("decoder_sparse_step", 1))
    biased = bool(c.get("attention_bias", False)) and family in ("llama", "qwen3", "qwen3_moe")
    scalar = c.get("query_pre_attn_scalar")
    return TransformerConfig(
        family=family,
        vocab_size=int(c["vocab_size"]),
        hidden_size=int(c["hidden_size"]),
        mlp_size=int(c["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(c.get("num_key_value_heads", heads)),
        head_dim=head_dim,
        layers=tuple(
            LayerConfig(
                window=windows[i],
                rope=rope_of_layer[i],
                experts=experts > 0 and i not in dense and (i + 1) % step == 0,
            )
            for i in range(count)
        ),
        ropes=ropes,
        context_length=context,
        rotary_dim=int(head_dim * partial),
        norm_eps=float(c["rms_norm_eps"]),
        tied=bool(c["tie_word_embeddings"]),
        qkv_bias=biased or family == "qwen2",
        output_bias=biased,
        mlp_bias=family == "llama" and bool(c.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        post_norms=gemma,
        activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
        embedding_scale=float(c["hidden_size"]) ** 0.5 if gemma else 1.0,
        attention_scale=float(scalar) ** -0.5 if gemma and scalar else None,
        attention_softcap=c.get("attn_logit_softcapping") if family == "gemma2" else None,
        logit_softcap=c.get("final_logit_softcapping") if gemma else None,
        num_experts=experts,
        experts_per_token=int(c.get("num_experts_per_tok", 0)) if experts else 0,
        expert_size=int(c.get("moe_intermediate_size", 0)) if experts else 0,
        normalize_experts=bool(c.get("norm_topk_prob", False)),
    )


def _windows(family: str, c: dict[str, Any], count: int) -> list[int | None]:
    """Each layer's sliding window."""
    window = c.get("sliding_window")
    if window is None or c.get("use_sliding_window", True) is False:
        return [None] * count
    if types := c.get("layer_types"):
        sliding = [kind == "sliding_attention" for kind in types]
    elif family.startswith("gemma"):
        pattern = int(c.get("_sliding_window_pattern", c["sliding_window_pattern"]))
        sliding = [(i + 1) % pattern != 0 for i in range(count)]
    elif family.startswith("qwen"):
        sliding = [i >= int(c.get("max_window_layers", 28)) for i in range(count)]
    else:
        sliding = [True] * count
    if len(sliding) != count:
        raise CheckpointError(f"layer_types must name {count} layers, got {len(sliding)}")
    return [int(window) if s else None for s in sliding]


def _ropes(
    family: str, c: dict[str, Any], windows: list[int | None], context: int
) -> tuple[tuple[Rope, ...], list[int]]:
    """The distinct rotary embeddings and which of them each layer uses (Gemma 3: other ones in sliding layers)."""
    theta = float(c.get("rope_theta", 10000.0))
    fields = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if family != "gemma3_text":
        return (_rope(fields, theta, context),), [0] * len(windows)
    if "full_attention" in fields:
        full = _rope(fields["full_attention"], theta, context)
        local = _rope(fields["sliding_attention"], 10000.0, context)
    else:
        full = _rope(fields, theta, context)
        local = Rope(theta=float(c["rope_local_base_freq"]))
    return (full, local), [0 if window is None else 1 for window in windows]


class SafetensorsFolder:
    """The tensors of a folder's `*.safetensors`, of the index where there is one.

    Each read opens its shard anew: the pages of an open map would count as the process's memory until the end.
    """

    def __init__(self, folder: Path):
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [folder / name for name in names]
        else:
            files = sorted(folder.glob("*.safetensors"))
        if not files:
            if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
                raise CheckpointError(
                    f"{folder}: pickled weights can run code when opened and are refused. Convert them: "
                    "transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(out) writes safetensors"
                )
            raise CheckpointError(f"{folder}: expected *.safetensors, found none")
        self._file: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            try:
                with safe_open(path, framework="np") as file:
                    for name in file.keys():
                        self.shapes[name] = tuple(file.get_slice(name).get_shape())
                        self._file[name] = path
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path}: missing, truncated or not a safetensors file: {error}"
                ) from error

    def read(self, name: str) -> np.ndarray:
        with safe_open(self._file[name], framework="np") as file:
            return file.get_tensor(name)


def load_folder(folder: Path, dtype: jnp.dtype | None) -> Transformer:
    """A Hugging Face folder as a `Transformer`; dtype None keeps float32 on CPU and takes bfloat16 elsewhere."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise CheckpointError(f"{folder}: expected config.json, found none")
    try:
        raw = json.loads(config_file.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{config_file}: not valid JSON: {error}") from error
    config = parse_config(raw, str(config_file))
    return load_parameters(config, SafetensorsFolder(folder), dtype, str(folder))
