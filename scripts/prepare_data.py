"""Conversations or texts into packed sequences for training.

python scripts/prepare_data.py --source answers.jsonl --target smollm2-135m-instruct --output data/smollm2
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.progress import track

import specjax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from training.data import prepare, read_examples

console = Console(highlight=False)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Prepare training data.

    Attributes:
      source: files of JSON lines (.gz too), each line with `messages`, `text`, or `prompt` and `response` as token ids.
      target: whose tokenizer and chat template to use.
      output: folder to write.
      length: tokens of a sequence.
      valid_share: of the documents that is kept for validation.
      draft_vocab_sizes: print how much of the wanted tokens vocabularies of these sizes cover.
      wanted: which tokens the head shall learn to draft: the `assistant`'s, or `all`, whoever wrote them, but for the
        chat template's fixed opening; then prompts alone (`turns`) are documents too.
      seed: of the split.
    """

    source: tuple[Path, ...]
    target: str
    output: Path
    length: int = 512
    valid_share: float = 0.02
    draft_vocab_sizes: tuple[int, ...] = (2048, 4096, 8192, 16384, 32000)
    wanted: Literal["assistant", "all"] = "assistant"
    seed: int = 0


def main(options: Options) -> None:
    tokenizer = specjax.load_tokenizer(options.target)
    examples = (
        example
        for path in options.source
        for example in track(
            read_examples(path, tokenizer, whole=options.wanted == "all"),
            description=path.name,
            console=console,
        )
    )
    summary = prepare(
        examples,
        options.output,
        length=options.length,
        source=options.target,
        valid_share=options.valid_share,
        seed=options.seed,
    )
    for split in ("train", "valid"):
        sequences, tokens = summary.sequences[split], summary.tokens[split]
        full = tokens / max(1, sequences * options.length)
        console.print(
            f"{split}: {summary.documents[split]} documents, {tokens} tokens, {summary.wanted[split]} wanted, "
            f"{sequences} sequences of {options.length} ({full:.1%} full)"
        )
    if summary.too_long:
        console.print(
            f"left out, longer than {options.length} tokens: {summary.too_long} documents"
        )
    if summary.masked:
        console.print(f"left out, without a token to learn: {summary.masked} documents")
    for size in options.draft_vocab_sizes:
        ids = summary.draft_vocabulary(size, tokenizer.stop_token_ids)
        console.print(f"a draft vocabulary of {size} covers {summary.coverage(ids):.2%}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
