"""Where an interval's time goes, on a clock that the test winds."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from gradsync.sync import stopwatch
from gradsync.sync.stopwatch import Stopwatch
from gradsync.train import loop
from gradsync.train.loop import Interval


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    winding = Clock()
    clock = SimpleNamespace(perf_counter=lambda: winding.now)
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(stopwatch, "time", clock)
    return winding


def slow(clock: Clock, seconds: list[float]) -> Iterator[float]:
    """Items that take their own value to come, and one more second to end."""
    for value in seconds:
        clock.advance(value)
        yield value
    clock.advance(1.0)


def exposed(clock: Clock, seconds: float) -> Stopwatch:
    watch = Stopwatch(on_cuda=False)
    watch.start()
    clock.advance(seconds)
    watch.stop()
    return watch


def test_waiting_is_told_from_working(clock: Clock) -> None:
    interval = Interval()
    seen = []
    for item in interval.waiting(slow(clock, [2.0, 3.0])):
        seen.append(item)
        clock.advance(10.0)
    assert seen == [2.0, 3.0]
    assert interval.data_s == 2.0 + 3.0 + 1.0  # finding the end takes time too
    assert interval.read() == (26.0, 0.0)


def test_waiting_in_waiting_adds_up(clock: Clock) -> None:
    interval = Interval()
    for _ in interval.waiting(slow(clock, [2.0])):
        for _ in interval.waiting(slow(clock, [3.0, 4.0])):
            clock.advance(10.0)
    assert interval.data_s == 2.0 + 3.0 + 4.0 + 1.0 + 1.0


def test_an_error_of_the_data_passes_through(clock: Clock) -> None:
    def broken() -> Iterator[int]:
        clock.advance(2.0)
        raise ValueError("no data")
        yield 0

    interval = Interval()
    with pytest.raises(ValueError, match="no data"):
        list(interval.waiting(broken()))
    assert interval.data_s == 2.0


def test_a_pause_is_left_out(clock: Clock) -> None:
    interval = Interval()
    clock.advance(1.0)
    with interval.paused():
        clock.advance(100.0)
    clock.advance(2.0)
    assert interval.read() == (3.0, 0.0)


def test_a_pause_that_fails_is_left_out(clock: Clock) -> None:
    interval = Interval()

    def block() -> None:
        with interval.paused():
            clock.advance(100.0)
            raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        block()
    assert interval.read() == (0.0, 0.0)


def test_exposed_communication_adds_up(clock: Clock) -> None:
    interval = Interval()
    interval.add(exposed(clock, 0.25))
    interval.add(exposed(clock, 0.5))
    interval.add(Stopwatch(on_cuda=False))  # a step in which nothing was exposed
    assert interval.steps == 3
    assert interval.read() == (0.75, 0.75)
    clock.advance(1.0)
    assert interval.read() == (1.75, 0.75)  # reading changes nothing


def test_reset_begins_anew(clock: Clock) -> None:
    interval = Interval()
    for _ in interval.waiting(slow(clock, [2.0])):
        interval.add(exposed(clock, 0.5))
        interval.reset()
        clock.advance(7.0)
    assert interval.steps == 0
    assert interval.data_s == 1.0  # what came after the reset
    assert interval.read() == (8.0, 0.0)


def test_a_stopwatch_keeps_only_whole_readings(clock: Clock) -> None:
    watch = Stopwatch(on_cuda=False)
    assert watch.seconds() == 0.0
    watch.start()
    assert watch.seconds() == 0.0
    clock.advance(2.0)
    watch.stop()
    kept = watch.copy()
    watch.start()
    clock.advance(5.0)
    watch.stop()
    assert (kept.seconds(), watch.seconds()) == (2.0, 5.0)
