"""Readings stay what they were, however often the watch is used again."""

from __future__ import annotations

import time

import pytest

from gradsync.sync.monitors import Stopwatch


def test_a_copy_keeps_its_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.5, 20.0, 20.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch(on_cuda=False)
    readings = []
    for _ in range(2):
        watch.start()
        watch.stop()
        readings.append(watch.copy())
    assert [reading.seconds() for reading in readings] == [2.5, 0.25]


def test_nothing_measured_is_zero() -> None:
    watch = Stopwatch(on_cuda=False)
    assert watch.seconds() == 0.0
    watch.stop()
    assert watch.seconds() == 0.0
