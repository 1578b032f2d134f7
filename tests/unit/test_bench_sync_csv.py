"""From samples of `bench sync` to rows, CSV and the picture's bars: arithmetic by hand."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from gradsync.bench.contestants import parse_contestants, with_ideals
from gradsync.bench.plan import Plan, SyncSettings, sync_plan, turns
from gradsync.bench.plot import bars_of
from gradsync.bench.sync import rows_csv, rows_of

CHECKED = {"losses": [5.5, 5.0], "memory_bytes": 2**20, "operations": 3.0, "sent_bytes": 100.0}


def rank(step_s: list[list[float]], comm_s: float | None) -> dict[str, Any]:
    compute_s = [[0.5 * second for second in steps] for steps in step_s]
    return {"step_s": step_s, "compute_s": compute_s, "comm_s": comm_s, **CHECKED}


@pytest.fixture
def plan() -> Plan:
    settings = SyncSettings(model_size="tiny", rounds=3, num_steps=1, context_length=100)
    chosen = with_ideals(parse_contestants("naive,fsdp,torch_ddp"), same_allocator=False)
    return sync_plan(settings, chosen, world_size=2, batch_size=4)


@pytest.fixture
def results() -> list[dict[str, Any]]:
    """Three rounds; in the second one something else slowed down everybody."""
    keeping = {
        "none": [rank([[0.1], [0.4], [0.1]], 0.0)] * 2,
        "naive": [
            rank([[0.15], [0.6], [0.12]], 0.06),
            rank([[0.11], [0.5], [0.16]], 0.04),
        ],
        "fsdp": [rank([[0.09], [0.36], [0.09]], None)] * 2,
    }
    default = {
        "none (default malloc)": [rank([[0.2], [0.8], [0.2]], 0.0)] * 2,
        "torch_ddp": [rank([[0.3], [1.2], [0.3]], 0.2)] * 2,
    }
    return [
        {"keeps_memory": True, "contestants": keeping},
        {"keeps_memory": False, "contestants": default},
    ]


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    """Ranks that never meet do not wait in each step for another one."""
    assert turns([[[1.0, 4.0], [1.0, 1.0]], [[2.0, 4.0], [0.0, 5.0]]]) == [3.0, 2.5]


def test_rows(plan: Plan, results: list[dict[str, Any]]) -> None:
    none, default, naive, fsdp, ddp = rows_of(plan, results)
    assert naive.total_ms.median == pytest.approx(160)
    assert naive.ratio.median == pytest.approx(1.5)  # of the same round: 1.5, 1.5, 1.6
    assert naive.exposed_ms == pytest.approx(60)  # 50, 200, 60
    assert naive.comm_ms == pytest.approx(60)
    assert naive.comm_fraction == pytest.approx(60 / 160)
    assert naive.compute_ms == pytest.approx(80)
    assert naive.tokens_per_s == pytest.approx(2 * 4 * 100 / 0.16)
    assert (fsdp.exposed_ms, fsdp.comm_ms, fsdp.comm_fraction) == (0.0, None, None)
    assert fsdp.ratio.median == pytest.approx(0.9)
    assert ddp.ratio.median == pytest.approx(1.5)  # to the ideal of its own setting
    assert none.ratio.median == default.ratio.median == 1
    assert [row.keep_memory for row in (none, default, naive, ddp)] == [True, False, True, False]


def test_csv_begins_with_the_common_columns(plan: Plan, results: list[dict[str, Any]]) -> None:
    text = rows_csv(plan, rows_of(plan, results))
    first = "model_size,d_model,num_layers,total_time_ms,compute_time_ms,comm_time_ms,"
    assert text.startswith(first + "comm_fraction,num_comm_ops,")
    lines = list(csv.DictReader(io.StringIO(text)))
    naive, fsdp = lines[2], lines[3]
    assert [naive[name] for name in list(naive)[:8]] == (
        ["tiny", "192", "4", "160", "80", "60", "0.375", "3"]
    )
    assert naive["contestant"] == "naive"
    assert (naive["ratio_to_none"], naive["world_size"], naive["batch_size"]) == ("1.5", "2", "4")
    assert (naive["keep_memory"], lines[4]["keep_memory"]) == ("true", "false")
    assert (fsdp["comm_time_ms"], fsdp["comm_fraction"]) == ("", "")


def test_bars_are_ratios_to_their_own_ideal(plan: Plan, results: list[dict[str, Any]]) -> None:
    none, default, naive, fsdp, ddp = bars_of(plan, rows_of(plan, results))
    assert (none.ideal, default.ideal, ddp.ideal) == pytest.approx((100, 200, 200))
    assert (naive.computing, naive.exposed) == pytest.approx((100, 50))
    assert naive.hidden == 0  # 60 ms of communication, 50 of them in the step: it cannot hide any
    assert (fsdp.computing, fsdp.exposed, fsdp.hidden) == pytest.approx((90, 0, 0))
    assert (ddp.computing, ddp.exposed, ddp.hidden) == pytest.approx((200, 100, 100))
