"""From a pass's logits to what was accepted: which law judges which row.

B rows, N drafts, w nodes of the block that was passed over, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from specjax.drafters.base import Context, Proposal
from specjax.sampling import (
    ACCEPT,
    RESIDUAL,
    draw,
    position_keys,
    process_logits,
    seen_at_nodes,
    stream,
)
from specjax.trees import Tree
from specjax.verification import (
    Acceptance,
    Verification,
    accept_matching,
    block_law,
    sibling_law,
    synthetic_law,
    token_law,
    traversal_law,
)


def accept(
    logits: Array,
    tokens: Array,
    tree: Tree | None,
    proposal: Proposal,
    context: Context,
    row_keys: Array,
    rule: Verification,
) -> Acceptance:
    """Judges a block: by matching where the drafts are deterministic, by their q where they were drawn from it.

    Args:
      logits: float32[B, w, V] after each of the block's first w nodes.
      tokens: int32[B, w] of those nodes.
      tree: of those nodes; None for a chain.
      context: the rows before the round, with the round's keys.
      row_keys: the rows' own keys [B].
    """
    drafts, length, keys = tokens[:, 1:], proposal.length, context.keys
    chosen, log_p = own_choice(logits, tokens, tree, context, row_keys)
    if rule.synthetic_rates is not None:
        if tree is not None:
            raise ValueError("synthetic_rates judge chains; this drafter proposes trees")
        count = synthetic_law(acceptance_numbers(keys, drafts), rule.synthetic_rates, length)
        return Acceptance(count=count, next_token=chosen[:, -1])
    also = None
    if rule.lossy_threshold is not None:
        also = likely(log_p, drafts, tree, rule.lossy_threshold)
    matched = accept_matching(chosen, drafts, length, tree, also)
    if (
        context.processors.greedy
        or proposal.log_q is None
        or not drafts.shape[1]
        or also is not None
    ):
        return matched
    judged = accept_sampled(log_p, drafts, proposal, tree, keys, rule)
    # a row without drafts is judged alike at every width: it must not notice its neighbours' proposals
    fixed = length == 0
    if proposal.deterministic is not None:
        fixed |= proposal.deterministic
    return jax.tree.map(
        lambda a, b: jnp.where(fixed.reshape(-1, *[1] * (a.ndim - 1)), a, b), matched, judged
    )


def own_choice(
    logits: Array, tokens: Array, tree: Tree | None, context: Context, row_keys: Array
) -> tuple[Array, Array]:
    """The target's token after every node, int32[B, w], and its log-probabilities, [B, w, V]."""
    width, processors = tokens.shape[1], context.processors
    seen = None
    if context.seen is not None:
        causal = jnp.tril(jnp.ones((width, width), bool))
        seen = seen_at_nodes(context.seen, tokens, causal if tree is None else tree.ancestors)
    log_p = process_logits(logits, processors, seen)
    if processors.greedy:  # log_p is one-hot; without a penalty it need not be made
        best = logits if seen is None else log_p
        return jnp.argmax(best, axis=-1).astype(jnp.int32), log_p
    depth = jnp.arange(width, dtype=jnp.int32)[None] if tree is None else tree.depth
    positions = jnp.broadcast_to(context.length[:, None] + depth, tokens.shape)
    return draw(position_keys(row_keys, positions), log_p), log_p


def likely(log_p: Array, drafts: Array, tree: Tree | None, threshold: float) -> Array:
    """bool[B, N], drafts that the target gives at least the threshold (lossy acceptance)."""
    parent = jnp.arange(drafts.shape[1])[None] if tree is None else tree.parent
    before = jnp.take_along_axis(log_p, jnp.broadcast_to(parent, drafts.shape)[..., None], axis=1)
    p = jnp.take_along_axis(before, drafts[..., None], axis=2)[..., 0]
    return jnp.exp(p) >= threshold


def acceptance_numbers(keys: Array, drafts: Array) -> Array:
    """A number in (0, 1) for every draft, float32[B, N]; never 0, so that a token of probability 0 never stands."""
    tiny = jnp.finfo(jnp.float32).tiny
    return jax.vmap(lambda key: jax.random.uniform(key, drafts.shape[1:], minval=tiny))(
        stream(keys, ACCEPT)
    )


def accept_sampled(
    log_p: Array,
    drafts: Array,
    proposal: Proposal,
    tree: Tree | None,
    keys: Array,
    rule: Verification,
) -> Acceptance:
    """Judges drafts that were drawn from `proposal.log_q`."""
    u, size, path = acceptance_numbers(keys, drafts), drafts.shape[1], None
    assert proposal.log_q is not None
    if tree is None:
        law = token_law if rule.law == "token" else block_law
        count, log_next = law(u, log_p, drafts, proposal.length, proposal.log_q[:, :size])
    else:
        law = traversal_law
        if rule.law == "token":
            law = partial(sibling_law, branches=proposal.branches)
        log_q, depth = proposal.log_q[:, : size + 1], min(proposal.depth, size)
        count, log_next, node = law(u, log_p, drafts, proposal.length, log_q, tree, depth=depth)
        path = tree.path(node)
    return Acceptance(count=count, next_token=draw(stream(keys, RESIDUAL), log_next), path=path)
