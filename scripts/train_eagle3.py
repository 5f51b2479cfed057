"""Trains an EAGLE-3 head: a run's settings are a TOML file.

python scripts/train_eagle3.py --config configs/smollm2_eagle3.toml
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from common import encode_workloads, use_compilation_cache
from rich.console import Console
from rich.table import Table

import specjax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from training.config import TrainConfig, read_config
from training.evaluation import decode_workloads
from training.loop import Result, TrainingStopped, train

console = Console(highlight=False)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a head.

    Attributes:
      config: the run; started again, an interrupted one goes on.
      data, output, start_from, decode_prompts: in place of what the file says.
      max_updates: ends the run after so many updates.
      seed: in place of the file's.
    """

    config: Path
    data: Path | None = None
    output: Path | None = None
    start_from: Path | None = None
    decode_prompts: Path | None = None
    max_updates: int | None = None
    seed: int | None = None


def evaluate(
    config: TrainConfig,
    result: Result,
    workloads: dict[str, list[list[int]]],
    stop: tuple[int, ...],
) -> None:
    """Decodes held-out prompts with the head, greedily and at temperature 1, and prints what stood."""
    target = specjax.load_target(config.target)
    drafter = specjax.head_drafter(specjax.load_head(result.folder, target), config.steps)
    table = Table("workload", "length, greedy", "per position", "length, T=1", title="Decoding")
    found = {
        temperature: decode_workloads(
            target,
            drafter,
            workloads,
            max_new_tokens=config.decode_tokens,
            stop_token_ids=stop,
            temperature=temperature,
        )
        for temperature in (0.0, 1.0)
    }
    for name, row in found[0.0].items():
        shares = " ".join(f"{x:.2f}" for x in row["acceptance_per_position"])
        table.add_row(
            name,
            f"{row['mean_acceptance_length']:.2f}",
            shares,
            f"{found[1.0][name]['mean_acceptance_length']:.2f}",
        )
    console.print(table)
    (config.output / "decoding.json").write_text(json.dumps(found, indent=1))


def main(options: Options, recipe: str = "eagle3") -> None:
    use_compilation_cache()
    given = {k: v for k, v in vars(options).items() if k != "config"}
    config = read_config(options.config, **given)
    if config.recipe != recipe:
        raise ValueError(
            f"{options.config}: recipe must be {recipe!r} for this command, got {config.recipe!r}"
        )
    workloads, stop = {}, ()
    # what is wrong with the prompts is said before hours of training
    if config.decode_prompts is not None:
        tokenizer = specjax.load_tokenizer(config.target)
        workloads = encode_workloads(config.decode_prompts, tokenizer, 8)
        stop = tuple(tokenizer.stop_token_ids)
    result = train(config, workloads=workloads, console=console)
    console.print(
        f"{result.updates} updates; simulated acceptance length {result.simulated_length:.3f}; head in {result.folder}"
    )
    if workloads:
        evaluate(config, result, workloads, stop)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except (OSError, ValueError, TrainingStopped) as error:
        sys.exit(f"error: {error}")
