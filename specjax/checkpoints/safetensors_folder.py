"""The files of a Hugging Face folder: safetensors, their index, JSON."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.checkpoints.parts import EVERYTHING
from specjax.checkpoints.weights import LISTED, CheckpointError

FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names
PICKLES_REFUSED = (
    "Pickled weights (*.bin, *.pt, *.pth) can run code when opened and are refused; convert them "
    "with transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(out), which "
    "writes safetensors"
)


def same_name(name: str) -> str | None:
    return name


def floats(_: str) -> Sequence[str]:
    return FLOATS


class SafetensorsFolder:
    """The tensors of a folder's `*.safetensors`, of the index where there is one.

    Each read opens its shard anew: the pages of an open map would count as the process's memory
    until the end. (bfloat16 comes out as numpy's since JAX has taught numpy that type.)

    Args:
      folder: where the files lie.
      rename: from the names in the files to ours; None leaves a tensor out.
      types: that the tensor of a name may have, in safetensors' spelling; the floating ones by default.
      pickled: what the message adds where there are no safetensors.

    Raises:
      CheckpointError: no weights, or files that are missing, damaged, pickled or quantised; all of
        them are named.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rename: Callable[[str], str | None] = same_name,
        types: Callable[[str], Sequence[str]] = floats,
        pickled: str = PICKLES_REFUSED,
    ):
        self._place: dict[str, tuple[Path, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        problems = []
        for path in _weight_files(folder, pickled):
            try:
                with safe_open(path, framework="np") as file:
                    for stored in file.keys():  # noqa: SIM118 (not a mapping)
                        name = rename(stored)
                        if name is None:
                            continue
                        view = file.get_slice(stored)
                        if view.get_dtype() not in types(name):
                            problems.append(
                                f"{path.name}: tensor {stored} must be one of "
                                f"{', '.join(types(name))}; got {view.get_dtype()} (of quantised "
                                "safetensors, gpt-oss's MXFP4 alone is supported)"
                            )
                        if name in self.shapes:
                            problems.append(f"tensor {name} is there twice, again in {path.name}")
                        self.shapes[name] = tuple(view.get_shape())
                        self._place[name] = (path, stored)
            except (SafetensorError, OSError) as error:
                state = "truncated, damaged or no safetensors file" if path.is_file() else "missing"
                problems.append(f"{path.name} is {state}: {error}")
        if len(problems) > LISTED:
            problems[LISTED:] = [f"and {len(problems) - LISTED} more"]
        if problems:
            raise CheckpointError("\n  ".join([f"{folder}: unusable weights", *problems]))

    def read(self, name: str, rows: slice | tuple[slice, ...] = EVERYTHING) -> np.ndarray:
        """Some rows of a tensor; a tuple cuts its further dimensions too."""
        path, stored = self._place[name]
        with safe_open(path, framework="np") as file:
            return file.get_slice(stored)[rows]


def _weight_files(folder: Path, pickled: str) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if not names or any(not isinstance(n, str) or Path(n).name != n for n in names):
            raise CheckpointError(f"{index}: expected weight_map from tensors to files beside it")
        return [folder / name for name in sorted(names)]
    # other files of the kind may lie beside the model's
    files = sorted(folder.glob("model.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: expected *.safetensors, found none. {pickled}")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
      CheckpointError: it is not there or holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent}: expected {path.name}, found none") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
