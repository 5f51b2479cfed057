"""Trained heads side by side: what stands by number of drafts, what drafting costs, and what comes of it."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import specjax
from benchmarking.oracles import Curve
from benchmarking.workloads import decode_in_turn, progress, tokens_per_second
from specjax.advice import AcceptanceProfile, RoundCosts, predict
from specjax.generate import bucket, needed_slots
from specjax.tuning import measure_draft_cost

NUM_DRAFTS = (1, 2, 3, 4, 5, 6, 7, 8)
TIMED = (1, 4)  # against plain decoding, beside the length that promises most
SHOWN = 4  # drafts of the table by workload


def measure_heads(
    target: Any,
    workloads: Mapping[str, Sequence[Sequence[int]]],
    heads: Mapping[str, Any],
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    curve: Curve,
    turns: int,
    console: Console,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Figures by head.

    The longest chain is decoded once over all prompts. A shorter one's tokens per pass follow from it, since a draft does
    not depend on how many come after it; with the costs measured here they foretell the speed-up of every length. The
    best length and some others are then timed against plain decoding, on the first prompt of every workload, one at a time.

    Args:
      workloads: prompts as token ids, by name.
      heads: by name, as `load_head` returns them.
      curve: cost of a pass by its width, in passes over one token.
      turns: see `decode_in_turn`.
      report: is given what was found after every temperature.

    Returns:
      by head: `trained` (drafts in a row), `draft_cost` by number of drafts, in passes over one token, and by temperature
      `tokens` (workload, then number of drafts), `per_position`, `predicted` (by number of drafts), `best`, and the speed-ups
      `measured` by number of drafts.
    """
    warnings.filterwarnings("ignore", "num_draft is .* trained to draft")  # the tables say it
    first = [prompts[0] for prompts in workloads.values()]
    every = [(workload, prompt) for workload, prompts in workloads.items() for prompt in prompts]
    # that decode together where acceptance alone is measured; on CPUs wide passes of many rows are slow
    rows = 1 if jax.default_backend() == "cpu" else 8
    # and one cache size for all of them, so that a head's longest chain is compiled once
    longest_prompt = max(len(prompt) for _, prompt in every)
    slots = bucket(needed_slots(longest_prompt, max_new_tokens, NUM_DRAFTS[-1]))
    result: dict[str, Any] = {}
    for name, head in heads.items():
        cost = {
            k: measure_draft_cost(target, specjax.head_drafter(head, k), first[0])
            for k in NUM_DRAFTS
        }
        trained = head.config.trained_depth
        result[name] = {"trained": trained, "draft_cost": cost, "temperatures": {}}
    for temperature in temperatures:
        sampling = specjax.Sampling(temperature=temperature)
        given = {
            "sampling": sampling,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": stop_token_ids,
        }
        chosen = {}
        for name, head in heads.items():
            longest = specjax.head_drafter(head, NUM_DRAFTS[-1])
            statistics: dict[str, list[Any]] = defaultdict(list)
            for at in progress(range(0, len(every), rows), name, console):
                some = every[at : at + rows]
                out = specjax.generate(
                    target,
                    [prompt for _, prompt in some],
                    drafter=longest,
                    key=at,
                    slots=slots,
                    **given,
                )
                for row, (workload, _) in enumerate(some):
                    counters = jax.tree.map(lambda x, r=row: x[r : r + 1], out.statistics)
                    statistics[workload].append(counters)
            found = _figures(statistics, result[name]["draft_cost"], curve)
            result[name]["temperatures"][f"{temperature:g}"] = found
            found["measured"] = dict.fromkeys(sorted({*TIMED, found["best"]} & {*NUM_DRAFTS}), 0.0)
            chosen |= {f"{name} {k}": specjax.head_drafter(head, k) for k in found["measured"]}
            mean = np.mean([tokens[NUM_DRAFTS[-1]] for tokens in found["tokens"].values()])
            console.print(f"{name} at temperature {temperature:g}: {mean:.2f} tokens a pass")
        outs = decode_in_turn(
            target,
            [[p] for p in first],
            {"plain": None, **chosen},
            console=console,
            turns=turns,
            **given,
        )
        plain = tokens_per_second(outs["plain"])
        for name in heads:
            measured = result[name]["temperatures"][f"{temperature:g}"]["measured"]
            measured |= {k: tokens_per_second(outs[f"{name} {k}"]) / plain for k in measured}
        report(result)
    return result


def _figures(
    statistics: Mapping[str, Sequence[Any]], draft_cost: Mapping[int, float], curve: Curve
) -> dict[str, Any]:
    """What follows from the counters of the longest chain, by workload, and the costs."""
    measured = partial(AcceptanceProfile.measured, by_depth=True)
    profiles = {w: measured(counted) for w, counted in statistics.items()}
    predicted = {}
    for k, cost in draft_cost.items():
        costs = RoundCosts(tuple(curve), tuple(curve.values()), draft=(cost, 0.0))
        predicted[k] = float(np.mean([predict(p, costs, k).speed_up for p in profiles.values()]))
    whole = measured([s for counted in statistics.values() for s in counted])
    return {
        "tokens": {w: {k: p.tokens(k) for k in draft_cost} for w, p in profiles.items()},
        "per_position": np.round(whole.per_position, 4).tolist(),
        "predicted": predicted,
        "best": max(predicted, key=lambda k: predicted[k]),
    }


def head_tables(result: Mapping[str, Any]) -> list[Table]:
    """By temperature: by number of drafts, by workload, and by position."""
    tables = []
    for temperature in next(iter(result.values()))["temperatures"]:
        found = {name: row["temperatures"][temperature] for name, row in result.items()}
        at = f"temperature {temperature}"
        table = Table("head", "drafts", title=f"Heads at {at}")
        for column in ("drafting, of a pass", "tokens/pass", "predicted", "measured"):
            table.add_column(column, justify="right")
        for name, row in found.items():
            for k, cost in result[name]["draft_cost"].items():
                mean = np.mean([tokens[k] for tokens in row["tokens"].values()])
                measured = f"{row['measured'][k]:.2f}x" if k in row["measured"] else ""
                cells = (f"{cost:.1%}", f"{mean:.2f}", f"{row['predicted'][k]:.2f}x", measured)
                mark = "*" if k > (result[name]["trained"] or k) else ""
                table.add_row(name if k == NUM_DRAFTS[0] else "", f"{k}{mark}", *cells)
            table.add_section()
        table.caption = "*: more than it was trained to draft in a row"
        tables.append(table)

        workloads = next(iter(found.values()))["tokens"]
        table = Table("head", title=f"Tokens per pass with {SHOWN} drafts at {at}")
        for workload in (*workloads, "mean"):
            table.add_column(workload, justify="right")
        for name, row in found.items():
            lengths = [tokens[SHOWN] for tokens in row["tokens"].values()]
            table.add_row(name, *(f"{x:.2f}" for x in (*lengths, np.mean(lengths))))
        tables.append(table)

        table = Table("draft", title=f"Drafts that stood, and all before them, at {at}")
        for name in found:
            table.add_column(name, justify="right")
        for i, k in enumerate(NUM_DRAFTS):
            table.add_row(str(k), *(f"{row['per_position'][i]:.1%}" for row in found.values()))
        tables.append(table)
    return tables
