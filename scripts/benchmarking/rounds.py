"""What a round costs: by its width, and by its parts."""

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import DRAFTERS, make_drafter
from flax import struct
from rich.table import Table

import specjax
from benchmarking.oracles import Curve
from specjax.decoding import decode, prefill
from specjax.drafters.base import Context, NoDrafter, Proposal
from specjax.generate import prepare
from specjax.sampling import Processors, make_keys
from specjax.trees import ladder
from specjax.tuning import time_pass, time_split


@struct.dataclass
class Width(NoDrafter):
    """Proposes `width - 1` tokens at no cost: isolates what a round costs beside the target's pass.

    Attributes:
      width: int32[], of the block that is passed over.
      widest: of the blocks that are compiled.
    """

    width: jax.Array
    widest: int = struct.field(pytree_node=False)

    @property
    def num_draft(self) -> int:
        return self.widest - 1

    def propose(self, target: Any, state: None, context: Context) -> tuple[Proposal, None]:
        tokens = jnp.zeros((context.length.shape[0], self.num_draft), jnp.int32)
        return Proposal(tokens=tokens, length=jnp.full_like(context.length, self.width - 1)), None


def time_round(
    target: Any, width: int, widest: int, *, batch: int = 1, slots: int = 512, rounds: int = 30
) -> float:
    """Seconds of a whole round of `width` tokens. Call twice: the first call compiles."""
    drafter, state, chunk = prepare(
        target,
        [[1] * 100] * batch,
        drafter=Width(jnp.int32(width), widest),
        max_new_tokens=slots - 100 - widest - 1,
        sampling=specjax.Sampling(),
        key=0,
        stop_token_ids=(),
    )
    state = jax.block_until_ready(prefill(target, drafter, state, chunk))
    began = time.perf_counter()
    jax.block_until_ready(decode(target, drafter, state, rounds))
    return (time.perf_counter() - began) / rounds


def measure_curve(
    target: Any,
    repeats: int,
    *,
    longest: int = 15,
    batch: int = 1,
    slots: int = 512,
    passes: int = 20,
) -> dict[str, Any]:
    """Milliseconds of a bare pass and of a whole round, by width up to `longest` drafts, and 15 at least: medians of
    measurements in turn."""
    widths = ladder(max(longest, 15))
    bare: dict[int, list[float]] = defaultdict(list)
    whole: dict[int, list[float]] = defaultdict(list)
    for attempt in range(repeats + 1):  # the first compiles
        for width in widths:
            one = time_pass(target, width, batch=batch, slots=slots, passes=passes)
            full = time_round(target, width, widths[-1], batch=batch, slots=slots, rounds=passes)
            if attempt:
                bare[width].append(1e3 * one)
                whole[width].append(1e3 * full)
    return {
        "batch": batch,
        "slots": slots,
        "pass_ms": {w: float(np.median(ms)) for w, ms in bare.items()},
        "round_ms": {w: float(np.median(ms)) for w, ms in whole.items()},
    }


def relative(curve: Mapping[str, Any]) -> Curve:
    """The verify curve: cost of a pass by its width, in passes over one token."""
    return {width: ms / curve["pass_ms"][1] for width, ms in curve["pass_ms"].items()}


def curve_table(curve: Mapping[str, Any]) -> Table:
    table = Table(
        "width", "pass, ms", "relative", "round, ms", "round / pass", title="Verify curve"
    )
    for width, cost in relative(curve).items():
        one, full = curve["pass_ms"][width], curve["round_ms"][width]
        table.add_row(str(width), f"{one:.2f}", f"{cost:.2f}", f"{full:.2f}", f"{full / one:.3f}")
    return table


def measure_lookup(target: Any, repeats: int, history: int = 8192) -> dict[str, float]:
    """Milliseconds of one proposal of every look-up drafter over a history of `history` tokens, and of one pass."""
    tokens = np.random.default_rng(0).integers(0, min(400, target.vocab_size), (1, history))
    context = Context(
        tokens=jnp.asarray(tokens, jnp.int32),
        length=jnp.asarray([history - 64]),
        keys=make_keys(0, 1),
        processors=Processors(),
        seen=None,
    )
    calls = {}
    for name in DRAFTERS:
        if (drafter := make_drafter(name, None)) is not None:
            propose = jax.jit(lambda state, context, d=drafter: d.propose(target, state, context))
            calls[name] = (propose, drafter.init(target, 1, history))
    times: dict[str, list[float]] = defaultdict(list)
    for attempt in range(repeats + 1):  # the first compiles
        for name, (propose, state) in calls.items():
            began = time.perf_counter()
            for _ in range(20):
                jax.block_until_ready(propose(state, context))
            if attempt:
                times[name].append(1e3 * (time.perf_counter() - began) / 20)
        spent = 1e3 * time_pass(target, 1)
        if attempt:
            times["pass"].append(spent)
    return {name: float(np.median(spent)) for name, spent in times.items()}


def lookup_table(result: Mapping[str, float]) -> Table:
    table = Table("drafter", "ms", "of a pass", title="Look-up over 8192 tokens")
    for name, spent in result.items():
        if name != "pass":
            table.add_row(name, f"{spent:.2f}", f"{spent / result['pass']:.1%}")
    return table


def measure_split(
    target: Any, drafters: Mapping[str, Any], prompt: list[int]
) -> dict[str, dict[str, float]]:
    """Milliseconds of the parts of a round after a prompt, by drafter; "plain" is without one."""
    result = {}
    for name, drafter in {"plain": NoDrafter(), **drafters}.items():
        room = (target.context_length - len(prompt)) // (drafter.num_draft + 1) - 1
        seconds = time_split(target, drafter, prompt, rounds=min(32, room))
        result[name] = {part: 1e3 * spent for part, spent in seconds.items()}
    return result


def split_table(result: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table("method", "round, ms", "draft", "verify", "rest", title="Parts of a round")
    for name, spent in result.items():
        shares = [f"{spent[part] / spent['round']:.1%}" for part in ("draft", "verify", "rest")]
        table.add_row(name, f"{spent['round']:.1f}", *shares)
    return table
