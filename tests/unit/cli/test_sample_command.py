"""`gradsync sample`: text from a run, with the tokenizer it was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradsync.commands.cli.main import main
from gradsync.commands.prepare.prepare import prepare

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
    draw = torch.multinomial

    def counted(*given: Any, **more: Any) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        return draw(*given, **more)

    monkeypatch.setattr(torch, "multinomial", counted)
    monkeypatch.setattr("gradsync.runtime.machine.choose_threads", lambda _: 7)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert main(["sample", str(run), "--prompt", "the ", "--tokens", "1"]) == 0
    assert threads == [1]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 2, "nowhere: no checkpoint there"),
        (["RUN", "--data", "OTHER"], 2, "another tokenizer (bpe 270"),
        (["RUN", "--temperature", "-1"], 2, "temperature"),
    ],
)
def test_bad_requests(
    run: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RUN": str(run), "OTHER": str(run.parent / "other")}
    assert main(["sample", *(places.get(each, each) for each in arguments)]) == code
    assert message in capsys.readouterr().err
