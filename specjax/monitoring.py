"""What a service wants to see of speculation: running totals as JSON lines and as Prometheus text."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from specjax.statistics import Statistics

PREFIX = "vllm:spec_decode_num"
"""Counters carry vLLM's names and meanings, so that its dashboards work."""


class Monitor:
    """Adds up the statistics of many calls.

    Attributes:
      drafts: rounds in which a row proposed anything.
      rounds, drafted, accepted, emitted: as in `Statistics`, over all rows.
      accepted_per_position: int64[K].
      draft_seconds, verify_seconds, other_seconds: measured shares of decoding, where they were given.
    """

    def __init__(self) -> None:
        self.drafts = self.rounds = self.drafted = self.accepted = self.emitted = 0
        self.accepted_per_position = np.zeros(0, np.int64)
        self.seconds: dict[str, float] = {}

    def add(self, statistics: Statistics, seconds: dict[str, float] | None = None) -> None:
        """Counts one call's statistics.

        Args:
          seconds: wall time by part, such as {"prefill": 0.1, "decode": 2.0}.
        """
        self.rounds += int(np.sum(statistics.rounds))
        self.drafted += int(np.sum(statistics.drafted))
        self.accepted += int(np.sum(statistics.accepted))
        self.emitted += int(np.sum(statistics.emitted))
        proposed = np.sum(np.asarray(statistics.drafted_per_position, np.int64), axis=0)
        accepted = np.sum(np.asarray(statistics.accepted_per_position, np.int64), axis=0)
        self.drafts += int(proposed[0]) if proposed.size else 0
        size = max(accepted.size, self.accepted_per_position.size)
        grown = np.zeros(size, np.int64)
        grown[: self.accepted_per_position.size] += self.accepted_per_position
        grown[: accepted.size] += accepted
        self.accepted_per_position = grown
        for part, spent in (seconds or {}).items():
            self.seconds[part] = self.seconds.get(part, 0.0) + spent

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per target pass; NaN before the first."""
        return self.emitted / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; NaN if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    def to_json(self) -> dict[str, Any]:
        """All counters and derived figures; those that are not defined yet are None."""

        def known(x: float) -> float | None:
            return None if np.isnan(x) else x

        return {
            "drafts": self.drafts,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "accepted_per_position": self.accepted_per_position.tolist(),
            "mean_acceptance_length": known(self.mean_acceptance_length),
            "acceptance_rate": known(self.acceptance_rate),
            "seconds": dict(self.seconds),
        }

    def append_to(self, path: Path | str) -> None:
        """Adds a line with the totals and the time (seconds since 1970) to a file."""
        with Path(path).open("a") as file:
            file.write(json.dumps({"time": time.time(), **self.to_json()}) + "\n")

    def prometheus(self, **labels: str) -> str:
        """The totals in Prometheus' text format, with vLLM's counter names.

        Args:
          labels: put on every sample, for example model_name="...".
        """

        def escape(value: str) -> str:
            return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

        def sample(name: str, value: float, **more: str) -> str:
            pairs = ",".join(f'{k}="{escape(str(v))}"' for k, v in (labels | more).items())
            return f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}"

        def counter(name: str, text: str, samples: list[str]) -> list[str]:
            return [f"# HELP {name} {text}", f"# TYPE {name} counter", *samples]

        lines: list[str] = []
        for name, text, value in (
            ("drafts", "Number of spec decoding drafts.", self.drafts),
            ("draft_tokens", "Number of draft tokens.", self.drafted),
            ("accepted_tokens", "Number of accepted tokens.", self.accepted),
        ):
            full = f"{PREFIX}_{name}"
            lines += counter(full, text, [sample(f"{full}_total", value)])
        full = f"{PREFIX}_accepted_tokens_per_pos"
        samples = [
            sample(f"{full}_total", int(value), position=str(i))
            for i, value in enumerate(self.accepted_per_position)
        ]
        lines += counter(full, "Accepted tokens per draft position.", samples)
        return "\n".join(lines) + "\n"
