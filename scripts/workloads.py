"""Drafters against plain decoding, workload by workload, for `benchmark.py`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from common import Conversation, count_compilations, make_drafter
from rich.console import Console
from rich.progress import track
from rich.table import Table

import specjax
from specjax.monitoring import Monitor


def oracle_cost(prompt: list[int], answer: list[int], curve: dict[int, float]) -> float:
    """Cost, in plain passes, of an answer drafted by look-up that knew beforehand how much would stand.

    Every round proposes as much of the longest match's continuation as the answer repeats, and nothing where it repeats
    nothing: what choosing the length can gain at most.
    """
    row, cost, at = np.asarray([*prompt, *answer]), 0.0, len(prompt)
    most = max(curve) - 1
    while at < len(row):
        history = row[:at]
        agree, match = np.arange(at) < at - 1, np.zeros(at, int)
        for back in range(min(8, at)):
            shifted = np.concatenate([np.full(back, -1), history[: at - back]])
            agree = agree & (shifted == history[at - 1 - back])
            match += agree
        stood = 0
        if match.max() > 0:
            end = at - 1 - int(np.argmax(match[::-1]))
            period = at - 1 - end
            while stood < min(most, len(row) - at - 1) and (
                row[at + stood] == row[end + 1 + stood % period]
            ):
                stood += 1
        cost += curve[min(w for w in curve if w > stood)]
        at += stood + 1
    return cost


def decode_in_turn(
    target: Any,
    batches: Sequence[Sequence[Sequence[int]]],
    drafters: Mapping[str, Any],
    *,
    sampling: specjax.Sampling,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    console: Console,
    description: str = "",
) -> dict[str, list[specjax.Generation]]:
    """Every batch of prompts with every drafter in turn, so that what slows the machine down slows all of them.

    A run in which anything was compiled is repeated: times are of decoding alone. Batch i has key i.
    """
    found: dict[str, list[specjax.Generation]] = {name: [] for name in drafters}
    for i, prompts in enumerate(
        track(
            batches,
            description=description,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
    ):
        for name, drafter in drafters.items():
            run = partial(
                specjax.generate,
                target,
                prompts,
                drafter=drafter,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                key=i,
                stop_token_ids=stop_token_ids,
            )
            with count_compilations() as compiled:
                out = run()
            found[name].append(run() if compiled else out)
    return found


def tokens_per_second(outs: Sequence[specjax.Generation]) -> float:
    """New tokens of all rows over the seconds of decoding."""
    emitted = sum(int(out.statistics.emitted.sum()) for out in outs)
    return emitted / sum(out.decode_seconds for out in outs)


def measure_workloads(
    target: Any,
    tokenizer: specjax.Tokenizer,
    workloads: dict[str, list[Conversation]],
    names: Sequence[str],
    *,
    temperature: float,
    max_new_tokens: int,
    curve: dict[int, float],
    console: Console,
    head: str | None = None,
) -> dict[str, Any]:
    """Drafters against plain decoding by workload; every prompt with each in turn."""
    drafters = {"plain": None} | {
        name: make_drafter(name, None, head=head, target=target) for name in names
    }
    sampling = specjax.Sampling(temperature=temperature)
    table = Table("workload", "tokens", "plain/s", title=f"Speed-up at temperature {temperature:g}")
    for name in names:
        table.add_column(f"{name} (length)")
    table.add_column("oracle")
    table.add_column("identical")
    result: dict[str, Any] = {}
    for workload, conversations in workloads.items():
        prompts = [tokenizer.encode_chat(c) for c in conversations]
        outs = decode_in_turn(
            target,
            [[prompt] for prompt in prompts],
            drafters,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            stop_token_ids=tokenizer.stop_token_ids,
            console=console,
            description=workload,
        )
        counts = {name: Monitor() for name in drafters}
        for name, runs in outs.items():
            for out in runs:
                counts[name].add(out.statistics)
        tokens = counts["plain"].emitted
        same = {
            name: sum(
                np.array_equal(a.tokens[0], b.tokens[0])
                for a, b in zip(runs, outs["plain"], strict=True)
            )
            for name, runs in outs.items()
        }
        ideal = sum(
            oracle_cost(prompt, out.tokens[0].tolist(), curve)
            for prompt, out in zip(prompts, outs["plain"], strict=True)
        )
        speeds = {name: tokens_per_second(runs) for name, runs in outs.items()}
        result[workload] = {
            "prompts": len(prompts),
            "plain_tokens_per_second": speeds["plain"],
            "oracle_speed_up": tokens / ideal,
            "drafters": {
                name: {
                    "tokens_per_second": speeds[name],
                    "speed_up": speeds[name] / speeds["plain"],
                    "identical": same[name],
                    **counts[name].to_json(),
                }
                for name in names
            },
        }
        table.add_row(
            workload,
            str(tokens),
            f"{speeds['plain']:.1f}",
            *(
                f"{speeds[n] / speeds['plain']:.2f}x ({counts[n].mean_acceptance_length:.2f})"
                for n in names
            ),
            f"{tokens / ideal:.2f}x",
            "/".join(str(same[n]) for n in names) + f" of {len(prompts)}",
        )
    means = {
        n: float(np.mean([w["drafters"][n]["speed_up"] for w in result.values()])) for n in names
    }
    oracle = float(np.mean([w["oracle_speed_up"] for w in result.values()]))
    table.add_section()
    table.add_row("mean", "", "", *(f"{means[n]:.2f}x" for n in means), f"{oracle:.2f}x", "")
    console.print(table)
    console.print(
        "length: tokens per target pass. oracle: the best that look-up could do if it knew how much will stand."
    )
    return result
