"""A stream of prompts through a fixed number of slots.

Rows that have ended are refilled while the others go on; nothing is compiled anew. Every prompt has its own key, so its
tokens depend neither on its slot nor on its neighbours, and a run that was interrupted ends with the same results.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import DecodeState, decode, insert, prefill, start
from specjax.drafters.base import Drafter, NoDrafter, Shared
from specjax.drafters.suffix import Suffix
from specjax.generate import bucket, check_prompts, check_stops
from specjax.models.transformer import Target
from specjax.sampling import Processors, Sampling, make_keys
from specjax.verification import Verification

ROUNDS = 64  # at most this many between two looks at which rows have ended
CHUNK = 128  # tokens that a pass of prefill takes


@dataclass(frozen=True)
class Completion:
    """One prompt's result.

    Attributes:
      index: of the prompt.
      prompt_tokens: how many it has.
      tokens: int32 array of new tokens, a stop token included.
      rounds, drafted, accepted, emitted: counters, as in `Statistics`.
    """

    index: int
    prompt_tokens: int
    tokens: np.ndarray
    rounds: int
    drafted: int
    accepted: int
    emitted: int

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "tokens": self.tokens.tolist()}


def generate_stream(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    slots: int = 16,
    drafter: Drafter | None = None,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 (frozen)
    key: jax.Array | int | None = None,
    stop_token_ids: Sequence[int] = (),
    verification: Verification = Verification(),  # noqa: B008 (frozen)
    skip: Sequence[int] = (),
    remember: bool = True,
) -> Iterator[Completion]:
    """Decodes any number of prompts, `slots` at a time, and yields each as it ends.

    Each prompt's tokens are those of `generate` over the whole list.

    Args:
      slots: B, rows that decode together.
      skip: indices of prompts that are left out, because they are done already.
      remember: whether a drafter with a memory (`Suffix`) learns from every completion.
      others: as for `generate`.

    Raises:
      ValueError: as for `generate`, and fewer than one slot.
    """
    if int(slots) != slots or slots < 1:
        raise ValueError(f"slots must be a whole number >= 1, got {slots}")
    drafter = drafter or NoDrafter()
    drafter.check(target)
    arrays = check_prompts(target, prompts, max_new_tokens)
    stops = check_stops(target, stop_token_ids)
    if remember and isinstance(drafter, Suffix):  # with a memory from the start: one program
        drafter = drafter.remember([])
    keys = make_keys(key, len(arrays))
    processors = Processors.create(sampling, len(arrays))
    left = set(skip)
    waiting = [i for i in range(len(arrays)) if i not in left]
    shared = None

    def rows(indices: Sequence[int], limit: int, room: int) -> DecodeState:
        """A state before prefill for some of the prompts; with limit 0 they are done from the start."""
        tokens = np.zeros((len(indices), room), np.int32)
        for row, i in zip(tokens, indices, strict=True):
            row[: arrays[i].size] = arrays[i]
        length = np.asarray([arrays[i].size for i in indices], np.int32)
        at = np.asarray(indices)
        return start(
            target,
            drafter,
            jnp.asarray(tokens),
            jnp.asarray(length),
            jnp.asarray(length + limit),
            keys[at],
            jax.tree.map(lambda x: x[at], processors),
            stops,
            verification,
        )

    for room, indices in plan(arrays, waiting, max_new_tokens + drafter.num_draft + 2, slots):
        queue = indices[::-1]
        state = rows([indices[0]] * slots, 0, room)
        if shared is not None:
            state = replace(state, drafter_state=share(state.drafter_state, shared))
        owner: list[int | None] = [None] * slots
        while queue or any(i is not None for i in owner):
            # row by row: a pass of prefill is bound by arithmetic, so several rows at once gain nothing
            for row in range(slots):
                if owner[row] is None and queue:
                    owner[row] = index = queue.pop()
                    single = rows([index], max_new_tokens, room)
                    single = replace(
                        single, drafter_state=share(single.drafter_state, state.drafter_state)
                    )
                    state = insert(state, row, prefill(target, drafter, single, CHUNK))
            busy = sum(i is not None for i in owner)
            state = decode(target, drafter, state, ROUNDS, busy if queue else 1)
            done, length = np.asarray(state.done), np.asarray(state.length)
            for row, index in enumerate(owner):
                if index is None or not done[row]:
                    continue
                counts = state.statistics
                size = arrays[index].size
                completion = Completion(
                    index=index,
                    prompt_tokens=size,
                    tokens=np.asarray(state.tokens[row])[size : length[row]].copy(),
                    rounds=int(counts.rounds[row]),
                    drafted=int(counts.drafted[row]),
                    accepted=int(counts.accepted[row]),
                    emitted=int(counts.emitted[row]),
                )
                owner[row] = None
                if remember and isinstance(drafter, Suffix):
                    drafter = drafter.remember([completion.tokens.tolist()])
                yield completion
        shared = state.drafter_state


def plan(
    arrays: Sequence[np.ndarray], waiting: Sequence[int], more: int, slots: int
) -> list[tuple[int, list[int]]]:
    """Which prompts decode in caches of which size: a pass costs by the cache's size, so short prompts have their own.

    Args:
      arrays: the prompts.
      waiting: indices of those that are to be decoded.
      more: slots that a prompt needs beside its own.

    Returns:
      sizes from large to small, with the prompts' indices. Prompts that would hardly fill the rows on their own share the
      next larger size, and the largest shares its own with the next.
    """
    sizes: dict[int, list[int]] = {}
    for i in waiting:
        padded = -(-arrays[i].size // CHUNK) * CHUNK + 1
        sizes.setdefault(bucket(max(arrays[i].size + more, padded)), []).append(i)
    found: list[tuple[int, list[int]]] = []
    for size in sorted(sizes, reverse=True):
        if found and (len(sizes[size]) < 2 * slots or len(found[-1][1]) < slots):
            found[-1][1].extend(sizes[size])
        else:
            found.append((size, sizes[size]))
    return [(size, sorted(indices)) for size, indices in found]


def share(own: Any, others: Any) -> Any:
    """A drafter's state with what all rows share taken from another."""
    return jax.tree.map(
        lambda a, b: b if isinstance(a, Shared) else a,
        own,
        others,
        is_leaf=lambda x: isinstance(x, Shared),
    )


def read_completions(path: Path) -> dict[int, dict[str, Any]]:
    """The completed lines of a results file by prompt index; a last line that was cut short is dropped.

    Raises:
      ValueError: a damaged line elsewhere, with its number.
    """
    if not path.exists():
        return {}
    text = path.read_bytes().decode(errors="replace")
    lines = text.split("\n")
    found = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            found[int(row["index"])] = row
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not a completion: {error}") from error
    return found


def generate_to_file(
    target: Target,
    prompts: Sequence[Sequence[int]],
    path: Path | str,
    *,
    extra: Callable[[Completion], dict[str, Any]] = lambda _: {},
    progress: Callable[[Completion], None] = lambda _: None,
    **options: Any,
) -> int:
    """Writes every prompt's completion to a file of JSON lines as it ends, and goes on where an earlier run stopped.

    Args:
      path: results, one line each in order of completion; lines that are there already are kept and not decoded again.
      extra: more fields of a line.
      progress: called after each line is on disk.
      options: as for `generate_stream`.

    Returns:
      how many completions were added.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        lines = path.read_bytes()
        path.write_bytes(lines[: lines.rfind(b"\n") + 1])
    known = read_completions(path)
    added = 0
    with path.open("a") as file:
        for completion in generate_stream(target, prompts, skip=sorted(known), **options):
            file.write(json.dumps({**completion.to_json(), **extra(completion)}) + "\n")
            file.flush()
            added += 1
            progress(completion)
    return added
