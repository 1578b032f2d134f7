"""Real ranks: every operation by every algorithm is right, and a wrong one is caught."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import Any
from unittest import mock

from gradsync.comm import p2p_collectives
from gradsync.comm.shared_memory.segment import SharedMemoryError
from gradsync.commands.bench import collectives_run
from gradsync.commands.bench.collectives import OPERATIONS, CollectivesOptions, findings_of
from support.rank_session import open_session

EVERY = CollectivesOptions(sizes="4,100K", rounds=1)
FAULTY = CollectivesOptions(operations="all_reduce,broadcast", sizes="400", dtype="bf16", rounds=1)


def _measured(
    rank: int, world_size: int, store_path: str, options: CollectivesOptions
) -> dict[str, Any]:
    """In `FAULTY`, a tree forgets to hand the sum back, and there is no shared memory."""
    told: list[tuple[int, int, str]] = []
    fakes: dict[str, Any] = {
        "Session": lambda _: open_session(rank, world_size, store_path),
        "show_progress": lambda *what: told.append(what),
        "_MOST_REPETITIONS": 1,
    }
    if options == FAULTY:
        fakes["p2p"] = mock.Mock(wraps=p2p_collectives, tree_broadcast=mock.Mock())
        fakes["share_memory"] = mock.Mock(side_effect=SharedMemoryError("not here"))
        fakes["environment"] = lambda **_: {"told": len(told)}
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(collectives_run, name, fake))
        return collectives_run.measure(asdict(options)) | {"told": told}


def test_every_algorithm_on_two_ranks(pool: Any) -> None:
    result = pool.run(_measured, 2, EVERY)[0]
    findings = findings_of(EVERY, result)
    document = findings.data
    found: dict[str, list[tuple[str, int]]] = {}
    for row in document["rows"]:
        assert 0 < row["p50_s"] <= row["p95_s"] < 60
        assert row["repetitions"] == 1
        found.setdefault(row["operation"], []).append((row["algorithm"], row["size_bytes"]))
    for operation, algorithms in OPERATIONS.items():
        least = 4 if operation in ("all_reduce", "broadcast") else 8
        expected = [(name, size) for size in (least, 102400) for name in (*algorithms, "copy")]
        assert found[operation] == expected
    assert (document["wrong"], document["skipped"], findings.code) == ([], [], 0)
    assert len(document["fits"]) == sum(map(len, OPERATIONS.values()))
    assert findings.environment["backend"] == "gloo"
    assert [len(each["rounds_s"]) for each in document["samples"]] == [1] * len(document["rows"])


def test_a_wrong_result_is_named_and_not_timed(pool: Any) -> None:
    first, *others = pool.run(_measured, 3, FAULTY)
    assert first["environment"] == {"told": 0}  # the load is that of before all work
    same = ("samples", "wrong", "skipped")
    assert all([other[name] for name in same] == [first[name] for name in same] for other in others)
    assert [other["told"] for other in others] == [[], []]
    assert len(first["wrong"]) == 2
    for line, operation in zip(first["wrong"], ("all_reduce", "broadcast"), strict=True):
        assert line.startswith(f"{operation} by tree, 200 elements of bf16: wrong on rank ")
    assert first["skipped"] == ["skipped: shared, shared_copies: not here"]
    assert [(entry["operation"], entry["algorithm"]) for entry in first["samples"]] == [
        *(("all_reduce", name) for name in ("backend", "ring", "hierarchical", "copy")),
        *(("broadcast", "backend"), ("broadcast", "copy")),
    ]
    assert first["told"] == [(0, 2, "all_reduce 400 B"), (1, 2, "broadcast 400 B")]
