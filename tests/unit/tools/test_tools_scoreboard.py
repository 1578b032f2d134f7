"""The page's table of faults is its record's, and says what a run showed."""

from __future__ import annotations

import json

from fault_scoreboard import KINDS, PAGE, RECORD, SIDES, table


def test_the_page_holds_the_records_table() -> None:
    record = json.loads(RECORD.read_text("utf-8"))
    assert {(each["kind"], each["side"]) for each in record["runs"]} == {
        (kind, side) for kind in KINDS for side in SIDES
    }
    assert table(record) in PAGE.read_text("utf-8")
