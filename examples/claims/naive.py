"""Steps of the naive trainer on a GPT: its figures, and what each rank computes and holds.

torchrun --nproc-per-node 2 examples/claims/naive.py tiny
"""

import sys

import torch
from torch.utils.flop_counter import FlopCounterMode

import gradsync as gs
from gradsync.commands.models.config import preset
from gradsync.commands.models.gpt import GPT
from gradsync.compat import NaiveDDPTrainer, shard_batch

BATCH, TOKENS, STEPS = 4, 128, 3
with gs.init(seed=0, threads=1) as world:
    config = preset(sys.argv[1])
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trainer = NaiveDDPTrainer(model, optimizer, world.rank, world.world_size, world.device)
    tokens = torch.randint(config.vocab_size, (BATCH, TOKENS + 1))
    shard = shard_batch((tokens[:, :-1], tokens[:, 1:]), world.rank, world.world_size)
    with FlopCounterMode(display=False) as counter:
        trainer.train_step(*shard)
    steps = [trainer.train_step(*shard) for _ in range(STEPS)]
    total, compute, comm = (
        1e3 * sum(step[part] for step in steps) / STEPS
        for part in ("total_time", "compute_time", "comm_time")
    )
    if world.is_main:
        state = [t for s in optimizer.state.values() for t in s.values()]
        weights = list(model.parameters())  # and as many gradients
        held = sum(t.nbytes for t in [*weights, *weights, *state])
        shares = f"compute {compute / total:.0%}, all-reduce {comm / total:.0%}"
        print(f"total {total:,.0f} ms: {shares}")
        count = steps[0]["num_comm_ops"]
        each = counter.get_flop_counts()["Global"].items()  # attention: torch counts it since 2.15
        flops = sum(number for name, number in each if "attention" not in str(name))
        print(f"a rank: {flops:,} FLOPs, {held:,} bytes, {count} all-reduces")
