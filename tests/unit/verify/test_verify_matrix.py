"""Launches, results and errors of the matrix, with ranks that are only pretended; its reports."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import verify_table
from torch.distributed import DistBackendError

from gradsync.commands.verify import matrix
from gradsync.commands.verify.compare import Difference
from gradsync.commands.verify.matrix import (
    WORK,
    RunEnd,
    broken_off,
    compare_world_sizes,
    run_matrix,
)
from gradsync.commands.verify.result import Result, document, mark, print_report
from gradsync.commands.verify.settings import Cell, VerifyPlan, VerifySettings, make_plan
from gradsync.errors import LostPeerError, RendezvousError, RunError
from gradsync.world import World

CELL = Cell(strategy="invariant", world_size=1, model="mlp", dtype="fp32")


def plan_of(
    *sizes: int, cross_load: bool = False, strategies: str = "naive invariant"
) -> VerifyPlan:
    """A single step leaves no checkpoint to hand on."""
    return make_plan(
        strategies=strategies.split(),
        world_sizes=sizes,
        models=["mlp"],
        dtypes=["fp32"],
        num_steps=None if cross_load else 1,
    )


def result_of(cell: Cell, **changes: Any) -> Result:
    differences = {p: asdict(Difference()) for p in ("loss", "gradient", "weight", "state")}
    fields = {"differences": differences, "weights_sha256": cell.strategy, **changes}
    return Result.of(cell, **fields)


class Ranks:
    """Pretends to start ranks: each cell passes unless `breaks` says otherwise."""

    def __init__(self, breaks: Callable[[Cell], str] = lambda cell: "", code: int = 1) -> None:
        self.breaks, self.code = breaks, code
        self.starts: list[tuple[int, int]] = []

    def __call__(self, folder: Path, world_size: int) -> RunEnd:
        work = json.loads((folder / WORK).read_text())
        cells = [Cell.from_json(cell) for cell in work["cells"]]
        self.starts.append((world_size, len(cells)))
        with (folder / f"done-{work['number']}.jsonl").open("w") as done:
            for cell in cells:
                if message := self.breaks(cell):
                    note_errors(folder, (0, 2.0, message, False), (1, 1.0, message, False))
                    return RunEnd(code=self.code)
                done.write(json.dumps(asdict(result_of(cell))) + "\n")
        return RunEnd(code=0)


def note_errors(folder: Path, *errors: tuple[int, float, str, bool]) -> None:
    """As (rank, time, message, whether it only tells of a lost peer)."""
    number = json.loads((folder / WORK).read_text())["number"]
    for error in errors:
        note = dict(zip(("rank", "time", "message", "echo"), error, strict=True))
        (folder / f"error-{number}-rank_{error[0]:05d}.json").write_text(json.dumps(note))


def test_all_pass(tmp_path: Path) -> None:
    ranks, told = Ranks(), []
    results = run_matrix(plan_of(1, 2), tmp_path, ranks, told.append)
    assert ranks.starts == [(1, 2), (2, 2)]
    assert [result.status for result in results] == ["passed"] * 4
    assert told == results


def test_an_error_costs_its_cell_alone(tmp_path: Path) -> None:
    ranks = Ranks(lambda cell: "boom" * (cell.name == "naive W=2 mlp fp32"))
    results = run_matrix(plan_of(1, 2, 3), tmp_path, ranks)
    assert ranks.starts == [(1, 2), (2, 2), (2, 1), (3, 2)]
    (error,) = [result for result in results if result.status == "error"]
    assert error.name == "naive W=2 mlp fp32"
    assert error.sentence == "rank 1 raised boom"  # the first one in time, not in rank
    assert len(results) == 6


def test_the_same_error_twice_ends_a_launch(tmp_path: Path) -> None:
    ranks = Ranks(lambda cell: "boom" * (cell.world_size == 2))
    results = run_matrix(plan_of(2, 3, strategies="naive flat ring ddp"), tmp_path, ranks)
    assert ranks.starts == [(2, 4), (2, 3), (3, 4)]
    assert [result.status for result in results] == ["error"] * 4 + ["passed"] * 4
    assert results[3].sentence == "not run: the same error came twice"


def test_a_checkpoint_that_was_never_written_is_not_waited_for(tmp_path: Path) -> None:
    broken = "naive W=1 mlp fp32"
    ranks = Ranks(lambda cell: "boom" * (cell.name == broken))
    results = run_matrix(plan_of(1, 2, cross_load=True), tmp_path, ranks)
    skipped = [result for result in results if result.sentence == f"not run: {broken} failed"]
    assert [result.strategy for result in skipped] == ["naive", "invariant"]


@pytest.mark.parametrize("code", [130, 143])
@pytest.mark.parametrize("breaks", ["stopped", ""], ids=["meanwhile", "when all was done"])
def test_a_signal_ends_everything(tmp_path: Path, code: int, breaks: str) -> None:
    def start(folder: Path, world_size: int) -> RunEnd:
        return replace(Ranks(lambda cell: breaks)(folder, world_size), code=code)

    with pytest.raises(KeyboardInterrupt):
        run_matrix(plan_of(1), tmp_path, start)


KILLED = {1: "rank 1 was ended by SIGKILL"}
LOST = "RuntimeError: connection closed by peer [127.0.0.1]:"


@pytest.mark.parametrize(
    ("notes", "deaths", "sentence", "ranks"),
    [
        ([], {}, "the ranks ended with code 1", []),
        ([(0, 1.0, LOST, True)], KILLED, "rank 1 was ended by SIGKILL", [1]),
        ([], KILLED, "rank 1 was ended by SIGKILL", [1]),
        (
            [(0, 1.0, LOST, True), (1, 3.0, "B", False), (2, 2.0, "A", False)],
            {},
            "rank 2 raised A",
            [2],
        ),
        (
            [(rank, 3.0 - rank, LOST, True) for rank in range(3)],
            {},
            f"rank 2 raised {LOST}",
            [],
        ),
    ],
)
def test_the_rank_whose_failure_it_was_is_named(
    tmp_path: Path,
    notes: list[tuple[int, float, str, bool]],
    deaths: dict[int, str],
    sentence: str,
    ranks: list[int],
) -> None:
    def fail(folder: Path, world_size: int) -> RunEnd:
        note_errors(folder, *notes)
        return RunEnd(code=1, deaths=deaths)

    results = run_matrix(plan_of(3), tmp_path, fail)
    assert [(result.sentence, result.ranks) for result in results] == [(sentence, ranks)] * 2


@pytest.mark.parametrize(
    "messages",
    [[f"{LOST}1000", f"{LOST}2000"], ["ValueError: x; rank 0 saw a", "ValueError: x; rank 0 b"]],
)
def test_errors_that_differ_only_in_numbers_are_the_same(
    tmp_path: Path, messages: list[str]
) -> None:
    """Addresses, ports and sizes change from start to start, and so does what others saw."""
    said = iter(messages)
    ranks = Ranks(lambda cell: next(said))
    results = run_matrix(plan_of(2, strategies="naive flat ring"), tmp_path, ranks)
    assert results[2].sentence == "not run: the same error came twice"


def test_under_a_launcher_the_first_error_is_the_last_cell() -> None:
    cells = [cell for launch in plan_of(1, 2).launches for cell in launch]
    results = broken_off([result_of(cells[0])], cells, "rank 1 raised boom", [1])
    assert [result.status for result in results] == ["passed", "error", "error", "error"]
    assert [result.name for result in results] == [cell.name for cell in cells]
    assert (results[1].sentence, results[1].ranks) == ("rank 1 raised boom", [1])
    assert results[3].sentence == "not run: the ranks had ended"
    assert broken_off(results, cells, "late", [1]) == results


def test_ranks_that_cannot_begin(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="ended with code 2 at once"):
        run_matrix(plan_of(1), tmp_path, lambda folder, world_size: RunEnd(code=2))


def results_of(*hashes: str) -> list[Result]:
    return [
        result_of(replace(CELL, world_size=size), weights_sha256=sha, bitwise=True)
        for size, sha in enumerate(hashes, 1)
    ]


def test_bitwise_means_one_hash_at_every_world_size(tmp_path: Path) -> None:
    def drift(folder: Path, world_size: int) -> RunEnd:
        ended = Ranks()(folder, world_size)
        if world_size == 3:
            (done,) = folder.glob("done-2.jsonl")
            done.write_text(done.read_text().replace('_sha256": "invariant"', '_sha256": "x"'))
        return ended

    results = run_matrix(plan_of(1, 2, 3, strategies="invariant"), tmp_path, drift)
    assert [result.status for result in results] == ["passed", "passed", "failed"]
    assert results[2].cause == "order only"
    assert "not those of invariant W=1 mlp fp32" in results[2].sentence


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


def test_the_document_and_the_table(tmp_path: Path) -> None:
    results = run_matrix(plan_of(1, 2, cross_load=True), tmp_path, Ranks())
    results[0].status, results[0].sentence, results[0].tried = "failed", "because", ["so: gone"]
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
    assert "tried: so: gone" in text
    assert "4 cells and 8 checkpoints handed on, 1 failed, 3 s" in text


def test_the_readme_table_follows_the_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run_matrix(plan_of(1, 2), tmp_path, Ranks())
    report, readme = tmp_path / "verify.json", tmp_path / "README.md"
    report.write_text(json.dumps(document(VerifySettings(), results, 1.0)))
    readme.write_text(f"before\n{verify_table.BEGIN}\nold\n{verify_table.END}\nafter\n")
    words = [str(report), str(readme)]
    assert verify_table.main([*words, "--check"]) == 1
    assert "is not what" in capsys.readouterr().err
    assert verify_table.main(words) == 0
    assert verify_table.main([*words, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| `invariant` | bitwise |" in text
    readme.write_text("nothing here")
    with pytest.raises(SystemExit, match="has no line"):
        verify_table.main(words)


def test_an_error_before_the_first_cell_is_not_swallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_session() -> None:
        raise RendezvousError("rank 1 did not come")

    monkeypatch.setattr(matrix, "open_session", open_session)
    work = {"number": 0, "settings": asdict(VerifySettings()), "cells": []}
    (tmp_path / matrix.WORK).write_text(json.dumps(work))
    with pytest.raises(RendezvousError, match="did not come"):
        matrix.run_worker(tmp_path)


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (ValueError("Connection closed by peer"), False),
        (RuntimeError("shapes do not match"), False),
        (RuntimeError("connection reset by storage server"), False),
        (LostPeerError("rank 0: rank 1 has ended"), True),
        (DistBackendError("NCCL error: remote process exited"), True),
    ],
)
def test_a_note_says_whether_it_only_tells_of_a_lost_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, echo: bool
) -> None:
    def run_cell(*args: object) -> None:
        raise error

    monkeypatch.setattr(matrix, "run_cell", run_cell)
    with pytest.raises(type(error)):
        matrix.run_cells([CELL], VerifySettings(), World(), tmp_path)
    (note,) = matrix.read_errors(tmp_path, 0)
    assert (note["rank"], note["echo"]) == (0, echo)
    assert note["message"] == f"{type(error).__name__}: {error}"
