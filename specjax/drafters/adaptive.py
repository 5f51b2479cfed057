"""How much to propose: as much as pays, by what was accepted so far and by what verification costs.

B rows, N drafted tokens, C classes.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.drafters.base import Context, Observation, Proposal
from specjax.models.transformer import Target
from specjax.trees import Tree, ladder

CONFIDENCES = 8  # classes of confidence
MEMORY = 24.0  # trials that a class remembers
PRIOR = 4.0  # trials that the first guess is worth

CURVES = {
    "cpu": {1: 1.0, 2: 1.45, 4: 1.6, 8: 2.0, 16: 2.8, 256: 26.8},
    "gpu": {1: 1.0, 2: 1.03, 4: 1.06, 8: 1.12, 16: 1.25, 256: 2.5},
}
"""Cost of a pass by the tokens in it, of all rows, in passes of one: the first guess where nothing was measured. CPU:
SmolLM2-135M float32 on two cores of an AMD EPYC, beyond 16 tokens as its arithmetic grows; GPU: unmeasured."""


def guess_costs(num_draft: int, backend: str | None = None, batch: int = 1) -> np.ndarray:
    """Costs of the ladder's widths from `CURVES` with `batch` rows, in passes of one token of each, linear in between."""
    curve = CURVES["cpu" if (backend or jax.default_backend()) == "cpu" else "gpu"]
    points, costs = np.asarray(list(curve)), np.asarray(list(curve.values()))
    slope = (costs[-1] - costs[-2]) / (points[-1] - points[-2])

    def cost(tokens: np.ndarray) -> np.ndarray:
        beyond = np.maximum(tokens - points[-1], 0)
        return np.interp(tokens, points, costs) + slope * beyond

    widths = np.asarray(ladder(num_draft))
    return (cost(widths * batch) / cost(np.asarray(batch))).astype(np.float32)


@struct.dataclass
class AdaptiveState:
    """What was learned about each row.

    Attributes:
      inner: the drafter's own state.
      hits, trials: float32[B, C], drafts that stood and drafts that were judged, by class, fading; nothing at first.
      classes: int32[B, N] of the last proposal's slots; size: int32[B], its length.
      quiet: int32[B], rounds since the row last proposed; with deterministic drafts, since any did.
      worth: float32[B], tokens per unit of cost that the last proposals promised, drafting included.
    """

    inner: Any
    hits: Array
    trials: Array
    classes: Array
    size: Array
    quiet: Array
    worth: Array


@struct.dataclass
class Adaptive:
    """Cuts a drafter's proposals to the length that is expected to pay.

    Every slot belongs to a class: where the drafts are deterministic, by the drafter's confidence; where they are
    sampled, by their position, since their confidence depends on tokens already drawn and choosing by it would bias the
    output. For every class the row keeps a running acceptance rate, which starts at a first guess; of deterministic drafts
    the guess is what the other rows of the batch saw. The length is the one whose expected tokens per unit of cost are
    highest, 1 + a_1 + a_1 a_2 + ... over the measured cost of the block width it needs. Deterministic proposals choose one
    width for the whole batch (a wide block for one row costs all, and many rows leave a pass less to spare); sampled ones
    choose by row, so that no row's tokens depend on its neighbours.

    Rows that have not proposed for `probe` rounds propose one token, to notice when the text turns (with deterministic
    drafts all rows together). If drafting itself costs, and no row expects to gain even so, the drafter is not asked until
    then.

    Attributes:
      drafter: whose proposals are cut.
      costs: cost of a pass of every block width of `ladder(num_draft)`, in any unit, for the batch that is decoded; None is
        `guess_costs`.
      draft_cost: cost of one proposal in passes of one token.
      probe: rounds.
    """

    drafter: Any
    costs: tuple[float, ...] | None = struct.field(pytree_node=False, default=None)
    draft_cost: float = struct.field(pytree_node=False, default=0.0)
    probe: int = struct.field(pytree_node=False, default=32)

    def __post_init__(self):
        if self.costs is not None:
            object.__setattr__(self, "costs", tuple(float(c) for c in self.costs))
        if not self.draft_cost >= 0:
            raise ValueError(f"draft_cost must be >= 0, got {self.draft_cost}")
        if self.probe < 1:
            raise ValueError(f"probe must be >= 1, got {self.probe}")

    @property
    def num_draft(self) -> int:
        return self.drafter.num_draft

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    def check(self, target: Target) -> None:
        """Raises ValueError if the drafter was made for another target or the costs for another drafter."""
        self.drafter.check(target)
        widths, costs = ladder(self.num_draft), self.costs
        if costs is not None and (
            len(costs) != len(widths) or not all(np.isfinite(c) and c > 0 for c in costs)
        ):
            raise ValueError(
                f"costs must be {len(widths)} positive numbers, for blocks of {widths} tokens, got {costs}"
            )

    def init(self, target: Target, batch: int, slots: int) -> AdaptiveState:
        nothing = jnp.zeros((batch, CONFIDENCES + self.num_draft))
        row = jnp.zeros(batch, jnp.int32)
        return AdaptiveState(
            inner=self.drafter.init(target, batch, slots),
            hits=nothing,
            trials=nothing,
            classes=jnp.zeros((batch, self.num_draft), jnp.int32),
            size=row,
            quiet=row,
            worth=jnp.full(batch, 2.0, jnp.float32),
        )

    def observe(
        self, target: Target, state: AdaptiveState, observation: Observation
    ) -> AdaptiveState:
        inner = self.drafter.observe(target, state.inner, observation)
        accepted = jnp.minimum(observation.count - 1, state.size)[:, None]
        slot = jnp.arange(self.num_draft)
        judged = (slot <= accepted) & (slot < state.size[:, None])
        judged &= (observation.count > 0)[:, None]
        rows = jnp.arange(state.size.shape[0])[:, None]
        at = jnp.where(judged, state.classes, state.hits.shape[1])  # out of range: dropped
        hits = state.hits.at[rows, at].add((slot < accepted).astype(jnp.float32), mode="drop")
        trials = state.trials.at[rows, at].add(1.0, mode="drop")
        fade = MEMORY / jnp.maximum(trials, MEMORY)
        return replace(
            state,
            inner=inner,
            hits=hits * fade,
            trials=trials * fade,
            size=jnp.zeros_like(state.size),
        )

    def propose(
        self, target: Target, state: AdaptiveState, context: Context
    ) -> tuple[Proposal, AdaptiveState]:
        batch = context.length.shape[0]
        costs, together = self._costs(1), self._costs(batch)
        active = ~jnp.broadcast_to(context.done, context.length.shape)
        probing = state.quiet >= self.probe

        def ask(inner):
            return self.drafter.propose(target, inner, context)

        def skip(inner):
            shape, _ = jax.eval_shape(ask, inner)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape), inner

        awake = active & ((state.worth > 1.0) | probing)
        if not self.draft_cost:
            proposal, inner = ask(state.inner)
        else:
            proposal, inner = jax.lax.cond(jnp.any(awake), ask, skip, state.inner)
        length, worth, classes, spoke = self._choose(
            state, proposal, costs, together, active, probing
        )
        asked = active & (jnp.any(awake) | (not self.draft_cost))
        return replace(proposal, length=length), replace(
            state,
            inner=inner,
            classes=classes,
            size=length,
            quiet=jnp.where(spoke, 0, state.quiet + 1),
            worth=jnp.where(asked, 0.5 * state.worth + 0.5 * worth, state.worth),
        )

    def _costs(self, batch: int) -> Array:
        """Of the ladder's widths, in passes of one token of every row; what was given holds for the caller's own batch."""
        given = self.costs
        costs = guess_costs(self.num_draft, batch=batch) if given is None else np.asarray(given)
        return jnp.asarray(costs / costs[0], jnp.float32)

    def _rates(self, state: AdaptiveState, fixed: Array) -> Array:
        """How often drafts stand, by row and class: float32[B, C]; `fixed` bool[B], rows of deterministic drafts."""
        confident = (jnp.arange(CONFIDENCES) + 0.5) / CONFIDENCES
        guess = jnp.pad(confident, (0, self.num_draft), constant_values=0.6)
        # what the neighbours saw may guide deterministic drafts alone: sampled ones would depend on it
        hits, trials = (jnp.sum(x, axis=0) - x for x in (state.hits, state.trials))
        theirs = (hits + PRIOR * guess) / (trials + PRIOR)
        guess = jnp.where(fixed[:, None], theirs, guess)
        return (state.hits + PRIOR * guess) / (state.trials + PRIOR)

    def _choose(
        self,
        state: AdaptiveState,
        proposal: Proposal,
        costs: Array,
        together: Array,
        active: Array,
        probing: Array,
    ) -> tuple[Array, Array, Array, Array]:
        """length int32[B], tokens per unit of cost float32[B], classes int32[B, N], whether it proposes bool[B].

        Args:
          costs: of the widths if a row were alone; together: with all rows.
        """
        batch, size = proposal.tokens.shape
        position = jnp.broadcast_to(CONFIDENCES + jnp.arange(size), (batch, size))
        fixed = jnp.full(batch, proposal.log_q is None)
        if proposal.deterministic is not None:
            fixed |= proposal.deterministic
        classes = position
        if proposal.confidence is not None and proposal.parent is None:
            level = jnp.clip(jnp.floor(proposal.confidence * CONFIDENCES), 0, CONFIDENCES - 1)
            classes = jnp.where(fixed[:, None], level.astype(jnp.int32), position)
        rates = jnp.take_along_axis(self._rates(state, fixed), classes, axis=1)
        # expected tokens by drafts verified: [B, N + 1]; of a tree the positions are its depths
        expected = 1.0 + jnp.pad(jnp.cumsum(jnp.cumprod(rates, axis=1), axis=1), ((0, 0), (1, 0)))
        widths = jnp.asarray(ladder(size))
        if proposal.parent is None:
            # how long a sampled proposal is depends on its tokens: it may shorten the choice, but not make it
            most = jnp.where(fixed, proposal.length, size)[:, None]
            fits = jnp.minimum(widths - 1, most)
            tokens = jnp.take_along_axis(expected, fits, axis=1)  # [B, widths]
        else:
            depth = Tree.create(proposal.parent).depth
            seen = jnp.arange(size + 1) <= proposal.length[:, None]
            deepest = jnp.max(jnp.where(seen, depth, 0), axis=1, keepdims=True)
            fits = jnp.where(widths > proposal.length[:, None], proposal.length[:, None], 0)
            tokens = jnp.take_along_axis(expected, jnp.where(fits > 0, deepest, 0), axis=1)
        own = jnp.argmax(tokens / costs, axis=1)
        rows_total = jnp.sum(jnp.where(active[:, None], tokens, 0.0), axis=0)
        jointly = jnp.all(fixed)
        rung = jnp.where(jointly, jnp.argmax(rows_total / together), own)
        length = jnp.take_along_axis(fits, rung[:, None], axis=1)[:, 0]
        length = jnp.minimum(length, proposal.length)
        # where one row probes, the block is wide enough for all: together they pay for it once, and know for the next rounds
        probing &= active & (proposal.length > 0)
        probing = jnp.where(jointly, jnp.any(probing), probing)
        least = jnp.minimum(proposal.length, 1) if proposal.parent is None else proposal.length
        length = jnp.where(probing, jnp.maximum(length, least), length)
        spoke = jnp.where(jointly, jnp.any(active & (length > 0)), length > 0)
        best = jnp.arange(batch), own
        return length, tokens[best] / (costs[own] + self.draft_cost), classes, spoke
