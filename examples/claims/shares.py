"""The mean over two ranks of each rank's mean, against the mean over the whole batch.

torchrun --nproc-per-node 2 examples/claims/shares.py
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import gradsync as gs


def gradient(x: torch.Tensor, way: str) -> torch.Tensor:
    """The step of SGD at lr 1 on the mean loss over `x`, and over ranks unless alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    begin = parameters_to_vector(model.parameters()).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    forward = DistributedDataParallel(model) if way == "DDP" else model
    sync = gs.replicate(model, strategy="naive") if way == "weighted" else None
    loss = nn.functional.mse_loss(forward(x), x.sum(1, keepdim=True))
    if sync:
        sync.backward(loss, weight=len(x))
        sync.step(optimizer)
    else:
        loss.backward()
        optimizer.step()
    return begin - parameters_to_vector(model.parameters()).detach()


with gs.init(threads=1) as world:
    torch.manual_seed(1)
    x = torch.randn(64, 16) * torch.arange(64)[:, None] / 32
    whole = gradient(x, "alone")
    for first in (32, 48):
        mine = x[:first] if world.is_main else x[first:]
        off = [(gradient(mine, way) - whole).norm() / whole.norm() for way in ("DDP", "weighted")]
        if world.is_main:
            print(f"shares {first}, {64 - first}: DDP {off[0]:.0e} off, weighted {off[1]:.0e} off")
