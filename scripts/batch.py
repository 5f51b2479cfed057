"""Answers a file of prompts, many at a time, and goes on where an earlier run stopped.

python scripts/batch.py --prompts prompts.jsonl --output answers.jsonl --slots 16
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from common import (
    DrafterName,
    OtherDrafter,
    chosen_drafter,
    encode_conversations,
    parse_options,
    use_compilation_cache,
)
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import specjax
from specjax.batching import Completion, generate_to_file, read_completions

console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Answer a file of prompts.

    Attributes:
      config: a TOML file with any of the options below but prompts, `output` and `limit`, as `advise.py --write` makes
        them; what is given on the command line wins.
      prompts: JSON lines with `prompt`, `turns` or `messages`.
      output: JSON lines, one per answer, in the order in which they end; answers that are there are kept.
      target: a built-in name, a Hugging Face folder or hub id, or a .gguf file.
      drafter: what proposes tokens.
      draft_model: source of the drafter `draft-model`.
      exit_layer: layers that the drafter `early-exit` runs.
      head: folder or hub id of the head that `head` and `hybrid-head` (n-gram first) draft with.
      num_draft: tokens proposed per round at most; the drafter's own default otherwise.
      costs: of a target pass of every block width in passes of one token, for adaptive drafters; `advise.py` measures them.
      slots: prompts that decode together.
      max_new_tokens: budget per prompt.
      temperature: 0 takes the most likely token; prompts take several in turn, which makes a mixture.
      top_k: keep the k most likely tokens; 0 is off.
      top_p: keep the most likely tokens up to this probability; 1 is off.
      seed: of the random keys.
      limit: only the first prompts.
    """

    prompts: Path
    output: Path
    target: str = "smollm2-135m-instruct"
    config: Path | None = None
    drafter: DrafterName | OtherDrafter = "none"
    draft_model: str | None = None
    exit_layer: int | None = None
    head: str | None = None
    num_draft: int | None = None
    costs: tuple[float, ...] | None = None
    slots: int = 16
    max_new_tokens: int = 256
    temperature: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    limit: int | None = None


NOT_IN_FILES = ("config", "prompts", "output", "limit")


def main(options: Options) -> None:
    use_compilation_cache()
    tokenizer = specjax.load_tokenizer(options.target)
    prompts = encode_conversations(options.prompts, tokenizer, options.limit)
    target = specjax.load_target(options.target)
    sampling = [
        specjax.Sampling(temperature=t, top_k=options.top_k, top_p=options.top_p)
        for t in options.temperature
    ]
    if not sampling:
        raise ValueError("temperature must be one number or more, got none")
    drafter = chosen_drafter(options, target)
    done = read_completions(options.output)
    for index, row in done.items():
        if index >= len(prompts):  # of a run with a higher limit
            continue
        temperature = sampling[index % len(sampling)].temperature
        mine = row.get("prompt") == prompts[index]
        if not mine or row.get("temperature", temperature) != temperature:
            raise ValueError(
                f"output {options.output} holds an answer {index} to another prompt or at another temperature; "
                "choose another file"
            )
    known = sum(index < len(prompts) for index in done)
    emitted = rounds = 0
    began = time.perf_counter()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling ...", total=len(prompts), completed=known)

        def show(completion: Completion) -> None:
            nonlocal emitted, rounds
            emitted += completion.emitted
            rounds += completion.rounds
            speed = emitted / (time.perf_counter() - began)
            progress.update(
                task,
                advance=1,
                description=f"{speed:.0f} tokens/s, {emitted / max(rounds, 1):.2f} tokens a pass",
            )

        added = generate_to_file(
            target,
            prompts,
            options.output,
            extra=lambda c: {
                "prompt": prompts[c.index],
                "temperature": sampling[c.index % len(sampling)].temperature,
                "text": tokenizer.decode(c.tokens.tolist(), skip_special_tokens=True),
            },
            progress=show,
            slots=options.slots,
            drafter=drafter,
            max_new_tokens=options.max_new_tokens,
            sampling=[sampling[i % len(sampling)] for i in range(len(prompts))],
            key=options.seed,
            stop_token_ids=tokenizer.stop_token_ids,
        )
    seconds = time.perf_counter() - began
    console.print(
        f"{added} answers added to {options.output} ({known} were there): {emitted} tokens in {seconds:.1f} s, "
        f"{emitted / seconds:.1f} tokens/s, compilation included"
    )


if __name__ == "__main__":
    try:
        main(parse_options(Options, __doc__, NOT_IN_FILES))
    except (ValueError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        sys.exit(1)
