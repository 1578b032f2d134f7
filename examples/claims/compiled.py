"""torch.compile before and after DDP wraps the model: are the gradients the same?

torchrun --nproc-per-node 2 examples/claims/compiled.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs


def compiled(model: nn.Module) -> nn.Module:
    """Captured as graphs that torch runs as they are, without generating code."""
    return torch.compile(model, backend="eager")


def gradient(wrap: Callable[[nn.Module], nn.Module], rank: int) -> Tensor:
    """The mean over ranks, as one vector."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    model = wrap(inner)
    torch.manual_seed(1 + rank)
    model(torch.randn(8, 16)).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in inner.parameters()])


with gs.init(threads=1) as world:
    plain = gradient(DistributedDataParallel, world.rank)
    after = gradient(lambda model: compiled(DistributedDataParallel(model)), world.rank)
    before = gradient(lambda model: DistributedDataParallel(compiled(model)), world.rank)
    if world.is_main:
        print(
            f"compile(DDP(model)): {int((after != plain).sum())} of {len(plain)} gradients differ"
        )
        print(
            f"DDP(compile(model)): {int((before != plain).sum())} of {len(plain)} gradients differ"
        )
