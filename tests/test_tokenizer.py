"""Tokenizers against transformers and llama.cpp on the same files, streaming, chats, bad input."""

import heapq
import importlib.util
import inspect
import itertools
import json
import json.decoder
import random
import subprocess
import sys
import textwrap
import unicodedata
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import specjax
from specjax.checkpoints.gguf_tokenizer import LLAMA3, SPLITS
from specjax.checkpoints.sources import resolve

SMOLLM2 = "smollm2-135m-instruct"

# ------------------------------------------------------------------------------ texts

PIECES = (
    "Não há coração que aguente: ações, pão-de-ló, água, às vezes à noite. «Você já viu?»",
    "今天天气很好，我们去公园散步吧。北京２０２４年，人工智能！",
    "مرحبا بالعالم، كيف حالك اليوم؟ ٣٤٥ ١٢٣",
    "नमस्ते दुनिया १२३ क्षत्रिय สวัสดีชาวโลก ๑๒๓ 안녕하세요 세계 こんにちは、世界。カタカナ",
    "Съешь же ещё этих мягких французских булок Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "👩‍👩‍👧‍👦 family 👍🏽 🇧🇷🇵🇹 🏳️‍🌈 ❤️ 🤷🏻‍♀️ 1️⃣",
    "0 12 345 6789 3.14159 1e-10 0xDEADBEEF 1,234,567 ½ ² Ⅷ ٣ 𝟘𝟙 ①",
    "def f(x):\n\treturn {'a': [1, 2], \"b\": x**2 // 3}  # ok?\n\n\nif x:\r\n    f(0)\n",
    "I'm you're HE'S we'd they'll I'VE don't 'tis ''s 'S 'ſ HelloWORLDfooBar's a/b//\n/ ǅabc",
    "a\0b\x01\x7f\x85\xa0\u200b\u2028\u2029\ufeffz \ufffd a\ufffdb \ue000\U000f0000 \u0378",
    "e\u0301 \u0301 a\u0328\u0301 \u0e33 \u093f n\u0303o",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>x<|im_end<|im_end|>|> <repo_name>a/b<file_sep>",
    "<s>hi</s> there<unk>? <s><s> <|begin_of_text|>a<|eot_id|> b <mark> <mark><keep>x KEEP y",
    "∀x∈ℝ: ⌈x⌉ ≠ ∅ ⇒ √2·π≈4.44 ▁ ▁▁x",
)
SPACES = (" ", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "        ", "\u3000", "\xa0", "")


def make_texts() -> list[str]:
    """Several hundred texts: chosen, of this Python's library, and mixed at random from pieces."""
    texts = ["", *SPACES, "a", " a", "a ", "  a", "\0", "'", "<", "\u0301", " \u0301", *PIECES]
    for module in (json.decoder, heapq, textwrap):
        source = inspect.getsource(module)
        texts += [source[i : i + 397] for i in range(0, len(source), 397)]
    rng = random.Random(0)
    words = [word for piece in PIECES for word in piece.split(" ")]
    for _ in range(200):
        texts.append("".join(rng.choice(words) + rng.choice(SPACES) for _ in range(8)))
    letters = "".join(PIECES)
    texts += ["".join(rng.choices(letters, k=20)) for _ in range(120)]
    points = [i for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    texts += ["".join(map(chr, rng.choices(points, k=10))) for _ in range(60)]
    texts += [" " * n for n in range(4, 40, 3)] + ["a" * n for n in range(2, 20, 3)]
    return texts


TEXTS = make_texts()
# What vocabularies are trained on: no token then looks like a special one.
LEARNED = [text for text in TEXTS[:80] if text and "<" not in text]


def assert_same(texts, ours, theirs):
    assert len(texts) == len(ours) == len(theirs)
    wrong = [(t, a, b) for t, a, b in zip(texts, ours, theirs, strict=True) if list(a) != list(b)]
    assert not wrong, f"{len(wrong)} of {len(texts)} differ, first: {wrong[0]}"


# ---------------------------------------------------------------------------- oracles

LLAMA_CPP = """
import json, sys
try:
    import llama_cpp
except Exception as error:
    sys.exit(f"llama_cpp cannot be imported: {error}")
answers = []
for path, texts in json.load(sys.stdin):
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    answers.append([model.tokenize(t.encode(), add_bos=True, special=True) for t in texts])
json.dump(answers, sys.stdout)
"""


def llama_cpp(*jobs: tuple[Path, list[str]]) -> list[list[list[int]]]:
    """llama.cpp's ids per file and text; in a process of its own, which may crash."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama_cpp is not installed")
    question = json.dumps([(str(path), texts) for path, texts in jobs])
    command = [sys.executable, "-c", LLAMA_CPP]
    done = subprocess.run(command, input=question, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"llama.cpp ended with {done.returncode}: {done.stderr[-200:]}")
    return json.loads(done.stdout)


def transformers_gguf(path: Path):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


# --------------------------------------------------------------------------- builders

BYTES = pre_tokenizers.ByteLevel.alphabet()
HEX = [f"<0x{i:02X}>" for i in range(256)]


def train(encoder: Tokenizer, texts=LEARNED, trainer=trainers.BpeTrainer, **options) -> Tokenizer:
    encoder.train_from_iterator(texts, trainer(show_progress=False, **options))
    return encoder


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), by_bytes])


def llama3_like() -> Tokenizer:
    encoder = Tokenizer(models.BPE(ignore_merges=True))
    encoder.pre_tokenizer = split(LLAMA3)
    encoder.decoder = decoders.ByteLevel()
    names = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id"]
    special = [f"<|{name}|>" for name in names]
    train(encoder, vocab_size=700, initial_alphabet=BYTES, special_tokens=special)
    begin = special[0]
    encoder.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {begin} $B",
        special_tokens=[(begin, encoder.token_to_id(begin))],
    )
    return encoder


def sentencepiece_like() -> Tokenizer:
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    encoder = Tokenizer(model)
    encoder.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    encoder.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>", *HEX]
    train(encoder, vocab_size=800, limit_alphabet=150, special_tokens=special)
    # the trainer makes every given token special; SentencePiece's byte tokens are not
    state = json.loads(encoder.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    encoder = Tokenizer.from_str(json.dumps(state))
    encoder.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return encoder


def chatml_like() -> Tokenizer:
    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    train(encoder, vocab_size=500, initial_alphabet=BYTES, special_tokens=["<|endoftext|>"])
    encoder.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    encoder.add_tokens(
        [
            AddedToken("<mark>", lstrip=True, rstrip=True),
            AddedToken("keep", single_word=True, normalized=True),
            AddedToken("<tool_call>", special=False),
        ]
    )
    return encoder


def normalizing() -> Tokenizer:
    encoder = Tokenizer(models.Unigram())
    encoder.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    encoder.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    options = {"vocab_size": 500, "unk_token": "<unk>", "special_tokens": special}
    train(encoder, trainer=trainers.UnigramTrainer, **options)
    encoder.add_tokens([AddedToken("keep", normalized=True)])
    return encoder


KINDS = {
    "llama3": (llama3_like, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "sentencepiece": (
        sentencepiece_like,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "chatml": (chatml_like, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "normalizing": (
        normalizing,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
}


@pytest.fixture(scope="module")
def encoders():
    return {name: build() for name, (build, _) in KINDS.items()}


def write(folder: Path, encoder: Tokenizer, config: dict | None = None, /, **files) -> Path:
    """A folder written by hand: tokenizer.json, its config, and other JSON files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder.save(str(folder / "tokenizer.json"))
    for name, value in {"tokenizer_config": config or {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def write_gguf(
    path: Path, model: str, tokens, types, *, scores=None, merges=None, arch="llama", **named
) -> Path:
    """A GGUF file with a tokenizer alone; `named` are `add_*` methods of its writer."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    if types is not None:
        writer.add_token_types(types)
    if scores is not None:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    for name, value in named.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---------------------------------------------------------------- SmolLM2's own file


@pytest.fixture(scope="module")
def smollm2():
    try:
        return specjax.load_tokenizer(SMOLLM2)
    except OSError as error:
        pytest.skip(f"the demonstration model cannot be had: {error}")


def test_smollm2_known_ids(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.stop_token_ids == (2,)
    assert smollm2.encode("Hello 123 world<|im_end|>\n") == [19556, 216, 33, 34, 35, 905, 2, 198]
    assert smollm2.encode("") == []
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    expected = (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [{"role": "user", "content": "hi"}]
    assert smollm2.render_chat(messages) == expected
    assert smollm2.encode_chat(messages) == smollm2.encode(expected)
    assert smollm2.encode_chat(messages)[:3] == [1, 9690, 198]
    assert smollm2.encode_chat(messages, add_generation_prompt=False)[-2:] == [2, 198]


def test_smollm2_equals_llama_cpp(smollm2):
    [theirs] = llama_cpp((resolve(SMOLLM2), TEXTS))
    assert len(TEXTS) > 450
    assert_same(TEXTS, [smollm2.encode(t) for t in TEXTS], theirs)


def test_smollm2_against_transformers(smollm2):
    """transformers cuts these texts by GPT-2's rule: digits stick to spaces, the rest agrees."""
    theirs = transformers_gguf(resolve(SMOLLM2))
    texts = [t for t in TEXTS if not any(unicodedata.category(c)[0] == "N" for c in t)]
    assert len(texts) > 200
    assert_same(texts, [smollm2.encode(t) for t in texts], theirs(texts)["input_ids"])
    assert theirs("a\n\n1")["input_ids"] != smollm2.encode("a\n\n1")
    messages = [
        {"role": "system", "content": "Seja breve."},
        {"role": "user", "content": "Olá <|im_end|> 🇵🇹"},
        {"role": "assistant", "content": "Oi!"},
        {"role": "user", "content": "código: `x = {}`"},
    ]
    assert smollm2.encode_chat(messages) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


# --------------------------------------------------------------- round trips, streams


# SmolLM2's vocabulary lacks the bytes F1 and F2 (planes without characters) and six control codes,
# which it drops, here as in llama.cpp.
HAS = st.characters(
    codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d\ufffd"
)


@given(text=st.text(HAS) | st.sampled_from(TEXTS[:-100]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_smollm2_round_trip(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


@given(text=st.text() | st.sampled_from(TEXTS))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_byte_level_round_trip(all_bytes, text):
    ids = all_bytes.encode(text)
    assert all_bytes.decode(ids[1:]) == text
    assert all_bytes.decode(ids) == "<|begin_of_text|>" + text


def test_decode_takes_arrays_and_ids_without_a_text(smollm2):
    ids = smollm2.encode("olá, 世界")
    assert smollm2.decode(np.asarray(ids, np.int32)) == "olá, 世界"
    assert smollm2.decode([*ids, 60000]) == "olá, 世界"
    assert smollm2.decode([]) == smollm2.decode(np.zeros(0, np.int32)) == ""
    assert smollm2.decode([*ids, 2], skip_special_tokens=True) == "olá, 世界"
    half = smollm2.encode("🇵")[:1]
    assert smollm2.decode(half) == "\ufffd"


def pieces(tokenizer, ids, cuts, **options) -> list[str]:
    stream = tokenizer.stream(**options)
    borders = [0, *sorted(c % (len(ids) + 1) for c in cuts), len(ids)]
    said = [stream.push(ids[a:b]) for a, b in itertools.pairwise(borders)]
    return [*said, stream.end()]


@pytest.fixture(scope="module")
def all_bytes(tmp_path_factory, encoders):
    return specjax.load_tokenizer(write(tmp_path_factory.mktemp("all"), encoders["llama3"]))


@pytest.fixture(scope="module")
def byte_tokens(tmp_path_factory, encoders):
    return specjax.load_tokenizer(
        write(tmp_path_factory.mktemp("bytes"), encoders["sentencepiece"])
    )


CUTS = st.lists(st.integers(0, 60), max_size=12)


@given(ids=st.lists(st.integers(0, 400) | st.integers(0, 49999), max_size=40), cuts=CUTS)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_stream_is_decode(smollm2, ids, cuts):
    for skip in (False, True):
        said = pieces(smollm2, ids, cuts, skip_special_tokens=skip)
        assert "".join(said) == smollm2.decode(ids, skip_special_tokens=skip)
        assert not any(piece.endswith("\ufffd") for piece in said[:-1])


@given(
    ids=st.lists(st.integers(0, 900) | st.integers(3, 258), max_size=40)
    | st.lists(st.sampled_from(["é", "世", "🙂", " a", "b"]), max_size=9),
    cuts=CUTS,
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_stream_is_decode_with_byte_tokens(byte_tokens, ids, cuts):
    if ids and isinstance(ids[0], str):
        ids = byte_tokens.encode("".join(ids))
    for skip in (False, True):
        said = pieces(byte_tokens, ids, cuts, skip_special_tokens=skip)
        assert "".join(said) == byte_tokens.decode(ids, skip_special_tokens=skip)


@given(text=st.text(HAS))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_stream_breaks_no_character(smollm2, text):
    said = pieces(smollm2, smollm2.encode(text), range(100))
    assert not any("\ufffd" in piece for piece in said)
    assert said[-1] == ""  # whole characters wait for nothing


# ------------------------------------------------------ folders, against transformers


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory, encoders):
    """The same folder in transformers and here, written by transformers."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(request.param)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=encoders[request.param], **KINDS[request.param][1]
    ).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder), specjax.load_tokenizer(folder)


def test_folder_equals_transformers(pair):
    theirs, ours = pair
    for special in (True, False):
        expected = theirs(TEXTS, add_special_tokens=special)["input_ids"]
        got = [ours.encode(t, add_special_tokens=special) for t in TEXTS]
        assert_same(TEXTS, got, expected)
    for skip in (True, False):
        expected = [theirs.decode(ids, skip_special_tokens=skip) for ids in got]
        assert [ours.decode(ids, skip_special_tokens=skip) for ids in got] == expected
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.stop_token_ids == (theirs.eos_token_id,)
    assert ours.token_texts() == theirs.convert_ids_to_tokens(list(range(ours.vocab_size)))


DECLARED = {
    "eos as a mapping": (
        {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True}},
        {},
    ),
    "tokens not in tokenizer.json": (
        {"eos_token": "<|im_end|>", "pad_token": "<pad>", "extra_special_tokens": ["<extra>"]},
        {},
    ),
    "a vocabulary entry made special": ({"bos_token": "def", "sep_token": "the"}, {}),
    "begin and end flags": (
        {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "add_bos_token": True,
            "add_eos_token": True,
        },
        {},
    ),
    "split special tokens": ({"eos_token": "<|im_end|>", "split_special_tokens": True}, {}),
    "declared with other flags": (
        {
            "added_tokens_decoder": {
                "501": {"content": "<|im_end|>", "special": True, "rstrip": True},
                "600": {"content": "<new>", "special": False, "lstrip": True},
            }
        },
        {"special_tokens_map": {"bos_token": "<ignored>"}},
    ),
    "named in special_tokens_map.json": (
        {"eos_token": "<|endoftext|>"},
        {
            "special_tokens_map": {
                "eos_token": {"content": "<|im_end|>", "lstrip": False, "special": True},
                "additional_special_tokens": ["<|im_start|>", "<extra>"],
            }
        },
    ),
}


@pytest.mark.parametrize("case", DECLARED)
def test_declared_tokens_equal_transformers(case, tmp_path, encoders):
    transformers = pytest.importorskip("transformers")
    config, files = DECLARED[case]
    folder = write(tmp_path, encoders["chatml"], config, **files)
    ours = specjax.load_tokenizer(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    texts = [*PIECES, "<pad>a<extra> <new> b <|im_end|> \n c def the\0 <ignored>"]
    assert_same(texts, [ours.encode(t) for t in texts], theirs(texts)["input_ids"])
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.vocab_size == len(theirs)


def test_file_rules_over_begin_flag(tmp_path, encoders):
    """transformers 5 ignores `add_bos_token` where tokenizer.json says what is put around texts."""
    config = {"bos_token": "<|begin_of_text|>", "add_bos_token": False}
    assert specjax.load_tokenizer(write(tmp_path, encoders["llama3"], config)).encode("a")[0] == 0


def test_stop_tokens(tmp_path, encoders):
    def stops(name, **files):
        config = {"eos_token": {"content": "<|im_end|>"}}
        return specjax.load_tokenizer(
            write(tmp_path / name, encoders["chatml"], config, **files)
        ).stop_token_ids

    end = encoders["chatml"].token_to_id("<|im_end|>")
    assert stops("a") == (end,)
    assert stops("b", generation_config={"eos_token_id": [7, end, 7]}) == (7, end)
    assert stops("c", config={"eos_token_id": 5}) == (5, end)
    both = {"generation_config": {"eos_token_id": 8}, "config": {"eos_token_id": 5}}
    assert stops("d", **both) == (8, end)
    with pytest.raises(specjax.CheckpointError, match="eos_token_id must be whole numbers"):
        stops("e", config={"eos_token_id": "5"})


# ------------------------------------------------------------------------------ chats

CHATML = (
    "{%- if tools %}\n    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}\n"
    "    {%- for tool in tools %}\n        {{- '\\n' }}\n        {{- tool | tojson }}\n"
    "    {%- endfor %}\n    {{- '\\n</tools><|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.tool_calls %}\n        {{- '<|im_start|>assistant' }}\n"
    "        {%- for call in message.tool_calls %}\n"
    "            {{- '\\n<tool_call>' + (call | tojson(indent=2)) + '</tool_call>' }}\n"
    "        {%- endfor %}\n        {{- '<|im_end|>\\n' }}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}\n"
)
LLAMA_3 = (
    "{{- bos_token }}\n"
    "{%- if not date is defined %}{% set date = strftime_now('%Y') %}{% endif %}\n"
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set system_message = messages[0]['content'] | trim %}\n"
    "    {%- set messages = messages[1:] %}\n"
    "{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date + '\\n' }}\n"
    "{{- system_message }}\n{{- '<|eot_id|>' }}\n"
    "{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\\n\\n' %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set system = '' %}"
    "{% set loop_messages = messages %}{% endif %}{{ bos_token }}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ ' [INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
# `{% generation %}` is a scope of its own: what is set inside is not seen outside
MARKED = (
    "{% set mood = 'calm' %}{% for message in messages %}\n"
    "{% if message.role == 'system' %}{% continue %}{% endif %}\n"
    "{% if loop.index > 3 %}{% break %}{% endif %}\n"
    "{{ message.role }}:{% if message.role == 'assistant' %}{% generation %}\n"
    "  {% set mood = 'wild' %}{{ message.content }}({{ mood }}){{ loop.index }}"
    "{% endgeneration %}\n"
    "{% else %}{{ message.content }}{% endif %}[{{ mood }}]\n"
    "{% endfor %}{{ documents | tojson }}"
    "{{ ['<é>', {'b': 1, 'a': none}] | tojson(sort_keys=true) }}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ 'name' in messages[0] }}{% if add_generation_prompt %}assistant:{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama-3": LLAMA_3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "marked": MARKED,
}
USER = {"role": "user", "content": "  Olá! Que horas são em 北京? <|im_end|>\n"}
ANSWER = {"role": "assistant", "content": "São 9h30 🕤\n\nAté já.  "}
SYSTEM = {"role": "system", "content": "Seja breve."}
CHATS = {
    "one": [USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "e < 1 & b?"}],
    "system": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    "none": [{**USER, "name": None, "tool_calls": None}],
}
TOOLS = [{"type": "function", "function": {"name": "hora", "description": "É <tarde>?"}}]


def load_pair(folder: Path, encoder: Tokenizer, config: dict):
    transformers = pytest.importorskip("transformers")
    write(folder, encoder, config)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return theirs, specjax.load_tokenizer(folder)


def ask(theirs, messages, **variables):
    return theirs.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False, **variables
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["llama3", "sentencepiece"])
def test_chats_equal_transformers(name, kind, tmp_path, encoders):
    config = {**KINDS[kind][1], "chat_template": TEMPLATES[name]}
    theirs, ours = load_pair(tmp_path, encoders[kind], config)
    compared = 0
    for messages in CHATS.values():
        for variables in ({}, {"tools": TOOLS}, {"enable_thinking": False, "documents": []}):
            try:
                expected = ask(theirs, messages, **variables)
            except Exception as error:
                with pytest.raises(ValueError, match=f"refused these messages: {error}"):
                    ours.encode_chat(messages, **variables)
                continue
            assert ours.encode_chat(messages, **variables) == expected
            compared += 1
    assert compared == (9 if name == "gemma" else 12)
    call = {"role": "assistant", "tool_calls": [{"name": "hora", "arguments": {"onde": "Évora"}}]}
    if name == "chatml":
        assert ours.encode_chat([USER, call], tools=TOOLS) == ask(theirs, [USER, call], tools=TOOLS)


def test_chat_is_rendered_as_written(tmp_path, encoders):
    """The templates' own words, without an oracle."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": MISTRAL}
    tokenizer = specjax.load_tokenizer(write(tmp_path, encoders["sentencepiece"], config))
    messages = [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    expected = "<s> [INST] Seja breve.\n\na [/INST] b</s>"
    assert tokenizer.render_chat(messages) == expected
    ids = tokenizer.encode_chat(messages)
    assert ids == tokenizer.encode(expected, add_special_tokens=False)
    assert ids.count(1) == 1 and ids[0] == 1 and ids[-1] == 2
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.encode_chat([ANSWER])


def test_named_templates(tmp_path, encoders):
    named = [
        {"name": "default", "template": "plain{{ messages | length }}"},
        {"name": "tool_use", "template": "tools{{ tools | length }}"},
        {"name": "rag", "template": "rag"},
    ]
    theirs, ours = load_pair(tmp_path / "list", encoders["chatml"], {"chat_template": named})
    assert ours.render_chat([USER]) == "plain1"
    assert ours.render_chat([USER], tools=TOOLS) == "tools1"
    assert ours.encode_chat([USER]) == ask(theirs, [USER])
    assert ours.encode_chat([USER], tools=TOOLS) == ask(theirs, [USER], tools=TOOLS)

    folder = write(tmp_path / "only", encoders["chatml"], {"chat_template": named[2:]})
    with pytest.raises(ValueError, match=r"no chat template \(only rag\)"):
        specjax.load_tokenizer(folder).encode_chat([USER])


def test_template_files_come_first(tmp_path, encoders):
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path, encoders["chatml"], {"chat_template": "of the config"})
    (folder / "chat_template.jinja").write_text("do ficheiro: é\n", encoding="utf-8")
    assert specjax.load_tokenizer(folder).render_chat([USER]) == "do ficheiro: é"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].type }}")
    ours = specjax.load_tokenizer(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.render_chat([USER], tools=TOOLS) == "function"
    for variables in ({}, {"tools": TOOLS}):
        assert ours.encode_chat([USER], **variables) == ask(theirs, [USER], **variables)


ESCAPES = (
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__']['__mro__'][1]['__subclasses__']() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ raise_exception.__globals__.keys() }}",
    "{{ strftime_now.__globals__['os'].system('true') }}",
    "{{ lipsum.__globals__['os'].getcwd() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ [1].append(2) }}",
    "{% for i in range(999999999) %}{% endfor %}",
    "{% include 'x' %}",
    "{{ self._TemplateReference__context.environment.globals }}",
)


@pytest.mark.parametrize("template", ESCAPES)
def test_templates_cannot_leave_the_sandbox(template, tmp_path, encoders):
    folder = write(tmp_path, encoders["chatml"], {"chat_template": template})
    messages = [dict(USER)]
    with pytest.raises(ValueError, match="the chat template refused"):
        specjax.load_tokenizer(folder).render_chat(messages)
    assert messages == [USER]


def test_templates_see_plain_data_only(tmp_path, encoders):
    folder = write(tmp_path, encoders["chatml"], {"chat_template": "{{ x }}{{ messages }}"})
    tokenizer = specjax.load_tokenizer(folder)
    with pytest.raises(ValueError, match=r"lists and mappings only: got \w*Path"):
        tokenizer.render_chat([USER], x=Path("a"))
    with pytest.raises(ValueError, match="mappings only: got bytes"):
        tokenizer.render_chat([{"role": "user", "content": b"a"}])


# -------------------------------------------------------------- GGUF: SentencePiece's


def spm_vocabulary():
    """Tokens, types and scores as SentencePiece's BPE trainer would write them."""
    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.Metaspace()
    train(encoder, [text for text in LEARNED if "\0" not in text], vocab_size=700)
    vocabulary = encoder.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    runs = [t for t in ("▁" * n for n in (2, 3, 4, 5, 8)) if t not in vocabulary]
    merged = [t for t in tokens if len(t) > 1] + runs
    scores = {t: -1e9 for t in tokens} | {t: -float(i) for i, t in enumerate(merged)}
    words = list(scores)
    random.Random(0).shuffle(words)  # ids need not follow scores
    head, own = ["<unk>", "<s>", "</s>"], ["<mark>", "  \n"]  # user-defined spaces are written so
    types = [2, 3, 3] + [6] * 256 + [4] * len(own) + [1] * len(words)
    before = [0.0] * (3 + 256 + len(own))
    return [*head, *HEX, *own, *words], types, before + [scores[word] for word in words]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_gguf_equals_llama_cpp(prefix, tmp_path):
    tokens, types, scores = spm_vocabulary()
    path = tmp_path / "spm.gguf"
    write_gguf(path, "llama", tokens, types, scores=scores, add_space_prefix=prefix)
    tokenizer = specjax.load_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.stop_token_ids) == (len(tokens), (2,))
    for text in TEXTS:  # SentencePiece puts its space after special tokens too
        if not any(special in text for special in ("<s>", "</s>", "<unk>", "<mark>", "  \n", "▁")):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    [theirs] = llama_cpp((path, TEXTS))
    assert_same(TEXTS, [tokenizer.encode(t) for t in TEXTS], theirs)


def test_sentencepiece_gguf_equals_transformers(tmp_path):
    """Where transformers' reading is SentencePiece's: no space in front, no special tokens."""
    tokens, types, scores = spm_vocabulary()
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    path = write_gguf(tmp_path / "spm.gguf", "llama", tokens, types, scores=scores, **ends)
    tokenizer, theirs = specjax.load_tokenizer(path), transformers_gguf(path)
    own = ("<s>", "</s>", "<unk>", "<mark>", "  \n")
    texts = [t for t in TEXTS if t[:1] not in (" ", "▁") and not any(s in t for s in own)]
    assert len(texts) > 250
    assert_same(texts, [tokenizer.encode(t) for t in texts], theirs(texts)["input_ids"])


def test_sentencepiece_gguf_by_hand(tmp_path):
    words = {"ab": -1.0, "▁a": -2.0, "▁ab": -3.0, "bc": -4.0, "abc": -5.0}
    letters = dict.fromkeys("▁abc", -1e9)
    tokens = ["<unk>", "<s>", "</s>", *HEX, *words, *letters]
    types = [2, 3, 3] + [6] * 256 + [1] * 9
    scores = [0.0] * 259 + [*words.values(), *letters.values()]
    path = write_gguf(tmp_path / "hand.gguf", "llama", tokens, types, scores=scores)
    tokenizer = specjax.load_tokenizer(path)

    def told(text):
        return [tokens[i] for i in tokenizer.encode(text)]

    assert told("") == ["<s>"]
    assert told("ab") == ["<s>", "▁ab"]
    assert told("abc") == ["<s>", "▁ab", "c"]  # -3 before -5: not the longest token, the best merge
    assert told("cabc") == ["<s>", "▁", "c", "abc"]
    assert told(" ac") == ["<s>", "▁", "▁a", "c"]
    assert told("é\n") == ["<s>", "▁", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert told("a</s>a<unk>") == ["<s>", "▁a", "</s>", "▁a", "<unk>"]
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    assert tokenizer.decode(tokenizer.encode("é abc", add_special_tokens=False)) == "é abc"


def test_phi3_swallows_space_after_control_tokens(tmp_path):
    """As in its tokenizer.json; the file says nothing of it, llama.cpp goes by the model's name."""
    own = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "▁", "a"]
    options = {"scores": [0.0] * 7, "arch": "phi3", "chat_template": "<|user|>\na<|end|>\n"}
    path = write_gguf(tmp_path / "phi3.gguf", "llama", own, [2, 3, 3, 3, 3, 1, 1], **options)
    tokenizer = specjax.load_tokenizer(path)
    assert [own[i] for i in tokenizer.encode_chat([USER])] == ["<|user|>", "▁", "a", "<|end|>"]
    assert tokenizer.stop_token_ids == (2, 4)


# -------------------------------------------------------------------- GGUF: byte-level


@pytest.fixture(scope="module")
def uncut():
    """A byte-level vocabulary learned without cutting, so that every cut shows in the ids."""
    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜User｜>"]
    train(encoder, vocab_size=2000, initial_alphabet=BYTES, special_tokens=special)
    state = json.loads(encoder.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    tokens.append("Ġunreached")  # by no merge: a whole word of the Llama 3 kind
    types = [3] * len(special) + [1] * (len(tokens) - len(special))
    return tokens, types, [" ".join(merge) for merge in state["merges"]]


def write_byte_level(path: Path, uncut, pre: str, **named) -> Path:
    tokens, types, merges = uncut
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return write_gguf(
        path, "gpt2", tokens, types, merges=merges, tokenizer_pre=pre, **{**ends, **named}
    )


def has_marks(text: str) -> bool:
    return any(unicodedata.category(c)[0] == "M" for c in text)


def test_byte_level_gguf_equals_llama_cpp(tmp_path, uncut):
    texts = [*TEXTS, "<｜User｜>a<|im_start|> \nb", "an unreached one"]
    files = {pre: write_byte_level(tmp_path / f"{pre}.gguf", uncut, pre) for pre in SPLITS}
    ours = {pre: specjax.load_tokenizer(path) for pre, path in files.items()}
    got = {pre: [t.encode(x) for x in texts] for pre, t in ours.items()}
    assert got["llama-bpe"][0] == got["tekken"][0] == [1]  # these begin texts unless told not to
    assert got["qwen2"][0] == got["smollm"][0] == []
    assert [len(uncut[0]) - 1 in got[pre][-1] for pre in ("llama-bpe", "dbrx")] == [True, False]
    cuts = [got[pre] for pre in ("gpt-2", "smollm", "dbrx", "qwen2", "gpt-4o")]
    assert all(a != b for i, a in enumerate(cuts) for b in cuts[:i])

    # Qwen2's tokenizer.json composes accents first, which llama.cpp leaves out
    asked = [unicodedata.normalize("NFC", x) for x in texts]
    jobs = [(path, asked if pre == "qwen2" else texts) for pre, path in files.items()]
    for pre, theirs in zip(files, llama_cpp(*jobs), strict=True):
        # llama.cpp writes \p{M} of these two out of the original's rule
        keep = [pre not in ("tekken", "gpt-4o") or not has_marks(x) for x in texts]
        assert sum(keep) > 350
        kept = [[y for y, k in zip(x, keep, strict=True) if k] for x in (texts, got[pre], theirs)]
        assert_same(*kept)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_byte_level_gguf_equals_transformers(pre, tmp_path, uncut):
    path = write_byte_level(tmp_path / "file.gguf", uncut, pre, add_bos_token=True)
    ours, theirs = specjax.load_tokenizer(path), transformers_gguf(path)
    texts = [unicodedata.normalize("NFC", x) for x in TEXTS]
    if pre in ("llama-bpe", "tekken"):  # whose whole words transformers does not keep
        merged = Tokenizer.from_str(theirs.backend_tokenizer.to_str())
        merged.model.ignore_merges = True
        expected = [merged.encode(x).ids for x in texts]
    else:
        expected = theirs(texts)["input_ids"]
    assert_same(texts, [ours.encode(x) for x in texts], expected)


def test_gguf_chat_templates_and_ends(tmp_path, uncut):
    named = [
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    options = {"chat_template": named, "add_eos_token": True, "pad_token_id": 0}
    path = write_byte_level(tmp_path / "a.gguf", uncut, "gpt-2", **options)
    tokenizer = specjax.load_tokenizer(path)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi"
    assert tokenizer.render_chat([USER], tools=TOOLS) == "1 tools"
    assert tokenizer.encode("") == [2]
    assert tokenizer.special_tokens["pad_token"] == "<|endoftext|>"
    # one end is named here, the other known by its text
    path = write_byte_level(tmp_path / "b.gguf", uncut, "gpt-2", eos_token_id=0)
    assert specjax.load_tokenizer(path).stop_token_ids == (0, 2)
    # and is that token even in a file without types
    tokens, _, merges = uncut
    write_gguf(path, "gpt2", tokens, None, merges=merges, tokenizer_pre="gpt-2", eos_token_id=0)
    tokenizer = specjax.load_tokenizer(path)
    assert tokenizer.stop_token_ids == (0, 2)
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode([2], skip_special_tokens=True) == ""
    # ids that are no tokens stand for none
    path = write_byte_level(tmp_path / "c.gguf", uncut, "gpt-2", pad_token_id=2**32 - 1)
    assert "pad_token" not in specjax.load_tokenizer(path).special_tokens


# -------------------------------------------------------------------------- bad input


def test_bad_folders(tmp_path, encoders):
    def refused(folder, match):
        with pytest.raises(specjax.CheckpointError, match=match):
            specjax.load_tokenizer(folder)

    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "expected tokenizer.json, found none")
    folder = write(tmp_path / "cut", encoders["chatml"])
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])
    refused(folder, "tokenizer.json: not a tokenizer")
    folder = write(tmp_path / "config", encoders["chatml"])
    (folder / "tokenizer_config.json").write_text('{"eos_token": ')
    refused(folder, "tokenizer_config.json: not valid JSON")
    (folder / "tokenizer_config.json").write_bytes(b"\xff\xfe{}")
    refused(folder, "tokenizer_config.json: not valid JSON")
    (folder / "tokenizer_config.json").write_text("[]")
    refused(folder, "expected a JSON object, got list")
    for config in ({"chat_template": [{"name": "a"}]}, {"added_tokens_decoder": {"0": 5}}):
        refused(write(folder, encoders["chatml"], config), "cannot be read")
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        specjax.load_tokenizer(tmp_path / "nowhere")


def test_bad_gguf(tmp_path, uncut):
    def refused(path, match):
        with pytest.raises(specjax.CheckpointError, match=match):
            specjax.load_tokenizer(path)

    tokens, types, merges = uncut
    path = tmp_path / "a.gguf"
    refused(write_byte_level(path, uncut, "bloom"), "pre must be one of .*; got 'bloom'")
    write_gguf(path, "gpt2", tokens, types, merges=merges)
    refused(path, "pre must be one of .*; got None")
    refused(write_gguf(path, "bert", tokens, types), "must be gpt2 or llama, got 'bert'")
    write_gguf(path, "gpt2", tokens, types, tokenizer_pre="gpt-2")
    refused(path, "tokenizer.ggml.merges must be in the file")
    write_gguf(path, "gpt2", tokens, types, tokenizer_pre="gpt-2", merges=["x nowhere"])
    refused(path, "not a usable tokenizer: .*nowhere")
    write_gguf(path, "llama", tokens, types)
    refused(path, "tokenizer.ggml.scores must be in the file")
    write_gguf(path, "llama", ["a", "b", "a"], None, scores=[0.0] * 3)
    refused(path, r"distinct .* got 3 tokens \(2 distinct\)")
    write_gguf(path, "llama", ["a", "b"], [1], scores=[0.0] * 2)
    refused(path, r"got 2 tokens \(2 distinct\), 1 types and 2 scores")
    write_gguf(path, "llama", ["a", "b", "ab"], None, scores=["x", "y", "z"])
    refused(path, "not a usable tokenizer: bad operand type")
    write_byte_level(path, uncut, "gpt-2")
    whole = path.read_bytes()
    for size in (0, 3, 20, 100, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        refused(path, "truncated or not a GGUF file")
    for start, damage in ((0, b"GGML"), (4, b"\x09"), (24, b"\xff" * 8)):
        path.write_bytes(whole[:start] + damage + whole[start + len(damage) :])
        refused(path, "truncated or not a GGUF file")


def test_bad_calls(tmp_path, encoders):
    tokenizer = specjax.load_tokenizer(write(tmp_path, encoders["chatml"]))
    for text in (None, b"a", ["a"], ("a", "b"), 5):
        with pytest.raises(ValueError, match="text must be a string, got"):
            tokenizer.encode(text)
    with pytest.raises(ValueError, match="text must be valid Unicode"):
        tokenizer.encode("a\ud800")
    for ids in ([-1], [0.5], ["3"], 5, [[1]], [True], [2**32]):
        with pytest.raises(ValueError, match="ids must be a flat sequence of token ids"):
            tokenizer.decode(ids)
        with pytest.raises(ValueError, match="ids must be a flat sequence of token ids"):
            tokenizer.stream().push(ids)
    with pytest.raises(ValueError, match="no chat template; use encode"):
        tokenizer.encode_chat([USER])
    tokenizer = specjax.load_tokenizer(write(tmp_path, encoders["chatml"], {"chat_template": "a"}))
    for messages in ("hi", USER, [], ["hi"], [{"content": "hi"}], None, 5, [None]):
        with pytest.raises(ValueError, match="messages must be a non-empty list of mappings"):
            tokenizer.encode_chat(messages)
    broken = {"chat_template": "{% for %}"}
    tokenizer = specjax.load_tokenizer(write(tmp_path, encoders["chatml"], broken))
    assert tokenizer.encode("a")  # a bad template is no reason not to tokenize
    with pytest.raises(ValueError, match="the chat template refused"):
        tokenizer.encode_chat([USER])
