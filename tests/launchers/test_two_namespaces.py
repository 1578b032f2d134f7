"""Training over two hosts with a network between them, each with memory that its ranks share."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from support.config_flags import train_arguments
from support.launchers import run_python
from support.namespaces import two_hosts
from support.small_run import losses, make_data, small_config

PROGRAM = Path(__file__).parents[1] / "support" / "two_host_ranks.py"


@pytest.mark.launcher("namespaces")
def test_two_hosts_of_two_ranks_give_the_losses_of_one(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")

    def arguments(name: str, sync: str) -> list[str]:
        return train_arguments(small_config(tmp_path / name, data, steps=3, sync=sync))

    together = [arguments(sync, sync) for sync in ("hierarchical", "invariant")]
    with two_hosts() as hosts:
        plan = {
            "hosts": [asdict(host) for host in hosts],
            "together": together,
            "alone": [arguments("alone", "invariant")],
        }
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        done = run_python([PROGRAM, tmp_path], timeout_s=90).ok()
    logs = {path.stem: path.read_text() for path in sorted(tmp_path.glob("*.log"))}
    assert set(json.loads(done.stdout).values()) == {0}, logs
    assert "through shared memory inside of hosts, of which there are 2" in logs["rank-0"]
    assert "all 4 ranks are on one host" not in logs["rank-0"]

    one_rank = losses(tmp_path / "alone")
    assert len(one_rank) == 3
    assert losses(tmp_path / "invariant") == one_rank
    assert losses(tmp_path / "hierarchical") == pytest.approx(one_rank, rel=1e-5)
    of_weights = {
        name: json.loads((tmp_path / name / "summary.json").read_text())["weights_sha256"]
        for name in ("alone", "invariant", "hierarchical")
    }
    assert of_weights["invariant"] == of_weights["alone"]
