"""`gradsync bench collectives`: sizes, figures, checks and refusals, without starting a rank."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsync.bench.collectives import (
    ALGORITHMS,
    EXPERIMENT,
    OPERATIONS,
    CollectivesOptions,
    Samples,
    Settings,
    bus_factor,
    choose_sizes,
    counts_of,
    fits_of,
    parse_size,
    plan_of,
    repetitions_of,
    rounds_of,
    rows_of,
    size_text,
    time_text,
)
from gradsync.bench.collectives_run import Lap, Patterns, in_time
from gradsync.bench.experiment import Findings, from_json
from gradsync.cli.main import main
from gradsync.errors import ConfigError
from gradsync.launch import local
from gradsync.world import World

SETTINGS = Settings(
    operations=tuple(OPERATIONS),
    algorithms=ALGORITHMS,
    sizes=(),
    max_bytes=2**30,
    dtype="fp32",
    device="cpu",
    threads=None,
    rounds=7,
    burst=1,
    seconds_per_point=0.35,
)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("4", 4), ("4B", 4), ("64K", 65536), ("64k", 65536), ("64KiB", 65536), ("1G", 2**30)),
        *(("25M", 25 * 2**20), ("25MB", 25_000_000), ("0.5K", 512), (" 2 kB ", 2000)),
    ],
)
def test_sizes_that_are_understood(text: str, size: int) -> None:
    assert parse_size("--sizes", text) == size


@pytest.mark.parametrize("text", ["12Q", "", "-4", "K", "4 5", "1e3", "4iB4", "nan", "9" * 400])
def test_sizes_that_are_not(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--sizes: .* is no size; write bytes"):
        parse_size("--sizes", text)


def test_sizes_are_said_exactly() -> None:
    sizes = (4, 1000, 1536, 4096, 25 * 2**20, 25_000_000, 2**30)
    said = ("4 B", "1000 B", "1.5 KiB", "4 KiB", "25 MiB", "25000000 B", "1 GiB")
    assert tuple(map(size_text, sizes)) == said


def test_default_sizes_go_as_far_as_memory() -> None:
    everything = choose_sizes(SETTINGS, available_bytes=2**40, ranks=2)
    assert everything == [4**k for k in range(1, 16)]
    small = choose_sizes(SETTINGS, available_bytes=16 * 2**20, ranks=2)
    assert small == [4**k for k in range(1, 11)]  # 7 buffers of 1 MiB on 2 ranks
    assert choose_sizes(replace(SETTINGS, max_bytes=100), available_bytes=2**40, ranks=2)[-1] == 64


def test_a_size_beyond_memory_is_refused_with_the_largest_possible() -> None:
    asked = replace(SETTINGS, sizes=(2**20, 4, 4))
    assert choose_sizes(asked, available_bytes=2**30, ranks=2) == [4, 2**20]
    with pytest.raises(ConfigError, match=r"--sizes: 1 MiB takes 0.0 GiB for 3 rank\(s\)") as found:
        choose_sizes(asked, available_bytes=10_000_000, ranks=3)
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
    assert repetitions_of(0.004, SETTINGS, 0.0009) == 10
    assert repetitions_of(1e-6, SETTINGS, 1e-6) == 50
    assert repetitions_of(9.0, SETTINGS, 0.0) == 1
    assert rounds_of([0.001, 0.001], SETTINGS) == 7
    assert rounds_of([0.069, 0.069], SETTINGS) == 5
    assert rounds_of([1.0, 1.0], SETTINGS) == 3
    assert rounds_of([1.0], replace(SETTINGS, rounds=1)) == 1


def test_settings_survive_json() -> None:
    assert from_json(Settings, json.loads(json.dumps(asdict(SETTINGS)))) == SETTINGS


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
    ranks = [Patterns(rank, 2, dtype, CPU) for rank in range(2)]
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


def samples(
    algorithm: str, *medians: float, size: int = 1000, operation: str = "all_reduce"
) -> Any:
    return Samples(
        operation=operation,
        algorithm=algorithm,
        size_bytes=size,
        count=size // 4,
        rounds_s=[[median, median, 10 * median] for median in medians],
    )


def test_bus_bandwidth_is_as_in_nccl_tests() -> None:
    factors = [bus_factor(operation, 4) for operation in OPERATIONS]
    assert factors == [1.5, 0.75, 0.75, 1.0]


def test_figures_of_a_row() -> None:
    found = [samples("ring", 4e-6, 8e-6), samples("copy", 2e-6, 6e-6)]
    ring, copy = rows_of(found, 4, one_memory=True)
    assert ring.p50_s == pytest.approx(8e-6)  # of 4 4 8 8 40 80
    assert ring.p95_s == pytest.approx(70e-6)
    assert ring.repetitions == 6
    assert ring.algbw_gbs == pytest.approx(1000 / 8e-6 / 1e9)
    assert ring.busbw_gbs == pytest.approx(1.5 * 1000 / 8e-6 / 1e9)
    assert ring.limit_s == pytest.approx(4e-6)
    assert ring.of_limit is not None
    assert ring.of_limit.median == pytest.approx(0.625)  # 2/4 and 6/8, round by round
    assert copy.algbw_gbs == pytest.approx(2000 / 6e-6 / 1e9)
    assert (copy.busbw_gbs, copy.limit_s, copy.of_limit) == (None, None, None)


def test_a_reduce_scatter_has_less_to_move() -> None:
    found = [samples(name, 4e-6, operation="reduce_scatter") for name in ("ring", "copy")]
    [row, _] = rows_of(found, 4, one_memory=True)
    assert row.limit_s == pytest.approx(4e-6 * (1 + 1 / 4) / 2)


def test_between_hosts_a_copy_is_no_limit() -> None:
    found = [samples("ring", 4e-6), samples("copy", 2e-6)]
    assert [row.of_limit for row in rows_of(found, 2, one_memory=False)] == [None, None]


def result(*, wrong: list[str] | None = None) -> dict[str, Any]:
    found = [
        samples(name, seconds * size, size=size)
        for size in (1000, 4096)
        for name, seconds in (("ring", 2e-9), ("copy", 1e-9))
    ]
    return {
        "environment": {
            **{"world_size": 2, "backend": "gloo", "cpu": "a [bold] cpu", "cores": 2},
            **{"load_at_start": 0.5, "torch": "2", "date": "2026-01-02", "accelerator": None},
            "threads_per_rank": 1,
        },
        "num_nodes": 1,
        "one_memory": True,
        "samples": [asdict(entry) for entry in found],
        "skipped": ["shared: not here"],
        "wrong": wrong or [],
    }


def report() -> Findings:
    made = json.loads(json.dumps(result(wrong=["all_reduce by tree: element 3"])))
    return EXPERIMENT.metrics(CollectivesOptions(), SETTINGS, made, World())


def test_the_printed_report() -> None:
    stream = io.StringIO()
    report().show(stream)
    text = stream.getvalue()
    assert text.startswith("2 ranks on 1 host(s), fp32, gloo; a [bold] cpu, 2 cores, load 0.5")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "1000 B ring 2.00 us 18.2 us 0.5 0.5 50%" in lines
    assert "copy (reads + writes) 1.00 us 9.10 us 2" in lines
    assert "all_reduce ring 0.00 us 0.5 0% 1.00" in lines
    assert "an operation in place (all_reduce) does not, and may pass 100%" in text
    assert "skipped: shared: not here" in text
    assert "WRONG all_reduce by tree: element 3" in text


def test_rows_as_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(report().csv())))
    assert [row["algorithm"] for row in rows] == ["ring", "copy"] * 2
    first = rows[0]
    assert first["operation"] == "all_reduce"
    assert (first["size_bytes"], first["count"], first["world_size"]) == ("1000", "250", "2")
    assert (first["p50_us"], first["limit_us"], first["of_limit"]) == ("2.0", "1.0", "0.5")
    assert rows[1]["busbw_gbs"] == ""


def test_one_size_gives_no_line() -> None:
    found = [samples("ring", 4e-6), samples("copy", 2e-6)]
    assert fits_of(rows_of(found, 2, one_memory=True)) == []


def test_times_have_three_digits() -> None:
    assert [*map(time_text, (1e-9, 4.214e-6, 12.34e-3, 0.2, 2.05))] == [
        *("0.00 us", "4.21 us", "12.3 ms", "200 ms", "2.05 s")
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--operations", "all_redcue"], "unknown operation 'all_redcue'; perhaps you meant"),
        (["--algorithms", "rong"], "unknown algorithm 'rong'; perhaps you meant 'ring'"),
        (["--operations", ","], "no operation given (there are: all_reduce,"),
        (["--operations", "broadcast", "--algorithms", "ring"], "nothing to measure: broadcast by"),
        (["--sizes", "12Q"], "--sizes: '12Q' is no size"),
        (["--max-bytes", "0"], "--max-bytes: '0' is less than one byte"),
        (["--world-size", "0"], "--world-size 0: collectives need at least 2 ranks"),
        (["--dtype", "fp31"], "unknown dtype 'fp31'; perhaps you meant 'fp32'"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--device", "cuda"], "--device cuda: torch finds no CUDA device here"),
        (["--rounds", "0"], "--rounds must be at least 1; got 0"),
        (["--burst", "0"], "--burst must be at least 1; got 0"),
        (["--threads", "0"], "--threads must be at least 1; got 0"),
        (["--seconds-per-point", "nan"], "--seconds-per-point must be a finite number"),
        (["--csv", "nowhere/x.csv"], "--csv nowhere/x.csv: there is no folder nowhere"),
        (["--csv", "."], "--csv .: is a folder"),
        (["--out", "file/x"], "--out file/x: file is no folder"),
    ],
)
def test_what_cannot_be_is_refused_before_any_rank_starts(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    Path("file").touch()
    pretend(monkeypatch, code=0)
    assert main(["bench", "collectives", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1


def pretend(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, Any] | None = None, **ended: Any
) -> None:
    """Replace the ranks by a result."""

    def launch_ranks(argv: list[str], nproc_per_node: int, **options: Any) -> local.Ended:
        assert argv[:3] == ["bench", "collectives", "--worker"]
        assert nproc_per_node == 2
        work = json.loads((Path(argv[3]) / "work.json").read_text())
        assert from_json(Settings, work).rounds == 7
        if found is not None:
            (Path(argv[3]) / "result.json").write_text(json.dumps(found))
        return local.Ended(**{"received": None, "killed": {}, **ended})

    monkeypatch.setattr(local, "launch_ranks", launch_ranks)


def test_the_document_and_the_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path / "cache"))
    pretend(monkeypatch, result(), code=0)
    places = ["--out", str(tmp_path / "out"), "--csv", str(tmp_path / "rows.csv"), "--save"]
    assert main(["bench", "collectives", "--json", "--sizes", "1000,4K", *places]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["passed"]
    assert [row["algorithm"] for row in document["rows"]] == ["ring", "copy"] * 2
    assert document["fits"][0]["operation"] == "all_reduce"
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["benchmark"] == "collectives"
    assert record["command"] == "gradsync bench collectives --world-size 2 --sizes 1000,4K"
    assert record["samples"] == result()["samples"]
    assert "all_reduce" in printed.err
    [kept] = (tmp_path / "cache" / "alpha-beta").iterdir()
    assert f"kept alpha and beta in {kept}" in printed.err
    assert (tmp_path / "rows.csv").exists()


@pytest.mark.parametrize(
    ("found", "ended", "code", "message"),
    [
        (result(wrong=["a line"]), {"code": 0}, 1, ""),
        (None, {"code": 2}, 2, ""),  # the ranks have said why
        (None, {"code": 0}, 1, "gradsync: error: the ranks ended without a result\n"),
        (None, {"code": 130, "received": signal.SIGINT}, 130, "gradsync: error: interrupted\n"),
        (
            *(None, {"code": 75, "received": signal.SIGTERM}, 143),
            "gradsync: error: ended by SIGTERM\n",
        ),
    ],
)
def test_exit_codes(
    found: dict[str, Any] | None,
    ended: dict[str, Any],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(monkeypatch, found, **ended)
    assert main(["bench", "collectives"]) == code
    printed = capsys.readouterr()
    assert printed.err == message
    assert ("WRONG a line" in printed.out) == (found is not None)


def test_the_command_names_what_was_asked_for() -> None:
    options = CollectivesOptions(sizes="4 K", rounds=2, out="x", as_json=True, save=True)
    words = "gradsync bench collectives --world-size 2 --sizes '4 K' --rounds 2"
    assert EXPERIMENT.metrics(options, SETTINGS, result(), World()).command == words
    assert plan_of(options, World()).sizes == (4096,)


def test_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "colectives"]) == 2
    assert "perhaps you meant 'collectives'" in capsys.readouterr().err
    assert main(["bench"]) == 2
    assert "  collectives  " in capsys.readouterr().out


def test_help_and_refusals_need_no_torch() -> None:
    code = (
        "import sys; from gradsync.cli.main import main\n"
        "for argv in (['bench', '--help'], ['bench', 'collectives', '--help']):\n"
        "    try: assert main(argv) == 0\n"
        "    except SystemExit as stop: assert not stop.code\n"
        "assert main(['bench', 'collectives', '--sizes', '12Q']) == 2\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: gradsync bench collectives" in done.stdout
