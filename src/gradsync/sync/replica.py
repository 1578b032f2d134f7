"""One rank's replica of a model: weights and optimizer states, whole or this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gradsync.sync.buffers import BufferSync
from gradsync.sync.reducer import Reducer
from gradsync.sync.step import Optimizers, each_optimizer

if TYPE_CHECKING:
    from torch import Tensor

    from gradsync.comm.base import Communicator
    from gradsync.sync.shares import HeldState, Share


class Replica:
    """This rank's replica of a model, for gradsync's own commands; scripts use `GradientSync`.

    All ranks call each method, except `wait`. An `optimizer` is one, or the list passed to `step`.
    """

    def __init__(self, comm: Communicator, reducer: Reducer, buffers: BufferSync) -> None:
        self.comm, self.reducer, self._buffers = comm, reducer, buffers
        self._shards = reducer.shards
        self.whole_parameters = self._shards.whole_parameters
        """False if a rank holds a share of each parameter, so every forward needs all ranks."""
        self.equal_replicas = self._shards.equal_replicas
        """False if replicas drift between rounds."""

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """Run a throwaway backward before the first step. Some strategies group sums by the first
        backward, so without this a resumed run would have other bits."""
        with self._buffers.untouched():
            self.reducer.prime(forward_backward)

    def wait(self) -> None:
        """Return when this rank's weights are those of the last step.

        With `overlap_publish` a weight is updated when the next forward needs it. Call this before
        reading weights or the optimizer's state in another way than by the methods below.
        """
        self._shards.wait()

    def synchronize_replicas(self) -> None:
        """See `GradientSync.synchronize_replicas`."""
        self._shards.synchronize_replicas()

    def gather(self, optimizer: Optimizers) -> None:
        """Make each `optimizer.state` whole until `scatter`, for a checkpoint."""
        self.wait()
        for each in each_optimizer(optimizer):
            self._shards.gather(each)

    def scatter(self, optimizer: Optimizers) -> None:
        """Divide a whole `optimizer.state`, after a checkpoint or loading."""
        for each in each_optimizer(optimizer):
            self._shards.scatter(each)

    def sharded_state_dict(self, optimizer: Optimizers) -> HeldState | None:
        """This rank's part of the state, sharing its memory; None if the state is whole."""
        self.wait()
        found: HeldState = {}
        for each in each_optimizer(optimizer):
            held = self._shards.sharded_state_dict(each)
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
            self._shards.load_sharded_state_dict(each, {p: states[p] for p in own if p in states})

    def sharded_weights(self) -> dict[str, tuple[Share, Tensor]] | None:
        """This rank's part of parameters and buffers; None if they are whole."""
        self.wait()
        return self._shards.sharded_weights()

    def load_sharded_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite this rank's part with one from `sharded_weights`."""
        self.wait()
        self._shards.load_sharded_weights(weights)
        self._buffers.refresh()

    def full_weights(self, *, copy: bool = True) -> dict[str, Tensor]:
        """Whole parameters and buffers by name, as `model.state_dict()`. Without `copy` these may
        be the model's own tensors, which the next step changes."""
        self.wait()
        weights, copies = self._shards.full_weights(), dict[object, Any]()
        for name, tensor in weights.items() if copy else ():
            if hasattr(tensor, "data_ptr"):  # else a module's extra state
                key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
                weights[name] = copies.setdefault(key, tensor.clone())  # tied ones stay tied
        return weights

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers with whole ones, by the names of `full_weights`."""
        self.wait()
        self._shards.load_full_weights(weights)
        self._buffers.refresh()

    def state_tensors(self) -> dict[str, Tensor]:
        """State that the strategy keeps between steps, for a checkpoint; call it after `gather`."""
        return self._shards.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore tensors from `state_tensors`, after weights and optimizer."""
        self._shards.load_state_tensors(tensors)
