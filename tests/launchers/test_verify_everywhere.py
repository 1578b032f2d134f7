"""`gradsync verify` as users type it, and under a launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.fork_server import WITH_RANKS, run_forked
from support.launchers import run_torchrun

VERIFY = ["-m", "gradsync", "verify"]

TARGET = """
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

DOES = []  # what rank 1's next forward does
CALLS = []


class Model(nn.Linear):
    def forward(self, x):
        if DOES and dist.is_initialized() and dist.get_rank() == 1:
            does = DOES.pop(0)
            if does == "raise":
                raise ValueError("injected")
            if does == "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def parts():
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 2))
    return Model(3, 2), data, lambda output, target: (output - target).square().sum()


def raises_in_the_second_cell():
    CALLS.append(1)  # rank 1 calls it once for each cell
    DOES[:] = ["raise"] if len(CALLS) == 2 else []
    return parts()


def dies():
    DOES[:] = ["die"]
    return parts()
"""


@pytest.mark.slow
def test_a_matrix_on_this_host(tmp_path: Path) -> None:
    words = [*VERIFY, "--models", "mlp", "--dtypes", "fp32", "--num-steps", "2"]
    words += ["--strategies", "naive,invariant", "--world-sizes", "1,2"]
    (done,) = run_forked([*words, "--json"], [WITH_RANKS], cwd=tmp_path, timeout_s=100)
    done.ok()
    document = json.loads(done.stdout)
    assert document["passed"]
    assert [cell["strategy"] for cell in document["cells"]] == ["naive", "invariant"] * 2
    invariant = [cell for cell in document["cells"] if cell["strategy"] == "invariant"]
    assert all(cell["bitwise"] for cell in invariant)
    assert len({cell["weights_sha256"] for cell in invariant}) == 1
    assert len(document["cross_load"]) == 8
    assert "bitwise" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TARGET)
    words = [*VERIFY, "--strategies", "naive,flat", "--world-sizes", "1,2", "--num-steps", "1"]
    words += ["--json", "--target", "own:dies"]
    (done,) = run_forked(words, [WITH_RANKS], cwd=tmp_path, timeout_s=100)
    assert done.returncode == 1
    cells = json.loads(done.stdout)["cells"]
    assert [(cell["status"], cell["ranks"], cell["sentence"]) for cell in cells] == [
        ("passed", [], ""),
        ("passed", [], ""),
        ("error", [1], "rank 1 was ended by SIGKILL (killed by hand, or out of memory)"),
        ("error", [], "not run: the ranks had ended"),
    ]
    assert "4 cells and 0 checkpoints handed on, 2 failed" in done.stderr


def test_under_a_launcher_it_verifies_at_that_size_and_an_error_does_not_cost_the_document(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(TARGET)
    words = [*VERIFY, "--strategies", "invariant,flat,naive", "--dtypes", "fp32"]
    words += ["--num-steps", "2", "--json", "--target", "own:raises_in_the_second_cell"]
    done = run_torchrun(2, words, cwd=tmp_path, timeout_s=100)
    assert done.returncode == 1
    cells = json.loads(done.stdout)["cells"]
    assert [cell["status"] for cell in cells] == ["passed", "error", "error"]
    assert {cell["world_size"] for cell in cells} == {2}
    assert "failed first: ValueError: injected" in cells[1]["sentence"]
    assert cells[2]["sentence"] == "not run: the ranks had ended"
    assert "6 checkpoints handed on, 8 failed" in done.stderr
    assert "in run_cell" not in done.stderr  # no stack of ours
