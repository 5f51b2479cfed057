"""A stream of prompts through slots that are refilled: what batching gains, and what speculation adds to it."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from common import count_compilations
from rich.table import Table

import specjax


def measure_batches(
    target: Any,
    prompts: Sequence[Sequence[int]],
    drafters: Mapping[str, Any],
    *,
    sizes: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
) -> dict[str, dict[str, float]]:
    """Tokens per second of a whole stream, prefill included, by slots and method; "plain" is without a drafter.

    The stream has every prompt once, and again from the start where there are fewer than two for each slot.
    """
    found: dict[str, dict[str, float]] = {}
    for size in sizes:
        stream = [prompts[i % len(prompts)] for i in range(max(len(prompts), 2 * size))]
        speeds = found[str(size)] = {}
        for name, drafter in {"plain": None, **drafters}.items():
            run = partial(
                specjax.generate_stream,
                target,
                stream,
                slots=size,
                drafter=drafter,
                max_new_tokens=max_new_tokens,
                stop_token_ids=stop_token_ids,
                remember=False,  # the stream repeats itself, which a user's requests do not
            )
            with count_compilations() as compiled:
                speeds[name] = time_stream(run)
            if compiled:
                speeds[name] = time_stream(run)
    return found


def time_stream(run: Any) -> float:
    """Tokens per second of a stream that is drained."""
    began = time.perf_counter()
    emitted = sum(done.emitted for done in run())
    return emitted / (time.perf_counter() - began)


def batch_table(result: Mapping[str, Mapping[str, float]]) -> Table:
    methods = [name for name in next(iter(result.values())) if name != "plain"]
    table = Table("slots", "plain, tokens/s", "ratio", title="A stream of prompts")
    for name in methods:
        table.add_column(f"{name}, over plain")
    first = next(iter(result.values()))["plain"]
    for size, speeds in result.items():
        plain = speeds["plain"]
        gains = (f"{speeds[name] / plain:.2f}x" for name in methods)
        table.add_row(size, f"{plain:.1f}", f"{plain / first:.2f}x", *gains)
    return table
