"""The names that other guides know do what those guides expect."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsync.compat import (
    DDPManager,
    barrier,
    broadcast,
    cleanup_distributed,
    get_device,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_distributed,
    is_main_process,
    per_process_batch,
    setup_distributed,
)
from gradsync.compat.functions import backend_here
from gradsync.errors import ConfigError, LaunchError, RunError
from gradsync.sync.replicate import replicate
from gradsync.world import World
from support.fork_server import run_forked
from support.launchers import run_torchrun
from support.rank_session import open_session


@contextmanager
def started_by_mpirun(rank: int, world_size: int, store_path: str) -> Iterator[None]:
    """The variables of a launcher, in this process's own environment."""
    env = open_session(rank, world_size, store_path)._env
    with mock.patch.dict(os.environ, env):
        yield


# -- DDPManager -----------------------------------------------------------------------------------


def use_every_method(rank: int, world_size: int, store_path: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with started_by_mpirun(rank, world_size, store_path):
        manager = DDPManager()
        seen["before"] = (manager.world == World(), manager.device.type, manager.is_main_process)
        seen["world"] = manager.initialize(backend="nccl", timeout_mins=1.5)
        assert manager.world is seen["world"]
        assert manager._session is not None
        seen["timeout_s"] = manager._session.options.timeout_s
        seen["numbers"] = (manager.rank, manager.world_size, manager.local_rank)
        seen["main"] = manager.is_main_process
        for op in ("sum", "mean", "min", "max"):
            tensor = torch.tensor([1.0 + rank, 10.0 * rank])
            assert manager.all_reduce(tensor, op) is tensor  # in place
            seen[op] = tensor.tolist()
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            seen[op.name] = manager.all_reduce(torch.tensor(1.0 + rank), op).item()
        with pytest.raises(RunError, match=r"rank 0: .* named 'norm'; rank 1: .* named 'loss'"):
            manager.all_reduce(torch.tensor(1.0), name="loss" if rank else "norm")
        seen["default"] = manager.all_reduce(torch.tensor(float(rank))).item()
        batches = manager.get_dataloader(range(10), 2, shuffle=False)
        seen["batches"] = [batch.tolist() for batch in batches]
        flag = Path(f"{store_path}-flag")
        if rank == 1:
            flag.touch()
        manager.barrier()
        seen["passed the barrier"] = flag.exists()
        manager.cleanup()
        manager.cleanup()
        seen["group after"] = dist.is_initialized()
    return seen


def test_every_method_on_two_ranks(pool: Any) -> None:
    for rank, seen in enumerate(pool.run(use_every_method, 2)):
        world = seen.pop("world")
        assert (world.rank, world.world_size) == (rank, 2)
        assert seen == {
            "before": (True, "cpu", True),
            "timeout_s": 90.0,
            "numbers": (rank, 2, rank),
            "main": rank == 0,
            **{"sum": [3.0, 10.0], "mean": [1.5, 5.0], "min": [1.0, 0.0], "max": [2.0, 10.0]},
            **{"SUM": 3.0, "AVG": 1.5, "MIN": 1.0, "MAX": 2.0, "default": 1.0},
            "batches": [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]][rank],
            "passed the barrier": True,
            "group after": False,
        }


def wrap_in_ddp(rank: int, world_size: int, store_path: str) -> list[Any]:
    with started_by_mpirun(rank, world_size, store_path), DDPManager() as manager:
        torch.manual_seed(rank)  # ranks start differently: rank 0's weights must win
        model = nn.Linear(2, 1, bias=False)
        options = {"broadcast_buffers": False, "device_ids": [rank]}
        wrapped = manager.wrap_model(model, strategy="ddp", **options)
        assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
        assert wrapped.module is model
        assert wrapped.gradient_as_bucket_view
        assert not wrapped.broadcast_buffers  # an option that came through
        wrapped(torch.full((1, 2), 1.0 + rank)).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[1.5, 1.5]]
        plain = manager.wrap_model(model, strategy="ddp", gradient_as_bucket_view=False)
        assert not plain.gradient_as_bucket_view
        with pytest.raises(ConfigError, match="wraps one model, got 2"):
            manager.wrap_model(model, nn.Linear(2, 1), strategy="ddp")
        return model.weight.tolist()


def test_wrap_model_in_ddp(pool: Any) -> None:
    first, second = pool.run(wrap_in_ddp, 2)
    assert first == second


DDP_OPTIONS: dict[str, Any] = {
    "device_ids": [0],
    "output_device": 0,
    "find_unused_parameters": True,
    "gradient_as_bucket_view": True,
    "bucket_cap_mb": 1.0,
    "static_graph": True,
    "broadcast_buffers": False,
    "process_group": None,
}


def use_the_wrapper(rank: int, world_size: int, store_path: str) -> list[Any]:
    """What scripts do with torch's DDP; one micro-batch that is not synchronised, then one."""
    with started_by_mpirun(rank, world_size, store_path), DDPManager() as manager:
        wrapped = manager.wrap_model(nn.Linear(2, 1, bias=False), strategy="ddp")
        with wrapped.no_sync():
            wrapped(torch.full((1, 2), 1.0 + rank)).sum().backward()
        early = wrapped.module.weight.grad.tolist()
        wrapped.require_backward_grad_sync = True
        wrapped(torch.ones(1, 2)).sum().backward()
        names = [*wrapped.state_dict(), *wrapped.module.state_dict()]
        return [early, wrapped.module.weight.grad.tolist(), names]


def test_the_wrapper_is_the_same_on_one_rank(pool: Any) -> None:
    names = ["module.weight", "weight"]
    assert pool.run(use_the_wrapper, 1) == [[[[1.0, 1.0]], [[2.0, 2.0]], names]]
    assert [seen[1:] for seen in pool.run(use_the_wrapper, 2)] == [[[[2.5, 2.5]], names]] * 2


def wrap_in_place(rank: int, world_size: int, store_path: str) -> dict[str, Any]:
    with started_by_mpirun(rank, world_size, store_path), DDPManager() as manager:
        torch.manual_seed(rank)
        backbone = nn.Linear(2, 2).requires_grad_(False)
        adapter, head = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
        assert manager.wrap_model(backbone) is backbone  # only moved
        wrapped = manager.wrap_model(adapter, head, **DDP_OPTIONS)
        (handle,) = manager._handles
        assert handle.reducer.recipe.bucket_mb == 1.0
        assert wrapped == (adapter, head)
        optimizer = torch.optim.SGD([*adapter.parameters(), *head.parameters()], lr=0.1)
        gradients = []
        for step in range(3):
            inputs = torch.full((1, 2), 1.0 + rank + step)
            with manager.no_sync() if step == 0 else nullcontext():
                head(adapter(inputs)).sum().backward()
            gradients.append(None if adapter.weight.grad is None else adapter.weight.grad.tolist())
            if step:
                optimizer.step()
                optimizer.zero_grad()
        return {"gradients": gradients[1:], "weights": [p.tolist() for p in adapter.parameters()]}


def test_wrap_model_in_place(pool: Any) -> None:
    """Several modules beside a frozen one are one engine; gradients are means over ranks."""
    first, second = pool.run(wrap_in_place, 2)
    assert first == second
    assert len(first["gradients"]) == 2


@pytest.mark.parametrize("sync", ["invariant", "naive", "ddp", "fsdp"])
def test_replicate_takes_the_options_of_ddp(sync: str) -> None:
    """As `wrap_model` does: a script may keep its arguments."""
    handle = replicate(nn.Linear(1, 1), World(), strategy=sync, **DDP_OPTIONS)
    handle.close()
    recipe = getattr(handle.reducer, "recipe", None)
    assert recipe is None or recipe.bucket_mb == 1.0
    with pytest.raises(ConfigError, match="has no option 'init_sync'"):
        replicate(nn.Linear(1, 1), World(), strategy=sync, init_sync=False)
    with pytest.raises(ConfigError, match="has no option 'bogus'"):
        replicate(nn.Linear(1, 1), World(), strategy=sync, bogus=False)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("process_group", 1, "strategy='naive' has no option 'process_group'"),
        ("init_sync", False, "strategy='naive' has no option 'init_sync'"),
        ("bucket_cap_mb", -1, "bucket_cap_mb must be positive; got -1"),
    ],
)
def test_options_of_ddp_that_would_change_results_are_refused(
    name: str, value: object, words: str
) -> None:
    with DDPManager() as manager, pytest.raises(ConfigError, match=words):
        manager.wrap_model(nn.Linear(1, 1), strategy="naive", **{name: value})


def test_nccl_without_a_gpu_is_gloo(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for available, said in ((False, 1), (True, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=available: there)
        caplog.clear()
        assert backend_here("nccl") is None
        assert caplog.text.count("'nccl' needs a GPU, and there is none: gloo is used") == said
    assert backend_here("gloo") == "gloo"


def test_one_rank_needs_nothing_else() -> None:
    manager = DDPManager()
    manager.initialize()
    session = manager._session
    with manager:
        assert manager._session is session  # joined only once
        assert manager.world == World(device_name=str(manager.device))
        assert not dist.is_initialized()
        model = nn.Linear(2, 2)
        assert manager.wrap_model(model) is model
        for op in ("sum", "mean", "min", "max", dist.ReduceOp.SUM):
            assert manager.all_reduce(torch.tensor([3.0]), op).tolist() == [3.0]
        manager.barrier()
    assert manager._session is None
    with pytest.raises(AttributeError) as caught, DDPManager():
        _ = model.module
    assert "`model`" in caught.value.__notes__[0]
    manager.world = World(world_size=2, local_world_size=2)  # as it was before `cleanup`
    assert manager.all_reduce(torch.tensor(4.0)).item() == 4.0
    with pytest.raises(ConfigError, match=r"op='mean' does not take torch.int64"):
        manager.all_reduce(torch.tensor(4), "mean")


# -- functions ------------------------------------------------------------------------------------


def call_and_leave(
    rank: int, world_size: int, store_path: str, join: Callable[[int, int, int], object], port: int
) -> dict[str, Any]:
    """Join by a function, and leave as the end of the process would."""
    at_exit: list[Callable[[], None]] = []
    with (
        started_by_mpirun(rank, world_size, store_path),
        mock.patch.object(atexit, "register", at_exit.append),
    ):
        outside = is_main_process()
        seen: dict[str, Any] = {"joined": join(rank, world_size, port), "main": [outside]}
        seen["group"] = (dist.get_rank(), dist.get_world_size(), dist.get_backend())
        seen["main"].append(is_main_process())
        seen["device"] = str(get_device())
        value = torch.tensor(1.0 + rank)
        dist.all_reduce(value)
        seen["sum"] = value.item()
        for leave in reversed(at_exit):  # as Python does
            leave()
    return seen | {"group after": dist.is_initialized()}


def by_init(rank: int, world_size: int, port: int) -> object:
    return init_distributed()


def by_setup(rank: int, world_size: int, port: int) -> object:
    """Known numbers; what a launcher says does not matter."""
    with mock.patch.dict(os.environ, {"OMPI_COMM_WORLD_SIZE": "9", "MASTER_PORT": str(port)}):
        return setup_distributed(rank, world_size, "nccl")  # falls back to gloo here


@pytest.mark.parametrize("join", [by_init, by_setup])
def test_joining_by_a_function(pool: Any, join: Callable[[int, int, int], object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for rank, seen in enumerate(pool.run(call_and_leave, 2, join, port)):
        assert seen["joined"] == ((rank, 2, rank) if join is by_init else None)
        assert seen["group"][:2] == (rank, 2)
        assert seen["main"] == [rank == 0] * 2
        assert seen["device"] == "cpu"
        assert seen["sum"] == 3.0
        assert not seen["group after"]


def use_the_getters(rank: int, world_size: int, store_path: str) -> list[Any]:
    """Before the group, and in it."""
    with started_by_mpirun(rank, world_size, store_path):
        seen: list[Any] = [get_rank(), get_world_size(), get_local_rank(), is_distributed()]
        with DDPManager():
            seen += [get_rank(), get_world_size(), get_local_rank(), is_distributed()]
            barrier()
            tensor = torch.tensor([float(rank)])
            assert broadcast(tensor, src=world_size - 1) is tensor
            return [*seen, tensor.item()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_getters_barrier_and_broadcast(pool: Any, ranks: int) -> None:
    place = [[rank, ranks, rank, ranks > 1] for rank in range(ranks)]
    assert pool.run(use_the_getters, ranks) == [[*each, *each, ranks - 1.0] for each in place]


def test_the_batch_of_a_process_is_exact() -> None:
    for micro, accumulation, ranks in product(range(1, 9), (1, 2, 3, 8), range(1, 9)):
        total = micro * accumulation
        if total % ranks:
            with pytest.raises(ConfigError, match=f"{total} samples .* {ranks} processes"):
                per_process_batch(micro, accumulation, ranks)
            continue
        size, steps = per_process_batch(micro, accumulation, ranks)
        assert size * steps * ranks == total
        assert 1 <= size <= max(micro // ranks, 1)
        if micro % ranks == 0:  # the published formula is exact there
            assert (size, steps) == (micro // ranks, accumulation)


def test_the_device_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_device() == torch.device("cpu" if not torch.cuda.is_available() else "cuda:0")
    variables = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert get_device() == torch.device("cuda:2")  # the local rank, not the rank
    assert not is_main_process()


def with_a_group_of_ones_own(rank: int, world_size: int, store_path: str) -> bool:
    dist.init_process_group(
        "gloo", init_method=f"file://{store_path}", rank=rank, world_size=world_size
    )
    main = is_main_process()
    assert (get_rank(), get_world_size()) == (rank, world_size)
    with pytest.raises(LaunchError, match=f"rank {rank}: .*LOCAL_RANK"):  # not 0 on all of them
        get_local_rank()
    barrier()  # the first to leave would close a connection that the other one is still making
    cleanup_distributed()
    assert not dist.is_initialized()
    cleanup_distributed()
    return main


def test_a_group_of_ones_own_says_who_is_main(pool: Any) -> None:
    """No launcher variable is set here: without asking the group, all would be."""
    assert pool.run(with_a_group_of_ones_own, 2) == [True, False]


SCRIPT = """
import os, sys
import torch
from gradsync.compat import get_device, init_distributed, is_main_process, setup_distributed
words = [get_device(), is_main_process()]
if "RANK" in os.environ:
    # The tutorial's call: torchrun's agent serves the store, rank 0 must not bind its port.
    setup_distributed(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "nccl")
    words += [torch.distributed.get_rank(), torch.distributed.get_world_size()]
    value = torch.tensor(1.0)
    torch.distributed.all_reduce(value)
    words += [value.item()]
else:
    words += init_distributed()
words += [is_main_process()]
sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: lines of two ranks do not mix
"""


def test_a_script_that_never_says_goodbye(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone = run_forked([script])[0].ok()
    assert alone.stdout == "cpu True 0 1 0 True\n"
    assert alone.stderr == ""
    done = run_torchrun(2, [script]).ok()
    assert sorted(done.stdout.splitlines()) == ["cpu False 1 2 2.0 False", "cpu True 0 2 2.0 True"]
    for complaint in ("destroy_process_group", "Traceback", "Error"):
        assert complaint not in done.stderr
