"""Which drafter a trained head belongs to."""

from dataclasses import replace

from specjax.drafters.eagle3 import Eagle3
from specjax.drafters.mtp import MTP
from specjax.drafters.p_eagle import PEagle
from specjax.models.eagle import EagleHead
from specjax.models.heads import Head
from specjax.models.mtp import MTPHead


def head_drafter(head: Head, num_draft: int | None = None) -> Eagle3 | PEagle:
    """`Eagle3`, `PEagle` or `MTP` with a head, as `load_head` returns it.

    Args:
      head: of any kind.
      num_draft: tokens to draft; None takes the drafter's usual number, or what the head was trained for if that is less.
    """
    if isinstance(head, MTPHead):
        drafter = MTP(head)
    elif isinstance(head, EagleHead) and head.config.mask_token_id is not None:
        drafter = PEagle(head)
    else:
        drafter = Eagle3(head)
    if num_draft is None:
        num_draft = min(drafter.num_draft, head.config.trained_depth or drafter.num_draft)
    return replace(drafter, num_draft=num_draft)
