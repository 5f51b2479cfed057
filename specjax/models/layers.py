"""Norms, rotations and feed-forward parts.

B rows, T tokens, D model width, F feed-forward width, E experts, Dh head width. Matrices are stored [in, out]: on CPU the
products of a few rows, which verification consists of, run up to twice as fast that way.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from specjax.models.config import Activation, ClampedSwiGLU, Rope, TransformerConfig


def matrix(rngs: nnx.Rngs, *shape: int, dtype, inputs: int | None = None) -> nnx.Param:
    """A parameter of normal entries with variance 1 / inputs (by default the first dimension)."""
    scale = (inputs or shape[0]) ** -0.5
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape, dtype))


def project(x: Array, weight: Array, bias: Array | None = None, *, dtype=None) -> Array:
    """x[..., in] times weight[in, ...], flattened to one matrix product; returns [..., *weight.shape[1:]].

    The result is of the weight's type, or of `dtype`, to which sums are then rounded once.
    """
    flat = weight.reshape(weight.shape[0], -1)
    rows = x.astype(flat.dtype)
    if jax.default_backend() == "cpu":
        # XLA would lay out anew what has more dimensions for the product that is the weight's gradient. Elsewhere the
        # batch may lie on several devices, which it could not, merged with what stands before it.
        rows = rows.reshape(-1, x.shape[-1])
    product: Any = _bfloat16_product if flat.dtype == jnp.bfloat16 else _product
    y = product(rows, flat, dtype)
    y = y.reshape(*x.shape[:-1], *weight.shape[1:])
    return y if bias is None else y + bias


def _product(x: Array, weight: Array, dtype) -> Array:
    return jnp.dot(x, weight, preferred_element_type=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _bfloat16_product(x: Array, weight: Array, dtype) -> Array:
    """x[..., in] times weight[in, out], whose gradients are products of bfloat16 too, summed in float32.

    Differentiated by JAX, a product with float32 results would multiply in float32 on the way back.
    """
    return _product(x, weight, dtype)


def _bfloat16_forward(x, weight, dtype):
    return _product(x, weight, dtype), (x, weight)


def _bfloat16_backward(dtype, kept, gradient):
    x, weight = kept
    flat, of_y = (a.reshape(-1, a.shape[-1]).astype(jnp.bfloat16) for a in (x, gradient))
    of_x = jnp.dot(of_y, _transposed(weight), preferred_element_type=jnp.float32)
    of_weight = jnp.dot(_transposed(flat), of_y, preferred_element_type=jnp.float32)
    return of_x.reshape(x.shape).astype(x.dtype), of_weight.astype(weight.dtype)


_bfloat16_product.defvjp(_bfloat16_forward, _bfloat16_backward)


def _transposed(matrix: Array) -> Array:
    """On CPUs laid out anew: XLA multiplies bfloat16 row by column in hardware (AMX), a transposed factor in float32, at a
    quarter of the speed."""
    if jax.default_backend() != "cpu":
        return matrix.T
    return with_layout_constraint(matrix.T, Layout(major_to_minor=(0, 1)))


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, computed in float32. Weights stay float32 in every model."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * self.weight[...]).astype(x.dtype)


def rotation(rope: Rope, rotary_dim: int, positions: Array) -> tuple[Array, Array]:
    """cos and sin, float32[B, T, rotary_dim / 2], of each position's angles."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rope.frequencies(rotary_dim))
    return jnp.cos(angles) * rope.amplitude, jnp.sin(angles) * rope.amplitude


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the first 2 * cos.shape[-1] dimensions of x, paired half against half (Hugging Face's order).

    Args:
      x: [..., Dh]; cos and sin broadcast against its leading axes.
    """
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [a * cos - b * sin, b * cos + a * sin]
    if rest.shape[-1]:
        turned.append(rest)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def gated(activation: Activation, gate: Array, up: Array) -> Array:
    """What a gated feed-forward part hands to its last product, of its first two; all of one shape."""
    if isinstance(activation, ClampedSwiGLU):
        gate = jnp.minimum(gate, activation.limit)
        up = jnp.clip(up, -activation.limit, activation.limit)
        return gate * jax.nn.sigmoid(activation.alpha * gate) * (up + 1)
    act = jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return act * up


class MLP(nnx.Module):
    """Gated feed-forward: down(gated(gate(x), up(x))). gate and up are one matrix [D, 2, F]."""

    def __init__(self, config: TransformerConfig, *, dtype, rngs: nnx.Rngs):
        width, hidden = config.hidden_size, config.mlp_size
        self.gate_up = matrix(rngs, width, 2, hidden, dtype=dtype)
        self.down = matrix(rngs, hidden, width, dtype=dtype)
        self.gate_up_bias = nnx.Param(jnp.zeros((2, hidden), dtype)) if config.mlp_bias else None
        self.down_bias = nnx.Param(jnp.zeros(width, dtype)) if config.mlp_bias else None
        self.activation: Activation = config.activation

    def __call__(self, x: Array) -> Array:
        bias = None if self.gate_up_bias is None else self.gate_up_bias[...]
        both = project(x, self.gate_up[...], bias)
        hidden = gated(self.activation, both[..., 0, :], both[..., 1, :])
        return project(
            hidden, self.down[...], None if self.down_bias is None else self.down_bias[...]
        )


def _add(y: Array, bias: nnx.Param | None, chosen: Array) -> Array:
    """y [*chosen.shape, ...] plus each one's row of a bias [E, ...], if there is one."""
    return y if bias is None else y + bias[...][chosen]


class Experts(nnx.Module):
    """Mixture of gated experts, `experts_per_token` of them chosen per token (Qwen3-MoE's router; gpt-oss's softmax over
    the chosen logits is the same with `normalize_experts`; or `SigmoidRouter`), and one for all tokens where configured.

    No capacity limit: a token's output depends on that token alone, so rows cannot influence one another.
    """

    def __init__(self, config: TransformerConfig, *, dtype, rngs: nnx.Rngs):
        width, hidden, experts = config.hidden_size, config.expert_size, config.num_experts
        self.router = matrix(rngs, width, experts, dtype=dtype)
        self.gate_up = matrix(rngs, experts, width, 2, hidden, dtype=dtype, inputs=width)
        self.down = matrix(rngs, experts, hidden, width, dtype=dtype, inputs=hidden)
        bias = config.expert_bias
        self.router_bias = nnx.Param(jnp.zeros(experts, dtype)) if bias else None
        self.gate_up_bias = nnx.Param(jnp.zeros((experts, 2, hidden), dtype)) if bias else None
        self.down_bias = nnx.Param(jnp.zeros((experts, width), dtype)) if bias else None
        self.activation: Activation = config.activation
        self.per_token = config.experts_per_token
        self.normalize, self.factor = config.normalize_experts, config.expert_factor
        self.choice = config.router
        # like the norms' weights in float32
        self.correction = nnx.Param(jnp.zeros(experts, jnp.float32)) if config.router else None
        shared = replace(config, mlp_size=config.shared_expert_size, mlp_bias=False)
        self.shared = MLP(shared, dtype=dtype, rngs=rngs) if shared.mlp_size else None
        self.shared_gate = (
            matrix(rngs, width, 1, dtype=dtype) if config.shared_expert_gate else None
        )

    def __call__(self, x: Array) -> Array:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights, chosen = self._choose(x)
        experts = self.gate_up.shape[0]
        few = x.shape[0] * self.per_token <= experts
        y = self._gathered(x, chosen) if few else self._grouped(x, chosen)
        y = jnp.sum(y * weights[..., None].astype(y.dtype), axis=1)
        if self.shared is not None:
            own = self.shared(x)
            if self.shared_gate is not None:
                own = own * jax.nn.sigmoid(project(x, self.shared_gate[...]))
            y = y + own
        return y.reshape(shape)

    def _choose(self, x: Array) -> tuple[Array, Array]:
        """Each token's experts and what they count, float32 and int32[tokens, per_token]."""
        bias = None if self.router_bias is None else self.router_bias[...]
        if self.choice is None or self.correction is None:
            scores = jax.nn.softmax(project(x, self.router[...], bias).astype(jnp.float32), axis=-1)
            weights, chosen = jax.lax.top_k(scores, self.per_token)
        else:
            scores = jax.nn.sigmoid(project(x, self.router[...], bias, dtype=jnp.float32))
            ranked = scores + self.correction[...]
            if self.choice.kept < self.choice.groups:
                grouped = ranked.reshape(x.shape[0], self.choice.groups, -1)
                best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
                kept = jax.lax.top_k(best, self.choice.kept)[1]
                seen = jnp.any(kept[..., None] == jnp.arange(self.choice.groups), axis=1)
                ranked = jnp.where(seen[..., None], grouped, -jnp.inf).reshape(ranked.shape)
            chosen = jax.lax.top_k(ranked, self.per_token)[1]
            weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.normalize:
            # sigmoids may all be zero
            weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-20)
        return weights * self.factor, chosen

    def _gathered(self, x: Array, chosen: Array) -> Array:
        """Few tokens: read the chosen experts' weights alone. Returns [tokens, per_token, D]."""
        both = jnp.einsum("nd,nkdgf->nkgf", x, self.gate_up[...][chosen])
        both = _add(both, self.gate_up_bias, chosen)
        hidden = gated(self.activation, both[:, :, 0], both[:, :, 1])
        y = jnp.einsum("nkf,nkfd->nkd", hidden, self.down[...][chosen])
        return _add(y, self.down_bias, chosen)

    def _grouped(self, x: Array, chosen: Array) -> Array:
        """Many tokens: sort (token, expert) pairs by expert and multiply group by group."""
        experts, width = self.gate_up.shape[0], x.shape[-1]
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=experts).astype(jnp.int32)
        rows = x[order // self.per_token]
        gate_up = self.gate_up[...].reshape(experts, width, -1)
        both = jax.lax.ragged_dot(rows, gate_up, sizes).reshape(rows.shape[0], 2, -1)
        both = _add(both, self.gate_up_bias, flat[order])
        hidden = gated(self.activation, both[:, 0], both[:, 1])
        y = _add(jax.lax.ragged_dot(hidden, self.down[...], sizes), self.down_bias, flat[order])
        return y[jnp.argsort(order)].reshape(*chosen.shape, width)
