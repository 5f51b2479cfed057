"""A training run from its settings to a head on disk."""

import json
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import specjax
from specjax.checkpoints.head_export import save_head
from specjax.models.heads import EagleHead
from specjax.models.transformer import Transformer
from training.checkpoints import RunCheckpoints
from training.config import TrainConfig
from training.data import batches, open_sequences, read_summary
from training.heads import is_trained, make_head
from training.logs import RunLog, plot_run
from training.parameters import split
from training.sharding import make_mesh, place_head, place_target
from training.source import Source
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
    mesh = None
    if config.data_parallel * config.model_parallel > 1:
        mesh = make_mesh(config.data_parallel, config.model_parallel)
        target = place_target(target, mesh)
    source = Source(config, target, summary, head.config.taps, console, mesh)
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
        mesh=mesh,
    )
    state = TrainState(params=params, optimizer=step.optimizer.init(params), update=jnp.int32(0))
    if mesh is not None:
        state, frozen = place_head((state, frozen), mesh)
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
