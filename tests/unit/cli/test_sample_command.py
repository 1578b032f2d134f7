"""`gradsync sample`: text from a run, with the tokenizer it was trained with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gradsync.commands.cli.main import main
from gradsync.commands.cli.sample import TextPieces
from gradsync.commands.prepare.prepare import prepare
from gradsync.data.tokenizer import ByteTokenizer

FLAGS = (
    *("--steps", "2", "--device", "cpu", "--dtype", "fp32", "--sample-tokens", "0"),
    *("--model.n-layer", "1", "--model.n-embd", "32", "--model.n-head", "2"),
    *("--model.block-size", "16", "--micro-batch-size", "2", "--tokens-per-update", "64"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on a little text; its data lies beside it."""
    home = tmp_path_factory.mktemp("sample")
    text = home / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    prepare([text], home / "data", val_fraction=0.2)
    prepare([text], home / "other", val_fraction=0.2, tokenizer="bpe", vocab_size=270)
    out = home / "run"
    assert main(["train", "tiny", *FLAGS, "--data", str(home / "data"), "--out", str(out)]) == 0
    return out


def test_the_same_seed_gives_the_same_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["sample", str(run), "--prompt", "the ", "--tokens", "20", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("the ")


def test_a_small_model_takes_one_thread(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr("builtins.print", lambda *_, **__: threads.append(torch.get_num_threads()))
    monkeypatch.setattr("gradsync.runtime.machine.choose_threads", lambda _: 7)
    torch.set_num_threads(2)
    assert main(["sample", str(run), "--prompt", "the ", "--tokens", "3"]) == 0
    assert set(threads[:-1]) == {1}
    assert torch.get_num_threads() == 2


def test_text_comes_piece_by_piece(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text="", **_: pieces.append(text))
    line = ["sample", str(run), "--prompt", "the ", "--tokens", "9", "--temperature=0"]
    assert main(line) == 0
    monkeypatch.undo()
    assert pieces[0] == "the "
    assert len(pieces) > 3
    assert (
        main(["sample", str(run), "--json", "--prompt=the ", "--tokens=9", "--temperature=0"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["text"] == "".join(pieces)


@pytest.mark.parametrize("raw", ["aé€🙂!".encode(), b"a\xff\xff\xffb\xe2\x82", b"\xf0\x9f", b""])
def test_pieces_are_whole_characters(raw: bytes) -> None:
    decode, pieces = ByteTokenizer().decode, list[str]()
    shown = TextPieces(decode, pieces.append)
    for size in range(len(raw) + 1):
        shown.show(raw[:size])
        assert "\ufffd" not in pieces[-1:] or b"\xff" in raw
    shown.show(raw, end=True)
    assert "".join(pieces) == decode(raw)
    if raw.decode(errors="ignore").encode() == raw:
        assert pieces == list(raw.decode())


def test_json_names_the_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(run / "checkpoints" / "step-00000002"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["checkpoint"].endswith("step-00000002")
    assert document["text"].startswith("\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 2, "nowhere: no checkpoint there"),
        (["RUN", "--data", "OTHER"], 2, "another tokenizer (bpe 270"),
        (["RUN", "--tokens", "-1"], 2, "--tokens must not be negative; got -1"),
        (["RUN", "--temperature", "-1"], 2, "temperature"),
    ],
)
def test_bad_requests(
    run: Path,
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"RUN": str(run), "OTHER": str(run.parent / "other")}
    assert main(["sample", *(places.get(each, each) for each in arguments)]) == code
    assert message in capsys.readouterr().err
