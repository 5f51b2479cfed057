"""Multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437, section 2.2): one more decoder layer of the target's own kind.

B rows, T tokens, H width.

    z = projection([norm(embedding of x[t+1]), norm(hidden state at t)])
    u = decoder layer(z);  o = final norm(u);  logits of x[t+2] = vocabulary rows . o

A module drafts several tokens by recursion: o stands for the next row's hidden state.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.heads import Head, HeadConfig
from specjax.models.layers import RMSNorm, matrix, project
from specjax.models.transformer import DecoderLayer


@dataclass(frozen=True, kw_only=True)
class MTPConfig(HeadConfig):
    """Shapes and switches of an MTP module; `taps` is (L,), the stream that enters the target's final norm.

    Attributes:
      hidden_first: the projection reads [hidden state, embedding] (MiMo), not [embedding, hidden state].
      post_norm: hidden states, the target's and its own, are read behind the final norms. Released modules of DeepSeek,
        GLM and Qwen draft better so.
      zero_first: the embedding at position 0 is left out, as DeepSeek, GLM and MiMo do.
    """

    hidden_first: bool = False
    post_norm: bool = True
    zero_first: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.decoder.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"an MTP module is as wide as its target, got {self.decoder.hidden_size} and {self.target_hidden_size}"
            )
        if len(self.taps) != 1:
            raise ValueError(f"an MTP module reads one hidden state, got taps {self.taps}")

    def misplaced_taps(self, layers: int) -> list[int]:
        return [i for i in self.taps if i != layers]


class MTPHead(Head):
    """Two norms, a projection, decoder layers, final norm, logits over the draft vocabulary.

    Args:
      config: shapes and switches.
      dtype: of the matrices; norm weights are always float32.
      rngs: for random parameters.
    """

    config: MTPConfig

    def __init__(self, config: MTPConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, normed=config.post_norm, dtype=dtype, rngs=rngs)
        decoder = config.decoder
        width, eps = decoder.hidden_size, decoder.norm_eps
        # the target's own final norm, never trained here
        self.target_norm = RMSNorm(width, eps) if config.post_norm else None
        self.embedding_norm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.projection = matrix(rngs, 2 * width, width, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(decoder, layer, dtype=dtype, rngs=rngs) for layer in decoder.layers]
        )

    def fuse(self, taps: Array) -> Array:
        stream = taps[..., 0, :].astype(self.dtype)
        return stream if self.target_norm is None else self.target_norm(stream)

    def enter(
        self, i: int, embedded: Array, x: Array, positions: Array
    ) -> tuple[DecoderLayer, Array, Array]:
        if i == 0:
            if self.config.zero_first:
                embedded = jnp.where((positions == 0)[..., None], 0, embedded)
            both = [self.embedding_norm(embedded), self.hidden_norm(x)]
            if self.config.hidden_first:
                both.reverse()
            x = project(jnp.concatenate(both, axis=-1), self.projection[...])
        layer = self.layers[i]
        return layer, layer.attention_norm(x), x
