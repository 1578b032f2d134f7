"""The naive trainer: one blocking all-reduce per parameter, timed, on shards of a global batch.

python examples/naive_trainer.py
torchrun --nproc-per-node 2 examples/naive_trainer.py
"""

import torch

import gradsync as gs
from gradsync.compat import NaiveDDPTrainer, shard_batch

with gs.init(seed=0, threads=1) as world:
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    model.to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = NaiveDDPTrainer(model, optimizer, world.rank, world.world_size, world.device)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(8, 32, generator=generator)
    for number in range(101):
        # Every rank draws the same global batch; 50 samples need not divide by the ranks.
        targets = torch.randint(0, 8, (50,), generator=generator)
        inputs = centres[targets] + torch.randn(50, 32, generator=generator)
        shard = shard_batch((inputs, targets), world.rank, world.world_size)
        info = trainer.train_step(*shard)
        if world.is_main and number % 50 == 0:
            print(
                f"step {number}: loss {info['loss']:.4f}, {info['total_time'] * 1e3:.2f} ms, "
                f"{info['comm_fraction']:.0%} of it in {info['num_comm_ops']} all-reduces"
            )
