"""Launches, results and errors of the matrix, with ranks that are only pretended; its reports."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gradsync.commands.launch import local
from gradsync.commands.launch.ranks import Signals
from gradsync.commands.verify import matrix
from gradsync.commands.verify.compare import Difference
from gradsync.commands.verify.matrix import _RESULTS, _WORK, compare_world_sizes
from gradsync.commands.verify.result import Result, document, mark, print_report
from gradsync.commands.verify.settings import Cell, VerifyPlan, VerifySettings, make_plan
from gradsync.errors import PeerError, RendezvousError
from gradsync.world import World

CELL = Cell(strategy="invariant", world_size=1, model="mlp", dtype="fp32")


def plan_of(*sizes: int, cross_load: bool = False) -> VerifyPlan:
    """A single step leaves no checkpoint to hand on."""
    return make_plan(
        strategies=["naive", "invariant"],
        world_sizes=sizes,
        models=["mlp"],
        dtypes=["fp32"],
        num_steps=None if cross_load else 1,
    )


def result_of(cell: Cell, **changes: Any) -> Result:
    differences = {p: asdict(Difference()) for p in ("loss", "gradient", "weight", "state")}
    fields = {"differences": differences, "weights_sha256": cell.strategy, **changes}
    return Result.of(cell, **fields)


Change = Callable[[Result], str]
"""Changes a result; returns "" or how its rank ends: `raised` or `killed`."""


def run(
    monkeypatch: pytest.MonkeyPatch, plan: VerifyPlan, folder: Path, change: Change = lambda _: ""
) -> list[Result]:
    """`run_matrix` with ranks that are only pretended."""

    def launch_ranks(argv: list[str], nproc_per_node: int, **_: Any) -> local.LaunchOutcome:
        cells = [Cell(**cell) for cell in json.loads((folder / _WORK).read_text())["cells"]]
        assert {cell.world_size for cell in cells} == {nproc_per_node}
        with (folder / _RESULTS).open("a") as file:
            for cell in cells:
                result = result_of(cell)
                if ended := change(result):
                    file.write('{"half')
                    killed = {1: 9} if ended == "killed" else {}
                    return local.LaunchOutcome(code=1, received=None, killed=killed)
                file.write(json.dumps(asdict(result)) + "\n")
        return local.LaunchOutcome(code=0, received=None, killed={})

    monkeypatch.setattr(local, "launch_ranks", launch_ranks)
    return matrix.run_matrix(plan, folder, Signals())


@pytest.mark.parametrize(
    ("ends", "said", "ranks"),
    [
        ("raised", "the ranks ended with code 1; their own lines say why", []),
        ("killed", "rank 1 was ended by SIGKILL (killed by hand, or out of memory)", [1]),
    ],
)
def test_an_error_ends_a_launch_and_no_other_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: str, said: str, ranks: list[int]
) -> None:
    broken = "naive W=2 mlp fp32"
    results = run(
        monkeypatch, plan_of(1, 2, 3), tmp_path, lambda result: ends * (result.name == broken)
    )
    assert [result.status for result in results] == ["passed"] * 2 + ["error"] * 2 + ["passed"] * 2
    assert (results[2].name, results[2].sentence, results[2].ranks) == (broken, said, ranks)
    assert results[3].sentence == "not run: the ranks had ended"


def test_a_checkpoint_that_was_never_written_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = "invariant W=1 mlp fp32"
    results = run(
        monkeypatch,
        plan_of(1, 2, cross_load=True),
        tmp_path,
        lambda result: "raised" * (result.name == broken),
    )
    skipped = [result for result in results if result.sentence == f"not run: {broken} failed"]
    assert [result.strategy for result in skipped] == ["naive", "invariant"]


@pytest.mark.parametrize(
    ("error", "sentence", "ranks"),
    [
        (ValueError("boom"), "rank 0 raised ValueError: boom", [0]),
        (RendezvousError("rank 1 did not come"), "rank 0 raised RendezvousError: rank 1 did", [0]),
        (PeerError("rank 2 failed first\n--- its stack", rank=2), "rank 2 failed first", [2]),
    ],
)
def test_the_rank_whose_failure_it_was_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
    sentence: str,
    ranks: list[int],
) -> None:
    def run_cell(cell: Cell, *_: object, **__: object) -> Any:
        if cell.strategy == "naive":
            raise error
        return result_of(cell), no_steps

    no_steps = matrix.Trace((), ())
    cells = [CELL, replace(CELL, strategy="naive"), replace(CELL, strategy="flat")]
    monkeypatch.setattr(matrix, "run_cell", run_cell)
    monkeypatch.setattr(matrix, "open_session", lambda: nullcontext(World()))
    work = {"settings": asdict(VerifySettings()), "cells": [asdict(cell) for cell in cells]}
    (tmp_path / _WORK).write_text(json.dumps(work))
    assert matrix.run_worker(tmp_path) == 1
    results = [json.loads(line) for line in (tmp_path / _RESULTS).read_text().splitlines()]
    assert [result["status"] for result in results] == ["passed", "error", "error"]
    assert results[1]["sentence"].startswith(sentence)
    assert (results[1]["ranks"], "\n" in results[1]["sentence"]) == (ranks, False)


def results_of(*hashes: str) -> list[Result]:
    return [
        result_of(replace(CELL, world_size=size), weights_sha256=sha, bitwise=True)
        for size, sha in enumerate(hashes, 1)
    ]


def test_bitwise_means_one_hash_at_every_world_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def drift(result: Result) -> str:
        result.weights_sha256 = "x" if result.world_size == 3 else "y"
        return ""

    results = run(monkeypatch, plan_of(1, 2, 3), tmp_path, drift)
    assert [result.status for result in results] == ["passed"] * 5 + ["failed"]
    assert results[5].cause == "order only"
    assert "not those of invariant W=1 mlp fp32" in results[5].sentence


def test_a_run_continued_from_another_strategy_may_differ() -> None:
    results = results_of("aaa", "bbb", "bbb")
    results[1].loaded_from = "naive W=1 mlp fp32"
    results[2].loaded_from = "invariant W=1 mlp fp32"
    compare_world_sizes(results)
    assert [result.status for result in results] == ["passed", "passed", "failed"]


def test_marks() -> None:
    first, second = results_of("aaa", "aaa")
    assert mark([first, second]) == "bitwise"
    second.bitwise = False
    assert mark([first, second]) == "rounding"
    second.promise = first.promise = "lossy"
    assert mark([first, second]) == "lossy"
    second.status = "failed"
    assert mark([first, second]) == "failed"
    first.status = "error"
    assert mark([first, second]) == "error"


def test_the_document_and_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = run(monkeypatch, plan_of(1, 2, cross_load=True), tmp_path)
    results[0].status, results[0].sentence = "failed", "because"
    results[0].losses = [1.0, math.nan]
    results[0].part_of_bound = results[0].differences["gradient"]["max_abs"] = math.inf
    # JSON has no infinity.
    made = document(VerifySettings(), results, math.inf)
    assert made["passed"] is False
    assert (len(made["cells"]), len(made["cross_load"])) == (4, 8)
    json.dumps(made, allow_nan=False)
    stream = io.StringIO()
    print_report(results, 3.0, stream)
    text = stream.getvalue()
    assert "failed naive W=1 mlp fp32: because" in text
    assert "4 cells and 8 checkpoints handed on, 1 failed, 3 s" in text
