"""A split that cannot be trained is refused before ranks start, in one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.plan.workload import goes_with_parts
from gradsync.commands.train.check import check_request
from gradsync.commands.train.config import SyncConfig, TrainConfig
from gradsync.errors import ConfigError
from gradsync.sync.registry import STRATEGIES

CONFIG = TrainConfig(
    tokens_per_update=4_096,  # 8 leaves
    micro_batch_size=2,
    model=GPTConfig(n_layer=4, n_head=8, n_embd=64),
)


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (4, {"parallel": "pp=3"}, "is 3 ranks, but there are 4"),
        (5, {"parallel": "pp=5"}, "pp=5 stages need a block each, the model has 4"),
        (2, {"parallel": "tp=2", "model": GPTConfig(architecture="gpt2")}, "this one is gpt2"),
        (3, {"parallel": "tp=3"}, "tp=3 does not divide the model's 8 query heads"),
        (4, {"parallel": "foo"}, "got 'foo', expected sizes such as"),
        (4, {"parallel": "pp=4,dp=1", "micro_batch_size": 8}, "stages need a micro-batch each"),
        (6, {"parallel": "pp=2"}, "8 micro-batches do not divide by 3"),
        (2, {"parallel": "pp=2", "dtype": "fp16"}, "fp16"),
        (2, {"parallel": "pp=2", "compile": "model"}, "compile=model; change it"),
        (2, {"parallel": "tp=2", "sync": "auto"}, "sync=auto measures whole models"),
        *(
            (2, {"parallel": "pp=2", "sync": name}, f"sync={name} does not go with a split model")
            for name in ("ddp", "powersgd", "fsdp", "local_sgd", "diloco", "zero1", "zero2")
        ),
        (2, {"parallel": "tp=2", "sync_options": SyncConfig(shard="optimizer")}, "shard"),
        (2, {"parallel": "tp=2", "sync_options": SyncConfig(collective="shared_memory")}, "memory"),
    ],
)
def test_refused_in_one_line(ranks: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_request(replace(CONFIG, **changes), ranks)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sync", [name for name in STRATEGIES if goes_with_parts(name)])
def test_replicas_share_the_leaves(sync: str) -> None:
    plan = check_request(replace(CONFIG, parallel="pp=2,tp=2,dp=2", sync=sync), 8)
    assert [len(plan.micro_batches_of(replica)) for replica in range(2)] == [4, 4]
    assert plan.describe("replica").endswith("micro-batches per replica: 4, 4")


def test_replicas_of_one_rank_are_plain_data_parallelism() -> None:
    for text in ("", "dp=4", "pp=1"):
        assert check_request(replace(CONFIG, parallel=text, sync="ddp"), 4).world_size == 4
