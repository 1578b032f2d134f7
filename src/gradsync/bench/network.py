"""`gradsync bench network`: training steps between hosts, over a range of the network's rates.

    host 0  eth0 ──┐ port 0            A host is a network namespace of this machine. The kernel
    host 1  eth0 ──┤ port 1  (bridge)  limits what passes eth0 (sent) and the port (received) to
    host 2  eth0 ──┘ port 2            the rate. Processors, memory and clock are shared.

On each rate the ranks carry out `gradsync bench sync`, in which all contestants take turns. They
are checked before the rate is set; then each turn's warm-up leaves to the first step that counts
what the last one leaves behind, at the same rate. A delay is netem's at eth0; where the kernel has
none, a thread takes the bridge's place (delay.py). Hosts take over this machine's TCP settings.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import tyro

from gradsync.bench import sync
from gradsync.bench.delay import DelayingSwitch
from gradsync.bench.experiment import (
    Ask,
    Experiment,
    Findings,
    check_alone,
    check_least,
    command_of,
    names_in,
    taken,
)
from gradsync.bench.report import Spread, csv_text, print_table, say, where
from gradsync.bench.sync_plan import CHECKED
from gradsync.core.files import one_line
from gradsync.errors import ConfigError, RunError
from gradsync.models.config import PRESETS
from gradsync.runtime import environ
from gradsync.runtime.bounds import whole_number

if TYPE_CHECKING:
    from gradsync.world import World

_COMMAND = ("bench", "network")
_PATH = f"{os.defpath}:/usr/sbin:/sbin"
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_PORT, _MOST_MBIT = 29_400, 400_000
_STEPS, _LONG_TURN_S = 3, 10.0  # of a turn: usual number, and what so many may take at most
_TICK_S = 0.004
"""A limit is kept in bursts: what passes within the longest tick of Linux."""
_LEAST_BURST = 70_000  # bytes; the kernel's large packets fit in, and are not cut


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkOptions:
    """Time training steps between hosts, at several rates of the network, beside ranks that never
    communicate. Hosts are network namespaces of this machine: needs root, Linux and iproute2."""

    rates: str = "100,1000,5000,10000"  # Megabits a second and direction, with commas between them.
    delay_ms: float = 0.0
    """Round trip that the cables add. A kernel without netem leaves it to a thread here, which
    takes a part of a core."""
    hosts: int = 2
    ranks_per_host: int = 1
    strategies: str = "invariant,invariant_bf16,bucketed,bf16,torch_ddp"
    """As `gradsync bench sync` takes them."""
    model_size: str = "mini"  # As `gradsync bench sync` has it, but for auto.
    context_length: int | None = None
    """Tokens of a sequence; default: what the model takes, at most 512."""
    batch_size: int = 1  # Sequences per rank and step.
    leaves_per_rank: int = 1  # Micro-batches into which these are divided.
    num_steps: int | None = None
    """Optimizer steps of a turn that count; default: 3, at slow rates fewer."""
    num_warmup: int = 1  # Optimizer steps of a turn before those.
    rounds: int = 3  # Turns of each contestant.
    dtype: str = "auto"  # fp32, bf16 (autocast over fp32 weights), or auto.
    threads: int = 1  # Intra-op threads of a rank.
    csv: str = ""  # Write one row per rate and contestant to this file.
    plot: str = ""  # Draw a picture: FILE.png, FILE.svg or FILE.pdf.
    out: str = ""  # Write record.json into this folder.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""
    dry_run: bool = False  # Only say what would be measured.


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkPlan:
    """Rates, and what the ranks measure at each."""

    rates: tuple[int, ...]
    """Mbit/s."""
    num_steps: tuple[int, ...]
    """At each of the rates, of a turn."""
    hosts: int
    ranks_per_host: int
    tokens: int
    """Length of a sequence."""
    settings: sync.SyncOptions

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkPoint:
    """One contestant at one rate."""

    rate_mbit: int
    contestant: str
    step_ms: Spread
    ratio: Spread  # the step over that of ranks that never communicate, of the same round
    sent_mb: float  # given to sockets by a rank in a step


def plan_of(options: NetworkOptions, world: World) -> NetworkPlan:
    """Check the request."""
    check_alone(world, "bench network")
    check_least(options, hosts=2, ranks_per_host=1)
    rates = [whole_number(rate, _MOST_MBIT) or 0 for rate in names_in(options.rates)]
    if not rates or 0 in rates:
        raise ConfigError(
            f"--rates {options.rates!r}: name whole numbers of Mbit/s, 1 to {_MOST_MBIT}"
        )
    if options.delay_ms < 0:
        raise ConfigError(f"--delay-ms must not be negative; got {options.delay_ms}")
    if options.hosts > 250:
        raise ConfigError(f"--hosts must be at most 250; got {options.hosts}")
    ranks = options.hosts * options.ranks_per_host
    places = {"csv": "", "plot": "", "out": "", "as_json": False, "dry_run": False}
    own = {"world_size": ranks, "same_allocator": True, "device": "cpu"}
    own["num_steps"] = _STEPS if options.num_steps is None else options.num_steps
    settings = taken(sync.SyncOptions, options, **own, **places)
    if settings.model_size == "auto":
        raise ConfigError("--model-size auto: here name one, such as mini")
    tokens = sync.plan_of(settings, world).settings.tokens  # refuses what cannot be measured
    size = PRESETS[settings.model_size].num_params()
    fitting = [int(_LONG_TURN_S / _wire_s(size, options.hosts, rate)) for rate in rates]
    usual = [min(max(steps, 1), _STEPS) for steps in fitting]
    return NetworkPlan(
        rates=tuple(rates),
        num_steps=tuple(options.num_steps or steps for steps in usual),
        hosts=options.hosts,
        ranks_per_host=options.ranks_per_host,
        tokens=tokens,
        settings=settings,
    )


def _collect(
    options: NetworkOptions, plan: NetworkPlan, _: World, __: Ask
) -> dict[int, dict[str, Any]]:
    """Output of `bench sync`, by rate."""
    if os.geteuid() or not shutil.which("ip", path=_PATH) or not shutil.which("tc", path=_PATH):
        raise RunError(
            "bench network makes network namespaces, which takes root, Linux and iproute2 (ip, tc)"
        )
    found = {}
    for rate, num_steps in zip(plan.rates, plan.num_steps, strict=True):
        say(f"{rate} Mbit/s")
        settings = replace(plan.settings, num_steps=num_steps)
        with namespaces(plan.hosts, delayed=options.delay_ms > 0) as network:
            limit = partial(network.limit, rate, options.delay_ms)
            found[rate] = _measure(plan, settings, network.hosts, limit)
    return found


class Network:
    """Hosts and the cables between them, whose rate may change; made by `namespaces`."""

    def __init__(self, hosts: list[str], ports: list[tuple[str, str]], switch: Any = None) -> None:
        self.hosts = hosts
        """Their namespaces; host n has the address 10.83.0.(n + 1)."""
        self._ports, self._switch = ports, switch

    def limit(self, rate_mbit: int, delay_ms: float = 0.0) -> None:
        """From now on let so many megabits a second pass to and from each host, and take so much
        longer for a message and its answer (where `namespaces` was told that there is a delay)."""
        if self._switch is not None:
            self._switch.set(round_trip_s=delay_ms / 1000, rate_mbit=rate_mbit)
            delay_ms = 0.0
        for host in self.hosts:
            _limit(host, "eth0", rate_mbit, delay_ms / 2)
        for namespace, port in self._ports:
            _limit(namespace, port, rate_mbit, 0.0)


@contextmanager
def namespaces(hosts: int, *, delayed: bool = False) -> Generator[Network]:
    """A network of so many hosts, without limits as yet; all of it goes at the end.

    Args:
        hosts: their number.
        delayed: whether `Network.limit` will be asked for a delay.

    Raises:
        RunError: the kernel refuses something, with its words.
    """
    name = f"gradsync-bench-{os.getpid()}"
    middle, members = f"{name}-switch", [f"{name}-{number}" for number in range(hosts)]
    with ExitStack() as undo:
        for ending in (signal.SIGTERM, signal.SIGHUP):  # nothing else would remove them
            if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup
                undo.callback(signal.signal, ending, signal.signal(ending, _leave))
        for each in (middle, *members):
            _ip("netns", "add", each)
            undo.callback(_ip, "netns", "delete", each)
        switch = DelayingSwitch() if delayed and not _has_netem(middle) else None
        if switch is None:
            _ip("-netns", middle, "link", "add", "bridge", "type", "bridge")
            _ip("-netns", middle, "link", "set", "bridge", "up")
        else:
            undo.callback(switch.close)
        ports = []
        for number, host in enumerate(members):
            address = f"10.83.0.{number + 1}"
            if switch is None:
                port = f"port{number}"
                here = ("link", "add", "eth0", "type", "veth", "peer", "name", port, "netns")
                _ip("-netns", host, *here, middle)
                _ip("-netns", middle, "link", "set", port, "master", "bridge", "up")
                ports.append((middle, port))
            else:
                try:
                    device = switch.add(address)
                except OSError as error:
                    why = f"or TUN devices (/dev/net/tun): {error.strerror}"
                    raise RunError(f"--delay-ms needs a kernel with netem, {why}") from error
                _ip("link", "set", device, "netns", host, "name", "eth0")
            _ip("-netns", host, "address", "add", f"{address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-netns", host, "link", "set", interface, "up")
        if switch is not None:
            switch.start()
        yield Network(members, ports, switch)


def _has_netem(namespace: str) -> bool:
    """Whether this kernel can hold packets back by itself; tried in a namespace of ours."""
    try:
        _qdisc(namespace, "lo", "netem", "delay", "1ms")
    except RunError:
        return False
    return True


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _limit(namespace: str, interface: str, rate_mbit: int, delay_ms: float) -> None:
    rate = ["rate", f"{rate_mbit}mbit"]
    if delay_ms:
        _qdisc(namespace, interface, "netem", "delay", f"{delay_ms}ms", "limit", "100000", *rate)
    else:
        burst = max(_LEAST_BURST, int(rate_mbit * 1e6 / 8 * _TICK_S))
        _qdisc(namespace, interface, "tbf", *rate, "burst", str(burst), "latency", "400ms")


def _qdisc(namespace: str, interface: str, *words: str) -> None:
    tc = ("netns", "exec", namespace, "tc", "qdisc", "replace", "dev", interface, "root")
    _ip(*tc, *words)


def _ip(*words: str) -> None:
    argv = [shutil.which("ip", path=_PATH) or "ip", *words]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RunError(f"{' '.join(argv)}: {one_line(done.stderr.strip()) or done.returncode}")


def _measure(
    plan: NetworkPlan, settings: sync.SyncOptions, hosts: Sequence[str], limit: Callable[[], None]
) -> dict[str, Any]:
    """Output of rank 0, once all ranks have ended; a rank's failure is a RunError. `limit` is
    called when all contestants are checked, which would take an hour at slow rates."""
    words = shlex.split(command_of(settings, ("bench", "sync")))[1:]
    shared = environ.snapshot() | {
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(plan.ranks_per_host),
        "MASTER_ADDR": "10.83.0.1",
        "MASTER_PORT": str(_PORT),
        "GRADSYNC_TOKEN": secrets.token_hex(32),
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradsync-bench-")))
        processes = []
        for rank in range(plan.world_size):
            host, place = divmod(rank, plan.ranks_per_host)
            own = {"RANK": rank, "LOCAL_RANK": place, "GROUP_RANK": host}
            argv = [shutil.which("ip", path=_PATH) or "ip", "netns", "exec", hosts[host]]
            argv += [sys.executable, "-m", "gradsync", *words, "--json"]
            out, err = (
                stack.enter_context((folder / f"{rank}.{kind}").open("w"))
                for kind in ("out", "err")
            )
            variables = shared | {name: str(value) for name, value in own.items()}
            heard = err if rank else subprocess.PIPE
            process = subprocess.Popen(argv, stdout=out, stderr=heard, env=variables, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)  # first; for one that has ended it does nothing
            processes.append(process)
        heard = processes[0].stderr
        assert heard is not None, "rank 0's is a pipe"
        with heard, (folder / "0.err").open("w") as file:
            for line in heard:
                file.write(line)
                if CHECKED in line:
                    limit()
        codes = [process.wait() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                said = (folder / f"{rank}.err").read_text(errors="replace").strip()
                raise RunError(f"rank {rank} of bench sync ended with {code}:\n{said[-2000:]}")
        return json.loads((folder / "0.out").read_text())


# -- what came out --------------------------------------------------------------------------------


def points_of(found: dict[int, dict[str, Any]]) -> list[NetworkPoint]:
    """One for each rate and contestant, in their order."""
    return [
        NetworkPoint(
            rate_mbit=rate,
            contestant=row["contestant"],
            step_ms=Spread(**row["total_ms"]),
            ratio=Spread(**row["ratio"]),
            sent_mb=row["comm_bytes"] / 1e6,
        )
        for rate, document in found.items()
        for row in document["rows"]
    ]


def floor_of(plan: NetworkPlan, points: Sequence[NetworkPoint], rate_mbit: int) -> float:
    """Least step over one without communication, where the network and the processors never wait
    for each other: fp32 gradients of 2 (H-1)/H S bytes pass a host's port at the rate."""
    alone_ms = next(
        point.step_ms.median
        for point in points
        if (point.rate_mbit, point.contestant) == (rate_mbit, "none")
    )
    size = PRESETS[plan.settings.model_size].num_params()
    return max(1.0, 1000 * _wire_s(size, plan.hosts, rate_mbit) / alone_ms)


def _wire_s(num_params: int, hosts: int, rate_mbit: int) -> float:
    return 2 * (hosts - 1) / hosts * 4 * num_params * 8 / (rate_mbit * 1e6)


_LEGEND = (
    "step time over that of ranks that never communicate, of the same round; median (quartiles) "
    "over rounds. floor: max(compute, bytes / rate) for fp32 gradients, each crossing once in and "
    "once out. Hosts are network namespaces of one machine, whose processors they share."
)


def _findings(
    options: NetworkOptions, plan: NetworkPlan, found: dict[int, dict[str, Any]], world: World
) -> Findings:
    from gradsync.bench.plot import plot_network

    points, first = points_of(found), next(iter(found.values()))
    environment = first["environment"] | {"tcp_congestion": _CONGESTION.read_text().strip()}
    floors = {rate: floor_of(plan, points, rate) for rate in plan.rates}
    names = list(dict.fromkeys(point.contestant for point in points))
    cells = [
        (
            name,
            *(point.ratio.text(2) for point in points if point.contestant == name),
            f"{next(p.sent_mb for p in points if p.contestant == name):.1f}",
        )
        for name in names
        if name != "none"
    ]
    cells.append(("floor", *(f"{floors[rate]:.2f}" for rate in plan.rates), ""))
    settings, leaves = plan.settings, plan.settings.leaves_per_rank
    steps = " or ".join(map(str, sorted(set(plan.num_steps))))
    title = (
        f"{settings.model_size}, {plan.hosts} hosts x {plan.ranks_per_host} x "
        f"{settings.batch_size} x {plan.tokens} tokens a step"
        + (f", {leaves} leaves a rank" if leaves > 1 else "")
        + (f", round trips of {options.delay_ms:g} ms more" if options.delay_ms else "")
        + f"; {settings.rounds} rounds of {steps} steps"
    )
    columns = ("contestant", *(f"{rate} Mbit/s" for rate in plan.rates), "sent, MB")
    notes = (_LEGEND, f"{where(environment)} over TCP ({environment['tcp_congestion']})")
    rows = [asdict(point) for point in points]
    return Findings(
        environment=environment,
        data={"plan": asdict(plan), "floors": {str(r): f for r, f in floors.items()}, "rows": rows},
        samples={str(rate): document["rows"] for rate, document in found.items()},
        show=lambda file: print_table(file, title, columns, cells, notes),
        csv=lambda: csv_text(
            [
                {
                    "rate_mbit": point.rate_mbit,
                    "contestant": point.contestant,
                    "step_ms": round(point.step_ms.median, 2),
                    "ratio_to_none": round(point.ratio.median, 4),
                    "sent_mb": round(point.sent_mb, 3),
                }
                for point in points
            ]
        ),
        draw=lambda path: plot_network(path, points, floors, title, notes[1:]),
    )


EXPERIMENT = Experiment(
    command=_COMMAND,
    options=NetworkOptions,
    measure="gradsync.bench.steps:measure",
    variants=plan_of,
    collect=_collect,
    metrics=_findings,
)
