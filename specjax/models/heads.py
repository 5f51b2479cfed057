"""What networks that draft from a target's hidden states have in common.

B rows, T tokens, A taps, Ht target width, H head width, V target vocabulary, Vd draft vocabulary, R rank.

Row t of such a head pairs the token x[t+1] with the target's hidden states at t, sits at position t, and predicts x[t+2]:
the states at t have settled what x[t+1] is drawn from, the token says which it became. A drafted token has no states of
the target yet, and takes the head's own output at the row before instead.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.attention import Prior, attend, masks
from specjax.models.cache import Block, Cache
from specjax.models.config import ClampedSwiGLU, TransformerConfig
from specjax.models.layers import RMSNorm, matrix, project, rotation
from specjax.models.transformer import Target, Transformer

Attend = Callable[[int, Array, Array, Array], Array]
"""What a layer's queries gather: (layer, queries [B, Hkv, G, T, Dh], keys and values [B, Hkv, T, Dh]) -> like queries.
Decoding and training differ in nothing but this."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Shapes of a head of any kind.

    Attributes:
      decoder: of its layers; `vocab_size` is V, `hidden_size` H.
      target_hidden_size: Ht.
      draft_vocab_size: Vd; equal to V means that drafts are the target's ids.
      taps: the target's layers whose entering hidden states it reads (0 the embeddings, L what enters the final norm).
      own_embedding: it has an embedding table of its own; otherwise it uses the target's.
      trained_depth: tokens that it was trained to draft in a row; None where nobody knows.
    """

    decoder: TransformerConfig
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    own_embedding: bool = False
    trained_depth: int | None = None

    def __post_init__(self):
        width, target = self.decoder.hidden_size, self.target_hidden_size
        sinks, activation = self.decoder.sinks, self.decoder.activation
        if sinks or isinstance(activation, ClampedSwiGLU):
            raise ValueError(
                "decoder: a head has no attention sinks and a plain activation; got "
                f"sinks {sinks} and activation {activation}"
            )
        if not self.own_embedding and width != target:
            raise ValueError(
                f"a head of width {width} cannot use the embedding of a target of width {target}: "
                "it needs its own"
            )
        if not 1 <= self.draft_vocab_size <= self.decoder.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be in 1..{self.decoder.vocab_size}, got {self.draft_vocab_size}"
            )

    def misplaced_taps(self, layers: int) -> list[int]:
        """Those that a target of `layers` layers does not have."""
        return [i for i in self.taps if not 0 <= i <= layers]

    @property
    def mapped(self) -> bool:
        """Whether draft ids differ from the target's."""
        return self.draft_vocab_size < self.decoder.vocab_size


def check_head(config: HeadConfig, target: Target, num_draft: int | None = None) -> None:
    """Raises ValueError where a head was made for another target; every mismatch is named.

    Args:
      num_draft: tokens to be drafted in a row; more than the head was trained for is worth a warning.
    """
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
        if bad := config.misplaced_taps(layers):
            problems.append(f"taps {bad}, the target has 0..{layers}")
    elif not config.own_embedding and not hasattr(target, "lookup"):
        problems.append(
            f"no embedding of its own, and {type(target).__name__} has no method lookup(tokens)"
        )
    if problems:
        raise ValueError("head was made for another target: " + "; ".join(problems))
    if num_draft and config.trained_depth and num_draft > config.trained_depth:
        warnings.warn(
            f"num_draft is {num_draft}, but the head was trained to draft {config.trained_depth} tokens in a row: "
            "those after them will rarely stand",
            stacklevel=2,
        )


class Markov(nnx.Module):
    """A low-rank bias on a slot's logits from the draft before it, which one pass over all slots cannot know (DSpark's
    vanilla head, arXiv 2607.05147). It begins as none."""

    def __init__(self, size: int, rank: int, *, dtype, rngs: nnx.Rngs):
        self.before = matrix(rngs, size, rank, dtype=dtype, inputs=rank)
        self.after = nnx.Param(jnp.zeros((rank, size), dtype))

    def __call__(self, drafted: Array) -> Array:
        """Draft ids int32[...] -> float32[..., Vd]; a negative id, which the draft vocabulary lacks, adds nothing."""
        rows = jnp.take(self.before[...], jnp.maximum(drafted, 0), axis=0, mode="clip")
        bias = project(rows, self.after[...], dtype=jnp.float32)
        return jnp.where((drafted >= 0)[..., None], bias, 0.0)


class Readout(nnx.Module):
    """Final norm and logits over the draft vocabulary. `normed` says that what comes in has been through the norm."""

    def __init__(
        self,
        width: int,
        size: int,
        eps: float,
        normed: bool,
        markov_rank: int = 0,
        *,
        dtype,
        rngs: nnx.Rngs,
    ):
        self.norm = RMSNorm(width, eps)
        self.head: Any = matrix(rngs, width, size, dtype=dtype)
        self.normed = normed
        self.markov = Markov(size, markov_rank, dtype=dtype, rngs=rngs) if markov_rank else None

    def __call__(self, x: Array, previous: Array | None = None) -> Array:
        """[..., H] -> float32[..., Vd]; `previous` int32[...] are the draft ids of the drafts before."""
        x = x if self.normed else self.norm(x)
        logits = project(x, self.head[...], dtype=jnp.float32)
        if self.markov is None or previous is None:
            return logits
        return logits + self.markov(previous)


class Head(nnx.Module):
    """Layers, final norm, logits over the draft vocabulary: what heads of every kind share. A plain pytree.

    A kind says what its rows read (`fuse`) and how they enter each layer (`enter`).

    Args:
      config: shapes and switches.
      normed: what a drafted token hands to the next is the final norm's output, not what enters it.
      markov_rank: R of the correction by the draft before; 0 is none.
      dtype: of the matrices; norm weights are always float32.
      rngs: for random parameters.
    """

    config: Any

    def __init__(
        self,
        config: HeadConfig,
        *,
        normed: bool,
        markov_rank: int = 0,
        dtype,
        rngs: nnx.Rngs,
    ):
        decoder = config.decoder
        width = decoder.hidden_size
        self.config = config
        self.readout = Readout(
            width,
            config.draft_vocab_size,
            decoder.norm_eps,
            normed,
            markov_rank,
            dtype=dtype,
            rngs=rngs,
        )
        self.embedding = (
            matrix(rngs, decoder.vocab_size, width, dtype=dtype, inputs=width)
            if config.own_embedding
            else None
        )
        self.ids = (
            nnx.Variable(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))
            if config.mapped
            else None
        )

    @property
    def dtype(self):
        return self.readout.head.dtype

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

    @abstractmethod
    def fuse(self, taps: Array) -> Array:
        """The target's hidden states [..., A, Ht] -> what a row reads of them, [..., H]."""

    @abstractmethod
    def enter(
        self, i: int, embedded: Array, x: Array, positions: Array
    ) -> tuple[Any, Array, Array]:
        """Layer i, what its attention reads of the stream x (for the first layer: of the hidden states), and the residual."""

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
            with jax.named_scope(f"head{i}"):
                layer, normed, residual = self.enter(i, embedded, x, positions)
                query, key, value = layer.attention.split(normed, angles[config.rope])
                x = layer.leave(
                    residual, layer.attention.join(attend(i, query, key, value), normed)
                )
        return self.readout.norm(x) if self.readout.normed else x

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
                decoder.attention_softcap,
            )

        x = self.run(embedded, hidden, positions, gather)
        after = jnp.minimum(jnp.argmax(x[0, 0]).astype(jnp.int32), 0)
        return x, Block(keys=tuple(keys), values=tuple(values), after=after)
