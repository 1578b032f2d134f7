"""Waiting for gloo's workers: what counts as asleep."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradsync.runtime import gloo_group


def write_task(tasks: Path, number: int, name: str, state: str, switches: int) -> None:
    task = tasks / str(number)
    task.mkdir(parents=True, exist_ok=True)
    (task / "comm").write_text(f"{name}\n")
    (task / "status").write_text(
        f"Name:\t{name}\nState:\t{state} (x)\nvoluntary_ctxt_switches:\t{switches}\n"
    )


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gloo_group, "_TASKS", tmp_path)
    write_task(tmp_path, 1, "python", "R", 5)  # the main thread is none of its business
    return tmp_path


def test_no_worker_and_sleeping_workers_are_at_rest(tasks: Path) -> None:
    assert gloo_group.wait_until_workers_sleep(1.0)
    write_task(tasks, 2, "pt_gloo_runloop", "S", 7)
    assert gloo_group.wait_until_workers_sleep(1.0)


def test_a_running_worker_is_not_at_rest(tasks: Path) -> None:
    write_task(tasks, 2, "pt_gloo_runloop", "R", 7)
    assert not gloo_group.wait_until_workers_sleep(0.05)


def test_a_worker_that_wakes_in_between_is_not_at_rest(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for Python's lock sleeps, too, but wakes up again and again."""
    count = iter(range(1000))

    def sleep(_: float) -> None:
        write_task(tasks, 2, "pt_gloo_runloop", "S", next(count))

    monkeypatch.setattr(gloo_group.time, "sleep", sleep)
    assert not gloo_group.wait_until_workers_sleep(0.02)
