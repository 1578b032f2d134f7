"""Random bits by number, and what rounding with them does to one node."""

from __future__ import annotations

import math

import pytest
import torch

from gradsync.errors import ConfigError
from gradsync.sync.options import Recipe
from gradsync.sync.stochastic_rounding import StochasticRounding, random_bits
from support.rounding import plain_bits

CPU = torch.device("cpu")


@pytest.mark.parametrize("keys", [(0, 0), (-1, 2**31 - 1), (123, -456)])
def test_bits_are_those_of_the_plain_hash_in_any_piece(keys: tuple[int, int]) -> None:
    whole = random_bits(keys, 0, 300, CPU).tolist()
    assert whole == [plain_bits(keys, element) for element in range(300)]
    for first, count in ((1, 1), (63, 64), (64, 236), (7, 0)):
        assert random_bits(keys, first, count, CPU).tolist() == whole[first : first + count]
    far = 2**32 - 10  # of more elements than 32 bits with a sign can count
    assert random_bits(keys, far, 5, CPU).tolist() == [plain_bits(keys, far + n) for n in range(5)]


def test_each_bit_is_set_half_the_time_and_alone() -> None:
    bits = random_bits((123, -456), 0, 2**14, CPU)
    other = random_bits((124, -456), 0, 2**14, CPU)
    columns = [(bits >> place & 1).double() * 2 - 1 for place in range(16)]
    columns += [(other >> place & 1).double() * 2 - 1 for place in range(16)]
    columns += [column.roll(1) for column in columns]
    table = torch.stack(columns)
    products = table @ table.T / 2**14
    assert float(table.mean(1).abs().max()) < 6 / 2**7
    assert float((products - torch.eye(len(columns))).abs().max()) < 6 / 2**7


def test_the_mean_is_the_value_and_each_is_a_neighbour() -> None:
    rounding, times = StochasticRounding(7), 1000
    values = torch.tensor([1.0, 1.0 + 2**-9, 1.0 + 2**-8, -3.0 - 2**-7, 2**-130 * 1.3, 3e38])
    low, total = values.to(torch.bfloat16).float(), torch.zeros(len(values), dtype=torch.double)
    seen: list[set[float]] = [set() for _ in values]
    for step in range(times):
        rounding.step = step
        found = rounding.leaf(values, parameter=0, leaf=0)
        total += found.double()
        for numbers, number in zip(seen, found.tolist(), strict=True):
            numbers.add(number)
    gap = torch.maximum(low.abs() * 2**-7, torch.tensor(2.0**-133)).double()
    assert ((total / times - values).abs() <= 4 * 0.5 * gap / math.sqrt(times)).all()
    counts = [len(numbers) for numbers in seen]
    assert counts[:5] == [1, 2, 2, 2, 2]
    assert max(counts) == 2


def test_what_bf16_has_stays_and_what_is_not_finite_does_not_become_finite() -> None:
    rounding = StochasticRounding(7)
    exact = torch.randn(1000).bfloat16().float()
    assert torch.equal(rounding.leaf(exact, 0, 0).float(), exact)
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7F800000], dtype=torch.int32)
    for step in range(20):
        rounding.step = step
        assert not rounding.leaf(nans.view(torch.float32), 0, 0).isfinite().any()


@pytest.mark.parametrize("other", [{}, {"wire": "bf16"}, {"order": "invariant"}])
def test_without_rounded_nodes_there_is_nothing_to_round(other: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="goes with order='invariant' and wire='bf16'; got"):
        Recipe(rounding="stochastic", **other)
