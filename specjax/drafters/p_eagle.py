"""Drafts from a P-EAGLE head, all of them in one pass (arXiv 2602.01469).

B rows, N drafted tokens, P rows that wait, T observed tokens, A taps, Ht target width, Vd draft vocabulary.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.drafters.base import Context, Observation, Proposal
from specjax.drafters.chain import Vocabulary, check_draft_length, draw_token, propose_chain
from specjax.models.cache import Block
from specjax.models.eagle import EagleHead
from specjax.models.heads import check_head
from specjax.models.transformer import Target
from specjax.trees import climb, row_widths


@struct.dataclass
class PEagleState:
    """What the head remembers. Committed rows wait for the next proposal, whose one pass takes them along.

    Attributes:
      cache: keys and values of the rows before those that wait; masked slots are never kept.
      tokens: int32[B, P], of the waiting rows: the tokens that follow them.
      taps: [B, P, A, Ht], the target's states at them.
      count: int32[B], how many wait.
    """

    cache: Any
    tokens: Array
    taps: Array
    count: Array


@struct.dataclass
class PEagle:
    """A head drafts `num_draft` tokens in one pass: the first slot is EAGLE-3's, the others carry a mask token and one
    learned vector in place of token and hidden state. Each token is drawn from its own slot's q, whatever the others
    became; a head with a Markov correction adds a bias from the draft before it.

    Attributes:
      head: an `EagleHead` with a `mask_token_id`.
      num_draft: N, tokens proposed at most.
      min_confidence: a proposal ends before the first slot whose likeliest token has less than this probability.
    """

    head: EagleHead
    num_draft: int = struct.field(pytree_node=False, default=7)
    min_confidence: float = struct.field(pytree_node=False, default=0.0)

    def __post_init__(self):
        check_draft_length(self.num_draft, self.min_confidence)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.config.taps

    def check(self, target: Target) -> None:
        if not isinstance(self.head, EagleHead):
            raise ValueError(f"head must be an EagleHead, got {type(self.head).__name__}")
        check_head(self.head.config, target, self.num_draft)
        if self.head.config.mask_token_id is None:
            raise ValueError("head must be a P-EAGLE head, with a mask token; got an EAGLE-3 head")

    def init(self, target: Target, batch: int, slots: int) -> PEagleState:
        config, waiting = self.head.config, self.num_draft + 1
        shape = (batch, waiting, len(config.taps), config.target_hidden_size)
        return PEagleState(
            cache=self.head.init_cache(batch, slots),
            tokens=jnp.zeros((batch, waiting), jnp.int32),
            taps=jnp.zeros(shape, self.head.dtype),
            count=jnp.zeros(batch, jnp.int32),
        )

    def observe(self, target: Target, state: PEagleState, observation: Observation) -> PEagleState:
        tokens, count = observation.tokens, observation.count
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        follows = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        follows = jnp.where(index == count[:, None] - 1, observation.next_token[:, None], follows)
        taps = observation.taps.astype(state.taps.dtype)
        waiting, widths = state.tokens.shape[1], row_widths(self.num_draft)

        def catch_up(state: PEagleState) -> PEagleState:
            return self._pass(target, state, state.tokens, state.taps, state.count, widths)

        if tokens.shape[1] <= waiting:
            # a round: nothing waits but where the last proposal was left out, and then that is caught up with
            state = jax.lax.cond(jnp.any(state.count > 0), catch_up, lambda state: state, state)
            spare = waiting - tokens.shape[1]
            follows = jnp.pad(follows, ((0, 0), (0, spare)))
            taps = jnp.pad(taps, ((0, 0), (0, spare), (0, 0), (0, 0)))
            new = count > 0
            return replace(
                state,
                tokens=jnp.where(new[:, None], follows, state.tokens),
                taps=jnp.where(new[:, None, None, None], taps, state.taps),
                count=count,
            )
        # a piece of a prompt, or of what a wider member of a mixture had accepted, passed over together with the one row
        # that may wait; of each batch row the last one waits again
        more = jnp.any(state.count > 1)
        state = jax.lax.cond(more, catch_up, lambda state: state, state)
        place = jnp.arange(1 + tokens.shape[1])
        at = jnp.minimum(place + 1 - state.count[:, None], place.size - 1)
        follows = jnp.take_along_axis(
            jnp.concatenate([state.tokens[:, :1], follows], axis=1), at, axis=1
        )
        every = jnp.concatenate([state.taps[:, :1], taps], axis=1)
        every = jnp.take_along_axis(every, at[..., None, None], axis=1)
        known = state.count + count
        widths = tuple(1 + width for width in observation.widths)
        passed = self._pass(target, state, follows, every, known, widths)
        last = jnp.maximum(known - 1, 0)[:, None]
        return replace(
            passed,
            cache=passed.cache.rewind(passed.cache.length - (known > 0)),
            tokens=state.tokens.at[:, 0].set(jnp.take_along_axis(follows, last, axis=1)[:, 0]),
            taps=state.taps.at[:, 0].set(
                jnp.take_along_axis(every, last[..., None, None], axis=1)[:, 0]
            ),
            count=(known > 0).astype(jnp.int32),
        )

    def _pass(
        self,
        target: Target,
        state: PEagleState,
        tokens: Array,
        taps: Array,
        count: Array,
        widths: tuple[int, ...],
    ) -> PEagleState:
        """Keeps the first `count` of some rows; nothing waits afterwards."""
        head, size = self.head, tokens.shape[1]
        positions = state.cache.length[:, None] + jnp.arange(size, dtype=jnp.int32)

        def at_width(width: int) -> Block:
            embedded, hidden = head.embed(target, tokens[:, :width]), head.fuse(taps[:, :width])
            return head(embedded, hidden, positions[:, :width], state.cache)[1].pad(size)

        block = climb(widths or (size,), jnp.max(count), at_width)
        return replace(
            state, cache=state.cache.commit(block, count), count=jnp.zeros_like(state.count)
        )

    def propose(
        self, target: Target, state: PEagleState, context: Context
    ) -> tuple[Proposal, PEagleState]:
        """One pass over the rows that wait and N - 1 masked slots after them."""
        head, cache, count = self.head, state.cache, state.count[:, None]
        mask_token: Any = head.config.mask_token_id  # `check` has seen to it
        vocabulary = Vocabulary(head.target_ids, target.vocab_size)
        waiting = state.tokens.shape[1]
        index = jnp.maximum(count - 1, 0) + jnp.arange(self.num_draft)
        # the same in every round: outside the switch, so that XLA takes it out of the loop
        mask = head.fused_mask()

        def at_width(width: int) -> tuple[Array, Block]:
            """With room for `width` rows that wait: what the slots made, and the rows' keys and values."""
            masks = ((0, 0), (0, self.num_draft - 1))
            slot = jnp.arange(width + self.num_draft - 1, dtype=jnp.int32)
            tokens = jnp.pad(state.tokens[:, :width], masks)
            tokens = jnp.where(slot < count, tokens, mask_token)
            hidden = jnp.pad(head.fuse(state.taps[:, :width]), (*masks, (0, 0)))
            hidden = jnp.where((slot < count)[..., None], hidden, mask)
            positions = cache.length[:, None] + slot
            rows, block = head(head.embed(target, tokens), hidden, positions, cache)
            # of the block the masked slots would reach past the cache
            slots = jnp.take_along_axis(rows, index[..., None], axis=1)
            return slots, block.narrow(width).pad(waiting)

        slots, kept = climb(row_widths(self.num_draft), jnp.max(state.count), at_width)
        logits = head.logits(slots)
        drafts, markov, seen = [], head.readout.markov, context.seen
        for i in range(self.num_draft):
            slot_logits = logits[:, i]
            if markov is not None and i > 0:
                slot_logits += markov(vocabulary.own(drafts[-1].tokens))
            draft, seen = draw_token(slot_logits, context, seen, i, vocabulary)
            drafts.append(draft)
        draft = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *drafts)
        draft = replace(draft, log_q=vocabulary.spread(draft.log_q))
        # a prompt of one token has no row yet to draft from
        length = jnp.where(state.count > 0, self.num_draft, 0).astype(jnp.int32)
        state = replace(
            state, cache=cache.commit(kept, state.count), count=jnp.zeros_like(state.count)
        )
        return propose_chain(draft, length, self.min_confidence), state
