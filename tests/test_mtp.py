"""MTP modules: against transformers' own layers, put together as the released modules are; names, export, refusals."""

import json
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import save_family
from safetensors.numpy import load_file, save_file
from zoo import tiny_deepseek, tiny_head, tiny_mtp, tiny_target

import specjax
from specjax import MTP
from specjax.checkpoints import CheckpointError
from specjax.drafters.base import Context, Observation
from specjax.models.config import LayerConfig, Rope
from specjax.sampling import Processors, Sampling, make_keys
from training.config import TrainConfig
from training.heads import MTP_FAMILIES, new_head

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
TARGET = tiny_target()


class Reference:
    """A module of torch: two norms, a projection, one of transformers' decoder layers, a norm, the target's vocabulary."""

    def __init__(self, norm, layer, rotation, embedding, head, *, hidden_first, zero_first):
        import torch

        self.torch, width = torch, SIZES["hidden_size"]
        self.enorm, self.hnorm, self.norm = (norm(width, eps=1e-5) for _ in range(3))
        self.projection = torch.nn.Linear(2 * width, width, bias=False)
        self.layer, self.rotation, self.embedding, self.head = layer, rotation, embedding, head
        self.hidden_first, self.zero_first = hidden_first, zero_first
        for module in (self.enorm, self.hnorm, self.norm, self.projection, layer):
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, 0.3 if parameter.ndim == 1 else 0.0, 0.3)

    def rows(self, tokens, hidden):
        """Token ids and hidden states of equal number -> what each row hands over, and its logits."""
        torch = self.torch
        embedded, size = self.embedding(torch.tensor(tokens)), len(tokens)
        if self.zero_first:
            embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        both = [self.enorm(embedded), self.hnorm(hidden)]
        x = self.projection(torch.cat(both[::-1] if self.hidden_first else both, -1))[None]
        positions = torch.arange(size)[None]
        mask = torch.triu(torch.full((size, size), -torch.inf), 1)[None, None]
        turned = self.rotation(x, positions)
        x = self.layer(x, position_embeddings=turned, attention_mask=mask, position_ids=positions)
        out = self.norm(x[0])
        return out, self.head(out)

    def draft(self, tokens, hidden, count):
        """The first rows' logits, and `count` greedy drafts by recursion."""
        drafts, first = [], None
        tokens = list(tokens)
        for _ in range(count):
            out, logits = self.rows(tokens, hidden)
            first = logits if first is None else first
            drafts.append(int(logits[-1].argmax()))
            tokens.append(drafts[-1])
            hidden = self.torch.cat([hidden, out[-1:]])
        return first, drafts

    def tensors(self, names: dict[str, str]) -> dict[str, np.ndarray]:
        parts: dict[str, Any] = {
            "enorm": self.enorm,
            "hnorm": self.hnorm,
            "eh_proj": self.projection,
            "norm": self.norm,
        }
        found = {f"{names[k]}.weight": v.weight for k, v in parts.items()}
        found |= {names["layer"] + k: v for k, v in self.layer.state_dict().items()}
        return {k: v.detach().numpy().copy() for k, v in found.items()}


def llama(family: str):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = {"llama": "Llama", "qwen2": "Qwen2"}[family]
    shape = getattr(transformers, f"{kind}Config")(**SIZES, num_hidden_layers=3)
    model = getattr(transformers, f"{kind}ForCausalLM")(shape).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.3 if parameter.ndim == 1 else 0.0, 0.3)
    return model


def reference(model, **switches) -> Reference:
    inner = model.model
    return Reference(
        type(inner.norm),
        inner.layers[2],
        inner.rotary_emb,
        inner.embed_tokens,
        model.lm_head,
        **switches,
    )


SPOKEN = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "norm": "final_layernorm",
    "layer": "",
}
DIALECTS: dict[str, Any] = {
    "deepseek": (
        "llama",
        {"num_nextn_predict_layers": 1},
        {"norm": "shared_head.norm", "layer": ""},
        "model.layers.2.",
        {"hidden_first": False, "zero_first": True},
    ),
    "mimo": (
        "qwen2",
        {"model_type": "mimo", "num_nextn_predict_layers": 1},
        SPOKEN,
        "model.mtp_layers.0.",
        {"hidden_first": True, "zero_first": True},
    ),
    "speculators": (
        "llama",
        {"speculators_model_type": "mtp"},
        SPOKEN,
        "mtp_layers.0.",
        {"hidden_first": False, "zero_first": False},
    ),
}


def write(folder, dialect):
    """A target of two layers and its module in one folder, as released; and the module in torch."""
    family, fields, renamed, prefix, switches = DIALECTS[dialect]
    model = llama(family)
    module = reference(model, **switches)
    names = {k: prefix + renamed.get(k, k) for k in ("enorm", "hnorm", "eh_proj", "norm")}
    names["layer"] = prefix + renamed["layer"]
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {k: v for k, v in tensors.items() if not k.startswith("model.layers.2.")}
    if dialect == "deepseek":  # these repeat the target's rows
        tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].copy()
    save_file(tensors | module.tensors(names), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2} | fields
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2]
    if dialect == "speculators":
        (folder / "head").mkdir()
        mine = {k: v for k, v in tensors.items() if k in ("lm_head.weight", "model.norm.weight")}
        save_file(mine | module.tensors(names), folder / "head" / "model.safetensors")
        head = {**fields, "transformer_layer_config": config, "num_target_layers": 2}
        (folder / "head" / "config.json").write_text(json.dumps(head))
        config.pop("speculators_model_type")
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return module


def proposal(target, head, tokens, num_draft):
    """Greedy drafts after a prompt and the newest token, and the logits of the prompt's rows."""
    drafter = specjax.MTP(head, num_draft=num_draft)
    prompt = jnp.asarray([tokens[:-1]])
    at = jnp.arange(prompt.shape[1])[None]
    taps = target(prompt, at, target.init_cache(1, 1), taps=drafter.taps).taps
    state = drafter.observe(
        target,
        drafter.init(target, 1, 32),
        Observation(prompt, jnp.asarray([prompt.shape[1]]), taps, jnp.asarray([tokens[-1]])),
    )
    context = Context(
        tokens=jnp.zeros((1, 32), jnp.int32),
        length=state.cache.length + 1,
        keys=make_keys(0, 1),
        processors=Processors.create(Sampling(), 1),
        seen=None,
    )
    rows, _ = head(
        head.embed(target, jnp.asarray([tokens[1:]])), head.fuse(taps), at, head.init_cache(1, 1)
    )
    return drafter.propose(target, state, context)[0].tokens[0], head.logits(rows)[0]


TOKENS = [3, 14, 15, 9, 26, 5, 35, 8]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_equals_transformers_layers(dialect, tmp_path):
    module = write(tmp_path, dialect)
    target = specjax.load_target(tmp_path, dtype="float32")
    source = tmp_path / "head" if dialect == "speculators" else tmp_path
    head = specjax.load_head(source, target)
    # behind the final norm
    at = jnp.arange(7)[None]
    stream = target(jnp.asarray([TOKENS[:-1]]), at, target.init_cache(1, 1), taps=(2,)).taps
    hidden = module.torch.tensor(np.array(target.norm(stream[0, :, 0])))
    with module.torch.no_grad():
        logits, drafts = module.draft(TOKENS[1:], hidden, 4)
    ours, rows = proposal(target, head, TOKENS, 4)
    np.testing.assert_allclose(rows, logits.numpy(), rtol=1e-4, atol=1e-4)
    assert ours.tolist() == drafts
    specjax.save_head(head, tmp_path / "again")  # in the embedding's order, whatever it came in
    again = specjax.load_head(tmp_path / "again", target)
    np.testing.assert_allclose(proposal(target, again, TOKENS, 4)[1], rows, rtol=1e-5, atol=1e-5)
    alone = specjax.load_head(source) if dialect != "speculators" else head
    np.testing.assert_allclose(
        proposal(target, alone, TOKENS, 1)[1], logits.numpy(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["glm4-moe", "glm4-moe-lite", "deepseek-v3"])
def test_equals_transformers_modules(name, tmp_path):
    """Against the module that transformers itself puts beside its DeepSeek and GLM targets."""
    torch = pytest.importorskip("torch")
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no MtpModel")
    model = save_family(name, tmp_path)
    # which transformers' config of the light GLM does not know
    model.config.num_mtp_layers, model.config.mtp_mlp_layer_types = 1, ["sparse"]
    module = layers.MtpModel(model, 1).eval()
    tensors = load_file(tmp_path / "model.safetensors")
    for full, value in [*module.layers[0].named_parameters(), *module.layers[0].named_buffers()]:
        torch.nn.init.normal_(value, 0.5 if value.ndim == 1 else 0.0, 0.3)
        own = full.replace("post_norm.", "shared_head.norm.").removeprefix("mtp_block.")
        value, stem = value.detach().numpy(), f"model.layers.4.{own.rpartition('.experts.')[0]}"
        if own.endswith(("experts.gate_up_proj", "experts.down_proj")):  # released one by one
            for e, one in enumerate(value):
                for part, rows in zip(("gate", "up"), np.split(one, 2), strict=True):
                    if own.endswith("gate_up_proj"):
                        tensors[f"{stem}.experts.{e}.{part}_proj.weight"] = rows.copy()
                if own.endswith("down_proj"):
                    tensors[f"{stem}.experts.{e}.down_proj.weight"] = one.copy()
        else:
            tensors[f"model.layers.4.{own}"] = value.copy()
    tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    # transformers does not leave the first embedding out
    config |= {"mtp_zero_first": False, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = specjax.load_target(tmp_path, dtype="float32")
    head = specjax.load_head(tmp_path, target)
    at = torch.arange(7)[None]
    with torch.no_grad():
        states = model.model(torch.tensor([TOKENS[:-1]])).last_hidden_state
        right = module.forward_layer(0, states, at, None, input_ids=torch.tensor([TOKENS[1:]]))
        logits = model.lm_head(right)[0].numpy()
    drafts, rows = proposal(target, head, TOKENS, 3)
    np.testing.assert_allclose(rows, logits, rtol=1e-4, atol=1e-4)
    assert drafts[0] == logits[-1].argmax()
    options = {"max_new_tokens": 12}
    plain = specjax.generate(target, [TOKENS], **options)
    spoken = specjax.generate(target, [TOKENS], drafter=specjax.MTP(head), **options)
    np.testing.assert_array_equal(plain.tokens[0], spoken.tokens[0])


QWEN: dict[str, Any] = {
    "qwen3_5": ("Qwen3_5", "Qwen3_5TextConfig", {}),
    "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3_5MoeTextConfig", {"num_experts": 5}),
    "qwen3_next": ("Qwen3Next", "Qwen3NextConfig", {"num_experts": 5, "norm_topk_prob": False}),
}
MIXTURE = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


@pytest.mark.parametrize("family", QWEN)
def test_gated_module_equals_transformers_layer(family, tmp_path):
    """Qwen3-Next and Qwen3.5: an output gate, partial rotary embedding, norms of 1 + weight, mixtures with a gated shared
    expert. Their targets are none that is supported."""
    torch = pytest.importorskip("torch")
    place = f"transformers.models.{family}"
    qwen = pytest.importorskip(f"{place}.modeling_{family}")
    settings = pytest.importorskip(f"{place}.configuration_{family}")
    prefix, config_class, fields = QWEN[family]

    torch.manual_seed(1)
    nested = family != "qwen3_next"
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    if nested:
        rope |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    types = ["linear_attention", "full_attention"]
    text = {**SIZES, "head_dim": 16, "num_hidden_layers": 2, "layer_types": types}
    text |= {"rope_parameters": rope} | fields | (MIXTURE if fields else {})
    if family == "qwen3_5_moe":
        text.pop("intermediate_size")
    shape = getattr(settings, config_class)(**text)
    shape._attn_implementation = "eager"
    embedding, head = torch.nn.Embedding(61, 32), torch.nn.Linear(32, 61, bias=False)
    module = Reference(
        getattr(qwen, f"{prefix}RMSNorm"),
        getattr(qwen, f"{prefix}DecoderLayer")(shape, 1),
        getattr(qwen, f"{prefix}{'Text' if nested else ''}RotaryEmbedding")(shape),
        embedding,
        head,
        hidden_first=False,
        zero_first=False,
    )
    names = {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "norm": "mtp.norm",
        "layer": "mtp.layers.0.",
    }
    inner = "model.language_model" if nested else "model"
    trunk = {
        f"{inner}.embed_tokens.weight": embedding.weight.detach().numpy(),
        "lm_head.weight": head.weight.detach().numpy(),
        f"{inner}.norm.weight": np.zeros(32, np.float32),
        f"{inner}.layers.0.input_layernorm.weight": np.zeros(32, np.float32),
    }

    def write_all():
        save_file(trunk | module.tensors(names), tmp_path / "model.safetensors")
        own = {"model_type": family, "text_config": text | {"model_type": f"{family}_text"}}
        if not nested:
            own = text | {"model_type": family}
        (tmp_path / "config.json").write_text(json.dumps(own))

    text["mtp_num_hidden_layers"] = 1
    write_all()
    with pytest.raises(CheckpointError, match="the MTP module alone can be loaded, with load_head"):
        specjax.load_target(tmp_path)
    ours = specjax.load_head(tmp_path)
    hidden = np.random.default_rng(0).normal(size=(7, 32)).astype(np.float32)
    with torch.no_grad():
        right = module.rows(TOKENS[1:], torch.tensor(hidden))[1].numpy()
    rows, _ = ours(
        ours.embed(TARGET, jnp.asarray([TOKENS[1:]])),
        jnp.asarray(hidden)[None],
        jnp.arange(7)[None],
        ours.init_cache(1, 1),
    )
    np.testing.assert_allclose(ours.logits(rows)[0], right, rtol=1e-4, atol=1e-4)
    assert (np.asarray(ours.target_norm.weight[...]) == 1).all()
    # of a tied model's files the embedding is the vocabulary's rows
    del trunk["lm_head.weight"]
    text["tie_word_embeddings"] = True
    write_all()
    tied = specjax.load_head(tmp_path)
    np.testing.assert_array_equal(tied.readout.head[...], embedding.weight.detach().numpy().T)
    with pytest.raises(ValueError, match="layout 'deepseek' has no layers with an output gate"):
        specjax.save_head(tied, tmp_path / "again")


@pytest.mark.parametrize("dialect", ["mimo", "speculators"])
def test_a_second_module_is_refused(dialect, tmp_path):
    write(tmp_path, dialect)
    source = tmp_path / "head" if dialect == "speculators" else tmp_path
    tensors = load_file(source / "model.safetensors")
    second = {k.replace("mtp_layers.0.", "mtp_layers.1."): v for k, v in tensors.items()}
    save_file(tensors | second, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unknown tensor unknown: .*mtp_layers\.1\."):
        specjax.load_head(source)
    if dialect == "speculators":  # where the file holds nothing but the module
        save_file(tensors | {"stray": np.zeros(2, np.float32)}, source / "model.safetensors")
        with pytest.raises(CheckpointError, match="stray"):
            specjax.load_head(source)


@pytest.mark.parametrize(
    "changes", [{}, {"draft_vocab_size": 61}, {"post_norm": False}, {"zero_first": True}]
)
def test_import_of_export(changes, tmp_path):
    head = tiny_mtp(TARGET, **changes)
    specjax.save_head(head, tmp_path)
    again = specjax.load_head(tmp_path, TARGET)
    assert again.config == head.config
    for a, b in zip(jax.tree.leaves(head), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    if (
        changes.get("post_norm") is False
    ):  # all that it reads lies in its own file but the embedding
        alone = specjax.load_head(tmp_path)
        assert alone.target_norm is None
    with pytest.raises(ValueError, match="layout 'sglang' is not one of an MTP module"):
        specjax.save_head(head, tmp_path, "sglang")


def test_the_final_norm_is_the_callers_choice(tmp_path):
    """What a release was trained with is often not said."""
    specjax.save_head(tiny_mtp(TARGET), tmp_path / "mtp")
    for post_norm in (True, False):
        head = specjax.load_head(tmp_path / "mtp", TARGET, post_norm=post_norm)
        assert head.config.post_norm == post_norm == (head.target_norm is not None)
        out = specjax.generate(TARGET, [[1, 2]], drafter=MTP(head), max_new_tokens=4)
        assert out.tokens[0].size == 4
    specjax.save_head(tiny_head(TARGET), tmp_path / "eagle")
    with pytest.raises(ValueError, match="post_norm is for MTP modules, got True"):
        specjax.load_head(tmp_path / "eagle", TARGET, post_norm=True)


def test_refused(tmp_path):
    head = tiny_mtp(TARGET)
    specjax.save_head(head, tmp_path)
    tensors, text = (
        load_file(tmp_path / "model.safetensors"),
        (tmp_path / "config.json").read_text(),
    )
    layers = TARGET.config.num_layers

    def refuse(message, tensors=tensors, **fields):
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(json.loads(text) | fields))
        with pytest.raises((CheckpointError, ValueError), match=message):
            specjax.load_head(tmp_path, TARGET)

    for name in ("enorm", "hnorm", "shared_head.norm"):
        full = f"model.layers.{layers}.{name}.weight"
        refuse(
            f"missing tensor {full}",
            {k: v for k, v in tensors.items() if k != full},
        )
    refuse("transformers drops them", {"d2t": tensors["d2t"]})
    refuse("one MTP module is supported", num_nextn_predict_layers=3)
    refuse("model_type must be one of .*; got 'deepseek_v32'", model_type="deepseek_v32")
    layer = {"transformer_layer_config": {"model_type": "qwen3_next"}}
    refuse("from the target's own files", speculators_model_type="mtp", **layer)
    refuse("mtp_hidden must be", mtp_hidden="behind")
    refuse("made for another target", vocab_size=64)
    refuse("unknown tensor", tensors | {f"model.layers.{layers}.gate.weight": np.zeros(3)})
    specjax.save_head(head, tmp_path)
    with pytest.raises(ValueError, match=r"made for another target: taps \[2\]"):
        specjax.load_head(tmp_path, tiny_target(layers=(LayerConfig(),) * 3))
    with pytest.raises(ValueError, match="head must be an EagleHead, got MTPHead"):
        drafter = specjax.PEagle(head)  # pyright: ignore
        specjax.generate(TARGET, [[1, 2]], drafter=drafter, max_new_tokens=2)
    with pytest.raises(ValueError, match="head must be an MTPHead"):
        specjax.generate(TARGET, [[1, 2]], drafter=specjax.MTP(tiny_head(TARGET)), max_new_tokens=2)


@pytest.mark.thorough
def test_more_drafts_than_trained_for_are_worth_a_warning():
    head = tiny_mtp(TARGET, trained_depth=2)
    with pytest.warns(UserWarning, match="num_draft is 4, but the head was trained to draft 2"):
        specjax.generate(TARGET, [[1, 2]], drafter=specjax.MTP(head, num_draft=4), max_new_tokens=2)
    assert specjax.head_drafter(head).num_draft == 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        *("llama-biases", "llama-yarn", "mistral", "qwen2-window", "qwen3", "qwen3-moe"),
        *("glm4-moe", "glm4-moe-lite", "deepseek-v3"),
    ],
)
def test_new_modules_of_every_family_travel(name, tmp_path):
    """What training starts from is written and read again without a loss, whatever the target's layer has."""
    pytest.importorskip("transformers")
    save_family(name, tmp_path / "target")
    target = specjax.load_target(tmp_path / "target", dtype="float32")
    assert target.config.family in MTP_FAMILIES
    settings = TrainConfig(
        target="tiny", data=tmp_path, output=tmp_path, recipe="mtp", train_embedding=True
    )
    ids = np.arange(3, target.vocab_size, 2, dtype=np.int32)
    head = new_head(settings, target, ids)
    specjax.save_head(head, tmp_path / "head")
    again = specjax.load_head(tmp_path / "head", target)
    assert again.config == head.config
    for a, b in zip(jax.tree.leaves(head), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    options = {"max_new_tokens": 12}
    plain = specjax.generate(target, [[3, 1, 4]], **options)
    spoken = specjax.generate(target, [[3, 1, 4]], drafter=specjax.MTP(again), **options)
    np.testing.assert_array_equal(plain.tokens[0], spoken.tokens[0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3", "gpt-oss"])
def test_new_heads_for_mixtures_are_dense_and_travel(name, tmp_path):
    """An EAGLE-3 head has none of what is peculiar to its target's layers."""
    pytest.importorskip("transformers")
    save_family(name, tmp_path / "target")
    target = specjax.load_target(tmp_path / "target", dtype="float32")
    settings = TrainConfig(target="tiny", data=tmp_path, output=tmp_path, taps=(1, 2, 3))
    head = new_head(settings, target, np.arange(3, 128, 2, dtype=np.int32))
    specjax.save_head(head, tmp_path / "head")
    again = specjax.load_head(tmp_path / "head", target)
    assert again.config == head.config
    options = {"max_new_tokens": 12}
    plain = specjax.generate(target, [[3, 1, 4]], **options)
    spoken = specjax.generate(target, [[3, 1, 4]], drafter=specjax.Eagle3(again), **options)
    np.testing.assert_array_equal(plain.tokens[0], spoken.tokens[0])
    recipe = TrainConfig(target="tiny", data=tmp_path, output=tmp_path, recipe="mtp")
    if name == "gpt-oss":
        with pytest.raises(ValueError, match="got 1 for gpt_oss"):
            new_head(recipe, target, None)


@pytest.mark.thorough
def test_what_a_written_module_of_deepseek_must_not_lose(tmp_path):
    """The router's correction in float32, a full rotation of GLM's, yarn's scale of scores, whole shared experts."""
    target = tiny_deepseek()
    head = tiny_mtp(target)
    correction = head.layers[0].mlp.correction
    correction[...] = 16.0 + 0.01 * jnp.arange(correction.size)
    specjax.save_head(head, tmp_path, dtype="bfloat16")
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.{target.config.num_layers}.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(tensors[name], correction[...])
    decoder = replace(head.config.decoder, shared_expert_size=25)
    odd = tiny_mtp(tiny_deepseek(), decoder=decoder)
    with pytest.raises(ValueError, match="width 24, got one of 25"):
        specjax.save_head(odd, tmp_path)
    plain = {"latent": None, "head_dim": 16, "rotary_dim": None, "family": "glm4_moe"}
    rope = Rope(kind="yarn", factor=4.0, original_length=32, mscale_all_dim=0.7)
    for changes in (plain, {"ropes": (rope,), "attention_scale": parse_scale(rope)}):
        decoder = replace(head.config.decoder, shared_expert_size=24, **changes)
        made = tiny_mtp(target, decoder=decoder)
        specjax.save_head(made, tmp_path)
        assert specjax.load_head(tmp_path).config.decoder == decoder


def parse_scale(rope: Rope) -> float:
    return 14**-0.5 * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
