"""Small targets and drafters of every temper, for the laws."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import Array

from specjax.drafters.base import Context, Observation, Proposal
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.models.config import LayerConfig, Rope, TransformerConfig
from specjax.models.transformer import Output, Transformer
from specjax.sampling import DRAFT, stream


def tiny_config(vocab_size: int = 61, **changes) -> TransformerConfig:
    fields: dict[str, Any] = {
        "family": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "mlp_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "layers": (LayerConfig(), LayerConfig(window=9)),
        "ropes": (Rope(),),
        "context_length": 2048,
    }
    return TransformerConfig(**(fields | changes))


def tiny_target(seed: int = 0, vocab_size: int = 61, scale: float = 3.0, **changes) -> Transformer:
    """A random transformer whose next-token distributions are far from uniform."""
    model = Transformer(tiny_config(vocab_size, **changes), rngs=nnx.Rngs(seed))
    model.head[...] = scale * model.head[...]
    return model


def noisy(model: Transformer, noise: float, seed: int = 7) -> Transformer:
    """The same model with its weights disturbed: a draft that is right now and then."""
    leaves, structure = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    leaves = [
        x + noise * jnp.std(x) * jax.random.normal(k, x.shape, x.dtype)
        for k, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


@struct.dataclass
class LengthCache:
    """All that a model without memory must remember."""

    length: Array

    def commit(self, block: "NoBlock", count: Array, path: Array | None = None) -> "LengthCache":
        return self.replace(length=self.length + count)

    def rewind(self, length: Array) -> "LengthCache":
        return self.replace(length=length)


@struct.dataclass
class NoBlock:
    """What it adds per pass: nothing."""

    def pad(self, width: int) -> "NoBlock":
        return self


@struct.dataclass
class Bigram:
    """A stranger's target: not a Flax module, no keys and values; the next token depends on the last one alone.

    Attributes:
      table: float32[V, V], logits of the next token.
    """

    table: Array

    @property
    def vocab_size(self) -> int:
        return self.table.shape[1]

    @property
    def context_length(self) -> int:
        return 4096

    def init_cache(self, batch: int, slots: int) -> LengthCache:
        return LengthCache(length=jnp.zeros(batch, jnp.int32))

    def __call__(self, tokens, positions, cache, mask=None, *, taps=()) -> Output:
        empty = jnp.zeros((*tokens.shape, len(taps), 1))
        return Output(logits=self.table[tokens], taps=empty, block=NoBlock())


def bigram(seed: int, vocab_size: int, scale: float = 1.5) -> Bigram:
    return Bigram(table=scale * jax.random.normal(jax.random.key(seed), (vocab_size, vocab_size)))


@struct.dataclass
class Stateless:
    """What drafters without a state share."""

    num_draft: int = struct.field(pytree_node=False, default=4)

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def check(self, target) -> None:
        pass

    def init(self, target, batch: int, slots: int) -> None:
        return None

    def observe(self, target, state, observation: Observation) -> None:
        return None


@struct.dataclass
class RandomDrafter(Stateless):
    """Adversarial: random tokens, random lengths, none included."""

    def propose(self, target, state, context: Context) -> tuple[Proposal, None]:
        def row(key):
            a, b = jax.random.split(key)
            tokens = jax.random.randint(a, (self.num_draft,), 0, target.vocab_size)
            return tokens, jax.random.randint(b, (), 0, self.num_draft + 1)

        tokens, length = jax.vmap(row)(stream(context.keys, DRAFT))
        return Proposal(tokens=tokens, length=length), None


@struct.dataclass
class ReplayDrafter(Stateless):
    """Knows the answer, int32[B, L] prompt included, and lies at every `lie`-th position (0: never)."""

    answer: Array = struct.field(default=None)  # pyright: ignore
    lie: int = struct.field(pytree_node=False, default=0)

    def propose(self, target, state, context: Context) -> tuple[Proposal, None]:
        at = context.length[:, None] + jnp.arange(self.num_draft)
        last = self.answer.shape[1] - 1
        tokens = jnp.take_along_axis(self.answer, jnp.minimum(at, last), axis=1)
        if self.lie:
            tokens = jnp.where(at % self.lie == 0, (tokens + 1) % target.vocab_size, tokens)
        length = jnp.full(context.length.shape, self.num_draft, jnp.int32)
        return Proposal(tokens=tokens, length=length), None


def drafters(target: Transformer) -> dict[str, Any]:
    """One of each temper, for a tiny target."""
    return {
        "ngram": NGram(num_draft=5, min_match=1),
        "ngram-long": NGram(num_draft=9, min_match=2),
        "perfect-model": DraftModel(target, num_draft=4),
        "noisy-model": DraftModel(noisy(target, 0.05), num_draft=3),
        "wrong-model": DraftModel(tiny_target(5, target.vocab_size), num_draft=2),
        "single": DraftModel(noisy(target, 0.05), num_draft=1),
        "random": RandomDrafter(num_draft=6),
    }
