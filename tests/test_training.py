"""The training-time test and its losses: parity with the peers' trainers, and with what decoding does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import shared
from flax import struct
from jax import Array
from safetensors.numpy import load_file
from test_heads import golden
from zoo import tiny_deepseek, tiny_gpt_oss, tiny_head, tiny_mtp, tiny_target

import specjax
from specjax.models.config import LayerConfig
from specjax.models.layers import project
from training.eagle3 import Batch, attend_anchors, supervised, unroll
from training.features import hidden_states, online_features
from training.losses import Teacher, divergence, head_loss, shift_left
from training.parameters import split
from training.recipes import Tally

TARGET = tiny_target()


@struct.dataclass
class GivenLogits:
    """A target whose last states are its logits."""

    embedding: Array
    vocab_size: int = struct.field(pytree_node=False)

    def lookup(self, tokens):
        return self.embedding[tokens]

    def logits(self, x, ids=None):
        return x if ids is None else x[..., ids]


def peers_case():
    """Inputs of the golden losses, in this project's terms: the head, the target, everything but the objective."""
    model, head, _ = golden("eagle3-safeailab-tiny")
    folder = shared("golden", "eagle3-train-tiny")
    given, right = (
        load_file(folder / "inputs.safetensors"),
        load_file(folder / "golden.safetensors"),
    )
    table = model.lookup(jnp.arange(512)[None])[0]
    batch = Batch(
        tokens=jnp.asarray(given["input_ids"], jnp.int32),
        wanted=jnp.asarray(given["loss_mask"] > 0),
        document=jnp.asarray(given["attention_mask"], jnp.int32),
    )
    taps = jnp.asarray(given["features"]).reshape(2, 16, 3, 64)
    teacher = Teacher(last=jnp.asarray(given["target_logits"]))
    inside = jnp.arange(16)
    valid = jnp.stack(  # their mask, one token early
        [shift_left(batch.wanted, k) & (inside + 1 + k < 16) for k in range(7)]
    )
    return head, GivenLogits(table, 512), batch, taps, teacher, valid, right


def test_peers_logits_and_hidden_states():
    head, target, batch, taps, _, _, right = peers_case()
    states = jax.jit(unroll, static_argnums=4)(head, target, batch, taps, 7)
    logits = head.logits(states)
    for k in range(7):
        real = np.asarray(batch.document > 0) & (np.arange(16) + 1 + k < 16)
        np.testing.assert_allclose(
            states[k][real], right["step_hidden"][k][real], rtol=1e-4, atol=5e-4
        )
        np.testing.assert_allclose(logits[k][real], right["step_logits"][k][real], atol=1e-3)


@pytest.mark.parametrize("chunk", [70, pytest.param(512, marks=pytest.mark.thorough)])
def test_peers_losses_accuracies_and_gradients(chunk):
    """SafeAILab's and SpecForge's: soft cross-entropy, mean over all rows, 0.8^k."""
    head, target, batch, taps, teacher, valid, right = peers_case()
    params, frozen, structure = split(head, lambda name: name != "ids")

    @jax.jit
    def loss(params, weights):
        head = structure.join(params, frozen)
        states = unroll(head, target, batch, taps, 7)
        return head_loss(head, target, states, teacher, valid, weights, objective="ce", chunk=chunk)

    for k in range(7):
        one, _ = loss(params, jnp.zeros(7).at[k].set(1 / 32))
        np.testing.assert_allclose(one, right["safeailab_losses"][k], rtol=1e-5)
    weights = 0.8 ** jnp.arange(7) / 32
    (total, rows), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, weights)
    np.testing.assert_allclose(total, right["safeailab_total"][0], rtol=1e-5)
    correct = (np.asarray(rows.right) & np.asarray(valid)).sum(axis=(1, 2))
    masked = np.asarray([shift_left(batch.wanted, k).sum() for k in range(7)])
    np.testing.assert_allclose(correct / masked, right["specforge_acc"], atol=1e-5)
    sampled = np.asarray(rows.acceptance)
    for k in range(7):
        counted = right["step_position_mask"][k] > 0
        np.testing.assert_allclose(
            sampled[k][counted].mean(), right["specforge_acceptance_rate"][k], rtol=1e-4
        )
    qkv = np.asarray(gradients["first.attention.qkv"])  # [2H, Hkv, G + 2, Dh]
    found = {
        "fc": gradients["fc"].T,
        "lm_head": gradients["readout.head"].T,
        "norm": gradients["readout.norm.weight"],
        "hidden_norm": gradients["first.hidden_norm.weight"],
        "input_layernorm": gradients["first.embedding_norm.weight"],
        "q_proj": qkv[:, :, :2].reshape(128, -1).T,
        "k_proj": qkv[:, :, 2].reshape(128, -1).T,
        "v_proj": qkv[:, :, 3].reshape(128, -1).T,
    }
    checked = 0
    for name, grad in right.items():
        if name.startswith("safeailab_grad."):
            short = name.removeprefix("safeailab_grad.").removesuffix(".weight").split(".")[-1]
            np.testing.assert_allclose(found[short], grad, atol=1e-4 * np.abs(grad).max())
            checked += 1
    assert checked == 8


@pytest.mark.parametrize("name", ["norm-before", "fc-norm-output"])
def test_speculators_losses(name):
    """Their frame is shifted beforehand; each loss is a mean over the counted rows; no target token is left out."""
    model, head, right = golden("eagle3-speculators-tiny", name)
    ids, size = right["train_input_ids"], 24
    documents = right["train_document_ids"]
    batch = Batch(
        tokens=jnp.asarray(np.concatenate([[0], ids]), jnp.int32)[None],
        wanted=jnp.zeros((1, size + 1), bool),
        document=jnp.asarray(np.concatenate([documents + 1, [0]]), jnp.int32)[None],
    )
    taps = np.concatenate([right["train_features"], np.zeros((1, 192), np.float32)])
    last = right["train_verifier_last_hidden"]
    last = jnp.asarray(np.concatenate([np.zeros((1, 64), np.float32), last]))[None]
    logits = model.logits(last)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    known = jnp.isin(best, head.target_ids)
    teacher = Teacher(
        last=last,
        log_total=jax.nn.logsumexp(logits, axis=-1),
        best=jnp.where(known, best, head.target_ids[0]),
    )
    taps = jnp.asarray(taps).reshape(1, size + 1, 3, 64)
    states = jax.jit(unroll, static_argnums=4)(head, model, batch, taps, 3)
    mask = np.concatenate([right["train_loss_mask"] > 0, [False]])
    valid = jnp.stack([shift_left(jnp.asarray(mask)[None], k) for k in range(3)])
    real = documents >= 0
    logits = head.logits(states)[:, 0, :size]
    for k in range(3):
        np.testing.assert_allclose(logits[k][real], right["train_step_logits"][k][real], atol=1e-3)
        count = float(valid[k].sum()) + 1e-5
        loss, _ = head_loss(head, model, states, teacher, valid, jnp.zeros(3).at[k].set(1 / count))
        np.testing.assert_allclose(loss, right["train_step_losses"][k], rtol=1e-4)


def test_anchors_that_count():
    """Two documents and padding: exactly those whose tokens from t + 1 to t + 2 + k are the assistant's, of one document."""
    wanted = jnp.asarray([[0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 0]], bool)
    document = jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
    valid = supervised(
        Batch(tokens=jnp.zeros((1, 11), jnp.int32), wanted=wanted, document=document), 3
    )
    right = [{1, 2, 5, 6}, {1, 5}, set()]
    assert [set(np.flatnonzero(valid[k, 0])) for k in range(3)] == right


def test_the_first_position_of_a_packed_document_is_read_as_in_decoding():
    """Where DeepSeek's modules leave the embedding out, which they do in every sequence's first place."""
    head = tiny_mtp(TARGET, zero_first=True)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, TARGET.vocab_size, (1, 12)))
    taps = jax.random.normal(jax.random.key(1), (1, 12, 1, TARGET.config.hidden_size))
    document = jnp.asarray([[1] * 5 + [2] * 7])

    def states(part):
        batch = Batch(tokens[:, part], jnp.ones_like(tokens[:, part], bool), document[:, part])
        return unroll(head, TARGET, batch, taps[:, part], 2)

    packed = states(slice(None))
    np.testing.assert_allclose(packed[:, :, 5:], states(slice(5, None)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed[:, :, :3], states(slice(5))[:, :, :3], rtol=1e-4, atol=1e-5)


def sequence(seed, size, length, target=TARGET):
    """One random document in a row of `length`."""
    tokens = np.zeros((1, length), np.int32)
    tokens[0, :size] = np.random.default_rng(seed).integers(0, target.vocab_size, size)
    inside = np.arange(length)[None] < size
    return Batch(
        tokens=jnp.asarray(tokens),
        wanted=jnp.asarray(inside & (np.arange(length)[None] > 2)),
        document=jnp.asarray(inside.astype(np.int32)),
    )


HEADS = {
    "plain": {},
    "variants": {
        "layers": (LayerConfig(window=3), LayerConfig()),  # less than the steps
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": True,
    },
    "mtp": {},
    "mtp-deepseek": {},
}
DEEPSEEK = tiny_deepseek()


@pytest.mark.thorough
@pytest.mark.parametrize("name", HEADS)
def test_training_logits_are_draft_logits(name):
    """Law 7: step k at anchor t is the (k + 1)-th draft after x[t + 1], with the true tokens forced."""
    target = DEEPSEEK if name == "mtp-deepseek" else TARGET
    make = tiny_mtp if name.startswith("mtp") else tiny_head
    head, batch = make(target, **HEADS[name]), sequence(0, 14, 14)
    taps, _ = hidden_states(target, batch, head.config.taps)
    steps = 4
    trained = head.logits(jax.jit(unroll, static_argnums=4)(head, target, batch, taps, steps))
    embedded, fused = head.embed(target, batch.tokens), head.fuse(taps)
    for anchor in (0, 3, 8):
        rows = anchor + 1
        cache = head.init_cache(1, 32)
        x, block = head(embedded[:, 1 : rows + 1], fused[:, :rows], jnp.arange(rows)[None], cache)
        cache, x = cache.commit(block, jnp.asarray([rows])), x[:, -1:]
        np.testing.assert_allclose(head.logits(x)[0, 0], trained[0, 0, anchor], atol=1e-4)
        for k in range(1, steps):
            token = batch.tokens[:, anchor + 1 + k][:, None]
            x, block = head(head.embed(target, token), x, jnp.asarray([[anchor + k]]), cache)
            cache = cache.commit(block, jnp.asarray([1]))
            np.testing.assert_allclose(head.logits(x)[0, 0], trained[k, 0, anchor], atol=1e-4)


@pytest.mark.parametrize("piece", [512, pytest.param(5, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "target",
    [
        TARGET,
        pytest.param(tiny_gpt_oss(), marks=pytest.mark.thorough),
        pytest.param(DEEPSEEK, marks=pytest.mark.thorough),
    ],
    ids=["llama", "gpt-oss", "deepseek"],
)
def test_states_equal_the_targets_own_pass(target, piece, monkeypatch):
    """The trainer's pass without a cache against the decoder's."""
    monkeypatch.setattr("training.eagle3.PIECE", piece)
    batch = sequence(1, 20, 20)
    taps, last = hidden_states(target, batch, (0, 1, 2))
    out = target(batch.tokens, jnp.arange(20)[None], target.init_cache(1, 1), taps=(0, 1, 2))
    np.testing.assert_allclose(taps, out.taps, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(target.logits(last), out.logits, rtol=1e-4, atol=1e-4)


@jax.jit
def total_loss(head, batch):
    features = online_features(TARGET, batch, head.config.taps)
    states = unroll(head, TARGET, batch, features.taps, 3)
    valid = supervised(batch, 3)
    loss, rows = head_loss(head, TARGET, states, features.teacher, valid, jnp.ones(3))
    return loss, Tally.create(rows, valid)


@pytest.mark.thorough
def test_packing_changes_nothing():
    head = tiny_head(TARGET)
    parts = [sequence(i, size, size) for i, size in enumerate((9, 14, 7))]
    packed = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
    number = np.repeat([1, 2, 3], [9, 14, 7])[None]
    packed = packed.replace(document=jnp.asarray(number))
    together, tally = total_loss(head, packed)
    alone = [total_loss(head, part) for part in parts]
    np.testing.assert_allclose(together, sum(loss for loss, _ in alone), rtol=1e-5)
    summed = jax.tree.map(lambda *x: sum(x), *(t for _, t in alone))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), tally, summed)


@pytest.mark.thorough
def test_long_sequences_in_pieces(monkeypatch):
    import training.eagle3

    head, batch = tiny_head(TARGET, **HEADS["variants"]), sequence(2, 30, 32)
    params, frozen, structure = split(head, lambda name: name != "ids")

    def loss(params):
        return total_loss.__wrapped__(structure.join(params, frozen), batch)[0]

    whole = jax.jit(jax.value_and_grad(loss))(params)
    monkeypatch.setattr(training.eagle3, "PIECE", 5)
    pieces = jax.jit(jax.value_and_grad(lambda p: loss(p)))(params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), whole, pieces)


def test_attention_against_the_written_mask():
    """Facts' rule by enumeration: step 0's keys up to the own row, later steps' keys of the own row alone."""
    steps, length = 3, 6
    keys = jax.random.normal(jax.random.key(0), (steps, 1, 2, length, 4))
    values = jax.random.normal(jax.random.key(1), (steps, 1, 2, length, 4))
    query = jax.random.normal(jax.random.key(2), (1, 2, 3, length, 4))
    document = jnp.asarray([[1, 1, 1, 2, 2, 2]])
    for k in range(steps):
        found = attend_anchors(
            query, list(keys[: k + 1]), list(values[: k + 1]), document, scale=0.5
        )
        flat_k, flat_v = (np.concatenate(list(x[: k + 1]), axis=2) for x in (keys, values))
        for q in range(length):
            seen = [
                j * length + r
                for j in range(k + 1)
                for r in range(length)
                if (j == 0 and r <= q and document[0, r] == document[0, q]) or (j > 0 and r == q)
            ]
            scores = 0.5 * np.einsum("hgd,hsd->hgs", query[0, :, :, q], flat_k[0][:, seen])
            weights = np.asarray(jax.nn.softmax(scores, axis=-1))
            right = np.einsum("hgs,hsd->hgd", weights, flat_v[0][:, seen])
            np.testing.assert_allclose(found[0, :, :, q], right, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("objective", ["kl", "ce", "nla", "lk_hybrid"])
def test_swept_gradients_equal_plain_ones(objective):
    """The loss whose gradients are taken chunk by chunk, against automatic differentiation of its definition."""
    head, batch = tiny_head(TARGET), sequence(3, 18, 18)
    features = online_features(TARGET, batch, head.config.taps)
    valid, weights = supervised(batch, 3), jnp.asarray([1.0, 0.7, 0.2])
    params, frozen, structure = split(head, lambda name: name != "ids")

    def plain(params):
        head = structure.join(params, frozen)
        states = unroll(head, TARGET, batch, features.taps, 3)
        whole = jax.nn.log_softmax(TARGET.logits(features.teacher.last))
        ids, total = head.target_ids, 0.0
        for k in range(3):
            teacher = shift_left(whole, k + 1)
            log_p = jax.nn.log_softmax(teacher[..., ids])
            covered = jnp.exp(teacher)[..., ids].sum(-1)
            log_q = jax.nn.log_softmax(head.logits(states[k]))
            loss, _ = divergence(objective, log_p, log_q, covered)
            used = valid[k] & jnp.isin(jnp.argmax(teacher, -1), ids)
            total += weights[k] * jnp.sum(jnp.where(used, loss, 0))
        return total

    def swept(params):
        head = structure.join(params, frozen)
        states = unroll(head, TARGET, batch, features.taps, 3)
        return head_loss(
            head, TARGET, states, features.teacher, valid, weights, objective=objective, chunk=15
        )[0]

    a, b = (jax.jit(jax.value_and_grad(f))(params) for f in (plain, swept))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), a, b)


@pytest.mark.thorough
def test_simulated_length_is_the_greedy_acceptance_length():
    """On the target's own greedy text, leading matches per anchor are what a greedy chain gets accepted (facts §9)."""
    prompt, size, steps = [3, 1, 4], 120, 3
    text = specjax.generate(TARGET, [prompt], max_new_tokens=size).tokens[0]
    tokens = jnp.asarray([*prompt, *text], jnp.int32)[None]
    inside = jnp.ones(tokens.shape, bool).at[:, :3].set(False)
    batch = Batch(tokens=tokens, wanted=inside, document=jnp.ones(tokens.shape, jnp.int32))
    head = tiny_head(TARGET, draft_vocab_size=61, scale=1.0)
    features = online_features(TARGET, batch, head.config.taps)
    valid = supervised(batch, steps)
    params, frozen, structure = split(head, lambda name: name != "ids")
    optimizer = optax.adam(3e-3)

    def judged(params):
        head = structure.join(params, frozen)
        states = unroll(head, TARGET, batch, features.taps, steps)
        return head_loss(head, TARGET, states, features.teacher, valid, jnp.ones(steps) / size)

    @jax.jit
    def learn(carry, _):
        params, state = carry
        gradients = jax.grad(lambda p: judged(p)[0])(params)
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(learn, (params, optimizer.init(params)), length=25)
    right = judged(params)[1].right
    chain = jnp.cumprod(right.astype(jnp.int32), axis=0).sum(axis=0)[0]
    at, expected = len(prompt), []
    while at < len(prompt) + size - steps - 1:  # the rounds of decoding, from the leading matches
        expected.append(int(chain[at - 2]) + 1)
        at += expected[-1]
    assert 1.2 < np.mean(expected) < 3.8, expected
    drafter = specjax.Eagle3(structure.join(params, frozen), num_draft=steps)
    out = specjax.generate(TARGET, [prompt], drafter=drafter, max_new_tokens=sum(expected))
    assert int(out.statistics.rounds[0]) == len(expected)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_gradients_of_products_in_bfloat16(dtype):
    """They are those of the rounded factors, up to the rounding of what comes in and goes out."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight, up = (
        jax.random.normal(k, shape).astype(jnp.bfloat16)
        for k, shape in zip(keys, ((3, 5, 16), (16, 2, 8), (3, 5, 2, 8)), strict=True)
    )

    def loss(x, weight, up):
        return jnp.sum(project(x, weight, dtype=dtype) * up)

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weight, up)
    right = jax.grad(loss, argnums=(0, 1))(*(a.astype(jnp.float32) for a in (x, weight, up)))
    for a, b in zip(found, right, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=2**-8, atol=1e-3)
    by_row = jax.vmap(jax.grad(loss, argnums=1), in_axes=(0, None, 0))(x, weight, up)
    np.testing.assert_allclose(
        jnp.sum(by_row.astype(jnp.float32), 0), right[1], rtol=0.02, atol=0.1
    )
