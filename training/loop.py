"""A training run from its settings to a head on disk."""

import json
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import Progress

import specjax
from specjax.checkpoints.head_export import save_head
from specjax.checkpoints.heads import load_head
from specjax.models.config import LayerConfig
from specjax.models.heads import EagleHead, HeadConfig, check_head, default_taps
from specjax.models.transformer import Transformer
from training.checkpoints import RunCheckpoints
from training.config import TrainConfig
from training.data import SPLITS, Summary, batches, open_sequences, read_summary
from training.eagle3 import Batch
from training.features import FeatureFile, check_features, feature_bytes, write_features
from training.logs import RunLog, plot_run
from training.parameters import split
from training.step import Step, Tally, TrainState, make_optimizer

# Settings that may change between the parts of one run.
FREE = ("output", "log_every", "evaluate_every", "save_every", "decode_prompts", "decode_tokens")
FREE += ("feature_folder", "data_parallel", "model_parallel", "accumulate")
STALLED = 12  # evaluations without a better loss that end a run


class TrainingStopped(RuntimeError):
    """A run that ended before its time; the message says why, and what was kept."""


@dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
      head: the best head.
      folder: where it was written, for `load_head`.
      updates: done.
      simulated_length: of the best head on the validation sequences.
    """

    head: EagleHead
    folder: Path
    updates: int
    simulated_length: float


def new_head(config: TrainConfig, target: Transformer, ids: np.ndarray | None) -> EagleHead:
    """A head for a target: random layers, the target's rows as vocabulary.

    Args:
      ids: int32[Vd], the draft vocabulary; None is the target's.
    """
    c = target.config
    taps = default_taps(c.num_layers) if config.taps is None else config.taps
    shape = HeadConfig(
        decoder=replace(
            c,
            family="llama",
            layers=(LayerConfig(),) * config.num_layers,
            ropes=c.ropes[:1],
            mlp_size=config.mlp_size or c.mlp_size,
            tied=False,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
            post_norms=False,
            activation="silu",
            embedding_scale=1.0,
            attention_scale=None,
            attention_softcap=None,
            logit_softcap=None,
            num_experts=0,
            rotary_dim=None,
        ),
        target_hidden_size=c.hidden_size,
        draft_vocab_size=c.vocab_size if ids is None else len(ids),
        taps=tuple(taps),
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )
    check_head(shape, target)
    head = EagleHead(shape, rngs=nnx.Rngs(config.seed))
    rows = target.head[...] if ids is None else target.head[...][:, ids]
    head.readout.head = nnx.Param(rows.astype(jnp.float32))
    if ids is not None:
        head.ids = nnx.Variable(jnp.asarray(ids))
    return head


def make_head(
    config: TrainConfig, target: Transformer, summary: Summary, stops: Sequence[int]
) -> EagleHead:
    """The head that a run starts from."""
    if config.start_from is not None:
        return load_head(config.start_from, target, dtype=jnp.float32)
    size = config.draft_vocab_size
    whole = size in (0, target.vocab_size)
    return new_head(config, target, None if whole else summary.draft_vocabulary(size, stops))


def train(
    config: TrainConfig,
    *,
    target: Transformer | None = None,
    stop_token_ids: Sequence[int] | None = None,
    console: Console | None = None,
) -> Result:
    """Trains a head, or goes on with a run that was interrupted.

    Args:
      config: the run.
      target, stop_token_ids: the model and its stop tokens, where they are not to be loaded from `config.target`.
      console: where it is shown.

    SIGTERM saves and ends with `TrainingStopped`. Started again, however it ended, a run reaches bit for bit the
    parameters that it would have had.

    Raises:
      ValueError: settings that do not fit the target, the data or what lies in the output folder.
      TrainingStopped: interrupted; a loss that is no number, or stalled: the last good checkpoint is kept.
      OSError: no room for features or a checkpoint.
    """
    console = console or Console(highlight=False)
    if target is None:
        target = specjax.load_target(config.target)
    if stop_token_ids is None:
        stop_token_ids = specjax.load_tokenizer(config.target).stop_token_ids
    summary = read_summary(config.data)
    if summary.vocabulary and max(summary.vocabulary) >= target.vocab_size:
        raise ValueError(f"data {config.data} has token ids outside the target's vocabulary")
    head = make_head(config, target, summary, stop_token_ids)
    ids = head.target_ids
    if ids is not None:
        share = summary.coverage(np.asarray(ids))
        console.print(f"draft vocabulary of {len(ids)} tokens covers {share:.2%} of what is wanted")
    sequences = open_sequences(config.data, "train", summary.length)
    per_epoch = len(sequences) // config.batch_size
    updates = max(1, round(config.epochs * per_epoch))
    updates = min(updates, config.max_updates or updates)
    source = Source(config, target, summary, head.config.taps, console)
    trained = partial(is_trained, config.train_readout)
    dtype = config.compute_dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    params, frozen, structure = split(head, trained)
    step = Step(
        structure=structure,
        optimizer=make_optimizer(config, updates),
        steps=config.steps,
        step_decay=config.step_decay,
        objective=config.objective,
        taps=head.config.taps,
        dtype=jnp.dtype(dtype),
    )
    state = TrainState(params=params, optimizer=step.optimizer.init(params), update=jnp.int32(0))
    kept = {k: v for k, v in asdict(config).items() if k not in FREE}
    identity = json.loads(json.dumps({**kept, "updates": updates}, default=str))
    checkpoints = RunCheckpoints(config.output, identity)
    data = batches(config.data, summary.length, config.batch_size, config.seed)
    try:
        first = checkpoints.latest or 0
        if first:
            state = checkpoints.load(state, data)
            console.print(f"going on after update {first}")
        log = RunLog(config.output, updates, first, console)
        try:
            with until_terminated() as terminated:
                state = _updates(
                    config,
                    step,
                    state,
                    frozen,
                    target,
                    source,
                    data,
                    checkpoints,
                    log,
                    updates,
                    terminated,
                )
        finally:
            log.close()
        checkpoints.wait()
        best = checkpoints.best
        assert best is not None
        params = checkpoints.load(state, update=best[0]).params
    finally:
        checkpoints.close()
    head = structure.join(params, frozen)
    save_head(head, config.output / "head")
    plot_run(config.output)
    return Result(head, config.output / "head", int(state.update), best[1])


def is_trained(readout: bool, name: str) -> bool:
    """Whether a parameter of a head is trained: all but the map of ids, and the vocabulary's rows if `readout` is off."""
    return name != "ids" and (readout or name != "readout.head")


def _updates(
    config: TrainConfig,
    step: Step,
    state: TrainState,
    frozen: Any,
    target: Transformer,
    source: "Source",
    data: Iterator,
    checkpoints: RunCheckpoints,
    log: RunLog,
    updates: int,
    terminated: threading.Event,
) -> TrainState:
    best_loss, waited, began, seen = math.inf, 0, time.perf_counter(), 0
    update = int(state.update)
    while update < updates:
        rows = next(data)
        batch, features = source.parts(rows, config.accumulate)
        state, report = step.update(state, frozen, target, batch, features)
        update, seen = update + 1, seen + rows["tokens"].size
        last = update == updates
        if update % config.log_every == 0 or last:
            loss = float(report.loss)
            spent = time.perf_counter() - began
            log.add(
                "train",
                update,
                {
                    "loss": loss,
                    **report.tally.figures(),
                    "norm": float(report.norm),
                    "tokens_per_second": seen / spent,
                },
            )
            if not math.isfinite(loss):
                checkpoints.wait()
                raise TrainingStopped(
                    f"the loss is {loss} at update {update}; the checkpoint of update {checkpoints.latest or 0} is kept. "
                    "A smaller learning_rate or clip may help"
                )
            began, seen = time.perf_counter(), 0
        length = None
        if update % config.evaluate_every == 0 or last:
            figures = evaluate(step, state, frozen, target, source)
            length = figures["simulated_length"]
            log.add("valid", update, figures)
            waited = 0 if figures["loss"] < best_loss - 1e-4 else waited + 1
            best_loss = min(best_loss, figures["loss"])
            began, seen = time.perf_counter(), 0
        ending = terminated.is_set()
        if update % config.save_every == 0 or length is not None or last or ending:
            checkpoints.save(update, state, data, length)
        if ending and not last:
            checkpoints.wait()
            raise TrainingStopped(
                f"terminated; update {update} is saved, and the same command goes on from there"
            )
        if waited >= STALLED and not last:
            checkpoints.wait()
            raise TrainingStopped(
                f"the validation loss has not improved for {waited} evaluations; the best checkpoint is that of "
                f"update {checkpoints.best}"
            )
    return state


def evaluate(
    step: Step, state: TrainState, frozen: Any, target: Transformer, source: "Source"
) -> dict[str, Any]:
    """Loss and acceptance over the validation sequences."""
    total, weight, tally = 0.0, 0.0, None
    for batch, features in source.validation():
        report = step.evaluate(state.params, frozen, target, batch, features)
        count = float(report.tally.counted[0])
        total, weight = total + float(report.loss) * count, weight + count
        tally = report.tally if tally is None else jax.tree.map(jnp.add, tally, report.tally)
    assert isinstance(tally, Tally)
    return {"loss": total / max(weight, 1.0), **tally.figures()}


class Source:
    """Batches with the target's states, computed in the step or read from disk.

    Args:
      config: of the run.
      target, summary: model and data.
      taps: of the head.
      console: where the writing of features is shown.
    """

    VALID = 64  # validation sequences that are used

    def __init__(
        self,
        config: TrainConfig,
        target: Transformer,
        summary: Summary,
        taps: tuple[int, ...],
        console: Console,
    ):
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
                "taps": list(taps),
                "sequences": len(sequences),
                "tokens": summary.tokens[part],
            }
            folder = root / part
            if not (folder / "features.json").is_file():
                need = feature_bytes(
                    len(sequences), summary.length, len(taps), target.config.hidden_size
                )
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
            self.files[part] = FeatureFile(folder, identity)
            check_features(target, sequences, self.files[part], taps)

    def _pair(self, part: str, rows: dict[str, np.ndarray]) -> tuple[Batch, Any]:
        batch = Batch(**{k: jnp.asarray(rows[k]) for k in ("tokens", "wanted", "document")})
        return batch, self.files[part].read(rows["index"]) if self.files else None

    def parts(self, rows: dict[str, np.ndarray], accumulate: int) -> tuple[Batch, Any]:
        """A batch as [M, B, T] arrays."""
        return jax.tree.map(
            lambda x: x.reshape(accumulate, -1, *x.shape[1:]), self._pair("train", rows)
        )

    def validation(self) -> Iterator[tuple[Batch, Any]]:
        """The validation sequences in batches of one size; what is left over is left out."""
        count = min(len(self.valid), self.VALID)
        for start in range(0, count - self.size + 1, self.size):
            rows = [self.valid[i] for i in range(start, start + self.size)]
            yield self._pair("valid", {k: np.stack([r[k] for r in rows]) for k in rows[0]})


@contextmanager
def until_terminated() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, in place of ending the process at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)
