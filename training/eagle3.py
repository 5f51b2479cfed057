"""EAGLE-3's training-time test (arXiv 2503.01840): a head is trained on its own outputs, S tokens deep.

B rows, T tokens, S steps, A taps, H head width, Ht target width.

Anchor t at step k stands for the k-th token drafted after x[t + 1], with the true tokens forced: it combines the embedding
of x[t + 1 + k] with what step k - 1 made of the same anchor (at step 0 with the target's states at t), sits at position
t + k, and predicts x[t + 2 + k].
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.models.attention import NEVER
from training.losses import shift_left

PIECE = 512  # queries whose scores exist at a time; longer sequences are cut into 8 pieces


@struct.dataclass
class Batch:
    """Packed sequences.

    Attributes:
      tokens: int32[B, T].
      wanted: bool[B, T], tokens that the head shall learn to draft: the assistant's.
      document: int32[B, T], which document of the row a token belongs to, 1, 2, ...; 0 is padding.
    """

    tokens: Array
    wanted: Array
    document: Array


def supervised(batch: Batch, steps: int) -> Array:
    """Which anchors count at each step: bool[S, B, T].

    Step k of anchor t counts if x[t + 1], ..., x[t + 2 + k] are all wanted and of one document: the token that the round
    starts from and all that are drafted. (Two public trainers look one token early, which leaves out the first draft of
    every answer and trains on what follows its end.)
    """
    first = shift_left(batch.document, 1)
    alive = shift_left(batch.wanted, 1) & (first > 0) & (first == batch.document)
    rows = []
    for k in range(steps):
        there = shift_left(batch.document, 2 + k) == first
        alive = alive & shift_left(batch.wanted, 2 + k) & there
        rows.append(alive)
    return jnp.stack(rows)


def document_positions(document: Array) -> Array:
    """int32[B, T], positions that begin with every document, as they do in decoding: some MTP modules read the first one
    otherwise."""
    index = jnp.broadcast_to(jnp.arange(document.shape[1], dtype=jnp.int32), document.shape)
    begins = document != jnp.pad(document, ((0, 0), (1, 0)))[:, :-1]
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def attend_anchors(
    query: Array,
    keys: list[Array],
    values: list[Array],
    document: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attention of step k = len(keys) - 1: to step 0's keys of rows before it, and to its own row's keys of later steps.

    Causal scores with k more columns; no mask of S T by S T entries. Cost T (T / 2 + k).

    Args:
      query: [B, Hkv, G, T, Dh].
      keys, values: of the steps so far, each [B, Hkv, T, Dh].
      document: int32[B, T].
      scale: on scores.
      window: a query sees positions less than `window` before its own.
      softcap: c * tanh(score / c); None is off.
      sinks: float32[Hkv, G], one more score of each query head, without a value; None is none.

    Returns:
      like query.
    """
    length, step = query.shape[3], len(keys) - 1

    def cap(scores: Array) -> Array:
        scores = scores * scale
        return scores if softcap is None else softcap * jnp.tanh(scores / softcap)

    # of later steps, as far as the window reaches back
    near = slice(1, None) if window is None else slice(max(1, step + 1 - window), None)
    own_keys = jnp.stack(keys[near], axis=3) if step else None  # [B, Hkv, T, k, Dh]
    own_values = jnp.stack(values[near], axis=3) if step else None

    def piece(start: int, stop: int, query: Array, key: Array, value: Array, own: Any) -> Array:
        at, to = jnp.arange(start, stop)[:, None], jnp.arange(stop)
        seen = (to <= at) & (document[:, start:stop, None] == document[:, None, :stop])
        if window is not None:
            seen &= to > at + step - window
        scores = jnp.einsum("bhgtd,bhsd->bhgts", query, key, preferred_element_type=jnp.float32)
        scores = jnp.where(seen[:, None, None], cap(scores), NEVER)
        if own is not None:
            more = jnp.einsum(
                "bhgtd,bhtkd->bhgtk", query, own[0], preferred_element_type=jnp.float32
            )
            scores = jnp.concatenate([scores, cap(more)], axis=-1)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks[..., None, None], (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        weights = weights if sinks is None else weights[..., :-1]
        mixed = jnp.einsum("bhgts,bhsd->bhgtd", weights[..., :stop], value)
        if own is not None:
            mixed += jnp.einsum("bhgtk,bhtkd->bhgtd", weights[..., stop:], own[1])
        return mixed

    size = max(PIECE, -(-length // 8))
    if length <= size:
        own = None if own_keys is None else (own_keys, own_values)
        return piece(0, length, query, keys[0], values[0], own)
    pieces = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        own = None
        if own_keys is not None and own_values is not None:
            own = (own_keys[:, :, start:stop], own_values[:, :, start:stop])
        # scores are computed again in the backward pass, so that they exist for one piece at a time
        run = jax.checkpoint(piece, static_argnums=(0, 1))
        pieces.append(
            run(
                start,
                stop,
                query[:, :, :, start:stop],
                keys[0][:, :, :stop],
                values[0][:, :, :stop],
                own,
            )
        )
    return jnp.concatenate(pieces, axis=3)


def unroll(head: Any, target: Any, batch: Batch, taps: Array, steps: int) -> Array:
    """What each step makes of every anchor.

    Args:
      head: a `Head`.
      target: for the embedding, where the head has none of its own.
      batch: sequences.
      taps: [B, T, A, Ht], the target's states.
      steps: S.

    Returns:
      [S, B, T, H], which the head's readout turns into logits.
    """
    decoder = head.config.decoder
    embedded = head.embed(target, batch.tokens)
    positions = document_positions(batch.document)
    keys: list[list[Array]] = [[] for _ in decoder.layers]
    values: list[list[Array]] = [[] for _ in decoder.layers]

    def gather(i: int, query: Array, key: Array, value: Array) -> Array:
        keys[i].append(key)
        values[i].append(value)
        return attend_anchors(
            query,
            keys[i],
            values[i],
            batch.document,
            scale=decoder.scale,
            window=decoder.layers[i].window,
            softcap=decoder.attention_softcap,
        )

    hidden, states = head.fuse(taps), []
    for k in range(steps):
        hidden = head.run(shift_left(embedded, k + 1), hidden, positions + k, gather)
        states.append(hidden)
    return jnp.stack(states)
