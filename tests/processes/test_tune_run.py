"""`gradsync tune` on two ranks, stage after stage; `--sync auto`, where rank 0's cache counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from gradsync.commands.bench import steps, tune
from gradsync.commands.bench.sync_plan import Contestant, SyncSettings
from gradsync.commands.bench.tune import TuneRequest, ask_all
from gradsync.commands.cli.train import _with_all_ranks
from gradsync.commands.models.config import PRESETS, GPTConfig
from gradsync.commands.train.tuned import TUNED, Tuned, TunedStrategy, conditions_of
from gradsync.runtime import environ
from support.rank_session import open_session
from support.small_run import make_data, small_config

SMALL = {"tiny": GPTConfig(n_layer=1, n_head=1, n_embd=64, vocab_size=2048, block_size=16)}
BY_MESSAGES = TunedStrategy(options={"collective": "backend"})
WINNERS = ["invariant:collective=backend", "invariant:collective=backend,bucket_mb=0.1"]


def _stages(rank: int, world_size: int, store_path: str) -> dict[str, Any]:
    """Stages whose decisions are made beforehand: measured times do not count."""
    wanted = iter(WINNERS)

    def decide(*samples: Any, name: str) -> dict[str, Any]:
        assert [len(each) for each in samples[:2]] == [8, 8]
        winner = next(wanted, name)
        assert winner in (name, *samples[2])
        return {"winner": winner, "noise": 0.0, "judged": [], "words": f"{winner} it is"}

    request = TuneRequest(
        settings=SyncSettings(
            model_size="tiny", context_length=16, rounds=8, num_steps=1, num_warmup=0
        ),
        batch_size=1,
        world_size=world_size,
    )

    def check(contestant: Contestant, *_: Any) -> dict[str, Any]:
        """Stand-in for the check of `bench sync`, without its dozen of steps."""
        sent = 1e6 if contestant.options else 100.0
        about = {"losses": [1.0], "operations": 1.0, "memory_bytes": None}
        return about | {"sent_bytes": sent}

    with (
        patch.dict(PRESETS, SMALL),
        patch.object(tune, "strategies", lambda *_, **__: [TunedStrategy(), BY_MESSAGES]),
        patch.object(tune, "_BUCKETS_MB", (0.1,)),
        patch.object(tune, "decide", decide),
        patch.object(steps, "check", check),
        patch.object(steps, "reference_losses", lambda *_: []),
        open_session(rank, world_size, store_path) as world,
    ):
        return ask_all(request, world)


def test_stage_follows_stage(pool: Any) -> None:
    first, second = pool.run(_stages, 2)
    assert first == second
    assert first["choice"] == {
        "sync": "invariant",
        "options": {"collective": "backend", "bucket_mb": 0.1},
        "compile": "none",
    }
    strategy, size = first["stages"]
    tried = [row["contestant"] for row in strategy["rows"]]
    assert tried == ["none", "invariant", "invariant (again)", WINNERS[0]]
    assert [row["contestant"] for row in size["rows"]] == [
        *("none", WINNERS[0], f"{WINNERS[0]} (again)", WINNERS[1])
    ]
    assert len(first["samples"]) == 2


def _auto(rank: int, world_size: int, store_path: str, folder: Path) -> tuple[str, Any, str]:
    data = make_data(folder / f"data{rank}")
    config = small_config(folder / "run", data, sync="auto", threads=None)
    with (
        environ.exported({"GRADSYNC_CACHE": str(folder / f"cache{rank}")}),
        open_session(rank, world_size, store_path) as world,
    ):
        # Each host's cache says something else.
        choice = (
            TunedStrategy(sync="zero1", options={"bucket_mb": 5.0})
            if rank == 0
            else TunedStrategy(sync="ddp")
        )
        tuned = Tuned(choice=choice, verdict="it is faster", date="2026-01-02")
        TUNED.save(conditions_of(config, world, threads=1), tuned)
        named, lines = _with_all_ranks(config, None, world, threads=1)
    return named.sync, named.sync_options.given(), lines[-1]


def test_all_ranks_take_rank_0s_answer(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(_auto, 2, tmp_path)
    assert first == second
    note = "sync auto: zero1:bucket_mb=5.0 (promise: bitwise); 2026-01-02: it is faster"
    assert first == ("zero1", {"bucket_mb": 5.0}, note)
