"""Attention of a block of new tokens to the committed cache and to itself.

B rows, T block tokens, S cache slots, Hkv key/value heads, G query heads per key/value head, Dh head width, D model width.
"""

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import Array

from specjax.models.config import Latent, LayerConfig, TransformerConfig
from specjax.models.layers import RMSNorm, matrix, project, rotate

LATENT_EPS = (
    1e-6  # of latent attention's norms, whatever the model's others have, as in transformers
)
NEVER = -1e30  # added to a masked score: finite, so that a fully masked row of padding gives no NaN


@struct.dataclass
class Masks:
    """Who sees whom, as additive float32 scores (0 or `NEVER`).

    Attributes:
      cache: [B, 1, 1 or G * T, S], queries against committed slots.
      block: [B or 1, 1, G * T, P], queries against the block's own tokens (P = T unless the block is passed in parts).
    """

    cache: Array
    block: Array


@struct.dataclass
class Prior:
    """Keys and values that earlier calls computed for other tokens of the same block.

    Attributes:
      keys, values: [B, Hkv, P, Dh], room for the whole block.
      at: int32[], where this call's tokens go.
    """

    keys: Array
    values: Array
    at: Array

    def extend(self, key: Array, value: Array) -> tuple[Array, Array]:
        """With this call's own [B, Hkv, T, Dh] in their place."""

        def put(old: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), self.at, 2)

        return put(self.keys, key), put(self.values, value)


def masks(
    positions: Array,
    length: Array,
    slots: int,
    mask: Array | None,
    window: int | None,
    group: int,
    key_positions: Array | None = None,
) -> Masks:
    """The masks of one layer type, laid out like the scores of all G query heads of a key/value head.

    Args:
      positions: int32[B, T] of the queries.
      length: int32[B], committed tokens per row.
      slots: S.
      mask: bool[T, P] or [B, T, P], True where query (second to last axis) sees key of the block; None is causal.
      window: a query sees keys less than `window` positions before it; None is no limit.
      group: G.
      key_positions: int32[B, P] of the block's keys; None says that they are the queries' own.
    """
    size = positions.shape[1]
    keys_at = positions if key_positions is None else key_positions
    slot = jnp.arange(slots)
    cached = (slot < length[:, None])[:, None, :]
    own = jnp.tril(jnp.ones((size, size), bool)) if mask is None else mask
    own = own[None] if own.ndim == 2 else own
    if window is not None:
        cached &= slot > positions[:, :, None] - window
        own &= keys_at[:, None, :] > positions[:, :, None] - window

    def scores(seen: Array) -> Array:
        seen = seen if seen.shape[1] == 1 else jnp.tile(seen, (1, group, 1))
        return jnp.where(seen, 0.0, NEVER)[:, None]

    own = jnp.broadcast_to(own, (own.shape[0], size, keys_at.shape[1]))
    return Masks(cache=scores(cached), block=scores(own))


def attend(
    query: Array,
    keys: Array,
    values: Array,
    cache_keys: Array,
    cache_values: Array,
    masks: Masks,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """One softmax over cached and new keys.

    Args:
      query: [B, Hkv, G, T, Dh].
      keys, values: the block's own, [B, Hkv, P, Dh].
      cache_keys: [B, Hkv, Dh, S]; cache_values: [B, Hkv, S, Dh].
      softcap: c * tanh(score / c); None is off.
      sinks: float32[Hkv, G], one more score of each query head, without a value (gpt-oss, arXiv 2508.10925); None is none.

    Returns:
      [B, Hkv, G, T, Dh]; scores, softmax and sums in float32.
    """
    batch, heads, group, size, width = query.shape
    flat = query.reshape(batch, heads, group * size, width)

    def scores(product: str, k: Array, mask: Array) -> Array:
        s = jnp.einsum(product, flat, k, preferred_element_type=jnp.float32) * scale
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        return s + mask

    old = scores("bhqd,bhdk->bhqk", cache_keys, masks.cache)
    new = scores("bhqd,bhkd->bhqk", keys, masks.block)
    top = jnp.maximum(jnp.max(old, -1, keepdims=True), jnp.max(new, -1, keepdims=True))
    sink = None if sinks is None else jnp.repeat(sinks, size, axis=1)[..., None]
    top = top if sink is None else jnp.maximum(top, sink)
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = jnp.sum(old, -1, keepdims=True) + jnp.sum(new, -1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - top)

    def mix(weights: Array, v: Array) -> Array:
        return jnp.einsum(
            "bhqk,bhkd->bhqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )

    out = (mix(old, cache_values) + mix(new, values)) / total
    return out.reshape(query.shape).astype(query.dtype)


class Attention(nnx.Module):
    """Grouped-query attention. Queries, keys and values are one matrix [D, Hkv, G + 2, Dh].

    Each key/value head keeps its G query heads, its key and its value side by side, so that one product computes all
    three and the Hkv axis can still be split over devices. `inputs` is the width of what enters, by default D.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: LayerConfig,
        *,
        dtype,
        rngs: nnx.Rngs,
        inputs: int | None = None,
    ):
        heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        width, head_dim = config.hidden_size, config.head_dim
        self.qkv = matrix(rngs, inputs or width, heads, group + 2, head_dim, dtype=dtype)
        self.output = matrix(rngs, heads * group * head_dim, width, dtype=dtype)
        self.qkv_bias = (
            nnx.Param(jnp.zeros((heads, group + 2, head_dim), dtype)) if config.qkv_bias else None
        )
        self.gate = (
            matrix(rngs, inputs or width, heads, group, head_dim, dtype=dtype)
            if config.output_gate
            else None
        )
        self.output_bias = nnx.Param(jnp.zeros(width, dtype)) if config.output_bias else None
        self.query_norm = RMSNorm(head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(head_dim, config.norm_eps) if config.qk_norm else None
        # like the norms' weights in float32, as the scores that they join
        self.sinks = nnx.Param(jnp.zeros((heads, group), jnp.float32)) if config.sinks else None
        self.scale, self.softcap = config.scale, config.attention_softcap

    def split(self, x: Array, angles: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """x [B, T, D] -> rotated queries [B, Hkv, G, T, Dh] and keys, and values, [B, Hkv, T, Dh]."""
        bias = None if self.qkv_bias is None else self.qkv_bias[...]
        qkv = project(x, self.qkv[...], bias)
        qkv = jnp.transpose(qkv, (0, 2, 3, 1, 4))  # [B, Hkv, G + 2, T, Dh]
        query, key, value = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        cos, sin = (a[:, None, None] for a in angles)
        return rotate(query, cos, sin), rotate(key, cos, sin)[:, :, 0], value

    def join(self, mixed: Array, x: Array) -> Array:
        """What the queries of x [B, T, D] gathered, [B, Hkv, G, T, Dh] -> [B, T, D]."""
        mixed = jnp.transpose(mixed, (0, 3, 1, 2, 4))
        if self.gate is not None:
            mixed = mixed * jax.nn.sigmoid(project(x, self.gate[...]))
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        bias = None if self.output_bias is None else self.output_bias[...]
        return project(mixed, self.output[...], bias)

    def __call__(
        self,
        x: Array,
        angles: tuple[Array, Array],
        masks: Masks,
        cache_keys: Array,
        cache_values: Array,
        prior: Prior | None = None,
    ) -> tuple[Array, Array, Array]:
        """x [B, T, D] -> (output [B, T, D], keys and values of the block [B, Hkv, P, Dh])."""
        query, key, value = self.split(x, angles)
        if prior is not None:
            key, value = prior.extend(key, value)
        mixed = attend(
            query,
            key,
            value,
            cache_keys,
            cache_values,
            masks,
            self.scale,
            self.softcap,
            None if self.sinks is None else self.sinks[...],
        )
        return self.join(mixed, x), key, value


class LatentAttention(Attention):
    """Attention whose keys and values are made from one narrow vector per token (see `Latent`). The cache holds them as made,
    values padded to the keys' width, so that everything else is as for any attention.

    R latent width, N dimensions without a position, V of a value.
    """

    def __init__(self, config: TransformerConfig, latent: Latent, *, dtype, rngs: nnx.Rngs):
        width, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        self.latent, self.scale, self.softcap = latent, config.scale, config.attention_softcap
        rank = latent.query_rank
        self.query_down = None if rank is None else matrix(rngs, width, rank, dtype=dtype)
        self.query_norm = None if rank is None else RMSNorm(rank, LATENT_EPS)
        self.query = matrix(rngs, rank or width, heads, head_dim, dtype=dtype)
        self.down = matrix(rngs, width, latent.rank + config.rotary, dtype=dtype)
        self.norm = RMSNorm(latent.rank, LATENT_EPS)
        made = latent.content_dim + latent.value_dim
        self.up = matrix(rngs, latent.rank, heads, made, dtype=dtype)
        self.output = matrix(rngs, heads * latent.value_dim, width, dtype=dtype)
        self.sinks = None

    def split(self, x: Array, angles: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        latent = self.latent
        cos, sin = (a[:, :, None] for a in angles)

        def turn(a: Array) -> Array:
            """[B, T, heads, rotated]"""
            if latent.interleaved:
                # queries and keys alike, so that their products do not change
                a = jnp.concatenate([a[..., ::2], a[..., 1::2]], axis=-1)
            return rotate(a, cos, sin)

        asked = x
        if self.query_down is not None and self.query_norm is not None:
            asked = self.query_norm(project(x, self.query_down[...]))
        query = project(asked, self.query[...])
        content, turned = jnp.split(query, [latent.content_dim], axis=-1)
        query = jnp.concatenate([content, turn(turned)], axis=-1)
        narrow, common = jnp.split(project(x, self.down[...]), [latent.rank], axis=-1)
        made = project(self.norm(narrow), self.up[...])
        content, value = jnp.split(made, [latent.content_dim], axis=-1)
        common = turn(common[:, :, None])
        common = jnp.broadcast_to(common, (*content.shape[:-1], common.shape[-1]))
        key = jnp.concatenate([content, common], axis=-1)
        value = jnp.pad(value, ((0, 0),) * 3 + ((0, key.shape[-1] - value.shape[-1]),))
        query, key, value = (jnp.swapaxes(a, 1, 2) for a in (query, key, value))
        return query[:, :, None], key, value

    def join(self, mixed: Array, x: Array) -> Array:
        mixed = jnp.moveaxis(mixed[:, :, 0, :, : self.latent.value_dim], 1, 2)
        return project(mixed.reshape(*mixed.shape[:2], -1), self.output[...])
