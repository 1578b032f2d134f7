"""Programs written for torch.distributed, on backend `shm`, against the same on gloo."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import io
import os
import re
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before any group: see runtime/session.py
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
import gradsync.backends
from gradsync.backends.group import SharedMemoryGroup
from gradsync.errors import LostPeerError
from gradsync.world import World
from support.rank_session import open_session

EXAMPLES = Path(__file__).parents[2] / "examples"
WIDTH = 40
STRATEGIES = ("invariant", "bucketed", "ring", "zero1", "zero2", "fsdp", "ddp")


class Net(nn.Module):
    """Equal on all ranks; the last layer is used or not."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for parameter in self.parameters():
            parameter.data.uniform_(-0.2, 0.2, generator=generator)

    def forward(self, x_BC: Tensor, *, whole: bool = True) -> Tensor:
        for layer in list(self.layers)[: None if whole else -1]:
            x_BC = torch.tanh(layer(x_BC))
        return x_BC


@contextmanager
def shm(rank: int, world_size: int, store_path: str) -> Iterator[tuple[Any, Any]]:
    """(the default group by `shm`, one by gloo)."""
    dist.init_process_group(
        "shm",
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=40),
    )
    try:
        yield dist.group.WORLD, dist.new_group(backend="gloo")
    finally:
        dist.destroy_process_group()


def _losses(rank: int, model: Callable[..., Tensor], steps: int = 3) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield model(torch.randn(5, WIDTH, generator=generator)).square().mean()


def _ddp(
    group: Any,
    *,
    hook: Callable[[DistributedDataParallel], object] | None = None,
    some: bool = False,
    accumulate: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Gradients of three steps, in several buckets."""
    rank = dist.get_rank(group)
    ddp = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.01, **options)
    if hook is not None:
        hook(ddp)
    found = []
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        for synchronise in (False, True) if accumulate else (True,):
            inputs = torch.randn(5, WIDTH, generator=generator)
            with nullcontext() if synchronise else ddp.no_sync():
                ddp(inputs, whole=not some or (rank + step) % 2 == 0).square().mean().backward()
        found += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        ddp.zero_grad()
    return found


def _bf16(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no postponed annotations
    """Torch's; by its own name DDP refuses it without NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def _of_torch(hook: Any) -> Callable[[DistributedDataParallel], object]:
    return lambda ddp: ddp.register_comm_hook(ddp.process_group, hook)


DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True, "some": True},
    "no_sync": {"accumulate": True},
    "torch's fp16 hook": {"hook": _of_torch(default_hooks.fp16_compress_hook)},
    "torch's bf16 hook": {"hook": _of_torch(_bf16)},
    "our bf16 hook": {"hook": lambda ddp: gs.comm_hook("bf16").register(ddp)},
    "our ring": {"hook": lambda ddp: gs.comm_hook("ring").register(ddp)},
}


def _join(group: Any) -> list[Tensor]:
    """Ranks with other numbers of batches."""
    ddp = DistributedDataParallel(Net(), process_group=group)
    rank = dist.get_rank(group)
    with ddp.join():
        for loss in _losses(rank, ddp, steps=2 + rank):
            loss.backward()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def _zero(group: Any) -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(Net(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, process_group=group
    )
    for loss in _losses(dist.get_rank(group), ddp):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(0)
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def _fsdp(group: Any) -> list[Tensor]:
    model, mesh = Net(), DeviceMesh.from_group(group, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for loss in _losses(dist.get_rank(group), model):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
    mesh._pg_registry.clear()  # torch keeps meshes in caches for ever, and so their groups
    return weights


def _training(rank: int, world_size: int, store_path: str) -> dict[str, Any]:
    # Before the group, for it takes the default one as a default argument; and it warns.
    importlib.import_module("torch.distributed.optim")
    programs: dict[str, Callable[[Any], list[Tensor]]] = {
        **{name: lambda group, o=options: _ddp(group, **o) for name, options in DDP.items()},
        "join": _join,
        "ZeroRedundancyOptimizer": _zero,
        "FSDP2": _fsdp,
    }
    found: dict[str, Any] = {}
    with shm(rank, world_size, store_path) as (mine, gloo):
        assert type(mine) is SharedMemoryGroup
        assert dist.get_backend() == "shm"
        for name, program in programs.items():
            found[name] = program(mine), program(gloo)
        # Under gloo this hook stops for ever: both of its threads wait inside of `then`.
        state = PowerSGDState(None, start_powerSGD_iter=2)
        hooked = _ddp(mine, hook=lambda ddp: ddp.register_comm_hook(state, powerSGD_hook))
        found["PowerSGD"] = hooked, None
    gc.collect()
    return found


def test_training_equals_gloos(pool: Any) -> None:
    """Two terms have one sum: bit for bit. PowerSGD stops on gloo: there, ranks equal ranks."""
    by_rank = pool.run(_training, 2)
    for name, (first, _) in by_rank[0].items():
        for found in by_rank:
            got, expected = found[name]
            assert len(got) > 0
            for mine, model in zip(got, first if expected is None else expected, strict=True):
                assert torch.equal(mine, model), name


def _around(rank: int, world_size: int, store_path: str) -> dict[str, Any]:
    """Other uses in programs: groups of some ranks, objects, messages, a second default group."""
    before = len(os.listdir("/proc/self/fd"))
    found: dict[str, Any] = {}
    for life in range(2):
        with shm(rank, world_size, f"{store_path}{life}"):
            pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 1], [2])[life:]]
            sums = []
            for group in pairs:
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    total = torch.tensor([10**rank])
                    dist.all_reduce(total, group=group)
                    sums.append(int(total))
            dist.destroy_process_group(pairs[0])
            objects: list[Any] = [{"from": rank}]
            dist.broadcast_object_list(objects, src=1)
            gathered: list[Any] = [None] * world_size
            dist.all_gather_object(gathered, rank)
            with dist._coalescing_manager(group=dist.group.WORLD):
                several = [torch.ones(3), torch.ones(2)]
                for tensor in several:
                    dist.all_reduce(tensor)
            swapped = torch.zeros(world_size)
            # Not on threads: gloo's can hold Python's lock while it waits for the others.
            dist.all_to_all_single(swapped, torch.full((world_size,), float(rank)))
            work = dist.all_reduce(torch.ones(2), async_op=True)
            dist.barrier()
            work.wait()
            only_gloos = "only implemented for GLOO"  # before torch 2.15
            refused = only_gloos in inspect.getsource(dist.monitored_barrier)
            with pytest.raises(ValueError, match=only_gloos) if refused else nullcontext():
                dist.monitored_barrier()
            found[f"sums {life}"] = sums
            found |= {
                "objects": (objects, gathered),
                "coalesced": float(several[1][0]),
                "swapped": swapped.tolist(),
                "world": World.from_process_group().one_host,
            }
    del group, pairs, work
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert "memfd:gradsync" not in _maps()
    return found


def _maps() -> str:
    with open("/proc/self/maps") as maps:
        return maps.read()


def test_groups_objects_and_nothing_left(pool: Any) -> None:
    found = pool.run(_around, 3)
    assert [rank["sums 0"] for rank in found] == [[11], [11, 110], [110, 100]]
    assert [rank["sums 1"] for rank in found] == [[], [110], [110, 100]]
    for rank in found:
        assert rank["objects"] == ([{"from": 1}], [0, 1, 2])
        assert rank["coalesced"] == 3.0
        assert rank["swapped"] == [0.0, 1.0, 2.0]
        assert rank["world"] is True


def _one_leaves(rank: int, world_size: int, store_path: str) -> str:
    """Rank 1 goes in the middle of a run: rank 0's backward says so."""
    message = ""
    with shm(rank, world_size, store_path):
        ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
        for step, loss in enumerate(_losses(rank, ddp)):
            if rank == 1 and step == 1:
                break
            try:
                loss.backward()
            except LostPeerError as error:
                message = str(error)
                break
    del ddp, loss
    gc.collect()
    return message


def test_a_rank_that_left_is_named_in_backward(pool: Any) -> None:
    message, _ = pool.run(_one_leaves, 2)
    assert message.startswith("rank(s) 1 left while this rank waits for them in all_reduce")


def _replicated(
    rank: int, world_size: int, store_path: str, backend: str
) -> tuple[dict[str, list[Tensor]], str]:
    """`gs.replicate` over a group of this backend, in a session of ours."""
    found = {}
    with open_session(rank, world_size, store_path, backend=backend) as world:
        for sync in STRATEGIES:
            model = Net()
            handle = gs.replicate(model, world, sync=sync)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(2):
                with handle.micro_step(last=True):
                    output = handle.forward(torch.randn(5, WIDTH, generator=generator))
                    handle.backward(output.square().sum(), weight=5)
                handle.step(optimizer)
            full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
            found[sync] = [tensor.detach().clone() for tensor in full]
            handle.close()
        return found, dist.group.WORLD.name()


def test_replicate_over_it(pool: Any) -> None:
    on_shm, on_gloo = (pool.run(_replicated, 2, backend) for backend in ("shm", "gloo"))
    for (mine, name), (gloos, _) in zip(on_shm, on_gloo, strict=True):
        assert name == "shm"
        for sync in STRATEGIES:
            for a, b in zip(mine[sync], gloos[sync], strict=True):
                assert torch.equal(a, b), sync


def _example(rank: int, world_size: int, store_path: str) -> str:
    """As it stands, but for where the ranks meet: torchrun's variables say so else."""
    meet = functools.partial(
        dist.init_process_group,
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=world_size,
    )
    printed = io.StringIO()
    with mock.patch.object(dist, "init_process_group", meet), redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / "shm_backend.py"))
    gc.collect()
    return printed.getvalue()


def test_the_example_learns(pool: Any) -> None:
    first, second = pool.run(_example, 2)
    (loss,) = re.findall(r"loss ([0-9.]+) on rank 0 of 2", first)
    assert float(loss) < 0.05
    assert second == ""
