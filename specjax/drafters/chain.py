"""Drafting token by token with a network: what all such drafters share.

A drafter brings a step, from the newest token to the logits of the next; here tokens are drawn from them as the target
will draw its own, and q is kept. B rows, N drafted tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.drafters.base import Context, Proposal
from specjax.sampling import DRAFT, draw, process_logits, stream


@struct.dataclass
class Draft:
    """Drawn tokens; one token wide [B, ...] while drafting, [B, N, ...] in the end.

    Attributes:
      tokens: int32.
      log_q: float32[..., V] that they were drawn from; None if every row is greedy.
      confidence: float32, probability that the drafter gives its likeliest token.
    """

    tokens: Array
    log_q: Array | None
    confidence: Array


def draw_token(
    logits: Array, context: Context, seen: Array | None, number: Array | int
) -> tuple[Draft, Array | None]:
    """One token per row from logits [B, V], through the target's processors.

    Args:
      seen: bool[B, V], tokens under the repetition penalty, drafts included; None while it is off.
      number: of the draw in this round: each draws from random numbers of its own.

    Returns:
      the draft, and `seen` with it.
    """
    processors = context.processors
    if processors.greedy and seen is None:
        token, log_q = jnp.argmax(logits, axis=-1).astype(jnp.int32), None
        confidence = jnp.max(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), axis=-1)
    else:
        wide = None if seen is None else seen[:, None]
        log_q = process_logits(logits[:, None], processors, wide)[:, 0]
        confidence = jnp.exp(jnp.max(log_q, axis=-1))
        if processors.greedy:
            token, log_q = jnp.argmax(log_q, axis=-1).astype(jnp.int32), None
        else:
            token = draw(stream(stream(context.keys, DRAFT), number), log_q)
    if seen is not None:
        seen = seen.at[jnp.arange(seen.shape[0]), token].set(True)
    return Draft(tokens=token, log_q=log_q, confidence=confidence), seen


def draft_chain(
    first: Array,
    step: Callable[[Any, Array, Array], tuple[Any, Array]],
    carry: Any,
    context: Context,
    num_draft: int,
) -> tuple[Draft, Any]:
    """N tokens one after the other.

    Args:
      first: [B, V], logits after the newest committed token.
      step: (carry, token int32[B], index int32[]) -> (carry, logits [B, V] after that token); called for the drafts
        0..N-2 (index 1..N-1).
      carry: the first step's.

    Returns:
      the draft [B, N, ...] and the last carry.
    """
    draft, seen = draw_token(first, context, context.seen, 0)

    def one(state, index):
        carry, draft, seen = state
        carry, logits = step(carry, draft.tokens, index)
        draft, seen = draw_token(logits, context, seen, index)
        return (carry, draft, seen), draft

    (carry, _, _), rest = jax.lax.scan(one, (carry, draft, seen), jnp.arange(1, num_draft))
    whole = jax.tree.map(
        lambda a, b: jnp.moveaxis(jnp.concatenate([a[None], b]), 0, 1), draft, rest
    )
    return whole, carry


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
