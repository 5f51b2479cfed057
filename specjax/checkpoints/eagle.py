"""EAGLE-3 and P-EAGLE heads in: the layouts of SafeAILab, SpecForge and SGLang, speculators, and ModelOpt.

They hold the same tensors under slightly different names, and differ in what their config.json says and leaves out.
"""

from dataclasses import replace
from typing import Any

from specjax.checkpoints.huggingface import parse_config
from specjax.checkpoints.parts import Part, Parts, layer_parts
from specjax.checkpoints.weights import CheckpointError
from specjax.models.config import TransformerConfig
from specjax.models.eagle import EagleConfig, default_taps

SPELLINGS = {"midlayer.": "layers.0.", "aux_norm_": "fc_norm."}
TAP_NORMS = {
    "fc_norm.low.": "fc_norm.0.",
    "fc_norm.mid.": "fc_norm.1.",
    "fc_norm.high.": "fc_norm.2.",
}
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
) -> EagleConfig:
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
        return EagleConfig(
            decoder=replace(decoder, tied=False),
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
            markov_rank=int(raw.get("markov_rank") or 0),
            trained_depth=raw.get("num_depths"),
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
    layers entered there too: SGLang tells them by another beginning, and here they must be confirmed. AWS's P-EAGLE heads,
    which alone say `ptd_token_id` and no `mask_token_id`, have them in either place.
    """
    top, inner = (c.get("eagle_aux_hidden_state_layer_ids") for c in (raw, eagle))
    for ids in (top, inner, eagle.get("layer_ids")):
        if ids is not None and (not isinstance(ids, list) or not all(type(i) is int for i in ids)):
            raise CheckpointError(f"{where}: layer ids must be a list of integers, got {ids!r}")
    top = top or eagle.get("layer_ids")
    if not top and raw.get("ptd_token_id") is not None and raw.get("mask_token_id") is None:
        top, inner = inner, None
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


def head_parts(config: EagleConfig, names: set[str] | None = None) -> Parts:
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
    if config.markov_rank:
        shape = (config.draft_vocab_size, config.markov_rank)
        parts["readout.markov.before"] = [Part("markov_head.markov_w1.weight", shape)]
        parts["readout.markov.after"] = [Part("markov_head.markov_w2.weight", shape, (), True)]
    if config.norm_before_fc:
        parts["input_norm.weight"] = norm("input_norm", wide)
    if config.fc_norm:
        for i in range(count):
            parts[f"tap_norms[{i}].weight"] = norm(f"fc_norm.{i}", config.target_hidden_size)
    for i, layer in enumerate(decoder.layers):
        there, here = f"layers.{i}", "first" if i == 0 else f"others[{i - 1}]"
        pieces = dict(layer_parts(decoder, layer, here, there, 2 * width if i == 0 else None))
        entering, fused = pieces.pop(f"{here}.attention_norm.weight"), f"{there}.hidden_norm"
        parts |= pieces
        if i == 0:
            parts["first.embedding_norm.weight"] = entering
            parts["first.hidden_norm.weight"] = norm(fused)
        else:  # SGLang and TensorRT-LLM call the later layers' norm after the first's
            alone = names is not None and entering[0].name not in names
            alone = alone and names is not None and f"{fused}.weight" in names
            parts[f"{here}.attention_norm.weight"] = norm(fused) if alone else entering
    return parts
