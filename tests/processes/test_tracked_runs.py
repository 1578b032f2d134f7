"""`gradsync train --track` on two ranks: rank 0 tracks, and no rank waits for a refusal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

from gradsync.train.config import TrainConfig
from gradsync.train.trackers import KINDS
from support.small_run import RankResult, losses, make_data, small_config, train_rank


class Made(KINDS["prometheus"]):
    """Counts those that this process made."""

    count = 0

    def __init__(self, *given: Any) -> None:
        type(self).count += 1
        super().__init__(*given)


def counted_rank(
    rank: int, world_size: int, store_path: str, config: TrainConfig
) -> tuple[RankResult, int]:
    """This rank's run, and how many trackers it made."""
    Made.count = 0
    with mock.patch.dict(KINDS, prometheus=Made):
        return train_rank(rank, world_size, store_path, config), Made.count


def rank_without_wandb(
    rank: int, world_size: int, store_path: str, config: TrainConfig
) -> RankResult:
    """This rank's run, where no host has the package."""
    with mock.patch.dict(sys.modules, wandb=None):
        return train_rank(rank, world_size, store_path, config)


def test_rank_0_alone_tracks_and_weights_stay(pool: Any, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    hashes = []
    for track, made in (("", [0, 0]), ("prometheus", [1, 0])):
        config = small_config(tmp_path / f"out{track}", data, track=track)
        ranks = pool.run(counted_rank, 2, config)
        assert [count for _, count in ranks] == made
        assert [result.exit_code for result, _ in ranks] == [0, 0], ranks
        hashes.append(ranks[0][0].summary["weights_sha256"])
    assert hashes[0] == hashes[1]
    assert losses(tmp_path / "out") == losses(tmp_path / "outprometheus")
    last = losses(tmp_path / "outprometheus")[6]
    assert (
        f'gradsync_train_loss{{run="outprometheus",rank="0"}} {last!r}\n'
        in (tmp_path / "outprometheus" / "metrics.prom").read_text()
    )


def test_a_package_that_rank_0_lacks_ends_all_ranks(pool: Any, tmp_path: Path) -> None:
    config = small_config(tmp_path / "out", make_data(tmp_path / "data"), track="wandb")
    first, second = pool.run(rank_without_wandb, 2, config)
    needs = "track=wandb needs the package wandb: pip install 'gradsync[wandb]'"
    assert first.error == f"ConfigError: {needs}"
    assert second.error.startswith("PeerError: rank 0")
    assert needs in second.error
    assert not (tmp_path / "out").exists()
