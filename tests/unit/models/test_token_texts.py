"""What single tokens stand for, read from the files that tokenizers are kept in."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.models import token_texts as reading
from flotilla.shared.models.token_texts import token_texts


def write(folder: Path, **document: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def test_texts_of_a_byte_level_vocabulary_are_those_that_the_library_decodes(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet()
    )
    text = "Jana has 40 apples\n and wünscht 日本 🙂 more"
    tokenizer.train_from_iterator([text] * 4, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(f"{text}<|end|>").ids
    texts = token_texts(tmp_path)

    assert texts is not None
    assert "".join(texts.of(ids)) == tokenizer.decode(ids, skip_special_tokens=False) == f"{text}<|end|>"
    assert len(texts.of(ids)) == len(ids)
    assert (
        texts.of(tokenizer.encode("apples").ids)[-1] == "apples"[-len(texts.of(tokenizer.encode("apples").ids)[-1]) :]
    )


def test_a_letter_of_several_tokens_stands_with_the_last_of_them(tmp_path: Path) -> None:
    vocabulary = {"Ã": 0, "¼": 1, "a": 2}
    texts = token_texts(write(tmp_path, model={"vocab": vocabulary}, decoder={"type": "ByteLevel"}))

    assert texts is not None
    assert texts.of([2, 0, 1, 2]) == ["a", "", "ü", "a"]


def test_word_marks_and_byte_tokens_of_sentence_pieces_are_read(tmp_path: Path) -> None:
    vocabulary = [["<0xC3>", 0.0], ["<0xBC>", 0.0], ["▁has", -1.0]]
    added = [{"id": 3, "content": "<eos>"}]
    texts = token_texts(write(tmp_path, model={"vocab": vocabulary}, added_tokens=added, decoder=None))

    assert texts is not None
    assert texts.of([2, 0, 1, 3, 99]) == [" has", "", "ü", "<eos>", ""]


@pytest.mark.parametrize("text", ["", "[]", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_a_file_of_another_form_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)

    assert token_texts(tmp_path) is None


def test_a_folder_without_one_is_none(tmp_path: Path) -> None:
    assert token_texts(tmp_path / "none") is None


def test_a_vocabulary_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    first = token_texts(write(tmp_path, model={"vocab": {"a": 0}}))

    then = token_texts(write(tmp_path, model={"vocab": {"b": 0}}))
    os.utime(tmp_path / "tokenizer.json", ns=(1, 1))
    last = token_texts(tmp_path)

    assert first is not None and then is not None and last is not None
    assert (first.of([0]), last.of([0])) == (["a"], ["b"])


def test_neither_a_pipe_nor_a_device_is_read(tmp_path: Path) -> None:
    (tmp_path / "pipe").mkdir()
    (tmp_path / "device").mkdir()
    os.mkfifo(tmp_path / "pipe" / "tokenizer.json")
    (tmp_path / "device" / "tokenizer.json").symlink_to("/dev/zero")
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(token_texts(tmp_path / "pipe")), daemon=True)
    reader.start()
    reader.join(10)

    assert found == [None]
    assert token_texts(tmp_path / "device") is None


def test_a_longer_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_BYTES", 10)

    assert token_texts(write(tmp_path, model={"vocab": {"a": 0}})) is None


def test_a_broken_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = reading._text_of

    def counted(path: str) -> bytes | None:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(reading, "_text_of", counted)
    (tmp_path / "tokenizer.json").write_text("[]")

    assert [token_texts(tmp_path), token_texts(tmp_path)] == [None, None]
    assert len(reads) == 1
