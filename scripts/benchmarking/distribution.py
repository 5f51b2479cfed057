"""Whether sampled text follows the target: drafted samples against plain ones, by chi-square."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from specjax.decoding import DecodeState, decode, prefill
from specjax.drafters.base import Shared
from specjax.generate import prepare
from specjax.sampling import Sampling, make_keys

TOKENS = 4  # of a sample: the first is drafted after the prompt, the others after drafts that stood or fell
EXPECTED = 5  # rarer tokens are counted together: what the chi-square law needs
ALPHA = 1e-3  # chance that any of a report's tests fails by chance


LEAST = 4 * EXPECTED  # samples in which two tokens can each be expected that often, twice over


def chi_square(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """Pearson's test that two samples of token ids, int[n] and int[m], come from one distribution.

    Returns:
      `statistic`, `degrees` of freedom and `p`; p is 1 where one class is left, which tells nothing.
    """
    a, b = np.asarray(a), np.asarray(b)
    ids = np.unique(np.concatenate([a, b]))
    counts = np.stack([(x[:, None] == ids).sum(axis=0) for x in (a, b)]).astype(float)
    share = counts.sum(axis=1, keepdims=True) / counts.sum()
    few = (share * counts.sum(axis=0)).min(axis=0)
    rare = few < EXPECTED
    joined = _join(few[rare])
    together = [np.bincount(joined, weights=row) for row in counts[:, rare]]
    counts = np.concatenate([counts[:, ~rare], np.stack(together)], axis=1)
    expected = share * counts.sum(axis=0)
    statistic, degrees = float(((counts - expected) ** 2 / expected).sum()), counts.shape[1] - 1
    p = float(jax.scipy.stats.chi2.sf(statistic, degrees)) if degrees else 1.0
    return {"statistic": statistic, "degrees": degrees, "p": p}


def _join(few: np.ndarray) -> np.ndarray:
    """Classes int[n] of rare tokens, neighbours in the vocabulary together until each class can be expected often enough."""
    classes, found, expected = np.zeros(len(few), int), 0, 0.0
    for i, one in enumerate(few):
        classes[i] = found
        expected += one
        if expected >= EXPECTED:
            found, expected = found + 1, 0.0
    return np.minimum(classes, max(found - 1, 0))  # what is left over goes to the last


def repeat(state: DecodeState, keys: jax.Array) -> DecodeState:
    """A prefilled row as one row for every key [B]. Nothing is shared with it: decoding overwrites what it is given."""

    def rows(x: Any) -> Any:
        copied = isinstance(x, Shared)
        return jax.tree.map(jnp.copy, x) if copied else jnp.repeat(x, len(keys), axis=0)

    one = replace(state, stop_token_ids=None, keys=None)
    many = jax.tree.map(rows, one, is_leaf=lambda x: isinstance(x, Shared))
    return replace(many, stop_token_ids=jnp.copy(state.stop_token_ids), keys=keys)


def sample(
    target: Any,
    prompt: Sequence[int],
    drafter: Any,
    *,
    samples: int,
    key: int,
    batch: int = 64,
) -> tuple[np.ndarray, float]:
    """Independent samples of the first new tokens at temperature 1, int[samples, TOKENS], and tokens per pass."""
    drafter, state, chunk = prepare(
        target,
        [prompt],
        drafter=drafter,
        max_new_tokens=TOKENS,
        sampling=Sampling(temperature=1.0),
        key=key,
        stop_token_ids=(),
    )
    state = prefill(target, drafter, state, chunk)  # once: the samples differ in their keys alone
    tokens, rounds = [], 0
    for keys in make_keys(key, -(-samples // batch) * batch).reshape(-1, batch):
        done = decode(target, drafter, repeat(state, keys), TOKENS)
        tokens.append(np.asarray(done.tokens[:, len(prompt) : len(prompt) + TOKENS]))
        rounds += int(done.statistics.rounds.sum())
    found = np.concatenate(tokens)
    return found[:samples], found.size / rounds


def measure_law(
    target: Any,
    prompts: Sequence[Sequence[int]],
    drafters: Mapping[str, Any],
    *,
    samples: int,
) -> list[dict[str, Any]]:
    """A test for every method, prompt and place. Plain samples and every method's have keys of their own."""
    rows = []
    for i, prompt in enumerate(prompts):
        plain, _ = sample(target, prompt, None, samples=samples, key=i)
        for j, (name, drafter) in enumerate(drafters.items(), 1):
            key = i + j * len(prompts)
            drafted, length = sample(target, prompt, drafter, samples=samples, key=key)
            rows += [
                {"method": name, "prompt": i, "place": at + 1, "tokens_per_pass": length}
                | chi_square(plain[:, at], drafted[:, at])
                for at in range(TOKENS)
            ]
    return rows


def law_errors(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tests that fail at a level that all of them together reach by chance once in a thousand reports."""
    return [
        f"{row['method']} does not follow the target's distribution: new token {row['place']} of prompt "
        f"{row['prompt']}, chi-square {row['statistic']:.1f} with {row['degrees']} degrees of freedom, p {row['p']:.1e}"
        for row in rows
        if row["p"] * len(rows) < ALPHA
    ]


def law_table(rows: Sequence[Mapping[str, Any]], samples: int) -> Table:
    title = f"Plain against drafted at temperature 1, {samples} samples each"
    table = Table(
        "method", "prompt", "tokens/pass", "token", "chi-square", "d.f.", "p", title=title
    )
    for row in rows:
        table.add_row(
            row["method"],
            str(row["prompt"]),
            f"{row['tokens_per_pass']:.2f}",
            str(row["place"]),
            f"{row['statistic']:.1f}",
            str(row["degrees"]),
            f"{row['p']:.3f}",
        )
    return table
