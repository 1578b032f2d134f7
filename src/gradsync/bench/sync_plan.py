"""The plan of `bench sync`, as checked values: sets of processes, contestants, order of turns.

    round 0    none  naive  flat  …                a turn: some steps to warm up, then `num_steps`
    round 1    naive  flat  …  none                the next round begins with the next contestant
    round 2    flat  …  none  naive

A *set* is a number of ranks with one process group and one allocator setting. All sets are alive
all the time; one of them works, the others sleep. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from gradsync.bench.contestant import Contestant
from gradsync.bench.memory_choice import DEVICES, Load, fits
from gradsync.errors import ConfigError
from gradsync.models.config import GPTConfig
from gradsync.models.presets import PRESETS, preset
from gradsync.plan.description import Kind
from gradsync.plan.profile import leaf_operations, probe_work, scaled_profile
from gradsync.plan.workload import Workload

DTYPES = ("fp32", "bf16")
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
    def model_text(self) -> str:
        """Model and precision, for titles."""
        millions = self.config.num_params() / 1e6
        return f"GPT {self.model_size} ({millions:.1f} M parameters), {self.dtype}"

    @property
    def turns_text(self) -> str:
        """How often, for titles."""
        return f"{self.rounds} rounds of {self.num_steps} steps"

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
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
        """Ranks of all sets."""
        return sum(self.world_sizes)

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Ranks of each set."""
        return tuple(each.world_size for each in self.sets)

    def turns(self) -> list[Entry]:
        """Entries in the order of turns: round after round, each begun by the next contestant."""
        order = []
        for number in range(self.settings.rounds):
            first = number % len(self.entries)
            order += [*self.entries[first:], *self.entries[:first]]
        return order

    def entry(self, label: str) -> Entry:
        """The one that is called so."""
        return next(entry for entry in self.entries if entry.label == label)

    def ideal_of(self, entry: Entry) -> Entry:
        """The `none` of the same set, which does not communicate and holds equal batches."""
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


def sizes_plan(settings: SyncSettings, sizes: Sequence[int], entries: Iterable[Entry]) -> Plan:
    """One set per number of ranks, in this order; all keep freed memory.

    Raises:
        ConfigError: see `Plan`.
    """
    sets = tuple(WorkerSet(world_size=size, keep_memory=True) for size in sizes)
    return Plan(settings=settings, sets=sets, entries=tuple(entries))


def ranks_text(world_size: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{world_size} rank{'s' if world_size > 1 else ''}"


def settings_of(options: Any, **others: Any) -> SyncSettings:
    """Settings from the options of a command that have the same names.

    Args:
        options: a dataclass; fields that it lacks have their defaults.
        others: in the place of options.

    Raises:
        ConfigError: see `SyncSettings`.
    """
    names = [entry.name for entry in fields(SyncSettings) if hasattr(options, entry.name)]
    return SyncSettings(**{name: getattr(options, name) for name in names} | others)


def fitting(plan: Plan, load: Load, room: int, *, contestants: int) -> Plan:
    """`plan`, with models that stay from turn to turn if so many fit into `room` bytes."""
    if fits(plan.settings.config, replace(load, contestants=contestants), room):
        return plan
    return replace(plan, settings=replace(plan.settings, side_by_side=False))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


BUDGET_S = 140.0
"""Limit for a measurement without a chosen model: with its ranks' start, under three minutes."""
_COMPANY = 1.5
"""A step with other ranks beside it, and with their gradients, over that of a rank alone: from 1.0
(`invariant`) to 2 (default malloc) in `benchmarks/sync/mini-512/record.json`."""


def seconds_of(plan: Plan, step_s: float) -> float:
    """How long all of it takes when a step takes `step_s`: checks and turns, one after another."""
    settings = plan.settings
    # A check: as it is, and laid bare after a step more; and once for each set the reference.
    turns = settings.rounds * (settings.num_warmup + settings.num_steps)
    each = 2 * CHECK_STEPS + 1 + turns
    return (len(plan.entries) * each + len(plan.sets) * CHECK_STEPS) * step_s


def duration(seconds: float) -> str:
    """For people: `40 s`, `3 min`, `1 h 20 min`."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def trial_step(work: Workload, *, ranks_per_host: int) -> float:
    """Seconds of a step in company: timed here alone, or a smaller leaf of the model, scaled."""
    from gradsync.plan.probe import probe_profile

    small = probe_work(work)
    measured = probe_profile(
        small, device=work.kind, ranks_per_host=ranks_per_host, budget_s=1.0, cached=False
    )
    profile = scaled_profile(measured, small, work)
    alone_s = work.num_leaves * (profile.forward_s + profile.backward_s) + profile.update_s
    return _COMPANY * alone_s


def in_time(plan: Plan, kind: Kind, trial: Callable[[Workload], float]) -> Plan:
    """`plan` with the largest model, not above its own, that takes at most `BUDGET_S`.

    From the smallest upwards: a larger one is timed only when by its operations it may do.

    Args:
        plan: with the largest model that fits into memory.
        kind: of device.
        trial: times a step of a rank, seconds.
    """
    largest = PRESETS[plan.settings.model_size].num_params()
    length = plan.settings.context_length or 1
    found: Plan | None = None
    step_s, operations = 0.0, 1.0
    for name, shape in PRESETS.items():
        if shape.num_params() > largest or shape.block_size < length:
            continue
        one = replace(plan, settings=replace(plan.settings, model_size=name))
        work = _workload(one, kind)
        wanted = leaf_operations(work)
        if found and seconds_of(one, step_s * wanted / operations) > 2 * BUDGET_S:
            break  # larger models use a machine better, but not that much
        step_s, operations = trial(work), wanted
        if found and seconds_of(one, step_s) > BUDGET_S:
            break
        found = one
    assert found is not None, "the plan's own model is among them"
    return found


def _workload(plan: Plan, kind: Kind) -> Workload:
    """A rank's step."""
    settings = plan.settings
    return Workload(
        model=settings.config,
        micro_batch_size=plan.entries[0].batch_size // settings.leaves_per_rank,
        seq_len=settings.tokens,
        num_leaves=settings.leaves_per_rank,
        dtype="bf16" if settings.dtype == "bf16" else "fp32",
        kind=kind,
    )
