"""When a step began, when its last gradient was there, when it ended.

On a CPU that is the clock. On an accelerator it is events in the stream: the clock there would say
when work was handed over, not when it was done; events are read once the device is done.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class StepTimes:
    """Of the steps of a turn, seconds."""

    step_s: list[float] = field(default_factory=list)
    """Whole steps."""
    compute_s: list[float] = field(default_factory=list)
    """Forward and backward, until the rank's last gradient is there."""


class StepClock:
    """Called by a turn in this order: `begin`, then `backward_done` and `step_done` for each step.

    [Note: The last gradient]
    Torch's DDP waits for its messages at the end of backward. What a rank computes by itself ends
    earlier, with the gradient of the embedding: it is first in forward, and so last in backward. A
    hook on that one parameter looks at the clock.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self._marks: list[Any] = []
        self._last_gradient: Any = None

    def watch(self, parameter: Tensor) -> None:
        """`parameter` is the one whose gradient comes last; see [Note: The last gradient]."""
        parameter.register_post_accumulate_grad_hook(self._gradient_ready)

    def begin(self) -> None:
        """The first step of a turn begins."""
        self._last_gradient = None
        self._marks = [self._now()]

    def backward_done(self) -> None:
        """The last backward of a step has returned."""
        ready, self._last_gradient = self._last_gradient, None
        # Sharded parameters are others than those that were watched: there this has to do.
        self._marks.append(self._now() if ready is None else ready)

    def step_done(self) -> None:
        """The step has ended, and the next one begins."""
        self._marks.append(self._now())

    def read(self) -> StepTimes:
        """Of all steps since `begin`; waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
        times = StepTimes()
        begins, readies, ends = self._marks[:-1:2], self._marks[1::2], self._marks[2::2]
        for begin, ready, end in zip(begins, readies, ends, strict=True):
            times.compute_s.append(self._between(begin, ready))
            times.step_s.append(self._between(begin, end))
        return times

    def _gradient_ready(self, _: Tensor) -> None:
        self._last_gradient = self._now()

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1000 if self._on_cuda else last - first
