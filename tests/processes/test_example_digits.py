"""The convnet example learns real digits, and prints the same on one rank and on two."""

from __future__ import annotations

import re
from pathlib import Path

from support.launchers import run_python, run_torchrun

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"


def test_digits_are_learned_and_ranks_do_not_show() -> None:
    alone = run_python([EXAMPLE]).ok().stdout
    assert run_torchrun(2, [EXAMPLE]).ok().stdout == alone
    accuracy = re.search(r"not seen in training: ([0-9.]+)%", alone)
    assert accuracy is not None
    assert float(accuracy[1]) > 95.0
