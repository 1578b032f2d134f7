"""From a configuration to the parts of a run: data, model, optimizer, synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gradsync.checkpoint.optimizer_state import unpack_optimizer
from gradsync.checkpoint.weights import match_weights
from gradsync.comm.base import Communicator
from gradsync.comm.values import broadcast_tensors
from gradsync.data.documents import is_stream
from gradsync.data.loader import EvalLeaves, Loader, loader
from gradsync.data.meta import Meta, read_meta
from gradsync.data.plan import BatchPlan
from gradsync.data.prepare import default_corpus
from gradsync.data.streaming import StreamLoader, stream_loader
from gradsync.data.text_stream import open_streamed_text
from gradsync.data.tokenizer import Tokenizer, load_tokenizer
from gradsync.data.tokens import open_dataset
from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig, preset
from gradsync.models.gpt import GPT
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from gradsync.train.config import TrainConfig
from gradsync.train.optimizer import build_optimizer
from gradsync.train.sharded_load import load_sharded
from gradsync.world import World

Autocast = AbstractContextManager[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Data that a run reads."""

    source: str
    """The data directory, or the name of the stream."""
    meta: Meta | None
    """None for streams, and for data sets that gradsync did not prepare."""
    plan: BatchPlan
    train: Loader | StreamLoader
    val: EvalLeaves
    tokenizer: str | None
    """Names the tokenizer of the data; None when its maker did not say."""
    vocab_size: int | None
    """Its number of token ids; None likewise."""
    load_tokenizer: Callable[[], Tokenizer] | None
    """Gives the tokenizer; None likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """Model, optimizer and handle that a run trains."""

    model: GPT
    optimizer: torch.optim.Optimizer
    sync: GradientSync
    scaler: Any
    """`torch.amp.GradScaler` for fp16, else None."""

    @property
    def parameter_names(self) -> list[str]:
        """Names of the whole model's parameters, in its order."""
        return [name for name, _ in self.model.named_parameters()]

    def load(
        self,
        comm: Communicator,
        saved: Mapping[str, Mapping[str, torch.Tensor]],
        optimizer_state: Mapping[str, Any],
    ) -> None:
        """Take weights, optimizer and strategy from what rank 0 has read; all ranks call it.

        Args:
            comm: all ranks.
            saved: whole tensors by kind and name on rank 0, {} elsewhere.
            optimizer_state: what of it is no tensor, on all ranks.

        Raises:
            CheckpointError: of another model, or another optimizer.
        """
        held = self.sync.sharded_state_dict(self.optimizer)
        if held is not None:
            load_sharded(
                self.model,
                self.optimizer,
                self.sync,
                held=held,
                comm=comm,
                saved=saved,
                optimizer_state=optimizer_state,
            )
            return
        self.sync.load_full_weights(
            match_weights(self.model, broadcast_tensors(comm, saved.get("model")))
        )
        unpack_optimizer(
            self.optimizer,
            list(self.model.named_parameters()),
            broadcast_tensors(comm, saved.get("optimizer")),
            optimizer_state,
        )
        self.sync.scatter(self.optimizer)
        self.sync.load_state_tensors(broadcast_tensors(comm, saved.get("sync")))

    def whole_model(self, weights: Mapping[str, torch.Tensor]) -> GPT:
        """A model that one rank can use alone: the trained one, or a copy of a spread one."""
        if self.sync.reducer.shards.whole_parameters:
            return self.model
        model = GPT(self.model.config, seed=0)
        model.load_state_dict(weights)
        return model


def open_data(config: TrainConfig, world: World, comm: Communicator) -> Data:
    """Open the data sets; the default corpus is prepared by one rank of each host, once.

    Raises:
        ConfigError: the batch arithmetic is not exact.
        DataError: missing, truncated or altered files; text that cannot be read.
    """
    plan = config.batch_plan(world.world_size)
    if is_stream(config.data):
        return _open_stream(config, world, comm, plan)
    if config.data:
        directory = Path(config.data)
    else:
        if world.local_rank == 0:
            default_corpus()
        comm.barrier()
        directory = default_corpus()
    train = open_dataset(directory, "train", config.sequence_length)
    val = open_dataset(directory, "val", config.sequence_length)
    for dataset in (train, val):
        # Data that gradsync did not prepare may not say its vocabulary: then each batch is checked
        # against the model's, since on a GPU a token too large is an assertion without a place.
        dataset.vocab_size = dataset.vocab_size or config.model.vocab_size
    meta = read_meta(directory)
    return Data(
        source=str(directory),
        meta=meta,
        plan=plan,
        train=loader(
            train,
            data_world(config, world),
            global_batch_size=plan.global_batch_size,
            micro_batch_size=plan.micro_batch_size,
            seed=config.seed,
            num_workers=config.num_workers,
        ),
        val=_eval_leaves(config, world, val),
        tokenizer=None if meta is None else meta.tokenizer_identity,
        vocab_size=None if meta is None else meta.vocab_size,
        load_tokenizer=None if meta is None else partial(load_tokenizer, meta, directory),
    )


def _open_stream(config: TrainConfig, world: World, comm: Communicator, plan: BatchPlan) -> Data:
    """Text as it comes, endless: pass after pass in the same order."""
    val_sequences = _val_sequences(config)
    assert val_sequences is not None
    text = open_streamed_text(
        config.data,
        text_key=config.text_key,
        tokenizer=config.tokenizer,
        seq_len=config.sequence_length,
        val_sequences=val_sequences,
    )
    train = stream_loader(
        text.train,
        data_world(config, world),
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        comm=comm,
        num_epochs=None,
        seed=config.seed,
    )
    train.remedy = "--data must name the same text, unchanged, on all hosts and to go on"
    return Data(
        source=config.data,
        meta=None,
        plan=plan,
        train=train,
        val=_eval_leaves(config, world, text.val),
        tokenizer=text.identity,
        vocab_size=text.tokenizer.vocab_size,
        load_tokenizer=lambda: text.tokenizer,
    )


def _eval_leaves(config: TrainConfig, world: World, dataset: Any) -> EvalLeaves:
    share, limit = data_world(config, world), _val_sequences(config)
    return EvalLeaves(dataset, share, config.micro_batch_size, limit)


def _val_sequences(config: TrainConfig) -> int | None:
    """Sequences to evaluate on; None for all there are."""
    limit = config.eval.max_tokens
    return None if limit is None else max(limit // config.sequence_length, 1)


def data_world(config: TrainConfig, world: World) -> World:
    """The ranks that share out the leaves: `world`, or the replicas of a split model (all ranks
    of a replica read the same leaves)."""
    layout = config.layout(world.world_size)
    if layout.model_ranks == 1:
        return world
    place = layout.coordinates(world.rank)
    return World(
        rank=place.data,
        world_size=layout.dp,
        local_rank=place.data,
        local_world_size=layout.dp,
        launcher=world.launcher,
        device=world.device,
    )


def model_config(config: TrainConfig, vocab_size: int | None) -> GPTConfig:
    """The model's shape with the vocabulary of the data, unless another one was asked for.

    Raises:
        ConfigError: the vocabulary asked for is too small for the data.
    """
    asked = config.model.vocab_size
    if vocab_size is None or asked == vocab_size:
        return config.model
    if asked == preset(config.preset).vocab_size:
        return replace(config.model, vocab_size=vocab_size)
    if asked < vocab_size:
        raise ConfigError(
            f"model.vocab_size {asked} is smaller than the data's vocabulary {vocab_size}; leave "
            "it out to take the data's"
        )
    return config.model


def trainer_options(sync: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options `given` for the strategy called `sync`, and those that the trainer adds.

    Between two steps nobody writes the trainer's weights, so the ranks of a host that share memory
    need only one copy of them. `update="whole"` cannot do with one.
    """
    shares = STRATEGIES[sync].recipe is not None and given.get("update") != "whole"
    return {"weights": "shared", **given} if shares else dict(given)


def build_learner(
    config: TrainConfig, world: World, shape: GPTConfig, comm: Communicator
) -> Learner:
    """Model, optimizer and synchronisation on this rank's device.

    Raises:
        ConfigError: unknown strategy, or a dtype the device has not.
    """
    device = torch.device(world.device)
    if config.dtype == "fp16" and device.type != "cuda":
        raise ConfigError("dtype fp16 needs CUDA; use bf16 or fp32 on a CPU")
    set_precision(config, device)
    model = GPT(
        shape,
        seed=config.seed,
        activation_checkpointing=config.activation_checkpointing,
        loss_rows=config.loss_rows,
    ).to(device)
    options = trainer_options(config.sync, config.sync_options.given())
    if config.compile == "ddp":
        options["compile_wrapper"] = True
    if config.compile == "model":
        model.compile()  # in place: names stay clean
    sync = replicate(model, world, sync=config.sync, comm=comm, **options)
    # After replication: parameters that are spread over ranks are other objects than before.
    optimizer = build_optimizer(model, config.optim)
    scaler = None
    if config.dtype == "fp16":
        # Losses are sums over a step's targets: start lower by as many powers of two.
        start = 2.0 ** (16 - (config.tokens_per_update - 1).bit_length())
        scaler = torch.amp.GradScaler("cuda", init_scale=start)
    return Learner(model=model, optimizer=optimizer, sync=sync, scaler=scaler)


def set_precision(config: TrainConfig, device: torch.device) -> None:
    """Set TF32 for fp32 matrix products on a GPU."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")


def autocast(config: TrainConfig, world: World) -> Autocast:
    """The mixed-precision context of a forward."""
    if config.dtype == "fp32":
        return nullcontext()
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float16
    return torch.autocast(torch.device(world.device).type, dtype=dtype)
