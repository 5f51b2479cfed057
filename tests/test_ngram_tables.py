"""The table-driven n-gram drafters and suffix drafting against slow readings of their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import bigram

import specjax
from specjax import NGram, Suffix
from specjax.drafters.base import Context, Observation
from specjax.drafters.ngram_map import NGramMap
from specjax.drafters.ngram_mod import NGramMod
from specjax.sampling import Processors, make_keys

SLOTS, PIECE = 64, 5
TARGET = bigram(0, 6)


class Replay:
    """Feeds a text to a drafter as the decode loop would: the prompt in pieces, then rounds of the given counts."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.observe = jax.jit(lambda state, seen: drafter.observe(TARGET, state, seen))
        self.propose = jax.jit(lambda state, context: drafter.propose(TARGET, state, context))

    def __call__(self, text, prompt, counts):
        """Yields (committed tokens, proposed tokens, tokens committed next) round by round."""
        state = self.drafter.init(TARGET, 1, SLOTS)
        padded = np.full(SLOTS + 2 * PIECE, 5, np.int32)
        padded[: len(text)] = text

        def observed(state, start, count):
            piece = Observation(
                tokens=jnp.asarray(padded[None, start : start + PIECE]),
                count=jnp.asarray([count]),
                taps=jnp.zeros((1, PIECE, 0, 1)),
                next_token=jnp.asarray([padded[start + count]]),
            )
            return self.observe(state, piece)

        for start in range(0, prompt - 1, PIECE):
            state = observed(state, start, min(PIECE, prompt - 1 - start))
        length = prompt
        for count in counts:
            if length + count > len(text):
                return
            context = Context(
                tokens=jnp.asarray(padded[None, :SLOTS]),
                length=jnp.asarray([length]),
                keys=make_keys(0, 1),
                processors=Processors(),
                seen=None,
            )
            proposal, state = self.propose(state, context)
            size = int(proposal.length[0])
            yield list(text[:length]), np.asarray(proposal.tokens)[0, :size].tolist(), count
            state = observed(state, length - 1, count)
            length += count


class SlowMap:
    """NGramMap's definition with dictionaries."""

    def __init__(self, n, m, min_hits, continuations):
        self.n, self.m, self.min_hits, self.continuations = n, m, min_hits, continuations
        self.table, self.other, self.learned, self.last = {}, {}, 0, None

    def propose(self, row):
        observed = row[:-1]
        while self.learned + self.n + self.m <= len(observed):
            start = self.learned + self.n
            key = tuple(observed[self.learned : start])
            following = tuple(observed[start : start + self.m])
            entries = self.table.setdefault(key, [])
            known = next((e for e in entries if e["tokens"] == following), None)
            if known:
                known["hits"] += 1
            elif len(entries) < self.continuations:
                entries.append({"tokens": following, "hits": 1, "reach": self.m})
            else:
                self.other[key] = self.other.get(key, 0) + 1
            self.learned += 1
        self.last = None
        key = tuple(row[-self.n :])
        entries = self.table.get(key, [])
        if len(row) <= self.n or not entries:
            return []
        best = max(entries, key=lambda e: e["hits"])
        others = sum(e["hits"] for e in entries) - best["hits"] + self.other.get(key, 0)
        if self.continuations > 1 and (
            best["hits"] < 2 * others or best["hits"] + others < self.min_hits
        ):
            return []
        draft = list(best["tokens"][: best["reach"]])
        self.last = (best, draft)
        return draft

    def committed(self, tokens):
        """What the round emitted after the newest token, all but the last of which can be accepted drafts."""
        if not self.last:
            return
        entry, draft = self.last
        stood = 0
        while stood < min(len(draft), len(tokens) - 1) and draft[stood] == tokens[stood]:
            stood += 1
        full = stood == len(draft)
        entry["reach"] = min(2 * stood + 1, self.m) if full else max(stood, 1)


texts = st.lists(st.integers(0, 2), min_size=8, max_size=SLOTS)
counts = st.lists(st.integers(1, PIECE), min_size=1, max_size=30)
MAPS = {
    "k": NGramMap(n=2, m=3),
    "k4v": NGramMap(n=2, m=3, continuations=4, min_hits=2),
    "k4v-long": NGramMap(n=3, m=4, continuations=4),
}
REPLAYS = {name: Replay(drafter) for name, drafter in MAPS.items()}


@pytest.mark.parametrize("name", MAPS)
@settings(max_examples=60, deadline=None)
@given(text=texts, prompt=st.integers(1, 20), counts=counts)
def test_maps_equal_dictionaries(name, text, prompt, counts):
    drafter = MAPS[name]
    slow = SlowMap(drafter.n, drafter.m, drafter.min_hits, drafter.continuations)
    prompt = min(prompt, len(text))
    for row, got, count in REPLAYS[name](text, prompt, counts):
        assert got == slow.propose(row)
        slow.committed(text[len(row) : len(row) + count])


MOD = NGramMod(n=3, min_draft=2, max_draft=6, slots=1 << 18)  # few collisions
MOD_REPLAY = Replay(MOD)


@settings(max_examples=60, deadline=None)
@given(text=texts, prompt=st.integers(1, 20), counts=counts)
def test_mod_equals_a_dictionary(text, prompt, counts):
    bad, table, learned = 0, {}, 0
    last = []
    for row, got, count in MOD_REPLAY(text, min(prompt, len(text)), counts):
        for at in range(max(learned, MOD.n), len(row) - 1):
            table[tuple(row[at - MOD.n : at])] = row[at]
        learned = len(row) - 1
        draft: list[int] = []
        if len(row) >= MOD.n:
            grown = list(row)
            while len(draft) < MOD.max_draft and tuple(grown[-MOD.n :]) in table:
                draft.append(table[tuple(grown[-MOD.n :])])
                grown.append(draft[-1])
        last = draft if len(draft) >= MOD.min_draft else []
        assert got == last
        following = text[len(row) : len(row) + count]
        if last:
            stood = 0
            while stood < min(len(last), count - 1) and last[stood] == following[stood]:
                stood += 1
            bad = bad + 1 if 4 * stood < len(last) else 0
        if bad >= 5:  # emptied before what this round committed is learned
            bad, table, learned = 0, {}, len(row) - 1


@pytest.mark.thorough
def test_mod_rows_share_what_they_learned():
    """The second row drafts what only the first one has seen; an emptied table drafts nothing."""
    state = MOD.init(TARGET, 2, SLOTS)
    tokens = jnp.asarray([[0, 1, 2, 3, 4, 5, 0, 1], [5, 5, 0, 1, 0, 0, 0, 0]])
    seen = Observation(
        tokens=tokens,
        count=jnp.asarray([8, 3]),
        taps=jnp.zeros((2, 8, 0, 1)),
        next_token=tokens[:, 0],
    )
    state = MOD.observe(TARGET, state, seen)
    context = Context(
        tokens=jnp.asarray([[0, 1, 2, 3], [5, 0, 1, 2]]),
        length=jnp.asarray([4, 4]),
        keys=make_keys(0, 2),
        processors=Processors(),
        seen=None,
    )
    proposal, _ = MOD.propose(TARGET, state, context)
    assert proposal.tokens[1, :4].tolist() == [3, 4, 5, 0] and proposal.length[1] >= 4
    emptied = state.replace(epoch=specjax.drafters.base.Shared(state.epoch.value + 1))
    assert (MOD.propose(TARGET, emptied, context)[0].length == 0).all()


SUFFIX = Suffix(num_draft=5, max_depth=4, candidates=SLOTS)
SUFFIX_REPLAY = Replay(SUFFIX)


def slow_suffix(row, corpus, settings):
    """(score, length of suffix, tokens) of the best path, by counting every occurrence."""
    best = (0.0, 0, [])
    for length in range(1, settings.max_depth + 1):
        if len(row) < length:
            continue
        suffix = row[len(row) - length :]
        last = len(corpus) - (1 if corpus is row else 0)
        ends = [e for e in range(length - 1, last) if corpus[e - length + 1 : e + 1] == suffix]
        if not ends:
            continue
        path, score, probability = [], 0.0, 1.0
        limit = min(settings.num_draft, int(length * settings.spec_factor + 1e-6))
        while len(path) < limit:
            following = {}
            for end in ends:
                at = end + 1 + len(path)
                if at < len(corpus) and corpus[at] >= 0:
                    following.setdefault(corpus[at], []).append(end)
            if not following:
                break
            token = max(following, key=lambda t: (len(following[t]), max(following[t])))
            share = len(following[token]) / len(ends)
            if probability * share < settings.min_probability:
                break
            probability *= share
            score += probability
            path.append(token)
            ends = following[token]
        if score > best[0] - 1e-5 and path:
            best = (score, length, path)
    return best


@settings(max_examples=100, deadline=None)
@given(text=texts, prompt=st.integers(1, 20))
def test_suffix_equals_counting(text, prompt):
    for row, got, _ in SUFFIX_REPLAY(text, min(prompt, len(text)), [3] * 20):
        assert got == slow_suffix(row, row, SUFFIX)[2]


@pytest.mark.thorough
def test_suffix_remembers_earlier_outputs():
    drafter = SUFFIX.remember([[1, 2, 3, 4, 5], [0, 2, 3, 1]])
    context = Context(
        tokens=jnp.asarray([[5, 1, 2, 0, 0, 0]]),
        length=jnp.asarray([3]),
        keys=make_keys(0, 1),
        processors=Processors(),
        seen=None,
    )
    proposal, _ = drafter.propose(TARGET, None, context)
    assert proposal.tokens[0, : int(proposal.length[0])].tolist() == [3, 4, 5]
    assert SUFFIX.propose(TARGET, None, context)[0].length[0] == 0
    with pytest.raises(ValueError, match="filled for another target"):
        drafter.remember([[99]]).check(TARGET)
    small = Suffix(memory_size=4).remember([[1, 2, 3, 4, 5, 0]])
    assert small.memory is not None and small.memory.tolist() == [4, 5, 0, -1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: NGram.simple(n=0), "n must be"),
        (lambda: NGram.map_k(m=0), "m must be"),
        (lambda: NGram.map_k4v(min_hits=0), "min_hits must be"),
        (lambda: NGram.simple("prose"), "preset must be"),
        (lambda: NGram.simple(min_hits=2), "unknown sizes"),
        (lambda: NGram.mod(n=0), "n must be"),
        (lambda: NGram.mod(min_draft=9, max_draft=3), "min_draft"),
        (lambda: NGram.mod(slots=1000), "power of two"),
        (lambda: Suffix(num_draft=0), "num_draft must be"),
        (lambda: Suffix(min_probability=0.0), "min_probability"),
    ],
)
def test_wrong_sizes_are_named(make, text):
    with pytest.raises(ValueError, match=f"{text}.*got|{text}.*expected"):
        make()


def test_presets():
    assert (NGram.simple().min_match, NGram.simple().num_draft) == (12, 48)
    text = NGram.map_k4v("text")
    assert (text.n, text.m, text.min_hits, text.continuations) == (8, 32, 2, 4)
