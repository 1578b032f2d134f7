"""`bench collectives`: sizes, figures, checks of results, without starting a rank."""

from __future__ import annotations

import pytest

from gradsync.commands.bench.collectives import (
    OPERATIONS,
    CollectivesOptions,
    bus_factor,
    choose_sizes,
    counts_of,
    fits_of,
    parse_size,
    rows_of,
    size_text,
    work_of,
)
from gradsync.commands.plan.report import duration
from gradsync.errors import ConfigError
from support.bench_results import collective


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", 4), ("4B", 4), ("64K", 65536), ("64KiB", 65536), ("25M", 25 * 2**20), ("1G", 2**30)],
)
def test_sizes_that_are_understood(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["12Q", "", "-4", "0", "K", "4 5", "1e3", "25MB", "9" * 400])
def test_sizes_that_are_not(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--sizes: .* is no size; write bytes"):
        parse_size(text)


def test_numbers_as_they_are_said() -> None:
    sizes = (4, 1000, 4096, 25 * 2**20, 25_000_000, 2**30)
    said = ("4 B", "1000 B", "4 KiB", "25 MiB", "25000000 B", "1 GiB")
    assert tuple(map(size_text, sizes)) == said
    times = map(duration, (4.214e-6, 12.34e-3, 2.05))
    assert list(times) == ["4.21 µs", "12.3 ms", "2.05 s"]


def test_sizes_go_as_far_as_memory() -> None:
    everything = choose_sizes("", available_bytes=2**40, ranks=2)
    assert everything == [4**k for k in range(1, 16)]
    small = choose_sizes("", available_bytes=16 * 2**20, ranks=2)
    assert small == [4**k for k in range(1, 10)]  # 8 buffers of 256 KiB on 2 ranks
    assert choose_sizes("1M,4,4", available_bytes=2**30, ranks=2) == [4, 2**20]


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


def test_only_algorithms_that_exist_are_measured() -> None:
    asked = CollectivesOptions(operations="broadcast,all_gather", algorithms="ring,tree")
    assert work_of(asked) == {"all_gather": ["ring"], "broadcast": ["tree"]}
    assert work_of(CollectivesOptions()) == {name: [*all_] for name, all_ in OPERATIONS.items()}


def test_figures_of_a_row() -> None:
    assert [bus_factor(operation, 4) for operation in OPERATIONS] == [1.5, 0.75, 0.75, 1.0]
    found = [collective("ring", 4e-6, 8e-6), collective("copy", 2e-6, 6e-6)]
    ring, copy = rows_of(found, 4, one_memory=True)
    assert ring["p50_s"] == pytest.approx(8e-6)  # of 4 4 8 8 40 80
    assert ring["p95_s"] == pytest.approx(70e-6)
    assert ring["repetitions"] == 6
    assert ring["algbw_gbs"] == pytest.approx(1000 / 8e-6 / 1e9)
    assert ring["busbw_gbs"] == pytest.approx(1.5 * 1000 / 8e-6 / 1e9)
    assert ring["of_limit"]["median"] == pytest.approx(0.625)  # 2/4 and 6/8, round by round
    assert copy["algbw_gbs"] == pytest.approx(2000 / 6e-6 / 1e9)
    assert (copy["busbw_gbs"], copy["of_limit"]) == (None, None)
    part = [{**each, "operation": "reduce_scatter"} for each in found]
    less = rows_of(part, 4, one_memory=True)[0]["of_limit"]["median"]
    assert less == pytest.approx(0.625 * (1 + 1 / 4) / 2)  # it has less to move
    between_hosts = rows_of(found, 4, one_memory=False)
    assert [row["of_limit"] for row in between_hosts] == [None, None]
    assert fits_of(between_hosts) == []  # one size gives no line
