"""A tiny model, trained on the spot from text that every Python brings along: its own standard library.

Demonstrations and tests need a target whose drafts are accepted for a reason, and a random model is none. This one costs
seconds and neither a download nor a file. It continues Python source; it is no chat model, and its template merely joins
what the messages say.

U updates, B rows, T tokens, V vocabulary.
"""

import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx
from jax import Array

from specjax.checkpoints.tokenizer import Tokenizer
from specjax.models.config import LayerConfig, TransformerConfig
from specjax.models.transformer import Transformer
from training.eagle3 import Batch
from training.features import hidden_states
from training.parameters import Parameters, Structure, split

END = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MODULES = ("cmd", "heapq", "shlex", "textwrap")  # 70 kB that every Python since 3.11 has
VOCABULARY = 512
ROWS, LENGTH = 16, 32  # of a batch


def library_text() -> list[str]:
    """The source of `MODULES`."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [(folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES]


def openings(count: int, seed: int = 0) -> list[str]:
    """Distinct places of the text to go on from: three lines, the last of which opens a block or an argument list.

    Raises:
      ValueError: there are not so many.
    """
    found = {}
    for text in library_text():
        lines = text.splitlines(keepends=True)
        for i, line in enumerate(lines):
            if i >= 2 and line.rstrip().endswith((":", "(", ",")):
                found["".join(lines[i - 2 : i + 1])] = None
    if count > len(found):
        raise ValueError(f"count must be at most {len(found)}, got {count}")
    chosen = np.random.default_rng(seed).permutation(len(found))[:count]
    return [list(found)[i] for i in chosen]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of V tokens."""
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE())
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(texts, trainer)
    return Tokenizer(
        encoder,
        chat_templates={"default": TEMPLATE},
        stop_token_ids=[encoder.get_vocab()[END]],
        special_tokens={"eos_token": END},
    )


@partial(jax.jit, static_argnums=(0, 1))
def fit(
    structure: Structure, optimizer: optax.GradientTransformation, params: Parameters, rows: Array
) -> tuple[Parameters, Array]:
    """One update for each batch of rows int32[U, B, T]; the parameters, and float32[U] losses in nats a token."""

    def loss(params: Parameters, tokens: Array) -> Array:
        model = structure.join(params)
        everything = jnp.ones_like(tokens)
        batch = Batch(tokens=tokens, wanted=everything > 0, document=everything)
        _, last = hidden_states(model, batch, (0,))
        logits, next_tokens = model.logits(last[:, :-1]), tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, next_tokens).mean()

    def update(carry, tokens: Array):
        params, state = carry
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), value

    trained: Any
    (trained, _), losses = jax.lax.scan(update, (params, optimizer.init(params)), rows)
    return trained, losses


def train_tiny(updates: int = 160, seed: int = 0) -> tuple[Transformer, Tokenizer, np.ndarray]:
    """Trains the tiny model; the same arguments on the same Python and machine give the same one.

    Returns:
      the model, its tokenizer, and float32[U], the loss of every update in nats a token.
    """
    texts = library_text()
    tokenizer = train_tokenizer(texts)
    (end,) = tokenizer.stop_token_ids
    stream = np.concatenate([[*tokenizer.encode(text), end] for text in texts]).astype(np.int32)
    starts = np.random.default_rng(seed).integers(0, len(stream) - LENGTH, (updates, ROWS, 1))
    rows = stream[starts + np.arange(LENGTH)]
    config = TransformerConfig(
        family="llama",
        vocab_size=tokenizer.vocab_size,
        hidden_size=96,
        mlp_size=288,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        layers=(LayerConfig(),) * 2,
        context_length=1024,
    )
    model = Transformer(config, rngs=nnx.Rngs(seed))
    params, _, structure = split(model, lambda _: True)
    schedule = optax.schedules.warmup_cosine_decay_schedule(0.0, 7e-3, updates // 10, updates)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    params, losses = fit(structure, optimizer, params, jnp.asarray(rows))
    return structure.join(params), tokenizer, np.asarray(losses)
