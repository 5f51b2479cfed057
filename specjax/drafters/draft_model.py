"""Drafts from a second, smaller model: speculative sampling as first published (arXiv 2211.17192, 2302.01318).

B rows, N drafted tokens, T observed tokens, V the target's vocabulary.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.checkpoints.vocabulary import check_same_tokens
from specjax.drafters.base import Context, Observation, Proposal
from specjax.drafters.chain import check_draft_length, draft_chain, propose_chain
from specjax.drafters.tree import StaticTree, TopKTree, grow
from specjax.models.transformer import Target


@struct.dataclass
class DraftModelState:
    """What the draft model remembers.

    Attributes:
      cache: the draft's own keys and values; right up to `cache.length`. Between rounds that is all committed tokens but
        the newest, or one less: a fully accepted draft's last token was never passed over. So every proposal starts with
        a pass over exactly the two newest tokens, whichever of the two cases a row is in.
      observed: int32[B], committed tokens but the newest.
      previous: int32[B], the token at `observed - 1`.
      written: int32[B, N - 1], the drafts whose keys and values lie beyond `cache.length`; -1 for none.
    """

    cache: Any
    observed: Array
    previous: Array
    written: Array


def fit_vocabulary(logits: Array, vocab_size: int) -> Array:
    """logits [..., Vd] as [..., vocab_size]: surplus columns are cut, missing ones are never drawn."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    pad = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits, pad, constant_values=-jnp.inf)


@struct.dataclass
class DraftModel:
    """A second model drafts `num_draft` tokens one by one.

    Drafts are drawn through the same processors as the target's tokens, and the distributions they were drawn from go
    along, so that acceptance is the full min(1, p / q). Greedy rows draft greedily. Rows longer than the draft's own
    context draft nothing.

    Attributes:
      model: any `Target` over the same tokens.
      num_draft: N, tokens proposed at most.
      min_confidence: a proposal ends before the first token whose likeliest value has less than this probability.
      tree: drafts a tree in place of a chain; `num_draft` is then its number of nodes. Every level is a pass over all
        nodes so far, since any model can do that.
    """

    model: Any
    num_draft: int = struct.field(pytree_node=False, default=3)
    min_confidence: float = struct.field(pytree_node=False, default=0.0)
    tree: StaticTree | TopKTree | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self):
        if self.tree is not None:
            object.__setattr__(self, "num_draft", self.tree.num_nodes)
        check_draft_length(self.num_draft, self.min_confidence)

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def check(self, target: Target) -> None:
        """Refuses a draft over other tokens: ids must mean the same texts to both."""
        check_same_tokens(target, self.model)

    def init(self, target: Target, batch: int, slots: int) -> DraftModelState:
        return DraftModelState(
            cache=self.model.init_cache(batch, slots),
            observed=jnp.zeros(batch, jnp.int32),
            previous=jnp.zeros(batch, jnp.int32),
            written=jnp.full((batch, self.num_draft - 1), -1, jnp.int32),
        )

    def observe(
        self, target: Target, state: DraftModelState, observation: Observation
    ) -> DraftModelState:
        """Keeps what the last proposal passed over already; passes over the rest where more than one token is missing."""
        tokens, count = observation.tokens, observation.count
        batch, size = tokens.shape
        overlap = min(size - 1, self.num_draft - 1)
        same = tokens[:, 1 : overlap + 1] == state.written[:, :overlap]
        same &= jnp.arange(1, overlap + 1) < count[:, None]
        kept = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        observed = state.observed + count
        known = jnp.minimum(state.cache.length + kept, observed)
        behind = jnp.any(observed - known > 1)

        # The pass starts one token early, with the token that the round before may have left out.
        first = jnp.maximum(state.observed - 1, 0)
        early = state.observed - first
        window = jnp.concatenate([state.previous[:, None], tokens], axis=1)
        shift = jnp.arange(size + 1) + (1 - early)[:, None]
        window = jnp.take_along_axis(window, jnp.minimum(shift, size), axis=1)
        positions = first[:, None] + jnp.arange(size + 1, dtype=jnp.int32)
        start = state.cache.rewind(first)

        def catch_up(_):
            return self.model(window, positions, start).block

        nothing = jax.eval_shape(catch_up, None)
        block = jax.lax.cond(
            behind,
            catch_up,
            lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing),
            None,
        )
        cache = start.rewind(jnp.where(behind, first, known))
        newest = jnp.take_along_axis(tokens, jnp.maximum(count[:, None] - 1, 0), axis=1)[:, 0]
        return DraftModelState(
            cache=cache.commit(block, jnp.where(behind, early + count, 0)),
            observed=observed,
            previous=jnp.where(count > 0, newest, state.previous),
            written=jnp.full((batch, self.num_draft - 1), -1, jnp.int32),
        )

    def propose(
        self, target: Target, state: DraftModelState, context: Context
    ) -> tuple[Proposal, DraftModelState]:
        length = context.length
        start = jnp.maximum(length - 2, 0)
        count = length - start  # 2, or 1 for a row of one token
        window_at = start[:, None] + jnp.arange(2, dtype=jnp.int32)
        window = jnp.take_along_axis(context.tokens, window_at, axis=1)
        cache = state.cache.rewind(start)
        output = self.model(window, window_at, cache)
        cache = cache.commit(output.block, count)
        logits = jnp.take_along_axis(output.logits, (count - 1)[:, None, None], axis=1)

        def step(cache, token, _):
            output = self.model(token[:, None], cache.length[:, None], cache)
            cache = cache.commit(output.block, jnp.ones_like(length))
            return cache, fit_vocabulary(output.logits[:, 0], target.vocab_size)

        first = fit_vocabulary(logits[:, 0], target.vocab_size)
        if self.tree is not None:
            return self._propose_tree(target, state, context, cache, first)
        draft, cache = draft_chain(first, step, cache, context, self.num_draft, self.min_confidence)
        room = jnp.clip(self.model.context_length - length, 0, self.num_draft)
        proposal = propose_chain(draft, room, self.min_confidence)
        # a draft has keys if the one after it was drawn
        written = jnp.where(draft.confidence[:, 1:] > 0, draft.tokens[:, :-1], -1)
        return proposal, replace(state, cache=cache.rewind(length), written=written)

    def _propose_tree(
        self, target: Target, state: DraftModelState, context: Context, cache: Any, first: Array
    ) -> tuple[Proposal, DraftModelState]:
        assert self.tree is not None
        length = context.length
        none = jnp.zeros((length.shape[0], 0), jnp.int32)

        def extend(carry, tokens: Array, depth: int, at: int, mask: Array, above=None):
            nodes, positions, masks = carry  # of the nodes so far; the root is in the cache
            here = jnp.broadcast_to(length[:, None] - 1 + depth, tokens.shape)
            nodes = jnp.concatenate([nodes, tokens], axis=1)
            positions = jnp.concatenate([positions, here], axis=1)
            masks = (*masks, mask)
            size = nodes.shape[1]
            seen = jnp.concatenate(masks, axis=1)[:, :, 1 : size + 1]
            logits = self.model(nodes, positions, cache, seen).logits[:, at - 1 :]
            return (nodes, positions, masks), fit_vocabulary(logits, target.vocab_size)

        proposal, _ = grow(self.tree, first, extend, (none, none, ()), context)
        deepest = self.tree.depth
        fits = length + deepest <= self.model.context_length
        proposal = replace(proposal, length=jnp.where(fits, proposal.length, 0))
        return proposal, replace(state, cache=cache.rewind(length))
