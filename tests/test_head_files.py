"""Heads in and out: round trips, every layout's spellings, and what is refused."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import shared
from flax import nnx
from safetensors.numpy import load_file, save_file
from zoo import tiny_head, tiny_target

import specjax
from specjax.checkpoints.eagle import parse_head_config
from specjax.models.config import ClampedSwiGLU, LayerConfig
from specjax.models.heads import HeadConfig

TARGET = tiny_target()
HEADS = {
    "plain": {},
    "same-vocabulary": {"draft_vocab_size": 61},
    "norms": {"fc_norm": True, "norm_output": True},
    "normed-residual": {"norm_before_fc": True, "norm_before_residual": True},
    "layers": {"layers": (LayerConfig(),) * 3},
    "windows": {"layers": (LayerConfig(window=7), LayerConfig())},
    "qwen3": {"qk_norm": True},
    "biased": {"qkv_bias": True},
    "narrow": {"width": 16},
    "taps": {"taps": (1, 2)},
    "p-eagle": {"mask_token_id": 60, "width": 32},
    "markov": {"mask_token_id": 60, "markov_rank": 4, "trained_depth": 8},
}


def same(a, b):
    assert a.config == b.config
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
@pytest.mark.parametrize("name", HEADS)
def test_import_of_export(name, layout, tmp_path):
    head = tiny_head(TARGET, **HEADS[name])
    specjax.save_head(head, tmp_path, layout, target=TARGET)
    same(specjax.load_head(tmp_path, TARGET), head)


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_export_needs_no_target(layout, tmp_path):
    head = tiny_head(TARGET)
    specjax.save_head(head, tmp_path, layout)
    same(specjax.load_head(tmp_path, TARGET), head)


def test_universal_layout(tmp_path):
    """Names, shapes and fields that vLLM, SGLang, TensorRT-LLM and the TPU servers look for."""
    head = tiny_head(TARGET)
    specjax.save_head(head, tmp_path, dtype="bfloat16")
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "np") as file:
        found = {
            n: (tuple(file.get_slice(n).get_shape()), file.get_slice(n).get_dtype())
            for n in file.keys()  # noqa: SIM118 (not a mapping)
        }
    middle = {
        "hidden_norm": (32,), "input_layernorm": (32,), "post_attention_layernorm": (32,),
        "self_attn.q_proj": (32, 64), "self_attn.k_proj": (16, 64), "self_attn.v_proj": (16, 64),
        "self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48),
    }  # fmt: skip
    right = {f"midlayer.{n}.weight": (s, "BF16") for n, s in middle.items()}
    right |= {"fc.weight": ((32, 96), "BF16"), "norm.weight": ((32,), "BF16")}
    right |= {"lm_head.weight": ((40, 32), "BF16"), "d2t": ((40,), "I64"), "t2d": ((61,), "BOOL")}
    assert found == right
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == 40
    assert config["rope_theta"] == 10000.0
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["torch_dtype"] == "bfloat16"


def test_layer_ids_of_the_usual_taps_are_written_as_those_left(tmp_path):
    target = tiny_target(layers=(LayerConfig(),) * 8)
    specjax.save_head(tiny_head(target, taps=(2, 4, 5)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


def test_p_eagle_files_have_the_names_that_engines_look_for(tmp_path):
    head = tiny_head(TARGET, mask_token_id=60, layers=(LayerConfig(),) * 2)
    for layout, first in (("sglang", "midlayer"), ("speculators", "layers.0")):
        specjax.save_head(head, tmp_path / layout, layout, target=TARGET)
        tensors = load_file(tmp_path / layout / "model.safetensors")
        assert tensors["mask_hidden"].shape == (1, 1, 96)
        assert {f"{first}.hidden_norm.weight", "layers.1.input_layernorm.weight"} <= set(tensors)
        config = json.loads((tmp_path / layout / "config.json").read_text())
        assert (config["ptd_token_id"], config["mask_token_id"]) == (60, 60)
        assert config["parallel_drafting"] is True
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "peagle"
    assert config["norm_before_residual"] is False


@pytest.mark.parametrize("place", ["top", "nested"])
def test_aws_heads_name_the_layers_entered_wherever_they_do(place, tmp_path):
    head = tiny_head(TARGET, mask_token_id=60)
    specjax.save_head(head, tmp_path)

    def as_aws(tensors, config):
        ids = config.pop("eagle_aux_hidden_state_layer_ids")
        for name in ("eagle_config", "mask_token_id", "num_aux_hidden_states", "num_depths"):
            config.pop(name, None)
        ids = {"eagle_aux_hidden_state_layer_ids": ids}
        return tensors, config | (ids if place == "top" else {"eagle_config": ids})

    rewritten(tmp_path, as_aws)
    same(specjax.load_head(tmp_path, TARGET), head)


@pytest.mark.parametrize("name", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_a_mask_token_has_three_names(name, tmp_path):
    head = tiny_head(TARGET, mask_token_id=60)
    specjax.save_head(head, tmp_path)

    def renamed(tensors, config):
        config = {k: v for k, v in config.items() if k not in ("mask_token_id", "ptd_token_id")}
        return tensors, config | {name: 60}

    rewritten(tmp_path, renamed)
    same(specjax.load_head(tmp_path, TARGET), head)


def test_rows_that_are_the_targets_need_not_be_written(tmp_path):
    head = tiny_head(TARGET)
    with pytest.raises(ValueError, match="share_rows: the head's rows"):
        specjax.save_head(head, tmp_path, share_rows=True, target=TARGET)
    head.readout.head = nnx.Param(TARGET.head[...][:, head.target_ids])
    with pytest.raises(ValueError, match="share_rows"):
        specjax.save_head(head, tmp_path, share_rows=True)
    specjax.save_head(head, tmp_path, share_rows=True, target=TARGET)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    same(specjax.load_head(tmp_path, TARGET), head)


def test_a_full_disk_leaves_the_head_that_was_there(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    import specjax.checkpoints.head_export

    head = tiny_head(TARGET)
    specjax.save_head(head, tmp_path)

    def full(*_, **__):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(specjax.checkpoints.head_export, "save_file", full)
    with pytest.raises(OSError, match="could not be written: No space"):
        specjax.save_head(tiny_head(TARGET, seed=9), tmp_path)
    same(specjax.load_head(tmp_path, TARGET), head)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_concatenated_halves(tmp_path):
    """The embedding's columns come first: q_proj of the file is the transposed matrix, head by head."""
    head = tiny_head(TARGET)
    specjax.save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    qkv = np.asarray(head.first.attention.qkv[...])  # [2H, Hkv, G + 2, Dh]
    q = qkv[:, :, :2].reshape(64, 32).T
    np.testing.assert_array_equal(tensors["midlayer.self_attn.q_proj.weight"], q)


def rewritten(folder, change):
    """The tensors and the config of a saved head, changed in place."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tensors, config = change(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def sparse(tensors, config):
    """As SafeAILab's: no head_dim, no layer ids, no switches, a pickled optimizer beside it."""
    for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"):
        del config[key]
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "rope_theta"):
        del config[key]
    return tensors, config


def prefixed(tensors, config):
    """As NeMo's and ModelOpt's: `model.` in front, `layers.0.`, no t2d, ids by frequency."""
    order = np.random.default_rng(0).permutation(40)
    ids = (np.arange(40) + tensors["d2t"])[order]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = (ids - np.arange(40)).astype(np.int32)
    del tensors["t2d"]
    renamed = {n.replace("midlayer.", "model.layers.0."): x for n, x in tensors.items()}
    return renamed, config


def test_spellings(tmp_path):
    head = tiny_head(TARGET)
    specjax.save_head(head, tmp_path / "sparse")
    rewritten(tmp_path / "sparse", sparse)
    same(specjax.load_head(tmp_path / "sparse", TARGET, taps=(0, 1, 2)), head)
    with pytest.raises(specjax.CheckpointError, match="coincide"):
        specjax.load_head(tmp_path / "sparse", TARGET)
    specjax.save_head(head, tmp_path / "prefixed")
    rewritten(tmp_path / "prefixed", prefixed)
    other = specjax.load_head(tmp_path / "prefixed", TARGET)
    ours = np.argsort(np.asarray(other.target_ids))
    np.testing.assert_array_equal(other.target_ids[ours], head.target_ids)
    np.testing.assert_array_equal(other.readout.head[...][:, ours], head.readout.head[...])


def test_legacy_tap_norms(tmp_path):
    head = tiny_head(TARGET, fc_norm=True)
    specjax.save_head(head, tmp_path)

    def legacy(tensors, config):
        names = {
            f"fc_norm.{i}.weight": f"aux_norm_{x}.weight"
            for i, x in enumerate(("low", "mid", "high"))
        }
        config["use_aux_norm"] = config.pop("fc_norm")
        return {names.get(n, n): x for n, x in tensors.items()}, config

    rewritten(tmp_path, legacy)
    same(specjax.load_head(tmp_path, TARGET), head)


def test_vocabulary_rows_from_the_target(tmp_path):
    head = tiny_head(TARGET)
    specjax.save_head(head, tmp_path)
    rewritten(tmp_path, lambda t, c: ({n: x for n, x in t.items() if n != "lm_head.weight"}, c))
    loaded = specjax.load_head(tmp_path, TARGET)
    np.testing.assert_array_equal(
        loaded.readout.head[...], np.asarray(TARGET.head[...])[:, np.asarray(head.target_ids)]
    )
    with pytest.raises(specjax.CheckpointError, match="missing tensor lm_head"):
        specjax.load_head(tmp_path)


def drop(name):
    return lambda t, c: ({n: x for n, x in t.items() if n != name}, c)


def put(**fields):
    return lambda t, c: (t, c | fields)


BROKEN = {
    "missing": (drop("fc.weight"), "missing tensor fc.weight, expected shape \\(32, 96\\)"),
    "unknown": (lambda t, c: (t | {"fc.bias": np.zeros(32, np.float32)}, c), "unknown tensor fc.bias"),
    "misshapen": (lambda t, c: (t | {"norm.weight": np.zeros(31, np.float32)}, c), "expected shape \\(32,\\), got \\(31,\\)"),
    "no map": (drop("d2t"), "missing tensor d2t"),
    "no map, tokens left out": (lambda t, c: ({k: v for k, v in t.items() if k != "d2t"} | {"lm_head.weight": np.zeros((61, 32), np.float32)}, c | {"draft_vocab_size": 61}), "t2d leaves tokens out"),
    "one layer id": (put(eagle_aux_hidden_state_layer_ids=3), "layer ids must be a list of integers, got 3"),
    "mask_hidden alone": (lambda t, c: (t | {"mask_hidden": np.zeros((1, 1, 96), np.float32)}, c), "is a P-EAGLE head's, but there is no mask token"),
    "absolute ids": (lambda t, c: (t | {"d2t": t["d2t"] + np.arange(40) + 30}, c), "must hold offsets"),
    "maps differ": (lambda t, c: (t | {"t2d": ~t["t2d"]}, c), "t2d and d2t name different tokens"),
    "ids differ": (put(eagle_aux_hidden_state_layer_ids=[1, 2, 2]), "contradict"),
    "layers left or entered": (
        lambda t, c: (t, {k: v for k, v in c.items() if "layer_ids" not in k} | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}}),
        "taps=.*\\(3, 19, 34\\) if it names the layers left",
    ),
    "another count of layers": (put(layer_types=["full_attention"] * 4, sliding_window=9), "the head's 1 layers"),
    "count of taps": (put(num_aux_hidden_states=4), "num_aux_hidden_states is 4"),
    "last state alone": (put(eagle_config={"use_aux_hidden_state": False}), "not supported"),
    "two mask tokens": (put(mask_token_id=3, ptd_token_id=4), "mask tokens contradict"),
    "no mask_hidden": (put(mask_token_id=3), "missing tensor mask_hidden, expected shape \\(1, 1, 96\\)"),
    "another kind": (put(model_type="deepseek_v3"), "llama or qwen3, got 'deepseek_v3'"),
    "another speculator": (put(speculators_model_type="dflash"), "must be eagle3 or peagle"),
    "vocabulary": (put(draft_vocab_size=99), "draft_vocab_size must be in 1..61, got 99"),
    "quantised": (put(quantization_config={"quant_method": "fp8"}), "quantised"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_refused(name, tmp_path):
    change, message = BROKEN[name]
    specjax.save_head(tiny_head(TARGET), tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(specjax.CheckpointError, match=message):
        specjax.load_head(tmp_path, TARGET)


def test_wrong_target_and_layout(tmp_path):
    specjax.save_head(tiny_head(TARGET), tmp_path)
    with pytest.raises(ValueError, match="vocabulary of 61 tokens, the target's has 50"):
        specjax.load_head(tmp_path, tiny_target(vocab_size=50))
    with pytest.raises(ValueError, match="layout must be one of sglang, speculators"):
        specjax.save_head(tiny_head(TARGET), tmp_path, "gguf")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(specjax.CheckpointError, match="weights_only=True"):
        specjax.load_head(tmp_path, TARGET)


def test_what_a_heads_layers_cannot_have():
    decoder = tiny_head(TARGET).config.decoder
    for change in ({"sinks": True}, {"activation": ClampedSwiGLU()}):
        with pytest.raises(ValueError, match="no attention sinks and a plain activation; got"):
            HeadConfig(
                decoder=replace(decoder, **change),
                target_hidden_size=32,
                draft_vocab_size=61,
                taps=(0, 1),
            )


def test_speculators_reads_a_missing_residual_switch_as_normed():
    config = json.loads(
        (shared("golden", "eagle3-speculators-tiny", "norm-before") / "config.json").read_text()
    )
    del config["norm_before_residual"]
    assert parse_head_config(config, None).norm_before_residual
    flat = {k: v for k, v in config["transformer_layer_config"].items()} | {
        "draft_vocab_size": 128,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    }
    plain = parse_head_config(flat, None)
    assert not plain.norm_before_residual
    assert plain.taps == (2, 4, 5)
