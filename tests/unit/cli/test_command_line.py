"""The command line as a whole: completion, examples, the version, and the demo of it all."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import IO

import pytest
import torch
import torch.distributed as dist
import tyro
from compare_commands import LIST

from gradsync.cli import demo, version
from gradsync.cli.completion import completion, make_parser
from gradsync.cli.examples import EXAMPLES
from gradsync.cli.main import COMMANDS, main
from support.launchers import run_command
from support.requirements import require

ASK = """
source "$1"; shift
for line; do
    read -ra COMP_WORDS <<< "$line"
    if [[ $line == *" " ]]; then COMP_WORDS+=(""); fi
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    complete=($(complete -p gradsync))
    "${complete[-2]}" gradsync "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
    echo "${COMPREPLY[@]}"
done
"""


def test_bash_completes(tmp_path: Path) -> None:
    """Commands, benchmarks, flags, choices and files."""
    require("shtab")
    expected = {
        "gradsync ": " ".join(COMMANDS),
        "gradsync do": "doctor",
        "gradsync bench s": "sync scaling",
        "gradsync train --optim.warm": "--optim.warmup-steps",
        "gradsync train --sync dil": "diloco",
        "gradsync train tin": "tiny",
        "gradsync report --format p": "png pdf",
        "gradsync lint one two ki": "kinds.py",
        "gradsync sample --out": "",
    }
    (tmp_path / "kinds.py").touch()
    script = tmp_path / "script"
    script.write_text(completion("bash", COMMANDS))
    done = run_command(["bash", "-c", ASK, "bash", script, *expected], cwd=tmp_path).ok()
    assert dict(zip(expected, done.stdout.splitlines(), strict=True)) == expected
    assert not done.stderr


def long(flag: str) -> bool:
    """Whether it begins with two dashes."""
    return flag.startswith("--")


def test_completion_knows_every_flag() -> None:
    require("shtab")
    listed = json.loads(LIST.read_text("utf-8"))["commands"]
    waiting, found = {"gradsync": make_parser(COMMANDS)}, {}
    while waiting:
        name, parser = waiting.popitem()
        flags = {flag for action in parser._actions for flag in action.option_strings}
        found[name] = set(filter(long, flags))
        if parser._subparsers:
            (below,) = parser._subparsers._group_actions
            waiting |= {f"{name} {word}": each for word, each in below.choices.items()}
    assert found.keys() == listed.keys()
    unlike = {flag for name in found for flag in found[name] ^ set(filter(long, listed[name]))}
    # Spelt otherwise (launch has --nnodes), and train's, in the help of tune.
    assert unlike == {"--elastic_gpu", "--nodes", "--sync"}


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_know_the_same(shell: str, tmp_path: Path) -> None:
    """Every command and flag, any number of files; and the shell, where it is there, parses it."""
    require("shtab")
    script = tmp_path / "script"
    script.write_text(text := completion(shell, COMMANDS))
    listed = json.loads(LIST.read_text("utf-8"))["commands"]
    flags = {flag for each in listed.values() for flag in filter(long, each)}
    known = set(re.findall(r"--[a-z][\w.-]*\w", text))
    if shell == "tcsh":  # one list for all commands
        known |= {f"--{word}" for word in text.partition("'c/--/(")[2].partition(")")[0].split()}
    assert flags - known == {"--elastic_gpu"}
    assert ('"*:paths:_files"' if shell == "zsh" else "'p/*/f/'") in text
    if shutil.which(shell):
        done = run_command([shell, "-n", script]).ok()
        assert (done.stdout, done.stderr) == ("", "")


def test_a_script_for_a_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--print-completion"]) == 2
    assert "got '', expected bash, zsh, tcsh" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion=zsh"]) == 2
    assert "pip install 'gradsync[completion]'\n" in capsys.readouterr().err


class Parsed(Exception):  # noqa: N818
    """Raised where a command would begin its work."""


def check_parses(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes these arguments; it does not run."""
    cli = tyro.cli

    def only(*args: object, **options: object) -> None:
        raise Parsed(cli(*args, **options))

    with monkeypatch.context() as patch:
        patch.setattr(tyro, "cli", only)
        with pytest.raises(Parsed):
            main(words)


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in EXAMPLES[command]:
        words = shlex.split(line, comments=True)
        words = words[words.index("gradsync") + 1 :]
        assert " ".join(words).startswith(command)
        check_parses(words, monkeypatch)


def test_the_version_tells_what_a_bug_report_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--version"]) == 0
    first, python, built, devices, launchers = capsys.readouterr().out.splitlines()
    assert first.startswith("gradsync ")
    assert python.startswith("python 3.")
    assert f"torch {torch.__version__}, built for " in built
    assert " cores, " in devices
    assert launchers.startswith("launchers: ")
    asked = ("gloo", "nccl", "mpi", "ucc", "xccl")
    there = [name for name in asked if dist.is_backend_available(name)]
    assert built.endswith(f"backends: {', '.join(there)}")
    monkeypatch.setattr(version, "find_spec", lambda name: ModuleSpec(name, None, origin=None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "torch: not installed" in version.describe()


def test_a_torch_that_cannot_be_read(tmp_path: Path) -> None:
    assert version.compiled_backends(tmp_path) == []


ANSWERS = {
    "train": {"weights_sha256": "ab" * 32, "steps": 9, "val_loss": 2.5, "unigram_entropy": 3.2},
    "drill": {
        **{"line": "gradsync: error: rank 1 vanished; more", "named_s": 0.5},
        **{"went_on_from": 20, "same_weights": True},
    },
    "verify": {"passed": True, "cells": [{"status": "passed", "strategy": "zero1"}]},
    "bench": {
        "rows": [
            {"contestant": "none", "total_ms": {"median": 9.0}, "ratio": {"median": 1.0}},
            {"contestant": "invariant", "total_ms": {"median": 9.9}, "ratio": {"median": 1.1}},
        ]
    },
}


SAID = """
as promised:
weights    one hash on 1 and 2 ranks after 9 steps: abababababababab… abababababababab…
failure    a killed rank was named after 0.5 s (rank 1 vanished); resumed from step 20 to the same \
hash
strategies 1 of 1 comparisons with one rank passed (zero1)
measured:
speed      a step on 2 ranks: invariant 9.9 ms (1.10); in brackets: times one that sends nothing \
(few and small steps: gradsync bench sync takes more)
loss       2.50 nats on validation text after 9 steps (3.20 by counting bytes)
report     OUT/report.html
"""


@pytest.mark.parametrize(
    ("quick", "broken", "said"),
    [
        (True, [], SAID),
        (False, [], SAID),
        (True, ["left behind: x"], "to the same hash; NOT as promised: left behind: x\n"),
    ],
)
def test_demo(
    quick: bool,
    broken: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With commands that only have their arguments checked."""

    def answer(words: Sequence[str], output: IO[str] | None = None) -> int:
        check_parses(words, monkeypatch)
        if output:
            output.write(json.dumps(ANSWERS[words[0]] | {"broken": broken}))
        return 0

    monkeypatch.setattr(demo, "_run", answer)
    out = tmp_path / "runs" / "demo"
    assert main(["demo", "--out", str(out), *["--quick"] * quick]) == len(broken)
    assert said in capsys.readouterr().out.replace(str(out), "OUT")
    assert main(["demo", "--out", str(out)]) == 2
    assert "is there already; name a new folder" in capsys.readouterr().err


def test_a_demo_ends_where_a_command_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_run", lambda words, output=None: 1)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 1
    assert "gradsync train ended with exit code 1" in capsys.readouterr().err
