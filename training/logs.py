"""What a run shows while it runs, and leaves behind: progress, JSON lines, TensorBoard, a plot."""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from training.files import write_whole


class RunLog:
    """Writes figures as they come.

    `log.jsonl` gets one object a line, with `kind` "train", "valid" or "decode"; a resumed run goes on in the same files,
    and lines of updates that it repeats are dropped.

    Args:
      folder: of the run.
      updates: how many there will be.
      first: updates done before.
      console: where progress is shown.
    """

    def __init__(self, folder: Path, updates: int, first: int, console: Console):
        self.folder, self.console = folder, console
        path = folder / "log.jsonl"
        kept = [row for row in read_log(folder) if row["update"] <= first]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=updates, completed=first, figures="")
        self._progress.start()

    def add(self, kind: str, update: int, figures: dict[str, Any]) -> None:
        """One line: numbers, and lists of numbers by step."""
        row = {"kind": kind, "update": update, "time": round(time.time(), 1), **figures}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in figures.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, update)
            elif isinstance(value, list):
                for i, x in enumerate(value):
                    self._board.add_scalar(f"{kind}/{name}_{i}", x, update)
        short = _short(figures)
        self._progress.update(
            self._task, completed=update, figures=short if kind == "train" else ""
        )
        if kind != "train" or not self.console.is_terminal:
            self.console.print(f"{kind} {update}: {short}", highlight=False)

    def close(self) -> None:
        self._progress.stop()
        self._file.close()
        self._board.close()


def _short(figures: dict[str, Any]) -> str:
    parts = []
    for name, value in figures.items():
        if isinstance(value, float):
            parts.append(f"{name} {value:.4g}")
        elif isinstance(value, list):
            parts.append(f"{name} " + "/".join(f"{x:.2f}" for x in value))
        elif isinstance(value, int):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a last line that was cut short is dropped."""
    path, rows = folder / "log.jsonl", []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def draw_run(rows: list[dict[str, Any]], left: Any, right: Any) -> None:
    """Loss and acceptance against updates, from the lines of a log, on two of matplotlib's axes."""
    for kind, style in (("train", "-"), ("valid", "o-")):
        lines = [r for r in rows if r["kind"] == kind]
        if lines:
            updates = [r["update"] for r in lines]
            left.plot(updates, [r["loss"] for r in lines], style, label=kind, ms=4)
            right.plot(
                updates,
                [r["simulated_length"] for r in lines],
                style,
                label=f"{kind}, simulated",
                ms=4,
            )
    if lines := [r for r in rows if r["kind"] == "decode"]:
        updates = [r["update"] for r in lines]
        right.plot(
            updates, [r["mean_acceptance_length"] for r in lines], "s-", label="decoded", ms=4
        )
    left.set(xlabel="updates", ylabel="loss (nats)", title="Loss")
    right.set(xlabel="updates", ylabel="tokens per round", title="Acceptance length")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()


def plot_run(folder: Path) -> Path | None:
    """`draw_run` of a run's log as `training.png`; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4), layout="constrained")
    draw_run(read_log(folder), *figure.subplots(1, 2))
    path = folder / "training.png"
    figure.savefig(path, dpi=120)
    return path
