"""Frozen submodules on devices of their own, around a trainable rest that is replicated.

    placement = place_parts(frozen_parts(model), room=[60 * 10**9, 60 * 10**9])
    handle = place_frozen(model, placement, ["cuda:0", "cuda:1"])
    sync = gs.replicate(model, world)              # what trains, on this rank's own device

Activations follow by hooks: inputs of a submodule go to its device, its outputs come back to where
its inputs were. Gradients take the same way back.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, MutableMapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from gradsync.core.torch_private import move_own
from gradsync.errors import ConfigError
from gradsync.plan.placement import Part, Place, Placement

if TYPE_CHECKING:
    import torch
    from torch import nn


class PlacedParts:
    """The hooks of `place_frozen`; without them, activations stay where they are."""

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def remove(self) -> None:
        """Take the hooks out; the parts stay on their devices."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()


def frozen_parts(model: nn.Module, *, least_bytes: int = 0) -> tuple[Part, ...]:
    """The largest submodules in which nothing trains, in the model's order.

    Args:
        model: parameters to be trained have `requires_grad`.
        least_bytes: smaller ones stay with what trains.
    """
    found: list[Part] = []
    inside = ""
    for name, module in model.named_modules():
        if not name or (inside and name.startswith(inside)):
            continue
        parameters = list(module.parameters())
        if not parameters or any(parameter.requires_grad for parameter in parameters):
            continue
        inside = f"{name}."
        num_bytes = _bytes(module)
        if num_bytes >= least_bytes:
            blocks = tuple(_bytes(block) for _, block in _blocks(module))
            found.append(Part(name=name, num_bytes=num_bytes, blocks=blocks))
    return tuple(found)


def place_frozen(
    model: nn.Module,
    placement: Placement,
    devices: Sequence[torch.device | str],
    *,
    rest: torch.device | str | None = None,
) -> PlacedParts:
    """Move frozen submodules to their devices, and let activations follow.

    Args:
        model: a part that runs in two must call its blocks as modules, one after the other.
        placement: from `place_parts`, with names of submodules of `model`.
        devices: of this rank, as the placement counts them.
        rest: where the other parts of `model` go; None leaves them where they are.

    Raises:
        ConfigError: a name that is no submodule, a submodule that trains, too few devices.
    """
    modules = dict(model.named_modules())
    for name, place in placement.places.items():
        if name not in modules:
            raise ConfigError(f"the model has no submodule {name!r}")
        if any(parameter.requires_grad for parameter in modules[name].parameters()):
            raise ConfigError(f"submodule {name!r} trains: only frozen ones are placed")
        if max(place.devices) >= len(devices):
            raise ConfigError(
                f"{name} is placed on device {max(place.devices)}, {len(devices)} were given"
            )
    if rest is not None:
        _move_rest(model, {id(modules[name]) for name in placement.places}, rest)
    placed = PlacedParts()
    for name, place in placement.places.items():
        _place(modules[name], place, [devices[index] for index in place.devices], placed)
    return placed


def _place(
    module: nn.Module, place: Place, devices: Sequence[torch.device | str], placed: PlacedParts
) -> None:
    first, last = devices[0], devices[-1]
    _follow(module, first, placed, comes_back=True)
    if len(devices) == 1:
        module.to(first)
        return
    blocks = _blocks(module)
    homes = {
        id(block): first if index < place.first_blocks else last
        for index, (_, block) in enumerate(blocks)
    }
    _place_rest(module, homes, first, placed)
    for _, block in blocks:
        block.to(homes[id(block)])
        _follow(block, homes[id(block)], placed)


def _move_rest(module: nn.Module, parts: Container[int], device: torch.device | str) -> None:
    """All of `module` but what is in one of `parts`: that may be too large for `device`."""
    move_own(module, device)
    for child in module.children():
        if id(child) not in parts:
            _move_rest(child, parts, device)


def _place_rest(
    module: nn.Module, homes: Mapping[int, object], device: torch.device | str, placed: PlacedParts
) -> None:
    """Place the rest: tensors of `module` itself, and submodules that hold no block."""
    move_own(module, device)
    for child in module.children():
        if id(child) in homes:
            continue
        if any(id(part) in homes for part in child.modules()):
            _place_rest(child, homes, device, placed)
        else:
            child.to(device)
            _follow(child, device, placed)


def _follow(
    module: nn.Module, device: torch.device | str, placed: PlacedParts, *, comes_back: bool = False
) -> None:
    """Inputs go to `device`; with `comes_back` outputs go to where the first input was."""
    origins: list[torch.device] = []

    def before(_: nn.Module, inputs: Any, named: Any) -> tuple[Any, Any]:
        if comes_back:
            origins.append(next(_devices((inputs, named)), _as_device(device)))
        return _moved(inputs, device), _moved(named, device)

    def after(_: nn.Module, inputs: Any, outputs: Any) -> Any:
        return _moved(outputs, origins.pop())

    placed.hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
    if comes_back:
        placed.hooks.append(module.register_forward_hook(after))


def _blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The largest list of submodules in it; for most models their layers."""
    from torch import nn

    lists = [part for part in module.modules() if isinstance(part, nn.Sequential | nn.ModuleList)]
    largest = max(lists, key=_bytes, default=None)
    return [] if largest is None else list(largest.named_children())


def _bytes(module: nn.Module) -> int:
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _as_device(device: torch.device | str) -> torch.device:
    import torch

    return torch.device(device)


def _devices(value: Any) -> Any:
    """Devices of the tensors in nested tuples, lists and mappings, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value.device
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _devices(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _devices(part)


def _moved(value: Any, device: torch.device | str) -> Any:
    """The same structure with its tensors on `device`."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, MutableMapping):
        moved = copy(value)  # of its own kind: models' outputs are often mappings with attributes
        for key, part in value.items():
            moved[key] = _moved(part, device)
        return moved
    if isinstance(value, tuple | list):
        parts = [_moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
