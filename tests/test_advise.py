"""Advice: its arithmetic against enumeration and simulation, its commands against the engines' documented flags, its script."""

import itertools
import json
import math
import re
import shlex
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest
from test_scripts import SCRIPTS, place, run  # noqa: F401 (a fixture)
from test_vocabulary import folder
from zoo import noisy, tiny_head, tiny_mtp, tiny_target

import specjax
from specjax import AcceptanceProfile, DraftModel, Eagle3, NGram, PEagle, RoundCosts, Suffix
from specjax.advice import LEAST_GAIN, best_prediction, price_per_million
from specjax.generate import prepare
from specjax.statistics import Statistics
from specjax.trees import ladder

sys.path.insert(0, str(SCRIPTS))
import advice_files
import advise
import advisor
import batch
import common
import findings
import generate
from common import DrafterName
from rich.console import Console
from rich.text import Text

TARGET = tiny_target()


def enumerate_tokens(rates: list[float]) -> float:
    """E[tokens of a round] by listing every outcome of every draft's coin."""
    total = 0.0
    for coins in itertools.product((True, False), repeat=len(rates)):
        chance = math.prod(r if c else 1 - r for r, c in zip(rates, coins, strict=True))
        stood = len(list(itertools.takewhile(bool, coins)))
        total += chance * (stood + 1)
    return total


def counters(rounds: int, proposed: list[int], accepted: list[int]) -> Statistics:
    def row(x):
        return np.asarray([x], np.int32)

    return Statistics(
        rounds=row(rounds),
        drafted=row(sum(proposed)),
        accepted=row(sum(accepted)),
        emitted=row(rounds + sum(accepted)),
        accepted_per_position=row(accepted),
        drafted_per_position=row(proposed),
    )


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 1.0])
def test_one_rate_is_the_enumerated_formula(rate):
    profile = AcceptanceProfile.geometric(rate, 6)
    assert profile.basis == "one rate" and profile.rounds == 0
    for k in range(7):
        assert profile.tokens(k) == pytest.approx(enumerate_tokens([rate] * k))
        np.testing.assert_allclose(profile.lengths(k), np.eye(k + 1)[k], atol=1e-12)
    assert AcceptanceProfile.geometric(0.7, 5).tokens() == pytest.approx(2.94117)  # and not 3.5


def test_measured_positions_are_the_enumerated_expectation():
    """Rates that fall from position to position: no single rate says what these counters do."""
    rates = [0.9, 0.5, 0.2]
    stood = (1000 * np.cumprod(rates)).astype(int).tolist()
    parts = [counters(400, [400] * 3, [360, 180, 36]), counters(600, [600] * 3, [540, 270, 54])]
    assert [
        a + b for a, b in zip(*(p.accepted_per_position[0] for p in parts), strict=True)
    ] == stood
    profile = AcceptanceProfile.measured(parts)
    assert profile.basis == "measured per position" and profile.rounds == 1000
    assert profile.tokens() == pytest.approx(enumerate_tokens(rates))
    np.testing.assert_allclose(profile.per_position, np.cumprod(rates))
    with pytest.raises(ValueError, match="at least one round"):
        AcceptanceProfile.measured([])
    with pytest.raises(ValueError, match=r"num_draft must be in 0..3"):
        profile.tokens(4)


def bursty_agreement(count: int, seed: int = 0) -> np.ndarray:
    """Whether a drafter agrees with the target at every token of a text: long stretches that it knows, others it does not."""
    rng = np.random.default_rng(seed)
    known = np.zeros(count, bool)
    for i in range(1, count):
        known[i] = known[i - 1] if rng.random() < 0.97 else rng.random() < 0.5
    return rng.random(count) < np.where(known, 0.97, 0.35)


def walk(agree: np.ndarray, num_draft: int) -> tuple[list[int], int]:
    """Decodes such a text with K drafts a round: (drafts that stood in every round, tokens)."""
    at, stood = 0, []
    while at + num_draft + 1 < len(agree):
        run = 0
        while run < num_draft and agree[at + run]:
            run += 1
        stood.append(run)
        at += run + 1
    return stood, at


def profile_of(stood: list[int], num_draft: int) -> AcceptanceProfile:
    accepted = [sum(s > i for s in stood) for i in range(num_draft)]
    return AcceptanceProfile.measured([counters(len(stood), [len(stood)] * num_draft, accepted)])


def test_cut_proposals_are_what_a_simulation_of_rounds_gives():
    """Measured with 15 drafts, predicted for fewer: bursts make the formula of one rate wrong, the profile is not."""
    agree = bursty_agreement(60_000)
    profile = profile_of(walk(agree, 15)[0], 15)
    for k in range(1, 16):
        stood, tokens = walk(agree, k)
        tolerance = 2e-3 if 16 % (k + 1) == 0 else 0.03
        assert profile.tokens(k) == pytest.approx(tokens / len(stood), rel=tolerance), k
    naive = 1 + np.cumsum(profile.per_position)[2]
    assert naive < 0.97 * profile.tokens(3), "bursts should tell the two apart"


def test_shorter_chains_of_heads_are_what_a_simulation_of_rounds_gives():
    """Heads' accuracy falls with depth, and every round begins anew with the best one."""
    rng, chance = np.random.default_rng(0), np.asarray([0.9, 0.85, 0.75, 0.65, 0.5, 0.4, 0.3])

    def simulate(k: int) -> list[int]:
        stands = rng.random((50_000, k)) < chance[:k]
        return np.cumprod(stands, axis=1).sum(axis=1).tolist()

    stood = simulate(7)
    accepted = [sum(s > i for s in stood) for i in range(7)]
    counted = [counters(len(stood), [len(stood)] * 7, accepted)]
    profile = AcceptanceProfile.measured(counted, by_depth=True)
    for k in range(1, 8):
        assert profile.tokens(k) == pytest.approx(1 + np.mean(simulate(k)), rel=0.01), k
        lengths = profile.lengths(k)
        assert lengths[k] == pytest.approx(1.0) and lengths.sum() == pytest.approx(1.0)
    by_text = AcceptanceProfile.measured(counted)
    assert by_text.tokens(3) < 0.9 * profile.tokens(3), "the two laws should differ here"


@pytest.mark.parametrize("draft", [(0.02, 0.0), (0.05, 0.08), (0.2, 0.3)])
def test_best_number_of_drafts_is_the_simulation_s(draft):
    """Exhaustive: rounds of every K are simulated and paid for, step by step."""
    agree = bursty_agreement(40_000, seed=1)
    curve = {1: 1.0, 2: 1.5, 4: 1.6, 8: 2.0, 16: 2.7}
    costs = RoundCosts(tuple(curve), tuple(curve.values()), draft=draft)

    def simulate(k: int) -> float:
        stood, tokens = walk(agree, k)
        width = np.interp(k + 1, list(curve), list(curve.values()))
        return tokens / sum(width + draft[0] + draft[1] * k for _ in stood)

    simulated = {k: simulate(k) for k in range(1, 16)}
    profile = profile_of(walk(agree, 15)[0], 15)
    best = best_prediction([specjax.predict(profile, costs, k) for k in range(1, 16)])
    assert best.speed_up == pytest.approx(simulated[best.num_draft], rel=0.03)
    assert simulated[best.num_draft] > 0.99 * max(simulated.values())
    assert best.width == best.num_draft + 1
    assert specjax.predict(profile, costs, 0).speed_up == 1


@pytest.mark.parametrize("batch", [1, 4])
def test_round_cost_is_a_simulation_s_of_the_widest_row(batch):
    """Rows propose independently, and one pass as wide as the longest proposal serves all."""
    shares = np.asarray([0.5, 0.1, 0.1, 0.1, 0.1, 0.1])
    curve = {1: 1.0, 2: 1.5, 4: 1.7, 6: 2.6}
    costs = RoundCosts(tuple(curve), tuple(curve.values()), draft=(0.1, 0.0), batch=batch)
    lengths = np.random.default_rng(0).choice(6, size=(200_000, batch), p=shares)
    paid = [curve[next(w for w in ladder(5) if w > longest)] for longest in lengths.max(axis=1)]
    assert costs.round_cost(shares) == pytest.approx(np.mean(paid) + 0.1, rel=5e-3)


# Best K and its speed-up by acceptance and draft cost where a pass costs the same at any width: worked out by the
# literature's formula, independently of this code.
KNOWN = {
    (0.006, 0.2): (3, 1.23),
    (0.006, 0.9): (28, 8.16),
    (0.02, 0.6): (6, 2.17),
    (0.05, 0.7): (6, 2.35),
    (0.1, 0.5): (2, 1.46),
    (0.2, 0.8): (4, 1.87),
    (0.4, 0.9): (4, 1.58),
    (0.4, 0.5): (1, 1.07),
}


@pytest.mark.parametrize("cost, rate", KNOWN)
def test_best_number_of_drafts_on_a_flat_curve(cost, rate):
    costs = RoundCosts((1, 65), (1.0, 1.0), draft=(0.0, cost))
    profile = AcceptanceProfile.geometric(rate, 64)
    best = best_prediction([specjax.predict(profile, costs, k) for k in range(65)])
    assert (best.num_draft, round(best.speed_up, 2)) == KNOWN[cost, rate]


def test_break_even_is_where_a_round_pays_for_itself():
    costs = RoundCosts((1, 2, 4, 8), (20.0, 30.0, 32.0, 90.0), draft=(0.05, 0.01))
    assert costs.verify == (1.0, 1.5, 1.6, 4.5)
    for k in range(1, 8):
        rate = specjax.break_even(costs, k)
        gains = [
            specjax.predict(AcceptanceProfile.geometric(r, k), costs, k).speed_up
            for r in (rate - 0.01, rate, rate + 0.01)
        ]
        assert gains[0] < 1 < gains[2] and gains[1] == pytest.approx(1)
    assert specjax.break_even(RoundCosts((1, 2), (1.0, 1.2)), 1) == pytest.approx(0.2)  # a > c
    assert math.isnan(specjax.break_even(RoundCosts((1, 2), (1.0, 2.1)), 1))
    for bad, message in (
        (((2, 4), (1.0, 2.0)), "widths must rise from 1"),
        (((1, 2), (1.0,)), "verify must be 2 positive numbers"),
        (((1, 2), (1.0, math.nan)), "verify must be 2 positive numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            RoundCosts(*bad)
    with pytest.raises(ValueError, match="width must be at most 8, as measured; got 16"):
        costs.pass_cost(16)


MEMORY_DRAFTERS = {
    "none": None,
    "ngram": NGram(num_draft=3),
    "map": NGram.map_k(n=2, m=3),
    "model": DraftModel(noisy(TARGET, 0.1), num_draft=2),
    "itself": DraftModel(TARGET, num_draft=2),
    "eagle3": Eagle3(tiny_head(TARGET), num_draft=2),
}


@pytest.mark.parametrize("name", MEMORY_DRAFTERS)
def test_memory_is_what_the_arrays_hold(name):
    drafter, batch, context = MEMORY_DRAFTERS[name], 3, 300
    prompt = [1] * 250
    _, state, _ = prepare(
        TARGET,
        [prompt] * batch,
        drafter=drafter,
        max_new_tokens=context - len(prompt),
        sampling=specjax.Sampling(),
        key=0,
        stop_token_ids=(),
    )
    found = specjax.estimate_memory(TARGET, drafter, batch=batch, context=context)

    def held(tree) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(tree))

    assert (found.weights, found.cache) == (held(TARGET), held(state.cache))
    assert found.drafter_state == held(state.drafter_state)
    assert found.drafter_weights == (0 if name == "itself" else held(drafter))
    assert (
        found.total
        == held(TARGET) + held((state.cache, state.drafter_state)) + found.drafter_weights
    )
    assert (found.drafter_share > 0) == (name not in ("none", "ngram"))
    with pytest.raises(ValueError, match="batch must be >= 1, got 0"):
        specjax.estimate_memory(TARGET, batch=0, context=8)


def test_price():
    assert price_per_million(3.6, 1000) == pytest.approx(1.0)
    for bad in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="price_per_hour must be a positive number"):
            price_per_million(bad, 10)


# What each engine's own sources and documentation name; anything else is refused at start-up.
FLAGS = {
    "vLLM": {"--speculative-config"},
    "SGLang": {
        "--model-path",
        "--speculative-algorithm",
        "--speculative-draft-model-path",
        "--speculative-num-steps",
        "--speculative-eagle-topk",
        "--speculative-num-draft-tokens",
        "--speculative-use-rejection-sampling",
        "--speculative-ngram-max-bfs-breadth",
        "--speculative-ngram-match-type",
        "--speculative-ngram-max-trie-depth",
    },
    "TensorRT-LLM": {"--config"},
    "llama.cpp": {
        "--model",
        "--spec-type",
        "--spec-draft-model",
        "--spec-draft-n-max",
        *(
            f"--spec-ngram-{kind}-{end}"
            for kind in ("simple", "map-k", "map-k4v")
            for end in ("size-n", "size-m", "min-hits")
        ),
        *(f"--spec-ngram-mod-{end}" for end in ("n-match", "n-min", "n-max")),
    },
}
KEYS = {
    "vLLM": {
        "method",
        "model",
        "num_speculative_tokens",
        "prompt_lookup_min",
        "prompt_lookup_max",
        "parallel_drafting",
        "draft_sample_method",
        "num_speculative_tokens_per_batch_size",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    },
    "TensorRT-LLM": {
        "decoding_type",
        "max_draft_len",
        "max_concurrency",
        "draft_len_schedule",
        "use_rejection_sampling",
        "speculative_model",
        "max_matching_ngram_size",
        "is_use_oldest",
        "is_public_pool",
    },
}
HEAD = tiny_head(TARGET, draft_vocab_size=61)
SETTINGS = {
    "none": None,
    "ngram": NGram(),
    "simple": NGram.simple(n=4, m=8),
    "map-k": NGram.map_k(n=12, m=15),
    "map-k4v": NGram.map_k4v("text"),
    "mod": NGram.mod(),
    "suffix": Suffix(),
    "adaptive": specjax.Adaptive(NGram(num_draft=7)),
    "model": DraftModel(TARGET, num_draft=5),
    "eagle3": Eagle3(HEAD, num_draft=3),
    "p-eagle": PEagle(tiny_head(TARGET, mask_token_id=2), num_draft=4),
    "mtp": specjax.MTP(tiny_mtp(TARGET), num_draft=2),
    "exit": specjax.EarlyExit(1),
}
NAMED = {"target": "org/big-model", "draft": "org/small", "head": "org/big-eagle3"}


def engine_configs(found: specjax.EngineCommand) -> dict:
    """The JSON inside a command."""
    texts = [w for w in shlex.split(str(found.command)) if w.startswith("{")]
    content = json.loads(texts[0]) if texts else {}
    return content.get("speculative_config", content)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("sampled", [False, True])
def test_engines_get_flags_that_they_know(name, sampled):
    schedule = {1: 4, 8: 0}
    commands = specjax.engine_commands(
        SETTINGS[name], **NAMED, sampled=sampled, drafts_by_batch=schedule
    )
    assert [c.engine for c in commands] == ["vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"]
    for found in commands:
        if found.command is None:
            assert found.note == "no equivalent"
            continue
        words = shlex.split(found.command)
        assert {w for w in words if w.startswith("--")} <= FLAGS[found.engine]
        assert set(engine_configs(found)) <= KEYS.get(found.engine, set())
        assert ("org/big-model" in words) == (found.engine != "llama.cpp")
    assert all(c.command is None for c in commands) == (name == "exit")


def test_engines_are_told_what_was_measured():
    def told(name: str, **more) -> tuple[dict, list[str], dict, list[str]]:
        found = specjax.engine_commands(SETTINGS[name], **(NAMED | more))
        vllm, sglang, tensorrt, llama = found
        words = [shlex.split(str(c.command)) for c in (sglang, llama)]
        return engine_configs(vllm), words[0], engine_configs(tensorrt), words[1]

    def value(words: list[str], flag: str) -> str:
        return words[words.index(flag) + 1]

    vllm, sglang, tensorrt, llama = told("ngram")
    assert vllm == {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 8,
        "num_speculative_tokens": 15,
    }
    assert value(sglang, "--speculative-num-draft-tokens") == "16"
    assert tensorrt["decoding_type"] == "NGram" and tensorrt["max_draft_len"] == 15
    assert value(llama, "--spec-type") == "ngram-simple"
    assert value(llama, "--spec-ngram-simple-size-n") == "8"  # from where on 15 are drafted here

    vllm, sglang, tensorrt, llama = told(
        "eagle3", sampled=True, drafts_by_batch={8: 1, 1: 3, 32: 0}
    )
    assert vllm["method"] == "eagle3" and vllm["draft_sample_method"] == "probabilistic"
    assert vllm["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 8, 1], [9, 32, 0]]
    assert value(sglang, "--speculative-algorithm") == "EAGLE3"
    assert value(sglang, "--speculative-num-steps") == "3"
    assert value(sglang, "--speculative-num-draft-tokens") == "4"
    assert "--speculative-use-rejection-sampling" in sglang
    assert tensorrt["draft_len_schedule"] == {"1": 3, "8": 1}
    assert (
        value(llama, "--spec-type") == "draft-eagle3" and value(llama, "--spec-draft-n-max") == "3"
    )

    # its validator wants the most drafts at the smallest batch, and knows no size below which there are none
    tensorrt = told("eagle3", drafts_by_batch={1: 2, 8: 1, 32: 0})[2]
    assert (tensorrt["max_draft_len"], tensorrt["draft_len_schedule"]) == (2, {"1": 2, "8": 1})
    for growing in ({1: 0, 8: 3}, {1: 1, 8: 3}):
        tensorrt = told("eagle3", drafts_by_batch=growing)[2]
        assert not {"max_concurrency", "draft_len_schedule"} & set(tensorrt)

    vllm, sglang, tensorrt, _ = told("model", drafts_by_batch={1: 5, 4: 5, 16: 0})
    assert vllm["method"] == "draft_model" and vllm["model"] == "org/small"
    assert value(sglang, "--speculative-algorithm") == "STANDALONE"
    assert tensorrt["max_concurrency"] == 4 and tensorrt["decoding_type"] == "Draft_Target"
    assert told("map-k")[3][-4:] == [
        "--spec-ngram-map-k-size-n",
        "12",
        "--spec-ngram-map-k-size-m",
        "15",
    ]
    vllm, sglang, tensorrt, llama = told("mtp")
    assert vllm == {"method": "mtp", "num_speculative_tokens": 2}
    assert value(sglang, "--speculative-algorithm") == "NEXTN"
    assert tensorrt == {"decoding_type": "MTP", "max_draft_len": 2}
    assert value(llama, "--spec-type") == "draft-mtp" and "--spec-draft-model" not in llama
    found = {c.engine: c for c in specjax.engine_commands(SETTINGS["p-eagle"], **NAMED)}
    assert engine_configs(found["vLLM"])["parallel_drafting"] is True
    assert found["SGLang"].command is None and found["llama.cpp"].command is None
    with pytest.raises(ValueError, match="drafts_by_batch must map batch sizes >= 1"):
        specjax.engine_commands(None, target="a/b", drafts_by_batch={0: 1})


def test_local_models_become_placeholders(tmp_path):
    for source in (str(tmp_path), "smollm2-135m-instruct"):
        words = [
            shlex.split(str(c.command)) for c in specjax.engine_commands(NGram(), target=source)
        ]
        assert all("ORG/TARGET" in w for w in words[:3]) and "TARGET.gguf" in words[3]
    head = specjax.engine_commands(Eagle3(HEAD), target="a/b", head="smollm2-135m-eagle3")
    assert engine_configs(head[0])["model"] == "ORG/HEAD"  # no server has the built-in ones
    served = specjax.engine_commands(Eagle3(HEAD), target="a/b", head=str(tmp_path))
    assert engine_configs(served[0])["model"] == str(tmp_path)
    found = specjax.engine_commands(NGram(), target="models/x y.gguf")
    assert "models/x y.gguf" in shlex.split(str(found[3].command))
    assert "ORG/TARGET" in shlex.split(str(found[0].command))


def made_up(
    costs_at_8: float, checked: float | None, temperature: float = 0.0, drift: float = 0.02
) -> findings.Advice:
    """Measurements as `advise` would return them: a look-up that pays at batch 1."""
    curves = {
        1: RoundCosts((1, 2, 4, 8), (1.0, 1.2, 1.4, 1.6)),
        8: RoundCosts((1, 2, 4, 8), (1.0, *[costs_at_8] * 3), batch=8),
    }

    def make(k, costs):
        curve = costs.pass_cost(np.asarray(ladder(k))).tolist()
        return specjax.Adaptive(NGram(num_draft=k), costs=tuple(curve))

    candidate = findings.Candidate("adaptive", 7, make, "adaptive")
    good = AcceptanceProfile.geometric(0.7, 7)
    bad = AcceptanceProfile.geometric(0.05, 7)
    trials = {
        t: [findings.Trial(candidate, t, p, {"edit": good, "chat": bad}, 1.5)]
        for t, p in ((0.0, good), (1.0, bad))
    }
    costs = {b: {"adaptive": c} for b, c in curves.items()}
    check = (
        None if checked is None else findings.Check(checked, {"edit": 1.9, "chat": 0.9}, 0.02, 40)
    )
    choices = {}
    for t, rows in trials.items():
        for b in curves:
            choice = findings.choose(rows, costs[b])
            run = (t, b) == (temperature, 1) and choice.pays
            choices[t, b] = findings.Choice(choice.trial, choice.prediction, check if run else None)
    return findings.Advice(
        workloads={"edit": 2, "chat": 2},
        curves=curves,
        seconds={1: 0.02, 8: 0.05},
        costs=costs,
        trials=trials,
        choices=choices,
        memory={b: specjax.estimate_memory(TARGET, batch=b, context=64) for b in curves},
        drift=dict.fromkeys(curves, drift),
    )


def spoken(found, options) -> dict[str, str]:
    return {label: Text.from_markup(line).plain for label, line in advise.verdict(found, options)}


class Scripted:
    """Measurements as an `Advisor` would take them, of two look-ups: the one that promises more, and one that is checked at
    `speeds` as well."""

    target, workloads = TARGET, {"edit": [[1, 2]]}
    console = Console(quiet=True)

    def __init__(self, **speeds: float):
        self.options, self.speeds = advisor.Options(context=64), speeds
        self.candidates = [
            findings.Candidate(name, 7, lambda k, _: NGram(num_draft=k), "look-up")
            for name in speeds
        ]

    def measure_curve(self, batch):
        return np.asarray([1.0, 1.2, 1.4, 1.6])

    def round_costs(self, seconds, batch):
        return RoundCosts((1, 2, 4, 8), tuple(seconds), batch=batch)

    def measure_drafting(self, candidate, costs):
        return 0.0, 0.0

    def try_out(self, costs, temperature):
        profiles = [AcceptanceProfile.geometric(rate, 7) for rate in (0.8, 0.7)]
        return [
            findings.Trial(c, temperature, p, {"edit": p}, 1.0)
            for c, p in zip(self.candidates, profiles, strict=True)
        ]

    def check(self, choice, costs):
        return findings.Check(self.speeds[choice.trial.candidate.name], {}, 0.0, 40.0)


@pytest.mark.parametrize(
    ("speeds", "name", "pays"),
    [((1.5, 1.2), "first", True), ((0.9, 1.2), "second", True), ((0.9, 0.8), "first", False)],
)
def test_where_the_best_is_refuted_the_next_is_tried(speeds, name, pays):
    scripted: Any = Scripted(first=speeds[0], second=speeds[1])
    choice = advisor.advise(scripted).choices[0.0, 1]
    assert (choice.trial.candidate.name, choice.pays) == (name, pays)
    assert choice.check is not None and choice.check.speed_up == max(speeds[0], pays * speeds[1])


def test_verdict_says_when_to_and_when_not(tmp_path):
    options = advisor.Options(batch=(1, 8), context=64, price_per_hour=2.0, target="org/name")
    found = made_up(costs_at_8=9.0, checked=1.8)
    said, ahead = spoken(found, options), found.choices[0.0, 1].prediction
    assert said["Advice"].startswith("Speculate: adaptive, up to 7 drafts (passes up to 8 wide)")
    assert said["Expected"].endswith(f"passes = {ahead.speed_up:.2f}x")
    assert said["Measured"].startswith("1.80x in this run")
    assert f"the prediction is {ahead.speed_up / 1.8 - 1:+.0%} off" in said["Measured"]
    assert all(text in said["Not for"] for text in ("temperature 1 (", "chat (", "batch 8 ("))
    assert "edit" not in said["Not for"]
    assert said["Batch"] == "pays at 1; not at 8"
    prices = re.search(r"a million tokens ([\d.]+) plainly, ([\d.]+) as", said["Price"])
    assert prices is not None
    before, after = map(float, prices.groups())
    assert before == pytest.approx(2.0 / 3600 / 40 * 1e6, rel=1e-3)
    assert before / after == pytest.approx(1.8, rel=1e-3)
    assert "Caution" not in said and "But at" not in said
    assert "up to 40% during" in spoken(made_up(9.0, checked=1.8, drift=0.4), options)["Caution"]
    curve = np.asarray([2.0, 3.0, 4.0])
    assert advisor._drift(curve, 3 * curve) == pytest.approx(0)
    assert advisor._drift(curve, np.asarray([2.0, 2.0, 4.4])) == pytest.approx(0.5)
    console = Console(width=110)
    with console.capture() as shown:
        console.print(advise.curve_table(found)[0], advise.drafter_table(found, 1)[0])
        console.print(advise.drafts_table(found, 1), advise.batch_table(found, options))
        console.print(advise.workload_table(found, found.choices[0.0, 1], 1))
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in shown.get().splitlines()]
    assert ["1", "2 tokens", "1.20", "20%", "9.00", "never pays"] in rows
    assert ["edit", "2", f"{ahead.tokens:.2f}", f"{ahead.speed_up:.2f}x", "1.90x"] in rows
    assert ["adaptive", "0", *[""] * 5, f"{ahead.speed_up:.2f}"] in rows
    vllm = engine_configs(advice_files.engine_commands(found, options)[0])
    # it cannot adapt: the fixed number that pays most, where here up to 7 are drafted as they promise
    trial, costs = found.choices[0.0, 1].trial, found.costs[1]["adaptive"]
    most = max(range(1, 8), key=lambda k: specjax.predict(trial.profile, costs, k).speed_up)
    assert vllm["num_speculative_tokens"] == most == 6
    assert vllm["num_speculative_tokens_per_batch_size"] == [[1, 1, most], [2, 8, 0]]

    file = tmp_path / "setting.toml"
    advice_files.write_setting(file, found, options)
    row = tomllib.loads(file.read_text())
    assert row["drafter"] == "adaptive" and row["num_draft"] == 7 and row["target"] == "org/name"
    assert row["costs"] == [1.0, 1.2, 1.4, 1.6]
    assert "generate.py" in file.read_text() and row.keys() <= vars(generate.Options()).keys()
    eight = advisor.Options(batch=(8, 1), context=64, target="org/name")
    advice_files.write_setting(file, made_up(1.6, checked=1.8), eight)
    row = tomllib.loads(file.read_text())
    assert "batch.py" in file.read_text() and row["slots"] == 8
    given: Any = {"prompts": file, "output": file}
    assert row.keys() <= vars(batch.Options(**given)).keys()

    close = made_up(9.0, checked=1.8)
    check = close.choices[0.0, 1].check
    assert check is not None
    check = replace(check, speed_up=1.04, scatter=-0.06)
    close.choices[0.0, 1] = replace(close.choices[0.0, 1], check=check)
    assert "within the scatter" in spoken(close, options)["Advice"]
    said = spoken(made_up(9.0, checked=0.98), options)
    assert said["Advice"].startswith("Do not speculate") and said["Measured"].startswith("0.98x")
    assert (
        spoken(made_up(1.6, checked=1.8), options)["Batch"]
        == "pays at 1, 8, all that were measured"
    )
    at_one = advisor.Options(batch=(1, 8), context=64, temperature=1.0)
    found = made_up(9.0, checked=1.8, temperature=1.0)
    said = spoken(found, at_one)
    assert said["Advice"].startswith("Do not speculate at temperature 1, batch 1")
    assert said["But at"].startswith("temperature 0, batch 1 (adaptive, 7 drafts")
    assert said["Measured"] == f"not run: less than {LEAST_GAIN}x expected"
    assert advice_files.setting_fields(found, at_one)["drafter"] == "none"
    plain = advice_files.engine_commands(found, at_one)[0]
    assert "--speculative-config" not in str(plain.command)


def test_networks_are_tried_where_they_are_named(tmp_path):
    """A head's kind is its file's, and lengths are set without loading it again."""
    specjax.save_head(HEAD, tmp_path / "head", layout="speculators")
    options = advisor.Options(drafters=("ngram",), head=str(tmp_path / "head"))
    lookup, head = advisor.find_candidates(options, TARGET)
    assert (lookup.name, lookup.longest, lookup.kind) == ("ngram", 15, "look-up")
    assert (head.name, head.longest, head.kind) == ("head", 7, "network")
    drafter = head.make(2, RoundCosts((1, 8), (1.0, 2.0)))
    assert isinstance(drafter, Eagle3) and drafter.num_draft == 2
    wrong = tiny_target(vocab_size=40)
    with pytest.raises(ValueError, match="made for another target"):
        advisor.find_candidates(options, wrong)
    with pytest.raises(ValueError, match="nothing to try"):
        advisor.find_candidates(advisor.Options(drafters=()), TARGET)


@pytest.mark.parametrize("name", [n for n in get_args(DrafterName) if n != "none"])
def test_every_look_up_takes_the_lengths_it_is_offered(name):
    [candidate] = advisor.find_candidates(advisor.Options(drafters=(name,)), TARGET)
    costs = RoundCosts((1, 16), (1.0, 2.0))
    for k in candidate.choices:
        assert candidate.make(k, costs).num_draft == k


def test_equals_go_to_the_adaptive_one():
    """A fixed drafter must promise visibly more to be chosen before one that adapts to the text."""
    costs = RoundCosts((1, 2, 4, 8), (1.0, 1.2, 1.4, 1.6))

    def trial(name: str, kind: str, rate: float) -> findings.Trial:
        candidate = findings.Candidate(name, 7, lambda k, c: None, kind)
        return findings.Trial(candidate, 0.0, AcceptanceProfile.geometric(rate, 7), {}, 1.0)

    both = {"fixed": costs, "adapts": costs}
    for rate, expected in ((0.7, "adapts"), (0.695, "adapts"), (0.6, "fixed")):
        trials = [trial("fixed", "look-up", 0.7), trial("adapts", "adaptive", rate)]
        assert findings.choose(trials, both).trial.candidate.name == expected


@pytest.mark.parametrize(
    "given, message",
    [
        ({"num_draft": -1}, "num_draft must be a whole number >= 1, got -1"),
        ({"num_draft": 0}, "num_draft must be a whole number >= 1, got 0"),
        ({"batch": (1, 0)}, r"batch must be distinct whole numbers >= 1, got \(1, 0\)"),
        ({"batch": ()}, "batch must be distinct"),
        ({"batch": (2, 2)}, "batch must be distinct"),
        ({"price_per_hour": 0.0}, "price_per_hour must be a positive number, got 0"),
        ({"price_per_hour": math.nan}, "price_per_hour must be a positive number, got nan"),
        ({"limit": 0}, "limit must be a whole number >= 1, got 0"),
        ({"drafters": ("none",)}, "drafters must propose something"),
    ],
)
def test_bad_options_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        advisor.Options(**given)


@pytest.mark.parametrize(
    "line, message",
    [
        ("", r"p.jsonl:2: expected a JSON object, got an empty line"),
        ("{oops", r"p.jsonl:2: expected a JSON object, got what is not JSON"),
        ('{"text": "x"}', r"p.jsonl:2: expected prompt, turns or messages"),
        ('{"prompt": "  "}', r"p.jsonl:2: expected a prompt of some text"),
        ('{"prompt": 3}', r"p.jsonl:2: expected a prompt of some text"),
        ('{"turns": []}', r"p.jsonl:2: expected a prompt of some text"),
        ('{"messages": [{"role": "user"}]}', r"p.jsonl:2: expected a prompt of some text"),
    ],
)
def test_bad_prompts_are_named_by_file_and_line(tmp_path, line, message):
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n{{"prompt": "b"}}\n')
    with pytest.raises(ValueError, match=message):
        common.read_prompts(file)
    (empty := tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="at least one prompt"):
        common.read_prompts(empty)


def test_prompts_keep_their_workloads(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [
        {"workload": "a", "prompt": "1"},
        {"turns": ["2", "3"]},
        {"workload": "a", "messages": [{"role": "user", "content": "4"}]},
        {"workload": "a", "prompt": "5"},
        {"category": "b", "turns": ["5"]},  # Spec-Bench's word
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = specjax.load_tokenizer(folder(tmp_path / "model", list("?12345")))
    assert not tokenizer.has_chat_template  # it continues what is said
    found = common.encode_workloads(file, tokenizer, 2)
    assert {w: [tokenizer.decode(p) for p in ps] for w, ps in found.items()} == {
        "a": ["1", "4"],
        "prompts": ["2"],
        "b": ["5"],
    }
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    with pytest.raises(ValueError, match="no chat template"):
        common.encode_conversation(tokenizer, talk)


@pytest.mark.thorough
def test_a_setting_goes_from_prompts_to_decoding(place, tmp_path):  # noqa: F811
    """advise.py on a tiny model, and its file read by generate.py, where flags win over it."""
    model, cache = place
    prompts, out, setting = (tmp_path / n for n in ("prompts.jsonl", "out.json", "setting.toml"))
    rows = [{"workload": w, "prompt": f"{w} one two one two"} for w in ("echo", "other")]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    common = ["--target", model, "--max-new-tokens", 12]
    given = ["--prompts", prompts, "--drafters", "ngram", "--num-draft", 2]
    given += ["--repeats", 1, "--context", 128, "--price-per-hour", 1.5]
    given += ["--json", out, "--write", setting]
    text = run("advise.py", *common, *given, cache=cache)
    assert "Verify curve" in text and "Advice" in text and "peculate" in text
    assert all(engine in text for engine in FLAGS)
    report = json.loads(out.read_text())
    assert report["prompts"] == {"echo": 1, "other": 1}
    assert report["verify_curve"]["1"]["widths"] == [1, 2, 3]
    assert report["verify_curve"]["1"]["cost"][0] == 1
    [drafter] = report["drafters"]
    assert drafter["drafter"] == "ngram" and drafter["rounds"] > 0
    assert np.isclose(sum(drafter["proposed"]), 1) and np.isclose(sum(drafter["accepted"]), 1)
    predictions = drafter["predictions"]["1"]
    assert [p["num_draft"] for p in predictions] == [1, 2]
    assert all(p["speed_up"] == pytest.approx(p["tokens"] / p["cost"]) for p in predictions)
    row = tomllib.loads(setting.read_text())
    assert row == report["setting"] and row["target"] == str(model)

    # whatever a tiny model's noise decided: the same file with a drafter in it
    setting.write_text(
        f"target = {json.dumps(str(model))}\ndrafter = 'adaptive'\nnum_draft = 3\ncosts = [1, 1, 1]\n"
        "temperature = 0.5\nmax_new_tokens = 7\n"
    )
    decode = ["--config", setting, "--prompt", "one two one two", "--json", out]
    run("generate.py", *decode, "--max-new-tokens", 5, cache=cache)
    report = json.loads(out.read_text())
    assert report["drafter"] == "adaptive" and len(report["rows"][0]["tokens"]) == 5
    assert len(report["rows"][0]["accepted_per_position"]) == 3


def test_flags_win_over_a_file(tmp_path, monkeypatch):
    file = tmp_path / "s.toml"
    file.write_text(
        "drafter = 'adaptive'\nnum_draft = 7\ncosts = [1, 1.5, 1.6, 2]\ntemperature = 0.5\n"
        "top_p = 0.9\ntarget = 'a/b'\n"
    )

    def parse(*words: str):
        monkeypatch.setattr(sys, "argv", ["generate.py", "--config", str(file), *words])
        return generate.parse()

    options = parse("--prompt", "x")
    assert (options.drafter, options.num_draft, options.target) == ("adaptive", 7, "a/b")
    assert (options.temperature, options.top_p, options.prompt) == (0.5, 0.9, ("x",))
    assert options.costs == (1, 1.5, 1.6, 2)
    options = parse("--drafter", "ngram", "--num-draft", "3", "--temperature", "0", "--prompt", "x")
    assert (options.drafter, options.num_draft, options.temperature) == ("ngram", 3, 0.0)
    assert options.top_p == 0.9 and options.prompt == ("x",)
    drafter = common.make_drafter("adaptive", 7, costs=(1, 1.5, 1.6, 2))
    assert drafter.costs == (1, 1.5, 1.6, 2)
    assert common.make_drafter("ngram", 7, costs=(1, 1.5, 1.6, 2)) == NGram(num_draft=7)


def test_configs_say_what_is_wrong(tmp_path):
    file = Path(tmp_path / "s.toml")
    file.write_text("drafte = 'ngram'")
    with pytest.raises(ValueError, match="unknown key 'drafte'; did you mean 'drafter'"):
        common.config_arguments(file, ["drafter", "num_draft"])
    file.write_text("drafter = ")
    with pytest.raises(ValueError, match=r"s.toml: not TOML"):
        common.config_arguments(file, ["drafter"])
    file.write_text("num_draft = 3\ncosts = [1, 2.5]")
    assert common.config_arguments(file, ["costs", "num_draft"]) == [
        "--num-draft",
        "3",
        "--costs",
        "1",
        "2.5",
    ]
