"""`ElasticGPUConfig`: which GPUs are available, and how to train on 1 to N of them; frozen
submodules on separate devices, around a trainable rest that is replicated.

    config = ElasticGPUConfig(base_batch_size=64, model_size_gb=30, frozen=frozen_parts(model))
    print(config)
    batch = config.config["batch_size"]
    config.place(model)
    log_gpu_memory()

Memory is what the driver reports for these devices now. A GPU's name does not determine its size:
an A100 has 40 or 80 GB, and a slice of one less.

    devices    a replica fits on one      a replica fits on two
    1          single                     (an error: by how many GB)
    2          ddp                        model_split
    3          ddp                        hybrid: 2 + 1
    4          ddp                        hybrid_ddp: two replicas, each on two

On several devices a replica's frozen parts are on separate devices (`place`); its trainable parts
are on its first device, and are replicated. Hooks move the activations: inputs of a submodule go to
its device, and its outputs come back to the device of its inputs; gradients return the same way. If
the trainable parts fit on no single device, use `gs.replicate(model, strategy="fsdp")`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle as Hook

from gradsync.commands.plan.description import Device, Hardware
from gradsync.commands.plan.hardware_file import load_hardware
from gradsync.commands.plan.machine import detect_hardware
from gradsync.core.files import counted
from gradsync.core.torch_private import move_own
from gradsync.data.micro_batch import map_tensors
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve

AnyDevice = torch.device | str
_GB = 1e9


# -- where frozen parts fit, by memory -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPart:
    """A frozen submodule."""

    name: str  # The name in `named_modules`
    num_bytes: int  # All of it, including what it needs in addition to its weights
    blocks: tuple[int, ...] = ()
    """Bytes of each block that it runs in sequence; empty: it cannot be cut. What is in no block
    stays with the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartPlace:
    """Devices of a part."""

    devices: tuple[int, ...]  # One device, or the two it is cut between
    first_blocks: int = 0  # For a part cut in two: the number of blocks on the first device


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPlacement:
    """Places of all parts."""

    places: Mapping[str, PartPlace]  # By name of the part
    left: tuple[int, ...]  # Bytes that stay free on each device

    def __str__(self) -> str:
        """One line per device: its parts, and what stays free."""
        held: list[list[str]] = [[] for _ in self.left]
        for name, place in self.places.items():
            for device in place.devices:
                held[device].append(name)
        return "\n".join(
            f"device {device}: {', '.join(names) or '-'}; {free / _GB:.1f} GB left"
            for device, (names, free) in enumerate(zip(held, self.left, strict=True))
        )


def place_parts(
    parts: Sequence[FrozenPart], room: Sequence[int], *, replicated_bytes: int = 0
) -> FrozenPlacement:
    """A place for every part; parts of equal size keep their order.

    First-fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms"; at most 11/9 of the
    fewest bins): the largest part first, each on the first device with room. If a part fits on no
    single device and is a sequence of blocks, it is cut in two, between the first pair of devices
    that holds it, at the cut that leaves the fuller of the two emptiest.

    Args:
        parts: with different names.
        room: usable bytes of each device.
        replicated_bytes: other bytes on every device: the trained part, its gradients, optimizer
            state and activations.

    Raises:
        ConfigError: a part fits nowhere; says how much memory is missing.
    """
    left = [free - replicated_bytes for free in room]
    if min(left) < 0:
        device = left.index(min(left))
        raise ConfigError(
            f"what trains does not fit on device {device}: {replicated_bytes / _GB:.1f} GB are "
            f"needed on each, {-left[device] / _GB:.1f} GB are missing"
        )
    places: dict[str, PartPlace] = {}
    for part in sorted(parts, key=lambda part: -part.num_bytes):
        whole = next((n for n, free in enumerate(left) if part.num_bytes <= free), None)
        place = _in_two(part, left) if whole is None else PartPlace(devices=(whole,))
        if place is None:
            rooms = ", ".join(f"{free / _GB:.1f}" for free in left)
            raise ConfigError(
                f"{part.name} ({part.num_bytes / _GB:.1f} GB) fits nowhere, nor in two between "
                f"blocks: the devices have {rooms} GB left; use more or larger ones"
            )
        places[part.name] = place
        for device, num_bytes in zip(place.devices, _shares(part, place), strict=True):
            left[device] -= num_bytes
    ordered = {part.name: places[part.name] for part in parts}
    return FrozenPlacement(places=ordered, left=tuple(left))


def _in_two(part: FrozenPart, left: Sequence[int]) -> PartPlace | None:
    for pair in combinations(range(len(left)), 2):
        found: list[tuple[int, PartPlace]] = []
        for cut in range(1, len(part.blocks)):
            place = PartPlace(devices=pair, first_blocks=cut)
            shares = zip(pair, _shares(part, place), strict=True)
            found.append((min(left[device] - share for device, share in shares), place))
        # Bytes left on the fuller device: choose the cut that leaves most.
        spare, best = max(found, key=lambda entry: entry[0], default=(-1, None))
        if spare >= 0:
            return best
    return None


def _shares(part: FrozenPart, place: PartPlace) -> tuple[int, ...]:
    """Bytes on each device of its place."""
    if len(place.devices) == 1:
        return (part.num_bytes,)
    outside = part.num_bytes - sum(part.blocks)
    first = outside + [0, *accumulate(part.blocks)][place.first_blocks]
    return first, part.num_bytes - first


# -- the configuration -----------------------------------------------------------------------------


class ElasticGPUConfig:
    """Reads the machine on construction; sets and starts nothing.

    Args:
        base_batch_size: samples of an optimizer step, over all replicas; `configure` divides them.
        model_size_gb: memory of one replica during training, GB (10**9 bytes), including `frozen`;
            None: not known, only `frozen` is counted.
        target_util: share of a device's free memory to plan with.
        sample_gb: activations of one sample, GB; None: not known, a step is not cut further.
        frozen: submodules that do not train (`frozen_parts(model)`), to be placed.
        hardware: replaces this machine's: a name or a file, as `gradsync plan --hardware` takes it,
            such as "a100-40x3".

    Raises:
        ConfigError: a replica that does not fit on all devices together, and by how many GB; fewer
            samples than replicas.
    """

    def __init__(
        self,
        base_batch_size: int = 64,
        model_size_gb: float | None = None,
        target_util: float = 0.75,
        *,
        sample_gb: float | None = None,
        frozen: Sequence[FrozenPart] = (),
        hardware: Hardware | str | None = None,
    ) -> None:
        self.base_batch_size = base_batch_size
        self.frozen = tuple(frozen)
        frozen_gb = sum(part.num_bytes for part in self.frozen) / _GB
        self.model_size_gb = frozen_gb if model_size_gb is None else model_size_gb
        self.target_util = target_util
        self.sample_gb = sample_gb
        if isinstance(hardware, str):
            hardware = load_hardware(hardware)
        env = environ.snapshot()
        world = resolve(env).world
        self.hardware = hardware or detect_hardware(env, ranks_per_host=world.local_world_size)
        self.devices: tuple[Device, ...] = self.hardware.devices
        """Devices of the ranks: GPUs, or without any, shares of the CPU."""
        self._room = [int(target_util * device.usable_bytes) for device in self.devices]
        self.groups = self._groups()
        """Devices of each replica."""
        self.replicas = len(self.groups) if hardware else world.world_size
        """Number of replicas in a step: the ranks of this run, or what fits on `hardware`."""
        self.placement: FrozenPlacement | None = None
        """Placement of the frozen parts over one replica's devices; None without frozen parts."""
        if self.frozen:
            trains = int(self.model_size_gb * _GB) - sum(part.num_bytes for part in self.frozen)
            if trains < 0:
                raise ConfigError("frozen parts are larger than model_size_gb says of all")
            room = [self._room[index] for index in self.groups[0]]
            self.placement = place_parts(self.frozen, room, replicated_bytes=trains)
        self.config = self.configure()
        """See `configure`."""

    @property
    def gpu_count(self) -> int:
        """Number of GPUs; 0 on a CPU."""
        return sum(device.kind == "cuda" for device in self.devices)

    @property
    def strategy(self) -> str:
        """single, ddp, model_split, hybrid or hybrid_ddp; see the module's table."""
        each, count = len(self.groups[0]), len(self.devices)
        if each == 1:
            return "single" if count == 1 else "ddp"
        if len(self.groups) > 1:
            return "hybrid_ddp"
        return "model_split" if each == 2 else "hybrid"

    def configure(self) -> dict[str, Any]:
        """Batch sizes and strategy.

        Returns:
            strategy; batch_size: samples of one forward and backward on each replica;
            grad_accum_steps: how many of these make a step; effective_batch_size: batch_size x
            grad_accum_steps x replicas: `base_batch_size`, or the nearest that divides; device: the
            first of this process's replica, "cpu" without GPUs.
        """
        base, replicas = self.base_batch_size, self.replicas
        if replicas > base:
            raise ConfigError(f"{replicas} replicas cannot share {base} samples")
        most = base
        if self.sample_gb is not None:
            room = min(sum(self._room[index] for index in group) for group in self.groups)
            most = int((room / _GB - self.model_size_gb) / self.sample_gb)
        if most < 1:
            raise ConfigError(f"no room for one sample of {self.sample_gb} GB beside a replica")
        sizes = range(1, min(most, -(-base // replicas)) + 1)
        cuts = [(size, max(round(base / replicas / size), 1)) for size in sizes]
        size, steps = min(cuts, key=lambda cut: (abs(cut[0] * cut[1] * replicas - base), cut[1]))
        return {
            "strategy": self.strategy,
            "batch_size": size,
            "grad_accum_steps": steps,
            "effective_batch_size": size * steps * replicas,
            "device": self._replica_devices()[0],
        }

    def place(self, model: nn.Module, devices: Sequence[AnyDevice] | None = None) -> list[Hook]:
        """Move `model`, the one whose `frozen_parts` were given, to the devices of this process's
        replica (or to `devices`); activations follow.

        Frozen parts go to the devices in `placement`, everything else to the first device, where
        inputs belong. Create the optimizer and call `gs.replicate`, over what trains, afterwards.

        Raises:
            ConfigError: a plan with several devices per replica has no frozen parts, or `model` has
                other frozen parts.
        """
        if self.placement is None and len(self.groups[0]) > 1:
            raise ConfigError(
                f"strategy {self.strategy!r} places frozen parts, and none were given (frozen="
                "frozen_parts(model)); to share out what trains: gs.replicate(strategy='fsdp')"
            )
        homes = self._replica_devices() if devices is None else devices
        placement = self.placement or FrozenPlacement(places={}, left=())
        return place_frozen(model, placement, homes)

    def __str__(self) -> str:
        config = self.config
        names = ", ".join(dict.fromkeys(device.name for device in self.devices))
        groups = ", ".join("+".join(map(str, group)) for group in self.groups)
        lines = [
            f"{len(self.devices)} x {names}: {self._room[0] / _GB:.1f} GB each may be planned with",
            f"strategy {config['strategy']}: replicas on devices {groups}",
            f"batch {config['effective_batch_size']} = {counted(self.replicas, 'replica')} x "
            f"{config['batch_size']} samples x {counted(config['grad_accum_steps'], 'forward')}",
        ]
        return "\n".join(lines + ([str(self.placement)] if self.placement else []))

    def _replica_devices(self) -> list[str]:
        """Devices of this process's replica, as torch names."""
        local_rank = resolve(environ.snapshot()).world.local_rank
        group = self.groups[local_rank % len(self.groups)]
        return [f"cuda:{index}" if self.gpu_count else "cpu" for index in group]

    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """As many replicas as fit in memory. Left-over devices join the last replica if a replica
        needs several devices."""
        count, room = len(self.devices), self._room
        wanted = int(self.model_size_gb * _GB)
        for each in range(1, count + 1):
            starts = range(0, count - each + 1, each)
            if all(sum(room[start : start + each]) >= wanted for start in starts):
                groups = [tuple(range(start, start + each)) for start in starts]
                if each > 1:
                    groups[-1] = tuple(range(groups[-1][0], count))
                return tuple(groups)
        raise ConfigError(
            f"a replica of {self.model_size_gb:g} GB does not fit on {counted(count, 'device')} "
            f"with {sum(room) / _GB:.1f} GB to plan with: {(wanted - sum(room)) / _GB:.1f} GB are "
            "missing"
        )


# -- frozen parts ----------------------------------------------------------------------------------


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
    model: nn.Module, placement: FrozenPlacement, devices: Sequence[AnyDevice]
) -> list[Hook]:
    """Move frozen submodules to their devices, and the rest of `model` to the first; activations
    follow by the hooks that it returns.

    Args:
        model: a part that is split in two must call its blocks as modules, one after the other.
        placement: from `place_parts`, with names of submodules of `model`.
        devices: of this rank, in the order of the placement.
    """
    modules = dict(model.named_modules())
    _place_around({id(modules[name]) for name in placement.places}, model, devices[0])
    return [
        hook
        for name, place in placement.places.items()
        for hook in _place(modules[name], place, [devices[index] for index in place.devices])
    ]


def _follow(module: nn.Module, device: AnyDevice, *, comes_back: bool = False) -> list[Hook]:
    """Move inputs to `device`; with `comes_back`, move outputs to the first input's device."""
    origins: list[AnyDevice] = []

    def before(_: nn.Module, inputs: Any, named: Any) -> tuple[Any, Any]:
        homes: list[AnyDevice] = []

        def move(tensor: Tensor) -> Tensor:
            homes.append(tensor.device)
            return tensor.to(device)

        moved = map_tensors(inputs, move), map_tensors(named, move)
        if comes_back:
            origins.append(homes[0] if homes else device)
        return moved

    def after(_: nn.Module, inputs: Any, outputs: Any) -> Any:
        home = origins.pop()
        return map_tensors(outputs, lambda tensor: tensor.to(home))

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True)]
    return [*hooks, module.register_forward_hook(after)] if comes_back else hooks


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
