"""GGUF files: configuration and weights (dequantised) from one file.

llama.cpp's conventions are undone here, so that the rest of the loader sees Hugging Face's: tensor
names, the order of the rotated dimensions of q and k in Llama files, experts stacked in one tensor,
and Gemma's norm weights, which are stored with the 1 already added.
"""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.gguf_header import Tensor, read_header
from specjax.checkpoints.huggingface import parse_config
from specjax.checkpoints.parts import EVERYTHING
from specjax.checkpoints.weights import CheckpointError, load_parameters
from specjax.models.config import Rope, TransformerConfig
from specjax.models.transformer import Transformer

FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
GEMMA_LAYER = LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI3_LAYER = LAYER | {"ffn_up": "mlp.gate_up_proj"}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
REQUIRED = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
# llama.cpp scales queries by head_dim ** -0.5, except in 27B models, which it tells by their layers
WIDE_QUERY_LAYERS = {"gemma2": 46, "gemma3": 62}


class GGUFFile:
    """Tensors of a GGUF file under Hugging Face's names, and its configuration.

    Raises:
      CheckpointError: damaged file, unsupported architecture or quantisation.
    """

    def __init__(self, path: Path):
        self.path = path
        metadata, tensors = read_header(path)
        self._metadata = {k: v for k, v in metadata.items() if not k.startswith("tokenizer.")}
        if self._metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{path}: one of {self._metadata['split.count']} pieces of a model; "
                "join them with `llama-gguf-split --merge` first"
            )
        self.architecture: str = self._metadata.get("general.architecture", "")
        if self.architecture not in FAMILIES:
            raise CheckpointError(
                f"{path}: general.architecture must be one of {', '.join(FAMILIES)}; "
                f"got {self.architecture!r}"
            )
        if unsupported := [
            f"{name} is {tensor.kind.name}"
            for name, tensor in tensors.items()
            if tensor.kind.name not in QUANTISATIONS
        ]:
            raise CheckpointError(
                f"{path}: tensor types must be among {', '.join(QUANTISATIONS)}; "
                f"{len(unsupported)} of {len(tensors)} are not: {', '.join(unsupported[:40])}"
            )
        self._gemma = self.architecture.startswith("gemma")
        self._rope_factors = tensors.pop("rope_freqs.weight", None)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._place: dict[str, tuple[Tensor, int]] = {}  # the tensor, and the first of its rows
        for name, tensor in tensors.items():
            self._register(name, tensor)

    def _register(self, name: str, tensor: Tensor) -> None:
        """Notes a tensor under Hugging Face's name; one without keeps its own, to be unknown."""
        match name.split("."):
            case ["blk", layer, kind, _] if kind in EXPERTS and len(tensor.shape) == 3:
                experts, rows, _ = tensor.shape
                for e in range(experts):
                    theirs = f"model.layers.{layer}.mlp.experts.{e}.{EXPERTS[kind]}.weight"
                    self._place[theirs], self.shapes[theirs] = (tensor, e * rows), tensor.shape[1:]
                return
            case ["blk", layer, kind, suffix]:
                table = GEMMA_LAYER if self._gemma else LAYER
                table = PHI3_LAYER if self.architecture == "phi3" else table
                if kind in table:
                    name = f"model.layers.{layer}.{table[kind]}.{suffix}"
            case [kind, suffix] if kind in GLOBAL:
                name = f"{GLOBAL[kind]}.{suffix}"
        self._place[name], self.shapes[name] = (tensor, 0), tensor.shape

    def read(self, name: str, rows: slice = EVERYTHING) -> np.ndarray:
        """Rows of a tensor as float32 (or as stored, for F16), in Hugging Face's order."""
        tensor, first = self._place[name]
        start, stop, _ = rows.indices(self.shapes[name][0])
        if self.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            # llama.cpp pairs a head's rotated rows (2i, 2i + 1), Hugging Face (i, i + half)
            size = self._head_dim()
            low, high = start // size * size, -(-stop // size) * size
            array = self._load(tensor, low, high)
            array = array.reshape(-1, size // 2, 2, *array.shape[1:]).swapaxes(1, 2)
            return array.reshape(-1, *array.shape[3:])[start - low : stop - low]
        array = self._load(tensor, first + start, first + stop)
        if self._gemma and name.endswith("norm.weight"):
            return array - np.float32(1)
        return array

    def _load(self, tensor: Tensor, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of a matrix or of stacked ones, or those entries of a vector."""
        vector = len(tensor.shape) == 1
        rows = 1 if vector else stop - start
        with self.path.open("rb") as file:
            file.seek(tensor.start + (0 if vector else start * tensor.row_bytes))
            data = np.frombuffer(file.read(rows * tensor.row_bytes), np.uint8).reshape(rows, -1)
        as_stored = {"F32": "<f4", "F16": "<f2"}.get(tensor.kind.name)
        array = data.view(as_stored) if as_stored else gguf.dequantize(data, tensor.kind)
        return array[0, start:stop] if vector else array

    def _number(self, name: str, default: float | None = None) -> Any:
        """A number of the architecture's metadata; lists with one value per layer must agree."""
        value = self._metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int | float):
            raise CheckpointError(
                f"{self.path}: metadata {self.architecture}.{name} must be one number for all "
                f"layers, got {'none' if value is None else repr(value)[:80]}"
            )
        return value

    def _head_dim(self) -> int:
        heads = max(1, self._number("attention.head_count"))
        return self._number("attention.key_length", self._number("embedding_length") // heads)

    def config(self) -> TransformerConfig:
        """The configuration that the metadata describes."""
        number = self._number
        if missing := [n for n in REQUIRED if f"{self.architecture}.{n}" not in self._metadata]:
            names = ", ".join(f"{self.architecture}.{name}" for name in missing)
            raise CheckpointError(f"{self.path}: missing metadata {names}")
        layers, heads = number("block_count"), number("attention.head_count")
        width, head_dim = number("embedding_length"), self._head_dim()
        raw: dict[str, Any] = {
            "model_type": FAMILIES[self.architecture],
            "vocab_size": self.shapes.get("model.embed_tokens.weight", (1,))[0],
            "hidden_size": width,
            "intermediate_size": number("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": number("context_length"),
            "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.shapes,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self.shapes,
            "use_bidirectional_attention": not number("attention.causal", True),
            "rope_theta": number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
        }
        if self._gemma:
            raw |= self._gemma_fields(layers, width // max(heads, 1), head_dim)
        elif self.architecture == "phi3":
            raw["sliding_window"] = number("attention.sliding_window", 0) or None
        if self.architecture == "qwen3moe":
            raw |= {
                "num_experts": number("expert_count"),
                "num_experts_per_tok": number("expert_used_count"),
                "moe_intermediate_size": number("expert_feed_forward_length"),
                "norm_topk_prob": True,  # llama.cpp always does for this architecture
            }
        elif experts := number("expert_count", 0):
            raise CheckpointError(
                f"{self.path}: mixtures of experts are supported for qwen3moe, "
                f"got {experts} experts in {self.architecture}"
            )
        rotary = number("rope.dimension_count", head_dim)
        if rotary % 2 or rotary > head_dim or (rotary != head_dim and self.architecture == "llama"):
            raise CheckpointError(
                f"{self.path}: metadata {self.architecture}.rope.dimension_count must be even and "
                f"fit the head's {head_dim} dimensions (of llama: be equal), got {rotary}"
            )
        config = parse_config(raw, str(self.path))
        return dataclasses.replace(
            config,
            rotary_dim=None if rotary == config.head_dim else rotary,
            ropes=self._ropes(config, rotary),
        )

    def _gemma_fields(self, layers: int, head_width: int, head_dim: int) -> dict[str, Any]:
        wide = layers == WIDE_QUERY_LAYERS[self.architecture]
        fields: dict[str, Any] = {"query_pre_attn_scalar": head_width if wide else head_dim}
        silent = 4096 if self.architecture == "gemma2" else 0
        fields["sliding_window"] = self._number("attention.sliding_window", silent) or None
        optional = {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            "rope_local_base_freq": "rope.freq_base_swa",
        }
        for theirs, ours in optional.items():
            if f"{self.architecture}.{ours}" in self._metadata:
                fields[theirs] = self._number(ours)
        pattern = self._metadata.get(f"{self.architecture}.attention.sliding_window_pattern")
        if isinstance(pattern, list):  # whether each layer slides
            kinds = ("full_attention", "sliding_attention")
            fields["layer_types"] = [kinds[bool(slides)] for slides in pattern]
        elif pattern is not None:
            fields["sliding_window_pattern"] = pattern
        return fields

    def _rope_scaling(self) -> dict[str, Any] | None:
        """The `rope.scaling` metadata in Hugging Face's spelling."""
        prefix = f"{self.architecture}.rope.scaling."
        given = {
            name.removeprefix(prefix): value
            for name, value in self._metadata.items()
            if name.startswith(prefix)
        }
        factor = given.pop("factor", None) or self._number("rope.scale_linear", 0)
        kind = given.pop("type", "linear")
        given.pop("finetuned", None)  # says how the model was made, not what it computes
        neutral = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0}
        given = {name: value for name, value in given.items() if value != neutral.get(name)}
        if kind == "none" or (kind == "linear" and factor in (0, 1)):
            return None
        names = {
            "original_context_length": "original_max_position_embeddings",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        }
        if unknown := given.keys() - names.keys():
            raise CheckpointError(
                f"{self.path}: metadata not supported: "
                + ", ".join(f"{prefix}{name} = {given[name]}" for name in sorted(unknown))
            )
        fields = {names[name]: value for name, value in given.items()}
        return {"rope_type": kind, "factor": factor} | fields

    def _ropes(self, config: TransformerConfig, rotary: int) -> tuple[Rope, ...]:
        """The configuration's, with Llama 3's divisor per frequency where the file has them."""
        if self._rope_factors is None:
            return config.ropes
        tensor, rope = self._rope_factors, config.ropes[0]
        if tensor.shape != (rotary // 2,) or rope.kind != "default":
            raise CheckpointError(
                f"{self.path}: tensor rope_freqs.weight: expected shape {(rotary // 2,)} and no "
                f"other scaling, got {tensor.shape} and rope type {rope.kind}"
            )
        factors = self._load(tensor, 0, rotary // 2)
        scaled = Rope(theta=rope.theta, kind="factors", factors=tuple(float(x) for x in factors))
        return (scaled, *config.ropes[1:])


def load_file(path: Path, dtype: jnp.dtype) -> Transformer:
    """A .gguf file as a `Transformer`.

    Raises:
      CheckpointError: see `GGUFFile` and `load_parameters`.
    """
    file = GGUFFile(path)
    return load_parameters(file.config(), file, dtype, str(path))
