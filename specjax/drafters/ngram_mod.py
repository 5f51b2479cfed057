"""n-gram drafts from one hash table that all rows share: llama.cpp's `ngram-mod`.

The table maps n tokens to the token that followed them last, in any row. There is no key in it: two n-grams that fall
together give a wrong draft, never a wrong output. B rows, T observed tokens, N drafted tokens.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.drafters.base import Context, Observation, Proposal, Shared, drafts_committed
from specjax.drafters.ngram_map import check_sizes
from specjax.models.transformer import Target

FACTOR = 2654435761
TOKEN_BITS = 20


@struct.dataclass
class NGramModState:
    """The table and what each row last saw.

    Attributes:
      table: int32[slots] shared by all rows; epoch * 2^20 + next token. Entries of other epochs are empty.
      epoch: int32[], counted up to empty the table at once.
      filled: int32[], entries of this epoch.
      tail: int32[B, n], the last tokens observed; -1 before the first.
      bad: int32[B], proposals in a row of which less than a quarter stood.
      drafted: int32[B, N], the last proposal; size: int32[B], its length, 0 is none.
    """

    table: Shared
    epoch: Shared
    filled: Shared
    tail: Array
    bad: Array
    drafted: Array
    size: Array


@struct.dataclass
class NGramMod:
    """Drafts token by token: what followed the newest n tokens, then what followed them and the draft, and so on.

    It differs from llama.cpp: new windows are learned at once, not 32 at a time; a table that is over a quarter full is
    emptied before a prompt is learned, not after, so that the prompt stays (facts §1.5); the hash has 32 bits. Rows share
    what they learned, so a row's drafts depend on its neighbours; its tokens do not (deterministic drafts never change
    a token).

    Attributes:
      n: tokens that are looked up.
      min_draft: shorter drafts are not proposed.
      max_draft: N, longest draft; `num_draft`.
      slots: entries of the table, a power of two (4 bytes each).
    """

    n: int = struct.field(pytree_node=False, default=24)
    min_draft: int = struct.field(pytree_node=False, default=48)
    max_draft: int = struct.field(pytree_node=False, default=64)
    slots: int = struct.field(pytree_node=False, default=1 << 20)

    def __post_init__(self):
        check_sizes(self.n, self.max_draft, 1, self.slots)
        if not 1 <= self.min_draft <= self.max_draft:
            raise ValueError(
                "min_draft and max_draft must satisfy 1 <= min_draft <= max_draft, "
                f"got {self.min_draft} and {self.max_draft}"
            )

    @property
    def num_draft(self) -> int:
        return self.max_draft

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def check(self, target: Target) -> None:
        if target.vocab_size > 1 << TOKEN_BITS:
            raise ValueError(
                f"NGramMod keeps tokens below {1 << TOKEN_BITS}; the target has {target.vocab_size}"
            )

    def init(self, target: Target, batch: int, slots: int) -> NGramModState:
        row = jnp.zeros(batch, jnp.int32)
        return NGramModState(
            table=Shared(jnp.zeros(self.slots, jnp.int32)),
            epoch=Shared(jnp.int32(1)),
            filled=Shared(jnp.int32(0)),
            tail=jnp.full((batch, self.n), -1, jnp.int32),
            bad=row,
            drafted=jnp.full((batch, self.max_draft), -1, jnp.int32),
            size=row,
        )

    def _index(self, value: Array) -> Array:
        """Table index of a polynomial hash."""
        value ^= value >> 15
        return ((value * np.uint32(2246822519)) >> np.uint32(32 - self._bits)).astype(jnp.int32)

    @property
    def _bits(self) -> int:
        return self.slots.bit_length() - 1

    def _hash(self, windows: Array) -> Array:
        """Polynomial hash, uint32[...] of int32[..., n]: it can roll on by one token in constant time."""
        value = jnp.zeros(windows.shape[:-1], jnp.uint32)
        for i in range(self.n):
            value = value * np.uint32(FACTOR) + windows[..., i].astype(jnp.uint32)
        return value

    def observe(
        self, target: Target, state: NGramModState, observation: Observation
    ) -> NGramModState:
        tokens, count = observation.tokens, observation.count
        size = tokens.shape[1]
        text = jnp.concatenate([state.tail, tokens], axis=1)
        windows = text[:, jnp.arange(size)[:, None] + jnp.arange(self.n)]  # before each token
        valid = (jnp.arange(size) < count[:, None]) & jnp.all(windows >= 0, axis=-1)

        # a new prompt, and a table over a quarter full; or a row that it has misled five times
        begins = jnp.any((state.tail[:, -1] < 0) & (count > 0))
        stood = drafts_committed(state.drafted, state.size, observation)
        proposed = (state.size > 0) & (count > 0)
        bad = jnp.where(proposed & (4 * stood < state.size), state.bad + 1, state.bad)
        bad = jnp.where(proposed & (4 * stood >= state.size), 0, bad)
        filled, epoch = state.filled.value, state.epoch.value
        empty = (begins & (4 * filled > self.slots)) | jnp.any(bad >= 5)
        # epochs wrap around before their bits do; an entry that old meets its number again at worst as a wrong draft
        epoch = jnp.where(empty, epoch % ((1 << (31 - TOKEN_BITS)) - 1) + 1, epoch)
        filled = jnp.where(empty, 0, filled)

        at = jnp.where(valid, self._index(self._hash(windows)), self.slots).reshape(-1)
        table = state.table.value
        old = jnp.take(table, at, mode="fill", fill_value=0) >> TOKEN_BITS
        filled += jnp.sum((at < self.slots) & (old != epoch), dtype=jnp.int32)
        # of equal indices the last one counts; a scatter may write them in any order
        later = jnp.arange(at.size) > jnp.arange(at.size)[:, None]
        at = jnp.where(jnp.any((at == at[:, None]) & later, axis=1), self.slots, at)
        entries = (epoch << TOKEN_BITS) + tokens.reshape(-1)
        tail = count[:, None] + jnp.arange(self.n)
        return replace(
            state,
            table=Shared(table.at[at].set(entries, mode="drop")),
            epoch=Shared(epoch),
            filled=Shared(filled),
            tail=jnp.take_along_axis(text, tail, axis=1),
            bad=jnp.where(bad >= 5, 0, bad),
            size=jnp.zeros_like(state.size),
        )

    def propose(
        self, target: Target, state: NGramModState, context: Context
    ) -> tuple[Proposal, NGramModState]:
        length = context.length
        at = jnp.maximum(length[:, None] - self.n, 0) + jnp.arange(self.n)
        window = jnp.take_along_axis(context.tokens, at, axis=1)
        oldest = np.uint32(pow(FACTOR, self.n, 1 << 32))
        table, epoch = state.table.value, state.epoch.value

        def step(carry, i):
            value, window, known = carry
            entry = table[self._index(value)]
            known &= entry >> TOKEN_BITS == epoch
            token = entry & ((1 << TOKEN_BITS) - 1)
            gone = jnp.take(window, i % self.n, axis=1)
            window = jax.lax.dynamic_update_index_in_dim(window, token, i % self.n, axis=1)
            value = value * np.uint32(FACTOR) + token.astype(jnp.uint32)
            value -= gone.astype(jnp.uint32) * oldest
            return (value, window, known), (token, known)

        carry = (self._hash(window), window, length >= self.n)
        _, (tokens, known) = jax.lax.scan(step, carry, jnp.arange(self.max_draft))
        tokens = tokens.T
        size = jnp.sum(known, axis=0, dtype=jnp.int32)
        size = jnp.where(size >= self.min_draft, size, 0)
        return Proposal(tokens=tokens, length=size), replace(state, drafted=tokens, size=size)
