"""A training run from its settings to a head on disk."""

import gc
import hashlib
import json
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import specjax
from specjax.checkpoints.head_export import save_head
from specjax.generate import check_prompts
from specjax.models.heads import Head
from specjax.models.transformer import Transformer
from training.checkpoints import RunCheckpoints
from training.config import TrainConfig
from training.data import Summary, batches, read_summary
from training.evaluation import decode_workloads
from training.features import without_layers
from training.heads import is_trained, make_head
from training.logs import RunLog, plot_run, read_log
from training.p_eagle import layout
from training.parameters import split
from training.recipes import Eagle3Recipe, PEagleRecipe, Recipe, Tally
from training.sharding import make_mesh, place_head, place_target
from training.source import Source
from training.step import Step, TrainState, make_optimizer

# Settings that may change between the parts of one run.
FREE = ("output", "log_every", "evaluate_every", "save_every", "decode_prompts", "decode_tokens")
FREE += ("decode_every", "feature_folder", "data_parallel", "model_parallel", "accumulate")
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

    head: Head
    folder: Path
    updates: int
    simulated_length: float


def train(
    config: TrainConfig,
    *,
    target: Transformer | None = None,
    stop_token_ids: Sequence[int] | None = None,
    workloads: Mapping[str, Sequence[Sequence[int]]] = MappingProxyType({}),
    console: Console | None = None,
) -> Result:
    """Trains a head, or goes on with a run that was interrupted.

    Args:
      config: the run.
      target, stop_token_ids: the model and its stop tokens, where they are not to be loaded from `config.target`.
      workloads: held-out prompts as token ids, by name, that are decoded every `config.decode_every` updates.
      console: where it is shown.

    SIGTERM saves and ends with `TrainingStopped`. Started again, however it ended, a run reaches bit for bit the
    parameters that it would have had.

    Raises:
      ValueError: settings that do not fit the target, the data or what lies in the output folder.
      TrainingStopped: interrupted; a loss that is no number, or stalled: the last good checkpoint is kept.
      OSError: no room for features or a checkpoint; the checkpoints before it are kept.
    """
    console = console or Console(highlight=False)
    # the frozen target computes as the head does
    dtype = config.compute_dtype and jnp.dtype(config.compute_dtype)
    model = specjax.load_target(config.target, dtype=dtype) if target is None else target
    if stop_token_ids is None:
        stop_token_ids = specjax.load_tokenizer(config.target).stop_token_ids
    if config.decode_every and not workloads:
        raise ValueError(
            f"workloads must be given to decode every {config.decode_every} updates, got none"
        )
    for prompts in workloads.values():
        check_prompts(model, prompts, config.decode_tokens)
    summary = read_summary(config.data)
    check_data(config, model, summary, console)
    head = make_head(config, model, summary, stop_token_ids)
    ids = head.target_ids
    if ids is not None:
        share = summary.coverage(np.asarray(ids))
        console.print(f"draft vocabulary of {len(ids)} tokens covers {share:.2%} of what is wanted")
    data = batches(config.data, summary.length, config.batch_size, config.seed)
    updates = max(1, round(config.epochs * (summary.sequences["train"] // config.batch_size)))
    updates = min(updates, config.max_updates or updates)
    checkpoints = RunCheckpoints(config.output, identity(config, updates, stop_token_ids))
    mesh = None
    if config.data_parallel * config.model_parallel > 1:
        mesh = make_mesh(config.data_parallel, config.model_parallel)
        model = place_target(model, mesh)
    dtype = config.compute_dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    params, frozen, structure = split(head, partial(is_trained, config.train_readout))
    step = Step(
        structure=structure,
        optimizer=make_optimizer(config, updates),
        recipe=make_recipe(config, summary),
        steps=config.steps,
        seed=config.seed,
        taps=head.config.taps,
        dtype=jnp.dtype(dtype),
        mesh=mesh,
    )
    state = step.start(params)
    if mesh is not None:
        state, frozen = place_head((state, frozen), mesh)
    try:
        source = Source(config, model, summary, head.config.taps, console, mesh)
        if config.features == "offline" and config.decode_every is None:
            model = without_layers(model)
            gc.collect()  # modules are cycles: their arrays would stay for a while
        first = checkpoints.latest or 0
        if first:
            state = checkpoints.load(state, data)
            console.print(f"going on after update {first}")
        log = RunLog(config.output, updates, first, console)
        run = Run(
            config, step, frozen, model, source, data, checkpoints, log, workloads, stop_token_ids
        )
        stopped = None
        try:
            with until_terminated() as terminated:
                state = run.go(state, updates, terminated)
        except TrainingStopped as error:
            stopped = error
        finally:
            log.close()
        checkpoints.wait()
        plot_run(config.output)
        best = checkpoints.best
        if best is None:
            raise stopped or RuntimeError("no update was evaluated")
        head = structure.join(checkpoints.load(state, update=best[0]).params, frozen)
        save_head(head, config.output / "head")
        if stopped is not None:
            raise stopped
    finally:
        checkpoints.close()
    return Result(head, config.output / "head", int(state.update), best[1])


def make_recipe(config: TrainConfig, summary: Summary) -> Recipe:
    """What the run minimises."""
    if config.recipe != "p_eagle":
        return Eagle3Recipe(config.steps, config.step_decay, config.objective)
    density = summary.wanted["train"] / (summary.sequences["train"] * summary.length)
    shape = layout(
        summary.length, config.steps, config.keep, config.keep_least, density, config.partitions
    )
    return PEagleRecipe(shape, config.objective, config.partitions)


def check_data(
    config: TrainConfig, target: Transformer, summary: Summary, console: Console
) -> None:
    """Raises ValueError if a run cannot be made of the data."""
    if summary.vocabulary and max(summary.vocabulary) >= target.vocab_size:
        raise ValueError(f"data {config.data} has token ids outside the target's vocabulary")
    if not summary.sequences["valid"]:
        raise ValueError(
            f"data {config.data} has no validation sequences; prepare it with a valid_share above 0"
        )
    if summary.length > target.context_length:
        raise ValueError(
            f"data {config.data} has sequences of {summary.length} tokens, the target's context is {target.context_length}"
        )
    mask = config.mask_token_id
    if mask is not None and (count := summary.vocabulary.get(mask, 0)):
        console.print(
            f"mask_token_id {mask} occurs {count} times in the data; take one that never does"
        )
    if summary.source != config.target:
        console.print(f"the data was prepared for {summary.source}, the target is {config.target}")


def identity(config: TrainConfig, updates: int, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """What makes a run the same run: its settings, and the content of its data."""
    # P-EAGLE draws its anchors for every part of a batch
    bound = ("accumulate",) if config.recipe == "p_eagle" else ()
    kept = {k: v for k, v in asdict(config).items() if k not in FREE or k in bound}
    dataset = hashlib.sha256((config.data / "dataset.json").read_bytes()).hexdigest()
    kept |= {"updates": updates, "dataset": dataset, "stop_token_ids": list(stop_token_ids)}
    return json.loads(json.dumps(kept, default=str))


@dataclass(frozen=True)
class Run:
    """What the updates of a run need beside the state."""

    config: TrainConfig
    step: Step
    frozen: Any
    target: Transformer
    source: Source
    data: Iterator
    checkpoints: RunCheckpoints
    log: RunLog
    workloads: Mapping[str, Sequence[Sequence[int]]]
    stop_token_ids: Sequence[int]

    def go(self, state: TrainState, updates: int, terminated: threading.Event) -> TrainState:
        """Updates until the last, logged, evaluated and saved.

        Raises:
          TrainingStopped: see `train`.
        """
        config, update = self.config, int(state.update)
        losses = [r["loss"] for r in read_log(config.output) if r["kind"] == "valid"]
        began, seen = time.perf_counter(), 0
        while update < updates:
            rows = next(self.data)
            batch, features = self.source.parts(rows, config.accumulate)
            state, report = self.step.update(state, self.frozen, self.target, batch, features)
            update, seen = update + 1, seen + rows["tokens"].size
            last = update == updates
            evaluating = last or update % config.evaluate_every == 0
            ending = terminated.is_set()
            saving = evaluating or ending or update % config.save_every == 0
            if last or update % config.log_every == 0:
                speed = seen / (time.perf_counter() - began)
                self.log.add("train", update, {**report.figures(), "tokens_per_second": speed})
            if (saving or update % config.log_every == 0) and int(state.skipped):
                raise TrainingStopped(
                    f"the loss or its gradients are no numbers at update {update} or shortly before; the checkpoint of "
                    f"update {self.checkpoints.latest or 0} is kept. A new run with a smaller learning_rate or clip may "
                    "help; start_from takes up the head of this one"
                )
            length = None
            if evaluating:
                figures = self.evaluate(state)
                length = figures["simulated_length"]
                self.log.add("valid", update, figures)
                losses.append(figures["loss"])
            if saving:
                self.checkpoints.save(update, state, self.data, length)
            if config.decode_every and update % config.decode_every == 0 and not ending:
                self.log.add("decode", update, self.decode(state))
                began, seen = time.perf_counter(), 0
            if ending and not last:
                self.checkpoints.wait()
                raise TrainingStopped(
                    f"terminated; update {update} is saved, and the same command goes on from there"
                )
            if not last and min(losses[:-STALLED], default=math.inf) <= min(
                losses[-STALLED:], default=0
            ):
                self.checkpoints.wait()
                best = self.checkpoints.best
                raise TrainingStopped(
                    f"the validation loss has not improved for {STALLED} evaluations; the best head is that of update "
                    f"{best[0] if best else update}"
                )
            if evaluating:
                began, seen = time.perf_counter(), 0
        return state

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Loss and acceptance over the validation sequences."""
        total, tally = 0.0, None
        for batch, features in self.source.validation():
            report = self.step.evaluate(state.params, self.frozen, self.target, batch, features)
            total += float(report.loss) * float(report.tally.counted[0])
            tally = report.tally if tally is None else jax.tree.map(jnp.add, tally, report.tally)
        assert isinstance(tally, Tally)
        return {"loss": total / max(float(tally.counted[0]), 1.0), **tally.figures()}

    def decode(self, state: TrainState) -> dict[str, Any]:
        """Tokens a pass in real decoding, greedily, on average and by workload; and what stood by position."""
        head = self.step.structure.join(state.params, self.frozen)
        found = decode_workloads(
            self.target,
            specjax.head_drafter(head, self.config.steps),
            self.workloads,
            max_new_tokens=self.config.decode_tokens,
            stop_token_ids=self.stop_token_ids,
        )
        whole = found.pop("all")
        return {
            "mean_acceptance_length": whole["mean_over_workloads"],
            "acceptance_per_position": whole["acceptance_per_position"],
            **{name: row["mean_acceptance_length"] for name, row in found.items()},
        }


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
