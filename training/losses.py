"""How far a head's distributions are from the target's, without ever holding all logits at once.

S steps, B rows, T tokens, H head width, Ht target width, V target vocabulary, Vd draft vocabulary, C rows of a chunk.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.drafters.chain import Vocabulary
from training.parameters import split

Objective = Literal["kl", "ce", "nla", "lk_hybrid"]
HYBRID_ETA = 3.0  # as in LK Losses, arXiv 2602.23881


def divergence(name: Objective, log_p: Array, log_q: Array, covered: Array) -> tuple[Array, Array]:
    """A loss for each row, and the row's acceptance.

    Args:
      name: `kl`: forward KL divergence; `ce`: soft cross-entropy, which has the same gradient; `nla`: the negative
        logarithm of the acceptance; `lk_hybrid`: w KL + (1 - w) (1 - acceptance), w = exp(-3 acceptance) held fixed
        (arXiv 2602.23881).
      log_p: float32[..., Vd], the target's log-probabilities, normalised over the draft vocabulary.
      log_q: float32[..., Vd], the head's.
      covered: float32[...], the target's probability of the draft vocabulary.

    Returns:
      loss and acceptance sum min(p, q) of a sampled draft, float32[...]. The acceptance is what serving sees: p is not
      renormalised there.
    """
    p = jnp.exp(log_p)
    acceptance = jnp.sum(jnp.minimum(p * covered[..., None], jnp.exp(log_q)), axis=-1)
    kl = jnp.sum(p * (log_p - log_q), axis=-1)
    match name:
        case "kl":
            loss = kl
        case "ce":
            loss = -jnp.sum(p * log_q, axis=-1)
        case "nla":
            loss = -jnp.log(jnp.maximum(acceptance, 1e-12))
        case "lk_hybrid":
            weight = jax.lax.stop_gradient(jnp.exp(-HYBRID_ETA * acceptance))
            loss = weight * kl + (1 - weight) * (1 - acceptance)
        case _:
            raise ValueError(
                f"objective must be one of {', '.join(get_args(Objective))}; got {name!r}"
            )
    return loss, acceptance


@struct.dataclass
class Teacher:
    """What the target says at every token.

    Attributes:
      last: [B, T, Ht], the stream that leaves its last layer.
      log_total: float32[B, T], log of the sum of exp(logits) over all of V; None: it is computed.
      best: int32[B, T], the likeliest token; None: it is computed.
    """

    last: Array
    log_total: Array | None = None
    best: Array | None = None


@struct.dataclass
class Rows:
    """Judgement of every anchor at every step.

    Attributes:
      right: bool[S, B, T], the head's likeliest token is the target's.
      acceptance: float32[S, B, T], of a sampled draft.
    """

    right: Array
    acceptance: Array


def shift_right(x: Array, by: int) -> Array:
    """x [B, T, ...] moved `by` places along T; zeros come in."""
    pad = [(0, 0), (by, 0)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pad)[:, : x.shape[1]]


def shift_left(x: Array, by: int) -> Array:
    """x [B, T, ...] moved `by` places back along T; zeros come in."""
    pad = [(0, 0), (0, by)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pad)[:, by:]


def chunk_rows() -> int:
    """Rows whose logits a CPU's caches hold (over 8192 tokens these are 16 MB); accelerators want larger products."""
    return 512 if jax.default_backend() == "cpu" else 2048


def head_loss(
    head: Any,
    target: Any,
    states: Array,
    teacher: Teacher,
    valid: Array,
    weights: Array,
    *,
    objective: Objective = "kl",
    trained: Callable[[str], bool] = lambda _: True,
    chunk: int | None = None,
) -> tuple[Array, Rows]:
    """The loss of a head that predicts S tokens from every anchor, one after the other.

    Args:
      states: [S, B, T, H], what step k made of anchor t: it predicts token t + 2 + k.
      teacher: the target's states; at token t + 1 + k it predicts the same token.
      valid: bool[S, B, T], anchors that count at each step.
      weights: float32[S], factor on the loss of each row of a step.
      others: see `row_loss`.

    Returns:
      the weighted sum over rows and steps, float32[], and the rows.
    """
    steps = range(states.shape[0])
    loss, rows = row_loss(
        head,
        target,
        # rows lie where the teacher speaks of them, so that one product serves all steps
        jnp.stack([shift_right(states[k], k + 1) for k in steps]),
        teacher,
        jnp.stack([shift_right(valid[k], k + 1) for k in steps]),
        weights,
        objective=objective,
        trained=trained,
        chunk=chunk,
    )
    return loss, jax.tree.map(lambda x: jnp.stack([shift_left(x[k], k + 1) for k in steps]), rows)


def row_loss(
    head: Any,
    target: Any,
    states: Array,
    teacher: Teacher,
    valid: Array,
    weights: Array,
    previous: Array | None = None,
    *,
    objective: Objective = "kl",
    trained: Callable[[str], bool] = lambda _: True,
    chunk: int | None = None,
) -> tuple[Array, Rows]:
    """The loss of rows against the teacher's rows of the same index.

    Logits exist for one chunk of rows at a time. Their gradients are taken in the same sweep, so nothing is computed
    twice and nothing as large as the logits is kept for the backward pass.

    Args:
      head: whose `readout` makes logits of states.
      target: the frozen model; its `logits` are the teacher.
      states: [S, B, T, H].
      teacher: what the target says, [B, T, ...].
      valid: bool[S, B, T], rows that count.
      weights: float32[S], factor on each row's loss.
      previous: int32[S, B, T], the token that is drafted before each row's, for heads with a correction by it; negative
        where there is none.
      objective: see `divergence`.
      trained: which of the head's parameters get gradients, by name.
      chunk: C, rows of all steps together whose logits exist at a time; None is `chunk_rows()`.

    Returns:
      the weighted sum, float32[], and the rows. Rows whose likeliest token is outside the draft vocabulary have no loss:
      there is nothing there that the head could say.
    """
    steps, batch, length = states.shape[:3]
    ids = head.target_ids
    vocabulary = Vocabulary(ids, target.vocab_size)
    # cut along T: the batch may lie on several devices
    piece_length = max(1, min(length, (chunk or chunk_rows()) // (steps * batch)))
    spare = -length % piece_length

    def pieces(x: Array, axis: int) -> Array:
        """[.., T, ..] -> [number of pieces, .., piece, ..]."""
        pad = [(0, spare) if i == axis else (0, 0) for i in range(x.ndim)]
        x = jnp.pad(x, pad)
        x = x.reshape(*x.shape[:axis], -1, piece_length, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    params, frozen, structure = split(head.readout, lambda name: trained(f"readout.{name}"))
    # [Vd, H]: in this order the gradient of a product's second factor is computed half as fast again on CPUs
    params = jax.tree.map(jnp.transpose, params)
    others = {
        "last": pieces(teacher.last, 1),
        "counted": pieces(valid, 2),
        "log_total": None if teacher.log_total is None else pieces(teacher.log_total, 1),
        "best": None if teacher.best is None else pieces(teacher.best, 1),
        "previous": None if previous is None else pieces(vocabulary.own(previous), 2),
    }

    def piece(params: Any, constants: Any, states: Array, others: Any) -> tuple[Array, Any]:
        readout = structure.join(jax.tree.map(jnp.transpose, params), constants["frozen"])
        target, vocabulary = constants["target"], constants["vocabulary"]
        ids = vocabulary.ids
        log_total, best = others["log_total"], others["best"]
        if log_total is None or best is None:
            logits = target.logits(others["last"])
            log_total = jax.nn.logsumexp(logits, axis=-1)
            best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            logits = logits if ids is None else logits[..., ids]
        else:
            logits = target.logits(others["last"], ids)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        covered = jnp.exp(jnp.minimum(jax.nn.logsumexp(logits, axis=-1) - log_total, 0.0))
        best = vocabulary.own(best)  # -1: outside the draft vocabulary

        log_q = jax.nn.log_softmax(readout(states, others["previous"]), axis=-1)
        loss, acceptance = divergence(objective, log_p, log_q, covered)  # [S, B, piece]
        right = jnp.argmax(log_q, axis=-1) == best
        used = others["counted"] & (best >= 0)
        loss = jnp.where(used, loss, 0.0) * constants["weights"][:, None, None]
        return jnp.sum(loss), (right, acceptance)

    constants = {
        "frozen": frozen,
        "target": target,
        "vocabulary": vocabulary,
        "weights": weights.astype(jnp.float32),
    }
    swept: Any = sweep(piece, params, constants, pieces(states, 2), others)
    loss, (right, acceptance) = swept

    def whole(x: Array) -> Array:
        """[pieces, S, B, piece] -> [S, B, T]."""
        return jnp.moveaxis(x, 0, 2).reshape(steps, batch, -1)[:, :, :length]

    return loss, Rows(right=whole(right), acceptance=whole(acceptance))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sweep(function: Callable, params: Any, constants: Any, rows: Any, others: Any) -> Any:
    """The sum of a function over chunks, whose gradients are computed on the way.

    Args:
      function: (params, constants, rows, others) -> (scalar, auxiliary); must not close over traced values.
      params: gradients are summed over the chunks.
      constants: no gradients.
      rows: first axis the chunks; gradients chunk by chunk.
      others: first axis the chunks; no gradients.

    Returns:
      the sum, and the auxiliary results stacked.
    """

    def one(total, chunk):
        value, auxiliary = function(params, constants, *chunk)
        return total + value, auxiliary

    return jax.lax.scan(one, jnp.float32(0), (rows, others))


def _sweep_forward(function, params, constants, rows, others):
    gradient = jax.value_and_grad(function, argnums=(0, 2), has_aux=True)

    def one(carry, chunk):
        total, summed = carry
        (value, auxiliary), (of_params, of_rows) = gradient(params, constants, *chunk)
        return (total + value, jax.tree.map(jnp.add, summed, of_params)), (auxiliary, of_rows)

    # summed in float32 whatever the parameters are computed in
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    (total, of_params), (auxiliary, of_rows) = jax.lax.scan(
        one, (jnp.float32(0), zeros), (rows, others)
    )
    of_params = jax.tree.map(lambda x, like: x.astype(like.dtype), of_params, params)
    return (total, auxiliary), (of_params, of_rows)


def _sweep_backward(function, gradients, cotangent):
    factor = cotangent[0]
    of_params, of_rows = jax.tree.map(lambda x: (x * factor).astype(x.dtype), gradients)
    return of_params, None, of_rows, None


sweep.defvjp(_sweep_forward, _sweep_backward)
