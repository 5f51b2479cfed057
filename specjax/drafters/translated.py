"""A draft model over other tokens than the target's.

B rows, T tokens, V the target's vocabulary, Vd the draft's.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.checkpoints.vocabulary import shared_tokens
from specjax.models.transformer import Output, Target


@struct.dataclass
class TranslatedModel:
    """A model that reads and writes another model's token ids.

    Tokens are translated one by one by their texts; the model can only propose what both vocabularies have, and reads a
    stand-in for tokens that it lacks. Its distribution is what is left after that, so acceptance stays exact, sampled or
    greedy (TLI, arXiv 2502.05202). How much is left is `coverage`.

    Attributes:
      model: the draft's.
      to_draft: int32[V], the model's id of each of the target's tokens; -1 where it has none.
      stand_in: what it reads in place of those.
    """

    model: Any
    to_draft: Array
    stand_in: int = struct.field(pytree_node=False, default=0)

    @property
    def vocab_size(self) -> int:
        return self.to_draft.shape[0]

    @property
    def context_length(self) -> int:
        return self.model.context_length

    @property
    def coverage(self) -> float:
        """Share of the target's vocabulary that the model can propose."""
        return float(np.mean(np.asarray(self.to_draft) >= 0))

    def init_cache(self, batch: int, slots: int) -> Any:
        return self.model.init_cache(batch, slots)

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        cache: Any,
        mask: Array | None = None,
        *,
        taps: tuple[int, ...] = (),
    ) -> Output:
        own = jnp.take(self.to_draft, tokens, mode="clip")
        own = jnp.where(own >= 0, own, self.stand_in)
        output = self.model(own, positions, cache, mask, taps=taps)
        logits = jnp.take(output.logits, jnp.maximum(self.to_draft, 0), axis=-1)
        return output.replace(logits=jnp.where(self.to_draft >= 0, logits, -jnp.inf))


def translate(draft: Any, target: Target) -> TranslatedModel:
    """`draft` as a model over the target's tokens, for `DraftModel`, by the texts of the two tokenizers.

    Args:
      draft, target: models that were loaded from checkpoints with a tokenizer.

    Raises:
      ValueError: a model without a source, or vocabularies with nothing in common.
    """
    sources = {
        name: getattr(model, "source", None)
        for name, model in (("draft", draft), ("target", target))
    }
    if missing := [name for name, source in sources.items() if source is None]:
        raise ValueError(
            f"translation goes by the texts of two tokenizers; the {' and the '.join(missing)} "
            "was not loaded from a checkpoint"
        )
    to_draft, _ = shared_tokens(str(sources["target"]), str(sources["draft"]))
    spare = max(target.vocab_size - len(to_draft), 0)
    to_draft = np.pad(to_draft, (0, spare), constant_values=-1)[: target.vocab_size]
    to_draft = np.where(to_draft < draft.vocab_size, to_draft, -1)
    return TranslatedModel(model=draft, to_draft=jnp.asarray(to_draft))
