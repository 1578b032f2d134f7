"""`gradsync submit` where there is no Slurm: what is checked, and what a dry run shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradsync.commands.cli.main import main


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "script.py").touch()


def submit(*argv: str) -> int:
    """Exit code of the command."""
    return main(["submit", *argv])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--", "train"], "--time is missing"),
        (["--time=60"], "what is to run? Write it after --"),
        (["--time=60", "--", "trian"], "perhaps you meant 'train'"),
        (["--time=60", "--", "nowhere.py"], "there is no script nowhere.py"),
        (["--time=60", "--launcher=ssh", "--", "train"], "ssh"),
        (["--time=60", "--setup=if", "--", "train"], "--setup is no shell: bash says"),
        (["--time=60", "--run-dir=x", "--", "train"], "train has --out"),
        (["--time=60", "--", "train", "--dry-run"], "put it before the --"),
        (["--time=60", "--", "train", "--ddp", "--gpus_per_node=2"], "drop them from train"),
        (["--time=60", "--", "train", "--nproc-per-node", "2"], "--ntasks-per-node"),
        (["--time=60", "--nodes=3", "--", "train", "--sync", "zero3"], "zero3"),
        (["--time=60", "--", "train", "--tokens-per-update", "5"], "nearest legal"),
        (["--time=60", "--", "train", "--stps", "5"], "--steps"),
        (["--time=60", "--nodes=0", "--", "script.py"], "--nodes must be at least 1; got 0"),
    ],
)
def test_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*argv) == 2
    assert message in capsys.readouterr().err
    assert not Path("slurm").exists()


def test_no_sbatch_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit("--time=60", "--", "script.py") == 2
    assert capsys.readouterr().err.count("there is no sbatch on this machine") == 1
    assert submit("--time=60", "--dry-run", "--", "script.py") == 0


def test_a_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--nodes=2", "--gpus-per-node=4", "--time=3-00", "--module=a", "--module=b"]
    argv += ["--sbatch-arg=--constraint=h100", "--dry-run"]
    words = ["train", "mini", "--out", "runs/first", "--steps", "5", "--out=runs/my run"]
    assert submit(*argv, "--", *words) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --job-name=mini\n" in script
    assert "#SBATCH --ntasks-per-node=4\n#SBATCH --gres=gpu:4\n" in script
    assert "#SBATCH --constraint=h100\n" in script
    assert "module load a\nmodule load b\n" in script
    assert "run_dir='runs/my run'\n" in script
    assert script.count("--out") == 1 + script.count("#SBATCH --output")
    assert submit(*argv, "--json", "--", *words) == 0
    assert json.loads(capsys.readouterr().out)["script"] == script
    assert not Path("slurm").exists()


def test_a_configuration_file_may_name_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("xl.yaml").write_text("preset: tiny\nout: runs/from-file\n")
    assert submit("--time=60", "--dry-run", "--", "train", "xl.yaml") == 0
    assert "run_dir=runs/from-file\n" in capsys.readouterr().out
