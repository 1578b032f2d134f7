"""Text as a stream: packed as `prepare` packs it, resumable anywhere, errors in a line. Offline."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradsync.commands.prepare.prepare import is_stream, prepare
from gradsync.commands.prepare.text_stream import (
    StreamedText,
    TextStream,
    open_streamed_text,
    open_texts,
)
from gradsync.commands.train.check import check_request
from gradsync.commands.train.config import EvalConfig, TrainConfig
from gradsync.data.tokens import open_dataset
from gradsync.errors import ConfigError, DataError

TEXTS = ["one", "", "a much longer one than the sequences are", "two", *"abcdef", "ü" * 9, "last"]


def write(folder: Path, name: str = "a.jsonl", texts: Any = TEXTS, key: str = "text") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return str(folder / name)


def opened(data: str, *, seq_len: int = 4, val_sequences: int = 1, **options: str) -> StreamedText:
    options = {"text_key": "text", "tokenizer": "", **options}
    return open_streamed_text(data, seq_len=seq_len, val_sequences=val_sequences, **options)


def rows(samples: Iterator[Any] | list[Any]) -> list[list[int]]:
    """Inputs and the last target."""
    return [[*inputs.tolist(), int(targets[-1])] for inputs, targets in samples]


@pytest.mark.parametrize("seq_len", [1, 4, 7])
def test_sequences_are_those_of_a_prepared_directory(tmp_path: Path, seq_len: int) -> None:
    data = write(tmp_path / "text")
    prepare([data], tmp_path / "out", val_fraction=0)
    known = open_dataset(tmp_path / "out", "train", seq_len)
    stream = opened(data, seq_len=seq_len)
    whole = TextStream(open_texts(data, "text"), stream.tokenizer, seq_len, "", 0)
    assert rows(iter(whole)) == rows([known[index] for index in range(len(known))])
    inputs, targets = next(iter(whole))
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert inputs[1:].equal(targets[:-1])


def test_a_stream_goes_on_from_any_sequence(tmp_path: Path) -> None:
    data = write(tmp_path / "text")
    whole = rows(iter(opened(data).train))
    for stop in range(len(whole)):
        one, other = opened(data).train, opened(data).train
        begun = rows(list(islice(one, stop)))
        other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert begun + rows(iter(other)) == whole


def test_whole_documents_are_held_out(tmp_path: Path) -> None:
    found = opened(write(tmp_path / "text"), val_sequences=2)
    assert rows(found.val) == [[*b"one", 256, *b"a"], list(b"a muc")]
    assert rows(iter(found.train))[0] == [*b"two", 256, *b"a"]
    assert found.identity == "byte 257"


def test_a_tokenizer_of_a_prepared_directory(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    data = write(tmp_path / "text")
    meta = prepare([data], tmp_path / "out", tokenizer="bpe", vocab_size=300, val_fraction=0)
    found = opened(data, tokenizer=str(tmp_path / "out"), seq_len=2)
    assert found.identity == meta.tokenizer_identity
    tokens = np.fromfile(tmp_path / "out" / "train.bin", dtype="<u2")
    assert rows(found.val) == [tokens[:3].tolist()]


def test_names_of_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path / "text")
    write(tmp_path / "prepared")
    (tmp_path / "prepared" / "train.bin").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"hf:x needs .*pip install 'gradsync\[data\]'"):
        open_texts("hf:x", "text")
    streams = [data, "hf:x", "missing.jsonl", "*.jsonl", "a?b", str(tmp_path / "text")]
    assert all(map(is_stream, streams))
    assert not any(map(is_stream, ["", "dir", str(tmp_path / "prepared"), str(tmp_path / "empty")]))


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "[1].jsonl"):
        write(tmp_path, name, [name])
    assert write(tmp_path, "c.json")
    expected = [b"[1].jsonl", b"a.jsonl", b"b.jsonl"]
    for data in (tmp_path, tmp_path / "*.jsonl"):
        assert list(open_texts(str(data), "text").read(0)) == expected
        assert list(open_texts(str(data), "text").read(2)) == expected[2:]
    assert list(open_texts(str(tmp_path / "[1].jsonl"), "text").read(0)) == expected[:1]


def test_a_hugging_face_stream_is_the_same(tmp_path: Path) -> None:
    data = write(tmp_path / "text", texts=[text for text in TEXTS if text])
    for name in (f"hf:json:{data}", f"hf:{tmp_path / 'text'}"):
        assert rows(iter(opened(name).train)) == rows(iter(opened(data).train))
        assert list(open_texts(name, "text").read(9)) == list(open_texts(data, "text").read(9))


@pytest.mark.parametrize(
    ("lines", "data", "message"),
    [
        (None, "a.jsonl", r"no file is called .*a\.jsonl"),
        (None, "*.jsonl", r"no file is called .*\*\.jsonl"),
        (['{"text": "x"}'], "a.*", r"a\.\* has too little text: .* there is none"),
        ([], "a.jsonl", r"too little text: validation takes the first 1 sequences"),
        (['{"text": "long enough"}'], "a.jsonl", r"training needs one more; there are 1"),
        (['{"text": "x"}', "", "{"], "a.jsonl", r"a\.jsonl:3: no JSON"),
        (['{"body": "x"}'], "a.jsonl", r"a\.jsonl:1: .* 'text'; its keys are 'body'; .*--text-key"),
        (['{"body": "x"}'], "hf:json:a.jsonl", r"no field 'text'; its fields are 'body'; .*--text"),
        (['{"text": 3}'], "hf:json:a.jsonl", r"row 0: 'text' is a int and no text"),
        (["{"], "hf:json:a.jsonl", r"hf:json:.*a\.jsonl cannot be opened: JSON parse error"),
        ([], "hf:json:a.jsonl", r"cannot be opened: no such files, or nothing in them"),
    ],
)
def test_what_is_wrong_with_a_stream_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str] | None,
    data: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if lines is not None:
        Path("a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(DataError, match=message) as caught:
        opened(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "nowhere.jsonl"}, r"no file is called nowhere\.jsonl"),
        ({"text_key": "body"}, "text_key are for streams"),
        ({"data": "hf:x", "num_workers": 1}, "hf:x is a stream: leave num_workers at 0"),
        ({"data": "hf:x", "eval": EvalConfig(max_tokens=None)}, "say with --eval"),
        ({"tokenizer": "dir"}, "tokenizer and text_key are for streams"),
    ],
)
def test_a_run_is_refused_before_it_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        check_request(TrainConfig(**options), 1)
