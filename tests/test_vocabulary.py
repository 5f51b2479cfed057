"""Which draft models share the target's tokens."""

from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
from tokenizers import Tokenizer, models

from specjax.checkpoints.vocabulary import check_same_tokens

WORDS = ["<unk>", "▁um", "▁dois", "▁▁", "três"]


def model(vocab_size: int, source: Path | None = None) -> SimpleNamespace:
    return SimpleNamespace(vocab_size=vocab_size, source=source and str(source))


def folder(path: Path, words: list[str], start: int = 0) -> Path:
    """A folder whose tokenizer gives these words the ids from `start` on."""
    path.mkdir()
    vocabulary = {word: i for i, word in enumerate(words, start)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).save(str(path / "tokenizer.json"))
    return path


def test_same_texts_agree(tmp_path):
    a, b = folder(tmp_path / "a", WORDS), folder(tmp_path / "b", WORDS)
    check_same_tokens(model(5, a), model(5, b))
    check_same_tokens(model(5, a), model(5, a))


def test_other_texts_are_refused(tmp_path):
    a = folder(tmp_path / "a", WORDS)
    b = folder(tmp_path / "b", ["<unk>", "▁um", "▁duas", "▁▁", "quatro"])
    with pytest.raises(ValueError, match="2 ids mean other texts") as error:
        check_same_tokens(model(5, a), model(5, b))
    assert "the first is 2, '▁dois' to the target and '▁duas' to the draft" in str(error.value)
    assert "sizes 5 for the target and 5 for the draft" in str(error.value)
    # the same words under other ids are other tokens
    with pytest.raises(ValueError, match="the first is 1"):
        check_same_tokens(model(5, a), model(6, folder(tmp_path / "c", WORDS, start=1)))


def test_a_longer_vocabulary_may_agree(tmp_path):
    a, b = folder(tmp_path / "a", WORDS), folder(tmp_path / "b", [*WORDS, "mais", "e mais"])
    check_same_tokens(model(5, a), model(7, b))
    check_same_tokens(model(7, b), model(5, a))
    check_same_tokens(model(8, a), model(5, b))  # rows without a text do not matter


def test_ids_without_a_text_may_mean_anything(tmp_path):
    words = dict(zip(WORDS, (0, 1, 2, 3, 5), strict=True))
    holey = tmp_path / "holey"
    holey.mkdir()
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(holey / "tokenizer.json"))
    check_same_tokens(
        model(6, holey), model(6, folder(tmp_path / "a", [*WORDS[:4], "[PAD4]", "três"]))
    )
    with pytest.raises(ValueError, match="the first is 5, 'três'"):
        check_same_tokens(model(6, holey), model(6, folder(tmp_path / "b", [*WORDS, "x"])))


def test_gguf_and_folder_agree(tmp_path):
    """A GGUF file writes the spaces of user-defined tokens as they are."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([word.replace("▁▁", "  ") for word in WORDS])
    writer.add_token_types([2, 1, 1, 4, 1])
    writer.add_token_scores([0.0, -1.0, -2.0, 0.0, -3.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    check_same_tokens(model(5, path), model(5, folder(tmp_path / "a", WORDS)))
    with pytest.raises(ValueError, match="the first is 4"):
        check_same_tokens(model(5, path), model(5, folder(tmp_path / "b", [*WORDS[:4], "3"])))


def test_without_tokenizers_sizes_decide(tmp_path):
    a, bare = folder(tmp_path / "a", WORDS), tmp_path / "bare"
    bare.mkdir()
    damaged = folder(tmp_path / "damaged", WORDS)
    (damaged / "tokenizer.json").write_text("{")
    for source in (None, bare, damaged, tmp_path / "gone"):
        check_same_tokens(model(5, a), model(5, source))
        check_same_tokens(model(5, source), model(5, a))
        with pytest.raises(ValueError, match="no tokenizers to show"):
            check_same_tokens(model(5, a), model(6, source))
    check_same_tokens(model(5), model(5))
    check_same_tokens(SimpleNamespace(vocab_size=5), SimpleNamespace(vocab_size=5))
    with pytest.raises(ValueError, match="sizes 5 for the target and 6 for the draft"):
        check_same_tokens(model(5), model(6))
