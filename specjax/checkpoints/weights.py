"""From the tensors of a file to the parameters of a `Transformer`.

Every file format presents its tensors under Hugging Face's names and shapes (`TensorFile`); one map, `parameter_parts`, says
which of them make up which parameter. Names and shapes are all checked before the first tensor is read, and every problem is
reported at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models.config import TransformerConfig
from specjax.models.transformer import Transformer


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is; the message names every problem found."""


class TensorFile(Protocol):
    """Named tensors in Hugging Face's names and shapes."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str) -> np.ndarray: ...


@dataclass(frozen=True)
class Part:
    """One tensor of the file, and where it goes in a parameter.

    Attributes:
      name: in Hugging Face's layout.
      shape: expected in the file.
      index: which part of the parameter it fills.
      place: from the file's array to that part's shape.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple = ()
    place: Callable[[np.ndarray], np.ndarray] = lambda x: x


def _transpose(x: np.ndarray) -> np.ndarray:
    return x.T


def _attention(config: TransformerConfig, at: str) -> Iterator[tuple[str, list[Part]]]:
    width, heads, head = config.hidden_size, config.num_kv_heads, config.head_dim
    group = config.num_heads // heads
    everything = slice(None)

    def rows(x: np.ndarray) -> np.ndarray:  # [heads * ... * head, D] -> [D, heads, ..., head]
        y = x.T.reshape(width, heads, -1, head)
        return y if y.shape[2] > 1 else y[:, :, 0]

    def queries(x: np.ndarray) -> np.ndarray:
        return x.T.reshape(width, heads, group, head)

    fused = config.family == "phi3"
    if fused:  # rows: all queries, then all keys, then all values

        def fuse(x: np.ndarray) -> np.ndarray:
            q, k, v = np.split(x, [heads * group * head, heads * (group + 1) * head])
            return np.concatenate([queries(q), rows(k)[:, :, None], rows(v)[:, :, None]], axis=2)

        shape = (heads * (group + 2) * head, width)
        yield "qkv", [Part(f"{at}.qkv_proj.weight", shape, (), fuse)]
    else:
        index = {"q": slice(0, group), "k": group, "v": group + 1}
        sizes = {"q": heads * group * head, "k": heads * head, "v": heads * head}
        yield (
            "qkv",
            [
                Part(
                    f"{at}.{x}_proj.weight",
                    (sizes[x], width),
                    (everything, everything, index[x]),
                    queries if x == "q" else rows,
                )
                for x in "qkv"
            ],
        )
        if config.qkv_bias:

            def bias(x: np.ndarray) -> np.ndarray:
                y = x.reshape(heads, -1, head)
                return y

            yield (
                "qkv_bias",
                [
                    Part(f"{at}.q_proj.bias", (sizes["q"],), (everything, index["q"]), bias),
                    *(
                        Part(
                            f"{at}.{x}_proj.bias",
                            (sizes[x],),
                            (everything, index[x]),
                            lambda y: y.reshape(heads, head),
                        )
                        for x in "kv"
                    ),
                ],
            )
    mixed = heads * group * head
    yield "output", [Part(f"{at}.o_proj.weight", (width, mixed), (), _transpose)]
    if config.output_bias:
        yield "output_bias", [Part(f"{at}.o_proj.bias", (width,))]


def _gated(at: str, width: int, hidden: int, index: tuple = ()) -> tuple[list[Part], list[Part]]:
    """Parts of gate_up [D, 2, F] and of down [F, D]; `index` selects an expert in front."""
    both = [
        Part(f"{at}.{x}_proj.weight", (hidden, width), (*index, slice(None), i), _transpose)
        for i, x in enumerate(("gate", "up"))
    ]
    return both, [Part(f"{at}.down_proj.weight", (width, hidden), index, _transpose)]


def _mlp(config: TransformerConfig, at: str, experts: bool) -> Iterator[tuple[str, list[Part]]]:
    width = config.hidden_size
    if experts:
        yield (
            "router",
            [Part(f"{at}.gate.weight", (config.num_experts, width), (), _transpose)],
        )
        both, down = [], []
        for e in range(config.num_experts):
            b, d = _gated(f"{at}.experts.{e}", width, config.expert_size, (e,))
            both += b
            down += d
        yield "gate_up", both
        yield "down", down
        return
    hidden = config.mlp_size
    both, down = _gated(at, width, hidden)
    if config.family == "phi3":
        both = [
            Part(
                f"{at}.gate_up_proj.weight",
                (2 * hidden, width),
                (),
                lambda x: x.T.reshape(width, 2, hidden),
            )
        ]
    yield "gate_up", both
    yield "down", down
    if config.mlp_bias:
        yield (
            "gate_up_bias",
            [Part(f"{at}.{x}_proj.bias", (hidden,), (i,)) for i, x in enumerate(("gate", "up"))],
        )
        yield "down_bias", [Part(f"{at}.down_proj.bias", (width,))]


def parameter_parts(config: TransformerConfig) -> dict[str, list[Part]]:
    """For each parameter, by its path in the module, the tensors that make it up."""
    width, vocab = config.hidden_size, config.vocab_size
    gemma = config.family.startswith("gemma")
    plus_one = (lambda x: x + np.float32(1)) if gemma else (lambda x: x)

    def norm(name: str, size: int = width) -> list[Part]:
        return [Part(f"{name}.weight", (size,), (), plus_one)]

    parts: dict[str, list[Part]] = {"norm.weight": norm("model.norm")}
    embedding = Part("model.embed_tokens.weight", (vocab, width))
    if config.tied:
        parts["head"] = [Part(embedding.name, embedding.shape, (), _transpose)]
    else:
        parts["embedding"] = [embedding]
        parts["head"] = [Part("lm_head.weight", (vocab, width), (), _transpose)]
    for i, layer in enumerate(config.layers):
        here, there = f"layers[{i}]", f"model.layers.{i}"
        for name, pieces in _attention(config, f"{there}.self_attn"):
            parts[f"{here}.attention.{name}"] = pieces
        for name, pieces in _mlp(config, f"{there}.mlp", layer.experts):
            parts[f"{here}.mlp.{name}"] = pieces
        if config.qk_norm:
            for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
                parts[f"{here}.attention.{ours}.weight"] = norm(
                    f"{there}.self_attn.{theirs}", config.head_dim
                )
        parts[f"{here}.attention_norm.weight"] = norm(f"{there}.input_layernorm")
        after = f"{there}.post_attention_layernorm"
        if config.post_norms:
            parts[f"{here}.attention_post_norm.weight"] = norm(after)
            parts[f"{here}.mlp_norm.weight"] = norm(f"{there}.pre_feedforward_layernorm")
            parts[f"{here}.mlp_post_norm.weight"] = norm(f"{there}.post_feedforward_layernorm")
        else:
            parts[f"{here}.mlp_norm.weight"] = norm(after)
    return parts


def _ignored(name: str, config: TransformerConfig) -> bool:
    """Tensors that carry nothing: buffers of old releases, and a tied model's copy of its table."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def check_tensors(config: TransformerConfig, shapes: dict[str, tuple[int, ...]], where: str):
    """Raises `CheckpointError` with every missing, unknown and misshapen tensor."""
    expected = {p.name: p.shape for ps in parameter_parts(config).values() for p in ps}
    problems = []
    for name, shape in expected.items():
        if name not in shapes:
            problems.append(f"missing tensor {name}, expected shape {shape}")
        elif tuple(shapes[name]) != shape:
            problems.append(f"tensor {name}: expected shape {shape}, got {tuple(shapes[name])}")
    for name in shapes.keys() - expected.keys():
        if not _ignored(name, config):
            problems.append(f"unknown tensor {name} of shape {tuple(shapes[name])}")
    if problems:
        listed = "\n  ".join(sorted(problems)[:40])
        more = f"\n  and {len(problems) - 40} more" if len(problems) > 40 else ""
        raise CheckpointError(f"{where}: {len(problems)} problems\n  {listed}{more}")


def load_parameters(
    config: TransformerConfig, file: TensorFile, dtype: jnp.dtype, where: str
) -> Transformer:
    """A `Transformer` filled from a file, parameter by parameter.

    The largest parameters come first, while little else is in memory: the peak stays near the model's own size.
    """
    check_tensors(config, file.shapes, where)
    parts = parameter_parts(config)
    abstract = jax.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    filled: list[jax.Array | None] = [None] * len(leaves)
    by_size = sorted(range(len(leaves)), key=lambda i: -leaves[i][1].size)
    for i in by_size:
        path, leaf = leaves[i]
        name = jax.tree_util.keystr(path).removeprefix(".").removesuffix(".value")
        pieces = parts[name]
        buffer = np.empty(leaf.shape, leaf.dtype)
        for part in pieces:
            tensor = file.read(part.name)
            if not np.issubdtype(tensor.dtype, np.floating) and tensor.dtype != jnp.bfloat16:
                raise CheckpointError(
                    f"{where}: tensor {part.name} must hold floats, got {tensor.dtype}; "
                    "quantised safetensors are not supported"
                )
            if leaf.dtype == np.float32:  # norms of bf16 models: widen before anything is added
                tensor = tensor.astype(np.float32, copy=False)
            buffer[part.index or ...] = part.place(tensor)
            del tensor
        filled[i] = jax.block_until_ready(jnp.asarray(buffer))
        del buffer
    return jax.tree_util.tree_unflatten(structure, filled)
