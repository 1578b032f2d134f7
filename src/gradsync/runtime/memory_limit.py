"""How much memory this process may take.

A limit can be set for this container or job (control groups, version 2 or 1), and for any group
around it: a Slurm job on a bare host sees the host's whole tree, and its own limit somewhere below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_FILES = {
    "memory.max": ("memory.current", ("inactive_file", "active_file")),
    "memory.limit_in_bytes": (
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
"""Files of a limit, by version: its usage, and the lines of memory.stat that are caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limit:
    """Limit of one group, bytes."""

    total: int
    free: int
    """Bytes left below the limit; cached files count as free: the kernel drops them first."""


def available_bytes(root: Path = _ROOT, own: Path = _OWN) -> int:
    """The smallest of what the machine and the limits on this process have left, bytes.

    Args:
        root: where control groups are mounted.
        own: the file that names the groups of this process.
    """
    free = psutil.virtual_memory().available
    return min([free, *(limit.free for limit in _limits(root, own))])


def total_bytes(root: Path = _ROOT, own: Path = _OWN) -> int:
    """The host's memory, or the limit on this process where that is less; bytes.

    Args:
        root, own: as of `available_bytes`.
    """
    total = psutil.virtual_memory().total
    return min([total, *(limit.total for limit in _limits(root, own))])


def _limits(root: Path, own: Path) -> Iterator[_Limit]:
    for folder in _groups(root, own):
        for name, (usage, caches) in _FILES.items():
            try:
                total = int((folder / name).read_text())
                used = int((folder / usage).read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
                statistics = dict(line.split() for line in lines)
                cached = sum(int(statistics.get(cache, 0)) for cache in caches)
            except (OSError, ValueError):  # no such file, or "max"
                continue
            yield _Limit(total=total, free=max(total - used + cached, 0))


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """Folders of this process's groups that count memory, and of all groups around them."""
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
        # A process from outside may see a way up and out of what is mounted here.
        if controllers in ("", "memory") and ".." not in parts:
            folder = root / controllers
            for part in parts:
                folder /= part
                yield folder
