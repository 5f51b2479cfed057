"""What single drafters promise beyond the laws: reuse, choice, adaptation, synthetic acceptance, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from zoo import RandomDrafter, ReplayDrafter, SilentDrafter, bigram, noisy, tiny_target

import specjax
from specjax import (
    Adaptive,
    DraftModel,
    EarlyExit,
    Guard,
    Hybrid,
    NGram,
    Sampling,
    StaticTree,
    TopKTree,
    Verification,
)
from specjax.drafters.adaptive import guess_costs
from specjax.drafters.base import Context
from specjax.sampling import Processors, make_keys
from specjax.trees import Tree, check_parents, ladder, static_tree
from specjax.verification import synthetic_rates

TARGET = tiny_target()
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [2, 7]]


def context_after(target, tokens):
    """What a drafter sees after a prefill of `tokens` int32[B, L]."""
    tokens = jnp.asarray(tokens)
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length - 1), (batch, length - 1))
    cache = target.init_cache(batch, 64)
    out = target(tokens[:, :-1], positions, cache)
    count = jnp.full(batch, length - 1, jnp.int32)
    return Context(
        tokens=tokens,
        length=count + 1,
        keys=make_keys(0, batch),
        processors=Processors(),
        seen=None,
        cache=cache.commit(out.block, count),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("drafter", [EarlyExit(2, num_draft=3), EarlyExit(skip=(2,), num_draft=3)])
def test_the_target_takes_over_what_the_draft_computed(drafter):
    """Reused keys, values and hidden states are those of a whole pass, in every layer that was reused."""
    target = tiny_target(layers=tiny_target().config.layers * 2)
    context = context_after(target, [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
    proposal, _ = drafter.propose(target, None, context)
    block = jnp.concatenate([context.tokens[:, -1:], proposal.tokens], axis=1)
    positions = context.length[:, None] - 1 + jnp.arange(4)
    whole = target(block, positions, context.cache, taps=(2,))
    assert len(proposal.reuse.keys) == 2
    np.testing.assert_allclose(proposal.reuse.hidden, whole.taps[:, :, 0], rtol=1e-4, atol=1e-5)
    part = target(block, positions, context.cache, reuse=proposal.reuse)
    np.testing.assert_allclose(part.logits, whole.logits, rtol=1e-4, atol=1e-4)
    for ours, right in zip(
        (*part.block.keys, *part.block.values),
        (*whole.block.keys, *whole.block.values),
        strict=True,
    ):
        np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_an_exit_at_the_top_is_the_target():
    out = specjax.generate(TARGET, PROMPTS, drafter=EarlyExit(2, num_draft=3), max_new_tokens=40)
    assert out.statistics.mean_acceptance_length == 4


@pytest.mark.thorough
def test_a_perfect_tree_stands_to_its_depth():
    drafter = DraftModel(TARGET, tree=StaticTree((2, 1, 1)))
    out = specjax.generate(TARGET, PROMPTS, drafter=drafter, max_new_tokens=40)
    assert out.statistics.mean_acceptance_length == 4
    assert (out.statistics.drafted == 60).all()


@pytest.mark.thorough
def test_top_k_tree_keeps_the_likeliest_paths():
    """Against every path of the tree's depth, scored in plain Python."""
    target, depth, k, size = bigram(2, 9), 3, 3, 7
    log = np.asarray(jax.nn.log_softmax(target.table))
    context = Context(
        tokens=jnp.asarray([[4, 2]]),
        length=jnp.asarray([2]),
        keys=make_keys(0, 1),
        processors=Processors(),
        seen=None,
    )
    drafter = DraftModel(target, tree=TopKTree(depth=depth, top_k=k, num_nodes=size))
    proposal, _ = drafter.propose(target, drafter.init(target, 1, 64), context)
    level, every = [((), 0.0)], []
    for _ in range(depth):
        grown = []
        for path, score in level:
            row = log[path[-1] if path else 2]
            grown += [((*path, int(t)), score + row[t]) for t in np.argsort(-row)[:k]]
        every += grown
        level = sorted(grown, key=lambda x: -x[1])[:k]
    best = {path for path, _ in sorted(every, key=lambda x: -x[1])[:size]}
    parent, tokens = np.asarray(proposal.parent[0]), np.asarray(proposal.tokens[0])
    paths = [()]
    for j, above in enumerate(parent):
        assert above <= j
        paths.append((*paths[above], int(tokens[j])))
    assert set(paths[1:]) == best


@pytest.mark.thorough
def test_hybrid_takes_the_first_that_proposes_and_the_others_stay_in_step():
    answer = specjax.generate(TARGET, PROMPTS, max_new_tokens=40)
    perfect = DraftModel(TARGET, num_draft=3)
    silent = SilentDrafter()
    out = specjax.generate(TARGET, PROMPTS, drafter=Hybrid((silent, perfect)), max_new_tokens=40)
    for got, expected in zip(out.tokens, answer.tokens, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert out.statistics.mean_acceptance_length == 4
    # a liar goes first in most rounds; when it is silent, the perfect model must not be out of step
    mixed = Hybrid((RandomDrafter(num_draft=2), perfect))
    out = specjax.generate(TARGET, PROMPTS, drafter=mixed, max_new_tokens=60)
    per_position = out.statistics.acceptance_per_position
    assert per_position[2] == 1.0  # only the model drafts a third token


@pytest.mark.thorough
def test_hybrid_gain_learns_whom_to_trust():
    liar = DraftModel(tiny_target(9), num_draft=3)
    trees = StaticTree((1, 1, 1))  # without confidence to go by: what they were worth decides
    hybrid = Hybrid(
        (DraftModel(tiny_target(9), tree=trees), DraftModel(TARGET, tree=trees)), choose="gain"
    )
    out = specjax.generate(TARGET, PROMPTS, drafter=hybrid, max_new_tokens=120)
    alone = specjax.generate(TARGET, PROMPTS, drafter=liar, max_new_tokens=120)
    assert alone.statistics.mean_acceptance_length < 1.5
    assert out.statistics.mean_acceptance_length > 2.5


@pytest.mark.thorough
def test_hybrid_tree_accepts_the_better_branch():
    plain = specjax.generate(TARGET, PROMPTS, max_new_tokens=40)
    answer = np.zeros((3, 60), np.int32)
    for row, prompt, tokens in zip(answer, PROMPTS, plain.tokens, strict=True):
        row[: len(prompt) + 40] = [*prompt, *tokens]
    answer = jnp.asarray(answer)
    right = (
        jnp.arange(60) // 10
    ) % 2 == 0  # each knows the half of the text that the other does not
    wrong = (answer + 1) % TARGET.vocab_size
    some = ReplayDrafter(num_draft=4, answer=jnp.where(right, answer, wrong))
    others = ReplayDrafter(num_draft=4, answer=jnp.where(right, wrong, answer))
    lengths = [
        specjax.generate(
            TARGET, PROMPTS, drafter=d, max_new_tokens=40
        ).statistics.mean_acceptance_length
        for d in (some, others, Hybrid((some, others), choose="tree"))
    ]
    assert lengths[2] > max(lengths[:2]) + 0.5


@pytest.mark.thorough
def test_adaptive_stops_and_probes():
    liar = Adaptive(DraftModel(tiny_target(9), num_draft=3), draft_cost=0.5, probe=10)
    out = specjax.generate(TARGET, PROMPTS, drafter=liar, max_new_tokens=300)
    rounds, drafted = out.statistics.rounds, out.statistics.drafted
    assert (drafted < 0.25 * rounds).all()  # it gave up
    assert (drafted >= 0.05 * rounds).all()  # and looks again
    perfect = Adaptive(DraftModel(TARGET, num_draft=3), draft_cost=0.5, probe=10)
    out = specjax.generate(TARGET, PROMPTS, drafter=perfect, max_new_tokens=200)
    assert out.statistics.mean_acceptance_length > 3.5


@pytest.mark.thorough
def test_adaptive_length_follows_the_costs():
    answer = specjax.generate(TARGET, PROMPTS, max_new_tokens=100)
    drafter = DraftModel(noisy(TARGET, 0.05), num_draft=7)
    free = Adaptive(drafter, costs=(1.0, 1.0, 1.0, 1.0))
    dear = Adaptive(drafter, costs=(1.0, 1.2, 4.0, 9.0))
    for name, used, most in (("free", free, 7), ("dear", dear, 1)):
        out = specjax.generate(TARGET, PROMPTS, drafter=used, max_new_tokens=100)
        for got, expected in zip(out.tokens, answer.tokens, strict=True):
            np.testing.assert_array_equal(got, expected)
        widest = np.flatnonzero(out.statistics.drafted_per_position.sum(0)).max() + 1
        assert widest == most, name


@pytest.mark.thorough
def test_rows_learn_from_each_other_what_deterministic_drafts_are_worth():
    """A row alone has to find out by itself that its drafts fail; eight find out together."""

    def drafted_before_giving_up(batch):
        wrong = ReplayDrafter(num_draft=3, answer=jnp.full((batch, 80), TARGET.vocab_size - 1))
        used = Adaptive(wrong, costs=(1.0, 1.4, 1.6), probe=100)
        out = specjax.generate(TARGET, [[5]] * batch, drafter=used, max_new_tokens=60)
        assert out.statistics.accepted.sum() == 0
        return out.statistics.drafted.sum() / batch

    assert drafted_before_giving_up(8) < 0.5 * drafted_before_giving_up(1)


@struct.dataclass
class HalfSilent(ReplayDrafter):
    """Has nothing to propose for odd rows."""

    def propose(self, target, state, context):
        proposal, state = super().propose(target, state, context)
        odd = jnp.arange(len(proposal.length)) % 2 == 1
        return proposal.replace(length=jnp.where(odd, 0, proposal.length)), state


@pytest.mark.thorough
def test_a_row_without_proposals_does_not_keep_its_batch_probing():
    wrong = HalfSilent(num_draft=3, answer=jnp.full((2, 80), TARGET.vocab_size - 1))
    used = Adaptive(wrong, costs=(1.0, 3.0, 4.0), probe=8)
    out = specjax.generate(TARGET, [[5], [7]], drafter=used, max_new_tokens=60)
    assert 3 <= out.statistics.drafted[0] <= 60 // 8 and out.statistics.drafted[1] == 0


@pytest.mark.thorough
def test_the_alarm_ends_speculation_row_by_row():
    plain = specjax.generate(TARGET, PROMPTS, max_new_tokens=60)
    answer = np.zeros((3, 80), np.int32)
    for row, prompt, tokens in zip(answer, PROMPTS, plain.tokens, strict=True):
        row[: len(prompt) + 60] = [*prompt, *tokens]
    answer[1] = (answer[1] + 1) % TARGET.vocab_size  # never right for this row
    drafter = ReplayDrafter(num_draft=3, answer=jnp.asarray(answer))
    out = specjax.generate(
        TARGET, PROMPTS, drafter=Guard(drafter, floor=0.3, after=12), max_new_tokens=60
    )
    assert out.alarm is not None and out.alarm.tolist() == [False, True, False]
    assert out.statistics.drafted[1] == 12 and (out.statistics.drafted[[0, 2]] > 40).all()
    assert plain.alarm is None


def test_guessed_costs_cover_the_ladder():
    for size in (0, 1, 5, 15, 48):
        costs = guess_costs(size, "cpu")
        assert len(costs) == len(ladder(size)) and (np.diff(costs) > 0).all() and costs[0] == 1
        # with many rows a pass is bound by arithmetic, and wide ones cost in proportion
        for backend in ("cpu", "gpu"):
            many = guess_costs(size, backend, batch=4096)
            np.testing.assert_allclose(many, ladder(size), rtol=0.1)


def test_synthetic_acceptance_has_its_length():
    """0.7 at K = 5 gives (1 - 0.7^6) / 0.3 = 2.94 tokens a round; a length gives itself."""
    rates = tuple(0.7**i for i in range(1, 6))
    for given, expected in ((rates, 2.94), (synthetic_rates(3.2, 5), 3.2)):
        out = specjax.generate(
            bigram(0, 11),
            [[1]] * 64,
            drafter=RandomDrafterFull(num_draft=5),
            max_new_tokens=600,
            verification=Verification(synthetic_rates=given),
        )
        assert abs(out.statistics.mean_acceptance_length - expected) < 0.05
    assert synthetic_rates(3.0, 5)[0] == pytest.approx(0.7090, abs=1e-4)  # llama.cpp's example


class RandomDrafterFull(RandomDrafter):
    """Always proposes all of its random tokens."""

    def propose(self, target, state, context):
        proposal, state = super().propose(target, state, context)
        return proposal.replace(length=jnp.full_like(proposal.length, self.num_draft)), state


jax.tree_util.register_pytree_node(
    RandomDrafterFull, lambda d: ((), d.num_draft), lambda n, _: RandomDrafterFull(num_draft=n)
)


@pytest.mark.thorough
def test_lossy_acceptance_accepts_more_and_only_when_asked():
    target, sampling = bigram(3, 6), Sampling(temperature=1.0)
    drafter = RandomDrafterFull(num_draft=3)

    def length(**rule):
        out = specjax.generate(
            target,
            [[1]] * 32,
            drafter=drafter,
            max_new_tokens=100,
            sampling=sampling,
            verification=Verification(**rule),
        )
        return out.statistics.mean_acceptance_length

    assert not Verification(lossy_threshold=0.2).exact and Verification().exact
    assert length(lossy_threshold=0.1) > length() + 0.1
    assert length(lossy_threshold=1.0) == length()


def test_trees():
    assert static_tree((2, 2)).tolist() == [0, 0, 1, 1, 2, 2]
    tree = Tree.create(jnp.asarray([[0, 0, 1, 3]]))
    assert tree.depth.tolist() == [[0, 1, 1, 2, 3]]
    assert tree.path(jnp.asarray([4])).tolist() == [[0, 1, 3, 4, 4]]
    assert np.flatnonzero(tree.ancestors[0, 4]).tolist() == [0, 1, 3, 4]
    assert check_parents([0, 0, 2]).tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: EarlyExit(0), "num_layers must be"),
        (lambda: EarlyExit(3).check(TARGET), "num_layers must be in 1..2"),
        (lambda: EarlyExit(), "num_layers must be given"),
        (lambda: EarlyExit(skip=(5,)).check(TARGET), "skip must name layers in 0..1"),
        (lambda: EarlyExit(skip=(0, 1)).check(TARGET), "skip leaves no layer"),
        (lambda: EarlyExit(1).check(bigram(0, 5)), "layers of a specjax Transformer"),
        (lambda: check_parents([0, 3]), r"parents\[1\] is 3"),
        (lambda: check_parents([0.5]), "parents must be"),
        (lambda: StaticTree(()), "branching must be"),
        (lambda: StaticTree((2, 0)), "branching must be"),
        (lambda: TopKTree(depth=2, top_k=2, num_nodes=9), "num_nodes must be in 2..6"),
        (lambda: TopKTree(depth=0, top_k=2, num_nodes=9), "depth must be"),
        (lambda: Hybrid(()), "drafters must name"),
        (lambda: Hybrid((NGram(),), choose="best"), "choose must be"),
        (
            lambda: Hybrid((NGram(), DraftModel(bigram(0, 5)))).check(TARGET),
            "vocabulary|tokens",
        ),
        (lambda: Adaptive(NGram(), costs=(1.0, 2.0)).check(TARGET), "costs must be 5"),
        (lambda: Guard(NGram(), floor=2.0), "floor must be"),
        (lambda: Guard(NGram(), after=0), "after must be"),
        (lambda: Adaptive(NGram(), probe=0), "probe must be"),
        (lambda: Adaptive(NGram(), draft_cost=-1.0), "draft_cost must be"),
        (lambda: Verification(law="none"), "law must be"),
        (lambda: Verification(lossy_threshold=0.0), "lossy_threshold must be"),
        (lambda: Verification(synthetic_rates=(0.5, 1.2)), "synthetic_rates must be prob"),
        (lambda: Verification(synthetic_rates=(0.5, 0.6)), "synthetic_rates must not increase"),
        (lambda: synthetic_rates(7.0, 5), "length must be"),
        (lambda: DraftModel(TARGET, num_draft=0), "num_draft must be"),
        (lambda: DraftModel(TARGET, min_confidence=2.0), "min_confidence must be"),
    ],
)
def test_wrong_settings_are_named(make, text):
    with pytest.raises(ValueError, match=text):
        make()
