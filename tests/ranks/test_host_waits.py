"""Where a step reads a tensor's value, which on a GPU waits for all that it has to do."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsync as gs
from gradsync.comm.process_group import ProcessGroupCommunicator
from support.thread_ranks import run_thread_ranks

READS = {"item", "tolist", "__float__", "__bool__", "__int__", "__index__", "nonzero", "numpy"}
READS |= {"cpu", "is_nonzero", "equal", "allclose"}
SOURCE = Path(gs.__file__).parent
ON_THE_CPU = {
    "step_metadata.agree_on_metadata",  # the step's message
    "step_metadata.message",  # weights; losses only where they are on a CPU
    "watch.find_straggler",  # seconds, every tenth step
    "tree_exchange._share",  # numbers of leaves
}
"""Tensors that are on the CPU, whatever device the model is on."""
NOT_ON_CUDA = {"step_metadata.is_finite", "replicas.scale_all", "watch.look"}
"""What `on_cuda`, or the tensor's device, keeps from being read on a GPU."""


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Functions of gradsync that read a tensor, on any thread; a mode of torch sees no callback of
    a backward."""
    found: set[str] = set()

    def noting(read: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            frame: Any = sys._getframe(1)
            while frame.f_code.co_name.startswith("<"):  # a comprehension
                frame = frame.f_back
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(SOURCE):  # else: torch's own optimizers read their step
                found.add(f"{path.stem}.{frame.f_code.co_name}")
            return read(*args, **kwargs)

        return noted

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))
    monkeypatch.setattr(torch, "equal", noting(torch.equal))
    return found


@pytest.mark.parametrize("their_loop", [False, True])
@pytest.mark.parametrize("sync", ["naive", "bucketed", "invariant", "zero1", "zero2"])
def test_no_step_waits_for_a_gpu(sync: str, their_loop: bool, places: set[str]) -> None:
    if their_loop and sync.startswith("zero"):
        return  # it has no loop of its own

    def work(rank: int, group: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        options = {} if sync == "naive" else {"collective": "backend"}
        comm = ProcessGroupCommunicator(group)
        handle = gs.replicate(model, comm=comm, strategy=sync, **options)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            loss = model(torch.ones(3, 4)).sum()
            if their_loop:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                handle.backward(loss, weight=3, reduction="sum")
                handle.step(optimizer, clip_norm=1.0)

        for _ in range(3):  # the first ones lay things out
            step()
        meet.wait()
        places.clear()
        meet.wait()
        for _ in range(12):
            step()
        seen.update(places)
        meet.wait()
        handle.close()

    seen: set[str] = set()
    meet = threading.Barrier(2)
    run_thread_ranks(work, 2)
    assert "step_metadata.agree_on_metadata" in seen
    assert seen <= ON_THE_CPU | NOT_ON_CUDA, seen - ON_THE_CPU - NOT_ON_CUDA
