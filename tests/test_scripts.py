"""The commands, run as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from folders import write_folder

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def run(script: str, *arguments: object, cache: Path, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"SPECJAX_CACHE": str(cache), "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """(model folder, cache folder)"""
    root = tmp_path_factory.mktemp("commands")
    return write_folder(root / "model"), root / "cache"


@pytest.mark.thorough
def test_generate_writes_the_agreed_json(place, tmp_path):
    model, cache = place
    results = {}
    for drafter in ("none", "ngram", "draft-model"):
        out = tmp_path / f"{drafter}.json"
        arguments = ["--target", model, "--drafter", drafter, "--max-new-tokens", 20, "--json", out]
        arguments += ["--prompt", "Hello hello hello", "--prompt", "One"]
        if drafter == "draft-model":
            arguments += ["--draft-model", model, "--num-draft", 3]
        text = run("generate.py", *arguments, cache=cache)
        results[drafter] = json.loads(out.read_text())
        assert text.strip()
    report = results["ngram"]
    assert set(report) == {"target", "drafter", "device", "rows"}
    assert len(report["rows"]) == 2
    assert set(report["rows"][0]) == {
        "prompt_tokens",
        "tokens",
        "text",
        "rounds",
        "drafted",
        "accepted",
        "accepted_per_position",
        "mean_acceptance_length",
        "prefill_seconds",
        "decode_seconds",
        "tokens_per_second",
    }
    for plain, *others in zip(*(results[d]["rows"] for d in results), strict=True):
        assert all(plain["tokens"] == other["tokens"] for other in others)
    perfect = results["draft-model"]["rows"][0]
    assert perfect["mean_acceptance_length"] > 3


@pytest.mark.thorough
def test_generate_reads_prompt_files(place, tmp_path):
    model, cache = place
    rows = [
        {"prompt": "a"},
        {"turns": ["b", "c"]},
        {"messages": [{"role": "user", "content": "d"}]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out.json"
    arguments = ["--target", model, "--prompt-file", file, "--max-new-tokens", 3, "--json", out]
    run("generate.py", *arguments, "--temperature", 0.9, "--top-p", 0.9, cache=cache)
    assert len(json.loads(out.read_text())["rows"]) == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt", "x", "--target", "no-such-model"], "no-such-model"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (["--prompt", "x", "--temperature", "-1"], "temperature must be"),
                ([], "no prompt"),
                (["--prompt", "x", "--drafter", "draft-model"], "--draft-model"),
                (["--prompt", "x", "--max-new-tokens", "100000"], "context"),
            )
        ),
    ],
)
def test_generate_names_what_is_wrong(place, arguments, message):
    model, cache = place
    if "--target" not in arguments:
        arguments = [*arguments, "--target", model]
    text = run("generate.py", *arguments, cache=cache, code=1)
    assert message in text and "Traceback" not in text


@pytest.mark.thorough
def test_the_benchmark_says_that_there_is_no_accelerator(place, tmp_path):
    if jax.default_backend() != "cpu":
        pytest.skip("there is one")
    model, cache = place
    out = tmp_path / "out.json"
    arguments = ["--target", model, "--sections", "gpu", "--json", out]
    assert "skipped" in run("benchmark.py", *arguments, cache=cache)
    assert "--gpu-shapes tiny" in json.loads(out.read_text())["gpu"]["skipped"]["gpu"]


@pytest.mark.thorough
def test_batch_answers_a_file_and_goes_on(place, tmp_path):
    model, cache = place
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": c}) for c in "abcde"))
    setting = tmp_path / "setting.toml"
    setting.write_text('drafter = "adaptive"\nnum_draft = 3\ncosts = [1, 1, 1]\nslots = 2\n')
    arguments = ["--target", model, "--prompts", prompts, "--output", out, "--config", setting]
    arguments += ["--max-new-tokens", 5, "--temperature", 0, 1]
    assert "3 answers added" in run("batch.py", *arguments, "--limit", 3, cache=cache)
    assert "2 answers added" in run("batch.py", *arguments, cache=cache)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(5))
    assert all(row["emitted"] == len(row["tokens"]) and row["prompt"] for row in rows)
    assert all(row["temperature"] == row["index"] % 2 for row in rows)
    text = run("batch.py", *arguments, 2, cache=cache, code=1)  # a third one in turn
    assert "to another prompt or at another temperature" in text
    prompts.write_text('{"question": 1}')
    text = run("batch.py", *arguments, cache=cache, code=1)
    assert "prompts.jsonl:1: expected prompt, turns or messages" in text


@pytest.mark.thorough
def test_pairs_and_layers_are_measured(place, tmp_path):
    model, cache = place
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "pair.json"
    prompts.write_text(json.dumps({"prompt": "one two one two"}))
    common = ["--target", model, "--prompts", prompts, "--max-new-tokens", 8]
    pair = ["--draft", model, "--num-draft", 2, "--json", out]
    text = run("check_pair.py", *common, *pair, cache=cache)
    assert "one draft pass costs" in text
    assert json.loads(out.read_text())["rates"]["0.0"][0] == 1.0
    text = run("search_layers.py", *common, "--shares", 0.5, cache=cache)
    assert "first 1 of 2" in text


@pytest.mark.thorough
def test_a_head_from_answers_to_drafts(place, tmp_path):
    """batch.py -> prepare_data.py -> train_eagle3.py -> export_head.py -> generate.py, as the README has it."""
    pytest.importorskip("grain")
    model, cache = place
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [{"workload": "letters", "prompt": c * 3} for c in "abcdefghijkl"]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    common = ["--target", model]
    made = ["--prompts", prompts, "--output", answers, "--slots", 4, "--max-new-tokens", 40]
    run("batch.py", *common, *made, "--temperature", 0.8, cache=cache)
    data = ["--source", answers, "--output", tmp_path / "data", "--length", 128]
    text = run("prepare_data.py", *common, *data, "--valid-share", 0.3, cache=cache)
    assert "wanted" in text and "a draft vocabulary of 2048 covers 100.00%" in text
    config = tmp_path / "run.toml"
    settings = {
        "target": str(model),
        "data": str(tmp_path / "data"),
        "output": str(tmp_path / "run"),
        "taps": [0, 1, 2],
        "draft_vocab_size": 128,
        "batch_size": 2,
        "epochs": 2.0,
        "decode_prompts": str(prompts),
        "decode_tokens": 8,
    }
    config.write_text("\n".join(f"{k} = {json.dumps(v)}" for k, v in settings.items()))
    text = run("train_eagle3.py", "--config", config, cache=cache)
    assert "covers" in text and "head in" in text and "letters" in text
    assert (tmp_path / "run" / "log.jsonl").stat().st_size
    out = ["--output", tmp_path / "served", "--layout", "speculators", "--dtype", "float32"]
    run("export_head.py", *common, *out, "--head", tmp_path / "run" / "head", cache=cache)
    report = tmp_path / "head.json"
    given = ["--prompt", "abc", "--max-new-tokens", 16, "--json", report, "--drafter", "head"]
    run("generate.py", *common, *given, "--head", tmp_path / "served", cache=cache)
    row = json.loads(report.read_text())["rows"][0]
    assert len(row["tokens"]) == 16 and row["drafted"] > 0
