"""Heads in, of every kind and layout."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints.eagle import head_parts, head_tensor, parse_head_config
from specjax.checkpoints.mtp import (
    DIALECTS,
    FusedExperts,
    file_names,
    mtp_dialect,
    mtp_parts,
    mtp_renamer,
    parse_mtp_config,
)
from specjax.checkpoints.parts import Parts, tensor_shapes
from specjax.checkpoints.safetensors_folder import FLOATS, SafetensorsFolder, read_json
from specjax.checkpoints.sources import BUILT_IN, resolve
from specjax.checkpoints.weights import CheckpointError, TensorFile, check_tensors, fill_parameters
from specjax.models.eagle import EagleConfig, EagleHead
from specjax.models.heads import Head, HeadConfig, check_head
from specjax.models.mtp import MTPConfig, MTPHead
from specjax.models.transformer import Transformer

PICKLED = (
    "Pickled weights (pytorch_model.bin) can run code when opened and are refused; convert them with "
    "safetensors.torch.save_file(torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')"
)
MAPS = ("d2t", "t2d")
TYPES = (*FLOATS, "BOOL", "I32", "I64")


def load_head(
    path: str | os.PathLike,
    target: Any = None,
    *,
    dtype: Any = None,
    taps: tuple[int, ...] | None = None,
    post_norm: bool | None = None,
) -> Head:
    """Loads a trained head.

    Args:
      path: a built-in name ("smollm2-135m-eagle3"), a folder with config.json and safetensors in any of the public
        layouts, or a hub id. A target's own folder gives its MTP module.
      target: the `Transformer` it was made for: it gives the head its vocabulary rows and usual taps where the files
        leave them out, and is checked against it. A built-in head without it loads the built-in target for that.
      dtype: of the matrices; None takes the target's, or float32.
      taps: layers to read in place of those that the config names, counted as the layers entered.
      post_norm: whether an MTP module reads hidden states behind the final norms; None is what its file says, else
        behind them. Which a release was trained with is often not said: the one that accepts more is.

    Returns:
      an `EagleHead`, for `Eagle3(head)` or `PEagle(head)`, or an `MTPHead`, for `MTP(head)`.

    Raises:
      FileNotFoundError: unknown source.
      CheckpointError: files that are damaged or incomplete, a head of another kind, tensors that nothing takes.
      ValueError: a head for another target, `post_norm` for another kind of head.
    """
    folder = resolve(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder with config.json and model.safetensors")
    model = target if isinstance(target, Transformer) else None
    dtype = jnp.dtype(getattr(target, "dtype", jnp.float32) if dtype is None else dtype)
    raw = read_json(folder / "config.json")
    dialect = mtp_dialect(raw)
    if post_norm is not None:
        if dialect is None:
            raise ValueError(f"post_norm is for MTP modules, got {post_norm} for {folder}")
        raw = raw | {"mtp_hidden": "post_norm" if post_norm else "pre_norm"}
    kind = _eagle if dialect is None else partial(_mtp, dialect=dialect)
    config, file, parts, borrowed = kind(folder, raw, model, taps)
    spare = {*MAPS, *borrowed, *(() if config.own_embedding else ("embed_tokens.weight",))}
    what = "an EAGLE-3 head"
    if isinstance(config, MTPConfig):
        what = "an MTP module"
        spare.add("target_norm.weight")  # of the target's own files; not every module reads it
    if isinstance(config, EagleConfig) and config.mask_token_id is not None:
        what = "a P-EAGLE head"
    maps = {name: file.read(name) for name in MAPS if name in file.shapes}
    ids = draft_ids(config, maps, str(folder))
    spell = str if dialect is None else file_names(dialect, config.taps[0])
    check_tensors(
        tensor_shapes(parts), file.shapes, str(folder), what, lambda name: name in spare, spell
    )

    if borrowed and model is None and raw.get("target_name") in BUILT_IN:
        from specjax.checkpoints import load_target  # which stands above this module

        model = load_target(raw["target_name"], dtype=dtype)
    if borrowed and model is None:
        raise CheckpointError(
            f"{folder}: missing tensor {', '.join(sorted(borrowed))}, which only a target of the head's width could give"
        )

    def create() -> Head:
        rngs = nnx.Rngs(0)
        if isinstance(config, MTPConfig):
            head = MTPHead(config, dtype=dtype, rngs=rngs)
        else:
            head = EagleHead(config, dtype=dtype, rngs=rngs)
        head.ids = None
        if "lm_head.weight" in borrowed:
            head.readout.head = None
        if isinstance(head, MTPHead) and "target_norm.weight" in borrowed:
            head.target_norm = None
        return head

    head = fill_parameters(create, parts, file)
    if model is not None and "lm_head.weight" in borrowed:
        rows = model.head[...] if ids is None else jnp.take(model.head[...], ids, axis=1)
        head.readout.head = nnx.Param(rows.astype(dtype))
    if model is not None and "target_norm.weight" in borrowed and isinstance(head, MTPHead):
        head.target_norm = model.norm
    if ids is not None:
        head.ids = nnx.Variable(jnp.asarray(ids))
    return head


Found = tuple[EagleConfig | MTPConfig, TensorFile, Parts, set[str]]
"""A head's config, its tensors under one dialect's names, its parts, and which tensors the target gives."""


def _eagle(
    folder: Path, raw: dict[str, Any], model: Transformer | None, taps: tuple[int, ...] | None
) -> Found:
    where = str(folder / "config.json")
    config = parse_head_config(raw, None if model is None else model.config, where, taps)
    file = SafetensorsFolder(folder, rename=head_tensor, types=lambda _: TYPES, pickled=PICKLED)
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
    if config.mask_token_id is None and "mask_hidden" in file.shapes:
        raise CheckpointError(
            f"{where}: the tensor mask_hidden is a P-EAGLE head's, but there is no mask token: expected mask_token_id, "
            "pard_token or ptd_token_id"
        )
    parts, borrowed = head_parts(config, set(file.shapes)), set()
    fits = model is None or model.config.hidden_size == config.decoder.hidden_size
    if "lm_head.weight" not in file.shapes and fits:
        # ModelOpt leaves out what equals the target's
        borrowed.add("lm_head.weight")
        del parts["readout.head"]
    return config, file, parts, borrowed


def _mtp(
    folder: Path,
    raw: dict[str, Any],
    model: Transformer | None,
    taps: tuple[int, ...] | None,
    *,
    dialect: str,
) -> Found:
    where = str(folder / "config.json")
    if taps is not None:
        raise ValueError(f"taps of an MTP module are the last layer's output, got {taps}")
    config, layers = parse_mtp_config(raw, dialect, where)
    file = SafetensorsFolder(
        folder, rename=mtp_renamer(dialect, layers), types=lambda _: TYPES, pickled=PICKLED
    )
    if config.decoder.num_experts:
        file = FusedExperts(file)
    if "eh_proj.weight" not in file.shapes:
        raise CheckpointError(
            f"{folder}: config.json announces an MTP module, but its tensors are not there; transformers drops them "
            "when it saves a model: take the published files"
        )
    if model is not None:
        check_head(config, model)
        config = replace(config, own_embedding=_own_embedding(config, file, model))
    else:
        config = replace(config, own_embedding="embed_tokens.weight" in file.shapes)
    parts, borrowed = mtp_parts(config), set()
    if model is not None and config.post_norm:
        borrowed.add("target_norm.weight")
        del parts["target_norm.weight"]
    spoken = DIALECTS[dialect]
    shared = model is not None and not (config.mapped or spoken.own_rows or spoken.alone)
    text = raw.get("text_config") or {}
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    if tied and model is None and not config.mapped and "lm_head.weight" not in file.shapes:
        parts["readout.head"] = [replace(parts["readout.head"][0], name="embed_tokens.weight")]
    elif shared or "lm_head.weight" not in file.shapes:
        borrowed.add("lm_head.weight")
        del parts["readout.head"]
    return config, file, parts, borrowed


def _own_embedding(config: HeadConfig, file: TensorFile, target: Transformer | None) -> bool:
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
        if (member := maps.get("t2d")) is not None and not member.all():
            raise CheckpointError(
                f"{where}: tensor t2d leaves tokens out, but there is no d2t and draft_vocab_size is the target's {vocab}"
            )
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
