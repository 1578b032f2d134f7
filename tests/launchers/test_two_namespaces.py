"""Training over two hosts with a network between them, each with memory that its ranks share."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from support import sockets
from support.host_runs import arguments, run_on_hosts, weights_of
from support.launchers import clean_environment
from support.namespaces import Host, program, two_hosts
from support.small_run import losses, make_data


@pytest.mark.launcher("namespaces")
def test_two_hosts_of_two_ranks_give_the_losses_of_one(tmp_path: Path) -> None:
    """Without a word about interfaces, though the host's own name means loopback on both."""
    data = make_data(tmp_path / "data")
    with two_hosts() as hosts:
        together = {"hierarchical": arguments(tmp_path, data, "hierarchical", sync="hierarchical")}
        alone = arguments(tmp_path, data, "alone")
        runs = run_on_hosts(tmp_path, hosts, together, alone=alone)
        torchrun_by_hand(tmp_path, hosts, arguments(tmp_path, data, "torchrun"))

    run = runs["hierarchical"]
    assert run.codes == (0, 0, 0, 0), run.logs
    assert "all 4 ranks are on one host" not in run.logs[0]
    one_rank = losses(tmp_path / "alone")
    assert len(one_rank) == 6
    assert losses(tmp_path / "hierarchical") == pytest.approx(one_rank, rel=1e-5)

    printed = (tmp_path / "node-0.log").read_text()
    assert "2 ranks by torchrun on 2 hosts" in printed
    assert losses(tmp_path / "torchrun") == one_rank
    assert weights_of(tmp_path / "torchrun") == weights_of(tmp_path / "alone")


LISTENS = """
import os, pathlib, time
import gradsync as gs
with gs.init(threads=1) as world:
    pathlib.Path(f"here-{world.rank}").touch()
    until = time.monotonic() + 60
    while not os.path.exists("go") and time.monotonic() < until:
        time.sleep(0.05)
"""
SCAN = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=3).close()
        print(port)
    except OSError:
        pass
"""


@pytest.mark.launcher("namespaces")
def test_no_port_of_a_run_on_one_host_is_reached_from_another(tmp_path: Path) -> None:
    (tmp_path / "listens.py").write_text(LISTENS)
    ip = program("ip") or "ip"
    with two_hosts() as (first, second), socket.create_server(("127.0.0.1", 0)) as server:
        elsewhere = str(server.getsockname()[1])
        words = [ip, "netns", "exec", first.namespace, sys.executable, "-m", "gradsync", "launch"]
        words += ["--nproc-per-node", "2", "--", "listens.py"]
        with subprocess.Popen(words, cwd=tmp_path, env=clean_environment()) as launcher:
            try:
                until = time.monotonic() + 60
                while len(list(tmp_path.glob("here-*"))) < 2:
                    assert launcher.poll() is None
                    assert time.monotonic() < until
                    time.sleep(0.05)
                listening = sockets.listening_at(launcher.pid)
                ports = [str(port) for _, port in listening]
                scan = [ip, "netns", "exec", second.namespace, sys.executable, "-c", SCAN]
                reached = subprocess.run(
                    [*scan, first.address, *ports], capture_output=True, text=True, check=True
                )
            finally:
                (tmp_path / "go").touch()
            assert launcher.wait(60) == 0
    assert len(listening) > 2  # the store's and gloo's
    assert elsewhere not in ports  # those of that namespace alone
    assert {address for address, _ in listening} == {"127.0.0.1"}
    assert reached.stdout == ""


def torchrun_by_hand(folder: Path, hosts: Sequence[Host], argv: Sequence[str]) -> None:
    """The same line on each host, but for its number; what it prints goes to FOLDER/node-N.log."""
    agents = []
    for number, host in enumerate(hosts):
        words = [program("ip") or "ip", "netns", "exec", host.namespace]
        words += [sys.executable, "-m", "torch.distributed.run", f"--log-dir={folder}/logs"]
        words += ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"]
        words += [f"--master-addr={hosts[0].address}", "--master-port=29400", "-m", "gradsync"]
        with (folder / f"node-{number}.log").open("w") as log:
            agents.append(
                subprocess.Popen([*words, *argv], env=clean_environment(), stdout=log, stderr=log)
            )
    try:
        codes = [agent.wait(timeout=90) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its ranks
            agent.wait()
    said = [(folder / f"node-{number}.log").read_text() for number in range(len(hosts))]
    assert codes == [0, 0], said
