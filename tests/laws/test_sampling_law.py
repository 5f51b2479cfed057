"""Law 2: the law of the output is the target's, exactly for one block, statistically over several rounds."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import RandomDrafter, RandomTreeDrafter, bigram, noisy, tiny_head, tiny_mtp, tiny_target

import specjax
from specjax import (
    MTP,
    Adaptive,
    DraftModel,
    Eagle3,
    Hybrid,
    NGram,
    PEagle,
    Sampling,
    StaticTree,
    TopKTree,
)
from specjax.sampling import Processors, process_logits
from specjax.trees import Tree, static_tree
from specjax.verification import accept_matching, block_law, sibling_law, token_law, traversal_law

V = 3
GRID = 512


def outcomes(law, size):
    """Exact law of an acceptance rule over its random numbers: [(probability, result)].

    The rule looks at each number u_i through one comparison, whose threshold may depend on how those before it fell; so
    from the first number on, the place where the result changes is found (later numbers at 1: nothing more stands), and
    both sides are followed.

    Args:
      law: u float32[R, size] -> a tuple of arrays [R, ...]; the first tells the outcomes apart.
      size: how many numbers.
    """

    def changes(known, low, high):
        """Grid over u_i in [low, high]: the last value with the outcome of u_i = 0, or None if u_i does not matter."""
        values = np.linspace(low, high, GRID)
        u = np.ones((GRID, size))
        u[:, : len(known)] = known
        u[:, len(known)] = values
        seen = np.asarray(law(jnp.asarray(np.clip(u, 1e-30, 1 - 1e-7), jnp.float32))[0])
        seen = seen.reshape(GRID, -1)
        differ = (seen != seen[0]).any(axis=1)
        if not differ.any():
            return None
        at = int(differ.argmax())
        return values[at - 1], values[at]

    def follow(known, chance):
        if len(known) == size:
            u = jnp.asarray([np.clip(known, 1e-30, 1 - 1e-7)], jnp.float32).reshape(1, size)
            yield chance, tuple(np.asarray(x)[0] for x in law(u))
            return
        edge = changes(known, 0.0, 1.0)
        if edge is None:
            yield from follow([*known, 1.0], chance)
            return
        if edge[1] < 1.0:
            edge = changes(known, edge[0], edge[1]) or edge
            threshold = sum(edge) / 2
        else:  # stands for every u below 1, or almost
            finer = changes(known, edge[0], 1.0)
            threshold = 1.0 if finer is None or finer[1] >= 1.0 else sum(finer) / 2
        yield from follow([*known, 0.0], chance * threshold)
        if threshold < 1.0:
            yield from follow([*known, 1.0], chance * (1 - threshold))

    return list(follow([], 1.0))


def conditional(seed):
    """A random conditional distribution of the prefix."""
    table = {}

    def law(prefix):
        if prefix not in table:
            rng = np.random.default_rng([seed, len(prefix), *prefix])
            table[prefix] = rng.dirichlet(np.ones(V))
        return table[prefix]

    return law


def enumerate_chain(rule, p, q, length):
    """Exact law of one block's output for a chain drawn from q: {emitted tokens: probability}."""
    law: dict[tuple[int, ...], float] = {}
    for drafts in itertools.product(range(V), repeat=length):
        weight = np.prod([q(drafts[:i])[d] for i, d in enumerate(drafts)])
        log_p = jnp.log(jnp.asarray([[p(drafts[:i]) for i in range(length + 1)]], jnp.float32))
        log_q = jnp.log(jnp.asarray([[q(drafts[:i]) for i in range(length)]], jnp.float32))
        log_q = log_q.reshape(1, length, V)
        tokens = jnp.asarray([drafts], jnp.int32).reshape(1, length)
        judge = partial(judge_chain, rule, log_p, tokens, log_q)

        for chance, (count, log_next) in outcomes(judge, length):
            following = np.asarray(jax.nn.softmax(log_next), np.float64)
            for token in range(V):
                key = (*drafts[: int(count)], token)
                law[key] = law.get(key, 0.0) + weight * chance * following[token]
    return law


@partial(jax.jit, static_argnums=0)
def judge_chain(rule, log_p, tokens, log_q, u):
    rows = u.shape[0]
    log_p, tokens, log_q = (
        jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in (log_p, tokens, log_q)
    )
    return rule(u, log_p, tokens, jnp.full(rows, tokens.shape[1]), log_q)


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


def assert_target_law(law, p, size):
    assert abs(sum(law.values()) - 1) < 1e-4
    full = continue_with_target(law, p, size)
    for path in itertools.product(range(V), repeat=size):
        expected = np.prod([p(path[:i])[t] for i, t in enumerate(path)])
        assert abs(full.get(path, 0.0) - expected) < 1e-4


def accepted(law):
    return sum((len(path) - 1) * chance for path, chance in law.items())


@pytest.mark.parametrize(("seed", "length"), [(0, 0), (1, 1), (0, 2), (2, 2), (1, 3)])
def test_one_sampled_chain_follows_the_target_exactly(seed, length):
    """Token by token and as a block, which accepts more."""
    p, q = conditional(seed), conditional(100 + seed)
    laws = {rule: enumerate_chain(rule, p, q, length) for rule in (token_law, block_law)}
    for law in laws.values():
        assert_target_law(law, p, length + 1)
    gain = accepted(laws[block_law]) - accepted(laws[token_law])
    assert gain > (0.005 if length > 1 else -1e-4)


def siblings_without_replacement(q, branches):
    """[(probability, tokens)] of drawing `branches` tokens from q one after the other."""
    for tokens in itertools.permutations(range(V), branches):
        chance, left = 1.0, 1.0
        for token in tokens:
            chance *= q[token] / left
            left -= q[token]
        yield chance, tokens


@pytest.mark.thorough
def test_one_sampled_tree_follows_the_target_exactly():
    """Two children, two grandchildren each, drawn without replacement; from the leaves up accepts more."""
    p, q = conditional(1), conditional(101)
    laws = [enumerate_tree(p, q, law) for law in (sibling_law, traversal_law)]
    for law in laws:
        assert_target_law(law, p, 3)
    chain = enumerate_chain(token_law, p, q, 2)
    assert accepted(laws[0]) > accepted(chain) + 0.05
    assert accepted(laws[1]) > accepted(laws[0]) + 0.002


def enumerate_tree(p, q, rule):
    """Exact law of one block's output."""
    parent = jnp.asarray([static_tree([2, 2])])
    tree = Tree.create(parent)
    law: dict[tuple[int, ...], float] = {}
    for first_chance, (a, b) in siblings_without_replacement(q(()), 2):
        for left_chance, left in siblings_without_replacement(q((a,)), 2):
            for right_chance, right in siblings_without_replacement(q((b,)), 2):
                weight = first_chance * left_chance * right_chance
                drafts = [a, b, *left, *right]
                prefixes = [(), (a,), (b,), *((a, t) for t in left), *((b, t) for t in right)]
                log_p = jnp.log(jnp.asarray([[p(x) for x in prefixes]], jnp.float32))
                log_q = jnp.log(jnp.asarray([[q(x) for x in prefixes]], jnp.float32))
                tokens = jnp.asarray([drafts])

                for chance, (node, count, log_next) in outcomes(
                    partial(judge_tree, rule, log_p, tokens, log_q, tree), 6
                ):
                    following = np.asarray(jax.nn.softmax(log_next), np.float64)
                    assert len(prefixes[int(node)]) == int(count)
                    for token in range(V):
                        key = (*prefixes[int(node)], token)
                        law[key] = law.get(key, 0.0) + weight * chance * following[token]
    return law


@partial(jax.jit, static_argnums=0)
def judge_tree(rule, log_p, tokens, log_q, tree, u):
    rows = u.shape[0]

    def wide(x):
        return jnp.broadcast_to(x, (rows, *x.shape[1:]))

    tree, log_p, tokens, log_q = jax.tree.map(wide, (tree, log_p, tokens, log_q))
    given = {"branches": 2}
    if rule is traversal_law:  # which looks at the children's numbers before their parent's
        u, given = u[:, jnp.asarray([2, 5, 0, 1, 3, 4])], {}
    count, log_next, node = rule(u, log_p, tokens, jnp.full(rows, 6), log_q, tree, depth=2, **given)
    return node, count, log_next


@pytest.mark.thorough
def test_a_chain_judged_as_a_tree_is_a_block():
    """At the last draft of any length, and past what was never drawn."""
    rng = np.random.default_rng(0)
    rows, size, vocab = 300, 4, 5
    draws = rng.dirichlet(np.ones(vocab), (2, rows, size + 1)).astype(np.float32)
    draws[1, :, :, 0] = 0.0
    log_p, log_q = np.log(draws, where=draws > 0, out=np.full_like(draws, -np.inf))
    tokens = rng.integers(1, vocab, (rows, size))
    never = rng.integers(0, 2 * size, rows)
    given = [rng.uniform(size=(rows, size)), log_p, tokens, rng.integers(0, size + 1, rows)]
    u, log_p, tokens, length = map(jnp.asarray, given)
    for fewer in (False, True):
        drafts = jnp.where(fewer & (jnp.arange(size) >= never[:, None]), 0, tokens)
        known = jnp.minimum(length, jnp.asarray(never)) if fewer else length
        count, following = block_law(u, log_p, drafts, known, log_q[:, :-1])
        tree = Tree.create(jnp.broadcast_to(jnp.arange(size), tokens.shape))
        got = traversal_law(u, log_p, drafts, length, jnp.asarray(log_q), tree, size)
        np.testing.assert_array_equal(got[0], count)
        np.testing.assert_array_equal(got[2], count)
        np.testing.assert_allclose(
            jax.nn.softmax(got[1]), jax.nn.softmax(following), rtol=1e-4, atol=1e-6
        )


def test_leaves_come_before_what_they_hang_on():
    """Against a walk in plain Python, for random trees."""
    rng = np.random.default_rng(1)
    parent = np.stack([[rng.integers(0, j + 1) for j in range(7)] for _ in range(50)])
    order = np.asarray(Tree.create(jnp.asarray(parent)).leaves_first())

    def walk(row, node):
        for child in np.flatnonzero(parent[row] == node) + 1:
            yield from walk(row, child)
        yield node

    for row in range(50):
        assert np.argsort(order[row]).tolist() == list(walk(row, 0))


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_matching_accepts_the_longest_path_of_own_tokens(shape):
    """Against a walk in plain Python, for random trees, lengths and choices."""
    rng = np.random.default_rng(0)
    size, rows = 7, 400
    parent = np.stack(
        [
            [j if shape == "chain" else rng.integers(0, j + 1) for j in range(size)]
            for _ in range(rows)
        ]
    )
    tokens, chosen = rng.integers(0, 3, (rows, size)), rng.integers(0, 3, (rows, size + 1))
    length = rng.integers(0, size + 1, rows)
    tree = None if shape == "chain" else Tree.create(jnp.asarray(parent))
    got = accept_matching(jnp.asarray(chosen), jnp.asarray(tokens), jnp.asarray(length), tree)
    for row in range(rows):
        paths = [[0]]
        for j in range(1, length[row] + 1):
            above = next((path for path in paths if path[-1] == parent[row, j - 1]), None)
            if above is not None and tokens[row, j - 1] == chosen[row, above[-1]]:
                paths.append([*above, j])
        best = max(paths, key=len)
        assert got.count[row] == len(best) - 1
        end = best[-1] if got.path is None else int(got.path[row, len(best) - 1])
        assert got.next_token[row] == chosen[row, end]
        if got.path is not None:
            assert list(got.path[row, : len(best)]) in [p for p in paths if len(p) == len(best)]


@pytest.mark.thorough
def test_soft_q_with_deterministic_drafts_would_be_caught():
    """The enumeration can fail: argmax drafts judged by q's probabilities are the classic bias."""
    p, q = conditional(0)(()), conditional(100)(())
    d = int(q.argmax())
    log_p, log_q = (jnp.log(jnp.asarray(x, jnp.float32)) for x in ([[p, p]], [[q]]))

    def judge(u):
        rows = u.shape[0]
        p_rows, q_rows = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in (log_p, log_q))
        return token_law(u, p_rows, jnp.full((rows, 1), d), jnp.ones(rows, int), q_rows)

    first = 0.0
    for chance, (count, log_next) in outcomes(judge, 1):
        following = np.asarray(jax.nn.softmax(log_next))
        first += chance * (1.0 if count else following[d])
    assert abs(first - p[d]) > 1e-2


def test_edges_of_the_rule():
    log = jnp.log
    half = jnp.asarray([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]])
    token = jnp.asarray([[2]])
    for law in (token_law, block_law):
        # a token of probability 0 never stands, however small u is, and is never the correction
        count, following = law(
            jnp.full((1, 1), 1e-38), log(half), token, jnp.asarray([1]), log(half[:, :1])
        )
        assert count[0] == 0 and following[0, 2] == -jnp.inf and jnp.isfinite(following[0, 0])
        # p == q: stands for every u below 1; if rounding rejects it, the next token still comes from p
        same = jnp.asarray([[[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]])
        count, following = law(
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


MODEL = bigram(9, 4)
LOOPS = {
    "plain": None,
    "ngram": NGram(num_draft=2, min_match=1),
    "random": RandomDrafter(num_draft=3),
    "random-tree": RandomTreeDrafter(num_draft=4),
    "model-3": DraftModel(MODEL, num_draft=3),
    "tree": DraftModel(MODEL, tree=StaticTree((2, 2))),
    "top-k": DraftModel(MODEL, tree=TopKTree(depth=2, top_k=2, num_nodes=4)),
    "adaptive": Adaptive(DraftModel(MODEL, num_draft=3), draft_cost=0.3, probe=2),
    "adaptive-unsure": Adaptive(
        DraftModel(MODEL, num_draft=3, min_confidence=0.5), costs=(1.0, 1.6, 1.7), probe=2
    ),
    "hybrid": Hybrid((NGram(num_draft=1, min_match=2), DraftModel(MODEL, num_draft=2))),
    "hybrid-gain": Hybrid(
        (NGram(num_draft=2, min_match=1), DraftModel(MODEL, num_draft=2)), choose="gain"
    ),
    "hybrid-tree": Hybrid(
        (NGram(num_draft=1, min_match=1), DraftModel(MODEL, tree=StaticTree((2,))))
    ),
}
CASES = [
    *[(name, "token") for name in LOOPS],
    *[(name, "block") for name in ("model-3", "tree")],
]
QUICK = [("model-3", "token")]


@pytest.mark.parametrize(
    ("name", "law"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.thorough) for case in CASES],
)
def test_rounds_follow_the_target(name, law):
    """Five tokens take two rounds or more; rows differ in their keys, and in one of two settings."""
    target, rows, size = bigram(3, 4), 4_000, 5
    spoken = specjax.generate(
        target,
        [[2, 1, 2]] * rows,
        drafter=LOOPS[name],
        max_new_tokens=size,
        sampling=[SETTINGS[i % 2] for i in range(rows)],
        key=11,
        verification=specjax.Verification(law=law),
    )
    for i, sampling in enumerate(SETTINGS):
        law_of_text = markov_law(target, 2, size, sampling)
        assert abs(chi_square(spoken.tokens[i::2], law_of_text)) < 4


FOUR = tiny_target(2, vocab_size=4, scale=1.5)
MARKOV = tiny_head(FOUR, draft_vocab_size=3, scale=1.0, mask_token_id=3, markov_rank=2)
MARKOV.readout.markov.after[...] = jnp.asarray([[1.0, -2.0, 0.5], [-1.0, 0.5, 2.0]])
HEADS = {
    "model": DraftModel(noisy(FOUR, 0.3), num_draft=2),
    "eagle3": Eagle3(tiny_head(FOUR, draft_vocab_size=3, scale=1.0), num_draft=2),
    "eagle3-tree": Eagle3(tiny_head(FOUR, draft_vocab_size=4, scale=1.0), tree=StaticTree((2, 1))),
    "p-eagle": PEagle(tiny_head(FOUR, draft_vocab_size=3, scale=1.0, mask_token_id=3), num_draft=2),
    "p-eagle-markov": PEagle(MARKOV, num_draft=2),
    "mtp": MTP(tiny_mtp(FOUR, draft_vocab_size=3), num_draft=2),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "law"),
    [*((name, "token") for name in HEADS), ("eagle3-tree", "block")],
)
def test_rounds_follow_a_transformer(name, law):
    rows, size, sampling = 2000, 3, Sampling(temperature=1.0)
    spoken = specjax.generate(
        FOUR,
        [[1, 3, 0]] * rows,
        drafter=HEADS[name],
        max_new_tokens=size,
        sampling=sampling,
        key=5,
        verification=specjax.Verification(law=law),
    )
    assert abs(chi_square(spoken.tokens, transformer_law(FOUR, [1, 3, 0], size, sampling))) < 4
    if name != "plain":
        assert 0.03 < spoken.statistics.acceptance_rate < 0.95


@pytest.mark.thorough
def test_the_chi_square_can_fail():
    target = bigram(3, 4)
    spoken = specjax.generate(
        target, [[2]] * 20_000, max_new_tokens=4, sampling=Sampling(temperature=1.0), key=11
    )
    wrong = markov_law(target, 2, 4, Sampling(temperature=1.1))
    assert chi_square(spoken.tokens, wrong) > 10
