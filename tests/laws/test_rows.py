"""Law 5: rows do not influence one another; a row's tokens depend on its prompt, key and settings alone."""

import jax
import numpy as np
import pytest
from zoo import RandomDrafter, noisy, tiny_target

import specjax
from specjax import DraftModel, NGram, Sampling

TARGET = tiny_target()
ZOO = {
    "plain": None,
    "ngram": NGram(num_draft=3, min_match=1),
    "noisy-model": DraftModel(noisy(TARGET, 0.05), num_draft=2),
    "random": RandomDrafter(num_draft=3),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4] * 4, [2, 7, 2, 7]]
MIXED = [
    Sampling(temperature=1.0),
    Sampling(),
    Sampling(temperature=0.7, top_k=5, top_p=0.9),
    Sampling(temperature=1.3, min_p=0.05),
]
KEYS = jax.vmap(jax.random.key)(np.arange(4) + 20)


def spoken(drafter, rows, **changes):
    options = {
        "max_new_tokens": 24,
        "sampling": [MIXED[i] for i in rows],
        "key": KEYS[np.asarray(rows)],
    }
    return specjax.generate(
        TARGET, [PROMPTS[i] for i in rows], drafter=drafter, **(options | changes)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", ZOO)
def test_batch_equals_single_rows(name):
    """Ragged prompts, greedy and sampled rows mixed, in another order, next to copies of themselves."""
    together = spoken(ZOO[name], [0, 1, 2, 3])
    shuffled = spoken(ZOO[name], [2, 0, 3, 2])
    for i, at in ((0, 1), (2, 0), (2, 3), (3, 2)):
        np.testing.assert_array_equal(together.tokens[i], shuffled.tokens[at])
        assert together.statistics.rounds[i] == shuffled.statistics.rounds[at]
    # alone, other steps of the processors are switched off: for every row once, then for one
    for i in range(4) if name == "plain" else (2,):
        alone = spoken(ZOO[name], [i])
        np.testing.assert_array_equal(together.tokens[i], alone.tokens[0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ngram", "random"])
def test_deterministic_drafts_never_change_a_token(name):
    """Sampled rows too: the target's draws belong to positions, so the text is plain decoding's with the same key."""
    np.testing.assert_array_equal(
        spoken(ZOO[name], [0, 1, 2, 3]).tokens, spoken(None, [0, 1, 2, 3]).tokens
    )


@pytest.mark.thorough
def test_seeds():
    sampling = Sampling(temperature=1.0)
    prompts = [[1, 2, 3]] * 3

    def tokens(key):
        out = specjax.generate(TARGET, prompts, max_new_tokens=16, sampling=sampling, key=key)
        return [t.tolist() for t in out.tokens]

    assert tokens(1) == tokens(1) == tokens(jax.random.key(1))
    assert tokens(1) != tokens(2)
    rows = tokens(1)
    assert rows[0] != rows[1] != rows[2]


@pytest.mark.parametrize(
    "name", ["plain", "ngram", pytest.param("noisy-model", marks=pytest.mark.thorough)]
)
def test_a_row_that_ends_early_changes_nothing(name):
    long = specjax.generate(TARGET, PROMPTS, drafter=ZOO[name], max_new_tokens=24)
    stop = int(long.tokens[0][2])
    cut = specjax.generate(
        TARGET, PROMPTS, drafter=ZOO[name], max_new_tokens=24, stop_token_ids=[stop]
    )
    for full, short in zip(long.tokens, cut.tokens, strict=True):
        np.testing.assert_array_equal(full[: len(short)], short)
        assert len(short) == 24 or short[-1] == stop
    assert len(cut.tokens[0]) <= 3
