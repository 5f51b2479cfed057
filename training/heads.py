"""The head that a run starts from."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints.heads import load_head
from specjax.models.config import LayerConfig, Rope, TransformerConfig
from specjax.models.eagle import EagleConfig, EagleHead, default_taps
from specjax.models.heads import Head, check_head
from specjax.models.mtp import MTPConfig, MTPHead
from specjax.models.transformer import Transformer
from training.config import VARIANTS, TrainConfig
from training.data import Summary

# whose decoder layer a config.json describes in the fields that `save_head` writes
MTP_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
MTP_FAMILIES += ("glm4_moe", "glm4_moe_lite", "deepseek_v3")


def new_head(config: TrainConfig, target: Transformer, ids: np.ndarray | None) -> Head:
    """A head for a target: random layers, the target's rows as vocabulary.

    Args:
      ids: int32[Vd], the draft vocabulary; None is the target's.
    """
    size = target.vocab_size if ids is None else len(ids)
    head = (_mtp_head if config.recipe == "mtp" else _eagle_head)(config, target, size)
    rows = target.head[...] if ids is None else target.head[...][:, ids]
    head.readout.head = nnx.Param(jnp.array(rows, jnp.float32, copy=True))  # it is donated
    if ids is not None:
        head.ids = nnx.Variable(jnp.asarray(ids))
    if head.embedding is not None:
        head.embedding = _embedding(target)
    return head


def _embedding(target: Transformer) -> nnx.Param:
    """The target's table, apart from it."""
    table = target.lookup(jnp.arange(target.vocab_size)[None])[0]
    return nnx.Param(jnp.array(table, jnp.float32, copy=True))


def _exported(ropes: tuple[Rope, ...]) -> tuple[Rope, ...]:
    """GGUF's table of factors has no counterpart in a head's config.json."""
    return tuple(Rope(theta=r.theta) if r.kind == "factors" else r for r in ropes)


def _eagle_head(config: TrainConfig, target: Transformer, draft_vocab_size: int) -> EagleHead:
    c = target.config
    taps = default_taps(c.num_layers) if config.taps is None else config.taps
    shape = EagleConfig(
        decoder=replace(
            c,
            family="llama",
            layers=(LayerConfig(),) * config.num_layers,
            ropes=_exported(c.ropes[:1]),
            mlp_size=config.mlp_size or c.mlp_size,
            tied=False,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
            post_norms=False,
            activation="silu",
            embedding_scale=1.0,
            attention_scale=None,
            attention_softcap=None,
            logit_softcap=None,
            sinks=False,
            num_experts=0,
            experts_per_token=0,
            expert_size=0,
            normalize_experts=True,
            router=None,
            expert_factor=1.0,
            shared_expert_size=0,
            shared_expert_gate=False,
            expert_bias=False,
            rotary_dim=None,
            norm_offset=0.0,
            latent=None,
        ),
        target_hidden_size=c.hidden_size,
        draft_vocab_size=draft_vocab_size,
        taps=tuple(taps),
        own_embedding=config.train_embedding,
        trained_depth=config.steps,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        mask_token_id=config.mask_token_id,
        markov_rank=config.markov_rank,
    )
    check_head(shape, target)
    head = EagleHead(shape, rngs=nnx.Rngs(config.seed))
    head.readout.norm = _copy(target.norm)  # to which its rows of the vocabulary belong
    if _layers_fit(shape.decoder, c):
        _start_as_last_layers(head, target)
    return head


def _layers_fit(head: TransformerConfig, target: TransformerConfig) -> bool:
    """Whether a head's layers have the parts of the target's last ones, with the same meaning."""
    same = {"ropes": head.ropes, "family": head.family, "tied": head.tied}
    enough = head.num_layers <= target.num_layers
    return enough and replace(target, layers=head.layers, **same) == head


def _start_as_last_layers(head: EagleHead, target: Transformer) -> None:
    """A fusion that hands on the highest tap, and layers that are the target's last: the stream is one that the rows of the
    vocabulary understand from the first update, on its scale unless a variant norms the taps. What the embedding adds is
    learnt from nothing."""
    width = target.config.hidden_size
    layers = target.layers[-head.config.decoder.num_layers :]
    head.fc = nnx.Param(jnp.zeros_like(head.fc[...]).at[-width:].set(jnp.eye(width)))
    last = layers[0]
    head.first.hidden_norm, head.first.mlp_norm = _copy(last.attention_norm), _copy(last.mlp_norm)
    head.first.mlp = _copy(last.mlp)
    head.first.attention.output = _copy(last.attention.output)
    qkv = _copy(last.attention.qkv)[...]
    head.first.attention.qkv = nnx.Param(jnp.concatenate([jnp.zeros_like(qkv), qkv]))
    head.others = nnx.List([_copy(layer) for layer in layers[1:]])


def _copy(module: Any) -> Any:
    """In float32, apart from the target's arrays: a run's own are donated."""
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), module)


def _mtp_head(config: TrainConfig, target: Transformer, draft_vocab_size: int) -> MTPHead:
    """Its layers start as the target's last, and the projection as the choice of the hidden state."""
    c = target.config
    if c.family not in MTP_FAMILIES or config.num_layers != 1:
        raise ValueError(
            f"recipe mtp trains one layer for targets of the families {', '.join(MTP_FAMILIES)}; "
            f"got {config.num_layers} for {c.family}"
        )
    shape = MTPConfig(
        decoder=replace(c, layers=c.layers[-1:], ropes=_exported(c.ropes), tied=False),
        target_hidden_size=c.hidden_size,
        draft_vocab_size=draft_vocab_size,
        taps=(c.num_layers,),
        own_embedding=config.train_embedding,
        trained_depth=config.steps,
        post_norm=config.post_norm,
    )
    check_head(shape, target)
    head = MTPHead(shape, rngs=nnx.Rngs(config.seed))
    head.layers = nnx.List([_copy(target.layers[-1])])
    if config.post_norm:
        head.target_norm = _copy(target.norm)
    eye = jnp.eye(c.hidden_size)
    head.projection = nnx.Param(jnp.concatenate([jnp.zeros_like(eye), eye]))
    return head


def make_head(
    config: TrainConfig, target: Transformer, summary: Summary, stops: Sequence[int]
) -> Head:
    """The head that a run starts from."""
    if config.start_from is not None:
        head = load_head(config.start_from, target, dtype=jnp.float32)
        return _continued(head, config, target)
    size = config.draft_vocab_size
    whole = size in (0, target.vocab_size)
    return new_head(config, target, None if whole else summary.draft_vocabulary(size, stops))


def _continued(head: Head, config: TrainConfig, target: Transformer) -> Head:
    """A trained head for a further run; an EAGLE-3 head may go on as P-EAGLE, whose first slot it is already, and a P-EAGLE
    head may gain an embedding of its own and the correction by the draft before.

    Raises:
      ValueError: another kind of head, or of another shape, than the run is to train.
    """
    head = jax.tree.map(lambda x: jnp.array(x, copy=True), head)  # it is donated
    if isinstance(head, EagleHead) and config.recipe == "p_eagle":
        _add_parts(head, config, target)
    kind = "mtp"
    if isinstance(head, EagleHead):
        kind = "eagle3" if head.config.mask_token_id is None else "p_eagle"
    if kind != config.recipe:
        raise ValueError(
            f"start_from {config.start_from} is a head of {kind}, got recipe {config.recipe}"
        )
    has = head.config
    wanted: dict[str, tuple[Any, Any]] = {
        "num_layers": (has.decoder.num_layers, config.num_layers),
        "train_embedding": (has.own_embedding, config.train_embedding),
    }
    if config.taps is not None:
        wanted["taps"] = (has.taps, config.taps)
    if config.mlp_size is not None:
        wanted["mlp_size"] = (has.decoder.mlp_size, config.mlp_size)
    if config.draft_vocab_size:
        wanted["draft_vocab_size"] = (has.draft_vocab_size, config.draft_vocab_size)
    if isinstance(has, MTPConfig):
        wanted["post_norm"] = (has.post_norm, config.post_norm)
    if isinstance(has, EagleConfig):
        for name in ("mask_token_id", "markov_rank", *VARIANTS):
            wanted[name] = (getattr(has, name), getattr(config, name))
    wrong = [f"{name} {old}, got {got}" for name, (old, got) in wanted.items() if old != got]
    if wrong:
        raise ValueError(f"start_from {config.start_from} has {'; '.join(wrong)}")
    trained: Any = head  # whose kind's config it stays
    trained.config = replace(has, trained_depth=config.steps)
    return trained


def _add_parts(head: EagleHead, config: TrainConfig, target: Transformer) -> None:
    """Gives a head what P-EAGLE's later slots read and it lacks; the correction and the embedding, a copy of the target's,
    change nothing until they are trained."""
    has, added = head.config, {}
    if has.mask_token_id is None:
        added["mask_token_id"] = config.mask_token_id
    if config.markov_rank and not has.markov_rank:
        added["markov_rank"] = config.markov_rank
    if config.train_embedding and not has.own_embedding:
        added["own_embedding"] = True
    if not added:
        return
    fresh = EagleHead(replace(has, **added), rngs=nnx.Rngs(config.seed))
    head.config = fresh.config
    if "mask_token_id" in added:
        head.mask_hidden = nnx.data(fresh.mask_hidden)
    if "markov_rank" in added:
        head.readout.markov = nnx.data(fresh.readout.markov)
    if "own_embedding" in added:
        head.embedding = nnx.data(_embedding(target))


def is_trained(readout: bool, name: str) -> bool:
    """Whether a parameter of a head is trained: all but the map of ids and the target's own norm, and the vocabulary's
    rows if `readout` is off."""
    frozen = ("ids", "target_norm.weight")
    return name not in frozen and (readout or name != "readout.head")
