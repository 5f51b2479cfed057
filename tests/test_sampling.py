"""process_logits against transformers' warpers, live and recorded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import shared
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from specjax.sampling import Processors, Sampling, draw, make_keys, process_logits, seen_at_nodes


def probabilities(logits, sampling, seen=None):
    """float64[rows, V] of float logits [rows, V]; one setting for all rows or one each."""
    processors = Processors.create(sampling, len(logits))
    seen = None if seen is None else jnp.asarray(seen)[:, None]
    log_p = process_logits(jnp.asarray(logits, jnp.float32)[:, None], processors, seen)
    return np.exp(np.asarray(log_p[:, 0], np.float64))


def test_recorded_warpers():
    golden = load_file(shared("golden", "sampling", "golden.safetensors"))
    logits = golden["logits"]
    for (temperature, top_k, top_p, min_p), expected in zip(
        golden["params"], golden["probs"], strict=True
    ):
        sampling = Sampling(
            temperature=float(temperature), top_k=int(top_k), top_p=float(top_p), min_p=float(min_p)
        )
        ours = probabilities(logits, sampling)
        np.testing.assert_array_equal(ours > 0, expected > 0)
        np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_recorded_ties():
    golden = load_file(shared("golden", "sampling", "golden.safetensors"))
    logits = golden["tie_logits"]
    cases = {
        "tie_top_k2": {"top_k": 2},
        "tie_top_k4": {"top_k": 4},
        "tie_min_p0p3": {"min_p": 0.3},
        "tie_min_p1p0": {"min_p": 1.0},
    }
    for name, setting in cases.items():
        ours = probabilities(logits, Sampling(temperature=1.0, **setting))
        np.testing.assert_allclose(ours, golden[name], atol=2e-6)
    for name, top_p in (("tie_top_p0p5", 0.5), ("tie_top_p0p75", 0.75)):
        ours, expected = probabilities(logits, Sampling(temperature=1.0, top_p=top_p)), golden[name]
        np.testing.assert_array_equal((ours > 0).sum(1), (expected > 0).sum(1))
        np.testing.assert_allclose(np.sort(ours), np.sort(expected), atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 3, 40]),
    st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.sampled_from([1.0, 1.3, 0.8]),
)
def test_live_warpers(seed, temperature, top_k, top_p, min_p, penalty):
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (4, 40)).astype(np.float32)
    history = rng.integers(0, 40, (4, 10))
    warpers = [process.RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
    warpers += [process.TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    warpers += [process.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [process.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [process.MinPLogitsWarper(min_p)] if min_p else []
    scores = torch.tensor(logits)
    for warper in warpers:
        scores = warper(torch.tensor(history), scores)
    expected = torch.softmax(scores.double(), -1).numpy()
    seen = np.zeros((4, 40), bool)
    np.put_along_axis(seen, history, True, axis=1)
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
    )
    ours = probabilities(logits, sampling, seen)
    np.testing.assert_array_equal(ours > 0, expected > 0)
    np.testing.assert_allclose(ours, expected, atol=3e-6)


@pytest.mark.thorough
def test_mixed_rows_equal_rows_on_their_own():
    logits = np.random.default_rng(0).normal(0, 2, (5, 30))
    rows = [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=2.0, top_p=0.6),
        Sampling(temperature=1.0, min_p=0.2),
    ]
    mixed = probabilities(logits, rows)
    for i, row in enumerate(rows):
        np.testing.assert_allclose(mixed[i], probabilities(logits[i : i + 1], row)[0], atol=1e-6)
    assert mixed[0].max() == 1 and mixed[0].argmax() == logits[0].argmax()


def test_infinite_logits_and_a_large_vocabulary():
    logits = np.random.default_rng(1).normal(0, 3, (2, 50_000))
    logits[0, ::2] = -np.inf
    for sampling in (
        Sampling(temperature=1.0, top_k=50),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=0.8, min_p=0.01),
    ):
        ours = probabilities(logits, sampling)
        np.testing.assert_allclose(ours.sum(1), 1, atol=1e-4)
        assert (ours[0, ::2] == 0).all()
    kept = (probabilities(logits, Sampling(temperature=1.0, top_k=50)) > 0).sum(1)
    np.testing.assert_array_equal(kept, [50, 50])


def test_draw_follows_the_distribution_and_never_takes_a_dropped_token():
    p = np.asarray([0.5, 0.0, 0.3, 0.2])
    keys = make_keys(0, 40_000)
    tokens = np.asarray(draw(keys, jnp.log(jnp.broadcast_to(jnp.asarray(p), (40_000, 4)))))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 40_000, p, atol=0.01)
    assert not (tokens == 1).any()


def test_seen_at_nodes_follows_ancestors():
    seen = jnp.zeros((1, 6), bool).at[0, 0].set(True)
    ancestors = jnp.asarray([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    got = seen_at_nodes(seen, jnp.asarray([[1, 2, 3]]), ancestors)[0]
    expected = [[0, 1], [0, 1, 2], [0, 1, 3]]
    assert [np.flatnonzero(row).tolist() for row in np.asarray(got)] == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
    ],
)
def test_wrong_settings_are_named(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be .*got"):
        Sampling(**wrong)


def test_keys():
    one = jax.random.key(3)
    rows = make_keys(one, 4)
    assert rows.shape == (4,)
    np.testing.assert_array_equal(jax.random.key_data(rows), jax.random.key_data(make_keys(3, 4)))
    assert make_keys(rows, 4) is rows
    with pytest.raises(ValueError, match="shape"):
        make_keys(rows, 5)
    with pytest.raises(ValueError, match="key must be"):
        make_keys("seed", 2)
