"""Where a measurement was made, without saying whose machine it is."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any

from gradsync.runtime.machine import cpu_model, usable_cores
from gradsync.runtime.memory_limit import total_bytes


def environment(*, world_size: int, threads: int) -> dict[str, Any]:
    """What a reader needs to judge the figures, as JSON; taken before anything is measured.

    Args:
        world_size: ranks that are measured.
        threads: intra-op threads of a rank.

    Returns:
        `date`, `cpu`, `cores` (that this process may use), `load_at_start` (of the last minute),
        `memory_gib`, `world_size`, `threads_per_rank`, `cpu_capability`, `backend` (of the process
        group; none without one), `accelerator` (its name, or None), `torch`, `python`, `system`.
    """
    import torch
    import torch.distributed as dist

    has_group = dist.is_available() and dist.is_initialized()
    has_cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "memory_gib": round(total_bytes() / 2**30, 1),
        "world_size": world_size,
        "threads_per_rank": threads,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "backend": str(dist.get_backend()) if has_group else "none",
        "accelerator": torch.cuda.get_device_name() if has_cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
