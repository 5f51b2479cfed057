"""What was drafted, what stood, and the figures derived from that.

`Statistics` is carried by the loop as device arrays and handed to the caller as numpy arrays; the derived figures work on
either. B rows, K the longest draft.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array


@struct.dataclass
class Statistics:
    """Counters per row. They count what was emitted: drafts that stood but fell behind a stop token are not accepted.

    Attributes:
      rounds: int32[B], target passes after prefill.
      drafted: int32[B], tokens proposed and verified.
      accepted: int32[B], drafted tokens emitted.
      emitted: int32[B], new tokens; rounds + accepted, less one where a stop token or the budget cut a draft.
      accepted_per_position: int32[B, K], rounds in which the draft at this position was emitted.
      drafted_per_position: int32[B, K], rounds in which a draft was proposed at this position.
    """

    rounds: Array | np.ndarray
    drafted: Array | np.ndarray
    accepted: Array | np.ndarray
    emitted: Array | np.ndarray
    accepted_per_position: Array | np.ndarray
    drafted_per_position: Array | np.ndarray

    @classmethod
    def create(cls, batch: int, num_draft: int) -> "Statistics":
        row = jnp.zeros(batch, jnp.int32)
        positions = jnp.zeros((batch, num_draft), jnp.int32)
        return cls(
            rounds=row,
            drafted=row,
            accepted=row,
            emitted=row,
            accepted_per_position=positions,
            drafted_per_position=positions,
        )

    def add(
        self, active: Array, drafted: Array, depth: Array, accepted: Array, emitted: Array
    ) -> "Statistics":
        """The counters after a round; rows that are not active (bool[B]) count nothing.

        Args:
          drafted: int32[B], tokens proposed; depth: the positions that they cover, the same for a chain.
          accepted, emitted: int32[B].
        """
        drafted, depth, accepted, emitted = (
            jnp.where(active, x, 0) for x in (drafted, depth, accepted, emitted)
        )
        position = jnp.arange(self.accepted_per_position.shape[1])
        return Statistics(
            rounds=self.rounds + active,
            drafted=self.drafted + drafted,
            accepted=self.accepted + accepted,
            emitted=self.emitted + emitted,
            accepted_per_position=self.accepted_per_position + (position < accepted[:, None]),
            drafted_per_position=self.drafted_per_position + (position < depth[:, None]),
        )

    def to_numpy(self) -> "Statistics":
        return jax.tree.map(np.asarray, self)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass over all rows; plain decoding is 1. NaN before the first round."""
        rounds = int(np.sum(self.rounds))
        return float(np.sum(self.emitted)) / rounds if rounds else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted over all rows. NaN if nothing was drafted."""
        drafted = int(np.sum(self.drafted))
        return float(np.sum(self.accepted)) / drafted if drafted else float("nan")

    @property
    def acceptance_per_position(self) -> np.ndarray:
        """Share of the drafts proposed at each position that stood, float64[K]; NaN where none was proposed."""
        drafted = np.sum(np.asarray(self.drafted_per_position), axis=0)
        accepted = np.sum(np.asarray(self.accepted_per_position), axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(drafted > 0, accepted / drafted, np.nan)
