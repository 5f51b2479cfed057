"""From conversations to packed sequences on disk, and from there to batches.

A prepared folder holds `train.array_record`, `valid.array_record` and `dataset.json`. Each record is one packed sequence:
int32[3, T] of tokens, wanted flags and document numbers. Grain reads them in an order that depends on the seed alone.
"""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from specjax.checkpoints.tokenizer import Tokenizer

SPLITS = ("train", "valid")


@dataclass(frozen=True)
class Example:
    """One document.

    Attributes:
      tokens: int32[n].
      wanted: bool[n], tokens that the head shall learn to draft; never the first, which nothing predicts.
    """

    tokens: np.ndarray
    wanted: np.ndarray


def chat_example(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> Example:
    """A conversation with exactly the assistant's tokens wanted, each turn's stop token included.

    The chat template is rendered up to every assistant turn and up to its end; the tokens of the shorter texts must be
    the beginning of the longer ones', or the mask would be a guess.

    Raises:
      ValueError: no assistant turn whose tokens can be told in this way. (Some templates render earlier turns
        differently once later ones follow; such turns are not learnt.)
    """
    tokens = tokenizer.encode_chat(messages, add_generation_prompt=False)
    wanted = np.zeros(len(tokens), bool)
    answers = [i for i, m in enumerate(messages) if m.get("role") == "assistant" and i > 0]
    for i in answers:
        before = tokenizer.encode_chat(messages[:i], add_generation_prompt=True)
        until = tokenizer.encode_chat(messages[: i + 1], add_generation_prompt=False)
        start, stop = len(before), len(until)
        if tokens[:start] != before or tokens[:stop] != until:
            continue
        turn = tokens[start:stop]
        ends = [j for j, token in enumerate(turn) if token in tokenizer.stop_token_ids]
        wanted[start : start + ends[-1] + 1 if ends else stop] = True
    if not wanted.any():
        what = "whose tokens the chat template lets one tell" if answers else "after another's"
        raise ValueError(f"no assistant turn {what}")
    return Example(np.asarray(tokens, np.int32), wanted)


def text_example(tokenizer: Tokenizer, text: str) -> Example:
    """Plain text, every token of it wanted but the first."""
    return _whole(tokenizer.encode(text))


def _whole(tokens: Sequence[int] | np.ndarray, opening: Sequence[int] = ()) -> Example:
    tokens = np.asarray(tokens, np.int32)
    if tokens.size < 2:
        raise ValueError(f"text must have at least 2 tokens, got {tokens.size}")
    return Example(tokens, np.arange(tokens.size) >= max(1, _shared(tokens, opening)))


def _shared(a: Sequence[int] | np.ndarray, b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    size = min(len(a), len(b))
    return int(np.cumprod(np.asarray(a[:size]) == np.asarray(b[:size])).sum())


def chat_opening(tokenizer: Tokenizer) -> list[int]:
    """What the chat template puts before the first words of a conversation without a system turn: a fixed text, which
    teaches nothing. Empty without a template."""
    if not tokenizer.has_chat_template:
        return []
    one, other = (
        tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=False)
        for text in ("a", "b")
    )
    return one[: _shared(one, other)]


def answer_example(
    prompt: Sequence[int], response: Sequence[int], vocab_size: int | None = None
) -> Example:
    """Token ids of a prompt and of what the target answered."""
    for name, ids in (("prompt", prompt), ("response", response)):
        if not isinstance(ids, list | tuple) or not ids:
            raise ValueError(f"{name} must be a list of token ids, got {str(ids)[:40]!r}")
        bad = [i for i in ids if type(i) is not int or i < 0 or i >= (vocab_size or i + 1)]
        if bad:
            raise ValueError(f"{name} must hold token ids in 0..{vocab_size}, got {bad[0]!r}")
    tokens = np.asarray([*prompt, *response], np.int32)
    return Example(tokens, np.arange(tokens.size) >= len(prompt))


def read_examples(path: Path, tokenizer: Tokenizer, *, whole: bool = False) -> Iterator[Example]:
    """Documents of a file of JSON lines (.gz too), each with `messages`, `text`, or `prompt` and `response` as token ids.

    Args:
      whole: every token is wanted, whoever wrote it, but the first and the chat template's fixed opening; then prompts alone
        (`turns`) are documents too. What the target would say is known for any text, so any text teaches; its own answers
        teach most.

    Raises:
      ValueError: a malformed line, with the file and the line's number.
    """
    import gzip

    opener = gzip.open if path.suffix == ".gz" else open
    opening = chat_opening(tokenizer) if whole else None
    number = 0
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):  # noqa: B007 (for the message)
                yield _example(json.loads(line.decode()), tokenizer, opening)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}:{number}: {error}") from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}, after line {number}: damaged: {error}") from error


def _example(row: Any, tokenizer: Tokenizer, opening: Sequence[int] | None) -> Example:
    """`opening`: what of a conversation is not wanted where all else is; None wants answers alone."""
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {str(row)[:60]}")
    if opening is not None and ("messages" in row or "turns" in row):
        messages = row.get("messages")
        if messages is None:
            turns = row["turns"]
            if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
                raise ValueError(f"turns must be a list of texts, got {str(turns)[:40]!r}")
            messages = [{"role": "user", "content": turns[0]}]
        tokens = tokenizer.encode_chat(messages, add_generation_prompt=False)
        return _whole(tokens, opening)
    if opening is not None and "prompt" in row:
        return _whole(_example(row, tokenizer, None).tokens, opening)
    if "messages" in row:
        return chat_example(tokenizer, row["messages"])
    if "text" in row:
        return text_example(tokenizer, row["text"])
    if "prompt" in row and "response" in row:
        return answer_example(row["prompt"], row["response"], tokenizer.vocab_size)
    if "prompt" in row and "tokens" in row:  # what scripts/batch.py writes
        return answer_example(row["prompt"], row["tokens"], tokenizer.vocab_size)
    raise ValueError(
        f"expected messages, text, or prompt and response; got the fields {', '.join(row) or 'none'}"
    )


@dataclass
class Summary:
    """What preparing found; `dataset.json` holds it.

    Attributes:
      length: T.
      documents, sequences, tokens, wanted: counts by split.
      too_long: documents longer than T, left out.
      masked: documents without two wanted tokens in a row, left out: the second is what a head's first draft learns.
      vocabulary: how often each token was wanted in the training split, by id.
      source: where the tokenizer came from.
      digests: SHA-256 of each split's sequences.
    """

    length: int
    source: str
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    sequences: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    wanted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    too_long: int = 0
    masked: int = 0
    vocabulary: dict[int, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def draft_vocabulary(self, size: int, always: Iterable[int] = ()) -> np.ndarray:
        """The ids of a draft vocabulary, ascending: `always`, then the most frequent, then the lowest unused.

        Raises:
          ValueError: `size` is too small for `always`.
        """
        chosen = dict.fromkeys(always)
        if len(chosen) > size:
            raise ValueError(f"draft_vocab_size must be at least {len(chosen)}, got {size}")
        frequent = sorted(self.vocabulary, key=lambda i: (-self.vocabulary[i], i))
        for token in (*frequent, *range(size + len(chosen))):
            if len(chosen) == size:
                break
            chosen.setdefault(token)
        return np.sort(np.fromiter(chosen, np.int32))

    def coverage(self, ids: np.ndarray) -> float:
        """The share of wanted tokens that a draft vocabulary can express: it caps acceptance."""
        total = sum(self.vocabulary.values())
        return sum(self.vocabulary.get(int(i), 0) for i in ids) / total if total else 0.0


def prepare(
    examples: Iterable[Example],
    folder: Path,
    *,
    length: int,
    source: str,
    valid_share: float = 0.02,
    seed: int = 0,
) -> Summary:
    """Packs documents into sequences and writes them.

    Documents are laid one after the other into the first of a few open sequences that has room; none is cut. One that is
    longer than a sequence is left out and counted.

    Args:
      examples: documents.
      folder: where to write; files of an earlier preparation there are replaced once all is written.
      length: T.
      source: of the tokenizer, for the record.
      valid_share: of the documents, chosen by the seed, that is kept for validation.
      seed: of that choice.

    Raises:
      ValueError: no document with something to learn fits.
      OSError: no room; what an earlier preparation left is as it was.
    """
    if length < 4:
        raise ValueError(f"length must be at least 4, got {length}")
    if not 0 <= valid_share < 1:
        raise ValueError(f"valid_share must be in [0, 1), got {valid_share}")
    folder.mkdir(parents=True, exist_ok=True)
    summary, chance = Summary(length=length, source=source), np.random.default_rng(seed)
    counts: Counter[int] = Counter()
    partial = {split: folder / f"{split}.array_record.partial" for split in SPLITS}
    # groups of one: any record can be read by itself, which is what shuffling does
    writers = {
        split: ArrayRecordWriter(str(path), "group_size:1") for split, path in partial.items()
    }
    packers = {split: Packer(length) for split in SPLITS}
    digests = {split: hashlib.sha256() for split in SPLITS}

    def write(split: str, packed: np.ndarray) -> None:
        writers[split].write(packed.tobytes())
        digests[split].update(packed.tobytes())
        summary.sequences[split] += 1

    try:
        for example in examples:
            drawn = chance.random() < valid_share
            if example.tokens.size > length:
                summary.too_long += 1
                continue
            if not (example.wanted[1:] & example.wanted[:-1]).any():
                summary.masked += 1
                continue
            # the first one in any case: without validation nobody would see what training does
            drawn |= valid_share > 0 and not summary.documents["valid"]
            split = "valid" if drawn else "train"
            summary.documents[split] += 1
            summary.tokens[split] += int(example.tokens.size)
            summary.wanted[split] += int(example.wanted.sum())
            if split == "train":
                counts.update(example.tokens[example.wanted].tolist())
            for packed in packers[split].add(example):
                write(split, packed)
        for split in SPLITS:
            for packed in packers[split].rest():
                write(split, packed)
        for writer in writers.values():
            writer.close()
        summary.vocabulary = dict(sorted(counts.items()))
        summary.digests = {split: digest.hexdigest() for split, digest in digests.items()}
        if not summary.sequences["train"]:
            raise ValueError(
                f"nothing to train on: {summary.too_long} documents are longer than {length} tokens, {summary.masked} have "
                f"nothing to learn, {summary.documents['valid']} are kept for validation"
            )
        described = folder / "dataset.json.partial"
        described.write_text(json.dumps(asdict(summary), indent=1, sort_keys=True) + "\n")
        # from here on nothing needs room
        for split, path in partial.items():
            path.replace(folder / f"{split}.array_record")
        described.replace(folder / "dataset.json")
    except RuntimeError as error:  # array_record's word for a full disk
        raise OSError(f"{folder}: could not be written: {error}") from error
    finally:
        for split, path in partial.items():
            with contextlib.suppress(RuntimeError):
                writers[split].close()
            path.unlink(missing_ok=True)
        (folder / "dataset.json.partial").unlink(missing_ok=True)
    return summary


def read_summary(folder: Path) -> Summary:
    """What `prepare` wrote.

    Raises:
      ValueError: no prepared dataset is there.
    """
    path = folder / "dataset.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no prepared dataset; make one with scripts/prepare_data.py")
    row = json.loads(path.read_text())
    row["vocabulary"] = {int(i): n for i, n in row["vocabulary"].items()}
    return Summary(**row)


class Packer:
    """Fills a few sequences at a time, first fit."""

    OPEN = 16

    def __init__(self, length: int):
        self.length = length
        self.open: list[list[Example]] = []

    def _used(self, bin: list[Example]) -> int:
        return sum(e.tokens.size for e in bin)

    def add(self, example: Example) -> Iterator[np.ndarray]:
        """Takes a document; yields a sequence that is as good as full."""
        for bin in self.open:
            if self._used(bin) + example.tokens.size <= self.length:
                bin.append(example)
                return
        self.open.append([example])
        if len(self.open) > self.OPEN:
            fullest = max(range(len(self.open)), key=lambda i: self._used(self.open[i]))
            yield self._pack(self.open.pop(fullest))

    def rest(self) -> Iterator[np.ndarray]:
        while self.open:
            yield self._pack(self.open.pop(0))

    def _pack(self, bin: list[Example]) -> np.ndarray:
        packed, at = np.zeros((3, self.length), np.int32), 0
        for number, example in enumerate(bin, 1):
            to = at + example.tokens.size
            packed[0, at:to], packed[1, at:to] = example.tokens, example.wanted
            packed[2, at:to] = number
            at = to
        return packed


def open_sequences(folder: Path, split: str, length: int) -> Any:
    """All sequences of a split, by index: a Grain source of dictionaries with int32[T] arrays and their `index`."""
    import grain

    path = folder / f"{split}.array_record"
    if not path.is_file() or not path.stat().st_size:
        raise ValueError(f"{path}: no such file; make it with scripts/prepare_data.py")
    source: Any = grain.sources.ArrayRecordDataSource(str(path))

    def read(index: int) -> dict[str, Any]:
        tokens, wanted, document = np.frombuffer(source[index], np.int32).reshape(3, length)
        return {
            "tokens": tokens,
            "wanted": wanted.astype(bool),
            "document": document,
            "index": np.int32(index),
        }

    return grain.MapDataset.range(len(source)).map(read)


def batches(folder: Path, length: int, batch_size: int, seed: int) -> Any:
    """Batches without end, each epoch in an order of its own: an iterator whose place can be saved."""
    data = open_sequences(folder, "train", length)
    if len(data) < batch_size:
        raise ValueError(
            f"batch_size must be at most the number of sequences, {len(data)}, got {batch_size}"
        )
    data = data.seed(seed).shuffle().repeat().batch(batch_size)
    return iter(data.to_iter_dataset())
