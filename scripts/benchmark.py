"""What speculation costs and gains, on this machine, in one run.

python scripts/benchmark.py --prompts prompts.jsonl --json results.json

Speeds are ratios of measurements taken in turn in one process: the machines are shared, and absolute figures drift.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import (
    DRAFTERS,
    DrafterName,
    OtherDrafter,
    describe_device,
    make_drafter,
    read_prompts,
    read_workloads,
    use_compilation_cache,
)
from peers import PEERS, Engine
from rich.console import Console
from rich.table import Table
from workloads import measure_workloads

import specjax
from specjax.decoding import decode, prefill
from specjax.drafters.base import Context, NoDrafter, Proposal
from specjax.generate import prepare
from specjax.sampling import Processors, make_keys
from specjax.trees import ladder
from specjax.tuning import time_pass, time_split

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
Section = Literal["curve", "plain", "lookup", "split", "batch", "workloads", "compile"]
HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Options:
    """Benchmark speculative decoding.

    Attributes:
      target: a built-in name, a Hugging Face folder or hub id, or a .gguf file.
      sections: `curve` (cost of a pass and of a round by width), `plain` (against other engines), `lookup` (cost of a
        proposal over a long history), `split` (what drafting, verifying and the rest of a round take), `batch` (a stream through one and through 16 slots), `workloads` (drafters by
        workload), `compile` (first call, second process).
      prompts: JSON lines with `workload` and `turns` or `prompt`.
      drafters: which to compare on the workloads.
      head: folder or hub id of the head that `head` and `hybrid-head` draft with.
      temperatures: at which.
      limit: prompts per workload at most.
      max_new_tokens: per prompt.
      repeats: measurements per figure; medians are reported.
      json: write every figure to this file.
    """

    target: str = "smollm2-135m-instruct"
    sections: tuple[Section, ...] = get_args(Section)
    prompts: Path = HERE / "prompts.jsonl"
    drafters: tuple[DrafterName | OtherDrafter, ...] = ("ngram", "suffix", "adaptive")
    head: str | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    limit: int = 8
    max_new_tokens: int = 1024
    repeats: int = 3
    json: Path | None = None


class Width(NoDrafter):
    """Proposes `width - 1` tokens at no cost: isolates what a round costs beside the target's pass."""

    def __init__(self, width: int, widest: int):
        self.width, self.widest = width, widest

    @property
    def num_draft(self) -> int:
        return self.widest - 1

    def propose(self, target, state, context: Context) -> tuple[Proposal, None]:
        batch = context.length.shape[0]
        return (
            Proposal(
                tokens=jnp.zeros((batch, self.num_draft), jnp.int32),
                length=jnp.full(batch, self.width - 1, jnp.int32),
            ),
            None,
        )


jax.tree_util.register_pytree_node(
    Width, lambda w: ((), (w.width, w.widest)), lambda aux, _: Width(*aux)
)


def measure_curve(target: Any, repeats: int, slots: int = 512, passes: int = 30) -> dict[str, Any]:
    """Milliseconds of a bare pass and of a whole round, by width, taken in turn."""
    widths = ladder(15)
    bare: dict[int, list[float]] = defaultdict(list)
    whole: dict[int, list[float]] = defaultdict(list)
    prompt = [1] * 100
    for attempt in range(repeats + 1):  # the first compiles
        for width in widths:
            bare_time = time_pass(target, width, slots=slots, passes=passes)
            drafter, state, chunk = prepare(
                target,
                [prompt],
                drafter=Width(width, widths[-1]),
                max_new_tokens=slots - 130,
                sampling=specjax.Sampling(),
                key=0,
                stop_token_ids=(),
            )
            state = jax.block_until_ready(prefill(target, drafter, state, chunk))
            began = time.perf_counter()
            jax.block_until_ready(decode(target, drafter, state, passes))
            whole_time = (time.perf_counter() - began) / passes
            if attempt:
                bare[width].append(1e3 * bare_time)
                whole[width].append(1e3 * whole_time)
    result = {"slots": slots, "pass_ms": {}, "round_ms": {}}
    table = Table(
        "width", "pass, ms", "relative", "round, ms", "round / pass", title="Verify curve"
    )
    base = float(np.median(bare[1]))
    for width in widths:
        one, full = float(np.median(bare[width])), float(np.median(whole[width]))
        result["pass_ms"][width], result["round_ms"][width] = one, full
        table.add_row(
            str(width), f"{one:.2f}", f"{one / base:.2f}", f"{full:.2f}", f"{full / one:.3f}"
        )
    console.print(table)
    return result


def measure_plain(target: Any, options: Options, tokenizer: specjax.Tokenizer) -> dict[str, Any]:
    """Plain greedy decoding against the peers, one prompt, in turn."""
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Tell me a long story."}])
    count, threads = min(options.max_new_tokens, 128), os.cpu_count() or 1

    def ours(prompt: list[int], count: int) -> tuple[list[int], float]:
        out = specjax.generate(target, [prompt], max_new_tokens=count)
        return out.tokens[0].tolist(), out.decode_seconds / count

    engines: dict[str, Engine] = {"specjax": ours}
    for name, make in PEERS.items():
        try:
            engines[name] = make(options.target, threads)
        except ImportError as error:
            console.print(f"peer {name} skipped: {error}")
    times: dict[str, list[float]] = defaultdict(list)
    outputs: dict[str, list[int]] = {}
    for attempt in range(options.repeats + 1):
        for name, engine in engines.items():
            outputs[name], seconds = engine(prompt, count)
            if attempt:
                times[name].append(seconds)
    table = Table(
        "engine", "tokens/s", "specjax is", "same tokens", title=f"Plain, batch 1, {target.dtype}"
    )
    result = {}
    own = float(np.median(times["specjax"]))
    for name, seconds in times.items():
        median = float(np.median(seconds))
        agree = next(
            (i for i, (a, b) in enumerate(zip(outputs[name], outputs["specjax"])) if a != b),  # noqa: B905
            count,
        )
        result[name] = {
            "tokens_per_second": 1 / median,
            "specjax_ratio": median / own,
            "same_tokens": agree,
        }
        table.add_row(
            name, f"{1 / median:.1f}", f"{median / own:.2f}x", f"first {agree} of {count}"
        )
    console.print(table)
    return result


def measure_lookup(target: Any, options: Options, history: int = 8192) -> dict[str, float]:
    """Milliseconds of one proposal of every look-up drafter over a history of `history` tokens, and its share of a pass."""
    tokens = np.random.default_rng(0).integers(0, 400, (1, history), np.int32)
    context = Context(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray([history - 64]),
        keys=make_keys(0, 1),
        processors=Processors(),
        seen=None,
    )
    drafters = {name: make_drafter(name, None) for name in DRAFTERS if name != "none"}
    calls = {}
    for name, drafter in drafters.items():
        propose = jax.jit(lambda state, context, d=drafter: d.propose(target, state, context))
        calls[name] = (propose, drafter.init(target, 1, history))
    times: dict[str, list[float]] = defaultdict(list)
    for attempt in range(options.repeats + 1):  # the first compiles
        for name, (propose, state) in calls.items():
            began = time.perf_counter()
            for _ in range(20):
                jax.block_until_ready(propose(state, context))
            if attempt:
                times[name].append(1e3 * (time.perf_counter() - began) / 20)
        spent = 1e3 * time_pass(target, 1)
        if attempt:
            times["pass"].append(spent)
    result = {name: float(np.median(spent)) for name, spent in times.items()}
    table = Table("drafter", "ms", "of a pass", title=f"Look-up over {history} tokens")
    for name in drafters:
        table.add_row(name, f"{result[name]:.2f}", f"{result[name] / result['pass']:.1%}")
    console.print(table)
    return result


def measure_split(
    target: Any, options: Options, tokenizer: specjax.Tokenizer
) -> dict[str, dict[str, float]]:
    """Milliseconds of the parts of a round, by drafter, on the first prompt."""
    prompt = tokenizer.encode_chat(read_prompts(options.prompts)[0].conversation)
    table = Table("drafter", "round, ms", "draft", "verify", "rest", title="Parts of a round")
    result = {}
    for name in ("none", *options.drafters):
        drafter = make_drafter(name, None, head=options.head, target=target)
        seconds = time_split(target, drafter, prompt)
        result[name] = {part: 1e3 * spent for part, spent in seconds.items()}
        shares = [f"{seconds[part] / seconds['round']:.1%}" for part in ("draft", "verify", "rest")]
        table.add_row(name, f"{result[name]['round']:.1f}", *shares)
    console.print(table)
    return result


def measure_batch(
    target: Any, options: Options, tokenizer: specjax.Tokenizer, slots: int = 16
) -> dict[str, float]:
    """Tokens per second through one slot and through many, refilled, plain."""
    workloads = read_workloads(options.prompts, options.limit).values()
    conversations = [c for some in workloads for c in some][:32]
    prompts = [tokenizer.encode_chat(c) for c in conversations]
    prompts = [p for p in prompts if len(p) < 400]
    result = {}
    for size in (1, slots):
        for _ in range(2):  # the first compiles
            began = time.perf_counter()
            done = list(
                specjax.generate_stream(
                    target,
                    prompts,
                    slots=size,
                    max_new_tokens=256,
                    stop_token_ids=tokenizer.stop_token_ids,
                )
            )
            seconds = time.perf_counter() - began
        result[str(size)] = sum(c.emitted for c in done) / seconds
    table = Table("slots", "tokens/s", "ratio", title=f"A stream of {len(prompts)} prompts, plain")
    for size, speed in result.items():
        table.add_row(size, f"{speed:.1f}", f"{speed / result['1']:.2f}x")
    console.print(table)
    return result


def measure_compile(options: Options) -> dict[str, float]:
    """Seconds of a first drafted `generate` call in a new process: nothing compiled, and everything kept."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "import specjax; from common import use_compilation_cache; use_compilation_cache()\n"
        "target = specjax.load_target(sys.argv[2])\n"
        "began = time.perf_counter()\n"
        "specjax.generate(target, [[1] * 40], drafter=specjax.NGram(), max_new_tokens=1)\n"
        "print(time.perf_counter() - began)\n"
    )
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first call", "second process"):
            done = subprocess.run(
                [sys.executable, "-c", code, str(HERE), options.target],
                env=os.environ | {"JAX_COMPILATION_CACHE_DIR": folder},
                capture_output=True,
                text=True,
                check=True,
            )
            result[name] = float(done.stdout.split()[-1])
    table = Table("", "seconds", title="Compilation of prefill and a five-width n-gram loop")
    for name, seconds in result.items():
        table.add_row(name, f"{seconds:.1f}")
    console.print(table)
    return result


def main(options: Options) -> None:
    use_compilation_cache()
    console.print(f"[bold]{options.target}[/] on {describe_device()}")
    report: dict[str, Any] = {"target": options.target, "device": describe_device()}
    target = specjax.load_target(options.target)
    tokenizer = specjax.load_tokenizer(options.target)
    if "curve" in options.sections:
        report["curve"] = measure_curve(target, options.repeats)
    if "plain" in options.sections:
        report["plain"] = measure_plain(target, options, tokenizer)
    if "lookup" in options.sections:
        report["lookup"] = measure_lookup(target, options)
    if "split" in options.sections:
        report["split"] = measure_split(target, options, tokenizer)
    if "batch" in options.sections:
        report["batch"] = measure_batch(target, options, tokenizer)
    if "workloads" in options.sections:
        times = report.get("curve") or measure_curve(target, 1)
        curve = {w: ms / times["pass_ms"][1] for w, ms in times["pass_ms"].items()}
        for temperature in options.temperatures:
            report[f"temperature {temperature:g}"] = measure_workloads(
                target,
                tokenizer,
                read_workloads(options.prompts, options.limit),
                options.drafters,
                temperature=temperature,
                max_new_tokens=options.max_new_tokens,
                curve=curve,
                console=console,
                head=options.head,
            )
    if "compile" in options.sections:
        report["compile"] = measure_compile(options)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except (ValueError, OSError) as error:
        console.print(f"[red]error:[/] {error}")
        sys.exit(1)
