"""The page of published claims: each command that CI can run prints what the page says."""

from __future__ import annotations

import shlex
from typing import Any

import claims
import pytest

from support.fork_server import WITH_RANKS, run_forked, torch_ranks

RUNS = [run for show in claims.load()["show"] for run in show["run"] if "skip" not in run]


def printed(command: str) -> str:
    """Output of a command of the page; torchrun's ranks are forked, and rank 0's counts."""
    words = shlex.split(command)
    variables: list[dict[str, str]] = [{}]
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[0][name] = value
    if words[0] == "torchrun":
        assert words[1] == "--nproc-per-node"
        variables, words = torch_ranks(int(words[2])), words[2:]
    program = ["-m", "gradsync"] if words[0] == "gradsync" else []
    variables[0] |= WITH_RANKS
    done = [each.ok() for each in run_forked([*program, *words[1:]], variables, cwd=claims.ROOT)]
    return done[0].stdout + done[0].stderr


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["command"])
def test_the_page_says_what_the_command_prints(run: dict[str, Any]) -> None:
    output = printed(run["command"])
    assert not claims.missing(run["prints"], output, run.get("tolerance", 0.0)), output
