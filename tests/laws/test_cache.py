"""Law 4: after any round the caches hold what a fresh prefill of the committed tokens would hold."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import drafters, grouped, tiny_target

from specjax import DraftModel, Eagle3, Hybrid, NGram, PEagle, Sampling, Suffix, Verification
from specjax.decoding import decode, draft, prefill
from specjax.drafters.ngram_map import NGramMap
from specjax.drafters.ngram_mod import NGramMod
from specjax.generate import prepare

TARGET = tiny_target()
ZOO = drafters(TARGET)
# look-ups have no cache of their own, and are all alike to the target's
LOOKS_UP = NGram | NGramMap | NGramMod | Suffix
HOLDING = [name for name, d in ZOO.items() if name == "ngram" or not isinstance(d, LOOKS_UP)]
propose = jax.jit(draft)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4] * 4, [2, 7]]


@partial(jax.jit, static_argnames="slots")
def fresh(model, tokens, count, slots):
    """A cache filled by one pass over the first `count` tokens of each row."""
    batch, size = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size), (batch, size))
    out = model(tokens, positions, model.init_cache(batch, slots))
    return model.init_cache(batch, slots).commit(out.block, count)


@jax.jit
def fresh_head(head, tokens, count):
    """A head's cache filled by one pass over the target's true hidden states of the first `count` tokens, and its output
    at the last of them (zeros where there is none)."""
    batch, size = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size), (batch, size))
    out = TARGET(tokens, positions, TARGET.init_cache(batch, 1), taps=head.config.taps)
    follows = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    empty = head.init_cache(batch, size)
    rows, block = head(head.embed(TARGET, follows), head.fuse(out.taps), positions, empty)
    last = jnp.take_along_axis(rows, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return empty.commit(block, count), jnp.where((count > 0)[:, None], last, 0)


@partial(jax.jit, static_argnames="num_draft")
def fresh_drafts(head, tokens, count, num_draft):
    """What a P-EAGLE head drafts greedily in one pass without a cache: over the target's true hidden states of the first
    `count` tokens, and masked slots after them."""
    batch, size = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size), (batch, size))
    known = positions < count[:, None]
    out = TARGET(tokens, positions, TARGET.init_cache(batch, 1), taps=head.config.taps)
    follows = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    follows = jnp.where(known, follows, head.config.mask_token_id)
    hidden = jnp.where(known[..., None], head.fuse(out.taps), head.fused_mask())
    rows, _ = head(head.embed(TARGET, follows), hidden, positions, head.init_cache(batch, 1))
    at = jnp.maximum(count - 1, 0)[:, None] + jnp.arange(num_draft)
    return jnp.argmax(head.logits(jnp.take_along_axis(rows, at[..., None], axis=1)), axis=-1)


def p_eagle_states(drafter, state):
    """The head and state of a P-EAGLE drafter, or of one within a mixture, which is left out in some rounds."""
    if isinstance(drafter, PEagle):
        yield drafter.head, state
    if isinstance(drafter, Hybrid):
        for member, held in zip(drafter.drafters, state.members, strict=True):
            yield from p_eagle_states(member, held)


def assert_same(cache, expected):
    np.testing.assert_array_equal(cache.length, expected.length)
    inside = np.arange(cache.slots)[None, :] < np.asarray(expected.length)[:, None]
    for ours, right in zip(
        (*cache.keys, *cache.values), (*expected.keys, *expected.values), strict=True
    ):
        is_key = ours.shape[3] == cache.slots
        mask = inside[:, None, None, :] if is_key else inside[:, None, :, None]
        np.testing.assert_allclose(
            np.where(mask, ours, 0), np.where(mask, right, 0), rtol=1e-4, atol=1e-5
        )


SAMPLED = ("noisy-model", "model-tree", "early-exit", "skip-first", "hybrid-mixed")
SAMPLED += ("eagle3", "eagle3-deep", "eagle3-tree", "p-eagle", "mtp")


@pytest.mark.parametrize("name", grouped(*HOLDING))
def test_cache_equals_fresh_prefill(name):
    """Greedy rows and, where drafts are sampled, rows at temperature 1 between them."""
    warm = 1.0 if name in SAMPLED else 0.0
    drafter, state, chunk = prepare(
        TARGET,
        PROMPTS,
        drafter=ZOO[name],
        max_new_tokens=30,
        sampling=[Sampling(temperature=t) for t in (0.0, warm, 0.0, warm)],
        key=3,
        stop_token_ids=[17],
    )
    state = prefill(TARGET, drafter, state, chunk)
    for _ in range(9):
        assert_same(state.cache, fresh(TARGET, state.tokens, state.length - 1, state.cache.slots))
        if isinstance(drafter, DraftModel):
            held = state.drafter_state.cache
            lag = np.asarray(state.length - 1 - held.length)
            assert ((lag == 0) | (lag == 1)).all(), lag
            assert_same(held, fresh(drafter.model, state.tokens, held.length, held.slots))
        if isinstance(drafter, Eagle3):
            held = state.drafter_state
            cache, hidden = fresh_head(drafter.head, state.tokens, state.length - 1)
            assert_same(held.cache, cache)
            np.testing.assert_allclose(held.hidden, hidden, rtol=1e-4, atol=1e-4)
        for head, held in p_eagle_states(drafter, state.drafter_state):
            assert (held.cache.length + held.count == state.length - 1).all()
            assert_same(held.cache, fresh_head(head, state.tokens, held.cache.length)[0])
        state = decode(TARGET, drafter, state, 1)


@pytest.mark.parametrize(
    "name", ["p-eagle", pytest.param("p-eagle-deep", marks=pytest.mark.thorough)]
)
def test_p_eagle_drafts_are_those_of_a_pass_without_a_cache(name):
    """In ragged rows and after rounds in which some, all or none of the drafts stood."""
    drafter = ZOO[name]
    drafter, state, chunk = prepare(
        TARGET,
        PROMPTS,
        drafter=drafter,
        max_new_tokens=30,
        sampling=Sampling(),
        key=3,
        stop_token_ids=[],
        verification=Verification(synthetic_rates=(0.8, 0.6, 0.4, 0.2)[: drafter.num_draft]),
    )
    state, waited = prefill(TARGET, drafter, state, chunk), set()
    for _ in range(8):
        proposal = propose(TARGET, drafter, state)[1]
        expected = fresh_drafts(drafter.head, state.tokens, state.length - 1, drafter.num_draft)
        rows = (
            state.length > 1
        ) & ~state.done  # a prompt of one token has nothing to draft from yet
        np.testing.assert_array_equal(
            proposal.tokens[rows], drafter.head.target_ids[expected][rows]
        )
        waited |= set(state.drafter_state.count[rows].tolist())
        state = decode(TARGET, drafter, state, 1)
    assert waited == set(range(1, drafter.num_draft + 2))


@jax.jit
def step(model, tokens, positions, cache):
    return model(tokens, positions, cache)


@pytest.mark.thorough
def test_cached_equals_uncached_wherever_it_is_split():
    tokens = jax.random.randint(jax.random.key(0), (2, 20), 0, TARGET.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(20), (2, 20))
    whole = step(TARGET, tokens, positions, TARGET.init_cache(2, 32))
    for cut in (1, 8, 9, 19):  # around the window too
        cache = TARGET.init_cache(2, 32)
        first = step(TARGET, tokens[:, :cut], positions[:, :cut], cache)
        cache = cache.commit(first.block, jnp.full(2, cut))
        second = step(TARGET, tokens[:, cut:], positions[:, cut:], cache)
        joined = jnp.concatenate([first.logits, second.logits], axis=1)
        np.testing.assert_allclose(joined, whole.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["plain", "ngram", "noisy-model"])
def test_compiled_loop_copies_no_cache(name, batch):
    """The whole point of a read-only cache: XLA must update it in place, inside the loop at least."""
    drafter, state, chunk = prepare(
        TARGET,
        PROMPTS[:batch],
        drafter=ZOO.get(name),
        max_new_tokens=600,
        sampling=Sampling(),
        key=0,
        stop_token_ids=(),
    )
    shapes = {
        "f32[" + ",".join(map(str, x.shape)) + "]"
        for x in (state.cache.keys[0], state.cache.values[0])
    }
    for program in (
        decode.lower(TARGET, drafter, state, 10),
        prefill.lower(TARGET, drafter, state, chunk),
    ):
        text = program.compile().as_text()
        assert all(shape in text for shape in shapes)
        copies = [
            line
            for line in text.splitlines()
            if " copy(" in line and any(f"= {shape}" in line for shape in shapes)
        ]
        assert not copies, copies[:3]


def test_no_recompilation_within_a_bucket():
    compiled = []
    for prompt, temperature in (([1, 2, 3], 0.7), ([4] * 20, 0.7), ([5, 6], 1.1)):
        drafter, state, chunk = prepare(
            TARGET,
            [prompt],
            drafter=ZOO["ngram"],
            max_new_tokens=30,
            sampling=Sampling(temperature=temperature),
            key=3,
            stop_token_ids=[7],
        )
        state = prefill(TARGET, drafter, state, chunk)
        decode(TARGET, drafter, state, 10)
        compiled.append((prefill._cache_size(), decode._cache_size()))
    assert len(set(compiled)) == 1, compiled
