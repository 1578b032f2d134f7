"""Which rank held wrong bits, told by hashes of the same step done again."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradsync.commands.train import drift
from gradsync.commands.train.output import RunDir
from gradsync.errors import DriftError

RIGHT, WRONG = {"a": [1, 2], "b": [3, 4]}, {"a": [1, 2], "b": [3, 5]}


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([RIGHT, WRONG], "other bits than rank 1 held, first in 'b' (1 of 2 tensors)"),
        ([WRONG, RIGHT], "other bits than rank 0 held, first in 'b' (1 of 2 tensors)"),
        ([WRONG, WRONG], "gives no rank's bits"),
        # The run that goes on has no such tensor to compare.
        ([{"c": [1, 1]}, {"c": [1, 2]}], "gives no rank's bits"),
        ([RIGHT | {"c": [1, 1]}, WRONG | {"c": [1, 1]}], "than rank 1 held"),
    ],
)
def test_verdict(tmp_path: Path, ranks: list[dict[str, list[int]]], said: str) -> None:
    drift.keep(RunDir(tmp_path), 4, DriftError("replicas differ", ranks))
    found = drift.read(tmp_path)
    assert found["step"] == 4
    assert said in drift.verdict(found, RIGHT)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 4}', '{"step": "4", "ranks": [{}]}'])
def test_a_file_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "drift.json").write_text(text)
    assert drift.read(tmp_path) == {}
