"""`--sync auto`: from what `gradsync tune` found to the strategy of this run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gradsync.data.documents import is_stream
from gradsync.data.meta import read_meta
from gradsync.data.tokenizer import ByteTokenizer
from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig, preset
from gradsync.sync.registry import find_strategy
from gradsync.train.config import SyncConfig, TrainConfig
from gradsync.train.config_io import read_file
from gradsync.train.recipes import recipe
from gradsync.train.tuned import Choice, Conditions, read_tuned, run_conditions, shape_of
from gradsync.world import World

_TUNED_FROM = 2
"""Ranks of `gradsync tune` unless it is told otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The strategy that `auto` stands for."""

    choice: Choice
    note: str
    """Which one it is and why, in one line for the user."""

    def to_json(self) -> dict[str, Any]:
        """For the other ranks."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Resolved:
        """The reverse of `to_json`."""
        named = dict(data)
        return cls(choice=Choice(**named.pop("choice")), **named)


def resolve_auto(config: TrainConfig, world: World, *, threads: int) -> Resolved:
    """The strategy that `config.sync = "auto"` stands for. Caches of hosts may differ: rank 0 asks,
    and tells the others.

    A run that goes on takes what it began with, whatever was measured since: bits depend on it.

    Args:
        config: with `out`.
        world: with the device.
        threads: intra-op threads of a rank.

    Raises:
        ConfigError: the configuration of the run to continue cannot be read.
        DataError: the data's description cannot be read.
    """
    if (place := continued(config)) is not None:
        choice = _choice_of(place)
        if choice is not None:
            return Resolved(choice=choice, note=f"sync auto: {choice.text}, as in {place}")
    default = Choice()
    if world.world_size == 1:
        return Resolved(choice=default, note=f"sync auto: {default.text}; one rank talks to nobody")
    conditions = conditions_of(config, world, threads=threads)
    tuned = read_tuned(conditions)
    if tuned is None:
        command = tune_command(config, conditions)
        note = f"sync auto: {default.text}; nothing is measured for such a run here: {command}"
        return Resolved(choice=default, note=note)
    promise = find_strategy(tuned.choice.sync).promise
    note = f"sync auto: {tuned.choice.text} (promise: {promise}); {tuned.date}: {tuned.verdict}"
    return Resolved(choice=tuned.choice, note=note)


def apply_choice(config: TrainConfig, choice: Choice, *, threads: int | None) -> TrainConfig:
    """`config` with a strategy in the place of `auto`; what is written down with the run.

    Args:
        config: with `sync="auto"`.
        choice: see `Resolved`.
        threads: intra-op threads, where the run is to keep them under a name that would take
            others; else None.
    """
    keeps_own = config.compile != "none" or config.loss_rows is not None
    promised = find_strategy(choice.sync).promise == "bitwise"
    return replace(
        config,
        sync=choice.sync,
        sync_options=SyncConfig(**choice.options),
        compile=config.compile if keeps_own else choice.compile,
        threads=config.threads if promised or config.threads is not None else threads,
    )


def conditions_of(config: TrainConfig, world: World, *, threads: int) -> Conditions:
    """The conditions that a run's step time depends on.

    Args:
        config: the run.
        world: with the device.
        threads: intra-op threads of a rank.

    Raises:
        ConfigError: impossible batch arithmetic.
        DataError: the data's description cannot be read.
    """
    plan = config.batch_plan(world.world_size)
    return Conditions(
        **run_conditions(config, _model(config), world, threads),
        micro_batch_size=plan.micro_batch_size,
        leaves_per_rank=-(-plan.num_leaves // world.world_size),
        num_nodes=world.num_nodes,
        keep_memory=config.keep_memory,
    )


def vocabulary(data: str, tokenizer: str = "") -> int | None:
    """Number of token ids of the data directory `data`, of a stream (by the data directory
    `tokenizer`, if given), of the built-in text for ""; None where the data does not say.

    Raises:
        DataError: its description cannot be read.
    """
    if is_stream(data):
        from gradsync.data.text_stream import stream_tokenizer

        return stream_tokenizer(tokenizer)[0].vocab_size
    if not data:
        return ByteTokenizer.vocab_size
    meta = read_meta(Path(data))
    return None if meta is None else meta.vocab_size


def tune_command(config: TrainConfig, conditions: Conditions) -> str:
    """The command that measures for such a run, or why there is none."""
    model = _model(config)
    if shape_of(model) != shape_of(replace(preset(config.preset), vocab_size=model.vocab_size)):
        return f"gradsync tune measures presets as they are, and this is another {config.preset}"
    if conditions.seq_len > (longest := preset(config.preset).block_size):
        return f"gradsync tune measures presets as they are: {config.preset} takes {longest} tokens"
    if conditions.dtype == "fp16":
        return "gradsync tune measures bf16 and fp32"
    start = recipe(config.preset)
    flags = {
        "--world-size": (conditions.world_size, _TUNED_FROM),
        "--dtype": (conditions.dtype, start.dtype),
        "--context-length": (conditions.seq_len, start.sequence_length),
        # Speed depends on the number of token ids alone.
        "--data": (config.tokenizer if is_stream(config.data) else config.data, ""),
        "--threads": (config.threads, None),
        "--device": (config.device, "auto"),
    }
    words = ["gradsync", "tune", config.preset]
    for flag, (value, default) in flags.items():
        words += [flag, str(value)] if value != default else []
    if not _same_batch(start, conditions):
        batch = conditions.micro_batch_size * conditions.leaves_per_rank
        words += ["--batch-size", str(batch), "--leaves-per-rank", str(conditions.leaves_per_rank)]
    if not conditions.keep_memory:
        words.append("--no-keep-memory")
    return f"`{shlex.join(words)}`"


def _same_batch(start: TrainConfig, conditions: Conditions) -> bool:
    """Whether `gradsync tune` takes these leaves by itself."""
    try:
        plan = start.batch_plan(conditions.world_size)
    except ConfigError:
        return False
    leaves = -(-plan.num_leaves // conditions.world_size)
    wanted = (conditions.micro_batch_size, conditions.leaves_per_rank)
    return (start.micro_batch_size, leaves) == wanted


def _model(config: TrainConfig) -> GPTConfig:
    """As the run will have it."""
    from gradsync.train.setup import model_config

    return model_config(config, vocabulary(config.data, config.tokenizer))


def continued(config: TrainConfig) -> Path | None:
    """The configuration of the run that this one goes on with."""
    if config.resume == "none":
        return None
    if config.resume == "auto":
        begun = config.out and any((Path(config.out) / "checkpoints").glob("step-*"))
        places = [Path(config.out)] if begun else []
    else:  # a run, its checkpoints, or one of those
        path = Path(config.resume).resolve()
        places = [path, *path.parents[:2]] if path.is_dir() else []
    found = (place / "config.yaml" for place in places)
    return next((path for path in found if path.is_file()), None)


def _choice_of(path: Path) -> Choice | None:
    """Strategy of the run that this one goes on with; None if that says `auto` too."""
    values = read_file(path)
    sync, given = values.get("sync"), values.get("sync_options") or {}
    if not isinstance(sync, str) or sync == "auto" or not isinstance(given, dict):
        return None
    known = {entry.name for entry in fields(SyncConfig)}
    options = {k: v for k, v in given.items() if k in known and v is not None}
    return Choice(sync=sync, options=options, compile=values.get("compile", "none"))
