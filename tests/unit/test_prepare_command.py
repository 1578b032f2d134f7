import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradsync.cli import prepare as command
from gradsync.errors import DataError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("to be or not to be " * 20)
    return path


def test_summary_says_what_was_read_and_written(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run([str(text), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "1 documents, 380 bytes" in printed
    assert "train 362, val 19 (byte, vocabulary 257, uint16)" in printed
    assert "nats" in printed
    assert str(tmp_path / "out") in printed


def test_json_is_one_document_with_the_description(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tokenizer", "bpe", "--vocab-size", "260", "--val-fraction", "0.5", "--json"]
    assert command.run([str(text), "--out", str(tmp_path / "out"), *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["vocab_size"] == 260
    assert printed["out"] == str(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert printed == {"out": str(tmp_path / "out"), **written}


def test_overwrite_and_text_key_are_passed_on(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "hello"}\n')
    arguments = [str(rows), "--out", str(tmp_path / "out"), "--text-key", "body"]
    assert command.run(arguments) == 0
    with pytest.raises(DataError, match="--overwrite"):
        command.run(arguments)
    assert command.run([*arguments, "--overwrite"]) == 0


def test_wrong_usage_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.run(["a.txt"])
    assert caught.value.code == 2
    assert "--out" in capsys.readouterr().err


def test_the_command_imports_no_torch() -> None:
    code = "import sys, gradsync.cli.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
