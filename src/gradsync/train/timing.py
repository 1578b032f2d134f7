"""Where an interval's time went, read only when asked for: no synchronisation in the step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from gradsync.sync.reducer import Stopwatch

T = TypeVar("T")


class Interval:
    """Steps, waiting for data and exposed communication since the last `reset`."""

    def __init__(self) -> None:
        self.steps = 0
        self.data_s = 0.0
        self._exposed: list[Stopwatch] = []
        self._started = time.perf_counter()

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """Pass `items` on, counting the time they take to come."""
        iterator = iter(items)
        while True:
            before = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.data_s += time.perf_counter() - before
            yield item

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens in the block: evaluation, saving."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - before

    def add(self, exposed: Stopwatch) -> None:
        """One more step, whose exposed communication `exposed` has measured."""
        self.steps += 1
        self._exposed.append(exposed)

    def read(self) -> tuple[float, float]:
        """(wall seconds, exposed communication seconds) so far; waits for the device."""
        exposed = sum(watch.seconds() for watch in self._exposed)
        return time.perf_counter() - self._started, exposed

    def reset(self) -> None:
        """Begin anew."""
        self.__init__()
