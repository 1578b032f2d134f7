"""A loop written for torch's DDP, run with DDP and with us on the same data: the same numbers.

The process group is made by the program itself, as in a script that knows nothing of gradsync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from support.sync_cases import SmallNet

OWN_LOOP = ("invariant", "bucketed", "naive", "overlap", "ring")
TURNS = 5


@contextmanager
def group_of_somebody_else(rank: int, world_size: int, store_path: str) -> Iterator[None]:
    # A process's first optimizer imports torch's compiler, which would keep a group alive that is
    # there already.
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def inputs(rank: int, turn: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * turn + rank))


# -- loops; `call` is the model or DDP around it ---------------------------------------------------

Loop = Callable[[int, nn.Module, Any, Any, torch.optim.Optimizer], None]
"""(rank, model, call, handle or DDP: it has `no_sync`, optimizer)."""


def plain(rank: int, model: nn.Module, call: Any, handle: Any, optimizer: Any) -> None:
    for turn in range(TURNS):
        optimizer.zero_grad()
        call(inputs(rank, turn)).square().mean().backward()
        optimizer.step()


def keeps_memory(rank: int, model: nn.Module, call: Any, handle: Any, optimizer: Any) -> None:
    for turn in range(TURNS):
        optimizer.zero_grad(set_to_none=False)
        call(inputs(rank, turn)).square().mean().backward()
        optimizer.step()


def clips(rank: int, model: nn.Module, call: Any, handle: Any, optimizer: Any) -> None:
    for turn in range(TURNS):
        optimizer.zero_grad()
        call(inputs(rank, turn)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def accumulates(rank: int, model: nn.Module, call: Any, handle: Any, optimizer: Any) -> None:
    for step in range(TURNS):
        optimizer.zero_grad()
        for turn in (2 * step, 2 * step + 1):
            with handle.no_sync():
                (call(inputs(rank, turn)).square().mean() / 3).backward()
        (call(inputs(rank, 50 + step)).square().mean() / 3).backward()
        optimizer.step()


def never_clears(rank: int, model: nn.Module, call: Any, handle: Any, optimizer: Any) -> None:
    for turn in range(TURNS):
        call(inputs(rank, turn)).square().mean().backward()
        if turn % 2:
            optimizer.step()


def two_losses(rank: int, model: nn.Module, call: Any, handle: Any, optimizer: Any) -> None:
    """One forward, one backward, over a sum of several uses of the model's output."""
    for turn in range(TURNS):
        optimizer.zero_grad()
        output = call(inputs(rank, turn))
        (output.square().mean() + output.abs().mean()).backward()
        optimizer.step()


LOOPS = (plain, keeps_memory, clips, accumulates, never_clears, two_losses)


def _run(
    rank: int, world_size: int, store_path: str, name: str
) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """For each loop: weights with DDP, weights with us."""
    found = {}
    with group_of_somebody_else(rank, world_size, store_path):
        for loop in LOOPS:
            pair = []
            for use_ddp in (True, False):
                torch.manual_seed(rank)
                model = SmallNet(branch=True)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                if use_ddp:
                    handle: Any = DistributedDataParallel(model)
                    loop(rank, model, handle, handle, optimizer)
                else:
                    handle = gs.replicate(model, sync=name)
                    loop(rank, model, model, handle, optimizer)
                    handle.close()
                pair.append({k: v.detach().clone() for k, v in model.named_parameters()})
            found[loop.__name__] = tuple(pair)
    return found


@pytest.mark.parametrize("name", OWN_LOOP)
def test_equals_ddp(pool: Any, name: str) -> None:
    first, *others = pool.run(_run, 3, name)
    for loop, (ddp, ours) in first.items():
        for key, expected in ddp.items():
            torch.testing.assert_close(ours[key], expected, rtol=1e-4, atol=1e-5, msg=loop + key)
        for other in others:
            assert all(torch.equal(other[loop][1][key], ours[key]) for key in ours), loop


def _world(rank: int, world_size: int, store_path: str) -> tuple[int, int, list[float]]:
    with group_of_somebody_else(rank, world_size, store_path):
        world = gs.World.from_process_group()
        torch.manual_seed(rank)
        model = nn.Linear(3, 1)
        gs.replicate(model, world)  # the result is not kept
        model(torch.full((1, 3), float(rank))).sum().backward()
        found = model.weight.grad.flatten().tolist()
        model._gradsync.close()
        return world.rank, world.world_size, found


def test_on_a_group_of_somebody_else(pool: Any) -> None:
    for rank, (told_rank, world_size, gradient) in enumerate(pool.run(_world, 3)):
        assert (told_rank, world_size) == (rank, 3)
        assert gradient == pytest.approx([1.0] * 3)


def _without_group(rank: int, world_size: int, store_path: str) -> list[float]:
    model = nn.Linear(3, 1)
    handle = gs.replicate(model)
    model(torch.ones(1, 3)).sum().backward()
    handle.close()
    return model.weight.grad.flatten().tolist()


def test_without_any_group_one_rank(pool: Any) -> None:
    assert pool.run(_without_group, 1) == [[1.0] * 3]
