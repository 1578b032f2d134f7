"""Under torch.compile: hooks fire, sums are right, and a user's own loop works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator, communicator
from gradsync.sync.replicate import replicate
from support.rank_session import open_session
from support.recording import RecordingCommunicator
from support.sync_cases import SmallNet


def inputs(rank: int, turn: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * turn + rank))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _train(
    inner: Communicator, name: str, backend: str | None, *, before: bool, own: bool
) -> tuple[dict[str, Tensor], int, int]:
    """Four steps of three leaves (or micro-batches): weights, operations, those by backward."""
    torch.manual_seed(0)
    model = SmallNet(branch=True)
    comm = RecordingCommunicator(inner)
    if backend is not None and before:
        model.compile(backend=backend)
    sync = replicate(model, strategy=name, comm=comm)
    if backend is not None and not before:
        model.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sent = 0
    for step in range(4):
        for micro_step in range(3):
            last = micro_step == 2
            x = inputs(comm.rank, 3 * step + micro_step)
            count = comm.operations.total()
            if not own:
                with sync.micro_step(last=last):
                    sync.backward(sync.forward(x).square().sum(), weight=len(x), reduction="sum")
            elif last:
                (model(x).square().mean() / 3).backward()
            else:
                with sync.no_sync():
                    (model(x).square().mean() / 3).backward()
            if not last:
                assert comm.operations.total() == count
            sent += comm.operations.total() - count
        if own:
            optimizer.step()
            optimizer.zero_grad()
        else:
            sync.step(optimizer)
            sync.replica.wait()
    sync.close()
    return _weights(model), comm.operations.total(), sent


def _compare(comm: Communicator, name: str, backend: str, own: bool) -> list[Any]:
    found = [_train(comm, name, None, before=False, own=own)]
    for before in (True, False):
        torch.compiler.reset()
        found.append(_train(comm, name, backend, before=before, own=own))
    torch.compiler.reset()
    return found


def _compare_on_rank(
    rank: int, world_size: int, store_path: str, name: str, backend: str, own: bool
) -> list[Any]:
    with open_session(rank, world_size, store_path) as world:
        return _compare(communicator(world), name, backend, own)


def _assert_alike(found: list[Any]) -> None:
    (expected, operations, _), *others = found
    for weights, as_many, _ in others:
        assert as_many == operations
        for key in expected:
            torch.testing.assert_close(weights[key], expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "own"),
    [("invariant", False), ("invariant", True), ("bucketed", True), ("naive", True)],
)
def test_same_as_uncompiled(pool: Any, name: str, own: bool) -> None:
    by_rank = pool.run(_compare_on_rank, 2, name, "eager", own)
    _assert_alike(by_rank[0])
    for (first, _, sent), (second, _, _) in zip(*by_rank, strict=True):
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert sent > 0 or not own, "an own loop sends in backward"


@pytest.mark.parametrize("own", [False, True], ids=["sync.step", "own loop"])
def test_with_a_compiled_backward(own: bool) -> None:
    """aot_eager traces backward, too; on one rank, for it starts things that a pool cannot undo."""
    _assert_alike(_compare(SingleCommunicator(), "invariant", "aot_eager", own))
