"""The tokenizer that a GGUF file's metadata describes, rebuilt with the `tokenizers` library.

A GGUF file holds a vocabulary and the name of a way to cut text, but no tokenizer.json. Tests hold
what is built here against llama.cpp, for which these files are made. transformers builds some of
them differently: it cuts by GPT-2's rule where it does not know `tokenizer.ggml.pre` ("smollm":
digits stick to spaces), puts SentencePiece's leading space before the first piece of text alone and
even where the file forbids it, and misses control tokens not written in byte-level letters.
llama.cpp is right there: it does what the original tokenizers do. Where it departs from those
(Qwen2's accents, Phi-3's control tokens, combining marks in "tekken" and "gpt-4o"), they rule here.
"""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from specjax.checkpoints.gguf_header import read_header
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.checkpoints.weights import CheckpointError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # llama.cpp's token types

# Where text is cut before byte-pair merging.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _WORDS % ("", "") + r"|\p{N}" + _REST
GPT4O = _WORDS % (("(?i:'s|'t|'re|'ve|'m|'ll|'d)?",) * 2) + r"|\p{N}{1,3}" + _REST

SPLITS = {  # by the file's `tokenizer.ggml.pre`
    "gpt-2": GPT2,
    **dict.fromkeys(("smollm", "starcoder", "refact"), GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "tekken": TEKKEN,
    "gpt-4o": GPT4O,
}
SINGLE_DIGITS = ("smollm", "starcoder", "refact")  # every digit is cut off before that
# A piece that is a token stays whole, whether or not the merges lead there; and texts begin with
# the begin token unless the file says otherwise.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")

NAMED = {
    "bos": "ggml.bos_token_id",
    "eos": "ggml.eos_token_id",
    "eot": "ggml.eot_token_id",
    "eom": "ggml.eom_token_id",
    "unk": "ggml.unknown_token_id",
    "pad": "ggml.padding_token_id",
}
# Many files name only one end; these tokens end a turn in whichever vocabulary they occur.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`) tokenizers.

    Raises:
      CheckpointError: no tokenizer in the file, a damaged one, or an unsupported kind.
    """
    metadata, _ = read_header(path)
    try:
        return _build(metadata)
    except Exception as error:  # the library raises plain Exceptions
        raise CheckpointError(f"{path}: not a usable tokenizer: {error}") from error


def _build(metadata: dict[str, Any]) -> Tokenizer:
    meta = {
        name.removeprefix("tokenizer."): value
        for name, value in metadata.items()
        if name.startswith("tokenizer.")
    }
    tokens, types = _check(meta)
    sentencepiece = meta["ggml.model"] == "llama"
    named = {"unk": 0, "bos": 1, "eos": 2} if sentencepiece else {}
    named |= {name: meta[key] for name, key in NAMED.items() if key in meta}
    named = {name: i for name, i in named.items() if i < len(tokens)}  # some files write 2**32 - 1
    encoder = _sentencepiece(meta, named.get("unk", 0)) if sentencepiece else _byte_pair(meta)

    special = {tokens[named[name]] for name in ("bos", "eos", "eot", "eom") if name in named}
    special |= {t for t, type_ in zip(tokens, types, strict=True) if type_ in (UNKNOWN, CONTROL)}
    special |= set(TURN_ENDS).intersection(tokens)
    # Phi-3's tokenizer swallows white space after its control tokens; the file does not say so.
    phi3 = sentencepiece and metadata.get("general.architecture") == "phi3"
    encoder.add_tokens(
        [
            AddedToken(
                token,
                special=token in special,
                normalized=False,
                rstrip=phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for token, type_ in zip(tokens, types, strict=True)
            if token in special or type_ == USER_DEFINED
        ]
    )
    _add_ends(encoder, meta, named)
    stops = [named[name] for name in ("eos", "eot", "eom") if name in named]
    stops += [tokens.index(token) for token in TURN_ENDS if token in special]
    return Tokenizer(
        encoder,
        chat_templates={
            name.removeprefix("chat_template").removeprefix(".") or "default": value
            for name, value in meta.items()
            if name == "chat_template" or name.startswith("chat_template.")
        },
        stop_token_ids=tuple(dict.fromkeys(stops)),
        special_tokens={
            f"{name}_token": tokens[i] for name, i in named.items() if name not in ("eot", "eom")
        },
    )


def _check(meta: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The tokens and their types, after refusing what cannot be built."""
    kind, pre = meta.get("ggml.model"), meta.get("ggml.pre")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model must be gpt2 or llama, got {kind!r}")
    if kind == "gpt2" and pre not in SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre must be one of {', '.join(sorted(SPLITS))}; got {pre!r}"
        )
    needed = ("ggml.tokens", "ggml.merges" if kind == "gpt2" else "ggml.scores")
    if missing := [f"tokenizer.{name}" for name in needed if name not in meta]:
        raise ValueError(f"{' and '.join(missing)} must be in the file")
    tokens = meta["ggml.tokens"]
    types = meta.get("ggml.token_type", [1] * len(tokens))
    scores = meta.get("ggml.scores", types)  # byte-level files need none
    if not 0 < len(set(tokens)) == len(tokens) == len(types) == len(scores):
        raise ValueError(
            f"tokenizer.ggml.tokens must be distinct and as many as types and scores, got "
            f"{len(tokens)} tokens ({len(set(tokens))} distinct), {len(types)} types and "
            f"{len(scores)} scores"
        )
    return tokens, types


def _byte_pair(meta: dict[str, Any]) -> tokenizers.Tokenizer:
    pre = meta["ggml.pre"]
    vocabulary = {token: i for i, token in enumerate(meta["ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in meta["ggml.merges"]]
    encoder = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in WHOLE_WORDS)
    )
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in SINGLE_DIGITS else []
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *digits,
            pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    encoder.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        # In Qwen2's own tokenizer.json. Neither llama.cpp nor transformers' reading of GGUF does
        # it; they depart from the model's training on text with decomposed accents.
        encoder.normalizer = normalizers.NFC()
    return encoder


def _sentencepiece(meta: dict[str, Any], unknown: int) -> tokenizers.Tokenizer:
    """SentencePiece's BPE merges the adjacent pair whose union scores highest: as ranked merges.

    Equal scores of different tokens, which its trainer does not write, are broken by id here and by
    place in the text there.
    """
    tokens = meta["ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for token, score in zip(tokens, meta["ggml.scores"], strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    encoder = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = meta.get("ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    encoder.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    encoder.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return encoder


def _add_ends(encoder: tokenizers.Tokenizer, meta: dict[str, Any], named: dict[str, int]) -> None:
    """The begin and end tokens that the file asks for around every text."""
    tokens, template, used = meta["ggml.tokens"], ["$A"], []
    begins = meta["ggml.model"] == "llama" or meta["ggml.pre"] in WHOLE_WORDS
    if meta.get("ggml.add_bos_token", begins) and "bos" in named:
        template.insert(0, tokens[named["bos"]])
        used.append((tokens[named["bos"]], named["bos"]))
    if meta.get("ggml.add_eos_token", False) and "eos" in named:
        template.append(tokens[named["eos"]])
        used.append((tokens[named["eos"]], named["eos"]))
    if used:
        encoder.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(dict.fromkeys(used))
        )
