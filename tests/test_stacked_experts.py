"""gpt-oss's stacked experts, plain and in MXFP4, against transformers' own reading of them."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import save_family
from safetensors.numpy import load_file, save_file
from test_loading import COMMON, GPT_OSS, logits, random_tensors, refuses, shapes_of, write_folder

import specjax

RAW = COMMON | GPT_OSS  # two layers of six experts, D 64 and F 96: two and three blocks wide
CONFIG = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
LAYER = "model.layers.1.mlp.experts."
UNPACKED = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def quantised(stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32[E, in, out] -> blocks and scales, every number rounded to one of MXFP4's."""
    rows = np.swapaxes(stack, 1, 2)
    rows = rows.reshape(*rows.shape[:2], -1, 32)
    scales = np.floor(np.log2(np.abs(rows).max(axis=-1))) - 2
    scaled = rows / np.exp2(scales)[..., None]
    codes = np.abs(scaled[..., None] - UNPACKED).argmin(axis=-1).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (scales + 127).astype(np.uint8)


def packed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A file's tensors with all stacks in MXFP4."""
    found = {}
    for name, value in tensors.items():
        if value.ndim == 3:
            found[f"{name}_blocks"], found[f"{name}_scales"] = quantised(value)
        else:
            found[name] = value
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_equals_transformers_bit_for_bit(dtype, tmp_path):
    """Every byte, and every scale with which all of MXFP4's numbers are float32's."""
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(0)
    stacks = [name for name, shape in shapes_of(RAW).items() if len(shape) == 3]
    tensors = packed(random_tensors(RAW))
    for stack in stacks:
        blocks, scales = tensors[f"{stack}_blocks"], tensors[f"{stack}_scales"]
        tensors[f"{stack}_blocks"] = rng.integers(0, 256, blocks.shape, np.uint8)
        tensors[f"{stack}_scales"] = rng.integers(0, 253, scales.shape, np.uint8)
        assert len(np.unique(tensors[f"{stack}_blocks"])) == 256
    model = specjax.load_target(write_folder(tmp_path, RAW | CONFIG, tensors), dtype=dtype)

    def bits(x):
        return np.asarray(x).view(np.uint16 if dtype == "bfloat16" else np.uint32)

    for i, layer in enumerate(model.layers):
        for name, ours in (("gate_up_proj", layer.mlp.gate_up), ("down_proj", layer.mlp.down)):
            at = f"model.layers.{i}.mlp.experts.{name}"
            right = mxfp4.convert_moe_packed_tensors(
                *(torch.tensor(tensors[f"{at}_{x}"]) for x in ("blocks", "scales")),
                dtype=getattr(torch, dtype),
            )
            right = right.view(torch.uint16 if dtype == "bfloat16" else torch.uint32).numpy()
            if name == "down_proj":
                np.testing.assert_array_equal(bits(ours[...]), right)
            else:
                np.testing.assert_array_equal(bits(ours[..., 0, :]), right[..., ::2])
                np.testing.assert_array_equal(bits(ours[..., 1, :]), right[..., 1::2])


def test_a_quantised_folder_equals_transformers(tmp_path):
    """A model whose experts are rounded to MXFP4, in a folder like those that are published."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    plain = save_family("gpt-oss", tmp_path, **sizes)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(packed(tensors), tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | CONFIG))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        attn_implementation="eager",
        dtype=torch.float32,
    )
    tokens = np.random.default_rng(0).integers(3, 128, (2, 24))
    with torch.no_grad():
        expected, unrounded = (model(torch.tensor(tokens)).logits for model in (theirs, plain))
    assert (expected - unrounded).abs().max() > 0.1
    ours = logits(specjax.load_target(tmp_path, dtype="float32"), tokens)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-4, atol=1e-4)


def test_stacks_of_both_kinds_in_one_file(tmp_path):
    """What `modules_to_not_convert` leaves plain is plain."""
    tensors = random_tensors(RAW)
    for name in [name for name, value in tensors.items() if value.ndim == 3]:
        tensors[name] = tensors[name] * 0 + 1.5  # a number of MXFP4
    mixed = packed(tensors)
    for ending in ("blocks", "scales"):
        del mixed[f"{LAYER}down_proj_{ending}"]
    mixed[f"{LAYER}down_proj"] = tensors[f"{LAYER}down_proj"]
    one = specjax.load_target(write_folder(tmp_path / "plain", RAW, tensors), dtype="float32")
    other = write_folder(tmp_path / "mixed", RAW | CONFIG, mixed)
    for a, b in zip(*map(jax.tree.leaves, (one, specjax.load_target(other))), strict=True):
        np.testing.assert_array_equal(a, b)


def put(name, change):
    def edit(tensors):
        tensors[LAYER + name] = change(tensors[LAYER + name])

    return edit


def drop(*names):
    def edit(tensors):
        for name in names:
            del tensors[LAYER + name]

    return edit


def add(name, value):
    return lambda tensors: tensors.update({name: value})


def no_number(scales):
    scales = scales.copy()
    scales[4, 7, 1] = 255
    return scales


BAD = {
    "no scales": (
        drop("gate_up_proj_scales"),
        "1 problem with gpt_oss:\n  missing tensor {}gate_up_proj_scales, expected shape (6, 192, 2)",
    ),
    "no blocks": (
        drop("down_proj_blocks"),
        "1 problem with gpt_oss:\n  missing tensor {}down_proj_blocks, expected shape (6, 64, 3, 16)",
    ),
    "neither": (
        drop("down_proj_blocks", "down_proj_scales"),
        "2 problems with gpt_oss:\n  missing tensor {}down_proj_blocks, expected",
    ),
    "both kinds": (
        add(f"{LAYER}down_proj", np.zeros((6, 96, 64), np.float32)),
        "1 problem with gpt_oss:\n  unknown tensor {}down_proj of shape (6, 96, 64)",
    ),
    "shape of scales": (
        put("gate_up_proj_scales", lambda x: x[:, :, :1].copy()),
        "tensor {}gate_up_proj_scales: expected shape (6, 192, 2), got (6, 192, 1)",
    ),
    "shape of blocks": (
        put("down_proj_blocks", lambda x: x.reshape(6, 64, 48)),
        "tensor {}down_proj_blocks: expected shape (6, 64, 3, 16), got (6, 64, 48)",
    ),
    "fewer experts": (
        put("gate_up_proj_bias", lambda x: x[:5].copy()),
        "tensor {}gate_up_proj_bias: expected shape (6, 192), got (5, 192)",
    ),
    "type of blocks": (
        put("down_proj_blocks", lambda x: x.astype(np.int8)),
        "tensor {}down_proj_blocks must be one of U8; got I8",
    ),
    "type of a bias": (
        put("down_proj_bias", lambda x: x.astype(np.uint8)),
        "tensor {}down_proj_bias must be one of F64, F32, F16, BF16; got U8",
    ),
    "a scale that is no number": (
        put("gate_up_proj_scales", no_number),
        "tensor {}gate_up_proj_scales: scales must be below 255, which is no number in MXFP4; "
        "got it in expert 4",
    ),
    "a tensor that nothing takes": (
        add("model.layers.0.mlp.router.scale", np.ones(3, np.float32)),
        "unknown tensor model.layers.0.mlp.router.scale of shape (3,)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_file_is_named_as_the_file_names_it(name, tmp_path):
    edit, message = BAD[name]
    tensors = packed(random_tensors(RAW))
    edit(tensors)
    folder = write_folder(tmp_path, RAW | CONFIG, tensors)
    refuses(folder, re.escape(message.format(LAYER)))


def test_blocks_must_fill_a_row(tmp_path):
    """24 columns would be three quarters of a block."""
    raw = RAW | {"intermediate_size": 24}
    tensors = packed(random_tensors(RAW))
    folder = write_folder(tmp_path, raw | CONFIG, tensors)
    refuses(folder, "hidden_size and intermediate_size must be multiples of 32; got 64 and 24")


def test_plain_stacks_of_the_wrong_shape(tmp_path):
    """[E, out, in], as the blocks have them, is not taken for [E, in, out]."""
    tensors = random_tensors(RAW)
    turned = np.swapaxes(tensors[f"{LAYER}gate_up_proj"], 1, 2).copy()
    tensors[f"{LAYER}gate_up_proj"] = turned
    del tensors[f"{LAYER}down_proj"]
    message = refuses(write_folder(tmp_path, RAW, tensors), "2 problems with gpt_oss")
    assert f"tensor {LAYER}gate_up_proj: expected shape (6, 64, 192), got (6, 192, 64)" in message
    assert f"missing tensor {LAYER}down_proj, expected shape (6, 96, 64)" in message


def test_sinks_and_norms_stay_float32(tmp_path):
    model = specjax.load_target(write_folder(tmp_path, RAW, random_tensors(RAW)), dtype="bfloat16")
    layer = model.layers[0]
    assert layer.attention.sinks.dtype == layer.mlp_norm.weight.dtype == jnp.float32
    assert layer.mlp.gate_up_bias.dtype == layer.mlp.router_bias.dtype == jnp.bfloat16
