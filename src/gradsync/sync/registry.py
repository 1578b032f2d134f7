"""Every strategy, in one table; tests, commands and the README's table iterate over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    options: tuple[str, ...] = ()
    """Names that `build` knows."""
    needs_group: bool = False
    """True when one rank has no use for it (then `naive`'s code runs, which does nothing)."""


def _naive(model: nn.Module, comm: Communicator) -> Reducer:
    from gradsync.sync.naive import NaiveReducer

    return NaiveReducer(model, comm)


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
            options=("bucket_mb", "find_unused_parameters", "compile_wrapper"),
            needs_group=True,
        ),
    )
}


def build_reducer(
    strategy: Strategy, model: nn.Module, comm: Communicator, options: Mapping[str, Any]
) -> Reducer:
    """Bind `strategy` to a model and a communicator.

    Raises:
        ConfigError: an option it does not know, naming those it does.
    """
    for name in options:
        if name not in strategy.options:
            known = ", ".join(strategy.options) or "none"
            raise ConfigError(f"sync={strategy.name!r} has no option {name!r} (it has: {known})")
    if strategy.needs_group and comm.world_size == 1:
        return _naive(model, comm)
    return strategy.build(model, comm, **options)


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
