"""gpt-oss's experts as its files hold them, stacked over experts and often in MXFP4, read as tensors of one expert.

E experts, D model width, F an expert's width. Two forms of a stack are public:

- plain: `gate_up_proj` [E, D, 2F] and `down_proj` [E, F, D], which is [E, in, out];
- MXFP4: `<stack>_blocks` uint8[E, out, in / 32, 16] and `<stack>_scales` uint8[E, out, in / 32].

In both, and in the biases `<stack>_bias` [E, out], outputs of gate and up alternate: gate, up, gate, ...

MXFP4 (OCP Microscaling Formats, version 1.0): 32 numbers of 4 bits share a power of two. A byte holds two, the earlier one
in its low half; a scale of s means 2 ** (s - 127), and 255 is no number.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from specjax.checkpoints.parts import EVERYTHING, parameter_parts, passed_over, tensor_shapes
from specjax.checkpoints.safetensors_folder import FLOATS, SafetensorsFolder
from specjax.checkpoints.weights import CheckpointError, check_tensors
from specjax.models.config import TransformerConfig

BLOCK = 32  # numbers that share a scale
BLOCKS, SCALES = "_blocks", "_scales"  # endings of names
NOT_A_NUMBER = 255  # as a scale
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")

# E2M1: a sign, two bits of exponent, one of mantissa
_POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NUMBERS = np.concatenate([_POSITIVE, -_POSITIVE])
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=1)  # of every byte
_FACTORS = np.ldexp(np.float32(1.0), np.arange(NOT_A_NUMBER) - 127)


def stored_types(name: str) -> Sequence[str]:
    """The types that a tensor of a gpt-oss file may have, in safetensors' spelling."""
    return ("U8",) if name.endswith((BLOCKS, SCALES)) else FLOATS


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers of MXFP4 blocks, exactly; scales above 252 take the larger ones out of float32's range, to infinity.

    Args:
      blocks: uint8[..., n, 16].
      scales: uint8[..., n], none of them 255.

    Returns:
      float32[..., 32 n].
    """
    numbers = _PAIRS[blocks].reshape(*scales.shape, BLOCK)
    numbers *= _FACTORS[scales][..., None]
    return numbers.reshape(*scales.shape[:-1], -1)


@dataclass(frozen=True)
class Place:
    """Where an expert's tensor lies.

    Attributes:
      stack: name of the stack, without the ending of its blocks and scales.
      expert: which.
      first, step: the outputs first, first + step, ... are its own.
    """

    stack: str
    expert: int
    first: int
    step: int


def _place(name: str) -> Place | None:
    """Of a tensor in the names of `parameter_parts`; None for all that are not an expert's."""
    match = EXPERT.fullmatch(name)
    if match is None:
        return None
    experts, number, which, kind = match.groups()
    ending = "_bias" if kind == "bias" else ""
    if which == "down":
        return Place(f"{experts}.down_proj{ending}", int(number), 0, 1)
    return Place(f"{experts}.gate_up_proj{ending}", int(number), int(which == "up"), 2)


def file_shapes(
    config: TransformerConfig, quantised: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """The tensors of a gpt-oss folder in the file's own names.

    Args:
      config: of the model.
      quantised: the stacks that are in MXFP4.
    """
    shapes = {}
    for name, shape in tensor_shapes(parameter_parts(config)).items():
        place = _place(name)
        if place is None:
            shapes[name] = shape
            continue
        front = (config.num_experts, place.step * shape[0])
        if len(shape) == 1:
            shapes[place.stack] = front
        elif place.stack in quantised:
            shapes[place.stack + BLOCKS] = (*front, shape[1] // BLOCK, BLOCK // 2)
            shapes[place.stack + SCALES] = (*front, shape[1] // BLOCK)
        else:
            shapes[place.stack] = (front[0], shape[1], front[1])
    return shapes


class StackedExperts:
    """A gpt-oss folder's tensors with those of each expert by itself, in Qwen3-MoE's names and as [out, in].

    Of a stack no more is in memory than the rows that are asked for.

    Args:
      file: opened with `stored_types`.
      config: of the model.
      where: the folder's name, for messages.

    Raises:
      CheckpointError: tensors that are missing, unknown or of the wrong shape; they are named as the file names them. In
        `read`: a scale that is no number.
    """

    def __init__(self, file: SafetensorsFolder, config: TransformerConfig, where: str):
        self._file, self._where = file, where
        there = file.shapes
        ours = tensor_shapes(parameter_parts(config))
        self._places = {name: place for name in ours if (place := _place(name))}
        stacks = {place.stack for name, place in self._places.items() if len(ours[name]) > 1}
        packed = {stack for stack in stacks if {stack + BLOCKS, stack + SCALES} & there.keys()}
        # a stack that is not there at all is missed in the form that the others have
        self._quantised = packed | (stacks - there.keys() if packed else set())
        sizes = (config.hidden_size, config.expert_size)
        if self._quantised and any(size % BLOCK for size in sizes):
            raise CheckpointError(
                f"{where}: in MXFP4, hidden_size and intermediate_size must be multiples of "
                f"{BLOCK}; got {sizes[0]} and {sizes[1]}"
            )
        expected = file_shapes(config, self._quantised)
        ignored = partial(passed_over, config=config)
        check_tensors(expected, there, where, config.family, ignored)
        others = {name: shape for name, shape in there.items() if name not in expected}
        self.shapes = ours | others

    def read(self, name: str, rows: slice = EVERYTHING) -> np.ndarray:
        """Some rows of a tensor, in the file's own type or, from MXFP4, in float32."""
        place = self._places.get(name)
        if place is None:
            return self._file.read(name, rows)
        shape, stack = self.shapes[name], place.stack
        start, stop, _ = rows.indices(shape[0])
        one = slice(place.expert, place.expert + 1)
        outputs = slice(place.step * start, place.step * stop)
        own = slice(place.first, None, place.step)
        if len(shape) == 1:
            return self._file.read(stack, (one, outputs))[0, own]
        if stack not in self._quantised:
            return self._file.read(stack, (one, EVERYTHING, outputs))[0, :, own].T
        blocks, scales = (
            self._file.read(stack + ending, (one, outputs))[0, own] for ending in (BLOCKS, SCALES)
        )
        if (scales == NOT_A_NUMBER).any():
            raise CheckpointError(
                f"{self._where}: tensor {stack}{SCALES}: scales must be below {NOT_A_NUMBER}, "
                f"which is no number in MXFP4; got it in expert {place.expert}"
            )
        return dequantise(blocks, scales)
