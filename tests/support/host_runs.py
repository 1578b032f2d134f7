"""Runs of four ranks on two hosts, and what happens to the cable while they go on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from support.config_flags import train_arguments
from support.fork_server import run_forked
from support.namespaces import Host
from support.small_run import small_config

PROGRAM = Path(__file__).with_name("two_host_ranks.py")
TIMEOUT_S = 100.0


@dataclass
class Move:
    """Something done to the cable once something holds."""

    when: Callable[[], bool]
    do: Callable[[], object]
    at_s: float = 0.0
    """When it was done, monotonic clock; 0 before."""


@dataclass(frozen=True)
class RunOnHosts:
    """How a run of four ranks ended."""

    codes: tuple[int, ...]
    """Exit codes, by rank."""
    ended_s: tuple[float, ...]
    """When, monotonic clock, by rank."""
    logs: tuple[str, ...] = field(repr=False)
    """Output of each rank."""

    def took_s(self, since: Move) -> float:
        """Until the last rank had ended."""
        return max(self.ended_s) - since.at_s


def run_on_hosts(
    folder: Path,
    hosts: tuple[Host, Host],
    together: Mapping[str, Sequence[str]],
    *,
    alone: Sequence[str] = (),
    relayed: Mapping[str, tuple[str, int]] | None = None,
    moves: Sequence[Move] = (),
) -> dict[str, RunOnHosts]:
    """Run them one after the other, with `moves` one after the other beside them.

    Args:
        folder: for logs.
        together: name -> arguments of `gradsync`, for four ranks.
        alone: arguments for one rank by itself, beside the first run.
        relayed: name -> where the second host's ranks look for the coordinator in that run.
    """
    plan = {
        "hosts": [asdict(host) for host in hosts],
        "together": {name: list(argv) for name, argv in together.items()},
        "alone": list(alone),
        "relayed": dict(relayed or {}),
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # as the command itself sets it before torch comes
    with _beside(moves):
        (done,) = run_forked([PROGRAM, folder], [quiet], timeout_s=TIMEOUT_S)
    done.ok()
    found = {}
    for name in together:
        ends = json.loads((folder / f"{name}.json").read_text())
        logs = [(folder / f"{name}-{rank}.log").read_text() for rank in range(len(ends))]
        codes, ended_s = zip(*ends, strict=True)
        found[name] = RunOnHosts(codes, ended_s, tuple(logs))
    said = (folder / "alone.log").read_text() if alone else ""
    assert not alone or "alone: exit 0" in done.stdout, said
    return found


def arguments(folder: Path, data: Path, name: str, **changes: object) -> list[str]:
    """Arguments that train into FOLDER/NAME."""
    return train_arguments(small_config(folder / name, data, **changes))


def has_logged(out: Path, step: int) -> Callable[[], bool]:
    """True once the run in `out` has written the metrics of that step."""

    def holds() -> bool:
        metrics = out / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return any(json.loads(line)["step"] >= step for line in lines if line.endswith("\n"))

    return holds


def has_ended(folder: Path, name: str) -> Callable[[], bool]:
    """True once all ranks of that run have ended."""
    return (folder / f"{name}.json").exists


def weights_of(out: Path) -> str:
    """SHA-256 of the weights a run ended with."""
    return json.loads((out / "summary.json").read_text())["weights_sha256"]


@contextmanager
def _beside(moves: Sequence[Move]):
    over, failed = threading.Event(), []

    def make() -> None:
        try:
            for move in moves:
                while not move.when():
                    if over.wait(0.01):
                        return
                move.do()
                move.at_s = time.monotonic()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=make, name="moves")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]
    assert all(move.at_s for move in moves), "the runs were over before all was done to the cable"
