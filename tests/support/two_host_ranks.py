"""Four ranks of `gradsync` on two hosts, and one by itself, forked from one warm process.

    python two_host_ranks.py FOLDER

FOLDER/plan.json: `hosts` (of each: namespace, address), `together` (name -> arguments; four ranks
run them, one after the other, each time anew), `alone` (arguments of the single rank, which runs
beside the first of those), `relayed` (name -> address and port at which the second host's ranks
look for rank 0's store). What rank r writes goes to FOLDER/NAME-r.log, the single one's to
FOLDER/alone.log; how each run ended to FOLDER/NAME.json: exit codes, and when (monotonic clock).
Forking is safe here: this process computes nothing, so it has no threads.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, without pytest's path

from gradsync.commands.cli.main import main as gradsync
from support.namespaces import become_host

WARM = ("torch._dynamo", "gradsync.commands.train.run")
"""Modules that every rank would import, the former in its first optimizer step."""

RANKS_A_HOST = 2
FIRST_PORT = 29_500


def main(folder: Path, plan: dict[str, Any]) -> None:
    """Fork all, wait for all, run by run."""
    alone = _forked(folder / "alone.log", plan["alone"], {}) if plan["alone"] else 0
    for number, (name, argv) in enumerate(plan["together"].items()):
        ranks = {}
        for rank in range(RANKS_A_HOST * len(plan["hosts"])):
            host = plan["hosts"][rank // RANKS_A_HOST]
            # The last run's port may still be served: each has its own.
            meet_at = (plan["hosts"][0]["address"], FIRST_PORT + number)
            if rank >= RANKS_A_HOST:
                meet_at = plan["relayed"].get(name, meet_at)
            variables = _variables(rank, len(plan["hosts"]), *meet_at)
            log = folder / f"{name}-{rank}.log"
            ranks[_forked(log, argv, variables, host["namespace"])] = rank
        ended: dict[int, tuple[int, float]] = {}
        while len(ended) < len(ranks):
            pid, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            if pid == alone:
                alone = 0
                print(f"alone: exit {code}")
            else:
                ended[ranks[pid]] = (code, time.monotonic())
        (folder / f"{name}.tmp").write_text(json.dumps([ended[rank] for rank in sorted(ended)]))
        (folder / f"{name}.tmp").rename(folder / f"{name}.json")
    if alone:
        print(f"alone: exit {os.waitstatus_to_exitcode(os.waitpid(alone, 0)[1])}")


def _variables(rank: int, num_hosts: int, address: str, port: int) -> dict[str, str]:
    """As a launcher would set them."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": RANKS_A_HOST * num_hosts,
        "LOCAL_RANK": rank % RANKS_A_HOST,
        "LOCAL_WORLD_SIZE": RANKS_A_HOST,
        "GROUP_RANK": rank // RANKS_A_HOST,
        "GROUP_WORLD_SIZE": num_hosts,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in variables.items()}


def _forked(log: Path, argv: list[str], variables: dict[str, str], namespace: str = "") -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with log.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        logging.basicConfig(level=logging.INFO)  # the choices are part of the test
        if namespace:
            become_host(namespace)
        os.environ.update(variables)
        code = gradsync(argv)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for name in WARM:
        import_module(name)
    with open(f"{sys.argv[1]}/plan.json", encoding="utf-8") as plan_file:
        main(Path(sys.argv[1]), json.load(plan_file))
