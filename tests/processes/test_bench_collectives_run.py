"""Real ranks: every operation by every algorithm is right, and a wrong one is caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

from gradsync.bench.collectives import ALGORITHMS, OPERATIONS, Settings
from gradsync.bench.collectives_run import Bench
from support.launchers import run_python
from support.rank_session import open_session

QUICK = ["--rounds", "1", "--seconds-per-point", "0"]


def test_every_algorithm_on_two_ranks(tmp_path: Path) -> None:
    words = ["--sizes", "4,100K", *QUICK, "--json", "--out", tmp_path]
    done = run_python(["-m", "gradsync", "bench", "collectives", *words], timeout_s=90).ok()
    document = json.loads(done.stdout)
    found: dict[str, list[tuple[str, int]]] = {}
    for row in document["rows"]:
        assert 0 < row["p50_s"] <= row["p95_s"] < 60
        assert row["repetitions"] == 1
        found.setdefault(row["operation"], []).append((row["algorithm"], row["size_bytes"]))
    for operation, algorithms in OPERATIONS.items():
        least = 4 if operation in ("all_reduce", "broadcast") else 8
        expected = [(name, size) for size in (least, 102400) for name in (*algorithms, "copy")]
        assert found[operation] == expected
    assert (document["wrong"], document["skipped"]) == ([], [])
    assert len(document["fits"]) == sum(map(len, OPERATIONS.values()))
    assert document["environment"]["backend"] == "gloo"
    record = json.loads((tmp_path / "record.json").read_text())
    assert [len(entry["rounds_s"]) for entry in record["samples"]] == [1] * len(document["rows"])


def _with_a_fault(rank: int, world_size: int, store_path: str) -> dict[str, Any]:
    """A tree that forgets to hand the sum back; shared memory that does not exist."""
    settings = Settings(
        operations=("all_reduce", "broadcast"),
        algorithms=ALGORITHMS,
        sizes=(400,),
        max_bytes=4,
        dtype="bf16",
        device="cpu",
        threads=1,
        rounds=1,
        burst=2,
        seconds_per_point=0.0,
    )
    from gradsync.comm.shared_memory.unavailable import SharedMemoryError

    module = "gradsync.bench.collectives_run.tree_broadcast"
    refuse = mock.Mock(side_effect=SharedMemoryError("not here"))
    told: list[tuple[int, int, str]] = []
    with (
        open_session(rank, world_size, store_path) as world,
        mock.patch(module, return_value=None),
        mock.patch("gradsync.bench.collectives_run.share_memory", refuse),
    ):
        bench = Bench(settings, world, lambda *what: told.append(what))
        samples = bench.run()
    return {
        "timed": [(entry.operation, entry.algorithm) for entry in samples],
        "wrong": bench.wrong,
        "skipped": bench.skipped,
        "told": told,
    }


def test_a_wrong_result_is_named_and_not_timed(pool: Any) -> None:
    first, *others = pool.run(_with_a_fault, 3)
    assert all(other == first | {"told": []} for other in others)
    assert len(first["wrong"]) == 2
    for line, operation in zip(first["wrong"], ("all_reduce", "broadcast"), strict=True):
        assert line.startswith(f"{operation} by tree, 200 elements of bf16: element ")
        assert line.endswith("is wrong on rank 1")
    assert first["skipped"] == ["shared, shared_copies: not here"]
    assert first["timed"] == [
        *(("all_reduce", name) for name in ("backend", "ring", "recursive_doubling")),
        *(("all_reduce", "hierarchical"), ("all_reduce", "copy")),
        *(("broadcast", "backend"), ("broadcast", "copy")),
    ]
    assert first["told"] == [(0, 2, "all_reduce 400 B"), (1, 2, "broadcast 400 B"), (2, 2, "done")]
