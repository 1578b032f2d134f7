"""Exact evaluation: each sample once, on one rank, without padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gradsync.data.leaf import Leaf, make_leaf
from gradsync.data.limits import require_at_least
from gradsync.data.reader import BatchReader, size_of
from gradsync.data.spans import cut_step
from gradsync.world import World


class EvalLeaves:
    """This rank's leaves of an evaluation; may be iterated again. See `eval_leaves`."""

    def __init__(
        self,
        reader: BatchReader,
        world: World,
        *,
        total_samples: int,
        micro_batch_size: int,
        device: torch.device,
    ) -> None:
        self.total_samples = total_samples
        """Samples over all ranks: what the summed `num_samples` of all leaves must come to."""
        self._span = cut_step(
            0,
            total_samples,
            micro_batch_size=micro_batch_size,
            rank=world.rank,
            world_size=world.world_size,
        )
        self._reader = reader
        self._device = device

        self.most = math.ceil(math.ceil(total_samples / micro_batch_size) / world.world_size)
        """Leaves of the rank that has most of them."""

    def __len__(self) -> int:
        return len(self._span.leaves)

    def __iter__(self) -> Iterator[Leaf]:
        for leaf in self._span.leaves:
            yield make_leaf(
                self._reader[np.arange(leaf.start, leaf.start + leaf.count)],
                index=leaf.index,
                step=0,
                num_samples=leaf.count,
                is_last=False,
                device=self._device,
            )


def eval_leaves(
    dataset: Any,
    world: World,
    micro_batch_size: int,
    max_samples: int | None = None,
    *,
    device: torch.device | str | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> EvalLeaves:
    """The first `max_samples` samples (or all) in order, split over the ranks by whole leaves.

    Ranks may have different numbers of leaves, or none: do not communicate inside the loop. Add up
    (sum, count) after it, and compare the count with `total_samples`.

    Args:
        dataset: anything with `__len__` and `__getitem__`.
        world: who we are.
        micro_batch_size: samples in a leaf; the last leaf may be shorter.
        max_samples: samples over all ranks; None is all.
        device: where batches go; None is the world's device.
        collate_fn: list of samples to batch; None is torch's `default_collate`.

    Raises:
        ConfigError: when a number is below 1.
        DataError: when the data set is not map-style.
    """
    require_at_least(1, micro_batch_size=micro_batch_size, max_samples=max_samples)
    num_samples = size_of(dataset)
    return EvalLeaves(
        BatchReader(dataset, collate_fn),
        world,
        total_samples=num_samples if max_samples is None else min(max_samples, num_samples),
        micro_batch_size=micro_batch_size,
        device=torch.device(world.device if device is None else device),
    )
