"""A session: a process group from launcher variables, for the length of a `with` block.

    with gs.init() as world:
        ...                     # world.device, world.rank; collectives work

Read the launcher, pin threads, choose the device, meet the other ranks, build the process group,
watch for failures. The end of the block undoes everything, also after an exception. A single
process has no process group.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from secrets import token_hex
from typing import Any

from gradsync.errors import ConfigError, LaunchError, LostPeerError, RendezvousError, RunError
from gradsync.runtime import environ
from gradsync.runtime.device import (
    check_not_shared,
    choose_backend,
    choose_device,
    device_here,
    device_identity,
)
from gradsync.runtime.gloo_group import (
    finish_sending,
    keep_forever,
    run_or_leave,
    wait_until_workers_sleep,
)
from gradsync.runtime.machine import choose_threads, keep_freed_memory, pin_threads
from gradsync.runtime.network import PeerConnections, interface_towards
from gradsync.runtime.peers import Peers
from gradsync.runtime.recovery import Recovery
from gradsync.runtime.rejoin import REJOIN, Admission, Lobby, ended_key, group_key, joined_key
from gradsync.runtime.rendezvous import Meeting, check_reach, meet
from gradsync.runtime.resolve import Resolution, resolve
from gradsync.runtime.seeds import seed_everything
from gradsync.runtime.session_options import SessionOptions
from gradsync.runtime.signals import LAUNCHED, StopRequest, end_program_as_said, say_interrupted
from gradsync.runtime.stacks import StackFiles
from gradsync.runtime.store import TOKEN, Presence, SignedStore, check_in
from gradsync.runtime.watch import REPORT_S, FailureWatch
from gradsync.world import World, place

log = logging.getLogger("gradsync")

_FAREWELL_S = 10.0
_NCCL_LATER_S = 60.0
"""By how much NCCL's own timeout is later: it ends the process before a rank can report why. It
counts from the launch of a sum in backward, gloo's from the end of the step."""
# Exit codes of an orderly end: done, or stopped by a signal with the checkpoint written.
_ORDERLY_EXITS = (None, 0, 75)


def name_warnings(stack: ExitStack) -> None:
    """Prefix the package's warnings with its name while `stack` is open, in a program without
    logging set up: Python would print them bare."""
    if log.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("gradsync: %(levelname)s: %(message)s"))
    # A program may set up logging later.
    handler.addFilter(lambda _: not logging.getLogger().handlers and log.handlers == [handler])
    log.addHandler(handler)
    stack.callback(log.removeHandler, handler)


class Session:
    """See `gradsync.init`. `world` and `threads` hold from `open` on."""

    def __init__(
        self, options: SessionOptions | None = None, *, env: Mapping[str, str] | None = None
    ) -> None:
        self.options = options or SessionOptions()
        self._world: World | None = None
        self.threads = 0
        self.stacks = StackFiles(self.options.stacks_dir)
        self._backend = ""
        self._env = environ.snapshot() if env is None else dict(env)
        self._stack = ExitStack()
        self._meeting: Meeting | None = None
        self._group: Any = None
        self.presences: list[Presence] = []
        """Of the ranks of the group, in order."""
        self._me: Presence | None = None
        self._joined_key = ""
        self._group_keys = [group_key(node) for node in (self._env.get("GROUP_RANK", "0"), "last")]
        self._lost = False
        self._connections: Any = None
        self._interface = ""
        self.watch: FailureWatch | None = None
        """Set while the session is open, if there are other ranks."""
        self._put_hook_back: Callable[[], None] = lambda: None

    @property
    def world(self) -> World:
        """This rank's place; a ConfigError before `open`, when no ranks have met."""
        if self._world is None:
            raise ConfigError(
                "gs.init() joins the run when its block is entered, and this rank is still alone: "
                "write `with gs.init() as world:`"
            )
        return self._world

    def __enter__(self) -> World:
        world = self.open()
        self._hook()  # also for errors before `close`
        return world

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if getattr(error, "code", error) in _ORDERLY_EXITS and self.world.recovery is not None:
                self.world.recovery.make_sure()
        except BaseException as failed:
            self.close(failed)
            raise
        self.close(error)

    def open(self) -> World:
        """Join the run; returns this rank's `World` with its device.

        Raises:
            LaunchError: launcher variables or the requested device are invalid.
            ConfigError: the requested backend is unknown, or cannot be used here.
            RendezvousError: the other ranks did not join in time.
        """
        self._world = World()  # rank 0 reports if the next line raises
        resolution = resolve(self._env)
        self._world = resolution.world
        again = environ.take(REJOIN) if self.options.on_loss == "shrink" else ""
        name_warnings(self._stack)
        if self.options.keep_memory:  # before the rendezvous, which starts threads
            keep_freed_memory()
        if self.world.is_main:
            for warning in resolution.warnings:
                log.warning("%s", warning)
        # Before ranks meet: a rank that fails later would take the store from the others.
        device = device_here(self.options.device, self.world.local_rank)
        self._backend = choose_backend(self.options.backend, device)
        try:
            grows = self.options.on_loss == "shrink" and self._env.get("ROLE_NAME") == LAUNCHED
            if self.world.is_distributed or grows:
                self._join(resolution, again)
            else:
                self._set_up_compute(self.world)
            if self.options.catch_stop:
                stop = self._stack.enter_context(StopRequest(announce=self.world.is_main))
                asks = partial(getattr, stop, "requested")
                self._world = replace(self.world, asks_to_stop=asks)
            if self.options.on_loss == "shrink":
                if "gloo" not in self._backend or sys.platform != "linux":
                    raise ConfigError("on_loss='shrink' needs Gloo, beside NCCL too, and Linux")
                times = {name: getattr(self.options, name) for name in ("silence_s", "timeout_s")}
                name = resolution.world.rank if self._joined_key else None
                recovery = Recovery(self, **times, outside=name)
                self._world = replace(self.world, recovery=recovery)
        except BaseException as error:
            say_interrupted(error)
            self._stack.close()
            raise
        return self.world

    def close(self, error: BaseException | None = None) -> None:
        """Leave the run. With `error`, tell the other ranks, or raise the first rank's error.

        Raises:
            PeerError: `error` only follows from another rank's failure.
            LostPeerError: a collective failed because another rank is late or has left.
        """
        orderly = error is None or (isinstance(error, SystemExit) and error.code in _ORDERLY_EXITS)
        watch, self.watch = self.watch, None
        if isinstance(error, AttributeError) and error.name == "module":
            error.add_note("gs.replicate wraps nothing: write `model`, not `model.module`")
        if error is not None and watch is not None:
            watch.sampler.held = True
        cause = None
        if orderly:
            self._put_hook_back()
            if self._meeting is not None and self.world.recovery and not self.world.waits_to_join:
                with suppress(RuntimeError):  # the store is gone
                    self._meeting.lobby.close(getattr(error, "code", None) or 0)
        else:  # the error that ends the session may end the program
            self._hook()
        try:
            if watch is None or self._meeting is None:
                if error is not None:
                    say_interrupted(error)
            elif orderly or error is None:
                finish_sending()
                watch.stop()
                self._meeting.say_farewell(_FAREWELL_S)
                cause = watch.peer_failure()
            else:
                cause = watch.settle(error)
                if self.world.device_name != "cpu":
                    wait_until_workers_sleep()
                    self._destroy_group(abort=True)
        finally:
            self._stack.close()
        if cause is not None:
            raise cause from cause.__cause__

    def _hook(self) -> None:
        launched, rank = self._env.get("ROLE_NAME") == LAUNCHED, self.world.rank
        if launched or self.world.is_distributed:
            self._put_hook_back = end_program_as_said(leave_out_interrupts=launched, rank=rank)

    def _join(self, resolution: Resolution, again: str) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            raise RunError("a process group exists already; gradsync.init() makes its own")
        options, world = self.options, self.world
        deadline_s = time.monotonic() + options.rendezvous_timeout_s
        self._connections = PeerConnections(options.silence_s)
        meeting = meet(self._env, resolution, deadline_s=deadline_s, rejoins=again != "")
        self._meeting = meeting
        self._stack.callback(meeting.close)
        self._connections.learn()
        # A rank announces its device to the others, unless it first needs their hosts to know its
        # local rank.
        if not resolution.reading.needs_hosts:
            self._set_up_compute(world)
        # By default gloo listens on the address of the host's name.
        interface = self._env.get("GLOO_SOCKET_IFNAME", "")
        if not interface and world.one_host:
            interface = "lo" if sys.platform == "linux" else "lo0"
        self._interface = interface or interface_towards(meeting.address)
        if again:
            self._wait_outside(meeting, again)
            return
        presences = check_in(
            meeting.records,
            self._introduce(),
            rank=world.rank,
            world_size=world.world_size,
            deadline_s=deadline_s,
            hosted_by_agent=meeting.hosted_by_agent,
        )
        meeting.everyone_is_here()
        meeting.learn_scope(sha256(repr(presences).encode()).hexdigest())
        hosts = [presence.host for presence in presences]
        if resolution.reading.needs_hosts:
            self._set_up_compute(place(world, hosts, trust_local=resolution.reading.trust_local))
        check_not_shared(hosts, [presence.device_identity for presence in presences])
        if "gloo" in self._backend:
            check_reach(
                meeting.records, self.world, hosts, interface=self._interface, deadline_s=deadline_s
            )
        self.presences = presences
        self._undo_group_at_end()
        if world.is_distributed:
            self._begin_group(meeting)
        if options.on_loss == "shrink":
            meeting.tell_launcher(*self._group_keys, value="0")

    def _introduce(self) -> Presence:
        """What this rank announces."""
        identity = device_identity(self.world.device_name, self._env.get("NCCL_HOSTID", ""))
        self._me = Presence(socket.gethostname(), identity, os.getpid(), token_hex())
        return self._me

    def _undo_group_at_end(self) -> None:
        self._stack.callback(self._destroy_group)
        self._stack.callback(wait_until_workers_sleep)
        os.register_at_fork(after_in_child=partial(_forget, weakref.ref(self)))

    def _wait_outside(self, meeting: Meeting, count: str) -> None:
        """Be one rank alone, started again, the `count`-th time; see rejoin.py."""
        found = [meeting.records.get(f"here/{rank}") for rank in range(self.world.world_size)]
        self.presences = [Presence(**json.loads(each)) for each in found if each]  # at the start
        if not self.presences:
            raise RendezvousError(f"no record of the others is readable: is {TOKEN} the same?")
        self._undo_group_at_end()
        self._joined_key = joined_key(self.world.rank, count)
        alone = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1}
        self._world = replace(self.world, **alone, node_rank=0, num_nodes=1)

    def _begin_group(self, meeting: Meeting) -> None:
        """Make the process group of the ranks that are present, and watch them."""
        from gradsync.core.torch_private import num_issued

        world, options = self.world, self.options
        self.stacks.private_name = meeting.records.name("stacks")
        # A thread that waits on one connection blocks it.
        store = meeting.records.over(meeting.connect())
        self._connections.learn()
        peers = Peers(
            store,
            rank=world.rank,
            world_size=world.world_size,
            hosted_by_agent=meeting.hosted_by_agent,
            processes={o: it for o, it in enumerate(self.presences) if o != world.rank},
            hosts=[] if world.one_host else [each.host for each in self.presences],
            connections=self._connections,
            all_here=options.on_loss == "shrink" and world.one_host,
            has_ended=meeting.has_ended,
        )
        self.watch = FailureWatch(
            store,
            peers,
            report_s=options.report_wait_s,
            num_issued=lambda: 0 if self._group is None else num_issued(self._group),
            stacks=self.stacks,
            on_loss=self._cut if options.on_loss == "shrink" else None,
            silence_s=options.silence_s,
        )
        if options.on_loss == "shrink":
            self.watch.start()  # a rank may be lost while the group is made
            self._meet(meeting.records, peers)
            self._lost = False
            make = partial(self._make_group, meeting, self._interface)
            if not run_or_leave(make, lambda: self._lost):  # gloo would wait until the timeout
                if world.recovery is not None:
                    world.recovery.abandoned = True
                raise LostPeerError("a rank was lost while the group was made")
        else:
            self._make_group(meeting, self._interface)
        self._connections.learn(pairs=True)
        if options.on_loss == "end":
            self.watch.start()

    def _meet(self, records: SignedStore, peers: Peers) -> None:
        """Wait until every rank of the new group is there; LostPeerError if one is lost. Gloo would
        wait for it until the timeout."""
        keys = [f"ready/{rank}" for rank in range(peers.world_size)]
        records.set(keys[peers.rank], "1")
        deadline_s = time.monotonic() + self.options.timeout_s
        while not records.get_all(keys):
            missing = [rank for rank, key in enumerate(keys) if records.get(key) is None]
            if peers.lost(missing, self.options.silence_s) or time.monotonic() > deadline_s:
                raise LostPeerError("one more was lost before the new group was made")
            time.sleep(0.01)

    # -- after a loss, see recovery.py

    def _cut(self) -> None:
        again, self._lost = self._lost, True
        if (recovery := self.world.recovery) is not None:
            recovery.lost = True  # before sums are aborted, see `Recovery.commit`
        self._connections.cut(self.options.timeout_s)
        if "nccl" in self._backend and not again:
            from gradsync.core.torch_private import abort_nccl

            abort_nccl()

    @property
    def lobby(self) -> Lobby | None:
        """See `recovery.Group`."""
        return None if self._meeting is None else self._meeting.lobby

    @property
    def scope(self) -> str:
        """See `recovery.Group`."""
        assert self._meeting is not None, "ranks have met"
        return self._meeting.scope

    def suspend(self, number: int, *, cut: bool) -> tuple[FailureWatch, SignedStore]:
        """See `recovery.Group`."""
        assert self.watch is not None, "there are other ranks"
        assert self._meeting is not None, "there are other ranks"
        self.watch.stop()
        if cut:
            self._cut()
        return self.watch, self._meeting.ballot(number)

    def announce(self, name: int, folder: str) -> None:
        """See `recovery.Group`."""
        assert self.lobby is not None, "ranks have met"
        self.lobby.announce(name, self._introduce(), folder)

    def admission(self) -> Admission | None:
        """See `recovery.Group`."""
        meeting, me = self._meeting, self._me
        assert meeting is not None, "this rank has announced itself"
        assert me is not None, "this rank has announced itself"
        if (found := meeting.lobby.admission(me)) is not None:
            meeting.learn_scope(found.scope)
            return found
        stops = self.world.should_stop
        ends = 75 if stops else meeting.lobby.how_it_ends(self.presences)
        if ends is not None:
            meeting.tell_launcher(ended_key(me.host, me.pid))  # the others do not wait for it
            if not stops:
                log.warning("the run ended before this rank could join it")
            raise SystemExit(ends)
        return None

    def regroup(self, number: int, presences: Sequence[Presence]) -> None:
        """See `recovery.Group`."""
        import torch

        from gradsync.core.torch_private import process_groups

        meeting, world, me = self._meeting, self.world, self._me
        assert meeting is not None, "there were other ranks"
        assert me is not None, "it has met them"
        wait_until_workers_sleep()  # [Note: Destroying a gloo group]
        if on_gpu := world.device_name != "cpu":  # kernels of the step may still write
            torch.cuda.synchronize(world.device)
        if world.recovery.abandoned or on_gpu:
            keep_forever(process_groups())  # a worker still waits: the destructor would join it
        self._destroy_group(abort=on_gpu)
        world.recovery.lost = world.recovery.abandoned = False
        self.presences = [*presences]
        ones = {"local_rank": 0, "local_world_size": 1, "node_rank": 0, "num_nodes": 1}
        among = replace(world, rank=presences.index(me), world_size=len(presences), **ones)
        hosts = [each.host for each in self.presences]
        world.become(place(among, hosts, trust_local=False))
        meeting.begin_group(number, world)
        if world.is_distributed:
            self._begin_group(meeting)
        else:
            self.watch = None
        if self._joined_key:  # first: see `AgentRendezvous.how_others_end`
            meeting.tell_launcher(self._joined_key)
        meeting.tell_launcher(*self._group_keys, value=str(number))

    def _set_up_compute(self, world: World) -> None:
        import torch

        from gradsync.core.torch_private import NEWEST_TESTED, leave_compiler_unloaded

        leave_compiler_unloaded()
        options = self.options
        if options.threads is not None and options.threads < 1:
            raise LaunchError(f"threads must be at least 1; got {options.threads}")
        self.threads = choose_threads(world.local_world_size, requested=options.threads)
        self._stack.callback(pin_threads, pin_threads(self.threads))
        device = choose_device(options.device, world.local_rank)
        self._world = replace(world, device_name=device, seed=options.seed or 0)
        cublas = "CUBLAS_WORKSPACE_CONFIG"
        if device != "cpu" and not self._env.get(cublas):
            # Read once, at the first matrix product: deterministic kernels need a fixed workspace.
            self._stack.enter_context(environ.exported({cublas: ":4096:8"}))
        if options.seed is not None:
            seed_everything(options.seed)
        if world.is_main and [int(n) for n in torch.__version__.split(".")[:2]] > [*NEWEST_TESTED]:
            words = (
                "torch %s is newer than %d.%d, the last release that this gradsync was tested with"
            )
            log.warning(words, torch.__version__, *NEWEST_TESTED)
        if world.is_main:
            log.info("%d intra-op thread(s) a rank, device %s", self.threads, device)

    def _make_group(self, meeting: Meeting, interface: str) -> None:
        # The functions of `nn` bind the default group as a default argument at import. Imported
        # later (the first optimizer does), they would keep a destroyed group and its sockets alive.
        import torch.distributed as dist
        import torch.distributed.nn.functional  # pyrefly: ignore

        from gradsync.core.torch_private import NCCL_ENDS_BY, number_groups_anew, set_timeout

        world, options = self.world, self.options
        on_cuda, shrinks = world.device_name != "cpu", options.on_loss == "shrink"
        variables = {
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.world_size),
            "LOCAL_RANK": str(world.local_rank),
            "LOCAL_WORLD_SIZE": str(world.local_world_size),
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": str(meeting.port),
        } | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})
        if on_cuda:
            variables["TORCH_DIST_USE_NCCL2"] = "0"  # torch 2.15's other NCCL backend is untried
        if shrinks:
            variables |= dict.fromkeys(NCCL_ENDS_BY, "0")
            number_groups_anew()
        self._stack.enter_context(environ.exported(variables))
        dist.init_process_group(
            self._backend,
            # Under "shrink" this thread may be left behind, waiting on it.
            store=dist.PrefixStore("group", meeting.connect() if shrinks else meeting.store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=options.timeout_s),
            device_id=world.device if on_cuda else None,
        )
        self._group = dist.group.WORLD
        if on_cuda and "nccl" in self._backend:
            longest = timedelta(seconds=options.timeout_s + _NCCL_LATER_S)
            set_timeout(self._group, world.device, longest)
        if "gloo" in self._backend:
            # All ranks, float32 [1], CPU: a rank that leaves at once fails those still connecting.
            dist.all_reduce(torch.zeros(1))

    def _destroy_group(self, *, abort: bool = False) -> None:
        """Destroy our group, unless the program has; it may have made another one. `abort` what it
        has under way."""
        import torch.distributed as dist

        from gradsync.core.torch_private import abort_process_groups

        if self._group is not None and dist.group.WORLD is self._group:
            (abort_process_groups if abort else dist.destroy_process_group)()
        self._group = None


def _forget(session: weakref.ref[Session]) -> None:
    """Leave the run to the parent: this process is its forked child, and no rank. Destroying
    inherited objects would wait for threads that it lacks, and write to sockets that it shares."""
    from gradsync.core.torch_private import process_groups

    if (mine := session()) is not None:
        kept = mine._stack, mine._meeting, mine.watch, process_groups()
        keep_forever(kept)  # [Note: Destroying a gloo group]
        if mine.watch is not None:
            atexit.unregister(mine.watch.stop)
        mine._stack, mine._meeting, mine.watch = ExitStack(), None, None


def init(
    *,
    device: str = "auto",
    backend: str | None = None,
    timeout_s: float = 1800.0,
    rendezvous_timeout_s: float = 60.0,
    silence_s: float = 10.0,
    threads: int | None = None,
    seed: int | None = None,
    keep_memory: bool = False,
    catch_stop: bool = False,
    on_loss: str = "end",
    report_wait_s: float = REPORT_S,
    stacks_dir: str | os.PathLike[str] = "",
) -> Session:
    """Join the run that this process was started in: python, torchrun, mpirun, srun, or nothing.

    Use as `with gs.init() as world:`. One rank's exception ends all ranks within seconds.

    Args:
        device: auto, cpu, cuda (index = local rank modulo visible devices), or cuda:N.
        backend: gloo, nccl, mpi or one for each device, `cpu:gloo,cuda:nccl`; None or "auto" takes
            gloo on CPU and gloo + nccl on CUDA.
        timeout_s: timeout of a collective, seconds.
        rendezvous_timeout_s: longest wait for the other ranks at the start, seconds.
        silence_s: longest silence of another rank's host, seconds, at least 1. Then its connections
            count as cut (Linux). Raise it if the network recovers by itself.
        threads: intra-op threads; None uses cores of the host / ranks on the host.
        seed: seeds Python's, numpy's and torch's global generators, alike on every rank; None does
            not seed them.
        keep_memory: keep freed memory in this process for the next step (Linux with glibc). Faster
            steps on a CPU with large temporaries; the process stays at its peak size, and the
            setting outlives the session. See docs/guide/verifying.md.
        catch_stop: let Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP make the `stop` of `sync.step`'s result
            true, on all ranks after the same step. A second Ctrl-C ends the program.
        on_loss: "shrink" goes on without a rank that dies or is stopped, with the same bits under
            `invariant`, on Linux; over NCCL it has not been tried. Write the step in `for attempt
            in sync.attempts(batch):`, and start it by `gradsync launch --on-loss shrink`, which
            leaves the others alive. "end" ends the run.
        report_wait_s: seconds after which a wait for another rank is reported, with that rank's
            current line (docs/guide/when-it-hangs.md).
        stacks_dir: folder for each rank's stacks when a rank is late or dead; by default a private
            temporary one, which the error names.

    Returns:
        A context manager that returns this rank's `World`.

    Raises:
        ConfigError: an unusable number, such as a time beyond 32 years; when entered, also a
            backend that is unknown or cannot be used here.
        LaunchError, RendezvousError: when entered, see docs/guide/launching.md.
    """
    return Session(
        SessionOptions(
            device=device,
            backend=backend,
            timeout_s=timeout_s,
            rendezvous_timeout_s=rendezvous_timeout_s,
            silence_s=silence_s,
            threads=threads,
            seed=seed,
            keep_memory=keep_memory,
            catch_stop=catch_stop,
            on_loss=on_loss,
            report_wait_s=report_wait_s,
            stacks_dir=os.fspath(stacks_dir),
        )
    )
