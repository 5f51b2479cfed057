"""From logits to the distribution that is served, and draws from it.

One function, `process_logits`, serves plain decoding, verification and the drafters' own draws; so p and q always went
through the same processors in the same order: repetition penalty, temperature, top-k, top-p, min-p (the order and the
results of Hugging Face transformers' warpers).

B rows, N positions, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

DRAFT, ACCEPT, RESIDUAL, SAMPLE = range(4)
"""Random streams: of a round, the drafter's draws, the acceptance tests, and the correction or bonus token; of a position,
the target's own draw."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How next tokens are drawn.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: keeps the k most likely tokens (ties at the edge stay); 0 is off.
      top_p: keeps the smallest set of most likely tokens whose probability reaches top_p; 1 is off.
      min_p: drops tokens less likely than min_p times the most likely; 0 is off.
      repetition_penalty: positive logits of tokens already in the row (prompt included) are divided by it, negative ones
        multiplied; 1 is off.

    Raises:
      ValueError: naming the setting, what was got and what was expected.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        def check(name: str, good: bool, expected: str) -> None:
            if not good:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)}")

        check(
            "temperature",
            math.isfinite(self.temperature) and self.temperature >= 0,
            "a finite number >= 0",
        )
        check("top_k", self.top_k >= 0 and int(self.top_k) == self.top_k, "a whole number >= 0")
        check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        check(
            "repetition_penalty",
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "a finite number > 0",
        )


@struct.dataclass
class Processors:
    """`Sampling` of every row as arrays. None switches a step off for the whole batch, and out of the compiled program.

    Attributes:
      temperature: float32[B], rows at 0 are greedy; None makes the whole batch greedy.
      top_k: int32[B]; top_p, min_p, repetition_penalty: float32[B].
    """

    temperature: Array | None = None
    top_k: Array | None = None
    top_p: Array | None = None
    min_p: Array | None = None
    repetition_penalty: Array | None = None

    @classmethod
    def create(cls, sampling: Sampling | Sequence[Sampling], batch: int) -> "Processors":
        """One `Sampling` for all rows, or one per row."""
        rows = [sampling] * batch if isinstance(sampling, Sampling) else list(sampling)
        if len(rows) != batch:
            raise ValueError(
                f"sampling must be one Sampling or one per prompt, got {len(rows)} for {batch} prompts"
            )

        def column(name: str, off: float, dtype):
            values = [getattr(row, name) for row in rows]
            return None if all(v == off for v in values) else jnp.asarray(values, dtype)

        temperature = column("temperature", 0.0, jnp.float32)
        if temperature is None:  # top-k, top-p and min-p never remove the most likely token
            return cls(repetition_penalty=column("repetition_penalty", 1.0, jnp.float32))
        return cls(
            temperature=temperature,
            top_k=column("top_k", 0, jnp.int32),
            top_p=column("top_p", 1.0, jnp.float32),
            min_p=column("min_p", 0.0, jnp.float32),
            repetition_penalty=column("repetition_penalty", 1.0, jnp.float32),
        )

    @property
    def greedy(self) -> bool:
        """Whether every row takes the most likely token."""
        return self.temperature is None

    def sampled(self, batch: int) -> Array:
        """bool[B], rows whose tokens are drawn."""
        if self.temperature is None:
            return jnp.zeros(batch, bool)
        return self.temperature > 0


def process_logits(logits: Array, processors: Processors, seen: Array | None = None) -> Array:
    """Log-probabilities of the served distribution.

    Args:
      logits: [B, N, V].
      processors: settings per row.
      seen: bool[B, N, V], tokens that the repetition penalty applies to at each position, drafted ancestors included;
        needed only where that penalty is on.

    Returns:
      float32[B, N, V]. Greedy rows are one-hot at the first maximum.
    """
    logits = logits.astype(jnp.float32)
    if processors.repetition_penalty is not None:
        if seen is None:
            raise ValueError("repetition_penalty needs `seen`, got None")
        penalty = processors.repetition_penalty[:, None, None]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    best = jnp.argmax(logits, axis=-1, keepdims=True)
    one_hot = jnp.where(jnp.arange(logits.shape[-1]) == best, 0.0, -jnp.inf)
    if processors.temperature is None:
        return one_hot
    temperature = processors.temperature[:, None, None]
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)
    if processors.top_k is not None:
        k = jnp.where(processors.top_k > 0, processors.top_k, logits.shape[-1])
        edge = _kth_largest(logits, jnp.minimum(k, logits.shape[-1])[:, None])
        logits = jnp.where(logits >= edge[..., None], logits, -jnp.inf)
    if processors.top_p is not None:
        logits = jnp.where(_nucleus(logits, processors.top_p[:, None]), logits, -jnp.inf)
    if processors.min_p is not None:
        floor = jnp.max(logits, -1, keepdims=True) + jnp.log(processors.min_p)[:, None, None]
        logits = jnp.where(logits >= floor, logits, -jnp.inf)
    sampled = jax.nn.log_softmax(logits, axis=-1)
    return jnp.where(temperature > 0, sampled, one_hot)


def _bisect(values: Array, enough) -> Array:
    """The largest entry x of `values` with `enough(x)`, for a predicate that holds up to some x and fails beyond.

    Bisects the bits of the float, whose order as integers is the order of the numbers: exact, and on every device
    cheaper than sorting a vocabulary.

    Args:
      values: float32[..., V].
      enough: maps float32[...] thresholds to bool[...].
    """

    def to_float(order: Array) -> Array:
        bits = jnp.where(order >= 0, order, order ^ jnp.int32(0x7FFFFFFF))
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def to_order(x: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        return jnp.where(bits >= 0, bits, bits ^ jnp.int32(0x7FFFFFFF))

    def halve(_, bounds):
        low, high = bounds  # enough(low) holds; it fails beyond high
        middle = (low | high) - ((low ^ high) >> 1)  # their mean rounded up, without overflow
        good = enough(to_float(middle))
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    finite = jnp.where(jnp.isfinite(values), values, jnp.inf)
    low, high = to_order(jnp.min(finite, -1)), to_order(jnp.max(values, -1))
    return to_float(jax.lax.fori_loop(0, 32, halve, (low, high))[0])


def _kth_largest(logits: Array, k: Array) -> Array:
    """The k-th largest logit: float32[B, N] for logits [B, N, V], k int32[B, 1]."""
    return _bisect(logits, lambda x: jnp.sum(logits >= x[..., None], -1) >= k)


def _nucleus(logits: Array, top_p: Array) -> Array:
    """bool[B, N, V], the tokens that top-p keeps.

    transformers sorts ascending and drops tokens whose cumulative probability, themselves included, is at most
    1 - top_p; the last token always stays. Equal probabilities at the edge are dropped in index order.
    """
    probs = jax.nn.softmax(logits, axis=-1)
    budget = 1.0 - top_p  # [B, 1]: mass that may be dropped

    def mass_below(x: Array) -> Array:
        return jnp.sum(jnp.where(probs < x[..., None], probs, 0.0), -1)

    edge = _bisect(jnp.where(probs > 0, probs, -jnp.inf), lambda x: mass_below(x) <= budget)
    edge = edge[..., None]
    # `edge` is the largest probability of which something can still be dropped or which bounds the kept set: everything
    # above stays, everything below goes, and of those equal to it as many go as fit into what is left of the budget.
    ties = probs == edge
    room = budget[..., None] - mass_below(edge[..., 0])[..., None]
    dropped = jnp.floor(room / edge)
    must_stay = (jnp.max(probs, -1, keepdims=True) == edge).astype(jnp.int32)
    dropped = jnp.minimum(dropped, jnp.sum(ties, -1, keepdims=True) - must_stay)
    rank = jnp.cumsum(ties, axis=-1)
    return (probs > edge) | (ties & (rank > dropped))


def round_keys(keys: Array, rounds: Array | np.ndarray) -> Array:
    """One key per row for this round: depends on the row's own key and round number alone.

    Laws that judge drafts by a known q count rounds, not positions: they look at numbers past the emitted token, and keys of
    positions would let the next round meet the same numbers again (facts: "RNG trap" of block verification).
    """
    return jax.vmap(jax.random.fold_in)(keys, rounds)


def position_keys(keys: Array, positions: Array) -> Array:
    """Keys [B, N] of the target's draws at int32[B, N] positions, from row keys [B].

    A draw is looked at only once everything before it is committed, so it may belong to the position: the row's tokens
    are then the same however its rounds fell.
    """
    return jax.vmap(lambda key, at: jax.vmap(lambda i: jax.random.fold_in(key, i))(at))(
        stream(keys, SAMPLE), positions
    )


def stream(keys: Array, number: Array | int) -> Array:
    """Keys [B] of one of the streams."""
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def draw(keys: Array, log_probs: Array, block: int = 256) -> Array:
    """One token per key: int32[...] from keys [...] and log_probs [..., V], known up to a constant.

    Inverts the cumulative distribution in two steps, a block of the vocabulary and a token in it, with a number each: two
    random numbers a draw instead of V, and no sum over more than a few hundred terms. A token of probability 0 is never
    drawn.
    """
    size = log_probs.shape[-1]
    p = jnp.exp(log_probs - jnp.max(log_probs, -1, keepdims=True))
    p = jnp.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, -size % block)])
    p = p.reshape(*p.shape[:-1], -1, block)
    flat = keys.reshape(-1)
    u = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(flat).reshape(*keys.shape, 2)

    def invert(weights: Array, u: Array) -> Array:
        sums = jnp.cumsum(weights, axis=-1)
        past = (sums > u[..., None] * sums[..., -1:]) & (weights > 0)
        # u next to 1 may round past the end; the likeliest entry then, never one of weight 0
        return jnp.where(jnp.any(past, -1), jnp.argmax(past, -1), jnp.argmax(weights, -1))

    chosen = invert(jnp.sum(p, -1), u[..., 0])
    inside = jnp.take_along_axis(p, chosen[..., None, None], axis=-2)[..., 0, :]
    return (chosen * block + invert(inside, u[..., 1])).astype(jnp.int32)


def tokens_seen(tokens: Array, length: Array, vocab_size: int) -> Array:
    """bool[B, V], which tokens occur among the first `length` of each row of tokens [B, L]."""
    valid = jnp.arange(tokens.shape[1]) < length[:, None]
    index = jnp.where(valid, tokens, vocab_size)  # out of range: dropped
    rows = jnp.arange(tokens.shape[0])[:, None]
    return jnp.zeros((tokens.shape[0], vocab_size), bool).at[rows, index].set(True, mode="drop")


def seen_at_nodes(seen: Array, tokens: Array, ancestors: Array) -> Array:
    """Tokens seen at each node of a draft, drafted ancestors included.

    Args:
      seen: bool[B, V] of the committed row.
      tokens: int32[B, N], the block's tokens.
      ancestors: bool[N, N] or [B, N, N], True where the second is the first itself or an ancestor of it.

    Returns:
      bool[B, N, V].
    """
    batch, size = tokens.shape
    ancestors = jnp.broadcast_to(ancestors, (batch, size, size))
    index = jnp.where(ancestors, tokens[:, None, :], seen.shape[-1])
    rows, nodes = jnp.arange(batch)[:, None, None], jnp.arange(size)[None, :, None]
    wide = jnp.broadcast_to(seen[:, None], (batch, size, seen.shape[-1]))
    return wide.at[rows, nodes, index].set(True, mode="drop")


def make_keys(key: Array | int | None, batch: int) -> Array:
    """Row keys [B]: from an integer seed (None is 0), one key (folded with each row's index), or B keys."""
    if key is None or isinstance(key, int | np.integer):
        keys = jax.random.key(int(key or 0))
    elif isinstance(key, Array):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        keys = key if typed else jax.random.wrap_key_data(key)
    else:
        raise ValueError(
            f"key must be a jax.random key, an array of them, or an integer, got {key!r}"
        )
    if keys.ndim == 0:
        return jax.vmap(lambda i: jax.random.fold_in(keys, i))(jnp.arange(batch))
    if keys.shape != (batch,):
        raise ValueError(f"key must be one key or {batch}, one per prompt; got shape {keys.shape}")
    return keys
