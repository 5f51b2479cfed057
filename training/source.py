"""Batches of a run, with the target's states beside them."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from specjax.models.transformer import Transformer
from training.config import TrainConfig
from training.data import SPLITS, Summary, open_sequences
from training.eagle3 import Batch
from training.features import FeatureFile, check_features, feature_bytes, write_features
from training.sharding import place_batch


class Source:
    """Batches with the target's states, computed in the step or read from disk.

    Args:
      config: of the run.
      target, summary: model and data.
      taps: of the head.
      console: where the writing of features is shown.
      mesh: where batches go; None is one device.
    """

    VALID = 64  # validation sequences that are used

    def __init__(
        self,
        config: TrainConfig,
        target: Transformer,
        summary: Summary,
        taps: tuple[int, ...],
        console: Console,
        mesh: Any = None,
    ):
        self.mesh = mesh
        self.valid = open_sequences(config.data, "valid", summary.length)
        self.size = max(1, min(config.batch_size // config.accumulate, len(self.valid)))
        self.files: dict[str, FeatureFile] = {}
        if config.features == "online":
            return
        root = config.feature_folder or config.data / "features"
        for part in SPLITS:
            sequences = open_sequences(config.data, part, summary.length)
            identity = {
                "target": config.target,
                "sequences": len(sequences),
                "tokens": summary.tokens[part],
                "digest": summary.digests.get(part),
            }
            folder = root / part
            if not (folder / "features.json").is_file():
                need = feature_bytes(target, len(sequences), summary.length, taps)
                console.print(f"features of the {part} split: {need / 1e9:.2f} GB in {folder}")
                with Progress(console=console, disable=not console.is_terminal) as progress:
                    task = progress.add_task(f"{part} features", total=len(sequences))
                    write_features(
                        target,
                        sequences,
                        folder,
                        taps,
                        identity,
                        progress=lambda n, p=progress, t=task: p.update(t, completed=n),
                    )
            self.files[part] = FeatureFile(folder, taps, identity)
            check_features(target, sequences, self.files[part], taps)

    def _pair(self, part: str, rows: dict[str, np.ndarray]) -> tuple[Batch, Any]:
        batch = Batch(**{k: jnp.asarray(rows[k]) for k in ("tokens", "wanted", "document")})
        return batch, self.files[part].read(rows["index"]) if self.files else None

    def parts(self, rows: dict[str, np.ndarray], accumulate: int) -> tuple[Batch, Any]:
        """A batch as [M, B, T] arrays."""
        pair = jax.tree.map(
            lambda x: x.reshape(accumulate, -1, *x.shape[1:]), self._pair("train", rows)
        )
        return pair if self.mesh is None else place_batch(pair, self.mesh, 1)

    def validation(self) -> Iterator[tuple[Batch, Any]]:
        """The validation sequences in batches of one size; what is left over is left out."""
        count = min(len(self.valid), self.VALID)
        for start in range(0, count - self.size + 1, self.size):
            rows = [self.valid[i] for i in range(start, start + self.size)]
            pair = self._pair("valid", {k: np.stack([r[k] for r in rows]) for k in rows[0]})
            yield pair if self.mesh is None else place_batch(pair, self.mesh, 0)
