"""Iterable data sets of Hugging Face `datasets` (extra `gradsync[data]`), without hanging.

Their shares are uneven: one rank runs out of data before another. A rank that stopped would leave
the others waiting in a collective for ever. So the ranks agree before every step who has data;
those without yield no leaves and stay, until nobody has any.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

from gradsync.comm.base import Communicator
from gradsync.comm.choose import communicator
from gradsync.comm.values import sum_and_min
from gradsync.data.leaf import Leaf, make_leaf
from gradsync.data.limits import require_at_least
from gradsync.data.step import Step
from gradsync.errors import ConfigError
from gradsync.runtime.seeds import seed_leaf
from gradsync.world import World


class StreamLoader:
    """Iterating gives `Step`s until no rank has data; see `stream_loader`."""

    def __init__(
        self,
        shard: Any,
        world: World,
        *,
        micro_batch_size: int,
        leaves_per_rank: int,
        comm: Communicator,
        num_epochs: int | None,
        collate_fn: Callable[[list[Any]], Any],
        device: torch.device,
        seed: int,
        seed_leaves: bool,
    ) -> None:
        self._shard = shard
        self._first_index = world.rank * leaves_per_rank
        self._micro_batch_size = micro_batch_size
        self._leaves_per_rank = leaves_per_rank
        self._comm = comm
        self._num_epochs = num_epochs
        self._collate_fn = collate_fn
        self._device = device
        self._seed = seed
        self._seed_leaves = seed_leaves

    def __iter__(self) -> Iterator[Step]:
        number = 0
        epochs = itertools.count() if self._num_epochs is None else range(self._num_epochs)
        for epoch in epochs:
            if hasattr(self._shard, "set_epoch"):
                self._shard.set_epoch(epoch)
            before = number
            for step in self._epoch(number):
                yield step
                number += 1
            if number == before:
                return  # no rank had any sample: another epoch would be as empty

    def _epoch(self, number: int) -> Iterator[Step]:
        samples = iter(self._shard)
        while True:
            groups = self._next_groups(samples)
            num_leaves, fewest = sum_and_min(self._comm, len(groups))
            if not num_leaves:
                return
            yield Step(
                self._leaves(groups, number, everyone_has_leaves=fewest > 0),
                number=number,
                num_leaves=num_leaves,
                num_local_leaves=len(groups),
            )
            number += 1

    def _next_groups(self, samples: Iterator[Any]) -> list[list[Any]]:
        """Samples of this rank's next leaves; fewer or none at the end."""
        groups = []
        for _ in range(self._leaves_per_rank):
            group = list(itertools.islice(samples, self._micro_batch_size))
            if not group:
                break
            groups.append(group)
        return groups

    def _leaves(
        self, groups: list[list[Any]], step: int, *, everyone_has_leaves: bool
    ) -> Iterator[Leaf]:
        for index, group in enumerate(groups, start=self._first_index):
            if self._seed_leaves:
                seed_leaf(self._seed, step, index)
            yield make_leaf(
                self._collate_fn(group),
                index=index,
                step=step,
                num_samples=len(group),
                is_last=everyone_has_leaves and group is groups[-1],
                device=self._device,
            )


def stream_loader(
    dataset: Any,
    world: World,
    *,
    micro_batch_size: int,
    leaves_per_rank: int,
    comm: Communicator | None = None,
    num_epochs: int | None = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    seed_leaves: bool = True,
    device: torch.device | str | None = None,
) -> StreamLoader:
    """Steps from a Hugging Face `IterableDataset`, split by `split_dataset_by_node`.

    All ranks make the same number of steps, and every sample comes exactly once an epoch. Near the
    end, ranks without data yield no leaves. What streaming cannot give: which samples form a step
    depends on the world size, and there is no state to resume from at another one. Where that
    matters, use `loader` with a map-style data set.

    Args:
        dataset: a `datasets.IterableDataset`.
        world: who we are.
        micro_batch_size: samples in a leaf.
        leaves_per_rank: leaves a rank takes for a step.
        comm: how the ranks agree; None takes the world's own.
        num_epochs: passes over the data; None never ends. `set_epoch` is called for each.
        collate_fn: list of samples to batch; None is torch's `default_collate`.
        seed: names the random streams of leaves; the order of samples is the data set's own.
        seed_leaves: as `loader` does it, torch's generators are seeded by (seed, step, leaf) right
            before a leaf is collated and handed out; False leaves them alone.
        device: where batches go; None is the world's device.

    Raises:
        ConfigError: when a number is below 1 or the extra is missing.
    """
    require_at_least(
        1,
        micro_batch_size=micro_batch_size,
        leaves_per_rank=leaves_per_rank,
        num_epochs=num_epochs,
    )
    try:
        from datasets.distributed import split_dataset_by_node
    except ImportError as error:
        raise ConfigError(
            "stream_loader needs the package datasets: pip install 'gradsync[data]'"
        ) from error
    return StreamLoader(
        split_dataset_by_node(dataset, rank=world.rank, world_size=world.world_size),
        world,
        micro_batch_size=micro_batch_size,
        leaves_per_rank=leaves_per_rank,
        comm=comm or communicator(world),
        num_epochs=num_epochs,
        collate_fn=collate_fn or default_collate,
        device=torch.device(world.device if device is None else device),
        seed=seed,
        seed_leaves=seed_leaves,
    )
