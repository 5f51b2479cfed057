"""Training an EAGLE-3 head: specjax beside speculators, and how specjax's cost grows.

Same weights, features, loss and optimizer; every trainer has a process of its own (`trainers`), and they are measured in
turn. Each takes a batch at once, and sequence by sequence with accumulated gradients: speculators packs it into one sequence,
whose scores are those of all pairs of its tokens.

B sequences, T tokens, S steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from scipy.optimize import nnls

from benchmarking.growth import SCRIPTS, fit_line, in_turn, row
from benchmarking.peers import CannotTakePart
from benchmarking.trainers import STEPS, Job

OWN, WHOLE = "specjax, one by one", "specjax, at once"
PEERS = "speculators, one by one", "speculators, packed"


class Trainer:
    """A running `trainers` process.

    Raises:
      CannotTakePart: something that it imports is not installed.
      ChildProcessError: it ended, now or in an update; with its last words.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path):
        self.process, self.log = process, log
        if reason := self._answer()["skipped"]:
            raise CannotTakePart(reason)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        last = self.log.read_text().strip().rpartition("\n")[2]
        raise ChildProcessError(f"a trainer ended with exit code {self.process.wait()}: {last}")

    def update(self, count: int, length: int) -> dict[str, Any]:
        """`seconds`, `loss` and, so far, `peak_bytes`, of an update of `count` sequences of `length` tokens."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([count, length]) + "\n")
        self.process.stdin.flush()
        return self._answer()


@contextmanager
def running(job: Job) -> Iterator[Trainer]:
    """The job's process, ended afterwards."""
    paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                [sys.executable, "-m", "benchmarking.trainers", job.dumps()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            try:
                yield Trainer(process, log)
            finally:
                process.kill()


def measure_training(
    source: str,
    draft_vocab_size: int,
    *,
    count: int,
    lengths: Sequence[int],
    growing_counts: Sequence[int],
    growing_lengths: Sequence[int],
    dtypes: Sequence[str],
    repeats: int,
    report: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Every trainer in every type at every length, and specjax's growth in the first type.

    Args:
      source: of the target.
      draft_vocab_size: Vd.
      count: B.
      lengths: T.
      growing_counts: B of the growth, at the first of `lengths`.
      growing_lengths: T of the growth, of one sequence.
      dtypes: of products; masters are float32.
      report: given what was found so far after every length, since a slow trainer takes long.

    Returns:
      `trainers`: by type, length and trainer, see `compare`; `growth`: by law; `skipped`: reasons by trainer.
    """
    found: dict[str, Any] = {"trainers": {}, "growth": {}, "skipped": {}}
    with tempfile.TemporaryDirectory() as folder:
        own = Job("specjax", source, folder, draft_vocab_size)
        theirs = replace(own, side="speculators")
        for dtype in dtypes:
            # specjax comes first: it writes the head that all start from
            jobs = {
                OWN: replace(own, dtype=dtype),
                WHOLE: replace(own, dtype=dtype, at_once=True),
                PEERS[0]: replace(theirs, dtype=dtype),
                PEERS[1]: replace(theirs, dtype=dtype, at_once=True),
            }
            with ExitStack() as stack:
                trainers: dict[str, Trainer] = {}
                for name, job in jobs.items():
                    if name in found["skipped"]:
                        continue
                    try:
                        trainers[name] = stack.enter_context(running(job))
                    except CannotTakePart as reason:
                        found["skipped"][name] = str(reason)
                found["trainers"][dtype] = {}
                for length in lengths:
                    found["trainers"][dtype][length] = compare(trainers, count, length, repeats)
                    report(found)
                if not found["growth"]:
                    found["growth"] = measure_growth(
                        trainers[OWN], growing_counts, lengths[0], growing_lengths, repeats
                    )
    return found


def compare(
    trainers: Mapping[str, Trainer], count: int, length: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Updates of all trainers in turn.

    Returns:
      by trainer: `tokens_per_second` of the median update, `loss` of the first one, `peak_bytes` until here, and
      `times_as_fast` as it is specjax, one by one.
    """
    answers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(repeats + 1):  # the first warms up
        for name, trainer in trainers.items():
            answers[name].append(trainer.update(count, length))
    medians = {n: float(np.median([a["seconds"] for a in x[1:]])) for n, x in answers.items()}
    return {
        name: {
            "tokens_per_second": count * length / medians[name],
            "times_as_fast": medians[name] / medians[OWN],
            "loss": answered[0]["loss"],
            "peak_bytes": answered[-1]["peak_bytes"],
        }
        for name, answered in answers.items()
    }


def fit_lengths(lengths: Sequence[int], seconds: Sequence[float]) -> dict[str, float]:
    """a and b, neither negative, of seconds = a T + b S (T^2 + S T), by least squares of relative errors, and `off`, the
    largest |seconds / fit - 1|. The first part is the matrices', the second the scores'."""
    t, y = np.asarray(lengths, float), np.asarray(seconds)
    terms = np.stack([t, STEPS * (t**2 + STEPS * t)], axis=1)
    (linear, scores), _ = nnls(terms / y[:, None], np.ones(len(y)))
    off = float(np.max(np.abs(y / (terms @ [linear, scores]) - 1)))
    return {"linear": float(linear), "scores": float(scores), "off": off}


def measure_growth(
    trainer: Trainer, counts: Sequence[int], length: int, lengths: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Seconds of an update against B at one length, and against T of one sequence."""

    def seconds(shape: tuple[int, int]) -> float:
        return trainer.update(*shape)["seconds"]

    y = in_turn(seconds, [(count, length) for count in counts], repeats)
    found = {"sequences": row("a + b B", "s an update", counts, y, fit_line(counts, y))}
    y = in_turn(seconds, [(1, length) for length in lengths], repeats)
    law = f"a T + b S (T^2 + S T), S = {STEPS}"
    found["length"] = row(law, "s an update", lengths, y, fit_lengths(lengths, y))
    return found


def training_tables(found: Mapping[str, Any], count: int) -> list[Table]:
    title = f"EAGLE-3 training, {STEPS} steps, {count} sequences, stored features"
    table = Table(
        "trainer", "type", "length", "tokens/s", "specjax is", "first loss", "peak GiB", title=title
    )
    for dtype, by_length in found["trainers"].items():
        for length, trainers in by_length.items():
            for name, figures in trainers.items():
                table.add_row(
                    name,
                    dtype,
                    str(length),
                    f"{figures['tokens_per_second']:.0f}",
                    "" if name == OWN else f"{figures['times_as_fast']:.2f}x as fast",
                    f"{figures['loss']:.5f}",
                    f"{figures['peak_bytes'] / 2**30:.2f}",
                )
    table.caption = (
        "One by one, speculators' loss is specjax's; packed, it also has rows that cross the ends."
    )
    growth = Table("of", "law", "at", "measured", "off", title="Growth of an update")
    for name, law in found["growth"].items():
        measured = ", ".join(f"{y:.3g}" for y in law["y"])
        at = ", ".join(map(str, law["x"]))
        growth.add_row(name, law["law"], at, f"{measured} {law['unit']}", f"{law['off']:.1%}")
    return [table, growth]
