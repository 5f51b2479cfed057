"""The frozen target's hidden states, computed in the step or once and kept on disk.

B rows, T tokens, A taps, Ht target width.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jax import Array

from specjax.models.layers import rotation
from specjax.models.transformer import Transformer
from training.eagle3 import Batch, attend_anchors
from training.files import write_json
from training.losses import Teacher

TOTALS = 512  # tokens whose full logits exist at a time


@struct.dataclass
class Features:
    """What a head reads and what it is judged by.

    Attributes:
      taps: [B, T, A, Ht].
      teacher: the target's last states.
    """

    taps: Array
    teacher: Teacher


def hidden_states(target: Transformer, batch: Batch, taps: tuple[int, ...]) -> tuple[Array, Array]:
    """One pass over packed sequences, in which documents do not see one another.

    Positions run through the whole sequence: rotary embeddings depend on distances alone.

    Returns:
      taps [B, T, A, Ht] and the stream that leaves the last layer, [B, T, Ht].
    """
    config = target.config
    index = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(index, batch.tokens.shape)
    angles = [rotation(rope, config.rotary, positions) for rope in config.ropes]
    x, tapped = target.embed(batch.tokens), {}
    for i, (layer, c) in enumerate(zip(target.layers, config.layers, strict=True)):
        tapped[i] = x
        normed = layer.attention_norm(x)
        query, key, value = layer.attention.split(normed, angles[c.rope])
        mixed = attend_anchors(
            query,
            [key],
            [value],
            batch.document,
            scale=config.scale,
            window=c.window,
            softcap=config.attention_softcap,
            sinks=None if layer.attention.sinks is None else layer.attention.sinks[...],
        )
        x = layer.leave(x, layer.attention.join(mixed, normed))
    tapped[config.num_layers] = x
    return jnp.stack([tapped[i] for i in taps], axis=2), x


def online_features(target: Transformer, batch: Batch, taps: tuple[int, ...]) -> Features:
    """The states of a batch, computed now."""
    found, last = hidden_states(target, batch, taps)
    return jax.lax.stop_gradient(Features(taps=found, teacher=Teacher(last=last)))


@partial(jax.jit, static_argnames="taps")
def _whole_features(target: Transformer, batch: Batch, taps: tuple[int, ...]) -> Features:
    """With what needs the whole vocabulary: the sum of exp(logits), and the likeliest token."""
    found, last = hidden_states(target, batch, taps)
    flat = last.reshape(-1, last.shape[-1])
    spare = -flat.shape[0] % TOTALS
    pieces = jnp.pad(flat, ((0, spare), (0, 0))).reshape(-1, TOTALS, flat.shape[-1])

    def one(rows: Array) -> tuple[Array, Array]:
        logits = target.logits(rows)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.nn.logsumexp(logits, axis=-1), best

    total, best = jax.lax.map(one, pieces)
    total, best = (x.reshape(-1)[: flat.shape[0]].reshape(last.shape[:2]) for x in (total, best))
    return Features(taps=found, teacher=Teacher(last=last, log_total=total, best=best))


def without_layers(target: Transformer) -> Transformer:
    """What training on stored states needs of the target: embedding, final norm and logits. Its layers' arrays are empty,
    so that theirs is free memory once nobody else holds them."""

    def keep(path: Any, x: Array) -> Array:
        inside = jax.tree_util.keystr(path).startswith(".layers")
        return jnp.zeros((0,) * x.ndim, x.dtype) if inside else x

    return jax.tree_util.tree_map_with_path(keep, target)


class FeatureFile:
    """Hidden states of every sequence of a split, in bfloat16 on disk.

    A folder with `states.npy` [sequences, T, layers, Ht] (of the layers that `features.json` names: what enters them, and
    last what leaves the target's last one), `totals.npy` and `best.npy` [sequences, T], and `features.json`, which is
    written last. Any head that reads some of these layers trains on it.

    Args:
      folder: where they lie.
      taps: layers to read.
      identity: what they depend on; files made for something else are refused.

    Raises:
      ValueError: incomplete files, or files of another target or dataset, or without a layer.
    """

    def __init__(self, folder: Path, taps: tuple[int, ...], identity: dict[str, Any]):
        record = folder / "features.json"
        if not record.is_file():
            raise ValueError(f"{folder}: no complete features there")
        found = json.loads(record.read_text())
        layers = found.pop("layers", [])
        if found != identity:
            different = [k for k in identity | found if identity.get(k) != found.get(k)]
            raise ValueError(
                f"{folder}: features of another run: "
                + ", ".join(
                    f"{k} is {found.get(k)!r}, expected {identity.get(k)!r}" for k in different
                )
            )
        if missing := [tap for tap in taps if tap not in layers]:
            raise ValueError(
                f"{folder}: features of layers {layers}, expected {missing} too; name another feature_folder"
            )
        self.columns = [layers.index(tap) for tap in taps]
        self.states = np.load(folder / "states.npy", mmap_mode="r").view(ml_dtypes.bfloat16)
        self.totals = np.load(folder / "totals.npy", mmap_mode="r")
        self.best = np.load(folder / "best.npy", mmap_mode="r")

    def __len__(self) -> int:
        return self.states.shape[0]

    def read(self, index: np.ndarray) -> Features:
        """Of some sequences."""

        def rows(kept: np.ndarray) -> Array:
            return jnp.asarray(np.stack([kept[i] for i in index]))

        states = rows(self.states)
        return Features(
            taps=states[:, :, np.asarray(self.columns)],
            teacher=Teacher(
                last=states[:, :, -1], log_total=rows(self.totals), best=rows(self.best)
            ),
        )


def feature_bytes(target: Transformer, sequences: int, length: int, taps: tuple[int, ...]) -> int:
    """What `write_features` puts on disk."""
    layers = len(_layers(target, taps))
    return sequences * length * (layers * target.config.hidden_size * 2 + 8)


def _layers(target: Transformer, taps: tuple[int, ...]) -> list[int]:
    """What is kept: the taps, and the last layer's output once."""
    depth = target.config.num_layers
    return [*(tap for tap in taps if tap != depth), depth]


def write_features(
    target: Transformer,
    sequences: Any,
    folder: Path,
    taps: tuple[int, ...],
    identity: dict[str, Any],
    *,
    batch_size: int = 4,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Passes the target over every sequence and keeps its states.

    An interrupted writing goes on where it stopped.

    Args:
      sequences: of `data.open_sequences`.
      folder: where to write.
      taps: layers to tap.
      identity: see `FeatureFile`.
      batch_size: sequences a pass.
      progress: called with the number of sequences done.

    Raises:
      OSError: not enough room, said before anything is computed.
    """
    count, layers = len(sequences), _layers(target, taps)
    identity = identity | {"layers": layers}
    length = sequences[0]["tokens"].shape[0]
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / "partial.json"
    done = 0
    if mark.is_file():
        row = json.loads(mark.read_text())
        done = row["done"] if row["identity"] == identity else 0
    need = feature_bytes(target, count, length, taps)
    if not done:
        for name in ("states.npy", "totals.npy", "best.npy"):  # of a writing that did not come far
            (folder / name).unlink(missing_ok=True)
    if not done and (free := shutil.disk_usage(folder).free) < need * 1.02:
        raise OSError(
            f"{folder}: the features of {count} sequences need {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
        )
    (folder / "features.json").unlink(missing_ok=True)

    def array(name: str, shape: tuple[int, ...], dtype: Any) -> np.memmap:
        mode = "r+" if done else "w+"
        mapped = np.lib.format.open_memmap(folder / name, mode=mode, dtype=dtype, shape=shape)
        with (folder / name).open(
            "r+b"
        ) as file:  # a sparse file would end in a bus error when the disk is full
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        return mapped

    states = array("states.npy", (count, length, len(layers), target.config.hidden_size), np.uint16)
    totals, best = (
        array("totals.npy", (count, length), np.float32),
        array("best.npy", (count, length), np.int32),
    )
    while done < count:
        rows = range(done, min(done + batch_size, count))
        read = [sequences[min(i, count - 1)] for i in range(done, done + batch_size)]
        batch = Batch(
            **{
                k: jnp.asarray(np.stack([r[k] for r in read]))
                for k in ("tokens", "wanted", "document")
            }
        )
        features = _whole_features(target, batch, tuple(layers))
        here = slice(rows.start, rows.stop)
        found = np.asarray(features.taps.astype(jnp.bfloat16))[: len(rows)]
        states[here] = found.view(np.uint16)
        totals[here] = np.asarray(features.teacher.log_total)[: len(rows)]
        best[here] = np.asarray(features.teacher.best)[: len(rows)]
        done = rows.stop
        if done % (16 * batch_size) < batch_size or done == count:
            for x in (states, totals, best):
                x.flush()
            write_json(mark, {"done": done, "identity": identity})
        progress(done)
    write_json(folder / "features.json", identity)
    mark.unlink(missing_ok=True)


def check_features(
    target: Transformer, sequences: Any, file: FeatureFile, taps: tuple[int, ...], rows: int = 2
) -> None:
    """Compares some stored states with a fresh pass: wrong ones train a useless head without any other sign.

    Raises:
      ValueError: they differ by more than rounding to bfloat16 explains: once, or in every layer of a target in bfloat16,
        whose passes over other batches sum in another order.
    """
    most = 0.02 if target.dtype == jnp.float32 else 0.1
    for index in np.linspace(0, len(file) - 1, min(rows, len(file))).astype(int):
        row = sequences[int(index)]
        batch = Batch(**{k: jnp.asarray(row[k][None]) for k in ("tokens", "wanted", "document")})
        fresh, kept = _whole_features(target, batch, taps), file.read(np.asarray([index]))
        real = row["document"] > 0
        for name, a, b in (
            ("taps", fresh.taps, kept.taps),
            ("last states", fresh.teacher.last, kept.teacher.last),
        ):
            a, b = (np.asarray(x).astype(np.float32)[0, real] for x in (a, b))
            scale = np.abs(a).max(axis=-1, keepdims=True)
            worst = float((np.abs(a - b) / scale).max())
            if not worst <= most:
                raise ValueError(
                    f"stored {name} of sequence {index} differ from a fresh pass by {worst:.1%} of their size"
                )
