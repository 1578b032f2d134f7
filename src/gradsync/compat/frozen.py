"""Place frozen submodules on separate devices, around a trainable rest that is replicated.

    placement = place_parts(frozen_parts(model), room=[60 * 10**9, 60 * 10**9])
    place_frozen(model, placement, ["cuda:0", "cuda:1"])
    sync = gs.replicate(model, world)              # what trains, on this rank's own device

Hooks move the activations: inputs of a submodule go to its device, and its outputs come back to the
device of its inputs. Gradients return the same way.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle as Hook

from gradsync.compat.placement import FrozenPart, FrozenPlacement, PartPlace
from gradsync.core.torch_private import move_own
from gradsync.data.micro_batch import map_tensors
from gradsync.errors import ConfigError

AnyDevice = torch.device | str


def _follow(module: nn.Module, device: AnyDevice, *, comes_back: bool = False) -> list[Hook]:
    """Move inputs to `device`; with `comes_back`, move outputs to the first input's device."""
    origins: list[AnyDevice] = []

    def before(_: nn.Module, inputs: Any, named: Any) -> tuple[Any, Any]:
        if comes_back:
            homes = [tensor.device for tensor in tensors_in((inputs, named))]
            origins.append(homes[0] if homes else device)
        return _moved(inputs, device), _moved(named, device)

    def after(_: nn.Module, inputs: Any, outputs: Any) -> Any:
        return _moved(outputs, origins.pop())

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True)]
    return [*hooks, module.register_forward_hook(after)] if comes_back else hooks


def frozen_parts(model: nn.Module) -> tuple[FrozenPart, ...]:
    """The largest submodules whose parameters have no `requires_grad`, in the model's order."""
    found: list[FrozenPart] = []
    inside = ""
    for name, module in model.named_modules():
        if not name or (inside and name.startswith(inside)):
            continue
        parameters = list(module.parameters())
        if not parameters or any(parameter.requires_grad for parameter in parameters):
            continue
        inside = f"{name}."
        blocks = tuple(map(_bytes, _blocks(module)))
        found.append(FrozenPart(name=name, num_bytes=_bytes(module), blocks=blocks))
    return tuple(found)


def place_frozen(
    model: nn.Module,
    placement: FrozenPlacement,
    devices: Sequence[AnyDevice],
    *,
    rest: AnyDevice | None = None,
) -> list[Hook]:
    """Move frozen submodules to their devices; activations follow by the hooks that it returns.

    Args:
        model: a part that is split in two must call its blocks as modules, one after the other.
        placement: from `place_parts`, with names of submodules of `model`.
        devices: of this rank, in the order of the placement.
        rest: device of the other parts of `model`; None does not move them.

    Raises:
        ConfigError: no such frozen submodule; too few devices.
    """
    modules = dict(model.named_modules())
    for name, place in placement.places.items():
        if name not in modules or any(p.requires_grad for p in modules[name].parameters()):
            raise ConfigError(f"{name!r} is no frozen submodule of the model")
        if max(place.devices) >= len(devices):
            raise ConfigError(
                f"{name} is placed on device {max(place.devices)}, {len(devices)} were given"
            )
    if rest is not None:
        _place_around({id(modules[name]) for name in placement.places}, model, rest)
    return [
        hook
        for name, place in placement.places.items()
        for hook in _place(modules[name], place, [devices[index] for index in place.devices])
    ]


def _place(module: nn.Module, place: PartPlace, devices: Sequence[AnyDevice]) -> list[Hook]:
    first, last = devices[0], devices[-1]
    hooks = _follow(module, first, comes_back=True)
    if len(devices) == 1:
        module.to(first)
        return hooks
    blocks = _blocks(module)
    for outside in _place_around({id(block) for block in blocks}, module, first):
        hooks += _follow(outside, first)
    for index, block in enumerate(blocks):
        home = first if index < place.first_blocks else last
        block.to(home)
        hooks += _follow(block, home)
    return hooks


def _place_around(kept: Container[int], module: nn.Module, device: AnyDevice) -> list[nn.Module]:
    """Move all of `module` except the submodules in `kept`, which may be too large for `device`.
    Returns the largest submodules that hold none of them."""
    move_own(module, device)
    outside = []
    for child in module.children():
        if id(child) in kept:
            continue
        if any(id(part) in kept for part in child.modules()):
            outside += _place_around(kept, child, device)
        else:
            outside.append(child.to(device))
    return outside


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The largest list of submodules in `module`; for most models their layers."""
    lists = [part for part in module.modules() if isinstance(part, nn.Sequential | nn.ModuleList)]
    return list(max(lists, key=_bytes).children()) if lists else []


def _bytes(module: nn.Module) -> int:
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _moved(value: Any, device: AnyDevice) -> Any:
    return map_tensors(value, lambda tensor: tensor.to(device))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and mappings, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found
