"""What an update minimises: EAGLE-3's training-time test, or P-EAGLE's elements. The loop around them is one.

B rows, T tokens, M parts of a batch, S steps or depths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from training.eagle3 import Batch, supervised, unroll
from training.losses import Objective, Rows, Teacher, head_loss, row_loss
from training.p_eagle import Elements, Layout, aligned_teacher, sample, unroll_parallel

Trained = Callable[[str], bool]


@struct.dataclass
class Tally:
    """Sums over anchors, by step: float32[S].

    Attributes:
      counted: anchors that count.
      right: of them, those whose likeliest token is the target's.
      chained: those right at this step and all before it.
      reached: those that count here and were right at all steps before it.
      acceptance: sum of min(p, q).
    """

    counted: Array
    right: Array
    chained: Array
    reached: Array
    acceptance: Array

    @classmethod
    def create(cls, rows: Rows, valid: Array) -> "Tally":
        """From every step of the same anchors, [S, ...]."""
        right = rows.right & valid
        chain = jnp.cumprod(right.astype(jnp.int32), axis=0) > 0
        before = jnp.concatenate([jnp.ones_like(chain[:1]), chain[:-1]])

        def total(x: Array) -> Array:
            return jnp.sum(x.astype(jnp.float32), axis=tuple(range(1, x.ndim)))

        return cls(
            counted=total(valid),
            right=total(right),
            chained=total(chain),
            reached=total(before & valid),
            acceptance=total(jnp.where(valid, rows.acceptance, 0.0)),
        )

    def figures(self) -> dict[str, Any]:
        """Accuracy and acceptance by step, and the simulated acceptance length: tokens that a greedy chain of S drafts
        would emit per round on the target's own greedy text."""
        t = jax.device_get(self)
        share = t.chained / (t.reached + 1e-9)
        length, stands = 1.0, 1.0
        for s in share:
            stands *= float(s)
            length += stands
        return {
            "accuracy": [round(float(x), 4) for x in t.right / (t.counted + 1e-9)],
            "acceptance": [round(float(x), 4) for x in t.acceptance / (t.counted + 1e-9)],
            "simulated_length": round(length, 4),
        }


class Recipe(Protocol):
    """A loss that can be summed over the parts of a batch."""

    def weights(self, batches: Batch, keys: Array) -> Array:
        """Factors on the rows' losses, from all M parts [M, B, T] of an update: the mean is over the whole update."""
        ...

    def loss(
        self,
        head: Any,
        target: Any,
        batch: Batch,
        taps: Array,
        teacher: Teacher,
        weights: Array,
        key: Array,
        trained: Trained,
    ) -> tuple[Array, Tally]:
        """Of one part [B, T]; `key` is the part's."""
        ...


@dataclass(frozen=True)
class Eagle3Recipe:
    """The training-time test.

    Attributes:
      steps: S.
      step_decay: factor on the loss of each further step; every step's loss is a mean over its anchors.
      objective: see `losses.divergence`.
    """

    steps: int
    step_decay: float
    objective: Objective

    def weights(self, batches: Batch, keys: Array) -> Array:
        counted = jnp.sum(jax.vmap(partial(supervised, steps=self.steps))(batches), axis=(0, 2, 3))
        return self.step_decay ** jnp.arange(self.steps) / jnp.maximum(counted, 1)

    def loss(
        self,
        head: Any,
        target: Any,
        batch: Batch,
        taps: Array,
        teacher: Teacher,
        weights: Array,
        key: Array,
        trained: Trained,
    ) -> tuple[Array, Tally]:
        states = unroll(head, target, batch, taps, self.steps)
        valid = supervised(batch, self.steps)
        loss, rows = head_loss(
            head,
            target,
            states,
            teacher,
            valid,
            weights,
            objective=self.objective,
            trained=trained,
        )
        return loss, Tally.create(jax.lax.stop_gradient(rows), valid)


@dataclass(frozen=True)
class PEagleRecipe:
    """All depths in one pass.

    Attributes:
      layout: anchors kept to each depth.
      objective: see `losses.divergence`; one mean over all elements of all depths.
      partitions: parts of the masked elements that pass one after the other, so that only one part's activations exist at
        a time. Gradients stay exact; the rows of depth 0, which all of them see, are computed again for each (P-EAGLE's
        algorithm 1, cut by chains in place of positions).
    """

    layout: Layout
    objective: Objective
    partitions: int = 1

    @property
    def depths(self) -> int:
        return len(self.layout.counts) + 1

    def weights(self, batches: Batch, keys: Array) -> Array:
        def count(batch: Batch, key: Array) -> Array:
            valid = supervised(batch, self.depths)
            return jnp.sum(valid[0]) + jnp.sum(sample(key, valid, self.layout).valid)

        return 1.0 / jnp.maximum(jnp.sum(jax.vmap(count)(batches, keys)), 1)[None]

    def loss(
        self,
        head: Any,
        target: Any,
        batch: Batch,
        taps: Array,
        teacher: Teacher,
        weights: Array,
        key: Array,
        trained: Trained,
    ) -> tuple[Array, Tally]:
        valid = supervised(batch, self.depths)
        elements = sample(key, valid, self.layout)
        small, places = self.layout.parts(self.partitions)
        size, counted = batch.tokens.shape[1], jnp.arange(self.partitions) == 0

        def part(loss: Array, given: tuple[Array, Array]) -> tuple[Array, Rows]:
            at, first = given
            mine = Elements(
                anchor=elements.anchor[:, at], valid=elements.valid[:, at], layout=small
            )
            near, far = unroll_parallel(head, target, batch, taps, mine)
            previous = jnp.pad(mine.previous(batch.tokens), ((0, 0), (size, 0)), constant_values=-1)
            added, rows = row_loss(
                head,
                target,
                jnp.concatenate([near, far], axis=1)[None],
                aligned_teacher(teacher, mine),
                jnp.concatenate([valid[0] & first, mine.valid], axis=1)[None],
                weights,
                previous[None],
                objective=self.objective,
                trained=trained,
            )
            return loss + added, rows

        run = part if self.partitions == 1 else jax.checkpoint(part)
        loss, rows = jax.lax.scan(run, jnp.float32(0), (jnp.asarray(places), counted))
        back = np.argsort(places.reshape(-1))

        def whole(x: Array) -> Array:
            """[partitions, 1, B, T + E / partitions] -> [1, B, T + E]."""
            far = jnp.moveaxis(x[..., size:], 0, 2).reshape(*x.shape[1:3], -1)
            return jnp.concatenate([x[0, ..., :size], far[..., back]], axis=-1)

        rows = jax.tree.map(whole, jax.lax.stop_gradient(rows))
        return loss, self._tally(rows, valid[0], elements.valid, elements)

    def _tally(self, rows: Rows, first: Array, deep: Array, elements: Any) -> Tally:
        """Chains are followed along the anchors that are kept; depth 0 is counted over all anchors."""
        size, counts = first.shape[1], self.layout.counts
        near = jax.tree.map(lambda x: x[:, :, :size], rows)
        whole = Tally.create(near, first[None])
        at, chain = 0, None
        parts: list[Tally] = [whole]
        for n in counts:
            part = slice(size + at, size + at + n)
            mine = elements.anchor[:, at : at + n]
            valid, right = deep[:, at : at + n], rows.right[0, :, part]
            if chain is None:
                chain = jnp.take_along_axis(rows.right[0, :, :size] & first, mine, axis=1)
            before = chain[:, :n]
            chain = before & right & valid

            def total(x: Array) -> Array:
                return jnp.sum(x.astype(jnp.float32))[None]

            parts.append(
                Tally(
                    counted=total(valid),
                    right=total(right & valid),
                    chained=total(chain),
                    reached=total(before & valid),
                    acceptance=total(jnp.where(valid, rows.acceptance[0, :, part], 0.0)),
                )
            )
            at += n
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
