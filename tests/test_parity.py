"""Parity with transformers on torch CPU: logits, every hidden state, greedy tokens, for every family."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import shared
from families import FAMILIES, save_family
from folders import write_folder
from safetensors.numpy import load_file

import specjax

GOLDEN = ["llama", "llama3rope", "mistral", "qwen2", "qwen3", "qwen3moe", "gemma3", "gpt-oss"]


def run(target, tokens, pieces):
    """Logits and all hidden states in Hugging Face's convention, computed in `pieces` cached passes."""
    batch, size = tokens.shape
    layers = target.config.num_layers
    cache = target.init_cache(batch, 64)
    logits, hidden, at = [], [], 0
    for width in pieces:
        positions = jnp.broadcast_to(at + jnp.arange(width), (batch, width))
        out = target(
            jnp.asarray(tokens[:, at : at + width]),
            positions,
            cache,
            taps=tuple(range(layers + 1)),
        )
        cache = cache.commit(out.block, jnp.full(batch, width))
        logits.append(out.logits)
        hidden.append(out.taps)
        at += width
    assert at == size
    taps = jnp.concatenate(hidden, axis=1)
    taps = taps.at[:, :, layers].set(target.norm(taps[:, :, layers]))
    return np.asarray(jnp.concatenate(logits, 1)), np.moveaxis(np.asarray(taps), 2, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    theirs = save_family(name, tmp_path)
    target = specjax.load_target(tmp_path, dtype="float32")
    tokens = np.random.default_rng(0).integers(3, 128, (2, 24)).astype(np.int32)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens.astype(np.int64)), output_hidden_states=True)
    for pieces in ([24], [16, 1, 4, 3]):
        logits, hidden = run(target, tokens, pieces)
        np.testing.assert_allclose(logits, expected.logits.numpy(), rtol=1e-4, atol=1e-4)
        for ours, right in zip(hidden, expected.hidden_states, strict=True):
            np.testing.assert_allclose(ours, right.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "llama" else pytest.mark.thorough) for n in GOLDEN],
)
def test_golden_target(name):
    folder = shared("golden", f"target-{name}-tiny")
    target = specjax.load_target(folder, dtype="float32")
    golden = load_file(folder / "io.safetensors")
    tokens = golden["input_ids"].astype(np.int32)
    for pieces in ([24], [10, 14]):
        logits, hidden = run(target, tokens, pieces)
        np.testing.assert_allclose(logits, golden["logits"], rtol=1e-4, atol=2e-4)
        np.testing.assert_allclose(hidden, golden["hidden_states"], rtol=1e-4, atol=2e-4)
    generated = specjax.generate(
        target, tokens.tolist(), drafter=specjax.NGram(num_draft=5), max_new_tokens=32
    )
    np.testing.assert_array_equal(np.stack(generated.tokens), golden["greedy_continuation"])


def test_old_and_new_spelling_of_rope_agree():
    from specjax.checkpoints.huggingface import parse_config

    folder = shared("golden", "target-llama3rope-tiny")
    raw = json.loads((folder / "config.json").read_text())
    old = dict(raw)
    parameters = old.pop("rope_parameters")
    old["rope_theta"] = parameters["rope_theta"]
    old["rope_scaling"] = {k: v for k, v in parameters.items() if k != "rope_theta"}
    assert parse_config(old) == parse_config(raw)


def test_parameters_are_a_plain_pytree(tmp_path):
    pytest.importorskip("transformers")
    save_family("llama", tmp_path)
    target = specjax.load_target(tmp_path, dtype="bfloat16")
    leaves = jax.tree.leaves(target)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert {str(leaf.dtype) for leaf in leaves} == {"bfloat16", "float32"}
    doubled = jax.tree.map(lambda x: 2 * x, target)
    assert jax.tree.structure(doubled) == jax.tree.structure(target)


def test_models_of_one_config_share_compiled_programs(tmp_path):
    folders = [write_folder(tmp_path / str(seed), seed) for seed in range(2)]
    targets = [specjax.load_target(folder) for folder in folders]
    assert targets[0].source != targets[1].source
    assert jax.tree.structure(targets[0]) == jax.tree.structure(targets[1])
    assert hash(jax.tree.structure(targets[0])) == hash(jax.tree.structure(targets[1]))
