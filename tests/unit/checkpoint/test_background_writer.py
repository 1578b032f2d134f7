"""Checkpoints written by a thread: what is in them, one at a time, and whose failure it is."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradsync.checkpoint.background import BackgroundWriter
from gradsync.checkpoint.pieces import InOrder
from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.checkpoint.tensor_file import ArrivingTensors
from gradsync.core.files import Filesystem
from gradsync.errors import CheckpointError


class Gate(Filesystem):
    """Holds every write back until it is opened; then raises `error`, if there is one."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.error: OSError | None = None

    def write(self, file, data):
        self.reached.set()
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error
        return super().write(file, data)


def snapshot(step: int, **tensors: Tensor) -> Snapshot:
    return Snapshot(step=step, tensors={"model": tensors}, state={"data": {"seen": [step]}})


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


@pytest.fixture
def writer(gate: Gate, tmp_path: Path) -> Iterator[BackgroundWriter]:
    writer = BackgroundWriter(CheckpointStore(tmp_path, fs=gate))
    yield writer
    gate.open.set()
    with suppress(CheckpointError):
        writer.wait()


def loaded(folder: Path, step: int) -> Snapshot:
    return CheckpointStore(folder).load(folder / f"step-{step:08d}")


def test_what_changes_during_the_write_is_not_in_it(
    writer: BackgroundWriter, gate: Gate, tmp_path: Path
) -> None:
    weight = torch.arange(6.0)
    saved = snapshot(1, weight=weight, tied=weight, view=weight[2:4])
    writer.save(saved)
    assert gate.reached.wait(20)  # the call has returned, nothing is written
    assert not list(tmp_path.glob("step-*"))
    weight.zero_()
    saved.state["data"]["seen"].append(2)
    gate.open.set()
    writer.wait()
    found = loaded(tmp_path, 1)
    assert found.state["data"] == {"seen": [1]}
    assert torch.equal(found.tensors["model"]["weight"], torch.arange(6.0))
    assert torch.equal(found.tensors["model"]["view"], torch.tensor([2.0, 3.0]))
    assert found.tensors["model"]["tied"] is found.tensors["model"]["weight"]


def test_the_next_save_waits_for_the_last_and_uses_its_memory(
    writer: BackgroundWriter, gate: Gate, tmp_path: Path
) -> None:
    writer.save(snapshot(1, weight=torch.zeros(3)))
    (copy,) = writer._copies.values()
    second = threading.Thread(target=writer.save, args=(snapshot(2, weight=torch.ones(3)),))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    assert torch.equal(copy, torch.zeros(3))
    gate.open.set()
    second.join(20)
    writer.wait()
    (again,) = writer._copies.values()
    assert again is copy
    for step, value in ((1, 0.0), (2, 1.0)):
        assert torch.equal(
            loaded(tmp_path, step).tensors["model"]["weight"], torch.full((3,), value)
        )


@pytest.mark.parametrize("seen_by", ["check", "wait", "save"])
def test_a_full_disk_is_an_error_of_the_next_call(
    writer: BackgroundWriter, gate: Gate, seen_by: str
) -> None:
    gate.error = OSError(errno.ENOSPC, "No space left on device")
    writer.save(snapshot(3, weight=torch.ones(2)))
    writer.check()  # not known yet
    gate.open.set()
    writer._thread.join()
    calls = {"save": lambda: writer.save(snapshot(4, weight=torch.ones(2)))}
    with pytest.raises(CheckpointError, match=r"step-00000003: No space left on device"):
        calls.get(seen_by, getattr(writer, seen_by))()
    writer.check()  # said once


def test_files_that_arrive_during_the_write_are_written_at_once(
    writer: BackgroundWriter, gate: Gate, tmp_path: Path
) -> None:
    gate.open.set()
    layout = {"weight": torch.empty(2, device="meta")}
    files = InOrder(["part-0"], lambda _: ArrivingTensors(layout, lambda _: torch.ones(2)))
    writer.save(Snapshot(step=5, tensors=files, state={}))
    assert (tmp_path / "step-00000005" / "part-0.safetensors").exists()


def test_a_sparse_tensor_is_refused_by_name(writer: BackgroundWriter, gate: Gate) -> None:
    gate.open.set()
    writer.save(snapshot(6, odd=torch.eye(2).to_sparse()))
    with pytest.raises(CheckpointError, match="'odd'"):
        writer.wait()
