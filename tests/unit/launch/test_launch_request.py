"""Launches as data: what is run, and what to type on which node."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gradsync.commands.cli.main import main
from gradsync.commands.launch import local
from gradsync.commands.launch.command import Program, check_program, parse_program, split
from gradsync.commands.launch.local import LaunchOutcome
from gradsync.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "argv", "name"),
    [
        (["train", "xl"], ("py", "-m", "gradsync", "train", "xl"), "train"),
        (["gradsync", "train"], ("py", "-m", "gradsync", "train"), "train"),
        (["python", "-m", "gradsync", "train"], ("py", "-m", "gradsync", "train"), "train"),
        (["a/run.py", "--x"], ("py", "a/run.py", "--x"), "run"),
        (["python3", "-W", "error", "run.py"], ("py", "-W", "error", "run.py"), "run"),
        (["python", "-c", "pass"], ("py", "-c", "pass"), "python"),
        (["-m", "pkg.mod", "1"], ("py", "-m", "pkg.mod", "1"), "pkg.mod"),
        (["nsys", "profile", "python", "x.py"], ("nsys", "profile", "python", "x.py"), "nsys"),
        (["./bin/go", "train"], ("./bin/go", "train"), "go"),
    ],
)
def test_programs(words: list[str], argv: tuple[str, ...], name: str) -> None:
    program = parse_program(words)
    assert program.argv("py") == argv
    assert program.name == name
    assert (program.command == "train") == ("gradsync" in argv)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "what is to run? Write it after --"),
        (["gradsync"], "what is to run?"),
        (["gradsync", "trian"], "perhaps you meant 'train'"),
        (["gradsync", "submit"], "gradsync submit is no command for ranks"),
    ],
)
def test_no_programs(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_program(words)


NODES = ("launch", "--nproc-per-node=2", "--nnodes=2")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--master-addr=a", "--node-rank=2"), "--node-rank must be in 0..1"),
        (("--node-rank=1",), "--nnodes above 1 needs --master-addr"),
        (("--max-restarts=1",), "--max-restarts works on one node"),
    ],
)
def test_refused(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NODES, *flags, "--", "train"]) == 2
    assert message in capsys.readouterr().err


def test_a_line_for_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [*NODES, "--master-addr=node-a", "--master-port=4000"]
    assert main([*nodes, "--", "my script.py", "$(x)", "it's"]) == 0
    lines = capsys.readouterr().out.splitlines()
    line = "gradsync launch --nproc-per-node 2 --nnodes 2 --node-rank {} --master-addr node-a "
    line += """--master-port 4000 -- python 'my script.py' '$(x)' 'it'"'"'s'"""
    assert lines == [
        "# node 0, which the others reach at node-a:4000: ranks 0 to 1 of 4",
        line.format(0),
        "# node 1: ranks 2 to 3 of 4",
        line.format(1),
    ]


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["--", "nowhere.py"], {}, "there is no script nowhere.py"),
        (["--", "trian"], {}, "nor a program on the PATH; perhaps you meant 'train'"),
        ([], {}, "what is to run?"),
        (
            ["--", "train"],
            {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK and WORLD_SIZE say that 2 ranks are started already",
        ),
        (
            ["--", "train"],
            {f"OMPI_COMM_WORLD_{n}": "2" for n in ("SIZE", "LOCAL_SIZE")}
            | {f"OMPI_COMM_WORLD_{n}": "0" for n in ("RANK", "LOCAL_RANK")},
            "openmpi has started 2 ranks already",
        ),
    ],
)
def test_launch_refuses(
    argv: list[str],
    env: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--nproc-per-node", "2", *argv]) == 2
    assert message in capsys.readouterr().err


STEP_OF_ONE = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    **{"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS": "1"},
}
"""As in the shell of `srun --pty bash`."""


@pytest.mark.parametrize(
    "words",
    [
        ["launch", "--nproc-per-node", "2", "--", "train", "tiny"],
        ["train", "tiny", "--device", "cpu", "--nproc-per-node", "2"],
    ],
)
def test_a_step_of_one_task_may_start_ranks(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def launch_ranks(argv: list[str], nproc_per_node: int, **options: Any) -> LaunchOutcome:
        started.append(nproc_per_node)
        return LaunchOutcome(code=0, received=None, killed={})

    monkeypatch.setattr(local, "launch_ranks", launch_ranks)
    for name, value in STEP_OF_ONE.items():
        monkeypatch.setenv(name, value)
    assert main(words) == 0
    assert started == [2]


def test_a_program_may_come_with_a_module() -> None:
    program = Program(words=("not-here",), by_python=False)
    check_program(program, on_this_host=False)
    with pytest.raises(ConfigError, match="'not-here' is neither"):
        check_program(program)


def test_a_script_needs_no_dashes() -> None:
    assert split(["--nnodes", "2", "x.py", "--lr"]) == (["--nnodes", "2"], ["x.py", "--lr"])
    assert split(["--log-dir", "x.py", "--", "y.py"]) == (["--log-dir", "x.py"], ["y.py"])
    assert split(["--nnodes", "2"]) == (["--nnodes", "2"], [])
