"""The parts of an interval's time, on a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from gradsync.commands.train import loop
from gradsync.commands.train.loop import Interval
from gradsync.sync import watch as stopwatch
from gradsync.sync.watch import Stopwatch


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
    for _ in interval.waiting(slow(clock, [2.0])):
        for _ in interval.waiting(slow(clock, [3.0, 4.0])):
            clock.advance(10.0)
    assert interval.data_s == 2.0 + 3.0 + 4.0 + 1.0 + 1.0  # finding the end takes time too
    assert interval.read() == (31.0, 0.0)


def test_a_pause_is_left_out(clock: Clock) -> None:
    interval = Interval()
    clock.advance(1.0)
    with interval.paused():
        clock.advance(100.0)
    clock.advance(2.0)
    assert interval.read() == (3.0, 0.0)


def test_exposed_communication_adds_up_until_reset(clock: Clock) -> None:
    interval = Interval()
    interval.add(exposed(clock, 0.25))
    interval.add(exposed(clock, 0.5))
    interval.add(Stopwatch(on_cuda=False))  # a step in which nothing was exposed
    assert interval.steps == 3
    assert interval.read() == (0.75, 0.75)
    clock.advance(1.0)
    assert interval.read() == (1.75, 0.75)  # reading changes nothing
    for _ in interval.waiting(slow(clock, [2.0])):
        interval.reset()
        clock.advance(7.0)
    assert (interval.steps, interval.data_s) == (0, 1.0)  # what came after the reset
    assert interval.read() == (8.0, 0.0)


@pytest.mark.parametrize("part", ["backward", "step"])
def test_exposed_communication_is_taken_from_the_part_in_which_it_lay(
    clock: Clock, part: str
) -> None:
    interval = Interval()
    for name in ("backward", "step"):
        with interval.span(name):
            clock.advance(5.0)
            if name == part:
                watch = exposed(clock, 2.0)
    interval.add(watch, part)
    watch.start()  # whoever measures again has its own readings
    clock.advance(9.0)
    watch.stop()
    assert interval.seconds_of(part) == 5.0
    assert interval.seconds_of("backward") + interval.seconds_of("step") == 10.0
    assert interval.read() == (21.0, 2.0)
