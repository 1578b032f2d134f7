"""Every strategy of the registry through verify's own matrix: W = 2, then on at W = 4."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradsync.commands.verify.matrix import compare_world_sizes, run_cells
from gradsync.commands.verify.result import Result
from gradsync.commands.verify.settings import Cell, VerifySettings, chosen_strategy, promise_of
from gradsync.sync.registry import STRATEGIES
from gradsync.world import World
from support.rank_session import open_session

NAMES = [*STRATEGIES]
BITWISE = [name for name in NAMES if chosen_strategy(name)[0].same_on_any_ranks]
SETTINGS = VerifySettings()
DOUBLE = Cell(strategy="invariant", world_size=2, model="mlp", dtype="fp64")


def cell_of(name: str, world_size: int) -> Cell:
    return Cell(strategy=name, world_size=world_size, model="mlp", dtype="fp32")


def handed_on(name: str) -> Cell:
    """To its neighbour in the registry; a bitwise one to itself."""
    after = name if name in BITWISE else NAMES[(NAMES.index(name) + 1) % len(NAMES)]
    return replace(cell_of(after, 4), loaded_from=cell_of(name, 2).name)


def _work(
    rank: int, world_size: int, store_path: str, folder: str, cells: list[Cell]
) -> list[Result]:
    with open_session(rank, world_size, store_path) as world:
        return list(run_cells(cells, SETTINGS, world, Path(folder)))


@pytest.fixture(scope="module")
def results(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Result]:
    folder = tmp_path_factory.mktemp("verify")
    starts = {
        2: [*(cell_of(name, 2) for name in NAMES), DOUBLE],
        4: [handed_on(name) for name in NAMES],
    }
    found = {}
    for world_size, cells in starts.items():
        answers = pool.run(_work, world_size, str(folder), cells, timeout_s=100.0)[0]
        found.update(zip(cells, answers, strict=True))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_keeps_its_promise(results: dict[Cell, Result], name: str) -> None:
    result = results[cell_of(name, 2)]
    assert result.passed, result.sentence
    assert result.bitwise or name not in BITWISE
    bounded = promise_of(name).bounded
    assert 0.01 < result.part_of_bound <= 1 if bounded else result.part_of_bound == 0


def test_losses_in_double_precision_have_one_ranks_bits(results: dict[Cell, Result]) -> None:
    result = results[DOUBLE]
    assert result.passed, result.sentence
    assert result.bitwise


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_goes_on_at_another_world_size(results: dict[Cell, Result], name: str) -> None:
    result = results[handed_on(name)]
    assert result.passed, result.sentence
    assert len(result.losses) == 2


@pytest.mark.parametrize("name", BITWISE)
def test_bitwise_means_one_hash(results: dict[Cell, Result], name: str, tmp_path: Path) -> None:
    (alone,) = run_cells([cell_of(name, 1)], SETTINGS, World(), tmp_path)
    compared = [alone, results[cell_of(name, 2)], results[handed_on(name)]]
    compare_world_sizes(compared)
    assert all(result.passed for result in compared)
    assert len({result.weights_sha256 for result in compared}) == 1
