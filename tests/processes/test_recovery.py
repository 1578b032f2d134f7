"""`gs.init(on_loss="shrink")`: ranks are killed, and the others end as one rank alone does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsync as gs
from gradsync.errors import ConfigError
from support import survivor
from support.fork_server import WITH_RANKS, run_forked
from support.launchers import Finished

EVERY = [[step, index] for step in range(survivor.STEPS) for index in range(survivor.MICRO_BATCHES)]


def launch(folder: Path, ranks: int, strategy: str, *kills: str, rejoin: int = 0) -> Finished:
    folder.mkdir()
    words = ["-m", "gradsync", "launch", "--nproc-per-node", ranks, "--on-loss", "shrink"]
    words += ["--rejoin", rejoin, "--", survivor.__file__, folder, strategy, *kills]
    (done,) = run_forked(words, [WITH_RANKS])
    return done


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone") / "out"
    launch(folder, 1, "invariant").ok()
    return told(folder)[0]


@pytest.mark.parametrize(
    "kills",
    [
        ["1:2:data"],
        ["0:3:forward"],
        ["2:1:backward"],
        ["1:3:reduced"],
        ["0:2:committed"],
        ["2:2:committed", "0:4:backward"],
        ["1:2:forward", "2:2:forward"],
        ["1:5:reduced"],
        ["1:2:data", "2:2:remade"],
        ["1:2:data", "2:2:grouped"],
        ["1:3:evaluates"],
        ["0:3:evaluated", "2:3:evaluates"],
        ["1:2:queued", "late"],
        ["2:2:queued", "late"],
        ["1:2:backward", "2:2:grouped", "late"],
        ["1:2:data", "uneven"],
    ],
    ids=" ".join,
)
def test_survivors_end_as_one_rank(tmp_path: Path, kills: list[str], alone: dict[str, Any]) -> None:
    done = launch(tmp_path / "out", 3, "invariant", *kills).ok()
    ends = told(tmp_path / "out")
    kills = [kill for kill in kills if ":" in kill]
    assert len(ends) == 3 - len(kills)
    for end in ends:
        assert end["world_size"] in (len(ends), len(ends) + ("5:reduced" in kills[-1]))
        for name in ("sha256", "lr", "losses", "draws", "seen"):
            assert end[name] == alone[name], name
    assert "lost rank(s)" in done.stderr
    # After the last loss no micro-batch is missing, and none comes twice.
    last = max(int(kill[2]) for kill in kills) + 1
    given = [[step, i] for end in ends for step, mine in end["done"] for i in mine if step >= last]
    assert sorted(given) == [each for each in EVERY if each[0] >= last]


@pytest.mark.parametrize("place", ["forward", "reduced", "evaluates"])
def test_all_ranks_live_though_a_connection_ends(
    tmp_path: Path, place: str, alone: dict[str, Any]
) -> None:
    """As after a short cut of the network."""
    done = launch(tmp_path / "out", 3, "invariant", f"1:2:{place}:cut-off").ok()
    ends = told(tmp_path / "out")
    assert [(end["world_size"], end["sha256"]) for end in ends] == [(3, alone["sha256"])] * 3
    assert "a connection ended" in done.stderr


@pytest.mark.parametrize(
    ("kills", "left"),
    [
        (["1:1:forward", "wait:3"], 3),
        (["0:1:reduced", "wait:2"], 3),
        (["2:1:saved", "1:1:stepped", "wait:3", "wait:4", "saves"], 3),
        (["1:1:data", "wait:2", "1+:3:forward", "wait:4"], 3),
        (["1:1:data", "wait:2", "0:3:stepped", "2:3:saved", "saves"], 1),
    ],
    ids=str,
)
def test_a_lost_rank_joins_again(
    tmp_path: Path, kills: list[str], left: int, alone: dict[str, Any]
) -> None:
    """At a checkpoint; also after a second loss, and beside one."""
    ranks = sum(":" in kill and not kill.startswith("wait") for kill in kills) if left == 3 else 1
    launch(tmp_path / "out", 3, "invariant", *kills, rejoin=ranks).ok()
    ends = told(tmp_path / "out")
    assert [end["world_size"] for end in ends] == [left] * left
    for end in ends:
        for name in ("sha256", "lr"):
            assert end[name] == alone[name], name


def test_a_rank_that_differs_does_not_join(tmp_path: Path, alone: dict[str, Any]) -> None:
    kills = ["1:1:data", "wait:3", "differs"]
    # It may come and leave before step 3, and then is to be started again.
    done = launch(tmp_path / "out", 3, "invariant", *kills, rejoin=3).ok()
    assert "rank 1, started again, leaves: lr of group 0 differs" in done.stderr.replace(
        "model 0: ", ""
    )
    assert [end["sha256"] for end in told(tmp_path / "out")] == [alone["sha256"]] * 2


def test_a_rank_that_differs_does_not_join_after_another_loss(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    kills = ["1:1:data", "wait:2", "1+:0:loaded:drifts", "0:*:compares"]
    done = launch(tmp_path / "out", 3, "invariant", *kills, rejoin=1).ok()
    assert "rank 1, started again, leaves: replicas differ" in done.stderr
    assert [end["sha256"] for end in told(tmp_path / "out")] == [alone["sha256"]]


def test_ranks_that_differ_already_end_when_another_one_joins(tmp_path: Path) -> None:
    kills = ["1:1:data", "2:1:data:drifts", "wait:2"]
    done = launch(tmp_path / "out", 3, "invariant", *kills, rejoin=1)
    assert done.returncode == 1
    assert "replicas differ" in done.stderr
    assert "leaves" not in done.stderr


def test_when_all_are_lost_the_run_has_failed(tmp_path: Path) -> None:
    done = launch(tmp_path / "out", 2, "invariant", "0:2:data", "1:1:data", rejoin=0)
    assert done.returncode == 1
    assert "rank 0 was ended by SIGKILL" in done.stderr


def test_the_last_checkpoint_is_written_though_its_writer_is_lost(tmp_path: Path) -> None:
    done = launch(tmp_path / "out", 3, "invariant", "saves", "0:*:step-00000006").ok()
    assert "rank 0 was ended by SIGKILL" in done.stderr
    assert (tmp_path / "out/checkpoints/step-00000006/manifest.json").exists()


@pytest.mark.parametrize("when", ["2:forward", "5:stepped"])
def test_a_stopped_rank_is_left_behind(tmp_path: Path, when: str, alone: dict[str, Any]) -> None:
    """After the last step, too: by the launcher."""
    launch(tmp_path / "out", 3, "invariant", f"1:{when}:stops").ok()
    assert [end["sha256"] for end in told(tmp_path / "out")] == [alone["sha256"]] * 2


@pytest.mark.parametrize("strategy", ["bucketed", "naive"])
def test_other_strategies_keep_whole_weights(
    tmp_path: Path, strategy: str, alone: dict[str, Any]
) -> None:
    launch(tmp_path / "out", 3, strategy, "0:2:backward").ok()
    first, second = told(tmp_path / "out")
    assert first["sha256"] == second["sha256"]
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.parametrize("place", ["forward", "reduced", "committed"])
def test_a_loop_of_ones_own(tmp_path: Path, place: str) -> None:
    launch(tmp_path / "alone", 1, "bucketed:own").ok()
    launch(tmp_path / "out", 4, "bucketed:own", f"3:2:{place}", f"0:2:{place}").ok()
    (alone,), ends = told(tmp_path / "alone"), told(tmp_path / "out")
    assert [end["world_size"] for end in ends] == [2, 2]
    assert ends[0]["sha256"] == ends[1]["sha256"]
    assert ends[0]["weights"] == pytest.approx(alone["weights"], abs=1e-5)


def test_an_exception_ends_the_run(tmp_path: Path) -> None:
    done = launch(tmp_path / "out", 2, "invariant", "1:2:forward:raises")
    assert done.returncode == 1
    assert "a bug of the program" in done.stderr
    assert not told(tmp_path / "out")


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("invariant", {"shard": "optimizer"}),
        ("zero1", {}),
        ("fsdp", {}),
        ("local_sgd", {}),
        ("invariant", {"collective": "shared_memory"}),
    ],
)
def test_what_cannot_go_on_is_refused(strategy: str, more: dict[str, Any]) -> None:
    with gs.init(on_loss="shrink") as world, pytest.raises(ConfigError, match="on_loss='"):
        gs.replicate(nn.Linear(2, 2), world, strategy=strategy, **more)


def test_a_sharded_optimizer_is_refused() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    with gs.init(on_loss="shrink") as world, pytest.raises(ConfigError, match="on_loss='shrink'"):
        gs.ShardedOptimizer(weights, torch.optim.SGD, world=world, lr=0.1)


def test_draws_go_on_after_a_step() -> None:
    """Else a loop of one's own would have the same noise in every step."""
    drawn = []
    for on_loss in ("end", "shrink"):
        with gs.init(seed=1, on_loss=on_loss) as world:
            sync = gs.replicate(nn.Linear(2, 2), world)
            for _ in range(3):
                for attempt in sync.attempts():
                    with attempt:
                        drawn.append(torch.rand(()).item())
    assert drawn[:3] == drawn[3:]


def test_half_a_step_is_refused() -> None:
    """A loss would drop the sums of the batches before."""
    with gs.init(on_loss="shrink") as world:
        model = nn.Linear(2, 2)
        sync = gs.replicate(model, world)
        data = [torch.randn(2) for _ in range(4)]
        (batch,) = gs.loader(data, world, global_batch_size=4, micro_batch_size=4, num_epochs=1)
        attempt = next(iter(sync.attempts(batch)))
        with pytest.raises(ConfigError, match="an attempt holds a whole step"), attempt:
            sync.backward(model(data[0]).sum(), weight=1)


def test_moving_buffers_are_refused_before_the_update() -> None:
    with gs.init(on_loss="shrink") as world:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        sync = gs.replicate(model, world, batch_norm="local")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model[0].weight.detach().clone()
        sync.backward(model(torch.randn(4, 2)).sum(), weight=4, reduction="sum")
        with pytest.raises(ConfigError, match="batch_norm='freeze'"):
            sync.step(optimizer)
        assert torch.equal(model[0].weight, before)


def test_a_share_of_a_lost_rank_is_not_left_out() -> None:
    """A micro-batch that was dealt among more ranks than are left would hide it."""
    with gs.init(on_loss="shrink") as world:
        model = nn.Linear(2, 2)
        sync = gs.replicate(model, world)
        data = [torch.randn(2) for _ in range(4)]
        loader = gs.loader(data, world, global_batch_size=4, micro_batch_size=2, num_epochs=1)
        loop = iter(loader)
        old = replace(next(iter(next(loop))), world_size=3)
        with pytest.raises(ConfigError, match="dealt among 3 ranks, and 1 are left"):
            sync.backward(model(old.inputs).sum(), old)


def test_an_unknown_answer_to_a_loss() -> None:
    with pytest.raises(ConfigError, match="on_loss must be 'end' or 'shrink'; got 'grow'"):
        gs.init(on_loss="grow")
