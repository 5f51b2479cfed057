"""Self-speculation: some of the target's own layers draft, all of them verify.

B rows, N drafted tokens, W = N + 1 nodes of a block, L layers, D width.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.drafters.base import Context, Observation, Proposal
from specjax.drafters.chain import check_draft_length, draft_chain, propose_chain
from specjax.drafters.tree import StaticTree, TopKTree, grow
from specjax.models.cache import Block
from specjax.models.transformer import Reuse, Target, Transformer


@struct.dataclass
class EarlyExit:
    """Drafts with the first layers of the target, its final norm and its head, less those that are skipped.

    LayerSkip (Elhoushi et al., arXiv 2404.16710): nothing of the target's cache is copied, and the layers below the first
    one that is left out are not run again by the target's pass, which takes over their keys, values and hidden states.
    Skipping layers in the middle is SWIFT's and Draft & Verify's way (arXiv 2410.06916, 2309.08168; whole layers here,
    not halves of them): drafted tokens see approximate keys above the first skipped layer, the target never does.

    How well this works depends on the model: without LayerSkip's training the first layers' guesses are poor.
    `scripts/search_layers.py` measures what suits a model and prompts.

    Attributes:
      num_layers: E, the layers that draft; None is all of them, for use with `skip`.
      num_draft: N, tokens proposed at most.
      skip: layers below E that are left out.
      min_confidence: a proposal ends before the first token whose likeliest value has less than this probability.
      tree: drafts a tree in place of a chain; `num_draft` is then its number of nodes. The target's pass runs all layers
        then: leaves were not passed over, and the nodes it verifies lie in another order.
    """

    num_layers: int | None = struct.field(pytree_node=False, default=None)
    num_draft: int = struct.field(pytree_node=False, default=3)
    skip: tuple[int, ...] = struct.field(pytree_node=False, default=())
    min_confidence: float = struct.field(pytree_node=False, default=0.0)
    tree: StaticTree | TopKTree | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self):
        if self.tree is not None:
            object.__setattr__(self, "num_draft", self.tree.num_nodes)
        check_draft_length(self.num_draft, self.min_confidence)
        if self.num_layers is None and not self.skip:
            raise ValueError("num_layers must be given, or layers to skip; got neither")
        if self.num_layers is not None and self.num_layers < 1:
            raise ValueError(f"num_layers must be >= 1, got {self.num_layers}")
        object.__setattr__(self, "skip", tuple(sorted({int(i) for i in self.skip})))

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def layers(self, target: Transformer) -> tuple[int, ...]:
        """The target's layers that draft."""
        count = target.config.num_layers if self.num_layers is None else self.num_layers
        return tuple(i for i in range(count) if i not in self.skip)

    def check(self, target: Target) -> None:
        if not isinstance(target, Transformer):
            raise ValueError(
                f"EarlyExit runs layers of a specjax Transformer, got {type(target).__name__}"
            )
        count = target.config.num_layers
        if self.num_layers is not None and self.num_layers > count:
            raise ValueError(
                f"num_layers must be in 1..{count}, the target's, got {self.num_layers}"
            )
        bad = [i for i in self.skip if not 0 <= i < (self.num_layers or count)]
        if bad:
            raise ValueError(
                f"skip must name layers in 0..{(self.num_layers or count) - 1}, got {bad}"
            )
        if not self.layers(target):
            raise ValueError(f"skip leaves no layer to draft with, got {self.skip}")

    def init(self, target: Target, batch: int, slots: int) -> None:
        return None

    def observe(self, target: Target, state: None, observation: Observation) -> None:
        return None

    def propose(self, target: Target, state: None, context: Context) -> tuple[Proposal, None]:
        assert isinstance(target, Transformer)  # `check` has seen to it
        if self.tree is not None:
            return self._propose_tree(target, context), None
        batch, width = context.length.shape[0], self.num_draft + 1
        layers = self.layers(target)
        shared = next((n for n, i in enumerate(layers) if n != i), len(layers))
        base = context.length[:, None] - 1
        places = base + jnp.arange(width)

        def part(block: Block, first: int, last: int) -> Block:
            return replace(block, keys=block.keys[first:last], values=block.values[first:last])

        def run(block: Block, x: Array, index: Array, first: int, last: int):
            """The stream of one more token of the block through the first..last of the drafting layers."""
            return target.run(
                x,
                base + index,
                context.cache,
                (jnp.arange(width) <= index)[None],
                layers=layers[first:last],
                prior=part(block, first, last),
                at=index,
                key_positions=places,
            )[:2]

        def below(carry: tuple[Block, Array], token: Array, index: Array):
            """Through the layers that the target need not run again."""
            block, hidden = carry
            x, new = run(block, target.embed(token[:, None]), index, 0, shared)
            block = replace(
                block,
                keys=(*new.keys, *block.keys[shared:]),
                values=(*new.values, *block.values[shared:]),
            )
            hidden = jax.lax.dynamic_update_slice_in_dim(hidden, x, index, 1)
            return (block, hidden), x

        def step(carry, token: Array, index: Array):
            (block, hidden), x = below(carry, token, index)
            if shared < len(layers):
                x, new = run(block, x, index, shared, len(layers))
                block = replace(
                    block,
                    keys=(*block.keys[:shared], *new.keys),
                    values=(*block.values[:shared], *new.values),
                )
            return (block, hidden), target.logits(x)[:, 0]

        newest = jnp.take_along_axis(context.tokens, base, axis=1)[:, 0]
        hidden = jnp.zeros((batch, width, target.config.hidden_size), target.dtype)
        carry = (target.empty_block(batch, width, layers), hidden)
        carry, first = step(carry, newest, jnp.int32(0))
        draft, carry = draft_chain(first, step, carry, context, self.num_draft, self.min_confidence)
        length = jnp.full(batch, self.num_draft, jnp.int32)
        if not shared:
            return propose_chain(draft, length, self.min_confidence), None
        (block, hidden), _ = below(carry, draft.tokens[:, -1], jnp.int32(self.num_draft))
        reuse = Reuse(hidden=hidden, keys=block.keys[:shared], values=block.values[:shared])
        return propose_chain(draft, length, self.min_confidence, reuse=reuse), None

    def _propose_tree(self, target: Transformer, context: Context) -> Proposal:
        assert self.tree is not None
        batch, slots = context.length.shape[0], self.tree.slots
        layers = self.layers(target)
        base = context.length[:, None] - 1

        def extend(carry, tokens: Array, depth: int, at: int, mask: Array, above=None):
            block, places = carry
            here = jnp.broadcast_to(base + depth, tokens.shape)
            places = jax.lax.dynamic_update_slice_in_dim(places, here, at, 1)
            x, block, _ = target.run(
                target.embed(tokens),
                here,
                context.cache,
                mask,
                layers=layers,
                prior=block,
                at=at,
                key_positions=places,
            )
            return (block, places), target.logits(x)

        newest = jnp.take_along_axis(context.tokens, base, axis=1)
        carry = (target.empty_block(batch, slots, layers), jnp.zeros((batch, slots), jnp.int32))
        root = jnp.broadcast_to(jnp.arange(slots) == 0, (batch, 1, slots))
        carry, first = extend(carry, newest, 0, 0, root)
        return grow(self.tree, first[:, 0], extend, carry, context)[0]
