"""Our reductions under torch's own DistributedDataParallel: one line, a communication hook.

torchrun --nproc-per-node 2 examples/ddp_hook.py
"""

import torch
import torch.nn.functional as F

import gradsync as gs

with gs.init(seed=0, threads=1) as world:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    ddp = torch.nn.parallel.DistributedDataParallel(model.to(world.device))
    gs.comm_hook("ring").register(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(world.rank)  # each rank has data of its own
    for _ in range(150):
        targets = torch.randint(0, 4, (32,), generator=generator)
        inputs = centres[targets] + 0.5 * torch.randn(32, 16, generator=generator)
        loss = F.cross_entropy(ddp(inputs), targets)
        loss.backward()  # each bucket goes round the ring as soon as it is full
        optimizer.step()
        optimizer.zero_grad()
    if world.is_main:
        print(f"loss {loss.item():.4f} on rank 0 of {world.world_size}")
