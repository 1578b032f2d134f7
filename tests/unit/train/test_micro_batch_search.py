"""Which micro-batch is tried next, and which one is taken."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from gradsync.commands.train.micro_batch import (
    Trial,
    chosen_size,
    legal_sizes,
    next_size,
    predicted,
)


def search(sizes: tuple[int, ...], fits_up_to: int, *, careful: bool = False) -> list[int]:
    """The sizes that are tried where memory ends at `fits_up_to`; each costs the same a piece."""
    trials: list[Trial] = []
    while (size := next_size(sizes, trials, careful=careful)) is not None:
        assert len(trials) < 100
        assert size not in [trial.size for trial in trials]
        trials.append(trial_of(size, fits_up_to))
    tried = [trial.size for trial in trials]
    best = max((size for size in tried if size <= fits_up_to), default=None)
    assert chosen_size(trials, careful=False) == best
    return tried


def trial_of(size: int, fits_up_to: int, *, seconds: float | None = None) -> Trial:
    return Trial(
        size=size,
        fits=size <= fits_up_to,
        peak=size / (fits_up_to + 0.5),
        slope=1 / (fits_up_to + 0.5),
        seconds=1 / size if seconds is None else seconds,  # growing always pays
    )


@pytest.mark.parametrize(
    ("sizes", "fits_up_to", "tried"),
    [
        (range(1, 65), 21, [1, 2, 4, 8, 16, 32, 24, 20, 22, 21]),  # doubles, then halves the gap
        ((1, 2, 3, 6, 9, 18), 7, [1, 2, 3, 6, 9]),
        ((5, 35), 34, [5, 35]),
        ((1, 2, 4, 8), 1000, [1, 2, 4, 8]),
        ((4, 8), 3, [4]),
    ],
)
def test_sizes_that_are_tried(sizes: Iterable[int], fits_up_to: int, tried: list[int]) -> None:
    assert search(tuple(sizes), fits_up_to) == tried


def test_nothing_fits() -> None:
    assert chosen_size([trial_of(4, 3)], careful=True) is None
    assert next_size((), (), careful=True) is None


def test_it_always_finds_the_largest() -> None:
    sizes = (1, 2, 3, 5, 8, 12, 13, 21, 30)
    for fits_up_to in range(0, 40, 3):
        tried = search(sizes, fits_up_to)
        most = max((size for size in sizes if size <= fits_up_to), default=None)
        assert max((size for size in tried if size <= fits_up_to), default=None) == most


def test_a_careful_search_never_tries_what_will_not_fit() -> None:
    """The largest that is predicted to fit is tried, if twice as much is too much."""
    for fits_up_to in range(1, 40):
        assert max(search(tuple(range(1, 65)), fits_up_to, careful=True)) <= fits_up_to
    assert search(tuple(range(1, 65)), 11, careful=True) == [1, 2, 4, 8, 11]


def test_a_careful_search_stops_when_growing_does_not_pay() -> None:
    trials = [trial_of(1, 100, seconds=1.0), trial_of(2, 100, seconds=1.5)]
    assert next_size((1, 2, 4), trials, careful=True) == 4
    trials.append(trial_of(4, 100, seconds=2.95))
    assert next_size((1, 2, 4, 8), trials, careful=True) is None
    assert next_size((1, 2, 4, 8), trials, careful=False) == 8
    assert chosen_size(trials, careful=True) == 4  # as fast as the fastest, within 3 %
    slower = [*trials[:2], trial_of(4, 100, seconds=3.2)]
    assert chosen_size(slower, careful=True) == 2
    assert chosen_size(slower, careful=False) == 4


def test_the_prediction_is_a_line() -> None:
    assert predicted(Trial(size=4, fits=True, peak=0.5, slope=0.1), 8) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("sequences", "ranks", "equal", "sizes"),
    [
        (16, 1, False, (1, 2, 4, 8, 16)),
        (16, 4, False, (1, 2, 4)),
        (12, 2, False, (1, 2, 3, 6)),
        (3, 4, False, ()),
        (8, 3, False, (1,)),  # leaves of 2 would give one rank 4 sequences, where 3 will do
        (9, 3, False, (1, 3)),
        (12, 2, True, (1, 2, 3, 6)),
        (12, 5, True, ()),
    ],
)
def test_legal_sizes(sequences: int, ranks: int, equal: bool, sizes: tuple[int, ...]) -> None:
    assert legal_sizes(sequences, ranks, equal_leaves=equal) == sizes


def test_legal_sizes_are_those_of_the_definition() -> None:
    for sequences, ranks in itertools.product((1, 30, 64, 97, 360), (1, 2, 3, 7)):
        loads = {
            size: -(-(sequences // size) // ranks) * size
            for size in range(1, sequences + 1)
            if sequences % size == 0 and sequences // size >= ranks
        }
        least = min(loads.values(), default=0)
        expected = tuple(size for size, load in loads.items() if load <= 1.125 * least)
        assert legal_sizes(sequences, ranks) == expected
