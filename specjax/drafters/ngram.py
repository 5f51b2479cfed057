"""Drafts copied from the row's own history: the continuation of an earlier occurrence of its newest tokens.

Known as prompt look-up or n-gram drafting. B rows, L history, N drafted tokens.
"""

import math

import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.drafters.base import Context, Observation, Proposal
from specjax.drafters.ngram_map import NGramMap, check_sizes
from specjax.drafters.ngram_mod import NGramMod
from specjax.models.transformer import Target


def longest_suffix_match(tokens: Array, length: Array, max_match: int) -> tuple[Array, Array]:
    """Where the newest tokens occurred before.

    Every end position j is scored by how many tokens, at most `max_match`, agree backwards from j and backwards from the
    newest token; the longest agreement wins and among equals the most recent. The score packs both into one integer, so
    that the search is one maximum (the form of vLLM's Triton kernel).

    Args:
      tokens: int32[B, L]; garbage from `length` on.
      length: int32[B].
      max_match: the longest agreement worth telling apart.

    Returns:
      end: int32[B], position of the occurrence's last token.
      match: int32[B], tokens that agree; 0 if the newest token never occurred before.
    """
    history = tokens.shape[1]
    position = jnp.arange(history)
    agree = jnp.ones(tokens.shape, bool)
    match = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(max_match):
        newest = jnp.take_along_axis(tokens, jnp.maximum(length[:, None] - 1 - back, 0), axis=1)
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :history]
        agree &= (shifted == newest) & (position >= back)
        match += agree
    earlier = position < length[:, None] - 1
    score = jnp.max(jnp.where(earlier, match * history + position, 0), axis=1)
    match = score // history
    return jnp.where(match > 0, score % history, 0), match


def continuation(tokens: Array, length: Array, end: Array, size: int) -> Array:
    """The `size` tokens after position `end`, int32[B, size].

    Where the history ends first, copying goes on over the copied tokens, as in LZ77: a row that repeats itself with
    period p drafts further periods.
    """
    period = jnp.maximum(length - 1 - end, 1)
    offset = jnp.arange(size) % period[:, None]
    return jnp.take_along_axis(tokens, end[:, None] + 1 + offset, axis=1)


AGREEMENT = (
    (
        0.0,
        0.26,
        0.57,
        0.67,
        0.72,
        0.78,
        0.82,
        0.85,
        0.87,
        0.89,
        0.91,
        0.92,
        0.93,
        0.94,
        0.95,
        0.96,
        0.98,
    ),
    (
        0.0,
        0.21,
        0.45,
        0.50,
        0.60,
        0.64,
        0.68,
        0.72,
        0.75,
        0.78,
        0.80,
        0.82,
        0.84,
        0.86,
        0.88,
        0.90,
        0.92,
    ),
)
"""Probability that the token after an occurrence of the newest 0, 1, ... 16 tokens is the next one, for greedy rows and for
rows at temperature 0.8: measured over SmolLM2's answers (some in between interpolated). A first guess for `Adaptive`."""

PRESETS = {"code": (12, 48, 1), "text": (8, 32, 2)}
"""n, m and min_hits that suit code and text."""


def _sizes(preset: str, given: dict[str, int], hits: bool) -> tuple[int, int, int]:
    """n, m, min_hits of a preset with what was given in their place.

    Raises:
      ValueError: an unknown preset or name, or a size below 1.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    sizes = dict(zip(("n", "m", "min_hits"), PRESETS[preset], strict=True))
    if unknown := set(given) - set(sizes if hits else ("n", "m")):
        raise ValueError(f"unknown sizes {sorted(unknown)}; expected n, m{', min_hits' * hits}")
    sizes |= given
    check_sizes(sizes["n"], sizes["m"], sizes["min_hits"], 2)
    return sizes["n"], sizes["m"], sizes["min_hits"]


@struct.dataclass
class NGram:
    """Longest suffix match over prompt and output, most recent wins, all on the device.

    How much is proposed grows with the agreement: up to the largest block width (a power of two, as verification's ladder
    has them) that is at most twice the match. A match of 2 proposes 3 tokens, of 4 to 7 tokens 7, of 8 tokens 15. Replayed
    over SmolLM2's answers, greedy and sampled, this came within 2% of the best fixed rule in every workload: long
    agreements mean copying, short ones are chance, and a proposal that stands lengthens the next match by itself. Rows
    that sample need one token more of agreement: at temperature 1 a match of two is right too rarely to pay.

    The modes of llama.cpp, `simple`, `map_k`, `map_k4v` and `mod`, are class methods that return their drafters.

    Attributes:
      num_draft: N, tokens proposed at most.
      min_match: shortest agreement that is worth a proposal to a greedy row.
      max_match: longest agreement looked for.
      grow: whether the proposal grows with the agreement as above; else it is always `num_draft` tokens.
    """

    num_draft: int = struct.field(pytree_node=False, default=15)
    min_match: int = struct.field(pytree_node=False, default=2)
    max_match: int = struct.field(pytree_node=False, default=8)
    grow: bool = struct.field(pytree_node=False, default=True)

    def __post_init__(self):
        if self.num_draft < 0:
            raise ValueError(f"num_draft must be >= 0, got {self.num_draft}")
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                "min_match and max_match must satisfy 1 <= min_match <= max_match, "
                f"got {self.min_match} and {self.max_match}"
            )

    @classmethod
    def simple(cls, preset: str = "code", **sizes: int) -> "NGram":
        """llama.cpp's `ngram-simple`: the m tokens after the latest occurrence of exactly the newest n.

        Where that occurrence ends less than n tokens before the text does, llama.cpp gives up, so that rows which repeat
        a short phrase get no draft; here the copy goes on over itself. It also needs no history of n + m tokens.

        Args:
          preset: "code" (n 12, m 48) or "text" (n 8, m 32).
          sizes: `n`, `m` in place of the preset's.
        """
        n, m, _ = _sizes(preset, sizes, hits=False)
        return cls(num_draft=m, min_match=n, max_match=n, grow=False)

    @classmethod
    def map_k(cls, preset: str = "code", **sizes: int) -> NGramMap:
        """llama.cpp's `ngram-map-k`, see `NGramMap`. Arguments as for `simple`."""
        n, m, _ = _sizes(preset, sizes, hits=False)
        return NGramMap(n=n, m=m)

    @classmethod
    def map_k4v(cls, preset: str = "code", **sizes: int) -> NGramMap:
        """llama.cpp's `ngram-map-k4v`, see `NGramMap`. Arguments as for `simple`, and `min_hits` (1, for text 2)."""
        n, m, min_hits = _sizes(preset, sizes, hits=True)
        return NGramMap(n=n, m=m, min_hits=min_hits, continuations=4)

    @classmethod
    def mod(cls, **settings: int) -> NGramMod:
        """llama.cpp's `ngram-mod` with its `--spec-default` sizes, see `NGramMod`."""
        return NGramMod(**settings)

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def proposal_length(self, match: int, sampled: bool = False) -> int:
        """Tokens proposed after an agreement of `match` tokens, to a greedy row or to one that samples."""
        if not self.grow:
            return self.num_draft if match >= self.min_match else 0
        if match < self.min_match + sampled:
            return 0
        return min(self.num_draft, 2 ** int(math.log2(2 * match)) - 1)

    def check(self, target: Target) -> None:
        pass

    def init(self, target: Target, batch: int, slots: int) -> None:
        return None

    def observe(self, target: Target, state: None, observation: Observation) -> None:
        return None

    def propose(self, target: Target, state: None, context: Context) -> tuple[Proposal, None]:
        end, match = longest_suffix_match(context.tokens, context.length, self.max_match)
        tokens = continuation(context.tokens, context.length, end, self.num_draft)
        lengths = jnp.asarray(
            [
                [self.proposal_length(m, sampled) for m in range(self.max_match + 1)]
                for sampled in (False, True)
            ],
            jnp.int32,
        )
        sampled = context.processors.sampled(context.length.shape[0]).astype(jnp.int32)
        agree = jnp.clip(match[:, None] + jnp.arange(self.num_draft), 0, len(AGREEMENT[0]) - 1)
        confidence = jnp.asarray(AGREEMENT, jnp.float32)[sampled[:, None], agree]
        return Proposal(tokens=tokens, length=lengths[sampled, match], confidence=confidence), None
