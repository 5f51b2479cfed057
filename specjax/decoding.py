"""The decode loop: draft, verify, accept, commit, all on the device.

    prefill       the prompt, all but its newest token
    decode_round  one round: propose -> verify -> accept -> commit
    decode        rounds until every row is done, one `lax.while_loop`

Plain decoding is this loop with a drafter that proposes nothing. Everything here is a pure function of pytrees; B rows,
L history, S cache slots, N drafted tokens, W = N + 1 the widest block, V vocabulary.

Two facts hold between rounds. The newest committed token has no keys and values yet: `cache.length == length - 1`, and the
next pass starts with it. And a row's tokens depend on its own prompt, key and settings alone: keys are the row's, folded
with a position in it or with its round number, and no operation mixes rows.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.acceptance import accept
from specjax.drafters.base import Context, Drafter, Observation, Proposal, Shared
from specjax.models.transformer import Target
from specjax.sampling import Processors, round_keys, tokens_seen
from specjax.statistics import Statistics
from specjax.trees import Tree, climb, ladder, row_widths
from specjax.verification import Acceptance, Verification


@struct.dataclass
class DecodeState:
    """All that changes while decoding.

    Attributes:
      tokens: int32[B, L], prompt and output; garbage from `length` on.
      length: int32[B], committed tokens.
      limit: int32[B], the length at which a row's budget is spent.
      done: bool[B], rows that met a stop token or their limit; they change no more.
      cache: the target's, `length - 1` tokens long.
      drafter_state: whatever the drafter remembers.
      keys: one random key per row.
      processors: sampling settings per row.
      stop_token_ids: int32[M], padded with -1.
      seen: bool[B, V], tokens under the repetition penalty; None while it is off.
      statistics: counters.
      verification: how drafts are judged (static).
    """

    tokens: Array
    length: Array
    limit: Array
    done: Array
    cache: Any
    drafter_state: Any
    keys: Array
    processors: Processors
    stop_token_ids: Array
    seen: Array | None
    statistics: Statistics
    verification: Verification = struct.field(pytree_node=False, default=Verification())


@partial(jax.jit, static_argnames="verification")
def start(
    target: Target,
    drafter: Drafter,
    tokens: Array,
    length: Array,
    limit: Array,
    keys: Array,
    processors: Processors,
    stop_token_ids: Array,
    verification: Verification = Verification(),  # noqa: B008 (frozen)
) -> DecodeState:
    """The state before prefill.

    Args:
      tokens: int32[B, L] with L = S slots: room for `limit` tokens and a widest block, and a multiple of the prefill chunk.
      length: int32[B], prompt lengths, at least 1.
      limit, keys, processors, stop_token_ids, verification: see `DecodeState`.
    """
    batch, slots = tokens.shape
    seen = None
    if processors.repetition_penalty is not None:
        seen = tokens_seen(tokens, length, target.vocab_size)
    return DecodeState(
        tokens=tokens,
        length=length,
        limit=limit,
        done=length >= limit,
        cache=target.init_cache(batch, slots),
        drafter_state=drafter.init(target, batch, slots),
        keys=keys,
        processors=processors,
        stop_token_ids=stop_token_ids,
        seen=seen,
        statistics=Statistics.create(batch, drafter.num_draft),
        verification=verification,
    )


@partial(jax.jit, static_argnames="chunk", donate_argnames="state")
def prefill(target: Target, drafter: Drafter, state: DecodeState, chunk: int) -> DecodeState:
    """Passes the prompts, all but each one's newest token, `chunk` tokens at a time.

    Rows of different lengths start together; one that has ended contributes no more tokens while the others go on.
    """
    batch, slots = state.tokens.shape
    if slots % chunk:
        raise ValueError(f"the cache's slots must be a multiple of chunk {chunk}, got {slots}")
    ends = state.length - 1

    def piece(i, carry):
        cache, drafter_state = carry
        at = i * chunk
        tokens = jax.lax.dynamic_slice(state.tokens, (0, at), (batch, chunk))
        count = jnp.clip(ends - at, 0, chunk)
        positions = jnp.broadcast_to(at + jnp.arange(chunk, dtype=jnp.int32), (batch, chunk))
        output = target(tokens, positions, cache, taps=drafter.taps)
        follows = jnp.take_along_axis(state.tokens, (at + count)[:, None], axis=1)[:, 0]
        seen = Observation(tokens=tokens, count=count, taps=output.taps, next_token=follows)
        drafter_state = drafter.observe(target, drafter_state, seen)
        return cache.commit(output.block, count), drafter_state

    pieces = (jnp.max(ends) + chunk - 1) // chunk
    cache, drafter_state = jax.lax.fori_loop(0, pieces, piece, (state.cache, state.drafter_state))
    return replace(state, cache=cache, drafter_state=drafter_state)


@struct.dataclass
class Verdict:
    """What verification returns, of one shape at every width.

    Attributes:
      acceptance: which drafts stand.
      block: keys and values of the whole pass, W wide.
      taps: [B, W, A, D].
    """

    acceptance: Acceptance
    block: Any
    taps: Array


def verify(
    target: Target, drafter: Drafter, state: DecodeState, proposal: Proposal, context: Context
) -> Verdict:
    """One target pass over [newest token, drafts], as narrow as this round's longest proposal allows."""
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    block = jnp.concatenate([last, proposal.tokens], axis=1)
    widths = ladder(drafter.num_draft)
    parent = proposal.parent
    tree = None if parent is None else Tree.create(parent)

    def at_width(width: int) -> Verdict:
        part = None if tree is None else tree.narrow(width)
        depth = jnp.arange(width, dtype=jnp.int32) if part is None else part.depth
        tokens = block[:, :width]
        known = {} if proposal.reuse is None else {"reuse": proposal.reuse.narrow(width)}
        output = target(
            tokens,
            state.length[:, None] - 1 + depth,
            state.cache,
            None if part is None else part.ancestors,
            taps=drafter.taps,
            **known,
        )
        acceptance = accept(
            output.logits, tokens, part, proposal, context, state.keys, state.verification
        )
        spare = widths[-1] - width
        if acceptance.path is not None:
            acceptance = replace(acceptance, path=jnp.pad(acceptance.path, ((0, 0), (0, spare))))
        taps = jnp.pad(output.taps, ((0, 0), (0, spare), (0, 0), (0, 0)))
        return Verdict(acceptance=acceptance, block=output.block.pad(widths[-1]), taps=taps)

    return climb(widths, jnp.max(proposal.length) + 1, at_width)


def proposed_depth(proposal: Proposal) -> Array:
    """The longest path among the proposed nodes: int32[B]."""
    if proposal.parent is None:
        return proposal.length
    depth = Tree.create(proposal.parent).depth
    nodes = jnp.arange(depth.shape[1])
    return jnp.max(jnp.where(nodes <= proposal.length[:, None], depth, 0), axis=1)


def commit(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    proposal: Proposal,
    verdict: Verdict,
) -> DecodeState:
    """Appends what was accepted: cut after the first stop token, then to the budget, then count."""
    acceptance, active = verdict.acceptance, ~state.done
    size = proposal.tokens.shape[1]
    index = jnp.arange(size + 1)
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    block = jnp.concatenate([last, proposal.tokens], axis=1)  # then the accepted path of it
    taps, path = verdict.taps, acceptance.path
    if path is not None:
        block = jnp.take_along_axis(block, path, axis=1)
        taps = jnp.take_along_axis(taps, path[..., None, None], axis=1)
    emitted_tokens = jnp.where(
        index < acceptance.count[:, None],
        jnp.pad(block[:, 1:], ((0, 0), (0, 1))),
        acceptance.next_token[:, None],
    )

    emitted = acceptance.count + 1
    stops = jnp.any(emitted_tokens[..., None] == state.stop_token_ids, axis=-1)
    stops &= index < emitted[:, None]
    stopped = jnp.any(stops, axis=1)
    emitted = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, emitted)
    room = state.limit - state.length
    stopped &= emitted <= room
    kept = jnp.minimum(acceptance.count, emitted)
    emitted = jnp.where(active, jnp.minimum(emitted, room), 0)
    length = state.length + emitted

    slot = jnp.arange(state.tokens.shape[1])
    offset = slot - state.length[:, None]
    fresh = jnp.take_along_axis(emitted_tokens, jnp.clip(offset, 0, size), axis=1)
    # a select, not a slice update: cheap at this size, and no backend copies or misplaces it
    tokens = jnp.where((offset >= 0) & (offset < emitted[:, None]), fresh, state.tokens)
    newest = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
    seen = state.seen
    if seen is not None:
        new = jnp.where(index < emitted[:, None], emitted_tokens, seen.shape[1])
        rows = jnp.arange(seen.shape[0])[:, None]
        seen = seen.at[rows, new].set(True, mode="drop")

    observation = Observation(
        tokens=block, count=emitted, taps=taps, next_token=newest, widths=row_widths(size)
    )
    return replace(
        state,
        tokens=tokens,
        length=length,
        done=state.done | stopped | (length >= state.limit),
        cache=state.cache.commit(verdict.block, emitted, path),
        drafter_state=drafter.observe(target, state.drafter_state, observation),
        seen=seen,
        statistics=state.statistics.add(
            active, proposal.length, proposed_depth(proposal), kept, emitted
        ),
    )


def draft(
    target: Target, drafter: Drafter, state: DecodeState
) -> tuple[DecodeState, Proposal, Context]:
    """This round's proposal, no longer than the row's budget allows."""
    context = Context(
        tokens=state.tokens,
        length=state.length,
        keys=round_keys(state.keys, state.statistics.rounds),
        processors=state.processors,
        seen=state.seen,
        cache=state.cache,
        done=state.done,
    )
    proposal, drafter_state = drafter.propose(target, state.drafter_state, context)
    # the target adds one token of its own, so drafts past limit - 1 are never emitted
    room = jnp.where(state.done, 0, state.limit - state.length - 1)
    if proposal.parent is None:
        proposal = replace(proposal, length=jnp.clip(proposal.length, 0, room))
    else:  # nodes come in any order of depth: all of them, or none
        proposal = replace(proposal, length=jnp.where(room > 0, proposal.length, 0))
    return replace(state, drafter_state=drafter_state), proposal, context


def decode_round(target: Target, drafter: Drafter, state: DecodeState) -> DecodeState:
    """One round: every active row grows by 1 to N + 1 tokens."""
    with jax.named_scope("draft"):
        state, proposal, context = draft(target, drafter, state)
    with jax.named_scope("verify"):
        verdict = verify(target, drafter, state, proposal, context)
    with jax.named_scope("commit"):
        return commit(target, drafter, state, proposal, verdict)


@partial(jax.jit, donate_argnames="state")
def decode(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    max_rounds: Array | int,
    min_active: Array | int = 1,
) -> DecodeState:
    """Rounds until every row is done, or fewer than `min_active` are left, `max_rounds` at most.

    One compiled program for any of these numbers.
    """

    def going(carry):
        rounds, state = carry
        return (rounds < max_rounds) & (jnp.sum(~state.done) >= min_active)

    def step(carry):
        rounds, state = carry
        return rounds + 1, decode_round(target, drafter, state)

    return jax.lax.while_loop(going, step, (jnp.int32(0), state))[1]


@partial(jax.jit, donate_argnames="state")
def insert(state: DecodeState, row: Array | int, single: DecodeState) -> DecodeState:
    """The batch with a row replaced by a state of one row.

    What all rows share (`drafters.base.Shared`) is taken from `single`, which has started from the batch's and learned
    the row's prompt.
    """

    def put(old: Any, new: Any) -> Any:
        if isinstance(old, Shared):
            return new
        return old.at[row].set(new[0])

    def merge(old: Any, new: Any) -> Any:
        return jax.tree.map(put, old, new, is_leaf=lambda x: isinstance(x, Shared))

    stops = state.stop_token_ids
    rows = merge(replace(state, stop_token_ids=None), replace(single, stop_token_ids=None))
    return replace(rows, stop_token_ids=stops)
