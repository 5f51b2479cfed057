"""Measuring before paying: pairs of models, layers, vocabularies, running totals."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from test_vocabulary import folder
from zoo import bigram, noisy, tiny_head, tiny_target

import specjax
from specjax import DraftModel, Eagle3, EarlyExit, Monitor, NGram, Sampling
from specjax.checkpoints.vocabulary import shared_tokens
from specjax.drafters.translated import TranslatedModel, translate
from specjax.tuning import (
    check_pair,
    expected_tokens,
    layer_changes,
    measure_costs,
    measure_draft_cost,
    time_split,
    try_layers,
)

TARGET = tiny_target()
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [2, 7]]


def test_expected_tokens():
    assert expected_tokens(0.7, 5) == pytest.approx(2.94117, abs=1e-5)
    assert expected_tokens(1.0, 3) == 4 and expected_tokens(0.0, 3) == 1
    with pytest.raises(ValueError, match="rate must be"):
        expected_tokens(1.2, 3)


@pytest.mark.thorough
def test_a_pair_is_reported():
    report = check_pair(
        TARGET, noisy(TARGET, 0.02), PROMPTS, num_draft=3, max_new_tokens=40, repeats=1
    )
    assert report.same_tokens and report.costs.shape == (3,) and report.draft_cost > 0
    for rates in report.rates.values():
        assert ((rates > 0.4) & (rates <= 1)).all()
    expected = (1 + np.cumsum(np.cumprod(report.rates[0.0]))) / (
        report.costs + report.draft_cost * np.arange(1, 4)
    )
    np.testing.assert_allclose(report.speed_up[0.0], expected)
    # what is best depends on this moment's times; of given ones it is known
    assert replace(report, speed_up={0.0: np.asarray([1.1, 1.3, 1.2])}).best() == (2, 1.3)
    assert replace(report, speed_up={0.0: np.asarray([0.9, 0.8, 0.7])}).best() == (0, 1.0)
    wrong = check_pair(
        TARGET,
        tiny_target(5),
        PROMPTS,
        num_draft=2,
        max_new_tokens=30,
        temperatures=(0.0,),
        repeats=1,
    )
    assert wrong.rates[0.0][0] < 0.3


def test_costs_start_at_one():
    costs = measure_costs(TARGET, (1, 4), slots=256, repeats=1)
    assert costs[0] == 1 and costs[1] > 0


@pytest.mark.thorough
def test_what_a_proposal_costs():
    """In passes of the target: a draft that is the target itself costs its number of passes, a head some share of that."""
    options = {"batch": 2, "max_new_tokens": 8, "repeats": 3}
    drafters = {
        "look-up": NGram(num_draft=2),
        "itself": DraftModel(TARGET, num_draft=5),
        "head": Eagle3(tiny_head(TARGET), num_draft=3),
    }
    costs = {n: measure_draft_cost(TARGET, d, [1, 2, 1, 2], **options) for n, d in drafters.items()}
    assert costs["itself"] > 1.5 and costs["itself"] > costs["look-up"] >= 0
    assert np.isfinite(costs["head"]) and costs["head"] > 0


@pytest.mark.thorough
def test_other_tokens_are_refused_and_translated(tmp_path):
    """The draft reads and proposes the target's ids; tokens that it lacks are never proposed."""
    words = [f"w{i}" for i in range(11)]
    ours = folder(tmp_path / "ours", words)
    theirs = folder(tmp_path / "theirs", [*words[:8][::-1], "other", "more"])
    to_draft, to_target = shared_tokens(str(ours), str(theirs))
    assert to_draft.tolist() == [7, 6, 5, 4, 3, 2, 1, 0, -1, -1, -1]
    assert to_target.tolist() == [7, 6, 5, 4, 3, 2, 1, 0, -1, -1]

    target = bigram(3, 11)
    known = np.arange(8)
    table = np.full((10, 10), -9.0, np.float32)
    table[np.ix_(to_draft[known], to_draft[known])] = np.asarray(target.table)[np.ix_(known, known)]
    draft = target.replace(table=jnp.asarray(table))
    model = TranslatedModel(model=draft, to_draft=jnp.asarray(to_draft))
    assert model.coverage == pytest.approx(8 / 11) and model.vocab_size == 11
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        options = {"max_new_tokens": 200, "sampling": sampling, "key": 1}
        plain = specjax.generate(target, [[1]] * 4, **options)
        out = specjax.generate(target, [[1]] * 4, drafter=DraftModel(model), **options)
        if sampling.temperature == 0:
            for a, b in zip(out.tokens, plain.tokens, strict=True):
                np.testing.assert_array_equal(a, b)
        assert out.statistics.mean_acceptance_length > 1.1
    with pytest.raises(ValueError, match="the draft and the target was not loaded"):
        translate(draft, target)
    with pytest.raises(ValueError, match="no token in common"):
        shared_tokens(str(ours), str(folder(tmp_path / "none", ["x", "y"])))


@pytest.mark.thorough
def test_layers_that_change_little_are_found():
    changes = layer_changes(TARGET, PROMPTS)
    assert changes.shape == (2,) and (changes > 0).all()
    trials = list(try_layers(TARGET, PROMPTS, [EarlyExit(2), EarlyExit(1)], max_new_tokens=20))
    assert trials[0].mean_acceptance_length == pytest.approx(4, abs=0.4)
    assert trials[1].mean_acceptance_length < trials[0].mean_acceptance_length
    assert all(t.speed_up > 0 for t in trials)


@pytest.mark.thorough
def test_monitor_adds_up_and_exports(tmp_path):
    monitor = Monitor()
    assert monitor.to_json()["mean_acceptance_length"] is None
    outs = [
        specjax.generate(
            TARGET, PROMPTS, drafter=NGram(num_draft=n, min_match=1), max_new_tokens=40
        )
        for n in (2, 4)
    ]
    for out in outs:
        monitor.add(out.statistics, {"decode": out.decode_seconds})
        monitor.append_to(tmp_path / "log.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows[1]["emitted"] == 240 == monitor.emitted and rows[0]["emitted"] == 120
    assert sum(rows[1]["accepted_per_position"]) == rows[1]["accepted"] == monitor.accepted
    assert rows[1]["seconds"]["decode"] == pytest.approx(sum(o.decode_seconds for o in outs))
    text = monitor.prometheus(model_name='a "b"')
    assert f'vllm:spec_decode_num_drafts_total{{model_name="a \\"b\\""}} {monitor.drafts}' in text
    assert "# TYPE vllm:spec_decode_num_draft_tokens counter" in text
    assert 'per_pos_total{model_name="a \\"b\\"",position="0"} ' in text
    assert monitor.drafts <= monitor.rounds
    assert monitor.mean_acceptance_length == monitor.emitted / monitor.rounds


@pytest.mark.thorough
@pytest.mark.parametrize("drafter", [None, NGram(num_draft=2)])
def test_time_split_adds_up(drafter):
    parts = time_split(TARGET, drafter, [1, 2, 3, 1, 2], rounds=4)
    assert set(parts) == {"draft", "verify", "rest", "round"}
    assert parts["draft"] >= 0 and parts["verify"] >= 0 and parts["round"] > 0
    assert parts["draft"] + parts["verify"] + parts["rest"] == pytest.approx(parts["round"])
