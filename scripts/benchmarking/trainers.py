"""A trainer of EAGLE-3 heads in a process of its own: specjax's, or speculators' on torch.

What it holds is then its own, and nothing is imported here that only the other side needs. The process takes a `Job` as
its argument, and for each line [B, T] on its input does one update of B sequences of T tokens and answers with a line.
"""

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

STEPS = 4  # S
TAPS = 3  # A
DECAY, RATE, CLIP = 0.8, 1e-3, 0.5

Update = Callable[[int, int], tuple[float, float]]
"""From B and T to an update's seconds and its loss."""


@dataclass(frozen=True)
class Job:
    """What is trained, and how.

    Attributes:
      side: whose trainer.
      source: of the target, as `specjax.load_target` has it.
      folder: of the head that both start from; specjax's side writes it.
      draft_vocab_size: Vd.
      dtype: `float32`, or `bfloat16` for products, with masters in float32.
      at_once: whether a batch goes through whole, which for speculators is one sequence [1, B T]; or sequence by
        sequence, with accumulated gradients.
    """

    side: Literal["specjax", "speculators"]
    source: str
    folder: str
    draft_vocab_size: int
    dtype: str = "float32"
    at_once: bool = False

    def dumps(self) -> str:
        return json.dumps(asdict(self))


def examples(vocab_size: int, width: int, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens int32[B, T], and states bfloat16[B, T, A + 1, Ht]: the taps, then what leaves the last layer."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, (count, length), dtype=np.int32)
    states = rng.standard_normal((count, length, TAPS + 1, width), dtype=np.float32)
    return tokens, states.astype(ml_dtypes.bfloat16)


def make_step(config: Any, head: Any, dtype: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The update of a training run, the head's parameters that it trains, and the head's other arrays."""
    from training.heads import is_trained
    from training.parameters import split
    from training.recipes import Eagle3Recipe
    from training.step import Step, make_optimizer

    params, frozen, structure = split(head, partial(is_trained, config.train_readout))
    step = Step(
        structure=structure,
        optimizer=make_optimizer(config, 100),
        recipe=Eagle3Recipe(config.steps, config.step_decay, config.objective),
        steps=config.steps,
        seed=0,
        taps=head.config.taps,
        dtype=dtype,
    )
    return step, params, frozen


def specjax_update(job: Job) -> Update:
    """specjax's on stored features; writes the head that it starts from."""
    import jax
    import jax.numpy as jnp
    from common import use_compilation_cache

    import specjax
    from training.config import TrainConfig
    from training.eagle3 import Batch
    from training.features import Features, without_layers
    from training.heads import new_head
    from training.losses import Teacher

    use_compilation_cache()
    target: Any = specjax.load_target(job.source, dtype=jnp.dtype(job.dtype))
    if job.draft_vocab_size > target.vocab_size:
        raise ValueError(
            f"draft_vocab_size must be at most the target's {target.vocab_size}, got {job.draft_vocab_size}"
        )
    layers = target.config.num_layers
    config = TrainConfig(
        target=job.source,
        data=Path(),
        output=Path(),
        draft_vocab_size=job.draft_vocab_size,
        taps=(0, layers // 2, layers),  # the features are random: which ones does not matter
        steps=STEPS,
        step_decay=DECAY,
        learning_rate=RATE,
        clip=CLIP,
    )
    head = new_head(config, target, np.arange(job.draft_vocab_size, dtype=np.int32))
    specjax.save_head(head, job.folder, "speculators", target=target)
    step, params, frozen = make_step(config, head, jnp.dtype(job.dtype))
    state = step.start(params)
    target = without_layers(target)  # as a run on stored features does
    del head, params
    gc.collect()

    def update(count: int, length: int) -> tuple[float, float]:
        nonlocal state
        tokens, states = examples(target.vocab_size, target.config.hidden_size, count, length)
        parts = 1 if job.at_once else count
        one = jnp.ones((parts, count // parts, length), jnp.int32)
        batch = Batch(tokens=jnp.asarray(tokens).reshape(one.shape), wanted=one > 0, document=one)
        given = jnp.asarray(states).reshape(*one.shape, *states.shape[2:])
        # the likeliest token is one of the draft vocabulary, so that every row counts, as for the peer
        teacher = Teacher(
            last=given[..., TAPS, :], log_total=jnp.zeros(one.shape), best=jnp.zeros_like(one)
        )
        features = jax.block_until_ready(Features(taps=given[..., :TAPS, :], teacher=teacher))
        began = time.perf_counter()
        state, report = step.update(state, frozen, target, batch, features)
        loss = float(report.loss)
        return time.perf_counter() - began, loss

    return update


def speculators_update(job: Job) -> Update:
    """speculators' model, loss and optimizer as its own trainer joins them, on the CPU."""
    # optional, and no part of the oracle's packages; first, so that a lack of it shows at once
    import speculators.models.eagle3 as eagle3  # pyright: ignore[reportMissingImports]
    import torch
    from safetensors.torch import load_file
    from speculators.losses import resolve_loss_config  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(os.cpu_count() or 1)
    config = eagle3.Eagle3SpeculatorConfig.from_pretrained(job.folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = eagle3.Eagle3DraftModel(config)
    weights = load_file(Path(job.folder) / "model.safetensors")
    # a new head has the target's norm and rows of the vocabulary: the teacher's are the same
    weights["verifier_norm.weight"] = weights["norm.weight"]
    weights["verifier_lm_head.weight"] = weights["lm_head.weight"]
    model.load_state_dict({name: x.clone() for name, x in weights.items()})
    del weights
    model.lm_head.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=RATE, weight_decay=0.0)
    loss_config = resolve_loss_config("kl_div", "eager")  # the fused one needs a GPU

    def loss_of(tokens: torch.Tensor, states: torch.Tensor) -> Any:
        """Of sequences [B, T] as one; token t + 1 goes with the taps at t and the last state at t + 1."""
        count, length = tokens.shape
        mask = torch.ones(count, length - 1)
        mask[:, -1] = 0  # nothing follows the last token
        documents = torch.arange(count)[:, None].expand(count, length - 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=job.dtype == "bfloat16"):
            return model(
                hidden_states=states[:, :-1, :TAPS].reshape(1, count * (length - 1), -1),
                input_ids=tokens[:, 1:].reshape(1, -1),
                document_ids=documents.reshape(1, -1),
                loss_mask=mask.reshape(1, -1),
                verifier_last_hidden_states=states[:, 1:, TAPS].reshape(
                    1, count * (length - 1), -1
                ),
                ttt_steps=STEPS,
                ttt_step_loss_decay=DECAY,
                loss_config=loss_config,
            )[1]

    def update(count: int, length: int) -> tuple[float, float]:
        shape = config.transformer_layer_config
        drawn = examples(shape.vocab_size, shape.hidden_size, count, length)
        tokens = torch.from_numpy(drawn[0]).long()
        states = torch.from_numpy(drawn[1].view(np.int16)).view(torch.bfloat16)
        states = states.to(getattr(torch, job.dtype))
        began, total = time.perf_counter(), 0.0
        parts = 1 if job.at_once else count
        for part in zip(tokens.chunk(parts), states.chunk(parts), strict=True):
            loss = loss_of(*part) / parts
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began, total

    return update


def peak_bytes() -> int:
    """The most that this process has held. Linux hands a parent's `ru_maxrss` on to its children, so it is asked for the
    memory's own mark."""
    status = Path("/proc/self/status")
    if status.exists():
        [line] = [x for x in status.read_text().splitlines() if x.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(**found: Any) -> None:
        print(json.dumps(found), file=answers, flush=True)

    job = Job(**json.loads(sys.argv[1]))
    try:
        update = (specjax_update if job.side == "specjax" else speculators_update)(job)
    except ImportError as reason:
        return answer(skipped=str(reason))
    answer(skipped=None)
    for line in sys.stdin:
        seconds, loss = update(*json.loads(line))
        answer(seconds=seconds, loss=loss, peak_bytes=peak_bytes())


if __name__ == "__main__":
    main()
