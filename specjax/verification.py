"""The acceptance laws: which drafted tokens stand, and which token follows them.

Whatever the drafter proposed, the emitted tokens follow the target's distribution p exactly. A chain is accepted by the
rule of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318): draft d, drawn from q, stands with
probability min(1, p(d) / q(d)); at the first rejection the correction is drawn from (p - q)+ normalised; if all stand, a
bonus token is drawn from the target. In one line: min(p, q) + (p - q)+ = p.

A proposal without q is deterministic: its q is one-hot, so d stands with probability p(d) and the correction comes from p
without d.

B rows, N drafted tokens, K the longest path, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.sampling import ACCEPT, RESIDUAL, draw, stream


@struct.dataclass
class Acceptance:
    """What one round decided.

    Attributes:
      count: int32[B], accepted drafts, 0..N.
      next_token: int32[B], the correction or bonus that follows them.
    """

    count: Array
    next_token: Array


def _leading(stands: Array) -> Array:
    """How many of bool[B, N] hold before the first that does not: int32[B]."""
    return jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def accept_greedy(best: Array, tokens: Array, length: Array) -> Acceptance:
    """Accepts a chain against greedy targets.

    Args:
      best: int32[B, N + 1], the target's most likely token after the prefix and after each draft.
      tokens: int32[B, N] drafts.
      length: int32[B], how many of them were proposed.
    """
    proposed = jnp.arange(tokens.shape[1]) < length[:, None]
    count = _leading((tokens == best[:, :-1]) & proposed)
    return Acceptance(count=count, next_token=jnp.take_along_axis(best, count[:, None], 1)[:, 0])


def accept_chain(
    keys: Array, log_p: Array, tokens: Array, length: Array, log_q: Array | None = None
) -> Acceptance:
    """Accepts a chain against sampled targets (greedy rows are one-hot rows of p).

    Args:
      keys: this round's keys [B].
      log_p, tokens, length, log_q: see `chain_law`.
    """
    tiny = jnp.finfo(jnp.float32).tiny  # u > 0, so a token of probability 0 never stands
    shape = tokens.shape[1:]
    u = jax.vmap(lambda k: jax.random.uniform(k, shape, minval=tiny))(stream(keys, ACCEPT))
    count, log_next = chain_law(u, log_p, tokens, length, log_q)
    return Acceptance(count=count, next_token=draw(stream(keys, RESIDUAL), log_next))


def chain_law(
    u: Array, log_p: Array, tokens: Array, length: Array, log_q: Array | None = None
) -> tuple[Array, Array]:
    """The law itself, with its random numbers as an argument.

    Args:
      u: float32[B, N] uniform in (0, 1).
      log_p: float32[B, N + 1, V] of the target after the prefix and after each draft.
      tokens: int32[B, N] drafts.
      length: int32[B], how many of them were proposed. The slot beyond takes a plain draw from p, the bonus.
      log_q: float32[B, N, V] that the drafts were drawn from; None says that they are deterministic.

    Returns:
      count: int32[B], accepted drafts.
      log_next: float32[B, V], log-probabilities of the token that follows them, up to a constant.
    """
    size = tokens.shape[1]
    if not size:
        return jnp.zeros_like(length), log_p[:, 0]
    chosen = tokens[..., None]
    p = jnp.take_along_axis(log_p[:, :-1], chosen, 2)[..., 0]
    q = jnp.zeros_like(p) if log_q is None else jnp.take_along_axis(log_q, chosen, 2)[..., 0]
    count = _leading((jnp.log(u) < p - q) & (jnp.arange(size) < length[:, None]))

    after = jnp.take_along_axis(log_p, count[:, None, None], 1)[:, 0]
    slot = jnp.minimum(count, size - 1)[:, None]  # of the rejected draft, if there is one
    if log_q is None:
        token = jnp.take_along_axis(tokens, slot, 1)
        residual = jnp.where(jnp.arange(after.shape[-1]) == token, -jnp.inf, after)
    else:
        q_there = jnp.take_along_axis(log_q, slot[..., None], 1)[:, 0]
        residual = jnp.log(jnp.maximum(jnp.exp(after) - jnp.exp(q_there), 0.0))
    # p == q up to rounding leaves nothing; then any draw from p is a draw from the target
    empty = jnp.all(residual == -jnp.inf, axis=-1)
    rejected = (count < length) & ~empty
    return count, jnp.where(rejected[:, None], residual, after)
