"""Real ranks: `bench simulation` measures collectives and steps, and predicts the ones by the
others."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from gradsync.bench.collectives import CollectivesSettings
from gradsync.bench.collectives_run import Bench
from gradsync.bench.report import silent
from gradsync.bench.simulation import EXPERIMENT, SimulationOptions, plan_of
from gradsync.cli.ranks import WORKER
from gradsync.world import World
from support.fork_server import rank_variables, run_forked
from support.rank_session import open_session

OPTIONS = SimulationOptions(
    **{"world_sizes": "2", "strategies": "bucketed", "context_length": 8, "threads": 1},
    **{"rounds": 2, "num_steps": 1, "seconds_per_point": 0.0},
)


def _collectives(
    rank: int, world_size: int, store_path: str, settings: CollectivesSettings
) -> dict[str, Any]:
    with open_session(rank, world_size, store_path) as world:
        samples = Bench(settings, world, silent).run()
    return {"environment": {"world_size": world_size}, "samples": [asdict(s) for s in samples]}


def test_predicted_beside_measured(pool: Any, tmp_path: Path) -> None:
    """A set of one rank and one of two, started together, as an agent starts them."""
    here, plan = World(), plan_of(OPTIONS, World())

    def ask(work: Any, ranks: int, **_: Any) -> dict[str, Any]:
        if isinstance(work, CollectivesSettings):
            return pool.run(_collectives, ranks, work)[0]
        (tmp_path / "work.json").write_text(json.dumps(asdict(work)))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        agent = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        local = {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": "0"}
        variables = [
            {**rank_variables(rank, ranks, store.port), **agent, **local, "LOCAL_RANK": str(rank)}
            for rank in range(ranks)
        ]
        argv = ["-m", "gradsync", "bench", "simulation", WORKER, tmp_path]
        for rank in run_forked(argv, variables):
            rank.ok()
        return json.loads((tmp_path / "result.json").read_text())

    collected = EXPERIMENT.collect(OPTIONS, plan, here, ask)
    document = EXPERIMENT.metrics(OPTIONS, plan, collected, here)
    (found,) = document.data["predictions"]
    assert (found["strategy"], found["world_size"]) == ("bucketed", 2)
    for name in ("predicted_ms", "measured_ms"):
        assert found[name]["count"] == 2
        assert 0 < found[name]["low"] <= found[name]["high"] < 10_000
    parts = ("compute_ms", "update_ms", "communication_ms")
    assert abs(sum(found[part] for part in parts) - found["predicted_ms"]["median"]) < 1e-6
    lines = {(fit["operation"], fit["algorithm"]) for fit in document.data["fits"]["2"]}
    assert {("reduce_scatter", "shared"), ("all_reduce", "backend"), ("copy", "copy")} <= lines
    labels = [sorted(measured) for measured in document.samples]
    assert labels == [["bucketed, 1 rank", "none, 1 rank"], ["bucketed, 2 ranks", "none, 2 ranks"]]
    assert [len(ranks) for ranks in document.samples[1].values()] == [2, 2]
