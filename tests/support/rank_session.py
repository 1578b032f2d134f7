"""A real gradsync session on each rank of a process pool, as if mpirun had started it."""

from __future__ import annotations

import hashlib

from gradsync.runtime.session import Session
from gradsync.runtime.session_options import SessionOptions


def open_session(rank: int, world_size: int, store_path: str, **options: object) -> Session:
    """A session whose ranks meet on this host; the pool's fresh `store_path` names the job."""
    env = {}
    if world_size > 1:
        env = {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(world_size),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(world_size),
            "PMIX_NAMESPACE": hashlib.sha256(store_path.encode()).hexdigest(),
        }
    defaults: dict[str, object] = {"device": "cpu", "threads": 1, "rendezvous_timeout_s": 20.0}
    return Session(SessionOptions(**{**defaults, **options}), env=env)  # type: ignore[arg-type]
