"""Whether two models mean the same texts by the same token ids, and which ids mean the same where they do not."""

from functools import cache
from typing import Any

import numpy as np

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


def shared_tokens(target: str, draft: str) -> tuple[np.ndarray, np.ndarray]:
    """Which ids of two tokenizers mean the same text: the intersection that heterogeneous drafting works with
    (arXiv 2502.05202, TLI).

    Args:
      target, draft: sources of the tokenizers.

    Returns:
      to_draft: int32[V target], the draft's id for each of the target's tokens, -1 where it has none.
      to_target: int32[V draft], the other way round.

    Raises:
      ValueError: no token in common.
    """
    ours, theirs = (load_tokenizer(source).token_texts() for source in (target, draft))
    ours, theirs = _surfaces(ours), _surfaces(theirs)
    index = {text: i for i, text in reversed(list(enumerate(theirs))) if text is not None}
    to_draft = np.full(len(ours), -1, np.int32)
    to_target = np.full(len(theirs), -1, np.int32)
    for i, text in enumerate(ours):
        j = index.get(text, -1) if text is not None else -1
        if j >= 0 and to_target[j] < 0:
            to_draft[i], to_target[j] = j, i
    if (to_draft < 0).all():
        raise ValueError(f"the tokenizers of {target} and {draft} have no token in common")
    return to_draft, to_target


@cache
def _byte_of_character() -> dict[str, int]:
    """The printable stand-ins of byte-level tokenizers."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def _surfaces(texts: list[str | None]) -> list[bytes | None]:
    """Vocabulary entries as the bytes that they stand for, so that tokenizers of different kinds can be compared."""
    byte_level = sum(text is not None and "\u0120" in text for text in texts)
    spaced = sum(text is not None and "\u2581" in text for text in texts)
    known = _byte_of_character()

    def surface(text: str | None) -> bytes | None:
        if text is None:
            return None
        if byte_level > spaced:
            if all(c in known for c in text):
                return bytes(known[c] for c in text)
            return text.encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()

    return [surface(text) for text in texts]
