"""What the decode loop knows of a drafter.

A drafter is a frozen pytree with pure methods; everything it remembers between rounds is a state that the loop carries.
B rows, N drafted tokens, T observed tokens, L history, A taps, D width, V vocabulary.
"""

from typing import Any, Protocol

import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.models.transformer import Target
from specjax.sampling import Processors


@struct.dataclass
class Proposal:
    """Drafted tokens of one round: a chain, or a tree below the newest committed token.

    Attributes:
      tokens: int32[B, N], N = the drafter's `num_draft`.
      length: int32[B], how many of them each row proposes, 0..N. Whether slot i is included may depend only on what is
        known before its token is drawn.
      log_q: float32[B, N, V], what the tokens were drawn from: entry j is the distribution after node j, node 0 being the
        newest committed token (a tree has one for every node, [B, W, V]). None says that the tokens are deterministic
        (argmax, look-up), which is a claim about how they came about, not a default.
      parent: int32[B, N], the node that each token follows, an earlier one (`trees`); None is a chain, 0, 1, 2, ...
        Siblings with log_q were drawn from it one after the other without replacement.
      deterministic: bool[B], rows whose tokens are deterministic although there is a log_q (of other rows).
      confidence: float32[B, N], the drafter's own estimate that a token stands if those before it do, known before the
        token is drawn; None where it has none.
      reuse: what the target's own first layers computed for the whole block, [newest token, drafts]; it is handed to the
        target's pass (`models.transformer.Reuse`).
      branches, depth: of a tree with log_q, the most children of a node and the longest path (static).
    """

    tokens: Array
    length: Array
    log_q: Array | None = None
    parent: Array | None = None
    deterministic: Array | None = None
    confidence: Array | None = None
    reuse: Any = None
    branches: int = struct.field(pytree_node=False, default=1)
    depth: int = struct.field(pytree_node=False, default=0)


@struct.dataclass
class Context:
    """The committed rows, as a drafter sees them when it proposes.

    Attributes:
      tokens: int32[B, L], prompt and output; garbage from `length` on.
      length: int32[B], committed tokens.
      keys: this round's keys [B]; draw from the DRAFT stream alone.
      processors: settings of the rows, for drafts that are sampled like the target samples.
      seen: bool[B, V], tokens under the repetition penalty; None while it is off.
      cache: the target's, `length - 1` tokens long; to be read.
      done: bool[B], rows that have ended.
    """

    tokens: Array
    length: Array
    keys: Array
    processors: Processors
    seen: Array | None
    cache: Any = None
    done: Array | bool = False


@struct.dataclass
class Observation:
    """Newly committed tokens that the target has passed over.

    Attributes:
      tokens: int32[B, T].
      count: int32[B], how many of them are real, 0..T.
      taps: [B, T, A, D], the target's hidden states at these tokens, for the layers that `drafter.taps` names.
      next_token: int32[B], the committed token that follows the last real one.
      widths: after a round, in which few of the T tokens were accepted, numbers of columns that are worth a program of
        their own, the last one T; for a piece of a prompt none (static).
    """

    tokens: Array
    count: Array
    taps: Array
    next_token: Array
    widths: tuple[int, ...] = struct.field(pytree_node=False, default=())


def drafts_committed(drafted: Array, length: Array, observation: Observation) -> Array:
    """How many of a drafter's own drafts were committed, whoever proposed them in the end: int32[B].

    Args:
      drafted: int32[B, N], its last proposal; length: int32[B], how much of it counts.
      observation: of the round.
    """
    size = min(observation.tokens.shape[1] - 1, drafted.shape[1])
    same = observation.tokens[:, 1 : size + 1] == drafted[:, :size]
    same &= jnp.arange(size) < jnp.minimum(observation.count - 1, length)[:, None]
    return jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


@struct.dataclass
class Shared:
    """Marks what all rows of a drafter's state have in common; everything else there has the rows as its first axis.

    Attributes:
      value: an array of any shape.
    """

    value: Array


class Drafter(Protocol):
    """Proposes tokens. Whatever it proposes, the output follows the target; only the speed depends on it.

    Attributes:
      num_draft: N, the longest proposal.
      taps: the target's layers whose entering hidden states it wants to observe.
    """

    @property
    def num_draft(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def check(self, target: Target) -> None:
        """Raises ValueError if it was made for another target."""
        ...

    def init(self, target: Target, batch: int, slots: int) -> Any:
        """The state before anything was committed; rows will grow to at most `slots` tokens, drafts included."""
        ...

    def observe(self, target: Target, state: Any, observation: Observation) -> Any:
        """Told of every commit: the prompt in pieces, then each round's accepted tokens, its own or not."""
        ...

    def propose(self, target: Target, state: Any, context: Context) -> tuple[Proposal, Any]:
        """Proposes what may follow the newest committed token, which has no keys and values anywhere yet."""
        ...


@struct.dataclass
class NoDrafter:
    """Proposes nothing: plain decoding."""

    @property
    def num_draft(self) -> int:
        return 0

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def check(self, target: Target) -> None:
        pass

    def init(self, target: Target, batch: int, slots: int) -> None:
        return None

    def observe(self, target: Target, state: None, observation: Observation) -> None:
        return None

    def propose(self, target: Target, state: None, context: Context) -> tuple[Proposal, None]:
        batch = context.length.shape[0]
        return (
            Proposal(tokens=jnp.zeros((batch, 0), jnp.int32), length=jnp.zeros(batch, jnp.int32)),
            None,
        )
