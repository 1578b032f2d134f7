"""Choices that `auto` stands for: the strategy that `gradsync tune` found fastest for this kind of
run here, and the dtype of the hardware.

Results of `gradsync tune` are in the user's cache, one file per kind of run on one machine. A file
is trusted only if it states what it was measured for, and names a strategy with options that this
version knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gradsync.commands.plan.machine import fast_dtype
from gradsync.commands.plan.measured import Cache, Conditions, machine_conditions
from gradsync.commands.train.config import AUTO, CompileOrder, SyncConfig, TrainConfig
from gradsync.commands.train.config_io import begun_config
from gradsync.commands.train.data import shape_before
from gradsync.sync.registry import check_options, find_strategy
from gradsync.world import World

if TYPE_CHECKING:
    from gradsync.comm.base import Communicator


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedStrategy:
    """A strategy, as `gradsync train` takes it; ConfigError if this version does not have it."""

    sync: str = "invariant"  # Its name
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the strategy; keys are fields of `SyncConfig`."""
    compile: CompileOrder = "none"  # What `torch.compile` applies to: none, model or ddp

    def __post_init__(self) -> None:
        check_options(find_strategy(self.sync), self.options)

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


def conditions_of(config: TrainConfig, world: World, *, threads: int) -> Conditions:
    """The conditions that determine the step time of a run; `threads` are per rank."""
    plan, shape = config.batch_plan(world.world_size), shape_before(config)
    sizes = ("n_layer", "n_head", "n_embd", "mlp_dim", "vocab_size", "tie_head")
    model = {name: getattr(shape, name) for name in sizes} | {"n_kv_head": shape.num_kv_heads}
    return machine_conditions(world.device_name, threads) | {
        "model": model,
        "dtype": config.dtype,
        "seq_len": config.sequence_length,
        "world_size": world.world_size,
        "micro_batch_size": plan.micro_batch_size,
        "leaves_per_rank": -(-plan.num_micro_batches // world.world_size),  # the largest number
        "num_nodes": world.num_nodes,
        "keep_memory": config.keep_memory,
    }


def _tuned(document: Any) -> Tuned:
    choice = TunedStrategy(**document["choice"])
    if find_strategy(choice.sync).promise == "lossy":
        raise ValueError(f"{choice.sync} is lossy, and not chosen by its speed")
    return Tuned(choice=choice, verdict=str(document["verdict"]), date=str(document["date"]))


TUNED = Cache("tuned", _tuned)  # Choices of `gradsync tune`


def resolve_auto(config: TrainConfig, world: World, *, threads: int) -> tuple[TunedStrategy, str]:
    """The strategy that `config.sync = "auto"` stands for, and why, in one line. Caches of hosts
    may differ: rank 0 reads its cache, and sends the result to the others."""
    if (begun := begun_config(config)) is not None:
        place, before = begun
        options = before.sync_options.given()
        choice = TunedStrategy(sync=before.sync, options=options, compile=before.compile)
        return choice, f"sync auto: {choice.text}, as in {place}"
    default = TunedStrategy()
    if world.world_size == 1:
        return default, f"sync auto: {default.text}; one rank has nothing to send"
    tuned = TUNED.read(conditions_of(config, world, threads=threads))
    if tuned is None:
        command = f"gradsync tune {config.preset} --world-size {world.world_size}"
        return default, (
            f"sync auto: {default.text}; nothing is measured for such a run here: `{command}`, "
            "with this run's batch, dtype and threads, measures it"
        )
    choice, promise = tuned.choice, find_strategy(tuned.choice.sync).promise
    return choice, f"sync auto: {choice.text} (promise: {promise}); {tuned.date}: {tuned.verdict}"


def apply_choice(config: TrainConfig, choice: TunedStrategy, *, threads: int | None) -> TrainConfig:
    """`config` with a strategy in place of `auto`, saved with the run. `threads`: the number per
    rank if the run must keep it under a strategy that would choose another, else None."""
    promised = find_strategy(choice.sync).same_on_any_ranks
    return replace(
        config,
        sync=choice.sync,
        sync_options=SyncConfig(**choice.options),
        compile=choice.compile if config.compile == "none" else config.compile,
        threads=config.threads if promised or config.threads is not None else threads,
    )


def dtype_alone(config: TrainConfig) -> TrainConfig:
    """`config` with `dtype: auto` resolved as far as this process can tell: as the run began, or by
    this host's hardware."""
    if config.dtype != AUTO:
        return config
    begun = begun_config(config)
    return replace(config, dtype=begun[1].dtype if begun else fast_dtype(config.device))


def resolve_dtype(config: TrainConfig, world: World, comm: Communicator) -> tuple[TrainConfig, str]:
    """`config` with `dtype: auto` resolved, and a line about it ("" if it was named). All ranks
    call it and get the same."""
    from gradsync.comm.values import all_gather_json

    if config.dtype != AUTO:
        return config, ""
    begun = begun_config(config) if world.is_main else None  # only rank 0 needs the run directory
    kept = [str(begun[0]), begun[1].dtype] if begun else None
    # Whole group, one small message from each rank.
    told = all_gather_json(comm, [fast_dtype(world.device_name), kept])
    if told[0][1]:
        place, dtype = told[0][1]
        return replace(config, dtype=dtype), f"dtype auto: {dtype}, as in {place}"
    slow = [str(rank) for rank, (fast, _) in enumerate(told) if fast != "bf16"]
    if not slow:
        return replace(config, dtype="bf16"), "dtype auto: bf16, which is multiplied in hardware"
    where = "here" if len(slow) == len(told) else f"on rank(s) {', '.join(slow)}"
    return replace(config, dtype="fp32"), f"dtype auto: fp32; bf16 would be emulated {where}"
