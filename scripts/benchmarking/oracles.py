"""What speculation could gain at most: drafters that know what will stand, played over recorded proposals.

An answer of n tokens is decoded plainly once more while a drafter proposes at every place of it. How much of each proposal
agrees with what follows is then known, `stands`: int[n], and the least cost of any rule that cuts the proposals can be
computed over the measured verify curve, in target passes over one token. Drafting costs nothing here. Three limits:

    length    cuts the proposals of one drafter
    choice    cuts the proposals of whichever of several drafters is best
    perfect   has the answer itself to propose

Each knows all that the one before it knows, so none can cost more. (Simulated limits of arXiv 2601.11580, with the cost of
wider passes counted.)

n answer tokens, N drafted tokens, L history.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.decoding import DecodeState, commit, draft, prefill, verify
from specjax.drafters.adaptive import Adaptive
from specjax.drafters.base import Context, NoDrafter, Proposal
from specjax.generate import prepare
from specjax.sampling import Sampling

Curve = Mapping[int, float]
"""Cost of a pass by its width, in passes over one token."""


def cheapest(curve: Curve) -> np.ndarray:
    """Cost of the cheapest pass that holds k drafts, k = 0, 1, ...: float64[widest width]."""
    return np.asarray(
        [min(c for w, c in curve.items() if w > drafts) for drafts in range(max(curve))]
    )


def least_cost(stands: Sequence[int] | np.ndarray, curve: Curve) -> float:
    """Cost of an answer whose rounds propose as much of what will stand as is best in the long run.

    A round at place i with k drafts, k <= stands[i], goes on at i + k + 1. The least cost from each place to the end,
    from the end backwards.
    """
    cost, size = cheapest(curve), len(stands)
    best = np.zeros(size + 1)
    for at in range(size - 1, -1, -1):
        drafts = np.arange(min(int(stands[at]), len(cost) - 1, size - at - 1) + 1)
        best[at] = np.min(cost[drafts] + best[at + drafts + 1])
    return float(best[0])


def perfect_stands(size: int) -> np.ndarray:
    """Of an answer of `size` tokens that is known: all the rest, less the token that a round adds itself."""
    return np.arange(size - 1, -1, -1)


def best_width(curve: Curve) -> int:
    """The width at which a round whose drafts all stand is cheapest per token."""
    return min(curve, key=lambda width: curve[width] / width)


@partial(jax.jit, static_argnames="most")
def _record(target: Any, drafter: Any, state: DecodeState, most: int) -> tuple[Any, Any]:
    """What is proposed at each of the next `most` places: int32[most, N], and how much: int32[most]."""

    def step(carry):
        at, state, tokens, length = carry
        state, proposal, context = draft(target, drafter, state)
        nothing = replace(proposal, length=jnp.zeros_like(proposal.length))
        verdict = verify(target, drafter, state, nothing, context)
        tokens = tokens.at[at].set(proposal.tokens[0])
        length = length.at[at].set(proposal.length[0])
        return at + 1, commit(target, drafter, state, nothing, verdict), tokens, length

    tokens = jnp.zeros((most, drafter.num_draft), jnp.int32)
    start = (jnp.int32(0), state, tokens, jnp.zeros(most, jnp.int32))
    _, _, tokens, length = jax.lax.while_loop(lambda carry: ~carry[1].done[0], step, start)
    return tokens, length


def record_stands(
    target: Any,
    drafter: Any,
    prompt: Sequence[int],
    answer: np.ndarray,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    key: int,
    stop_token_ids: Sequence[int],
) -> np.ndarray | None:
    """How much of what a drafter proposes stands at every place of an answer, all before the place being committed.

    Args:
      drafter: of an `Adaptive`, the drafter that it cuts.
      answer: int32[n], what plain decoding emits with these settings and this key.

    Returns:
      int[n]; None where that is no matter of agreeing with the answer: trees, and drafts judged by their q.
    """
    if isinstance(drafter, Adaptive):
        drafter = drafter.drafter
    _, state, chunk = prepare(
        target,
        [prompt],
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=key,
        stop_token_ids=stop_token_ids,
    )
    _, shape, _ = jax.eval_shape(draft, target, drafter, state)
    if shape.parent is not None or shape.log_q is not None:
        return None
    state = prefill(target, drafter, state, chunk)
    tokens, lengths = map(np.asarray, _record(target, drafter, state, max_new_tokens))
    return count_stands(tokens, lengths, answer)


def count_stands(tokens: np.ndarray, lengths: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """How many of the tokens proposed at each place the answer goes on with: int[n].

    The answer's last token is a round's own: a draft of it saves nothing.

    Args:
      tokens: int32[at least n, N]; lengths: int32[at least n]; answer: int32[n].
    """
    size, width = len(answer), tokens.shape[1]
    place, offset = np.arange(size)[:, None], np.arange(width)
    follows = answer[np.minimum(place + offset, size - 1)]
    same = (tokens[:size] == follows) & (offset < lengths[:size, None])
    same &= place + offset < size - 1
    return np.cumprod(same, axis=1).sum(axis=1)


@struct.dataclass
class Replay(NoDrafter):
    """Proposes what the target will say, from a recording: how fast rounds are when every draft stands.

    Attributes:
      row: int32[L], prompt and answer, and room for `size` more.
      size: tokens per proposal.
    """

    row: jax.Array
    size: int = struct.field(pytree_node=False)

    @property
    def num_draft(self) -> int:
        return self.size

    def propose(self, target: Any, state: None, context: Context) -> tuple[Proposal, None]:
        tokens = self.row[context.length[:, None] + jnp.arange(self.size)]
        return Proposal(tokens=tokens, length=jnp.full_like(context.length, self.size)), None

    @classmethod
    def of(cls, prompt: Sequence[int], answer: np.ndarray, *, slots: int, size: int) -> "Replay":
        """Of one prompt; `slots` the same for all, so that they share a program."""
        row = np.zeros(slots + size, np.int32)
        row[: len(prompt) + len(answer)] = [*prompt, *answer]
        return cls(row=jnp.asarray(row), size=size)
