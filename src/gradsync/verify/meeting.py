"""What the ranks of `local_sgd` and `diloco` must hold after they have met, in fp64.

    local_sgd   the mean of the ranks' weights
    diloco      SGD with Nesterov momentum from where the round began, with the mean distance walked

Bounds: the mean of W numbers takes at most W + 1 roundings on the mean of their magnitudes, the
outer step eight more on everything that enters it, and what the momentum has gathered before counts
again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.verify.exact import DTYPE_NAMES, part_of_bound
from gradsync.verify.finding import Finding, Kind
from gradsync.verify.saved import Saved
from gradsync.verify.tolerance import SMALLEST_NORMAL, gamma
from gradsync.verify.trace import Tensors, Trace

_OUTER = 8


class Meetings:
    """Follows one run's meetings, all ranks' weights at hand.

    Args:
        strategy: local_sgd or diloco.
        options: its own, `inner_steps` among them.
        trace: rank 0's.
        saved: the checkpoint that the run began with.
    """

    def __init__(
        self, strategy: str, options: Mapping[str, Any], trace: Trace, saved: Saved | None
    ) -> None:
        self._outer = strategy == "diloco"
        self._inner_steps = options["inner_steps"]
        self._lr = options.get("outer_lr", 0.7)
        self._momentum = options.get("outer_momentum", 0.9)
        self._trace = trace
        self._velocity: dict[str, tuple[Tensor, Tensor]] = {}
        if saved is not None and saved.strategy == strategy:
            for key, tensor in saved.extra.items():
                exact = tensor.double()
                self._velocity[key.partition("/")[2]] = (exact, torch.zeros_like(exact))

    def meets_at(self, place: int) -> bool:
        """Whether the round ends with the step at `place`."""
        return (place + 1) % self._inner_steps == 0

    def check(self, place: int, weights: Sequence[Tensors]) -> Finding | None:
        """Compare rank 0's weights after the meeting with what all ranks' weights before it give.

        Args:
            place: of the step.
            weights: every rank's trainable parameters as its own optimizer left them.
        """
        step = self._trace.steps[place]
        start = self._trace.steps[place + 1 - self._inner_steps].before
        for name in self._trace.trainable:
            stack = torch.stack([each[name].double() for each in weights])
            dtype = DTYPE_NAMES[step.after[name].dtype]
            error = gamma(len(weights) + 1, dtype)
            expected, bound = stack.mean(0), error * stack.abs().mean(0)
            if self._outer:
                begun = start[name].double()
                expected, bound = self._step_out(name, begun, expected, bound, dtype)
            if part_of_bound(step.after[name], expected, bound + SMALLEST_NORMAL[dtype]) > 1:
                return Finding(kind=Kind.MEETING, step=step.number, names=(name,))
        return None

    def _step_out(
        self, name: str, begun: Tensor, mean: Tensor, bound: Tensor, dtype: str
    ) -> tuple[Tensor, Tensor]:
        """One outer step and how far it may be off; diloco's algorithm 1."""
        zeros = torch.zeros_like(begun)
        old, old_bound = self._velocity.get(name, (zeros, zeros))
        delta = begun - mean
        size = begun.abs() + mean.abs() + old.abs()
        error = bound + gamma(_OUTER, dtype) * size
        velocity = self._momentum * old + delta
        velocity_bound = self._momentum * old_bound + error
        self._velocity[name] = (velocity, velocity_bound)
        walked = delta + self._momentum * velocity
        return (
            begun - self._lr * walked,
            self._lr * (error + self._momentum * velocity_bound) + gamma(_OUTER, dtype) * size,
        )
