"""What a draft model would do for a target, before anyone pays for it.

python scripts/check_pair.py --target T --draft D --prompts prompts.jsonl
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from common import describe_device, encode_conversations, use_compilation_cache
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import specjax
from specjax.tuning import check_pair

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Options:
    """Check a draft model against a target.

    Attributes:
      target, draft: built-in names, Hugging Face folders or hub ids, or .gguf files.
      prompts: JSON lines with `prompt`, `turns` or `messages`.
      limit: prompts used.
      num_draft: drafts per round at most.
      max_new_tokens: per prompt.
      temperatures: at which acceptance is measured.
      translate: the draft has another tokenizer: draft with the tokens that both have.
      json: write the report to this file.
    """

    target: str = "smollm2-135m-instruct"
    draft: str
    prompts: Path = HERE / "prompts.jsonl"
    limit: int = 16
    num_draft: int = 7
    max_new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    translate: bool = False
    json: Path | None = None


def main(options: Options) -> None:
    use_compilation_cache()
    target = specjax.load_target(options.target)
    draft = specjax.load_target(options.draft)
    tokenizer = specjax.load_tokenizer(options.target)
    prompts = encode_conversations(options.prompts, tokenizer, options.limit)
    pair = draft
    if options.translate:
        pair = specjax.translate(draft, target)
        console.print(f"the draft can propose {pair.coverage:.0%} of the target's tokens")
    report = check_pair(
        target,
        pair,
        prompts,
        num_draft=options.num_draft,
        max_new_tokens=options.max_new_tokens,
        temperatures=options.temperatures,
    )
    console.print(f"{options.draft} for {options.target} on {describe_device()}")
    console.print(f"one draft pass costs {report.draft_cost:.2f} target passes")
    table = Table("drafts", "target pass", title="Expected speed-up")
    for temperature in report.rates:
        table.add_column(f"T={temperature:g}: stands")
        table.add_column("speed-up")
    for k in range(options.num_draft):
        cells = [str(k + 1), f"{report.costs[k]:.2f}"]
        for temperature, rates in report.rates.items():
            cells += [f"{rates[k]:.2f}", f"{report.speed_up[temperature][k]:.2f}x"]
        table.add_row(*cells)
    console.print(table)
    for temperature in report.rates:
        k, gain = report.best(temperature)
        advice = f"num_draft={k}, {gain:.2f}x" if k else "do not draft: no number of drafts pays"
        console.print(f"temperature {temperature:g}: {advice}")
    if options.json is not None:
        content = {
            "target": options.target,
            "draft": options.draft,
            "device": describe_device(),
            "shared_vocabulary": report.shared_vocabulary,
            "draft_cost": report.draft_cost,
            "costs": report.costs.tolist(),
            "rates": {str(t): r.tolist() for t, r in report.rates.items()},
            "speed_up": {str(t): r.tolist() for t, r in report.speed_up.items()},
        }
        options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except (ValueError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        sys.exit(1)
