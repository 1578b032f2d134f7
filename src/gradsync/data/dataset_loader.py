"""`DatasetLoader`: endless (x, y) batches of tokens, for loops that do their own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsync.data.limits import require_at_least
from gradsync.data.loader import LoaderState, loader
from gradsync.data.tokens import open_dataset
from gradsync.errors import ConfigError
from gradsync.world import World


class DatasetLoader:
    """A thin face over `loader`: every call of `next_batch` takes the next `batch` samples of this
    process, and the processes' batches of one call are disjoint.

    Args:
        batch: B, samples a process takes at once.
        seq_len: T, tokens in a sample.
        process_rank: this process, 0 .. num_processes-1.
        num_processes: processes that share the data.
        dataset_dir: a data directory, see `open_dataset`.
        device: where batches go.
        split: "train" or "val".
        seed: names the order, and the random streams of batches.
        seed_leaves: seed torch's generators by (seed, step, process) before each batch, as
            `loader` does, so that processes draw unlike dropout masks; False leaves them alone.

    Raises:
        ConfigError: when a number is out of its range.
        DataError: when the data cannot be used.
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
        seed_leaves: bool = True,
    ) -> None:
        require_at_least(1, batch=batch, seq_len=seq_len, num_processes=num_processes)
        if not 0 <= process_rank < num_processes:
            raise ConfigError(f"process_rank must be in 0..{num_processes - 1}; got {process_rank}")
        self._loader = loader(
            open_dataset(dataset_dir, split, seq_len),
            World(rank=process_rank, world_size=num_processes),
            global_batch_size=batch * num_processes,
            micro_batch_size=batch,
            seed=seed,
            seed_leaves=seed_leaves,
            device=device,
        )
        self._steps = iter(self._loader)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64, shape [B, T] each; never ends, epochs advance alone."""
        (leaf,) = next(self._steps)
        return leaf.inputs, leaf.targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.next_batch()

    def state_dict(self) -> LoaderState:
        """Where the data stands; the same on all processes."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, whatever the number of processes that saved it.

        Raises:
            DataError: when the state is of another data set or seed.
        """
        self._loader.load_state_dict(state)
        self._steps = iter(self._loader)
