"""The host's side: what is refused at the border, and what comes back."""

import numpy as np
import pytest
from zoo import tiny_target

import specjax
from specjax.decoding import decode
from specjax.generate import bucket

TARGET = tiny_target(context_length=200)


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([], {}, "non-empty list"),
        ("text", {}, "load_tokenizer"),
        ([1, 2, 3], {}, "token-id lists"),
        ([[1], []], {}, r"prompts\[1\] must be a non-empty list"),
        ([[1, 61]], {}, r"prompts\[0\]\[1\] must be a token id in \[0, 61\), got 61"),
        ([[-1]], {}, "got -1"),
        ([[1.5]], {}, "integers"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens must be"),
        ([[1]], {"max_new_tokens": 1.5}, "max_new_tokens must be"),
        ([[1] * 201], {}, "201 tokens and max_new_tokens is 4.*context of 200"),
        ([[1] * 190], {"max_new_tokens": 11}, "context of 200"),
        ([[1]], {"stop_token_ids": [61]}, "stop_token_ids"),
        ([[1]], {"key": 1.5}, "key must be"),
        ([[1] * 9], {"slots": 20}, "slots must be a whole number >= 33 .*, got 20"),
        ([[1] * 40], {"slots": 128.5}, "slots must be a whole number >= 129 .*, got 128.5"),
        ([[1]], {"sampling": [specjax.Sampling()] * 2}, "one Sampling or one per prompt"),
    ],
)
def test_bad_input_is_named(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        specjax.generate(TARGET, prompts, **({"max_new_tokens": 4} | options))


def test_a_draft_with_another_vocabulary_is_refused():
    draft = specjax.DraftModel(tiny_target(vocab_size=53))
    with pytest.raises(ValueError, match="61 for the target and 53 for the draft"):
        specjax.generate(TARGET, [[1]], drafter=draft, max_new_tokens=4)
    with pytest.raises(ValueError, match="num_draft must be a whole number >= 1, got 0"):
        specjax.DraftModel(TARGET, num_draft=0)


@pytest.mark.thorough
def test_the_whole_context_can_be_used():
    for drafter in (None, specjax.NGram(), specjax.DraftModel(TARGET, num_draft=4)):
        out = specjax.generate(TARGET, [[1] * 150, [2] * 3], drafter=drafter, max_new_tokens=50)
        assert [len(t) for t in out.tokens] == [50, 50]


@pytest.mark.thorough
def test_a_draft_with_a_shorter_context_falls_silent():
    draft = tiny_target(context_length=20)
    plain = specjax.generate(TARGET, [[1, 2, 3]], max_new_tokens=40)
    out = specjax.generate(
        TARGET, [[1, 2, 3]], drafter=specjax.DraftModel(draft, num_draft=4), max_new_tokens=40
    )
    np.testing.assert_array_equal(out.tokens[0], plain.tokens[0])
    assert 10 <= out.statistics.drafted[0] <= 20


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 34, 127, 128, 129, 130, 140])
def test_prompts_of_every_length_around_a_prefill_chunk(size):
    """The last token of a chunk, the first of the next, and the cache's end."""
    target = tiny_target(context_length=400)
    prompt = np.random.default_rng(size).integers(0, 61, size).tolist()
    plain = specjax.generate(target, [prompt, [3]], max_new_tokens=12)
    alone = specjax.generate(target, [[3]], max_new_tokens=12)
    np.testing.assert_array_equal(plain.tokens[1], alone.tokens[0])
    drafted = specjax.generate(
        target,
        [prompt, [3]],
        drafter=specjax.DraftModel(target, num_draft=3),
        max_new_tokens=12,
    )
    for a, b in zip(plain.tokens, drafted.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (drafted.statistics.rounds == 3).all()


def test_named_slots_are_one_program():
    target = tiny_target(context_length=600)
    drafter, compiled = specjax.NGram(num_draft=3), []
    for size in (3, 200):
        prompt = np.random.default_rng(size).integers(0, 61, size).tolist()
        given = {"drafter": drafter, "max_new_tokens": 20}
        out = specjax.generate(target, [prompt], slots=300, **given)
        compiled.append(decode._cache_size())  # pyright: ignore[reportFunctionMemberAccess]
        usual = specjax.generate(target, [prompt], **given)
        np.testing.assert_array_equal(out.tokens[0], usual.tokens[0])
        compiled.append(decode._cache_size())  # pyright: ignore[reportFunctionMemberAccess]
    first, usual, again, _ = compiled
    assert first < usual == again


def test_buckets_are_few_and_roomy():
    sizes = [bucket(n) for n in range(1, 9000)]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert all(size % 128 == 0 for size in sizes)
    assert len(set(sizes)) <= 12


@pytest.mark.thorough
def test_statistics_derive():
    out = specjax.generate(
        TARGET, [[1, 2, 3]], drafter=specjax.DraftModel(TARGET, num_draft=3), max_new_tokens=16
    )
    counts = out.statistics
    assert counts.rounds.tolist() == [4] and counts.emitted.tolist() == [16]
    assert counts.accepted.tolist() == [12] and counts.drafted.tolist() == [12]
    assert counts.acceptance_rate == 1.0 and counts.mean_acceptance_length == 4.0
    assert counts.acceptance_per_position.tolist() == [1.0, 1.0, 1.0]
    assert isinstance(counts.rounds, np.ndarray)
    nothing = specjax.generate(TARGET, [[1]], max_new_tokens=0)
    assert np.isnan(nothing.statistics.mean_acceptance_length)
    assert nothing.tokens[0].shape == (0,)
