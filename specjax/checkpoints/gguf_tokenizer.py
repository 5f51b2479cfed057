"""The tokenizer that a GGUF file's metadata describes, rebuilt with the `tokenizers` library."""

from pathlib import Path
from typing import Any

import gguf
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Encoder,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from specjax.checkpoints.tokenizer import Tokenizer
from specjax.checkpoints.weights import CheckpointError

CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # llama.cpp's token types

# How text is cut before byte-pair merging, by the file's `tokenizer.ggml.pre`.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(use_regex=False)]
    )


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]
    )


PRE_TOKENIZERS = {
    "gpt-2": lambda: _byte_level(use_regex=True),
    "smollm": _digits,
    "llama-bpe": lambda: _split(LLAMA3_SPLIT),
    "qwen2": lambda: _split(QWEN2_SPLIT),
}


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`) tokenizers.

    Raises:
      CheckpointError: no tokenizer in the file, or an unsupported kind.
    """
    try:
        reader = gguf.GGUFReader(path)
        meta: dict[str, Any] = {
            name.removeprefix("tokenizer."): field.contents()
            for name, field in reader.fields.items()
            if name.startswith("tokenizer.")
        }
    except (ValueError, KeyError, IndexError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: truncated or not a GGUF file: {error}") from error
    kind = meta.get("ggml.model")
    if kind == "gpt2":
        encoder = _byte_pair(path, meta)
    elif kind == "llama":
        encoder = _sentencepiece(meta)
    else:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model must be gpt2 or llama, got {kind!r}"
        )
    tokens = meta["ggml.tokens"]
    types = meta.get("ggml.token_type") or [1] * len(tokens)
    encoder.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == CONTROL
        ]
    )
    encoder.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == USER_DEFINED
        ]
    )
    _add_ends(encoder, meta)
    special = {
        f"{name}_token": tokens[meta[key]]
        for name, key in (
            ("bos", "ggml.bos_token_id"),
            ("eos", "ggml.eos_token_id"),
            ("unk", "ggml.unknown_token_id"),
            ("pad", "ggml.padding_token_id"),
        )
        if key in meta
    }
    stops = [meta[k] for k in ("ggml.eos_token_id", "ggml.eot_token_id") if k in meta]
    stops += [i for i, t in enumerate(tokens) if t in ("<end_of_turn>", "<|eot_id|>", "<|im_end|>")]
    return Tokenizer(
        encoder,
        chat_template=meta.get("chat_template"),
        stop_token_ids=tuple(dict.fromkeys(int(i) for i in stops)),
        special_tokens=special,
    )


def _byte_pair(path: Path, meta: dict[str, Any]) -> Encoder:
    pre = meta.get("ggml.pre", "gpt-2")
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre must be one of {', '.join(PRE_TOKENIZERS)}; got {pre!r}"
        )
    vocabulary = {token: i for i, token in enumerate(meta["ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in meta["ggml.merges"]]
    encoder = Encoder(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    encoder.pre_tokenizer = PRE_TOKENIZERS[pre]()
    encoder.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        encoder.normalizer = normalizers.NFC()
    return encoder


def _sentencepiece(meta: dict[str, Any]) -> Encoder:
    """SentencePiece's BPE merges the adjacent pair whose union scores highest: as ranked merges."""
    tokens, scores = meta["ggml.tokens"], meta["ggml.scores"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for i, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[i], vocabulary[left], vocabulary[right], left, right))
    merges = [(left, right) for *_, left, right in sorted(ranked, key=lambda r: r[:3])]
    unknown = tokens[meta.get("ggml.unknown_token_id", 0)]
    encoder = Encoder(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = meta.get("ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    encoder.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    encoder.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return encoder


def _add_ends(encoder: Encoder, meta: dict[str, Any]) -> None:
    """The begin and end tokens that the file asks for around every text."""
    tokens, single, pair, used = meta["ggml.tokens"], ["$A"], ["$A", "$B"], []
    default = meta.get("ggml.model") == "llama"
    if meta.get("ggml.add_bos_token", default) and "ggml.bos_token_id" in meta:
        bos = tokens[meta["ggml.bos_token_id"]]
        single, pair = [bos, *single], [bos, *pair]
        used.append((bos, meta["ggml.bos_token_id"]))
    if meta.get("ggml.add_eos_token", False) and "ggml.eos_token_id" in meta:
        eos = tokens[meta["ggml.eos_token_id"]]
        single, pair = [*single, eos], [*pair, eos]
        used.append((eos, meta["ggml.eos_token_id"]))
    if used:
        encoder.post_processor = processors.TemplateProcessing(
            single=" ".join(single), pair=" ".join(pair), special_tokens=used
        )
