"""How time, memory and compilation grow, and how far each is from the law that it should follow.

The laws: a pass costs a + b S in cache slots, a + b B in rows and a + b V in the vocabulary; what a round costs beside its
pass does not depend on the drafts K that were compiled for; decoding holds the bytes that its shapes say; a shape that was
compiled is never compiled again.
"""

import gc
import os
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import count_compilations
from flax import nnx
from rich.table import Table

import specjax
from benchmarking.rounds import time_round
from specjax.advice import estimate_memory
from specjax.generate import prepare
from specjax.models.transformer import Transformer
from specjax.tuning import time_pass

SCRIPTS = Path(__file__).resolve().parents[1]


def fit_line(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Least squares of y = start + slope x, and `off`, the largest |y / fit - 1|: how far y is from a line."""
    slope, start = np.polyfit(x, y, 1)
    fitted = start + slope * np.asarray(x)
    return {
        "start": float(start),
        "slope": float(slope),
        "off": float(np.max(np.abs(y / fitted - 1))),
    }


def fit_constant(y: Sequence[float], scale: float) -> dict[str, float]:
    """The mean of y, and `off`, the largest distance from it in units of `scale`."""
    start = float(np.mean(y))
    return {
        "start": start,
        "slope": 0.0,
        "off": float(np.max(np.abs(np.asarray(y) - start))) / scale,
    }


def in_turn(measure: Callable[[Any], float], points: Sequence[Any], repeats: int) -> list[float]:
    """Medians of `repeats` measurements at every point, in turn; one more, which compiles, is left out."""
    found: dict[Any, list[float]] = defaultdict(list)
    for attempt in range(repeats + 1):
        for point in points:
            value = measure(point)
            if attempt:
                found[point].append(value)
    return [float(np.median(found[point])) for point in points]


def row(law: str, unit: str, x: Sequence[int], y: Sequence[float], fit: Any) -> dict[str, Any]:
    """One law's measurements; `y` is in `unit`."""
    return {"law": law, "unit": unit, "x": list(x), "y": list(y), **fit}


def with_vocabulary(target: Transformer, size: int) -> Transformer:
    """A random model of the target's shapes, two layers deep, with a vocabulary of `size`."""
    config = replace(target.config, vocab_size=size, layers=target.config.layers[:2])
    return Transformer(config, dtype=target.dtype, rngs=nnx.Rngs(0))


def live_bytes() -> int:
    """Bytes of all arrays that are alive on the devices."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def peak_bytes() -> int:
    """The most that this process has held: of the device's memory where it tells, else of the host's."""
    statistics = jax.devices()[0].memory_stats()
    if statistics is not None:
        return int(statistics["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def held_bytes(target: Any, context: int) -> int:
    """What decoding one row of `context` tokens holds beside the weights."""
    before = live_bytes()
    given = {"drafter": None, "sampling": specjax.Sampling(), "key": 0, "stop_token_ids": ()}
    state = prepare(target, [[1] * 8], max_new_tokens=context - 8, **given)
    held = live_bytes() - before
    del state
    return held


def measure_growth(
    target: Any,
    *,
    repeats: int,
    contexts: Sequence[int],
    batches: Sequence[int],
    vocabularies: Sequence[int],
    drafts: Sequence[int] = (1, 3, 7, 15),
    passes: int = 10,
) -> dict[str, Any]:
    """Every law's measurements, its fit and how far they are off it; times are milliseconds per token and row's pass.

    Args:
      contexts: cache slots; batches: rows; vocabularies: V; drafts: K.
    """

    def pass_ms(model: Any, **given: Any) -> float:
        return 1e3 * time_pass(model, 1, passes=passes, **given)

    result: dict[str, Any] = {}
    y = in_turn(lambda slots: pass_ms(target, slots=slots), contexts, repeats)
    result["context"] = row("a + b slots", "ms a pass", contexts, y, fit_line(contexts, y))
    y = in_turn(lambda batch: pass_ms(target, batch=batch), batches, repeats)
    result["batch"] = row("a + b rows", "ms a pass", batches, y, fit_line(batches, y))
    models = {size: with_vocabulary(target, size) for size in vocabularies}
    y = in_turn(lambda size: pass_ms(models[size]), vocabularies, repeats)
    fit = fit_line(vocabularies, y)
    result["vocabulary"] = row("a + b V, two layers", "ms a pass", vocabularies, y, fit)
    models.clear()

    def overhead(k: int) -> float:
        """A round of one token where K drafts are compiled for, beside its pass."""
        return 1e3 * time_round(target, 1, k + 1, rounds=passes) - pass_ms(target)

    y = in_turn(overhead, drafts, repeats)
    result["drafts"] = row("constant", "ms a round", drafts, y, fit_constant(y, pass_ms(target)))

    result["compile"] = measure_compilations(target)
    expected = [estimate_memory(target, context=c).cache for c in contexts]
    held = [held_bytes(target, c) for c in contexts]
    off = float(np.max(np.abs(np.asarray(held) / expected - 1)))
    mib = [h / 2**20 for h in held]
    result["memory"] = row("bytes of the cache", "MiB held", contexts, mib, {"off": off})
    result["peak_bytes"] = peak_bytes()
    return result


def measure_compilations(target: Any) -> dict[str, Any]:
    """How many programs calls of growing prompts compile, and in how many seconds; prompts of one bucket share them."""
    sizes, counts, seconds = (9, 17, 33, 65, 9), [], []
    for size in sizes:
        with count_compilations() as compiled:
            specjax.generate(target, [[1] * size], drafter=specjax.NGram(), max_new_tokens=16)
        counts.append(len(compiled))
        seconds.append(sum(compiled))
    off = float(counts[-1])  # the last call's shapes are the first's
    return row("none for a known shape", "programs", sizes, counts, {"off": off}) | {
        "seconds": seconds
    }


def growth_table(result: Mapping[str, Any]) -> Table:
    table = Table("of", "law", "at", "measured", "fit", "off", title="Growth")
    for name, found in result.items():
        if name == "peak_bytes":
            continue
        ends = ", ".join(f"{y:.3g}" for y in found["y"])
        fit = f"{found['start']:.3g} + {found['slope']:.2g} x" if "slope" in found else ""
        off = f"{found['off']:.0f}" if name == "compile" else f"{found['off']:.1%}"
        at = ", ".join(map(str, found["x"]))
        table.add_row(name, found["law"], at, f"{ends} {found['unit']}", fit, off)
    table.caption = f"peak memory {result['peak_bytes'] / 2**30:.2f} GiB"
    return table


def measure_processes(source: str) -> dict[str, float]:
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
                [sys.executable, "-c", code, str(SCRIPTS), source],
                env=os.environ | {"JAX_COMPILATION_CACHE_DIR": folder},
                capture_output=True,
                text=True,
                check=True,
            )
            result[name] = float(done.stdout.split()[-1])
    return result


def process_table(result: Mapping[str, float]) -> Table:
    table = Table("", "seconds", title="Compilation of prefill and a five-width n-gram loop")
    for name, seconds in result.items():
        table.add_row(name, f"{seconds:.1f}")
    return table
