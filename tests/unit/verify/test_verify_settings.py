"""The matrix: its cells, its order of work, its arithmetic; by value."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from gradsync.commands.verify.settings import Cell, VerifyPlan, VerifySettings, make_plan


def plan_of(**changes: Any) -> VerifyPlan:
    asked: dict[str, Any] = {
        "strategies": ["naive", "ddp"],
        "world_sizes": [3, 1, 2],
        "models": ["mlp", "gpt"],
        "dtypes": ["fp32"],
    }
    return make_plan(**{**asked, **changes})


def test_every_combination_once_and_checkpoints_go_round() -> None:
    """To the next world size, to the same strategy and another; the last one's to the smallest."""
    plan = plan_of()
    own = [[cell for cell in launch if not cell.loaded_from] for launch in plan.launches]
    assert [{cell.world_size for cell in launch} for launch in plan.launches] == [
        {1},
        {2},
        {3},
        {1},
    ]
    assert [len(set(cells)) for cells in own] == [4, 4, 4, 0]
    handed = [cell for launch in plan.launches for cell in launch if cell.loaded_from]
    assert {cell.name for cell in handed} == {
        f"{after} W={size} mlp fp32 from {before} W={source} mlp fp32"
        for before in ("naive", "ddp")
        for after in ("naive", "ddp")
        for source, size in ((1, 2), (2, 3), (3, 1))
    }
    assert len(handed) == 3 * 2 * 2
    for cell in (cell for launch in plan.launches for cell in launch):
        assert Cell(**json.loads(json.dumps(asdict(cell)))) == cell


def test_one_world_size_hands_over_within_itself() -> None:
    (cells,) = plan_of(world_sizes=[2]).launches
    assert all("W=2" in cell.loaded_from for cell in cells if cell.loaded_from)
    # A checkpoint is written by a cell before it is asked for.
    places = [not cell.loaded_from for cell in cells]
    assert True in places
    assert False in places
    assert places == sorted(places, reverse=True)


def test_nothing_is_handed_over() -> None:
    """A single step leaves no checkpoint."""
    launches = plan_of(num_steps=1).launches
    assert [{cell.world_size for cell in launch} for launch in launches] == [{1}, {2}, {3}]
    assert not any(cell.loaded_from for launch in launches for cell in launch)


def test_the_last_step_is_short_by_default() -> None:
    settings = VerifySettings(num_steps=4, num_micro_batches=5, micro_batch_size=3)
    assert settings.dataset_size == 3 * 15 + 4  # two, the second with one sample
    assert settings.num_epochs == 1


@pytest.mark.parametrize(("size", "last"), [(1, 1), (2, 2), (3, 2), (8, 2)])
def test_the_users_short_micro_batch_has_two_samples(size: int, last: int) -> None:
    """BatchNorm over a single sample has nothing to take statistics of."""
    settings = VerifySettings(target="a:b", micro_batch_size=size)
    assert settings.dataset_size == 3 * settings.global_batch_size + size + last


@pytest.mark.parametrize("num_samples", [1, 7, 15, 46, 60, 200])
def test_there_is_data_for_every_step(num_samples: int) -> None:
    settings = VerifySettings(num_steps=4, num_samples=num_samples)
    assert settings.num_epochs is not None
    assert settings.num_epochs * num_samples > 3 * settings.global_batch_size


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ({}, (4, 5, 3)),
        ({"world_sizes": [1, 8]}, (4, 9, 3)),  # all world sizes see the same batches
        ({"num_samples": 5_000, "num_steps": 50}, (50, 5, 20)),
        ({"num_samples": 1_001, "num_steps": 50}, (50, 5, 5)),  # the last of a second pass
        ({"num_samples": 61}, (5, 5, 3)),
        ({"num_samples": 900, "num_steps": 10, "world_sizes": [8]}, (10, 9, 10)),
    ],
)
def test_so_many_samples_are_trained(asked: dict[str, Any], made: tuple[int, int, int]) -> None:
    settings = plan_of(**asked).settings
    assert (settings.num_steps, settings.num_micro_batches, settings.micro_batch_size) == made
    assert settings.num_steps * settings.global_batch_size >= asked.get("num_samples", 0)
