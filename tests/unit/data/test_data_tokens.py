import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradsync.commands.prepare.prepare import prepare
from gradsync.data.meta import read_meta
from gradsync.data.tokens import TokenDataset, open_dataset
from gradsync.errors import ConfigError, DataError


def write_tokens(path: Path, tokens: np.ndarray, dtype: str = "uint16") -> Path:
    tokens.astype(dtype).tofile(path)
    return path


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 50)
    prepare([text], tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize("num_tokens", [17, 20, 21, 24])
def test_every_token_but_the_first_is_a_target_once(tmp_path: Path, num_tokens: int) -> None:
    tokens = np.arange(100, 100 + num_tokens)
    data = TokenDataset(write_tokens(tmp_path / "train.bin", tokens), 4)
    assert len(data) == (num_tokens - 1) // 4
    inputs_BT, targets_BT = data.read_batch(np.arange(len(data)))
    assert inputs_BT.shape == targets_BT.shape == (len(data), 4)
    assert inputs_BT.dtype == targets_BT.dtype == torch.int64
    assert inputs_BT.is_contiguous()
    assert targets_BT.is_contiguous()
    assert inputs_BT.flatten().tolist() == tokens[: len(data) * 4].tolist()
    assert targets_BT.flatten().tolist() == tokens[1 : len(data) * 4 + 1].tolist()


def test_single_samples_equal_the_batch_and_iteration_ends(tmp_path: Path) -> None:
    data = TokenDataset(write_tokens(tmp_path / "train.bin", np.arange(50)), 7)
    inputs_BT, targets_BT = data.read_batch(np.array([3, 0, 3]))
    assert torch.equal(inputs_BT[0], data[3][0])
    assert torch.equal(targets_BT[1], data[0][1])
    assert len(list(data)) == len(data)
    with pytest.raises(IndexError):
        data[-1]


def test_a_pickled_data_set_reopens_its_file_instead_of_copying_it(tmp_path: Path) -> None:
    data = TokenDataset(write_tokens(tmp_path / "train.bin", np.arange(60_000)), 10)
    copy = pickle.dumps(data)
    assert len(copy) < 1000
    again = pickle.loads(copy)  # noqa: S301  our own bytes, made a line above
    assert torch.equal(again[17][0], data[17][0])
    assert again.fingerprint == data.fingerprint


def test_wide_vocabularies_use_uint32(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "train.bin", np.array([70_000, 1, 90_000]), "uint32")
    data = TokenDataset(path, 2, dtype="uint32")
    assert data[0][0].tolist() == [70_000, 1]


def test_nanogpt_directories_are_taken_as_they_are(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.bin", np.array([5, 50_256, 7, 8, 9]))
    (tmp_path / "meta.pkl").write_bytes(b"not even a pickle: it must not be opened")
    data = open_dataset(tmp_path, "train", 2)
    assert data.vocab_size is None
    assert data[0][1].tolist() == [50_256, 7]


def test_prepared_files_bring_their_dtype_and_vocabulary(prepared: Path) -> None:
    opened = open_dataset(prepared, "train", 16)
    assert opened.vocab_size == 257
    assert TokenDataset(prepared / "train.bin", 16).vocab_size == 257
    assert bytes(opened[0][0].tolist()).decode() == "the quick brown "


def test_fingerprint_names_content_and_sample_length(tmp_path: Path) -> None:
    names = set()
    for index, (value, seq_len) in enumerate([(1, 4), (1, 5), (2, 4)]):
        path = write_tokens(tmp_path / f"{index}.bin", np.full(100_000, value))
        names.add(TokenDataset(path, seq_len).fingerprint)
    assert len(names) == 3
    same = write_tokens(tmp_path / "same.bin", np.full(100_000, 1))
    assert TokenDataset(same, 4).fingerprint in names


def test_a_token_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    tokens = np.zeros(100)
    tokens[57] = 300
    path = write_tokens(tmp_path / "train.bin", tokens)
    data = TokenDataset(path, 10, vocab_size=257)
    data.read_batch(np.array([0, 1]))
    with pytest.raises(DataError, match=r"train.bin: token 300 at position 57 .* of 257"):
        data.read_batch(np.array([2, 5]))


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", {}, "0 tokens are too few"),
        (b"abc", {}, "train.bin is cut off: no whole number of uint16 tokens"),
        (bytes(10), {"seq_len": 5}, "5 tokens are too few for seq_len=5, which needs at least 6"),
        (bytes(18), {"seq_len": 0}, "seq_len must be at least 1"),
        (bytes(18), {"dtype": "int8"}, "unknown dtype 'int8'"),
        (None, {}, r"train.bin cannot be read: No such file"),
    ],
)
def test_unusable_files_are_refused(
    tmp_path: Path, content: bytes | None, options: dict[str, Any], message: str
) -> None:
    if content is not None:
        (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises((ConfigError, DataError), match=message):
        TokenDataset(tmp_path / "train.bin", **{"seq_len": 4, **options})


def test_missing_splits_and_changed_files_are_told_apart(prepared: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist; make it with gradsync prepare"):
        open_dataset(prepared / "nowhere", "train", 4)
    with pytest.raises(DataError, match="prepared without a 'test' split"):
        open_dataset(prepared, "test", 4)
    path = prepared / "train.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match="damaged or replaced"):
        open_dataset(prepared, "train", 16)
    path.write_bytes(b"?" + content[1:])
    with pytest.raises(DataError, match="damaged or replaced"):
        open_dataset(prepared, "train", 16)
    open_dataset(prepared, "val", 16)
    (prepared / "val.bin").unlink()
    with pytest.raises(DataError, match=r"val.bin cannot be read"):
        open_dataset(prepared, "val", 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "dtype must be one of uint16, uint32; got 'float32'"),
        ({"dtype": "uint32"}, "files has no train.bin of 951 tokens of uint32"),
        ({"format_version": 99}, "format_version is 99, this gradsync reads 1"),
        ({"vocab_size": "257"}, "not supported between"),
        ({"vocab_size": 0}, "0 tokens do not fit into uint16"),
        ({"files": {}}, "files has no train.bin of 951 tokens"),
        ({"files": {"train.bin": {"num_bytes": 1902}}}, "missing .* 'sha256'"),
    ],
)
def test_a_malformed_description_names_file_and_key(
    prepared: Path, changes: dict[str, object], message: str
) -> None:
    path = prepared / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(DataError, match=message) as caught:
        open_dataset(prepared, "train", 16)
    assert "meta.json" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "\x00"])
def test_a_description_that_is_no_json_object_is_refused(prepared: Path, text: str) -> None:
    (prepared / "meta.json").write_text(text)
    with pytest.raises(DataError, match=r"meta.json: (cannot be read|format_version is None)"):
        read_meta(prepared)


@pytest.mark.parametrize(
    ("written", "vocab_size", "read_as", "words"),
    [
        ("uint32", None, None, "every second token is below 4"),
        ("int64", None, None, "every second token is below 4"),
        ("int64", None, "uint32", "every second token is below 4, as where .* as uint32"),
        ("uint16", 65_537, None, "a vocabulary of 65,537 does not fit into uint16"),
        ("uint16", 65_536, None, ""),
        ("uint16", None, "uint16", ""),
        ("uint32", 200_000, "uint32", ""),
    ],
)
def test_tokens_of_a_type_that_nothing_names_are_not_taken_for_narrower_ones(
    tmp_path: Path, written: str, vocab_size: int | None, read_as: str | None, words: str
) -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000 if written != "uint32" else 200_000, 999)
    write_tokens(tmp_path / "train.bin", tokens, written)
    if words:
        with pytest.raises(DataError, match=rf"train.bin: {words}.*token_dtype.*uint32"):
            open_dataset(tmp_path, "train", 8, dtype=read_as, vocab_size=vocab_size)
        return
    data = open_dataset(tmp_path, "train", 8, dtype=read_as, vocab_size=vocab_size)
    assert data[0][0].tolist() == tokens[:8].tolist()


def test_few_different_tokens_are_no_halves_of_wider_ones(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.bin", np.arange(999) % 3)
    assert len(open_dataset(tmp_path, "train", 8)) == 124
