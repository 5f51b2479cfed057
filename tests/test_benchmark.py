"""The benchmark: its oracles against hand-computed and enumerated cases, its tests of a law, its report."""

import json
import os
import signal
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import write_folder
from test_scripts import SCRIPTS
from zoo import tiny_head, tiny_target

import specjax
from specjax import Adaptive, DraftModel, NGram, Sampling

sys.path.insert(0, str(SCRIPTS))
import benchmark
from benchmarking import (
    distribution,
    gpu,
    growth,
    heads,
    oracles,
    peers,
    plots,
    training,
    workloads,
)

CURVE = {1: 1.0, 2: 1.5, 4: 2.0}
TARGET = tiny_target()
PROMPT = [7, 8, 9, 10, 7, 8, 9, 10, 7, 8]
GIVEN = {"max_new_tokens": 24, "stop_token_ids": (), "key": 3}


@pytest.mark.parametrize(
    "stands, cost",
    [
        ([0, 0, 0], 3.0),  # nothing to propose: three plain passes
        ([3, 0, 0, 0], 2.0),  # everything in one pass of four
        ([1, 0], 1.5),
        ([3, 2, 1, 0, 0], 3.0),  # four at once, then one
        ([2, 1, 0], 2.0),  # three tokens need a pass of four
        ([0, 3, 0, 0, 0], 3.0),  # plain, then four at once
        ([1, 3, 0, 0, 0], 3.0),  # drafting one would cost 1.5 and leave nothing that stands
        ([], 0.0),
    ],
)
def test_oracles_cost_what_they_do_by_hand(stands, cost):
    assert oracles.least_cost(stands, CURVE) == cost


def test_a_wide_pass_that_is_cheaper_is_taken():
    curve = {1: 1.0, 2: 1.9, 4: 1.2}
    np.testing.assert_allclose(oracles.cheapest(curve), [1.0, 1.2, 1.2, 1.2])
    assert oracles.least_cost([1, 0], curve) == 1.2
    assert oracles.best_width(curve) == 4
    assert oracles.best_width({1: 1.0, 2: 2.5, 4: 4.5}) == 1


def enumerated_costs(stands: list[int], curve: oracles.Curve, at: int = 0) -> list[float]:
    """Of every way to cut every proposal."""
    if at >= len(stands):
        return [0.0]
    return [
        min(c for w, c in curve.items() if w > drafts) + rest
        for drafts in range(min(stands[at], max(curve) - 1) + 1)
        for rest in enumerated_costs(stands, curve, at + drafts + 1)
    ]


def random_stands(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.minimum(rng.geometric(0.4, size) - 1, oracles.perfect_stands(size))


def test_no_rule_costs_less_than_the_oracle():
    rng = np.random.default_rng(0)
    for _ in range(40):
        curve = dict(zip((1, 2, 4, 8), 1 + rng.uniform(-0.2, 2.0, 4).cumsum(), strict=True))
        stands = random_stands(rng, 9).tolist()
        expected = min(enumerated_costs(stands, curve))
        assert oracles.least_cost(stands, curve) == pytest.approx(expected)


def test_who_knows_more_never_pays_more():
    """perfect <= choice <= length <= proposing everything, in cost."""
    rng = np.random.default_rng(1)
    cost = oracles.cheapest(CURVE)
    for _ in range(40):
        drafters = [random_stands(rng, 30) for _ in range(3)]
        choice = oracles.least_cost(np.max(drafters, axis=0), CURVE)
        assert oracles.least_cost(oracles.perfect_stands(30), CURVE) <= choice
        for stands in drafters:
            length = oracles.least_cost(stands, CURVE)
            assert choice <= length <= 30
            at, proposing = 0, 0.0
            while at < 30:
                proposing += cost[min(stands[at] + rng.integers(0, 3), 3)]
                at += min(stands[at], 3) + 1
            assert length <= proposing


def test_what_stands_is_counted_up_to_the_answers_last_token():
    answer = np.asarray([5, 6, 7, 8])
    tokens = np.asarray([[5, 6, 9], [6, 7, 8], [7, 8, 8], [8, 8, 8], [0, 0, 0]])
    lengths = np.asarray([3, 2, 3, 3, 3])
    assert oracles.count_stands(tokens, lengths, answer).tolist() == [2, 2, 1, 0]


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_recorded_proposals_are_those_of_real_rounds(temperature):
    """Walking through what stood takes as many rounds as decoding with the drafter did."""
    sampling, drafter = Sampling(temperature=temperature), NGram(num_draft=3)
    out = specjax.generate(TARGET, [PROMPT], drafter=drafter, sampling=sampling, **GIVEN)
    answer = out.tokens[0]
    record = oracles.record_stands
    for asked in (drafter, Adaptive(drafter)):
        stands = record(TARGET, asked, PROMPT, answer, sampling=sampling, **GIVEN)
        assert stands is not None and len(stands) == 24
        at, rounds = 0, 0
        while at < 24:
            at, rounds = at + stands[at] + 1, rounds + 1
        assert rounds == out.statistics.rounds[0]
    model = DraftModel(TARGET, num_draft=2)
    judged = record(TARGET, model, PROMPT, answer, sampling=sampling, **GIVEN)
    if temperature:
        assert judged is None  # by its q, not by agreeing
    else:
        assert judged is not None and judged.tolist() == [2] * 22 + [1, 0]


@pytest.mark.thorough
def test_replayed_answers_stand():
    sampling = Sampling(temperature=0.7)
    plain = specjax.generate(TARGET, [PROMPT], sampling=sampling, **GIVEN)
    replay = oracles.Replay.of(PROMPT, plain.tokens[0], slots=64, size=4)
    out = specjax.generate(TARGET, [PROMPT], drafter=replay, sampling=sampling, **GIVEN)
    np.testing.assert_array_equal(out.tokens[0], plain.tokens[0])
    assert out.statistics.rounds[0] == 5  # 5 + 5 + 5 + 5 + 4


def test_chi_square_is_pearsons():
    a, b = np.repeat([1, 2], [10, 20]), np.repeat([1, 2], [20, 10])
    found = distribution.chi_square(a, b)
    assert found["degrees"] == 1
    assert found["statistic"] == pytest.approx(20 / 3)
    assert found["p"] == pytest.approx(0.009823, rel=1e-3)
    # rare tokens are one class: 1, 2 and the rest
    rare = distribution.chi_square([*a, 3, 4, 5], [*b, 6, 7, 8])
    assert rare["degrees"] == 2 and rare["statistic"] == pytest.approx(20 / 3)
    # of many rare ones neighbours are: five classes of five tokens
    spread = np.arange(25)
    assert distribution.chi_square(spread, spread) == {"statistic": 0.0, "degrees": 4, "p": 1.0}
    assert distribution.chi_square([1, 1], [1, 1])["p"] == 1.0


@pytest.mark.thorough
@pytest.mark.parametrize("drafter", [None, NGram(num_draft=3)])
def test_samples_are_those_of_generate(drafter):
    """One prefill for all rows gives what a prefill for each does."""
    found, length = distribution.sample(TARGET, PROMPT, drafter, samples=5, key=2, batch=3)
    out = specjax.generate(
        TARGET,
        [PROMPT] * 6,
        drafter=drafter,
        max_new_tokens=distribution.TOKENS,
        sampling=Sampling(temperature=1.0),
        key=2,
    )
    np.testing.assert_array_equal(found, out.tokens[:5])
    assert length == pytest.approx(out.statistics.mean_acceptance_length)


def test_a_wrong_law_is_an_error():
    rng = np.random.default_rng(0)
    row = {"method": "m", "prompt": 0, "place": 1}
    a, b, wrong = (rng.choice(3, 500, p=p) for p in ([0.5, 0.3, 0.2],) * 2 + ([0.3, 0.5, 0.2],))
    right = row | distribution.chi_square(a, b)
    assert not distribution.law_errors([right] * 4)
    [error] = distribution.law_errors([right, row | distribution.chi_square(a, wrong)])
    assert "m does not follow" in error and "2 degrees of freedom" in error


def test_growth_is_measured_against_lines():
    fit = growth.fit_line([1, 2, 4], [3.0, 5.0, 9.0])
    assert (fit["start"], fit["slope"]) == pytest.approx((1.0, 2.0))
    assert fit["off"] == pytest.approx(0.0, abs=1e-9)
    assert growth.fit_line([1, 2, 3], [1.0, 2.6, 3.0])["off"] > 0.1
    assert growth.fit_constant([1.0, 2.0, 3.0], 10.0) == {"start": 2.0, "slope": 0.0, "off": 0.1}


def test_the_cost_of_lengths_is_split_into_matrices_and_scores():
    lengths = [16, 32, 64]
    seconds = [3e-3 * t + 2e-5 * training.STEPS * (t**2 + training.STEPS * t) for t in lengths]
    fit = training.fit_lengths(lengths, seconds)
    assert (fit["linear"], fit["scores"]) == pytest.approx((3e-3, 2e-5))
    assert fit["off"] == pytest.approx(0.0, abs=1e-9)
    assert training.fit_lengths(lengths, [1.0, 1.0, 1.0])["off"] > 0.3


def test_a_decoding_holds_its_cache():
    held = growth.held_bytes(TARGET, 512)
    expected = specjax.estimate_memory(TARGET, context=512).cache
    assert 1 <= held / expected < 1.05


def test_outputs_that_differ_are_errors():
    assert workloads.first_difference(np.asarray([1, 2]), np.asarray([1, 2])) is None
    assert workloads.first_difference(np.asarray([1, 2]), np.asarray([1, 3])) == 1
    assert workloads.first_difference(np.asarray([1, 2]), np.asarray([1, 2, 3])) == 2
    plain = specjax.generate(TARGET, [PROMPT], **GIVEN)
    other = plain.tokens[0].copy()
    other[5] += 1
    figures = workloads.compare([plain, replace(plain, tokens=[other])], [plain, plain])
    assert figures["identical"] == 1 and figures["speed_up"] == 1.0
    [error] = workloads.identity_errors({"chat": {"methods": {"ngram": figures}}})
    assert error == "ngram differs from plain decoding on prompt 1 of chat, from new token 5 on"


def test_engines_are_compared_on_the_same_work():
    calls: list[str] = []

    def engine(name: str, seconds: float, tokens: list[int]) -> peers.Engine:
        def run(prompt: list[int], count: int) -> tuple[list[int], float]:
            calls.append(name)
            return tokens[:count], seconds

        return run

    engines = {"own": engine("own", 0.1, [1, 2, 3]), "peer": engine("peer", 0.2, [1, 9, 3])}
    own, other = ({name: engine} for name, engine in engines.items())
    result, failed = peers.measure_peers(own, other, [[1], [2]], 3, repeats=2)
    assert calls == ["own", "peer"] * 6 and not failed
    assert result["own"] == {"tokens_per_second": 10, "over_first": 1, "same_tokens": [3, 3]}
    assert result["peer"] == {"tokens_per_second": 5, "over_first": 0.5, "same_tokens": [1, 1]}


def test_a_peer_that_fails_on_the_way_is_left_out_by_name():
    def own(prompt: list[int], count: int) -> tuple[list[int], float]:
        return [1] * count, 0.1

    def failing(prompt: list[int], count: int) -> tuple[list[int], float]:
        if prompt == [2]:
            raise IndexError("no such layer\nand more")
        return own(prompt, count)

    result, failed = peers.measure_peers({"own": own}, {"peer": failing}, [[1], [2]], 3, repeats=1)
    assert set(result) == {"own"} and failed == {"peer": "failed: IndexError: no such layer"}
    with pytest.raises(IndexError):
        peers.measure_peers({"own": failing}, {}, [[2]], 3, repeats=1)


def drawn_report() -> dict:
    """Figures for every plot; one method without a limit, one without drafts."""

    def method(speed: float, shares: list) -> dict:
        return {"speed_up": speed, "acceptance_per_position": shares}

    methods = {"ngram": method(1.4, [0.7, 0.5, None]), "head": method(2.0, [None, None])}
    limits = {"length": {"ngram": 1.6, "head": None}, "choice": 2.2, "perfect": 5.0}
    limits |= {"replayed": 4.6}
    found = {"chat": {"methods": methods, "limits": limits}, "code": {"methods": methods}}
    parts = {"draft": 1.0, "verify": 4.0, "rest": -0.1, "round": 4.9}
    return {
        "workloads": {"0": found, "1": found},
        "curve": {"pass_ms": {1: 2.0, 2: 3.0}, "round_ms": {1: 2.1, 2: 3.1}},
        "split": {"plain": parts, "ngram": parts},
        "batch": {"1": {"plain": 1.0, "ngram": 2.0}, "64": {"plain": 30.0, "ngram": 24.0}},
    }


def test_plots_are_drawn_of_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    report = drawn_report()
    files = plots.write_plots(report, tmp_path / "all")
    assert {file.stem for file in files} == set(plots.PLOTS)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    del report["workloads"]["1"]  # one temperature is no line
    left = {file.stem for file in plots.write_plots(report, tmp_path / "one")}
    assert left == set(plots.PLOTS) - {"temperatures"}
    gpu = {"curve": report["curve"], "batch 1": {"plain": 9.0, "drafted": 20.0}, "skipped": {}}
    gpu["batch 1"]["tokens_per_pass"] = 2.5
    files = plots.write_plots({"gpu": gpu}, tmp_path / "gpu")
    assert [file.stem for file in files] == ["gpu_verify_curve", "gpu_batches"]
    del report["workloads"], report["batch"]
    assert [f.stem for f in plots.write_plots(report, tmp_path)] == ["verify_curve", "split"]


def test_acceptance_is_averaged_over_the_workloads_that_drafted():
    figures = [{"acceptance_per_position": x} for x in ([0.8, 0.5], [0.4, None])]
    found = {w: {"methods": {"m": f}} for w, f in zip("ab", figures, strict=True)}
    assert workloads.acceptance_by_position(found)["m"] == pytest.approx([0.6, 0.5])


def test_an_engine_that_crashes_is_noticed():
    assert peers.exit_code(os._exit, 0) == 0
    assert peers.exit_code(os._exit, 3) == 3
    assert peers.exit_code(os.abort) == -signal.SIGABRT


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """(model folder, file of prompts)"""
    root = tmp_path_factory.mktemp("benchmark")
    prompts = root / "prompts.jsonl"
    rows = [{"workload": w, "prompt": f"{w} one two one two"} for w in ("echo", "other")]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    return write_folder(root / "model"), prompts


@pytest.mark.parametrize(
    "options, message",
    [
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"batches": (4, 0)}, r"batches must be at least 1, got \(4, 0\)"),
        ({"temperatures": (-1.0,)}, "temperatures must be"),
        ({"sections": ("growth",), "contexts": (512,)}, "contexts must be at least three"),
        ({"sections": ("growth",), "contexts": (512, 1024, 10**6)}, "at most the target's"),
        ({"sections": ("law",), "samples": 19}, "samples must be at least 20, got 19"),
        ({"workloads": ("echo", "chat")}, "among those of the prompts, echo, other; got chat"),
        ({"drafters": ()}, "drafters must name at least one"),
        ({"temperatures": ()}, "temperatures must be numbers"),
        ({"max_new_tokens": 10**6}, "prompt 0 of echo has .* tokens and max_new_tokens is 1000000"),
        ({"lengths": (512, 8)}, r"lengths must be at least 16 tokens, got \(512, 8\)"),
        ({"drafters": ("draft-model",)}, "needs --draft-model"),
    ],
)
def test_wrong_inputs_are_named(place, options, message):
    model, prompts = place
    given = {"target": str(model), "prompts": prompts, "max_new_tokens": 12} | options
    with pytest.raises(ValueError, match=message):
        benchmark.Benchmark(benchmark.Options(**given), [])


def measure(place, **given):
    """A report on the tiny model."""
    model, prompts = place
    out = prompts.with_name("report.json")
    settings = {
        "drafters": ("none", "ngram"),
        "limit": 1,
        "max_new_tokens": 12,
        "repeats": 1,
    } | given
    benchmark.main(benchmark.Options(target=str(model), prompts=prompts, json=out, **settings))
    return json.loads(out.read_text())


@pytest.mark.thorough
def test_a_report_has_every_figure(place):
    report = measure(place, sections=("curve", "workloads"), temperatures=(0.0,), turns=3)
    assert set(report["workloads"]["0"]) == {"echo", "other"}
    assert {"target", "device"} < set(report) and report["errors"] == []
    assert list(map(int, report["curve"]["pass_ms"])) == [1, 2, 4, 8, 16]
    for workload in ("echo", "other"):
        found = report["workloads"]["0"][workload]
        assert found["prompts"] == 1 and 0 < found["tokens"] <= 12
        ngram, limits = found["methods"]["ngram"], found["limits"]
        assert ngram["identical"] == 1 and ngram["different"] == {}
        assert ngram["mean_acceptance_length"] >= 1
        assert min(ngram[f"speed_up{x}"] for x in ("", "_with_prefill", "_median")) > 0
        assert (
            1  # more where a wide pass happened to be measured as the cheaper one
            <= limits["length"]["none"]
            <= limits["length"]["ngram"]
            <= limits["choice"]
            <= limits["perfect"]
        )
        assert limits["replayed"] > 0


@pytest.mark.thorough
def test_a_report_has_the_law_the_parts_and_the_batches(place):
    sections = ("split", "workloads", "law", "batch")
    given = {"drafters": ("none", "ngram"), "batches": (2,), "samples": 64}
    report = measure(place, sections=sections, temperatures=(1.0,), workloads=("echo",), **given)
    assert set(report["workloads"]["1"]) == {"echo"}
    limits = report["workloads"]["1"]["echo"]["limits"]
    assert 1 <= limits["length"]["none"] <= limits["length"]["ngram"]
    assert report["errors"] == []
    assert set(report["split"]) == {"plain", "none", "ngram"}
    assert set(report["split"]["ngram"]) == {"draft", "verify", "rest", "round"}
    assert len(report["law"]) == 2 * distribution.TOKENS
    assert {"statistic", "degrees", "p", "tokens_per_pass"} <= set(report["law"][0])
    assert set(report["batch"]) == {"2"}
    assert set(report["batch"]["2"]) == {"plain", "none", "ngram"}


@pytest.mark.thorough
def test_heads_are_compared_by_number_of_drafts(place, tmp_path, monkeypatch):
    monkeypatch.setattr(heads, "NUM_DRAFTS", (1, 4))
    target = specjax.load_target(place[0])
    specjax.save_head(tiny_head(target), tmp_path)
    found = measure(place, sections=("heads",), heads=(str(tmp_path),))["heads"][str(tmp_path)]
    assert min(found["draft_cost"].values()) >= 0
    for temperature in ("0", "1"):
        row = found["temperatures"][temperature]
        for tokens in row["tokens"].values():
            assert 1 <= tokens["1"] <= 2 and tokens["1"] <= tokens["4"] <= 5
        assert len(row["per_position"]) == 4 and row["best"] in (1, 4)
        assert set(row["predicted"]) == set(row["measured"]) == {"1", "4"}
        assert min(row["measured"].values()) > 0
    tokenizer = specjax.load_tokenizer(place[0])
    out = specjax.generate(
        target,
        benchmark.encode_workloads(place[1], tokenizer, 1)["echo"],
        drafter=specjax.head_drafter(specjax.load_head(tmp_path, target), 4),
        max_new_tokens=12,
        stop_token_ids=tokenizer.stop_token_ids,
    )
    expected = out.statistics.mean_acceptance_length
    assert found["temperatures"]["0"]["tokens"]["echo"]["4"] == pytest.approx(expected, rel=0.1)


@pytest.mark.thorough
def test_a_report_has_growth_and_peers(place):
    pytest.importorskip("transformers")
    report = measure(place, sections=("growth", "peers"), contexts=(256, 384, 512), exit_layer=1)
    laws = {name: found for name, found in report["growth"].items() if name != "peak_bytes"}
    assert set(laws) == {"context", "batch", "vocabulary", "drafts", "compile", "memory"}
    assert all({"law", "unit", "x", "y", "off"} <= set(found) for found in laws.values())
    assert laws["compile"]["off"] == 0 and laws["memory"]["off"] < 0.05
    assert report["growth"]["peak_bytes"] > 0
    engines = report["peers"]["engines"]
    expected = ("", ", prompt lookup", ", early exit")
    assert {"specjax", "specjax, ngram"} | {f"transformers{x}" for x in expected} <= set(engines)
    assert all(figures["same_tokens"] == [12, 12] for figures in engines.values())
    assert "--draft-model" in report["peers"]["skipped"]["transformers, assisted"]


@pytest.mark.thorough
def test_trainers_are_compared_on_the_same_head(place):
    """speculators takes part where it is installed, and has to find the same loss there; else it is skipped by name."""
    given = {"draft_vocab_size": 64, "sequences": 2, "lengths": (16,)}
    found = measure(place, sections=("training",), **given)["training"]
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.02)):
        trainers = found["trainers"][dtype]["16"]
        own, whole = (trainers.pop(name) for name in (training.OWN, training.WHOLE))
        assert whole["loss"] == pytest.approx(own["loss"], rel=tolerance)
        assert own["times_as_fast"] == 1 and min(own.values()) > 0
        assert set(trainers) | set(found["skipped"]) == set(training.PEERS)
        if trainers:
            theirs = trainers["speculators, one by one"]["loss"]
            assert theirs == pytest.approx(own["loss"], rel=tolerance)
    assert found["growth"]["sequences"]["x"] == [1, 2, 4]
    assert found["growth"]["length"]["x"] == [8, 16, 32]


def test_a_trainer_that_ends_says_why(place):
    job = training.Job("specjax", str(place[0]), str(place[0].parent / "head"), 10**6)
    with (
        pytest.raises(ChildProcessError, match=r"exit code 1: ValueError: draft_vocab_size must"),
        training.running(job),
    ):
        pass


@pytest.mark.thorough
def test_the_section_of_accelerators_runs_anywhere_with_tiny_shapes(place):
    report = measure(place, sections=("gpu",), gpu_shapes="tiny")
    found = report["gpu"]
    assert found["copy_bandwidth"] > 0 and found["product_flops"] > 0
    assert found["plain"]["reached"] > 0 and found["plain"]["limit"] > 0
    assert 1 <= found["batch 2"]["tokens_per_pass"] <= gpu.NUM_DRAFT + 1
    assert found["training"]["tokens_per_second"] > 0 < found["training"]["utilisation"]
    assert "torch" in found or "torch" in found["skipped"]


def test_operations_of_training_are_counted():
    """Two of every weight of the target that multiplies, six of the head's, all steps but for the map from the taps."""
    params = {"fc": jnp.ones((6, 2)), "first.up": jnp.ones((2, 5)), "norm": jnp.ones(2)}
    weights = sum(x.size for x in jax.tree.leaves(TARGET) if x.ndim > 1)
    multiplied = weights - TARGET.vocab_size * TARGET.config.hidden_size
    assert gpu.training_flops(TARGET, params, 3) == 2 * multiplied + 6 * (12 + 3 * 10)
