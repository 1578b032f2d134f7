"""The data of a run, and the model's shape that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gradsync.commands.models.config import GPTConfig, preset
from gradsync.commands.prepare.prepare import is_stream
from gradsync.commands.prepare.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from gradsync.commands.train.config import TrainConfig
from gradsync.data.batch_plan import BatchPlan
from gradsync.data.meta import Meta, read_meta
from gradsync.errors import ConfigError
from gradsync.world import World

if TYPE_CHECKING:
    from gradsync.comm.base import Communicator
    from gradsync.data.loader import EvalLoader, Loader
    from gradsync.data.streaming import StreamLoader


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Data that a run reads."""

    source: str  # The data directory, or the name of the stream
    meta: Meta | None = None  # None for streams and for data that gradsync did not prepare
    plan: BatchPlan
    train: Loader | StreamLoader
    val: EvalLoader
    tokenizer: str | None  # Name of the data's tokenizer; None if the data do not state it
    vocab_size: int | None  # Number of token ids; None likewise
    load_tokenizer: Callable[[], Tokenizer] | None  # Returns the tokenizer; None likewise


def open_data(config: TrainConfig, world: World, comm: Communicator) -> Data:
    """Open the data sets; one rank of each host prepares the default corpus, once. A stream repeats
    its text without end, in the same order in each pass."""
    from gradsync.data.loader import EvalLoader, loader

    plan, share = config.batch_plan(world.world_size), _replicas(config, world)
    sizes = {
        "global_batch_size": plan.global_batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "seed": config.seed,
    }
    limit = config.eval.max_tokens
    val_sequences = None if limit is None else max(limit // config.sequence_length, 1)
    if is_stream(config.data):
        from gradsync.commands.prepare.text_stream import open_streamed_text
        from gradsync.data.streaming import stream_loader

        assert val_sequences is not None
        text = open_streamed_text(
            config.data,
            text_key=config.text_key,
            tokenizer=config.tokenizer,
            seq_len=config.sequence_length,
            val_sequences=val_sequences,
        )
        return Data(
            source=config.data,
            plan=plan,
            train=stream_loader(text.train, share, comm=comm, num_epochs=None, **sizes),
            val=EvalLoader(text.val, share, plan.micro_batch_size, val_sequences),
            tokenizer=text.identity,
            vocab_size=text.tokenizer.vocab_size,
            load_tokenizer=lambda: text.tokenizer,
        )
    from gradsync.commands.prepare.prepare import default_corpus
    from gradsync.data.tokens import open_dataset

    directory = Path(config.data)
    if not config.data:
        if world.local_rank == 0:
            default_corpus()
        comm.barrier()
        directory = default_corpus()
    # Data that gradsync did not prepare may not state its vocabulary. Then each batch is checked
    # against the model's: on a GPU a token too large raises an assertion without a place.
    known = {"dtype": config.token_dtype or None, "vocab_size": config.model.vocab_size}
    train = open_dataset(directory, "train", config.sequence_length, **known)
    val = open_dataset(directory, "val", config.sequence_length, **known)
    meta = read_meta(directory)
    return Data(
        source=str(directory),
        meta=meta,
        plan=plan,
        train=loader(train, share, num_workers=config.num_workers, **sizes),
        val=EvalLoader(val, share, plan.micro_batch_size, val_sequences),
        tokenizer=None if meta is None else meta.tokenizer_identity,
        vocab_size=None if meta is None else meta.vocab_size,
        load_tokenizer=None if meta is None else partial(load_tokenizer, meta, directory),
    )


def _replicas(config: TrainConfig, world: World) -> World:
    """The ranks that divide the micro-batches: all, or the replicas of a split model."""
    layout = config.layout(world.world_size)
    if layout.model_ranks == 1:
        return world
    place = layout.coordinates(world.rank)
    ranks = {"rank": place.data, "world_size": layout.dp}
    local = {"local_rank": place.data, "local_world_size": layout.dp}
    return replace(world, **ranks, **local, node_rank=0, num_nodes=1)


def vocabulary(data: str, tokenizer: str = "") -> int | None:
    """Number of token ids in the data directory `data`, in a stream (with the tokenizer of the data
    directory `tokenizer`, if given), or in the built-in text for ""; None if it is not stated.
    """
    if is_stream(data):
        from gradsync.commands.prepare.text_stream import stream_tokenizer

        return stream_tokenizer(tokenizer)[0].vocab_size
    if not data:
        return ByteTokenizer.vocab_size
    meta = read_meta(Path(data))
    return None if meta is None else meta.vocab_size


def model_config(config: TrainConfig, vocab_size: int | None) -> GPTConfig:
    """The model's shape with the data's vocabulary, unless another one was asked for."""
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


def shape_before(config: TrainConfig) -> GPTConfig:
    """The shape that the run's model will have, before the data are opened."""
    return model_config(config, vocabulary(config.data, config.tokenizer))
