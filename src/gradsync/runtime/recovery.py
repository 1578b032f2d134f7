"""Go on without a lost rank: survivors agree, form a new group, and finish or repeat the step.

    a connection ends      -> every survivor ends its own, so that all of them notice
    report, propose        -> through the rendezvous store (membership.py)
    new group              -> over the members of the first proposal, with ranks numbered anew
    the step               -> finished with the sums that all hold, or begun again
    a checkpoint           -> ranks that were started again may join the group (rejoin.py)

The store must outlive the lost rank: `gradsync launch` serves it. A rank that raises an exception
is not lost: its error ends the run, as without this.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from gradsync.errors import ConfigError, LostPeerError, PeerError
from gradsync.runtime.failure import communication_error, symptom
from gradsync.runtime.gloo_group import run_or_leave
from gradsync.runtime.membership import Move, Report, admits, finishes, next_move
from gradsync.runtime.peers import process_state
from gradsync.runtime.rejoin import Admission, Lobby
from gradsync.runtime.store import Presence, record_of, wait_until
from gradsync.runtime.watch import REPORT_S

if TYPE_CHECKING:
    from gradsync.runtime.store import SignedStore
    from gradsync.runtime.watch import FailureWatch
    from gradsync.world import World

log = logging.getLogger("gradsync")

_LOOK_S = 0.02


class Group(Protocol):
    """What a `Session` does for its recovery."""

    @property
    def world(self) -> World:
        """The ranks; the same object after a loss, with new numbers."""
        ...

    @property
    def presences(self) -> list[Presence]:
        """Of the group's ranks, in order."""
        ...

    @property
    def lobby(self) -> Lobby | None:
        """Where ranks wait to join; None for a process that no other can join."""
        ...

    @property
    def scope(self) -> str:
        """Of the session's records."""
        ...

    def suspend(self, number: int, *, cut: bool) -> tuple[FailureWatch, SignedStore]:
        """Stop watching, and with `cut` end all connections, so that the other ranks notice;
        returns the watch and the records of the `number`-th ballot."""
        ...

    def regroup(self, number: int, presences: Sequence[Presence]) -> None:
        """Go on in a group of the ranks with these `presences`, this one among them.

        Raises:
            RuntimeError: one of them is lost, too.
        """
        ...

    def announce(self, name: int, folder: str) -> None:
        """Say that this process, of rank `name` as the launcher counts, waits for a checkpoint in
        `folder`."""
        ...

    def admission(self) -> Admission | None:
        """This rank's place in the group, if it waits outside and was admitted.

        Raises:
            SystemExit: the run is over.
        """
        ...


class Handle(Protocol):
    """What synchronises a model."""

    number: int
    """The same on all ranks."""

    @property
    def in_step(self) -> bool:
        """Whether there are gradients that no step has used."""
        ...

    saved_with: Any
    """The optimizers that were saved with it."""

    def regroup(self) -> None:
        """Continue among the ranks that are left."""
        ...

    def settings(self) -> dict[str, str]:
        """Hyper-parameters of the optimizers that were saved with the model."""
        ...

    def check_replicas(self, optimizer: Any) -> None:
        """Raise DriftError on all ranks unless they hold the same bits."""
        ...

    def finish_writing(self) -> None:
        """Wait until nothing is being written."""
        ...


class Recovery:
    """Recovers a session of `gs.init(on_loss="shrink")` from lost ranks.

    Args:
        group: the session, open.
        silence_s: after which a silent host counts as lost.
        timeout_s: longest wait for the other survivors.
        outside: this rank was started again, and waits outside of the group; its number as the
            launcher counts.
    """

    def __init__(
        self, group: Group, *, silence_s: float, timeout_s: float, outside: int | None = None
    ) -> None:
        self._group, self._silence_s, self._timeout_s = group, silence_s, timeout_s
        self._names = [*range(group.world.world_size)] if outside is None else [outside]
        self.waits_to_join = outside is not None
        """Whether this rank was started again, and has not joined the others yet."""
        self.generation = 0
        """Groups so far, after the first one."""
        self.committed = 0
        """Steps whose update all ranks make."""
        self.lost = self.abandoned = False
        """Whether a rank is lost, and whether a wait for it was given up."""
        self.in_attempt = False
        """Whether a step may be begun again, see `sync.attempts`."""
        self.recovered = 0
        """The last of them that this rank has joined."""
        self._saved: int | None = None
        """The step of the checkpoint at which others may join before the next step."""
        self._new: set[int] = set()  # names of ranks that have done no step with the others yet
        self.incidents: list[dict[str, Any]] = []
        """Losses and joins that are in no file yet."""
        self.unsure: list[tuple[int, Callable[[], bool], Callable[[], None]]] = []
        """Since the last step, checkpoints that a lost rank 0 may not have written: their step,
        what waits until it has, and what writes them."""
        self.handles: WeakSet[Handle] = WeakSet()
        """Everything that synchronises a model."""
        self._stale = False
        self._cut_at = -1  # steps before the last one that was repeated with no rank lost
        self._admission: Admission | None = None
        self._processes: Mapping[int, int] = {}  # process ids of the last group's other members

    @property
    def world(self) -> World:
        """The ranks; the same object after a loss, with new numbers."""
        return self._group.world

    @property
    def name(self) -> int:
        """This rank's number as the launcher counts."""
        return self._names[self.world.rank]

    def is_lost(self, generation: int) -> bool:
        """Whether a rank of the group of that generation is lost; the caller then gives up waiting.
        The others may have a new group before it looks."""
        self.abandoned = self.abandoned or self.lost
        return self.lost or self.generation != generation

    def commit(self, barrier: Callable[[], None], *, evaluates: bool = False) -> None:
        """Return once every rank holds the step's whole sums, so that all make the update; or once
        every rank has done an evaluation. One `barrier` of the whole group; if it fails, survivors
        decide: see [Note: Commit].

        Raises:
            RuntimeError: the barrier's own error: the step must begin again, or the run must end.
        """
        if self.world.device_name != "cpu":  # sums may be under way, or aborted: then garbage
            import torch

            torch.cuda.synchronize(self.world.device)
            barrier()  # fails if a rank has aborted, which may end others' sums with garbage, too
        try:
            barrier()
        except RuntimeError as error:
            recovers = self.in_attempt and communication_error(error) is not None
            report = {"holds_sums": True, "evaluates": evaluates}
            if not recovers or not self.recover(error, **report):
                raise
        self.committed += 1
        self._new.clear()
        if not evaluates:
            self.unsure.clear()

    def rebind(self, *, again: bool = False) -> None:
        """Make the handles continue in the new group, if there is one. With `again`, a rank that is
        lost meanwhile is recovered from, too."""
        while self._stale:
            try:
                # Their messages go in one order on all ranks.
                for handle in sorted(self.handles, key=lambda each: each.number):
                    if self.world.device_name == "cpu":
                        handle.regroup()
                    elif not run_or_leave(handle.regroup, lambda: self.lost):
                        self.abandoned = True  # NCCL's groups wait until the timeout
                        raise LostPeerError("a rank was lost while groups were made")
            except RuntimeError as error:
                if not again or communication_error(error) is None:
                    raise
                self.recover(error)
            else:
                self._stale = False

    def recover(
        self,
        error: BaseException | None,
        *,
        holds_sums: bool = False,
        evaluates: bool = False,
        saved: int | None = None,
    ) -> bool:
        """Form a group without the lost ranks; returns whether this rank finishes the step.

        Args:
            error: what a collective raised; None after a checkpoint, to let others join.
            holds_sums, evaluates, saved: see `Report`.

        Raises:
            PeerError: another rank's own failure ends the run, or the store is gone.
            RuntimeError: `error`, twice in a step with no rank lost, or a rank never comes or ends.
        """
        group, began = self._group, time.monotonic()
        self._saved = None
        while True:
            self.generation += 1
            world, lost = group.world, set(range(group.world.world_size))
            mine = Report(self.committed, holds_sums, evaluates, saved)
            chosen, joining = self._agree(mine, error)
            finish = holds_sums = finishes(world.rank, chosen)
            lost -= chosen.keys()
            if error is not None and not lost and not joining:
                if self._cut_at == self.committed:  # again: it is no matter of the network
                    raise error
                self._cut_at = self.committed
            names = [self._names[rank] for rank in sorted(chosen)] + [*joining]
            presences = [group.presences[rank] for rank in sorted(chosen)] + [*joining.values()]
            took_s = time.monotonic() - began
            said = self._describe(sorted(lost), [*joining], len(names), error, finish=finish)
            hosts = sorted({group.presences[rank].host for rank in lost})
            who = {"rank": [self._names[rank] for rank in sorted(lost)], "host": hosts}
            kind = "lost" if lost else "joined" if joining else "cut"
            self.incidents.append({"time": time.time() - took_s, "kind": kind, "said": said} | who)
            self._end(lost)
            if world.rank == min(chosen):
                _say(f"{said}, agreed after {took_s:.2f} s")
            if joining and group.lobby is not None:
                admission = Admission(
                    generation=self.generation,
                    step=saved or 0,
                    committed=max(report.committed for report in chosen.values()),
                    names=names,
                    num_new=len(joining),
                    presences=presences,
                    scope=group.scope,
                )
                group.lobby.admit([*joining.values()], admission)
            self._new.update(joining)
            self._names, saved = names, None
            try:
                group.regroup(self.generation, presences)
                break
            except RuntimeError as again:
                if communication_error(again) is None:
                    raise
                error = again  # one more was lost meanwhile
        self._stale, self.recovered = True, self.generation
        log.info("rank %d goes on after %.2f s", world.rank, time.monotonic() - began)
        return finish

    def saved(self, step: int, ask: Callable[[], bool]) -> bool:
        """After a checkpoint, on all ranks: let ranks that wait for it join before the next step.
        Returns False if a rank was lost meanwhile, which the others have recovered from.

        Args:
            step: of the checkpoint.
            ask: rank 0's answer on every rank: whether one waits, and the checkpoint is on disk.
        """
        try:
            waits = ask()
        except RuntimeError as error:
            if communication_error(error) is None:
                raise
            self.recover(error)
            self.rebind(again=True)
            return False
        if waits:  # another save of the same step may be of no use to them
            self._saved = step
        return True

    def make_sure(self) -> None:
        """At the end, on all ranks: the last checkpoints get to the disk."""
        while self.unsure:
            step, written, write = self.unsure.pop(0)
            while not self.saved(step, written):
                write()

    def let_join(self) -> Collection[int]:
        """Before a step, on all ranks: take in ranks that wait, if there is a checkpoint for them,
        or join the others. Returns the new ranks of the group, which are to be compared."""
        if self.waits_to_join:
            self._join()
        elif self._saved is not None:
            self.recover(None, saved=self._saved)
        self.rebind(again=True)
        return [rank for rank, name in enumerate(self._names) if name in self._new]

    def leave_out(self, newcomers: Collection[int], why: str) -> None:
        """Go on without ranks that have joined, and differ from the others; they end."""
        if self.world.rank in newcomers:
            _say(f"rank {self.name}, started again, leaves: {why}")
            os.kill(os.getpid(), signal.SIGKILL)  # as a lost rank, for the launcher
        self.recover(LostPeerError(why))
        self.rebind(again=True)

    def one_waits(self, folder: str = "") -> bool:
        """Whether a rank that was started again waits to join, at a checkpoint in `folder` or any;
        asks the store."""
        with suppress(RuntimeError):  # without it no rank can join
            lobby = self._group.lobby
            return lobby is not None and bool(lobby.waiting(self._names, folder))
        return False

    def wait_outside(self, folder: str) -> int:
        """Wait for the others' next checkpoint in `folder`; returns its step. Later calls, for what
        a script keeps in other folders, do not wait.

        Raises:
            SystemExit: the run is over.
        """
        if self._admission is None:
            self._group.announce(self._names[0], folder)
            _say(f"rank {self._names[0]} waits for the others' next checkpoint")
            try:
                while (admission := self._group.admission()) is None:
                    time.sleep(2 * _LOOK_S)
            except RuntimeError as gone:
                raise PeerError("the launcher with the rendezvous store has vanished") from gone
            self._admission = admission
        return self._admission.step

    def _join(self) -> None:
        """Enter the group that has admitted this rank, with the checkpoint loaded."""
        admission = self._admission
        if admission is None:
            raise ConfigError(
                "this rank was started again, and joins the others by gs.load: call it before the "
                "first step"
            )
        self.generation, self.committed = admission.generation, admission.committed
        self._names, self.waits_to_join = admission.names, False
        self._new.update(admission.names[-admission.num_new :])
        self._stale, self.recovered = True, self.generation
        try:
            self._group.regroup(self.generation, admission.presences)
        except RuntimeError as error:
            if communication_error(error) is None:
                raise
            self.recover(error)

    def _agree(
        self, mine: Report, error: BaseException | None
    ) -> tuple[Mapping[int, Report], Mapping[int, Presence]]:
        """The new members, with their reports, by their rank in the group that has ended; and those
        that join them, by the launcher's number."""
        from torch.distributed import DistError

        if not self._group.world.is_distributed:
            return {0: mine}, self._waiting([mine])
        watch, records = self._group.suspend(self.generation, cut=error is not None)
        rank, peers = self._group.world.rank, watch.peers
        self._processes = peers.pids
        members, began, told = range(peers.world_size), time.monotonic(), False
        try:
            records.set(f"report/{rank}", record_of(mine))
            while True:
                if failure := watch.peer_failure():
                    raise failure from error
                texts = {each: records.get(f"report/{each}") for each in members}
                found = {each: Report(**json.loads(text)) for each, text in texts.items() if text}
                missing = [each for each in members if each not in found]
                left = set(missing).intersection(peers.left() if missing else ())
                if left and not mine.holds_sums:  # it does not take part in this step; not lost
                    raise error or LostPeerError(f"rank(s) {sorted(left)} have left")
                # Whoever has left in good order while others hold a step's sums has committed it.
                dead = left | peers.lost(missing, self._silence_s)
                text = records.get("members")
                chosen, joining = ({}, {}) if text is None else _proposal(text)
                match next_move(rank, members, found, dead, chosen or None):
                    case Move.PROPOSE:
                        joining = self._waiting([*found.values()])
                        proposal = {each: asdict(report) for each, report in found.items()}
                        who = {name: asdict(presence) for name, presence in joining.items()}
                        records.claim("members", json.dumps([proposal, who]))
                    case Move.JOIN:
                        return chosen, joining
                    case Move.LEAVE:
                        _say(
                            f"rank {rank}: the others took this rank for dead and went on: it ends"
                        )
                        os.kill(os.getpid(), signal.SIGKILL)  # as a lost rank, for the launcher
                    case Move.WAIT:
                        waited_s = time.monotonic() - began
                        if waited_s > self._timeout_s:
                            raise error or LostPeerError(f"rank(s) {missing} did not come")
                        if waited_s > REPORT_S and not told:
                            told = True
                            _say(f"rank {rank} waits for {missing} to abandon the step")
                        time.sleep(_LOOK_S)
        except DistError as gone:
            said = peers.server_obituary(gone)
            if peers.hosted_by_agent and peers.hosts:  # by another host's launcher, for others
                _say(said)
                os.kill(os.getpid(), signal.SIGKILL)  # an exit code would end the run
            raise PeerError(said) from error

    def _waiting(self, reports: Sequence[Report]) -> Mapping[int, Presence]:
        """Who may join a group of ranks with these reports."""
        lobby = self._group.lobby
        return lobby.waiting(self._names) if lobby is not None and admits(reports) else {}

    def _end(self, lost: set[int]) -> None:
        """Kill lost ranks of this host that are only stopped: they hold files and locks."""
        for pid in (self._processes[rank] for rank in lost if rank in self._processes):
            if process_state(pid) != "ended":
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                wait_until(lambda pid=pid: process_state(pid) == "ended", time.monotonic() + 5)

    def _describe(
        self,
        lost: list[int],
        joining: list[int],
        num_left: int,
        error: BaseException | None,
        *,
        finish: bool,
    ) -> str:
        told = []
        if lost or (error is not None and not joining):
            who = "lost rank(s) " + ", ".join(str(self._names[rank]) for rank in lost)
            said = "" if error is None else f" ({symptom(communication_error(error) or error)})"
            told.append((who if lost else "a connection ended") + said)
        if joining:
            told.append(f"rank(s) {', '.join(map(str, joining))} join")
        what = "go on" if error is None else "finish it" if finish else "repeat it"
        return "; ".join([*told, f"{num_left} rank(s) {what}"])


def _say(line: str) -> None:
    print(f"gradsync: {line}", file=sys.stderr, flush=True)


def _proposal(text: bytes) -> tuple[dict[int, Report], dict[int, Presence]]:
    reports, joining = json.loads(text)
    presences = {int(name): Presence(**presence) for name, presence in joining.items()}
    return {int(rank): Report(**report) for rank, report in reports.items()}, presences
