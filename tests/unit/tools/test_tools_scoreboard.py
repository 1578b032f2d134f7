"""The page's table of faults is its record's, and says what a run showed."""

from __future__ import annotations

import json

import pytest
from fault_scoreboard import KINDS, LIMIT_S, NAMED, PAGE, RECORD, SIDES, cell, table

FOUND = {"named_s": 3.2, "place": True, "ended_s": 20.4, "exit_code": 124, "left": 0}


def test_the_page_holds_the_records_table() -> None:
    record = json.loads(RECORD.read_text("utf-8"))
    assert {(each["kind"], each["side"]) for each in record["runs"]} == {
        (kind, side) for kind in KINDS for side in SIDES
    }
    assert table(record) in PAGE.read_text("utf-8")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "rank 1 named after 3 s, with its line; ends after 20 s with 124"),
        ({"named_s": None}, "no rank named; ends after 20 s with 124"),
        ({"ended_s": None, "exit_code": None}, f"still there after {LIMIT_S} s"),
        ({"exit_code": 0, "named_s": None}, "ends as if nothing were"),
        ({"left": 2}, "; 2 processes left"),
    ],
)
def test_a_cell(changes: dict[str, object], said: str) -> None:
    assert said in cell(FOUND | changes)


def test_a_line_that_names_the_rank() -> None:
    for line in ("rank 1 is slow", "[rank1]: ValueError", "  rank      : 1 (local_rank: 1)"):
        assert NAMED.search(line), line
    for line in ("rank 10 waits", "ranks 0 and 2 wait", "127.0.0.1"):
        assert not NAMED.search(line), line
