"""Measures what speculation costs and what it would gain, before anyone pays for it."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.vocabulary import check_same_tokens, shared_tokens
from specjax.decoding import DecodeState, decode, draft, prefill, verify
from specjax.drafters.base import Observation
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.early_exit import EarlyExit
from specjax.generate import bucket, generate, prepare
from specjax.models.transformer import Target, Transformer
from specjax.sampling import Sampling
from specjax.trees import row_widths


@partial(jax.jit, static_argnames=("width", "passes"), donate_argnames="cache")
def bare_passes(target: Target, cache: Any, tokens: jax.Array, width: int, passes: int):
    """`passes` target passes of `width` tokens, each committed by one token."""

    def step(_, carry):
        cache, tokens = carry
        positions = cache.length[:, None] + jnp.arange(width)
        out = target(tokens, positions, cache)
        cache = cache.commit(out.block, jnp.ones_like(cache.length))
        return cache, jnp.argmax(out.logits, axis=-1).astype(jnp.int32)

    return jax.lax.fori_loop(0, passes, step, (cache, tokens))


def time_pass(
    target: Target, width: int, *, batch: int = 1, slots: int = 512, passes: int = 20
) -> float:
    """Seconds of one bare pass of `width` tokens over a cache of `slots` slots, 100 of them filled.

    Call twice: the first call compiles.
    """
    cache = target.init_cache(batch, slots)
    cache = cache.replace(length=cache.length + 100)
    tokens = jnp.ones((batch, width), jnp.int32)
    began = time.perf_counter()
    jax.block_until_ready(bare_passes(target, cache, tokens, width, passes))
    return (time.perf_counter() - began) / passes


def measure_passes(
    target: Target, widths: Sequence[int], *, batch: int = 1, slots: int = 512, repeats: int = 3
) -> np.ndarray:
    """Seconds of a pass of every width, medians of measurements in turn: float64[widths]."""
    times = np.zeros((repeats + 1, len(widths)))
    for attempt in range(repeats + 1):  # the first compiles
        for i, width in enumerate(widths):
            times[attempt, i] = time_pass(target, width, batch=batch, slots=slots)
    return np.median(times[1:], axis=0)


def measure_costs(
    target: Target, widths: Sequence[int], *, batch: int = 1, slots: int = 512, repeats: int = 3
) -> np.ndarray:
    """The verify curve: cost of a pass of every width in passes of the first, medians of measurements in turn.

    For `Adaptive(drafter, costs=measure_costs(target, ladder(drafter.num_draft)))`.
    """
    medians = measure_passes(target, widths, batch=batch, slots=slots, repeats=repeats)
    return medians / medians[0]


def time_call(function: Any, *arguments: Any, repeats: int = 5) -> float:
    """Seconds of a call, the mean of `repeats`, after one that compiles."""
    jax.block_until_ready(function(*arguments))
    began = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(function(*arguments))
    return (time.perf_counter() - began) / repeats


def nothing(target: Target, drafter: Any, state: DecodeState) -> jax.Array:
    """What handing over a model's arrays costs, which a round inside the loop does not pay."""
    return state.length


def measure_draft_cost(
    target: Target,
    drafter: Any,
    prompt: Sequence[int],
    *,
    batch: int = 1,
    max_new_tokens: int = 64,
    slots: int | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    repeats: int = 5,
) -> float:
    """Cost of one proposal after a prompt, in target passes over one token: the median of measurements in turn.

    What a head makes of a round's committed tokens is part of it, measured after a round in which one draft stood.

    Args:
      prompt: token ids.
      batch: rows, all of this prompt.
      max_new_tokens: room that the caches have beside the prompt; slots: theirs, as `generate` takes them.
      sampling: of the rows; drafts of networks are drawn accordingly.
    """
    drafter, state, chunk = prepare(
        target,
        [prompt] * batch,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=0,
        stop_token_ids=(),
        slots=slots,
    )
    state = prefill(target, drafter, state, chunk)
    tokens = jnp.zeros((batch, drafter.num_draft + 1), jnp.int32)
    taps = jax.eval_shape(lambda: target(tokens, tokens, state.cache, taps=drafter.taps)).taps
    seen = Observation(
        tokens=tokens,
        count=jnp.full(batch, min(2, tokens.shape[1]), jnp.int32),
        taps=jnp.zeros(taps.shape, taps.dtype),
        next_token=tokens[:, 0],
        widths=row_widths(drafter.num_draft),
    )

    def propose(target: Target, drafter: Any, state: DecodeState) -> Any:
        return draft(target, drafter, state)[1]

    def observe(target: Target, drafter: Any, state: DecodeState, seen: Observation) -> Any:
        after = drafter.observe(target, state.drafter_state, seen)
        return jax.tree.map(lambda x: x.ravel()[:1], after)  # its arrays stay where they are

    @jax.jit
    def observed(target: Target, drafter: Any, state: DecodeState, seen: Observation) -> Any:
        return drafter.observe(target, state.drafter_state, seen)

    if drafter.taps:
        after = observed(target, drafter, state, seen)
        state = replace(state, drafter_state=after)
    hand_over = jax.jit(nothing)
    parts: list[tuple[Any, tuple[Any, ...]]] = [(jax.jit(propose), (state,))]
    if (
        drafter.taps
    ):  # on what proposing leaves behind, as in a round: P-EAGLE's rows no longer wait then
        parts.append((jax.jit(observe), (jax.jit(draft)(target, drafter, state)[0], seen)))
    ratios = []
    for _ in range(repeats + 1):
        call = time_call(hand_over, target, drafter, state)
        spent = sum(time_call(part, target, drafter, *given) - call for part, given in parts)
        whole = time_pass(target, 1, batch=batch, slots=state.tokens.shape[1])
        ratios.append(spent / whole)
    return max(float(np.median(ratios[1:])), 0.0)  # the first compiled


def time_split(
    target: Target,
    drafter: Any,
    prompt: Sequence[int],
    *,
    rounds: int = 32,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
) -> dict[str, float]:
    """Where the time of a round goes, on a real prompt at batch 1.

    Drafting and verifying are timed by themselves on the very states of the rounds, whose widths differ; the rest is what
    a whole round takes beside them: acceptance is part of verifying, what a head makes of the committed tokens is part of
    the rest.

    Args:
      prompt: token ids.
      rounds: that are timed.

    Returns:
      seconds per round: `draft`, `verify`, `rest`, `round`.
    """
    drafter, state, chunk = prepare(
        target,
        [prompt],
        drafter=drafter,
        max_new_tokens=(rounds + 1) * ((0 if drafter is None else drafter.num_draft) + 1),
        sampling=sampling,
        key=0,
        stop_token_ids=(),
    )
    state = prefill(target, drafter, state, chunk)
    # what leaves a program is copied, so each part returns no more than what it decides
    prepared = jax.jit(draft)
    propose = jax.jit(lambda *given: draft(*given)[1])
    check = jax.jit(lambda *given: verify(*given).acceptance)
    hand_over = jax.jit(nothing)
    found: dict[str, list[float]] = {"call": [], "draft": [], "verify": []}
    whole = []
    for _ in range(4):
        copied = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        began = time.perf_counter()
        jax.block_until_ready(decode(target, drafter, copied, rounds))
        whole.append((time.perf_counter() - began) / rounds)
    for _ in range(rounds):
        _, proposal, context = prepared(target, drafter, state)
        found["call"].append(time_call(hand_over, target, drafter, state, repeats=3))
        found["draft"].append(time_call(propose, target, drafter, state, repeats=3))
        found["verify"].append(
            time_call(check, target, drafter, state, proposal, context, repeats=3)
        )
        state = decode(target, drafter, state, 1)
    means = {name: float(np.mean(seconds)) for name, seconds in found.items()}
    call = means.pop("call")
    means = {name: max(seconds - call, 0.0) for name, seconds in means.items()}
    means["round"] = float(np.median(whole[1:]))  # the first compiled
    return means | {"rest": means["round"] - means["draft"] - means["verify"]}


def expected_tokens(rate: float, num_draft: int) -> float:
    """Tokens per round, (1 - a^(K+1)) / (1 - a), if each draft stands with probability a (arXiv 2211.17192)."""
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must be a probability in [0, 1], got {rate}")
    return num_draft + 1.0 if rate == 1 else (1 - rate ** (num_draft + 1)) / (1 - rate)


@dataclass(frozen=True)
class PairReport:
    """What a draft model would do for a target.

    Attributes:
      same_tokens: whether ids mean the same texts to both.
      shared_vocabulary: share of the target's tokens that the draft has; NaN where no tokenizers tell.
      rates: per temperature, the chance that draft i stands if those before it did, float64[K].
      draft_cost: one pass of the draft in passes of the target.
      costs: a target pass over K + 1 tokens in passes of one, for K = 1, 2, ...
      speed_up: per temperature, expected tokens per round over its cost, for K = 1, 2, ...
    """

    same_tokens: bool
    shared_vocabulary: float
    rates: dict[float, np.ndarray]
    draft_cost: float
    costs: np.ndarray
    speed_up: dict[float, np.ndarray]

    def best(self, temperature: float = 0.0) -> tuple[int, float]:
        """The number of drafts that pays most and its speed-up; 0 and 1.0 where none pays."""
        ratios = self.speed_up[temperature]
        k = int(np.nanargmax(ratios)) + 1
        return (k, float(ratios[k - 1])) if ratios[k - 1] > 1 else (0, 1.0)


def check_pair(
    target: Target,
    draft: Target,
    prompts: Sequence[Sequence[int]],
    *,
    num_draft: int = 7,
    max_new_tokens: int = 64,
    temperatures: Sequence[float] = (0.0, 1.0),
    repeats: int = 3,
) -> PairReport:
    """Measures vocabulary agreement, acceptance on these prompts, and costs on this machine.

    The speed-up of K drafts is 1 + r_1 + r_1 r_2 + ... over v(K + 1) + c K: measured conditional rates r, the verify
    curve v and the draft's cost c, all in passes of the target.

    Raises:
      ValueError: the vocabularies differ and nothing is shared; bad prompts.
    """
    same, shared = True, float("nan")
    sources = getattr(target, "source", None), getattr(draft, "source", None)
    try:
        check_same_tokens(target, draft)
    except ValueError:
        same = False
    if all(sources):
        to_draft, _ = shared_tokens(*(str(s) for s in sources))
        shared = float(np.mean(to_draft >= 0))
    if not same:
        raise ValueError(
            f"the draft's ids mean other texts than the target's; {shared:.0%} of the target's tokens have a "
            "counterpart: check specjax.translate(draft, target) in its place (`--translate` of scripts/check_pair.py)"
        )
    rates = {}
    for temperature in temperatures:
        counts = generate(
            target,
            prompts,
            drafter=DraftModel(draft, num_draft=num_draft),
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=temperature),
            key=0,
        ).statistics
        accepted = np.sum(counts.accepted_per_position, axis=0, dtype=float)
        reached = np.concatenate([[np.sum(counts.drafted_per_position[:, 0])], accepted[:-1]])
        rates[temperature] = np.where(reached > 0, accepted / np.maximum(reached, 1), np.nan)
    costs = measure_costs(target, range(1, num_draft + 2), repeats=repeats)
    times = [
        [time_pass(model, 1) for model in (draft, target)] for _ in range(repeats + 1)
    ]  # in turn; the first compiles
    ratio = float(np.median([a / b for a, b in times[1:]]))
    k = np.arange(1, num_draft + 1)
    speed_up = {
        t: (1 + np.cumsum(np.cumprod(np.nan_to_num(r)))) / (costs[1:] + ratio * k)
        for t, r in rates.items()
    }
    return PairReport(
        same_tokens=same,
        shared_vocabulary=shared,
        rates=rates,
        draft_cost=ratio,
        costs=costs[1:],
        speed_up=speed_up,
    )


def layer_changes(target: Transformer, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """How much every layer changes the stream: mean over tokens of 1 - cosine(input, output), float64[L].

    Layers that change little are the first to skip (SWIFT and CLaSp use the same similarity).
    """
    count = target.config.num_layers
    total, tokens = np.zeros(count), 0
    for prompt in prompts:
        size = bucket(len(prompt))
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(prompt)] = prompt
        changes = np.asarray(_changes(target, jnp.asarray(padded), len(prompt)))
        total += changes
        tokens += len(prompt)
    return total / tokens


@jax.jit
def _changes(target: Transformer, tokens: jax.Array, length: jax.Array | int) -> jax.Array:
    size = tokens.shape[1]
    positions = jnp.arange(size)[None]
    taps = tuple(range(target.config.num_layers + 1))
    x = target(tokens, positions, target.init_cache(1, 1), taps=taps).taps[0].astype(jnp.float32)
    norm = jnp.linalg.norm(x, axis=-1)
    cosine = jnp.sum(x[:, :-1] * x[:, 1:], -1) / (norm[:, :-1] * norm[:, 1:])
    return jnp.sum(jnp.where(positions[0, :, None] < length, 1 - cosine, 0.0), axis=0)


@dataclass(frozen=True)
class LayerTrial:
    """A set of drafting layers, measured.

    Attributes:
      drafter: what was tried.
      mean_acceptance_length: tokens per target pass.
      speed_up: plain decoding time over its time, on the same prompts in turn.
    """

    drafter: EarlyExit
    mean_acceptance_length: float
    speed_up: float


def try_layers(
    target: Transformer,
    prompts: Sequence[Sequence[int]],
    drafters: Sequence[EarlyExit],
    *,
    max_new_tokens: int = 64,
) -> Iterator[LayerTrial]:
    """Decodes the prompts greedily, plainly and with every drafter in turn; yields each result."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    for drafter in drafters:
        for used in (None, drafter):  # compiles
            generate(target, [prompts[0]], drafter=used, **options)
        spent, emitted, rounds = {True: 0.0, False: 0.0}, 0, 0
        for prompt in prompts:
            for drafted in (False, True):
                out = generate(target, [prompt], drafter=drafter if drafted else None, **options)
                spent[drafted] += out.decode_seconds
            emitted += int(out.statistics.emitted.sum())
            rounds += int(out.statistics.rounds.sum())
        yield LayerTrial(drafter, emitted / max(rounds, 1), spent[False] / spent[True])
