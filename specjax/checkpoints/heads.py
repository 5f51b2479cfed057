"""EAGLE-3 and P-EAGLE heads in: the layouts of SafeAILab, SpecForge and SGLang, speculators, and ModelOpt.

They hold the same tensors under slightly different names, and differ in what their config.json says and leaves out.
"""

import os
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints.huggingface import FLOATS, SafetensorsFolder, parse_config, read_json
from specjax.checkpoints.sources import resolve
from specjax.checkpoints.weights import (
    CheckpointError,
    Part,
    Parts,
    attention_parts,
    check_tensors,
    fill_parameters,
    mlp_parts,
)
from specjax.models.config import TransformerConfig
from specjax.models.heads import EagleHead, HeadConfig, check_head, default_taps
from specjax.models.transformer import Transformer

PICKLED = (
    "Pickled weights (pytorch_model.bin) can run code when opened and are refused; convert them with "
    "safetensors.torch.save_file(torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')"
)
SPELLINGS = {"midlayer.": "layers.0.", "aux_norm_": "fc_norm."}
TAP_NORMS = {
    "fc_norm.low.": "fc_norm.0.",
    "fc_norm.mid.": "fc_norm.1.",
    "fc_norm.high.": "fc_norm.2.",
}
MAPS = ("d2t", "t2d")
# Fields of a head's config.json that change its network in a way that is not built here.
UNSUPPORTED = {"eh_proj_before_attn": False, "logit_scale": 1.0, "bias": False}


def head_tensor(name: str) -> str:
    """A tensor's name in any layout -> speculators' (`layers.0.`, no prefix)."""
    name = name.removeprefix("model.")
    for theirs, ours in (*SPELLINGS.items(), *TAP_NORMS.items()):
        name = name.replace(theirs, ours, 1) if name.startswith(theirs) else name
    return name


def parse_head_config(
    raw: dict[str, Any],
    target: TransformerConfig | None,
    where: str = "config.json",
    taps: tuple[int, ...] | None = None,
) -> HeadConfig:
    """A head's config.json in any of the layouts.

    Args:
      raw: its content.
      target: the model it was made for; needed where the file says nothing of the taps.
      where: the file, for messages.
      taps: what to read in place of what the file says.

    Raises:
      CheckpointError: another kind of head, or fields that contradict one another.
    """
    nested = raw.get("transformer_layer_config")
    kind = raw.get("speculators_model_type")
    if kind not in (None, "eagle3", "peagle") or (kind and not isinstance(nested, dict)):
        raise CheckpointError(
            f"{where}: speculators_model_type must be eagle3 or peagle, with a transformer_layer_config; got {kind!r}"
        )
    fields = dict(nested) if isinstance(nested, dict) else dict(raw)
    fields.setdefault("model_type", "llama")
    eagle = raw.get("eagle_config") if isinstance(raw.get("eagle_config"), dict) else {}
    assert isinstance(eagle, dict)
    for name, harmless in UNSUPPORTED.items():
        if (got := eagle.get(name, raw.get(name))) not in (None, harmless):
            raise CheckpointError(
                f"{where}: {name} {got!r} is not supported, expected {harmless!r}"
            )
    if not eagle.get("use_aux_hidden_state", True):
        raise CheckpointError(
            f"{where}: use_aux_hidden_state false: heads that read the last hidden state alone are not supported"
        )
    if fields.get("model_type") not in ("llama", "qwen3"):
        raise CheckpointError(
            f"{where}: a head's model_type must be llama or qwen3, got {fields.get('model_type')!r}"
        )
    decoder = _windows(parse_config(fields, where), fields, where)
    if taps is None:
        taps = _taps(raw, eagle, target, where)
    count = raw.get("num_aux_hidden_states")
    if count is not None and count != len(taps):
        raise CheckpointError(
            f"{where}: num_aux_hidden_states is {count}, but there are {len(taps)} taps: {taps}"
        )

    def switch(name: str, default: bool = False) -> bool:
        value = eagle.get(name, raw.get(name))
        return default if value is None else bool(value)

    width = raw.get("target_hidden_size") or decoder.hidden_size
    draft = raw.get("draft_vocab_size") or decoder.vocab_size
    try:
        return HeadConfig(
            decoder=replace(
                decoder,
                tied=False,
                normalize_experts=True,
                rotary_dim=None if decoder.rotary == decoder.head_dim else decoder.rotary,
            ),
            target_hidden_size=int(width),
            draft_vocab_size=int(draft),
            taps=taps,
            # what speculators' own reader takes a missing key to mean
            norm_before_residual=switch("norm_before_residual", kind == "eagle3"),
            norm_before_fc=switch("norm_before_fc"),
            fc_norm=switch("fc_norm") or switch("use_aux_norm"),
            norm_output=switch("norm_output") or switch("return_hidden_post_norm"),
            own_embedding=int(width) != decoder.hidden_size,
            mask_token_id=_mask_token(raw, kind, where),
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def _mask_token(raw: dict[str, Any], kind: str | None, where: str) -> int | None:
    """P-EAGLE's mask token, under any of its names; None for EAGLE-3."""
    names = ("mask_token_id", "pard_token", "ptd_token_id")
    found = {name: raw[name] for name in names if raw.get(name) is not None}
    if len(set(found.values())) > 1:
        raise CheckpointError(f"{where}: the mask tokens contradict one another: {found}")
    if kind == "peagle" and not found:
        raise CheckpointError(f"{where}: a P-EAGLE head without {' or '.join(names)}")
    return None if kind == "eagle3" or not found else int(next(iter(found.values())))


def _windows(decoder: TransformerConfig, fields: dict[str, Any], where: str) -> TransformerConfig:
    """With the sliding windows that speculators writes for heads of every kind."""
    types, window = fields.get("layer_types"), fields.get("sliding_window")
    if not types or not window:
        return decoder
    kinds = ("full_attention", "sliding_attention")
    if len(types) != decoder.num_layers or any(kind not in kinds for kind in types):
        raise CheckpointError(
            f"{where}: layer_types must name the kinds of the head's {decoder.num_layers} layers, each one of "
            f"{', '.join(kinds)}; got {types}"
        )
    layers = tuple(
        replace(layer, window=int(window) if kind == "sliding_attention" else None)
        for layer, kind in zip(decoder.layers, types, strict=True)
    )
    return replace(decoder, layers=layers)


def _taps(
    raw: dict[str, Any], eagle: dict[str, Any], target: TransformerConfig | None, where: str
) -> tuple[int, ...]:
    """Which streams the head reads, counted as the layers that they enter.

    vLLM and speculators write just that at the top level (vLLM also as `eagle_config.layer_ids`); SpecForge, ModelOpt and
    TensorRT-LLM write, in `eagle_config`, the layers that they leave, which usually begin with 1. Some heads have the
    layers entered there too: SGLang tells them by another beginning, and here they must be confirmed.
    """
    top, inner = (c.get("eagle_aux_hidden_state_layer_ids") for c in (raw, eagle))
    top = top or eagle.get("layer_ids")
    entered = [int(i) for i in top] if top else None
    left = [int(i) + 1 for i in inner] if inner else None
    if inner and not entered and int(inner[0]) != 1:
        raise CheckpointError(
            f"{where}: eagle_config names layers {inner}, which may be those left or those entered; say with taps=(...) "
            f"which layers' inputs the head reads: {tuple(left or ())} if it names the layers left"
        )
    if inner and entered and left and entered not in (left, [int(i) for i in inner]):
        raise CheckpointError(
            f"{where}: the layer ids contradict one another: {entered} at the top level are layers entered, and "
            f"{inner} in eagle_config are layers left, which would be {left}; say which with taps=(...)"
        )
    if found := entered or left:
        return tuple(found)
    if target is None:
        raise CheckpointError(f"{where}: no layer ids; pass the target, or taps=(...)")
    try:
        return default_taps(target.num_layers)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error


def head_parts(config: HeadConfig, names: set[str] | None = None) -> Parts:
    """For each parameter of an `EagleHead`, the tensors that make it up, in speculators' names.

    Args:
      config: of the head.
      names: of the tensors that are there, where some parts may have one of two names or be missing.
    """
    decoder, count = config.decoder, len(config.taps)
    width, wide = decoder.hidden_size, count * config.target_hidden_size

    def norm(name: str, size: int = width) -> list[Part]:
        return [Part(f"{name}.weight", (size,))]

    parts: Parts = {
        "fc": [Part("fc.weight", (width, wide), (), True)],
        "readout.norm.weight": norm("norm"),
        "readout.head": [Part("lm_head.weight", (config.draft_vocab_size, width), (), True)],
    }
    if config.own_embedding:
        parts["embedding"] = [Part("embed_tokens.weight", (decoder.vocab_size, width))]
    if config.mask_token_id is not None:
        parts["mask_hidden"] = [Part("mask_hidden", (1, 1, wide))]
    if config.norm_before_fc:
        parts["input_norm.weight"] = norm("input_norm", wide)
    if config.fc_norm:
        for i in range(count):
            parts[f"tap_norms[{i}].weight"] = norm(f"fc_norm.{i}", config.target_hidden_size)
    for i in range(decoder.num_layers):
        there = f"layers.{i}"
        here = "first" if i == 0 else f"others[{i - 1}]"
        inputs = 2 * width if i == 0 else width
        for name, pieces in attention_parts(decoder, f"{there}.self_attn", inputs):
            parts[f"{here}.attention.{name}"] = pieces
        for name, pieces in mlp_parts(decoder, f"{there}.mlp"):
            parts[f"{here}.mlp.{name}"] = pieces
        if decoder.qk_norm:
            for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
                parts[f"{here}.attention.{ours}.weight"] = norm(
                    f"{there}.self_attn.{theirs}", decoder.head_dim
                )
        before, fused = f"{there}.input_layernorm", f"{there}.hidden_norm"
        if i == 0:
            parts["first.embedding_norm.weight"] = norm(before)
            parts["first.hidden_norm.weight"] = norm(fused)
        else:  # SGLang and TensorRT-LLM call the later layers' norm after the first's
            alone = names is not None and f"{before}.weight" not in names
            alone = alone and names is not None and f"{fused}.weight" in names
            parts[f"{here}.attention_norm.weight"] = norm(fused if alone else before)
        parts[f"{here}.mlp_norm.weight"] = norm(f"{there}.post_attention_layernorm")
    return parts


def load_head(
    path: str | os.PathLike,
    target: Any = None,
    *,
    dtype: Any = None,
    taps: tuple[int, ...] | None = None,
) -> EagleHead:
    """Loads a trained head.

    Args:
      path: a folder with config.json and model.safetensors in any of the public layouts, or a hub id.
      target: the `Transformer` it was made for: it gives the head its vocabulary rows and usual taps where the files
        leave them out, and is checked against it.
      dtype: of the matrices; None takes the target's, or float32.
      taps: layers to read in place of those that the config names, counted as the layers entered.

    Returns:
      an `EagleHead`, for `Eagle3(head)`.

    Raises:
      FileNotFoundError: unknown source.
      CheckpointError: files that are damaged or incomplete, a head of another kind, tensors that nothing takes.
      ValueError: a head for another target.
    """
    folder = resolve(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder with config.json and model.safetensors")
    model = target if isinstance(target, Transformer) else None
    if dtype is None:
        dtype = getattr(target, "dtype", jnp.float32)
    where = folder / "config.json"
    config = parse_head_config(
        read_json(where), None if model is None else model.config, str(where), taps
    )
    file = SafetensorsFolder(
        folder, rename=head_tensor, types=(*FLOATS, "BOOL", "I32", "I64"), pickled=PICKLED
    )
    if model is not None:
        check_head(config, model)
    config = replace(
        config,
        own_embedding=_own_embedding(config, file, model),
        # `attention_bias` is read in two ways: with a bias on the output, and without
        decoder=replace(
            config.decoder, output_bias="layers.0.self_attn.o_proj.bias" in file.shapes
        ),
    )
    maps = {name: file.read(name) for name in MAPS if name in file.shapes}
    ids = draft_ids(config, maps, str(folder))
    parts = head_parts(config, set(file.shapes))
    borrowed = "lm_head.weight" not in file.shapes
    if borrowed:  # ModelOpt leaves out what equals the target's
        if model is None or model.config.hidden_size != config.decoder.hidden_size:
            raise CheckpointError(
                f"{folder}: missing tensor lm_head.weight, which only a target of the head's width could give"
            )
        del parts["readout.head"]
    spare = {*MAPS, *(() if config.own_embedding else ("embed_tokens.weight",))}
    what = "an EAGLE-3 head" if config.mask_token_id is None else "a P-EAGLE head"
    check_tensors(parts, file.shapes, str(folder), what, lambda name: name in spare)

    def create() -> EagleHead:
        head = EagleHead(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
        head.ids = None
        if borrowed:
            head.readout.head = None
        return head

    head = fill_parameters(create, parts, file)
    if borrowed:
        assert model is not None
        rows = model.head[...] if ids is None else jnp.take(model.head[...], ids, axis=1)
        head.readout.head = nnx.Param(rows.astype(dtype))
    if ids is not None:
        head.ids = nnx.Variable(jnp.asarray(ids))
    return head


def _own_embedding(config: HeadConfig, file: SafetensorsFolder, target: Transformer | None) -> bool:
    """Whether the file's embedding is to be kept: the target's own is shared where they are equal."""
    name = "embed_tokens.weight"
    if name not in file.shapes:
        return config.own_embedding
    shape = (config.decoder.vocab_size, config.decoder.hidden_size)
    if target is None or config.own_embedding or file.shapes[name] != shape:
        return True
    for start in range(0, shape[0], 4096):
        rows = jnp.asarray(file.read(name, slice(start, min(start + 4096, shape[0]))), target.dtype)
        tokens = jnp.arange(start, start + rows.shape[0])
        if not bool(jnp.array_equal(rows, target.lookup(tokens[None])[0])):
            return True
    return False


def draft_ids(config: HeadConfig, maps: dict[str, np.ndarray], where: str) -> np.ndarray | None:
    """int32[Vd], the target's id of each draft id; None where the vocabularies are one.

    Args:
      maps: `d2t`, offsets from the draft's ids to the target's, and `t2d`, whether a target's token is in the draft's
        vocabulary; either may be missing.

    Raises:
      CheckpointError: they are missing, or contradict themselves or one another.
    """
    size, vocab = config.draft_vocab_size, config.decoder.vocab_size
    if "d2t" not in maps:
        if size < vocab:
            raise CheckpointError(f"{where}: missing tensor d2t, expected shape ({size},)")
        return None
    offsets = maps["d2t"]
    if offsets.shape != (size,):
        raise CheckpointError(f"{where}: tensor d2t: expected shape ({size},), got {offsets.shape}")
    ids = np.arange(size) + offsets.astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) < size:
        raise CheckpointError(
            f"{where}: tensor d2t must hold offsets to {size} different ids below {vocab}; "
            f"got ids {ids.min()}..{ids.max()}, {len(np.unique(ids))} different"
        )
    if (member := maps.get("t2d")) is not None:
        known = np.zeros(vocab, bool)
        known[ids] = True
        if member.shape != (vocab,) or not np.array_equal(member.astype(bool), known):
            raise CheckpointError(f"{where}: tensors t2d and d2t name different tokens")
    if size == vocab and not offsets.any():
        return None
    return ids.astype(np.int32)
