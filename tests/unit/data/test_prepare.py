import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gradsync.data import documents as documents_file
from gradsync.data import prepare as prepare_file
from gradsync.data.documents import Document, Documents
from gradsync.data.meta import Meta, read_meta
from gradsync.data.prepare import choose_validation, entropy_nats, prepare
from gradsync.data.tokenizer import load_tokenizer
from gradsync.errors import ConfigError, DataError, RunError

END = 256


def tokens_of(directory: Path, split: str) -> list[int]:
    dtype = read_meta(directory).dtype
    return np.fromfile(directory / f"{split}.bin", dtype=dtype).tolist()


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_few_documents_are_joined_and_their_tail_held_out(tmp_path: Path) -> None:
    for name, text in (("b.txt", "second"), ("a.txt", "first")):
        (tmp_path / name).write_text(text)
    out = tmp_path / "out"
    meta = prepare([tmp_path], out, val_fraction=0.25)
    everything = [*b"first", END, *b"second", END]
    assert tokens_of(out, "train") + tokens_of(out, "val") == everything
    assert meta.tokens == {"train": 10, "val": 3}
    assert (meta.split_by, meta.documents, meta.text_bytes) == ("tail", 2, 11)
    assert meta == read_meta(out)


def test_description_holds_size_and_checksum_of_every_file(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", ["some text"] * 3)
    meta = prepare([source], tmp_path / "out", tokenizer="bpe", vocab_size=260)
    assert set(meta.files) == {"train.bin", "val.bin", "tokenizer.json"}
    for name, file in meta.files.items():
        content = (tmp_path / "out" / name).read_bytes()
        assert file.num_bytes == len(content)
        assert file.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_whole_documents_come_back_and_are_split_by_content(tmp_path: Path, tokenizer: str) -> None:
    texts = [f"document {i} says {'hello ' * (i % 7)}ü" for i in range(60)]
    splits = []
    for name, order in (("forward", texts), ("backward", texts[::-1])):
        source = write_jsonl(tmp_path / f"{name}.jsonl", order)
        out = tmp_path / name
        meta = prepare([source], out, tokenizer=tokenizer, val_fraction=0.1)
        assert meta.split_by == "documents"
        decode = load_tokenizer(meta, out).decode
        found = {
            split: decode(tokens_of(out, split)).split("<|endoftext|>") for split in meta.tokens
        }
        assert all(parts.pop() == "" for parts in found.values())
        assert sorted(found["train"] + found["val"]) == sorted(texts)
        assert len(found["val"]) == 6
        splits.append(set(found["val"]))
    assert splits[0] == splits[1]


def test_equal_documents_never_stand_on_both_sides() -> None:
    hashes = np.array([7, 7, 7, 7, *range(100, 130)], dtype=np.uint64)
    held_out = choose_validation(hashes, 0.05)
    assert held_out.tolist() == [True] * 4 + [False] * 30
    assert choose_validation(np.full(50, 3, dtype=np.uint64), 0.1) is None
    assert choose_validation(np.arange(19, dtype=np.uint64), 0.1) is None


def test_no_validation_split_is_written_when_none_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    meta = prepare([tmp_path / "a.txt"], tmp_path / "out", val_fraction=0)
    assert meta.split_by == "none"
    assert set(meta.tokens) == {"train"}
    assert not (tmp_path / "out" / "val.bin").exists()


def test_folders_are_read_in_order_without_hidden_and_binary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.walk

    def backwards(*arguments: object, **options: object) -> Iterator[object]:
        """A file system may list in any order; this one is never the right one."""
        for parent, folders, names in real(*arguments, **options):
            folders.sort(reverse=True)
            names.sort(reverse=True)
            yield parent, folders, names

    monkeypatch.setattr(os, "walk", backwards)
    source = tmp_path / "source"
    for name in ("b/y.txt", "b/x.txt", "a.txt", "c/z.txt", ".git/config", "c/.hid", "d/im.bin"):
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x00\x01" if name.endswith("bin") else name.encode())
    (source / "empty.txt").touch()
    out = source / "out"
    meta = prepare([source], out, val_fraction=0)
    assert bytes(t for t in tokens_of(out, "train") if t < END) == b"a.txtb/x.txtb/y.txtc/z.txt"
    assert (meta.documents, meta.skipped_files) == (4, 2)
    again = prepare([source], out, val_fraction=0, overwrite=True)
    assert again.files == meta.files  # the output itself was not read as input


def test_a_folder_that_cannot_be_read_is_an_error_and_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    real = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="closed: Permission denied"):
        prepare([tmp_path], tmp_path / "out")


def test_large_files_pass_in_pieces_and_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {i} äöü🌊\n" for i in range(400)) + "🌊" * 300
    (tmp_path / "big.txt").write_text(text)
    (tmp_path / "small.txt").write_text("after")
    whole = prepare([tmp_path], tmp_path / "whole")
    monkeypatch.setattr(documents_file, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(prepare_file, "_GROUP_BYTES", 100)
    pieces = list(Document(tmp_path / "big.txt").chunks())
    assert len(pieces) > 50
    assert "".join(piece.decode() for piece in pieces) == text  # no character was cut
    assert prepare([tmp_path / "big.txt", tmp_path / "small.txt"], tmp_path / "parts").files == (
        whole.files
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "rows.jsonl:3: no JSON"),
        ('["text"]', "rows.jsonl:3: needs an object with a string under 'text'; it is a list"),
        ('{"body": "x", "id": 3}', "rows.jsonl:3: .* its keys are 'body', 'id'; .*--text-key"),
        ('{"text": 5}', "rows.jsonl:3: .* a string under 'text'; something else is there;"),
        (b'{"text": "\xff"}', "rows.jsonl:3: no JSON"),
    ],
)
def test_bad_json_lines_are_named_by_file_and_line(
    tmp_path: Path, line: str | bytes, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    bad = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"text": "good"}\n\n' + bad + b"\n")
    with pytest.raises(DataError, match=message):
        prepare([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_text_key_and_lone_surrogates_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"body": "a\\ud800b"}\n{"body": ""}\n')
    meta = prepare([path], tmp_path / "out", text_key="body", val_fraction=0)
    assert meta.documents == 1
    assert tokens_of(tmp_path / "out", "train") == [*b"a?b", END]


def test_input_that_gives_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="no text in"):
        prepare([tmp_path], tmp_path / "out")
    with pytest.raises(DataError, match=r"gone.txt does not exist"):
        prepare([tmp_path / "gone.txt"], tmp_path / "out")
    (tmp_path / "image").write_bytes(b"\x00")
    with pytest.raises(DataError, match="image is no text file"):
        prepare([tmp_path / "image"], tmp_path / "out")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is no text file"):
        prepare([tmp_path / "pipe"], tmp_path / "out")
    with pytest.raises(ConfigError, match="at least one file"):
        prepare([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.0}, "below 1; got 1.0"),
        ({"val_fraction": -0.1}, "at least 0"),
        ({"vocab_size": 500}, "byte tokenizer has 257 tokens, vocab_size=500 is for bpe"),
        ({"tokenizer": "word"}, "tokenizer must be byte or bpe; got 'word'"),
        ({"tokenizer": "bpe", "vocab_size": 5}, "at least 257 tokens; got 5"),
    ],
)
def test_impossible_options_are_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=message):
        prepare([tmp_path / "a.txt"], tmp_path / "out", **options)


def test_prepared_data_is_replaced_only_when_asked(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("old")
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is no obstacle
    prepare([source], out, val_fraction=0)
    source.write_text("new")
    with pytest.raises(DataError, match="already holds prepared data; --overwrite replaces it"):
        prepare([source], out, val_fraction=0)
    assert tokens_of(out, "train") == [*b"old", END]
    prepare([source], out, val_fraction=0, overwrite=True)
    assert tokens_of(out, "train") == [*b"new", END]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="exists and is no data directory"):
        prepare([precious], precious, overwrite=True)
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_a_failure_half_way_leaves_nothing_new_and_the_old_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.txt"
    source.write_text("old")
    prepare([source], tmp_path / "out", val_fraction=0)

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    for name in ("out", "new"):
        with pytest.raises(RunError, match=f"preparing .*{name} failed: .*No space left"):
            prepare([source], tmp_path / name, overwrite=True)
    assert tokens_of(tmp_path / "out", "train") == [*b"old", END]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]


def test_input_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", ["one", "two"])
    real = prepare_file._scan

    def then_append(documents: Documents) -> object:
        found = real(documents)
        write_jsonl(source, ["one", "two", "three"])
        return found

    monkeypatch.setattr(prepare_file, "_scan", then_append)
    with pytest.raises(DataError, match="the input changed"):
        prepare([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_entropy_is_that_of_the_tokens(tmp_path: Path) -> None:
    assert entropy_nats(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4))
    (tmp_path / "a.txt").write_text("aab")
    meta = prepare([tmp_path / "a.txt"], tmp_path / "out")
    expected = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert meta.unigram_entropy_nats == pytest.approx(expected)


def test_large_vocabularies_get_wide_tokens() -> None:
    common = {
        "vocab_size": 70_000,
        "tokenizer": "bpe",
        "documents": 1,
        "text_bytes": 1,
        "tokens": {},
        "split_by": "none",
        "unigram_entropy_nats": 0.0,
        "skipped_files": 0,
        "source": "",
        "files": {},
    }
    with pytest.raises(DataError, match="do not fit"):
        Meta(dtype="uint16", **common)
    Meta(dtype="uint32", **common)
