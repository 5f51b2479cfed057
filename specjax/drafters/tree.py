"""Trees of drafts, for every drafter that can pass over several nodes at once.

B rows, T nodes of a level, N drafted nodes, P = 1 + expanded nodes (the root and those that were passed over), V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.drafters.base import Context, Proposal
from specjax.drafters.chain import SAME, Vocabulary
from specjax.sampling import DRAFT, process_logits, stream
from specjax.trees import Tree, static_tree

Extend = Callable[[Any, Array, int, int, Array, Array], tuple[Any, Array]]
"""Passes over one level: (carry, tokens int32[B, T], depth, slot of the first, mask bool[B, T, P], above int32[B, T]) ->
(carry, logits [B, T, Vd]). Slot 0 is the newest committed token, which the drafter has passed over before; `above` says
which node of the level before each token follows."""


@dataclass(frozen=True)
class StaticTree:
    """Every node of depth d has `branching[d]` children: the likeliest tokens for greedy rows, for others tokens drawn
    from q without replacement, which verification accepts by the siblings' law.

    Raises:
      ValueError: a level without branches.
    """

    branching: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "branching", tuple(self.branching))
        static_tree(self.branching)

    @property
    def depth(self) -> int:
        return len(self.branching)

    @property
    def parents(self) -> np.ndarray:
        """int32[N]."""
        return static_tree(self.branching)

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def slots(self) -> int:
        """P: the last level is not passed over."""
        return 1 + self.num_nodes - int(np.prod(self.branching))


@dataclass(frozen=True)
class TopKTree:
    """EAGLE-2's tree (Li et al., arXiv 2406.16858): at every depth the `top_k` likeliest nodes are expanded to `top_k`
    children each; of all of them the `num_nodes` with the largest probability of their whole path are verified.

    Deterministic at every temperature: acceptance is by matching.

    Raises:
      ValueError: naming the argument, what was got and what was expected.
    """

    depth: int
    top_k: int
    num_nodes: int

    def __post_init__(self):
        for name in ("depth", "top_k"):
            value = getattr(self, name)
            if int(value) != value or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value}")
        most = self.top_k + (self.depth - 1) * self.top_k**2
        if not self.depth <= self.num_nodes <= most:
            raise ValueError(
                f"num_nodes must be in {self.depth}..{most} for depth {self.depth} and top_k {self.top_k}, "
                f"got {self.num_nodes}"
            )

    @property
    def slots(self) -> int:
        return 1 + (self.depth - 1) * self.top_k


def grow(
    shape: StaticTree | TopKTree,
    first: Array,
    extend: Extend,
    carry: Any,
    context: Context,
    vocabulary: Vocabulary = SAME,
) -> tuple[Proposal, Any]:
    """Drafts a tree.

    Args:
      first: [B, Vd], logits after the newest committed token.
      extend: passes over a level, see `Extend`.
      vocabulary: of the logits.

    Returns:
      the proposal, every node of it proposed, and the last carry.
    """
    if isinstance(shape, StaticTree):
        return _grow_static(shape, first, extend, carry, context, vocabulary)
    return _grow_top_k(shape, first, extend, carry, vocabulary)


def _grow_static(
    shape: StaticTree,
    first: Array,
    extend: Extend,
    carry: Any,
    context: Context,
    vocabulary: Vocabulary,
) -> tuple[Proposal, Any]:
    batch, processors = first.shape[0], context.processors
    parents = jnp.broadcast_to(shape.parents, (batch, shape.num_nodes))
    ancestors = Tree.create(parents).ancestors[:, :, : shape.slots]
    keys = stream(context.keys, DRAFT)
    logits, tokens, log_qs, at = first[:, None], [], [], 0
    for depth, branches in enumerate(shape.branching, 1):
        width = logits.shape[1]
        best = jax.lax.top_k(logits, branches)[1].astype(jnp.int32)
        if not processors.greedy:
            seen = vocabulary.seen(context.seen)
            seen = None if seen is None else seen[:, None]
            log_q = process_logits(logits, processors, seen)
            noise = jax.vmap(lambda key, shape=log_q.shape[1:]: jax.random.gumbel(key, shape))(
                stream(keys, depth)
            )
            drawn = jax.lax.top_k(log_q + noise, branches)[1].astype(jnp.int32)
            sampled = processors.sampled(batch)[:, None, None]
            best = jnp.where(sampled, drawn, best)
            log_qs.append(log_q)
        tokens.append(vocabulary.tokens(best.reshape(batch, width * branches)))
        at += width
        if depth < shape.depth:
            mask = ancestors[:, at : at + width * branches]
            above = jnp.repeat(jnp.arange(width, dtype=jnp.int32), branches)
            above = jnp.broadcast_to(above, tokens[-1].shape)
            carry, logits = extend(carry, tokens[-1], depth, at, mask, above)
    log_q = deterministic = None
    if log_qs:
        log_q = vocabulary.spread(jnp.concatenate(log_qs, axis=1))
        assert log_q is not None
        leaves = shape.num_nodes + 1 - log_q.shape[1]
        log_q = jnp.pad(log_q, ((0, 0), (0, leaves), (0, 0)), constant_values=-jnp.inf)
        deterministic = ~processors.sampled(batch)
    proposal = Proposal(
        tokens=jnp.concatenate(tokens, axis=1),
        length=jnp.full(batch, shape.num_nodes, jnp.int32),
        log_q=log_q,
        parent=parents,
        deterministic=deterministic,
        branches=max(shape.branching),
        depth=shape.depth,
    )
    return proposal, carry


def _grow_top_k(
    shape: TopKTree, first: Array, extend: Extend, carry: Any, vocabulary: Vocabulary
) -> tuple[Proposal, Any]:
    batch, k = first.shape[0], shape.top_k
    rows = jnp.arange(batch)[:, None]

    def children(logits: Array, score: Array) -> tuple[Array, Array]:
        """Tokens and path scores [B, T * k] of the likeliest children of nodes with path scores [B, T]."""
        log = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        best, tokens = jax.lax.top_k(log, k)
        tokens = vocabulary.tokens(tokens.astype(jnp.int32))
        return tokens.reshape(batch, -1), (score[..., None] + best).reshape(batch, -1)

    # every candidate: its token, path score and the candidate it follows (-1: the root)
    token, score = children(first[:, None], jnp.zeros((batch, 1)))
    tokens, scores, follows = [token], [score], [jnp.full(token.shape, -1, jnp.int32)]
    chosen = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))  # of all candidates
    level_token, level_score = token, score
    mask = jnp.zeros((batch, k, shape.slots), bool).at[:, :, 0].set(True)
    above = jnp.zeros((batch, k), jnp.int32)
    count = k
    for depth in range(1, shape.depth):
        at = 1 + (depth - 1) * k
        own = jax.nn.one_hot(at + jnp.arange(k), shape.slots, dtype=bool)
        mask = mask | own
        carry, logits = extend(carry, level_token, depth, at, mask, above)
        token, score = children(logits, level_score)  # [B, k * k]
        tokens.append(token)
        scores.append(score)
        follows.append(jnp.repeat(chosen, k, axis=1))
        level_score, best = jax.lax.top_k(score, k)
        level_token = jnp.take_along_axis(token, best, axis=1)
        above = best // k
        mask = jnp.take_along_axis(mask, above[..., None], axis=1)
        chosen = (count + best).astype(jnp.int32)
        count += k * k

    # the best nodes in the order of their making: a parent always scores at least as high, and was made before
    every = jnp.concatenate(scores, axis=1)
    order = jnp.argsort(-every, axis=1, stable=True)[:, : shape.num_nodes]
    order = jnp.sort(order, axis=1)
    place = jnp.zeros(
        (batch, every.shape[1] + 1), jnp.int32
    )  # candidate -> node; the last entry is the root's
    place = place.at[rows, order].set(jnp.arange(1, shape.num_nodes + 1, dtype=jnp.int32))
    above = jnp.take_along_axis(jnp.concatenate(follows, axis=1), order, axis=1)
    proposal = Proposal(
        tokens=jnp.take_along_axis(jnp.concatenate(tokens, axis=1), order, axis=1),
        length=jnp.full(batch, shape.num_nodes, jnp.int32),
        parent=jnp.take_along_axis(place, above, axis=1),  # -1 takes the root's entry
        depth=shape.depth,
    )
    return proposal, carry
