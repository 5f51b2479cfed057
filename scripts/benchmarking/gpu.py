"""One accelerator, in ten minutes: Llama 8B's shapes with random weights, beside what the device can do at most.

No weights are needed: speed depends on shapes, and acceptance is synthetic, of a stated length, so that drafting, verifying
and training cost what they cost while the text means nothing. The limits are measured on the same device: how fast a copy
moves bytes, and how fast one large product of bfloat16 matrices computes.

B rows, T tokens, S steps.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

import specjax
from benchmarking.rounds import curve_table, measure_curve
from benchmarking.trainers import make_step
from benchmarking.workloads import decode_one, tokens_per_second
from specjax.advice import estimate_memory, tree_bytes
from specjax.models.config import LayerConfig, Rope, TransformerConfig
from specjax.models.transformer import Transformer
from specjax.verification import synthetic_rates
from training.config import TrainConfig
from training.eagle3 import Batch
from training.heads import new_head

ShapeName = Literal["llama-8b", "tiny"]
SECONDS = 540.0  # no stage begins after this
NUM_DRAFT = 3
LENGTH = 2.5  # tokens per pass: what EAGLE-3 heads are reported to reach with three drafts, roughly
PROMPT = 128  # tokens
CONTEXT = 512  # cache slots of the plain decoding


@dataclass(frozen=True)
class Shapes:
    """What is measured.

    Attributes:
      config: of the target.
      draft_vocab_size: of the head.
      tokens: new ones of every decoding.
      batches: rows of the sweep.
      sequences, length: B and T of a training batch.
      product: rows and columns of the matrices, and copied: bytes, that the device's limits are measured with.
    """

    config: TransformerConfig
    draft_vocab_size: int
    tokens: int
    batches: tuple[int, ...]
    sequences: int
    length: int
    product: int
    copied: int


SHAPES: dict[ShapeName, Shapes] = {
    "llama-8b": Shapes(
        TransformerConfig(
            family="llama",
            vocab_size=128256,
            hidden_size=4096,
            mlp_size=14336,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            layers=(LayerConfig(),) * 32,
            ropes=(Rope(theta=500000.0),),
            context_length=8192,
        ),
        draft_vocab_size=32000,
        tokens=128,
        batches=(1, 4, 16, 64),
        sequences=4,
        length=2048,
        product=8192,
        copied=2**30,
    ),
    "tiny": Shapes(
        TransformerConfig(
            family="llama",
            vocab_size=512,
            hidden_size=32,
            mlp_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            layers=(LayerConfig(),) * 7,
            ropes=(Rope(),),
            context_length=1024,
        ),
        draft_vocab_size=64,
        tokens=8,
        batches=(2,),
        sequences=1,
        length=64,
        product=128,
        copied=2**20,
    ),
}


def best_seconds(function: Callable[..., Any], *arguments: Any, repeats: int = 10) -> float:
    """Seconds of the fastest of `repeats` calls, after one that compiles."""
    jax.block_until_ready(function(*arguments))
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        spent.append(time.perf_counter() - began)
    return min(spent)


def copy_bandwidth(size: int) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes."""
    x = jnp.zeros(size // 4, jnp.float32)
    return 2 * x.nbytes / best_seconds(jax.jit(lambda x: x + 1), x)


def product_flops(size: int) -> float:
    """Operations per second of a product of two bfloat16 matrices [size, size]."""
    x = jnp.ones((size, size), jnp.bfloat16)
    return 2 * size**3 / best_seconds(jax.jit(jnp.matmul), x, x)


def random_head(target: Transformer, shapes: Shapes) -> tuple[TrainConfig, Any]:
    """The settings of a training run that exists nowhere, and its EAGLE-3 head in float32."""
    nowhere = Path()
    config = TrainConfig(
        target="random",
        data=nowhere,
        output=nowhere,
        draft_vocab_size=shapes.draft_vocab_size,
        batch_size=shapes.sequences,
    )
    return config, new_head(config, target, np.arange(shapes.draft_vocab_size, dtype=np.int32))


def in_dtype(module: Any, dtype: Any) -> Any:
    """The module with its matrices in another type."""

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, module)


def decoding_bytes(target: Transformer) -> int:
    """What a plain step at batch 1 has to read: all weights but the embedding's other rows, and the cache."""
    embedding = 0 if target.config.tied else target.vocab_size * target.config.hidden_size
    cache = estimate_memory(target, context=CONTEXT).cache
    return tree_bytes(target) - embedding * target.dtype.itemsize + cache


def random_prompts(target: Transformer, batch: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return rng.integers(0, target.vocab_size, (batch, PROMPT)).tolist()


def measure_plain(target: Transformer, bandwidth: float) -> dict[str, float]:
    """Plain decoding at batch 1 beside what the memory's bandwidth allows."""
    new = CONTEXT - PROMPT - 2
    out = decode_one(target, random_prompts(target, 1), max_new_tokens=new)
    speed, limit = tokens_per_second([out]), bandwidth / decoding_bytes(target)
    return {"tokens_per_second": speed, "limit": limit, "reached": speed / limit}


def measure_batch(target: Transformer, drafter: Any, batch: int, tokens: int) -> dict[str, float]:
    """Tokens per second of all rows, decoding alone, plain and drafted with synthetic acceptance."""
    prompts = random_prompts(target, batch)
    rates = specjax.Verification(synthetic_rates=synthetic_rates(LENGTH, NUM_DRAFT))
    plain = decode_one(target, prompts, max_new_tokens=tokens)
    drafted = decode_one(
        target, prompts, drafter=drafter, max_new_tokens=tokens, verification=rates
    )
    speeds = {"plain": tokens_per_second([plain]), "drafted": tokens_per_second([drafted])}
    return speeds | {
        "speed_up": speeds["drafted"] / speeds["plain"],
        "tokens_per_pass": drafted.statistics.mean_acceptance_length,
    }


def training_flops(target: Transformer, params: dict[str, jax.Array], steps: int) -> int:
    """Operations per token of an update: matrices alone, without attention's scores.

    2 of the target's forward pass for each of its weights that multiplies, and 6 of the head's forward and backward; the
    map from the taps is passed once, all else at every step.
    """
    embedding = target.vocab_size * target.config.hidden_size
    weights = sum(x.size for x in jax.tree.leaves(target) if x.ndim > 1)
    multiplied = weights - (0 if target.config.tied else embedding)
    head = {name: x.size for name, x in params.items() if x.ndim > 1 and name != "embedding"}
    once = head.pop("fc")
    return 2 * multiplied + 6 * (once + steps * sum(head.values()))


def measure_training(target: Transformer, shapes: Shapes, flops: float) -> dict[str, float]:
    """Updates of an EAGLE-3 head, the target passing over every batch."""
    config, head = random_head(target, shapes)
    step, params, frozen = make_step(config, head, target.dtype)
    per_token = training_flops(target, params, config.steps)
    state = step.start(params)
    size = (1, shapes.sequences, shapes.length)
    tokens = jax.random.randint(jax.random.key(0), size, 0, target.vocab_size, jnp.int32)
    ones = jnp.ones(size, jnp.int32)
    batch = Batch(tokens=tokens, wanted=ones > 0, document=ones)
    spent = []
    for _ in range(4):
        began = time.perf_counter()
        state, report = step.update(state, frozen, target, batch, None)
        jax.block_until_ready(report)
        spent.append(time.perf_counter() - began)
    speed = tokens.size / min(spent[1:])  # the first compiles
    return {"tokens_per_second": speed, "utilisation": speed * per_token / flops}


def measure_torch(shapes: Shapes) -> dict[str, float]:
    """Plain decoding by transformers at batch 1: as it is, and compiled over a static cache.

    Raises:
      ImportError, RuntimeError: torch, transformers, CUDA or room for a second copy of the weights is not there.
    """
    import torch

    # by name: reading its thousand modules takes the type checker half a minute
    transformers: Any = import_module("transformers")

    if not torch.cuda.is_available():
        raise RuntimeError("torch has no CUDA here")
    c = shapes.config
    settings = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.mlp_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
    )
    with torch.device("cuda"):
        model: Any = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
        ids = torch.randint(0, c.vocab_size, (1, PROMPT))
    model.generation_config.eos_token_id = None
    greedy = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    found = {}
    # a static cache is what makes `generate` compile the model
    for name, cache in (("transformers", {}), ("compiled", {"cache_implementation": "static"})):

        def seconds(count: int, cache: Any = cache) -> float:
            began = time.perf_counter()
            model.generate(ids, max_new_tokens=count, **greedy, **cache)
            torch.cuda.synchronize()
            return time.perf_counter() - began

        seconds(shapes.tokens)
        first = seconds(1)
        found[name] = (shapes.tokens - 1) / (seconds(shapes.tokens) - first)
    return found


def measure_gpu(name: ShapeName, repeats: int, console: Console) -> dict[str, Any]:
    """Every stage that can begin within `SECONDS`; each is shown when it is done, what is left out is said.

    Returns:
      by stage; `skipped` has the reasons of what was left out.
    """
    if name != "tiny" and jax.default_backend() == "cpu":
        reason = "no accelerator here; --gpu-shapes tiny tries the same on a CPU"
        console.print(f"gpu skipped: {reason}")
        return {"skipped": {"gpu": reason}}
    shapes, began = SHAPES[name], time.perf_counter()
    result: dict[str, Any] = {"shapes": name, "skipped": {}}

    def stage(key: str, measure: Callable[[], Any]) -> None:
        if time.perf_counter() - began > SECONDS:
            result["skipped"][key] = f"{SECONDS:.0f} s were over"
            return
        try:
            result[key] = measure()
        except KeyError as missing:
            result["skipped"][key] = f"it needs {missing}, which was skipped"
        except (ImportError, RuntimeError) as reason:  # no torch, or no room
            result["skipped"][key] = str(reason).split("\n")[0]
        console.print(f"[dim]{key}: done after {time.perf_counter() - began:.0f} s[/]")

    stage("copy_bandwidth", lambda: copy_bandwidth(shapes.copied))
    stage("product_flops", lambda: product_flops(shapes.product))
    made: dict[str, Any] = {}

    def build() -> int:
        """Bytes of the target and the head."""
        target = Transformer(shapes.config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        head = in_dtype(random_head(target, shapes)[1], target.dtype)
        made.update(target=target, drafter=specjax.Eagle3(head, NUM_DRAFT))
        return tree_bytes((target, head))

    stage("weights", build)
    stage("plain", lambda: measure_plain(made["target"], result["copy_bandwidth"]))
    stage("curve", lambda: measure_curve(made["target"], repeats))
    for batch in shapes.batches:

        def measure(batch: int = batch) -> dict[str, float]:
            return measure_batch(made["target"], made["drafter"], batch, shapes.tokens)

        stage(f"batch {batch}", measure)
    stage("training", lambda: measure_training(made["target"], shapes, result["product_flops"]))
    stage("torch", lambda: measure_torch(shapes))
    for table in gpu_tables(result):
        console.print(table)
    for key, reason in result["skipped"].items():
        console.print(f"{key} skipped: {reason}")
    return result


def gpu_tables(result: dict[str, Any]) -> Sequence[Table]:
    title = f"Shapes of {result['shapes']}, random bfloat16 weights"
    table = Table("", "measured", "limit", "reached", title=title)
    if copied := result.get("copy_bandwidth"):
        table.add_row("copy", f"{copied / 1e9:.3g} GB/s", "", "")
    if flops := result.get("product_flops"):
        table.add_row("bfloat16 product", f"{flops / 1e12:.3g} TFLOP/s", "", "")
    if plain := result.get("plain"):
        table.add_row(
            "plain decoding, batch 1",
            f"{plain['tokens_per_second']:.1f} tokens/s",
            f"{plain['limit']:.1f}",
            f"{plain['reached']:.1%}",
        )
    for name, speed in result.get("torch", {}).items():
        table.add_row(f"torch, {name}", f"{speed:.1f} tokens/s", "", "")
    if training := result.get("training"):
        table.add_row(
            "EAGLE-3 training",
            f"{training['tokens_per_second']:.0f} tokens/s",
            "",
            f"{training['utilisation']:.1%}",
        )
    tables = [table]
    if "curve" in result:
        tables.append(curve_table(result["curve"]))
    title = f"{NUM_DRAFT} drafts of a random EAGLE-3 head, synthetic acceptance"
    sweep = Table("batch", "plain, tokens/s", "drafted", "speed-up", "tokens/pass", title=title)
    for key, found in result.items():
        if key.startswith("batch "):
            sweep.add_row(
                key.removeprefix("batch "),
                f"{found['plain']:.1f}",
                f"{found['drafted']:.1f}",
                f"{found['speed_up']:.2f}x",
                f"{found['tokens_per_pass']:.2f}",
            )
    return [*tables, sweep]
