"""Job scripts: their text, what is refused, and that no argument is ever shell."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gradsync.commands.launch.request import Program, parse_program
from gradsync.commands.launch.sbatch import SbatchPlan, sbatch_script
from gradsync.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"


def plan(*words: str, **changes: Any) -> SbatchPlan:
    program = parse_program(words or ["train", "mini"])
    values: dict[str, Any] = {"program": program, "job_name": "mini", "time": "1:00:00"} | changes
    return SbatchPlan(**values)


PLANS = {
    "srun_gpus": plan(
        *("train", "xl", "--optim.lr", "3e-4", "--data", "my data"),
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
    "mpirun_cpus": plan(
        *("python", "my script.py", "$(reboot)"),
        nodes=2,
        ntasks_per_node=3,
        launcher="mpirun",
        run_dir="out",
    ),
    "bare": plan(
        *("./simulate", "--fast"), output="my 100% logs", python="/opt/python 3/bin/python"
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    """Run this file as a program to write the golden files anew; then read them."""
    assert sbatch_script(PLANS[name]) == (GOLDEN / f"{name}.sbatch").read_text()


@pytest.mark.parametrize("name", PLANS)
def test_bash_reads_it(name: str) -> None:
    script = sbatch_script(PLANS[name])
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_what_every_script_says(launcher: Any) -> None:
    script = sbatch_script(plan(launcher=launcher, nodes=2, ntasks_per_node=3))
    assert "#SBATCH --ntasks-per-node=3\n" in script
    only_shell = "B:" if launcher == "mpirun" else ""
    assert f"#SBATCH --signal={only_shell}USR1@120\n" in script
    assert "#SBATCH --open-mode=append\n" in script
    assert "#SBATCH --requeue\n" in script
    assert "gres" not in script  # a CPU job
    assert " export " not in script


def test_cores_are_said_twice() -> None:
    """A step no longer inherits them from the job since Slurm 22.05."""
    script = sbatch_script(plan(cpus_per_task=4))
    assert script.count("--cpus-per-task=4") == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "--nodes must be at least 1; got 0"),
        ({"ntasks_per_node": 0}, "--ntasks-per-node must be at least 1"),
        ({"gpus_per_node": -1}, "--gpus-per-node must be at least 0"),
        ({"gpus_per_node": 4, "ntasks_per_node": 8}, "must equal --gpus-per-node"),
        ({"gpus_per_node": 4, "ntasks_per_node": 1}, "must equal --gpus-per-node"),
        ({"job_name": "a/b"}, "--job-name is part of file names"),
        ({"job_name": ""}, "--job-name must not be empty"),
        ({"partition": "gpu\n#SBATCH --uid=0"}, "--partition must be one printable line"),
        ({"output": ""}, "--output must name a folder"),
        ({"output": "a\nb"}, "--output must be one printable line"),
        ({"output": "a#SBATCH"}, "--output must be one printable line"),
        ({"output": "a\\b"}, "--output must be one printable line"),
        ({"sbatch_arg": ("--comment=a\n#SBATCH --uid=0",)}, "one printable line"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan(**changes)


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
    plans = [
        plan(
            program=program_of(kind, words),
            launcher=launcher,
            run_dir=run_dir,
            python="interpreter",
            module=(run_dir,) if run_dir else (),
        )
        for words, launcher, kind, run_dir in cases
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calls = iter(calls_of([sbatch_script(each) for each in plans], folder))
        left = {path.name for path in folder.iterdir()}
    assert left == {"all.sh", "calls"}
    for (_, launcher, kind, run_dir), each in zip(cases, plans, strict=True):
        if run_dir:
            assert next(calls) == ["module", "load", run_dir]
        got = next(calls)
        assert got[0] == launcher
        expected = [*each.program.words]
        if kind == "train":
            # The job's id is not known here.
            expected += ["--out", run_dir or "runs/mini-"]
        assert got[len(got) - len(expected) :] == expected
    assert next(calls, None) is None


@settings(max_examples=40)
@given(st.text(max_size=30))
def test_a_folder_adds_no_line(folder: str) -> None:
    plain = sbatch_script(plan())
    try:
        script = sbatch_script(plan(output=folder))
    except ConfigError:
        return
    sbatch_arg = [line for line in script.splitlines() if line.lstrip().startswith("#SBATCH")]
    assert len(sbatch_arg) == plain.count("\n#SBATCH")
    assert script.count("\n") - script.count("\\\n") == plain.count("\n") - plain.count("\\\n")


def test_a_script_without_a_run_directory_has_none() -> None:
    script = sbatch_script(plan("./any"))
    assert "run_dir" not in script
    assert "run_dir=out" in sbatch_script(replace(plan("./any"), run_dir="out"))


if __name__ == "__main__":
    for _name, _plan in PLANS.items():
        (GOLDEN / f"{_name}.sbatch").write_text(sbatch_script(_plan))
