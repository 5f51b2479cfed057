"""Law 1: with any drafter, greedy output is plain greedy output, token for token. Law 3: a perfect drafter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import (
    ReplayDrafter,
    bigram,
    drafters,
    grouped,
    noisy,
    tiny_deepseek,
    tiny_gpt_oss,
    tiny_head,
    tiny_mtp,
    tiny_target,
)

import specjax
from specjax import MTP, DraftModel, Eagle3, EarlyExit, NGram, PEagle, StaticTree, TopKTree
from specjax.decoding import draft, prefill
from specjax.generate import prepare

TARGET = tiny_target()
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4] * 4, [2, 7]]
ZOO = drafters(TARGET)
PLAIN = specjax.generate(TARGET, PROMPTS, max_new_tokens=40)


def same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", grouped(*ZOO))
def test_greedy_identity(name):
    spoken = specjax.generate(TARGET, PROMPTS, drafter=ZOO[name], max_new_tokens=40)
    same(spoken.tokens, PLAIN.tokens)
    counts = spoken.statistics
    assert (counts.emitted == 40).all()
    assert (counts.accepted <= counts.drafted).all()
    assert (counts.accepted_per_position.sum(axis=1) == counts.accepted).all()
    if "tree" in name or "top-k" in name or "mixed" in name:  # several nodes at a position
        assert (counts.drafted_per_position.sum(axis=1) <= counts.drafted).all()
    else:
        assert (counts.drafted_per_position.sum(axis=1) == counts.drafted).all()


GPT_OSS, DEEPSEEK = tiny_gpt_oss(), tiny_deepseek()
MIXTURES = {
    # sinks, experts with biases, clamps and windows
    ("gpt-oss", "chain"): (GPT_OSS, NGram(num_draft=3, min_match=1)),
    ("gpt-oss", "head-tree"): (GPT_OSS, Eagle3(tiny_head(GPT_OSS), tree=StaticTree((2, 2)))),
    ("gpt-oss", "p-eagle"): (GPT_OSS, PEagle(tiny_head(GPT_OSS, mask_token_id=2), num_draft=3)),
    ("gpt-oss", "model-tree"): (
        GPT_OSS,
        DraftModel(noisy(GPT_OSS, 0.05), tree=TopKTree(depth=3, top_k=2, num_nodes=5)),
    ),
    # latent attention, whose values are narrower than its keys, and experts in groups
    ("deepseek", "chain"): (DEEPSEEK, NGram(num_draft=3, min_match=1)),
    ("deepseek", "mtp-tree"): (DEEPSEEK, MTP(tiny_mtp(DEEPSEEK), tree=StaticTree((2, 2)))),
    ("deepseek", "exit"): (DEEPSEEK, EarlyExit(1, num_draft=2)),
}


@pytest.mark.parametrize(("family", "name"), grouped(*MIXTURES))
def test_greedy_identity_of_mixtures(family, name):
    target, drafter = MIXTURES[family, name]
    plain = specjax.generate(target, PROMPTS, max_new_tokens=24)
    spoken = specjax.generate(target, PROMPTS, drafter=drafter, max_new_tokens=24)
    same(spoken.tokens, plain.tokens)
    assert spoken.statistics.accepted.sum() > 0


def uncached_greedy(prompt, count):
    """Greedy decoding without a cache, one full pass per token."""
    tokens = list(prompt)
    for _ in range(count):
        padded = jnp.asarray([tokens + [0] * (128 - len(tokens))])
        cache = TARGET.init_cache(1, 1)
        out = TARGET(padded, jnp.arange(128)[None], cache)
        tokens.append(int(jnp.argmax(out.logits[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@pytest.mark.thorough
def test_plain_decoding_is_uncached_argmax():
    for prompt, tokens in zip(PROMPTS, PLAIN.tokens, strict=True):
        assert tokens.tolist() == uncached_greedy(prompt, 40)


LIES = [(1, 0), (1, 2), (2, 5), (4, 0), (4, 5), (7, 2), (7, 5)]


@pytest.mark.parametrize(
    ("num_draft", "lie"),
    [pytest.param(*c, marks=() if c == (4, 5) else pytest.mark.thorough) for c in LIES],
)
def test_replayed_drafts_stand_until_the_first_lie(num_draft, lie):
    width = max(map(len, PROMPTS)) + 40
    answer = np.zeros((len(PROMPTS), width), np.int32)
    for row, prompt, tokens in zip(answer, PROMPTS, PLAIN.tokens, strict=True):
        row[: len(prompt) + 40] = [*prompt, *tokens]
    drafter = ReplayDrafter(answer=jnp.asarray(answer), num_draft=num_draft, lie=lie)
    spoken = specjax.generate(TARGET, PROMPTS, drafter=drafter, max_new_tokens=40)
    same(spoken.tokens, PLAIN.tokens)
    if not lie:
        assert (spoken.statistics.rounds == -(-40 // (num_draft + 1))).all()


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_equal_to_the_target_gives_k_plus_one(temperature):
    for num_draft in (1, 4):
        spoken = specjax.generate(
            TARGET,
            PROMPTS,
            drafter=DraftModel(TARGET, num_draft=num_draft),
            max_new_tokens=10 * (num_draft + 1),
            sampling=specjax.Sampling(temperature=temperature),
        )
        assert (spoken.statistics.rounds == 10).all()
        assert spoken.statistics.mean_acceptance_length == num_draft + 1


@pytest.mark.thorough
@pytest.mark.parametrize("budget", range(8))
def test_budget_is_met_exactly(budget):
    for drafter in (None, NGram(num_draft=3, min_match=1), DraftModel(TARGET, num_draft=3)):
        spoken = specjax.generate(TARGET, PROMPTS, drafter=drafter, max_new_tokens=budget)
        same(spoken.tokens, [tokens[:budget] for tokens in PLAIN.tokens])


SOME = (
    "ngram",
    "noisy-model",
    "model-tree",
    "early-exit",
    "hybrid-mixed",
    "adaptive-model",
    "random-tree",
)


@pytest.mark.parametrize("name", grouped("plain", *SOME))
def test_stop_token_anywhere_in_a_block_ends_the_row(name):
    """The stop token as first token, as draft, as correction and as bonus."""
    expected = [tokens.tolist() for tokens in PLAIN.tokens]
    unused = next(
        i for i in range(TARGET.vocab_size) if all(i not in tokens for tokens in expected)
    )
    for at in range(6):
        stop = expected[0][at]
        cut = [t[: t.index(stop) + 1] if stop in t else t for t in expected]
        spoken = specjax.generate(
            TARGET,
            PROMPTS,
            drafter=ZOO.get(name),
            max_new_tokens=40,
            stop_token_ids=[stop, unused],
        )
        same(spoken.tokens, [np.asarray(t) for t in cut])


def test_strangers_module_decodes():
    """Any pytree that answers the protocol is a target, and a draft."""
    target = bigram(0, 17)
    assert isinstance(target, specjax.Target)
    plain = specjax.generate(target, [[1], [2, 3]], max_new_tokens=30)
    table = np.asarray(target.table)
    token = 1
    for got in plain.tokens[0]:
        token = int(table[token].argmax())
        assert got == token
    for drafter in (NGram(num_draft=4), DraftModel(bigram(1, 17), num_draft=3)):
        spoken = specjax.generate(target, [[1], [2, 3]], drafter=drafter, max_new_tokens=30)
        same(spoken.tokens, plain.tokens)


def test_streaming_gives_the_same_tokens():
    for rounds in (1, 3):
        pieces = list(
            specjax.stream(TARGET, PROMPTS, drafter=ZOO["ngram"], max_new_tokens=40, rounds=rounds)
        )
        joined = [np.concatenate(row) for row in zip(*(p.tokens for p in pieces), strict=True)]
        same(joined, PLAIN.tokens)
        assert pieces[-1].done.all() and not pieces[0].done.all()


PENALTY = specjax.Sampling(repetition_penalty=1.7)


@pytest.mark.thorough
@pytest.mark.parametrize("name", grouped("perfect-model", *SOME))
def test_repetition_penalty_sees_the_drafts_before_it(name):
    options = {"max_new_tokens": 40, "sampling": PENALTY}
    plain = specjax.generate(TARGET, PROMPTS, **options)
    assert any((a != b).any() for a, b in zip(plain.tokens, PLAIN.tokens, strict=True))
    spoken = specjax.generate(TARGET, PROMPTS, drafter=ZOO[name], **options)
    same(spoken.tokens, plain.tokens)
    if name == "perfect-model":
        assert spoken.statistics.mean_acceptance_length == 5


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["noisy-model", "early-exit", "eagle3", "eagle3-deep", "mtp", "p-eagle"]
)
def test_drafts_are_penalised_for_the_drafts_before_them(name):
    """Under a penalty that no logit outweighs, a row drafts nothing twice and nothing that is there; without it, some do."""

    def repeats(penalty):
        drafter, state, chunk = prepare(
            TARGET,
            PROMPTS,
            drafter=ZOO[name],
            max_new_tokens=20,
            sampling=specjax.Sampling(repetition_penalty=penalty),
            key=0,
            stop_token_ids=(),
        )
        state = prefill(TARGET, drafter, state, chunk)
        state, proposal, _ = jax.jit(draft)(TARGET, drafter, state)
        found = 0
        for row, length in enumerate(np.asarray(state.length)):
            there = np.asarray(state.tokens[row])[:length].tolist()
            drafted = np.asarray(proposal.tokens[row])[: int(proposal.length[row])].tolist()
            found += len(there) + len(drafted) - len({*there, *drafted}) - (length - len({*there}))
        return found

    assert repeats(1e6) == 0
    assert repeats(1.0) > 0
