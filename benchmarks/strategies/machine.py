"""Where a record was made, without saying whose machine it is."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Date, processor, memory's share of the world: what a reader needs to judge the figures."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_at_start": round(os.getloadavg()[0], 2),
        "threads_per_rank": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "backend": "gloo",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
