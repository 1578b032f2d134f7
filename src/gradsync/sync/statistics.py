"""Synchronisation of a model's buffers, and of its BatchNorm layers, over a step.

A handle calls it at the phases of a step; the rules are in `buffers.py` and `batch_norm.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gradsync.comm.base import Communicator
from gradsync.sync.batch_norm import BatchNormHandling
from gradsync.sync.buffers import BufferSync, unchanged_buffers

if TYPE_CHECKING:
    from torch import nn


class Statistics:
    """One model's buffers over the phases of a step.

    Args:
        model: equal on all ranks.
        comm: all ranks.
        batch_norm: from `choose_batch_norm`.
        equal_replicas: False when replicas drift between rounds; then the strategy averages
            buffers itself when ranks meet.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        batch_norm: BatchNormHandling,
        *,
        equal_replicas: bool,
    ) -> None:
        self._model = model
        self._batch_norm = batch_norm
        self._buffers = (
            BufferSync(model, comm, skip=batch_norm.own_buffers) if equal_replicas else None
        )

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Enclose throwaway forwards."""
        with unchanged_buffers(self._model):
            yield
        self.leaf_ends(counts=False)

    def leaf_begins(self, *, last: bool) -> None:
        """Begin a backward.

        Raises:
            ConfigError: under batch_norm='sync', ranks with different numbers of leaves.
        """
        self._batch_norm.meet("last backward" if last else "backward")

    def leaf_ends(self, *, counts: bool = True) -> None:
        """End a backward; `counts` is False for a leaf of weight 0."""
        if self._buffers is not None:
            self._buffers.end_leaf(counts=counts)

    def step_begins(self) -> list[int]:
        """For each buffer, the number of leaves here that changed it; sums go into `step_ends`."""
        self._batch_norm.meet("step")
        return [] if self._buffers is None else self._buffers.counts()

    def step_ends(self, counts: Sequence[float]) -> None:
        """Set the buffers' new values."""
        if self._buffers is not None:
            self._buffers.step(counts)

    def refresh(self) -> None:
        """Read values that were overwritten between steps."""
        if self._buffers is not None:
            self._buffers.refresh()

    def close(self) -> None:
        """Remove hooks, restore the layers' own methods."""
        self._batch_norm.close()
        if self._buffers is not None:
            self._buffers.close()
