"""Hugging Face folders: shards, number types, configs of every age, bad input, memory."""

import gc
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from families import save_family
from safetensors.numpy import load_file, save_file

import specjax
from specjax.checkpoints import weights
from specjax.checkpoints.huggingface import DEFAULTS, parse_config
from specjax.checkpoints.parts import parameter_parts, tensor_shapes
from specjax.checkpoints.stacked_experts import BLOCKS, SCALES, file_shapes
from specjax.checkpoints.weights import CheckpointError

COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
}
LLAMA = {"model_type": "llama"}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2}
DEEPSEEK = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def shapes_of(raw: dict, quantised=()) -> dict[str, tuple[int, ...]]:
    """Of every tensor of a model in Hugging Face's layout, by name; of gpt-oss with the named stacks in MXFP4."""
    config = parse_config(raw)
    if config.family == "gpt_oss":
        return file_shapes(config, quantised)
    return tensor_shapes(parameter_parts(config))


def random_tensors(raw: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a model in Hugging Face's layout, by name, as float32."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0.0, 0.3 if len(shape) == 1 else 0.2, shape).astype(np.float32)
        for name, shape in shapes_of(raw).items()
    }


def write_folder(folder, raw: dict, tensors: dict[str, np.ndarray]):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(target, tokens) -> np.ndarray:
    """Of one pass without a cache, float32[B, T, V]."""
    tokens = jnp.asarray(tokens)
    cache = target.init_cache(tokens.shape[0], 1)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(target(tokens, positions, cache).logits)


def assert_same_parameters(one, other):
    pairs = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True)
    for (path, a), b in pairs:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


# --------------------------------------------------------------------------- whole files


def write_shards(folder, raw, tensors, count=3):
    """The same model in several files and an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    names = sorted(tensors)
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::count]}, folder / file)
        weight_map |= dict.fromkeys(names[i::count], file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("family", [LLAMA, QWEN3_MOE, GPT_OSS])
def test_shards_equal_one_file(family, tmp_path):
    raw = COMMON | family
    tensors = random_tensors(raw)
    one = specjax.load_target(write_folder(tmp_path / "one", raw, tensors), dtype="float32")
    folder = write_shards(tmp_path / "many", raw, tensors)
    assert_same_parameters(one, specjax.load_target(folder, dtype="float32"))
    (folder / "model.safetensors.index.json").unlink()  # without it: all files there are
    assert_same_parameters(one, specjax.load_target(folder, dtype="float32"))
    assert one.source == str(tmp_path / "one")


@pytest.mark.parametrize("family", ["llama-biases", "qwen3-moe"])
def test_shards_that_transformers_writes(family, tmp_path):
    pytest.importorskip("transformers")
    model = save_family(family, tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="16KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one = specjax.load_target(tmp_path / "one", dtype="float32")
    assert_same_parameters(one, specjax.load_target(tmp_path / "many", dtype="float32"))


def test_other_weight_files_beside_the_model_are_left_alone(tmp_path):
    raw = COMMON | LLAMA
    folder = write_folder(tmp_path, raw, random_tensors(raw))
    save_file({"unrelated": np.zeros(3, np.float32)}, folder / "adapter.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    specjax.load_target(folder, dtype="float32")


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float64", "float32", "bfloat16", "float16"])
def test_number_types_are_cast_as_torch_casts(stored, target, tmp_path):
    torch = pytest.importorskip("torch")
    raw = COMMON | LLAMA
    kind = ml_dtypes.bfloat16 if stored == "bfloat16" else np.dtype(stored)
    tensors = {name: value.astype(kind) for name, value in random_tensors(raw).items()}
    model = specjax.load_target(write_folder(tmp_path, raw, tensors), dtype=target)

    def cast(name, dtype):
        wide = torch.tensor(tensors[name].astype(np.float64)).to(getattr(torch, stored))
        return wide.to(getattr(torch, dtype)).double().numpy()

    layer = model.layers[1]
    down = cast("model.layers.1.mlp.down_proj.weight", target).T
    np.testing.assert_array_equal(np.asarray(layer.mlp.down[...], np.float64), down)
    table = cast("model.embed_tokens.weight", target)
    np.testing.assert_array_equal(np.asarray(model.embedding[...], np.float64), table)
    norm = cast("model.layers.1.input_layernorm.weight", "float32")
    np.testing.assert_array_equal(np.asarray(layer.attention_norm.weight[...], np.float64), norm)
    matrices = {x.dtype for x in jax.tree.leaves(model) if x.ndim > 1}
    assert matrices == {jnp.dtype(target)}


FAMILIES = [
    LLAMA,
    LLAMA | {"attention_bias": True, "mlp_bias": True},
    LLAMA | {"tie_word_embeddings": True},
    {"model_type": "mistral"},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "attention_bias": True},
    QWEN3_MOE | {"mlp_only_layers": [1]},
    {"model_type": "gemma2"},
    {"model_type": "gemma3_text"},
    {"model_type": "phi3"},
    GPT_OSS,
    {"model_type": "glm4_moe", "use_qk_norm": True} | DEEPSEEK,
    {"model_type": "glm4_moe_lite"} | DEEPSEEK | LATENT,
    {"model_type": "deepseek_v3", "q_lora_rank": None, "n_group": 3, "topk_group": 2}
    | DEEPSEEK
    | LATENT,
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family["model_type"])
@pytest.mark.parametrize("read", [1 << 21, 500])
def test_every_number_goes_to_one_place(family, read, monkeypatch, tmp_path):
    """As many numbers in the parameters as in the file, and no parameter's entry left unwritten."""
    assert {f["model_type"] for f in FAMILIES} == set(DEFAULTS)

    def unwritten(shape, dtype, aligned=weights._aligned):
        memory = aligned(shape, dtype)
        memory[...] = np.nan
        return memory

    monkeypatch.setattr(weights, "_aligned", unwritten)
    monkeypatch.setattr(weights, "READ", read)  # small: every tensor in several pieces
    monkeypatch.setattr(weights, "TILE", 7)
    raw = COMMON | family
    tensors = random_tensors(raw)
    model = specjax.load_target(write_folder(tmp_path, raw, tensors), dtype="float32")
    leaves = jax.tree.leaves(model)
    assert not any(np.isnan(leaf).any() for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) == sum(value.size for value in tensors.values())
    if not family["model_type"].startswith("gemma"):  # 1 is added to norms
        ours = np.sort(np.concatenate([np.ravel(leaf) for leaf in leaves]))
        np.testing.assert_array_equal(
            ours, np.sort(np.concatenate([*map(np.ravel, tensors.values())]))
        )


def test_tensors_that_carry_nothing(tmp_path):
    raw = COMMON | LLAMA | {"tie_word_embeddings": True}
    tensors = random_tensors(raw)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    model = specjax.load_target(write_folder(tmp_path, raw, tensors), dtype="float32")
    np.testing.assert_array_equal(model.head[...], tensors["model.embed_tokens.weight"].T)


# --------------------------------------------------------------------------- config.json

SIZES = {name: COMMON[name] for name in list(COMMON)[:5]}  # what every published config holds
SPARSE = {
    "llama": SIZES,
    "mistral": SIZES | {"num_attention_heads": 16},
    "qwen2": SIZES | {"num_attention_heads": 32},
    "qwen3": SIZES | {"num_attention_heads": 32},
    "qwen3_moe": SIZES,
    "gemma2": SIZES,
    "gemma3_text": {"num_hidden_layers": 7},
    "phi3": SIZES,
    "gpt_oss": {"num_hidden_layers": 3},
    "glm4_moe": {"num_hidden_layers": 3, "head_dim": 128},
    "glm4_moe_lite": {"num_hidden_layers": 3},
    "deepseek_v3": {"num_hidden_layers": 5},
}


@pytest.mark.parametrize("family", SPARSE)
def test_silent_configs_mean_what_transformers_takes_them_for(family):
    """Fields that config.json leaves out, or sets to null."""
    transformers = pytest.importorskip("transformers")
    assert set(SPARSE) == set(DEFAULTS)
    nulls = {"rope_scaling": None, "num_key_value_heads": None, "sliding_window": None}
    if family.startswith("gemma"):
        nulls = {"final_logit_softcapping": None, "attn_logit_softcapping": None}
    elif family == "qwen3_moe":
        nulls = {"rope_scaling": None, "mlp_only_layers": None}
    elif family == "mistral":
        nulls = {"rope_scaling": None, "sliding_window": None, "head_dim": None}
    elif family == "gpt_oss":
        nulls = dict.fromkeys(("rope_scaling", "rope_parameters", "layer_types", "sliding_window"))
    elif family.startswith(("glm", "deepseek")):
        nulls = {"rope_scaling": None}
    for extra in ({}, nulls):
        raw = SPARSE[family] | extra
        theirs = transformers.AutoConfig.for_model(family, **raw).to_dict()
        assert parse_config(raw | {"model_type": family}) == parse_config(theirs)


OLD = {  # as the hub's config.json files spell it: the family's tiny model, fields to put in
    "llama3-rope": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
            "rope_type": "llama3",
        },
        "pretraining_tp": 1,
    },
    "llama-linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": {"rope_theta": 1e6, "sliding_window": None},
    "qwen2": {
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "sliding_window": 8,
        "max_window_layers": 2,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen2-window": {"rope_theta": 1e6, "use_sliding_window": True, "sliding_window": 8},
    "qwen3-moe": {"rope_theta": 1e6, "rope_scaling": None, "num_experts": 6},
    "gemma2": {"rope_theta": 1e4, "hidden_act": "gelu_pytorch_tanh"},
    "gemma3": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
        "sliding_window_pattern": 2,
    },
    "phi3": {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5},
    "glm4-moe": {"rope_theta": 1e6, "rope_scaling": None, "partial_rotary_factor": 0.5},
    "glm4-moe-lite": {"rope_theta": 1e6, "partial_rotary_factor": 1.0, "topk_method": "noaux_tc"},
    "deepseek-v3": {
        "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
            "type": "yarn",
        },
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    "gpt-oss": {  # what the published config.json holds beside sizes, and nothing of alpha
        "num_local_experts": 6,
        "experts_per_token": 2,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 32,
            "rope_type": "yarn",
            "truncate": False,
        },
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.9,
    },
}
NEW = ("rope_parameters", "layer_types", "dtype", "num_local_experts", "_sliding_window_pattern")
NEW += ("swiglu_alpha",)


@pytest.mark.parametrize("name", OLD)
def test_old_spelling_equals_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    save_family(name, tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw = {key: value for key, value in raw.items() if key not in NEW} | OLD[name]
    file.write_text(json.dumps(raw | {"torch_dtype": "float32"}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    )
    target = specjax.load_target(tmp_path, dtype="float32")
    assert target.config == parse_config(theirs.config.to_dict())
    tokens = np.random.default_rng(0).integers(3, 128, (1, 48))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits(target, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spelling", ["language_model.model.", "model.language_model."])
def test_text_part_of_gemma3_with_vision(spelling, tmp_path):
    """The published folders hold a model that sees around the text model, which alone is read."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = COMMON | {"num_hidden_layers": 3, "sliding_window": 8, "initializer_range": 0.2}
    del text["rope_theta"]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=63
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("vision_tower.") for name in tensors)
    renamed = {n.replace("language_model.model.", spelling): v for n, v in tensors.items()}
    save_file(renamed, file)

    target = specjax.load_target(tmp_path, dtype="float32")
    assert target.config.family == "gemma3_text"
    tokens = np.random.default_rng(0).integers(3, 60, (1, 24))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits(target, tokens), expected, rtol=1e-4, atol=1e-4)

    save_file(renamed | {"model.audio_tower.weight": np.ones(2, np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"unknown tensor model\.audio_tower\.weight"):
        specjax.load_target(tmp_path)


def test_sparse_text_part_of_a_published_multimodal_config():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = parse_config({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
    assert [layer.window for layer in config.layers[:6]] == [1024] * 5 + [None]
    assert [(rope.theta, rope.kind) for rope in config.ropes] == [(1e6, "linear"), (1e4, "default")]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "mamba"}, "model_type must be one of deepseek_v3, .*; got 'mamba'"),
        ({"model_type": None}, "model_type must be one of .*; got None"),
        ({"hidden_size": None, "vocab_size": None}, "missing fields vocab_size, hidden_size"),
        ({"hidden_size": "wide"}, r"expected positive numbers, got \{'hidden_size': 'wide'\}"),
        ({"num_attention_heads": 0}, r"expected positive numbers, got"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"head_dim": 31}, "rotary_dim must be even"),
        ({"hidden_act": "relu"}, "activation must be one of silu, gelu_pytorch_tanh; got 'relu'"),
        ({"use_bidirectional_attention": True}, "only causal models"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type must.*got 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope type linear: missing fields factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "bend": 1}},
            "rope type llama3: missing fields high_freq_factor, low_freq_factor",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "bend": 1}}, "unknown fields bend"),
        ({"quantization_config": {"quant_method": "awq"}}, "got quant_method 'awq'.*GGUF"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types must name 2"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 2}, "layer_types must"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "rope type must.*got 'su'"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": "two"}, "invalid literal"),
        (GPT_OSS | {"num_experts_per_tok": 7}, "experts_per_token must.* num_experts, got 7 and 6"),
        (GPT_OSS | {"hidden_act": "gelu_pytorch_tanh"}, "must be one of silu; got 'gelu"),
        (GPT_OSS | {"swiglu_limit": None}, "float"),
        ({"model_type": "glm4_moe"} | DEEPSEEK | {"n_group": 4}, "of equal size"),
        ({"model_type": "glm4_moe", "scoring_func": "softmax"} | DEEPSEEK, "scoring_func must be"),
        ({"model_type": "glm4_moe"} | DEEPSEEK | {"n_group": 2, "num_experts_per_tok": 4}, "fewer"),
        ({"model_type": "deepseek_v3", "attention_bias": True} | DEEPSEEK | LATENT, "no biases"),
        ({"model_type": "deepseek_v3"} | DEEPSEEK | LATENT | {"v_head_dim": 21}, "value_dim must"),
        (
            {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]} | DEEPSEEK | LATENT,
            "mlp_layer_types must name 2",
        ),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "got quant_method 'mxfp4' of.*'llama'",
        ),
        (GPT_OSS | {"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' of.*'gpt"),
    ],
)
def test_config_that_is_not_supported(change, match, tmp_path):
    if change.get("model_type") == "qwen3":
        change = change | {"use_sliding_window": True}
    (tmp_path / "config.json").write_text(json.dumps(COMMON | LLAMA | change))
    with pytest.raises(CheckpointError, match=match) as caught:
        specjax.load_target(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("content", ["", "{'model_type': 'llama'}", "[1]", "\xff"])
def test_config_that_is_no_json_object(content, tmp_path):
    with pytest.raises(CheckpointError, match=r"expected config\.json, found none"):
        specjax.load_target(tmp_path)
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json: (not valid JSON|expected a JSON)"):
        specjax.load_target(tmp_path)


# --------------------------------------------------------------------------- bad weights


@pytest.fixture
def folder(tmp_path):
    raw = COMMON | LLAMA
    return write_folder(tmp_path / "model", raw, random_tensors(raw))


def refuses(source, match: str) -> str:
    with pytest.raises(CheckpointError, match=match) as caught:
        specjax.load_target(source, dtype="float32")
    return str(caught.value)


def test_wrong_tensors_are_named_all_at_once(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:63]
    tensors["model.layers.0.mlp.gate_proj.bias"] = np.zeros(96, np.float32)
    save_file(tensors, folder / "model.safetensors")
    message = refuses(folder, "4 problems with llama")
    assert str(folder) in message
    assert "missing tensor model.norm.weight, expected shape (64,)" in message
    assert (
        "missing tensor model.layers.1.self_attn.k_proj.weight, expected shape (64, 64)" in message
    )
    assert "tensor lm_head.weight: expected shape (64, 64), got (63, 64)" in message
    assert "unknown tensor model.layers.0.mlp.gate_proj.bias of shape (96,)" in message


def test_long_lists_of_problems_are_cut(tmp_path):
    raw = COMMON | QWEN3_MOE
    tensors = {f"encoder.{name}": value for name, value in random_tensors(raw).items()}
    message = refuses(write_folder(tmp_path, raw, tensors), f"{2 * len(tensors)} problems")
    assert len(message.splitlines()) == 1 + 2 * 41
    assert message.count(f"and {len(tensors) - 40} more like the last") == 2


def test_untied_model_needs_its_head(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    refuses(folder, r"1 problem with llama:\n  missing tensor lm_head.weight")


@pytest.mark.parametrize("kind", [np.int8, ml_dtypes.float8_e4m3fn])
def test_quantised_tensors_are_named(kind, folder):
    tensors = load_file(folder / "model.safetensors")
    names = ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight")
    for name in names:
        tensors[name] = tensors[name].astype(kind)
    save_file(tensors, folder / "model.safetensors")
    message = refuses(folder, "must be one of F64, F32, F16, BF16; got (I8|F8_E4M3)")
    assert all(name in message for name in names)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_safetensors(keep, folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if keep == 0.5 else keep])
    message = refuses(folder, "model.safetensors is truncated, damaged or no safetensors file")
    assert str(folder) in message


def test_damaged_safetensors(folder):
    file = folder / "model.safetensors"
    good = file.read_bytes()
    (size,) = struct.unpack_from("<Q", good)
    for bad in (
        b"PK\x03\x04" + bytes(1000),  # pickled weights under a wrong name
        struct.pack("<Q", 1 << 60) + good[8:],
        good[:8] + b"x" * size + good[8 + size :],
    ):
        file.write_bytes(bad)
        refuses(folder, "truncated, damaged or no safetensors file")


def test_missing_shards_are_named_all_at_once(tmp_path):
    raw = COMMON | LLAMA
    folder = write_shards(tmp_path / "many", raw, random_tensors(raw))
    (folder / "model-00001-of-00003.safetensors").unlink()
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"")
    message = refuses(folder, "unusable weights")
    assert "model-00001-of-00003.safetensors is missing" in message
    assert "model-00003-of-00003.safetensors is truncated" in message


def test_tensor_in_two_files(folder):
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, folder / "extra.safetensors")
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    refuses(folder, "tensor model.norm.weight is there twice, again in first.safetensors")


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "expected weight_map"),
        ('{"weight_map": {}}', "expected weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "expected weight_map .*files beside it"),
        ('{"weight_map": {"a": 3}}', "expected weight_map"),
    ],
)
def test_bad_index(index, match, folder):
    (folder / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refuses(folder, match)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for source in (folder, folder / "pytorch_model.bin"):
        message = refuses(source, "Pickled weights")
        assert "save_pretrained(out), which writes safetensors" in message


def test_file_of_no_known_format(folder, tmp_path):
    assert f"pass the folder, {folder}" in refuses(
        folder / "model.safetensors", "expected a folder"
    )
    (tmp_path / "notes.txt").write_text("hello")
    refuses(tmp_path / "notes.txt", r"notes\.txt: expected a folder .*, or a \.gguf file$")


def test_dtype_must_be_a_usable_float(folder):
    for dtype in ("int32", "float8_e4m3fn", bool):
        with pytest.raises(ValueError, match="dtype must be a floating type of 16 bits or more"):
            specjax.load_target(folder, dtype=dtype)
    default = {leaf.dtype for leaf in jax.tree.leaves(specjax.load_target(folder)) if leaf.ndim > 1}
    assert default == {jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")}


# -------------------------------------------------------------------------------- memory

PEAK = """
import gc, re, sys
import jax, specjax
def resident(key):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(key + r":\\s+(\\d+)", file.read())[1])
warm, source, dtype = sys.argv[1:]
specjax.load_target(warm, dtype=dtype)
gc.collect()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
before = resident("VmRSS")
target = specjax.load_target(source, dtype=dtype)
print((resident("VmHWM") - before) / sum(leaf.nbytes for leaf in jax.tree.leaves(target)))
"""


def peak(warm, source, dtype) -> float:
    """Peak of the memory that loading takes, relative to the model's own size."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of resident memory is measured on Linux alone")
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PEAK, str(warm), str(source), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


LARGE = COMMON | LLAMA | {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048}
LARGE |= {"num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4}
LARGE |= {"head_dim": 64}
TABLE = LARGE | {"tie_word_embeddings": True, "vocab_size": 96000, "num_hidden_layers": 1}


# the stacks of experts are the largest tensors
STACKS = LARGE | GPT_OSS | {"num_local_experts": 16, "intermediate_size": 768, "vocab_size": 512}
STACKS["num_hidden_layers"] = 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("raw", "stored", "dtype"),
    [
        (LARGE, "float32", "float32"),
        (LARGE, "bfloat16", "bfloat16"),
        # nearly all of it one tensor
        (TABLE, "float32", "float32"),
        (STACKS, "float32", "float32"),
        (STACKS, "mxfp4", "float32"),
    ],
)
def test_peak_memory_stays_near_the_models_size(raw, stored, dtype, folder, tmp_path):
    """63 to 80 million parameters: about 300 MB in float32."""
    kind = np.float32 if stored == "float32" else ml_dtypes.bfloat16
    stacks = [name for name in shapes_of(raw) if stored == "mxfp4" and name.endswith("up_proj")]
    stacks += [name.replace("gate_up", "down") for name in stacks]

    def values(name, shape):
        packed = name.endswith((BLOCKS, SCALES))
        return np.full(shape, 127, np.uint8) if packed else np.full(shape, 0.5, kind)

    large = tmp_path / "large"
    try:
        shapes = shapes_of(raw, stacks)
        write_folder(large, raw, {name: values(name, s) for name, s in shapes.items()})
        ratio = peak(folder, large, dtype)
    finally:
        shutil.rmtree(large)
        gc.collect()
    assert 0.9 < ratio < 1.3


@pytest.mark.thorough
def test_peak_memory_of_a_gguf_file(folder):
    from specjax.checkpoints.sources import resolve

    try:
        source = resolve("smollm2-135m-instruct")
    except OSError as error:
        pytest.skip(f"the model cannot be fetched here: {error}")
    assert 0.9 < peak(folder, source, "float32") < 1.3
