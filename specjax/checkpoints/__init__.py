"""Real checkpoints in: names, files, formats, tokenizers."""

import os
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.gguf import load_file
from specjax.checkpoints.huggingface import load_folder
from specjax.checkpoints.safetensors_folder import PICKLES_REFUSED
from specjax.checkpoints.sources import resolve
from specjax.checkpoints.tokenizer import Tokenizer, load_tokenizer
from specjax.checkpoints.weights import CheckpointError
from specjax.models.transformer import Origin, Transformer

__all__ = ["CheckpointError", "Tokenizer", "load_target", "load_tokenizer"]


def load_target(source: str | os.PathLike, *, dtype: Any = None) -> Transformer:
    """Loads a model to decode from.

    Args:
      source: a built-in name ("smollm2-135m-instruct"), a Hugging Face folder or hub id, or a .gguf
        file.
      dtype: of the matrices; None means float32 on CPU and bfloat16 on accelerators.

    Returns:
      A `Transformer`: a pytree of arrays on the default device. `source` is kept on it for
      vocabulary checks.

    Raises:
      FileNotFoundError: unknown source.
      OSError: no room, or a download failed.
      CheckpointError: a file that is damaged, incomplete or not supported; every problem is named.
    """
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(f"dtype must be a floating type of 16 bits or more, got {dtype}")
    path = resolve(source)
    if path.is_dir():
        model = load_folder(path, dtype)
    elif path.suffix == ".gguf":
        model = load_file(path, dtype)
    else:
        expected = "expected a folder with config.json and *.safetensors, or a .gguf file"
        if path.suffix == ".safetensors":
            expected += f"; pass the folder, {path.parent}"
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
            expected += f". {PICKLES_REFUSED}"
        raise CheckpointError(f"{path}: {expected}")
    model.origin = Origin(str(path.absolute()))
    return model
