"""Pictures of a report, PNG files. Needs matplotlib (`pip install specjax[plot]`)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarking.rounds import relative
from benchmarking.workloads import acceptance_by_position

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's, which colour-blind readers tell apart."""
MARKERS = "osD^vP"
GREY = "#666666"
Report = Mapping[str, Any]


def greedy(report: Report) -> Report:
    """The workloads at the lowest temperature that was measured."""
    return report["workloads"][min(report["workloads"], key=float)]


def methods(report: Report) -> list[str]:
    return list(next(iter(greedy(report).values()))["methods"])


def lowest(report: Report) -> str:
    return f"temperature {min(map(float, report['workloads'])):g}"


def plot_workloads(axes: Any, report: Report) -> None:
    found, names = greedy(report), methods(report)
    place, width = np.arange(len(found)), 0.8 / len(names)
    for i, name in enumerate(names):
        x = place + (i - (len(names) - 1) / 2) * width
        y = [f["methods"][name]["speed_up"] for f in found.values()]
        axes.bar(x, y, 0.92 * width, color=COLORS[i % len(COLORS)], label=name)
        for at, f in zip(x, found.values(), strict=True):
            limit = f.get("limits", {}).get("length", {}).get(name)
            if limit is not None:
                ends = at - width / 2.4, at + width / 2.4
                axes.hlines(limit, *ends, color="black", lw=1.8, label="oracle length")
    limited = [(at, f["limits"]) for at, f in enumerate(found.values()) if "limits" in f]
    for name, label, marker in (
        ("choice", "oracle choice", "D"),
        ("replayed", "perfect drafts, measured", "*"),
        ("perfect", "perfect drafts, simulated", "^"),
    ):
        if limited:
            y = [limits[name] for _, limits in limited]
            axes.scatter([at for at, _ in limited], y, marker=marker, s=36, color=GREY, label=label)
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xticks(place, found, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_ylabel("decoding speed, times plain")
    axes.set_title(f"Speed-up by workload, {lowest(report)}")


def plot_positions(axes: Any, report: Report) -> None:
    for i, (name, shares) in enumerate(acceptance_by_position(greedy(report)).items()):
        at = np.arange(1, len(shares) + 1)
        axes.plot(
            at,
            100 * np.asarray(shares),
            MARKERS[i % len(MARKERS)] + "-",
            color=COLORS[i % len(COLORS)],
            label=name,
        )
    axes.set_xlabel("position of the draft in its proposal")
    axes.set_ylabel("drafts accepted, % of those proposed")
    axes.set_ylim(0, 102)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"Acceptance per position, {lowest(report)}, mean over workloads")


def plot_curve(axes: Any, report: Report) -> None:
    curve = report["curve"]
    costs = relative(curve)
    rounds = [ms / curve["pass_ms"][1] for ms in curve["round_ms"].values()]
    axes.plot(list(costs), list(costs.values()), "o-", color=COLORS[0], label="target pass alone")
    axes.plot(list(costs), rounds, "s--", color=COLORS[1], label="whole round, free drafts")
    tokens = np.linspace(1, max(costs))
    axes.plot(tokens, tokens, ":", color=GREY, label="as many plain passes")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(costs), list(costs))
    axes.set_ylim(0, 1.25 * max(*costs.values(), *rounds))
    axes.set_xlabel("width of the pass, tokens")
    axes.set_ylabel("cost, in passes over one token")
    axes.set_title(f"Verify curve ({curve['pass_ms'][1]:.3g} ms for one token)")


def plot_split(axes: Any, report: Report) -> None:
    found = report["split"]
    left = np.zeros(len(found))
    for part, color in zip(("draft", "verify", "rest"), COLORS, strict=False):
        spent = np.asarray([max(f[part], 0.0) for f in found.values()])
        axes.barh(list(found), spent, left=left, color=color, label=part)
        left += spent
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * left.max())
    for at, f in enumerate(found.values()):
        label = f"{f['round']:.3g} ms"
        axes.text(left[at] + 0.01 * left.max(), at, label, va="center", color=GREY)
    axes.set_xlabel("milliseconds per round")
    axes.set_title("Where the time of a round goes")


def plot_batches(axes: Any, report: Report) -> None:
    found = report["batch"]
    sizes = [int(size) for size in found]
    names = [name for name in next(iter(found.values())) if name != "plain"]
    for i, name in enumerate(names):
        y = [speeds[name] / speeds["plain"] for speeds in found.values()]
        axes.plot(
            sizes, y, MARKERS[i % len(MARKERS)] + "-", color=COLORS[i % len(COLORS)], label=name
        )
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, sizes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size, slots")
    axes.set_ylabel("tokens per second, times plain")
    axes.set_title("Speed-up by batch size")


def plot_temperatures(axes: Any, report: Report) -> None:
    found = sorted(report["workloads"].items(), key=lambda item: float(item[0]))
    at = [float(temperature) for temperature, _ in found]
    for i, name in enumerate(methods(report)):
        y = [np.mean([f["methods"][name]["speed_up"] for f in part.values()]) for _, part in found]
        axes.plot(at, y, MARKERS[i % len(MARKERS)] + "-", color=COLORS[i % len(COLORS)], label=name)
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xticks(at)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("temperature")
    axes.set_ylabel("decoding speed, times plain")
    axes.set_title("Speed-up by temperature, mean over workloads")


PLOTS: dict[str, tuple[str, Callable[[Any, Report], None]]] = {
    "workloads": ("workloads", plot_workloads),
    "acceptance": ("workloads", plot_positions),
    "verify_curve": ("curve", plot_curve),
    "split": ("split", plot_split),
    "batches": ("batch", plot_batches),
    "temperatures": ("workloads", plot_temperatures),
}
"""By file name: the section of the report that is needed, and who draws it."""


def gpu_report(found: Report) -> Report:
    """The accelerator's sections where the plots look for them."""
    batches = {
        key.removeprefix("batch "): f for key, f in found.items() if key.startswith("batch ")
    }
    named = {
        size: {"plain": f["plain"], f"{f['tokens_per_pass']:.1f} tokens a pass": f["drafted"]}
        for size, f in batches.items()
    }
    parts = {"curve": found.get("curve"), "batch": named}
    return {name: part for name, part in parts.items() if part}


def write_plots(report: Report, folder: Path) -> Sequence[Path]:
    """Draws whatever the report has the figures for; returns the files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    sources = {"": report, "gpu_": gpu_report(report.get("gpu", {}))}
    figures = [(p, r, name) for p, r in sources.items() for name in PLOTS if PLOTS[name][0] in r]
    if len(report.get("workloads", {})) < 2:  # one temperature is no line
        figures = [figure for figure in figures if figure[2] != "temperatures"]
    for prefix, report, name in figures:
        draw = PLOTS[name][1]
        figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        draw(axes, report)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if name == "split" else "y", color="#dddddd", lw=0.6)
        axes.set_axisbelow(True)
        handles, labels = axes.get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        axes.legend(
            once.values(), once.keys(), frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0)
        )
        files.append(folder / f"{prefix}{name}.png")
        figure.savefig(files[-1])
    return files
