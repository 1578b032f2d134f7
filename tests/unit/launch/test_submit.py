"""`gradsync submit` where there is no Slurm: the script, what is refused, and that no argument is
ever shell."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gradsync.commands.cli.main import main
from gradsync.commands.launch.command import Program, parse_program
from gradsync.commands.launch.submit import SubmitOptions, sbatch_script

GOLDEN = Path(__file__).parent / "golden"


def script_of(program: Program, python: str = "python", **changes: Any) -> str:
    return sbatch_script(
        SubmitOptions(**{"job_name": "mini", "time": "1:00:00"} | changes), program, python
    )


SCRIPTS = {
    "srun_gpus": script_of(
        parse_program(["train", "xl", "--data", "my data", "--out", "runs/xl"]),
        nodes=2,
        ntasks_per_node=4,
        gpus_per_node=4,
        time="72:00:00",
        partition="gpu",
        account="physics",
        cpus_per_task=8,
        module=("cuda/12.4", "nccl"),
        setup=("source venv/bin/activate", 'export NCCL_DEBUG="INFO"'),
        sbatch_arg=("--qos=normal", "--mem=200G", "--exclusive"),
        run_dir="runs/xl",
    ),
    "mpirun_cpus": script_of(
        parse_program(["python", "my script.py", "$(reboot)"]),
        nodes=2,
        ntasks_per_node=3,
        launcher="mpirun",
        run_dir="out",
    ),
    "bare": script_of(
        parse_program(["./simulate", "--fast"]),
        output="my 100% logs",
        python="/opt/python 3/bin/python",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_golden(name: str) -> None:
    """Run this file as a program to write the golden files anew; then read them."""
    assert SCRIPTS[name] == (GOLDEN / f"{name}.sbatch").read_text()


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
        (["--time=60", "--run-dir=x", "--", "train"], "train has --out"),
        (["--time=60", "--", "train", "--nproc-per-node", "2"], "--ntasks-per-node"),
        (["--time=60", "--nodes=3", "--", "train", "--sync", "zero3"], "zero3"),
        (["--time=60", "--", "train", "--tokens-per-update", "5"], "nearest legal"),
        (["--time=60", "--", "train", "--stps", "5"], "--steps"),
        (
            ["--time=60", "--gpus-per-node=4", "--ntasks-per-node=8", "--", "script.py"],
            "must equal --gpus-per-node",
        ),
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
    words = ["train", "mini", "--steps", "5", "--out=runs/my run"]
    assert submit(*argv, "--", *words) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --job-name=mini\n" in script
    assert "#SBATCH --ntasks-per-node=4\n#SBATCH --gres=gpu:4\n" in script
    assert "#SBATCH --constraint=h100\n" in script
    assert "module load a\nmodule load b\n" in script
    assert "run_dir='runs/my run'\n" in script
    assert "train mini --steps 5 '--out=runs/my run' &\n" in script
    assert not Path("slurm").exists()


def test_a_configuration_file_may_name_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("xl.yaml").write_text("preset: tiny\nout: runs/from-file\n")
    assert submit("--time=60", "--dry-run", "--", "train", "xl.yaml") == 0
    assert "run_dir=runs/from-file\n" in capsys.readouterr().out


# -- data are data -----------------------------------------------------------------------------

NASTY = (
    *("$(touch canary)", "`touch canary`", "; touch canary", "a\ntouch canary\n", "'", '"', "\\"),
    *("", " ", "-", "--", "#SBATCH --uid=0", "$HOME", "${rank}", "$$", "*", "~", "a b", "&", "|"),
    *("'\"'$(touch canary)", "\t", "\r", "!x", "{a,b}", "{task}", "\u2028", "é", "EOF", "$'\\n'"),
)
WORDS = st.lists(
    st.one_of(
        st.sampled_from(NASTY),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
    ),
    max_size=5,
)
CASES = st.tuples(
    WORDS,
    st.sampled_from(["srun", "mpirun"]),
    st.sampled_from(["train", "script", "program"]),
    st.one_of(st.sampled_from(["runs/x", "a $HOME b", "$(touch canary)`x`'\""]), st.just("")),
)
# Stand-ins that note how many words they got, and these, each ended by a zero byte.
STUBS = r"""
note() { printf '%s\0' "$#" "$@" >> calls; }
srun() { note srun "$@"; }
mpirun() { note mpirun "$@"; }
module() { note module "$@"; }
rm() { :; }
interpreter() { :; }
./any() { note any "$@"; }
"""


def program_of(kind: str, words: list[str]) -> Program:
    if kind == "train":
        return Program(words=("-m", "gradsync", "train", *words))
    return Program(
        words=("my script.py" if kind == "script" else "./any", *words), by_python=kind == "script"
    )


def calls_of(scripts: list[str], folder: Path) -> list[list[str]]:
    """Run all scripts in one bash; what was called with which arguments."""
    text = STUBS + "".join(f"(\n{script}\n)\n" for script in scripts)
    (folder / "all.sh").write_text(text, newline="")
    for options in (["-n"], []):
        done = subprocess.run(
            ["bash", *options, "all.sh"], cwd=folder, capture_output=True, timeout=60, check=False
        )
        assert (done.stderr, done.stdout) == (b"", b"")
    words = iter((folder / "calls").read_bytes().decode().split("\0")[:-1])
    return [[next(words) for _ in range(int(count))] for count in words]


# Hundreds of cases an example: they show where it went wrong, shrinking would take minutes.
@settings(max_examples=4, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(st.lists(CASES, min_size=60, max_size=60))
def test_arguments_are_never_shell(cases: list[tuple[list[str], Any, str, str]]) -> None:
    """The launcher gets exactly these words, whatever they are, and nothing else is run."""
    scripts = [
        script_of(
            program_of(kind, words),
            "interpreter",
            launcher=launcher,
            run_dir=run_dir,
            module=(run_dir,) if run_dir else (),
        )
        for words, launcher, kind, run_dir in cases
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calls = iter(calls_of(scripts, folder))
        left = {path.name for path in folder.iterdir()}
    assert left == {"all.sh", "calls"}
    for words, launcher, kind, run_dir in cases:
        if run_dir:
            assert next(calls) == ["module", "load", run_dir]
        got = next(calls)
        assert got[0] == launcher
        expected = [*program_of(kind, words).words]
        if kind == "train" and not run_dir:
            # The job's id is not known here.
            expected += ["--out", "runs/mini-"]
        assert got[len(got) - len(expected) :] == expected
    assert next(calls, None) is None


if __name__ == "__main__":
    for _name, _script in SCRIPTS.items():
        (GOLDEN / f"{_name}.sbatch").write_text(_script)
