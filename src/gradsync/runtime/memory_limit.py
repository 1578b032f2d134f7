"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil


def available_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """The smaller of what the machine has left and what the container's limit (cgroup v2) leaves,
    bytes. Cached files count as free: the kernel drops them first."""
    free = psutil.virtual_memory().available
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    if limit == "max":
        return free
    cached = int(statistics.get("inactive_file", 0)) + int(statistics.get("active_file", 0))
    return min(free, max(int(limit) - used + cached, 0))
