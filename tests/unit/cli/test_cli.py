"""The command line: what it imports, and one clear line for every bad request."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gradsync.commands.cli.main import COMMANDS, main
from gradsync.commands.cli.train import complete_flags
from gradsync.commands.models.config import PRESETS
from gradsync.commands.prepare import tokenizer
from gradsync.commands.prepare.prepare import prepare
from support.foreign_files import rewrite_json
from support.launchers import run_python
from support.small_run import make_data


def test_answers_without_torch() -> None:
    """One process for all: what one of them imports stays."""
    lines = {
        **dict.fromkeys(("--help", "--version", "doctor --hardware", "doctor --launcher"), 0),
        **{f"{name} --help": 0 for name in ("train", "prepare", "doctor", "sample", "launch")},
        "train tiny --dry-run": 0,
        "submit --help": 0,
        "submit --time=60 --dry-run -- train tiny": 0,
        # A model that no memory holds is refused before torch comes.
        "train tiny --model.vocab-size 4000000000": 2,
    }
    code = (
        "import sys; from gradsync.commands.cli.main import main\n"
        "import gradsync.commands.launch.requeue\n"
        f"for line, expected in {lines}.items():\n"
        "    try: code = main(line.split())\n"
        "    except SystemExit as stop: code = stop.code or 0\n"
        "    assert code == expected, (line, code)\n"
        "    assert 'torch' not in sys.modules, line + ' imported torch'\n"
    )
    run_python(["-c", code]).ok()


@pytest.mark.parametrize(
    ("named", "told"), [("{0}/a/../b", "{0}/b"), ("link/../b", "{0}/b"), ("a/b", "a/b"), ("", "")]
)
def test_the_run_directory_is_told_by_its_plain_path(
    named: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    out = named.format(tmp_path)
    assert main(["train", "tiny", "--out", out, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["out"] == told.format(tmp_path)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in printed
    assert main([]) == 2


def test_help_names_presets_and_what_is_taken_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    printed = capsys.readouterr().out
    words = " ".join(printed.split())
    assert f"Presets: {', '.join(PRESETS)}; tiny is the default." in words
    assert "--sync STR" in words
    assert "--sync-options KEY=VALUE …" in printed


def run(*arguments: str) -> int:
    """Exit code of a command."""
    return main(arguments)


TRAIN = ("train", "tiny", "--device", "cpu")
SMALL = (*TRAIN, "--model.block-size", "16", "--micro-batch-size", "2", "--tokens-per-update", "64")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tran",), "unknown command 'tran'; perhaps you meant 'train'"),
        (
            (*TRAIN, "--optm.lr", "1"),
            "Unrecognized options: --optm.lr, 1; perhaps you meant --optim.lr (",
        ),
        ((*TRAIN, "of", "--batch-size", "8"), "perhaps you meant --micro-batch-size ("),
        ((*TRAIN, "--lr", "3e-4"), "perhaps you meant --optim.lr ("),
        (
            (*TRAIN, "--steps", "many"),
            "error: Error parsing --steps: invalid literal for int() with base 10: 'many' (",
        ),
        ((*TRAIN, "--steps"), "Missing value for argument '--steps'"),
        (("sample",), "Missing from gradsync sample: PATH "),
        (("train", "tny"), "unknown model preset 'tny'; perhaps you meant 'tiny'"),
        (("train", "nowhere.yaml"), "cannot read configuration nowhere.yaml"),
        ((*TRAIN, "--sync", "nave"), "perhaps you meant 'naive'"),
        ((*TRAIN, "--optim.lr", "-1"), "error: optim.lr must be a positive number; got -1.0\n"),
        ((*TRAIN, "--seq-len", "9999"), "seq_len 9999 is longer than model.block_size"),
        (
            (*TRAIN, "--tokens-per-update", "9000"),
            "nearest legal tokens_per_update is 8704 or 9216",
        ),
        ((*TRAIN, "--nproc-per-node", "16"), "16"),
        ((*TRAIN, "--dtype", "fp16"), "dtype fp16 needs CUDA"),
        ((*TRAIN, "--compile", "ddp", "--sync", "naive"), "compile=ddp wraps torch DDP"),
        ((*TRAIN, "--model.n-head", "5"), "n_embd must be a multiple of n_head"),
        ((*TRAIN, "--data", "nowhere"), "nowhere does not exist (--data takes one, .jsonl files"),
        ((*TRAIN, "--data", "empty"), "`gradsync prepare PATHS --out DIR` makes it"),
        ((*TRAIN, "--model.vocab-size", "100"), "smaller than the data's vocabulary 257"),
        ((*TRAIN, "--model.vocab-size", "4000000000"), "the vocabulary (4,000,000,000)"),
        ((*TRAIN, "--model.n-embd", "307200"), "takes"),
        ((*TRAIN, "--data", "my.txt"), "my.txt is no prepared data directory (--data takes one"),
        (("prepare",), "name texts and a directory"),
        (("prepare", "nowhere.txt", "--out", "data"), "nowhere.txt does not exist"),
        (("prepare", "nowhere.txt"), "--out"),
        (
            ("prepare", ".", "--out", "data", "--tokenizer", "words"),
            "invalid choice 'words' for argument '--tokenizer'. Expected one of ('byte', 'bpe')",
        ),
    ],
)
def test_bad_request_gets_one_clear_message(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("text")
    Path("empty").mkdir()
    assert run(*arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("gradsync: error: ")
    assert message in printed
    assert len(printed.splitlines()) == 1


def test_prepare_says_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("some text " * 600)
    assert run("prepare", "my.txt", "--out", "my data") == 0
    *_, held_out, _, _, last = capsys.readouterr().out.splitlines()
    assert held_out == "held out  5.0 % of the tokens: the last ones"
    assert last == "next      gradsync train tiny --data 'my data'"
    assert run(*shlex.split(last)[2:], "--dry-run", "--device", "cpu") == 0


def test_a_model_whose_optimizer_has_no_room_is_refused_unbuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gradsync.commands.train.check.total_bytes", lambda: 12 * 10**6)
    # 1.8 M parameters: 7 MB of weights, and three times that
    assert run(*TRAIN, "--steps", "1") == 2
    assert "takes 0.0293 GB at least, and this host has 0.012 GB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        (("--resume",), "auto"),
        (("--resume", "--steps", "3"), "auto"),
        (("--resume", "none"), "none"),
        (("--resume=none",), "none"),
        (("--resume", "auto", "--steps", "3"), "auto"),
    ],
)
def test_resume_alone_is_auto(
    words: tuple[str, ...], resume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*TRAIN, "--dry-run", *words) == 0
    assert f"\nresume: {resume}\n" in capsys.readouterr().out
    assert complete_flags([]) == []


@pytest.mark.parametrize("words", [("--compile",), ("--compile", "--steps", "3")])
def test_compile_alone_is_model(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TRAIN, "--dry-run", *words) == 0
    assert "\ncompile: model\n" in capsys.readouterr().out


def test_cuda_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run("train", "tiny", "--device", "cuda", "--out", str(tmp_path)) == 2
    assert "this process sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncate", "train.bin"),
        ("empty", "train.bin"),
        ("remove", "train.bin"),
        ("other vocabulary", "outside the vocabulary"),
    ],
)
def test_damaged_data_is_named(
    damage: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_data(tmp_path / "data")
    train = data / "train.bin"
    if damage == "truncate":
        train.write_bytes(train.read_bytes()[:-1])
    elif damage == "empty":
        train.write_bytes(b"")
    elif damage == "remove":
        train.unlink()
    else:
        train.write_bytes(b"\xff\x7f" * 5_000)
    assert run(*SMALL, "--data", str(data), "--out", str(tmp_path / "run")) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def in_pieces(folder: Path) -> Path:
    """Data that a tokenizer of their own has made."""
    (folder / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare([folder / "text"], folder / "data", tokenizer="bpe", vocab_size=280, val_fraction=0.2)
    return folder / "data"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "tokenizer.json: is no tokenizer: "),
        (None, "tokenizer.json: No such file"),
        ("", "the tokenizer has 280 tokens, meta.json says 299"),
    ],
)
def test_a_tokenizer_that_cannot_spell_the_sample_is_found_first(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not where the run is done; one that samples nothing needs none."""
    data = in_pieces(tmp_path)
    if text:
        (data / "tokenizer.json").write_text(text)
    elif text is None:
        (data / "tokenizer.json").unlink()
    else:
        rewrite_json(data / "meta.json", lambda meta: meta.update(vocab_size=299))
    words = (*SMALL, "--data", str(data), "--out", str(tmp_path / "run"), "--steps", "1")
    capsys.readouterr()
    assert run(*words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert not (tmp_path / "run").exists()
    assert run(*words, "--sample-tokens", "0") == 0


def test_without_the_package_of_its_tokenizer_a_run_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = in_pieces(tmp_path)
    monkeypatch.setattr(tokenizer, "find_spec", lambda _: None)
    assert run(*SMALL, "--data", str(data), "--out", str(tmp_path / "run"), "--steps", "1") == 0
    assert "no sample: bpe needs the package tokenizers" in capsys.readouterr().out


def test_a_refused_start_leaves_no_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, new = make_data(tmp_path / "data"), tmp_path / "new"
    words = (*SMALL, "--model.n-embd", "1500000", "--data", str(data), "--out", str(new / "run"))
    assert run(*words) == 2
    assert "and this host has" in capsys.readouterr().err
    assert not new.exists()


def test_a_start_that_fails_leaves_its_log(tmp_path: Path) -> None:
    data, out = make_data(tmp_path / "data"), tmp_path / "run"
    damaged = tmp_path / "step-00000001"
    damaged.mkdir()
    words = ("--data", str(data), "--out", str(out), "--resume", str(damaged))
    assert run(*SMALL, *words) == 1
    assert json.loads((out / "exit.json").read_text())["exit_code"] == 1
    log = (out / "logs" / "rank_00000.log").read_text()
    assert log.index("started") < log.index("ended by CheckpointError") < log.index("Traceback")


HOLDER = """
import os, sys
from pathlib import Path
from gradsync.commands.train.output import RunDir
run_dir = RunDir(Path(sys.argv[1]))
run_dir.hold(begin=True)
if os.fork() == 0:  # as a data loader's worker, which may outlive its rank
    os.close(1)
    sys.stdin.read()
    os._exit(0)
print("holds", flush=True)
sys.stdin.read()
"""


def test_a_second_run_in_one_directory_is_refused_and_changes_nothing_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = make_data(tmp_path / "data"), tmp_path / "run"
    words = (*SMALL, "--steps", "2", "--data", str(data), "--out", str(out), "--resume")
    # Its worker lives on until the pipe closes.
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"holds\n"
        before = sorted(out.rglob("*"))
        assert run(*words) == 1
        said = capsys.readouterr().err
        assert f"another run writes to --out {out}" in said
        assert "Traceback" not in said
        assert sorted(out.rglob("*")) == before
        other.kill()
        other.wait()
        assert run(*words) == 0
    assert json.loads((out / "exit.json").read_text())["exit_code"] == 0


def test_ranks_already_started_by_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    assert run(*TRAIN, "--nproc-per-node", "3") == 2
    assert "env has started 2 ranks already" in capsys.readouterr().err


def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = make_data(tmp_path / "data"), tmp_path / "run"
    assert run(*SMALL, "--data", str(data), "--out", str(out), "--steps", "2", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads((out / "summary.json").read_text())
    assert "step 2/2" in captured.err
