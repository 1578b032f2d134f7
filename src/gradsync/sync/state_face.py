"""What a handle offers to those who save, load and compare: whole weights, whole state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.sync.reducer import Reducer
from gradsync.sync.replicas import check_replicas, replica_tensors
from gradsync.sync.statistics import Statistics
from gradsync.sync.step import Optimizers, each_optimizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gradsync.sync.sharded.shares import HeldState, Share


class StateFace:
    """The part of `GradientSync` that a training step does not need; all ranks call each of it."""

    model: nn.Module
    comm: Communicator
    reducer: Reducer
    _statistics: Statistics

    def settle(self) -> None:
        """At the end of a run, on all ranks: strategies that let replicas drift (`local_sgd`,
        `diloco`) bring them together. Nothing to do under the others."""
        self.reducer.settle()

    def gather(self, optimizer: Optimizers) -> None:
        """Before a checkpoint, on all ranks: each `optimizer.state` is whole until `scatter`.

        Args:
            optimizer: one, or a list of those that `step` takes together; so below.
        """
        for each in each_optimizer(optimizer):
            self.reducer.gather(each)

    def scatter(self, optimizer: Optimizers) -> None:
        """After a checkpoint, or after loading a whole `optimizer.state`, on all ranks."""
        for each in each_optimizer(optimizer):
            self.reducer.scatter(each)

    def held_state(self, optimizer: Optimizers) -> HeldState | None:
        """This rank's part of the state, see `Reducer.held_state`; None where it is whole."""
        found: HeldState = {}
        for each in each_optimizer(optimizer):
            held = self.reducer.held_state(each)
            if held is None:
                return None
            # One that shares buckets out lists the others' parameters too, without state.
            found |= {p: part for p, part in held.items() if part[1] or p not in found}
        return found

    def keep_state(self, optimizer: Optimizers, states: Mapping[Any, dict[str, Any]]) -> None:
        """Take a part as `held_state` gives it."""
        for each in each_optimizer(optimizer):
            own = [p for group in each.param_groups for p in group["params"]]
            self.reducer.keep_state(each, {p: states[p] for p in own if p in states})

    def held_weights(self) -> dict[str, tuple[Share, Tensor]] | None:
        """This rank's part of parameters and buffers; None where they are whole."""
        return self.reducer.held_weights()

    def keep_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite this rank's part with one as `held_weights` gives it."""
        self.reducer.keep_weights(weights)
        self._statistics.refresh()

    def full_weights(self) -> dict[str, Tensor]:
        """Whole parameters and buffers by name, as `model.state_dict()`; all ranks call it."""
        return self.reducer.full_weights()

    def state_tensors(self) -> dict[str, Tensor]:
        """What the strategy remembers from step to step, for a checkpoint; after `gather`."""
        return self.reducer.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state_tensors` gave, after weights and optimizer."""
        self.reducer.load_state_tensors(tensors)

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers with whole ones, by the names of `full_weights`."""
        self.reducer.load_full_weights(weights)
        self._statistics.refresh()

    def check_replicas(
        self, optimizer: Optimizers | None = None, *, step: int | None = None
    ) -> None:
        """All ranks must hold the same bits: compares a hash per parameter and buffer.

        All ranks call it between two steps, after `step` and before the next step's first
        `backward`: an update that ranks divide among themselves (on one host, `zero1`, `zero2`)
        makes one mixture of what differed before it, and then all are equal. Every step compares
        by itself when a rank notices that weights have changed (version counters, addresses, a
        sample of elements); this call finds what these miss.

        Args:
            optimizer: compare its state too; not under strategies that share it out.
            step: for the message.

        Raises:
            RunError: on every rank: names the first tensor that differs, the step and the ranks.
            ConfigError: under a strategy whose ranks differ on purpose.
        """
        if not (self.reducer.whole_parameters and self.reducer.equal_replicas):
            raise ConfigError(
                f"sync={self.reducer.strategy!r} lets ranks hold different values on purpose: "
                "there is nothing to check"
            )
        optimizers = [] if optimizer is None else each_optimizer(optimizer)
        check_replicas(replica_tensors(self.model, optimizers), self.comm, step=step)
