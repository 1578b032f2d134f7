"""The run that others are compared with: one rank, and its data."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.config_flags import train_arguments
from support.fork_server import run_forked
from support.small_run import OneRank, small_config


@pytest.fixture(scope="session")
def one_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    """Six steps of one rank without a launcher."""
    out = tmp_path_factory.mktemp("one-rank")
    # Without a number of threads: the command pins one, or a lone rank would take all cores.
    config = small_config(out, data, threads=None)
    (done,) = run_forked(["-m", "gradsync", *train_arguments(config)])
    return OneRank(out, done.ok().stdout)
