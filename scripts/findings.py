"""What `advise.py` found: candidates, what each did on the prompts, and what was chosen."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import specjax
from specjax.advice import LEAST_GAIN, best_prediction

TIE = 0.02  # predictions this close are the same


@dataclass(frozen=True)
class Candidate:
    """A drafter to try.

    Attributes:
      name: `generate.py`'s for it.
      longest: drafts per round in the measurement.
      make: the drafter of so many drafts, with the verify curve of a batch size.
      kind: look-ups cost the same for any number of drafts; adaptive drafters choose it themselves; networks pay for
        each.
    """

    name: str
    longest: int
    make: Callable[[int, specjax.RoundCosts], Any]
    kind: str

    @property
    def choices(self) -> range:
        """Numbers of drafts to choose from."""
        return range(self.longest if self.kind == "adaptive" else 1, self.longest + 1)

    def profile(self, outs: Iterable[specjax.Generation]) -> specjax.AcceptanceProfile:
        """What stood."""
        statistics = (out.statistics for out in outs)
        return specjax.AcceptanceProfile.measured(statistics, by_depth=self.name == "head")


@dataclass(frozen=True)
class Trial:
    """A candidate at one temperature, on the prompts.

    Attributes:
      candidate: who.
      temperature: at which.
      profile: what stood, over all prompts; by_workload: the same by workload.
      measured: speed-up at the longest proposal, batch 1, over plain decoding in turn.
    """

    candidate: Candidate
    temperature: float
    profile: specjax.AcceptanceProfile
    by_workload: dict[str, specjax.AcceptanceProfile]
    measured: float

    def predictions(self, costs: specjax.RoundCosts) -> list[specjax.Prediction]:
        return [specjax.predict(self.profile, costs, k) for k in self.candidate.choices]


@dataclass(frozen=True)
class Check:
    """A setting run against plain decoding in turn.

    Attributes:
      speed_up: measured; by_workload: the same, where it was run by workload.
      scatter: speed of plain decoding measured a second time over the first, less 1.
      plain: tokens per second of plain decoding, all rows together.
    """

    speed_up: float
    by_workload: dict[str, float]
    scatter: float
    plain: float


@dataclass(frozen=True)
class Choice:
    """The best candidate at a batch size and temperature.

    Attributes:
      trial: of the candidate.
      prediction: of its best number of drafts.
      check: what it did; None where it was not worth running.
    """

    trial: Trial
    prediction: specjax.Prediction
    check: Check | None = None

    @property
    def pays(self) -> bool:
        """Whether it is advised: it gains more than plain decoding differs from itself."""
        confirmed = self.check is None or self.check.speed_up >= 1 + abs(self.check.scatter)
        return self.prediction.speed_up >= LEAST_GAIN and confirmed


@dataclass(frozen=True)
class Advice:
    """All that was found.

    Attributes:
      workloads: prompts by workload.
      curves: the verify curve by batch size; seconds: of a pass over one token.
      costs: the curve and what drafting costs, by batch size and candidate.
      trials: by temperature.
      choices: the best by temperature and batch size; those at the asked-for temperature were run if they promised
        enough.
      memory: of the chosen setting, by batch size.
      drift: by batch size, how far a cost of the verify curve was at the end from what it was at the start, as a share:
        what other work on the machine makes of all this.
    """

    workloads: dict[str, int]
    curves: dict[int, specjax.RoundCosts]
    seconds: dict[int, float]
    costs: dict[int, dict[str, specjax.RoundCosts]]
    trials: dict[float, list[Trial]]
    choices: dict[tuple[float, int], Choice]
    memory: dict[int, specjax.Memory]
    drift: dict[int, float]


def choose(trials: Sequence[Trial], costs: dict[str, specjax.RoundCosts]) -> Choice:
    """The trial with the best prediction under these costs, by candidate; of those that come within `TIE` of it an adaptive
    one, which stops drafting where the text turns out otherwise."""
    best = [Choice(t, best_prediction(t.predictions(costs[t.candidate.name]))) for t in trials]
    least = (1 - TIE) * max(choice.prediction.speed_up for choice in best)
    equals = [choice for choice in best if choice.prediction.speed_up >= least]
    return max(equals, key=lambda c: (c.trial.candidate.kind == "adaptive", c.prediction.speed_up))
