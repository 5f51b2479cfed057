"""From prompts to tokens: the host's side of decoding."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import DecodeState, decode, prefill, start
from specjax.drafters.base import Drafter, NoDrafter
from specjax.drafters.guard import Guard
from specjax.models.transformer import Target
from specjax.programs import keep_room
from specjax.sampling import Processors, Sampling, make_keys
from specjax.statistics import Statistics
from specjax.verification import Verification

CHUNKS = (32, 128)  # prefill widths: one for short prompts, one for the rest


@dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Attributes:
      tokens: per prompt, int32 array of the new tokens, a stop token included.
      statistics: counters per prompt (numpy), with derived figures.
      prefill_seconds, decode_seconds: wall time, compilation included where a shape was new.
      alarm: bool per prompt, whether a `Guard` ended its speculation; None without one.
    """

    tokens: list[np.ndarray]
    statistics: Statistics
    prefill_seconds: float
    decode_seconds: float
    alarm: np.ndarray | None = None


@dataclass(frozen=True)
class Piece:
    """What `stream` yields after every few rounds.

    Attributes:
      tokens: per prompt, the tokens that are new since the last piece.
      done: bool per prompt.
      statistics: counters so far.
    """

    tokens: list[np.ndarray]
    done: np.ndarray
    statistics: Statistics


def bucket(slots: int) -> int:
    """The cache size compiled for: few distinct ones, so that prompts of many lengths share a program."""
    size = 256
    while size < slots:
        size *= 2
    smaller = size * 3 // 4  # 384, 768, ...: at most a third is spare
    return smaller if size > 256 and smaller >= slots else size


def prefill_chunk(longest: int) -> int:
    """Tokens that a pass of prefill takes, for prompts of at most `longest` tokens."""
    return next((c for c in CHUNKS if longest - 1 <= c), CHUNKS[-1])


def needed_slots(longest: int, max_new_tokens: int, num_draft: int) -> int:
    """The fewest cache slots in which prompts of at most `longest` tokens decode."""
    chunk = prefill_chunk(longest)
    return max(longest + max_new_tokens + num_draft + 2, -(-longest // chunk) * chunk + 1)


def check_stops(target: Target, stop_token_ids: Sequence[int]) -> jax.Array:
    """The stop tokens as int32[M], padded with -1 so that few sizes are compiled.

    Raises:
      ValueError: one outside the vocabulary.
    """
    stops = [int(i) for i in stop_token_ids]
    if bad := [i for i in stops if not 0 <= i < target.vocab_size]:
        raise ValueError(f"stop_token_ids must be in [0, {target.vocab_size}), got {bad}")
    return jnp.asarray(stops + [-1] * (-len(stops) % 4 or 4 * (not stops)), jnp.int32)


def check_prompts(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[np.ndarray]:
    """The prompts as int32 arrays.

    Raises:
      ValueError: naming the prompt and what is wrong with it.
    """
    if (
        isinstance(max_new_tokens, bool)
        or int(max_new_tokens) != max_new_tokens
        or max_new_tokens < 0
    ):
        raise ValueError(f"max_new_tokens must be a whole number >= 0, got {max_new_tokens}")
    if isinstance(prompts, str) or not len(prompts) or np.isscalar(prompts[0]):
        raise ValueError(
            f"prompts must be a non-empty list of token-id lists, got {prompts!r:.100}; "
            "encode texts with load_tokenizer(...).encode"
        )
    arrays = []
    for i, prompt in enumerate(prompts):
        array = np.asarray(prompt)
        if array.ndim != 1 or not array.size:
            raise ValueError(
                f"prompts[{i}] must be a non-empty list of token ids, got {prompt!r:.100}"
            )
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"prompts[{i}] must hold integers, got {array.dtype}")
        bad = (array < 0) | (array >= target.vocab_size)
        if bad.any():
            at = int(bad.argmax())
            raise ValueError(
                f"prompts[{i}][{at}] must be a token id in [0, {target.vocab_size}), got {array[at]}"
            )
        if array.size + max_new_tokens > target.context_length:
            raise ValueError(
                f"prompts[{i}] has {array.size} tokens and max_new_tokens is {max_new_tokens}: "
                f"together at most the model's context of {target.context_length}"
            )
        arrays.append(array.astype(np.int32))
    return arrays


def prepare(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling],
    key: jax.Array | int | None,
    stop_token_ids: Sequence[int],
    verification: Verification = Verification(),  # noqa: B008 (frozen)
    slots: int | None = None,
) -> tuple[Drafter, DecodeState, int]:
    """Checks everything at the border and builds the state before prefill; returns the prefill chunk too."""
    keep_room()
    drafter = NoDrafter() if drafter is None else drafter
    drafter.check(target)
    arrays = check_prompts(target, prompts, max_new_tokens)
    stops = check_stops(target, stop_token_ids)
    longest = max(a.size for a in arrays)
    least = needed_slots(longest, max_new_tokens, drafter.num_draft)
    if slots is not None and (int(slots) != slots or slots < least):
        raise ValueError(
            f"slots must be a whole number >= {least} for these prompts, max_new_tokens and drafts, got {slots}"
        )
    slots = bucket(least) if slots is None else -(-int(slots) // CHUNKS[-1]) * CHUNKS[-1]
    tokens = np.zeros((len(arrays), slots), np.int32)
    for row, array in zip(tokens, arrays, strict=True):
        row[: array.size] = array
    length = np.asarray([a.size for a in arrays], np.int32)
    state = start(
        target,
        drafter,
        jnp.asarray(tokens),
        jnp.asarray(length),
        jnp.asarray(length + max_new_tokens),
        make_keys(key, len(arrays)),
        Processors.create(sampling, len(arrays)),
        stops,
        verification,
    )
    return drafter, state, prefill_chunk(longest)


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None = None,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 (frozen)
    key: jax.Array | int | None = None,
    stop_token_ids: Sequence[int] = (),
    verification: Verification = Verification(),  # noqa: B008 (frozen)
    slots: int | None = None,
) -> Generation:
    """Decodes a batch of prompts to their ends in one jitted loop.

    Args:
      target: the model whose distribution the output follows.
      prompts: token-id lists, of any lengths.
      drafter: proposes tokens; None decodes plainly. The output's law does not depend on it.
      max_new_tokens: budget per prompt.
      sampling: settings for all prompts, or one per prompt; the default is greedy.
      key: a `jax.random.key`, one per prompt or one for all, or an integer seed. A row depends on its own key alone.
      stop_token_ids: a row ends after the first of these.
      verification: how drafts are judged; what differs from the default in law is said there.
      slots: of the caches, at least what prompt, new tokens and drafts need, rounded up to a multiple of 128; None is the
        next of 256, 384, 512, 768, ... that has room. Every number is a decoding program of its own (and every batch size):
        calls that name one share it, whatever the lengths of their prompts.

    Raises:
      ValueError: empty prompts, ids outside the vocabulary, more tokens than the model's context, a drafter that was
        made for another target.
    """
    began = time.perf_counter()
    drafter, state, chunk = prepare(
        target,
        prompts,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=key,
        stop_token_ids=stop_token_ids,
        verification=verification,
        slots=slots,
    )
    first = np.asarray(state.length)
    state = jax.block_until_ready(prefill(target, drafter, state, chunk))
    filled = time.perf_counter()
    state = jax.block_until_ready(decode(target, drafter, state, np.iinfo(np.int32).max))
    ended = time.perf_counter()
    tokens, last = np.asarray(state.tokens), np.asarray(state.length)
    return Generation(
        tokens=[tokens[i, first[i] : last[i]].copy() for i in range(len(first))],
        statistics=state.statistics.to_numpy(),
        prefill_seconds=filled - began,
        decode_seconds=ended - filled,
        alarm=None if not isinstance(drafter, Guard) else np.asarray(state.drafter_state.alarm),
    )


def stream(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None = None,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 (frozen)
    key: jax.Array | int | None = None,
    stop_token_ids: Sequence[int] = (),
    verification: Verification = Verification(),  # noqa: B008 (frozen)
    slots: int | None = None,
    rounds: int = 4,
) -> Iterator[Piece]:
    """`generate` in pieces of `rounds` rounds, with the same tokens in the end. Closing the iterator ends decoding."""
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    drafter, state, chunk = prepare(
        target,
        prompts,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=key,
        stop_token_ids=stop_token_ids,
        verification=verification,
        slots=slots,
    )
    sent = np.asarray(state.length)
    state = prefill(target, drafter, state, chunk)
    while True:
        state = decode(target, drafter, state, rounds)
        tokens, length, done = (np.asarray(x) for x in (state.tokens, state.length, state.done))
        yield Piece(
            tokens=[tokens[i, sent[i] : length[i]].copy() for i in range(len(sent))],
            done=done.copy(),
            statistics=state.statistics.to_numpy(),
        )
        sent = length.copy()
        if done.all():
            return
