"""Which drafter, how many drafts, and whether to speculate at all: measured on your prompts and your machine.

python scripts/advise.py --target T --prompts prompts.jsonl --write setting.toml
python scripts/generate.py --config setting.toml --prompt "..."
"""

import json
import sys

import numpy as np
import tyro
from advice_files import engine_commands, to_json, write_setting
from advisor import Advisor, Options, advise
from common import describe_device, use_compilation_cache
from findings import Advice, Choice
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

import specjax
from specjax.advice import LEAST_GAIN, best_prediction, price_per_million
from specjax.trees import ladder

BUSY = 0.15  # a verify curve that moves by more says that the machine is not ours alone
console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def number(x: float, form: str = ".2f") -> str:
    return "-" if np.isnan(x) else format(x, form)


def curve_table(advice: Advice) -> tuple[Table, str]:
    """What drafts must earn, and how to read it."""
    table = Table("drafts", "pass over", title="Verify curve")
    for batch in advice.curves:
        table.add_column(f"cost, batch {batch}", justify="right")
        table.add_column("must stand", justify="right")
    widest = max(curve.widths[-1] for curve in advice.curves.values())
    for width in ladder(widest - 1):
        cells = [str(width - 1), f"{width} tokens" if width > 1 else "1 token"]
        for curve in advice.curves.values():
            cells.append(f"{float(curve.pass_cost(width)):.2f}")
            rate = specjax.break_even(curve, width - 1) if width > 1 else np.nan
            cells.append("never pays" if width > 1 and np.isnan(rate) else number(rate, ".0%"))
        table.add_row(*cells)
    spent = ", ".join(f"{1e3 * s:.1f} ms at batch {b}" for b, s in advice.seconds.items())
    return table, (
        f"cost: in target passes over one token ({spent}); a round pays if it emits more tokens than that. "
        "must stand: the chance that every draft then needs, drafting itself not counted."
    )


def drafter_table(advice: Advice, batch: int) -> tuple[Table, str]:
    """Every candidate at every temperature."""
    table = Table(title=f"Drafters on these prompts, batch {batch}")
    table.add_column("drafter", no_wrap=True)
    for name in ("T", "tokens\na round", "stood, % at\n1 2 4 8", "cost of\ndrafting"):
        table.add_column(name, justify="right")
    for name in ("predicted", "measured", "best\ndrafts", "predicted"):
        table.add_column(name, justify="right")
    for temperature, trials in advice.trials.items():
        for trial in trials:
            costs = advice.costs[batch][trial.candidate.name]
            predictions = trial.predictions(costs)
            best, stood = best_prediction(predictions), trial.profile.per_position
            table.add_row(
                trial.candidate.name,
                f"{temperature:g}",
                f"{trial.profile.tokens():.2f}",
                " ".join(
                    number(100 * stood[i - 1], ".0f") for i in (1, 2, 4, 8) if i <= len(stood)
                ),
                f"{costs.draft_cost(best.num_draft):.1%}",
                f"{predictions[-1].speed_up:.2f}x",
                f"{trial.measured:.2f}x" if batch == 1 else "-",
                str(best.num_draft),
                f"{best.speed_up:.2f}x",
            )
        table.add_section()
    longest = sorted({t.candidate.longest for t in next(iter(advice.trials.values()))})
    return table, (
        f"Run with up to {' or '.join(map(str, longest))} drafts: tokens that a round emits; share of the drafts proposed at "
        "these positions that stood; cost of a proposal in target passes over one token; speed-up over plain decoding, as "
        "predicted from acceptance by position and costs, and as measured. Then the number of drafts that should pay most."
    )


def drafts_table(advice: Advice, batch: int) -> Table:
    """Predicted speed-up by number of drafts."""
    longest = max(t.candidate.longest for trials in advice.trials.values() for t in trials)
    counts = sorted({k for k in (1, 2, 3, 4, 5, 7, 11, longest) if k <= longest})
    table = Table("drafter", "T", title=f"Predicted speed-up by number of drafts, batch {batch}")
    for k in counts:
        table.add_column(str(k), justify="right")
    for temperature, trials in advice.trials.items():
        for trial in trials:
            costs = advice.costs[batch][trial.candidate.name]
            ratios = {p.num_draft: f"{p.speed_up:.2f}" for p in trial.predictions(costs)}
            cells = [ratios.get(k, "") for k in counts]
            table.add_row(trial.candidate.name, f"{temperature:g}", *cells)
        table.add_section()
    return table


def workload_table(advice: Advice, choice: Choice, batch: int) -> Table:
    """The chosen setting by workload."""
    name, k = choice.trial.candidate.name, choice.prediction.num_draft
    table = Table("workload", "prompts", title=f"{name}, {k} drafts, by workload")
    for column in ("tokens a round", "predicted", "measured"):
        table.add_column(column, justify="right")
    measured = choice.check.by_workload if choice.check else {}
    for workload, profile in choice.trial.by_workload.items():
        ahead = specjax.predict(profile, advice.costs[batch][name], k)
        got = f"{measured[workload]:.2f}x" if workload in measured else "-"
        prompts = str(advice.workloads[workload])
        table.add_row(workload, prompts, f"{ahead.tokens:.2f}", f"{ahead.speed_up:.2f}x", got)
    return table


def batch_table(advice: Advice, options: Options) -> Table:
    """The best setting by batch size, with memory and price."""
    table = Table(title=f"By batch size, temperature {options.temperature:g}")
    table.add_column("batch", justify="right")
    table.add_column("best setting", no_wrap=True)
    names = ["predicted", "measured", "tokens/s\nplain", "tokens/s\nadvised"]
    names += [f"memory, {options.context}\ntokens a row", "of that,\ndrafter"]
    for name in [*names, *["price of\n1M tokens"] * (options.price_per_hour is not None)]:
        table.add_column(name, justify="right")
    for batch, memory in advice.memory.items():
        choice = advice.choices[options.temperature, batch]
        plain, fast = speeds(advice, choice, batch)
        setting = f"{choice.trial.candidate.name}, {choice.prediction.num_draft} drafts"
        cells = [
            str(batch),
            setting if choice.pays else "do not speculate",
            f"{choice.prediction.speed_up:.2f}x",
            "-" if choice.check is None else f"{choice.check.speed_up:.2f}x",
            f"{plain:.1f}",
            f"{fast:.1f}",
            decimal(memory.total),
            f"{memory.drafter_share:.1%}",
        ]
        if options.price_per_hour is not None:
            cells.append(f"{price_per_million(options.price_per_hour, fast):.4g}")
        table.add_row(*cells)
    return table


def speeds(advice: Advice, choice: Choice, batch: int) -> tuple[float, float]:
    """Tokens per second of plain decoding and of what is advised: measured, or by the verify curve."""
    plain = choice.check.plain if choice.check else batch / advice.seconds[batch]
    return plain, plain * (choice.check.speed_up if choice.check and choice.pays else 1.0)


def verdict(advice: Advice, options: Options) -> list[tuple[str, str]]:
    """The advice as labelled lines of rich markup, the decision first."""
    batch, temperature = options.batch[0], options.temperature
    choice = advice.choices[temperature, batch]
    name, ahead, check = choice.trial.candidate.name, choice.prediction, choice.check
    where = f"at temperature {temperature:g}, batch {batch}"
    if choice.pays:
        decision = f"[bold green]Speculate: {name}, up to {ahead.num_draft} drafts[/] (passes up to {ahead.width} wide) {where}"
    else:
        lost = check is None or check.speed_up < 1
        why = "nothing that was tried pays" if lost else "what it gains is within the scatter"
        decision = f"[bold red]Do not speculate[/] {where}: {why}"
    lines = [("Advice", decision)]
    gain = f"{ahead.tokens:.2f} tokens a round / {ahead.cost:.2f} passes = [bold]{ahead.speed_up:.2f}x[/]"
    if not choice.pays:
        gain = f"{name} with {ahead.num_draft} comes closest: {gain}"
    lines.append(("Expected", gain))
    if check is not None:
        error = ahead.speed_up / check.speed_up - 1
        lines.append(
            (
                "Measured",
                f"[bold]{check.speed_up:.2f}x[/] in this run (the prediction is {error:+.0%} off; plain decoding a second time "
                f"was {check.scatter:+.0%} off, which is how far this machine scatters)",
            )
        )
    elif not choice.pays:
        lines.append(("Measured", f"not run: less than {LEAST_GAIN}x expected"))
    sizes = {b: c for (t, b), c in advice.choices.items() if t == temperature}
    elsewhere = [
        f"temperature {t:g}, batch {b} ({c.trial.candidate.name}, {c.prediction.num_draft} drafts, "
        f"{(c.check.speed_up if c.check else c.prediction.speed_up):.2f}x)"
        for (t, b), c in advice.choices.items()
        if c.pays
    ]
    if not choice.pays and elsewhere:
        lines.append(("But at", ", ".join(elsewhere)))
    against = [
        f"temperature {t:g} ({c.prediction.speed_up:.2f}x)"
        for (t, b), c in advice.choices.items()
        if b == batch and t != temperature and not c.pays
    ]
    if choice.pays:
        workloads, costs = choice.trial.by_workload, advice.costs[batch][name]
        ratios = {
            w: specjax.predict(profile, costs, ahead.num_draft).speed_up
            for w, profile in workloads.items()
        }
        if len(ratios) > 1:
            against += [f"{w} ({ratio:.2f}x)" for w, ratio in ratios.items() if ratio < 1]
        against += [
            f"batch {b} ({(c.check or c.prediction).speed_up:.2f}x)"
            for b, c in sizes.items()
            if not c.pays
        ]
        lines.append(
            ("Not for", ", ".join(against) or "nothing that was measured speaks against it")
        )
        paying, losing = ([str(b) for b, c in sizes.items() if c.pays is p] for p in (True, False))
        if len(sizes) > 1:
            end = f"; not at {', '.join(losing)}" if losing else ", all that were measured"
            lines.append(("Batch", f"pays at {', '.join(paying)}{end}"))
    if advice.drift[batch] > BUSY:
        lines.append(
            (
                "Caution",
                f"[yellow]this machine does other work[/]: costs of the verify curve moved by up to {advice.drift[batch]:.0%} "
                "during this run; trust what was measured in turn more than what was predicted",
            )
        )
    memory = advice.memory[batch]
    drafter = memory.drafter_weights + memory.drafter_state
    lines.append(
        (
            "Memory",
            f"{decimal(memory.weights)} weights + {decimal(memory.cache)} cache of {options.context} tokens + "
            f"{decimal(drafter)} drafter ({memory.drafter_share:.1%})",
        )
    )
    if options.price_per_hour is not None:
        speed = speeds(advice, choice, batch)
        before, after = (price_per_million(options.price_per_hour, x) for x in speed)
        lines.append(("Price", f"a million tokens {before:.4g} plainly, {after:.4g} as advised"))
    return lines


def main(options: Options) -> None:
    use_compilation_cache()
    advisor = Advisor(options, console)
    kinds = ", ".join(advisor.workloads) if len(advisor.workloads) > 1 else "no workloads named"
    console.print(
        f"[bold]{escape(options.target)}[/] on {describe_device()}; {len(advisor.prompts)} prompts ({escape(kinds)})",
        soft_wrap=True,
    )
    advice = advise(advisor)
    batch = options.batch[0]
    choice = advice.choices[options.temperature, batch]
    for table, note in (curve_table(advice), drafter_table(advice, batch)):
        console.print(table)
        console.print(note, style="dim")
    console.print(drafts_table(advice, batch))
    if len(advice.workloads) > 1:
        console.print(workload_table(advice, choice, batch))
    console.print(batch_table(advice, options))
    console.print(
        "[bold]The same elsewhere[/] (not run here; other machines have other verify curves)"
    )
    for found in engine_commands(advice, options):
        console.print(f"[bold]{found.engine}[/]: {found.note}")
        if found.command is not None:
            console.print(found.command, markup=False, soft_wrap=True)
    lines = verdict(advice, options)
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(advice, options), indent=1))
    if options.write is not None:
        write_setting(options.write, advice, options)
        lines.append(
            ("Use it", f"python scripts/generate.py --config {options.write} --prompt TEXT")
        )
    grid = Table.grid(padding=(0, 1))
    for label, line in lines:
        grid.add_row(f"[bold]{label}[/]", line)
    console.print(Panel(grid, title=escape(options.target)))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except (ValueError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        sys.exit(1)
