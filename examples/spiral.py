"""Classify two spirals on 1..N ranks: the README's script with a model and data to run it on.

python examples/spiral.py
torchrun --nproc-per-node 2 examples/spiral.py
mpirun -np 2 python examples/spiral.py
srun -n 2 python examples/spiral.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import gradsync as gs


def spirals(num_points: int = 1024) -> TensorDataset:
    """Points on two arms, float32 [N, 2], and which arm they are on, int64 [N]."""
    turn = torch.linspace(0.5, 6.0, num_points)
    arm = torch.arange(num_points) % 2
    angle = turn + torch.pi * arm
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 3
    return TensorDataset(points, arm)


def build_model() -> nn.Module:
    """A small network; rank 0's weights are everybody's start."""
    hidden = [nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, 2))


dataset = spirals()

with gs.init(seed=0, threads=1) as world:
    model = build_model().to(world.device)
    sync = gs.replicate(model, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in gs.loader(dataset, world, global_batch_size=64, micro_batch_size=8, num_epochs=30):
        for micro_batch in batch:
            loss = F.cross_entropy(model(micro_batch.inputs), micro_batch.targets)
            sync.backward(loss, micro_batch)
        sync.step(optimizer, clip_norm=1.0)
        if world.is_main and batch.number % 60 == 0:
            print(f"step {batch.number}: loss {sync.mean_loss:.4f}, world size {world.world_size}")
    if world.is_main:
        print(f"weights {gs.weights_sha256(model.named_parameters())}")
