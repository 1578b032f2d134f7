"""Buckets of torch's DDP: their sizes, when they leave, whether gradients are kept twice.

torchrun --nproc-per-node 2 examples/claims/buckets.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs

LAYERS, WIDTH = 16, 1024  # 16 weights of 4 MiB


def note(noted: list[list], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own all-reduce; the bucket is noted, and how many gradients there are by now."""
    ready, sent = noted
    sent.append(f"{bucket.buffer().nbytes >> 20} MiB after {len(ready)}")
    return allreduce_hook(None, bucket)


with gs.init(threads=1) as world:
    for view in (False, True):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        replica = DistributedDataParallel(model, gradient_as_bucket_view=view)
        ready, sent = noted = [[], []]
        replica.register_comm_hook(noted, note)
        for weight in model.parameters():
            weight.register_hook(ready.append)
        for _ in range(2):  # buckets take their final form after the first step
            ready.clear()
            sent.clear()
            replica(torch.randn(2, WIDTH)).square().mean().backward()
        if world.is_main:
            places = {weight.grad.untyped_storage().data_ptr() for weight in model.parameters()}
            print(f"gradient_as_bucket_view={view}: {LAYERS} gradients in {len(places)} buffers")
    if world.is_main:
        print(f"buckets sent, and of {LAYERS} gradients: {', '.join(sent)}")
