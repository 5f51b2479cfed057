"""Small targets and drafters of every temper, for the laws."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx, struct
from jax import Array

from specjax.drafters.adaptive import Adaptive
from specjax.drafters.base import Context, Observation, Proposal
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.eagle3 import Eagle3
from specjax.drafters.early_exit import EarlyExit
from specjax.drafters.guard import Guard
from specjax.drafters.hybrid import Hybrid
from specjax.drafters.mtp import MTP
from specjax.drafters.ngram import NGram
from specjax.drafters.ngram_map import NGramMap
from specjax.drafters.ngram_mod import NGramMod
from specjax.drafters.p_eagle import PEagle
from specjax.drafters.suffix import Suffix
from specjax.drafters.tree import StaticTree, TopKTree
from specjax.models.config import (
    ClampedSwiGLU,
    Latent,
    LayerConfig,
    Rope,
    SigmoidRouter,
    TransformerConfig,
)
from specjax.models.eagle import EagleConfig, EagleHead
from specjax.models.mtp import MTPConfig, MTPHead
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


def tiny_deepseek(seed: int = 0, vocab_size: int = 61) -> Transformer:
    """A random transformer with what DeepSeek-V3 has: latent attention, a router of sigmoids in groups, a shared expert."""
    model = tiny_target(
        seed,
        vocab_size,
        family="deepseek_v3",
        layers=(LayerConfig(), LayerConfig(experts=True)),
        num_kv_heads=4,
        head_dim=14,
        rotary_dim=6,
        latent=Latent(query_rank=10, rank=12, content_dim=8, value_dim=9),
        router=SigmoidRouter(groups=3, kept=2),
        num_experts=6,
        experts_per_token=2,
        expert_size=24,
        expert_factor=1.5,
        shared_expert_size=48,
    )
    correction = model.layers[1].mlp.correction
    correction[...] = jax.random.normal(jax.random.key(seed), correction.shape)
    return model


def tiny_gpt_oss(seed: int = 0, vocab_size: int = 61) -> Transformer:
    """A random transformer with all that gpt-oss has: sinks, biases everywhere, clamped experts, alternating windows."""
    model = tiny_target(
        seed,
        vocab_size,
        family="gpt_oss",
        layers=(LayerConfig(window=9, experts=True), LayerConfig(experts=True)),
        ropes=(Rope(kind="yarn", factor=4.0, original_length=32, truncate=False),),
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        activation=ClampedSwiGLU(limit=1.0),
        num_experts=6,
        experts_per_token=2,
        expert_size=24,
        expert_bias=True,
    )
    keys = iter(jax.random.split(jax.random.key(seed), 100))

    def fill(path: Any, x: Array) -> Array:
        """Biases and sinks are born as zeros, which would hide mistakes."""
        zeros = any(name in jax.tree_util.keystr(path) for name in ("bias", "sinks"))
        return jax.random.normal(next(keys), x.shape, x.dtype) if zeros else x

    return jax.tree_util.tree_map_with_path(fill, model)


def tiny_head(
    target: Transformer,
    seed: int = 3,
    *,
    draft_vocab_size: int = 40,
    scale: float = 3.0,
    layers: tuple[LayerConfig, ...] = (LayerConfig(),),
    taps: tuple[int, ...] = (0, 1, 2),
    width: int | None = None,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    **switches,
) -> EagleHead:
    """A random head whose distributions are far from uniform; its draft ids are spread over the target's."""
    c = target.config
    config = EagleConfig(
        decoder=tiny_config(
            c.vocab_size,
            family="qwen3" if qk_norm else "llama",
            hidden_size=width or c.hidden_size,
            layers=layers,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
        ),
        target_hidden_size=c.hidden_size,
        draft_vocab_size=draft_vocab_size,
        taps=taps,
        own_embedding=width is not None,
        **switches,
    )
    head = EagleHead(config, rngs=nnx.Rngs(seed))
    head.readout.head[...] = scale * head.readout.head[...]
    if head.ids is not None:
        head.ids[...] = jnp.sort(
            jax.random.permutation(jax.random.key(seed), c.vocab_size)[:draft_vocab_size]
        ).astype(jnp.int32)
    return head


def tiny_mtp(
    target: Transformer,
    seed: int = 4,
    *,
    draft_vocab_size: int = 40,
    decoder: TransformerConfig | None = None,
    **switches,
) -> MTPHead:
    """A random MTP module of the target's kind; its draft ids are spread over the target's."""
    c = target.config
    own = replace(c, layers=(LayerConfig(experts=c.router is not None),), tied=False)
    config = MTPConfig(
        decoder=decoder or own,
        target_hidden_size=c.hidden_size,
        draft_vocab_size=draft_vocab_size,
        taps=(c.num_layers,),
        **switches,
    )
    head = MTPHead(config, rngs=nnx.Rngs(seed))
    head.readout.head[...] = 3.0 * head.readout.head[...]
    if config.post_norm:
        head.target_norm = target.norm
    if head.ids is not None:
        order = jax.random.permutation(jax.random.key(seed), c.vocab_size)
        head.ids[...] = jnp.sort(order[:draft_vocab_size]).astype(jnp.int32)
    return head


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
    lie: Array | int = 0

    def propose(self, target, state, context: Context) -> tuple[Proposal, None]:
        at = context.length[:, None] + jnp.arange(self.num_draft)
        last = self.answer.shape[1] - 1
        tokens = jnp.take_along_axis(self.answer, jnp.minimum(at, last), axis=1)
        lies = (self.lie > 0) & (at % jnp.maximum(self.lie, 1) == 0)
        tokens = jnp.where(lies, (tokens + 1) % target.vocab_size, tokens)
        length = jnp.full(context.length.shape, self.num_draft, jnp.int32)
        return Proposal(tokens=tokens, length=length), None


@struct.dataclass
class SilentDrafter(Stateless):
    """Never proposes anything."""

    def propose(self, target, state, context: Context) -> tuple[Proposal, None]:
        batch = context.length.shape[0]
        tokens = jnp.zeros((batch, self.num_draft), jnp.int32)
        return Proposal(tokens=tokens, length=jnp.zeros(batch, jnp.int32)), None


@struct.dataclass
class RandomTreeDrafter(Stateless):
    """Adversarial: random tokens out of a few, random parents, random lengths."""

    def propose(self, target, state, context: Context) -> tuple[Proposal, None]:
        size = self.num_draft

        def row(key):
            a, b, c = jax.random.split(key, 3)
            tokens = jax.random.randint(a, (size,), 0, target.vocab_size)
            parent = jax.random.randint(b, (size,), 0, jnp.arange(1, size + 1))
            return tokens, jax.random.randint(c, (), 0, size + 1), parent

        tokens, length, parent = jax.vmap(row)(stream(context.keys, DRAFT))
        return Proposal(tokens=tokens, length=length, parent=parent), None


# One of each kind: the laws are tried with these on every Python, with the others on one.
QUICK = ("ngram", "eagle3")


def grouped(*cases: Any) -> list:
    """Test parameters, a drafter's name or a tuple that begins with one: a worker takes all tests of a name, and compiles
    its programs once."""
    parameters = []
    for case in cases:
        case = case if isinstance(case, tuple) else (case,)
        marks = [pytest.mark.xdist_group(case[0])]
        if case[0] not in QUICK:
            marks.append(pytest.mark.thorough)
        parameters.append(pytest.param(*case, marks=marks))
    return parameters


def drafters(target: Transformer) -> dict[str, Any]:
    """One of each kind and temper, for a tiny target of two layers or more."""
    near = noisy(target, 0.05)
    ngram = NGram(num_draft=3, min_match=1)
    return {
        "ngram": NGram(num_draft=5, min_match=1),
        "ngram-map-k": NGramMap(n=1, m=3),
        "ngram-map-k4v": NGramMap(n=1, m=3, continuations=4),
        "ngram-mod": NGramMod(n=1, min_draft=1, max_draft=3, slots=1 << 10),
        "suffix": Suffix(num_draft=3, max_depth=4),
        "suffix-memory": Suffix(num_draft=3, memory_size=64).remember([range(9)]),
        "perfect-model": DraftModel(target, num_draft=4),
        "noisy-model": DraftModel(near, num_draft=3),
        "model-tree": DraftModel(near, tree=StaticTree((2, 2))),
        "model-top-k": DraftModel(near, tree=TopKTree(depth=3, top_k=2, num_nodes=5)),
        "eagle3": Eagle3(tiny_head(target), num_draft=3),
        "eagle3-single": Eagle3(tiny_head(target, draft_vocab_size=61), num_draft=1),
        "eagle3-deep": Eagle3(
            tiny_head(
                target,
                layers=(LayerConfig(window=6), LayerConfig()),
                fc_norm=True,
                norm_output=True,
                norm_before_residual=True,
            ),
            num_draft=4,
            min_confidence=0.08,
        ),
        "mtp": MTP(tiny_mtp(target), num_draft=3),
        "mtp-tree": MTP(tiny_mtp(target, post_norm=False), tree=StaticTree((2, 1))),
        "p-eagle": PEagle(tiny_head(target, mask_token_id=60), num_draft=4),
        "p-eagle-deep": PEagle(
            tiny_head(
                target, layers=(LayerConfig(), LayerConfig(window=9)), mask_token_id=2, fc_norm=True
            ),
            num_draft=3,
        ),
        "eagle3-tree": Eagle3(tiny_head(target), tree=StaticTree((2, 2))),
        "eagle3-top-k": Eagle3(tiny_head(target), tree=TopKTree(depth=3, top_k=3, num_nodes=9)),
        "early-exit": EarlyExit(1, num_draft=3),
        "skip": EarlyExit(skip=(1,), num_draft=2),
        "skip-first": EarlyExit(skip=(0,), num_draft=3, min_confidence=0.1),
        "early-exit-top-k": EarlyExit(1, tree=TopKTree(depth=2, top_k=2, num_nodes=4)),
        "hybrid-first": Hybrid((ngram, DraftModel(near, num_draft=3, min_confidence=0.5))),
        "hybrid-gain": Hybrid((ngram, EarlyExit(1, num_draft=2)), choose="gain"),
        "hybrid-mtp": Hybrid((ngram, MTP(tiny_mtp(target), num_draft=2))),
        "hybrid-mixed": Hybrid((ngram, DraftModel(near, tree=StaticTree((2, 1))))),
        # more tokens may be accepted in a round than the second member's rows have room to wait
        "hybrid-p-eagle": Hybrid(
            (
                NGram(num_draft=7, min_match=1),
                PEagle(tiny_head(target, mask_token_id=1), num_draft=3),
            )
        ),
        "hybrid-tree": Hybrid((ngram, Suffix(num_draft=3)), choose="tree"),
        "adaptive": Adaptive(ngram, probe=3),
        "adaptive-model": Adaptive(DraftModel(near, num_draft=3), draft_cost=0.5, probe=3),
        "adaptive-hybrid": Adaptive(Hybrid((ngram, DraftModel(near, num_draft=2)))),
        "guard": Guard(DraftModel(tiny_target(5, target.vocab_size), num_draft=2), after=8),
        "random": RandomDrafter(num_draft=6),
        "random-tree": RandomTreeDrafter(num_draft=5),
    }
