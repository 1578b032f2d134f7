"""A loop written for torch's DDP, run with DDP and with us on the same data: the same numbers.

The process group is made by the program itself, as in a script that knows nothing of gradsync.
"""

from __future__ import annotations

from collections.abc import Iterator
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

OWN_LOOP = ("invariant", "bucketed", "naive")
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


LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "keeps memory": {"set_to_none": False},
    "clips": {"clip_norm": 0.1},
    "accumulates": {"accumulates": 2},
    "never clears": {"clears": False},
    "two losses": {"two_losses": True},
}


def loop(
    rank: int,
    call: Any,
    handle: Any,
    optimizer: torch.optim.Optimizer,
    *,
    clears: bool = True,
    set_to_none: bool = True,
    clip_norm: float | None = None,
    accumulates: int = 0,
    two_losses: bool = False,
) -> None:
    """`call` is the model, or DDP around it; `handle` ours or DDP's: it has `no_sync`."""

    def backward(turn: int) -> None:
        output = call(inputs(rank, turn))
        loss = output.square().mean() + (output.abs().mean() if two_losses else 0.0)
        (loss / (accumulates + 1)).backward()

    for turn in range(TURNS):
        if clears:
            optimizer.zero_grad(set_to_none=set_to_none)
        for more in range(accumulates):
            with handle.no_sync():
                backward(50 + 2 * turn + more)
        backward(turn)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)
        if clears or turn % 2:
            optimizer.step()


def _run(
    rank: int, world_size: int, store_path: str, name: str
) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """For each loop: weights with DDP, weights with us."""
    found = {}
    with group_of_somebody_else(rank, world_size, store_path):
        for loop_name, options in LOOPS.items():
            pair = []
            for use_ddp in (True, False):
                torch.manual_seed(rank)
                model = SmallNet(branch=True)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                if use_ddp:
                    handle: Any = DistributedDataParallel(model)
                    loop(rank, handle, handle, optimizer, **options)
                else:
                    handle = gs.replicate(model, strategy=name)
                    loop(rank, model, handle, optimizer, **options)
                    handle.close()
                pair.append({k: v.detach().clone() for k, v in model.named_parameters()})
            found[loop_name] = tuple(pair)
    return found


@pytest.mark.parametrize("name", OWN_LOOP)
def test_equals_ddp(pool: Any, name: str) -> None:
    first, *others = pool.run(_run, 3, name)
    for loop_name, (ddp, ours) in first.items():
        for key, expected in ddp.items():
            torch.testing.assert_close(
                ours[key], expected, rtol=1e-4, atol=1e-5, msg=loop_name + key
            )
        for other in others:
            assert all(torch.equal(other[loop_name][1][key], ours[key]) for key in ours)


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


def test_without_any_group_one_rank() -> None:
    model = nn.Linear(3, 1)
    handle = gs.replicate(model)
    model(torch.ones(1, 3)).sum().backward()
    handle.close()
    assert model.weight.grad.flatten().tolist() == [1.0] * 3
