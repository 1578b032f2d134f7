"""Four ranks of `gradsync` on two hosts, and one by itself, forked from one warm process.

    python two_host_ranks.py FOLDER

FOLDER/plan.json: `hosts` (of each: namespace, address), `together` (argument lists that
all four ranks run one after the other), `alone` (argument lists of the single rank). What rank r
writes goes to FOLDER/rank-r.log, the single one's to FOLDER/alone.log. Prints each one's exit code,
as JSON. Forking is safe here: this process computes nothing, so it has no threads.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import traceback
from importlib import import_module
from typing import Any

from gradsync.cli.main import main as gradsync

WARM = ("torch._dynamo", "gradsync.train.run")
"""What every rank would import; the first optimizer step does the former."""

RANKS_A_HOST = 2
_CLONE_NEWNET = 0x40000000


def main(folder: str, plan: dict[str, Any]) -> dict[str, int]:
    """Fork all, wait for all."""
    hosts = plan["hosts"]
    children = {_forked(f"{folder}/alone.log", plan["alone"]): "alone"}
    for rank in range(RANKS_A_HOST * len(hosts)):
        host = hosts[rank // RANKS_A_HOST]
        variables = {
            "RANK": rank,
            "WORLD_SIZE": RANKS_A_HOST * len(hosts),
            "LOCAL_RANK": rank % RANKS_A_HOST,
            "LOCAL_WORLD_SIZE": RANKS_A_HOST,
            "GROUP_RANK": rank // RANKS_A_HOST,
            "GROUP_WORLD_SIZE": len(hosts),
            "MASTER_ADDR": hosts[0]["address"],
        }
        pid = _forked(
            f"{folder}/rank-{rank}.log",
            plan["together"],
            {name: str(value) for name, value in variables.items()},
            host["namespace"],
        )
        children[pid] = f"rank {rank}"
    codes = {}
    while children:
        pid, status = os.wait()
        codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
    return codes


def _forked(
    log: str,
    runs: list[list[str]],
    variables: dict[str, str] | None = None,
    namespace: str | None = None,
) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with open(log, "w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        logging.basicConfig(level=logging.INFO)  # the choices are part of the test
        if namespace is not None:
            _enter(namespace)
        os.environ.update(variables or {})
        for number, argv in enumerate(runs):
            if variables is not None:  # the last run's port may still be served
                os.environ["MASTER_PORT"] = str(29_500 + number)
            code = gradsync(argv)
            if code:
                break
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    for name in WARM:
        import_module(name)
    with open(f"{sys.argv[1]}/plan.json", encoding="utf-8") as plan_file:
        plan = json.load(plan_file)
    print(json.dumps(main(sys.argv[1], plan)))
