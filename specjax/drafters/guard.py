"""An acceptance alarm: rows whose drafts keep failing fall back to plain decoding.

B rows.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.drafters.base import Context, Observation, Proposal
from specjax.models.transformer import Target


@struct.dataclass
class GuardState:
    """What the guard has seen.

    Attributes:
      inner: the drafter's own state.
      drafted, accepted: float32[B], tokens of recent rounds, fading.
      seen: int32[B], tokens drafted in all.
      size: int32[B], tokens proposed this round.
      alarm: bool[B], rows that propose no more.
    """

    inner: Any
    drafted: Array
    accepted: Array
    seen: Array
    size: Array
    alarm: Array


@struct.dataclass
class Guard:
    """Raises the alarm for a row when the share of its recent drafts that stood falls below a floor; it decodes plainly
    from then on. `Generation.alarm` tells which rows did.

    For services that would rather know that a drafter has gone stale than lose time; `Adaptive` adapts silently and tries
    again.

    Attributes:
      drafter: whose proposals are watched.
      floor: share of drafted tokens.
      after: tokens drafted before the first judgement.
    """

    drafter: Any
    floor: float = struct.field(pytree_node=False, default=0.1)
    after: int = struct.field(pytree_node=False, default=64)

    def __post_init__(self):
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be in [0, 1], got {self.floor}")
        if self.after < 1:
            raise ValueError(f"after must be >= 1, got {self.after}")

    @property
    def num_draft(self) -> int:
        return self.drafter.num_draft

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    def check(self, target: Target) -> None:
        self.drafter.check(target)

    def init(self, target: Target, batch: int, slots: int) -> GuardState:
        row = jnp.zeros(batch, jnp.int32)
        return GuardState(
            inner=self.drafter.init(target, batch, slots),
            drafted=row.astype(jnp.float32),
            accepted=row.astype(jnp.float32),
            seen=row,
            size=row,
            alarm=row.astype(bool),
        )

    def observe(self, target: Target, state: GuardState, observation: Observation) -> GuardState:
        inner = self.drafter.observe(target, state.inner, observation)
        judged = (state.size > 0) & (observation.count > 0)
        size = jnp.where(judged, state.size, 0)
        accepted = jnp.where(judged, jnp.minimum(observation.count - 1, size), 0)
        fade = jnp.where(judged, jnp.exp(-size / self.after), 1.0)
        drafted = fade * state.drafted + size
        stood = fade * state.accepted + accepted
        seen = state.seen + size
        low = (seen >= self.after) & (stood < self.floor * drafted)
        return GuardState(
            inner=inner,
            drafted=drafted,
            accepted=stood,
            seen=seen,
            size=jnp.zeros_like(size),
            alarm=state.alarm | low,
        )

    def propose(
        self, target: Target, state: GuardState, context: Context
    ) -> tuple[Proposal, GuardState]:
        proposal, inner = self.drafter.propose(target, state.inner, context)
        length = jnp.where(state.alarm, 0, proposal.length)
        return replace(proposal, length=length), replace(state, inner=inner, size=length)
