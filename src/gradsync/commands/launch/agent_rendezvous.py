"""How the launchers of all hosts meet, and how those learn of a lost host that go on without it."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psutil
from torch.distributed import DistNetworkError, PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from gradsync.commands.launch.requeue import STOPPED
from gradsync.errors import RendezvousError
from gradsync.runtime import environ
from gradsync.runtime.bounds import MOST_NODES
from gradsync.runtime.rejoin import NAMED, ended_key, group_key, joined_key
from gradsync.runtime.store import SignedStore, host_store, join_store, token_of, wait_until

_T = TypeVar("_T")
_LOOPBACK = "127.0.0.1"
_KNOCK_S = 1.0
_WAIT_S = 300.0  # for the other nodes, at the start
_OTHERS_END_S = 300.0  # as torch waits
_TELL_S = 5.0
_ANSWER_S = 5.0
_REGROUP_S = 60.0
_LOOK_S, _LOOKS = 1.0, 4
_STOP = "gradsync/stop"
_NUMBERED = "gradsync/hosts"  # how many hosts have come so far
_BEAT = "gradsync/beat/{}"  # of a host with ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """This host as one of several."""

    count: int  # hosts that begin
    rank: int  # `count` and more: comes when they have begun
    address: str  # of node 0
    port: int  # on node 0
    most: int = MOST_NODES  # hosts whose ranks live at once


class AgentRendezvous(RendezvousHandler):
    """Rendezvous of agents, and then of their ranks: a store that the agent of node 0 serves.

    torch's static rendezvous needs a port chosen beforehand and listens on all interfaces. It does
    not say which node is missing, and cannot be interrupted.

    Args:
        nodes: None for one host, whose socket then listens on the loopback only.
    """

    def __init__(self, nodes: Nodes | None) -> None:
        self._nodes = nodes
        self._token = token_of(environ.snapshot())  # authenticates the nodes to each other
        # All nodes need the same id; the port distinguishes runs.
        self._run_id = uuid.uuid4().hex if nodes is None else "gradsync-launch"
        self._store: Any = None
        self._number = 0 if nodes is None else nodes.rank
        self._begun = self._told = False
        self._gone = False  # the store
        self._late = False  # the others have begun without this host
        self._next_look_s, self._times_out = 0.0, 0
        self._asking: threading.Thread | None = None
        self.stop_asked = False  # of a host whose ranks are lost, when `is_left_out` last looked
        self.stopped: Callable[[], bool] = lambda: False
        """True after a stop request: the agent then waits for no node."""

    @property
    def use_agent_store(self) -> bool:
        """True: the store lives as long as the agent, and ranks connect to it."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Rendezvous of the next generation's ranks; waits for all nodes."""
        nodes = self._nodes
        if nodes is None:
            if self._store is None:
                self._store = host_store(_LOOPBACK, 0, one_host=True)
            where = RendezvousStoreInfo(_LOOPBACK, self._store.port)
            return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, where)
        deadline_s = time.monotonic() + _WAIT_S
        if self._store is None:
            self._store = self._open(nodes, deadline_s)
        where = RendezvousStoreInfo(nodes.address, nodes.port)
        try:
            if self._comes_late(nodes):
                self._number, self._late = self._store.add(_NUMBERED, 1) - 1, True
                self._find_place(nodes.most)
                own = PrefixStore(f"{self._run_id}/{self._number}", self._store)
                return RendezvousInfo(own, 0, 1, where)
            self._wait_for_nodes(nodes, self._records(), deadline_s)
        except RendezvousError:
            raise
        except RuntimeError as error:  # torch's DistNetworkError is one
            raise RendezvousError(
                f"node {nodes.rank}: node 0, which serves the store, went away while the nodes met"
            ) from error
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, nodes.rank, nodes.count, where)

    def _comes_late(self, nodes: Nodes) -> bool:
        """Whether the run has begun, or is to begin, without this host."""
        has_begun = partial(self._store.check, [group_key("last")])
        if nodes.rank >= nodes.count:
            wait_until(lambda: self.stopped() or has_begun(), math.inf)
            if self.stopped():
                raise self._vain(nodes, "the run has not begun")
        return nodes.rank > 0 and has_begun()

    def _find_place(self, most: int) -> None:
        """Wait until fewer than `most` of the hosts that came before this one have ranks, as their
        beats tell, which soon end after a loss. This one beats, too, for those that come next."""

        def has_place() -> bool:
            keys, until_s = map(_BEAT.format, range(self._number)), time.monotonic() + 4 * _LOOK_S
            before = {key: self._store.add(key, 0) for key in keys}
            while time.monotonic() < until_s and not self.stopped():
                self._store.add(_BEAT.format(self._number), 1)
                time.sleep(_LOOK_S / 2)
            return sum(self._store.add(key, 0) > beat for key, beat in before.items()) < most

        if self._number >= most and not wait_until(has_place, time.monotonic() + 10 * _LOOK_S):
            self._store.add(NAMED, 1)  # a rank's number is never below its host's
            raise RendezvousError(f"{most} hosts have ranks already, the most that --nnodes allows")

    def _records(self) -> SignedStore:
        return SignedStore(PrefixStore(self._run_id, self._store), self._token, "nodes")

    def begin(self, world_size: int, ranks: range) -> tuple[int, int] | None:
        """Before this host's `ranks` start: none of them is in a group. Returns the host's number
        and its first rank's, if the run has begun without it."""
        self._begun, self._times_out = False, 0
        self._store.delete_key(group_key(self._number))
        if self._late:
            return self._number, self._store.add(NAMED, len(ranks)) - len(ranks)
        job = f"gradsync/{SignedStore(self._store, self._token, '0').name('prefix')}"
        here = [f"{job}/1/here/{rank}" for rank in range(world_size)]
        if self._nodes and not self._store.check(here):  # what a lost launcher's ranks have left
            for rank in ranks:
                self._store.delete_key(f"{job}/sessions/{rank}")
                self._store.delete_key(here[rank])
        if self._number == 0:
            self._store.set(NAMED, str(world_size))
        return None

    def has_begun(self) -> bool:
        """Whether the ranks have met; before that, a lost one ends the run."""
        key = group_key(self._number)
        self._begun = self._begun or self._ask(lambda: self._store.check([key]), otherwise=False)
        return self._begun

    def has_joined(self, rank: int, count: str) -> bool:
        """Whether rank `rank`, started again `count` times, is one of the group again."""
        key = joined_key(rank, count)
        return self._ask(lambda: self._store.check([key]), otherwise=False)

    def say_lost(self, pid: int) -> None:
        """Tell ranks of other hosts, which see no process of this one, that a rank has ended."""
        if self._nodes is not None:
            key = ended_key(socket.gethostname(), pid)
            self._ask(lambda: self._store.set(key, "1"), otherwise=None)

    def is_left_out(self, *, inside: bool) -> bool:
        """Whether ranks of other hosts have gone on without this one's, seen several times: a new
        group's ranks say so one after the other. It looks now and then, and says that ranks live;
        False if none was `inside` of the group."""

        def differs() -> bool:
            self._store.add(_BEAT.format(self._number), 1)
            self.stop_asked = self._store.check([_STOP])
            keys = [group_key(self._number), group_key("last")]
            return inside and self._store.check(keys) and len({*self._store.multi_get(keys)}) > 1

        now_s = time.monotonic()
        if self._nodes is not None and now_s > self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            self._times_out = self._times_out + 1 if self._ask(differs, otherwise=False) else 0
        return self._times_out > _LOOKS

    def ask_others_to_stop(self) -> None:
        """Have the other hosts' launchers stop their ranks."""
        self._ask(lambda: self._store.set(_STOP, "1"), otherwise=None)

    def how_others_end(self, waited_s: float, coming: Sequence[str] = ()) -> int | None:
        """How hosts end that go on without this one's ranks, which were lost so long ago: None
        while they run, 0 for well, 75 for a stop, 1 otherwise, or if there are none. A rank that
        was started again may have joined by now, and have told so under a key of `coming`."""

        def ends() -> int | None:
            records = self._records()
            here, group = self._last_group(self._store)
            if self._number in here:
                if any(self._store.check([key]) for key in coming):
                    return None
                records.set(f"empty/{self._number}", str(group))
                if waited_s > _REGROUP_S:  # the others would have made another one
                    return 1
            found = []
            for node in here:
                empty = records.get(f"empty/{node}") == str(group).encode()
                found.append(records.get(f"ended/{node}") or (b"1" if empty else None))
            if None in found:
                return None
            return next((code for code in (0, STOPPED) if str(code).encode() in found), 1)

        return 1 if self._nodes is None else self._ask(ends, otherwise=1)

    def _last_group(self, store: Any) -> tuple[list[int], int]:
        """Hosts with ranks in it, and its number."""
        keys = [group_key(node) for node in self._hosts(store)]
        last = [int(store.get(key)) if store.check([key]) else -1 for key in keys]
        return [node for node, number in enumerate(last) if number == max(last)], max(last)

    def _hosts(self, store: Any) -> range:
        return range(store.add(_NUMBERED, 0) if self._nodes else 1)

    def _ask(
        self,
        question: Callable[[], _T],
        *,
        otherwise: _T,
        limit_s: float | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> _T:
        """Its answer, or `otherwise` if node 0 has left or is silent: then the store waits for it
        indefinitely; or once the wait is `over`, which the question should notice, too: Python
        aborts if a thread is in torch's code when it ends."""
        answers: list[_T] = []

        def ask() -> None:
            try:
                answers.append(question())
            except DistNetworkError:
                self._gone = True
            except RuntimeError:  # no answer in time
                pass

        if self._nodes is None:
            return question()
        if not self._gone and (self._asking is None or not self._asking.is_alive()):
            self._asking = thread = threading.Thread(target=ask, name="gradsync-ask", daemon=True)
            thread.start()
            until_s = time.monotonic() + (limit_s or _ANSWER_S)
            wait_until(lambda: not thread.is_alive() or over(), until_s)
            thread.join(_KNOCK_S)
        return answers[0] if answers else otherwise

    def _open(self, nodes: Nodes, deadline_s: float) -> Any:
        if nodes.rank == 0:
            store = host_store(nodes.address, nodes.port, one_host=False)
            store.set(_NUMBERED, str(nodes.count))
            return store
        while True:  # in short tries, to notice signals in between
            slice_s = min(deadline_s, time.monotonic() + _KNOCK_S)
            try:
                return join_store(nodes.address, nodes.port, rank=nodes.rank, deadline_s=slice_s)
            except RendezvousError:
                if self.stopped() or time.monotonic() >= deadline_s:
                    raise self._vain(nodes, "node 0 does not answer") from None

    def _wait_for_nodes(self, nodes: Nodes, store: SignedStore, deadline_s: float) -> None:
        keys = [f"here/{node}" for node in range(nodes.count)]

        def all_here() -> bool:
            store.claim(keys[nodes.rank], "1")
            return bool(store.get_all(keys)) or self.stopped()

        wait_until(all_here, deadline_s)
        missing = [str(node) for node, key in enumerate(keys) if store.get(key) is None]
        if missing:
            raise self._vain(nodes, f"node(s) {', '.join(missing)} did not come")

    def _vain(self, nodes: Nodes, problem: str) -> RendezvousError:
        if self.stopped():
            return RendezvousError(f"stopped while waiting: {problem}")
        return RendezvousError(
            f"node {nodes.rank} of {nodes.count} waited {_WAIT_S:.0f} s at "
            f"{nodes.address}:{nodes.port}, but {problem}. Is each node's line running, do all "
            "lines say the same --nnodes, --master-addr and --master-port, and is that port open "
            "between the nodes?"
        )

    def say_ended(self, code: int) -> None:
        """Tell the other nodes how this one's ranks have ended; only the first call counts. Then
        wait for theirs, which may need the store of node 0: long if they ended well, until a signal
        comes; after a stop, briefly."""
        begins = self._nodes is not None and self._nodes.rank < self._nodes.count
        if not (begins or self._late) or self._store is None or self._told:
            return
        self._told, records, store = True, self._records(), self._store
        over = self.stopped if code == 0 else bool  # `shutdown` forgets it
        deadline_s = time.monotonic() + (_OTHERS_END_S if code == 0 else _TELL_S)

        def tell() -> None:
            keys = [f"ended/{node}" for node in self._hosts(store)]
            records.claim(keys[self._number], str(code))
            if code in (0, STOPPED):
                here = [keys[node] for node in self._last_group(store)[0]]
                wait_until(lambda: over() or bool(records.get_all(here)), deadline_s)
                brief_s = min(deadline_s, time.monotonic() + _TELL_S)  # hosts without ranks left
                wait_until(lambda: over() or bool(records.get_all(keys)), brief_s)

        self._ask(tell, otherwise=None, limit_s=deadline_s - time.monotonic(), over=over)

    def shutdown(self) -> bool:
        """Drop the store, whose socket closes with it, and the agent, which also holds it. End the
        connection of a thread that waits for a host that is cut off."""
        if self._nodes and self._asking and self._asking.is_alive():
            for each in psutil.Process().net_connections("tcp"):
                if each.raddr and each.raddr.port == self._nodes.port:
                    with suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as one:
                        one.shutdown(socket.SHUT_RDWR)
            self._asking.join(_KNOCK_S)
        self._store = None
        self.stopped = lambda: False
        return True

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "gradsync"

    def get_run_id(self) -> str:
        """Name of this run."""
        return self._run_id

    def is_closed(self) -> bool:
        """False: another generation is always possible."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: no other node can join."""

    def num_nodes_waiting(self) -> int:
        """0: the nodes are fixed."""
        return 0
