"""A model that torch's DDP has wrapped: edits, names, dropout, parts that do not train.

torchrun --nproc-per-node 2 examples/claims/wrapped.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs


def different(mine: Tensor) -> str:
    """How many elements of the two ranks' tensors differ."""
    difference = mine.detach() * (1 - 2 * dist.get_rank())
    dist.all_reduce(difference)
    return f"{int(difference.count_nonzero()):,} of {mine.numel():,}"


with gs.init(threads=1) as world:
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.module.weight[0] += 1.0 - world.rank
    for _ in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    found = [f"3 steps after rank 0 has edited 64: {different(model.module.weight)} differ"]
    for words, seed in (("the same seed", 0), ("seed + rank", world.rank)):
        torch.manual_seed(seed)
        mask = nn.functional.dropout(torch.ones(10_000))
        found.append(f"dropout masks with {words}: {different(mask)} elements differ")
    found.append(f"names when saved: {', '.join(model.state_dict())}")
    try:
        DistributedDataParallel(nn.Linear(4, 4).requires_grad_(False))
    except RuntimeError as error:
        found.append(f"a frozen part: RuntimeError: {str(error).partition(' when')[0]}")
    if world.is_main:
        print("\n".join(found))
