"""A stranger with access to the rendezvous store of a run: what ranks do then, and who may know."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from support.fork_server import Forked, run_forked, torch_ranks
from support.launchers import clean_environment

# Rank 0 connects to its own store as any process of this machine could.
ATTACKED = r"""
import json, os, sys, time
import torch, torch.distributed as dist
import gradsync as gs
from gradsync.errors import RunError

STEERING = "\x1b]0;owned\x07"
FORGED = {
    "failure": {"rank": 1, "host": STEERING, "summary": STEERING, "traceback_text": STEERING},
    "beat/1": {"beat": 9, "waits": False, "idle": False, "excused": False, "issued": 0,
               "since_s": 0.0, "where": STEERING},
    "here/1": {"host": STEERING, "device_identity": "", "pid": 1},
    "noticed/1": "left",
}

def attack():
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, wait_for_workers=False
    )
    keys = store.list_keys()
    known = next(key.removesuffix("beat/1") for key in keys if key.endswith("beat/1"))
    for key, value in FORGED.items():
        store.set(known + key, value if isinstance(value, str) else json.dumps(value))
    for key in keys:
        if key.endswith(("beat/0", "here/0")):
            store.set(key, store.get(key[:-1] + "1"))

try:
    with gs.init(threads=1, report_wait_s=0.5) as world:
        for step in range(6):
            if world.rank == 0 and step == 1:
                time.sleep(0.6)  # heartbeats are there
                attack()
            if world.rank == 1 and step in (2, 3):
                time.sleep(2.5)  # rank 0 looks who is late
            dist.all_reduce(torch.ones(1))
        print("all steps", flush=True)
        if world.rank == 1:
            raise KeyError("the true reason")
        dist.barrier()
except RunError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_a_stranger_changes_nothing_and_is_told_of_once(tmp_path: Path) -> None:
    """Neither a forged failure nor another rank's records end the run or name another rank; and
    where a stranger has written, a true failure is told all the same."""
    script = tmp_path / "rank.py"
    script.write_text(ATTACKED)
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(Forked([script], clean_environment(each), cwd=tmp_path))
            for each in torch_ranks(2)
        ]
        assert [run.wait(40) for run in runs] == [1, 1], runs[0].finished().describe()
        first, second = (run.finished() for run in runs)
    for said in (first, second):
        assert said.stdout == "all steps\n", said.describe()
        assert "\x1b" not in said.stderr
        assert "owned" not in re.sub("gradsync: ignored .*", "", said.stderr)
        assert said.stderr.count("gradsync: ignored") == 1
    assert re.search("rank 1 on .* failed first: KeyError: 'the true reason'", first.stderr)
    assert re.search(
        r"waiting for rank 1 for \d s: rank 1 \(process \d+\) is in rank\.py", first.stderr
    )


SHOWS = """
import os, sys
from pathlib import Path

def argv_of(pid):
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""

token = os.environ["GRADSYNC_TOKEN"]
seen = [pid for pid in os.listdir("/proc") if pid.isdigit() and token.encode() in argv_of(pid)]
Path(sys.argv[1], f"rank-{os.environ['RANK']}").write_text(f"{token} {seen}")
"""


def test_the_launcher_hands_on_a_token_that_no_command_line_shows(tmp_path: Path) -> None:
    script = tmp_path / "shows.py"
    script.write_text(SHOWS)
    told = []
    for turn, ranks in (("one", 2), ("two", 1)):
        (tmp_path / turn).mkdir()
        words = [f"--nproc-per-node={ranks}", "--", script, tmp_path / turn]
        run_forked(["-m", "gradsync", "launch", *words])[0].ok()
        said = {path.read_text() for path in (tmp_path / turn).iterdir()}
        assert len(said) == 1
        told += said
    assert re.fullmatch(r"[0-9a-f]{64} \[\]", told[0])
    assert told[0] != told[1]
    assert "GRADSYNC_TOKEN" not in os.environ
