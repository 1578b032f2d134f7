"""A torch elastic rendezvous for one host: a store whose socket listens on the loopback only.

torch's own static rendezvous needs a port chosen beforehand, and listens on all interfaces.
"""

from __future__ import annotations

import uuid
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from gradsync.runtime.store import host_store

_ADDRESS = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """One agent, no other host to wait for; the workers share the agent's store."""

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._store: Any = None

    @property
    def use_agent_store(self) -> bool:
        """True: the store lives as long as the agent, and ranks connect to it."""
        return True

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Where the workers of the next generation meet; opens the store the first time."""
        if self._store is None:
            self._store = host_store(_ADDRESS, 0, one_host=True)
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_ADDRESS, self._store.port))

    def is_closed(self) -> bool:
        """False: there may always be another generation."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: no other node can join."""

    def num_nodes_waiting(self) -> int:
        """0: there is no other host."""
        return 0

    def get_run_id(self) -> str:
        """A random name of this run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Let go of the store; its socket closes with it."""
        self._store = None
        return True
