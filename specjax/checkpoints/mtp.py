"""MTP modules in, under the names of DeepSeek and GLM, Qwen3.5, MiMo and speculators.

Most lie in their target's own files, whose other tensors are passed over.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from specjax.checkpoints.huggingface import parse_config
from specjax.checkpoints.parts import EVERYTHING, Part, Parts, layer_parts, norm_part
from specjax.checkpoints.safetensors_folder import SafetensorsFolder
from specjax.checkpoints.weights import CheckpointError
from specjax.models.config import LayerConfig
from specjax.models.mtp import MTPConfig

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


@dataclass(frozen=True)
class Dialect:
    """How one family of files calls the tensors of a module.

    Attributes:
      prefix: of the module's tensors; `{layers}` is the target's number of layers.
      names: theirs, without the prefix, to DeepSeek's.
      layer: prefix of the decoder layer's tensors, after `prefix`.
      own_rows: the module's files repeat the target's embedding and vocabulary rows under `prefix`.
      alone: the file holds nothing but the module; else it lies among its target's tensors.
      hidden_first, zero_first: see `MTPConfig`.
      norm_offset: see `TransformerConfig`; None takes the target's.
    """

    prefix: str
    names: Mapping[str, str]
    layer: str = ""
    own_rows: bool = False
    alone: bool = False
    hidden_first: bool = False
    zero_first: bool = False
    norm_offset: float | None = None


SPOKEN = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "norm",
}
DIALECTS = {
    "deepseek": Dialect(
        "model.layers.{layers}.",
        {
            "shared_head.norm": "norm",
            "shared_head.head": "lm_head",
            "embed_tokens": "embed_tokens",
            "enorm": "enorm",
            "hnorm": "hnorm",
            "eh_proj": "eh_proj",
        },
        own_rows=True,
        zero_first=True,
    ),
    "qwen": Dialect(
        "mtp.",
        {
            "pre_fc_norm_embedding": "enorm",
            "pre_fc_norm_hidden": "hnorm",
            "fc": "eh_proj",
            "norm": "norm",
        },
        layer="layers.0.",
        norm_offset=1.0,
    ),
    "mimo": Dialect("model.mtp_layers.0.", SPOKEN, hidden_first=True, zero_first=True),
    "speculators": Dialect("mtp_layers.0.", SPOKEN, alone=True),
}


def mtp_dialect(raw: dict[str, Any]) -> str | None:
    """Which names a config.json announces; None where it announces no MTP module."""
    text = raw.get("text_config") or {}
    family = raw.get("model_type")
    if raw.get("speculators_model_type") == "mtp":
        return "speculators"
    if family in QWEN:
        return "qwen"
    if family == "mimo":
        return "mimo"
    return "deepseek" if any(raw.get(n) or text.get(n) for n in COUNTS) else None


def parse_mtp_config(
    raw: dict[str, Any], dialect: str, where: str = "config.json"
) -> tuple[MTPConfig, int]:
    """A config.json that announces an MTP module, the target's own or one written by `save_head`.

    Returns:
      the module's config, and the target's number of layers.

    Raises:
      CheckpointError: more than one module, or a decoder layer that is not supported.
    """
    spoken, nested = DIALECTS[dialect], raw.get("transformer_layer_config")
    fields = dict(nested) if isinstance(nested, dict) else dict(raw)
    fields |= fields.get("text_config") or {}
    counts = {name: (raw | fields)[name] for name in COUNTS if (raw | fields).get(name)}
    if any(count != 1 for count in counts.values()):
        raise CheckpointError(f"{where}: one MTP module is supported, got {counts}")
    layers = int(fields.get("num_hidden_layers") or 0)
    depth = int(raw.get("num_target_layers") or layers)
    if dialect == "qwen":
        fields = _qwen_fields(fields)
    elif fields.get("model_type") in QWEN:
        raise CheckpointError(
            f"{where}: layers of {fields['model_type']} are read from the target's own files (mtp.*), not from {dialect}'s"
        )
    base = parse_config({**fields, "quantization_config": None}, where)
    last = LayerConfig(rope=base.layers[-1].rope, experts=base.layers[-1].experts)
    if dialect != "qwen" and not isinstance(nested, dict):
        last = base.layers[-1]  # of the target's own kind, its window too
    if base.router is not None:
        last = replace(last, experts=True)  # however few of the target's layers are mixtures
    shared = fields.get("shared_expert_intermediate_size") if dialect == "qwen" else None
    if shared:
        base = replace(base, shared_expert_size=int(shared), shared_expert_gate=True)
    offset = spoken.norm_offset
    try:
        decoder = replace(
            base,
            layers=(last,),
            tied=False,
            output_gate=dialect == "qwen" and bool(fields.get("attn_output_gate")),
            norm_offset=base.norm_offset if offset is None else offset,
        )
        config = MTPConfig(
            decoder=decoder,
            target_hidden_size=base.hidden_size,
            draft_vocab_size=int(raw.get("draft_vocab_size") or base.vocab_size),
            taps=(depth,),
            own_embedding=bool(raw.get("own_embedding")),
            trained_depth=raw.get("num_depths"),
            hidden_first=spoken.hidden_first,
            post_norm=raw.get("mtp_hidden", "post_norm") == "post_norm",
            zero_first=bool(raw.get("mtp_zero_first", spoken.zero_first)),
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    if raw.get("mtp_hidden", "post_norm") not in ("post_norm", "pre_norm"):
        raise CheckpointError(
            f"{where}: mtp_hidden must be post_norm or pre_norm, got {raw['mtp_hidden']!r}"
        )
    return config, depth


def _qwen_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The full-attention layer of Qwen3-Next and Qwen3.5 as Qwen3's. Their other layers are of no concern here, and the three
    axes of Qwen3.5's rotary positions are one in text."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    sparse = bool(fields.get("num_experts"))
    return {
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
        "intermediate_size": fields.get(
            "moe_intermediate_size"
        ),  # Qwen3.5's mixtures name no other
        **fields,
        "model_type": "qwen3_moe" if sparse else "qwen3",
        "mlp_only_layers": None,
        "decoder_sparse_step": 1,
        "layer_types": None,
        "rope_scaling": None,
        "rope_parameters": {k: v for k, v in rope.items() if not k.startswith("mrope_")},
        "attn_output_gate": fields.get("attn_output_gate", True),
    }


class FusedExperts:
    """A file whose experts are stacked, `gate_up_proj` [E, 2 F, D] and `down_proj` [E, D, F] (Qwen3.5), read as tensors of one
    expert each."""

    def __init__(self, file: SafetensorsFolder):
        self._file, self._places = file, {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in file.shapes.items():
            stem, _, stack = name.rpartition(".experts.")
            which = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(stack, ())
            if not which or len(shape) != 3:
                self.shapes[name] = shape
                continue
            rows = shape[1] // len(which)
            for expert, (i, part) in product(range(shape[0]), enumerate(which)):
                one = f"{stem}.experts.{expert}.{part}_proj.weight"
                self.shapes[one] = (rows, shape[2])
                self._places[one] = (name, expert, i * rows)

    def read(self, name: str, rows: slice = EVERYTHING) -> np.ndarray:
        """Some rows of a tensor."""
        if name not in self._places:
            return self._file.read(name, rows)
        stack, expert, first = self._places[name]
        start, stop, _ = rows.indices(self.shapes[name][0])
        one = (slice(expert, expert + 1), slice(first + start, first + stop))
        return self._file.read(stack, one)[0]


def mtp_renamer(dialect: str, layers: int) -> Callable[[str], str | None]:
    """From the names in a file to DeepSeek's without prefix; None for tensors that are no part of the module."""
    spoken = DIALECTS[dialect]
    prefix = spoken.prefix.format(layers=layers)
    modules = prefix.removesuffix("0.") if prefix.endswith("mtp_layers.0.") else prefix
    trunk = {"model.norm.weight": "target_norm.weight"}
    trunk["model.language_model.norm.weight"] = "target_norm.weight"
    if not spoken.own_rows:
        trunk |= {
            "lm_head.weight": "lm_head.weight",
            "model.embed_tokens.weight": "embed_tokens.weight",
            "embed_tokens.weight": "embed_tokens.weight",
            "model.language_model.embed_tokens.weight": "embed_tokens.weight",
        }

    def rename(name: str) -> str | None:
        if name in ("d2t", "t2d"):
            return name
        if not name.startswith(prefix):
            stray = spoken.alone or name.startswith(modules)  # of a second module
            return trunk.get(name, f"unknown: {name}" if stray else None)
        rest = name.removeprefix(prefix)
        stem, _, kind = rest.rpartition(".")
        if stem in spoken.names:
            return f"{spoken.names[stem]}.{kind}"
        inside = rest.startswith(spoken.layer)
        return f"layers.0.{rest.removeprefix(spoken.layer)}" if inside else f"unknown: {name}"

    return rename


def mtp_parts(config: MTPConfig) -> Parts:
    """For each parameter of an `MTPHead`, the tensors that make it up, in `mtp_renamer`'s names."""
    decoder = config.decoder
    width = decoder.hidden_size
    parts: Parts = {
        "projection": [Part("eh_proj.weight", (width, 2 * width), (), True)],
        "embedding_norm.weight": norm_part(decoder, "enorm"),
        "hidden_norm.weight": norm_part(decoder, "hnorm"),
        "readout.norm.weight": norm_part(decoder, "norm"),
        "readout.head": [Part("lm_head.weight", (config.draft_vocab_size, width), (), True)],
    }
    if config.own_embedding:
        parts["embedding"] = [Part("embed_tokens.weight", (decoder.vocab_size, width))]
    if config.post_norm:
        parts["target_norm.weight"] = norm_part(decoder, "target_norm")
    for i, layer in enumerate(decoder.layers):
        parts |= dict(layer_parts(decoder, layer, f"layers[{i}]", f"layers.{i}"))
    return parts


def file_names(dialect: str, layers: int) -> Callable[[str], str]:
    """`mtp_renamer` backwards, for messages and for files that hold a module alone."""
    spoken = DIALECTS[dialect]
    prefix = spoken.prefix.format(layers=layers)
    back = {ours: theirs for theirs, ours in spoken.names.items()}

    def name(ours: str) -> str:
        if ours == "target_norm.weight":
            return "model.norm.weight"
        stem, _, kind = ours.rpartition(".")
        if stem in back:
            return f"{prefix}{back[stem]}.{kind}"
        if ours.startswith("layers.0."):
            return f"{prefix}{spoken.layer}{ours.removeprefix('layers.0.')}"
        return {"embed_tokens.weight": "model.embed_tokens.weight"}.get(ours, ours)

    return name
