"""Batches under other projects' names: `DDPManager.get_dataloader`, `DatasetLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from gradsync.data.batch_plan import require_at_least, share
from gradsync.data.loader import Loader
from gradsync.data.micro_batch import move_to
from gradsync.data.order import SampleOrder
from gradsync.data.tokens import open_dataset
from gradsync.errors import ConfigError
from gradsync.world import World


class BatchLoader:
    """torch's `DataLoader` for this rank: one pass gives `len(self)` batches on the device, the
    same number on every rank, so that DDP cannot hang. `options` are torch's.

    Each sample comes once per pass, on one rank. The last batches are shorter: ranks' shares differ
    by at most one sample, and none is empty. `sampler.set_epoch(n)` names the order of the next
    pass; without it the order changes from pass to pass all the same.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        self.dataset, self.batch_size, self.device = dataset, batch_size, world.device
        order = SampleOrder(len(dataset), world.seed if seed is None else seed, shuffle)
        self.sampler = SharesOfBatches(order, world, batch_size, drop_last=drop_last)
        options["pin_memory"] = world.device.type == "cuda"
        self._batches = DataLoader(dataset, batch_sampler=self.sampler, **options)

    def __len__(self) -> int:
        return len(self.sampler.shares)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield move_to(batch, self.device)


class SharesOfBatches(Sampler[list[int]]):
    """Yields a rank's part of each batch of a pass, as indices into the data set. Its length is the
    number of this rank's samples in a pass, as that of torch's `DistributedSampler`."""

    def __init__(
        self, order: SampleOrder, world: World, batch_size: int, *, drop_last: bool
    ) -> None:
        require_at_least(1, batch_size=batch_size)
        count, ranks, whole = order.num_samples, world.world_size, batch_size * world.world_size
        sizes = [whole] * (count // whole)
        if rest := 0 if drop_last else count % whole:
            few = sizes and rest < ranks  # then the batch before leaves one for each rank
            sizes[-1:] = [whole + rest - ranks, ranks] if few else [*sizes[-1:], rest]
        if min(sizes, default=0) < ranks:
            raise ConfigError(
                f"{count} samples cannot be dealt to {ranks} ranks in batches of {batch_size} so "
                "that each has as many and none is empty: take fewer ranks, a larger batch_size, "
                "or drop_last=True"
            )
        self._order, self._epoch = order, 0
        self.shares: list[range] = []
        """Places of this rank's samples within a pass, by batch."""
        start = 0
        for size in sizes:
            part = share(size, world.rank, ranks)
            self.shares.append(range(start + part.start, start + part.stop))
            start += size

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` in the next pass."""
        self._epoch = epoch

    def __len__(self) -> int:
        return sum(map(len, self.shares))

    def __iter__(self) -> Iterator[list[int]]:
        first = self._epoch * self._order.num_samples
        self._epoch += 1
        for part in self.shares:
            yield self._order.indices(first + part.start, len(part)).tolist()


class DatasetLoader:
    """Endless (x, y) batches of tokens, for loops with their own arithmetic. Each `next_batch`
    takes the next `batch` samples of this process; the processes' batches of one call are disjoint.

    Args:
        batch: B, samples per process and call.
        seq_len: T, tokens in a sample.
        process_rank: this process, 0 .. num_processes-1.
        num_processes: processes that share the data.
        dataset_dir: a data directory from `gradsync prepare`.
        device: where batches go.
        split: "train" or "val".
        seed: of the order, and of random draws at each batch.
    """

    def __init__(  # noqa: PLR0917  the call that readers of other guides know
        self,
        batch: int,
        seq_len: int,
        process_rank: int,
        num_processes: int,
        dataset_dir: Path | str,
        device: torch.device | str = "cpu",
        *,
        split: str = "train",
        seed: int = 0,
    ) -> None:
        self._loader = Loader(
            open_dataset(dataset_dir, split, seq_len),
            World(rank=process_rank, world_size=num_processes),
            global_batch_size=batch * num_processes,
            micro_batch_size=batch,
            seed=seed,
            device=device,
        )
        self._steps = iter(self._loader)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64, shape [B, T] each; endless, epochs advance by themselves."""
        (micro_batch,) = next(self._steps)
        return micro_batch.inputs, micro_batch.targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """Position in the data; equal on all processes."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`, saved with any number of processes."""
        self._loader.load_state_dict(state)
        self._steps = iter(self._loader)
