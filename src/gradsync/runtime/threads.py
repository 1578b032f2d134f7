"""Intra-op threads, chosen and pinned by us before the first operation.

Launchers leave different counts behind: plain python uses all cores, torchrun sets one, mpirun
binds a rank to a core. 16 of 56 fp32 operations change bits with the count, so the same script
would not give the same numbers. One rule for all: cores of the host / ranks on the host.
"""

from __future__ import annotations

import os
from pathlib import Path


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPU limit of this container in cores (cgroup v2 `cpu.max`), or None when there is none."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def choose_threads(
    local_world_size: int,
    *,
    requested: int | None = None,
    host_cores: int | None = None,
    allowed_cores: int | None = None,
    limit: float | None = None,
) -> int:
    """Intra-op threads for one rank: min(host cores // ranks here, cores this process may use).

    A launcher that binds (Open MPI does up to two ranks) has already divided the cores: the
    affinity mask is then the smaller number. A container limit counts as fewer host cores.

    Args:
        local_world_size: ranks on this host.
        requested: the user's `--threads`; wins when given.
        host_cores, allowed_cores, limit: what the machine says; read from it when None.
    """
    if requested is not None:
        return requested
    cores = float(host_cores if host_cores is not None else os.cpu_count() or 1)
    limit = limit if limit is not None else cgroup_cores()
    if limit is not None:
        cores = min(cores, max(limit, 1.0))
    allowed = allowed_cores if allowed_cores is not None else _affinity()
    return max(1, min(int(cores) // local_world_size, allowed))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pin_threads(count: int) -> int:
    """Set torch's intra-op threads to `count`; returns the count there was before."""
    import torch

    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    return before
