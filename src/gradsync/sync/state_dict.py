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

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json, call_site, check_same_call, same_on_all_ranks
from gradsync.core.files import counted
from gradsync.errors import ConfigError, DriftError, RunError
from gradsync.sync.check_replicas import check_replicas
from gradsync.sync.replicas import Replicas
from gradsync.sync.step import Optimizers, each_optimizer

log = logging.getLogger("gradsync")


def whole_state(
    replica: Replicas, comm: Communicator, optimizer: Optimizers | None, *, keep: bool
) -> dict[str, Any]:
    """See `GradientSync.state_dict`; {} unless this rank is to `keep` it."""
    check_same_call(comm, "state_dict", torch.empty(0), call_site())
    each = [] if optimizer is None else each_optimizer(optimizer)
    for one in each:
        replica.gather(one)
    states: Any = [deepcopy(one.state_dict()) for one in each if keep]
    tensors = {name: t.clone() for name, t in replica.state_tensors().items() if keep}
    weights, copies = replica.full_weights(), dict[object, Any]()
    for name, tensor in weights.items() if keep else ():
        if isinstance(tensor, Tensor):  # else a module's extra state
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            weights[name] = copies.setdefault(key, tensor.clone())  # tied ones stay tied
    for one in each:
        replica.scatter(one)
    if not keep:
        return {}
    if not isinstance(optimizer, Sequence):
        states = states[0] if states else None
    return {
        "model": weights,
        "optimizer": states,
        "kinds": [type(one).__name__ for one in each],
        "names": _names(replica.model, each),
        "strategy": {"name": replica.strategy, "tensors": tensors},
    }


def load_whole_state(
    replica: Replicas, comm: Communicator, state: Mapping[str, Any], optimizer: Optimizers | None
) -> None:
    """See `GradientSync.load_state_dict`."""
    check_same_call(comm, "load_state_dict", torch.empty(0), call_site())
    each = [] if optimizer is None else each_optimizer(optimizer)
    for rank, words in enumerate(all_gather_json(comm, _why_not(state, replica.model, each))):
        if words:
            raise ConfigError(f"load_state_dict() on rank {rank}: {words}")
    states = state["optimizer"] if each else []
    states = states if isinstance(states, list) else [states]
    if comm.world_size > 1:
        _refuse_unlike(comm, {"model": state["model"], "optimizer": states})
    weights = {n: t for n, t in state["model"].items() if not is_extra_state(n)}
    replica.load_full_weights(weights)
    if extra := {n: held for n, held in state["model"].items() if n not in weights}:
        replica.model.load_state_dict(extra, strict=False)
    own = replica.model.state_dict()
    same_dtypes = all(own[name].dtype == tensor.dtype for name, tensor in weights.items())
    for one, held in zip(each, states, strict=True):
        one.load_state_dict(deepcopy(held))  # torch would train in the caller's tensors
        cast = dict(_tensors(one.state_dict()))  # to the weight's dtype; an fp32 copy is to stay so
        for name, tensor in _tensors(held) if same_dtypes else ():
            if name in cast and cast[name].dtype != tensor.dtype:
                cast[name].data = tensor.to(cast[name].device, copy=True)
    for one in each:
        replica.scatter(one)
    kept, mine = state["strategy"], replica.strategy
    if kept["name"] == mine:
        replica.load_state_tensors(kept["tensors"])
    elif kept["tensors"] and comm.rank == 0:
        log.warning(
            "the state was saved under strategy=%r: what that strategy keeps between steps (%s) is "
            "left out under %r",
            *(kept["name"], counted(len(kept["tensors"]), "tensor"), mine),
        )


def _names(model: nn.Module, optimizers: Sequence[Any]) -> list[list[list[str]]]:
    """Names of the parameters in each group of each optimizer, which torch matches by position."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        [[known.get(id(p), "?") for p in group["params"]] for group in one.param_groups]
        for one in optimizers
    ]


def is_extra_state(name: str) -> bool:
    """Whether it is what a module's `get_extra_state` returned, under that name in a state dict."""
    return name.rpartition(".")[2] == "_extra_state"


def _why_not(state: Any, model: nn.Module, optimizers: Sequence[Any]) -> str:
    """Why `state` cannot be loaded; "" if it can."""
    if not isinstance(state, Mapping) or {"model", "optimizer", "strategy"} - set(state):
        return "this is no state of sync.state_dict()"
    own, given = model.state_dict(), state["model"]
    for name in sorted(own.keys() ^ given):
        holder, other = ("model", "state") if name in own else ("state", "model")
        return f"the {other} has no weight {name!r}, which the {holder} has"
    for name, tensor in own.items():
        if isinstance(tensor, Tensor) and given[name].shape != tensor.shape:
            shapes = f"{list(given[name].shape)} in the state, {list(tensor.shape)} here"
            return f"weight {name!r} is {shapes}"
    kinds = [type(one).__name__ for one in optimizers]
    if kinds and state.get("kinds", kinds) != kinds:
        return (
            f"the state holds optimizers {state['kinds']}, but {kinds} came with it: give both "
            "calls the same as sync.step()"
        )
    own_names = _names(model, optimizers)
    if kinds and state.get("names", own_names) != own_names:
        return (
            "the optimizers hold other parameters than the saved ones, or in another order or in "
            "other groups: torch matches them by position"
        )
    return ""


def _refuse_unlike(comm: Communicator, given: Mapping[str, Any]) -> None:
    """Raise RunError on all ranks if they were given different states."""
    settings = repr([one["param_groups"] for one in given["optimizer"]]).encode()
    if not same_on_all_ranks(comm, settings):
        raise RunError("load_state_dict() was given optimizers with other settings on other ranks")
    try:
        check_replicas(dict(_tensors(given)).items(), comm)
    except DriftError as error:
        raise RunError(f"load_state_dict() got other states on other ranks: {error}") from None


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested mappings and lists, by path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from _tensors(part, f"{name}.{key}".lstrip("."))
