"""What speculation costs and gains, on this machine, in one run.

python scripts/benchmark.py --prompts prompts.jsonl --json results.json --plots plots

Speeds are ratios of measurements taken in turn in one process: the machines are shared, and absolute figures drift.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import tyro
from benchmarking import (
    distribution,
    gpu,
    growth,
    heads,
    peers,
    plots,
    rounds,
    serving,
    training,
    workloads,
)
from common import (
    DrafterName,
    OtherDrafter,
    check_room,
    choose_workloads,
    describe_device,
    encode_workloads,
    make_drafter,
    use_compilation_cache,
)
from rich.console import Console
from rich.markup import escape

import specjax
from specjax.checkpoints.sources import built_in_heads
from specjax.drafters.base import NoDrafter

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
Section = Literal[
    "curve",
    "split",
    "lookup",
    "workloads",
    "heads",
    "law",
    "peers",
    "batch",
    "growth",
    "compile",
    "training",
    "gpu",
]
DEFAULT: tuple[Section, ...] = ("curve", "split", "lookup", "workloads", "law", "peers", "batch")
HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Options:
    """Benchmark speculative decoding.

    Attributes:
      target: a built-in name, a Hugging Face folder or hub id, or a .gguf file.
      sections: `curve` (cost of a pass and of a round by width), `split` (what drafting, verifying and the rest of a
        round take), `lookup` (cost of a proposal over a long history), `workloads` (drafters by workload, and the limits
        that oracles set), `heads` (trained heads by number of drafts, side by side), `law` (sampled text against plain decoding's, by chi-square), `peers` (other engines on the
        same work), `batch` (a stream through more and more slots), `growth` (time and memory against context, rows,
        vocabulary and drafts), `compile` (first call, second process), `training` (an EAGLE-3 head beside speculators'
        trainer, and its growth; on the CPU), `gpu` (an accelerator at a large model's shapes, in ten minutes, without the
        target).
      prompts: JSON lines with `workload` and `turns` or `prompt`.
      workloads: of the prompts; by default all.
      drafters: which to compare.
      draft_model: source of the draft model that `draft-model`, and a peer's, draft with.
      exit_layer: layers that `early-exit`, and a peer's, draft with.
      head: folder or hub id of the head that `head` and `hybrid-head` draft with.
      heads: of the section of that name; by default those that come along.
      temperatures: of the workloads and heads.
      oracles: whether to compute the limits of the workloads, which takes one more plain decoding for every drafter.
      limit: prompts per workload at most.
      max_new_tokens: per prompt of the workloads; at most 128 of them elsewhere.
      batches: slots of the streams.
      contexts: cache slots that growth is measured at.
      samples: of each prompt for the law.
      draft_vocab_size: of the heads that are trained.
      sequences: of a training batch.
      lengths: tokens of a training sequence; growth is measured from half the least to twice the most.
      training_types: of the products in training; processors without bfloat16 arithmetic take minutes for an update.
      gpu_shapes: of the model with random weights; `tiny` tries the section anywhere.
      repeats: measurements of a cost, of which the median is reported.
      turns: how often workloads and heads are decoded, of which the median counts. With few prompts more than once: a
        program sets up each width when it first runs, which takes as long as many tokens.
      json: write every figure to this file.
      plots: draw the figures into this folder.
    """

    target: str = "smollm2-135m-instruct"
    sections: tuple[Section, ...] = DEFAULT
    prompts: Path = HERE / "prompts.jsonl"
    workloads: tuple[str, ...] = ()
    drafters: tuple[DrafterName | OtherDrafter, ...] = ("ngram", "suffix", "adaptive")
    draft_model: str | None = None
    exit_layer: int | None = None
    head: str | None = None
    heads: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    oracles: bool = True
    limit: int = 8
    max_new_tokens: int = 1024
    batches: tuple[int, ...] = (1, 4, 16, 64)
    contexts: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    samples: int = 256
    draft_vocab_size: int = 8192
    sequences: int = 4
    lengths: tuple[int, ...] = (512, 1024)
    training_types: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    gpu_shapes: gpu.ShapeName = "llama-8b"
    repeats: int = 3
    turns: int = 1
    json: Path | None = None
    plots: Path | None = None

    def __post_init__(self):
        numbers = ("limit", "max_new_tokens", "samples", "repeats", "turns", "batches", "contexts")
        numbers += ("draft_vocab_size", "sequences", "lengths")
        for name in numbers:
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            if not values or min(values) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.turns % 2 == 0:
            raise ValueError(f"turns must be odd, to have a median, got {self.turns}")
        if not self.temperatures or not all(0 <= t < float("inf") for t in self.temperatures):
            raise ValueError(f"temperatures must be numbers >= 0, got {self.temperatures}")
        if not self.drafters:
            raise ValueError("drafters must name at least one, got none")
        if self.plots is not None and find_spec("matplotlib") is None:
            raise ValueError("plots need matplotlib: pip install 'specjax[plot]'")
        if "growth" in self.sections and len(set(self.contexts)) < 3:
            raise ValueError(
                f"contexts must be at least three, to be off a line, got {self.contexts}"
            )
        if "law" in self.sections and self.samples < distribution.LEAST:
            raise ValueError(f"samples must be at least {distribution.LEAST}, got {self.samples}")
        if min(self.lengths) < 16:
            raise ValueError(f"lengths must be at least 16 tokens, got {self.lengths}")


class Benchmark:
    """The sections that need a target, a method each, which returns its part of the report; errors are added to a list,
    and `report` is given a long section's figures as they come."""

    def __init__(
        self,
        options: Options,
        errors: list[str],
        report: Callable[[str, Any], None] = lambda *_: None,
    ):
        self.options, self.report = options, report
        self.target = specjax.load_target(options.target)
        self.tokenizer = specjax.load_tokenizer(options.target)
        self.by_workload = encode_workloads(options.prompts, self.tokenizer, options.limit)
        if options.workloads:
            self.by_workload = choose_workloads(self.by_workload, options.workloads)
        most = self.target.context_length
        new = options.max_new_tokens if "workloads" in options.sections else self.short
        check_room(self.by_workload, new, most)
        if "growth" in options.sections and max(options.contexts) > most:
            raise ValueError(
                f"contexts must be at most the target's {most}, got {options.contexts}"
            )
        self.drafters = {
            name: NoDrafter()
            if name == "none"
            else make_drafter(
                name,
                None,
                draft_model=options.draft_model,
                exit_layer=options.exit_layer,
                head=options.head,
                target=self.target,
            )
            for name in options.drafters
        }
        self.errors = errors
        self._curve: dict[str, Any] | None = None

    def prompts(self, per_workload: int) -> list[list[int]]:
        """The first prompts of every workload."""
        return list(chain.from_iterable(p[:per_workload] for p in self.by_workload.values()))

    @property
    def short(self) -> int:
        """New tokens where speed alone is measured."""
        return min(self.options.max_new_tokens, 128)

    def curve(self) -> dict[str, Any]:
        if self._curve is None:
            widest = max(drafter.num_draft for drafter in self.drafters.values())
            self._curve = rounds.measure_curve(self.target, self.options.repeats, longest=widest)
            console.print(rounds.curve_table(self._curve))
        return self._curve

    def split(self) -> dict[str, Any]:
        result = rounds.measure_split(self.target, self.drafters, self.prompts(1)[0])
        console.print(rounds.split_table(result))
        return result

    def lookup(self) -> dict[str, float]:
        result = rounds.measure_lookup(self.target, self.options.repeats)
        console.print(rounds.lookup_table(result))
        return result

    def workloads(self) -> dict[str, Any]:
        """By temperature."""
        curve, found = rounds.relative(self.curve()), {}
        for temperature in self.options.temperatures:
            result = workloads.measure_workloads(
                self.target,
                self.by_workload,
                self.drafters,
                temperature=temperature,
                max_new_tokens=self.options.max_new_tokens,
                stop_token_ids=self.tokenizer.stop_token_ids,
                curve=curve,
                oracles=self.options.oracles,
                turns=self.options.turns,
                console=console,
            )
            at = f"temperature {temperature:g}"
            console.print(workloads.workload_table(result, f"Workloads at {at}"))
            console.print(workloads.position_table(result, f"Drafts that stood at {at}"))
            if temperature == 0:
                differ = workloads.identity_errors(result)
                if self.target.dtype == jnp.float32:
                    self.errors += differ
                else:  # where two logits are the same, a wide pass may round them otherwise than a narrow one
                    console.print(*(f"{d} (in {self.target.dtype})" for d in differ), sep="\n")
            found[f"{temperature:g}"] = result
        return found

    def heads(self) -> dict[str, Any]:
        names = self.options.heads or tuple(built_in_heads())
        result = heads.measure_heads(
            self.target,
            self.by_workload,
            {name: specjax.load_head(name, self.target) for name in names},
            temperatures=self.options.temperatures,
            max_new_tokens=self.short,
            stop_token_ids=self.tokenizer.stop_token_ids,
            curve=rounds.relative(self.curve()),
            turns=self.options.turns,
            console=console,
            report=partial(self.report, "heads"),
        )
        for table in heads.head_tables(result):
            console.print(table)
        return result

    def law(self) -> list[dict[str, Any]]:
        samples = self.options.samples
        prompts = sorted(self.prompts(1), key=len)[-2:]  # the longest, in which look-up finds most
        rows = distribution.measure_law(self.target, prompts, self.drafters, samples=samples)
        console.print(distribution.law_table(rows, samples))
        self.errors += distribution.law_errors(rows)
        if not any(row["degrees"] for row in rows):
            self.errors.append(
                "the law was not tested: every sample was the same; ask for more samples"
            )
        return rows

    def peers(self) -> dict[str, Any]:
        options = self.options
        entry = peers.Entry(
            options.target, os.cpu_count() or 1, options.draft_model, options.exit_layer
        )
        others, skipped = peers.make_peers(entry)
        own = {"specjax": None} | {f"specjax, {n}": d for n, d in self.drafters.items()}
        engines = {n: peers.specjax_engine(self.target, d) for n, d in own.items()}
        result, failed = peers.measure_peers(
            engines, others, self.prompts(1), max(2, self.short), options.repeats
        )
        skipped |= failed
        console.print(peers.peer_table(result, max(2, self.short), self.target.dtype))
        for name, reason in skipped.items():
            console.print(f"{name} skipped: {reason}")
        return {"engines": result, "skipped": skipped}

    def batch(self) -> dict[str, Any]:
        result = serving.measure_batches(
            self.target,
            self.prompts(4),
            self.drafters,
            sizes=self.options.batches,
            max_new_tokens=self.short,
            stop_token_ids=self.tokenizer.stop_token_ids,
        )
        console.print(serving.batch_table(result))
        return result

    def growth(self) -> dict[str, Any]:
        vocabulary = self.target.vocab_size
        result = growth.measure_growth(
            self.target,
            repeats=self.options.repeats,
            contexts=self.options.contexts,
            batches=(1, 2, 4, 8, 16),
            vocabularies=[vocabulary // 4, vocabulary // 2, vocabulary, vocabulary * 2],
        )
        console.print(growth.growth_table(result))
        return result

    def compile(self) -> dict[str, float]:
        result = growth.measure_processes(self.options.target)
        console.print(growth.process_table(result))
        return result


def train(options: Options, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The section of training; it loads the target in processes of its own. `report` is given what was found so far."""

    def tell(found: dict[str, Any]) -> None:
        dtype, by_length = list(found["trainers"].items())[-1]
        length, trainers = list(by_length.items())[-1]
        speeds = (f"{name} {x['tokens_per_second']:.0f}" for name, x in trainers.items())
        console.print(f"{dtype}, {length} tokens a sequence: tokens/s {', '.join(speeds)}")
        report(found)

    lengths = sorted(options.lengths)
    growing = [lengths[0] // 2, *lengths, 2 * lengths[-1]]
    result = training.measure_training(
        options.target,
        options.draft_vocab_size,
        count=options.sequences,
        lengths=lengths,
        growing_counts=(1, 2, 4),
        growing_lengths=growing,
        dtypes=options.training_types,
        repeats=options.repeats,
        report=tell,
    )
    for table in training.training_tables(result, options.sequences):
        console.print(table)
    for name, reason in result["skipped"].items():
        console.print(f"{name} skipped: {reason}")
    return result


def main(options: Options) -> None:
    use_compilation_cache()
    report: dict[str, Any] = {"target": options.target, "device": describe_device(), "errors": []}
    console.print(f"[bold]{options.target}[/] on {describe_device()}")

    def add(section: str, found: Any) -> None:
        report[section] = found
        if options.json is not None:  # what was measured is not lost with what comes after it
            options.json.write_text(json.dumps(report, indent=1))

    own = [section for section in options.sections if section not in ("training", "gpu")]
    if own:
        benchmark = Benchmark(options, report["errors"], add)
        for section in own:
            add(section, getattr(benchmark, section)())
    if "training" in options.sections:
        add("training", train(options, partial(add, "training")))
    if "gpu" in options.sections:
        add("gpu", gpu.measure_gpu(options.gpu_shapes, options.repeats, console))
    if options.plots is not None:
        for file in plots.write_plots(report, options.plots):
            console.print(f"drew {file}")
    if report["errors"]:
        raise ValueError("\n".join(report["errors"]))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except (ValueError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        sys.exit(1)
