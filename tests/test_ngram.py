"""n-gram look-up against a slow reading of its definition."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import bigram

import specjax
from specjax.drafters.ngram import NGram, continuation, longest_suffix_match

HISTORY = 24  # one shape, one program


def slow_match(row, max_match):
    """(end, match) by trying every end position."""
    best = (0, 0)
    for end in range(len(row) - 1):
        agree = 0
        while agree < min(max_match, end + 1) and row[end - agree] == row[len(row) - 1 - agree]:
            agree += 1
        best = max(best, (agree, end))
    return (best[1], best[0]) if best[0] else (0, 0)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=HISTORY),
    st.lists(st.integers(0, 3), min_size=HISTORY, max_size=HISTORY),
)
def test_match_equals_brute_force_and_reads_nothing_past_the_length(row, garbage):
    tokens = np.asarray([row + garbage[: HISTORY - len(row)]], np.int32)
    length = jnp.asarray([len(row)])
    end, match = longest_suffix_match(jnp.asarray(tokens), length, 4)
    assert (int(end[0]), int(match[0])) == slow_match(row, 4)
    if match[0]:
        drafts = np.asarray(continuation(jnp.asarray(tokens), length, end, 7))[0]
        grown = list(row)
        for i, draft in enumerate(drafts):  # copying token by token, over what was copied
            assert draft == grown[int(end[0]) + 1 + i]
            grown.append(draft)


def test_most_recent_of_equal_matches_wins():
    row = [1, 2, 7, 5, 1, 2, 8, 5, 1, 2]
    end, match = longest_suffix_match(jnp.asarray([row]), jnp.asarray([10]), 8)
    assert (int(end[0]), int(match[0])) == (5, 3)  # "5 1 2" beats the later-looking "1 2"


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_loop_is_drafted_over_its_own_end(period):
    """A target that repeats itself is drafted at full width, not one period at a time."""
    size = 9
    table = np.full((size, size), -5.0, np.float32)
    for i in range(size):
        table[i, (i + 1) % period if i < period else 0] = 5.0
    target = bigram(0, size).replace(table=jnp.asarray(table))
    out = specjax.generate(target, [[8, 0]], drafter=NGram(num_draft=7), max_new_tokens=100)
    expected = [(i + 1) % period for i in range(100)]
    assert out.tokens[0].tolist() == expected
    assert out.statistics.mean_acceptance_length > 5


def test_proposals_grow_with_the_match():
    drafter = NGram()
    assert [drafter.proposal_length(m) for m in range(9)] == [0, 0, 3, 3, 7, 7, 7, 7, 15]
    assert [drafter.proposal_length(m, sampled=True) for m in (2, 3)] == [0, 3]
    assert NGram(num_draft=5).proposal_length(8) == 5


@pytest.mark.parametrize(
    "wrong", [{"num_draft": -1}, {"min_match": 0}, {"min_match": 5, "max_match": 4}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="got"):
        NGram(**wrong)
