"""GGUF files: written by the `gguf` package, and held against Hugging Face and llama.cpp."""

import dataclasses
import importlib.util
import subprocess
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from test_loading import (
    COMMON,
    LLAMA,
    QWEN3_MOE,
    assert_same_parameters,
    logits,
    random_tensors,
    write_folder,
)

import specjax
from specjax.checkpoints.gguf import GGUFFile
from specjax.checkpoints.gguf_header import read_header
from specjax.checkpoints.huggingface import parse_config
from specjax.checkpoints.sources import built_in_heads
from specjax.checkpoints.weights import CheckpointError

QWEN2 = {"model_type": "qwen2", "head_dim": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {  # architecture in the file, config.json
    "llama": ("llama", LLAMA),
    "llama-tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "llama-biases": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-yarn": ("llama", LLAMA | {"rope_scaling": YARN}),
    "llama3-rope": ("llama", LLAMA | {"rope_scaling": LLAMA3}),
    "qwen2": ("qwen2", QWEN2 | {"use_sliding_window": False, "sliding_window": 8}),
    "qwen2-yarn": ("qwen2", QWEN2 | {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {"model_type": "qwen3", "tie_word_embeddings": True}),
    "qwen3moe": ("qwen3moe", QWEN3_MOE),
    "gemma2": (
        "gemma2",
        {
            "model_type": "gemma2",
            "sliding_window": 8,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 7,
            "sliding_window": 8,
            "query_pre_attn_scalar": 32,
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi3": ("phi3", {"model_type": "phi3", "head_dim": 16, "partial_rotary_factor": 0.5}),
}


def as_llama_cpp(architecture: str, raw: dict, tensors: dict[str, np.ndarray]):
    """Names and values as llama.cpp's converter writes them."""
    heads = {"q": raw["num_attention_heads"], "k": raw["num_key_value_heads"]}
    names = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(names[architecture], raw["num_hidden_layers"])
    stacks: dict[str, list[np.ndarray]] = {}
    for name, value in tensors.items():
        pieces = name.split(".")
        if architecture == "llama" and pieces[-2] in ("q_proj", "k_proj"):
            n = heads[pieces[-2][0]]
            value = value.reshape(n, 2, len(value) // n // 2, *value.shape[1:])
            value = value.swapaxes(1, 2).reshape(-1, *value.shape[3:])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        if "experts" in pieces:  # layers.0.mlp.experts.3.up_proj: one tensor for all experts
            del pieces[pieces.index("experts") + 1]
            stacks.setdefault(table.get_name(".".join(pieces), (".weight",)), []).append(value)
            continue
        yield table.get_name(name, (".weight", ".bias")), value
    yield from ((name, np.stack(values)) for name, values in stacks.items())


def describe(writer: gguf.GGUFWriter, raw: dict) -> None:
    """The metadata that llama.cpp's converter makes of a config.json."""
    config = parse_config(raw)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.mlp_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.rotary)
    writer.add_rope_freq_base(config.ropes[0].theta)
    scaling = raw.get("rope_scaling", {})
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if kind == "llama3":  # the converter writes what each frequency is divided by
        plain = dataclasses.replace(config.ropes[0], kind="default").frequencies(config.rotary)
        factors = plain / config.ropes[0].frequencies(config.rotary)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    if config.family.startswith("gemma"):
        writer.add_sliding_window(raw["sliding_window"])
    if config.attention_softcap:
        writer.add_attn_logit_softcapping(config.attention_softcap)
    if config.logit_softcap:
        writer.add_final_logit_softcapping(config.logit_softcap)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.experts_per_token)
        writer.add_expert_feed_forward_length(config.expert_size)
    if config.family == "phi3":
        writer.add_sliding_window(raw.get("sliding_window") or 0)


def as_float32(name: str, value: np.ndarray) -> tuple[np.ndarray, Kind]:
    return value, Kind.F32


def write_gguf(path, architecture, raw, tensors, encode=as_float32, edit=None):
    """Writes a file, and returns the values that its bytes stand for, by the file's names.

    Args:
      encode: a matrix's name and values to what is stored, and its type.
      edit: what else to do to the writer.
    """
    writer = gguf.GGUFWriter(path, architecture)
    describe(writer, raw)
    values = {}
    for name, value in as_llama_cpp(architecture, raw, tensors):
        data, kind = encode(name, value) if value.ndim > 1 else (value, Kind.F32)
        writer.add_tensor(name, data, raw_dtype=kind)
        values[name] = data if kind == Kind.F32 else gguf.dequantize(data, kind)
    if edit is not None:
        edit(writer)
    finish(writer)
    return values


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


TOKENS = np.random.default_rng(1).integers(0, 64, (1, 24)).astype(np.int32)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_same_model_from_hugging_face(name, tmp_path):
    architecture, raw = CASES[name]
    raw = COMMON | raw
    tensors = random_tensors(raw)
    write_gguf(tmp_path / "model.gguf", architecture, raw, tensors)
    ours = specjax.load_target(tmp_path / "model.gguf", dtype="float32")
    theirs = specjax.load_target(write_folder(tmp_path / "hf", raw, tensors), dtype="float32")
    if architecture.startswith("gemma"):  # 1 is added to norms and taken away again
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    else:
        assert_same_parameters(ours, theirs)
    assert ours.context_length == theirs.context_length
    np.testing.assert_allclose(logits(ours, TOKENS), logits(theirs, TOKENS), rtol=1e-4, atol=1e-5)


LLAMA_CPP = """
import ctypes, sys
import numpy as np
try:
    import llama_cpp as lib
except Exception as error:
    sys.exit(f"llama_cpp cannot be imported: {error}")
lib.llama_backend_init()
out, tokens, *paths = sys.argv[1:]
tokens = np.load(tokens)
answers = {}
for path in paths:
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    assert model, path
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_threads = 64, 64, 1
    settings.type_k = settings.type_v = 0  # float32
    settings.flash_attn_type = 0
    context = lib.llama_init_from_model(model, settings)
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, 1
    assert lib.llama_decode(context, batch) == 0
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    flat = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(tokens), size))
    answers[path] = flat.copy()
np.savez(out, **answers)
"""


def test_equals_llama_cpp(tmp_path):
    """Every family's logits, from the program that these files are made for."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama_cpp is not installed")
    paths = []
    for name, (architecture, raw) in CASES.items():
        paths.append(tmp_path / f"{name}.gguf")
        write_gguf(paths[-1], architecture, COMMON | raw, random_tensors(COMMON | raw))
    np.save(tmp_path / "tokens.npy", TOKENS[0])
    command = [sys.executable, "-c", LLAMA_CPP, tmp_path / "out.npz", tmp_path / "tokens.npy"]
    done = subprocess.run([*command, *paths], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"llama.cpp ended with {done.returncode}: {done.stderr[-200:]}")
    answers = np.load(tmp_path / "out.npz")
    for path in paths:
        ours = logits(specjax.load_target(path, dtype="float32"), TOKENS)[0]
        # llama.cpp looks Gemma's activation up in a table of 16-bit floats
        atol = 1e-2 if path.name.startswith("gemma") else 1e-5
        theirs = answers[str(path)]
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=atol, err_msg=path.name)


# ---------------------------------------------------------------------- quantisations

WIDE = {  # rows of 256 numbers, which is one block of the K quantisations
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_hidden_layers": 1,
}


def random_blocks(value: np.ndarray, kind: Kind) -> np.ndarray:
    """Bytes of any content, but for the scales, which must be numbers of a sensible size."""
    rng = np.random.default_rng(value.size)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (value.size // block, size)).astype(np.uint8)
    scales = {"Q4_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}[kind.name]
    for at in scales:
        scale = rng.uniform(-1e-3, 1e-3, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
    return blocks.reshape(*value.shape[:-1], -1)


def encoder(kind: Kind):
    def encode(name: str, value: np.ndarray):
        try:
            return gguf.quantize(value, kind), kind
        except NotImplementedError:  # the package can only read it
            return random_blocks(value, kind), kind

    return encode


def half(data: np.ndarray) -> float:
    return float(data.view(np.float16)[0])


def decode_q8_0(b):
    return half(b[:2]) * b[2:].view(np.int8).astype(float)


def decode_q4_0(b):
    return half(b[:2]) * (np.concatenate([b[2:] & 15, b[2:] >> 4]).astype(float) - 8)


def decode_q4_1(b):
    return half(b[:2]) * np.concatenate([b[4:] & 15, b[4:] >> 4]).astype(float) + half(b[2:4])


def decode_q4_k(b):
    """Eight groups of 32; a group's 6-bit scale and minimum are spread over 12 bytes."""
    packed, quants, out = b[4:16].astype(int), b[16:].astype(int), []
    for group in range(8):
        if group < 4:
            scale, low = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            low = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        bytes_ = quants[group // 2 * 32 : group // 2 * 32 + 32]
        four = bytes_ >> 4 if group % 2 else bytes_ & 15
        out.append(half(b[:2]) * scale * four - half(b[2:4]) * low)
    return np.concatenate(out)


def decode_q6_k(b):
    """Two halves of 128; four low bits in one array, two high bits in another, a scale per 16."""
    low, high, scales = b[:128].astype(int), b[128:192].astype(int), b[192:208].view(np.int8)
    out = np.empty(256)
    for i in range(256):
        part, rest = divmod(i, 128)
        quarter, at = divmod(rest, 32)
        four = low[64 * part + 32 * (quarter % 2) + at] >> (4 if quarter >= 2 else 0) & 15
        two = high[32 * part + at] >> 2 * quarter & 3
        out[i] = half(b[208:]) * int(scales[i // 16]) * ((four | two << 4) - 32)
    return out


BY_HAND = {
    "F16": lambda b: b.view(np.float16).astype(float),
    "BF16": lambda b: (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(float),
    "Q8_0": decode_q8_0,
    "Q4_0": decode_q4_0,
    "Q4_1": decode_q4_1,
    "Q4_K": decode_q4_k,
    "Q6_K": decode_q6_k,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_quantisation(name, tmp_path):
    """Every matrix in one type: what is read is what the package and the format's rules say."""
    kind = Kind[name]
    raw = COMMON | WIDE
    tensors = random_tensors(raw)
    path = tmp_path / "model.gguf"
    written = write_gguf(path, "qwen3", raw, tensors, encoder(kind))
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 1)
    values = {n: written[table.get_name(n, (".weight",))].astype(np.float32) for n in tensors}
    file = GGUFFile(path)
    for n, value in values.items():
        np.testing.assert_array_equal(file.read(n).astype(np.float32), value)
        np.testing.assert_array_equal(file.read(n, slice(3, 10)).astype(np.float32), value[3:10])

    down = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_down.weight")
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.asarray(down.data).view(np.uint8).reshape(-1, size)
    read = file.read("model.layers.0.mlp.down_proj.weight").reshape(-1, block)
    for i in (0, 1, len(stored) - 1):
        np.testing.assert_allclose(read[i], BY_HAND[name](stored[i]), rtol=1e-5, atol=1e-9)

    ours = specjax.load_target(path, dtype="float32")
    theirs = specjax.load_target(write_folder(tmp_path / "hf", raw, values), dtype="float32")
    assert_same_parameters(ours, theirs)


@pytest.mark.parametrize("name", ["Q5_0", "IQ4_XS"])
def test_unsupported_quantisation_is_named(name, tmp_path):
    raw = COMMON | WIDE
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3", raw, random_tensors(raw), encoder(Kind[name]))
    with pytest.raises(CheckpointError, match=rf"blk.0.ffn_down.weight is {name}") as caught:
        specjax.load_target(path)
    assert "Q4_K, Q6_K" in str(caught.value)


# --------------------------------------------------------------------------- bad files


@pytest.fixture
def good(tmp_path):
    raw = COMMON | CASES["llama"][1]
    write_gguf(tmp_path / "good.gguf", "llama", raw, random_tensors(raw))
    return tmp_path / "good.gguf"


def test_header_equals_the_package(good):
    reader = gguf.GGUFReader(good)
    metadata, tensors = read_header(good)
    fields = reader.fields.items()
    assert metadata == {k: f.contents() for k, f in fields if not k.startswith("GGUF.")}
    assert {n: (t.start, t.stop - t.start, t.shape, t.kind) for n, t in tensors.items()} == {
        t.name: (t.data_offset, t.n_bytes, tuple(t.shape[::-1].tolist()), t.tensor_type)
        for t in reader.tensors
    }


def test_truncated_at_any_point(good):
    data = good.read_bytes()
    cut = good.with_name("cut.gguf")
    for size in [*range(0, 3000, 41), len(data) // 2, len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: truncated"):
            specjax.load_target(cut)


def test_damaged_header_gives_no_other_error(good):
    """A byte of the front is wrong: either it is noticed, or the file still describes a model."""
    data = bytearray(good.read_bytes())
    front = min(tensor.start for tensor in read_header(good)[1].values())
    rng = np.random.default_rng(0)
    refused = 0
    for place in rng.integers(0, front, 300):
        damaged = data.copy()
        damaged[place] ^= int(rng.integers(1, 256))
        bad = good.with_name("bad.gguf")
        bad.write_bytes(damaged)
        try:
            GGUFFile(bad).config()
        except CheckpointError as error:
            assert "bad.gguf" in str(error)
            refused += 1
    assert refused > 100


def test_not_a_gguf_file(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match=r"expected b'GGUF'.*got b'PK"):
        specjax.load_target(path)
    with pytest.raises(FileNotFoundError):
        specjax.load_target(tmp_path / "absent.gguf")


def refuses(tmp_path, match, raw=None, tensors=None, edit=None, architecture="llama"):
    raw = COMMON | (raw or LLAMA)
    path = tmp_path / "refused.gguf"
    write_gguf(path, architecture, raw, tensors or random_tensors(raw), edit=edit)
    with pytest.raises(CheckpointError, match=match) as caught:
        specjax.load_target(path)
    assert "refused.gguf" in str(caught.value)
    return str(caught.value)


def drop(*keys: str):
    def edit(writer):
        for key in keys:
            assert writer.kv_data[0].pop(key, None) is not None

    return edit


def put(key: str, value, kind: gguf.GGUFValueType):
    def edit(writer):
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, kind)

    return edit


FLOAT, UINT = gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.UINT32
STRING, LIST = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY


def test_unknown_architecture_is_named(tmp_path):
    edit = put("general.architecture", "mamba", STRING)
    message = refuses(tmp_path, "general.architecture must be one of", edit=edit)
    assert "got 'mamba'" in message


def test_missing_metadata_is_named_all_at_once(tmp_path):
    names = ("llama.block_count", "llama.context_length", "llama.attention.layer_norm_rms_epsilon")
    message = refuses(tmp_path, "missing metadata", edit=drop(*names))
    assert all(name in message for name in names)


@pytest.mark.parametrize(
    ("key", "value", "kind", "match"),
    [
        ("llama.rope.scaling.type", "longrope", STRING, "rope type must be.*got 'longrope'"),
        ("llama.rope.scaling.alpha", 2.0, FLOAT, r"not supported: llama.rope.scaling.alpha = 2.0"),
        ("llama.attention.head_count_kv", [2, 4], LIST, r"one number for all layers, got \[2, 4\]"),
        ("llama.attention.head_count", 3, UINT, "multiple of num_kv_heads"),
        ("llama.block_count", "two", STRING, "block_count must be one number.*got 'two'"),
        ("llama.rope.dimension_count", 31, UINT, "rope.dimension_count must be even.*got 31"),
        ("llama.expert_count", 8, UINT, "mixtures of experts are supported for qwen3moe"),
        ("llama.attention.causal", False, gguf.GGUFValueType.BOOL, "only causal models"),
        ("split.count", 3, UINT, "one of 3 pieces.*llama-gguf-split"),
    ],
)
def test_metadata_that_is_not_supported(key, value, kind, match, tmp_path):
    edit = put(key, value, kind)
    if key == "llama.rope.scaling.alpha":
        edit = both(edit, put("llama.rope.scaling.factor", 2.0, FLOAT))
    refuses(tmp_path, match, edit=edit)


def both(*edits):
    def edit(writer):
        for one in edits:
            one(writer)

    return edit


def test_wrong_tensors_are_named_all_at_once(tmp_path):
    tensors = random_tensors(COMMON | LLAMA)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.zeros(63, np.float32)

    def edit(writer):
        writer.add_tensor("blk.0.ssm_a", np.zeros(5, np.float32))

    message = refuses(tmp_path, "3 problems", tensors=tensors, edit=edit)
    assert "missing tensor model.layers.1.mlp.up_proj.weight, expected shape (96, 64)" in message
    assert "tensor model.norm.weight: expected shape (64,), got (63,)" in message
    assert "unknown tensor blk.0.ssm_a of shape (5,)" in message


def test_divisors_and_a_scaling_together_are_refused(tmp_path):
    raw = LLAMA | {"rope_scaling": YARN}

    def edit(writer):
        writer.add_tensor("rope_freqs.weight", np.ones(16, np.float32))

    refuses(tmp_path, "rope_freqs.weight.*rope type yarn", raw=raw, edit=edit)


def test_lists_of_equal_numbers_and_other_spellings(good):
    """Per-layer lists that agree, and keys that say what is so anyway, change nothing."""
    raw = COMMON | LLAMA
    path = good.with_name("other.gguf")
    edits = both(
        put("llama.attention.head_count_kv", [2, 2], LIST),
        put("llama.rope.scaling.type", "none", STRING),
        put("llama.rope.scaling.attn_factor", 1.0, FLOAT),
        put("llama.rope.scaling.finetuned", True, gguf.GGUFValueType.BOOL),
        drop("llama.attention.value_length", "llama.vocab_size"),
    )
    write_gguf(path, "llama", raw, random_tensors(raw), edit=edits)
    assert GGUFFile(path).config() == GGUFFile(good).config()
    linear = put("llama.rope.scale_linear", 4.0, FLOAT)  # how it was written before rope.scaling
    write_gguf(path, "llama", raw, random_tensors(raw), edit=linear)
    assert GGUFFile(path).config().ropes[0].kind == "linear"
    assert GGUFFile(path).config().ropes[0].factor == 4.0


@pytest.mark.parametrize("pattern", [3, [True, True, False] * 2 + [True]])
def test_gemma3_window_pattern(pattern, tmp_path):
    architecture, raw = CASES["gemma3"]
    kind = LIST if isinstance(pattern, list) else UINT
    edit = both(
        put("gemma3.attention.sliding_window_pattern", pattern, kind),
        put("gemma3.rope.freq_base_swa", 2e4, FLOAT),
    )
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, COMMON | raw, random_tensors(COMMON | raw), edit=edit)
    config = GGUFFile(path).config()
    assert [layer.window for layer in config.layers] == [8, 8, None, 8, 8, None, 8]
    assert [layer.rope for layer in config.layers] == [1, 1, 0, 1, 1, 0, 1]
    assert (config.ropes[0].kind, config.ropes[0].factor) == ("linear", 8.0)
    assert (config.ropes[1].kind, config.ropes[1].theta) == ("default", 2e4)


# ------------------------------------------------------------------ the demonstration model

NAME = "smollm2-135m-instruct"
QUESTIONS = [
    "Why does bread rise in the oven?",
    "Name three rivers of South America and say where they end.",
    "Write a short letter that asks a neighbour to water the plants.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a story about a lighthouse keeper who collects clocks.",
    "Count from one to thirty in words.",
    "How would you explain gravity to a child of six?",
    "Give me a recipe for potato soup with exact amounts.",
    "Write a Python function that says whether a number is prime.",
    "List the months of the year and one holiday in each.",
]


@pytest.fixture(scope="module")
def smollm2():
    try:
        return specjax.load_target(NAME, dtype="float32")
    except OSError as error:
        pytest.skip(f"the model cannot be fetched here: {error}")


def test_smollm2_is_the_published_model(smollm2):
    config = smollm2.config
    assert config.num_layers == 30
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.hidden_size, config.mlp_size, config.vocab_size) == (576, 1536, 49152)
    assert config.tied and smollm2.embedding is None
    assert (config.ropes[0].kind, config.ropes[0].theta) == ("default", 1e5)
    assert smollm2.context_length == 8192
    assert sum(leaf.size for leaf in jax.tree.leaves(smollm2)) == 134_515_008


def torch_model(torch, transformers, path):
    """transformers' model of the same weights, read by the gguf package alone."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.device("meta"):  # no random weights first
        names = list(transformers.LlamaForCausalLM(config).state_dict())
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    state = {}
    for name in names:
        theirs = name.replace("lm_head", "model.embed_tokens")
        tensor = stored[table.get_name(theirs, (".weight",))]
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            heads = 9 if "q_proj" in name else 3
            value = value.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
        state[name] = torch.tensor(value)
    return transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32
    ).eval()


def test_smollm2_equals_transformers(smollm2):
    """Logits of one prompt, and the first 128 greedy tokens of ten."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = torch_model(torch, transformers, smollm2.source)
        tokenizer = specjax.load_tokenizer(NAME)
        prompts = [tokenizer.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
        answers = specjax.generate(smollm2, prompts, max_new_tokens=128).tokens
        assert [len(answer) for answer in answers] == [128] * 10
        with torch.no_grad():
            # Greedy decoding picks what the model finds likeliest after the tokens before it: by
            # induction, one pass over prompt and answer proves all 128 of them.
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                whole = np.concatenate([prompt, answer])
                right = model(torch.tensor(whole[None])).logits[0].numpy()
                greedy = right[len(prompt) - 1 : -1].argmax(-1)
                np.testing.assert_array_equal(answer, greedy, err_msg=QUESTIONS[i])
                if i == 0:
                    ours = logits(smollm2, whole[None].astype(np.int32))[0]
                    np.testing.assert_allclose(ours, right, rtol=1e-3, atol=1e-3)
            start = torch.tensor([prompts[0]])
            generated = model.generate(
                start,
                attention_mask=torch.ones_like(start),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
            )
        np.testing.assert_array_equal(generated[0, start.shape[1] :], answers[0][:24])
    finally:
        torch.set_num_threads(threads)


@jax.jit
def first_drafts(head, target, tokens, hidden):
    """What a head would draft after every token but the last, target ids int32[1, T]; row t guesses token t + 2."""
    positions = jnp.arange(tokens.shape[1])[None]
    embedded = head.embed(target, jnp.roll(tokens, -1, axis=1))
    cache = head.init_cache(1, tokens.shape[1])
    x, _ = head(embedded, head.fuse(hidden), positions, cache)
    return jnp.take(head.target_ids, jnp.argmax(head.logits(x), axis=-1))


@pytest.mark.thorough
def test_heads_that_come_along_know_the_model(smollm2):
    """One pass over an answer, without the loop, whose thirty layers at every width take a minute to compile."""
    prompt = specjax.load_tokenizer(NAME).encode_chat([{"role": "user", "content": QUESTIONS[8]}])
    answer = specjax.generate(smollm2, [prompt], max_new_tokens=64).tokens[0]
    tokens = jnp.asarray([[*prompt, *answer.tolist()]])
    layers = tuple(range(31))
    positions = jnp.arange(tokens.shape[1])[None]
    cache = smollm2.init_cache(1, 1)
    taps = jax.jit(lambda m: m(tokens, positions, cache, taps=layers).taps)(smollm2)
    for name in built_in_heads():
        head = specjax.load_head(name, smollm2)
        drafts = first_drafts(head, smollm2, tokens, taps[:, :, jnp.asarray(head.config.taps)])
        right = (drafts[:, :-2] == tokens[:, 2:])[0, len(prompt) - 1 :]
        assert jnp.mean(right) > 0.25, (name, right)
