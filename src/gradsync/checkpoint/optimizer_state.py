"""An optimizer's state by parameter name: independent of parameter order, wrappers and world size.

    tensors   "exp_avg/blocks.0.attention.q.weight" -> tensor, "step/blocks.0…" -> 0-dim tensor
    state     {"class": "AdamW",
               "groups": [{"params": [names], "lr": 0.001, "betas": [0.9, 0.95], …}],
               "params": {name: {"shape": […], "slots": ["exp_avg", …], "values": {other: number}}}}

Torch's own `load_state_dict` is not used: it matches by position, and casts state to the
parameter's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsync.checkpoint.weights import clean_names
from gradsync.core.files import one_line
from gradsync.errors import CheckpointError

# Options that do not change the result of a step: the loading run keeps its own.
_IMPLEMENTATION = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})

NamedParams = Iterable[tuple[str, Tensor]]


def pack_optimizer(
    optimizer: Optimizer, named_params: NamedParams
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of any torch optimizer with dense tensors, numbers or None as state: the tensors
    (its own, not copies), and a dict fit for JSON.

    Names are without wrappers; CheckpointError for a parameter that is not in `named_params`.
    """
    tensors: dict[str, Tensor] = {}
    params: dict[str, Any] = {}
    by_group = _by_group(optimizer, named_params)
    for name, param in (item for group in by_group for item in group.items()):
        entry: dict[str, Any] = {"shape": list(param.shape), "slots": [], "values": {}}
        for slot, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{slot}/{name}"] = value
                entry["slots"].append(slot)
            else:
                entry["values"][slot] = value
        params[name] = entry
    groups = [
        {"params": list(members)}
        | {key: _to_json(v) for key, v in group.items() if key not in _IMPLEMENTATION}
        for members, group in zip(by_group, optimizer.param_groups, strict=True)
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "params": params}


def unpack_optimizer(
    optimizer: Optimizer,
    named_params: NamedParams,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> None:
    """Restore the state from `pack_optimizer`; the next step is then bitwise the same.

    Everything is checked before anything changes. Tensors are copied to their parameter's device;
    `step` stays on the CPU unless the group is fused or capturable, as torch expects.
    CheckpointError for another optimizer class, other groups, or a parameter that is missing,
    unknown or of another shape; the message names it.
    """
    for name, (param, group) in unpack_settings(optimizer, named_params, tensors, state).items():
        entry = state["params"][name]
        restored: dict[str, Any] = dict(entry["values"])
        for slot in entry["slots"]:
            value = tensors[f"{slot}/{name}"]
            home = state_device(slot, param, group)
            restored[slot] = torch.empty_like(value, device=home).copy_(value)
        optimizer.state.pop(param, None)
        if restored:
            optimizer.state[param] = restored


def unpack_settings(
    optimizer: Optimizer,
    named_params: NamedParams,
    names: Collection[str],
    state: Mapping[str, Any],
) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """Restore the settings, everything but the parameters' state, after the checks of
    `unpack_optimizer`. `names` are the names of the packed tensors. Returns each parameter and its
    group, by clean name."""
    by_group = _by_group(optimizer, named_params)
    _check(optimizer, by_group, names, state)
    found = {}
    for members, group, saved in zip(
        by_group, optimizer.param_groups, state["groups"], strict=True
    ):
        for key, value in saved.items():
            if key not in _IMPLEMENTATION:
                _restore_setting(group, key, value)
        found |= {name: (param, group) for name, param in members.items()}
    return found


def check_packed(state: Any) -> None:
    """Check that a value from a file has the form of packed state."""
    try:
        texts = [state["class"], *(name for group in state["groups"] for name in group["params"])]
        for entry in state["params"].values():
            texts += entry["slots"]
            is_right = all(type(size) is int for size in entry["shape"])
            if not is_right or not isinstance(entry["values"], dict):
                raise TypeError
        if not all(isinstance(text, str) for text in texts):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError("optimizer state: expected its class, groups and params") from None


def state_device(slot: str, param: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Device of a parameter's state `slot` ("exp_avg" …); see `unpack_optimizer` about `step`."""
    on_device = slot != "step" or bool(group.get("fused") or group.get("capturable"))
    return param.device if on_device else torch.device("cpu")


def _by_group(optimizer: Optimizer, named_params: NamedParams) -> list[dict[str, Tensor]]:
    """The parameters of each group, by clean name."""
    named = dict(named_params)
    clean = clean_names(named)
    name_of = {id(param): clean[name] for name, param in reversed(named.items())}
    groups: list[dict[str, Tensor]] = []
    for group in optimizer.param_groups:
        groups.append({})
        for param in group["params"]:
            name = name_of.get(id(param))
            if name is None:
                raise CheckpointError(
                    f"the optimizer holds a parameter of shape {tuple(param.shape)} that is "
                    "not among the named parameters: its state has no name"
                )
            groups[-1][name] = param
    return groups


def _check(
    optimizer: Optimizer,
    by_group: Sequence[Mapping[str, Tensor]],
    tensors: Collection[str],
    state: Mapping[str, Any],
) -> None:
    check_packed(state)
    kind = type(optimizer).__name__
    if state["class"] != kind:
        raise CheckpointError(f"optimizer state is of {one_line(state['class'])}, expected {kind}")
    saved, params = state["params"], {n: p for group in by_group for n, p in group.items()}
    for name, param in params.items():
        if name not in saved:
            raise CheckpointError(f"optimizer state: parameter {name!r} is missing")
        if saved[name]["shape"] != list(param.shape):
            raise CheckpointError(
                f"optimizer state: parameter {name!r} has shape {tuple(saved[name]['shape'])}, "
                f"expected {tuple(param.shape)}"
            )
        for slot in saved[name]["slots"]:
            if f"{slot}/{name}" not in tensors:
                raise CheckpointError(f"optimizer state: {slot!r} of parameter {name!r} is missing")
    if unknown := [name for name in saved if name not in params]:
        raise CheckpointError(f"optimizer state: parameter {unknown[0]!r} is unknown here")
    known = {f"{slot}/{name}" for name, entry in saved.items() for slot in entry["slots"]}
    if stray := sorted(set(tensors) - known):
        raise CheckpointError(f"optimizer state: tensor {stray[0]!r} belongs to no parameter")
    _check_groups(optimizer, by_group, state["groups"])


def _check_groups(
    optimizer: Optimizer,
    by_group: Sequence[Mapping[str, Tensor]],
    packed: Sequence[Mapping[str, Any]],
) -> None:
    groups = [set(group["params"]) for group in packed]
    for index, names in enumerate(by_group):
        there = groups[index] if index < len(groups) else set()
        if moved := sorted(there ^ set(names)):
            raise CheckpointError(
                f"optimizer state: parameter {moved[0]!r} is in another parameter group "
                f"({len(groups)} saved groups, {len(by_group)} here)"
            )
    if len(groups) != len(by_group):
        raise CheckpointError(
            f"optimizer state: {len(groups)} parameter groups, expected {len(by_group)}"
        )
    for group, saved in zip(optimizer.param_groups, packed, strict=True):
        for key in set(saved) & set(group) - _IMPLEMENTATION:
            value, own = saved[key], _to_json(group[key])
            if _kind(value) != _kind(own):
                raise CheckpointError(
                    f"optimizer state: {key} is {str(value)[:40]!r}, expected something like {own}"
                )


def _to_json(value: Any) -> Any:
    if isinstance(
        value, Tensor
    ):  # a learning rate may be a 0-dim tensor; a double holds it exactly
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _kind(value: Any) -> Any:
    """The kind of a setting, equal for interchangeable ones: a finite number, or a list by its
    length; for a switch (`amsgrad`), which determines the state's slots, its value."""
    if isinstance(value, list):
        return [_kind(item) for item in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if is_number and math.isfinite(value) else repr(value)


def _restore_setting(group: dict[str, Any], key: str, value: Any) -> None:
    current = group.get(key)
    if isinstance(current, Tensor):
        current.fill_(value)  # in place: a captured graph or a scheduler may hold this tensor
    else:
        group[key] = tuple(value) if isinstance(value, list) else value
