"""Which micro-batch is tried next, and which one is taken."""

from __future__ import annotations

import itertools

import pytest

from gradsync.plan.micro_batch import (
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


def test_it_doubles_and_then_halves_the_gap() -> None:
    assert search(tuple(range(1, 65)), 21) == [1, 2, 4, 8, 16, 32, 24, 20, 22, 21]


def test_only_legal_sizes_are_tried() -> None:
    assert search((1, 2, 3, 6, 9, 18), 7) == [1, 2, 3, 6, 9]
    assert search((5, 35), 34) == [5, 35]


def test_the_largest_legal_size_ends_it() -> None:
    assert search((1, 2, 4, 8), 1000) == [1, 2, 4, 8]


def test_nothing_fits() -> None:
    assert search((4, 8), 3) == [4]
    assert chosen_size([trial_of(4, 3)], careful=True) is None
    assert next_size((), (), careful=True) is None


@pytest.mark.parametrize("fits_up_to", range(0, 40, 3))
def test_it_always_finds_the_largest(fits_up_to: int) -> None:
    sizes = (1, 2, 3, 5, 8, 12, 13, 21, 30)
    tried = search(sizes, fits_up_to)
    most = max((size for size in sizes if size <= fits_up_to), default=None)
    assert max((size for size in tried if size <= fits_up_to), default=None) == most


def test_a_careful_search_never_tries_what_will_not_fit() -> None:
    for fits_up_to in range(1, 40):
        tried = search(tuple(range(1, 65)), fits_up_to, careful=True)
        assert max(tried) <= fits_up_to


def test_a_careful_search_goes_on_with_what_is_left_below_the_limit() -> None:
    """Twice as much is too much, the largest that is predicted to fit is tried."""
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


def test_legal_sizes_divide_the_batch_and_leave_everybody_a_leaf() -> None:
    assert legal_sizes(16, 1) == (1, 2, 4, 8, 16)
    assert legal_sizes(16, 4) == (1, 2, 4)
    assert legal_sizes(12, 2) == (1, 2, 3, 6)
    assert legal_sizes(3, 4) == ()


def test_shares_stay_even() -> None:
    """8 sequences in leaves of 2 would give one of three ranks 4 of them, where 3 will do."""
    assert legal_sizes(8, 3) == (1,)
    assert legal_sizes(9, 3) == (1, 3)


def test_equal_leaves() -> None:
    assert legal_sizes(12, 2, equal_leaves=True) == (1, 2, 3, 6)
    assert legal_sizes(12, 5, equal_leaves=True) == ()


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
