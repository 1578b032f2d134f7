"""`--sync auto`: the fastest strategy that `gradsync tune` found for this kind of run here; and
`--dtype auto`.

Results are in the user's cache, one file per kind of run on one machine. A file is trusted only if
it states what it was measured for, and names a strategy with options that this version knows.
Probed micro-batches are kept in the same way (`micro_batch.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from gradsync.commands.models.config import GPTConfig, preset
from gradsync.commands.plan.machine import fast_dtype
from gradsync.commands.plan.profile import Cache, Conditions, machine_conditions
from gradsync.commands.prepare.documents import is_stream
from gradsync.commands.train.config import (
    AUTO,
    CompileOrder,
    Dtype,
    SyncConfig,
    TrainConfig,
    recipe,
)
from gradsync.commands.train.config_io import HINTS, read_file, typed
from gradsync.commands.train.data import shape_before
from gradsync.errors import ConfigError
from gradsync.sync.registry import check_options, find_strategy
from gradsync.world import World

if TYPE_CHECKING:
    from gradsync.comm.base import Communicator

_TUNED_FROM = 2  # Default number of ranks of `gradsync tune`


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedStrategy:
    """A strategy, as `gradsync train` takes it; ConfigError if this version does not have it."""

    sync: str = "invariant"  # Its name
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the strategy; keys are fields of `SyncConfig`."""
    compile: CompileOrder = "none"  # What `torch.compile` applies to: none, model or ddp

    def __post_init__(self) -> None:
        if not isinstance(self.sync, str):
            raise ConfigError(f"no name of a strategy: {self.sync!r}")
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"no options by name: {self.options!r}")
        check_options(find_strategy(self.sync), self.options)
        SyncConfig(**self.options)
        if self.compile not in get_args(CompileOrder):
            raise ConfigError(f"no order of compilation: {self.compile!r}")
        if self.compile == "ddp" and self.sync != "ddp":
            raise ConfigError(f"no order of compilation for {self.sync}: {self.compile!r}")

    @property
    def text(self) -> str:
        """`zero1:bucket_mb=50`, and the compile setting."""
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        name = f"{self.sync}:{options}" if options else self.sync
        return name if self.compile == "none" else f"{name}, compile {self.compile}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """A choice, the reason (in one line), and the date of the measurement."""

    choice: TunedStrategy
    verdict: str
    date: str


def run_conditions(config: TrainConfig, shape: GPTConfig, world: World, threads: int) -> Conditions:
    """The conditions of every measurement of a training step; `threads` are per rank."""
    return machine_conditions(world.device_name, threads) | {
        "model": _sizes(shape),
        "dtype": config.dtype,
        "seq_len": config.sequence_length,
        "world_size": world.world_size,
    }


def _sizes(model: GPTConfig) -> dict[str, Any]:
    """The sizes of a model that determine computation and communication."""
    names = ("n_layer", "n_head", "n_embd", "mlp_dim", "vocab_size", "tie_head")
    return {name: getattr(model, name) for name in names} | {"n_kv_head": model.num_kv_heads}


def conditions_of(config: TrainConfig, world: World, *, threads: int) -> Conditions:
    """The conditions that determine the step time of a run."""
    plan = config.batch_plan(world.world_size)
    return run_conditions(config, shape_before(config), world, threads) | {
        "micro_batch_size": plan.micro_batch_size,
        "leaves_per_rank": -(
            -plan.num_micro_batches // world.world_size
        ),  # of the rank with the most
        "num_nodes": world.num_nodes,
        "keep_memory": config.keep_memory,
    }


def check_line(value: Any) -> str:
    """`value`, which is printed, if it is a line of text; ValueError otherwise."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{value!r} is no line of text")
    return value


def _tuned(document: Any) -> Tuned:
    choice = TunedStrategy(**document["choice"])
    if find_strategy(choice.sync).promise == "lossy":
        raise ValueError(f"{choice.sync} is lossy, and not chosen by its speed")
    verdict, date = check_line(document["verdict"]), check_line(document["date"])
    return Tuned(choice=choice, verdict=verdict, date=date)


TUNED = Cache("tuned", _tuned)  # Choices of `gradsync tune`


def resolve_auto(config: TrainConfig, world: World, *, threads: int) -> tuple[TunedStrategy, str]:
    """The strategy that `config.sync = "auto"` stands for, and why, in one line. Caches of hosts
    may differ: rank 0 reads its cache, and sends the result to the others.

    A resumed run keeps its strategy, whatever was measured since: bits depend on it.
    """
    place, values = begun_with(config) or (None, {})
    sync, compiled = values.get("sync"), values.get("compile", "none")
    if isinstance(sync, str) and sync != AUTO:
        options = begun_options(place, values)
        choice = TunedStrategy(sync=sync, options=options, compile=compiled)
        return choice, f"sync auto: {choice.text}, as in {place}"
    default = TunedStrategy()
    if world.world_size == 1:
        return default, f"sync auto: {default.text}; one rank has nothing to send"
    conditions = conditions_of(config, world, threads=threads)
    tuned = TUNED.read(conditions)
    if tuned is None:
        command = tune_command(config, conditions)
        return (
            default,
            f"sync auto: {default.text}; nothing is measured for such a run here: {command}",
        )
    choice, promise = tuned.choice, find_strategy(tuned.choice.sync).promise
    return choice, f"sync auto: {choice.text} (promise: {promise}); {tuned.date}: {tuned.verdict}"


def apply_choice(config: TrainConfig, choice: TunedStrategy, *, threads: int | None) -> TrainConfig:
    """`config` with a strategy in place of `auto`; this is saved with the run.

    `threads` is the number per rank if the run must keep it under a strategy name that would choose
    another number, else None.
    """
    keeps_own = config.compile != "none" or config.loss_rows is not None
    promised = find_strategy(choice.sync).same_on_any_ranks
    return replace(
        config,
        sync=choice.sync,
        sync_options=SyncConfig(**choice.options),
        compile=config.compile if keeps_own else choice.compile,
        threads=config.threads if promised or config.threads is not None else threads,
    )


def tune_command(config: TrainConfig, conditions: Conditions) -> str:
    """The command that measures this kind of run, or why none can."""
    shape, named = shape_before(config), preset(config.preset)
    world_size, seq_len = conditions["world_size"], conditions["seq_len"]
    only = "gradsync tune measures presets as they are"
    if _sizes(shape) != _sizes(replace(named, vocab_size=shape.vocab_size)):
        return f"{only}, and this is another {config.preset}"
    if seq_len > named.block_size:
        return f"{only}: {config.preset} takes {named.block_size} tokens"
    if conditions["dtype"] == "fp16":
        return "gradsync tune measures bf16 and fp32"
    if not conditions["keep_memory"]:
        return "gradsync tune measures runs that keep freed memory"
    start = recipe(config.preset)
    flags = {
        "--world-size": (world_size, _TUNED_FROM),
        "--dtype": (conditions["dtype"], fast_dtype(config.device)),
        "--context-length": (seq_len, start.sequence_length),
        # Speed depends only on the number of token ids.
        "--data": (config.tokenizer if is_stream(config.data) else config.data, ""),
        "--threads": (config.threads, None),
        "--device": (config.device, "auto"),
    }
    words = ["gradsync", "tune", config.preset]
    for flag, (value, default) in flags.items():
        words += [flag, str(value)] if value != default else []
    micro, leaves = conditions["micro_batch_size"], conditions["leaves_per_rank"]
    try:
        taken = -(-start.batch_plan(world_size).num_micro_batches // world_size)
    except ConfigError:
        taken = None
    if (start.micro_batch_size, taken) != (micro, leaves):
        words += ["--batch-size", str(micro * leaves), "--micro-batches-per-rank", str(leaves)]
    return f"`{shlex.join(words)}`"


def resolve_dtype(config: TrainConfig, world: World, comm: Communicator) -> tuple[TrainConfig, str]:
    """`config` with `dtype: auto` resolved, and a line about it ("" if it was named). All ranks
    call it and get the same."""
    from gradsync.comm.values import all_gather_json

    if config.dtype != AUTO:
        return config, ""
    # Only rank 0's host needs the run directory. Whole group, one small message from each rank.
    mine = [fast_dtype(world.device_name), *(begun_dtype(config) if world.is_main else ("", ""))]
    told = all_gather_json(comm, mine)
    kept, place = told[0][1:]
    if kept:
        return replace(config, dtype=kept), f"dtype auto: {kept}, as in {place}"
    slow = [str(rank) for rank, (fast, *_) in enumerate(told) if fast != "bf16"]
    if not slow:
        return replace(config, dtype="bf16"), "dtype auto: bf16, which is multiplied in hardware"
    named = ", ".join(slow[:8]) + (" …" if len(slow) > 8 else "")
    where = "here" if len(slow) == len(told) else f"on rank(s) {named}"
    return replace(config, dtype="fp32"), f"dtype auto: fp32; bf16 would be emulated {where}"


def begun_dtype(config: TrainConfig) -> tuple[str, str]:
    """The dtype of the run being resumed, and the file that says so; "" for none."""
    place, values = begun_with(config) or (None, {})
    found: Any = values.get("dtype")
    return (found, str(place)) if found in get_args(Dtype) and found != AUTO else ("", "")


def continued(config: TrainConfig) -> Path | None:
    """The configuration file of the run being resumed."""
    if config.resume == "none":
        return None
    if config.resume == "auto":
        begun = config.out and any((Path(config.out) / "checkpoints").glob("step-*"))
        places = [Path(config.out)] if begun else []
    else:  # a run, its checkpoints, or one of them
        path = Path(config.resume).resolve()
        places = [path, *path.parents[:2]] if path.is_dir() else []
    found = (place / "config.yaml" for place in places)
    return next((path for path in found if path.is_file()), None)


def begun_with(config: TrainConfig) -> tuple[Path, dict[str, Any]] | None:
    """The configuration file of the run being resumed, and its values."""
    place = continued(config)
    return None if place is None else (place, read_file(place))


def begun_options(place: Path | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """The strategy's options in the values of `place`, if they are set and this version has
    them."""
    options = values.get("sync_options") or {}
    if not isinstance(options, dict):
        raise ConfigError(f"configuration {place}: sync_options: expected keys and values")
    known = {entry.name for entry in fields(SyncConfig)}
    return {
        name: typed(value, HINTS[f"sync_options.{name}"], f"{place}: sync_options.{name}")
        for name, value in options.items()
        if name in known and value is not None
    }
