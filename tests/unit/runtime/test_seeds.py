"""Random streams, keyed by what they are for."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.runtime.seeds import seed_everything, seed_micro_batch, stream_seed


@pytest.fixture(autouse=True)
def _random_state() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ((1337, "leaf", 0, 0), 6_031_643_802_997_894_539),
        ((1337, "leaf", 0, 1), 923_606_023_303_061_058),
        ((0, "leaf", 12, 3), 8_705_408_876_186_621_254),
        ((-1, "order"), 4_305_372_763_714_925_104),
    ],
)
def test_seeds_stay_what_they_are(key: tuple[int, str], expected: int) -> None:
    """A change here changes every run's dropout: checkpoints then say another stream version."""
    assert stream_seed(*key) == expected


counters = st.lists(st.integers(0, 2**40), max_size=3)
keys = st.tuples(st.integers(), st.sampled_from(["leaf", "order", "sample"]), counters)


@given(keys, keys)
def test_another_key_is_another_stream(
    one: tuple[int, str, list[int]], other: tuple[int, str, list[int]]
) -> None:
    first = stream_seed(one[0], one[1], *one[2])
    assert 0 <= first < 2**63
    assert (first == stream_seed(other[0], other[1], *other[2])) == (one == other)


def test_counters_do_not_run_together() -> None:
    assert len({stream_seed(1, "leaf", *c) for c in ((2, 3), (23,), (2, 30), (3, 2), ())}) == 5


def masks(seed: int, step: int, leaf: int) -> list[float]:
    seed_micro_batch(seed, step, leaf)
    return torch.rand(4).tolist()


def test_a_leaf_depends_on_nothing_before_it() -> None:
    alone = masks(7, 3, 1)
    masks(7, 3, 0)
    torch.rand(100)
    assert masks(7, 3, 1) == alone


def test_a_leaf_is_seeded_from_its_own_stream() -> None:
    digest = hashlib.sha256(b"7:leaf:3:1").digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") // 2)
    assert torch.rand(4).tolist() == masks(7, 3, 1)


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_everything_is_seeded() -> None:
    seed_everything(3)
    first = draw()
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    assert all(one != other for one, other in zip(draw(), first, strict=True))


def test_a_seed_may_be_larger_than_numpy_takes() -> None:
    seed_everything(2**40 + 5)
    large = draw()
    seed_everything(5)
    assert draw()[1] == large[1]
    assert draw()[0] != large[0]
