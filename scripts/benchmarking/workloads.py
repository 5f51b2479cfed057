"""Drafters against plain decoding, workload by workload, and against what they could gain at most."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from common import count_compilations
from rich.console import Console
from rich.progress import track
from rich.table import Table

import specjax
from benchmarking.oracles import (
    Curve,
    Replay,
    best_width,
    least_cost,
    perfect_stands,
    record_stands,
)
from specjax.generate import bucket
from specjax.monitoring import Monitor


def decode_one(target: Any, prompts: Sequence[Sequence[int]], **given: Any) -> specjax.Generation:
    """`specjax.generate`, once more as long as anything was compiled: its times are of decoding alone."""
    while True:  # more than twice only if programs were forgotten in between
        with count_compilations() as compiled:
            out = specjax.generate(target, prompts, **given)
        if not compiled:
            return out


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
    slots: int | None = None,
    turns: int = 1,
) -> dict[str, list[specjax.Generation]]:
    """Every batch of prompts with every drafter in turn, so that what slows the machine down slows all of them.

    Times are of decoding alone. Batch i has key i. `slots` is `generate`'s. Of several `turns` of a batch the one of median
    time counts.
    """
    found: dict[str, list[specjax.Generation]] = {name: [] for name in drafters}
    for i, prompts in enumerate(progress(batches, description, console)):
        runs: dict[str, list[specjax.Generation]] = {name: [] for name in drafters}
        for name, drafter in list(drafters.items()) * turns:
            out = decode_one(
                target,
                prompts,
                drafter=drafter,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                key=i,
                stop_token_ids=stop_token_ids,
                slots=slots,
            )
            runs[name].append(out)
        for name, outs in runs.items():
            found[name].append(sorted(outs, key=lambda out: out.decode_seconds)[turns // 2])
    return found


def progress(items: Sequence[Any], description: str, console: Console) -> Any:
    """The items, with a bar where somebody looks."""
    quiet = not console.is_terminal
    return track(items, description=description, console=console, transient=True, disable=quiet)


def tokens_per_second(outs: Sequence[specjax.Generation], *, prefill: bool = False) -> float:
    """New tokens of all rows over the seconds of decoding, or of prefill and decoding."""
    emitted = sum(int(out.statistics.emitted.sum()) for out in outs)
    return emitted / sum(out.decode_seconds + prefill * out.prefill_seconds for out in outs)


def first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    """The first place at which two outputs differ; None if they are the same."""
    if np.array_equal(a, b):
        return None
    size = min(len(a), len(b))
    unlike = np.flatnonzero(a[:size] != b[:size])
    return int(unlike[0]) if unlike.size else size


def compare(
    runs: Sequence[specjax.Generation], plain: Sequence[specjax.Generation]
) -> dict[str, Any]:
    """A method's figures beside plain decoding's of the same prompts, one prompt a run.

    `different` has, for every prompt whose output is not plain decoding's, where it begins to differ.
    """
    counts = Monitor()
    for out in runs:
        counts.add(out.statistics)
    statistics = [out.statistics for out in runs]
    proposed = np.sum([np.sum(s.drafted_per_position, axis=0) for s in statistics], axis=0)
    accepted = np.sum([np.sum(s.accepted_per_position, axis=0) for s in statistics], axis=0)
    pairs = list(zip(runs, plain, strict=True))
    places = {i: first_difference(a.tokens[0], b.tokens[0]) for i, (a, b) in enumerate(pairs)}
    different = {i: place for i, place in places.items() if place is not None}
    return {
        **counts.to_json(),
        "acceptance_per_position": [
            round(a / p, 4) if p else None
            for a, p in zip(accepted.tolist(), proposed.tolist(), strict=True)
        ],
        "tokens_per_second": tokens_per_second(runs),
        "speed_up": tokens_per_second(runs) / tokens_per_second(plain),
        "speed_up_with_prefill": tokens_per_second(runs, prefill=True)
        / tokens_per_second(plain, prefill=True),
        "speed_up_median": float(
            np.median([tokens_per_second([a]) / tokens_per_second([b]) for a, b in pairs])
        ),
        "identical": len(runs) - len(different),
        "different": different,
    }


def measure_workloads(
    target: Any,
    workloads: Mapping[str, Sequence[Sequence[int]]],
    drafters: Mapping[str, Any],
    *,
    temperature: float,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    curve: Curve,
    oracles: bool,
    turns: int,
    console: Console,
) -> dict[str, Any]:
    """Figures by workload: `methods` beside plain decoding, `limits` in the same unit, speed-ups.

    Args:
      drafters: by the name of the method.
      curve: the limits' cost of a pass by its width.
      oracles: whether to compute limits, which takes a plain decoding more for every drafter.
      turns: see `decode_in_turn`.
    """
    given = {
        "sampling": specjax.Sampling(temperature=temperature),
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": stop_token_ids,
    }
    result: dict[str, Any] = {}
    for workload, prompts in workloads.items():
        outs = decode_in_turn(
            target,
            [[prompt] for prompt in prompts],
            {"plain": None, **drafters},
            console=console,
            description=workload,
            turns=turns,
            **given,
        )
        plain = outs.pop("plain")
        result[workload] = {
            "prompts": len(prompts),
            "tokens": sum(int(out.statistics.emitted.sum()) for out in plain),
            "plain_tokens_per_second": tokens_per_second(plain),
            "plain_tokens_per_second_with_prefill": tokens_per_second(plain, prefill=True),
            "methods": {name: compare(runs, plain) for name, runs in outs.items()},
        }
        if oracles:
            answers = [out.tokens[0] for out in plain]
            result[workload]["limits"] = measure_limits(
                target, prompts, answers, drafters, curve=curve, console=console, **given
            )
    return result


def measure_limits(
    target: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[np.ndarray],
    drafters: Mapping[str, Any],
    *,
    curve: Curve,
    console: Console,
    **given: Any,
) -> dict[str, Any]:
    """Speed-ups of oracles over plain decoding: simulated ones (see `oracles`), and measured, of the answer replayed."""
    cost = {"perfect": 0.0, "choice": 0.0, **dict.fromkeys(drafters, 0.0)}
    slots = bucket(max(map(len, prompts)) + given["max_new_tokens"])
    replayed, plain = [], []
    for i, prompt in enumerate(progress(prompts, "limits", console)):
        answer = answers[i]
        stands = {
            name: record_stands(target, drafter, prompt, answer, key=i, **given)
            for name, drafter in drafters.items()
        }
        known = {name: found for name, found in stands.items() if found is not None}
        for name, found in known.items():
            cost[name] += least_cost(found, curve)
        nothing = np.zeros(len(answer), int)
        cost["choice"] += least_cost(np.max([nothing, *known.values()], axis=0), curve)
        cost["perfect"] += least_cost(perfect_stands(len(answer)), curve)
        replay = Replay.of(prompt, answer, slots=slots, size=best_width(curve) - 1)
        for runs, drafter in ((replayed, replay), (plain, None)):
            runs.append(decode_one(target, [prompt], drafter=drafter, key=i, **given))
    tokens = sum(map(len, answers))
    return {
        "length": {name: tokens / cost[name] if cost[name] else None for name in drafters},
        "choice": tokens / cost["choice"],
        "perfect": tokens / cost["perfect"],
        "replayed": tokens_per_second(replayed) / tokens_per_second(plain),
    }


def identity_errors(result: Mapping[str, Any]) -> list[str]:
    """What is wrong with greedy results: every output must equal plain decoding's."""
    return [
        f"{method} differs from plain decoding on prompt {prompt} of {workload}, from new token {place} on"
        for workload, found in result.items()
        for method, figures in found["methods"].items()
        for prompt, place in figures["different"].items()
    ]


def workload_table(result: Mapping[str, Any], title: str) -> Table:
    """A row for every workload and method, then the means over workloads."""
    table = Table("workload", "method", title=title)
    for name in ("tokens/pass", "speed-up", "median", "with prefill", "limit", "reached", "same"):
        table.add_column(name, justify="right")

    def times(x: float | None) -> str:
        return "" if x is None else f"{x:.2f}x"

    def add(workload: str, method: str, found: Sequence[Mapping[str, Any]]) -> None:
        """Means over the given workloads."""
        figures = [f["methods"][method] for f in found]

        def mean(name: str) -> float:
            return float(np.mean([f[name] or np.nan for f in figures]))

        limits = [f["limits"]["length"][method] for f in found if "limits" in f]
        limit = float(np.mean(limits)) if limits and None not in limits else None
        same = sum(f["identical"] for f in figures)
        table.add_row(
            workload,
            method,
            f"{mean('mean_acceptance_length'):.2f}",
            *(times(mean(n)) for n in ("speed_up", "speed_up_median", "speed_up_with_prefill")),
            times(limit),
            "" if limit is None else f"{mean('speed_up') / limit:.0%}",
            f"{same} of {sum(f['prompts'] for f in found)}",
        )

    def add_limits(found: Sequence[Mapping[str, Any]]) -> None:
        limits = [f["limits"] for f in found if "limits" in f]
        if limits:
            choice, perfect, replayed = (
                float(np.mean([x[name] for x in limits]))
                for name in ("choice", "perfect", "replayed")
            )
            table.add_row("", "[dim]oracle choice[/]", "", "", "", "", times(choice))
            reached = f"{replayed / perfect:.0%}"
            table.add_row(
                "", "[dim]perfect[/]", "", times(replayed), "", "", times(perfect), reached
            )

    groups = [(name, [found]) for name, found in result.items()]
    if len(groups) > 1:
        groups.append(("mean", list(result.values())))
    for name, found in groups:
        for i, method in enumerate(found[0]["methods"]):
            add(name if i == 0 else "", method, found)
        add_limits(found)
        table.add_section()
    table.caption = (
        "limit: of the method with its lengths known beforehand, of the best choice among the methods, and of the answer "
        "itself as draft, whose speed-up is measured"
    )
    lengths = [f["limits"]["length"] for f in result.values() if "limits" in f]
    if unknown := sorted({name for found in lengths for name, x in found.items() if x is None}):
        table.caption += f"; {', '.join(unknown)}: sampled drafts are judged by chance, so they have no limit and no part in the choice"
    return table


def acceptance_by_position(result: Mapping[str, Any]) -> dict[str, list[float]]:
    """By method, the mean over workloads of the share of the drafts at each position that stood.

    As far as any workload drafted; of a workload without drafts at a position there is no share.
    """
    found: dict[str, list[float]] = {}
    for name in next(iter(result.values()))["methods"]:
        rows = [f["methods"][name]["acceptance_per_position"] for f in result.values()]
        columns = [[x for x in column if x is not None] for column in zip(*rows, strict=True)]
        found[name] = [float(np.mean(column)) for column in columns if column]
    return found


def position_table(result: Mapping[str, Any], title: str) -> Table:
    """Share of the drafts at each position that stood, over all workloads."""
    shares = acceptance_by_position(result)
    table = Table("draft", *shares, title=title)
    for at in range(max(map(len, shares.values()), default=0)):
        cells = (f"{s[at]:.1%}" if at < len(s) else "" for s in shares.values())
        table.add_row(str(at + 1), *cells)
    return table
