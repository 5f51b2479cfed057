"""One update of a head, as a pure jitted function.

B rows, T tokens, S steps, M parts that a batch is cut into.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from training.config import TrainConfig
from training.eagle3 import Batch
from training.features import Features, online_features
from training.parameters import Parameters, Structure
from training.recipes import Recipe, Tally
from training.sharding import head_sharding


@struct.dataclass
class TrainState:
    """All that changes while training, beside the place in the data.

    Attributes:
      params: float32 masters of what is trained, by name.
      optimizer: Optax's state.
      update: int32[], updates done.
      skipped: int32[], of them those whose gradients were no numbers, which changed nothing.
    """

    params: Parameters
    optimizer: Any
    update: Array
    skipped: Array


@struct.dataclass
class Report:
    """Of one update or evaluation.

    Attributes:
      loss: float32[], mean over anchors, summed over steps with their weights.
      norm: float32[], of the gradients before clipping.
      tally: sums.
    """

    loss: Array
    norm: Array
    tally: Tally

    def figures(self) -> dict[str, Any]:
        """For the log."""
        return {"loss": float(self.loss), **self.tally.figures(), "norm": float(self.norm)}


def make_optimizer(config: TrainConfig, updates: int) -> optax.GradientTransformation:
    """Clipping, then AdamW, or Muon for matrices and AdamW for the rest; warm-up and cosine."""

    def schedule(peak: float) -> optax.Schedule:
        return optax.schedules.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=peak,
            warmup_steps=max(1, round(config.warmup * updates)),
            decay_steps=max(2, updates),
            end_value=peak * config.final_share,
        )

    def matrices(params: Parameters) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    adam = optax.adamw(
        schedule(config.learning_rate),
        b1=0.9,
        b2=0.95,
        weight_decay=config.weight_decay,
        mask=matrices,
    )
    if config.optimizer == "adamw":
        return optax.chain(optax.clip_by_global_norm(config.clip), adam)
    muon = optax.chain(
        # every parameter [in, ...] is one matrix
        optax.contrib.scale_by_muon(
            weight_dimension_numbers=partial(
                jax.tree.map,
                lambda x: optax.contrib.MuonDimensionNumbers((0,), tuple(range(1, x.ndim))),
            )
        ),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule(config.muon_learning_rate)),
    )

    def labels(params: Parameters) -> dict[str, str]:
        """The vocabulary's rows, the mask's state and biases are no maps between streams: they stay with AdamW."""

        def label(name: str, x: Any) -> str:
            other = name.startswith(("readout.", "embedding", "mask_hidden")) or "bias" in name
            return "adamw" if other or x.ndim < 2 else "muon"

        return {name: label(name, x) for name, x in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.partition({"muon": muon, "adamw": adam}, labels),
    )


@dataclass(frozen=True, eq=False)
class Step:
    """What an update is made of; compiled once per run.

    Attributes:
      structure: the head beside its arrays.
      optimizer: see `make_optimizer`.
      recipe: what is minimised.
      steps: S, that it speaks of.
      seed: of what it draws.
      taps: of the head.
      dtype: of matrices while computing.
      mesh: of the devices that parameters and batches are spread over; None is one device.
    """

    structure: Structure
    optimizer: optax.GradientTransformation
    recipe: Recipe
    steps: int
    seed: int
    taps: tuple[int, ...]
    dtype: Any
    mesh: Any = None

    def start(self, params: Parameters) -> TrainState:
        """The state before the first update. The parameters are copied: updates overwrite them in place."""
        params = {name: jnp.array(x, copy=True) for name, x in params.items()}
        return TrainState(
            params=params,
            optimizer=self.optimizer.init(params),
            update=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
        )

    def _loss(
        self,
        params: Parameters,
        frozen: Parameters,
        target: Any,
        batch: Batch,
        features: Features | None,
        key: Array,
        weights: Array,
    ) -> tuple[Array, Tally]:
        def cast(part: Parameters) -> Parameters:
            return {
                n: x.astype(self.dtype)
                if x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating)
                else x
                for n, x in part.items()
            }

        head = self.structure.join(cast(params), cast(frozen))
        seen = online_features(target, batch, self.taps) if features is None else features
        taps, teacher = jax.tree.map(
            lambda x: x.astype(self.dtype) if x.dtype == jnp.bfloat16 else x,
            (seen.taps, seen.teacher),
        )
        return self.recipe.loss(
            head, target, batch, taps, teacher, weights, key, params.__contains__
        )

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def update(
        self,
        state: TrainState,
        frozen: Parameters,
        target: Any,
        batches: Batch,
        features: Features | None,
    ) -> tuple[TrainState, Report]:
        """One update.

        Args:
          frozen: the head's other arrays.
          target: the frozen model.
          batches: [M, B, T].
          features: [M, B, T, ...], or None: the target is run here.
        """
        parts = batches.tokens.shape[0]
        keys = jax.random.split(jax.random.fold_in(jax.random.key(self.seed), state.update), parts)
        weights = self.recipe.weights(batches, keys)
        gradient = jax.value_and_grad(self._loss, has_aux=True)

        def part(carry, given):
            loss, gradients, tally = carry
            (value, found), new = gradient(state.params, frozen, target, *given, weights)
            add = partial(jax.tree.map, jnp.add)
            return (loss + value, add(gradients, new), add(tally, found)), None

        zeros = Tally(*(jnp.zeros(self.steps),) * 5)
        start = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state.params), zeros)
        (loss, gradients, tally), _ = jax.lax.scan(part, start, (batches, features, keys))
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
        report = Report(loss=loss, norm=optax.tree.norm(gradients), tally=tally)
        params: Any = optax.apply_updates(state.params, updates)
        # what is no number never enters the state, and so no checkpoint
        sound = jnp.isfinite(loss) & jnp.isfinite(report.norm)
        params, optimizer = jax.tree.map(
            lambda new, old: jnp.where(sound, new, old),
            (params, optimizer),
            (state.params, state.optimizer),
        )
        state = TrainState(
            params=params,
            optimizer=optimizer,
            update=state.update + 1,
            skipped=state.skipped + ~sound,
        )
        if self.mesh is not None:  # every update finds the arrays where the one before did
            state = jax.tree.map(
                lambda x: jax.lax.with_sharding_constraint(x, head_sharding(x.shape, self.mesh)),
                state,
            )
        return state, report

    @partial(jax.jit, static_argnums=0)
    def evaluate(
        self,
        params: Parameters,
        frozen: Parameters,
        target: Any,
        batch: Batch,
        features: Features | None,
    ) -> Report:
        """The loss and sums of one batch [B, T], without an update."""
        keys = jax.random.split(jax.random.key(0), 1)
        weights = self.recipe.weights(jax.tree.map(lambda x: x[None], batch), keys)
        loss, tally = self._loss(params, frozen, target, batch, features, keys[0], weights)
        return Report(loss=loss, norm=jnp.float32(0), tally=tally)
