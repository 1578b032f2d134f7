"""Functions for scripts that do not use a `with` block, under other projects' names."""

from __future__ import annotations

import atexit
import logging
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.errors import ConfigError, LaunchError
from gradsync.runtime import environ
from gradsync.runtime.device import choose_device
from gradsync.runtime.machine import available_bytes
from gradsync.runtime.resolve import resolve
from gradsync.runtime.session import Session
from gradsync.runtime.session_options import SessionOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("gradsync")


def backend_here(backend: str | None) -> str | None:
    """`backend`, or None for "nccl": then the device decides, with a warning if that is a CPU."""
    if backend != "nccl":
        return backend
    if not torch.cuda.is_available() and is_main_process():
        log.warning("backend 'nccl' needs a GPU, and there is none: gloo is used instead")
    return None


def init_distributed(
    backend: str | None = None, *, timeout: timedelta = timedelta(minutes=30)
) -> tuple[int, int, int]:
    """Join the run in which this process was started; leave it when the process ends.

    Works under torchrun, mpirun (Open MPI, MPICH, Intel MPI, MVAPICH2), srun, and plain python, and
    needs no exported variables. Prefer `with gs.init()`: it also notifies the other ranks if this
    one fails.

    Args:
        backend: torch backend; for None or "nccl" the device decides: gloo on CPU, gloo + nccl on
            CUDA.
        timeout: longest duration of a collective.

    Returns:
        (rank, world_size, local_rank).
    """
    session = _join(backend, timeout)
    return session.world.rank, session.world.world_size, session.world.local_rank


def setup_distributed(rank: int, world_size: int, backend: str | None = None) -> None:
    """Join a run with a known rank and size, for example in a spawned process.

    Ranks meet at MASTER_ADDR:MASTER_PORT, by default 127.0.0.1:29500. `nccl` becomes gloo + nccl
    with CUDA, and gloo elsewhere, so that the same call works on a laptop.
    """
    env = environ.snapshot()
    mine = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    if any(env.get(name) != value for name, value in mine.items()):
        # Not what a launcher set for this process: its other variables do not apply either.
        names = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        kept = (*names, "GLOO_SOCKET_IFNAME")
        env = mine | {name: env[name] for name in kept if name in env}
    _join(backend, timedelta(minutes=30), env)


def _join(backend: str | None, timeout: timedelta, env: Mapping[str, str] | None = None) -> Session:
    """An open session; it closes when the process ends."""
    options = SessionOptions(backend=backend_here(backend), timeout_s=timeout.total_seconds())
    session = Session(options, env=env)
    session.open()
    atexit.register(session.close)
    return session


def get_device() -> torch.device:
    """This rank's device: `cuda:(local_rank % visible devices)`, or the CPU. Needs no group."""
    return torch.device(choose_device("auto", resolve(environ.snapshot()).world.local_rank))


def get_rank() -> int:
    """Rank of this process in its group, else by the launcher's variables; 0 without any."""
    return dist.get_rank() if dist.is_initialized() else resolve(environ.snapshot()).world.rank


def get_world_size() -> int:
    """Number of processes in the group, else by the launcher's variables; 1 without any."""
    if dist.is_initialized():
        return dist.get_world_size()
    return resolve(environ.snapshot()).world.world_size


def get_local_rank() -> int:
    """Rank of this process on its host, from the launcher."""
    world = resolve(environ.snapshot()).world
    if world.world_size != get_world_size():
        raise LaunchError(f"rank {get_rank()}: no launcher tells the local rank; set LOCAL_RANK")
    return world.local_rank


def is_main_process() -> bool:
    """True on rank 0; reads the process group if it exists, else the launcher's variables."""
    return get_rank() == 0


def is_distributed() -> bool:
    """True if there is more than one process."""
    return get_world_size() > 1


def barrier() -> None:
    """Return after every process has called it."""
    if is_distributed():
        dist.barrier()


def broadcast(tensor: Tensor, src: int = 0) -> Tensor:
    """`tensor`, overwritten with rank `src`'s; every process calls it."""
    if is_distributed():
        dist.broadcast(tensor, src)
    return tensor


def cleanup_distributed() -> None:
    """Leave the process group, if it exists; the end of the process also does so."""
    if dist.is_initialized():
        dist.destroy_process_group()


def per_process_batch(micro: int, accumulation: int, world_size: int) -> tuple[int, int]:
    """Samples per forward and forwards per step on each process: at most `micro // world_size`
    samples and at least 1; over all processes exactly `micro * accumulation` samples per step.

    Raises:
        ConfigError: `world_size` does not divide the samples of a step.
    """
    total = micro * accumulation
    sizes = range(1, max(micro // world_size, 1) + 1)
    fits = [size for size in sizes if total % (size * world_size) == 0]
    if not fits:
        raise ConfigError(f"{total} samples of a step do not divide among {world_size} processes")
    return fits[-1], total // (fits[-1] * world_size)


def log_gpu_memory(label: str = "") -> None:
    """Print the memory in use: a line per visible GPU; on a CPU, this process's memory.

    GB are 10**9 bytes. It prints on every rank that calls it; use `if is_main_process():` for
    one. `label` goes in front of each line, such as "after step 100".
    """
    lines = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        lines.append(
            f"cuda:{index} {torch.cuda.get_device_name(index)}: "
            f"{torch.cuda.memory_allocated(index) / 1e9:.2f} GB allocated, "
            f"{torch.cuda.memory_reserved(index) / 1e9:.2f} GB reserved, "
            f"peak {torch.cuda.max_memory_allocated(index) / 1e9:.2f} GB, "
            f"{free / 1e9:.2f} of {total / 1e9:.2f} GB free"
        )
    if not torch.cuda.is_available():
        lines = [
            f"process: {psutil.Process().memory_info().rss / 1e9:.2f} GB resident, "
            f"{available_bytes() / 1e9:.2f} GB available on the host"
        ]
    for line in lines:
        print(f"{label}: {line}" if label else line, flush=True)
