"""Optimizer settings that ranks compare: equal for equal options, whatever objects these are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

from gradsync.sync.step_metadata import settings_of


def settings(number: int = 0, **options: Any) -> dict[str, str]:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.param_groups[0] |= options
    return settings_of(optimizer, parameters, number=number)


def make_schedule() -> Callable[[int], float]:
    return lambda step: 0.9**step


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(0.1),
        lambda: torch.tensor([0.9, 0.99]),
        lambda: (0.9, [0.99, None, True], {"a": torch.tensor(2)}),
        lambda: float("nan"),
        lambda: 10**400,
        make_schedule,
        lambda: functools.partial(max, 1),
        object,
        lambda: torch.device("cpu"),
        lambda: Enum("Kind", {"DEFAULT": object()})["DEFAULT"],
        lambda: {object(): 1, make_schedule(): 2, "a": 3},
    ],
)
def test_equal_options_are_equal(make: Callable[[], Any]) -> None:
    first, second = settings(option=make()), settings(option=make())
    assert first == second


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.1, 0.2), (0.1, None), (True, False), ((0.9, 0.99), (0.9, 0.999)), ("a", "b"), (0.0, 1e-9)],
)
def test_others_are_not(one: object, other: object) -> None:
    assert settings(option=one) != settings(option=other)
    assert settings(option=torch.tensor(0.1)) != settings(option=torch.tensor(0.2))


def test_names_say_where() -> None:
    assert list(settings())[:2] == ["the class of the optimizer", "lr of group 0"]
    assert settings(number=1)["lr of group 0 of optimizer 1"] == "0.1"
    assert settings()["the class of the optimizer"] == "torch.optim.sgd.SGD"


def test_groups_hold_the_same_parameters() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    whole = settings_of(torch.optim.SGD(parameters), parameters)
    turned = settings_of(torch.optim.SGD(parameters[::-1]), parameters)
    fewer = settings_of(torch.optim.SGD(parameters[:2]), parameters)
    order, held = "the order of parameters of group 0", "the list of parameters of group 0"
    assert [name for name in whole if whole[name] != turned[name]] == [order]
    assert [name for name in whole if whole[name] != fewer[name]] == [held, order]
