"""The tiny model: the same one every time, and one that has learnt something."""

import jax
import numpy as np
import pytest

from training.tiny import library_text, openings, train_tiny


@pytest.mark.thorough
def test_training_is_deterministic_and_learns():
    model, tokenizer, losses = train_tiny(updates=24)
    again, _, _ = train_tiny(updates=24)
    for a, b in zip(*map(jax.tree.leaves, (model, again)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(losses) == 24 and losses[-1] < losses[0] - 1.0
    assert model.vocab_size == tokenizer.vocab_size == 512
    text = library_text()[0]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    other, _, _ = train_tiny(updates=1, seed=1)
    assert (np.asarray(other.head[...]) != np.asarray(model.head[...])).any()


def test_openings_are_places_of_the_text():
    found = openings(50)
    assert len(set(found)) == 50 and found == openings(50) and found != openings(50, seed=1)
    everything = "\n".join(library_text())
    assert all(text in everything and text.count("\n") == 3 for text in found)
    with pytest.raises(ValueError, match="count must be at most"):
        openings(10_000)
