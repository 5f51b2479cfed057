"""Law 2: the law of the output is the target's, exactly for one block, statistically over several rounds."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import RandomDrafter, bigram, noisy, tiny_target

import specjax
from specjax import DraftModel, NGram, Sampling
from specjax.sampling import Processors, process_logits
from specjax.verification import chain_law

V = 3


def enumerate_block(p, q, length, deterministic):
    """Exact law of one block's output through the production rule: {emitted tokens: probability}.

    The rule looks at u only through `u < ratio`; so each slot needs two values of u, one on either side, weighted by how
    likely they are.

    Args:
      p: float64 function of the drafted prefix -> [V]; q likewise; both as used for slot len(prefix).
      length: drafts proposed.
      deterministic: the draft is q's argmax and the rule is told so.
    """
    law: dict[tuple[int, ...], float] = {}
    for drafts in itertools.product(range(V), repeat=length):
        weight = 1.0
        for i, d in enumerate(drafts):
            here = q(drafts[:i])
            weight *= float(here.argmax() == d) if deterministic else here[d]
        if weight == 0:
            continue
        log_p = np.log([p(drafts[:i]) for i in range(length + 1)])
        log_q = None
        ratios = [p(drafts[:i])[d] for i, d in enumerate(drafts)]
        if not deterministic:
            log_q = np.log([q(drafts[:i]) for i in range(length)])
            ratios = [r / q(drafts[:i])[d] for i, (r, d) in enumerate(zip(ratios, drafts))]  # noqa: B905
        ratios = np.minimum(ratios, 1.0)
        for accepts in itertools.product([True, False], repeat=length):
            chance = weight * np.prod(
                [r if a else 1 - r for r, a in zip(ratios, accepts, strict=True)]
            )
            if chance == 0:
                continue
            u = [0.5 * r if a else 0.5 * (1 + r) for r, a in zip(ratios, accepts, strict=True)]
            count, log_next = chain_law(
                jnp.asarray([u], jnp.float32).reshape(1, length),
                jnp.asarray([log_p], jnp.float32),
                jnp.asarray([drafts], jnp.int32).reshape(1, length),
                jnp.asarray([length]),
                None if log_q is None else jnp.asarray([log_q], jnp.float32),
            )
            count = int(count[0])
            following = np.asarray(jax.nn.softmax(log_next[0]), np.float64)
            for token in range(V):
                key = (*drafts[:count], token)
                law[key] = law.get(key, 0.0) + chance * following[token]
    return law


def conditional(seed):
    """A random conditional distribution of the prefix."""
    table = {}

    def law(prefix):
        if prefix not in table:
            rng = np.random.default_rng([seed, len(prefix), *prefix])
            table[prefix] = rng.dirichlet(np.ones(V))
        return table[prefix]

    return law


def continue_with_target(law, p, size):
    """Extends blocks shorter than `size` by the target's own law: what later rounds would emit."""
    full: dict[tuple[int, ...], float] = {}
    for prefix, chance in law.items():
        for rest in itertools.product(range(V), repeat=size - len(prefix)):
            probability, path = chance, prefix
            for token in rest:
                probability *= p(path)[token]
                path = (*path, token)
            full[path] = full.get(path, 0.0) + probability
    return full


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_one_block_follows_the_target_exactly(seed, length, deterministic):
    p, q = conditional(seed), conditional(100 + seed)
    law = enumerate_block(p, q, length, deterministic)
    assert abs(sum(law.values()) - 1) < 1e-5
    size = length + 1
    full = continue_with_target(law, p, size)
    for path in itertools.product(range(V), repeat=size):
        expected = np.prod([p(path[:i])[t] for i, t in enumerate(path)])
        assert abs(full.get(path, 0.0) - expected) < 1e-5


def test_soft_q_with_deterministic_drafts_would_be_caught():
    """The enumeration can fail: argmax drafts judged by q's probabilities are the classic bias."""
    p, q = conditional(0), conditional(100)
    one_hot = lambda prefix: np.eye(V)[q(prefix).argmax()]  # noqa: E731
    honest = enumerate_block(p, q, 1, deterministic=True)
    law: dict[int, float] = {}
    d = int(q(()).argmax())
    ratio = min(1.0, p(())[d] / q(())[d])
    residual = np.maximum(p(()) - q(()), 0)
    law[d] = ratio + (1 - ratio) * residual[d] / residual.sum()
    first = sum(chance for path, chance in honest.items() if path[0] == d)
    assert abs(first - p(())[d]) < 1e-5 < abs(law[d] - p(())[d])
    assert one_hot(()).sum() == 1


def test_edges_of_the_rule():
    log = jnp.log
    half = jnp.asarray([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]])
    token = jnp.asarray([[2]])
    # a token of probability 0 never stands, however small u is, and is never the correction
    count, following = chain_law(
        jnp.full((1, 1), 1e-38), log(half), token, jnp.asarray([1]), log(half[:, :1])
    )
    assert count[0] == 0 and following[0, 2] == -jnp.inf and jnp.isfinite(following[0, 0])
    # p == q: stands for every u below 1; if rounding rejects it, the next token still comes from p
    same = jnp.asarray([[[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]])
    count, following = chain_law(
        jnp.full((1, 1), 1.0), log(same), jnp.asarray([[0]]), jnp.asarray([1]), log(same[:, :1])
    )
    assert count[0] == 0
    np.testing.assert_allclose(jax.nn.softmax(following[0]), same[0, 0], rtol=1e-6)


def markov_law(target, first, size, sampling):
    """Exact law of `size` tokens after `first` for a bigram target."""
    processors = Processors.create(sampling, 1)
    log_p = process_logits(target.table[None], processors)[0]
    p = np.exp(np.asarray(log_p, np.float64))
    law = {}
    for path in itertools.product(range(p.shape[1]), repeat=size):
        law[path] = np.prod([p[a, b] for a, b in itertools.pairwise((first, *path))])
    return law


def transformer_law(target, prompt, size, sampling):
    """Exact law of `size` tokens after a prompt for a transformer over few tokens."""
    paths = list(itertools.product(range(target.vocab_size), repeat=size))
    tokens = jnp.asarray([[*prompt, *path] for path in paths])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = target(tokens, positions, target.init_cache(len(paths), 1)).logits
    log_p = process_logits(logits, Processors.create(sampling, len(paths)))
    start = len(prompt) - 1
    picked = jnp.take_along_axis(
        log_p[:, start : start + size], tokens[:, start + 1 :, None], axis=2
    )
    chances = np.exp(np.asarray(picked[..., 0].sum(axis=1), np.float64))
    return dict(zip(paths, chances, strict=True))


def chi_square(tokens, law):
    """Chi-square statistic of the rows' sequences against a law, in standard deviations from its mean."""
    rows = len(tokens)
    counts: dict[tuple[int, ...], int] = {}
    for row in tokens:
        key = tuple(int(t) for t in row)
        counts[key] = counts.get(key, 0) + 1
    assert sum(law.values()) == pytest.approx(1, abs=1e-4)
    impossible = sum(n for path, n in counts.items() if law[path] == 0)
    assert impossible == 0
    terms = [
        (counts.get(path, 0) - rows * chance) ** 2 / (rows * chance)
        for path, chance in law.items()
        if rows * chance >= 5
    ]
    assert len(terms) > 5
    dof = len(terms) - 1
    return (sum(terms) - dof) / np.sqrt(2 * dof)


SETTINGS = [
    Sampling(temperature=0.7),
    Sampling(temperature=2.0, top_k=3, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "drafter",
    [
        None,
        NGram(num_draft=2, min_match=1),
        RandomDrafter(num_draft=3),
        DraftModel(bigram(9, 4), num_draft=1),
        DraftModel(bigram(9, 4), num_draft=3),
    ],
    ids=["plain", "ngram", "random", "model-1", "model-3"],
)
def test_rounds_follow_the_target(drafter, sampling):
    """Four tokens take two rounds or more; rows differ in their keys alone."""
    target, rows, size = bigram(3, 4), 20_000, 4
    spoken = specjax.generate(
        target,
        [[2, 1, 2]] * rows,
        drafter=drafter,
        max_new_tokens=size,
        sampling=sampling,
        key=11,
    )
    assert abs(chi_square(spoken.tokens, markov_law(target, 2, size, sampling))) < 4


def test_rounds_follow_a_transformer():
    target, rows, size = tiny_target(2, vocab_size=4, scale=1.5), 2000, 3
    sampling = Sampling(temperature=1.0)
    law = transformer_law(target, [1, 3, 0], size, sampling)
    for drafter in (None, DraftModel(noisy(target, 0.3), num_draft=2)):
        spoken = specjax.generate(
            target,
            [[1, 3, 0]] * rows,
            drafter=drafter,
            max_new_tokens=size,
            sampling=sampling,
            key=5,
        )
        assert abs(chi_square(spoken.tokens, law)) < 4


def test_the_chi_square_can_fail():
    target = bigram(3, 4)
    spoken = specjax.generate(
        target, [[2]] * 20_000, max_new_tokens=4, sampling=Sampling(temperature=1.0), key=11
    )
    wrong = markov_law(target, 2, 4, Sampling(temperature=1.1))
    assert chi_square(spoken.tokens, wrong) > 10
