"""A clock that jumps from event to event, and a channel that carries one thing at a time; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Action = Callable[[], None]


class EventLoop:
    """Actions at moments; those of one moment in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self._waiting: list[tuple[float, int, Action]] = []
        self._order = count()

    def after(self, seconds: float, action: Action) -> None:
        """Carry `action` out so long from now."""
        heappush(self._waiting, (self.now + seconds, next(self._order), action))

    def run(self) -> float:
        """Until nothing is left to do; returns when that was."""
        while self._waiting:
            self.now, _, action = heappop(self._waiting)
            action()
        return self.now


class Channel:
    """What comes waits until what came before is through."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[float, Action]] = deque()
        self._busy = False

    def send(self, seconds: float, done: Action) -> None:
        """Occupy the channel so long, as soon as it is free; then call `done`."""
        self._queue.append((seconds, done))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._queue)
        if self._busy:
            seconds, done = self._queue.popleft()
            self._loop.after(seconds, lambda: self._finish(done))

    def _finish(self, done: Action) -> None:
        done()
        self._next()
