"""One training run as data: a TOML file, or arguments of a command."""

import difflib
import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from training.losses import Objective

Recipe = Literal["eagle3", "p_eagle", "mtp"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run of a head. A file of a P-EAGLE or MTP run that leaves them out gets what was published, `PUBLISHED`.

    Attributes:
      recipe: `eagle3` (the training-time test), `p_eagle` (all drafts in one pass) or `mtp` (the training-time test of
        one more layer of the target's kind).
      target: a built-in name, a Hugging Face folder or hub id, or a .gguf file.
      data: folder that `scripts/prepare_data.py` wrote.
      output: folder of the run: checkpoints, logs, plot, and in the end the head.
      features: `online` passes the target over every batch; `offline` passes it over every sequence once and keeps the
        states on disk.
      feature_folder: where offline features lie; by default beside the data.
      draft_vocab_size: Vd, the most frequent tokens of the data; 0 is the whole vocabulary.
      num_layers: of the head.
      mlp_size: of the head; by default the target's.
      taps: layers that the head reads, counted as the layers entered; by default 2, L // 2, L - 3.
      norm_before_residual, norm_before_fc, fc_norm, norm_output: EAGLE-3's variants, all off in what every server loads.
      post_norm: whether an MTP module reads hidden states, the target's and its own, behind the final norms.
      train_embedding: whether the head has an embedding of its own, which starts as the target's and is trained.
      train_readout: whether the rows of the vocabulary, which start as the target's, are trained too.
      start_from: a built-in head's name or a head's folder to go on from. P-EAGLE may start from an EAGLE-3 head, and from one
        of its own without `markov_rank` or an embedding of its own. Its shape must be the one that is asked for here.
      mask_token_id: P-EAGLE's mask token: one that never occurs; its embedding is the target's.
      markov_rank: of P-EAGLE's correction by the draft before; 0 is none.
      partitions: parts of P-EAGLE's elements that pass one after the other, to save memory.
      steps: S, tokens drafted in training.
      keep, keep_least: P-EAGLE keeps a share max(keep ** d, keep_least) of the anchors to depth d.
      step_decay: factor on the loss of each further step.
      objective: see `training.losses.divergence`.
      optimizer: `adamw`, or `muon` for the matrices with AdamW for the rest.
      learning_rate: at its highest.
      muon_learning_rate: of the matrices under `muon`.
      warmup: share of all steps until then; from there it falls as a cosine.
      final_share: of the learning rate that is left in the end.
      weight_decay: of matrices.
      clip: largest norm of all gradients together.
      batch_size: sequences per update.
      accumulate: parts that a batch is cut into, one after the other on the device.
      epochs: passes over the data.
      max_updates: ends earlier; None does not.
      seed: of parameters and of the order of the data.
      log_every: updates between two lines of the log.
      evaluate_every: updates between two evaluations on the validation sequences.
      save_every: updates between two checkpoints, which is what a crash can lose.
      decode_prompts: JSON lines of prompts to decode at the end, by workload; None decodes nothing.
      decode_tokens: new tokens per prompt then.
      decode_every: updates between two greedy decodings of these prompts on the way; None decodes them at the end alone.
      compute_dtype: of matrices in the step; masters are float32. None: float32 on CPU, bfloat16 elsewhere.
      data_parallel, model_parallel: devices along which batches and head, and the target's layers, are split.
    """

    target: str
    data: Path
    output: Path
    recipe: Recipe = "eagle3"
    features: Literal["online", "offline"] = "online"
    feature_folder: Path | None = None
    draft_vocab_size: int = 8192
    num_layers: int = 1
    mlp_size: int | None = None
    taps: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    post_norm: bool = True
    train_embedding: bool = False
    train_readout: bool = True
    start_from: Path | None = None
    mask_token_id: int | None = None
    markov_rank: int = 0
    partitions: int = 1
    steps: int = 4
    keep: float = 0.8
    keep_least: float = 0.2
    step_decay: float = 0.8
    objective: Objective = "kl"
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    muon_learning_rate: float = 2e-2
    warmup: float = 0.03
    final_share: float = 0.05
    weight_decay: float = 0.0
    clip: float = 0.5
    batch_size: int = 8
    accumulate: int = 1
    epochs: float = 3.0
    max_updates: int | None = None
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 200
    save_every: int = 200
    decode_prompts: Path | None = None
    decode_tokens: int = 128
    decode_every: int | None = None
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    data_parallel: int = 1
    model_parallel: int = 1

    def __post_init__(self):
        for field in fields(self):
            if not _is_of(value := getattr(self, field.name), field.type):
                raise ValueError(f"{field.name} must be {_said(field.type)}; got {value!r}")
        whole = ("steps", "batch_size", "accumulate", "num_layers", "log_every", "save_every")
        whole += (
            "evaluate_every",
            "data_parallel",
            "model_parallel",
            "decode_tokens",
            "partitions",
        )
        for name in whole:
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if (self.recipe == "p_eagle") != (self.mask_token_id is not None):
            raise ValueError(
                f"mask_token_id must be given for p_eagle, and only for it; got {self.mask_token_id} for {self.recipe}"
            )
        if self.recipe != "p_eagle" and (self.markov_rank or self.partitions > 1):
            raise ValueError(
                f"markov_rank and partitions are p_eagle's; got {self.markov_rank} and {self.partitions} for {self.recipe}"
            )
        if self.recipe == "mtp" and (given := [name for name in VARIANTS if getattr(self, name)]):
            raise ValueError(f"{', '.join(given)}: an MTP module has no such switches")
        if self.recipe == "mtp" and (self.taps is not None or self.mlp_size is not None):
            raise ValueError("taps and mlp_size of an MTP module are the target's own; got others")
        if self.recipe == "p_eagle" and self.steps < 2:
            raise ValueError(f"steps must be at least 2 for p_eagle, got {self.steps}")
        if self.max_updates is not None and self.max_updates < 1:
            raise ValueError(f"max_updates must be at least 1, got {self.max_updates}")
        if self.decode_every is not None and (self.decode_every < 1 or self.decode_prompts is None):
            raise ValueError(
                f"decode_every must be at least 1, and needs decode_prompts; got {self.decode_every} "
                f"and {self.decode_prompts}"
            )
        if self.taps is not None and not self.taps:
            raise ValueError("taps must name at least one layer, got none")
        for name in ("learning_rate", "muon_learning_rate", "clip", "epochs", "step_decay"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("keep", "keep_least"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {value}")
        for name in ("warmup", "final_share"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
        for name in ("draft_vocab_size", "weight_decay", "markov_rank"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if self.batch_size % (self.accumulate * self.data_parallel):
            raise ValueError(
                f"batch_size must be a multiple of accumulate x data_parallel = "
                f"{self.accumulate * self.data_parallel}, got {self.batch_size}"
            )


def _said(kind: Any) -> str:
    """An annotation in words."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_said(option) for option in get_args(kind))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        return f"a list of {_said(get_args(kind)[0])}"
    if kind is type(None):
        return "left out"
    return "a finite number" if kind is float else str(kind.__name__)


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotation as `TrainConfig` has them; numbers are finite, and a name may stand for a path."""
    if get_origin(kind) in (Union, UnionType):
        return any(_is_of(value, option) for option in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(x, get_args(kind)[0]) for x in value)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind is Path:
        return isinstance(value, str | Path)
    return type(value) is kind


VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
PUBLISHED = {
    "p_eagle": {"num_layers": 4, "steps": 8, "train_embedding": True},
    "mtp": {"steps": 3, "step_decay": 0.6},
}
"""What a recipe's published heads have where they differ from EAGLE-3's (P-EAGLE: arXiv 2602.01469; FastMTP: 2509.18362)."""
PATHS = ("data", "output", "feature_folder", "start_from", "decode_prompts")


def read_config(path: Path, **overrides: Any) -> TrainConfig:
    """A run from a TOML file; `overrides` replace what it says.

    Raises:
      ValueError: keys that mean nothing, with what may have been meant, or values out of range.
    """
    try:
        row = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from error
    names = [field.name for field in fields(TrainConfig)]
    problems = []
    for key in row:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            problems.append(
                f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    if problems:
        raise ValueError("\n  ".join([f"{path}:", *problems]))
    row |= {name: value for name, value in overrides.items() if value is not None}
    row = PUBLISHED.get(str(row.get("recipe")), {}) | row
    if missing := [name for name in ("target", "data", "output") if name not in row]:
        raise ValueError(f"{path}: missing {', '.join(missing)}")
    for name in PATHS:
        if isinstance(row.get(name), str):
            row[name] = Path(row[name])
    if isinstance(row.get("taps"), list):
        row["taps"] = tuple(row["taps"])
    try:
        return TrainConfig(**row)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
