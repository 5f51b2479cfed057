"""The tokenizer that a GGUF file's metadata describes, rebuilt with the `tokenizers` library.

A GGUF file holds a vocabulary and the name of a way to cut text, but no tokenizer.json. Tests hold
what is built here against llama.cpp, for which these files are made. transformers builds some of
them differently: it cuts by GPT-2's rule where it does not know `tokenizer.ggml.pre` ("smollm":
digits stick to spaces, which no merge was learned for), puts SentencePiece's leading space before
the first piece of text alone, drops control tokens that are not written in byte-level letters, and
keeps Phi-3's line breaks after control tokens. llama.cpp, or the model's own tokenizer.json where
that is known to differ from it (Qwen2, Phi-3), is what the models were trained with.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import (
    Tokenizer as Encoder,
)

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
    metadata = read_metadata(path)
    meta = {
        name.removeprefix("tokenizer."): value
        for name, value in metadata.items()
        if name.startswith("tokenizer.")
    }
    kind = meta.get("ggml.model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{path}: tokenizer.ggml.model must be gpt2 or llama, got {kind!r}")
    pre = meta.get("ggml.pre")
    if kind == "gpt2" and pre not in SPLITS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre must be one of {', '.join(sorted(SPLITS))}; got {pre!r}"
        )
    tokens = meta.get("ggml.tokens", [])
    count = len(tokens)
    types = meta.get("ggml.token_type", [1] * count)
    scores = meta.get("ggml.scores", [0.0] * count)
    if not count or len(set(tokens)) != count or len(types) != count or len(scores) != count:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens, token_type and scores must be of one length and the "
            f"tokens distinct, got {count} tokens ({len(set(tokens))} distinct), {len(types)} types "
            f"and {len(scores)} scores"
        )
    ids = {"unk": 0, "bos": 1, "eos": 2} if kind == "llama" else {}
    ids |= {name: meta[key] for name, key in NAMED.items() if key in meta}
    ids = {name: i for name, i in ids.items() if i < count}  # llama.cpp too ignores wild ones
    try:
        if kind == "gpt2":
            encoder = _byte_pair(meta)
        else:
            encoder = _sentencepiece(tokens, scores, ids["unk"], meta)
    except Exception as error:  # the library raises plain Exceptions
        raise CheckpointError(f"{path}: not a usable tokenizer: {error!r}") from error

    special = {tokens[ids[name]] for name in ("bos", "eos", "eot", "eom") if name in ids}
    special |= {t for t, type_ in zip(tokens, types, strict=True) if type_ in (UNKNOWN, CONTROL)}
    special |= {t for t in TURN_ENDS if t in tokens}
    # Phi-3's tokenizer swallows white space after its control tokens, of which the file says nothing.
    phi3 = kind == "llama" and metadata.get("general.architecture") == "phi3"
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
    _add_ends(encoder, tokens, ids, meta, kind == "llama" or pre in WHOLE_WORDS)
    stops = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    stops += [tokens.index(token) for token in TURN_ENDS if token in special]
    templates = {"default": meta["chat_template"]} if "chat_template" in meta else {}
    for name, value in meta.items():
        if name.startswith("chat_template."):
            templates[name.removeprefix("chat_template.")] = value
    return Tokenizer(
        encoder,
        chat_templates=templates,
        stop_token_ids=tuple(dict.fromkeys(stops)),
        special_tokens={f"{n}_token": tokens[i] for n, i in ids.items() if n not in ("eot", "eom")},
    )


def _byte_pair(meta: dict[str, Any]) -> Encoder:
    pre = meta["ggml.pre"]
    vocabulary = {token: i for i, token in enumerate(meta["ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in meta["ggml.merges"]]
    encoder = Encoder(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in WHOLE_WORDS))
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


def _sentencepiece(
    tokens: list[str], scores: list[float], unknown: int, meta: dict[str, Any]
) -> Encoder:
    """SentencePiece's BPE merges the adjacent pair whose union scores highest: as ranked merges.

    Equal scores of different tokens, which its trainer does not write, are broken by id here and by
    place in the text there.
    """
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    encoder = Encoder(
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


def _add_ends(
    encoder: Encoder, tokens: list[str], ids: dict[str, int], meta: dict[str, Any], bos: bool
) -> None:
    """The begin and end tokens that the file asks for around every text."""
    template, used = ["$A"], []
    if meta.get("ggml.add_bos_token", bos) and "bos" in ids:
        template.insert(0, tokens[ids["bos"]])
        used.append((tokens[ids["bos"]], ids["bos"]))
    if meta.get("ggml.add_eos_token", False) and "eos" in ids:
        template.append(tokens[ids["eos"]])
        used.append((tokens[ids["eos"]], ids["eos"]))
    if used:
        encoder.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(dict.fromkeys(used))
        )


_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}


def read_metadata(path: Path) -> dict[str, Any]:
    """The keys and values at the front of a GGUF file.

    `gguf.GGUFReader` reads them too, but makes numpy objects of every string: seconds for one
    vocabulary, where this takes a tenth of one.

    Raises:
      CheckpointError: not a GGUF file of version 2 or 3, or a truncated one.
    """
    at = 0  # the place in the file

    def scalars(code: str, count: int = 1) -> tuple:
        nonlocal at
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(data, at)
        at += layout.size
        return values

    def value(kind: int) -> Any:
        nonlocal at
        if kind == _STRING:
            (length,) = scalars("Q")
            if length > len(data) - at:
                raise ValueError(f"a string of {length} bytes at {at}")
            at += length
            return data[at - length : at].decode()
        if kind == _ARRAY:
            kind, length = *scalars("I"), *scalars("Q")
            if kind in _SCALARS:
                return list(scalars(_SCALARS[kind], length))
            return [value(kind) for _ in range(length)]
        return scalars(_SCALARS[kind])[0]

    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            magic, version, _, count = struct.unpack_from("<4sIQQ", data)
            at = 24
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"magic {magic!r}, version {version}")
            return {value(_STRING): value(*scalars("I")) for _ in range(count)}
    except (ValueError, KeyError, OSError, struct.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{path}: truncated or not a GGUF file: {error!r}") from error
