"""Many prompts through few slots: the same tokens, whatever the slots, the order and the interruptions."""

import json

import numpy as np
import pytest
from zoo import noisy, tiny_target

import specjax
from specjax import DraftModel, NGram, Sampling, Suffix
from specjax.batching import generate_stream, generate_to_file, plan, read_completions
from specjax.decoding import decode, prefill

TARGET = tiny_target()
RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(0, 61, RNG.integers(1, 30)).tolist() for _ in range(11)]
SAMPLING = [Sampling(temperature=t) for t in RNG.choice([0.0, 1.0], 11)]
OPTIONS = {"max_new_tokens": 20, "sampling": SAMPLING, "key": 3, "stop_token_ids": [17, 4]}
WHOLE = specjax.generate(TARGET, PROMPTS, **OPTIONS)
DRAFTERS = {
    "plain": None,
    "ngram": NGram(num_draft=3, min_match=1),
    "suffix": Suffix(num_draft=3, memory_size=128),
    "mod": NGram.mod(n=1, min_draft=1, max_draft=3, slots=1 << 10),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "mod" else pytest.mark.thorough) for n in DRAFTERS]
)
def test_stream_equals_generate(name):
    done = list(generate_stream(TARGET, PROMPTS, slots=3, drafter=DRAFTERS[name], **OPTIONS))
    assert sorted(c.index for c in done) == list(range(11))
    for completion in done:
        np.testing.assert_array_equal(completion.tokens, WHOLE.tokens[completion.index])
        assert completion.emitted == len(completion.tokens)
        assert completion.prompt_tokens == len(PROMPTS[completion.index])
    if name == "suffix":
        assert sum(c.accepted for c in done) > 0


@pytest.mark.thorough
def test_a_memory_learns_from_completions_unless_told_not_to():
    """The same prompt again: who remembers drafts its answer."""
    given = {"slots": 1, "drafter": Suffix(num_draft=3, memory_size=128), "max_new_tokens": 20}
    rounds = {
        remember: [
            c.rounds for c in generate_stream(TARGET, [PROMPTS[0]] * 2, remember=remember, **given)
        ]
        for remember in (True, False)
    }
    assert rounds[True][1] < rounds[True][0] == rounds[False][0] == rounds[False][1]


@pytest.mark.thorough
def test_sampled_drafts_do_not_depend_on_slots():
    drafter = DraftModel(noisy(TARGET, 0.05), num_draft=2)
    runs = [
        {c.index: c for c in generate_stream(TARGET, PROMPTS, slots=n, drafter=drafter, **OPTIONS)}
        for n in (2, 3)
    ]
    for index in range(11):
        np.testing.assert_array_equal(runs[0][index].tokens, runs[1][index].tokens)
        assert runs[0][index].rounds == runs[1][index].rounds


@pytest.mark.thorough
def test_nothing_is_compiled_anew_while_rows_are_refilled():
    list(generate_stream(TARGET, PROMPTS, slots=3, drafter=DRAFTERS["ngram"], **OPTIONS))
    before = decode._cache_size(), prefill._cache_size()
    more = [*PROMPTS, *PROMPTS[::-1]]
    settings = {**OPTIONS, "sampling": SAMPLING + SAMPLING[::-1]}
    list(generate_stream(TARGET, more, slots=3, drafter=DRAFTERS["ngram"], **settings))
    assert (decode._cache_size(), prefill._cache_size()) == before


def test_a_killed_run_goes_on(tmp_path):
    path = tmp_path / "out" / "answers.jsonl"

    class Killed(Exception):
        pass

    def kill(completion):
        kill.left -= 1
        if not kill.left:
            raise Killed

    kill.left = 4
    with pytest.raises(Killed):
        generate_to_file(TARGET, PROMPTS, path, slots=3, progress=kill, **OPTIONS)
    first = read_completions(path)
    assert len(first) == 4
    with path.open("a") as file:
        file.write('{"index": 9, "tok')  # killed in the middle of a line
    seen = []
    added = generate_to_file(
        TARGET,
        PROMPTS,
        path,
        slots=2,
        extra=lambda c: {"twice": 2 * c.emitted},
        progress=lambda c: seen.append(c.index),
        **OPTIONS,
    )
    assert added == 7 == len(seen) and not set(seen) & set(first)
    rows = read_completions(path)
    assert len(path.read_text().splitlines()) == len(rows) == 11
    for index, row in rows.items():
        assert row["tokens"] == WHOLE.tokens[index].tolist()
        assert index in first or row["twice"] == 2 * row["emitted"]
    assert generate_to_file(TARGET, PROMPTS, path, slots=2, **OPTIONS) == 0


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"tokens": []}) + "\n" + json.dumps({"index": 1}) + "\n")
    with pytest.raises(ValueError, match="line 1: not a completion"):
        read_completions(path)


@pytest.mark.parametrize("slots", [0, 1.5])
def test_wrong_slots_are_named(slots):
    with pytest.raises(ValueError, match=r"slots must be .* got"):
        next(generate_stream(TARGET, PROMPTS, slots=slots, **OPTIONS))


def test_prompts_of_a_size_share_caches_when_they_fill_the_rows():
    def sizes(*lengths):
        arrays = [np.zeros(length, np.int32) for length in lengths]
        found = plan(arrays, range(len(arrays)), 100, 4)
        assert sorted(i for _, group in found for i in group) == list(range(len(arrays)))
        return [(size, len(group)) for size, group in found]

    assert sizes(*[600] * 8, *[100] * 8) == [(768, 8), (256, 8)]
    assert sizes(*[600] * 8, *[100] * 7) == [(768, 15)]
    assert sizes(*[600] * 3, *[300] * 9, *[100] * 8) == [(768, 12), (256, 8)]
    assert sizes(*[600] * 4, *[300] * 8) == [(768, 4), (512, 8)]
