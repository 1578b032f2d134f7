"""`ElasticGPUConfig`: which GPUs are available, and how to train on 1 to N of them.

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
are on its first device, and are replicated. If the trainable parts fit on no single device, use a
strategy that shards them: `gs.replicate(model, strategy="fsdp")`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from gradsync.commands.plan.description import Device, Hardware
from gradsync.commands.plan.hardware_file import load_hardware
from gradsync.commands.plan.machine import detect_hardware
from gradsync.compat.frozen import AnyDevice, Hook, place_frozen
from gradsync.compat.placement import FrozenPart, FrozenPlacement, place_parts
from gradsync.core.files import counted
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve

_GB = 1e9


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
        self._room = [int(target_util * device.usable_bytes) for device in self.devices]
        self.groups = self._groups()
        """Devices of each replica."""
        self.replicas = len(self.groups) if hardware else world.world_size
        """Number of replicas in a step: the ranks of this run, or what fits on `hardware`."""
        self.placement: FrozenPlacement | None = self._placement()
        """Placement of the frozen parts over one replica's devices; None without frozen parts."""
        self.config = self.configure()
        """See `configure`."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices of the ranks: GPUs, or without any, shares of the CPU."""
        return self.hardware.devices

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
        sizes = range(1, min(self._most_samples(), -(-base // replicas)) + 1)
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
        return place_frozen(model, placement, homes, rest=homes[0])

    def __str__(self) -> str:
        config = self.config
        names = ", ".join(dict.fromkeys(device.name for device in self.devices))
        takes = f", a replica takes {self.model_size_gb:g} GB" if self.model_size_gb else ""
        groups = ", ".join("+".join(map(str, group)) for group in self.groups)
        lines = [
            f"{len(self.devices)} x {names}: {self._room[0] / _GB:.1f} GB each may be planned with"
            + takes,
            f"strategy {config['strategy']}: replicas on devices {groups}",
            f"batch {config['effective_batch_size']} (of {self.base_batch_size} asked for) = "
            f"{counted(self.replicas, 'replica')} x {config['batch_size']} samples x "
            f"{counted(config['grad_accum_steps'], 'forward')}",
        ]
        if self.placement is not None:
            lines.append(self.placement.describe())
        return "\n".join(lines)

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

    def _placement(self) -> FrozenPlacement | None:
        if not self.frozen:
            return None
        room = [self._room[index] for index in self.groups[0]]
        trains = int(self.model_size_gb * _GB) - sum(part.num_bytes for part in self.frozen)
        if trains < 0:
            raise ConfigError("frozen parts are larger than model_size_gb says of all")
        return place_parts(self.frozen, room, replicated_bytes=trains)

    def _most_samples(self) -> int:
        if self.sample_gb is None:
            return self.base_batch_size
        rooms = [sum(self._room[index] for index in group) for group in self.groups]
        most = int((min(rooms) / _GB - self.model_size_gb) / self.sample_gb)
        if most < 1:
            raise ConfigError(
                f"no room for one sample of {self.sample_gb} GB beside a replica of "
                f"{self.model_size_gb:g} GB"
            )
        return most
