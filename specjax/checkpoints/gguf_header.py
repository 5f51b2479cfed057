"""The front of a GGUF file: metadata, and where its tensors lie.

The `gguf` package's reader does this too, and dequantising is left to that package. But it makes numpy objects of every token
(seconds and 150 MB for SmolLM2's vocabulary) and maps the whole file, whose pages then count as the process's memory: more
than a third of the model's size, where loading is meant to stay below 1.3 times it. Tests hold the two equal.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf

from specjax.checkpoints.weights import CheckpointError

STRING, ARRAY = 8, 9  # types of metadata values; the others are scalars, in struct's letters:
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in the file.

    Attributes:
      kind: quantisation.
      shape: in numpy's order, the rows first.
      start: of its first byte in the file.
    """

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape[:-1]) * self.row_bytes


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata of a GGUF file and the places of its tensors.

    Raises:
      CheckpointError: not a GGUF file of version 2 or 3, or a damaged or truncated one.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            metadata, tensors = _parse_header(file, size)
    except (ValueError, KeyError, TypeError, OSError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: truncated or not a GGUF file: {error!r}") from error
    if cut := [name for name, tensor in tensors.items() if tensor.stop > size]:
        raise CheckpointError(
            f"{path}: truncated: expected at least {max(tensors[n].stop for n in cut)} bytes, got "
            f"{size}; {len(cut)} tensors are cut off, the first: {cut[0]}"
        )
    return metadata, tensors


def _parse_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    def scalars(code: str, count: int) -> tuple:
        length = count * struct.calcsize(f"<{code}")
        if length > size - file.tell():  # believed only now: a damaged length may be enormous
            raise ValueError(f"it ends before {length} bytes at {file.tell()}")
        return struct.unpack(f"<{count}{code}", file.read(length))

    def scalar(code: str) -> Any:
        return scalars(code, 1)[0]

    def string() -> str:
        return scalars("s", scalar("Q"))[0].decode()

    def value(kind: int) -> Any:
        if kind == STRING:
            return string()
        if kind != ARRAY:
            return scalar(SCALARS[kind])
        kind, count = scalar("I"), scalar("Q")
        if kind == STRING:
            return [string() for _ in range(count)]
        return list(scalars(SCALARS[kind], count))

    magic, version = scalars("s", 4)[0], scalar("I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"expected b'GGUF' and version 2 or 3, got {magic!r} and {version}")
    count, pairs = scalars("Q", 2)
    metadata = {string(): value(scalar("I")) for _ in range(pairs)}
    found = {}
    for _ in range(count):
        name = string()
        shape = tuple(reversed(scalars("Q", scalar("I"))))
        kind = gguf.GGMLQuantizationType(scalar("I"))
        if name in found or not shape or 0 in shape or shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            raise ValueError(f"tensor {name} of {kind.name} and shape {shape}: impossible or twice")
        found[name] = (kind, shape, scalar("Q"))
    alignment = metadata.get("general.alignment", 32)
    front = math.ceil(file.tell() / alignment) * alignment
    return metadata, {
        name: Tensor(kind, shape, front + start) for name, (kind, shape, start) in found.items()
    }
