"""`gradsync bench network`: training steps between hosts, over a range of the network's rates.

    host 0  eth0 ──┐ port 0            A host is a network namespace of this machine. The kernel
    host 1  eth0 ──┤ port 1  (bridge)  limits what passes eth0 (sent) and the port (received) to
    host 2  eth0 ──┘ port 2            the rate. Processors, memory and clock are shared.

On each rate the ranks carry out `gradsync bench sync`, in which all contestants take turns.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import tyro

from gradsync.bench import sync
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
from gradsync.core.files import one_line
from gradsync.errors import ConfigError, RunError
from gradsync.models.config import PRESETS
from gradsync.runtime import environ
from gradsync.runtime.bounds import whole_number

if TYPE_CHECKING:
    from gradsync.world import World

_COMMAND = ("bench", "network")
_PATH = f"{os.defpath}:/usr/sbin:/sbin"
_PORT, _MOST_MBIT = 29_400, 400_000
_TICK_S = 0.004
"""A limit is kept in bursts: what passes within the longest tick of Linux."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkOptions:
    """Time training steps between hosts, at several rates of the network, beside ranks that never
    communicate. Hosts are network namespaces of this machine: needs root, Linux and iproute2."""

    rates: str = "100,1000,5000,10000"  # Megabits a second and direction, with commas between them.
    delay_ms: float = 0.0  # One-way delay of every message; the kernel needs netem for it.
    hosts: int = 2
    ranks_per_host: int = 1
    strategies: str = "invariant,invariant_bf16,bucketed,bf16,torch_ddp"
    """As `gradsync bench sync` takes them."""
    model_size: str = "mini"  # As `gradsync bench sync` has it, but for auto.
    context_length: int | None = None
    """Tokens of a sequence; default: what the model takes, at most 512."""
    batch_size: int = 1  # Sequences per rank and step.
    leaves_per_rank: int = 1  # Micro-batches into which these are divided.
    num_steps: int = 3  # Optimizer steps of a turn that count.
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
    hosts: int
    ranks_per_host: int
    tokens: int
    """Of a sequence."""
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
    settings = taken(sync.SyncOptions, options, **own, **places)
    if settings.model_size == "auto":
        raise ConfigError("--model-size auto: here name one, such as mini")
    tokens = sync.plan_of(settings, world).settings.tokens  # refuses what cannot be measured
    return NetworkPlan(
        rates=tuple(rates),
        hosts=options.hosts,
        ranks_per_host=options.ranks_per_host,
        tokens=tokens,
        settings=settings,
    )


def _collect(
    options: NetworkOptions, plan: NetworkPlan, _: World, __: Ask
) -> dict[int, dict[str, Any]]:
    """What `bench sync` printed, by rate."""
    if os.geteuid() or not shutil.which("ip", path=_PATH) or not shutil.which("tc", path=_PATH):
        raise RunError(
            "bench network makes network namespaces, which takes root, Linux and iproute2 (ip, tc)"
        )
    found = {}
    for rate in plan.rates:
        say(f"{rate} Mbit/s")
        with namespaces(plan.hosts, rate, options.delay_ms) as hosts:
            found[rate] = _measure(plan, hosts)
    return found


@contextmanager
def namespaces(hosts: int, rate_mbit: int, delay_ms: float = 0.0) -> Iterator[list[str]]:
    """Names of namespaces with the addresses 10.83.0.1, 10.83.0.2 …, joined by a bridge in one of
    their own; they go at the end.

    Raises:
        RunError: the kernel refuses one, with its words.
    """
    name = f"gradsync-bench-{os.getpid()}"
    switch, members = f"{name}-switch", [f"{name}-{number}" for number in range(hosts)]
    with ExitStack() as undo:
        for ending in (signal.SIGTERM, signal.SIGHUP):  # nothing else would remove them
            if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup
                undo.callback(signal.signal, ending, signal.signal(ending, _leave))
        for each in (switch, *members):
            _ip("netns", "add", each)
            undo.callback(_ip, "netns", "delete", each)
        _ip("-netns", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-netns", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(members):
            port = f"port{number}"
            here = ("link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-netns", host, *here)
            _ip("-netns", host, "address", "add", f"10.83.0.{number + 1}/24", "dev", "eth0")
            _ip("-netns", switch, "link", "set", port, "master", "bridge")
            for place, interface in ((host, "lo"), (host, "eth0"), (switch, port)):
                _ip("-netns", place, "link", "set", interface, "up")
            _limit(host, "eth0", rate_mbit, delay_ms)
            _limit(switch, port, rate_mbit, 0.0)
        yield members


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _limit(namespace: str, interface: str, rate_mbit: int, delay_ms: float) -> None:
    rate = ["rate", f"{rate_mbit}mbit"]
    burst = max(32_768, int(rate_mbit * 1e6 / 8 * _TICK_S))
    how = ["netem", "delay", f"{delay_ms}ms", "limit", "100000", *rate]
    if not delay_ms:
        how = ["tbf", *rate, "burst", str(burst), "latency", "400ms"]
    tc = ("netns", "exec", namespace, "tc", "qdisc", "replace", "dev", interface, "root")
    _ip(*tc, *how)


def _ip(*words: str) -> None:
    argv = [shutil.which("ip", path=_PATH) or "ip", *words]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RunError(f"{' '.join(argv)}: {one_line(done.stderr.strip()) or done.returncode}")


def _measure(plan: NetworkPlan, hosts: Sequence[str]) -> dict[str, Any]:
    """What rank 0 printed, once all ranks have ended; a rank's failure is a RunError."""
    words = shlex.split(command_of(plan.settings, ("bench", "sync")))[1:]
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
            process = subprocess.Popen(argv, stdout=out, stderr=err, env=variables)
            stack.callback(process.wait)
            stack.callback(process.kill)  # first; for one that has ended it does nothing
            processes.append(process)
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
    size = 4 * PRESETS[plan.settings.model_size].num_params()
    wire_ms = 2 * (plan.hosts - 1) / plan.hosts * size * 8 / (rate_mbit * 1e6) * 1e3
    return max(1.0, wire_ms / alone_ms)


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
    environment = first["environment"]
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
    title = (
        f"{settings.model_size}, {plan.hosts} hosts x {plan.ranks_per_host} x "
        f"{settings.batch_size} x {plan.tokens} tokens a step"
        + (f", {leaves} leaves a rank" if leaves > 1 else "")
        + (f", delay {options.delay_ms:g} ms" if options.delay_ms else "")
        + f"; {settings.rounds} rounds of {settings.num_steps} steps"
    )
    columns = ("contestant", *(f"{rate} Mbit/s" for rate in plan.rates), "sent, MB")
    notes = (_LEGEND, where(environment))
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
