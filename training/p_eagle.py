"""P-EAGLE's training (arXiv 2602.01469): every depth of every anchor in one pass, most of the deep ones dropped.

B rows, T tokens, K depths, E masked elements, A taps, H head width, Ht target width.

An element (anchor a, depth d) is the slot d of the round that starts at anchor a. At depth 0 it is EAGLE-3's row: token
x[a + 1] and the target's states at a. Deeper it carries the mask token and the learned vector, sits at position a + d, and
predicts x[a + d + 2]. It sees the rows of depth 0 up to its anchor, and its own chain up to itself: just what it will see
when it drafts. Chains are nested: an element's chain is there with it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.models.attention import NEVER
from training.eagle3 import Batch, attend_anchors
from training.losses import Teacher, shift_left

PIECE = 512  # elements whose scores exist at a time


@dataclass(frozen=True)
class Layout:
    """How many anchors are kept to each depth, and where their elements lie: depth by depth, anchors in one order.

    Attributes:
      counts: of the depths 1, ..., K - 1, falling; the first counts[d - 1] anchors are kept to depth d.
    """

    counts: tuple[int, ...]

    @property
    def depth(self) -> np.ndarray:
        """int32[E]."""
        return np.repeat(np.arange(1, len(self.counts) + 1), self.counts).astype(np.int32)

    @property
    def number(self) -> np.ndarray:
        """int32[E], which of the kept anchors."""
        return np.concatenate([np.arange(n) for n in self.counts]).astype(np.int32)

    @property
    def chain(self) -> np.ndarray:
        """int32[E, K - 1], the element of the same anchor at each depth, -1 past the own one."""
        starts = np.concatenate([[0], np.cumsum(self.counts)[:-1]])
        depths = np.arange(len(self.counts))
        found = starts[None] + self.number[:, None]
        return np.where(depths[None] < self.depth[:, None], found, -1).astype(np.int32)

    def parts(self, count: int) -> tuple["Layout", np.ndarray]:
        """Every `count`-th anchor with its whole chain: the layout of each such part, and int32[count, E / count], which
        elements it has."""
        small = Layout(tuple(n // count for n in self.counts))
        starts = np.concatenate([[0], np.cumsum(self.counts)[:-1]])
        places = starts[small.depth - 1] + count * small.number
        return small, (places[None] + np.arange(count)[:, None]).astype(np.int32)


def layout(
    length: int,
    depths: int,
    ratio: float,
    floor: float,
    density: float = 1.0,
    partitions: int = 1,
) -> Layout:
    """Conditional drop-token sampling in fixed numbers: depth d keeps a share max(ratio ** d, floor) of the anchors.

    Args:
      length: T.
      depths: K.
      ratio, floor: see above.
      density: share of tokens that can be anchors at all.
      partitions: what the numbers must be multiples of.

    Raises:
      ValueError: shares outside (0, 1], more parts than anchors.
    """
    for name, value in (("ratio", ratio), ("floor", floor), ("density", density)):
        if not 0 < value <= 1:
            raise ValueError(f"{name} must be in (0, 1], got {value}")
    if partitions > length:
        raise ValueError(f"partitions must be at most the {length} tokens, got {partitions}")
    shares = [max(ratio**d, floor) for d in range(1, depths)]
    counts = (int(length * density * share) // partitions * partitions for share in shares)
    return Layout(tuple(max(partitions, n) for n in counts))


@struct.dataclass
class Elements:
    """The masked elements of a batch.

    Attributes:
      anchor: int32[B, E].
      valid: bool[B, E], whether they count.
      layout: static.
    """

    anchor: Array
    valid: Array
    layout: Layout = struct.field(pytree_node=False)

    def previous(self, tokens: Array) -> Array:
        """int32[B, E], the token before the one that each element predicts, of [B, T]: what was drafted before it, if all
        went well."""
        at = jnp.minimum(self.anchor + self.layout.depth + 1, tokens.shape[1] - 1)
        return jnp.take_along_axis(tokens, at, axis=1)


def sample(key: Array, valid: Array, shape: Layout) -> Elements:
    """Draws the anchors that are kept, in random order: those of a depth are a random part of those before it.

    Args:
      key: random key.
      valid: bool[K, B, T] of `eagle3.supervised`.
    """
    # anchors that reach depth 1 first, the others last
    scores = jax.random.uniform(key, valid.shape[1:]) - ~valid[1]
    order = jax.lax.top_k(scores, shape.counts[0])[1].astype(jnp.int32)  # [B, counts[0]]
    anchor = jnp.take(order, shape.number, axis=1)
    depth = jnp.broadcast_to(shape.depth, anchor.shape)
    rows = jnp.arange(anchor.shape[0])[:, None]
    return Elements(anchor=anchor, valid=valid[depth, rows, anchor], layout=shape)


def attend_elements(
    query: Array,
    keys: Array,
    values: Array,
    context: Array,
    document: Array,
    anchor: Array,
    shape: Layout,
    *,
    scale: float,
    window: int | None = None,
) -> Array:
    """Attention of the masked elements: to depth 0 up to the anchor, and to their own chain.

    Scores are [E, T + K - 1] for one piece of the elements at a time; no mask of E by E entries.

    Args:
      query: [B, Hkv, G, E, Dh].
      keys, values: the elements' own, [B, Hkv, E, Dh].
      context: keys and values of depth 0, [2, B, Hkv, T, Dh].
      document: int32[B, T]; anchor: int32[B, E].
      window: a query sees positions less than `window` before its own.
    """
    chain = jnp.asarray(shape.chain)
    depth = jnp.asarray(shape.depth)
    place = jnp.arange(document.shape[1])

    def piece(query: Array, anchor: Array, depth: Array, chain: Array, *arrays: Array) -> Array:
        context, keys, values = arrays
        of_anchor = jnp.take_along_axis(document, anchor, axis=1)
        seen = (place <= anchor[..., None]) & (document[:, None] == of_anchor[..., None])
        own = chain >= 0
        if window is not None:
            seen &= place > (anchor + depth)[..., None] - window
            own &= jnp.arange(1, chain.shape[1] + 1) > depth[:, None] - window
        far = jnp.einsum("bhgtd,bhsd->bhgts", query, context[0], preferred_element_type=jnp.float32)
        at = jnp.maximum(chain, 0)
        near = jnp.einsum(
            "bhgtd,bhtkd->bhgtk", query, keys[:, :, at], preferred_element_type=jnp.float32
        )
        scores = jnp.concatenate(
            [
                jnp.where(seen[:, None, None], far * scale, NEVER),
                jnp.where(own, near * scale, NEVER),
            ],
            axis=-1,
        )
        weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        size = place.size
        mixed = jnp.einsum("bhgts,bhsd->bhgtd", weights[..., :size], context[1])
        return mixed + jnp.einsum("bhgtk,bhtkd->bhgtd", weights[..., size:], values[:, :, at])

    total = query.shape[3]
    if total <= PIECE:
        return piece(query, anchor, depth, chain, context, keys, values)
    run = jax.checkpoint(piece)
    pieces = []
    for start in range(0, total, PIECE):
        part = slice(start, start + PIECE)
        pieces.append(
            run(
                query[:, :, :, part],
                anchor[:, part],
                depth[part],
                chain[part],
                context,
                keys,
                values,
            )
        )
    return jnp.concatenate(pieces, axis=3)


def unroll_parallel(
    head: Any, target: Any, batch: Batch, taps: Array, elements: Elements
) -> tuple[Array, Array]:
    """All elements in one pass of the head.

    Args:
      taps: [B, T, A, Ht], the target's states.

    Returns:
      what the head makes of the rows of depth 0, [B, T, H], and of the masked elements, [B, E, H].
    """
    decoder, shape = head.config.decoder, elements.layout
    size, tokens = batch.tokens.shape[1], batch.tokens
    rows, count = tokens.shape[0], elements.anchor.shape[1]
    mask = jnp.full((rows, count), head.config.mask_token_id, jnp.int32)
    embedded = head.embed(target, jnp.concatenate([shift_left(tokens, 1), mask], axis=1))
    hidden = head.fuse(taps)
    fused = jnp.broadcast_to(head.fused_mask(), (rows, count, hidden.shape[-1]))
    index = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
    positions = jnp.concatenate([index, elements.anchor + shape.depth], axis=1)

    def gather(i: int, query: Array, key: Array, value: Array) -> Array:
        window = decoder.layers[i].window
        near = attend_anchors(
            query[:, :, :, :size],
            [key[:, :, :size]],
            [value[:, :, :size]],
            batch.document,
            scale=decoder.scale,
            window=window,
        )
        far = attend_elements(
            query[:, :, :, size:],
            key[:, :, size:],
            value[:, :, size:],
            jnp.stack([key[:, :, :size], value[:, :, :size]]),
            batch.document,
            elements.anchor,
            shape,
            scale=decoder.scale,
            window=window,
        )
        return jnp.concatenate([near, far], axis=3)

    states = head.run(embedded, jnp.concatenate([hidden, fused], axis=1), positions, gather)
    return states[:, :size], states[:, size:]


def aligned_teacher(teacher: Teacher, elements: Elements) -> Teacher:
    """The teacher's rows beside all elements, [B, T + E, ...]: at depth 0 the next token's, deeper that of a + d + 1."""
    size = teacher.last.shape[1]
    at = jnp.minimum(elements.anchor + elements.layout.depth + 1, size - 1)

    def beside(x: Array) -> Array:
        deep = jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1)
        return jnp.concatenate([shift_left(x, 1), deep], axis=1)

    return jax.tree.map(beside, teacher)
