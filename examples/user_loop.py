"""A loop that was there before: torch's process group, `loss.backward()`, `optimizer.step()`.

One line is added, `gs.replicate`; gradients are means over ranks as under torch's DDP, but the
model is not wrapped, and a parameter that some rank does not use is no problem.

torchrun --nproc-per-node 2 examples/user_loop.py     (python examples/user_loop.py: one rank)
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import gradsync as gs

if "RANK" in os.environ:  # else it is one rank, without a launcher
    dist.init_process_group("gloo")
world = gs.World.from_process_group()
rank = world.rank
torch.manual_seed(rank)  # ranks may start differently: rank 0's weights are everybody's
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))

sync = gs.replicate(model, strategy="bucketed", bucket_mb=1.0)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
for number in range(200):
    targets = torch.randint(0, 4, (32,))
    inputs = centres[targets] + 0.5 * torch.randn(32, 16)
    if number % 2 == 0:  # two micro-batches a step: the first one only adds up
        with sync.no_sync():
            F.cross_entropy(model(inputs), targets).backward()
        continue
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()  # when it returns, every .grad is the mean over ranks
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(f"loss {loss.item():.4f} on rank 0 of {world.world_size}")
sync.close()
if dist.is_initialized():
    dist.destroy_process_group()
