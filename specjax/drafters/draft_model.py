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
from specjax.models.transformer import Target
from specjax.sampling import DRAFT, draw, process_logits, stream


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
      num_draft: N, tokens proposed every round.
    """

    model: Any
    num_draft: int = struct.field(pytree_node=False, default=3)

    def __post_init__(self):
        if self.num_draft < 1:
            raise ValueError(f"num_draft must be >= 1, got {self.num_draft}")

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
        length, keys = context.length, stream(context.keys, DRAFT)
        start = jnp.maximum(length - 2, 0)
        count = length - start  # 2, or 1 for a row of one token
        window_at = start[:, None] + jnp.arange(2, dtype=jnp.int32)
        window = jnp.take_along_axis(context.tokens, window_at, axis=1)
        cache = state.cache.rewind(start)
        output = self.model(window, window_at, cache)
        cache = cache.commit(output.block, count)
        logits = jnp.take_along_axis(output.logits, (count - 1)[:, None, None], axis=1)

        def choose(logits: Array, seen: Array | None, slot) -> tuple[Array, Array | None]:
            logits = fit_vocabulary(logits, target.vocab_size)
            if context.processors.greedy and seen is None:
                return jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, 0], None
            log_q = process_logits(
                logits, context.processors, None if seen is None else seen[:, None]
            )[:, 0]
            if context.processors.greedy:
                return jnp.argmax(log_q, axis=-1).astype(jnp.int32), None
            return draw(stream(keys, slot), log_q), log_q

        def see(seen: Array | None, token: Array) -> Array | None:
            return None if seen is None else seen.at[jnp.arange(seen.shape[0]), token].set(True)

        def step(carry, slot):
            cache, token, seen = carry
            output = self.model(token[:, None], cache.length[:, None], cache)
            cache = cache.commit(output.block, jnp.ones_like(length))
            token, log_q = choose(output.logits, seen, slot)
            return (cache, token, see(seen, token)), (token, log_q)

        token, log_q = choose(logits, context.seen, 0)
        carry = (cache, token, see(context.seen, token))
        (cache, _, _), (tokens, log_qs) = jax.lax.scan(step, carry, jnp.arange(1, self.num_draft))
        tokens = jnp.concatenate([token[None], tokens]).T
        if log_q is not None and log_qs is not None:
            log_q = jnp.moveaxis(jnp.concatenate([log_q[None], log_qs]), 0, 1)
        proposal = Proposal(
            tokens=tokens,
            length=jnp.clip(self.model.context_length - length, 0, self.num_draft),
            log_q=log_q,
        )
        written = tokens[:, : self.num_draft - 1]
        return proposal, replace(state, cache=cache.rewind(length), written=written)
