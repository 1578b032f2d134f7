"""State that torch's DDP keeps equal on two ranks, and state that it leaves alone.

torchrun --nproc-per-node 2 examples/claims/replicas.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs


def compare(words: str, mine: Tensor) -> None:
    """Print how far the two ranks' tensors are apart."""
    difference = mine.detach() * (1 - 2 * dist.get_rank())
    dist.all_reduce(difference)
    if dist.get_rank() == 0:
        print(f"{words}: {float(difference.abs().max()):.3f} apart")


def step(words: str, model: nn.Module, x: Tensor, lr: float = 0.1) -> None:
    """One training step; compares the first weights after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    optimizer.zero_grad()
    model.train()(x).pow(3).mean().backward()
    optimizer.step()
    compare(words, next(model.parameters()))


with gs.init(threads=1) as world:
    torch.manual_seed(world.rank)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(16, 8) + world.rank
    step("weights after a step of each rank alone", model, x)
    replica = DistributedDataParallel(model)
    step("weights after a step of DDP", replica, x)
    compare("running means of BatchNorm after it", model[1].running_mean)
    replica.eval()(x)
    compare("running means after one more forward", model[1].running_mean)
    step("weights after a step with lr 0.1 and 0.2", replica, x, 0.1 * (1 + world.rank))
