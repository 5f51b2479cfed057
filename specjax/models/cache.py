"""The committed keys and values of every layer, and the block that one pass adds to them.

B rows, S slots, T block tokens, Hkv key/value heads, Dh head width. Slot s of a row holds position s. Keys and values are
separate arrays per layer, so that XLA can update each in place inside a loop. Values lie as [B, Hkv, S, Dh] and keys as
[B, Hkv, Dh, S]: both products of decoding then stream their array in order (on CPU the keys' product took half the time of
one over [B, Hkv, S, Dh]).
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
      after: int32[], always 0, but computed from the pass's result. A commit overwrites the arrays that the pass reads,
        in place; adding this to the place it writes to tells XLA that the reading comes first. Without it the compiler
        copies the whole cache every round (it drops optimisation barriers before it decides that).
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    after: Array

    def pad(self, width: int) -> "Block":
        """The same block with rows of zeros up to `width` tokens, so that blocks of several widths have one shape."""

        def widen(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2]), (0, 0)))

        keys, values = jax.tree.map(widen, (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def narrow(self, width: int) -> "Block":
        """Its first `width` tokens."""
        keys, values = jax.tree.map(lambda x: x[:, :, :width], (self.keys, self.values))
        return replace(self, keys=keys, values=values)


@struct.dataclass
class Cache:
    """Keys and values of committed tokens. `length` is the only truth: slots beyond it hold garbage that no pass reads.

    A pass never writes here. It reads the cache, returns a `Block`, and `commit` puts the accepted rows in their place;
    so a rejected draft needs no undoing.

    Attributes:
      keys: one array per layer, [B, Hkv, Dh, S].
      values: one array per layer, [B, Hkv, S, Dh].
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
        front = (batch, kv_heads)
        return cls(
            keys=tuple(jnp.zeros((*front, head_dim, slots), dtype) for _ in range(num_layers)),
            values=tuple(jnp.zeros((*front, slots, head_dim), dtype) for _ in range(num_layers)),
            length=jnp.zeros(batch, jnp.int32),
        )

    @property
    def slots(self) -> int:
        return self.values[0].shape[2]

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
        keys, values = block.keys, block.values
        if path is not None:
            rows = path[:, None, :, None]
            keys, values = jax.tree.map(
                lambda x: jnp.take_along_axis(x, rows, axis=2), (keys, values)
            )
        start = self.length + block.after

        def write(old: Array, new: Array, axis: int) -> Array:
            new = new.astype(old.dtype)
            if old.shape[0] == 1:  # a plain slice update; the batched form below is a scatter
                at = [start[0] if i == axis else 0 for i in range(4)]
                return jax.lax.dynamic_update_slice(old, new, at)

            def row(old: Array, new: Array, start: Array) -> Array:
                return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis - 1)

            return jax.vmap(row)(old, new, start)

        return replace(
            self,
            keys=tuple(
                write(old, jnp.swapaxes(new, 2, 3), 3)
                for old, new in zip(self.keys, keys, strict=True)
            ),
            values=tuple(write(old, new, 2) for old, new in zip(self.values, values, strict=True)),
            length=self.length + count,
        )
