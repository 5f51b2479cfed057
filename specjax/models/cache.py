"""The committed keys and values of every layer, and the block that one pass adds to them.

B rows, S slots, T block tokens, Hkv key/value heads, Dh head width. Slot s of a row holds position s. Keys and values are
separate arrays per layer, [B, Hkv, S, Dh]: the decode products then run over contiguous memory, and XLA can update each
array in place inside a loop.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array


@struct.dataclass
class Block:
    """Keys and values that one pass computed for its T tokens.

    Attributes:
      keys, values: one array per layer, [B, Hkv, T, Dh].
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    def pad(self, width: int) -> "Block":
        """The same block with rows of zeros up to `width` tokens, so that blocks of several widths have one shape."""

        def widen(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2]), (0, 0)))

        return jax.tree.map(widen, self)


@struct.dataclass
class Cache:
    """Keys and values of committed tokens. `length` is the only truth: slots beyond it hold garbage that no pass reads.

    A pass never writes here. It reads the cache, returns a `Block`, and `commit` puts the accepted rows in their place;
    so a rejected draft needs no undoing.

    Attributes:
      keys, values: one array per layer, [B, Hkv, S, Dh].
      length: int32[B], committed tokens per row. Rows advance independently.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    length: Array

    @classmethod
    def create(
        cls, num_layers: int, batch: int, kv_heads: int, slots: int, head_dim: int, dtype
    ) -> "Cache":
        """An empty cache: every length is 0."""
        shape = (batch, kv_heads, slots, head_dim)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            length=jnp.zeros(batch, jnp.int32),
        )

    @property
    def slots(self) -> int:
        return self.keys[0].shape[2]

    def rewind(self, length: Array) -> "Cache":
        """The same slots read up to another length, int32[B]: back over drafts, or forward over what was written."""
        return replace(self, length=length)

    def commit(self, block: Block, count: Array, path: Array | None = None) -> "Cache":
        """Appends the accepted rows of a block.

        Args:
          block: what the pass returned, T tokens wide.
          count: int32[B], how many rows each batch row keeps.
          path: int32[B, P], which rows of the block those are, in order (a branch of a tree); None takes them from the
            front.

        Returns:
          The longer cache. Every row must have `length + T <= S`: all T rows are written, the ones past `count` land
          beyond the new length, where the next commit overwrites them. (`dynamic_update_slice` would clamp silently.)
        """
        if path is not None:
            rows = path[:, None, :, None]
            block = jax.tree.map(lambda x: jnp.take_along_axis(x, rows, axis=2), block)

        def write(old: Array, new: Array) -> Array:
            new = new.astype(old.dtype)
            if old.shape[0] == 1:  # a plain slice update; the batched form below is a scatter
                return jax.lax.dynamic_update_slice(old, new, (0, 0, self.length[0], 0))
            return jax.vmap(lambda o, n, start: jax.lax.dynamic_update_slice(o, n, (0, start, 0)))(
                old, new, self.length
            )

        return replace(
            self,
            keys=tuple(map(write, self.keys, block.keys)),
            values=tuple(map(write, self.values, block.values)),
            length=self.length + count,
        )
