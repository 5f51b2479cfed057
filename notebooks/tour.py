# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Speculative decoding with specjax
#
# A language model writes one token per pass, and a pass spends most of its time on reading the model's weights. A cheap
# *drafter* guesses the next few tokens; the model, called the *target* here, judges all of them in one pass. What stands
# follows the target's own distribution exactly: the text stays what it was, and good guesses make it come sooner.
#
# This notebook loads a target, decodes plainly and speculatively, watches what is accepted, trains a small EAGLE-3 head and
# exports it for a server. Run the cells in order. They take some minutes on a GPU or TPU; on a CPU the training takes most of
# an hour, unless `QUESTIONS` below is made smaller.
#
# ## Set up
#
# JAX stays as it is: Colab and TPU VMs come with the one that fits their drivers, and a notebook that replaces it breaks both.
# Opened inside a copy of the repository, this cell finds the rest by itself; elsewhere, put the repository's address into
# `SOURCE`. A TPU serves one process at a time: close other notebooks that use it.

# %%
import importlib.util
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import jax

SOURCE = ""  # @param {type:"string"}
"""Where specjax comes from if it is not installed: a folder, or an address such as git+https://..."""

OLDEST = (0, 10, 2) if sys.version_info < (3, 12) else (0, 11, 1)
if jax.__version_info__ < OLDEST:
    raise RuntimeError(
        f"specjax needs JAX {'.'.join(map(str, OLDEST))} or newer on this Python, found {jax.__version__}. Older ones are "
        "not tested (0.10.2 is the oldest that is), and the Flax that is tested on Python 3.12 and later needs 0.11.1. This "
        "notebook never upgrades JAX by itself, since that can part it from the drivers: choose a newer runtime, or upgrade "
        "JAX as https://docs.jax.dev/en/latest/installation.html says for your device, and restart"
    )

if not all(
    importlib.util.find_spec(name)
    for name in ("specjax", "training", "gguf", "grain", "tensorboardX", "matplotlib")
):
    here = [p for p in (Path.cwd(), Path.cwd().parent) if (p / "specjax" / "__init__.py").is_file()]
    source = SOURCE or (str(here[0]) if here else "")
    if not source:
        raise RuntimeError(
            "specjax is not installed, and this is no copy of its repository: set SOURCE above to the repository's folder or "
            "to its address, git+https://..."
        )
    address = source if "://" in source else Path(source).expanduser().resolve().as_uri()
    kept = [f"{name}=={metadata.version(name)}" for name in ("jax", "jaxlib", "numpy")]
    print(f"installing specjax from {source}; {', '.join(kept)} stay ...")
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("\n".join(kept))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "-c", str(constraints)]
        done = subprocess.run(
            [*pip, f"specjax[train,plot] @ {address}"], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"specjax could not be installed beside this JAX:\n{done.stderr}")
    importlib.invalidate_caches()

device = jax.devices()[0]
print(f"JAX {jax.__version__} on {len(jax.devices())} x {device.device_kind} ({device.platform})")

# %% [markdown]
# ## Load a target
#
# SmolLM2-135M-Instruct (Apache-2.0, 98 MB) is fetched once. Any Hugging Face folder, hub id or `.gguf` file of the families in
# the README's [table](../README.md#what-works) does as well. `tiny` is a model that is trained here and now, in seconds, on a
# few files of Python's standard library: it needs no network and shows that everything works, though not what it is worth.
#
# float32 and full-precision products make the comparisons below exact to the last token; people serve in bfloat16, where a
# pass of several tokens may round a near tie otherwise than a pass of one.

# %%
import matplotlib.pyplot as plt
import numpy as np

import specjax

TARGET = "smollm2-135m-instruct"  # @param {type:"string"}
TARGET = os.environ.get("SPECJAX_NOTEBOOK_TARGET", TARGET)
TINY = TARGET == "tiny"
jax.config.update("jax_default_matmul_precision", "highest")

if TINY:
    from training.tiny import openings, train_tiny

    target, tokenizer, losses = train_tiny()
    print(f"the tiny model's loss fell from {losses[0]:.2f} to {losses[-1]:.2f} nats a token")
else:
    target = specjax.load_target(TARGET, dtype="float32")
    tokenizer = specjax.load_tokenizer(TARGET)
parameters = sum(x.size for x in jax.tree.leaves(target))
print(
    f"{TARGET}: {parameters / 1e6:.1f} million parameters, {target.config.num_layers} layers, "
    f"vocabulary of {target.vocab_size} tokens, context of {target.context_length}"
)

# %% [markdown]
# ## Ask it something
#
# `encode_chat` applies the model's own chat template. Everything from here on works on token ids.

# %%
QUESTIONS = 52 if TINY else 160  # @param {type:"raw"}
"""How many questions there are. The first four are asked throughout, the others serve to train the head."""

NEW_TOKENS = 48 if TINY else 128
EDIT = """Rename the variable `d` to `inventory` everywhere and return the whole program.

d = {"apple": 3, "pear": 5, "plum": 0}

def restock(d, item, count):
    if item not in d:
        d[item] = 0
    d[item] = d[item] + count
    return d

def sold_out(d):
    return [item for item in d if d[item] == 0]

d = restock(d, "plum", 12)
print(sold_out(d))"""

if TINY:
    questions = openings(QUESTIONS)
else:
    forms = (
        "Explain {} to a child of ten.",
        "Give me five short facts about {}.",
        "What are the good and the bad sides of {}?",
        "Write a short story in which {} plays a part.",
        "How did {} come about?",
        "Write a friendly letter to a friend about {}.",
        "What should a beginner know about {}?",
        "Describe {} in three short paragraphs.",
    )
    # fmt: off
    topics = (
        "bicycles", "rain", "bread", "the moon", "bees", "chess", "volcanoes", "libraries", "tea",
        "trains", "mountains", "dreams", "coffee", "whales", "bridges", "gardens", "clocks",
        "maps", "soap", "music", "winter", "football", "glass", "the sea", "honey", "letters",
        "lighthouses", "dogs", "money", "forests", "paper", "salt",
    )
    # fmt: on
    pairs = [form.format(topic) for topic in topics for form in forms]
    order = np.random.default_rng(0).permutation(len(pairs))[: QUESTIONS - 1]
    questions = [EDIT, *(pairs[i] for i in order)]
prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in questions]
print(questions[1])
print(f"-> {len(prompts[1])} tokens, the first: {prompts[1][:8]}")

# %% [markdown]
# ## Decode plainly, then with drafts
#
# `NGram` looks up where the newest tokens occurred before, in the prompt or the answer, and drafts what came next. It costs next
# to nothing and pays where a text repeats itself: code, editing, summaries, quotations.
#
# Each call below runs twice, since the first one compiles; the figures are the second's. The tokens must be the same.

# %%
SHOWN, results = prompts[:4], {}
options = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": tokenizer.stop_token_ids}


def run(name, drafter=None, **more):
    """Answers the questions one by one and prints what that took; returns tokens, and counters for each question."""
    for _ in range(2):
        found = [
            specjax.generate(target, [prompt], drafter=drafter, **options, **more)
            for prompt in SHOWN
        ]
    tokens = [out.tokens[0] for out in found]
    counters = jax.tree.map(lambda *x: np.concatenate(x), *(out.statistics for out in found))
    speed = sum(map(len, tokens)) / sum(out.decode_seconds for out in found)
    results[name] = (counters.mean_acceptance_length, speed)
    print(f"{name:28} {results[name][0]:6.2f} tokens a pass {speed:8.1f} tokens/s")
    return tokens, counters


def same(some, others):
    """Whether two runs gave the same tokens, to the last one."""
    return all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))


plain, _ = run("plain")
looked_up, counters = run("NGram()", specjax.NGram())
identical = {"ngram": same(plain, looked_up)}
print(f"\nthe same tokens: {identical['ngram']}\n")
print(tokenizer.decode(plain[1].tolist(), skip_special_tokens=True))

# %% [markdown]
# ## Stream
#
# `stream` gives the same tokens in pieces of a few rounds (a round is one cycle of drafting and judging). `tokenizer.stream` holds
# back half characters. With drafts the text comes in jumps.

# %%
text, jumps = tokenizer.stream(skip_special_tokens=True), []
for piece in specjax.stream(target, SHOWN[:1], drafter=specjax.NGram(), rounds=1, **options):
    print(text.push(piece.tokens[0].tolist()), end="", flush=True)
    jumps.append(len(piece.tokens[0]))
print(text.end())

# %% [markdown]
# ## Watch acceptance
#
# The counters come with every result. Left: of the drafts proposed at each position, how many stood; a draft can only stand if
# all before it did. Right: how many tokens each round of the stream above gave. Plain decoding gives one.

# %%
print(f"rounds   {counters.rounds.tolist()} passes of the target, for each question")
print(f"drafted  {counters.drafted.tolist()} tokens")
print(
    f"accepted {counters.accepted.tolist()} tokens, {counters.acceptance_rate:.0%} of all drafted"
)
print(f"emitted  {counters.emitted.tolist()} tokens")

drafted = counters.drafted_per_position.sum(axis=0)
used = np.flatnonzero(drafted)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
bars = left.bar(used + 1, 100 * counters.acceptance_per_position[used], color="tab:blue")
left.bar_label(bars, [str(n) for n in drafted[used]], fontsize=8)
left.set(
    xlabel="position of the draft (tokens after the newest)",
    ylabel="accepted (% of drafts)",
    title="Drafts that stood, of how many proposed",
    ylim=(0, 110),
)
right.bar(np.arange(1, len(jumps) + 1), jumps, width=1.0, color="tab:orange")
right.axhline(1, color="black", lw=1, label="plain decoding")
right.axhline(np.mean(jumps), color="tab:red", ls="--", lw=1.5, label=f"mean, {np.mean(jumps):.2f}")
right.set(xlabel="round", ylabel="tokens", title="Tokens of each round")
right.legend()
plt.show()

# %% [markdown]
# ## Sample
#
# With `Sampling` the target draws its tokens. Look-up drafts are judged against the very draw that plain decoding would have
# made, with random numbers that belong to the position: the same key gives the same text, with drafts and without.
# The warmer the sampling, the less a text repeats itself, and the less there is to look up.

# %%
for temperature in (0.5, 1.0):
    sampling = specjax.Sampling(temperature=temperature)
    drawn, _ = run(f"T={temperature}, plain", sampling=sampling, key=7)
    guessed, _ = run(f"T={temperature}, NGram()", specjax.NGram(), sampling=sampling, key=7)
    identical[f"ngram at {temperature}"] = same(drawn, guessed)
    print(f"the same tokens: {identical[f'ngram at {temperature}']}")

# %% [markdown]
# ## Mix drafters
#
# `Suffix` drafts what followed most often; `Hybrid` asks its members in turn and takes the first proposal; `Adaptive` cuts a
# proposal to the length that is expected to pay, by what was accepted so far and by what a wider pass costs. All of them can be
# combined, and none changes a token.

# %%
mixed = specjax.Adaptive(specjax.Hybrid((specjax.NGram(), specjax.Suffix())))
blended, _ = run("Adaptive(NGram, Suffix)", mixed)
identical["adaptive"] = same(plain, blended)
print(f"the same tokens: {identical['adaptive']}")

# %% [markdown]
# ## Train an EAGLE-3 head
#
# A head is one small layer that reads the target's hidden states and drafts from them, so it can guess text that never occurred
# before. It learns best from what the target itself writes. The four questions above are held out; the target answers the
# others, at a temperature of 0.8, sixteen at a time.

# %%
from training.data import answer_example, prepare, read_summary

WORK = Path(tempfile.mkdtemp(prefix="specjax-"))
asked, answers = prompts[len(SHOWN) :], {}
for completion in specjax.generate_stream(
    target, asked, slots=16, sampling=specjax.Sampling(temperature=0.8), key=0, **options
):
    answers[completion.index] = completion.tokens
    if len(answers) % max(1, len(asked) // 4) == 0:
        print(f"{len(answers)} of {len(asked)} questions answered")

summary = prepare(
    (answer_example(asked[i], answers[i].tolist()) for i in range(len(asked))),
    WORK / "data",
    length=200 if TINY else 512,
    source=TARGET,
    valid_share=0.1,
)
print(f"{summary.wanted['train']} tokens to learn, {summary.wanted['valid']} to validate on")

# %% [markdown]
# A real head learns from a hundred million tokens, for days; this one sees ten thousands, for minutes. It learns the commonest
# turns, which is enough to see the curves move. The lines below are the run's log: the loss, and what a greedy chain of drafts
# would gain on the validation text. Should the run be cut off, `train` with the same settings goes on from its last checkpoint.

# %%
from training.config import TrainConfig
from training.loop import train

config = TrainConfig(
    target=TARGET,
    data=WORK / "data",
    output=WORK / "run",
    features="offline",  # the target's states are computed once and kept on disk
    taps=(0, 1, 2) if TINY else None,
    draft_vocab_size=256 if TINY else 4096,
    steps=3,
    learning_rate=1e-2 if TINY else 1e-3,
    batch_size=4,
    epochs=6.0 if TINY else 8.0,
    log_every=5,
    evaluate_every=10,
    save_every=20,
)
result = train(config, target=target, stop_token_ids=tokenizer.stop_token_ids)

# %% [markdown]
# Left and middle: the run. Right: how often the head's likeliest token was the target's, for each drafted position, with the true
# tokens before it; at the first evaluation and at the last.

# %%
from training.logs import draw_run, read_log

log = read_log(result.folder.parent)
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.5), layout="constrained")
draw_run(log, left, middle)
evaluations = [row for row in log if row["kind"] == "valid"]
place = np.arange(config.steps)
for shift, row in ((-0.2, evaluations[0]), (0.2, evaluations[-1])):
    accuracy = 100 * np.asarray(row["accuracy"])
    bars = right.bar(
        1 + place + shift, accuracy, width=0.38, label=f"after {row['update']} updates"
    )
    right.bar_label(bars, fmt="%.0f", fontsize=8)
right.set(
    xlabel="drafted position",
    ylabel="right (% of tokens)",
    title="Accuracy on validation text",
    xticks=1 + place,
)
right.legend(loc="upper right")
right.margins(y=0.25)
plt.show()

# %% [markdown]
# ## Decode with the head
#
# On the held-out questions. The untrained head is the one that the run started from: what it drafts is judged all the same, and
# the text is still the target's.

# %%
from training.heads import make_head

results.clear()
head = result.head
start = make_head(config, target, read_summary(config.data), tokenizer.stop_token_ids)
hybrid = specjax.Hybrid((specjax.NGram(), specjax.Eagle3(head)))
plain, _ = run("plain")
identical["untrained"] = same(plain, run("Eagle3, untrained", specjax.Eagle3(start))[0])
trained, before = run("Eagle3, trained", specjax.Eagle3(head))
identical["trained"] = same(plain, trained)
identical["lookup"] = same(plain, run("NGram()", specjax.NGram())[0])
identical["hybrid"] = same(plain, run("Hybrid(NGram, Eagle3)", hybrid)[0])
print(f"\nthe same tokens: {all(identical.values())}")

# %% [markdown]
# Tokens a pass is what the drafts are worth; tokens a second is what is left of it after their cost, and after the cost of wider
# passes, on this device.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3), layout="constrained", sharey=True)
for place, (axes, label, form) in enumerate(
    ((left, "tokens a pass of the target", "%.2f"), (right, "tokens/s", "%.1f"))
):
    values = [row[place] for row in results.values()]
    axes.bar_label(axes.barh(list(results), values), fmt=form, padding=3, fontsize=9)
    axes.axvline(results["plain"][place], color="black", lw=1, ls=":")
    axes.set(xlabel=label)
    axes.margins(x=0.15)
left.invert_yaxis()
figure.suptitle(f"{len(SHOWN)} held-out questions, one by one, greedy")
plt.show()

# %% [markdown]
# ## Export the head, and load it again
#
# `layout="sglang"` is what SGLang, vLLM and TensorRT-LLM read, `layout="speculators"` what speculators and vLLM do. Every tensor of
# a file is used when it is loaded, or loading fails.

# %%
specjax.save_head(head, WORK / "served", layout="sglang")
for path in sorted((WORK / "served").iterdir()):
    print(f"{path.name:24} {path.stat().st_size / 1e6:8.3f} MB")
loaded = specjax.load_head(WORK / "served", target)
again, after = run("Eagle3, loaded", specjax.Eagle3(loaded))
identical["loaded"] = same(trained, again)
print(
    f"the same tokens: {identical['loaded']}, in as many rounds: {np.array_equal(before.rounds, after.rounds)}"
)
print(f"everything lies in {WORK}")

# %% [markdown]
# ## What next
#
# - Train in earnest, with scripts and on more data: [Train a head](../README.md#train-a-head).
# - Other drafters, draft models and trees, and what targets are known: [What works](../README.md#what-works).
# - What it gains on which text, measured: [Measure it](../README.md#measure-it).
# - How a round works, and where to read it: [How it works](../README.md#how-it-works).
# - Thousands of prompts from the command line: [Use](../README.md#use).
