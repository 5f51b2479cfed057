"""Networks that draft from a target's hidden states: EAGLE-3 (arXiv 2503.01840), P-EAGLE (arXiv 2602.01469) and variants.

B rows, T tokens, A taps, Ht target width, H head width, V target vocabulary, Vd draft vocabulary.

Row t of such a head pairs the token x[t+1] with the target's hidden states at t, sits at position t, and predicts x[t+2]:
the states at t have settled what x[t+1] is drawn from, the token says which it became. A drafted token has no states of
the target yet, and takes the head's own output at the row before instead; under P-EAGLE it takes neither token nor output
of earlier drafts but a mask token and one learned vector, so that all drafts come out of one pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.attention import Attention, Prior, attend, masks
from specjax.models.cache import Block, Cache
from specjax.models.config import TransformerConfig
from specjax.models.layers import MLP, RMSNorm, matrix, project, rotation
from specjax.models.transformer import DecoderLayer, Target, Transformer

Attend = Callable[[int, Array, Array, Array], Array]
"""What a layer's queries gather: (layer, queries [B, Hkv, G, T, Dh], keys and values [B, Hkv, T, Dh]) -> like queries.
Decoding and training differ in nothing but this."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Shapes and switches of a head.

    Attributes:
      decoder: of its layers; `vocab_size` is V, `hidden_size` H.
      target_hidden_size: Ht.
      draft_vocab_size: Vd; equal to V means that drafts are the target's ids.
      taps: the target's layers whose entering hidden states it reads (0 the embeddings, L what enters the final norm).
      norm_before_residual: the first layer's residual is the normed hidden state, not the raw one.
      norm_before_fc: one norm over all taps before they are fused.
      fc_norm: a norm for each tap before they are fused (EAGLE-3.1).
      norm_output: what a drafted token hands to the next is the final norm's output (EAGLE-3.1).
      own_embedding: it has an embedding table of its own; otherwise it uses the target's.
      mask_token_id: P-EAGLE's mask token; None for heads that draft one token after the other.
    """

    decoder: TransformerConfig
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    mask_token_id: int | None = None

    def __post_init__(self):
        width, target = self.decoder.hidden_size, self.target_hidden_size
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude one another, got both")
        if not self.own_embedding and width != target:
            raise ValueError(
                f"a head of width {width} cannot use the embedding of a target of width {target}: "
                "it needs its own"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.decoder.vocab_size:
            raise ValueError(
                f"mask_token_id must be in 0..{self.decoder.vocab_size - 1}, got {self.mask_token_id}"
            )
        if not 1 <= self.draft_vocab_size <= self.decoder.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be in 1..{self.decoder.vocab_size}, got {self.draft_vocab_size}"
            )

    @property
    def mapped(self) -> bool:
        """Whether draft ids differ from the target's."""
        return self.draft_vocab_size < self.decoder.vocab_size


def check_head(config: HeadConfig, target: Target) -> None:
    """Raises ValueError where a head was made for another target; every mismatch is named."""
    problems = []
    if config.decoder.vocab_size != target.vocab_size:
        problems.append(
            f"vocabulary of {config.decoder.vocab_size} tokens, the target's has {target.vocab_size}"
        )
    if isinstance(target, Transformer):
        width, layers = target.config.hidden_size, target.config.num_layers
        if config.target_hidden_size != width:
            problems.append(
                f"hidden states of width {config.target_hidden_size}, the target's have {width}"
            )
        if bad := [i for i in config.taps if not 0 <= i <= layers]:
            problems.append(f"taps {bad}, the target has 0..{layers}")
    elif not config.own_embedding and not hasattr(target, "lookup"):
        problems.append(
            f"no embedding of its own, and {type(target).__name__} has no method lookup(tokens)"
        )
    if problems:
        raise ValueError("head was made for another target: " + "; ".join(problems))


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

    def __init__(self, config: HeadConfig, *, dtype, rngs: nnx.Rngs):
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


class Readout(nnx.Module):
    """Final norm and logits over the draft vocabulary. `normed` says that what comes in has been through the norm."""

    def __init__(self, width: int, size: int, eps: float, normed: bool, *, dtype, rngs: nnx.Rngs):
        self.norm = RMSNorm(width, eps)
        self.head: Any = matrix(rngs, width, size, dtype=dtype)
        self.normed = normed

    def __call__(self, x: Array) -> Array:
        """[..., H] -> float32[..., Vd]."""
        x = x if self.normed else self.norm(x)
        return project(x, self.head[...], dtype=jnp.float32)


class EagleHead(nnx.Module):
    """Fusion of the taps, decoder layers, final norm, logits over the draft vocabulary. A plain pytree.

    Args:
      config: shapes and switches.
      dtype: of the matrices; norm weights are always float32.
      rngs: for random parameters.
    """

    def __init__(self, config: HeadConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        decoder, count = config.decoder, len(config.taps)
        width, wide = decoder.hidden_size, count * config.target_hidden_size
        self.config = config
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
        self.readout = Readout(
            width,
            config.draft_vocab_size,
            decoder.norm_eps,
            config.norm_output,
            dtype=dtype,
            rngs=rngs,
        )
        self.embedding = (
            matrix(rngs, decoder.vocab_size, width, dtype=dtype, inputs=width)
            if config.own_embedding
            else None
        )
        # stands for the taps that a masked slot does not have; before fusion, as in public files
        self.mask_hidden = (
            nnx.Param(jax.random.normal(rngs.params(), (1, 1, wide), dtype))
            if config.mask_token_id is not None
            else None
        )
        self.ids = (
            nnx.Variable(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))
            if config.mapped
            else None
        )

    @property
    def dtype(self):
        return self.fc.dtype

    @property
    def target_ids(self) -> Array | None:
        """int32[Vd], the target's id of every draft id; None where they are the same."""
        return None if self.ids is None else self.ids[...]

    def init_cache(self, batch: int, slots: int) -> Cache:
        c = self.config.decoder
        return Cache.create(c.num_layers, batch, c.num_kv_heads, slots, c.head_dim, self.dtype)

    def empty_block(self, batch: int, width: int) -> Block:
        """Room for the keys and values of `width` drafts."""
        c = self.config.decoder
        shape = (batch, c.num_kv_heads, width, c.head_dim)
        zeros = tuple(jnp.zeros(shape, self.dtype) for _ in range(c.num_layers))
        return Block(keys=zeros, values=zeros, after=jnp.int32(0))

    def embed(self, target: Target, tokens: Array) -> Array:
        """tokens [B, T] -> rows of its own embedding table or of the target's, [B, T, H]."""
        if self.embedding is not None:
            return jnp.take(self.embedding[...], tokens, axis=0, mode="clip")
        table: Any = target  # `check_head` has seen that it has this method
        return table.lookup(tokens).astype(self.dtype)

    def fuse(self, taps: Array) -> Array:
        """The target's hidden states [..., A, Ht] -> [..., H]."""
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

    def run(self, embedded: Array, hidden: Array, positions: Array, attend: Attend) -> Array:
        """All layers over [B, T] rows.

        Args:
          embedded: [B, T, H], of the tokens that follow the rows.
          hidden: [B, T, H], fused taps, or what an earlier row handed over.
          positions: int32[B, T].
          attend: see `Attend`.

        Returns:
          [B, T, H], for `logits` and for the next row.
        """
        decoder = self.config.decoder
        angles = [rotation(rope, decoder.rotary, positions) for rope in decoder.ropes]
        x = hidden
        for i, config in enumerate(decoder.layers):
            if i == 0:
                layer = self.first
                normed, residual = layer.enter(embedded, x)
            else:
                layer = self.others[i - 1]
                normed, residual = layer.attention_norm(x), x
            with jax.named_scope(f"head{i}"):
                query, key, value = layer.attention.split(normed, angles[config.rope])
                x = layer.leave(residual, layer.attention.join(attend(i, query, key, value)))
        return self.readout.norm(x) if self.config.norm_output else x

    def logits(self, x: Array) -> Array:
        """What `run` returned -> float32[..., Vd]."""
        return self.readout(x)

    def __call__(
        self,
        embedded: Array,
        hidden: Array,
        positions: Array,
        cache: Cache,
        mask: Array | None = None,
        *,
        prior: Block | None = None,
        at: Array | int = 0,
        key_positions: Array | None = None,
    ) -> tuple[Array, Block]:
        """`run` over new rows that see the committed ones; arguments as for `Transformer.run`.

        Returns:
          [B, T, H] and the layers' keys and values (P wide with `prior`).
        """
        decoder = self.config.decoder
        group = decoder.num_heads // decoder.num_kv_heads
        seen = {
            window: masks(positions, cache.length, cache.slots, mask, window, group, key_positions)
            for window in {layer.window for layer in decoder.layers}
        }
        keys, values = [], []

        def gather(i: int, query: Array, key: Array, value: Array) -> Array:
            if prior is not None:
                place = Prior(prior.keys[i], prior.values[i], jnp.asarray(at, jnp.int32))
                key, value = place.extend(key, value)
            keys.append(key)
            values.append(value)
            return attend(
                query,
                key,
                value,
                cache.keys[i],
                cache.values[i],
                seen[decoder.layers[i].window],
                decoder.scale,
            )

        x = self.run(embedded, hidden, positions, gather)
        after = jnp.minimum(jnp.argmax(x[0, 0]).astype(jnp.int32), 0)
        return x, Block(keys=tuple(keys), values=tuple(values), after=after)
