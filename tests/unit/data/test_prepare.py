"""Text to token files: nothing is lost, split by content, whole or not at all."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from gradsync.commands.prepare import command
from gradsync.commands.prepare import prepare as prepare_file
from gradsync.commands.prepare.prepare import (
    Documents,
    choose_validation,
    default_corpus,
    entropy_nats,
    prepare,
)
from gradsync.commands.prepare.tokenizer import load_tokenizer
from gradsync.data.meta import read_meta
from gradsync.data.tokens import open_dataset
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
    meta = prepare([tmp_path / "a.txt"], tmp_path / "none", val_fraction=0)
    assert (meta.split_by, meta.tokens) == ("none", {"train": 6})
    assert not (tmp_path / "none" / "val.bin").exists()


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
        for path, file in meta.files.items():
            content = (out / path).read_bytes()
            assert (file.num_bytes, file.sha256) == (len(content), sha256(content).hexdigest())
    assert splits[0] == splits[1]
    assert set(meta.files) >= {"train.bin", "val.bin"}


def test_equal_documents_never_stand_on_both_sides() -> None:
    hashes = np.array([7, 7, 7, 7, *range(100, 130)], dtype=np.uint64)
    assert choose_validation(hashes, 0.2).tolist() == [True] * 7 + [False] * 27
    # four would be more than asked for
    assert choose_validation(hashes, 0.05).tolist() == [False] * 4 + [True] * 2 + [False] * 28
    assert choose_validation(np.arange(20, dtype=np.uint64), 0.99) is None
    assert choose_validation(np.full(50, 3, dtype=np.uint64), 0.1) is None
    assert choose_validation(np.arange(19, dtype=np.uint64), 0.1) is None


def test_many_equal_documents_do_not_take_the_rest_along(tmp_path: Path) -> None:
    for most in range(5):  # whichever hash the line has
        texts = [*(f"document {i}" for i in range(100)), *[f"the line {most}"] * 900]
        source = write_jsonl(tmp_path / "equal.jsonl", texts)
        meta = prepare([source], tmp_path / f"out{most}")
        assert 0.03 < meta.tokens["val"] / sum(meta.tokens.values()) < 0.06


def test_a_share_that_was_not_asked_for_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"document {number}" for number in range(4)] * 10  # the fewest that can be held out
    meta = prepare([write_jsonl(tmp_path / "few.jsonl", texts)], tmp_path / "out")
    assert meta.tokens == {"train": 30 * 11, "val": 10 * 11}
    (said,) = caplog.messages
    assert "25 % of the tokens are held out" in said
    assert "not 5 %" in said


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
    assert (meta.documents, meta.skipped_files) == (4, 3)
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
    monkeypatch.setattr(prepare_file, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(prepare_file, "_GROUP_BYTES", 100)
    (pieces,) = map(list, Documents([tmp_path / "big.txt"]))
    assert len(pieces) > 50
    assert "".join(piece.decode() for piece in pieces) == text  # no character was cut
    assert prepare([tmp_path / "big.txt", tmp_path / "small.txt"], tmp_path / "parts").files == (
        whole.files
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "rows.jsonl:3: no JSON"),
        ('["text"]', "rows.jsonl:3: needs an object with a string under 'text'; its keys are none"),
        ('{"body": "x", "id": 3}', "rows.jsonl:3: .* its keys are 'body', 'id'; .*--text-key"),
        ('{"text": 5}', "rows.jsonl:3: .* a string under 'text'; its keys are 'text'"),
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


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.txt", {"val_fraction": 1.0}, "below 1; got 1.0"),
        ("a.txt", {"val_fraction": -0.1}, "at least 0"),
        ("a.txt", {"vocab_size": 500}, "has 257 tokens, vocab_size=500 is for bpe"),
        ("a.txt", {"tokenizer": "bpe", "vocab_size": 5}, "at least 257 tokens; got 5"),
        ("empty.txt", {}, "no text in"),
        ("gone.txt", {}, "gone.txt does not exist"),
        ("image", {}, "image is no text file"),
        ("pipe", {}, "pipe is no text file"),
        (None, {}, "at least one file"),
    ],
)
def test_what_cannot_be_prepared_is_refused(
    tmp_path: Path, name: str | None, options: dict[str, object], message: str
) -> None:
    for file, content in (("a.txt", b"text"), ("empty.txt", b""), ("image", b"\x00")):
        (tmp_path / file).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((ConfigError, DataError), match=message):
        prepare([tmp_path / name] if name else [], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


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
    with pytest.raises(DataError, match="exists and is no data directory"):  # it holds other things
        prepare([source], tmp_path, overwrite=True)


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


def test_large_vocabularies_get_wide_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    meta = prepare([tmp_path / "a.txt"], tmp_path / "out")
    with pytest.raises(DataError, match="do not fit"):
        replace(meta, vocab_size=70_000)
    replace(meta, vocab_size=70_000, dtype="uint32", tokens={})


# -- the embedded corpus ---------------------------------------------------------------------------


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of five files, and an empty cache."""
    library = tmp_path / "lib"
    for name in ("os.py", "j/son.py", "test/t.py", "site-packages/x.py", "a/tests/t.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n" * 100)
    (library / "data.txt").write_text("no source")
    monkeypatch.setattr(prepare_file.sysconfig, "get_path", lambda _: str(library))
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path / "cache"))
    return library


def test_the_sources_of_the_running_python_are_prepared_once() -> None:
    directory = default_corpus()
    meta = read_meta(directory)
    assert 400 < meta.documents < 1500
    assert meta.tokens["train"] + meta.tokens["val"] == meta.text_bytes + meta.documents
    assert 2.5 < meta.unigram_entropy_nats < 4.0
    assert len(open_dataset(directory, "val", 256)) > 1000
    before = (directory / "train.bin").stat().st_mtime_ns
    assert default_corpus() == directory
    assert (directory / "train.bin").stat().st_mtime_ns == before


def test_tests_and_installed_packages_are_left_out(small_library: Path) -> None:
    meta = read_meta(first := default_corpus())
    assert meta.documents == 2
    assert "Python" in meta.source
    (small_library / "os.py").write_text("changed")
    assert default_corpus() != first
    for path in small_library.rglob("*.py"):
        path.unlink()
    with pytest.raises(DataError, match=r"no Python sources to learn from; .* --data"):
        default_corpus()


def test_the_loser_of_a_race_uses_what_the_winner_made(
    small_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deterministic: the winner finishes while the loser is between its check and its work."""
    real = prepare_file.prepare

    def after_a_winner(*arguments: object, **options: object) -> object:
        real(*arguments, **options)
        return real(*arguments, **options)

    monkeypatch.setattr(prepare_file, "prepare", after_a_winner)
    directory = default_corpus()
    assert read_meta(directory) is not None
    # A cache that cannot be written is an error.
    monkeypatch.setenv("GRADSYNC_CACHE", str(directory / "meta.json"))
    with pytest.raises(RunError, match=r"preparing .* failed: .*GRADSYNC_CACHE can name"):
        default_corpus()


# -- the command -----------------------------------------------------------------------------------


def test_the_command_says_what_was_read_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be " * 20)
    assert command.run([str(text), "--out", str(tmp_path / "plain")]) == 0
    printed = capsys.readouterr().out
    assert "1 document, 380 bytes\n" in printed
    assert "train 362, val 19 (byte, vocabulary 257, uint16)" in printed
    assert "nats" in printed
    assert str(tmp_path / "plain") in printed
    options = ["--tokenizer", "bpe", "--vocab-size", "260", "--val-fraction", "0.5"]
    assert command.run([str(text), "--out", str(tmp_path / "out"), *options]) == 0
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["vocab_size"] == 260
    # Overwrite and text key are passed on.
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "hello"}\n')
    arguments = [str(rows), "--out", str(tmp_path / "rows"), "--text-key", "body"]
    assert command.run(arguments) == 0
    with pytest.raises(DataError, match="--overwrite"):
        command.run(arguments)
    assert command.run([*arguments, "--overwrite"]) == 0


def test_what_is_left_out_or_no_text_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "in" / ".git").mkdir(parents=True)
    for name, content in {"a": b"caf\xe9 " * 99, "b": "café".encode(), ".git/c": b"c"}.items():
        (tmp_path / "in" / name).write_bytes(content)
    arguments = [str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--tokenizer", "bpe"]
    assert command.run(arguments) == 0
    read = "read      2 documents, 500 bytes, 1 hidden or binary skipped\n"
    assert capsys.readouterr().out.startswith(read)
    assert caplog.messages == ["bytes in 1 document are not UTF-8: each became U+FFFD"]
