"""What `gradsync tune` found, kept in the user's cache: one file per kind of run on one machine.

A file is believed only if it says for itself what it was measured for, and names a strategy with
options as this version knows them. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from gradsync.errors import ConfigError, DataError
from gradsync.models.config import GPTConfig
from gradsync.runtime import environ
from gradsync.runtime.text_file import read_json
from gradsync.sync.registry import check_options, find_strategy
from gradsync.train.config import CompileOrder, SyncConfig

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What decides how long a step takes; a choice holds where all of it is equal."""

    model: Mapping[str, Any]
    """The shape, see `shape_of`."""
    dtype: str
    """bf16 or fp32."""
    seq_len: int
    """Tokens of a sequence."""
    micro_batch_size: int
    """Sequences of a leaf."""
    leaves_per_rank: int
    """Leaves of a step, of the rank with the most."""
    world_size: int
    """Ranks."""
    num_nodes: int
    """Hosts."""
    threads: int
    """Intra-op threads of a rank."""
    keep_memory: bool
    """Whether freed memory was to stay in the process."""
    device: str
    """Name of the accelerator, or cpu."""
    cpu: str
    """Name of the processor."""
    cores: int
    """Of the host."""
    torch: str
    """Version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A strategy, as `gradsync train` takes it.

    Raises:
        ConfigError: this version has no such strategy, option or order.
    """

    sync: str = "invariant"
    """Its name."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the strategy; keys are fields of `SyncConfig`."""
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
    """Of the measurement."""


def shape_of(model: GPTConfig) -> dict[str, Any]:
    """What of a model decides how much there is to compute and to send."""
    return {
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_kv_head": model.num_kv_heads,
        "n_embd": model.n_embd,
        "mlp_dim": model.mlp_dim,
        "vocab_size": model.vocab_size,
        "tie_head": model.tie_head,
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
    key = json.dumps(asdict(conditions), sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return tuned_folder() / f"{digest}.json"


def tuned_document(conditions: Conditions, tuned: Tuned) -> dict[str, Any]:
    """What the file holds, for JSON."""
    return {
        "format_version": FORMAT_VERSION,
        "conditions": asdict(conditions),
        **asdict(tuned),
    }


def read_tuned(conditions: Conditions) -> Tuned | None:
    """What was kept for `conditions`; None when nothing was.

    Raises:
        ConfigError: see `tuned_folder`.
        DataError: the file cannot be read, is damaged, of another version or of other conditions.
    """
    path = tuned_path(conditions)
    try:
        document = read_json(path, finite=False)
        return _checked(document, conditions)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:  # ConfigError is a ValueError
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path} cannot be used ({reason})") from error


def _checked(document: Any, conditions: Conditions) -> Tuned:
    if not isinstance(document, dict):
        raise ValueError("it holds no object")
    if document["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format_version {document['format_version']}, not {FORMAT_VERSION}")
    if document["conditions"] != json.loads(json.dumps(asdict(conditions))):
        raise ValueError("it was measured for something else")
    choice = Choice(**document["choice"])
    if find_strategy(choice.sync).promise == "lossy":
        raise ValueError(f"{choice.sync} is lossy, and not chosen by its speed")
    return Tuned(
        choice=choice,
        verdict=_line(document["verdict"]),
        date=_line(document["date"]),
    )


def _line(value: Any) -> str:
    """It is printed: one line of text."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{value!r} is no line of text")
    return value
