"""`gradsync doctor` on two ranks: they meet, or one line says why not."""

from __future__ import annotations

import json
import socket

from support.fork_server import rank_variables, run_forked, torch_ranks

DOCTOR = ["-m", "gradsync", "doctor"]


def test_two_ranks_give_one_report(tmp_path):
    ranks = run_forked([*DOCTOR, "--json", "--out", tmp_path], torch_ranks(2))
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert ranks[1].stdout == ""
    document = json.loads(ranks[0].stdout)
    assert document["world"]["world_size"] == 2
    assert document["machine"]["cores"] >= 1
    said = {each["check"]: each["said"] for each in document["findings"]}
    assert said["ranks alike"].startswith("2 ranks, the same torch, gradsync, python")
    assert "µs for 8 bytes" in said["gloo sum"]
    assert said["disk"].startswith(str(tmp_path))


WITHOUT_ROOM = """
import os, resource, sys
from gradsync.commands.cli.main import main
if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_NOFILE, (33, 33))
sys.exit(main(["doctor"]))
"""


def test_ranks_that_differ_are_named_and_all_exit_with_1(tmp_path):
    script = tmp_path / "without_room.py"
    script.write_text(WITHOUT_ROOM)
    ranks = run_forked([script], torch_ranks(2))
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "blocker  open files     rank 1: 33 of" in ranks[0].stdout
    assert "open files differs: rank" in ranks[0].stdout
    assert ranks[1].stdout == ""


def test_a_port_in_use_is_a_finding_and_no_traceback():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (rank,) = run_forked(DOCTOR, [rank_variables(0, 2, taken.getsockname()[1])])
        (alone,) = run_forked(DOCTOR, [{"MASTER_PORT": str(taken.getsockname()[1])}])
    assert rank.returncode == 1
    assert "blocker  ranks " in rank.stdout
    assert "is already in use; set MASTER_PORT" in rank.stdout
    assert "verdict: not ready, 1 blocker," in rank.stdout
    assert alone.returncode == 1
    assert "cannot be bound: Address already in use; set MASTER_PORT" in alone.stdout
    assert "Traceback" not in rank.stderr + alone.stderr
