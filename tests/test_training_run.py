"""Whole training runs on a tiny target: data, features, resuming, and a head that drafts better than an untrained one."""

import dataclasses
import functools
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import write_folder
from rich.console import Console
from zoo import tiny_gpt_oss, tiny_head, tiny_target

import specjax

pytest.importorskip("grain")
pytest.importorskip("array_record")

from training.checkpoints import RunCheckpoints
from training.config import TrainConfig, read_config
from training.data import (
    Example,
    answer_example,
    batches,
    chat_example,
    open_sequences,
    prepare,
    read_examples,
    read_summary,
)
from training.evaluation import decode_workloads
from training.features import FeatureFile, check_features, without_layers, write_features
from training.heads import make_head, new_head
from training.logs import read_log
from training.loop import TrainingStopped, identity, train
from training.step import make_optimizer

TARGET = tiny_target()
LENGTH = 48
QUIET = Console(quiet=True)


def documents(count=80, seed=0):
    """Prompts, and what the tiny target makes of them at temperature 1."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 61, random.integers(2, 7)).tolist() for _ in range(count)]
    out = specjax.generate(
        TARGET,
        prompts,
        max_new_tokens=20,
        sampling=specjax.Sampling(temperature=0.7),
        key=seed,
    )
    return [answer_example(p, t.tolist()) for p, t in zip(prompts, out.tokens, strict=True)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prepare(documents(), folder, length=LENGTH, source="tiny", valid_share=0.15)
    return folder


def config(data, output, **changes):
    fields = {
        "target": "tiny",
        "data": data,
        "output": output,
        "draft_vocab_size": 48,
        "taps": (0, 1, 2),
        "steps": 3,
        "batch_size": 4,
        "learning_rate": 3e-3,
        "epochs": 1.0,
        "log_every": 2,
        "evaluate_every": 4,
        "save_every": 3,
    }
    return TrainConfig(**(fields | changes))


def run(settings, target=TARGET, **given):
    return train(settings, target=target, stop_token_ids=(), console=QUIET, **given)


def untrained(settings):
    """The head that a run would start from."""
    return make_head(settings, TARGET, read_summary(settings.data), ())


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_trained_head_drafts_better(data, tmp_path):
    long = {"epochs": 15.0, "learning_rate": 1e-2, "evaluate_every": 40, "save_every": 40}
    result = run(config(data, tmp_path, **long))
    start = untrained(config(data, tmp_path / "none"))
    prompts = [[7, 3, 9], [1, 50, 2, 8], [33, 4], [20, 21, 22]]

    def length(head):
        drafter = specjax.Eagle3(head, num_draft=3)
        out = specjax.generate(TARGET, prompts, drafter=drafter, max_new_tokens=60)
        return out.statistics.emitted.sum() / out.statistics.rounds.sum()

    # it starts as the target's last layer, which is better than nothing
    trained, random = specjax.load_head(result.folder, TARGET), tiny_head(TARGET)
    assert length(trained) > 1.1 * length(start) > 1.2 * length(random)
    assert length(trained) > 1.4 * length(random)
    log = read_log(tmp_path)
    simulated = [row["simulated_length"] for row in log if row["kind"] == "valid"]
    assert max(simulated) == pytest.approx(result.simulated_length, abs=1e-4)
    losses = [row["loss"] for row in log if row["kind"] == "train"]
    assert losses[-1] < 0.7 * losses[0]
    assert {row["kind"] for row in log} == {"train", "valid"}
    assert list((tmp_path / "tensorboard").iterdir())


def test_decodes_on_the_way(data, tmp_path):
    workloads = {"a": [[7, 3, 9], [1, 50]], "b": [[20, 21, 22]]}
    settings = config(
        data,
        tmp_path,
        max_updates=4,
        decode_prompts=Path("held-out"),
        decode_every=2,
        decode_tokens=9,
    )
    with pytest.raises(ValueError, match="workloads must be given to decode every 2 updates"):
        run(settings)
    with pytest.raises(ValueError, match=r"prompts\[0\] has .* tokens and max_new_tokens is 9"):
        run(settings, workloads={"a": [[1] * TARGET.context_length]})
    result = run(settings, workloads=workloads)
    first, last = (row for row in read_log(tmp_path) if row["kind"] == "decode")
    assert (first["update"], last["update"]) == (2, 4)
    found = decode_workloads(
        TARGET,
        specjax.Eagle3(result.head, num_draft=3),
        workloads,
        max_new_tokens=9,
        stop_token_ids=(),
    )
    assert last["mean_acceptance_length"] == found["all"]["mean_over_workloads"]
    assert {name: last[name] for name in workloads} == {
        name: found[name]["mean_acceptance_length"] for name in workloads
    }
    assert (tmp_path / "training.png").is_file()


@pytest.fixture(scope="module")
def features(data):
    return {"features": "offline", "feature_folder": data / "features"}


@pytest.fixture(scope="module")
def whole(data, features, tmp_path_factory):
    """A run that nothing interrupted."""
    return run(config(data, tmp_path_factory.mktemp("whole"), **features))


def terminate_at(update, monkeypatch):
    """SIGTERM arrives while an update is being prepared."""
    import training.source

    count, advance = 0, training.source.Source.parts

    def parts(self, *given):
        nonlocal count
        count += 1
        if count == update:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(self, *given)

    monkeypatch.setattr(training.source.Source, "parts", parts)


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_resumed_run_is_bit_identical(data, features, whole, tmp_path, monkeypatch):
    """Ended by SIGTERM, in the middle between two saves."""
    settings = config(data, tmp_path, **features)

    terminate_at(5, monkeypatch)
    with pytest.raises(TrainingStopped, match="update 5 is saved"):
        run(settings)
    resumed = run(settings)
    assert resumed.updates == whole.updates > 6
    same(resumed.head, whole.head)
    folders = whole.folder.parent, tmp_path
    rows = [[r for r in read_log(folder) if r["kind"] == "train"] for folder in folders]
    assert [r["update"] for r in rows[0]] == [r["update"] for r in rows[1]]
    assert [r["loss"] for r in rows[0]] == [r["loss"] for r in rows[1]]


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[5:]
import test_training_run as t
import training.source
count, advance = 0, training.source.Source.parts
def parts(self, *given):
    global count
    count += 1
    if count == 6:
        import os, signal, time
        time.sleep(1)  # the save of update 3 is under way, or done
        os.kill(os.getpid(), signal.SIGKILL)
    return advance(self, *given)
if sys.argv[4] == "kill":
    training.source.Source.parts = parts
features = {"features": "offline", "feature_folder": Path(sys.argv[3])}
settings = t.config(Path(sys.argv[1]), Path(sys.argv[2]), **features)
t.train(settings, target=t.TARGET, stop_token_ids=())
"""


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_killed_run_resumes_bit_identical(data, features, whole, tmp_path):
    here = Path(__file__).resolve().parent
    for how, code in (("kill", -signal.SIGKILL), ("end", 0)):
        command = [
            sys.executable,
            "-c",
            textwrap.dedent(KILLED),
            str(data),
            str(tmp_path),
            str(features["feature_folder"]),
            how,
        ]
        done = subprocess.run(
            [*command, str(here), str(here.parent)], capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
    assert re.search(
        "going on after update [34]\n", done.stdout
    )  # of the two that were being saved
    same(specjax.load_head(tmp_path / "head", TARGET), whole.head)


OTHERS = {
    "p-eagle": {
        "recipe": "p_eagle",
        "mask_token_id": 60,
        "num_layers": 2,
        "steps": 4,
        "markov_rank": 4,
        "partitions": 2,
        "train_embedding": True,
    },
    "mtp": {"recipe": "mtp", "taps": None, "step_decay": 0.6},
}


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
@pytest.mark.parametrize("name", OTHERS)
def test_other_heads_resume_bit_identical(data, tmp_path, name, monkeypatch):
    """P-EAGLE's anchors are drawn anew in every update, the same ones whether or not the run was interrupted."""
    short = {"max_updates": 5, "save_every": 9, "evaluate_every": 9, **OTHERS[name]}
    whole = run(config(data, tmp_path / "whole", **short))
    terminate_at(2, monkeypatch)
    with pytest.raises(TrainingStopped, match="update 2 is saved"):
        run(config(data, tmp_path / "parts", **short))
    same(run(config(data, tmp_path / "parts", **short)).head, whole.head)


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
@pytest.mark.parametrize("name", OTHERS)
def test_other_heads_draft_better_than_untrained_ones(data, tmp_path, name):
    more, long = OTHERS[name], {"epochs": 20.0, "learning_rate": 1e-2, "evaluate_every": 40}
    result = run(config(data, tmp_path / "a", save_every=40, **long, **more))
    start = untrained(config(data, tmp_path / "b", **more))
    prompts = [[7, 3, 9], [1, 50, 2, 8], [33, 4], [20, 21, 22]]

    def length(head):
        """Tokens a pass, and in how many rounds the second draft stood."""
        drafter = specjax.head_drafter(head, 3)
        out = specjax.generate(TARGET, prompts, drafter=drafter, max_new_tokens=60)
        found = out.statistics
        second = found.accepted_per_position.sum(axis=0)[1] / found.rounds.sum()
        return found.emitted.sum() / found.rounds.sum(), second

    (trained, deep), (fresh, before) = (
        length(specjax.load_head(result.folder, TARGET)),
        length(start),
    )
    # an MTP module starts as the target's last layer, and so with some skill
    assert trained > 1.15 * fresh
    assert deep > before + 0.02  # P-EAGLE's is a masked slot's
    # what is the target's own has not moved
    if name == "mtp":
        np.testing.assert_array_equal(result.head.target_norm.weight, TARGET.norm.weight)
    else:
        assert not np.array_equal(result.head.embedding, start.embedding)
        assert np.abs(result.head.readout.markov.after).max() > 0


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_heads_of_gpt_oss_are_llamas(layout, tmp_path):
    """Nothing of the target's sinks, experts and clamps; its rope, YaRN without rounding, travels."""
    target = tiny_gpt_oss()
    head = new_head(config(tmp_path, tmp_path, draft_vocab_size=0), target, None)
    decoder = head.config.decoder
    assert (decoder.family, decoder.activation, decoder.sinks) == ("llama", "silu", False)
    assert decoder.ropes == target.config.ropes
    specjax.save_head(head, tmp_path, layout, target=target)
    written = json.loads((tmp_path / "config.json").read_text())
    if layout == "speculators":
        verifier = written["speculators_config"]["verifier"]
        assert verifier["architectures"] == ["GptOssForCausalLM"]
    again = specjax.load_head(tmp_path, target)
    assert again.config == head.config
    same(again, head)


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_head_of_gpt_oss_trains_and_decodes(data, tmp_path):
    target = tiny_gpt_oss()
    result = run(config(data, tmp_path, max_updates=4), target)
    losses = [row["loss"] for row in read_log(tmp_path) if row["kind"] == "train"]
    assert losses[-1] < losses[0]
    prompts = [[3, 1, 4], [2, 7, 1, 8, 2, 8]]
    plain = specjax.generate(target, prompts, max_new_tokens=20)
    drafter = specjax.Eagle3(specjax.load_head(result.folder, target), num_draft=3)
    spoken = specjax.generate(target, prompts, drafter=drafter, max_new_tokens=20)
    same(spoken.tokens, plain.tokens)


SPREAD = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import jax
import test_training_run as t
from training.sharding import make_mesh, place_head, place_target
assert len(jax.devices()) == 8
data, output = Path(sys.argv[1]), Path(sys.argv[2])
more = {"max_updates": 4, "evaluate_every": 4, "log_every": 1, "data_parallel": 4, "model_parallel": 2}
t.run(t.config(data, output, **more))
target = place_target(t.TARGET, make_mesh(4, 2))
qkv = target.layers[0].attention.qkv[...]
assert {s.data.shape for s in qkv.addressable_shards} == {(32, 1, 4, 8)}, qkv.sharding
head = place_head({"fc": jax.numpy.zeros((96, 32))}, make_mesh(8, 1))["fc"]
assert {s.data.shape for s in head.addressable_shards} == {(12, 32)}
layer = place_target(t.tiny_gpt_oss(), make_mesh(4, 2)).layers[0]
for x, size in (
    (layer.attention.sinks, (1, 2)),
    (layer.mlp.gate_up, (3, 32, 2, 24)),
    (layer.mlp.gate_up_bias, (3, 2, 24)),
    (layer.mlp.down_bias, (3, 32)),
):
    assert {s.data.shape for s in x[...].addressable_shards} == {size}, x.sharding
"""


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_eight_devices_train_like_one(data, tmp_path):
    """Data parallel by 4 with the head split, tensor parallel by 2: the same losses."""
    run(config(data, tmp_path / "one", max_updates=4, evaluate_every=4, log_every=1))
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-c", SPREAD, data, tmp_path / "eight", here, here.parent]
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags},
    )
    assert done.returncode == 0, done.stderr
    logs = [read_log(tmp_path / name) for name in ("one", "eight")]
    assert len(logs[0]) == len(logs[1]) == 5
    for one, eight in zip(*logs, strict=True):
        np.testing.assert_allclose(one["loss"], eight["loss"], rtol=2e-4)
    heads = [specjax.load_head(tmp_path / n / "head", TARGET) for n in ("one", "eight")]
    for a, b in zip(*map(jax.tree.leaves, heads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05, atol=2e-3)


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_accumulated_and_offline_updates_are_the_same(data, tmp_path):
    def losses(name, **more):
        short = {"max_updates": 4, "evaluate_every": 4, "log_every": 1}
        run(config(data, tmp_path / name, **short, **more))
        return [row["loss"] for row in read_log(tmp_path / name) if row["kind"] == "train"]

    plain = losses("a")
    np.testing.assert_allclose(losses("b", accumulate=4), plain, rtol=1e-4)
    kept = losses("c", features="offline", feature_folder=tmp_path / "features")
    np.testing.assert_allclose(kept, plain, rtol=5e-3)  # bfloat16
    assert len(set(plain)) == 4
    half = losses("d", compute_dtype="bfloat16")
    np.testing.assert_allclose(half, plain, rtol=3e-2)


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_muon_trains(data, tmp_path):
    run(config(data, tmp_path, optimizer="muon", epochs=4.0))
    losses = [row["loss"] for row in read_log(tmp_path) if row["kind"] == "train"]
    assert losses[-1] < 0.95 * losses[0]


def test_only_p_eagles_draws_bind_a_run_to_its_parts(tmp_path):
    """It draws anchors for every part of a batch, so another `accumulate` would be another run."""
    (tmp_path / "dataset.json").write_text("{}")

    def same(**given):
        one, two = (
            identity(config(tmp_path, tmp_path, accumulate=n, **given), 1, ()) for n in (1, 2)
        )
        return one == two

    assert same() and not same(recipe="p_eagle", mask_token_id=60)


def test_muon_is_for_maps_between_streams(tmp_path):
    """The mask's state, the correction's tables and biases move by AdamW's learning rate, as the vocabulary's rows do."""
    names = ("fc", "layers[0].mlp.down", "mask_hidden", "readout.markov.before", "readout.head")
    names += ("embedding", "layers[0].attention.qkv_bias")
    params = {name: jax.random.normal(jax.random.key(i), (8, 8)) for i, name in enumerate(names)}
    settings = config(
        tmp_path, tmp_path, optimizer="muon", learning_rate=1e-4, muon_learning_rate=1.0
    )
    optimizer = make_optimizer(settings, 10)
    state = optimizer.init(params)
    for _ in range(2):  # the first is warm-up's, of no size
        moved, state = optimizer.update(params, state, params)
    sizes = {name: float(jnp.abs(x).max()) for name, x in moved.items()}
    assert {name for name, size in sizes.items() if size > 1e-2} == set(names[:2]), sizes


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_frozen_readout_stays_the_targets(data, tmp_path):
    head = run(config(data, tmp_path, train_readout=False, max_updates=3)).head
    rows = np.asarray(TARGET.head[...])[:, np.asarray(head.target_ids)]
    np.testing.assert_array_equal(head.readout.head[...], rows)


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_numbers_that_are_none_stop_and_spoil_nothing(data, features, whole, tmp_path, monkeypatch):
    """An update on hidden states that are NaN: the run ends, and goes on from its last checkpoint as if nothing had been."""
    import training.source

    count, advance = 0, training.source.Source.parts

    def parts(self, *given):
        nonlocal count
        count += 1
        batch, read = advance(self, *given)
        return batch, read.replace(taps=read.taps * (np.nan if count == 5 else 1))

    monkeypatch.setattr(training.source.Source, "parts", parts)
    settings = config(data, tmp_path, **features)
    with pytest.raises(
        TrainingStopped, match=r"no numbers at update 6 .*checkpoint of update 4 is"
    ):
        run(settings)
    same(run(settings).head, whole.head)


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_a_stalled_run_stops_and_leaves_its_best_head(data, tmp_path, monkeypatch):
    import training.loop

    monkeypatch.setattr(training.loop, "STALLED", 3)
    settings = config(data, tmp_path, learning_rate=1e-30, epochs=20.0, evaluate_every=1)
    with pytest.raises(TrainingStopped, match="not improved for 3 evaluations; the best head"):
        run(settings)
    head = specjax.load_head(tmp_path / "head", TARGET)
    with pytest.raises(TrainingStopped, match="not improved"):  # and does not go on
        run(settings)
    assert len([r for r in read_log(tmp_path) if r["kind"] == "valid"]) <= 5
    more = config(data, tmp_path / "more", start_from=tmp_path / "head", max_updates=1)
    same(run(more).head.ids, head.ids)
    with pytest.raises(ValueError, match="has num_layers 1, got 2"):
        run(dataclasses.replace(more, output=tmp_path / "two", num_layers=2))
    with pytest.raises(ValueError, match="is a head of eagle3, got recipe mtp"):
        run(dataclasses.replace(more, recipe="mtp", taps=None, mlp_size=None))


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_whole_vocabulary_is_trained(data, tmp_path):
    """The head's rows start as the target's own array, which the updates must not overwrite."""
    before = np.asarray(TARGET.head[...]).copy()
    head = run(config(data, tmp_path, draft_vocab_size=0, max_updates=3)).head
    np.testing.assert_array_equal(TARGET.head[...], before)
    assert head.target_ids is None and (np.asarray(head.readout.head[...]) != before).any()


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_other_data_is_another_run(tmp_path):
    folder, output = tmp_path / "data", tmp_path / "run"
    prepare(documents(30), folder, length=LENGTH, source="tiny", valid_share=0.2)
    run(config(folder, output, max_updates=1))
    prepare(documents(30, seed=1), folder, length=LENGTH, source="tiny", valid_share=0.2)
    with pytest.raises(ValueError, match="another run: dataset was"):
        run(config(folder, output, max_updates=1))
    prepare(documents(30), folder, length=LENGTH, source="tiny", valid_share=0.0)
    with pytest.raises(ValueError, match="no validation sequences"):
        run(config(folder, tmp_path / "new", max_updates=1))


@pytest.mark.thorough
@pytest.mark.xdist_group("run")
def test_another_runs_folder_is_refused(data, tmp_path):
    run(config(data, tmp_path, max_updates=2))
    with pytest.raises(ValueError, match=r"another run: steps was 3, now 2"):
        run(config(data, tmp_path, max_updates=2, steps=2))


def test_packing_keeps_every_document(tmp_path):
    random = np.random.default_rng(1)
    examples = []
    for size in random.integers(2, 30, 200):
        tokens = random.integers(0, 61, size).astype(np.int32)
        examples.append(Example(tokens, random.random(size) < 0.5))
        examples[-1].wanted[-2:] = True
    examples.append(Example(np.zeros(LENGTH + 1, np.int32), np.ones(LENGTH + 1, bool)))
    examples.append(Example(np.zeros(5, np.int32), np.zeros(5, bool)))
    examples.append(answer_example([1, 2], [3]))  # its one token only follows what is given
    summary = prepare(iter(examples), tmp_path, length=LENGTH, source="x", valid_share=0.1)
    assert (summary.too_long, summary.masked) == (1, 2)
    assert read_summary(tmp_path) == summary
    moved = [*examples[1:], examples[0]]
    again = prepare(iter(moved), tmp_path / "b", length=LENGTH, source="x", valid_share=0.1)
    assert again.tokens != summary.tokens or again.digests != summary.digests
    found = []
    for split in ("train", "valid"):
        sequences = open_sequences(tmp_path, split, LENGTH)
        assert len(sequences) == summary.sequences[split]
        for row in (sequences[i] for i in range(len(sequences))):
            for number in range(1, row["document"].max() + 1):
                at = row["document"] == number
                found.append((row["tokens"][at].tolist(), row["wanted"][at].tolist()))
    right = [(e.tokens.tolist(), e.wanted.tolist()) for e in examples[:-3]]
    assert sorted(found) == sorted(right)
    full = sum(summary.tokens.values()) / (LENGTH * sum(summary.sequences.values()))
    assert full > 0.85


def test_order_of_data_depends_on_the_seed_and_can_be_resumed(data):
    def order(iterator, count=6):
        return [next(iterator)["index"].tolist() for _ in range(count)]

    first = order(batches(data, LENGTH, 4, seed=0))
    assert first == order(batches(data, LENGTH, 4, seed=0))
    assert first != order(batches(data, LENGTH, 4, seed=1))
    iterator = batches(data, LENGTH, 4, seed=0)
    order(iterator, 2)
    other = batches(data, LENGTH, 4, seed=0)
    other.set_state(iterator.get_state())
    assert order(other, 4) == first[2:]


def test_draft_vocabulary(data):
    summary = read_summary(data)
    ids = summary.draft_vocabulary(10, always=[60])
    assert len(ids) == 10 and 60 in ids and (np.diff(ids) > 0).all()
    rest = [i for i in ids if i != 60]
    least = min(summary.vocabulary.get(int(i), 0) for i in rest)
    assert all(n <= least for i, n in summary.vocabulary.items() if i not in ids)
    assert summary.coverage(np.arange(61)) == 1.0
    assert len(summary.draft_vocabulary(61)) == 61
    with pytest.raises(ValueError, match="at least 2, got 1"):
        summary.draft_vocabulary(1, always=[3, 4])


@pytest.mark.parametrize("system", [False, True])
def test_chat_mask_covers_the_assistants_tokens(system):
    tokenizer = chat_tokenizer()
    turns = [
        ("user", "Hi there"),
        ("assistant", "Hello!"),
        ("user", "Why?"),
        ("assistant", "So.\n"),
    ]
    messages = [{"role": role, "content": text} for role, text in turns]
    if system:
        messages.insert(0, {"role": "system", "content": "Be kind"})
    example = chat_example(tokenizer, messages)
    spans, inside = [], False
    for token, wanted in zip(example.tokens.tolist(), example.wanted, strict=True):
        if wanted and not inside:
            spans.append([])
        if wanted:
            spans[-1].append(token)
        inside = bool(wanted)
    assert [tokenizer.decode(s) for s in spans] == ["Hello!<|im_end|>", "So.\n<|im_end|>"]


@functools.cache
def chat_tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        return specjax.load_tokenizer(write_folder(Path(folder)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2: "),
        ("[]", "2: expected a JSON object"),
        ('{"a": 1}', "2: expected messages, text, or prompt and response; got the fields a"),
        ("", "2: "),
        ('{"prompt": [1], "response": []}', "2: response must be a list of token ids"),
        ('{"prompt": "a", "response": "b"}', "2: prompt must be a list of token ids, got 'a'"),
        (
            '{"prompt": [1, 5000], "response": [1]}',
            "2: prompt must hold token ids in 0..300, got 5000",
        ),
        ('{"prompt": [1.5], "response": [1]}', "2: prompt must hold token ids in 0..300, got 1.5"),
        ('{"text": "x"}', "2: text must have at least 2 tokens"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "2: no assistant turn"),
        ('{"messages": []}', "2: messages must be a non-empty list"),
        (b'{"text": "\xff"}', "2: .*can't decode"),
    ],
)
def test_malformed_lines_are_named(line, message, tmp_path):
    path = tmp_path / "d.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"prompt": [1, 2], "response": [3]}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"d.jsonl:{message}"):
        list(read_examples(path, chat_tokenizer()))


def test_damaged_archives_are_named(tmp_path):
    whole = gzip.compress(b'{"prompt": [1, 2], "response": [3]}\n' * 1000)
    path = tmp_path / "d.jsonl.gz"
    for content, message in ((whole[:-20], "damaged: "), (b"{}", "after line 0: damaged: Not a")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"d\.jsonl\.gz, .*{message}"):
            list(read_examples(path, chat_tokenizer()))


def test_all_tokens_of_a_document_can_be_wanted(tmp_path):
    """A prompt alone teaches too then, but for what the template puts before it; without, only the assistant's tokens do."""
    path, tokenizer = tmp_path / "d.jsonl", chat_tokenizer()
    turn = {"role": "user", "content": "hello there"}
    rows = [
        {"turns": ["hello there", "later"]},
        {"messages": [turn]},
        {"prompt": [1, 2], "response": [3]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked, same, answered = read_examples(path, tokenizer, whole=True)
    assert asked.tokens.tolist() == tokenizer.encode_chat([turn], add_generation_prompt=False)
    assert same.tokens.tolist() == asked.tokens.tolist()
    opening = len(tokenizer.encode("<|im_start|>user\n"))
    assert not asked.wanted[:opening].any() and asked.wanted[opening:].all()
    assert answered.tokens.tolist() == [1, 2, 3]
    assert answered.wanted.tolist() == [False, True, True]
    with pytest.raises(ValueError, match="1: expected messages, text, or prompt"):
        list(read_examples(path, tokenizer))
    for bad in ('{"turns": "hello there"}', '{"turns": []}'):
        path.write_text(bad)
        with pytest.raises(ValueError, match="1: turns must be a list of texts"):
            list(read_examples(path, tokenizer, whole=True))


def test_features_are_validated(data, tmp_path):
    sequences = open_sequences(data, "train", LENGTH)
    write_features(TARGET, sequences, tmp_path, (0, 2), {"target": "tiny"})
    file = FeatureFile(tmp_path, (0, 2), {"target": "tiny"})
    check_features(TARGET, sequences, file, (0, 2))
    # the last layer's output, an MTP module's tap, is there for the teacher anyway
    check_features(TARGET, sequences, FeatureFile(tmp_path, (2,), {"target": "tiny"}), (2,))
    with pytest.raises(ValueError, match=r"of layers \[0, 2\], expected \[1\] too"):
        FeatureFile(tmp_path, (0, 1), {"target": "tiny"})
    with pytest.raises(ValueError, match="differ from a fresh pass"):
        check_features(tiny_target(1), sequences, file, (0, 2))
    alone = tmp_path / "alone"
    write_features(TARGET, sequences, alone, (2,), {"target": "tiny"})
    check_features(TARGET, sequences, FeatureFile(alone, (2,), {"target": "tiny"}), (2,))
    with pytest.raises(ValueError, match="target is 'tiny', expected 'other'"):
        FeatureFile(tmp_path, (0, 2), {"target": "other"})
    (tmp_path / "features.json").unlink()
    with pytest.raises(ValueError, match="no complete features"):
        FeatureFile(tmp_path, (0, 2), {"target": "tiny"})


def test_stored_states_need_no_layers(data):
    alone, tokens = without_layers(TARGET), np.arange(12).reshape(2, 6)
    same(alone.lookup(tokens), TARGET.lookup(tokens))
    x = TARGET.lookup(tokens)
    same(alone.logits(x, np.arange(5)), TARGET.logits(x, np.arange(5)))
    assert not any(x.size for x in jax.tree.leaves(alone.layers))


def test_no_room_for_features_is_said_first(data, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(OSError, match=r"need 0\.00 GB, 0\.00 GB are free"):
        write_features(TARGET, open_sequences(data, "train", LENGTH), tmp_path, (0, 2), {})
    assert not list(tmp_path.glob("*.npy"))


def test_config_files(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('target = "t"\ndata = "d"\noutput = "o"\nlerning_rate = 1e-3\nx = 1\n')
    with pytest.raises(
        ValueError, match="unknown key 'lerning_rate'; did you mean 'learning_rate'"
    ):
        read_config(path)
    path.write_text('target = "t"\ndata = "d"\n')
    with pytest.raises(ValueError, match="missing output"):
        read_config(path)
    assert read_config(path, output="o", seed=3).seed == 3
    for line, message in (
        ("steps = 0", "steps must be at least 1, got 0"),
        ('objective = "mse"', "objective must be one of kl, ce, nla, lk_hybrid; got 'mse'"),
        ("batch_size = 6\naccumulate = 4", "batch_size must be a multiple of"),
        ("learning_rate = -1.0", "learning_rate must be positive"),
        ("steps = 3.5", "steps must be int; got 3.5"),
        ('fc_norm = "false"', "fc_norm must be bool; got 'false'"),
        ('compute_dtype = "bf16"', "must be one of float32, bfloat16 or left out; got 'bf16'"),
        ("max_updates = 2.5", "max_updates must be int or left out; got 2.5"),
        ("taps = 5", "taps must be a list of int or left out; got 5"),
        ('taps = ["a"]', "taps must be a list of int"),
        ("decode_prompts = 5", "decode_prompts must be Path or left out; got 5"),
        ("decode_every = 5", "needs decode_prompts; got 5 and None"),
        ("weight_decay = nan", "weight_decay must be a finite number; got nan"),
        ("keep = 0", "keep must be in"),
        ("keep_least = 1.5", "keep_least must be in"),
        ("max_updates = -1", "max_updates must be at least 1"),
        ("taps = []", "taps must name at least one layer"),
        ("steps =", "not TOML"),
    ):
        path.write_text(f'target = "t"\ndata = "d"\noutput = "o"\n{line}\n')
        with pytest.raises(ValueError, match=message):
            read_config(path)
    path.write_text(
        'target = "t"\ndata = "d"\noutput = "o"\nrecipe = "p_eagle"\nmask_token_id = 3\nsteps = 5\n'
    )
    published = read_config(path)
    assert (published.num_layers, published.steps, published.train_embedding) == (4, 5, True)


def test_best_and_latest_checkpoints_are_kept(tmp_path):
    checkpoints = RunCheckpoints(tmp_path, {"a": 1})
    with pytest.raises(ValueError, match="is in use: another process trains there"):
        RunCheckpoints(tmp_path, {"a": 1})
    data = iter(__import__("grain").MapDataset.range(5).to_iter_dataset())
    state = {"x": jax.numpy.zeros(2)}
    for update, length in ((1, 1.5), (2, 2.5), (3, None), (4, 2.0), (5, None)):
        checkpoints.save(update, {"x": state["x"] + update}, data, length)
        checkpoints.wait()
    assert (checkpoints.latest, checkpoints.best) == (5, (2, 2.5))
    assert checkpoints.load(state)["x"].tolist() == [5, 5]
    assert checkpoints.load(state, update=2)["x"].tolist() == [2, 2]
    checkpoints.close()
    kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    assert kept == ["2", "5"]
    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1}
    for _ in range(2):  # what was refused does not hold the folder
        with pytest.raises(ValueError, match="holds another run: a was 1, now 2"):
            RunCheckpoints(tmp_path, {"a": 2})
    RunCheckpoints(tmp_path, {"a": 1}).close()
