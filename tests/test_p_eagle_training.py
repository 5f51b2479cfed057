"""P-EAGLE's elements: parity with speculators' trainer, and with what drafting does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_heads import golden
from test_training import sequence
from zoo import tiny_head, tiny_target

import specjax
from specjax.models.config import LayerConfig
from specjax.models.eagle import EagleHead
from training.config import TrainConfig
from training.eagle3 import Batch, supervised
from training.features import hidden_states, online_features
from training.heads import make_head
from training.losses import Teacher, row_loss
from training.p_eagle import Elements, Layout, aligned_teacher, layout, sample, unroll_parallel
from training.parameters import split
from training.recipes import PEagleRecipe

TARGET = tiny_target()


def given_elements(right):
    """The golden elements in this project's order, and where each of them is in the golden arrays."""
    pairs = list(zip(right["train_anchor"].tolist(), right["train_depth"].tolist(), strict=True))
    deepest = {}
    for anchor, depth in pairs:
        deepest[anchor] = max(deepest.get(anchor, 0), depth)
    order = sorted((a for a in deepest if deepest[a]), key=lambda a: (-deepest[a], a))
    counts = [sum(deepest[a] >= d for a in order) for d in range(1, max(deepest.values()) + 1)]
    shape = Layout(tuple(counts))
    anchors = [order[n] for n in shape.number]
    places = [pairs.index(p) for p in zip(anchors, shape.depth.tolist(), strict=True)]
    mask = right["train_loss_mask"] > 0
    valid = mask[np.asarray(anchors) + shape.depth]
    elements = Elements(
        anchor=jnp.asarray(anchors, jnp.int32)[None], valid=jnp.asarray(valid)[None], layout=shape
    )
    first = [pairs.index((a, 0)) for a in range(19)]
    return elements, np.asarray(first), np.asarray(places)


def test_speculators_elements_losses_and_gradients():
    model, head, right = golden("peagle-speculators-tiny")
    ids, documents = right["train_token_ids"], right["train_document_ids"]
    batch = Batch(
        tokens=jnp.asarray(np.concatenate([[0], ids]), jnp.int32)[None],
        wanted=jnp.zeros((1, 20), bool),
        document=jnp.asarray(np.concatenate([documents + 1, [0]]), jnp.int32)[None],
    )
    taps = np.concatenate([right["train_features"], np.zeros((1, 192), np.float32)])
    taps = jnp.asarray(taps).reshape(1, 20, 3, 64)
    last = np.concatenate([np.zeros((1, 64), np.float32), right["train_verifier_last_hidden"]])
    last = jnp.asarray(last)[None]
    logits = model.logits(last)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    known = jnp.isin(best, head.target_ids)  # the reference leaves no token out
    teacher = Teacher(
        last=last,
        log_total=jax.nn.logsumexp(logits, axis=-1),
        best=jnp.where(known, best, head.target_ids[0]),
    )
    elements, first, places = given_elements(right)
    mask = jnp.asarray(np.concatenate([right["train_loss_mask"] > 0, [False]]))[None]
    valid = jnp.concatenate([mask, elements.valid], axis=1)[None]
    weight = 1.0 / (float(valid.sum()) + 1e-5)
    params, frozen, structure = split(head, lambda name: name != "ids")

    @jax.jit
    def judged(params):
        head = structure.join(params, frozen)
        near, far = unroll_parallel(head, model, batch, taps, elements)
        states = jnp.concatenate([near, far], axis=1)
        loss, _ = row_loss(
            head,
            model,
            states[None],
            aligned_teacher(teacher, elements),
            valid,
            jnp.asarray([weight]),
        )
        return loss, states

    (loss, states), gradients = jax.jit(jax.value_and_grad(judged, has_aux=True))(params)
    real = documents >= 0
    found = np.asarray(head.logits(states)[0])
    np.testing.assert_allclose(found[:19][real], right["train_logits"][first][real], atol=1e-3)
    inside = real[np.asarray(elements.anchor[0])]
    np.testing.assert_allclose(found[20:][inside], right["train_logits"][places][inside], atol=1e-3)
    np.testing.assert_allclose(loss, right["train_loss"][0], rtol=1e-4)
    first_qkv = np.asarray(gradients["first.attention.qkv"])
    other_qkv = np.asarray(gradients["others[0].attention.qkv"])
    ours = {
        "fc": gradients["fc"].T,
        "mask_hidden": gradients["mask_hidden"],
        "embed_tokens": gradients["embedding"],
        "q_proj": first_qkv[:, :, :2].reshape(128, -1).T,
        "k_proj": other_qkv[:, :, 2].reshape(64, -1).T,
    }
    checked = 0
    for name, grad in right.items():
        if name.startswith("train_grad."):
            short = name.removeprefix("train_grad.").removesuffix(".weight").split(".")[-1]
            np.testing.assert_allclose(ours[short], grad, atol=2e-4 * np.abs(grad).max())
            checked += 1
    assert checked == 5


HEADS = {
    "plain": {},
    "deep": {
        "layers": (LayerConfig(), LayerConfig(window=7), LayerConfig()),
        "norm_before_fc": True,
        "norm_before_residual": True,
    },
}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "size"), [("plain", 512), ("deep", 7)])
def test_elements_are_what_drafting_sees(name, size, monkeypatch):
    """Law 7: an element's logits are those of the slot in one pass over its anchor's prefix and the mask tokens."""
    import training.p_eagle

    monkeypatch.setattr(training.p_eagle, "PIECE", size)
    head, batch, depths = tiny_head(TARGET, mask_token_id=5, **HEADS[name]), sequence(0, 14, 14), 4
    taps, _ = hidden_states(TARGET, batch, head.config.taps)
    shape = Layout((3, 3, 3))
    anchors = jnp.asarray([[0, 4, 9] * 3])
    elements = Elements(anchor=anchors, valid=anchors >= 0, layout=shape)
    near, far = unroll_parallel(head, TARGET, batch, taps, elements)
    fused, follows = head.fuse(taps), batch.tokens[:, 1:]
    for n, anchor in enumerate((0, 4, 9)):
        rows = anchor + 1
        tokens = jnp.concatenate([follows[:, :rows], jnp.full((1, depths - 1), 5)], axis=1)
        hidden = jnp.tile(head.fused_mask(), (1, depths - 1, 1))
        hidden = jnp.concatenate([fused[:, :rows], hidden], axis=1)
        size = rows + depths - 1
        x, _ = head(
            head.embed(TARGET, tokens), hidden, jnp.arange(size)[None], head.init_cache(1, 1)
        )
        slots = np.asarray(head.logits(x)[0, anchor:])
        ours = jnp.concatenate([near[:, anchor], far[0, n::3]])
        np.testing.assert_allclose(head.logits(ours), slots, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_packed_documents_do_not_see_one_another():
    """Elements of two documents in one row are those of each document in a row of its own."""
    head = tiny_head(TARGET, mask_token_id=5, **HEADS["deep"])
    alone, others, size = sequence(0, 14, 14), sequence(1, 14, 14), 14
    packed = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), alone, others)
    packed = replace(packed, document=packed.document.at[:, size:].set(2))
    shape = Layout((3, 3))
    anchors = jnp.asarray([[0, 4, 9] * 2])

    def run(batch, anchors):
        taps, _ = hidden_states(TARGET, batch, head.config.taps)
        elements = Elements(anchor=anchors, valid=anchors >= 0, layout=shape)
        return unroll_parallel(head, TARGET, batch, taps, elements)

    near, far = run(others, anchors)
    packed_near, packed_far = run(packed, anchors + size)
    # the row that ends a document is followed by another's token: it counts for nothing
    tight = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(packed_near[:, size:-1], near[:, :-1], **tight)
    np.testing.assert_allclose(packed_far, far, **tight)
    assert not supervised(packed, 3)[0, 0, size - 2 : size].any()


def test_layout_and_chains():
    shape = layout(100, 4, 0.5, 0.2)
    assert shape.counts == (50, 25, 20)  # 0.5, 0.25, and the floor above 0.125
    depth, number, chain = shape.depth, shape.number, shape.chain
    for e in range(95):
        for d in range(1, 4):
            at = chain[e, d - 1]
            if d <= depth[e]:
                assert (depth[at], number[at]) == (d, number[e])
            else:
                assert at == -1
        assert chain[e, depth[e] - 1] == e
    with pytest.raises(ValueError, match="ratio must be in"):
        layout(10, 3, 1.5, 0.2)


def test_anchors_are_drawn_among_those_that_count():
    batch = jax.tree.map(lambda *x: jnp.concatenate(x), sequence(1, 40, 40), sequence(2, 25, 40))
    valid = supervised(batch, 4)
    shape = layout(40, 4, 0.4, 0.1)
    draws = [sample(jax.random.key(i), valid, shape) for i in range(3)]
    for elements in draws:
        anchor = np.asarray(elements.anchor)
        for row in range(2):
            kept = anchor[row, : shape.counts[0]]
            assert len(set(kept)) == len(kept)
            reach = np.asarray(valid[1, row])
            assert reach[kept].sum() == min(reach.sum(), shape.counts[0])
            for e, (a, d) in enumerate(zip(anchor[row], shape.depth, strict=True)):
                assert elements.valid[row, e] == valid[d, row, a]
    assert not np.array_equal(draws[0].anchor, draws[1].anchor)


@pytest.mark.thorough
def test_loss_of_a_recipe_is_a_mean_over_the_update():
    """Two parts together weigh their elements alike, whatever part they are in."""
    head = tiny_head(TARGET, mask_token_id=5)
    parts = [sequence(3, 40, 40), sequence(4, 12, 40)]
    recipe = PEagleRecipe(layout(40, 3, 0.9, 0.2), "kl")
    keys = jax.random.split(jax.random.key(0), 2)
    weights = recipe.weights(jax.tree.map(lambda *x: jnp.stack(x), *parts), keys)
    total = tally = None
    for part, key in zip(parts, keys, strict=True):
        features = online_features(TARGET, part, head.config.taps)
        loss, found = recipe.loss(
            head, TARGET, part, features.taps, features.teacher, weights, key, lambda _: True
        )
        total = loss if total is None else total + loss
        tally = found if tally is None else jax.tree.map(jnp.add, tally, found)
    assert tally is not None and total is not None
    np.testing.assert_allclose(weights[0] * tally.counted.sum(), 1.0, rtol=1e-6)
    assert tally.counted.shape == (3,) and (np.diff(tally.counted) < 0).all()
    assert (tally.chained <= tally.right).all() and (tally.reached[1:] <= tally.counted[1:]).all()
    assert float(total) > 0


@pytest.mark.thorough
def test_partitions_change_nothing():
    """Loss, gradients and sums of one draw of elements, whole and in parts, with a Markov correction."""
    head = tiny_head(TARGET, mask_token_id=5, markov_rank=3)
    head.readout.markov.after[...] = jax.random.normal(jax.random.key(8), (3, 40))
    batch, key = sequence(3, 30, 36), jax.random.key(2)
    features = online_features(TARGET, batch, head.config.taps)
    params, frozen, structure = split(head, lambda name: name != "ids")
    shape = layout(36, 4, 0.8, 0.2, partitions=3)
    assert all(n % 3 == 0 for n in shape.counts)

    def run(partitions):
        recipe = PEagleRecipe(shape, "kl", partitions)
        weights = recipe.weights(jax.tree.map(lambda x: x[None], batch), key[None])

        @jax.jit
        def loss(params):
            head = structure.join(params, frozen)
            return recipe.loss(
                head, TARGET, batch, features.taps, features.teacher, weights, key, lambda _: True
            )

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    (whole, tally), gradients = run(1)
    (parts, again), others = run(3)
    np.testing.assert_allclose(whole, parts, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(tally), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    for name, a in gradients.items():
        np.testing.assert_allclose(a, others[name], rtol=1e-3, atol=1e-6, err_msg=name)
        assert np.abs(a).max() > 0, name


@pytest.mark.thorough
def test_markov_loss_by_hand():
    """A masked element's distribution has the bias of the token drafted before it, if the draft vocabulary has it."""
    head = tiny_head(TARGET, mask_token_id=5, markov_rank=3)
    head.readout.markov.after[...] = jax.random.normal(jax.random.key(8), (3, 40))
    batch, key = sequence(3, 20, 20), jax.random.key(2)
    features = online_features(TARGET, batch, head.config.taps)
    shape = layout(20, 3, 0.9, 0.2)
    loss, _ = PEagleRecipe(shape, "ce").loss(
        head, TARGET, batch, features.taps, features.teacher, jnp.ones(1), key, lambda _: True
    )
    valid = supervised(batch, 3)
    elements = sample(key, valid, shape)
    near, far = unroll_parallel(head, TARGET, batch, features.taps, elements)
    teacher = np.asarray(TARGET.logits(features.teacher.last)[0], np.float64)
    ids = np.asarray(head.target_ids)
    markov = head.readout.markov
    before, after = (np.asarray(x[...], np.float64) for x in (markov.before, markov.after))
    tokens, total = np.asarray(batch.tokens[0]), 0.0

    def cross_entropy(at, logits):
        p = np.exp(teacher[at][ids] - teacher[at][ids].max())
        q = logits - logits.max()
        return -(p / p.sum()) @ (q - np.log(np.exp(q).sum()))

    def counts(at):
        return np.argmax(teacher[at]) in ids

    logits = np.asarray(head.logits(near)[0], np.float64)
    for t in range(19):
        if valid[0, 0, t] and counts(t + 1):
            total += cross_entropy(t + 1, logits[t])
    logits = np.asarray(head.logits(far)[0], np.float64)
    biased = 0
    for e, (a, d) in enumerate(zip(np.asarray(elements.anchor[0]), shape.depth, strict=True)):
        if elements.valid[0, e] and counts(a + d + 1):
            place = np.flatnonzero(ids == tokens[a + d + 1])
            bias = before[place[0]] @ after if len(place) else 0.0
            biased += len(place)
            total += cross_entropy(a + d + 1, logits[e] + bias)
    assert biased > 5
    np.testing.assert_allclose(loss, total, rtol=1e-4)


def test_a_run_starts_from_a_head_that_lacks_parts(tmp_path):
    """An EAGLE-3 head's first slot drafts what the head drafted, the other slots are new; a P-EAGLE head without a
    correction gains one that changes nothing yet."""
    specjax.save_head(tiny_head(TARGET), tmp_path)
    given: Any = {
        "target": "tiny",
        "data": Path("data"),
        "output": Path("run"),
        "recipe": "p_eagle",
        "draft_vocab_size": 40,
        "mask_token_id": 5,
        "markov_rank": 2,
        "steps": 6,
        "start_from": tmp_path,
    }
    summary: Any = None  # the ids of the draft vocabulary are the head's
    head = make_head(TrainConfig(**given), TARGET, summary, ())
    assert isinstance(head, EagleHead) and head.readout.markov is not None
    assert (head.config.mask_token_id, head.config.trained_depth) == (5, 6)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    before = specjax.load_head(tmp_path, TARGET)
    drafters = specjax.Eagle3(before, num_draft=1), specjax.PEagle(head, num_draft=1)
    old, new = (
        specjax.generate(TARGET, prompts, drafter=drafter, max_new_tokens=20).statistics
        for drafter in drafters
    )
    np.testing.assert_array_equal(new.accepted, old.accepted)
    specjax.save_head(head, tmp_path / "p_eagle")
    again = make_head(
        TrainConfig(**given | {"start_from": tmp_path / "p_eagle"}), TARGET, summary, ()
    )
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(head), strict=True):
        np.testing.assert_array_equal(a, b)
    plain: Any = specjax.load_head(tmp_path / "p_eagle", TARGET)
    plain.config, plain.readout.markov = replace(plain.config, markov_rank=0), None
    specjax.save_head(plain, tmp_path / "plain")
    gained = make_head(
        TrainConfig(**given | {"start_from": tmp_path / "plain"}), TARGET, summary, ()
    )
    assert gained.config.markov_rank == 2
    np.testing.assert_array_equal(gained.readout.markov.after[...], 0)
    np.testing.assert_array_equal(gained.mask_hidden[...], plain.mask_hidden[...])
    own = make_head(TrainConfig(**given | {"train_embedding": True}), TARGET, summary, ())
    table = TARGET.lookup(np.arange(TARGET.vocab_size)[None])[0]
    np.testing.assert_array_equal(own.embedding[...], table)
    own.embedding[...] = own.embedding[...] + 1.0
    specjax.save_head(own, tmp_path / "own", target=TARGET)
    for given_too, message in (
        ({"taps": (1,), "mlp_size": 99}, r"has taps \(0, 1, 2\), got \(1,\); mlp_size 48, got 99"),
        ({"start_from": tmp_path / "own"}, "has train_embedding True, got False"),
    ):
        with pytest.raises(ValueError, match=message):
            make_head(TrainConfig(**given | given_too), TARGET, summary, ())
    with pytest.raises(ValueError, match="has mask_token_id 5, got 6; markov_rank 2, got 0"):
        other = {"start_from": tmp_path / "p_eagle", "mask_token_id": 6, "markov_rank": 0}
        make_head(TrainConfig(**given | other), TARGET, summary, ())
