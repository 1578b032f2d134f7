"""Faults on the cable between two hosts: what heals costs time, all else ends with a reason."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from gradsync.commands.train.config import SyncConfig
from support.cable import Cable
from support.host_runs import Move, arguments, has_ended, has_logged, run_on_hosts, weights_of
from support.namespaces import two_hosts
from support.relay import Relay
from support.small_run import make_data
from support.two_host_ranks import FIRST_PORT

STEPS = 8
SILENCE_S = 2.0
NOTICE_S = 15.0
"""From the end of a connection to the end of the last rank: nine seconds for two looks of the watch
and its grace, should the main thread hear nothing, and some for a busy machine."""
NAMED = re.compile(r"rank\(s\) 2, 3 on \S+ vanished without a word")
GONE = ("Connection timed out", "No route to host", "Network is unreachable")


@pytest.mark.slow
@pytest.mark.launcher("namespaces")
@pytest.mark.launcher("nftables")
def test_faults_on_the_cable(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    late = SyncConfig(overlap_publish=True)
    long = {"steps": 100_000, "silence_s": SILENCE_S, "sync_options": late}
    together = {
        "blocked": arguments(tmp_path, data, "blocked", rendezvous_timeout_s=2.0),
        "disturbed": arguments(tmp_path, data, "disturbed", steps=STEPS, sync_options=late),
        "reset": arguments(tmp_path, data, "reset", **long),
        "cut": arguments(tmp_path, data, "cut", **long),
    }
    counts = {}
    with two_hosts() as hosts:
        cable = Cable(hosts)

        def interrupt() -> None:
            counts["dropped"] = cable.hit()
            counts["held back"] = cable.held_back()
            cable.heal()
            cable.cut_one_way()
            time.sleep(1.0)  # the length of the fault
            cable.heal()

        cable.only_port(FIRST_PORT)
        reset = Move(has_logged(tmp_path / "reset", 1), cable.reset)
        # A step is logged when its sums are known; on this cable they take long to reach all ranks,
        # beside the next forward: the host falls silent in the middle of that.
        cut = Move(has_logged(tmp_path / "cut", 2), cable.cut)
        moves = [
            Move(has_ended(tmp_path, "blocked"), cable.heal),
            Move(has_logged(tmp_path / "disturbed", 1), lambda: cable.slow(10)),
            Move(has_logged(tmp_path / "disturbed", 3), lambda: cable.lose(5)),
            Move(has_logged(tmp_path / "disturbed", 6), interrupt),
            reset,
            Move(has_ended(tmp_path, "reset"), cable.heal),
            Move(has_logged(tmp_path / "cut", 1), lambda: cable.slow(2)),
            cut,
            Move(has_ended(tmp_path, "cut"), cable.heal),
        ]
        slow = Relay(hosts[1], to=(hosts[0].address, FIRST_PORT + 1), delay_s=0.03)
        with slow:
            runs = run_on_hosts(
                tmp_path,
                hosts,
                together,
                alone=arguments(tmp_path, data, "alone", steps=STEPS),
                relayed={"disturbed": (hosts[1].address, slow.port)},
                moves=moves,
            )

    disturbed = runs["disturbed"]
    assert disturbed.codes == (0, 0, 0, 0), disturbed.logs
    assert weights_of(tmp_path / "disturbed") == weights_of(tmp_path / "alone")
    assert counts["dropped"] > 0
    assert counts["held back"] > 0
    assert slow.passed_on > 1_000

    blocked = runs["blocked"]
    assert blocked.codes == (1, 1, 1, 1), blocked.logs
    for log in blocked.logs:
        assert "though the coordinator's port answers; open the ports between the hosts" in log

    for name, fault, least_s, most_s, causes in (
        ("reset", reset, 0.0, NOTICE_S, ("Connection reset by peer",)),
        ("cut", cut, 1.0, SILENCE_S + NOTICE_S, GONE),
    ):
        run = runs[name]
        assert run.codes == (1, 1, 1, 1), run.logs
        assert least_s < run.took_s(fault) < most_s, run
        for log in run.logs[:2]:
            assert NAMED.search(log), run.logs
            assert "the network to it is broken" in log
            assert not re.search(r"rank [01] \(process \d+\) gives no sign", log), run.logs
        for log in run.logs[2:]:
            said = "which serves the rendezvous store, vanished without a word"
            assert any(f"{said} ({cause})" in log for cause in causes), run.logs
