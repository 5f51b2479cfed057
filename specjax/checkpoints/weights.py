"""From the tensors of a file to the parameters of a module.

Every file format presents its tensors under Hugging Face's names and shapes (`TensorFile`); a
table of `parts` says which of them make up which parameter. Names, shapes and types are
all checked before the first tensor is read, and every problem is reported at once.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints.parts import (
    EVERYTHING,
    Part,
    Parts,
    parameter_parts,
    passed_over,
    tensor_shapes,
)
from specjax.models.config import TransformerConfig
from specjax.models.transformer import Transformer

READ = 1 << 21  # elements of a tensor that are in memory at a time
TILE = 128  # rows that are transposed at a time: few enough for the processor's cache
LISTED = 40  # problems of one kind that a message spells out
HUGE = 1 << 22  # bytes from which memory is asked for in huge pages
M = TypeVar("M")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is; the message names every problem found."""


class TensorFile(Protocol):
    """Named tensors of floating point numbers, in Hugging Face's names and shapes."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str, rows: slice = EVERYTHING) -> np.ndarray:
        """Some rows (of the first dimension) of a tensor."""
        ...


def check_tensors(
    expected: dict[str, tuple[int, ...]],
    shapes: dict[str, tuple[int, ...]],
    where: str,
    what: str,
    ignored: Callable[[str], bool] = lambda _: False,
    spell: Callable[[str], str] = str,
) -> None:
    """Raises `CheckpointError` with every missing, unknown and misshapen tensor.

    Args:
      expected: what should be there.
      shapes: what is there.
      where: the file's name, for the message.
      what: the kind of model, for the message.
      ignored: whether a tensor carries nothing.
      spell: a tensor's name in the file.
    """
    missing = [
        f"missing tensor {spell(name)}, expected shape {shape}"
        for name, shape in expected.items()
        if name not in shapes
    ]
    misshapen = [
        f"tensor {spell(name)}: expected shape {shape}, got {tuple(shapes[name])}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    unknown = [
        f"unknown tensor {spell(name)} of shape {tuple(shape)}"
        for name, shape in shapes.items()
        if name not in expected and not ignored(name)
    ]
    count = len(missing) + len(misshapen) + len(unknown)
    if count:
        lines = []
        for kind in (missing, misshapen, unknown):
            lines += kind[:LISTED]
            if len(kind) > LISTED:
                lines.append(f"and {len(kind) - LISTED} more like the last")
        problems = "1 problem" if count == 1 else f"{count} problems"
        raise CheckpointError("\n  ".join([f"{where}: {problems} with {what}:", *lines]))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory at a multiple of 64 bytes: JAX on CPU then takes it without a copy. Pages of its own, huge ones where the
    system has them, which go back to it as soon as nobody holds them; malloc would keep them for the process."""
    size = int(np.prod(shape)) * dtype.itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    pages = mmap.mmap(-1, max(size, 1), **private)
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:size].view(dtype).reshape(shape)


def _blocks(view: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Cuts [D, ..., n] into [D, up to TILE], in the order of the dimensions after the first."""
    inner, row = view.shape[-1], 0
    for at in np.ndindex(*view.shape[1:-1]):
        for start in range(0, inner, TILE):
            block = view[(EVERYTHING, *at, slice(start, start + TILE))]
            yield row, block
            row += block.shape[1]


def _fill(view: np.ndarray, part: Part, file: TensorFile) -> None:
    """Writes one part in its place, reading at most some `READ` elements at a time."""
    first, last = part.rows or (0, part.shape[0])
    many = max(TILE, READ // max(1, int(np.prod(part.shape[1:]))))
    if len(part.shape) == 1:
        values = file.read(part.name)
        if part.add:
            values = values.astype(np.float32) + np.float32(part.add)
        view[...] = values.reshape(view.shape)
    elif not part.columns:
        for start in range(0, last - first, many):
            stop = min(start + many, last - first)
            view[start:stop] = file.read(part.name, slice(first + start, first + stop))
    else:
        start = stop = 0
        values = np.empty(0)
        for row, block in _blocks(view):
            end = row + block.shape[1]
            if end > stop:
                start, stop = row, min(max(row + many, end), last - first)
                values = file.read(part.name, slice(first + start, first + stop))
            block[...] = values[row - start : end - start].T


def fill_parameters(create: Callable[[], M], parts: Parts, file: TensorFile) -> M:
    """A module filled from a file, tensor by tensor.

    Host memory holds the parameter in the making and a few megabytes of the file; on CPU the
    parameter itself becomes the JAX array, so the peak is the model's own size.

    Args:
      create: makes the module; it is traced and never run.
      parts: of every leaf that is to be filled, by its path; checked against the file beforehand.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(create))
    left, filled = dict(parts), []
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path).removeprefix(".").removesuffix(".value")
        buffer = _aligned(leaf.shape, leaf.dtype)
        for part in left.pop(name):
            _fill(buffer[part.index or ...], part, file)
        filled.append(jax.block_until_ready(jax.device_put(buffer, may_alias=True)))
        del buffer
    if left:  # a mistake in a table of parts: these tensors would be dropped in silence
        raise RuntimeError(f"no parameter takes {', '.join(left)}")
    return jax.tree_util.tree_unflatten(structure, filled)


def load_parameters(
    config: TransformerConfig, file: TensorFile, dtype: jnp.dtype, where: str
) -> Transformer:
    """A `Transformer` filled from a file.

    Raises:
      CheckpointError: tensors are missing, unknown or of the wrong shape.
    """
    parts = parameter_parts(config)
    ignored = partial(passed_over, config=config)
    check_tensors(tensor_shapes(parts), file.shapes, where, config.family, ignored)
    return fill_parameters(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)), parts, file)
