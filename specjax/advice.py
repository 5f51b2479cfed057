"""What speculation will gain, before it is switched on: expected tokens of a round over what a round costs.

All of it is arithmetic on what was measured: which drafts stood (`Statistics`), what a target pass costs by its width
(`tuning.measure_costs`) and what proposing costs (`tuning.measure_draft_cost`). Costs are in target passes over one token,
so plain decoding costs 1 a token, and the speed-up of K drafts is tokens(K) / cost(K).

N the longest proposal that was measured, K the number of drafts considered, B rows that decode together.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from specjax.drafters.base import Drafter
from specjax.generate import bucket
from specjax.models.transformer import Target
from specjax.statistics import Statistics
from specjax.trees import ladder
from specjax.tuning import expected_tokens

LEAST_GAIN = 1.05
"""A predicted speed-up below this is not advised: it is within what a prediction can be wrong by."""


@dataclass(frozen=True)
class AcceptanceProfile:
    """How long proposals were and how much of them stood, by round.

    Attributes:
      proposed: float64[N + 1], share of rounds that proposed exactly 0, 1, ... N tokens.
      accepted: float64[N + 1], share of rounds in which exactly 0, 1, ... N drafts stood.
      rounds: how many were measured; 0 for a model.
      rate: of a model, the chance of every draft to stand if those before it did; None where it was measured.
      by_depth: whether a draft stands by how many were drafted before it, as those of heads do, whose accuracy falls along
        the chain; otherwise by the text alone, as those of look-ups and draft models.
    """

    proposed: np.ndarray
    accepted: np.ndarray
    rounds: int = 0
    rate: float | None = None
    by_depth: bool = False

    @classmethod
    def measured(
        cls, statistics: Iterable[Statistics], *, by_depth: bool = False
    ) -> "AcceptanceProfile":
        """From the counters of one or several calls with the same drafter.

        Raises:
          ValueError: no round among them.
        """
        counted = list(statistics)
        rounds = sum(int(np.sum(s.rounds)) for s in counted)
        if not rounds:
            raise ValueError("statistics must count at least one round, got none")

        def shares(per_position: Iterable[np.ndarray | jax.Array]) -> np.ndarray:
            at_least = sum(np.sum(np.asarray(x), axis=0, dtype=float) for x in per_position)
            at_least = np.concatenate([[rounds], np.atleast_1d(at_least), [0.0]])
            return (at_least[:-1] - at_least[1:]) / rounds

        return cls(
            proposed=shares(s.drafted_per_position for s in counted),
            accepted=shares(s.accepted_per_position for s in counted),
            rounds=rounds,
            by_depth=by_depth,
        )

    @classmethod
    def geometric(cls, rate: float, num_draft: int) -> "AcceptanceProfile":
        """The model for when only one acceptance rate is known: every draft stands with the same probability."""
        expected_tokens(rate, num_draft)  # refuses what is no probability
        accepted = rate ** np.arange(num_draft + 1) * (1.0 - rate)
        accepted[-1] = rate**num_draft
        proposed = np.zeros(num_draft + 1)
        proposed[-1] = 1.0
        return cls(proposed=proposed, accepted=accepted, rate=float(rate))

    @property
    def num_draft(self) -> int:
        """N."""
        return len(self.accepted) - 1

    @property
    def basis(self) -> str:
        """What predictions rest on, in words."""
        return "measured per position" if self.rate is None else "one rate"

    @property
    def per_position(self) -> np.ndarray:
        """Share of the drafts proposed at each position that stood, float64[N]; NaN where none was proposed."""
        reached, stood = (np.cumsum(x[::-1])[::-1][1:] for x in (self.proposed, self.accepted))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(reached > 0, stood / reached, np.nan)

    def rounds_when_cut(self, num_draft: int) -> float:
        """Rounds that do the work of one measured round if proposals are cut to K tokens.

        A run of a drafts that stand takes a // (K + 1) + 1 rounds then, since the text that one long proposal foretold is
        foretold by several short ones too; a run that N cut short goes on, and takes (N + 1) / (K + 1). For greedy chains
        this is exact but for that last fraction: whether a draft agrees with the target depends on the text alone. If
        every draft stands with one probability a, tokens per round come out as (1 - a^(K+1)) / (1 - a).

        `by_depth` a shorter round is the beginning of a long one, and emits 1 + r_1 + r_1 r_2 + ... tokens.
        """
        self._check(num_draft)
        if self.by_depth:
            runs = np.arange(self.num_draft + 1)
            return float(
                self.accepted @ (runs + 1) / (self.accepted @ (np.minimum(runs, num_draft) + 1))
            )
        runs = np.arange(self.num_draft + 1)
        needed = (runs // (num_draft + 1) + 1).astype(float)
        needed[-1] = (self.num_draft + 1) / (num_draft + 1)
        return float(self.accepted @ needed)

    def tokens(self, num_draft: int | None = None) -> float:
        """Expected tokens per round with K drafts, by default with N: 1 and those that stand."""
        k = self.num_draft if num_draft is None else num_draft
        if self.rate is not None:
            self._check(k)
            return expected_tokens(self.rate, k)
        emitted = float(self.accepted @ np.arange(1, self.num_draft + 2))
        return emitted / self.rounds_when_cut(k)

    def lengths(self, num_draft: int) -> np.ndarray:
        """Share of rounds that propose 0, 1, ... K tokens, float64[K + 1]; rounds that go on with a cut proposal
        propose K."""
        rounds = 1.0 if self.by_depth else self.rounds_when_cut(num_draft)
        shares = self.proposed[: num_draft + 1].copy()
        shares[-1] = self.proposed[num_draft:].sum() + rounds - 1.0
        return shares / rounds

    def _check(self, num_draft: int) -> None:
        longest = self.num_draft
        if not 0 <= num_draft <= longest:
            raise ValueError(f"num_draft must be in 0..{longest}, as measured; got {num_draft}")


@dataclass(frozen=True)
class RoundCosts:
    """What a round costs at one batch size, in target passes over one token of every row.

    Attributes:
      widths: block widths that were measured, from 1 upwards.
      verify: cost of a target pass of every such width, the first being 1; linear in between.
      draft: cost of proposing K tokens, as fixed + per_token * K.
      batch: B.
    """

    widths: tuple[int, ...]
    verify: tuple[float, ...]
    draft: tuple[float, float] = (0.0, 0.0)
    batch: int = 1

    def __post_init__(self):
        if not self.widths or self.widths[0] != 1 or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths must rise from 1, got {self.widths}")
        good = all(math.isfinite(c) and c > 0 for c in self.verify)
        if (count := len(self.widths)) != len(self.verify) or not good:
            raise ValueError(f"verify must be {count} positive numbers, got {self.verify}")
        if not all(math.isfinite(c) and c >= 0 for c in self.draft):
            raise ValueError(f"draft must be two numbers >= 0, got {self.draft}")
        if self.batch < 1:
            raise ValueError(f"batch must be >= 1, got {self.batch}")
        object.__setattr__(self, "verify", tuple(float(c) / self.verify[0] for c in self.verify))

    def pass_cost(self, width: int | np.ndarray) -> np.ndarray:
        """Cost of a target pass of `width` tokens."""
        widest = self.widths[-1]
        if np.max(width) > widest:
            raise ValueError(f"width must be at most {widest}, as measured; got {np.max(width)}")
        return np.asarray(np.interp(width, self.widths, self.verify))

    def draft_cost(self, num_draft: int) -> float:
        """Cost of one proposal; nothing without drafts."""
        return self.draft[0] + self.draft[1] * num_draft if num_draft else 0.0

    def round_cost(self, lengths: np.ndarray) -> float:
        """Expected cost of a round whose proposals have these lengths.

        Args:
          lengths: float64[K + 1], share of rounds in which a row proposes 0, 1, ... K tokens. The pass is as wide as the
            ladder of K allows for the longest of B proposals, which are taken to be independent.
        """
        num_draft = len(lengths) - 1
        rungs = np.asarray(ladder(num_draft))
        width = rungs[np.searchsorted(rungs, np.arange(1, num_draft + 2))]
        longest = np.diff(np.cumsum(lengths) ** self.batch, prepend=0.0)
        return float(longest @ self.pass_cost(width)) + self.draft_cost(num_draft)


@dataclass(frozen=True)
class Prediction:
    """What K drafts would do.

    Attributes:
      num_draft: K; 0 is plain decoding.
      tokens: expected per round.
      cost: of a round, in target passes over one token.
    """

    num_draft: int
    tokens: float
    cost: float

    @property
    def width(self) -> int:
        """Of the widest target pass: the newest token and the drafts."""
        return self.num_draft + 1

    @property
    def speed_up(self) -> float:
        """Over plain decoding."""
        return self.tokens / self.cost


def predict(profile: AcceptanceProfile, costs: RoundCosts, num_draft: int) -> Prediction:
    """What K drafts would do, by measured acceptance and costs."""
    if num_draft == 0:
        return Prediction(0, 1.0, 1.0)
    cost = costs.round_cost(profile.lengths(num_draft))
    return Prediction(num_draft, profile.tokens(num_draft), cost)


def best_prediction(predictions: Sequence[Prediction]) -> Prediction:
    """The one of the highest speed-up, of the fewest drafts among equals. Below `LEAST_GAIN` none is advised."""
    return max(predictions, key=lambda p: (p.speed_up, -p.num_draft))


def break_even(costs: RoundCosts, num_draft: int) -> float:
    """The chance to stand that every one of K drafts needs so that a round pays for itself.

    Solves (1 - a^(K+1)) / (1 - a) = v(K + 1) + draft cost for a; NaN where no acceptance would do.
    """
    if num_draft < 1:
        raise ValueError(f"num_draft must be >= 1, got {num_draft}")
    cost = float(costs.pass_cost(num_draft + 1)) + costs.draft_cost(num_draft)
    if cost > num_draft + 1:
        return math.nan
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, num_draft) >= cost else (middle, high)
    return high


@dataclass(frozen=True)
class Memory:
    """Bytes that decoding holds on the device between rounds; what a pass needs for a moment is not counted.

    Attributes:
      weights: the target's parameters.
      cache: the target's keys and values.
      drafter_weights: the drafter's parameters that are not the target's own.
      drafter_state: what the drafter remembers: its cache, its tables.
    """

    weights: int
    cache: int
    drafter_weights: int
    drafter_state: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.drafter_weights + self.drafter_state

    @property
    def drafter_share(self) -> float:
        """Of the total."""
        return (self.drafter_weights + self.drafter_state) / self.total


def tree_bytes(tree: Any) -> int:
    """Bytes of a pytree's arrays, or of what `jax.eval_shape` says of them."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def estimate_memory(
    target: Target, drafter: Drafter | None = None, *, batch: int = 1, context: int
) -> Memory:
    """What decoding `batch` rows of up to `context` tokens holds, by shapes alone: nothing is allocated.

    Args:
      context: tokens of prompt and output together.
    """
    for name, value in (("batch", batch), ("context", context)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    slots = bucket(context + (0 if drafter is None else drafter.num_draft) + 2)
    own = {id(x) for x in jax.tree.leaves(target)}
    extra = [x for x in jax.tree.leaves(drafter) if id(x) not in own]
    start = (lambda: None) if drafter is None else partial(drafter.init, target, batch, slots)
    return Memory(
        weights=tree_bytes(target),
        cache=tree_bytes(jax.eval_shape(partial(target.init_cache, batch, slots))),
        drafter_weights=tree_bytes(extra),
        drafter_state=tree_bytes(jax.eval_shape(start)),
    )


def price_per_million(price_per_hour: float, tokens_per_second: float) -> float:
    """What a million tokens cost on a machine of this price, in its currency."""
    given = {"price_per_hour": price_per_hour, "tokens_per_second": tokens_per_second}
    for name, value in given.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value}")
    return price_per_hour / 3600 / tokens_per_second * 1e6
