"""Every strategy, in one table; tests, commands and the README's table iterate over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from gradsync.comm.base import Communicator
from gradsync.errors import ConfigError
from gradsync.sync.reducer import Reducer

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A named way to synchronise gradients."""

    name: str
    """What users type."""
    summary: str
    """One line."""
    cost: str
    """Bytes per rank and step (S = size of the gradients, W = ranks), operations, memory."""
    build: Callable[..., Reducer]
    """`build(model, comm, **options)`."""
    needs_group: bool = False
    """True when one rank has no use for it (then `naive`'s code runs, which does nothing)."""


def _naive(model: nn.Module, comm: Communicator, **options: Any) -> Reducer:
    from gradsync.sync.naive import NaiveReducer

    return NaiveReducer(model, comm, **options)


def _ddp(model: nn.Module, comm: Communicator, **options: Any) -> Reducer:
    from gradsync.sync.torch_ddp import TorchDdpReducer

    return TorchDdpReducer(model, comm, **options)


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            name="naive",
            summary="one blocking all-reduce per parameter after backward; the readable twin",
            cost="2(W-1)/W S bytes, one operation per parameter, no extra memory",
            build=_naive,
        ),
        Strategy(
            name="ddp",
            summary="torch's DistributedDataParallel, buckets overlapped with backward",
            cost="2(W-1)/W S bytes, one operation per bucket, S bytes of buckets",
            build=_ddp,
            needs_group=True,
        ),
    )
}


def find_strategy(name: str) -> Strategy:
    """The strategy called `name`.

    Raises:
        ConfigError: unknown, naming the nearest.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    near = get_close_matches(name, STRATEGIES, n=1)
    hint = f"; perhaps you meant {near[0]!r}" if near else ""
    raise ConfigError(f"unknown sync strategy {name!r}{hint} (there are: {', '.join(STRATEGIES)})")
