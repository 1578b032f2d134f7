"""Verify can fail: every planted mistake is caught, with its place and its likely cause."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator
from gradsync.commands.verify.matrix import run_cell
from gradsync.commands.verify.record import State
from gradsync.commands.verify.run import read, save
from gradsync.commands.verify.settings import Cell, VerifySettings, promise_of
from support import verify_faults
from support.rank_session import open_session

SETTINGS = VerifySettings(num_steps=3)


def _verify(
    rank: int, world_size: int, store_path: str, faults: list[tuple[str, str, str]]
) -> list[dict[str, Any]]:
    """One session for all: opening one costs more than a cell."""
    results = []
    with open_session(rank, world_size, store_path) as world:
        comm = communicator(world)
        for fault, strategy, model in faults:
            cell = Cell(strategy=strategy, world_size=world_size, model=model, dtype="fp32")
            saved = None
            if fault == "momentum_lost":
                saved = _checkpoint(cell, comm, Path(store_path + "-saved"))
            prepare = getattr(verify_faults, fault, None)
            promise = promise_of(strategy)
            if fault == "promised_bitwise":
                promise = replace(promise, kind="bitwise", same_bits=True)
            with (
                mock.patch(
                    "gradsync.commands.verify.matrix.promise_of", lambda _, promise=promise: promise
                ),
                # Verify must find a fault also where the step itself would refuse it.
                mock.patch("gradsync.sync.step._refuse_unlike"),
            ):
                result, _ = run_cell(cell, SETTINGS, comm, saved, prepare=prepare)
                results.append(asdict(result))
    return results


def _checkpoint(cell: Cell, comm: Communicator, folder: Path) -> State:
    """Checkpoint of a right run, after its first step."""
    _, trace = run_cell(cell, SETTINGS, comm)
    if comm.rank == 0:
        save(folder, cell.strategy, trace, 1)
    return read(folder, comm)


# Fault, strategy, model, number of ranks; the cause, and words of the finding.
UNSYNCHRONISED = "unsynchronised parameter"
FAULTS = [
    ("one_parameter_not_reduced", "naive", "mlp", 2, UNSYNCHRONISED, "'head.weight', rank 1: the"),
    ("one_parameter_not_reduced", "naive", "mlp", 3, UNSYNCHRONISED, "differs between ranks"),
    ("divided_twice", "naive", "mlp", 2, "loss scaling", "0.5 times it on rank 0"),
    ("divided_twice", "bucketed", "gpt", 3, "loss scaling", "0.333333 times"),
    ("divided_by_the_local_count", "naive", "mlp", 2, "loss scaling", "on rank 0"),
    ("mean_of_means", "naive", "mlp", 2, "unknown", "times the bound"),
    ("micro_batch_dropped", "naive", "mlp", 2, "data", "samples are missing"),
    ("sample_duplicated", "naive", "mlp", 2, "data", "too many"),
    ("lost_in_backward", "naive", "mlp", 2, "unknown", "a micro-batch left out of the sum"),
    ("stale_bucket", "naive", "mlp", 2, "unknown", "step 1, 'head.weight': the gradient is not"),
    ("rank_seeded_dropout", "naive", "mlp", 2, "dropout/RNG", "drew from another state"),
    ("hidden_dropout", "naive", "mlp", 2, "unknown", "random numbers drawn by rank"),
    ("weight_flipped", "naive", "mlp", 2, UNSYNCHRONISED, "but the optimizer"),
    ("start_not_shared", "naive", "mlp", 2, "initial weights", "'head.bias', rank 1"),
    ("hook_averages_the_parameter", "naive", "conv", 2, UNSYNCHRONISED, "between ranks"),
    ("no_sync_after_forward", "ddp", "gpt", 2, UNSYNCHRONISED, "enter no_sync before"),
    ("statistics_of_one_rank", "naive", "conv", 2, "BatchNorm", "norm.running_mean', rank 1"),
    ("no_meeting", "local_sgd", "mlp", 2, UNSYNCHRONISED, "weights differ"),
    ("meeting_at_rank_0", "local_sgd", "mlp", 3, UNSYNCHRONISED, "meeting"),
    ("learning_rate_of_all", "naive", "mlp", 2, "optimizer step", "the optimizer's step"),
    ("loss_of_one_rank", "local_sgd", "mlp", 3, "loss scaling", "the mean loss"),
    ("gradients_negated", "powersgd", "gpt", 2, "unknown", "the loss does not fall"),
    ("promised_bitwise", "naive", "gpt", 2, "order only", "differs by"),
    ("loss_of_one_rank", "naive", "mlp", 2, "loss scaling", "the mean loss"),
    ("statistics_of_all", "naive", "conv", 2, "BatchNorm", "Leave buffers to gs.replicate"),
    ("momentum_lost", "naive", "mlp", 2, "initial weights", "state is not the checkpoint's"),
    ("other_learning_rate", "naive", "mlp", 2, UNSYNCHRONISED, "weights differ"),
]


RIGHT = [("", "naive", "mlp"), ("", "naive", "conv"), ("", "naive", "gpt")]


@pytest.fixture(scope="module")
def results(pool: Any) -> dict[tuple[str, int], dict[str, Any]]:
    """Rank 0's result by (fault, world size); by (model, 2) where nothing was planted."""
    found = {}
    for world_size in (2, 3):
        jobs = [fault[:3] for fault in FAULTS if fault[3] == world_size]
        jobs += RIGHT if world_size == 2 else []
        answers = pool.run(_verify, world_size, jobs)[0]
        for (fault, _, model), answer in zip(jobs, answers, strict=True):
            found[fault or model, world_size] = answer
    return found


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault[0]}-{fault[3]}" for fault in FAULTS])
def test_a_planted_fault_is_named(
    results: dict[tuple[str, int], dict[str, Any]], fault: tuple[str, str, str, int, str, str]
) -> None:
    name, _, _, world_size, cause, words = fault
    result = results[name, world_size]
    assert result["status"] == "failed"
    assert result["cause"].startswith(cause), result["sentence"]
    assert words in result["sentence"]


@pytest.mark.parametrize("model", ["mlp", "conv", "gpt"])
def test_without_a_fault_nothing_is_found(
    results: dict[tuple[str, int], dict[str, Any]], model: str
) -> None:
    result = results[model, 2]
    assert (result["status"], result["sentence"]) == ("passed", "")
