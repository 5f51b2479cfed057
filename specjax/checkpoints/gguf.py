"""GGUF files: configuration, weights (dequantised) and tokenizer data from one file.

llama.cpp's conventions are undone here, so that the rest of the loader sees Hugging Face's: tensor names, the order of the
rotated dimensions of q and k in Llama files, and Gemma's norm weights, which are stored with the 1 already added.
"""

from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.huggingface import parse_config
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
GEMMA_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


class GGUFFile:
    """Tensors of a GGUF file under Hugging Face's names, and its metadata.

    Raises:
      CheckpointError: damaged file, unsupported architecture or quantisation.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
            self.metadata = {
                name: field.contents()
                for name, field in reader.fields.items()
                if not name.startswith("GGUF.")
            }
        except (ValueError, KeyError, IndexError, OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: truncated or not a GGUF file: {error}") from error
        self.architecture = self.metadata.get("general.architecture")
        if self.architecture not in FAMILIES:
            raise CheckpointError(
                f"{path}: architecture must be one of {', '.join(FAMILIES)}; got {self.architecture!r}"
            )
        self.gemma = self.architecture.startswith("gemma")
        self._tensors: dict[str, tuple[Any, int | None]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.rope_factors: tuple[float, ...] = ()
        unsupported = []
        for tensor in reader.tensors:
            if tensor.tensor_type.name not in QUANTISATIONS:
                unsupported.append(f"{tensor.name} is {tensor.tensor_type.name}")
                continue
            self._register(tensor)
        if unsupported:
            raise CheckpointError(
                f"{path}: tensor types must be among {', '.join(QUANTISATIONS)}; "
                f"{len(unsupported)} are not, the first: {unsupported[0]}"
            )

    def _register(self, tensor: Any) -> None:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if tensor.name == "rope_freqs.weight":
            self.rope_factors = tuple(float(x) for x in _dequantise(tensor))
            return
        pieces = tensor.name.split(".")
        if pieces[0] == "blk" and len(pieces) == 4:
            table = LAYER | GEMMA_LAYER if self.gemma else LAYER
            layer, kind, suffix = f"model.layers.{pieces[1]}", pieces[2], pieces[3]
            if kind in EXPERTS:
                for e in range(shape[0]):
                    name = f"{layer}.mlp.experts.{e}.{EXPERTS[kind]}.{suffix}"
                    self._tensors[name], self.shapes[name] = (tensor, e), shape[1:]
                return
            name = f"{layer}.{table[kind]}.{suffix}" if kind in table else tensor.name
            if self.architecture == "phi3" and kind == "ffn_up":
                name = f"{layer}.mlp.gate_up_proj.{suffix}"
        elif pieces[0] in GLOBAL and len(pieces) == 2:
            name = f"{GLOBAL[pieces[0]]}.{pieces[1]}"
        else:
            name = tensor.name
        self._tensors[name], self.shapes[name] = (tensor, None), shape

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32 (or as stored, for F32 and F16), in Hugging Face's order."""
        tensor, expert = self._tensors[name]
        array = _dequantise(tensor, expert)
        if self.architecture == "llama" and ".self_attn." in name and ("q_proj" in name or "k_proj" in name):
            heads = self._field("attention.head_count" if "q_proj" in name else "attention.head_count_kv")
            # llama.cpp pairs dimensions (2i, 2i + 1), Hugging Face (i, i + half)
            array = array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if self.gemma and name.endswith("norm.weight"):
            array = array - np.float32(1)
        return array

    def _field(self, name: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise CheckpointError(f"{self.path}: missing metadata {self.architecture}.{name}")
        return value

    def config(self) -> TransformerConfig:
        """The configuration that the metadata describes."""
        get = self._field
        heads = get("attention.head_count")
        raw = {
            "model_type": FAMILIES[self.architecture],
            "vocab_size": self.shapes.get("model.embed_tokens.weight", (0,))[0],
            "hidden_size": get("embedding_length"),
            "intermediate_size": get("feed_forward_length"),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": get("attention.key_length", get("embedding_length") // heads),
            "max_position_embeddings": get("context_length"),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "rope_theta": get("rope.freq_base", 10000.0),
        }
        optional = {
            "sliding_window": "attention.sliding_window",
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        }
        for theirs, ours in optional.items():
            value = self.metadata.get(f"{self.architecture}.{ours}")
            if value is not None:
                raw[theirs] = value
        if self.architecture == "qwen3moe":
            raw["norm_topk_prob"] = True  # llama.cpp always normalises this architecture's router
        if self.architecture == "llama" and "model.layers.0.self_attn.q_proj.bias" in self.shapes:
            raw["attention_bias"] = True
        if self.gemma:
            # llama.cpp scales by head_dim ** -0.5, but for the 27B models, whose query scalar is width / heads
            wide = raw["num_hidden_layers"] in (46, 62)
            raw["query_pre_attn_scalar"] = raw["hidden_size"] // heads if wide else raw["head_dim"]
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind != "none":
            original = self.metadata.get(f"{self.architecture}.rope.scaling.original_context_length")
            raw["rope_scaling"] = {
                "rope_type": kind,
                "factor": get("rope.scaling.factor", 1.0),
                "original_max_position_embeddings": original,
            }
        config = parse_config(raw, str(self.path))
        if self.rope_factors:
            rope = Rope(theta=raw["rope_theta"], kind="factors", factors=self.rope_factors)
            config = _with_ropes(config, (rope, *config.ropes[1:]))
        return config


def _with_ropes(config: TransformerConfig, ropes: tuple[Rope, ...]) -> TransformerConfig:
    import dataclasses

    return dataclasses.replace(config, ropes=ropes)


def _dequantise(tensor: Any, expert: int | None = None) -> np.ndarray:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    data = tensor.data if expert is None else tensor.data[expert]
    shape = shape if expert is None else shape[1:]
    kind = tensor.tensor_type.name
    if kind in ("F32", "F16"):
        return np.asarray(data).reshape(shape)
    return gguf.dequantize(data, tensor.tensor_type).reshape(shape)


def load_file(path: Path, dtype: jnp.dtype) -> Transformer:
    """A .gguf file as a `Transformer`."""
    file = GGUFFile(path)
    return load_parameters(file.config(), file, dtype, str(path))
