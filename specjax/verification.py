"""The acceptance laws: which drafted tokens stand, and which token follows them.

Whatever the drafter proposed, the emitted tokens follow the target's distribution p exactly.

Deterministic proposals (argmax, look-up, top-k trees) are accepted by matching: the target's own token is drawn at every
node, with random numbers that belong to its position in the row, and a draft stands if it is that token. A draft d stands
with probability p(d), the best that a one-hot q allows, and the row's tokens are those of plain decoding with the same key,
whatever was proposed.

Proposals drawn from a known q stand with probability min(1, p / q), the first rejection is replaced by a draw from
(p - q)+ normalised: min(p, q) + (p - q)+ = p. Token by token, chains (Leviathan et al., arXiv 2211.17192; Chen et al.,
arXiv 2302.01318), and trees by trying siblings in turn, each against what the ones before it left over (Sequoia's rejection
without replacement, arXiv 2402.12374). Or as a whole, chains as blocks (Sun et al., arXiv 2403.10444) and trees from the
leaves up (Weng et al., arXiv 2505.12398). Their random numbers belong to the round: these laws look at numbers past the
token they emit, and the next round must not meet those again.

B rows, N drafted tokens, W = N + 1 nodes of a block, V vocabulary.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.trees import Tree


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How drafts are judged. The default, and every choice of `law`, leaves the target's distribution as it is.

    Attributes:
      law: for drafts drawn from a known q: "token" judges them one by one, from the first on; "block" a path together, from
        its end, which accepts more.
      lossy_threshold: LOSSY. A draft stands if it is the target's own token, or if the target gives it at least this
        probability; its q is not looked at. None is exact.
      synthetic_rates: INVALID TEXT. For measuring speeds: draft i stands with unconditional probability rates[i],
        whatever it is. None judges the drafts.

    Raises:
      ValueError: naming the setting, what was got and what was expected.
    """

    law: Literal["token", "block"] = "token"
    lossy_threshold: float | None = None
    synthetic_rates: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.law not in ("token", "block"):
            raise ValueError(f"law must be 'token' or 'block', got {self.law!r}")
        threshold, rates = self.lossy_threshold, self.synthetic_rates
        if threshold is not None and not 0 < threshold <= 1:
            raise ValueError(f"lossy_threshold must be in (0, 1] or None, got {threshold}")
        if rates is None:
            return
        object.__setattr__(self, "synthetic_rates", tuple(float(r) for r in rates))
        if not all(0 <= r <= 1 for r in rates):
            raise ValueError(f"synthetic_rates must be probabilities in [0, 1], got {tuple(rates)}")
        if any(b > a for a, b in itertools.pairwise(rates)):
            raise ValueError(
                f"synthetic_rates must not increase: draft i stands only where i - 1 does; got {tuple(rates)}"
            )

    @property
    def exact(self) -> bool:
        """Whether the output follows the target's distribution."""
        return self.lossy_threshold is None and self.synthetic_rates is None


def synthetic_rates(length: float, num_draft: int) -> tuple[float, ...]:
    """Unconditional rates p, p^2, ..., p^N of a mean acceptance length, for `Verification.synthetic_rates`.

    Raises:
      ValueError: a length that N drafts cannot have.
    """
    if not 1 <= length <= num_draft + 1:
        raise ValueError(
            f"length must be in [1, {num_draft + 1}] with {num_draft} drafts, got {length}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        long = sum(middle**i for i in range(1, num_draft + 1)) > length - 1
        low, high = (low, middle) if long else (middle, high)
    return tuple(high**i for i in range(1, num_draft + 1))


@struct.dataclass
class Acceptance:
    """What one round decided.

    Attributes:
      count: int32[B], accepted drafts, 0..N.
      next_token: int32[B], the correction or bonus that follows them.
      path: int32[B, W], the accepted nodes from the root on; None says 0, 1, 2, ...
    """

    count: Array
    next_token: Array
    path: Array | None = None


def leading(stands: Array) -> Array:
    """How many of bool[B, N] hold before the first that does not: int32[B]."""
    return jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def accept_matching(
    chosen: Array,
    tokens: Array,
    length: Array,
    tree: Tree | None = None,
    also: Array | None = None,
) -> Acceptance:
    """Accepts the drafts that are the target's own tokens.

    Args:
      chosen: int32[B, W], the target's token after every node: its most likely one, or a draw.
      tokens: int32[B, N] drafts.
      length: int32[B], how many of them were proposed.
      tree: None for a chain.
      also: bool[B, N], drafts that stand although they are not (lossy acceptance).
    """
    size = tokens.shape[1]
    proposed = jnp.arange(size) < length[:, None]
    after = chosen[:, :-1] if tree is None else jnp.take_along_axis(chosen, tree.parent, axis=1)
    stands = tokens == after
    if also is not None:
        stands |= also
    stands &= proposed
    if tree is None:
        count = leading(stands)
        return Acceptance(
            count=count, next_token=jnp.take_along_axis(chosen, count[:, None], 1)[:, 0]
        )
    falls = jnp.pad(~stands, ((0, 0), (1, 0)))
    reached = ~jnp.any(tree.ancestors & falls[:, None, :], axis=-1)
    node = jnp.argmax(jnp.where(reached, tree.depth, -1), axis=1).astype(jnp.int32)
    return Acceptance(
        count=jnp.take_along_axis(tree.depth, node[:, None], 1)[:, 0],
        next_token=jnp.take_along_axis(chosen, node[:, None], 1)[:, 0],
        path=tree.path(node),
    )


def _picked(log: Array, tokens: Array) -> Array:
    """Entries [B, N] of log [B, N, V] at tokens [B, N]."""
    return jnp.take_along_axis(log, tokens[..., None], 2)[..., 0]


def _row(log: Array, index: Array) -> Array:
    """Rows [B, V] of log [B, N, V] at index [B]."""
    return jnp.take_along_axis(log, index[:, None, None], 1)[:, 0]


def _after_rejection(log_next: Array, residual: Array, rejected: Array) -> Array:
    """The residual where a draft was rejected. One that rounding left empty says p == q: then p is right."""
    empty = jnp.all(residual <= 0, axis=-1)
    return jnp.where((rejected & ~empty)[:, None], jnp.log(residual), log_next)


def token_law(
    u: Array, log_p: Array, tokens: Array, length: Array, log_q: Array
) -> tuple[Array, Array]:
    """Judges a sampled chain token by token; its random numbers are an argument.

    Args:
      u: float32[B, N] uniform in (0, 1).
      log_p: float32[B, W, V] of the target after the root and after each draft.
      tokens: int32[B, N] drafts.
      length: int32[B], how many of them were proposed. The slot beyond takes a plain draw from p, the bonus.
      log_q: float32[B, N, V] that the drafts were drawn from.

    Returns:
      count: int32[B], accepted drafts.
      log_next: float32[B, V], log-probabilities of the token that follows them, up to a constant.
    """
    size = tokens.shape[1]
    if not size:
        return jnp.zeros_like(length), log_p[:, 0]
    ratio = _picked(log_p[:, :-1], tokens) - _picked(log_q, tokens)
    count = leading((jnp.log(u) < ratio) & (jnp.arange(size) < length[:, None]))
    after, q = _row(log_p, count), _row(log_q, jnp.minimum(count, size - 1))
    residual = jnp.maximum(jnp.exp(after) - jnp.exp(q), 0.0)
    return count, _after_rejection(after, residual, count < length)


def block_law(
    u: Array, log_p: Array, tokens: Array, length: Array, log_q: Array
) -> tuple[Array, Array]:
    """Judges a sampled chain as a block: arXiv 2403.10444, algorithm 2. Arguments and results of `token_law`.

    P_i = min(1, P_{i-1} p(d_i) / q(d_i)) is how well the first i drafts fit together; the longest prefix i whose number
    u_i is below h_i stands, h_i = R_i / (R_i + 1 - P_i) with R_i the mass of (P_i p - q)+ after it, and h = P at the end.
    """
    size = tokens.shape[1]
    if not size:
        return jnp.zeros_like(length), log_p[:, 0]
    ratio = _picked(log_p[:, :-1], tokens) - _picked(log_q, tokens)
    fits = [jnp.zeros(length.shape, jnp.float32)]
    for i in range(size):
        fits.append(jnp.minimum(fits[-1] + ratio[:, i], 0.0))
    fit = jnp.exp(jnp.stack(fits, axis=1))  # [B, W], P_0 = 1
    left = jnp.maximum(fit[:, :-1, None] * jnp.exp(log_p[:, :-1]) - jnp.exp(log_q), 0.0)
    mass = jnp.sum(left, -1)  # [B, N]: R_0 .. R_{N-1}
    total = mass + 1.0 - fit[:, :-1]
    inner = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)
    index = jnp.arange(1, size + 1)
    chance = jnp.where(
        index == length[:, None], fit[:, 1:], jnp.pad(inner[:, 1:], ((0, 0), (0, 1)))
    )
    stands = (u < chance) & (index <= length[:, None])
    count = jnp.max(jnp.where(stands, index, 0), axis=1).astype(jnp.int32)
    residual = _row(left, jnp.minimum(count, size - 1))
    return count, _after_rejection(_row(log_p, count), residual, count < length)


def sibling_law(
    u: Array,
    log_p: Array,
    tokens: Array,
    length: Array,
    log_q: Array,
    tree: Tree,
    branches: int,
    depth: int,
) -> tuple[Array, Array, Array]:
    """Judges a tree whose siblings were drawn from q one after the other without replacement.

    From the root down: the children of a node are tried in order, each stands with probability min(1, p / q); after a
    rejection p becomes (p - q)+ and q loses the rejected token, both normalised.

    Args:
      u, log_p, tokens, length: as for `token_law`.
      log_q: float32[B, W, V]; entry j is what the children of node j were drawn from.
      branches, depth: the most children that a node has, and the longest path.

    Returns:
      count, log_next: as for `token_law`; node: int32[B], the last accepted node.
    """
    batch, size = tokens.shape
    rows = jnp.arange(batch)
    node = jnp.zeros(batch, jnp.int32)
    log_next = log_p[:, 0]
    index = jnp.arange(1, size + 1)
    open_ = jnp.ones(batch, bool)
    for _ in range(depth):
        p, q = jnp.exp(_row(log_p, node)), jnp.exp(_row(log_q, node))
        mine = (tree.parent == node[:, None]) & (index <= length[:, None])
        rank = jnp.cumsum(mine, axis=1)
        accepted, follow = jnp.zeros(batch, bool), node
        for branch in range(branches):
            here = mine & (rank == branch + 1)
            child = jnp.argmax(here, axis=1)
            token = tokens[rows, child]
            p_token, q_token = p[rows, token], q[rows, token]
            # q == 0: it had fewer tokens than branches, and this child was never drawn
            trying = jnp.any(here, axis=1) & open_ & ~accepted & (q_token > 0)
            stands = trying & (u[rows, child] * q_token < p_token)
            follow = jnp.where(stands, child + 1, follow).astype(jnp.int32)
            accepted |= stands
            rest = jnp.maximum(p - q, 0.0)
            mass = jnp.sum(rest, -1, keepdims=True)
            failed = (trying & ~stands)[:, None]
            p = jnp.where(failed & (mass > 0), rest / jnp.where(mass > 0, mass, 1.0), p)
            without = q.at[rows, token].set(0.0)
            mass = jnp.sum(without, -1, keepdims=True)
            q = jnp.where(failed, without / jnp.where(mass > 0, mass, 1.0), q)
        log_next = jnp.where(
            accepted[:, None], _row(log_p, follow), jnp.where(open_[:, None], jnp.log(p), log_next)
        )
        node, open_ = follow, accepted
    return jnp.take_along_axis(tree.depth, node[:, None], 1)[:, 0], log_next, node


def traversal_law(
    u: Array,
    log_p: Array,
    tokens: Array,
    length: Array,
    log_q: Array,
    tree: Tree,
    depth: int,
) -> tuple[Array, Array, Array]:
    """Judges a sampled tree from the leaves up: arXiv 2505.12398, algorithm 1. Arguments and results of `sibling_law`.

    P(child) = min(1, P(node) p / q) is how well the path to a node fits, 1 at the root. Leaf after leaf stands with
    probability P. One that does not is taken away: p after its parent becomes R = (P p - q)+ and P becomes R / (R + 1 - P)
    by its mass, q loses the token, and a parent without children is a leaf. On a chain this is `block_law`.
    """
    size = tokens.shape[1]
    parent = jnp.pad(tree.parent, ((0, 0), (1, 0)))
    index = jnp.arange(size + 1)
    # a q of 0 had fewer tokens than branches, and this child was never drawn
    before = jnp.take_along_axis(log_q, tree.parent[..., None], axis=1)
    drawn = (_picked(before, tokens) > -jnp.inf) & (index[1:] <= length[:, None])
    absent = jnp.pad(~drawn, ((0, 0), (1, 0)))
    real = ~jnp.any(tree.ancestors & absent[:, None, :], axis=-1)

    def row(u, p, tokens, q, parent, real, order):
        tokens, u = jnp.pad(tokens, (1, 0)), jnp.pad(u, (1, 0))  # the root stands: u is 0 there
        q_token = q[parent, tokens]

        def judge(time, carry):
            p, fit, mass_q, refused, found = carry
            node = jnp.argmax(order == time)
            above = parent[node]
            # how well the nodes fit that have lost no child yet
            ratio = p[parent, tokens] / q_token * mass_q[parent]
            kept = (index == 0) | jnp.any((parent == index[:, None]) & refused, axis=1)
            for _ in range(depth):
                fit = jnp.where(kept, fit, jnp.minimum(fit[parent] * ratio, 1.0))
            judging = real[node] & (found < 0)
            stands = u[node] < fit[node]
            found = jnp.where(judging & stands, node, found)
            falls = judging & ~stands

            gone = jnp.where((parent == above) & refused, tokens, p.shape[1])
            q_left = q[above].at[gone].set(0.0, mode="drop")
            left = jnp.maximum(fit[above] * p[above] - q_left / mass_q[above], 0.0)
            mass = jnp.sum(left)
            total = mass + 1.0 - fit[above]
            share = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)
            rest = jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1.0), p[above])
            p = p.at[above].set(jnp.where(falls, rest, p[above]))
            fit = fit.at[above].set(jnp.where(falls, share, fit[above]))
            without = jnp.sum(q_left.at[tokens[node]].set(0.0))
            mass_q = mass_q.at[above].set(jnp.where(falls, without, mass_q[above]))
            return p, fit, mass_q, refused.at[node].set(falls), found

        ones, no = jnp.ones(size + 1), jnp.zeros(size + 1, bool)
        start = (p, ones, ones, no, jnp.int32(-1))
        p, *_, found = jax.lax.fori_loop(0, size + 1, judge, start)
        return jnp.log(p[found]), found

    log_next, node = jax.vmap(row)(
        u, jnp.exp(log_p), tokens, jnp.exp(log_q), parent, real, tree.leaves_first()
    )
    return jnp.take_along_axis(tree.depth, node[:, None], 1)[:, 0], log_next, node


def synthetic_law(u: Array, rates: tuple[float, ...], length: Array) -> Array:
    """How many drafts stand if draft i stands with unconditional probability rates[i] (0 past their end): int32[B]."""
    size = u.shape[1]
    known = jnp.asarray([*rates[:size], *[0.0] * (size - len(rates))], jnp.float32)
    before = jnp.concatenate([jnp.ones(1), known[:-1]])
    conditional = known / jnp.where(before > 0, before, 1.0)
    return leading((u < conditional) & (jnp.arange(size) < length[:, None]))
