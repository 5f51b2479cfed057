"""One mesh of devices: batches and head split along "data", the target's layers along "model".

XLA partitions the step by where its arguments lie; nothing else in the trainer knows of devices.
"""

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA, MODEL = "data", "model"

TARGET_SPECS: tuple[tuple[str, int, P], ...] = (
    (r"attention\.qkv$", 4, P(None, MODEL)),  # [D, Hkv, G + 2, Dh]: whole heads
    (r"attention\.qkv_bias$", 3, P(MODEL)),
    (r"attention\.output$", 2, P(MODEL)),  # [Hkv G Dh, D]
    (r"attention\.sinks$", 2, P(MODEL)),  # [Hkv, G]
    (r"attention\.(query|up)$", 3, P(None, MODEL)),  # of latent attention, [R, H, ...]: whole heads
    (r"mlp\.(shared\.)?gate_up$", 3, P(None, None, MODEL)),  # [D, 2, F]
    (r"mlp\.gate_up_bias$", 2, P(None, MODEL)),
    (r"mlp\.(shared\.)?down$", 2, P(MODEL)),  # [F, D]
    (r"mlp\.gate_up$", 4, P(MODEL)),  # [E, D, 2, F]: whole experts
    (r"mlp\.down$", 3, P(MODEL)),  # [E, F, D]
    (r"mlp\.gate_up_bias$", 3, P(MODEL)),  # [E, 2, F]
    (r"mlp\.down_bias$", 2, P(MODEL)),  # [E, D]
    (r"^head$", 2, P(None, MODEL)),  # [D, V]
    (r"^embedding$", 2, P(MODEL)),  # [V, D]
)
"""Tensor parallelism of a `Transformer`, by a parameter's name and number of dimensions; what no row names is on every
device."""


def make_mesh(data: int, model: int) -> Mesh:
    """A mesh of data x model devices.

    Raises:
      ValueError: there are not as many.
    """
    have = len(jax.devices())
    if data * model > have:
        raise ValueError(
            f"data_parallel x model_parallel must be at most the number of devices, {have}; got {data} x {model}"
        )
    devices = np.asarray(jax.devices()[: data * model]).reshape(data, model)
    return Mesh(devices, (DATA, MODEL))


def _fitting(spec: P, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The spec where the devices divide the dimension, and a copy on each device where they do not."""
    fits = all(
        axis is None or size % mesh.shape[axis] == 0
        for axis, size in zip(spec, shape, strict=False)
    )
    return NamedSharding(mesh, spec if fits else P())


def place_target(target: Any, mesh: Mesh) -> Any:
    """The target with its arrays spread by `TARGET_SPECS`."""

    def put(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path).removeprefix(".").removesuffix(".value")
        rows = (
            s for pattern, ndim, s in TARGET_SPECS if ndim == x.ndim and re.search(pattern, name)
        )
        return jax.device_put(x, _fitting(next(rows, P()), x.shape, mesh))

    return jax.tree_util.tree_map_with_path(put, target)


def head_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Fully sharded data parallelism: an array's longest dimension that the devices divide is split along "data"."""
    size = mesh.shape[DATA]
    for axis in sorted(range(len(shape)), key=lambda i: -shape[i]):
        if len(shape) > 1 and shape[axis] % size == 0:
            return NamedSharding(mesh, P(*[DATA if i == axis else None for i in range(len(shape))]))
    return NamedSharding(mesh, P())


def place_head(arrays: Any, mesh: Mesh) -> Any:
    """Parameters, or an optimizer's state, each array by its shape."""
    return jax.tree.map(lambda x: jax.device_put(x, head_sharding(x.shape, mesh)), arrays)


def place_batch(arrays: Any, mesh: Mesh, axis: int) -> Any:
    """Arrays whose `axis` is the batch."""
    spec = P(*[None] * axis, DATA)
    return jax.tree.map(lambda x: jax.device_put(x, _fitting(spec, x.shape, mesh)), arrays)
