"""Checks of a request that one rank makes alone, before anything starts or is built; no torch.

They raise ConfigError or DataError, in one line that says what to change.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.parallel.layout import ParallelLayout, check_divisible
from gradsync.commands.plan.workload import goes_with_parts
from gradsync.commands.prepare.documents import HUGGING_FACE, is_stream, json_lines
from gradsync.commands.train.config import AUTO, TrainConfig
from gradsync.data.batch_plan import BatchPlan
from gradsync.data.tokenizer import check_tokenizer
from gradsync.errors import ConfigError, DataError
from gradsync.runtime.machine import total_bytes
from gradsync.sync.registry import STRATEGIES, check_options, find_strategy

BY_MESSAGES = {"collective": "backend"}
"""Option that the engine's strategies need with a split model: ranks of one host hold different
parts, so they have no memory to share."""


def check_request(config: TrainConfig, world_size: int) -> BatchPlan:
    """Check everything that needs nothing started, on any rank alone; returns the batch plan."""
    if config.sync != AUTO:
        check_options(find_strategy(config.sync), config.sync_options.given())
    if config.dtype == "fp16" and config.device == "cpu":
        raise ConfigError("dtype fp16 needs CUDA; use bf16 or fp32 on a CPU")
    _check_data(config)
    if config.out and Path(config.out).exists() and not Path(config.out).is_dir():
        raise ConfigError(f"--out {config.out} is a file; name a directory")
    layout, plan = config.layout(world_size), config.batch_plan(world_size)
    if layout.model_ranks > 1 and config.sync == AUTO:
        raise ConfigError("parallel: sync=auto measures whole models; name the strategy")
    check_layout(config, layout, plan)
    if config.sync == AUTO:  # checked again when the strategy is known
        return plan
    if find_strategy(config.sync).equal_leaves and plan.num_micro_batches % world_size:
        raise ConfigError(
            f"sync={config.sync} needs equally many micro-batches on all ranks; got "
            f"{plan.num_micro_batches} on {world_size} ranks: change --tokens-per-update, "
            "--micro-batch-size or the number of ranks"
        )
    return plan


def _check_data(config: TrainConfig) -> None:
    if is_stream(config.data):
        if not config.data.startswith(HUGGING_FACE):
            json_lines(config.data)
        if config.num_workers:
            raise ConfigError(
                f"num_workers reads ahead in a prepared data directory, {config.data} is a stream; "
                "leave it at 0"
            )
        if config.eval.max_tokens is None:
            raise ConfigError(
                f"{config.data} is a stream, and its first tokens are for validation: say how many "
                "with --eval.max-tokens"
            )
        return
    if config.tokenizer:
        raise ConfigError("tokenizer is for streams; a prepared data directory has its own")
    if config.text_key != TrainConfig().text_key:
        raise ConfigError(
            "text_key is for streams; a prepared data directory has tokens, no fields"
        )
    _check_prepared(config.data)
    if config.data and config.sample_tokens:  # the sample is decoded after the run
        check_tokenizer(Path(config.data))


def _check_prepared(data: str) -> None:
    """Refuse a path that is text, empty or missing, in place of a prepared directory."""
    path = Path(data)
    if not data or any((path / name).exists() for name in ("train.bin", "val.bin", "meta.json")):
        return
    if path.is_dir() and not any(path.iterdir()):
        raise DataError(f"{data} is empty; `gradsync prepare PATHS --out {data}` fills it")
    if not path.exists():
        cure = f"`gradsync prepare PATHS --out {data}` makes it"
        if path.suffix:  # a text's name, not a directory's
            cure = "--data takes a prepared directory, .jsonl files or hf:NAME"
        raise DataError(f"{data} does not exist; {cure}")
    text, out = (shlex.quote(str(each)) for each in (path, path.parent / f"{path.stem}-data"))
    raise DataError(
        f"{data} is not prepared (it has no train.bin): `gradsync prepare {text} --out {out}`, "
        f"then --data {out}"
    )


def check_size(shape: GPTConfig, *, device: str, num_nodes: int) -> None:
    """Refuse a model that this host cannot hold, by formula, however ranks divide it.

    All weights are first drawn in host memory. On CPUs (`device` "cpu") gradients and AdamW's two
    moments are there too; several hosts (`num_nodes`) may divide them.
    """
    copies = 4 if device == "cpu" and num_nodes == 1 else 1
    rotary = 2 * shape.block_size * shape.head_dim
    need_gb = 4 * (copies * shape.num_params() + rotary) / 1e9
    host_gb = total_bytes() / 1e9
    if need_gb > host_gb:
        raise ConfigError(
            f"to train {shape.num_params():.3g} parameters takes {need_gb:.3g} GB at least, and "
            f"this host has {host_gb:.3g} GB: lower --model.n-layer, --model.n-embd, "
            f"--model.block-size ({shape.block_size:,}) or the vocabulary ({shape.vocab_size:,})"
        )


def check_layout(config: TrainConfig, layout: ParallelLayout, plan: BatchPlan) -> None:
    """Refuse settings that a split model does not support."""
    if layout.model_ranks == 1:
        return
    check_divisible(config.model, layout)
    _check_parts_sync(config)
    if config.dtype == "fp16":
        raise ConfigError(
            "parallel: dtype fp16 scales losses, on which the parts of a model would have to "
            "agree; use bf16 or fp32"
        )
    if config.init:
        raise ConfigError("parallel: a split model does not begin with init's weights; drop init")
    if config.compile != "none":
        raise ConfigError(f"parallel: a split model is not compiled; drop compile={config.compile}")
    share, rest = divmod(plan.num_micro_batches, layout.dp)
    if rest:
        raise ConfigError(
            f"parallel: {plan.num_micro_batches} micro-batches a step cannot be dealt equally to "
            f"dp={layout.dp} replicas; change --tokens-per-update, --micro-batch-size or dp"
        )
    if share < layout.pp:
        raise ConfigError(
            f"parallel: pp={layout.pp} stages need a micro-batch each at a time, a replica has "
            f"{share} in a step; raise --tokens-per-update, or lower --micro-batch-size or pp"
        )


def _check_parts_sync(config: TrainConfig) -> None:
    strategy = find_strategy(config.sync)
    if not goes_with_parts(config.sync):
        known = ", ".join(name for name in STRATEGIES if goes_with_parts(name))
        raise ConfigError(
            f"parallel: sync={config.sync} does not go with a split model; these do: {known}"
        )
    if strategy.recipe is None:
        return
    given = config.sync_options.given()
    if given.get("shard", "none") != "none" or given.get("reduction") == "hierarchical":
        raise ConfigError(
            "parallel: sync_options.shard and reduction=hierarchical do not go with a split model"
        )
    if given.get("collective", "backend") == "shared_memory":
        raise ConfigError(
            "parallel: ranks of a split model hold different parts and share no memory; drop "
            "sync_options.collective"
        )
    options: dict[str, Any] = {**given, **BY_MESSAGES}
    replace(strategy.recipe, **options)  # validates the options
