"""Resources of this host for ranks: processor, cores, threads, memory; and this process's memory.
No torch at import. Limits of containers and jobs (control groups, version 2 or 1) reduce the host.

[Note: Keeping freed memory]
Each step allocates the same big temporaries (logits, activations, gradients) and frees them again.
glibc maps every block above 32 MiB and unmaps it when freed, and returns the top of its heap
likewise. So in every step the kernel clears the same pages, one page fault each. Three settings end
that: no block is mapped, the heap's top is not returned, and threads started later share the one
heap instead of getting small heaps. Results do not change. The price: the process stays at its peak
size, even when it needs less.

The setting affects the whole process and cannot be undone, so a library must not choose it unasked:
`gradsync train` on a CPU does, `gs.init` only on request.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MEMORY_FILES = {
    "memory.max": ("memory.current", "inactive_file", "active_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
}
"""Files of a memory limit, by version: its usage, and the cache lines of memory.stat."""
# Parameters of `mallopt`, from glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def cgroup_cores(root: Path = _GROUPS) -> float | None:
    """CPU limit of this container in cores (cgroup v2 `cpu.max`); None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None


def host_cores(root: Path = _GROUPS) -> int:
    """Cores of the host, or of this container if limited; not affected by the cores that a launcher
    has bound a rank to."""
    cores = os.cpu_count() or 1
    return max(1, int(min(cores, cgroup_cores(root) or cores)))


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy(load: float, cores: int) -> str:
    """A message if the load of the last minute leaves too few cores for a new run, else ""."""
    said = f"this machine was busy in the last minute: load {load:.1f} on {cores} cores"
    return said if load > 0.5 * cores else ""


def choose_threads(local_world_size: int, *, requested: int | None = None) -> int:
    """Intra-op threads for one rank: `requested`, or min(host cores // ranks here, usable cores).

    Launchers leave different counts: plain python uses all cores, torchrun sets one, mpirun binds a
    rank to a core. 16 of 56 fp32 operations change bits with the count, so the same script would
    not give the same numbers. Hence one rule, pinned before the first operation. A launcher that
    binds (Open MPI does up to two ranks) has already divided the cores: the affinity mask is then
    the smaller number.
    """
    if requested is not None:
        return requested
    return max(1, min(host_cores() // local_world_size, usable_cores()))


def pin_threads(count: int) -> int:
    """Set torch's intra-op threads to `count`; returns the previous count."""
    import torch

    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    return before


def available_bytes(root: Path = _GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Bytes available: the least that the machine and this process's limits have left.

    Args:
        root: where control groups are mounted.
        own: the file that names the groups of this process.
    """
    limits = [free for _, free in _memory_limits(root, own)]
    return min([psutil.virtual_memory().available, *limits])


def total_bytes(root: Path = _GROUPS, own: Path = _OWN_GROUPS) -> int:
    """The host's memory, or this process's limit if that is less; bytes."""
    limits = [total for total, _ in _memory_limits(root, own)]
    return min([psutil.virtual_memory().total, *limits])


def _memory_limits(root: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Limit of each group and the rest below it, bytes. Cached files count as free: the kernel
    drops them first."""
    for folder in _groups(root, own):
        for name, (usage, *caches) in _MEMORY_FILES.items():
            try:
                total = int((folder / name).read_text())
                used = int((folder / usage).read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
                statistics = dict(line.split() for line in lines)
                cached = sum(int(statistics.get(cache, 0)) for cache in caches)
            except (OSError, ValueError):  # no such file, or "max"
                continue
            yield total, max(total - used + cached, 0)


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """Folders of this process's memory groups and all their parents: a Slurm job on a bare host
    sees the host's whole tree, with its own limit somewhere below."""
    yield root
    yield root / "memory"
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")  # number:controllers:path
        controllers, _, path = rest.partition(":")
        parts = Path(path).parts[1:]
        # A process from outside may see a path that leads above this mount.
        if controllers in ("", "memory") and ".." not in parts:
            folder = root / controllers
            for part in parts:
                folder /= part
                yield folder


def keep_freed_memory() -> bool:
    """Keep freed memory in this process from now on; returns whether it was set.

    False, without a change, for another system or C library than Linux with glibc. Has no effect
    with another allocator in its place (jemalloc, tcmalloc).

    Call it early, before other threads allocate: those keep separate heaps. Any thread may call it,
    more than once; once is enough. See [Note: Keeping freed memory].
    """
    if sys.platform != "linux":
        return False
    process = ctypes.CDLL(None)
    if not hasattr(process, "gnu_get_libc_version"):
        return False
    # -1 is the largest size_t: never. A limit for mmap does not work: above 32 MiB it is refused.
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
    accepted = [process.mallopt(name, value) for name, value in settings]
    return all(accepted)
