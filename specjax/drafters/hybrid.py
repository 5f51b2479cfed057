"""Several drafters, one of which proposes for each row in each round.

B rows, M members, N drafted tokens, W = N + 1 nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.drafters.base import Context, Drafter, Observation, Proposal
from specjax.models.transformer import Target


@struct.dataclass
class HybridState:
    """What the members remember, and how they did.

    Attributes:
      members: their states.
      gain: float32[B, M], running mean of the drafts accepted in the rounds that a member proposed for.
      source: int32[B], who proposed last; -1 is nobody.
    """

    members: tuple[Any, ...]
    gain: Array
    source: Array


def expected_gain(proposal: Proposal) -> Array | None:
    """Drafts that a proposal expects to see accepted, float32[B], where its members' confidence may be used; else None.

    The confidence of a sampled slot depends on the tokens drawn before it: choosing by it would bias the output.
    """
    if proposal.confidence is None or proposal.log_q is not None or proposal.parent is not None:
        return None
    proposed = jnp.arange(proposal.tokens.shape[1]) < proposal.length[:, None]
    return jnp.sum(jnp.cumprod(jnp.where(proposed, proposal.confidence, 0.0), axis=1), axis=1)


def widen(proposal: Proposal, size: int, vocab_size: int | None, tree: bool) -> Proposal:
    """The same proposal with room for `size` drafts, a q if `vocab_size` is given and parents if `tree` is set."""
    batch, own = proposal.tokens.shape
    spare = size - own
    tokens = jnp.pad(proposal.tokens, ((0, 0), (0, spare)))
    parent, log_q, fixed = proposal.parent, proposal.log_q, proposal.deterministic
    if tree:
        chain = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
        parent = chain if parent is None else jnp.concatenate([parent, chain[:, own:]], axis=1)
    if vocab_size is not None:
        rows = size + tree
        if log_q is None:
            log_q, fixed = jnp.zeros((batch, rows, vocab_size)), jnp.ones(batch, bool)
        else:
            log_q = jnp.pad(log_q, ((0, 0), (0, rows - log_q.shape[1]), (0, 0)))
            fixed = jnp.zeros(batch, bool) if fixed is None else fixed
    confidence = proposal.confidence
    if confidence is None:
        confidence = jnp.full((batch, own), 0.5, jnp.float32)
    return Proposal(
        tokens=tokens,
        length=proposal.length,
        log_q=log_q,
        parent=parent,
        deterministic=fixed,
        confidence=jnp.pad(confidence, ((0, 0), (0, spare))),
    )


def choose_rows(options: Sequence[Proposal], source: Array) -> Proposal:
    """Row b of the result is row b of options[source[b]]."""

    def pick(*leaves: Array) -> Array:
        stacked = jnp.stack(leaves)
        index = source.reshape(1, -1, *[1] * (stacked.ndim - 2))
        return jnp.take_along_axis(stacked, index, axis=0)[0]

    return jax.tree.map(pick, *options)


def side_by_side(options: Sequence[Proposal]) -> Proposal:
    """Chains as branches of one tree, each row's packed without gaps.

    Raises:
      ValueError: a sampled chain (siblings drawn from different q have no law here) or a tree.
    """
    if any(p.log_q is not None or p.parent is not None for p in options):
        raise ValueError("choose='tree' takes deterministic chains; got sampled drafts or a tree")
    size = sum(p.tokens.shape[1] for p in options)
    batch = options[0].tokens.shape[0]
    place = jnp.arange(size)
    tokens = jnp.zeros((batch, size), jnp.int32)
    parent = jnp.broadcast_to(place, (batch, size)).astype(jnp.int32)
    start = jnp.zeros((batch, 1), jnp.int32)
    for p in options:
        end = start + p.length[:, None]
        index = jnp.clip(place - start, 0, p.tokens.shape[1] - 1)
        mine = (place >= start) & (place < end)
        tokens = jnp.where(mine, jnp.take_along_axis(p.tokens, index, axis=1), tokens)
        parent = jnp.where(place == start, 0, parent)
        start = end
    return Proposal(tokens=tokens, length=start[:, 0], parent=parent)


@struct.dataclass
class Hybrid:
    """Picks among drafters per row and per round.

    "first" takes the first member that proposes anything; the later ones run only if some row needs them. That is how
    peers combine look-up with a network: `Hybrid([NGram(), Eagle3(head)])`. "gain" runs all and takes the proposal that
    promises most: by its own confidence where the drafts are deterministic, else by what the member's drafts were worth
    to this row so far. "tree" runs all and verifies their chains side by side, as branches of one tree; the members'
    drafts must be deterministic for that. All members see every commit, so a member that was passed over is in step when
    its turn comes.

    A member's `reuse` is not handed on: other rows may have taken another member's drafts.

    Attributes:
      drafters: the members, cheapest first.
      choose: "first", "gain" or "tree".
    """

    drafters: tuple[Any, ...]
    choose: Literal["first", "gain", "tree"] = struct.field(pytree_node=False, default="first")

    def __post_init__(self):
        if isinstance(self.drafters, list | tuple):
            if not self.drafters:
                raise ValueError("drafters must name at least one drafter, got none")
            object.__setattr__(self, "drafters", tuple(self.drafters))
        if self.choose not in ("first", "gain", "tree"):
            raise ValueError(f"choose must be 'first', 'gain' or 'tree', got {self.choose!r}")

    @property
    def num_draft(self) -> int:
        sizes = [drafter.num_draft for drafter in self.drafters]
        return sum(sizes) if self.choose == "tree" else max(sizes)

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(sorted({tap for drafter in self.drafters for tap in drafter.taps}))

    def check(self, target: Target) -> None:
        for drafter in self.drafters:
            drafter.check(target)

    def init(self, target: Target, batch: int, slots: int) -> HybridState:
        return HybridState(
            members=tuple(d.init(target, batch, slots) for d in self.drafters),
            gain=jnp.ones((batch, len(self.drafters)), jnp.float32),
            source=jnp.full(batch, -1, jnp.int32),
        )

    def observe(self, target: Target, state: HybridState, observation: Observation) -> HybridState:
        members = []
        for drafter, member in zip(self.drafters, state.members, strict=True):
            places = jnp.asarray([self.taps.index(tap) for tap in drafter.taps], jnp.int32)
            own = replace(observation, taps=jnp.take(observation.taps, places, axis=2))
            members.append(drafter.observe(target, member, own))
        index = jnp.arange(len(self.drafters))
        judged = (index == state.source[:, None]) & (observation.count > 0)[:, None]
        accepted = (observation.count - 1).astype(jnp.float32)[:, None]
        gain = jnp.where(judged, state.gain + 0.1 * (accepted - state.gain), state.gain)
        return HybridState(
            members=tuple(members), gain=gain, source=jnp.full_like(state.source, -1)
        )

    def propose(
        self, target: Target, state: HybridState, context: Context
    ) -> tuple[Proposal, HybridState]:
        batch = context.length.shape[0]
        options: list[Proposal] = []
        members: list[Any] = []
        lacking = jnp.ones(batch, bool)
        for drafter, member in zip(self.drafters, state.members, strict=True):
            proposal, member = self._ask(drafter, target, member, context, lacking, bool(options))
            lacking &= proposal.length == 0
            options.append(proposal)
            members.append(member)
        if self.choose == "tree":
            return side_by_side(options), replace(state, members=tuple(members))
        lengths = jnp.stack([p.length for p in options], axis=1)
        if self.choose == "first":
            source = jnp.argmax(lengths > 0, axis=1)
        else:
            gains = [expected_gain(p) for p in options]
            promised = jnp.stack(
                [state.gain[:, i] if g is None else g for i, g in enumerate(gains)], axis=1
            )
            source = jnp.argmax(jnp.where(lengths > 0, promised, -1.0), axis=1)
        tree = any(p.parent is not None for p in options)
        vocab = next((p.log_q.shape[-1] for p in options if p.log_q is not None), None)
        wide = [widen(p, self.num_draft, vocab, tree) for p in options]
        proposal = replace(
            choose_rows(wide, source),
            branches=max(p.branches for p in options),
            depth=max(p.depth or p.tokens.shape[1] for p in options),
        )
        source = jnp.where(proposal.length > 0, source.astype(jnp.int32), -1)
        return proposal, replace(state, members=tuple(members), source=source)

    def _ask(
        self,
        drafter: Drafter,
        target: Target,
        member: Any,
        context: Context,
        lacking: Array,
        later: bool,
    ) -> tuple[Proposal, Any]:
        """One member's proposal; a later one's is empty, and costs nothing, if no row lacks one."""

        def ask(member):
            proposal, member = drafter.propose(target, member, context)
            return replace(proposal, reuse=None), member

        if self.choose != "first" or not later:
            return ask(member)

        def skip(member):
            shape, _ = jax.eval_shape(ask, member)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape), member

        return jax.lax.cond(jnp.any(lacking & ~context.done), ask, skip, member)
