"""`gradsync train --profile`: a trace of each rank, and the same weights as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradsync.report.timeline import read_spans
from gradsync.train.config import SyncConfig
from support.small_run import make_data, small_config, train_rank


def test_each_rank_writes_a_trace_in_which_buckets_have_names(pool: Any, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    by_messages = SyncConfig(collective="backend")
    hashes = []
    for step in (0, 2):
        out = tmp_path / str(step)
        config = small_config(out, data, profile=step, sync_options=by_messages, steps=4)
        first, second = pool.run(train_rank, 2, config)
        assert (first.exit_code, second.exit_code) == (0, 0), first.error
        hashes.append(first.summary["weights_sha256"])
    assert hashes[0] == hashes[1]
    files = sorted(path.name for path in (tmp_path / "2/profile_trace/iteration_2").iterdir())
    assert files == ["rank0_trace.json", "rank1_trace.json"]
    assert not (tmp_path / "0" / "profile_trace").exists()
    spans = read_spans(tmp_path / "2")
    kinds = {rank: {span.kind for span in spans if span.rank == rank} for rank in (0, 1)}
    assert kinds[0] == kinds[1] == {"forward", "backward", "step", "in", "out", "update"}
