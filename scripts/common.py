"""What the commands share: how they start and how they name drafters."""

import difflib
import json
import os
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import jax
import tyro

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
    "ngram-mod": lambda n: specjax.NGram.mod(
        **({} if n is None else {"max_draft": n, "min_draft": min(n, 48)})
    ),
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
    costs: Sequence[float] | None = None,
    target: Any = None,
) -> Any:
    """The drafter of a command line's name; None for "none".

    Args:
      name: a key of `DRAFTERS`, or one of those below, which need one of the other arguments.
      num_draft: None leaves the drafter's own default.
      draft_model: source of a draft model.
      exit_layer: layers of early exit.
      head: folder or hub id of a trained head for `target`, of any kind.
      costs: of every block width in passes of one token, for an adaptive drafter; a guess otherwise.

    Raises:
      ValueError: unknown name, or something missing that it needs.
    """
    if name in DRAFTERS:
        drafter = DRAFTERS[name](num_draft)
        if costs is not None and isinstance(drafter, specjax.Adaptive):
            drafter = replace(drafter, costs=tuple(costs))
        return drafter
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


def chosen_drafter(options: Any, target: Any) -> Any:
    """What the options of `generate.py` and `batch.py` name."""
    return make_drafter(
        options.drafter,
        options.num_draft,
        draft_model=options.draft_model,
        exit_layer=options.exit_layer,
        head=options.head,
        costs=options.costs,
        target=target,
    )


Conversation = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """A line of a file of prompts.

    Attributes:
      workload: what kind it says it is; "prompts" where it says nothing.
      conversation: up to the user's last turn.
    """

    workload: str
    conversation: Conversation


def _conversation(row: dict[str, Any]) -> Conversation | None:
    """What a line's `messages`, `turns` or `prompt` say; None where they are not what they should be."""
    if "messages" in row:
        messages = row["messages"]
        good = isinstance(messages, list) and all(
            isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content"))
            for m in messages
        )
        return messages if good and messages else None
    turns = row["turns"] if "turns" in row else [row["prompt"]]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        return None
    return [{"role": "user", "content": turns[0]}] if turns[0].strip() else None


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt of a file: JSON lines with `prompt`, `turns` or `messages`, and maybe `workload` (Spec-Bench says
    `category`); or one text. Of turns the first is asked.

    Raises:
      ValueError: a line that has none of these, or an empty one, with its number; a file without prompts.
    """
    content = path.read_text()
    if not content.strip():
        raise ValueError(f"{path}: expected at least one prompt, got an empty file")
    if path.suffix != ".jsonl":
        return [Prompt("prompts", [{"role": "user", "content": content}])]
    found: list[Prompt] = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            got = "an empty line" if not line.strip() else f"what is not JSON: {error}"
            raise ValueError(f"{path}:{number}: expected a JSON object, got {got}") from error
        if not isinstance(row, dict) or not row.keys() & {"messages", "turns", "prompt"}:
            raise ValueError(
                f"{path}:{number}: expected prompt, turns or messages, got {str(row)[:80]}"
            )
        conversation = _conversation(row)
        if conversation is None:
            raise ValueError(
                f"{path}:{number}: expected a prompt of some text, turns whose first is one, or messages with role and "
                f"content; got {str(row)[:80]}"
            )
        workload = row.get("workload", row.get("category", "prompts"))
        found.append(Prompt(str(workload), conversation))
    return found


def read_conversations(path: Path) -> list[Conversation]:
    """Every prompt of a file as a conversation. See `read_prompts`."""
    return [prompt.conversation for prompt in read_prompts(path)]


def encode_conversation(tokenizer: specjax.Tokenizer, conversation: Conversation) -> list[int]:
    """Token ids up to the assistant's turn; a model without a chat template continues what its one message says.

    Raises:
      ValueError: several messages, and no template that could join them.
    """
    if len(conversation) == 1 and not tokenizer.has_chat_template:
        return tokenizer.encode(conversation[0]["content"])
    return tokenizer.encode_chat(conversation)


def encode_conversations(
    path: Path, tokenizer: specjax.Tokenizer, limit: int | None = None
) -> list[list[int]]:
    """The first `limit` conversations of a file. See `encode_conversation`."""
    return [encode_conversation(tokenizer, c) for c in read_conversations(path)[:limit]]


def encode_workloads(
    path: Path, tokenizer: specjax.Tokenizer, limit: int
) -> dict[str, list[list[int]]]:
    """The first `limit` prompts of every workload of a file. See `read_prompts` and `encode_conversation`."""
    workloads: dict[str, list[list[int]]] = defaultdict(list)
    for prompt in read_prompts(path):
        if len(workloads[prompt.workload]) < limit:
            workloads[prompt.workload].append(encode_conversation(tokenizer, prompt.conversation))
    return dict(workloads)


def choose_workloads(
    workloads: Mapping[str, list[list[int]]], names: Sequence[str]
) -> dict[str, list[list[int]]]:
    """Those of these names.

    Raises:
      ValueError: one that is not there.
    """
    if missing := [name for name in names if name not in workloads]:
        raise ValueError(
            f"workloads must be among those of the prompts, {', '.join(workloads)}; got {', '.join(missing)}"
        )
    return {name: workloads[name] for name in names}


def check_room(
    workloads: Mapping[str, Sequence[Sequence[int]]], max_new_tokens: int, context: int
) -> None:
    """Raises ValueError for a prompt that has no room for so many new tokens in a model's context."""
    for name, prompts in workloads.items():
        for i, prompt in enumerate(prompts):
            if len(prompt) + max_new_tokens > context:
                raise ValueError(
                    f"prompt {i} of {name} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}: together at most "
                    f"the model's context of {context}"
                )


OptionsType = TypeVar("OptionsType")


def parse_options(
    options: type[OptionsType], description: str | None, not_in_files: Sequence[str]
) -> OptionsType:
    """The command line over what the file of `--config` says.

    Args:
      options: a dataclass with a field `config`.
      not_in_files: fields that a file may not set.
    """
    found: Any = tyro.cli(options, description=description)
    if found.config is None:
        return found
    known = [f.name for f in fields(found) if f.name not in not_in_files]
    arguments = config_arguments(found.config, known)
    return tyro.cli(options, description=description, args=[*arguments, *sys.argv[1:]])


def config_arguments(path: Path, names: Sequence[str]) -> list[str]:
    """A TOML file of options as the arguments that say the same, for `tyro` to check.

    Args:
      names: of the options that a file may set.

    Raises:
      ValueError: no TOML, or a key that means nothing, with what may have been meant.
    """
    try:
        row = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from error
    arguments: list[str] = []
    for key, value in row.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; expected {', '.join(names)}"
            raise ValueError(f"{path}: unknown key {key!r}{hint}")
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{key.replace('_', '-')}", *map(str, values)]
    return arguments
