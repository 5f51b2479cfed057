"""Drafters against plain decoding, workload by workload, for `benchmark.py`."""

import json
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import count_compilations, make_drafter
from rich.console import Console
from rich.progress import track
from rich.table import Table

import specjax
from specjax.monitoring import Monitor


def read_workloads(path: Path, limit: int) -> dict[str, list[str]]:
    """The first `limit` first turns of every workload."""
    workloads: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        texts = workloads[row["workload"]]
        if len(texts) < limit:
            texts.append(row["turns"][0] if "turns" in row else row["prompt"])
    return dict(workloads)


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


def measure_workloads(
    target: Any,
    tokenizer: specjax.Tokenizer,
    workloads: dict[str, list[str]],
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
    for workload, texts in workloads.items():
        seconds, tokens = defaultdict(float), defaultdict(int)
        counts = {name: Monitor() for name in drafters}
        same, ideal = defaultdict(int), 0.0
        for i, text in enumerate(
            track(texts, description=workload, console=console, transient=True)
        ):
            prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
            plain = None
            for name, drafter in drafters.items():
                run = partial(
                    specjax.generate,
                    target,
                    [prompt],
                    drafter=drafter,
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    key=i,
                    stop_token_ids=tokenizer.stop_token_ids,
                )
                with count_compilations() as compiled:
                    out = run()
                if compiled:
                    out = run()
                plain = out if plain is None else plain
                seconds[name] += out.decode_seconds
                tokens[name] += len(out.tokens[0])
                counts[name].add(out.statistics)
                same[name] += np.array_equal(plain.tokens[0], out.tokens[0])
            assert plain is not None
            ideal += oracle_cost(prompt, plain.tokens[0].tolist(), curve)
        speeds = {name: tokens[name] / seconds[name] for name in drafters}
        result[workload] = {
            "prompts": len(texts),
            "plain_tokens_per_second": speeds["plain"],
            "oracle_speed_up": tokens["plain"] / ideal,
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
            str(tokens["plain"]),
            f"{speeds['plain']:.1f}",
            *(
                f"{speeds[n] / speeds['plain']:.2f}x ({counts[n].mean_acceptance_length:.2f})"
                for n in names
            ),
            f"{tokens['plain'] / ideal:.2f}x",
            "/".join(str(same[n]) for n in names) + f" of {len(texts)}",
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
