"""This process's place among the ranks, a frozen value checked at creation. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from gradsync.errors import LaunchError

if TYPE_CHECKING:
    import torch

_MOST = 2**20
"""Most ranks of a run. The number comes from the environment, and lists have that length."""
NO_GROUP = "no process group"
"""Launcher of a one-rank world that has one rank only because there is no group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The place of this process among all processes of a run.

    Rank 0 is the *main process*. A `World` never changes, except when ranks are lost under
    `gs.init(on_loss="shrink")`: then the ranks that are left are numbered anew.

    Raises:
        LaunchError: when the numbers cannot describe a run (for example `rank >= world_size`).
    """

    rank: int = 0
    """Index of this process, 0 .. world_size-1."""
    world_size: int = 1
    """Number of processes in the run."""
    local_rank: int = 0
    """Index of this process on its host, 0 .. local_world_size-1."""
    local_world_size: int = 1
    """Number of this run's processes on this host."""
    node_rank: int = 0
    """Index of this host, 0 .. num_nodes-1."""
    num_nodes: int = 1
    """Number of hosts."""
    launcher: str = "python"
    """python, torchrun, env (by hand), openmpi, pals, flux, mvapich2, hydra or srun; from
    `from_process_group`: process group, or `NO_GROUP`."""
    device_name: str = "cpu"
    """Name of `device`, such as "cpu" or "cuda:1". Set when the session starts."""
    seed: int = 0
    """The `seed` of `gs.init`, 0 without one; the default seed of loaders."""
    recovery: Any = field(default=None, compare=False, repr=False)
    """Of `gs.init(on_loss="shrink")`: the `runtime.recovery.Recovery` of this run, else None."""
    asks_to_stop: Callable[[], bool] | None = field(default=None, compare=False, repr=False)
    """Of `gs.init(catch_stop=True)`: whether a signal has asked this rank to stop."""

    def __post_init__(self) -> None:
        checks = (
            ("world_size", 1, self.world_size, _MOST),
            ("rank", 0, self.rank, self.world_size - 1),
            ("local_world_size", 1, self.local_world_size, self.world_size),
            ("local_rank", 0, self.local_rank, self.local_world_size - 1),
            ("num_nodes", 1, self.num_nodes, self.world_size),
            ("node_rank", 0, self.node_rank, self.num_nodes - 1),
        )
        for name, least, value, most in checks:
            if not least <= value <= most:
                raise LaunchError(f"{name} must be in {least}..{most}; got {self.describe()}")

    @property
    def device(self) -> torch.device:
        """Torch device of this rank."""
        import torch

        return torch.device(self.device_name)

    @property
    def is_main(self) -> bool:
        """True on rank 0, the only rank that prints and saves."""
        return self.rank == 0 and not self.waits_to_join

    @property
    def waits_to_join(self) -> bool:
        """Whether this rank was lost, was started again, and has not joined the others yet: until
        its first step it is one rank alone."""
        return self.recovery is not None and self.recovery.waits_to_join

    @property
    def should_stop(self) -> bool:
        """Whether a signal has asked this rank to stop, under `gs.init(catch_stop=True)`."""
        return self.asks_to_stop is not None and self.asks_to_stop()

    @property
    def is_distributed(self) -> bool:
        """True when there is more than one rank."""
        return self.world_size > 1

    @property
    def one_host(self) -> bool:
        """True when all ranks share one host."""
        return self.local_world_size == self.world_size

    @classmethod
    def from_process_group(cls) -> World:
        """The world of torch's default process group; one rank without a group.

        All ranks call it at the same point: they tell each other their host names.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            return cls(launcher=NO_GROUP)
        return _ask_process_group()

    def become(self, other: World) -> None:
        """Take all values of `other`, after a loss: whoever holds this world sees the new one."""
        for each in fields(self):
            object.__setattr__(self, each.name, getattr(other, each.name))

    def describe(self) -> str:
        """One line, `local_rank=2(4)` meaning local rank 2 of 4 on this host."""
        return (
            f"rank={self.rank}({self.world_size}) local_rank={self.local_rank}"
            f"({self.local_world_size}) node_rank={self.node_rank}({self.num_nodes}) "
            f"launcher={self.launcher} device={self.device_name}"
        )


def place(world: World, hosts: Sequence[str], *, trust_local: bool = True) -> World:
    """Complete `world` from the host name of every rank.

    Launchers such as Open MPI do not identify the hosts, and variables set by hand may lack the
    local rank. Hosts are numbered in order of their lowest rank.

    Args:
        world: the launcher's values.
        hosts: host name of each rank, in rank order; length `world_size`.
        trust_local: keep the launcher's local rank and size; False derives them from `hosts`.
    """
    if len(hosts) != world.world_size:
        raise LaunchError(f"got {len(hosts)} host names for {world.world_size} ranks")
    order = list(dict.fromkeys(hosts))
    mine = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    placed = replace(world, node_rank=order.index(hosts[world.rank]), num_nodes=len(order))
    if trust_local:
        return placed
    return replace(placed, local_rank=mine.index(world.rank), local_world_size=len(mine))


def _ask_process_group() -> World:
    """Rank and size from torch; hosts by one all-gather of names, uint8 [256] per rank."""
    import socket

    import torch
    import torch.distributed as dist

    rank, world_size, backends = dist.get_rank(), dist.get_world_size(), dist.get_backend_config()
    cuda = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    sends = "cpu" if "gloo" in backends or "mpi" in backends else cuda
    name = socket.gethostname().encode()[:256].ljust(256)
    mine = torch.tensor(list(name), dtype=torch.uint8, device=sends)
    names = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(names, mine)
    hosts = [bytes(told.tolist()).decode().strip() for told in names]
    device = cuda if "nccl" in backends or sends != "cpu" else "cpu"
    world = World(rank=rank, world_size=world_size, launcher="process group", device_name=device)
    return place(world, hosts, trust_local=False)
