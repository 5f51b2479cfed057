"""Heads out, in layouts that vLLM, SGLang, TensorRT-LLM and speculators load."""

import json
import os
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from specjax.checkpoints.eagle import head_parts
from specjax.checkpoints.mtp import file_names, mtp_parts
from specjax.checkpoints.parts import Part
from specjax.models.config import Rope, TransformerConfig
from specjax.models.eagle import EagleConfig
from specjax.models.heads import Head
from specjax.models.mtp import MTPConfig
from specjax.models.transformer import Transformer

Layout = Literal["sglang", "speculators", "deepseek"]


def save_head(
    head: Head,
    path: str | os.PathLike,
    layout: Layout | None = None,
    *,
    target: Any = None,
    verifier: str | None = None,
    dtype: Any = None,
    num_draft: int | None = None,
    share_rows: bool = False,
) -> None:
    """Writes a head's folder: model.safetensors and config.json.

    Args:
      head: to be written.
      path: folder, made if need be; a head that lies there is replaced.
      layout: `sglang` is what SafeAILab, SpecForge, SGLang, vLLM, TensorRT-LLM and the TPU servers load of heads of one
        layer; only vLLM reads more layers (SGLang and TensorRT-LLM look for other names in them), norm_before_residual,
        q/k norms and biases of it. `speculators` is read by
        speculators and vLLM. `deepseek` is an MTP module's: the names under which modules lie in their target's files, for
        a target of this layout to take in. None is `deepseek` for MTP modules and `sglang` for others.
      target: the model it drafts for; its embedding goes into speculators' layout.
      verifier: name or hub id of the target, from which `vllm serve` can then start with speculators' layout alone.
      dtype: of all that is written but a router's correction, which stays float32; None keeps the head's own (norms are float32), so that reading it again gives the
        same head.
      num_draft: the number of drafted tokens that speculators' layout proposes to servers; None is 7 of P-EAGLE's and 3 of
        others, or what they were trained for if that is less.
      share_rows: leave out the vocabulary's rows, which must be `target`'s own: half of a small head. `load_head` takes
        them from the target again; servers want them in the file.

    Raises:
      ValueError: an unknown layout, or one that the head has none of; rows that are not the target's.
    """
    module = isinstance(head.config, MTPConfig)
    layout = layout or ("deepseek" if module else "sglang")
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}; got {layout!r}")
    if module != (layout == "deepseek"):
        kind = "an MTP module" if module else type(head).__name__
        raise ValueError(f"layout {layout!r} is not one of {kind}; got {kind}")
    decoder = head.config.decoder
    if module and (decoder.output_gate or decoder.shared_expert_gate or decoder.norm_offset):
        raise ValueError(
            "layout 'deepseek' has no layers with an output gate, a gated shared expert or norms of 1 + weight, as modules of "
            "Qwen3-Next and Qwen3.5 have: their own files are the way to keep them"
        )
    if decoder.router is not None and decoder.shared_expert_size % decoder.expert_size:
        raise ValueError(
            "layout 'deepseek' counts shared experts of the others' width "
            f"{decoder.expert_size}, got one of {decoder.shared_expert_size}"
        )
    tensors = _tensors(head, None if dtype is None else jnp.dtype(dtype))
    if share_rows:
        if not _has_rows_of(head, target, dtype or head.dtype):
            raise ValueError(
                "share_rows: the head's rows of the vocabulary must be its target's, got others"
            )
        del tensors["lm_head.weight"]
    dtype = jnp.dtype(head.dtype if dtype is None else dtype)
    if isinstance(head.config, MTPConfig):
        config = _mtp_config(head.config)
        name = file_names("deepseek", head.config.taps[0])
        tensors = {name(ours): x for ours, x in tensors.items()}
    elif layout == "speculators":
        usual = 3 if head.config.mask_token_id is None else 7
        usual = min(usual, head.config.trained_depth or usual)
        config = _speculators_config(
            head.config, target, verifier, usual if num_draft is None else num_draft
        )
        if isinstance(target, Transformer) and head.embedding is None:
            every = jnp.arange(target.vocab_size)[None]
            tensors["embed_tokens.weight"] = np.asarray(target.lookup(every)[0].astype(dtype))
    else:
        config = _flat_config(head.config)
        tensors = {name.replace("layers.0.", "midlayer.", 1): x for name, x in tensors.items()}
    if share_rows:
        config["target_name"] = verifier
    name = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}[dtype.name]
    config["torch_dtype"] = config["dtype"] = name
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    # both are complete before a head that lies here is replaced
    files = {name: folder / f"{name}.partial" for name in ("model.safetensors", "config.json")}
    try:
        save_file(tensors, files["model.safetensors"], metadata={"format": "pt"})
        files["config.json"].write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name, partial in files.items():
            partial.replace(folder / name)
    except SafetensorError as error:
        raise OSError(f"{folder}: the head could not be written: {error}") from error
    finally:
        for partial in files.values():
            partial.unlink(missing_ok=True)


def _has_rows_of(head: Head, target: Any, dtype: Any) -> bool:
    """Whether they are the same as far as the written type tells."""
    if not isinstance(target, Transformer):
        return False
    ids = head.target_ids
    rows = target.head[...] if ids is None else target.head[...][:, ids]
    return bool(jnp.array_equal(rows.astype(dtype), head.readout.head[...].astype(dtype)))


def _tensors(head: Head, dtype: np.dtype | None) -> dict[str, np.ndarray]:
    """Every tensor in the loader's names, [out, in] as torch has them."""
    config = head.config
    parts = mtp_parts(config) if isinstance(config, MTPConfig) else head_parts(config)
    leaves = jax.tree_util.tree_flatten_with_path(head)[0]
    found = {
        jax.tree_util.keystr(path).removeprefix(".").removesuffix(".value"): leaf
        for path, leaf in leaves
    }
    tensors = {
        part.name: _read(np.asarray(found[name]), part, dtype)
        for name, pieces in parts.items()
        for part in pieces
    }
    size, vocab = config.draft_vocab_size, config.decoder.vocab_size
    ids = np.arange(size) if head.target_ids is None else np.asarray(head.target_ids, np.int64)
    if isinstance(config, MTPConfig) and config.hidden_first:
        # the layout's order, which is the same function: the embedding first
        hidden, embedded = np.split(tensors["eh_proj.weight"], 2, axis=1)
        tensors["eh_proj.weight"] = np.concatenate([embedded, hidden], axis=1)
    tensors["d2t"] = (ids - np.arange(size)).astype(np.int64)
    tensors["t2d"] = np.zeros(vocab, bool)
    tensors["t2d"][ids] = True
    return tensors


def _read(parameter: np.ndarray, part: Part, dtype: np.dtype | None) -> np.ndarray:
    """One tensor of the file out of the parameter that holds it: what `weights` does, backwards."""
    view = parameter[part.index or ...]
    if part.columns:
        view = view.reshape(view.shape[0], -1).T
    if part.add:
        view = view - np.float32(part.add)
    view = np.ascontiguousarray(view.reshape(part.shape))
    # a router's correction lies on a large offset: rounded, it would choose other experts
    kept = dtype is None or part.name.endswith("e_score_correction_bias")
    return view if kept else view.astype(dtype)


def rope_fields(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, as config.json has them.

    Raises:
      ValueError: a rope that only GGUF files can express.
    """
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind == "factors":
        raise ValueError("a rope of kind 'factors' has no counterpart in config.json")
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_length,
        }
    if rope.kind == "yarn":
        scaling |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "original_max_position_embeddings": rope.original_length,
            "truncate": rope.truncate,
        }
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
        both = {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
        scaling |= {name: value for name, value in both.items() if value}
    plain = rope.kind == "default"
    return {"rope_theta": rope.theta, "rope_scaling": None if plain else scaling}


def _decoder_fields(decoder: TransformerConfig) -> dict[str, Any]:
    windows = [layer.window for layer in decoder.layers]
    fields: dict[str, Any] = {
        "model_type": "qwen3" if decoder.qk_norm else "llama",
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.mlp_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu" if decoder.activation == "silu" else "gelu_pytorch_tanh",
        "rms_norm_eps": decoder.norm_eps,
        **rope_fields(decoder.ropes[0]),
        "max_position_embeddings": decoder.context_length,
        "vocab_size": decoder.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": decoder.qkv_bias,
        "mlp_bias": decoder.mlp_bias,
    }
    latent, router = decoder.latent, decoder.router
    if latent is not None:
        fields |= {
            "head_dim": None,
            "kv_lora_rank": latent.rank,
            "qk_nope_head_dim": latent.content_dim,
            "qk_rope_head_dim": decoder.rotary,
            "v_head_dim": latent.value_dim,
            "rope_interleave": latent.interleaved,
        }
    elif (
        decoder.rotary != decoder.head_dim or decoder.family == "glm4_moe"
    ):  # silent, GLM means 0.5
        fields["partial_rotary_factor"] = decoder.rotary / decoder.head_dim
    if decoder.num_experts:
        fields |= {
            "num_experts": decoder.num_experts,
            "num_experts_per_tok": decoder.experts_per_token,
            "moe_intermediate_size": decoder.expert_size,
            "norm_topk_prob": decoder.normalize_experts,
        }
        if router is None:
            fields["decoder_sparse_step"] = 1
        else:
            fields |= {
                "num_experts": None,
                "n_routed_experts": decoder.num_experts,
                "n_group": router.groups,
                "topk_group": router.kept,
                "routed_scaling_factor": decoder.expert_factor,
                "n_shared_experts": decoder.shared_expert_size // decoder.expert_size,
                "first_k_dense_replace": 0,
                "use_qk_norm": decoder.qk_norm,
            }
    if any(windows):
        fields["sliding_window"] = next(w for w in windows if w)
        fields["layer_types"] = [
            "full_attention" if w is None else "sliding_attention" for w in windows
        ]
    return fields


def _switches(config: EagleConfig) -> dict[str, Any]:
    same = config.target_hidden_size == config.decoder.hidden_size
    masks = {}
    if config.mask_token_id is not None:  # by the names that engines and trainers look for
        masks = {
            "mask_token_id": config.mask_token_id,
            "ptd_token_id": config.mask_token_id,
            "parallel_drafting": True,
            "markov_rank": config.markov_rank or None,
        }
    return {
        **masks,
        "num_depths": config.trained_depth,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": None if same else config.target_hidden_size,
        # as vLLM and speculators count: the layers entered
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
    }


def _mtp_config(config: MTPConfig) -> dict[str, Any]:
    """As a target with one module has it, and what a module alone must say besides."""
    decoder, layers = config.decoder, config.taps[0]
    kinds = _decoder_fields(decoder).get("layer_types")
    fields = {
        **_decoder_fields(decoder),
        "model_type": decoder.family,
        "num_hidden_layers": layers,
        "layer_types": kinds and kinds * layers,
        "use_sliding_window": bool(kinds) or None,
        "num_nextn_predict_layers": 1,
        "draft_vocab_size": config.draft_vocab_size,
        "num_depths": config.trained_depth,
        "own_embedding": config.own_embedding,
        "mtp_hidden": "post_norm" if config.post_norm else "pre_norm",
        "mtp_zero_first": config.zero_first,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if decoder.latent is not None:  # null says that queries are not compressed
        fields["q_lora_rank"] = decoder.latent.query_rank
    return fields


def _flat_config(config: EagleConfig) -> dict[str, Any]:
    fields = {
        **_decoder_fields(config.decoder),
        **_switches(config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_aux_hidden_states": len(config.taps),
        "eagle_config": {
            # as SGLang reads it: ids that begin with 1 are the layers left, others the layers entered. (SpecForge and
            # TensorRT-LLM always count those left: for them only the usual taps, which enter layer 2 first, are right.)
            "eagle_aux_hidden_state_layer_ids": [
                i - 1 if config.taps[0] == 2 else i for i in config.taps
            ],
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
            "return_hidden_post_norm": config.norm_output,
        },
    }
    return {name: value for name, value in fields.items() if value is not None}


def _speculators_config(
    config: EagleConfig, target: Any, verifier: str | None, num_draft: int
) -> dict[str, Any]:
    family = getattr(getattr(target, "config", None), "family", None)
    names = {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_draft,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    parallel = config.mask_token_id is not None
    return {
        **_switches(config),
        "speculators_model_type": "peagle" if parallel else "eagle3",
        "speculators_version": "0.1.0",
        "architectures": ["PEagleSpeculator" if parallel else "Eagle3Speculator"],
        "transformer_layer_config": _decoder_fields(config.decoder),
        "tie_word_embeddings": False,
        "embed_requires_grad": config.own_embedding,
        "speculators_config": {
            "algorithm": "peagle" if parallel else "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": verifier,
                "architectures": [names[family]] if family in names else [],
            },
        },
    }
