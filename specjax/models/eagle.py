"""Heads of EAGLE-3 (arXiv 2503.01840), P-EAGLE (arXiv 2602.01469) and their variants.

B rows, T tokens, A taps, Ht target width, H head width, V target vocabulary, Vd draft vocabulary, R rank.

Three hidden states of the target, from low, middle and high layers, are fused into one. Under P-EAGLE a drafted token takes
neither token nor output of earlier drafts but a mask token and one learned vector, so that all drafts come out of one pass.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.attention import Attention
from specjax.models.heads import Head, HeadConfig
from specjax.models.layers import MLP, RMSNorm, matrix, project
from specjax.models.transformer import DecoderLayer


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """Shapes and switches of an EAGLE-3 or P-EAGLE head.

    Attributes:
      norm_before_residual: the first layer's residual is the normed hidden state, not the raw one.
      norm_before_fc: one norm over all taps before they are fused.
      fc_norm: a norm for each tap before they are fused (EAGLE-3.1).
      norm_output: what a drafted token hands to the next is the final norm's output (EAGLE-3.1).
      mask_token_id: P-EAGLE's mask token; None for heads that draft one token after the other.
      markov_rank: R of P-EAGLE's correction by the draft before; 0 is none.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None
    markov_rank: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude one another, got both")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.decoder.vocab_size:
            raise ValueError(
                f"mask_token_id must be in 0..{self.decoder.vocab_size - 1}, got {self.mask_token_id}"
            )
        if self.markov_rank < 0 or (self.markov_rank and self.mask_token_id is None):
            raise ValueError(
                f"markov_rank must be at least 0, and 0 without a mask token; got {self.markov_rank}"
            )


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high, as every public trainer has them: 2, L // 2, L - 3."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not 0 < taps[0] < taps[1] < taps[2]:
        raise ValueError(
            f"taps must be named for a target of {num_layers} layers: the usual ones, {taps}, coincide"
        )
    return taps


class FusionLayer(nnx.Module):
    """A head's first layer: attention over [normed embedding, normed hidden state], 2H wide; the residual is the
    hidden state alone."""

    def __init__(self, config: EagleConfig, *, dtype, rngs: nnx.Rngs):
        decoder = config.decoder
        width, eps = decoder.hidden_size, decoder.norm_eps
        self.embedding_norm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.attention = Attention(
            decoder, decoder.layers[0], dtype=dtype, rngs=rngs, inputs=2 * width
        )
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = MLP(decoder, dtype=dtype, rngs=rngs)
        self.norm_before_residual = config.norm_before_residual

    def enter(self, embedded: Array, hidden: Array) -> tuple[Array, Array]:
        """What attention reads, [B, T, 2H], and the residual, [B, T, H]."""
        normed = self.hidden_norm(hidden)
        both = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        return both, normed if self.norm_before_residual else hidden

    def leave(self, residual: Array, attended: Array) -> Array:
        x = residual + attended
        return x + self.mlp(self.mlp_norm(x))


class EagleHead(Head):
    """Fusion of the taps, decoder layers, final norm, logits over the draft vocabulary.

    Args:
      config: shapes and switches.
      dtype: of the matrices; norm weights are always float32.
      rngs: for random parameters.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        super().__init__(
            config,
            normed=config.norm_output,
            markov_rank=config.markov_rank,
            dtype=dtype,
            rngs=rngs,
        )
        decoder, count = config.decoder, len(config.taps)
        width, wide = decoder.hidden_size, count * config.target_hidden_size
        self.input_norm = RMSNorm(wide, decoder.norm_eps) if config.norm_before_fc else None
        self.tap_norms = (
            nnx.List([RMSNorm(config.target_hidden_size, decoder.norm_eps) for _ in range(count)])
            if config.fc_norm
            else None
        )
        self.fc = matrix(rngs, wide, width, dtype=dtype)
        self.first = FusionLayer(config, dtype=dtype, rngs=rngs)
        self.others = nnx.List(
            [DecoderLayer(decoder, layer, dtype=dtype, rngs=rngs) for layer in decoder.layers[1:]]
        )
        # stands for the taps that a masked slot does not have; before fusion, as in public files
        self.mask_hidden = (
            nnx.Param(jax.random.normal(rngs.params(), (1, 1, wide), dtype))
            if config.mask_token_id is not None
            else None
        )

    def fuse(self, taps: Array) -> Array:
        if self.tap_norms is not None:
            normed = [norm(taps[..., i, :]) for i, norm in enumerate(self.tap_norms)]
            taps = jnp.stack(normed, axis=-2)
        x = taps.reshape(*taps.shape[:-2], -1)
        if self.input_norm is not None:
            x = self.input_norm(x)
        return project(x, self.fc[...])

    def fused_mask(self) -> Array:
        """What stands for the hidden state of every masked slot, [H]."""
        assert self.mask_hidden is not None
        return self.fuse(self.mask_hidden[...].reshape(len(self.config.taps), -1))

    def enter(
        self, i: int, embedded: Array, x: Array, positions: Array
    ) -> tuple[FusionLayer | DecoderLayer, Array, Array]:
        if i == 0:
            return self.first, *self.first.enter(embedded, x)
        layer = self.others[i - 1]
        return layer, layer.attention_norm(x), x
