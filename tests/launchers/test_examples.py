"""Every example runs as its docstring says, with the results it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.fork_server import run_forked, torch_ranks
from support.launchers import run_torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_twelve_lines_give_the_same_weights_on_one_rank_and_under_torchrun() -> None:
    hashes = {
        re.findall(r"weights ([0-9a-f]{64})", done.ok().stdout)[0]
        for done in (
            *run_forked([EXAMPLES / "minimal.py"]),
            run_torchrun(2, [EXAMPLES / "minimal.py"]),
        )
    }
    assert len(hashes) == 1


def printed_on_two_ranks(name: str) -> str:
    """Output of rank 0; rank 1 must print nothing."""
    first, second = run_forked([EXAMPLES / name], torch_ranks(2))
    assert second.ok().stdout == ""
    return first.ok().stdout


@pytest.mark.parametrize(
    ("name", "largest_loss"), [("user_loop.py", 0.05), ("adapters.py", 0.2), ("ddp_hook.py", 0.05)]
)
def test_it_learns_on_two_ranks(name: str, largest_loss: float) -> None:
    (loss,) = re.findall(r"loss ([0-9.]+)", printed_on_two_ranks(name))
    assert float(loss) < largest_loss


def test_the_loop_that_was_there_before_runs_without_a_launcher() -> None:
    (alone,) = run_forked([EXAMPLES / "user_loop.py"])
    assert alone.ok().stdout.endswith("on rank 0 of 1\n")


def test_the_naive_trainer_prints_the_same_losses_on_one_rank_and_on_two() -> None:
    (alone,) = run_forked([EXAMPLES / "naive_trainer.py"])
    printed = [alone.ok().stdout, printed_on_two_ranks("naive_trainer.py")]
    losses = [re.findall(r"loss ([0-9.]+)", text) for text in printed]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    assert all("in 4 all-reduces" in text for text in printed)


def test_digits_are_learned_and_ranks_do_not_show() -> None:
    (alone,) = run_forked([EXAMPLES / "digits.py"])
    accuracy = re.search(r"not seen in training: ([0-9.]+)%", alone.ok().stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 95.0
    assert printed_on_two_ranks("digits.py") == alone.stdout


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in EXAMPLES.parent.glob("tests/**/test_*.py"))
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in tests, example.name
