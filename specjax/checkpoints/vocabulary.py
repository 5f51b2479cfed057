"""Whether two models mean the same texts by the same token ids."""

from typing import Any

from specjax.checkpoints.tokenizer import load_tokenizer


def check_same_tokens(target: Any, draft: Any) -> None:
    """Refuses a draft model over other tokens than the target's.

    Models loaded from checkpoints remember their source; where both have a tokenizer there, the
    texts of the ids that both know are compared: one vocabulary may be longer, as families pad
    theirs differently. Without texts, equal vocabulary sizes are taken on trust and unequal ones
    refused.

    Args:
      target: a model with a `vocab_size`, and a `source` where it was loaded from one.
      draft: likewise.

    Raises:
      ValueError: the vocabularies differ, or cannot be compared.
    """
    ours, theirs = getattr(target, "source", None), getattr(draft, "source", None)
    sizes = f"{target.vocab_size} for the target and {draft.vocab_size} for the draft"
    if ours is not None and ours == theirs:
        return
    texts = [_texts(source) for source in (ours, theirs)]
    if texts[0] is None or texts[1] is None:
        if target.vocab_size == draft.vocab_size:
            return
        raise ValueError(
            f"a draft model needs the target's vocabulary, got sizes {sizes}, "
            "and no tokenizers to show that the shared ids mean the same texts"
        )
    different = [
        (i, a, b)
        for i, (a, b) in enumerate(zip(*texts, strict=False))
        if a != b and a is not None and b is not None
    ]
    if different:
        i, a, b = different[0]
        raise ValueError(
            f"a draft model needs the target's vocabulary, but {len(different)} ids mean other "
            f"texts (sizes {sizes}): the first is {i}, {a!r} to the target and {b!r} to the draft"
        )


def _texts(source: str | None) -> list[str | None] | None:
    if source is None:
        return None
    try:
        texts = load_tokenizer(source).token_texts()
    except (OSError, ValueError):
        return None
    # GGUF writes a space in SentencePiece's user-defined tokens as it is, tokenizer.json as "▁"
    return [text and text.replace(" ", "▁") for text in texts]
