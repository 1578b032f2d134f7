"""Gradient accumulation under torch's DDP: when the flag is set, how far replicas drift.

torchrun --nproc-per-node 2 examples/claims/accumulation.py
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs


def counted(sent: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own all-reduce, noted."""
    sent.append(bucket.index())
    return allreduce_hook(None, bucket)


with gs.init(threads=1) as world:
    for when in ("between forward and backward", "before the forward", "never"):
        torch.manual_seed(world.rank)
        model = DistributedDataParallel(torch.nn.Linear(16, 16))
        model.register_comm_hook(sent := [], counted)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for micro in range(40):  # ten steps of four micro-batches
            x, last = torch.randn(8, 16), micro % 4 == 3
            if when == "before the forward":
                model.require_backward_grad_sync = last
            loss = model(x).square().mean() / 4
            if when == "between forward and backward":
                model.require_backward_grad_sync = last
            loss.backward()
            if last:
                optimizer.step()
                model.zero_grad()
        apart = model.module.weight.detach() * (1 - 2 * world.rank)
        dist.all_reduce(apart)
        if world.is_main:
            print(f"flag {when}: {apart.abs().max():.1e} apart, {len(sent)} all-reduces")
