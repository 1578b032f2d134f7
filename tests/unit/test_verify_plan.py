"""The matrix: its cells, its order of work, its arithmetic; by value."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from gradsync.errors import ConfigError
from gradsync.verify.plan import (
    Cell,
    Job,
    Plan,
    Settings,
    job_from_json,
    launches,
    make_plan,
    sized_settings,
    split_list,
)


def plan_of(**changes: Any) -> Plan:
    asked: dict[str, Any] = {
        "strategies": ["naive", "ddp"],
        "world_sizes": [3, 1, 2],
        "models": ["mlp", "gpt"],
        "dtypes": ["fp32"],
        "settings": Settings(),
    }
    return make_plan(**{**asked, **changes})


def test_every_combination_once() -> None:
    plan = plan_of()
    assert len(plan.cells) == len(set(plan.cells)) == 2 * 3 * 2
    assert [cell.world_size for cell in plan.cells] == [1] * 4 + [2] * 4 + [3] * 4


def test_all_world_sizes_see_the_same_batches() -> None:
    assert plan_of(world_sizes=[1, 8]).settings.num_leaves == 9
    assert plan_of().settings.num_leaves == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ["mpl"]}, "unknown model 'mpl'; perhaps you meant 'mlp'"),
        ({"dtypes": ["fp8"]}, "unknown dtype 'fp8'"),
        ({"world_sizes": [0]}, "at least 1, got 0"),
        ({"strategies": []}, "no strategies given"),
        ({"models": ["target"]}, "unknown model 'target'"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="verify") as raised:
        plan_of(**changes)
    assert message in str(raised.value)


def sizes_of(order: list[list[Job]]) -> list[int]:
    """The one world size of each start."""
    sizes = [{job.cell.world_size for job in jobs} for jobs in order]
    assert all(len(each) == 1 for each in sizes)
    return [size for each in sizes for size in each]


def test_each_world_size_is_started_once_and_the_smallest_again() -> None:
    order = launches(plan_of())
    assert sizes_of(order) == [1, 2, 3, 1]
    assert all(job.source is None for job in order[0])
    assert all(job.source is not None for job in order[-1])


def test_checkpoints_go_to_the_next_world_size_and_to_another_strategy() -> None:
    handed = {
        (job.source.strategy, job.source.world_size, job.cell.strategy, job.cell.world_size)
        for jobs in launches(plan_of())
        for job in jobs
        if job.source is not None
    }
    for before, after in ((1, 2), (2, 3), (3, 1)):
        for source in ("naive", "ddp"):
            for target in ("naive", "ddp"):
                assert (source, before, target, after) in handed


def test_one_world_size_hands_over_within_itself() -> None:
    (jobs,) = launches(plan_of(world_sizes=[2]))
    assert {job.source.world_size for job in jobs if job.source} == {2}
    # A checkpoint is written by a cell before it is asked for.
    places = [job.source is None for job in jobs]
    assert places == sorted(places, reverse=True)


def test_without_cross_load_there_are_cells_only() -> None:
    order = launches(plan_of(cross_load=False))
    assert sizes_of(order) == [1, 2, 3]
    assert all(job.source is None for jobs in order for job in jobs)


def test_a_single_step_leaves_nothing_to_hand_over() -> None:
    order = launches(plan_of(settings=Settings(num_steps=1)))
    assert sizes_of(order) == [1, 2, 3]
    assert all(job.source is None for jobs in order for job in jobs)


def test_jobs_survive_json() -> None:
    for jobs in launches(plan_of()):
        for job in jobs:
            assert job_from_json(json.loads(json.dumps(asdict(job)))) == job


def test_the_last_step_is_short_by_default() -> None:
    settings = Settings(num_steps=4, num_leaves=5, leaf_size=3)
    assert settings.dataset_size == 3 * 15 + 4  # two leaves, the second with one sample
    assert settings.num_epochs == 1


@pytest.mark.parametrize(("leaf_size", "last"), [(1, 1), (2, 2), (3, 2), (8, 2)])
def test_the_users_short_leaf_has_two_samples(leaf_size: int, last: int) -> None:
    """BatchNorm over a single sample has nothing to take statistics of."""
    settings = Settings(target="a:b", leaf_size=leaf_size)
    assert settings.dataset_size == 3 * settings.global_batch_size + leaf_size + last


@pytest.mark.parametrize("num_samples", [1, 7, 15, 46, 60, 200])
def test_there_is_data_for_every_step(num_samples: int) -> None:
    settings = Settings(num_steps=4, num_samples=num_samples)
    assert settings.num_epochs is not None
    assert settings.num_epochs * num_samples > 3 * settings.global_batch_size


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ({}, (4, 5, 3)),
        ({"num_samples": 5_000, "num_steps": 50}, (50, 5, 20)),
        ({"num_samples": 5_000, "num_steps": 50, "num_leaves": 10}, (50, 10, 10)),
        ({"num_samples": 1_001, "num_steps": 50}, (50, 5, 5)),  # the last of a second pass
        ({"num_samples": 61}, (5, 5, 3)),
        ({"num_samples": 61, "leaf_size": 61}, (1, 5, 61)),
        ({"num_samples": 60, "leaf_size": 3, "num_steps": 4}, (4, 5, 3)),
        ({"num_samples": 60, "leaf_size": 3, "num_steps": 9}, (9, 5, 3)),  # several passes
        ({"num_samples": 900, "num_steps": 10, "most_ranks": 8}, (10, 9, 10)),
    ],
)
def test_so_many_samples_are_trained(asked: dict[str, Any], made: tuple[int, int, int]) -> None:
    default: dict[str, Any] = {"num_steps": None, "num_samples": None, "leaf_size": None}
    settings = sized_settings(**{"most_ranks": 4, **default, **asked})
    assert (settings.num_steps, settings.num_leaves, settings.leaf_size) == made
    assert settings.num_steps * settings.global_batch_size >= asked.get("num_samples", 0)


def test_steps_that_cannot_take_so_many_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"5000 samples are 334 steps of 15 .* num_steps is 50"):
        sized_settings(num_steps=50, num_samples=5_000, leaf_size=3, most_ranks=4)


@pytest.mark.parametrize(
    "changes",
    [{"num_steps": 0}, {"num_samples": 0}, {"optimizer": "adam"}, {"batch_norm": "none"}],
)
def test_settings_are_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(Settings(), **changes)


def test_names() -> None:
    cell = Cell(strategy="ring", world_size=3, model="gpt", dtype="bf16")
    assert cell.name == "ring W=3 gpt bf16"
    assert split_list(" a, b,,c ") == ["a", "b", "c"]
