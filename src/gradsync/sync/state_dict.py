"""The whole state of a run's model, optimizers and strategy, for a checkpoint of a script's own.

It is compared before it is loaded: by names and shapes, so that nothing is left at its random start
or broadcast, and between ranks, because a rank with another state trains another model, and where
ranks share the update all get a mixture.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.comm.values import all_gather_json, call_site, check_same_call, same_on_all_ranks
from gradsync.core.files import counted
from gradsync.errors import ConfigError, DriftError, RunError
from gradsync.sync.check_replicas import check_replicas
from gradsync.sync.replica import Replica
from gradsync.sync.step import Optimizers, each_optimizer

log = logging.getLogger("gradsync")


def whole_state(replica: Replica, optimizer: Optimizers | None) -> dict[str, Any]:
    """See `GradientSync.state_dict`."""
    check_same_call(replica.comm, "state_dict", torch.empty(0), call_site())
    each = [] if optimizer is None else each_optimizer(optimizer)
    if optimizer is not None:
        replica.gather(optimizer)
    states = [deepcopy(one.state_dict()) for one in each]
    tensors = {name: tensor.clone() for name, tensor in replica.state_tensors().items()}
    weights = replica.full_weights()
    if optimizer is not None:
        replica.scatter(optimizer)
    several = isinstance(optimizer, Sequence)
    return {
        "model": weights,
        "optimizer": states if several else states[0] if states else None,
        "kinds": [type(one).__name__ for one in each],
        "strategy": {"name": replica.reducer.strategy, "tensors": tensors},
    }


def load_whole_state(
    replica: Replica, model: nn.Module, state: Mapping[str, Any], optimizer: Optimizers | None
) -> None:
    """See `GradientSync.load_state_dict`."""
    comm = replica.comm
    check_same_call(comm, "load_state_dict", torch.empty(0), call_site())
    each = [] if optimizer is None else each_optimizer(optimizer)
    # Whole group, two all-gathers: int64 [1], uint8 [longest]; overlaps nothing.
    wrong = all_gather_json(comm, _why_not(state, model, each))
    for rank, words in enumerate(wrong):
        if words:
            raise ConfigError(f"load_state_dict() on rank {rank}: {words}")
    if comm.world_size > 1:
        _refuse_unlike(replica, state, bool(each))
    replica.load_full_weights(state["model"])
    for one, held in zip(each, _states(state) if each else (), strict=True):
        one.load_state_dict(deepcopy(held))  # torch would train in the caller's tensors
    if optimizer is not None:
        replica.scatter(optimizer)
    kept, mine = state["strategy"], replica.reducer.strategy
    if kept["name"] == mine:
        replica.load_state_tensors(kept["tensors"])
    elif kept["tensors"] and comm.rank == 0:
        log.warning(
            "the state was saved under strategy=%r: what that strategy keeps between steps (%s) is "
            "left out under %r",
            *(kept["name"], counted(len(kept["tensors"]), "tensor"), mine),
        )


def _states(state: Mapping[str, Any]) -> list[Any]:
    held = state["optimizer"]
    return held if isinstance(held, list) else [] if held is None else [held]


def _why_not(state: Any, model: nn.Module, optimizers: Sequence[Any]) -> str:
    """Why `state` cannot be loaded; "" if it can."""
    if not isinstance(state, Mapping):
        return f"expected a state from sync.state_dict(), got {type(state).__name__}"
    missing = {"model", "optimizer", "strategy"} - set(state)
    if missing:
        return f"this is no state of sync.state_dict(): it has no {min(missing)!r}"
    own, given = model.state_dict(), state["model"]
    words = [
        f"the state has no weight {name!r}, which the model has" for name in own.keys() - given
    ]
    words += [
        f"the model has no weight {name!r}, which the state has" for name in given.keys() - own
    ]
    words += [
        f"weight {name!r} is {list(given[name].shape)} in the state, {list(tensor.shape)} here"
        for name, tensor in own.items()
        if name in given and isinstance(tensor, Tensor) and given[name].shape != tensor.shape
    ]
    held, kinds = _states(state), [type(one).__name__ for one in optimizers]
    if optimizers and len(held) != len(optimizers):
        words.append(
            f"the state holds {counted(len(held), 'optimizer')}, but {len(optimizers)} came with "
            "it: give both calls the same as sync.step()"
        )
    elif optimizers and state.get("kinds", kinds) != kinds:
        words.append(f"the state is of {', '.join(state['kinds'])}, not of {', '.join(kinds)}")
    return min(words, default="")


def _refuse_unlike(replica: Replica, state: Mapping[str, Any], with_optimizer: bool) -> None:
    """Raise RunError on all ranks if they were given different states."""
    held = _states(state) if with_optimizer else []
    found = dict(_tensors({"model": state["model"], "optimizer": held}))
    settings = [one["param_groups"] for one in held]
    if not same_on_all_ranks(replica.comm, repr(settings).encode()):
        raise RunError("load_state_dict() was given optimizers with other settings on other ranks")
    try:
        check_replicas(found.items(), replica.comm)
    except DriftError as error:
        raise RunError(
            f"load_state_dict() was given other states on other ranks: {error}"
        ) from None


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested mappings and lists, by path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from _tensors(part, f"{name}.{key}".lstrip("."))
