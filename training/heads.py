"""The head that a run starts from."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints.heads import load_head
from specjax.models.config import LayerConfig, Rope
from specjax.models.heads import EagleHead, HeadConfig, check_head, default_taps
from specjax.models.transformer import Transformer
from training.config import TrainConfig
from training.data import Summary


def new_head(config: TrainConfig, target: Transformer, ids: np.ndarray | None) -> EagleHead:
    """A head for a target: random layers, the target's rows as vocabulary.

    Args:
      ids: int32[Vd], the draft vocabulary; None is the target's.
    """
    c = target.config
    taps = default_taps(c.num_layers) if config.taps is None else config.taps
    shape = HeadConfig(
        decoder=replace(
            c,
            family="llama",
            layers=(LayerConfig(),) * config.num_layers,
            # GGUF's table of factors has no counterpart in a head's config.json
            ropes=(Rope(theta=c.ropes[0].theta) if c.ropes[0].kind == "factors" else c.ropes[0],),
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
            num_experts=0,
            rotary_dim=None,
        ),
        target_hidden_size=c.hidden_size,
        draft_vocab_size=c.vocab_size if ids is None else len(ids),
        taps=tuple(taps),
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        mask_token_id=config.mask_token_id,
    )
    check_head(shape, target)
    head = EagleHead(shape, rngs=nnx.Rngs(config.seed))
    rows = target.head[...] if ids is None else target.head[...][:, ids]
    head.readout.head = nnx.Param(jnp.array(rows, jnp.float32, copy=True))  # it is donated
    if ids is not None:
        head.ids = nnx.Variable(jnp.asarray(ids))
    return head


def make_head(
    config: TrainConfig, target: Transformer, summary: Summary, stops: Sequence[int]
) -> EagleHead:
    """The head that a run starts from."""
    if config.start_from is not None:
        return load_head(config.start_from, target, dtype=jnp.float32)
    size = config.draft_vocab_size
    whole = size in (0, target.vocab_size)
    return new_head(config, target, None if whole else summary.draft_vocabulary(size, stops))


def is_trained(readout: bool, name: str) -> bool:
    """Whether a parameter of a head is trained: all but the map of ids, and the vocabulary's rows if `readout` is off."""
    return name != "ids" and (readout or name != "readout.head")
