"""`diloco`: an inner optimizer on each rank, an outer one with Nesterov momentum when they meet.

Douillard et al. 2023 (arXiv 2311.08105), algorithm 1, with t a round and i a rank:

    theta_i      <- inner optimizer from theta, `inner_steps` steps on rank i's own data
    delta        =  1/W sum_i (theta - theta_i)             the outer gradient
    theta        <- SGD(lr=outer_lr, momentum=outer_momentum, nesterov=True) with delta

The inner optimizer is the user's (AdamW in the paper), its state private to each rank, kept from
round to round. Bytes per rank: 2(W-1)/W S every `inner_steps` steps, one operation per dtype;
memory: 2 S (the round's start, the outer momentum), 2 S more while ranks meet. On one rank it is
not the identity: the outer optimizer runs there, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from gradsync.comm.base import Communicator
from gradsync.core.torch_private import foreach_copy_, foreach_sub
from gradsync.errors import CheckpointError, ConfigError
from gradsync.sync.periodic.mean import mean_over_ranks
from gradsync.sync.periodic.rounds import RoundReducer
from gradsync.sync.reducer import Reduction, trainable

if TYPE_CHECKING:
    from torch import Tensor, nn

_PREFIX = "outer_momentum/"


class DilocoReducer(RoundReducer):
    """Outer SGD over the weights with which the round began.

    Args:
        model: on its device; its replicas are equal.
        comm: all ranks.
        inner_steps: steps of a round (H). The paper's 500 suits runs of many thousand steps.
        outer_lr: learning rate of the outer SGD; 1.0 with `outer_momentum=0.0` averages weights.
        outer_momentum: Nesterov momentum of the outer SGD, 0 .. 1.

    Raises:
        ConfigError: a number out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        inner_steps: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        if outer_lr <= 0:
            raise ConfigError(f"outer_lr must be above 0, got {outer_lr}")
        if not 0 <= outer_momentum < 1:
            raise ConfigError(
                f"outer_momentum must be in 0 .. 1 (1 excluded), got {outer_momentum}"
            )
        super().__init__(model, comm, inner_steps=inner_steps)
        with torch.no_grad():
            self._start = [
                parameter.detach().to(
                    torch.promote_types(parameter.dtype, torch.float32), copy=True
                )
                for parameter in self.parameters
            ]
        self._outer = torch.optim.SGD(
            self._start, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
        )

    def reduce(self, used: list[bool]) -> Reduction:
        """See `RoundReducer.reduce`; the first step of a round stores the weights it starts from.

        Stored each time, not kept from the last meeting: weights may have been loaded since.
        """
        if not self.steps_in_round:
            foreach_copy_(self._start, [p.detach() for p in self.parameters])
        return super().reduce(used)

    def meet(self) -> None:
        """Take one outer step from the round's start, equal on all ranks."""
        with torch.no_grad():
            deltas = foreach_sub(self._start, [p.detach() for p in self.parameters])
            for start, delta in zip(self._start, mean_over_ranks(deltas, self.comm), strict=True):
                start.grad = delta
            del deltas
            self._outer.step()
            self._outer.zero_grad(set_to_none=True)
            for parameter, start in zip(self.parameters, self._start, strict=True):
                parameter.copy_(start)

    def state_tensors(self) -> dict[str, Tensor]:
        """The outer momentum by parameter, equal on all ranks; nothing before the first meeting."""
        return {
            _PREFIX + name: self._outer.state[start]["momentum_buffer"]
            for (name, _), start in zip(trainable(self.model), self._start, strict=True)
            if self._outer.state[start].get("momentum_buffer") is not None
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a saved outer momentum; an empty mapping begins without one.

        Raises:
            CheckpointError: a parameter is missing or has another shape.
        """
        self._outer.state.clear()
        self.steps_in_round = 0
        if not tensors:
            return
        for (name, _), start in zip(trainable(self.model), self._start, strict=True):
            saved = tensors.get(_PREFIX + name)
            if saved is None or saved.shape != start.shape:
                got = "missing" if saved is None else f"of shape {tuple(saved.shape)}"
                raise CheckpointError(
                    f"outer momentum of parameter {name!r} is {got}, expected {tuple(start.shape)}"
                )
            self._outer.state[start]["momentum_buffer"] = saved.to(start, copy=True)
