"""Which tensors of a file make up which parameter: one table, `parameter_parts`, for every kind of layer.

Names and shapes are Hugging Face's; other formats translate theirs to these.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from specjax.models.config import Latent, LayerConfig, TransformerConfig

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Part:
    """Where one tensor of the file, or a range of its rows, goes in a parameter.

    Attributes:
      name: in Hugging Face's layout.
      shape: of the whole tensor in the file.
      index: which part of the parameter it fills.
      columns: False: the same numbers in the same order. True: the file has [out, in] and the
        parameter [in, ...], so that rows become columns; the dimensions after the first are,
        flattened, the file's rows.
      rows: first and last (exclusive) row of the tensor that are meant; None means all.
      add: a constant added to every entry, in float32.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple = ()
    columns: bool = False
    rows: tuple[int, int] | None = None
    add: float = 0.0


Parts = dict[str, list[Part]]
"""For each parameter, by its path in the module, the tensors that make it up."""


def attention_parts(
    config: TransformerConfig, at: str, inputs: int | None = None
) -> Iterator[tuple[str, list[Part]]]:
    """Of one attention's matrices and biases; `inputs` is the width of what enters, by default D."""
    heads, head = config.num_kv_heads, config.head_dim
    width = inputs or config.hidden_size
    group = config.num_heads // heads
    mixed = heads * group * head
    # What the third dimension of `qkv`, [D, Hkv, G + 2, Dh], holds: name, place, rows in the file
    places = [
        ("q", slice(0, group), mixed),
        ("k", group, heads * head),
        ("v", group + 1, heads * head),
    ]
    if (
        config.family == "phi3"
    ):  # one tensor: the rows of all queries, then all keys, then all values
        shape, parts, start = (sum(rows for _, _, rows in places), width), [], 0
        for _, place, rows in places:
            index = (EVERYTHING, EVERYTHING, place)
            name = f"{at}.qkv_proj.weight"
            parts.append(Part(name, shape, index, True, (start, start + rows)))
            start += rows
        yield "qkv", parts
    else:
        split = places
        if config.output_gate:  # each head's rows of queries and then of its gate, in one tensor
            split = places[1:]
            pairs = [
                (head * (2 * h), head * (2 * h + 1), head * (2 * h + 2), divmod(h, group))
                for h in range(heads * group)
            ]
            name, shape = f"{at}.q_proj.weight", (2 * mixed, width)
            yield (
                "gate",
                [
                    Part(name, shape, (EVERYTHING, *place), True, (middle, end))
                    for _, middle, end, place in pairs
                ],
            )
            queries = [
                Part(name, shape, (EVERYTHING, *place), True, (start, middle))
                for start, middle, _, place in pairs
            ]
        else:
            queries = []
        yield (
            "qkv",
            [
                *queries,
                *[
                    Part(
                        f"{at}.{x}_proj.weight",
                        (rows, width),
                        (EVERYTHING, EVERYTHING, place),
                        True,
                    )
                    for x, place, rows in split
                ],
            ],
        )
    if config.qkv_bias:
        yield (
            "qkv_bias",
            [
                Part(f"{at}.{x}_proj.bias", (rows,), (EVERYTHING, place))
                for x, place, rows in places
            ],
        )
    yield "output", [Part(f"{at}.o_proj.weight", (config.hidden_size, mixed), (), True)]
    if config.output_bias:
        yield "output_bias", [Part(f"{at}.o_proj.bias", (config.hidden_size,))]
    if config.sinks:
        yield "sinks", [Part(f"{at}.sinks", (config.num_heads,))]


def latent_parts(
    config: TransformerConfig, latent: Latent, at: str
) -> Iterator[tuple[str, list[Part]]]:
    """Of one latent attention's matrices and norms."""
    width, heads, head = config.hidden_size, config.num_heads, config.head_dim

    def whole(name: str, *shape: int) -> list[Part]:
        return [Part(f"{at}.{name}.weight", shape, (), True)]

    if latent.query_rank is None:
        yield "query", whole("q_proj", heads * head, width)
    else:
        yield "query_down", whole("q_a_proj", latent.query_rank, width)
        yield "query_norm.weight", norm_part(config, f"{at}.q_a_layernorm", latent.query_rank)
        yield "query", whole("q_b_proj", heads * head, latent.query_rank)
    made = heads * (latent.content_dim + latent.value_dim)
    yield "down", whole("kv_a_proj_with_mqa", latent.rank + config.rotary, width)
    yield "norm.weight", norm_part(config, f"{at}.kv_a_layernorm", latent.rank)
    yield "up", whole("kv_b_proj", made, latent.rank)
    yield "output", whole("o_proj", width, heads * latent.value_dim)


def _gated(at: str, width: int, hidden: int, index: tuple = ()) -> tuple[list[Part], list[Part]]:
    """Parts of gate_up [D, 2, F] and of down [F, D]; `index` selects an expert in front."""
    gate_up = [
        Part(f"{at}.{x}_proj.weight", (hidden, width), (*index, EVERYTHING, i), True)
        for i, x in enumerate(("gate", "up"))
    ]
    return gate_up, [Part(f"{at}.down_proj.weight", (width, hidden), index, True)]


def _gated_biases(
    at: str, width: int, hidden: int, index: tuple = ()
) -> tuple[list[Part], list[Part]]:
    """Parts of the biases beside them, [2, F] and [D]."""
    gate_up = [
        Part(f"{at}.{x}_proj.bias", (hidden,), (*index, i)) for i, x in enumerate(("gate", "up"))
    ]
    return gate_up, [Part(f"{at}.down_proj.bias", (width,), index)]


def mlp_parts(
    config: TransformerConfig, at: str, experts: bool = False
) -> Iterator[tuple[str, list[Part]]]:
    """Of one feed-forward part."""
    width, hidden = config.hidden_size, config.mlp_size
    if experts:
        count, hidden = config.num_experts, config.expert_size
        router = f"{at}.router" if config.family == "gpt_oss" else f"{at}.gate"
        yield "router", [Part(f"{router}.weight", (count, width), (), True)]
        if config.router is not None:
            yield "correction", [Part(f"{router}.e_score_correction_bias", (count,))]
        if config.shared_expert_size:
            shared = f"{at}.shared_expert" if config.shared_expert_gate else f"{at}.shared_experts"
            pair = _gated(shared, width, config.shared_expert_size)
            yield from zip(("shared.gate_up", "shared.down"), pair, strict=True)
        if config.shared_expert_gate:
            yield "shared_gate", [Part(f"{at}.shared_expert_gate.weight", (1, width), (), True)]
        pairs = [_gated(f"{at}.experts.{e}", width, hidden, (e,)) for e in range(count)]
        yield "gate_up", [part for gate_up, _ in pairs for part in gate_up]
        yield "down", [part for _, down in pairs for part in down]
        if config.expert_bias:
            yield "router_bias", [Part(f"{router}.bias", (count,))]
            biases = [_gated_biases(f"{at}.experts.{e}", width, hidden, (e,)) for e in range(count)]
            yield "gate_up_bias", [part for gate_up, _ in biases for part in gate_up]
            yield "down_bias", [part for _, down in biases for part in down]
        return
    gate_up, down = _gated(at, width, hidden)
    if config.family == "phi3":  # one tensor, the rows of the gate first
        gate_up = [Part(f"{at}.gate_up_proj.weight", (2 * hidden, width), (), True)]
    yield "gate_up", gate_up
    yield "down", down
    if config.mlp_bias:
        gate_up, down = _gated_biases(at, width, hidden)
        yield "gate_up_bias", gate_up
        yield "down_bias", down


def norm_part(config: TransformerConfig, name: str, size: int | None = None) -> list[Part]:
    """Of a norm's weight, by default as wide as the stream."""
    return [Part(f"{name}.weight", (size or config.hidden_size,), add=config.norm_offset)]


def layer_parts(
    config: TransformerConfig, layer: LayerConfig, here: str, there: str, inputs: int | None = None
) -> Iterator[tuple[str, list[Part]]]:
    """Of one decoder layer, `here` in the module and `there` in the file; `inputs` as for `attention_parts`."""

    def norm(ours: str, theirs: str, size: int | None = None) -> tuple[str, list[Part]]:
        return f"{here}.{ours}.weight", norm_part(config, f"{there}.{theirs}", size)

    attention = (
        attention_parts(config, f"{there}.self_attn", inputs)
        if config.latent is None
        else latent_parts(config, config.latent, f"{there}.self_attn")
    )
    for name, pieces in attention:
        yield f"{here}.attention.{name}", pieces
    for name, pieces in mlp_parts(config, f"{there}.mlp", layer.experts):
        yield f"{here}.mlp.{name}", pieces
    if config.qk_norm:
        yield norm("attention.query_norm", "self_attn.q_norm", config.head_dim)
        yield norm("attention.key_norm", "self_attn.k_norm", config.head_dim)
    yield norm("attention_norm", "input_layernorm")
    if config.post_norms:
        yield norm("attention_post_norm", "post_attention_layernorm")
        yield norm("mlp_norm", "pre_feedforward_layernorm")
        yield norm("mlp_post_norm", "post_feedforward_layernorm")
    else:
        yield norm("mlp_norm", "post_attention_layernorm")


def parameter_parts(config: TransformerConfig) -> Parts:
    """Of a whole `Transformer`."""
    width, vocab = config.hidden_size, config.vocab_size
    parts: Parts = {"norm.weight": norm_part(config, "model.norm")}
    table = Part("model.embed_tokens.weight", (vocab, width))
    if config.tied:
        parts["head"] = [Part(table.name, table.shape, (), True)]
    else:
        parts["embedding"] = [table]
        parts["head"] = [Part("lm_head.weight", (vocab, width), (), True)]
    for i, layer in enumerate(config.layers):
        parts |= dict(layer_parts(config, layer, f"layers[{i}]", f"model.layers.{i}"))
    return parts


# MTP modules ride along in their target's files; `load_head` reads them.
MTP_PREFIXES = ("mtp.", "model.mtp_layers.", "mtp_layers.")


def passed_over(name: str, config: TransformerConfig) -> bool:
    """Tensors that are no part of the model: buffers of old releases, a tied model's copy of its table, MTP modules."""
    extra = f"model.layers.{config.num_layers}."  # where DeepSeek and GLM put theirs
    return (
        name.endswith("rotary_emb.inv_freq")
        or (config.tied and name == "lm_head.weight")
        or name.startswith((*MTP_PREFIXES, extra))
    )


def tensor_shapes(parts: Parts) -> dict[str, tuple[int, ...]]:
    """The tensors that a table of parts is made of."""
    return {part.name: part.shape for pieces in parts.values() for part in pieces}
