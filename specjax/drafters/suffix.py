"""Suffix drafting: the continuation that followed most often, in this row and in earlier outputs.

SuffixDecoding (Oliaro et al., arXiv 2411.04975) keeps suffix trees; here the same counts come from a handful of matching
positions, all on the device. B rows, L history, M remembered tokens, R candidates, D depths, N drafted tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.drafters.base import Context, Observation, Proposal
from specjax.models.transformer import Target


def suffix_matches(text: Array, newest: Array, valid: Array) -> Array:
    """How many of the newest tokens end at every position.

    Args:
      text: int32[L].
      newest: int32[D], newest[0] is the newest token, newest[1] the one before it, ...; -1 where there is none.
      valid: bool[L], positions that count as the end of an occurrence.

    Returns:
      int32[L] in 0..D.
    """
    agree = valid
    match = jnp.zeros(text.shape, jnp.int32)
    for back in range(newest.shape[0]):
        shifted = jnp.pad(text, (back, 0), constant_values=-2)[: text.shape[0]]
        agree &= shifted == newest[back]
        match += agree
    return match


def most_frequent_path(
    text: Array,
    match: Array,
    end: Array,
    depth: int,
    size: int,
    candidates: int,
    spec_factor: float,
    min_probability: float,
) -> tuple[Array, Array, Array, Array]:
    """The best draft over all suffix lengths.

    For a suffix of length l the candidates are the occurrences of at least l agreeing tokens. From there the token that
    most of them continue with is appended and the others drop out, while the running product of shares stays above
    `min_probability`; its sum is the expected number of accepted tokens. The highest sum wins, the longer suffix among
    equals.

    Args:
      text: int32[L]; match: int32[L] from `suffix_matches`; end: int32[], nothing is read from there on.
      depth: D, the longest suffix told apart; size: N.
      candidates: R, occurrences looked at: the longest, and the most recent among equals.
      spec_factor: a suffix of length l drafts at most l * spec_factor tokens.

    Returns:
      tokens int32[N], shares float32[N], length int32[], score float32[].
    """
    history = text.shape[0]
    r = min(candidates, history)
    packed = jnp.where(match > 0, match * history + jnp.arange(history), -1)
    packed, _ = jax.lax.top_k(packed, r)
    found, position = packed // history, packed % history
    found = jnp.where(packed >= 0, found, 0)
    lengths = jnp.arange(1, depth + 1)
    alive = found >= lengths[:, None]  # [D, R]
    limit = jnp.floor(lengths * spec_factor + 1e-6).astype(jnp.int32)

    def step(carry, i):
        alive, probability, going = carry
        at = position + 1 + i
        token = jnp.where(at < end, text[jnp.minimum(at, history - 1)], -1)
        same = (token[:, None] == token) & (token >= 0)[:, None]  # [R, R]
        votes = (alive.astype(jnp.float32) @ same.astype(jnp.float32)) * alive  # [D, R]
        share = jnp.max(votes, axis=1) / jnp.maximum(jnp.sum(alive, axis=1), 1)
        # of tokens with equally many votes the one that was seen last
        best = jnp.argmax(votes.astype(jnp.int32) * history + position, axis=1)
        probability = probability * share
        going &= (probability >= min_probability) & (share > 0) & (i < limit)
        chosen = token[best]  # [D]
        alive &= token == chosen[:, None]
        return (alive, probability, going), (chosen, share, jnp.where(going, probability, 0.0))

    start = (alive, jnp.ones(depth), jnp.any(alive, axis=1))
    _, (tokens, shares, gains) = jax.lax.scan(step, start, jnp.arange(size))
    scores = jnp.sum(gains, axis=0)
    best = jnp.argmax(scores + 1e-6 * lengths)  # the longer suffix of equals, rounding aside
    return (
        tokens[:, best],
        shares[:, best],
        jnp.sum(gains[:, best] > 0, dtype=jnp.int32),
        scores[best],
    )


@struct.dataclass
class Suffix:
    """Drafts what most often followed the newest tokens, in the row so far or in remembered outputs.

    It differs from Arctic Inference in one thing: at most `candidates` occurrences are counted, the longest agreements
    and the most recent among them.

    Attributes:
      memory: int32[M], tokens of earlier outputs, oldest first, separated by -1; None before `remember`.
      num_draft: N, longest draft.
      max_depth: D, the longest suffix looked for.
      spec_factor: a suffix of length l drafts at most l * spec_factor tokens.
      min_probability: drafts end where the product of shares falls below it.
      candidates: R.
      memory_size: M, tokens that `remember` keeps.
    """

    memory: Array | None = None
    num_draft: int = struct.field(pytree_node=False, default=15)
    max_depth: int = struct.field(pytree_node=False, default=16)
    spec_factor: float = struct.field(pytree_node=False, default=2.0)
    min_probability: float = struct.field(pytree_node=False, default=0.1)
    candidates: int = struct.field(pytree_node=False, default=64)
    memory_size: int = struct.field(pytree_node=False, default=16_384)

    def __post_init__(self):
        for name in ("num_draft", "max_depth", "candidates", "memory_size"):
            value = getattr(self, name)
            if int(value) != value or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value}")
        if not self.spec_factor > 0:
            raise ValueError(f"spec_factor must be > 0, got {self.spec_factor}")
        if not 0 < self.min_probability <= 1:
            raise ValueError(f"min_probability must be in (0, 1], got {self.min_probability}")

    def remember(self, outputs: Iterable[Sequence[int]]) -> "Suffix":
        """The same drafter with these outputs in its memory; the oldest make room.

        Only the first call has the decode loop compiled anew: the memory has one size from then on.
        """
        empty = np.full(self.memory_size, -1, np.int32)
        kept = empty if self.memory is None else np.asarray(self.memory)
        for output in outputs:
            kept = np.concatenate([kept, np.asarray(output, np.int32), [-1]])[-self.memory_size :]
        return replace(self, memory=jnp.asarray(kept, jnp.int32))

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def check(self, target: Target) -> None:
        highest = -1 if self.memory is None else int(jnp.max(self.memory))
        if highest >= target.vocab_size:
            raise ValueError(
                f"the memory holds token {highest}; the target has {target.vocab_size}: "
                "it was filled for another target"
            )

    def init(self, target: Target, batch: int, slots: int) -> None:
        return None

    def observe(self, target: Target, state: None, observation: Observation) -> None:
        return None

    def propose(self, target: Target, state: None, context: Context) -> tuple[Proposal, None]:
        settings = (
            self.max_depth,
            self.num_draft,
            self.candidates,
            self.spec_factor,
            self.min_probability,
        )

        def row(tokens: Array, length: Array):
            back = length - 1 - jnp.arange(self.max_depth)
            newest = jnp.where(back >= 0, tokens[jnp.maximum(back, 0)], -3)
            earlier = jnp.arange(tokens.shape[0]) < length - 1
            own = suffix_matches(tokens, newest, earlier)
            own = most_frequent_path(tokens, own, length, *settings)
            if self.memory is None:
                return own
            old = suffix_matches(self.memory, newest, self.memory >= 0)
            old = most_frequent_path(self.memory, old, jnp.int32(self.memory.shape[0]), *settings)
            return jax.tree.map(lambda a, b: jnp.where(old[3] > own[3], b, a), own, old)

        tokens, shares, length, _ = jax.vmap(row)(context.tokens, context.length)
        return Proposal(tokens=jnp.maximum(tokens, 0), length=length, confidence=shares), None
