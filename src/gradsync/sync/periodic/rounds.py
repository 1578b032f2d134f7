"""Rounds of the periodic strategies: ranks step alone for a while, then meet.

    rank 0   step ─ step ─ … ─ step ─┐             ┌─ step ─ step ─ …
    rank 1   step ─ step ─ … ─ step ─┴─ one mean ──┴─ step ─ step ─ …
             └───── inner_steps ─────┘

Between two meetings each rank has different weights, and no gradient crosses the wire: a step sends
only its small message (loss, weight, stop flag). A rank's gradient is the mean over its own leaves;
in a step without a leaf it does not update, but still counts the step: all ranks meet after the
same number of steps.

[Note: A checkpoint ends the round] In the middle of a round there are W models. A caller that needs
one model (a checkpoint, an evaluation, the end of a run) calls `synchronize_replicas`: the round
ends there, with as many inner steps as it had. A checkpoint also keeps one inner optimizer's state,
rank 0's; `gather` copies it to all ranks. So a run that continues after a checkpoint and a run that
resumes from it are the same run. The price: the interval between checkpoints is part of the run's
definition, unless checkpoints fall on multiples of `inner_steps`, where rounds end anyway.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.sync.periodic.inner_state import take_state_of_rank_0
from gradsync.sync.periodic.mean import average_buffers
from gradsync.sync.reducer import Reducer, Reduction
from gradsync.sync.stopwatch import Stopwatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class RoundReducer(Reducer):
    """A strategy whose ranks meet every `inner_steps` steps.

    Args:
        model: on its device; its replicas are equal.
        comm: all ranks.
        inner_steps: steps of a round.

    Raises:
        ConfigError: `inner_steps` below 1.
    """

    equal_replicas = False

    def __init__(self, model: nn.Module, comm: Communicator, *, inner_steps: int) -> None:
        if inner_steps < 1:
            raise ConfigError(f"inner_steps must be at least 1, got {inner_steps}")
        super().__init__(model, comm)
        self.inner_steps = inner_steps
        self.steps_in_round = 0
        """Number of steps since the ranks last met."""
        self._watch = self._new_watch()
        self._note_buffers()

    def reduce(self, used: list[bool]) -> Reduction:
        """Leave `.grad` to this rank; the step's cost is known after `after_step`."""
        self._watch = self._new_watch()
        return Reduction(divided_by=1, exposed=self._watch, local=True)

    def after_step(self) -> None:
        """Count the step, even without data on this rank; meet when the round is full."""
        self.steps_in_round += 1
        if self.steps_in_round >= self.inner_steps:
            self.synchronize_replicas()

    def synchronize_replicas(self) -> None:
        """End the round now, so that all ranks hold the same model; all ranks call it.

        Does nothing when no step was taken since the last meeting. See
        [Note: A checkpoint ends the round].
        """
        if not self.steps_in_round:
            return
        self._watch.start()
        self.meet()
        average_buffers(list(self.model.buffers()), self._buffer_starts, self.comm)
        self._note_buffers()
        self._watch.stop()
        self.steps_in_round = 0

    @abstractmethod
    def meet(self) -> None:
        """Make the parameters equal on all ranks."""

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """End the round; every rank continues with rank 0's inner state, as the checkpoint does."""
        self.synchronize_replicas()
        take_state_of_rank_0(optimizer, self.comm)

    def full_weights(self) -> dict[str, Tensor]:
        """Return the weights that all ranks share; ends the round."""
        self.synchronize_replicas()
        return super().full_weights()

    def load_full_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the model on all ranks, and begin a round."""
        super().load_full_weights(weights)
        self.steps_in_round = 0
        self._note_buffers()

    def _note_buffers(self) -> None:
        """Store the buffers' values, which are equal on all ranks now; see `average_buffers`."""
        self._buffer_starts = [buffer.detach().clone() for buffer in self.model.buffers()]

    def _new_watch(self) -> Stopwatch:
        return Stopwatch(on_cuda=any(parameter.is_cuda for parameter in self.parameters))
