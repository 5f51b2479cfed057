"""Decodes prompts from the command line.

python scripts/generate.py --target smollm2-135m-instruct --drafter ngram --prompt "What is a monad?"
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from common import (
    DrafterName,
    OtherDrafter,
    chosen_drafter,
    describe_device,
    encode_conversation,
    parse_options,
    read_conversations,
    use_compilation_cache,
)
from rich.console import Console
from rich.markup import escape
from rich.progress import track

import specjax

console = Console(stderr=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Decode prompts, plainly or speculatively.

    Attributes:
      config: a TOML file with any of the options below but prompts and `json`, as `advise.py --write` makes them; what is
        given on the command line wins.
      target: a built-in name, a Hugging Face folder or hub id, or a .gguf file.
      drafter: what proposes tokens.
      draft_model: source of the drafter `draft-model`.
      exit_layer: layers that the drafter `early-exit` runs.
      head: folder or hub id of the head that `head` and `hybrid-head` (n-gram first) draft with.
      num_draft: tokens proposed per round at most; the drafter's own default otherwise.
      costs: of a target pass of every block width in passes of one token, for adaptive drafters; `advise.py` measures them.
      prompt: a prompt; may be given several times.
      prompt_file: a text file with one prompt, or JSON lines with `prompt`, `turns` or `messages`.
      raw: continue the text as it is, without the chat template.
      max_new_tokens: budget per prompt.
      temperature: 0 takes the most likely token.
      top_k: keep the k most likely tokens; 0 is off.
      top_p: keep the most likely tokens up to this probability; 1 is off.
      min_p: drop tokens less likely than this share of the most likely; 0 is off.
      repetition_penalty: 1 is off.
      seed: of the random keys.
      json: write the results to this file.
    """

    config: Path | None = None
    target: str = "smollm2-135m-instruct"
    drafter: DrafterName | OtherDrafter = "ngram"
    draft_model: str | None = None
    exit_layer: int | None = None
    head: str | None = None
    num_draft: int | None = None
    costs: tuple[float, ...] | None = None
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    prompt_file: Path | None = None
    raw: bool = False
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    json: Path | None = None


NOT_IN_FILES = ("config", "prompt", "prompt_file", "raw", "json")


def parse() -> Options:
    return parse_options(Options, __doc__, NOT_IN_FILES)


def main(options: Options) -> None:
    use_compilation_cache()
    conversations: list[list[dict[str, str]]] = [
        [{"role": "user", "content": prompt}] for prompt in options.prompt
    ]
    if options.prompt_file is not None:
        conversations += read_conversations(options.prompt_file)
    if not conversations:
        raise ValueError("no prompt: give --prompt TEXT or --prompt-file F")
    sampling = specjax.Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )
    target = specjax.load_target(options.target)
    drafter = chosen_drafter(options, target)
    tokenizer = specjax.load_tokenizer(options.target)
    rows = []
    for i, messages in enumerate(
        track(conversations, console=console, disable=len(conversations) == 1)
    ):
        prompt = (
            tokenizer.encode(messages[-1]["content"])
            if options.raw
            else encode_conversation(tokenizer, messages)
        )
        out = specjax.generate(
            target,
            [prompt],
            drafter=drafter,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            key=options.seed + i,
            stop_token_ids=tokenizer.stop_token_ids,
        )
        tokens, counts = out.tokens[0], out.statistics
        text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        print(text, flush=True)
        rows.append(
            {
                "prompt_tokens": len(prompt),
                "tokens": tokens.tolist(),
                "text": text,
                "rounds": int(counts.rounds[0]),
                "drafted": int(counts.drafted[0]),
                "accepted": int(counts.accepted[0]),
                "accepted_per_position": counts.accepted_per_position[0].tolist(),
                "mean_acceptance_length": counts.mean_acceptance_length,
                "prefill_seconds": out.prefill_seconds,
                "decode_seconds": out.decode_seconds,
                "tokens_per_second": len(tokens) / out.decode_seconds,
            }
        )
    if options.json is not None:
        report = {
            "target": options.target,
            "drafter": options.drafter,
            "device": describe_device(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    try:
        main(parse())
    except (ValueError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)
