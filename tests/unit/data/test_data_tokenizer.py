import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.commands.prepare.prepare import prepare
from gradsync.commands.prepare.tokenizer import BpeTokenizer, ByteTokenizer, load_tokenizer
from gradsync.errors import ConfigError, DataError

TEXTS = [b"a rose is a rose is a rose", "Ärger über Öl 🌊".encode(), b"x = <|endoftext|> + 1\n" * 9]


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    return BpeTokenizer.train(TEXTS, 300)


@given(text=st.text())
def test_bytes_come_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode(errors="strict"))
    assert tokenizer.decode(ids) == text


def test_byte_decoding_shows_ends_and_replaces_what_is_no_utf8() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([72, 256, 0xFF]) == "H<|endoftext|>\ufffd"


@pytest.mark.parametrize("text", [text.decode() for text in TEXTS] + ["日本 never seen", ""])
def test_bpe_comes_back_and_batches_equal_singles(bpe: BpeTokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert np.array_equal(bpe.encode_batch([text.encode()])[0], ids)
    assert ids.size == 0 or ids.max() < bpe.vocab_size


def test_bpe_learns_pairs_and_no_text_makes_an_end(bpe: BpeTokenizer, tmp_path: Path) -> None:
    assert len(bpe.encode("a rose is a rose")) < 8
    assert bpe.end_of_text_id not in bpe.encode("x = <|endoftext|> + 1")
    for name, one in (("a", bpe), ("b", BpeTokenizer.train(TEXTS, 300))):
        one.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'gradsync\[tokenizers\]'"):
        BpeTokenizer.train(TEXTS, 300)


def test_the_tokenizer_of_a_directory_is_loaded_and_checked(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(TEXTS[0] * 20)
    meta = prepare([text], tmp_path / "bytes")
    assert load_tokenizer(meta, tmp_path / "bytes").decode([104, 105]) == "hi"
    meta = prepare([text], tmp_path / "bpe", tokenizer="bpe", vocab_size=280)
    tokenizer = load_tokenizer(meta, tmp_path / "bpe")
    assert tokenizer.decode(tokenizer.encode("a rose <|endoftext|>")) == "a rose <|endoftext|>"
    path = tmp_path / "bpe" / "tokenizer.json"
    BpeTokenizer.train(TEXTS, 257).save(path)
    with pytest.raises(DataError, match=r"the tokenizer has 257 tokens, meta.json says"):
        load_tokenizer(meta, tmp_path / "bpe")
    path.write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json: is no tokenizer"):
        load_tokenizer(meta, tmp_path / "bpe")
    path.unlink()
    with pytest.raises(DataError, match=r"tokenizer.json: No such file"):
        load_tokenizer(meta, tmp_path / "bpe")
