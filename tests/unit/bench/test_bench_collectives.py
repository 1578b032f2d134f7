"""`bench collectives`: sizes, figures, checks of results, without starting a rank."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch

from gradsync.commands.bench.collectives import (
    OPERATIONS,
    CollectivesOptions,
    bus_factor,
    choose_sizes,
    counts_of,
    findings_of,
    fits_of,
    parse_size,
    repetitions_of,
    rounds_of,
    rows_of,
    size_text,
    time_text,
    work_of,
)
from gradsync.commands.bench.collectives_run import Lap, Patterns, in_time
from gradsync.errors import ConfigError
from support.bench_results import COLLECTIVES, collective


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("4", 4), ("4B", 4), ("64K", 65536), ("64k", 65536), ("64KiB", 65536), ("1G", 2**30)),
        *(("25M", 25 * 2**20), ("25MB", 25_000_000), ("0.5K", 512), (" 2 kB ", 2000)),
    ],
)
def test_sizes_that_are_understood(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["12Q", "", "-4", "K", "4 5", "1e3", "4iB4", "nan", "9" * 400])
def test_sizes_that_are_not(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--sizes: .* is no size; write bytes"):
        parse_size(text)


def test_numbers_as_they_are_said() -> None:
    sizes = (4, 1000, 1536, 4096, 25 * 2**20, 25_000_000, 2**30)
    said = ("4 B", "1000 B", "1.5 KiB", "4 KiB", "25 MiB", "25000000 B", "1 GiB")
    assert tuple(map(size_text, sizes)) == said
    assert [*map(time_text, (1e-9, 4.214e-6, 12.34e-3, 0.2, 2.05))] == [
        *("0.00 us", "4.21 us", "12.3 ms", "200 ms", "2.05 s")
    ]


def test_sizes_go_as_far_as_memory() -> None:
    everything = choose_sizes("", available_bytes=2**40, ranks=2)
    assert everything == [4**k for k in range(1, 16)]
    small = choose_sizes("", available_bytes=16 * 2**20, ranks=2)
    assert small == [4**k for k in range(1, 11)]  # 7 buffers of 1 MiB on 2 ranks
    assert choose_sizes("1M,4,4", available_bytes=2**30, ranks=2) == [4, 2**20]
    with pytest.raises(ConfigError, match=r"--sizes: 1 MiB is too large for 3 ranks") as found:
        choose_sizes("1M,4,4", available_bytes=10_000_000, ranks=3)
    assert str(found.value).endswith(f"the largest size is {9_000_000 // 21} bytes")


@pytest.mark.parametrize(
    ("operation", "dtype", "counts"),
    [
        ("all_reduce", "fp32", [1, 4]),
        ("all_reduce", "fp64", [1, 2]),
        ("broadcast", "int8", [4, 5, 16]),
        ("all_gather", "fp32", [3, 6]),
        ("reduce_scatter", "bf16", [3, 9]),
    ],
)
def test_counts_are_whole_elements_and_parts(operation: str, dtype: str, counts: list[int]) -> None:
    assert counts_of(operation, [4, 5, 16], dtype, 3) == counts


def test_time_is_shared_out() -> None:
    assert repetitions_of(0.003, 0.0009) == 10
    assert repetitions_of(1e-6, 1e-6) == 50
    assert repetitions_of(9.0, 0.0) == 1
    assert rounds_of([0.001, 0.001], 7) == 7
    assert rounds_of([0.055, 0.055], 7) == 5
    assert rounds_of([1.0, 1.0], 7) == 3
    assert rounds_of([1.0], 1) == 1


def test_only_algorithms_that_exist_are_measured() -> None:
    asked = CollectivesOptions(operations="broadcast,all_gather", algorithms="ring,tree")
    assert work_of(asked) == {"all_gather": ["ring"], "broadcast": ["tree"]}
    assert work_of(CollectivesOptions()) == {name: [*all_] for name, all_ in OPERATIONS.items()}


def test_only_repetitions_that_began_together_count() -> None:
    laps = [Lap(1e-3, 1e-6), Lap(2e-3, 1e-3), Lap(3e-3, 3e-5)]
    assert in_time(laps) == [1e-3, 3e-3]
    assert in_time([Lap(5e-3, 4e-3), Lap(4e-3, 3e-3)]) == [4e-3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("operation", list(OPERATIONS))
@pytest.mark.parametrize("length", [2, 70_000])
def test_right_results_pass_and_each_kind_of_wrong_one_is_found(
    operation: str, dtype: torch.dtype, length: int
) -> None:
    """Rank 1 of 2; `length` is a part's."""
    ranks = [Patterns(rank, 2, dtype, torch.device("cpu")) for rank in range(2)]
    size = length if operation == "all_gather" else 2 * length
    brought = []
    for rank in ranks:
        source, result = torch.zeros(size, dtype=dtype), torch.zeros(length, dtype=dtype)
        rank.fill(source, result)
        assert (result == -1).all()
        brought.append(source)
    right = {
        "all_reduce": brought[0] + brought[1],
        "reduce_scatter": (brought[0] + brought[1])[length:],
        "all_gather": torch.cat(brought),
        "broadcast": brought[0],
    }[operation]
    assert ranks[1].first_wrong(operation, right) == -1
    for place in (0, len(right) - 1):
        wrong = right.clone()
        wrong[place] += 1
        assert ranks[1].first_wrong(operation, wrong) == place
    assert ranks[1].first_wrong(operation, torch.full_like(right, -1)) == 0
    if length > 2:
        own = brought[1] if len(brought[1]) == len(right) else brought[1][: len(right)]
        assert len(own) < len(right) or ranks[1].first_wrong(operation, own) >= 0
        assert ranks[1].first_wrong(operation, right.roll(1)) >= 0


def rows(
    *medians: float, world_size: int, operation: str = "all_reduce", one: bool
) -> list[dict[str, Any]]:
    """Rows of a ring, and of copies that take half as long."""
    copies = [median / 2 for median in medians]
    found = [("ring", medians), ("copy", copies)]
    samples = [collective(name, *each, operation=operation) for name, each in found]
    return rows_of(samples, world_size, one_memory=one)


def test_figures_of_a_row() -> None:
    assert [bus_factor(operation, 4) for operation in OPERATIONS] == [1.5, 0.75, 0.75, 1.0]
    found = [collective("ring", 4e-6, 8e-6), collective("copy", 2e-6, 6e-6)]
    ring, copy = rows_of(found, 4, one_memory=True)
    assert ring["p50_s"] == pytest.approx(8e-6)  # of 4 4 8 8 40 80
    assert ring["p95_s"] == pytest.approx(70e-6)
    assert ring["repetitions"] == 6
    assert ring["algbw_gbs"] == pytest.approx(1000 / 8e-6 / 1e9)
    assert ring["busbw_gbs"] == pytest.approx(1.5 * 1000 / 8e-6 / 1e9)
    assert ring["limit_s"] == pytest.approx(4e-6)
    assert ring["of_limit"]["median"] == pytest.approx(0.625)  # 2/4 and 6/8, round by round
    assert copy["algbw_gbs"] == pytest.approx(2000 / 6e-6 / 1e9)
    assert (copy["busbw_gbs"], copy["limit_s"], copy["of_limit"]) == (None, None, None)
    [row, _] = rows(8e-6, world_size=4, operation="reduce_scatter", one=True)
    assert row["limit_s"] == pytest.approx(4e-6 * (1 + 1 / 4) / 2)  # it has less to move
    between_hosts = rows(4e-6, world_size=2, one=False)
    assert [row["of_limit"] for row in between_hosts] == [None, None]
    assert fits_of(between_hosts) == []  # one size gives no line


def test_what_is_printed() -> None:
    result = json.loads(json.dumps(COLLECTIVES | {"wrong": ["all_reduce by tree: element 3"]}))
    findings_of(CollectivesOptions(), result).show(stream := io.StringIO())
    text = stream.getvalue()
    assert text.startswith("2 ranks on 1 host, fp32; 2026-01-02, a [bold] cpu, 2 cores (load 0.5")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "1000 B ring 2.00 us 18.2 us 0.5 0.5 50%" in lines
    assert "1000 B copy 1.00 us 9.10 us 2" in lines
    assert "all_reduce ring 0.00 us 0.5 0% 1.00" in lines
    assert "skipped: shared: not here" in text
    assert "WRONG all_reduce by tree: element 3" in text
