"""n-gram drafts from a hash map of the row's history: llama.cpp's `ngram-map-k` and `ngram-map-k4v`.

A key is n tokens in a row; its value is where they occurred and how the text went on. Looking up costs the same at any
length of the history. B rows, T observed tokens, H slots, N = m drafted tokens.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.drafters.base import Context, Observation, Proposal, drafts_committed
from specjax.models.transformer import Target


def rolling_hash(windows: Array) -> Array:
    """uint32[...] of int32[..., n] windows (multiplicative, as in llama.cpp, with the high bits folded down)."""
    value = jnp.zeros(windows.shape[:-1], jnp.uint32)
    for i in range(windows.shape[-1]):
        value = value * np.uint32(2654435761) + windows[..., i].astype(jnp.uint32)
    return value ^ (value >> 15)


def check_sizes(n: int, m: int, min_hits: int, slots: int) -> None:
    """Raises ValueError naming the argument, what was got and what was expected."""
    for name, value in (("n", n), ("m", m), ("min_hits", min_hits)):
        if int(value) != value or value < 1:
            raise ValueError(f"{name} must be a whole number >= 1, got {value}")
    if slots < 2 or slots & (slots - 1):
        raise ValueError(f"slots must be a power of two, got {slots}")


@struct.dataclass
class NGramMapState:
    """Fixed-size tables per row. A value is the position after an occurrence of the key.

    Attributes:
      key: uint32[B, H], hash of the n tokens that own the slot.
      value: int32[B, H, C], 0 is none (no continuation starts at 0).
      print_: uint32[B, H, C], hash of the m tokens at `value`.
      hits: int32[B, H, C], occurrences of the key with that continuation.
      reach: int32[B, H, C], tokens to draft from it.
      other: int32[B, H], occurrences with a continuation that found no place.
      tail: int32[B, n + m], the last tokens observed; -1 before the first.
      observed: int32[B].
      used: int32[B, 3], slot, entry and length of the last proposal; length 0 is none.
      drafted: int32[B, N], that proposal.
    """

    key: Array
    value: Array
    print_: Array
    hits: Array
    reach: Array
    other: Array
    tail: Array
    observed: Array
    used: Array
    drafted: Array


@struct.dataclass
class NGramMap:
    """Drafts the m tokens that followed an earlier occurrence of the newest n tokens, found in a hash map.

    One continuation per key (`map-k`) keeps the first occurrence; four (`map-k4v`) count how often each followed and draft
    the majority's, if the others together came up at most half as often. Occurrences count once m tokens follow them.

    It differs from llama.cpp, where facts name a defect: the draft is copied from the chosen continuation, not from
    the latest occurrence (its PR #28431); a rejected draft does not silence its key for good, the next one is of the
    accepted length, one token at least, and grows again when it stands; `min_hits` counts occurrences, not look-ups; a row
    never sees another request's table.

    Attributes:
      n: tokens of a key.
      m: tokens of a continuation; `num_draft`.
      min_hits: occurrences of the key before it is used (four continuations only, as in llama.cpp).
      continuations: 1 or 4.
      slots: size of the hash map per row, a power of two; the first key of a slot stays.
    """

    n: int = struct.field(pytree_node=False, default=12)
    m: int = struct.field(pytree_node=False, default=48)
    min_hits: int = struct.field(pytree_node=False, default=1)
    continuations: int = struct.field(pytree_node=False, default=1)
    slots: int = struct.field(pytree_node=False, default=1 << 14)

    def __post_init__(self):
        check_sizes(self.n, self.m, self.min_hits, self.slots)
        if self.continuations < 1:
            raise ValueError(f"continuations must be >= 1, got {self.continuations}")

    @property
    def num_draft(self) -> int:
        return self.m

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def check(self, target: Target) -> None:
        pass

    def init(self, target: Target, batch: int, slots: int) -> NGramMapState:
        table = jnp.zeros((batch, self.slots, self.continuations), jnp.int32)
        return NGramMapState(
            key=table[..., 0].astype(jnp.uint32),
            value=table,
            print_=table.astype(jnp.uint32),
            hits=table,
            reach=table,
            other=table[..., 0],
            tail=jnp.full((batch, self.n + self.m), -1, jnp.int32),
            observed=jnp.zeros(batch, jnp.int32),
            used=jnp.zeros((batch, 3), jnp.int32),
            drafted=jnp.full((batch, self.m), -1, jnp.int32),
        )

    def _slot(self, keys: Array) -> Array:
        return (keys & np.uint32(self.slots - 1)).astype(jnp.int32)

    def observe(
        self, target: Target, state: NGramMapState, observation: Observation
    ) -> NGramMapState:
        state = self._judge(state, observation)
        tokens, count = observation.tokens, observation.count
        span, size = self.n + self.m, tokens.shape[1]
        text = jnp.concatenate([state.tail, tokens], axis=1)
        # occurrence i of this call: n tokens from i + 1 on, its continuation complete with observed token i
        starts = jnp.arange(1, size + 1)
        keys = rolling_hash(text[:, starts[:, None] + jnp.arange(self.n)])
        prints = rolling_hash(text[:, starts[:, None] + self.n + jnp.arange(self.m)])
        value = state.observed[:, None] - span + starts + self.n
        fresh = (starts <= count[:, None]) & (value >= self.n)

        def add(tables, x):
            return jax.vmap(_insert)(tables, *x), None

        tables = (state.key, state.value, state.print_, state.hits, state.reach, state.other)
        reach = jnp.full(keys.shape, self.m, jnp.int32)
        columns = (self._slot(keys), keys, prints, value, fresh, reach)
        tables, _ = jax.lax.scan(add, tables, tuple(x.T for x in columns))
        key, value, print_, hits, reach, other = tables
        tail = count[:, None] + jnp.arange(span)
        return replace(
            state,
            key=key,
            value=value,
            print_=print_,
            hits=hits,
            reach=reach,
            other=other,
            tail=jnp.take_along_axis(text, tail, axis=1),
            observed=state.observed + count,
            used=jnp.zeros_like(state.used),
        )

    def _judge(self, state: NGramMapState, observation: Observation) -> NGramMapState:
        """Adapts the length of the entry that the last proposal came from."""
        slot, entry, length = state.used.T
        stood = drafts_committed(state.drafted, length, observation)
        reach = jnp.where(stood < length, jnp.maximum(stood, 1), jnp.minimum(2 * stood + 1, self.m))
        rows = jnp.arange(slot.shape[0])
        judged = (length > 0) & (observation.count > 0)
        at = jnp.where(judged, slot, self.slots)  # out of range: dropped
        return replace(state, reach=state.reach.at[rows, at, entry].set(reach, mode="drop"))

    def propose(
        self, target: Target, state: NGramMapState, context: Context
    ) -> tuple[Proposal, NGramMapState]:
        tokens, length = context.tokens, context.length
        rows = jnp.arange(length.shape[0])
        at = jnp.maximum(length[:, None] - self.n, 0) + jnp.arange(self.n)
        pattern = jnp.take_along_axis(tokens, at, axis=1)
        key = rolling_hash(pattern)
        slot = self._slot(key)
        value, hits = state.value[rows, slot], state.hits[rows, slot]
        entry = jnp.argmax(hits, axis=1)
        start, best = value[rows, entry], hits[rows, entry]
        others = jnp.sum(hits, axis=1) - best + state.other[rows, slot]
        occurrence = jnp.maximum(start[:, None] - self.n, 0) + jnp.arange(self.n)
        found = (start > 0) & (length > self.n) & (state.key[rows, slot] == key)
        found &= jnp.all(jnp.take_along_axis(tokens, occurrence, axis=1) == pattern, axis=1)
        if self.continuations > 1:
            found &= (best >= 2 * others) & (best + others >= self.min_hits)
        drafts = jnp.take_along_axis(tokens, start[:, None] + jnp.arange(self.m), axis=1)
        size = jnp.where(found, state.reach[rows, slot, entry], 0)
        used = jnp.stack([slot, entry.astype(jnp.int32), size], axis=1)
        return Proposal(tokens=drafts, length=size), replace(state, used=used, drafted=drafts)


def _insert(tables, slot, key, print_, value, fresh, reach):
    """One occurrence of a key into one row's tables: counts its continuation, or keeps it where there is room."""
    keys, values, prints, hits, reaches, other = tables
    empty = hits[slot] == 0
    fresh &= (keys[slot] == key) | jnp.all(empty)
    mine = (prints[slot] == print_) & ~empty
    known, room = jnp.any(mine), jnp.any(empty)
    entry = jnp.where(known, jnp.argmax(mine), jnp.argmax(empty))

    def where(condition):  # out of range: dropped
        return jnp.where(fresh & condition, slot, keys.shape[0])

    new, counted, lost = where(~known & room), where(known | room), where(~known & ~room)
    return (
        keys.at[new].set(key, mode="drop"),
        values.at[new, entry].set(value, mode="drop"),
        prints.at[new, entry].set(print_, mode="drop"),
        hits.at[counted, entry].add(1, mode="drop"),
        reaches.at[new, entry].set(reach, mode="drop"),
        other.at[lost].add(1, mode="drop"),
    )
