"""Drafts from a multi-token prediction module (DeepSeek-V3, arXiv 2412.19437)."""

from flax import struct

from specjax.drafters.eagle3 import Eagle3
from specjax.models.mtp import MTPHead
from specjax.models.transformer import Target


@struct.dataclass
class MTP(Eagle3):
    """A module drafts by recursion, just as an EAGLE-3 head does: its own output stands for the hidden state of the next
    row. After a round only rows with the target's true states stay in its cache.

    Attributes:
      head: an `MTPHead` for the target that it is used with; `num_draft` may exceed the number of tokens that it was
        trained to draft, at the price of acceptance.
    """

    head: MTPHead

    def check(self, target: Target) -> None:
        if not isinstance(self.head, MTPHead):
            raise ValueError(f"head must be an MTPHead, got {type(self.head).__name__}")
        super().check(target)
