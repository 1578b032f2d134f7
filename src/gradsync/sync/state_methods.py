"""Methods of a handle for saving, loading and comparing: whole weights, whole state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradsync.comm.base import Communicator
from gradsync.core.files import counted
from gradsync.errors import ConfigError
from gradsync.sync.buffers import BufferSync
from gradsync.sync.check_replicas import check_replicas, replica_tensors
from gradsync.sync.reducer import Reducer
from gradsync.sync.step import Optimizers, StepParts, each_optimizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gradsync.sync.sharded_state import HeldState, Share


class StateMethods:
    """Methods of `GradientSync` that a step does not need; all ranks call each, except `wait`."""

    model: nn.Module
    comm: Communicator
    reducer: Reducer
    _buffers: BufferSync
    _parts: StepParts

    def __repr__(self) -> str:
        of = f"{type(self.model).__name__}, {counted(len(self.reducer.parameters), 'parameter')}"
        ranks = f"rank {self.comm.rank} of {self.comm.world_size}"
        return f"<{type(self).__name__} {self.reducer.strategy} of {of}, {ranks}>"

    @property
    def whole_parameters(self) -> bool:
        """False if a rank holds a share of each parameter, so every forward needs all ranks."""
        return self.reducer.shards.whole_parameters

    @property
    def equal_replicas(self) -> bool:
        """False if replicas drift between rounds."""
        return self.reducer.shards.equal_replicas

    def wait(self) -> None:
        """Return when this rank's weights are those of the last step.

        With `overlap_publish` a weight is updated when the next forward needs it. Call this before
        you read weights or the optimizer's state in another way than by the methods below. Without
        `overlap_publish` there is nothing to wait for.
        """
        self.reducer.shards.wait()

    def synchronize_replicas(self) -> None:
        """Make replicas equal at the end of a run, on all ranks, under strategies that let them
        drift (`local_sgd`, `diloco`); does nothing under others."""
        self.reducer.shards.synchronize_replicas()

    def gather(self, optimizer: Optimizers) -> None:
        """Make each `optimizer.state` whole until `scatter`, for a checkpoint; all ranks call it.

        Args:
            optimizer: one, or the list passed to `step`; the same applies below.
        """
        self.wait()
        for each in each_optimizer(optimizer):
            self.reducer.shards.gather(each)

    def scatter(self, optimizer: Optimizers) -> None:
        """Divide a whole `optimizer.state`, after a checkpoint or loading; all ranks call it."""
        for each in each_optimizer(optimizer):
            self.reducer.shards.scatter(each)

    def sharded_state_dict(self, optimizer: Optimizers) -> HeldState | None:
        """This rank's part of the state, sharing its memory; None if the state is whole."""
        self.wait()
        found: HeldState = {}
        for each in each_optimizer(optimizer):
            held = self.reducer.shards.sharded_state_dict(each)
            if held is None:
                return None
            # An optimizer that shares buckets also lists the others' parameters, without state.
            found |= {p: part for p, part in held.items() if part[1] or p not in found}
        return found

    def load_sharded_state_dict(
        self, optimizer: Optimizers, states: Mapping[Any, dict[str, Any]]
    ) -> None:
        """Restore a part from `sharded_state_dict`."""
        for each in each_optimizer(optimizer):
            own = [p for group in each.param_groups for p in group["params"]]
            mine = {p: states[p] for p in own if p in states}
            self.reducer.shards.load_sharded_state_dict(each, mine)

    def sharded_weights(self) -> dict[str, tuple[Share, Tensor]] | None:
        """This rank's part of parameters and buffers; None if they are whole."""
        self.wait()
        return self.reducer.shards.sharded_weights()

    def load_sharded_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite this rank's part with one from `sharded_weights`."""
        self.wait()
        self.reducer.shards.load_sharded_weights(weights)
        self._buffers.refresh()

    def full_weights(self, *, copy: bool = True) -> dict[str, Tensor]:
        """Whole parameters and buffers by name, as `model.state_dict()`; all ranks call it.

        Args:
            copy: False returns the model's own tensors, which the next step changes, except if a
                rank has only a part of each.
        """
        self.wait()
        weights, copies = self.reducer.shards.full_weights(), dict[object, Any]()
        for name, tensor in weights.items() if copy else ():
            if hasattr(tensor, "data_ptr"):  # else a module's extra state
                key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
                weights[name] = copies.setdefault(key, tensor.clone())  # tied ones stay tied
        return weights

    def state_tensors(self) -> dict[str, Tensor]:
        """State that the strategy keeps between steps, for a checkpoint; call it after `gather`."""
        return self.reducer.shards.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore tensors from `state_tensors`, after weights and optimizer."""
        self.reducer.shards.load_state_tensors(tensors)

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers with whole ones, by the names of `full_weights`."""
        self.wait()
        self.reducer.shards.load_full_weights(weights)
        self._buffers.refresh()

    def check_replicas(
        self,
        optimizer: Optimizers | None = None,
        *,
        step: int | None = None,
        heal: bool = False,
    ) -> bool:
        """Check that all ranks hold the same bits: compares a hash per parameter and buffer.

        All ranks call it between two steps, after `step` and before the next step's first
        `backward`. When ranks divide an update (on one host, `zero1`, `zero2`), weights that
        differed before it become one mixture, equal on all ranks. It finds changes that a step does
        not notice by itself, such as `p.data[0] = 0`.

        Args:
            optimizer: compare its state too; not under strategies that shard it.
            step: number of the step, for the message.
            heal: copy the bits that more than half of the ranks hold to the others, with a warning.

        Returns:
            Whether the bits were equal before; False if something was healed.

        Raises:
            RunError: on every rank: names the first tensor that differs, the step and the ranks;
                with `heal` only if no majority agrees.
            ConfigError: under a strategy whose ranks differ on purpose.
        """
        if not (self.reducer.shards.whole_parameters and self.reducer.shards.equal_replicas):
            raise ConfigError(
                f"sync={self.reducer.strategy!r} lets ranks hold different values on purpose: "
                "there is nothing to check"
            )
        self.wait()
        optimizers = [] if optimizer is None else each_optimizer(optimizer)
        tensors = replica_tensors(self.model, optimizers)
        healed = check_replicas(tensors, self.comm, step=step, heal=heal)
        if healed and self._parts.watch:
            self._parts.watch.remember(*optimizers)
        return not healed
