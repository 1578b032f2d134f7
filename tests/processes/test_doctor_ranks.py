"""`gradsync doctor` on two ranks: they meet, or one line says why not."""

from __future__ import annotations

import json
import socket

from support.fork_server import rank_variables, run_forked, torch_ranks

DOCTOR = ["-m", "gradsync", "doctor"]


def test_two_ranks_give_one_report():
    ranks = run_forked([*DOCTOR, "--json"], torch_ranks(2))
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert ranks[1].stdout == ""
    document = json.loads(ranks[0].stdout)
    assert document["world"]["world_size"] == 2
    assert document["machine"]["cores"] >= 1
    said = {each["check"]: each["said"] for each in document["findings"]}
    assert said["ranks alike"].startswith("2 ranks, the same torch, gradsync, python")
    assert "µs for 8 bytes" in said["gloo sum"]


ANOTHER = """
import os, sys
from gradsync.commands.cli import doctor
from gradsync.commands.cli.main import main
if os.environ["RANK"] == "1":
    doctor.__version__ = "0.0.1"
sys.exit(main(["doctor"]))
"""


def test_ranks_that_differ_are_named_and_all_exit_with_1(tmp_path):
    script = tmp_path / "another.py"
    script.write_text(ANOTHER)
    ranks = run_forked([script], torch_ranks(2))
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "blocker  ranks alike    gradsync differs: rank 1 0.0.1" in ranks[0].stdout
    assert ranks[1].stdout == ""


def test_a_port_in_use_is_a_finding_and_no_traceback():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (rank,) = run_forked(DOCTOR, [rank_variables(0, 2, taken.getsockname()[1])])
    assert rank.returncode == 1
    assert "blocker  ranks " in rank.stdout
    assert "is already in use; set MASTER_PORT" in rank.stdout
    assert "verdict: not ready, 1 blocker," in rank.stdout
    assert "Traceback" not in rank.stderr
