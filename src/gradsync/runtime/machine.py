"""Kind of host, as the system tells it. No torch here."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from gradsync.runtime.threads import cgroup_cores

_CPU_INFO = Path("/proc/cpuinfo")


def cpu_model() -> str:
    """The processor's name."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def host_cores() -> int:
    """Cores of the host, or of this container where it is limited; the same for ranks that a
    launcher has bound to some of them."""
    cores = os.cpu_count() or 1
    limit = cgroup_cores()
    return cores if limit is None else max(1, min(cores, int(limit)))


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
