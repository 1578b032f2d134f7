"""Time between two points of the step, on the CPU's clock or in the GPU's stream."""

from __future__ import annotations

import time
from typing import Any


class Stopwatch:
    """Measures one interval: `start`, `stop`, and later `seconds()`.

    On CUDA it records events and reads them only when asked: wall-clock time would measure the
    launch, not the work, and waiting would synchronise the step.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self._marks: list[Any] = [None, None]

    def start(self) -> None:
        """Mark the beginning."""
        self._marks[0] = self._now()

    def stop(self) -> None:
        """Mark the end."""
        self._marks[1] = self._now()

    def copy(self) -> Stopwatch:
        """Copy this reading, so that it survives later measurements."""
        other = Stopwatch(on_cuda=self._on_cuda)
        other._marks = list(self._marks)
        return other

    def seconds(self) -> float:
        """Time from `start` to `stop`, waited for; 0.0 when one of the two has never happened."""
        first, last = self._marks
        if first is None or last is None:
            return 0.0
        if not self._on_cuda:
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1000

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
