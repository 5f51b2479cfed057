"""The shape of a drafted block: a tree whose root is the newest committed token.

A block holds W = N + 1 nodes: node 0 is that token, nodes 1..N are the drafts. `parent[j - 1]` is the node that draft j
follows, always an earlier one, so the first w nodes of a block are a tree for every w. A chain is parent = 0, 1, 2, ...

B rows, N drafts, W nodes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

Result = TypeVar("Result")


def ladder(num_draft: int) -> tuple[int, ...]:
    """Block widths that are compiled: powers of two, and the widest possible block."""
    widest, width, widths = num_draft + 1, 1, []
    while width < widest:
        widths.append(width)
        width *= 2
    return (*widths, widest)


def row_widths(num_draft: int) -> tuple[int, ...]:
    """Numbers of a round's committed rows for which a drafter's own pass over them is compiled: on CPUs, where a product
    costs by its rows, a ladder. Accelerators stream the weights whatever their number, and a choice costs them more."""
    return ladder(num_draft) if jax.default_backend() == "cpu" else (num_draft + 1,)


def climb(widths: Sequence[int], needed: Array, at_width: Callable[[int], Result]) -> Result:
    """`at_width` of the narrowest width that has room for what is needed; no other one runs.

    Args:
      widths: rising; the last one is taken for more than it has room for.
      needed: int32[].
      at_width: whose results have one shape at every width.
    """
    if len(widths) == 1:
        return at_width(widths[0])
    rung = jnp.sum(needed > jnp.asarray(widths[:-1]))
    return jax.lax.switch(rung, [partial(at_width, width) for width in widths])


@struct.dataclass
class Tree:
    """Who descends from whom.

    Attributes:
      parent: int32[B, N].
      ancestors: bool[B, W, W], True where the second node is the first itself or one it descends from: the tree's mask.
      depth: int32[B, W], drafts between the root and the node, the node included.
    """

    parent: Array
    ancestors: Array
    depth: Array

    @classmethod
    def create(cls, parent: Array) -> "Tree":
        """parent: int32[B, N]."""
        size = parent.shape[1] + 1
        steps = parent[..., None] == jnp.arange(size)
        reach = jnp.pad(steps, ((0, 0), (1, 0), (0, 0))) | jnp.eye(size, dtype=bool)
        for _ in range((size - 1).bit_length()):  # paths of 1, 2, 4, ... steps
            reach = jnp.einsum("bij,bjk->bik", reach.astype(jnp.int32), reach.astype(jnp.int32)) > 0
        return cls(parent=parent, ancestors=reach, depth=jnp.sum(reach, -1, dtype=jnp.int32) - 1)

    def narrow(self, width: int) -> "Tree":
        """The first `width` nodes."""
        return Tree(
            parent=self.parent[:, : width - 1],
            ancestors=self.ancestors[:, :width, :width],
            depth=self.depth[:, :width],
        )

    def leaves_first(self) -> Array:
        """Place of every node in a walk that leaves a node after its children, those in order: int32[B, W]; the root's is last."""
        above = jnp.pad(self.parent, ((0, 0), (1, 0)), constant_values=-1)
        index = jnp.arange(self.depth.shape[1])
        older = (above[:, :, None] == above[:, None, :]) & (index < index[:, None])
        reach = self.ancestors.astype(jnp.int32)
        # nodes under an older sibling of the node, or of one it descends from
        passed = jnp.einsum("bij,bjk,blk->bil", reach, older.astype(jnp.int32), reach) > 0
        below = jnp.sum(reach, axis=1, dtype=jnp.int32) - 1
        return jnp.sum(passed, axis=-1, dtype=jnp.int32) + below

    def path(self, node: Array) -> Array:
        """The nodes from the root to `node`, int32[B, W]; past its depth the last one is repeated."""
        batch, size = self.depth.shape
        mine = jnp.take_along_axis(self.ancestors, node[:, None, None], axis=1)[:, 0]
        at = jnp.where(
            mine, self.depth, size
        )  # place of every node on the path; off it: out of range
        rows = jnp.arange(batch)[:, None]
        path = jnp.broadcast_to(node[:, None], (batch, size))
        return path.at[rows, at].set(jnp.arange(size, dtype=node.dtype), mode="drop")


def static_tree(branching: Sequence[int]) -> np.ndarray:
    """Parents of a tree in which every node of depth d has `branching[d]` children, level by level.

    Raises:
      ValueError: a level without branches.
    """
    if not branching or any(int(b) != b or b < 1 for b in branching):
        raise ValueError(f"branching must be whole numbers >= 1, got {tuple(branching)}")
    parents, level, nodes = [], [0], 1
    for width in branching:
        parents += [node for node in level for _ in range(width)]
        level = list(range(nodes, nodes + len(level) * width))
        nodes += len(level)
    return np.asarray(parents, np.int32)


def check_parents(parents: Sequence[int]) -> np.ndarray:
    """The parents as int32[N].

    Raises:
      ValueError: one that is not an earlier node.
    """
    array = np.asarray(parents)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"parents must be a list of node numbers, got {parents!r:.100}")
    bad = [(j + 1, int(p)) for j, p in enumerate(array) if not 0 <= p <= j]
    if bad:
        node, parent = bad[0]
        raise ValueError(
            f"parents[{node - 1}] is {parent}: draft {node} must follow an earlier node, one of 0..{node - 1}"
        )
    return array.astype(np.int32)
