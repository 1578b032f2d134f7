"""Every example runs as its docstring says, and keeps its word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.launchers import run_python, run_torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_twelve_lines_give_the_same_weights_on_one_rank_and_on_three() -> None:
    hashes = {
        re.findall(r"weights ([0-9a-f]{64})", done.ok().stdout)[0]
        for done in (
            run_python([str(EXAMPLES / "minimal.py")]),
            run_torchrun(3, [str(EXAMPLES / "minimal.py")]),
        )
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("name", "largest_loss"), [("own_loop.py", 0.05), ("adapters.py", 0.2), ("ddp_hook.py", 0.05)]
)
def test_it_learns_on_two_ranks(name: str, largest_loss: float) -> None:
    done = run_torchrun(2, [str(EXAMPLES / name)]).ok()
    losses = re.findall(r"loss ([0-9.]+)", done.stdout)
    assert len(losses) == 1  # one rank prints
    assert float(losses[0]) < largest_loss


def test_the_naive_trainer_prints_the_same_losses_on_one_rank_and_on_two() -> None:
    printed = [
        run_python([str(EXAMPLES / "naive_trainer.py")]).ok().stdout,
        run_torchrun(2, [str(EXAMPLES / "naive_trainer.py")]).ok().stdout,
    ]
    losses = [re.findall(r"loss ([0-9.]+)", text) for text in printed]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    assert all("in 4 all-reduces" in text for text in printed)


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in EXAMPLES.parent.glob("tests/**/test_*.py"))
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in tests, example.name
