"""`gradsync verify` as users type it, and under a launcher."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from support.launchers import run_python, run_torchrun

VERIFY = ["-m", "gradsync", "verify"]
SMALL = ["--models", "mlp", "--dtype", "fp32", "--num-steps", "2"]

TARGET = """
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset


class Model(nn.Linear):
    def forward(self, x):
        if dist.is_initialized() and dist.get_rank() == 1:
            if DOES == "raises":
                raise ValueError("injected")
            if DOES == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


DOES = ""


def right():
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 2))
    return Model(3, 2), data, lambda output, target: (output - target).square().sum()


def wrong():
    global DOES
    DOES = "raises"
    return right()


def dying():
    global DOES
    DOES = "dies"
    return right()
"""


@pytest.mark.slow
def test_a_matrix_on_this_host(tmp_path: Path) -> None:
    rows = tmp_path / "cells.csv"
    words = [*VERIFY, *SMALL, "--strategies", "naive,invariant", "--world-sizes", "1,2"]
    done = run_python([*words, "--json", "--csv", rows], cwd=tmp_path, timeout_s=100).ok()
    document = json.loads(done.stdout)
    assert document["passed"]
    assert [cell["strategy"] for cell in document["cells"]] == ["naive", "invariant"] * 2
    invariant = [cell for cell in document["cells"] if cell["strategy"] == "invariant"]
    assert all(cell["bitwise"] for cell in invariant)
    assert len({cell["weights_sha256"] for cell in invariant}) == 1
    assert len(document["cross_load"]) == 8
    assert "bitwise" in done.stderr
    with rows.open() as file:
        assert len(list(csv.DictReader(file))) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cells.csv"]


def test_a_rank_that_raises_costs_its_cell(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TARGET)
    words = [*VERIFY, "--strategies", "naive", "--world-size", "2", "--dtype", "fp32"]
    words += ["--no-cross-load", "--num-steps", "2"]
    wrong = run_python([*words, "--target", "own:wrong"], cwd=tmp_path, timeout_s=100)
    assert wrong.returncode == 1
    said = "error naive W=2 target fp32: rank 1 raised ValueError: injected"
    assert said in wrong.stdout
    assert "1 cells and 0 checkpoints handed on, 1 failed" in wrong.stdout


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TARGET)
    words = [*VERIFY, "--strategies", "naive", "--world-size", "2", "--dtype", "fp32", "--json"]
    words += ["--no-cross-load", "--num-steps", "2", "--target", "own:dying"]
    done = run_python(words, cwd=tmp_path, timeout_s=100)
    assert done.returncode == 1
    (cell,) = json.loads(done.stdout)["cells"]
    assert (cell["status"], cell["ranks"]) == ("error", [1])
    assert cell["sentence"] == "rank 1 was ended by SIGKILL (killed by hand, or out of memory)"


@pytest.mark.parametrize(
    ("target", "message"),
    [("wrong", "failed first: ValueError: injected"), ("dying", "rank")],
)
def test_under_a_launcher_an_error_does_not_cost_the_document(
    tmp_path: Path, target: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(TARGET)
    words = [*VERIFY, "--strategies", "naive,flat", "--dtype", "fp32", "--num-steps", "2"]
    words += ["--json", "--target", f"own:{target}"]
    done = run_torchrun(2, words, cwd=tmp_path, timeout_s=100)
    assert done.returncode == 1
    cells = json.loads(done.stdout)["cells"]
    assert [(cell["strategy"], cell["status"]) for cell in cells] == [
        ("naive", "error"),
        ("flat", "error"),
    ]
    assert message in cells[0]["sentence"]
    assert cells[1]["sentence"] == "not run: the ranks had ended"
    assert "4 checkpoints handed on, 6 failed" in done.stderr
    assert "in run_cell" not in done.stderr  # no stack of ours


def test_under_a_launcher_it_verifies_at_that_world_size(tmp_path: Path) -> None:
    words = [*VERIFY, *SMALL, "--strategies", "invariant", "--json"]
    done = run_torchrun(2, words, cwd=tmp_path, timeout_s=100).ok()
    document = json.loads(done.stdout)
    assert [cell["world_size"] for cell in document["cells"]] == [2]
    assert document["passed"]
    assert len(document["cross_load"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategies", "nave"], "perhaps you meant 'naive'"),
        (["--models", "mpl"], "perhaps you meant 'mlp'"),
        (["--world-sizes", "two"], "'two' is not a number"),
        (["--target", "json:nothing"], "has no 'nothing'"),
    ],
)
def test_what_cannot_be_is_refused_at_once(words: list[str], message: str) -> None:
    done = run_python([*VERIFY, *words])
    assert done.returncode == 2
    assert message in done.stderr


def test_a_dry_run_lists_the_cells() -> None:
    words = ["--dry-run", "--strategies", "ring", "--world-sizes", "1,2", *SMALL]
    done = run_python([*VERIFY, *words]).ok()
    assert done.stdout.splitlines() == [
        "ring W=1 mlp fp32",
        "ring W=2 mlp fp32",
        "ring W=2 mlp fp32 from ring W=1 mlp fp32",
        "ring W=1 mlp fp32 from ring W=2 mlp fp32",
    ]
