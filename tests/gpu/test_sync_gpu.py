"""Every strategy on a CUDA device: two ranks that share it, and NCCL with one rank."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.core.torch_private import backend_of
from gradsync.sync import comm_hook
from gradsync.sync.registry import STRATEGIES
from support.engine_cases import pretend_hosts
from support.one_device import ThroughHost
from support.sync_cases import assert_keeps_its_promise, cases_for, train_case
from support.thread_ranks import run_thread_ranks

pytestmark = pytest.mark.gpu

CUDA = "cuda:0"
THREADED = [name for name, s in STRATEGIES.items() if not s.needs_group and name != "fp16"]
"""Ranks as threads share the one thread that runs backward on a device, and fp16 waits in there,
until all ranks have told their largest gradient."""


@pytest.fixture(scope="module")
def nccl() -> Iterator[ProcessGroupCommunicator]:
    """Torch's default group, of one rank."""
    torch.cuda.set_device(CUDA)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=torch.device(CUDA),
    )
    yield ProcessGroupCommunicator(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", THREADED)
def test_ranks_on_one_device_keep_the_promise(name: str, world_size: int) -> None:
    def work(_: int, group: dist.ProcessGroup) -> list[dict[str, Any]]:
        comm = ThroughHost(ProcessGroupCommunicator(group))
        hosts = pretend_hosts(comm, 2 if world_size % 2 == 0 else 1)
        return [train_case(case, name, comm, hosts=hosts, device=CUDA) for case in cases_for(name)]

    by_rank = run_thread_ranks(work, world_size, timeout_s=100.0)
    for case, *results in zip(cases_for(name), *by_rank, strict=True):
        assert_keeps_its_promise(case, name, results, CUDA)


@pytest.mark.parametrize("name", STRATEGIES)
def test_nccl_with_one_rank(name: str, nccl: ProcessGroupCommunicator) -> None:
    own = name if name in ("diloco", "invariant_bf16") else "naive"
    for case in cases_for(name):
        result = train_case(case, name, nccl, hosts=pretend_hosts(nccl, 1), device=CUDA)
        assert_keeps_its_promise(case, own, [result], CUDA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_collectives_of_nccl(dtype: torch.dtype, nccl: ProcessGroupCommunicator) -> None:
    values = torch.arange(1000, device=CUDA).to(dtype)
    summed, output = values.clone(), torch.empty_like(values)
    nccl.all_reduce(summed).wait()
    assert torch.equal(summed, values)
    nccl.broadcast(summed).wait()
    nccl.all_gather(output, values).wait()
    assert torch.equal(output, values)
    nccl.reduce_scatter(output.zero_(), values).wait()
    assert torch.equal(output, values)
    small = torch.arange(3)
    nccl.all_reduce(small).wait()
    assert small.tolist() == [0, 1, 2]
    nccl.barrier()
    assert backend_of(nccl.group, CUDA).name() == "nccl"


@pytest.mark.parametrize("name", comm_hook.STRATEGIES)
def test_hooks_of_ddp(name: str, nccl: ProcessGroupCommunicator) -> None:
    plain = nn.Linear(64, 64).to(CUDA)
    ddp = DistributedDataParallel(deepcopy(plain))
    ddp.register_comm_hook(*comm_hook.comm_hook(name))
    x = torch.randn(8, 64, device=CUDA)
    for model in (ddp, plain):
        model(x).square().sum().backward()
    expected = plain.weight.grad
    rtol, atol = (1e-2, 0.1) if name in ("bf16", "fp16") else (0.0, 0.0)
    torch.testing.assert_close(ddp.module.weight.grad, expected, rtol=rtol, atol=atol)
