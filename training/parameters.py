"""Modules as flat dictionaries of arrays, so that some can be trained and the others left alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

Parameters = dict[str, Array]
"""Arrays by their path in a module, such as "first.attention.qkv"."""


@dataclass(frozen=True)
class Structure:
    """What a module is beside its arrays.

    Attributes:
      names: of the arrays, in the module's order.
      treedef: JAX's description of the module.
    """

    names: tuple[str, ...]
    treedef: Any

    def join(self, *parts: Parameters) -> Any:
        """The module with its arrays from several dictionaries, each in exactly one of them."""
        arrays = {name: x for part in parts for name, x in part.items()}
        return jax.tree.unflatten(self.treedef, [arrays[name] for name in self.names])


def split(module: Any, trained: Callable[[str], bool]) -> tuple[Parameters, Parameters, Structure]:
    """A module as the arrays that are trained, the others, and the rest.

    Args:
      module: any pytree.
      trained: of an array's name.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(module)
    named = [
        (jax.tree_util.keystr(path).removeprefix(".").removesuffix(".value"), leaf)
        for path, leaf in leaves
    ]
    return (
        {name: leaf for name, leaf in named if trained(name)},
        {name: leaf for name, leaf in named if not trained(name)},
        Structure(tuple(name for name, _ in named), treedef),
    )
