"""EAGLE-3 heads: parity with what SafeAILab's and speculators' own code computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import shared
from safetensors.numpy import load_file
from zoo import bigram, tiny_head, tiny_target

import specjax
from specjax.drafters.base import Context, Observation
from specjax.drafters.eagle3 import HeadState
from specjax.models.eagle import default_taps
from specjax.sampling import Processors, Sampling, make_keys
from specjax.trees import Tree

TREE = specjax.TopKTree(
    depth=5, top_k=4, num_nodes=19
)  # SafeAILab: depth 4 more passes, 20 with the root


def golden(*parts):
    folder = shared("golden", *parts)
    target = specjax.load_target(shared("golden", "target-llama-tiny"), dtype="float32")
    return target, specjax.load_head(folder, target), load_file(folder / "golden.safetensors")


def observed(drafter, target, tokens, features, sampled, state=None) -> HeadState:
    state = drafter.init(target, 1, 64) if state is None else state
    taps = jnp.asarray(features).reshape(1, len(tokens), 3, -1)
    observation = Observation(
        tokens=jnp.asarray(tokens, jnp.int32)[None],
        count=jnp.asarray([len(tokens)]),
        taps=taps,
        next_token=jnp.asarray([sampled], jnp.int32),
    )
    return drafter.observe(target, state, observation)


def proposed(drafter, target, state):
    length = state.cache.length + 1
    context = Context(
        tokens=jnp.zeros((1, 64), jnp.int32),
        length=length,
        keys=make_keys(0, 1),
        processors=Processors.create(Sampling(), 1),
        seen=None,
    )
    return drafter.propose(target, state, context)[0]


def test_safeailab_rows_and_chain():
    target, head, right = golden("eagle3-safeailab-tiny")
    assert head.config.taps == (2, 4, 5)
    follows = jnp.asarray(right["true_row_token_ids"])[None]
    taps = jnp.asarray(right["features"]).reshape(1, 20, 3, 64)
    rows, _ = head(
        head.embed(target, follows), head.fuse(taps), jnp.arange(20)[None], head.init_cache(1, 1)
    )
    np.testing.assert_allclose(rows[0], right["true_row_hidden"], atol=1e-4)
    np.testing.assert_allclose(head.logits(rows)[0], right["true_row_logits"], atol=1e-3)
    drafter = specjax.Eagle3(head, num_draft=5)
    state = observed(
        drafter, target, right["prompt_ids"], right["features"], right["sampled_id"][0]
    )
    np.testing.assert_allclose(state.hidden[0], right["true_row_hidden"][-1], atol=1e-4)
    assert proposed(drafter, target, state).tokens[0].tolist() == right["chain_target_ids"].tolist()


def assert_tree(proposal, right, prefix):
    tokens = [right[f"{prefix}tokens"][0], *np.asarray(proposal.tokens[0])]
    assert tokens == right[f"{prefix}tokens"].tolist()
    tree = Tree.create(proposal.parent)
    np.testing.assert_array_equal(tree.depth[0], right[f"{prefix}position_ids"])
    np.testing.assert_array_equal(tree.ancestors[0], right[f"{prefix}mask"] > 0)


@pytest.mark.thorough
def test_safeailab_trees():
    target, head, right = golden("eagle3-safeailab-tiny")
    drafter = specjax.Eagle3(head, tree=TREE)
    state = observed(
        drafter, target, right["prompt_ids"], right["features"], right["sampled_id"][0]
    )
    assert_tree(proposed(drafter, target, state), right, "tree_")
    # three more tokens are committed; what was drafted is gone
    ids = right["round2_token_ids"]
    state = observed(drafter, target, ids[20:23], right["round2_features"], ids[23], state)
    assert_tree(proposed(drafter, target, state), right, "round2_tree_")


@pytest.mark.parametrize("name", ["norm-before", "fc-norm-output"])
def test_speculators_rows_and_chain(name):
    target, head, right = golden("eagle3-speculators-tiny", name)
    assert not head.config.own_embedding  # the file's equals the target's
    follows = jnp.asarray(right["true_row_token_ids"])[None]
    taps = jnp.asarray(right["features"]).reshape(1, 20, 3, 64)
    rows, _ = head(
        head.embed(target, follows), head.fuse(taps), jnp.arange(20)[None], head.init_cache(1, 1)
    )
    which = "post_norm" if head.config.norm_output else "pre_norm"
    np.testing.assert_allclose(rows[0], right[f"true_hidden_{which}"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(head.logits(rows)[0], right["true_logits"], atol=1e-3)
    drafter = specjax.Eagle3(head, num_draft=3)
    state = observed(
        drafter, target, right["prompt_ids"], right["features"], right["sampled_id"][0]
    )
    assert proposed(drafter, target, state).tokens[0].tolist() == right["chain_target_ids"].tolist()


def test_speculators_p_eagle_pass():
    """All slots of one pass, masked ones included, and the drafts that come out of it."""
    target, head, right = golden("peagle-speculators-tiny")
    assert head.config.own_embedding and head.config.mask_token_id == 511
    assert head.config.taps == (2, 4, 5)
    taps = jnp.asarray(right["inf_features"]).reshape(1, 12, 3, 64)
    hidden = jnp.concatenate([head.fuse(taps), jnp.tile(head.fused_mask(), (1, 3, 1))], axis=1)
    follows = jnp.asarray(right["inf_token_ids"])[None]
    rows, _ = head(head.embed(target, follows), hidden, jnp.arange(15)[None], head.init_cache(1, 1))
    np.testing.assert_allclose(rows[0], right["inf_hidden_pre_norm"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(head.logits(rows)[0], right["inf_logits"], atol=1e-3)
    drafter = specjax.PEagle(head, num_draft=4)
    state = observed(
        drafter, target, right["inf_prompt_ids"], right["inf_features"], right["inf_bonus_id"][0]
    )
    found = proposed(drafter, target, state).tokens[0].tolist()
    assert found == right["inf_draft_target_ids"].tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p_eagle_of_one_slot_is_eagle3(temperature):
    target = tiny_target()
    head = tiny_head(target, mask_token_id=5)
    options = {"max_new_tokens": 30, "key": 3, "sampling": Sampling(temperature=temperature)}
    prompts = [[3, 1, 4, 1, 5], [9] * 40]
    a, b = (
        specjax.generate(target, prompts, drafter=drafter, **options)
        for drafter in (specjax.PEagle(head, num_draft=1), specjax.Eagle3(head, num_draft=1))
    )
    for x, y in zip(a.tokens, b.tokens, strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(a.statistics.accepted, b.statistics.accepted)


@pytest.mark.thorough
def test_p_eagle_drafts_in_one_pass(monkeypatch):
    """Passes of the head that a round's program contains, outside of branches that are not taken: one."""
    from specjax.decoding import decode_round, prefill
    from specjax.generate import prepare
    from specjax.models.eagle import EagleHead

    target, calls, run = tiny_target(), [], EagleHead.run

    def counted(self, embedded, *rest):
        calls.append(embedded.shape[1])
        return run(self, embedded, *rest)

    monkeypatch.setattr(EagleHead, "run", counted)
    settings = {"max_new_tokens": 9, "sampling": Sampling(), "key": 0, "stop_token_ids": ()}
    drafter = specjax.PEagle(tiny_head(target, mask_token_id=5), num_draft=4)
    drafter, state, chunk = prepare(target, [[1, 2, 3]], drafter=drafter, **settings)
    state = prefill(target, drafter, state, chunk)
    calls.clear()
    with jax.disable_jit():
        decode_round(target, drafter, state)
    assert calls == [1 + 3]  # one row waits, three slots are masked


@pytest.mark.thorough
def test_p_eagle_beyond_its_training_changes_no_token():
    target = tiny_target()
    head = tiny_head(target, mask_token_id=5, trained_depth=2)
    prompts = [[3, 1, 4, 1, 5], [9] * 12]
    plain = specjax.generate(target, prompts, max_new_tokens=24)
    with pytest.warns(UserWarning, match="num_draft is 6, but the head was trained to draft 2"):
        out = specjax.generate(
            target, prompts, drafter=specjax.PEagle(head, num_draft=6), max_new_tokens=24
        )
    for x, y in zip(out.tokens, plain.tokens, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "switches", [{}, {"qk_norm": True, "width": 24}, {"qkv_bias": True, "norm_output": True}]
)
def test_a_tree_of_one_branch_is_a_chain(switches):
    target = tiny_target()
    head = tiny_head(target, **switches)
    outs = [
        specjax.generate(target, [[3, 1, 4, 1, 5], [9] * 12], drafter=drafter, max_new_tokens=24)
        for drafter in (
            specjax.Eagle3(head, num_draft=3),
            specjax.Eagle3(head, tree=specjax.StaticTree((1, 1, 1))),
        )
    ]
    for x, y in zip(*(out.tokens for out in outs), strict=True):
        np.testing.assert_array_equal(x, y)
    for count in ("rounds", "accepted", "accepted_per_position"):
        chain, tree = (getattr(out.statistics, count) for out in outs)
        np.testing.assert_array_equal(chain, tree)


def test_p_eagle_needs_a_mask_token():
    target = tiny_target()
    drafter = specjax.PEagle(tiny_head(target))
    with pytest.raises(ValueError, match="must be a P-EAGLE head"):
        specjax.generate(target, [[1, 2]], drafter=drafter, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"mask_token_id must be in 0\.\.60, got 61"):
        tiny_head(target, mask_token_id=61)


@pytest.mark.thorough
def test_golden_head_decodes_losslessly():
    target, head, right = golden("eagle3-safeailab-tiny")
    prompt = right["prompt_ids"].tolist()
    plain = specjax.generate(target, [prompt], max_new_tokens=40).tokens[0]
    for drafter in (specjax.Eagle3(head, num_draft=4), specjax.Eagle3(head, tree=TREE)):
        spoken = specjax.generate(target, [prompt], drafter=drafter, max_new_tokens=40)
        np.testing.assert_array_equal(spoken.tokens[0], plain)


def test_head_for_another_target_is_refused():
    head = tiny_head(tiny_target())
    others = {
        "vocabulary of 61 tokens, the target's has 50": tiny_target(vocab_size=50),
        "width 32, the target's have 16": tiny_target(hidden_size=16),
        "taps \\[2\\], the target has 0..1": tiny_target(layers=tiny_target().config.layers[:1]),
        "no method lookup": bigram(0, 61),
    }
    for message, target in others.items():
        with pytest.raises(ValueError, match=message):
            specjax.generate(target, [[1, 2]], drafter=specjax.Eagle3(head), max_new_tokens=2)


def test_arguments():
    with pytest.raises(ValueError, match="exclude"):
        tiny_head(tiny_target(), norm_before_fc=True, fc_norm=True)
    with pytest.raises(ValueError, match="num_draft must be"):
        specjax.Eagle3(tiny_head(tiny_target()), num_draft=0)
    with pytest.raises(ValueError, match="min_confidence ends chains"):
        specjax.Eagle3(tiny_head(tiny_target()), min_confidence=0.5, tree=TREE)
    with pytest.raises(ValueError, match="vocabulary has tokens, 40; got 50"):
        drafter = specjax.Eagle3(tiny_head(tiny_target()), tree=specjax.TopKTree(1, 50, 3))
        specjax.generate(tiny_target(), [[1, 2]], drafter=drafter, max_new_tokens=2)
    assert default_taps(32) == (2, 16, 29)
    with pytest.raises(ValueError, match="coincide"):
        default_taps(5)
