"""Drafting token by token with a network: what all such drafters share.

A drafter brings a step, from the newest token to the logits of the next; here tokens are drawn from them as the target
will draw its own, and q is kept. B rows, N drafted tokens, V the target's
vocabulary, Vd the drafter's.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.drafters.base import Context, Proposal
from specjax.sampling import DRAFT, draw, process_logits, stream


@struct.dataclass
class Vocabulary:
    """Where a drafter's logits lie in the target's vocabulary.

    Processing and drawing happen among the drafter's own Vd ids, which gives the same as among V with the rest at -inf and
    costs less; what leaves is in the target's ids.

    Attributes:
      ids: int32[Vd], the target's id of each of the drafter's; None where they are the same.
      size: V (static).
    """

    ids: Array | None = None
    size: int = struct.field(pytree_node=False, default=0)

    def tokens(self, drafted: Array) -> Array:
        """Draft ids of any shape as the target's."""
        return drafted if self.ids is None else jnp.take(self.ids, drafted, mode="clip")

    def own(self, tokens: Array) -> Array:
        """The target's ids, int32 of any shape, as the drafter's; -1 for those that it cannot say, and for -1."""
        if self.ids is None:
            return tokens
        places = jnp.full(self.size, -1, jnp.int32)
        places = places.at[self.ids].set(jnp.arange(self.ids.shape[0], dtype=jnp.int32))
        return jnp.where(tokens < 0, -1, jnp.take(places, tokens, mode="clip"))

    def seen(self, seen: Array | None) -> Array | None:
        """bool[B, V] over the draft's ids, [B, Vd]."""
        return seen if seen is None or self.ids is None else seen[:, self.ids]

    def spread(self, log_q: Array | None) -> Array | None:
        """Log-probabilities [..., Vd] as [..., V]: what the drafter cannot say has none."""
        if log_q is None or self.ids is None:
            return log_q
        empty = jnp.full((*log_q.shape[:-1], self.size), -jnp.inf, log_q.dtype)
        return empty.at[..., self.ids].set(log_q)


SAME = Vocabulary()


@struct.dataclass
class Draft:
    """Drawn tokens; one token wide [B, ...] while drafting, [B, N, ...] in the end.

    Attributes:
      tokens: int32.
      log_q: float32[..., V] that they were drawn from ([..., Vd] while drafting); None if every row is greedy.
      confidence: float32, probability that the drafter gives its likeliest token.
    """

    tokens: Array
    log_q: Array | None
    confidence: Array


def draw_token(
    logits: Array,
    context: Context,
    seen: Array | None,
    number: Array | int,
    vocabulary: Vocabulary = SAME,
) -> tuple[Draft, Array | None]:
    """One token per row from logits [B, Vd], through the target's processors.

    Args:
      seen: bool[B, V], tokens under the repetition penalty, drafts included; None while it is off.
      number: of the draw in this round: each draws from random numbers of its own.
      vocabulary: of the logits.

    Returns:
      the draft, and `seen` with it.
    """
    processors = context.processors
    if processors.greedy and seen is None:
        token, log_q = jnp.argmax(logits, axis=-1).astype(jnp.int32), None
        confidence = jnp.max(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), axis=-1)
    else:
        narrow = vocabulary.seen(seen)
        wide = None if narrow is None else narrow[:, None]
        log_q = process_logits(logits[:, None], processors, wide)[:, 0]
        confidence = jnp.exp(jnp.max(log_q, axis=-1))
        if processors.greedy:
            token, log_q = jnp.argmax(log_q, axis=-1).astype(jnp.int32), None
        else:
            token = draw(stream(stream(context.keys, DRAFT), number), log_q)
    token = vocabulary.tokens(token)
    if seen is not None:
        seen = seen.at[jnp.arange(seen.shape[0]), token].set(True)
    return Draft(tokens=token, log_q=log_q, confidence=confidence), seen


def draft_chain(
    first: Array,
    step: Callable[[Any, Array, Array], tuple[Any, Array]],
    carry: Any,
    context: Context,
    num_draft: int,
    min_confidence: float = 0.0,
    vocabulary: Vocabulary = SAME,
) -> tuple[Draft, Any]:
    """N tokens one after the other.

    Drafting ends early where no row goes on: all have ended, or drawn a token whose distribution was too flat
    (`propose_chain` leaves it out). What was not drafted is 0, confidence too.

    Args:
      first: [B, Vd], logits after the newest committed token.
      step: (carry, token int32[B], index int32[]) -> (carry, logits [B, Vd] after that token); called for the drafts
        0..N-2 (index 1..N-1).
      carry: the first step's.
      min_confidence: of a token's likeliest value, for its row to go on; 0 drafts all N.
      vocabulary: of the logits.

    Returns:
      the draft [B, N, ...] and the last carry.
    """
    draft, seen = draw_token(first, context, context.seen, 0, vocabulary)
    whole = jax.tree.map(lambda x: jnp.zeros((num_draft, *x.shape), x.dtype).at[0].set(x), draft)
    going = ~jnp.broadcast_to(context.done, draft.tokens.shape)

    def sure(draft: Draft, going: Array) -> Array:
        return going & (draft.confidence >= min_confidence) if min_confidence > 0 else going

    def more(state):
        index, going = state[0], state[-1]
        return (index < num_draft) & jnp.any(going)

    def one(state):
        index, carry, draft, seen, whole, going = state
        carry, logits = step(carry, draft.tokens, index)
        draft, seen = draw_token(logits, context, seen, index, vocabulary)
        whole = jax.tree.map(lambda xs, x: xs.at[index].set(x), whole, draft)
        return index + 1, carry, draft, seen, whole, sure(draft, going)

    state = (jnp.int32(1), carry, draft, seen, whole, sure(draft, going))
    _, carry, _, _, whole, _ = jax.lax.while_loop(more, one, state)
    whole = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), whole)
    return replace(whole, log_q=vocabulary.spread(whole.log_q)), carry


def propose_chain(draft: Draft, length: Array, min_confidence: float, **more: Any) -> Proposal:
    """The proposal of a drawn chain: up to the first slot whose distribution is too flat.

    The confidence of a slot is known before its token is drawn, so leaving the slot out does not bias anything.

    Args:
      length: int32[B], tokens proposed at most.
      more: further fields of the proposal.
    """
    if min_confidence > 0:
        sure = jnp.cumprod((draft.confidence >= min_confidence).astype(jnp.int32), axis=1)
        length = jnp.minimum(length, jnp.sum(sure, axis=1, dtype=jnp.int32))
    return Proposal(
        tokens=draft.tokens,
        length=length,
        log_q=draft.log_q,
        confidence=draft.confidence,
        **more,
    )


def check_draft_length(num_draft: int, min_confidence: float = 0.0) -> None:
    """Raises ValueError naming the argument, what was got and what was expected."""
    if int(num_draft) != num_draft or num_draft < 1:
        raise ValueError(f"num_draft must be a whole number >= 1, got {num_draft}")
    if not 0 <= min_confidence <= 1:
        raise ValueError(f"min_confidence must be in [0, 1], got {min_confidence}")
