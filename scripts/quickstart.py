"""The demonstration: two prompts, plain and with n-gram drafts, and what that gained."""

import numpy as np
from common import describe_device, use_compilation_cache
from rich.console import Console
from rich.table import Table

import specjax

PROMPTS = {
    "chat": "What makes a good night's sleep? Give me five short tips and explain each one.",
    "code editing": """Rename the variable `d` to `inventory` everywhere and return the whole program.

```python
d = {"apple": 3, "pear": 5, "plum": 0}

def restock(d, item, count):
    if item not in d:
        d[item] = 0
    d[item] = d[item] + count
    return d

def sold_out(d):
    return [item for item in d if d[item] == 0]

d = restock(d, "plum", 12)
d = restock(d, "fig", 7)
print(sold_out(d))
```""",
}
NAME = "smollm2-135m-instruct"
console = Console(highlight=False)


def main() -> None:
    use_compilation_cache()
    console.print(f"[bold]specjax {NAME}[/] on {describe_device()}")
    target, tokenizer = specjax.load_target(NAME), specjax.load_tokenizer(NAME)
    drafter = specjax.NGram()
    table = Table(
        "prompt", "tokens", "plain/s", "drafted/s", "speed-up", "tokens a pass", "identical"
    )
    for name, text in PROMPTS.items():
        prompts = [tokenizer.encode_chat([{"role": "user", "content": text}])]
        options = {"max_new_tokens": 200, "stop_token_ids": tokenizer.stop_token_ids}

        console.rule(f"{name}: {text.splitlines()[0]}")
        with console.status("compiling (kept for the next time) ..."):
            for warm in (None, drafter):  # compiled before anything is timed
                specjax.generate(target, prompts, drafter=warm, **options)
        text = tokenizer.stream(skip_special_tokens=True)
        for piece in specjax.stream(target, prompts, drafter=drafter, **options):
            console.out(text.push(piece.tokens[0].tolist()), end="")
        console.out(text.end(), end="\n\n")

        times: dict[bool, list[float]] = {False: [], True: []}
        outputs = {}
        for _ in range(3):
            for speculative in (False, True):
                outputs[speculative] = specjax.generate(
                    target, prompts, drafter=drafter if speculative else None, **options
                )
                times[speculative].append(outputs[speculative].decode_seconds)
        plain, spoken = outputs[False], outputs[True]
        slow, fast = (float(np.median(times[kind])) for kind in (False, True))
        count = len(plain.tokens[0])
        same = np.array_equal(plain.tokens[0], spoken.tokens[0])
        table.add_row(
            name,
            str(count),
            f"{count / slow:.1f}",
            f"{count / fast:.1f}",
            f"{slow / fast:.2f}x",
            f"{spoken.statistics.mean_acceptance_length:.2f}",
            "yes" if same else "NO",
        )
    console.print(table)
    console.print(
        "Decoding time alone, medians of three runs in turn; the text is the target's own, token for token."
    )


if __name__ == "__main__":
    main()
