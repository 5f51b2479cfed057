"""The decoder-only transformer that serves as target or as draft model.

B rows, T tokens, A taps, D model width, V vocabulary, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import Array

from specjax.models.attention import Attention, LatentAttention, Masks, Prior, masks
from specjax.models.cache import Block, Cache
from specjax.models.config import LayerConfig, TransformerConfig
from specjax.models.layers import MLP, Experts, RMSNorm, matrix, project, rotation


@struct.dataclass
class Output:
    """What one pass returns.

    Attributes:
      logits: float32[B, T, V].
      taps: [B, T, A, D], the asked-for hidden states in the asked-for order.
      block: what `cache.commit` needs to keep the pass's tokens.
    """

    logits: Array
    taps: Array
    block: Any


@runtime_checkable
class Target(Protocol):
    """All that decoding knows of a model. Any pytree that answers these four can be a target or a draft.

    The cache is the model's own affair: `init_cache` returns a pytree with an int32[B] `length`, a method
    `commit(block, count, path=None)` that appends `count` rows of the block a call returned and, for draft models, a
    method `rewind(length)`; a block has a method `pad(width)` that makes blocks of several widths one shape. See
    `models.cache`; a model without memory needs no more than the length. A call reads the cache and never writes it.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    def init_cache(self, batch: int, slots: int) -> Any: ...

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        cache: Any,
        mask: Array | None = None,
        *,
        taps: tuple[int, ...] = (),
    ) -> Output: ...


@struct.dataclass
class Reuse:
    """What some layers computed for a block before its pass, so that the pass need not.

    Attributes:
      hidden: [B, W, D], the stream that leaves those layers, which are the first ones.
      keys, values: one array for each of those layers, [B, Hkv, W, Dh].
    """

    hidden: Array
    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    def narrow(self, width: int) -> "Reuse":
        """Of the block's first `width` tokens."""
        keys, values = jax.tree.map(lambda x: x[:, :, :width], (self.keys, self.values))
        return Reuse(hidden=self.hidden[:, :width], keys=keys, values=values)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward with residuals; Gemma's second pair of norms where configured."""

    def __init__(self, config: TransformerConfig, layer: LayerConfig, *, dtype, rngs: nnx.Rngs):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm_eps)

        self.attention_norm = norm()
        self.attention = (
            Attention(config, layer, dtype=dtype, rngs=rngs)
            if config.latent is None
            else LatentAttention(config, config.latent, dtype=dtype, rngs=rngs)
        )
        self.mlp_norm = norm()
        feed_forward = Experts if layer.experts else MLP
        self.mlp = feed_forward(config, dtype=dtype, rngs=rngs)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_post_norm = norm() if config.post_norms else None

    def __call__(
        self,
        x: Array,
        angles: tuple[Array, Array],
        masks: Masks,
        keys: Array,
        values: Array,
        prior: Prior | None = None,
    ) -> tuple[Array, Array, Array]:
        normed = self.attention_norm(x)
        y, key, value = self.attention(normed, angles, masks, keys, values, prior)
        return self.leave(x, y), key, value

    def leave(self, x: Array, attended: Array) -> Array:
        """The stream [B, T, D] after what attention adds to it, and after the feed-forward part."""
        y = attended
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.mlp(self.mlp_norm(x))
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))


@jax.jit
def _layer(layer: DecoderLayer, x, angles, masks, keys, values, prior):
    """One layer as a function of its own, so that equal layers are traced once and not L times."""
    return layer(x, angles, masks, keys, values, prior)


@dataclass(eq=False)
class Origin:
    """Where a model was loaded from, if it was. All origins are equal: models that differ in nothing but this share
    compiled programs.

    Attributes:
      path: absolute path of the file or folder.
    """

    path: str | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return 0


class Transformer(nnx.Module):
    """Embedding, L decoder layers, final norm, logits. A plain pytree: pass it to `jax.jit` as an argument.

    Args:
      config: shapes and switches.
      dtype: of embeddings, matrices and biases; norm weights and attention sinks are always float32.
      rngs: for random parameters. Under `jax.eval_shape` nothing is allocated.
    """

    def __init__(self, config: TransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        width, vocab = config.hidden_size, config.vocab_size
        self.config = config
        self.origin = Origin()
        # A tied table is kept as the head's [D, V], whose products are the expensive ones; looking up a column is cheap.
        self.embedding = (
            None if config.tied else matrix(rngs, vocab, width, dtype=dtype, inputs=width)
        )
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype=dtype, rngs=rngs) for layer in config.layers]
        )
        self.norm = RMSNorm(width, config.norm_eps)
        self.head = matrix(rngs, width, vocab, dtype=dtype)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        return self.config.context_length

    @property
    def source(self) -> str | None:
        """Path of the file or folder that it was loaded from."""
        return self.origin.path

    @property
    def dtype(self):
        return self.head.dtype

    def init_cache(self, batch: int, slots: int) -> Cache:
        c = self.config
        return Cache.create(c.num_layers, batch, c.num_kv_heads, slots, c.head_dim, self.dtype)

    def lookup(self, tokens: Array) -> Array:
        """tokens [B, T] -> their rows of the embedding table, [B, T, D]."""
        if self.embedding is None:
            return jnp.moveaxis(jnp.take(self.head[...], tokens, axis=1, mode="clip"), 0, -1)
        return jnp.take(self.embedding[...], tokens, axis=0, mode="clip")

    def embed(self, tokens: Array) -> Array:
        """tokens [B, T] -> the stream that enters layer 0, [B, T, D]."""
        x = self.lookup(tokens)
        return x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale

    def logits(self, x: Array, ids: Array | None = None) -> Array:
        """The stream that leaves the last layer, [..., D] -> float32[..., V], or [..., n] of the tokens `ids` [n] alone."""
        head = self.head[...] if ids is None else jnp.take(self.head[...], ids, axis=1)
        logits = project(self.norm(x), head, dtype=jnp.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def empty_block(self, batch: int, width: int, layers: Sequence[int]) -> Block:
        """Room for the keys and values of `width` tokens in the given layers, for `run` in parts."""
        c = self.config
        shape = (batch, c.num_kv_heads, width, c.head_dim)
        zeros = tuple(jnp.zeros(shape, self.dtype) for _ in layers)
        return Block(keys=zeros, values=zeros, after=jnp.int32(0))

    def run(
        self,
        x: Array,
        positions: Array,
        cache: Cache,
        mask: Array | None = None,
        *,
        layers: Sequence[int],
        prior: Block | None = None,
        at: Array | int = 0,
        key_positions: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Array, Block, dict[int, Array]]:
        """The stream through some of the layers.

        Args:
          x: [B, T, D].
          positions, cache, mask: as for a whole pass.
          layers: which, in order.
          prior: keys and values of these layers for the tokens of the same block that earlier calls passed, P wide; the
            mask is then [.., T, P].
          at: where in `prior` this call's tokens go.
          key_positions: int32[B, P] of the tokens of `prior`.
          taps: which of the layers' inputs to return.

        Returns:
          the stream that leaves the last of them, the layers' keys and values (P wide with `prior`), and the taps.
        """
        config = self.config
        group = config.num_heads // config.num_kv_heads
        angles = [rotation(rope, config.rotary, positions) for rope in config.ropes]
        seen = {
            window: masks(positions, cache.length, cache.slots, mask, window, group, key_positions)
            for window in {config.layers[i].window for i in layers}
        }
        tapped, keys, values = {}, [], []
        for place, i in enumerate(layers):
            layer = config.layers[i]
            if i in taps:
                tapped[i] = x
            known = None
            if prior is not None:
                known = Prior(prior.keys[place], prior.values[place], jnp.asarray(at, jnp.int32))
            with jax.named_scope(f"layer{i}"):
                x, key, value = _layer(
                    self.layers[i],
                    x,
                    angles[layer.rope],
                    seen[layer.window],
                    cache.keys[i],
                    cache.values[i],
                    known,
                )
            keys.append(key)
            values.append(value)
        after = jnp.minimum(jnp.argmax(x[0, 0]).astype(jnp.int32), 0)
        return x, Block(keys=tuple(keys), values=tuple(values), after=after), tapped

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        cache: Cache,
        mask: Array | None = None,
        *,
        taps: tuple[int, ...] = (),
        reuse: Reuse | None = None,
    ) -> Output:
        """One pass over T new tokens of each row.

        Args:
          tokens: int32[B, T].
          positions: int32[B, T]; a token's position in its row, which for a tree is its depth past the cache.
          cache: committed keys and values; read only.
          mask: bool[T, T] or [B, T, T], who of the block sees whom; None is causal.
          taps: layer indices i in 0..L; tap i is the hidden state entering layer i (0: the embeddings, L: what enters
            the final norm).
          reuse: what the first layers computed for these very tokens; only the others run.

        Returns:
          `Output`; logits that nobody uses cost nothing under jit.
        """
        count = self.config.num_layers
        done = 0 if reuse is None else len(reuse.keys)
        if any(i < done for i in taps):
            raise ValueError(f"taps {taps} lie below layer {done}, whose work is reused")
        x = self.embed(tokens) if reuse is None else reuse.hidden
        x, block, tapped = self.run(x, positions, cache, mask, layers=range(done, count), taps=taps)
        if reuse is not None:
            keys, values = (*reuse.keys, *block.keys), (*reuse.values, *block.values)
            block = replace(block, keys=keys, values=values)
        tapped[count] = x
        stacked = (
            jnp.stack([tapped[i] for i in taps], axis=2)
            if taps
            else jnp.zeros((*tokens.shape, 0, self.config.hidden_size), x.dtype)
        )
        return Output(logits=self.logits(x), taps=stacked, block=block)
