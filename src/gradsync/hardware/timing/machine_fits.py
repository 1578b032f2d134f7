"""The lines that `gradsync bench collectives --save` measured on this machine; no torch."""

from __future__ import annotations

from importlib.metadata import version

from gradsync.hardware.timing.alpha_beta import Fit
from gradsync.hardware.timing.alpha_beta_cache import load_fits
from gradsync.runtime.machine import cpu_model, usable_cores
from gradsync.runtime.threads import choose_threads


def fits_here(world_size: int, *, threads: int | None = None) -> list[Fit]:
    """What collectives of fp32 cost among so many CPU ranks of this host; nothing where nobody
    measured that.

    Args:
        world_size: ranks on this host.
        threads: intra-op threads of each; None: as many as the trainer takes.

    Raises:
        RunError: the cache cannot be read.
        DataError: the file is damaged.
    """
    return load_fits(
        {
            "cpu": cpu_model(),
            "cores": usable_cores(),
            "accelerator": None,
            "backend": "gloo",
            "world_size": world_size,
            "threads_per_rank": choose_threads(world_size, requested=threads),
            "torch": version("torch"),
            "num_nodes": 1,
            "dtype": "fp32",
        }
    )
