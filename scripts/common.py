"""What the commands share: how they start and how they name drafters."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import jax

import specjax
from specjax.checkpoints.sources import cache_dir


def use_compilation_cache() -> None:
    """Keeps compiled programs between processes, in the cache folder unless JAX was told of another."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@contextmanager
def count_compilations() -> Iterator[list[float]]:
    """A list that grows by the seconds of every program compiled, or read from the persistent cache, meanwhile."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def describe_device() -> str:
    """The device that computes, in words."""
    device = jax.devices()[0]
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    return f"{device.device_kind}{cores} ({device.platform}, jax {jax.__version__})"


def _sized(cls: Any, num_draft: int | None, **given: Any) -> Any:
    return cls(**given) if num_draft is None else cls(num_draft=num_draft, **given)


DrafterName = Literal[
    "none",
    "ngram",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "suffix",
    "adaptive",
    "adaptive-suffix",
]

OtherDrafter = Literal["draft-model", "early-exit", "head", "hybrid-head"]

DRAFTERS: dict[str, Callable[[int | None], Any]] = {
    "none": lambda _: None,
    "ngram": lambda n: _sized(specjax.NGram, n),
    "ngram-simple": lambda n: specjax.NGram.simple("code", **({} if n is None else {"m": n})),
    "ngram-map-k": lambda n: specjax.NGram.map_k("code", **({} if n is None else {"m": n})),
    "ngram-map-k4v": lambda n: specjax.NGram.map_k4v("code", **({} if n is None else {"m": n})),
    "ngram-mod": lambda n: specjax.NGram.mod(**({} if n is None else {"max_draft": n})),
    "suffix": lambda n: _sized(specjax.Suffix, n),
    "adaptive": lambda n: specjax.Adaptive(_sized(specjax.NGram, n)),
    "adaptive-suffix": lambda n: specjax.Adaptive(_sized(specjax.Suffix, n)),
}
"""Drafters that need nothing but a length, by their name on the command line."""


def make_drafter(
    name: str,
    num_draft: int | None,
    *,
    draft_model: str | None = None,
    exit_layer: int | None = None,
    head: str | None = None,
    target: Any = None,
) -> Any:
    """The drafter of a command line's name; None for "none".

    Args:
      name: a key of `DRAFTERS`, or one of those below, which need one of the other arguments.
      num_draft: None leaves the drafter's own default.
      draft_model: source of a draft model.
      exit_layer: layers of early exit.
      head: folder or hub id of an EAGLE-3 head for `target`.

    Raises:
      ValueError: unknown name, or something missing that it needs.
    """
    if name in DRAFTERS:
        return DRAFTERS[name](num_draft)
    match name:
        case "draft-model":
            if draft_model is None:
                raise ValueError("drafter draft-model needs --draft-model SOURCE, got none")
            model = specjax.load_target(draft_model)
            return _sized(specjax.DraftModel, num_draft, model=model)
        case "early-exit":
            if exit_layer is None:
                raise ValueError("drafter early-exit needs --exit-layer E, got none")
            return _sized(specjax.EarlyExit, num_draft, num_layers=exit_layer)
        case "head" | "hybrid-head":
            if head is None:
                raise ValueError(f"drafter {name} needs --head FOLDER, got none")
            trained = specjax.head_drafter(specjax.load_head(head, target), num_draft)
            return trained if name == "head" else specjax.Hybrid((specjax.NGram(), trained))
    names = ", ".join([*DRAFTERS, *get_args(OtherDrafter)])
    raise ValueError(f"drafter must be one of {names}; got {name!r}")


def read_conversations(path: Path) -> list[list[dict[str, str]]]:
    """Every prompt of a file as a conversation: JSON lines with `prompt`, `turns` or `messages`, or one text.

    Raises:
      ValueError: a line that has none of these, with its number.
    """
    content = path.read_text()
    if path.suffix != ".jsonl":
        return [[{"role": "user", "content": content}]]
    found: list[list[dict[str, str]]] = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict) or not row.keys() & {"messages", "turns", "prompt"}:
            raise ValueError(
                f"{path}:{number}: expected prompt, turns or messages, got {str(row)[:80]}"
            )
        if "messages" in row:
            found.append(row["messages"])
        else:
            first = row["turns"][0] if "turns" in row else row["prompt"]
            found.append([{"role": "user", "content": first}])
    return found


def encode_conversations(
    path: Path, tokenizer: specjax.Tokenizer, limit: int | None = None
) -> list[list[int]]:
    """The first `limit` conversations of a file, as token ids up to the assistant's turn."""
    return [tokenizer.encode_chat(c) for c in read_conversations(path)[:limit]]
