"""Training steps between hosts, over a range of the network's rates.

    python benchmarks/network.py --rates 1000,5000 --strategies invariant,torch_ddp --out FOLDER

    host 0  eth0 ──┐ port 0            A host is a network namespace of this machine. The kernel
    host 1  eth0 ──┤ port 1  (bridge)  limits what passes eth0 (sent) and the port (received) to
    host 2  eth0 ──┘ port 2            the rate. Processors, memory and clock are shared.

It needs root, Linux and iproute2, and removes all that it has made. On each rate the ranks carry
out `gradsync bench sync`, in which all contestants take turns; flags that are not its own go there.
Contestants are checked before the rate is set; then each turn's warm-up leaves to the first step
that counts what the last one leaves behind, at the same rate. A delay is netem's at eth0; where the
kernel has none, a thread takes the bridge's place (delay.py). Hosts take over this machine's TCP
settings.
"""

from __future__ import annotations

import argparse
import json
import math
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
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from delay import DelayingSwitch

from gradsync.commands.arguments import check_least, flag_of, names_in, parse
from gradsync.commands.bench import sync
from gradsync.commands.bench.experiment import (
    Spread,
    command_of,
    print_table,
    say,
    where,
    write_record,
)
from gradsync.commands.bench.sync_plan import CHECKED
from gradsync.core.files import check_place, one_line
from gradsync.errors import ConfigError, GradsyncError, RunError
from gradsync.runtime import environ
from gradsync.runtime.bounds import whole_number
from gradsync.world import World

_PATH = f"{os.defpath}:/usr/sbin:/sbin"
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_PORT, _MOST_MBIT, _MOST_HOSTS = 29_400, 400_000, 250
_STEPS, _LONG_TURN_S = 3, 10.0  # of a turn: usual number, and what so many may take at most
_TICK_S = 0.004
"""A limit is kept in bursts: what passes within the longest tick of Linux."""
_LEAST_BURST = 70_000  # bytes; the kernel's large packets fit in, and are not cut
_OWN = ("rates", "delay_ms", "hosts", "ranks_per_host", "num_steps")
"""Flags that change what is measured, beside those of `bench sync`."""
_USUAL = (
    "--strategies=invariant,invariant_bf16,bucketed,bf16,torch_ddp",
    *("--model-size=mini", "--num-warmup=1", "--rounds=3", "--threads=1"),
)


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, sync.SyncOptions, str]:
    """The own flags, those of `bench sync`, and the command that measures the same again."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="Other flags are those of gradsync bench sync.",
        allow_abbrev=False,
    )
    rates = "Mbit/s in each direction, with commas between them"
    parser.add_argument("--rates", default="100,1000,5000,10000", help=rates)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="round trip of the cables")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    steps = "optimizer steps of a turn that count; default: 3, at slow rates fewer"
    parser.add_argument("--num-steps", type=int, help=steps)
    parser.add_argument("--out", default="", help="folder for record.json")
    parser.add_argument("--json", action="store_true", help="a document; the table is on stderr")
    own, rest = parser.parse_known_args(argv)
    check_least(own, hosts=2, ranks_per_host=1, num_steps=1)
    if own.hosts > _MOST_HOSTS:
        raise ConfigError(f"--hosts must be at most {_MOST_HOSTS}; got {own.hosts}")
    if not 0 <= own.delay_ms < math.inf:
        raise ConfigError(f"--delay-ms must be finite and not negative; got {own.delay_ms}")
    if own.out:
        check_place("--out", Path(own.out), folder=True)
    mine = [
        f"--world-size={own.hosts * own.ranks_per_host}",
        f"--num-steps={own.num_steps or _STEPS}",
    ]
    options = parse(sync.SyncOptions, [*_USUAL, *rest, "--device=cpu", *mine], "bench sync")
    words = ["python", "benchmarks/network.py"]
    for name in _OWN:
        if (value := getattr(own, name)) != parser.get_default(name):
            words += [flag_of(name), str(value)]
    return own, options, shlex.join([*words, *rest])


def rates_of(text: str) -> list[int]:
    """Mbit/s, as `--rates` has them."""
    rates = [whole_number(rate, _MOST_MBIT) or 0 for rate in names_in(text)]
    if not rates or 0 in rates:
        raise ConfigError(f"--rates {text!r}: name whole numbers of Mbit/s, 1 to {_MOST_MBIT}")
    return rates


def wire_s(num_params: int, hosts: int, rate_mbit: int) -> float:
    """Seconds in which fp32 gradients of 2 (H-1)/H S bytes pass a host's port."""
    return 2 * (hosts - 1) / hosts * 4 * num_params * 8 / (rate_mbit * 1e6)


def floor(num_params: int, hosts: int, rate_mbit: int, alone_s: float) -> float:
    """Least step over one without communication, `alone_s`, where the network and the processors
    never wait for each other."""
    return max(1.0, wire_s(num_params, hosts, rate_mbit) / alone_s)


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


def measure(
    options: sync.SyncOptions, hosts: Sequence[str], ranks_per_host: int, limit: Callable[[], None]
) -> dict[str, Any]:
    """Output of rank 0 of `bench sync`, once all ranks have ended; a rank's failure is a RunError.
    `limit` is called when all contestants are checked, which would take an hour at slow rates."""
    words = shlex.split(command_of(options, ("bench", "sync")))[1:]
    shared = environ.snapshot() | {
        "WORLD_SIZE": str(options.world_size),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_ADDR": "10.83.0.1",
        "MASTER_PORT": str(_PORT),
        "GRADSYNC_TOKEN": secrets.token_hex(32),
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradsync-bench-")))
        processes = []
        for rank in range(options.world_size):
            host, place = divmod(rank, ranks_per_host)
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


_LEGEND = (
    "step time over that of ranks that never communicate, of the same round; median (quartiles) "
    "over rounds. floor: max(compute, bytes / rate) for fp32 gradients, each crossing once in and "
    "once out. Hosts are network namespaces of one machine, whose processors they share."
)


def cells_of(rows: Sequence[dict[str, Any]], floors: dict[str, float]) -> list[tuple[str, ...]]:
    """A line for each contestant, a column for each rate."""
    found = {(str(row["rate_mbit"]), row["contestant"]): row for row in rows}
    cells = [
        (
            name,
            *(Spread(**found[rate, name]["ratio"]).text(2) for rate in floors),
            f"{found[next(iter(floors)), name]['sent_mb']:.1f}",
        )
        for name in dict.fromkeys(row["contestant"] for row in rows)
        if name != "none"
    ]
    return [*cells, ("floor", *(f"{each:.2f}" for each in floors.values()), "")]


def work(argv: Sequence[str]) -> None:
    """Measure at each rate; print and keep what came out."""
    own, options, command = parsed(argv)
    rates = rates_of(own.rates)
    plan = sync.plan_of(options, World())  # refuses what cannot be measured
    options = replace(options, model_size=plan.settings.model_size)
    size = plan.settings.config.num_params()
    if os.geteuid() or not shutil.which("ip", path=_PATH) or not shutil.which("tc", path=_PATH):
        raise RunError("network namespaces take root, Linux and iproute2 (ip, tc)")
    found, num_steps = {}, []
    for rate in rates:
        say(f"{rate} Mbit/s")
        fitting = int(_LONG_TURN_S / wire_s(size, own.hosts, rate))
        num_steps.append(own.num_steps or min(max(fitting, 1), _STEPS))
        asked = replace(options, num_steps=num_steps[-1])
        with namespaces(own.hosts, delayed=own.delay_ms > 0) as network:
            limit = partial(network.limit, rate, own.delay_ms)
            found[rate] = measure(asked, network.hosts, own.ranks_per_host, limit)
    rows = [
        {
            **{"rate_mbit": rate, "contestant": row["contestant"], "step_ms": row["total_ms"]},
            **{"ratio": row["ratio"], "sent_mb": row["comm_bytes"] / 1e6},
        }
        for rate, document in found.items()
        for row in document["rows"]
    ]
    alone_s = [row["step_ms"]["median"] / 1000 for row in rows if row["contestant"] == "none"]
    known = zip(rates, alone_s, strict=True)
    floors = {str(rate): floor(size, own.hosts, rate, step_s) for rate, step_s in known}
    environment = found[rates[0]]["environment"]
    environment |= {"tcp_congestion": _CONGESTION.read_text().strip()}
    asked = {"rates": rates, "num_steps": num_steps, "tokens": plan.settings.tokens}
    asked |= {name: getattr(own, name) for name in ("delay_ms", "hosts", "ranks_per_host")}
    data = {"plan": asked | {"settings": asdict(options)}, "floors": floors, "rows": rows}
    steps = " or ".join(map(str, sorted(set(num_steps))))
    title = (
        f"{plan.settings.model_text}, {own.hosts} hosts x {own.ranks_per_host} x "
        f"{options.batch_size} x {plan.settings.tokens} tokens a step, micro-batches a rank: "
        f"{options.micro_batches_per_rank}, added round trip: {own.delay_ms:g} ms; "
        f"{options.rounds} rounds of {steps} steps"
    )
    notes = (_LEGEND, f"{where(environment)} over TCP ({environment['tcp_congestion']})")
    columns = ("contestant", *(f"{rate} Mbit/s" for rate in rates), "sent, MB")
    human = sys.stderr if own.json else sys.stdout
    lines = [dict(zip(columns, cells, strict=True)) for cells in cells_of(rows, floors)]
    print_table(human, title, lines, notes)
    if own.json:
        head = {"environment": environment, "command": command}
        print(json.dumps({**head, **data}, indent=1, allow_nan=False), flush=True)
    if own.out:
        samples = {str(rate): document["rows"] for rate, document in found.items()}
        about = {"name": "network", "command": command, "environment": environment}
        path = write_record(Path(own.out), **about, data={**data, "samples": samples})
        say(f"wrote {path}")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        work(argv)
    except GradsyncError as error:
        print(f"network.py: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
