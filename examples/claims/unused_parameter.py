"""A parameter that the loss does not depend on, under torch's DDP.

torchrun --nproc-per-node 2 examples/claims/unused_parameter.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs


def steps(find_unused: bool) -> None:
    """Two steps, in the second of which DDP may raise."""
    torch.manual_seed(0)
    used, unused = nn.Linear(10, 10), nn.Linear(10, 10)
    model = nn.Sequential(used, unused)
    model.forward = used.forward
    replica = DistributedDataParallel(model, find_unused_parameters=find_unused)
    torch.manual_seed(dist.get_rank())
    name = "find_unused_parameters" if find_unused else "by default"
    for number in (1, 2):
        try:
            replica(torch.randn(4, 10)).square().mean().backward()
            both = [torch.empty(10, 10) for _ in range(2)]
            dist.all_gather(both, used.weight.grad)
            said = f"no error, gradients in use {float((both[0] - both[1]).abs().max()):.2f} apart"
        except RuntimeError as error:
            said = f"RuntimeError: {str(error).partition(' in the')[0]}"
        if dist.get_rank() == 0:
            print(f"{name}, step {number}: {said}")


with gs.init(threads=1) as world:
    steps(find_unused=False)
    steps(find_unused=True)
