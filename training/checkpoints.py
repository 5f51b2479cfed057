"""Checkpoints of a run: the whole state and the place in the data, saved beside the training."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout
from orbax.checkpoint import v1 as ocp

from training.files import write_json

training: Any = ocp.training  # its annotations do not fit one another
policies = training.preservation_policies


class RunCheckpoints:
    """The checkpoints in a run's folder: the latest, and the best by simulated acceptance length.

    Args:
      folder: of the run.
      identity: what makes a run the same run; a folder of another one is refused.

    Raises:
      ValueError: the folder belongs to a run with other settings, which are named, or another process is training in it.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = FileLock(folder / ".lock")  # the system frees it however the process ends
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"output {folder} is in use: another process trains there") from error
        try:
            _check_identity(folder, identity)
        except (ValueError, OSError):
            self._lock.release()
            raise
        self._checkpointer = training.Checkpointer(
            (folder / "checkpoints").absolute(),
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(1),
                    policies.BestN(
                        get_metric_fn=lambda metrics: metrics["length"],
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    ),
                ]
            ),
            cleanup_tmp_directories=True,
        )

    @property
    def latest(self) -> int | None:
        """The update of the newest checkpoint."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    @property
    def best(self) -> tuple[int, float] | None:
        """The update and the simulated acceptance length of the best one that was measured."""
        measured = [
            (c.step, float(c.metrics["length"]))
            for c in self._checkpointer.checkpoints
            if c.metrics
        ]
        return max(measured, key=lambda pair: pair[1], default=None)

    def save(self, update: int, state: Any, data: Any, length: float | None) -> None:
        """Starts saving; training goes on meanwhile. An error of the save before is raised here.

        Args:
          update: number of updates done.
          state: pytree of arrays.
          data: the iterator over the data.
          length: simulated acceptance length, where it was just measured.
        """
        if update == self.latest:
            return
        with self._room():
            self._checkpointer.save_checkpointables_async(
                update,
                {"state": state, "data": data},
                metrics=None if length is None else {"length": length},
            )

    def load(self, like: Any, data: Any = None, update: int | None = None) -> Any:
        """A saved state, in the shapes and places of `like`; `data` is moved to where it was."""
        wanted = {"state": jax.tree.map(_shape, like)}
        if data is not None:
            wanted["data"] = data
        return self._checkpointer.load_checkpointables(update, wanted)["state"]

    def wait(self) -> None:
        """Until nothing is being saved."""
        with self._room():
            self._checkpointer.wait()

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Says in one line what the storage library says of a full disk in pages."""
        try:
            yield
        except ValueError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and "No space left" not in str(error):
                raise
            raise OSError(
                f"{self._folder}: no room for a checkpoint; the last whole one is kept, and the same command goes on from it"
            ) from error

    def close(self) -> None:
        self._checkpointer.close()
        self._lock.release()


def _check_identity(folder: Path, identity: dict[str, Any]) -> None:
    """Raises ValueError if the folder holds another run; marks a new one as this run's."""
    record = folder / "run.json"
    if not record.is_file():
        write_json(record, identity)
        return
    found = json.loads(record.read_text())
    different = [k for k in identity | found if identity.get(k) != found.get(k)]
    if different:
        raise ValueError(
            f"output {folder} holds another run: "
            + ", ".join(f"{k} was {found.get(k)!r}, now {identity.get(k)!r}" for k in different)
        )


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
