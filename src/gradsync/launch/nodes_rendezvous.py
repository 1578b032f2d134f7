"""A torch elastic rendezvous of several nodes whose numbers are known: node 0 serves the store.

torch's own static rendezvous does not say which node is missing, and cannot be interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from gradsync.errors import RendezvousError
from gradsync.launch.plan import LaunchPlan
from gradsync.runtime.store import host_store, join_store, wait_until

_RUN_ID = "gradsync-launch"
_KNOCK_S = 1.0


class NodesRendezvous(RendezvousHandler):
    """The agents of `plan.nodes` nodes meet at `plan.coordinator`; the ranks share their store.

    Args:
        plan: with a node rank and a coordinator.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        assert plan.node_rank is not None
        self._plan = plan
        self._node = plan.node_rank
        self._store: Any = None
        self.stopped: Callable[[], bool] = lambda: False
        """True once a stop was asked for: no node is waited for then."""

    @property
    def use_agent_store(self) -> bool:
        """True: ranks connect to the store of node 0's agent."""
        return True

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "nodes"

    def next_rendezvous(self) -> RendezvousInfo:
        """Where the ranks meet; waits for all nodes.

        Raises:
            RendezvousError: naming the nodes that did not come.
        """
        plan = self._plan
        deadline_s = time.monotonic() + plan.wait_s
        if self._store is None:
            self._store = self._open(deadline_s)
        store = PrefixStore(_RUN_ID, self._store)
        try:
            self._meet(store, deadline_s)
        except RendezvousError:
            raise
        except RuntimeError as error:  # torch's DistNetworkError is one
            raise RendezvousError(
                f"node {self._node}: node 0, which serves the store, went away while the nodes met"
            ) from error
        where = RendezvousStoreInfo(plan.coordinator, plan.port)
        return RendezvousInfo(store, self._node, plan.nodes, where)

    def _open(self, deadline_s: float) -> Any:
        plan = self._plan
        if self._node == 0:
            return host_store(plan.coordinator, plan.port, one_host=False)
        while True:  # in short tries: a signal must be noticed in between
            try:
                slice_s = min(deadline_s, time.monotonic() + _KNOCK_S)
                return join_store(plan.coordinator, plan.port, rank=self._node, deadline_s=slice_s)
            except RendezvousError:
                self._give_up_if(deadline_s, "node 0 does not answer")

    def _meet(self, store: Any, deadline_s: float) -> None:
        keys = [f"here/{node}" for node in range(self._plan.nodes)]
        store.set(keys[self._node], str(self._plan.nodes))
        wait_until(lambda: store.check(keys) or self.stopped(), deadline_s)
        missing = [node for node, key in enumerate(keys) if not store.check([key])]
        if missing:
            names = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
            self._give_up_if(deadline_s, f"node(s) {names} did not come", at_once=True)
        told = {int(number) for number in store.multi_get(keys)}
        if told != {self._plan.nodes}:
            raise RendezvousError(
                f"the nodes were started with different --nnodes: {sorted(told)}; start all again"
            )

    def _give_up_if(self, deadline_s: float, problem: str, *, at_once: bool = False) -> None:
        plan = self._plan
        if self.stopped():
            raise RendezvousError(f"stopped while waiting: {problem}")
        if at_once or time.monotonic() >= deadline_s:
            raise RendezvousError(
                f"node {self._node} of {plan.nodes} waited {plan.wait_s:.0f} s at "
                f"{plan.coordinator}:{plan.port}, but {problem}. Is each node's line running, do "
                "all lines say the same --master-addr and --master-port, and is that port open "
                "between the nodes?"
            )

    def is_closed(self) -> bool:
        """False: it is never closed."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: no other node can join."""

    def num_nodes_waiting(self) -> int:
        """0: the nodes are known."""
        return 0

    def get_run_id(self) -> str:
        """The same on all nodes; the port tells runs apart."""
        return _RUN_ID

    def shutdown(self) -> bool:
        """Let go of the store."""
        self._store = None
        return True
