"""Drafts from an EAGLE-3 head, which reads the target's hidden states (arXiv 2503.01840).

B rows, N drafted tokens, T observed tokens, H head width, Vd draft vocabulary.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.drafters.base import Context, Observation, Proposal
from specjax.drafters.chain import Vocabulary, check_draft_length, draft_chain, propose_chain
from specjax.drafters.tree import StaticTree, TopKTree, grow
from specjax.models.cache import Block
from specjax.models.heads import Head, check_head
from specjax.models.transformer import Target
from specjax.trees import climb


@struct.dataclass
class HeadState:
    """What a head remembers.

    Attributes:
      cache: its keys and values of all rows that have the target's true hidden states, `length - 1` of them; drafts are
        never kept.
      hidden: [B, H], what the newest of these rows hands over: the first draft's logits come from it.
    """

    cache: Any
    hidden: Array


def observe_rows(
    head: Any, target: Target, state: HeadState, observation: Observation
) -> HeadState:
    """Passes over committed rows, whose hidden states are the target's own."""
    tokens, count = observation.tokens, observation.count
    size = tokens.shape[1]
    index = jnp.arange(size, dtype=jnp.int32)
    follows = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    follows = jnp.where(index == count[:, None] - 1, observation.next_token[:, None], follows)
    positions = state.cache.length[:, None] + index
    last = jnp.maximum(count - 1, 0)[:, None, None]

    def at_width(width: int) -> tuple[Array, Block]:
        hidden = head.fuse(observation.taps[:, :width])
        embedded = head.embed(target, follows[:, :width])
        rows, block = head(embedded, hidden, positions[:, :width], state.cache)
        return jnp.take_along_axis(rows, last, axis=1)[:, 0], block.pad(size)

    newest, block = climb(observation.widths or (size,), jnp.max(count), at_width)
    return HeadState(
        cache=state.cache.commit(block, count),
        hidden=jnp.where((count > 0)[:, None], newest, state.hidden),
    )


@struct.dataclass
class Eagle3:
    """A head drafts `num_draft` tokens one after the other, or a tree of them.

    Sampled rows draw their drafts from q and keep it; greedy rows draft greedily. Top-k trees are deterministic at every
    temperature.

    Attributes:
      head: an `EagleHead` for the target that it is used with.
      num_draft: N, tokens proposed at most.
      min_confidence: a proposal ends before the first token whose likeliest value has less than this probability.
      tree: drafts a tree in place of a chain; `num_draft` is then its number of nodes.
    """

    head: Head
    num_draft: int = struct.field(pytree_node=False, default=3)
    min_confidence: float = struct.field(pytree_node=False, default=0.0)
    tree: StaticTree | TopKTree | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self):
        if self.tree is not None:
            object.__setattr__(self, "num_draft", self.tree.num_nodes)
            if self.min_confidence:
                raise ValueError("min_confidence ends chains; it must be 0 with a tree")
        check_draft_length(self.num_draft, self.min_confidence)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.config.taps

    def check(self, target: Target) -> None:
        depth = self.num_draft if self.tree is None else self.tree.depth
        check_head(self.head.config, target, depth)
        if self.tree is not None:
            most = (
                max(self.tree.branching) if isinstance(self.tree, StaticTree) else self.tree.top_k
            )
            if most > self.head.config.draft_vocab_size:
                raise ValueError(
                    f"tree must have at most as many branches as the draft vocabulary has tokens, "
                    f"{self.head.config.draft_vocab_size}; got {most}"
                )

    def init(self, target: Target, batch: int, slots: int) -> HeadState:
        width = self.head.config.decoder.hidden_size
        return HeadState(
            cache=self.head.init_cache(batch, slots),
            hidden=jnp.zeros((batch, width), self.head.dtype),
        )

    def observe(self, target: Target, state: HeadState, observation: Observation) -> HeadState:
        return observe_rows(self.head, target, state, observation)

    def propose(
        self, target: Target, state: HeadState, context: Context
    ) -> tuple[Proposal, HeadState]:
        head, cache = self.head, state.cache
        vocabulary = Vocabulary(head.target_ids, target.vocab_size)
        batch, rows = state.hidden.shape[0], cache.length
        first = head.logits(state.hidden)
        size = max(1, (self.num_draft if self.tree is None else self.tree.slots) - 1)
        places = rows[:, None] + jnp.arange(size, dtype=jnp.int32)  # a chain's, draft by draft

        def step(carry, token: Array, index: Array):
            block, hidden = carry
            x, block = head(
                head.embed(target, token[:, None]),
                hidden,
                rows[:, None] + index - 1,
                cache,
                (jnp.arange(size) < index)[None],
                prior=block,
                at=index - 1,
                key_positions=places,
            )
            return (block, x), head.logits(x[:, 0])

        def extend(carry, tokens: Array, depth: int, at: int, mask: Array, above: Array):
            block, hidden, places = carry
            here = jnp.broadcast_to(rows[:, None] + depth - 1, tokens.shape)
            places = places.at[:, at - 1 : at - 1 + tokens.shape[1]].set(here)
            x, block = head(
                head.embed(target, tokens),
                jnp.take_along_axis(hidden, above[..., None], axis=1),
                here,
                cache,
                mask[:, :, 1:],  # the newest token's row is in the cache
                prior=block,
                at=at - 1,
                key_positions=places,
            )
            return (block, x, places), head.logits(x)

        block, hidden = head.empty_block(batch, size), state.hidden[:, None]
        if self.tree is not None:
            carry = (block, hidden, places)
            proposal, _ = grow(self.tree, first, extend, carry, context, vocabulary)
        else:
            draft, _ = draft_chain(
                first,
                step,
                (block, hidden),
                context,
                self.num_draft,
                self.min_confidence,
                vocabulary,
            )
            everything = jnp.full(batch, self.num_draft, jnp.int32)
            proposal = propose_chain(draft, everything, self.min_confidence)
        # a prompt of one token has no row yet to draft from
        return replace(proposal, length=jnp.where(rows > 0, proposal.length, 0)), state
