"""Samples that torch's DistributedSampler deals, counted.

python examples/claims/sampler.py
"""

from torch.utils.data import DistributedSampler

import gradsync as gs


def dealt(num_samples: int, ranks: int, epoch: int = -1) -> list[list[int]]:
    """Each rank's samples of one epoch; set_epoch is called where one is given."""
    samplers = [DistributedSampler(range(num_samples), ranks, rank) for rank in range(ranks)]
    for sampler in samplers:
        if epoch >= 0:
            sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def ours(ranks: int) -> list[list[int]]:
    """The same from gs.loader, in batches of five samples."""
    worlds = [gs.World(rank=rank, world_size=ranks) for rank in range(ranks)]
    sizes = {"global_batch_size": 5, "micro_batch_size": 1, "num_epochs": 1}
    loaders = [gs.loader(range(10), world, **sizes) for world in worlds]
    return [[int(each.batch) for batch in made for each in batch] for made in loaders]


for name, shares in (("DistributedSampler", dealt(10, 4)), ("gs.loader", ours(4))):
    samples = [sample for share in shares for sample in share]
    print(f"{name}, 10 samples, 4 ranks: {len(samples)} dealt, {len(set(samples))} different")
print(f"the same split from the same seed: {dealt(1000, 4, 1) == dealt(1000, 4, 1)}")
print(f"without set_epoch: epoch 1 {dealt(8, 2)}, epoch 2 {dealt(8, 2)}")
print(f"with set_epoch: epoch 1 {dealt(8, 2, 0)}, epoch 2 {dealt(8, 2, 1)}")
