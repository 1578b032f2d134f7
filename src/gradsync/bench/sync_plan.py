"""What `bench sync` measures, as checked values: sets of processes, contestants, order of turns.

    round 0    none  naive  flat  …                a turn: some steps to warm up, then `num_steps`
    round 1    naive  flat  …  none                the next round begins with the next contestant
    round 2    flat  …  none  naive

A *set* is a number of ranks with one process group and one allocator setting. All sets are alive
all the time; one of them works, the others sleep. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradsync.bench.contestant import Contestant
from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig
from gradsync.models.presets import PRESETS, preset

DTYPES = ("fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")
CHECK_STEPS = 4
"""Optimizer steps by which each contestant is checked."""
_USUAL_CONTEXT = 512
_LARGEST_SEED = 2**32
"""Each leaf's is a multiple of it, and generators take 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncSettings:
    """How each contestant is measured.

    Raises:
        ConfigError: numbers that cannot be, naming those that can.
    """

    model_size: str
    """A preset of `gradsync.models.presets`."""
    vocab_size: int | None = None
    """Number of token ids; None takes the preset's."""
    context_length: int | None = None
    """Tokens of a sequence; None takes the model's own, at most 512."""
    num_steps: int = 10
    """Optimizer steps of a turn that count."""
    num_warmup: int = 2
    """Optimizer steps of a turn before those."""
    rounds: int = 5
    """Turns of each contestant."""
    leaves_per_rank: int = 1
    """Micro-batches of a rank and step."""
    dtype: str = "bf16"
    """fp32, or bf16 (autocast over fp32 weights)."""
    bucket_mb: float | None = None
    """Size of buckets where there are any; None takes each contestant's own. MiB."""
    threads: int = 1
    """Intra-op threads of a rank."""
    device: str = "auto"
    """auto, cpu or cuda."""
    seed: int = 0
    """Names tokens and weights."""
    side_by_side: bool = True
    """Models stay from turn to turn; otherwise each turn builds its own."""

    def __post_init__(self) -> None:
        preset(self.model_size)
        for name in ("num_steps", "rounds", "leaves_per_rank", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1; got {getattr(self, name)}")
        if self.num_warmup < 0:
            raise ConfigError(f"--num-warmup must not be negative; got {self.num_warmup}")
        for name, known in (("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{_flag(name)} must be one of {', '.join(known)}; got {getattr(self, name)!r}"
                )
        if self.bucket_mb is not None and not 0 < self.bucket_mb < math.inf:
            raise ConfigError(f"--bucket-mb must be positive and finite; got {self.bucket_mb}")
        if abs(self.seed) > _LARGEST_SEED:
            raise ConfigError(f"--seed must be within +-{_LARGEST_SEED}; got {self.seed}")
        longest = PRESETS[self.model_size].block_size
        if not 1 <= self.tokens <= longest:
            raise ConfigError(
                f"--context-length {self.context_length}: {self.model_size!r} takes 1 to {longest} "
                "tokens"
            )

    @property
    def config(self) -> GPTConfig:
        """The model's shape."""
        shape = PRESETS[self.model_size]
        return shape if self.vocab_size is None else replace(shape, vocab_size=self.vocab_size)

    @property
    def tokens(self) -> int:
        """Of a sequence."""
        if self.context_length is None:
            return min(_USUAL_CONTEXT, PRESETS[self.model_size].block_size)
        return self.context_length


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSet:
    """Ranks with one process group."""

    world_size: int
    keep_memory: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A contestant in its set."""

    contestant: Contestant
    worker_set: int
    """Index into `Plan.sets`."""
    batch_size: int
    """Sequences of a rank and step."""

    @property
    def label(self) -> str:
        """The contestant's."""
        return self.contestant.label


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The whole measurement.

    Raises:
        ConfigError: a world size of 0, a batch that does not divide into leaves.
    """

    settings: SyncSettings
    sets: tuple[WorkerSet, ...]
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        for each in self.sets:
            if each.world_size < 1:
                raise ConfigError(f"--world-size must be at least 1; got {each.world_size}")
        leaves = self.settings.leaves_per_rank
        for entry in self.entries:
            if entry.batch_size < 1:
                raise ConfigError(f"--batch-size must be at least 1; got {entry.batch_size}")
            if entry.batch_size % leaves:
                raise ConfigError(
                    f"--batch-size {entry.batch_size} does not divide into {leaves} leaves; take "
                    f"a multiple of {leaves}"
                )

    @property
    def num_ranks(self) -> int:
        """Of all sets."""
        return sum(each.world_size for each in self.sets)

    def turns(self) -> list[Entry]:
        """Who measures after whom: round after round, each begun by the next contestant."""
        order = []
        for number in range(self.settings.rounds):
            first = number % len(self.entries)
            order += [*self.entries[first:], *self.entries[:first]]
        return order

    def ideal_of(self, entry: Entry) -> Entry:
        """The `none` of the same set, which talks to nobody and holds equal batches."""
        return next(
            each
            for each in self.entries
            if each.contestant.name == "none" and each.worker_set == entry.worker_set
        )


def sync_plan(
    settings: SyncSettings, contestants: Sequence[Contestant], *, world_size: int, batch_size: int
) -> Plan:
    """One set per allocator setting that occurs.

    Raises:
        ConfigError: see `Plan`.
    """
    keeps = list(dict.fromkeys(each.keep_memory for each in contestants))
    return Plan(
        settings=settings,
        sets=tuple(WorkerSet(world_size=world_size, keep_memory=keep) for keep in keeps),
        entries=tuple(
            Entry(
                contestant=each,
                worker_set=keeps.index(each.keep_memory),
                batch_size=batch_size,
            )
            for each in contestants
        ),
    )


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """For the ranks."""
    return asdict(plan)


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """What `plan_to_json` made."""
    return Plan(
        settings=SyncSettings(**data["settings"]),
        sets=tuple(WorkerSet(**each) for each in data["sets"]),
        entries=tuple(
            Entry(
                contestant=Contestant(**each["contestant"]),
                worker_set=each["worker_set"],
                batch_size=each["batch_size"],
            )
            for each in data["entries"]
        ),
    )


def built_per_turn(plan: Plan) -> Plan:
    """The same, with models that live for one turn only."""
    return replace(plan, settings=replace(plan.settings, side_by_side=False))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
