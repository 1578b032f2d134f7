"""Results of `gradsync tune` in the user's cache: one file per kind of run on one machine.

A file is believed only if it says for itself what it was measured for, and names a strategy with
options as this version knows them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from gradsync.core.files import cache_entry, read_entry, write_entry
from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig
from gradsync.runtime import environ
from gradsync.runtime.machine import cpu_model, host_cores
from gradsync.sync.registry import check_options, find_strategy
from gradsync.train.config import CompileOrder, SyncConfig, TrainConfig
from gradsync.world import World

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConditions:
    """Conditions that every measurement of a training step depends on."""

    model: Mapping[str, Any]
    """The shape, see `shape_of`; for memory, whether it has dropout too."""
    dtype: str
    """bf16, fp16 or fp32."""
    seq_len: int
    """Tokens of a sequence."""
    world_size: int
    """Ranks."""
    threads: int
    """Intra-op threads of a rank."""
    device: str
    """Name of the accelerator, or cpu."""
    cpu: str
    """Name of the processor."""
    cores: int
    """Cores of the host."""
    torch: str
    """Version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions(RunConditions):
    """Conditions that decide how long a step takes; a choice holds where all of them are equal."""

    micro_batch_size: int
    """Sequences of a leaf."""
    leaves_per_rank: int
    """Leaves of a step, of the rank with the most."""
    num_nodes: int
    """Hosts."""
    keep_memory: bool
    """Whether freed memory was to stay in the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A strategy, as `gradsync train` takes it.

    Raises:
        ConfigError: this version has no such strategy, option or order.
    """

    sync: str = "invariant"
    """Its name."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the strategy; keys are fields of `SyncConfig`."""
    compile: CompileOrder = "none"
    """Where `torch.compile` stands: none, model or ddp."""

    def __post_init__(self) -> None:
        if not isinstance(self.sync, str):
            raise ConfigError(f"no name of a strategy: {self.sync!r}")
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"no options by name: {self.options!r}")
        try:
            check_options(find_strategy(self.sync), self.options)
            SyncConfig(**self.options)
        except TypeError as error:
            raise ConfigError(f"no option of gradsync train: {error}") from error
        if self.compile not in get_args(CompileOrder):
            raise ConfigError(f"no order of compilation: {self.compile!r}")
        if self.compile == "ddp" and self.sync != "ddp":
            raise ConfigError(f"no order of compilation for {self.sync}: {self.compile!r}")

    @property
    def text(self) -> str:
        """`zero1:bucket_mb=50`, and the order of compilation."""
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        name = f"{self.sync}:{options}" if options else self.sync
        return name if self.compile == "none" else f"{name}, compile {self.compile}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """A choice, and where it comes from."""

    choice: Choice
    verdict: str
    """Why, in one line."""
    date: str
    """Date of the measurement."""


def shape_of(model: GPTConfig) -> dict[str, Any]:
    """Sizes of a model that decide how much there is to compute and to send."""
    return {
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_kv_head": model.num_kv_heads,
        "n_embd": model.n_embd,
        "mlp_dim": model.mlp_dim,
        "vocab_size": model.vocab_size,
        "tie_head": model.tie_head,
    }


def run_conditions(
    config: TrainConfig, shape: GPTConfig, world: World, threads: int
) -> dict[str, Any]:
    """The fields of `RunConditions`, for ranks with `threads` intra-op threads."""
    import torch

    on_cuda = world.device.startswith("cuda")
    return {
        "model": shape_of(shape),
        "dtype": config.dtype,
        "seq_len": config.sequence_length,
        "world_size": world.world_size,
        "threads": threads,
        "device": torch.cuda.get_device_name(world.device) if on_cuda else "cpu",
        "cpu": cpu_model(),
        "cores": host_cores(),
        "torch": str(torch.__version__),
    }


def tuned_folder() -> Path:
    """Where all choices are kept.

    Raises:
        ConfigError: there is no home to keep a cache in.
    """
    return environ.cache_dir() / "tuned"


def tuned_path(conditions: Conditions) -> Path:
    """Where the choice for `conditions` is kept.

    Raises:
        ConfigError: see `tuned_folder`.
    """
    return cache_entry(tuned_folder(), json.dumps(asdict(conditions), sort_keys=True))


def save_tuned(conditions: Conditions, tuned: Tuned) -> Path:
    """Keep it in the place of what was there; returns where.

    Raises:
        ConfigError: see `tuned_folder`.
        RunError: the cache cannot be written.
    """
    return write_entry(tuned_path(conditions), entry_document(conditions, tuned))


def read_tuned(conditions: Conditions) -> Tuned | None:
    """The entry kept for `conditions`; None when nothing was, or nothing that can be believed.

    Raises:
        ConfigError: see `tuned_folder`.
    """

    def build(document: Any) -> Tuned:
        check_entry(document, conditions)
        choice = Choice(**document["choice"])
        if find_strategy(choice.sync).promise == "lossy":
            raise ValueError(f"{choice.sync} is lossy, and not chosen by its speed")
        verdict, date = check_line(document["verdict"]), check_line(document["date"])
        return Tuned(choice=choice, verdict=verdict, date=date)

    return read_entry(tuned_path(conditions), build)


def entry_document(conditions: Any, found: Any) -> dict[str, Any]:
    """The JSON value of a cache's file: what was found, and for what; both are dataclasses."""
    return {"format_version": FORMAT_VERSION, "conditions": asdict(conditions), **asdict(found)}


def check_entry(document: Any, conditions: Any) -> None:
    """Raise ValueError or KeyError if `document` is not what `entry_document` made for these."""
    if not isinstance(document, dict):
        raise ValueError("it holds no object")
    if document["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format_version {document['format_version']}, not {FORMAT_VERSION}")
    if document["conditions"] != json.loads(json.dumps(asdict(conditions))):
        raise ValueError("it was measured for something else")


def check_line(value: Any) -> str:
    """`value`, which is printed, if it is a line of text; ValueError otherwise."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{value!r} is no line of text")
    return value
