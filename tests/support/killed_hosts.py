"""As `killed_ranks.py`, with ranks that pretend to sit on hosts of two: `python killed_hosts.py
WORLD_SIZE MOVE[,MOVE...]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, without pytest's path

from torch import nn

from gradsync.comm.base import Communicator
from gradsync.sync import exchange
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.replicate import replicate
from support import killed_ranks
from support.engine_cases import pretend_hosts


def on_hosts(model: nn.Module, *, comm: Communicator) -> GradientSync:
    """Replicate by `hierarchical`, through shared memory or not at all."""
    return replicate(
        model,
        strategy="hierarchical",
        comm=comm,
        groups=pretend_hosts(comm, 2),
        collective="shared_memory",
    )


if __name__ == "__main__":
    exchange.LEAST_BYTES = 0
    killed_ranks.replicate = on_hosts
    killed_ranks.main(int(sys.argv[1]), [int(move) for move in sys.argv[2].split(",")])
