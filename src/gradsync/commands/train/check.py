"""Checks of a request that one rank makes alone, before anything starts or is built; no torch.

They raise ConfigError or DataError, in one line that says what to change.
"""

from __future__ import annotations

from pathlib import Path

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.parallel.layout import ParallelLayout
from gradsync.commands.plan.choice import obstacle
from gradsync.commands.plan.workload import Split, Workload, goes_with_parts
from gradsync.commands.prepare.prepare import HUGGING_FACE, is_stream, json_lines
from gradsync.commands.prepare.tokenizer import check_tokenizer
from gradsync.commands.train.config import AUTO, TrainConfig
from gradsync.data.batch_plan import BatchPlan
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
    layout, plan = config.layout(world_size), config.batch_plan(world_size)
    if config.sync != AUTO:  # else checked again when the strategy is known
        check_layout(config, layout, plan)
    elif layout.model_ranks > 1:
        raise ConfigError("parallel: sync=auto measures whole models; name the strategy")
    return plan


def _check_data(config: TrainConfig) -> None:
    if is_stream(config.data):
        if not config.data.startswith(HUGGING_FACE):
            json_lines(config.data)
        if config.num_workers or config.eval.max_tokens is None:
            raise ConfigError(
                f"{config.data} is a stream: leave num_workers at 0 (they read ahead in a prepared "
                "data directory), and say with --eval.max-tokens how many of its first tokens are "
                "for validation"
            )
        return
    if config.tokenizer or config.text_key != "text":
        raise ConfigError(
            "tokenizer and text_key are for streams; a prepared data directory has tokens, and a "
            "tokenizer of its own"
        )
    path, data = Path(config.data), config.data
    if not data:
        return
    if not any((path / name).exists() for name in ("train.bin", "val.bin", "meta.json")):
        what = "is no prepared data directory" if path.exists() else "does not exist"
        raise DataError(
            f"{data} {what} (--data takes one, .jsonl files or hf:NAME): "
            "`gradsync prepare PATHS --out DIR` makes it"
        )
    if config.sample_tokens:  # the sample is decoded after the run
        check_tokenizer(path)


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
    """Refuse a batch or a model that cannot be divided so, and what a split model lacks."""
    work = Workload(
        model=config.model,
        micro_batch_size=plan.micro_batch_size,
        seq_len=config.sequence_length,
        num_leaves=plan.num_micro_batches,
        dtype="bf16" if config.dtype == AUTO else config.dtype,
    )
    if why := obstacle(work, Split(strategy=config.sync, layout=layout)):
        raise ConfigError(
            f"sync={config.sync} on {layout}: {why}; change --parallel, --tokens-per-update, "
            "--micro-batch-size, the model or the number of ranks"
        )
    if layout.model_ranks == 1:
        return
    if not goes_with_parts(config.sync):
        known = ", ".join(name for name in STRATEGIES if goes_with_parts(name))
        raise ConfigError(
            f"parallel: sync={config.sync} does not go with a split model; these do: {known}"
        )
    given = config.sync_options
    for refused, words in (
        (config.init, "init: a split model draws its weights"),
        (config.compile != "none", f"compile={config.compile}"),
        (
            given.shard not in (None, "none")
            or given.reduction == "hierarchical"
            or given.collective == "shared_memory",
            "sync_options shard, reduction=hierarchical and collective=shared_memory",
        ),
    ):
        if refused:
            raise ConfigError(f"parallel: a split model does not go with {words}; change it")
