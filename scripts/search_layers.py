"""Which layers of a target should draft for it: first ones (early exit), or all but the ones that change little (skipping).

python scripts/search_layers.py --target T --prompts prompts.jsonl
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from common import describe_device, encode_conversations, use_compilation_cache
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import specjax
from specjax.tuning import layer_changes, try_layers

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Options:
    """Search the layers for self-speculation.

    Attributes:
      target: a built-in name, a Hugging Face folder or hub id, or a .gguf file.
      prompts: JSON lines with `prompt`, `turns` or `messages`.
      limit: prompts used.
      shares: of the layers, to exit after and to skip.
      num_draft: tokens drafted per round.
      max_new_tokens: per prompt.
    """

    target: str = "smollm2-135m-instruct"
    prompts: Path = HERE / "prompts.jsonl"
    limit: int = 4
    shares: tuple[float, ...] = (0.25, 0.5, 0.75)
    num_draft: int = 2
    max_new_tokens: int = 64


def main(options: Options) -> None:
    use_compilation_cache()
    bad = [s for s in options.shares if not 0 < s < 1]
    if bad:
        raise ValueError(f"shares must be in (0, 1), got {bad}")
    tokenizer = specjax.load_tokenizer(options.target)
    target = specjax.load_target(options.target)
    prompts = encode_conversations(options.prompts, tokenizer, options.limit)
    count = target.config.num_layers
    changes = layer_changes(target, prompts)
    inner = 1 + np.argsort(changes[1:-1])  # the first and the last layer stay
    drafters = []
    for share in options.shares:
        size = max(1, round(share * count))
        drafters.append(specjax.EarlyExit(size, num_draft=options.num_draft))
        skip = tuple(sorted(int(i) for i in inner[: min(size, count - 2)]))
        if skip:  # a model of two layers has none to spare
            drafters.append(specjax.EarlyExit(skip=skip, num_draft=options.num_draft))
    console.print(f"{options.target} on {describe_device()}")
    table = Table(
        "drafting layers", "length", "speed-up", title=f"{options.num_draft} drafts a round"
    )
    best = None
    trials = try_layers(target, prompts, drafters, max_new_tokens=options.max_new_tokens)
    for trial in trials:
        d = trial.drafter
        name = f"skip {list(d.skip)}" if d.skip else f"first {d.num_layers} of {count}"
        table.add_row(name, f"{trial.mean_acceptance_length:.2f}", f"{trial.speed_up:.2f}x")
        if best is None or trial.speed_up > best.speed_up:
            best = trial
    console.print(table)
    assert best is not None
    if best.speed_up > 1:
        console.print(f"best: {best.drafter}")
    else:
        console.print(
            f"none pays: the best, {best.drafter}, reaches {best.speed_up:.2f}x. Self-speculation needs a target that "
            "was trained for it (LayerSkip), or one with more layers than this."
        )


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except (ValueError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        sys.exit(1)
