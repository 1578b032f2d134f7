"""The measurement as checked values: a model, sets of processes, contestants, order of turns.

    round 0    none  naive  flat  …                a turn: some steps to warm up, then `num_steps`
    round 1    naive  flat  …  none                the next round begins with the next contestant
    round 2    flat  …  none  naive

A *set* is a number of ranks with one process group and one allocator setting. All sets stay alive;
one works at a time, the others sleep. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from gradsync.commands.bench.contestants import ALONE, Contestant
from gradsync.commands.bench.experiment import Ask, check_least
from gradsync.commands.bench.host import bucket_mb, shrunk
from gradsync.commands.models.config import PRESETS, GPTConfig, preset
from gradsync.commands.parallel.layout import ParallelLayout
from gradsync.commands.plan.description import Kind
from gradsync.commands.plan.memory import memory_need
from gradsync.commands.plan.profile import leaf_operations, probe_work, scaled_profile
from gradsync.commands.plan.workload import Split, Workload
from gradsync.core.files import counted
from gradsync.errors import ConfigError
from gradsync.runtime.machine import available_bytes

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("fp32", "bf16")
CHECKED = "all contestants train as they should; measuring"  # printed between checks and turns
CHECK_STEPS = 4  # optimizer steps of each contestant's check
SETTLING = 2  # first steps, which build buckets (DDP) or state (late updates)
DECIDING = 5  # steps until overlap_publish=auto has chosen, plus one
USUAL_TOKENS = 512
_SHARE = 0.9  # fraction of the free memory to use at most


Ranks = Sequence[Mapping[str, Any]]  # per rank: what `Runner.run` found for a contestant
Results = Sequence[Mapping[str, Any]]  # per set: what `Runner.run` returned


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncSettings:
    """How each contestant is measured; invalid numbers are refused."""

    model_size: str  # a preset of `gradsync.commands.models.presets`
    vocab_size: int | None = None  # number of token ids; None takes the preset's
    context_length: int | None = None  # tokens of a sequence; None: the model's own, at most 512
    num_steps: int = 10  # optimizer steps of a turn that count
    num_warmup: int = 2  # optimizer steps of a turn before those
    rounds: int = 5  # turns of each contestant
    leaves_per_rank: int = 1  # micro-batches of a rank and step
    dtype: str = "bf16"  # fp32, or bf16 (autocast over fp32 weights)
    threads: int = 1  # intra-op threads of a rank
    device: str = "auto"  # auto, cpu or cuda
    side_by_side: bool = True  # models stay from turn to turn; else each turn builds its own
    host: bool = False  # shrink the model until computing costs nothing, see host.py

    def __post_init__(self) -> None:
        preset(self.model_size)
        check_least(self, num_steps=1, rounds=1, leaves_per_rank=1, threads=1)
        if self.num_warmup < 0:
            raise ConfigError(f"--num-warmup must not be negative; got {self.num_warmup}")
        for name, known in (("dtype", DTYPES), ("device", DEVICES)):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"--{name} must be one of {', '.join(known)}; got {value!r}")
        longest = self.config.block_size
        if not 1 <= self.tokens <= longest:
            raise ConfigError(
                f"--context-length {self.context_length}: {self.model_size!r} takes 1 to {longest} "
                "tokens"
            )

    @property
    def config(self) -> GPTConfig:
        """The model's shape."""
        shape = PRESETS[self.model_size]
        shape = shape if self.vocab_size is None else replace(shape, vocab_size=self.vocab_size)
        return shrunk(shape) if self.host else shape

    @property
    def bucket_mb(self) -> float | None:
        """Size of all contestants' buckets in MiB; None: each one's default."""
        return bucket_mb(PRESETS[self.model_size]) if self.host else None

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        usual = min(USUAL_TOKENS, self.config.block_size)
        return usual if self.context_length is None else self.context_length

    @property
    def model_text(self) -> str:
        """Model and precision, for titles."""
        millions = self.config.num_params() / 1e6
        how = ", 8 wide" if self.host else f" ({millions:.1f} M parameters)"
        return f"GPT {self.model_size}{how}, {self.dtype}"

    @property
    def turns_text(self) -> str:
        """How often, for titles."""
        return f"{self.rounds} rounds of {self.num_steps} steps"

    @property
    def text(self) -> str:
        """The measurement, for titles."""
        return f"{self.model_text}, sequences of {self.tokens}; {self.turns_text}"

    def workload(self, batch_size: int, kind: Kind) -> Workload:
        """A step of one rank of `batch_size` sequences, as the formulas take it."""
        return Workload(
            model=self.config,
            micro_batch_size=batch_size // self.leaves_per_rank,
            seq_len=self.tokens,
            num_leaves=self.leaves_per_rank,
            dtype="bf16" if self.dtype == "bf16" else "fp32",
            kind=kind,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSet:
    """Ranks with one process group."""

    world_size: int
    keep_memory: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A contestant in its set."""

    contestant: Contestant
    worker_set: int  # index into `BenchPlan.sets`
    batch_size: int  # sequences of a rank and step

    @property
    def label(self) -> str:
        """The contestant's."""
        return self.contestant.label


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """The whole measurement."""

    settings: SyncSettings
    sets: tuple[WorkerSet, ...]
    entries: tuple[Entry, ...]
    takes_s: float = 0.0  # all steps together, estimated from a few timed ones; 0: not timed

    def __post_init__(self) -> None:
        leaves = self.settings.leaves_per_rank
        for each in self.sets:
            check_least(each, world_size=1)
        for entry in self.entries:
            check_least(entry, batch_size=1)
            if entry.batch_size % leaves:
                raise ConfigError(
                    f"--batch-size {entry.batch_size} does not divide into {leaves} leaves; take "
                    f"a multiple of {leaves}"
                )

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Ranks of each set."""
        return tuple(each.world_size for each in self.sets)

    def measured(self, ask: Ask) -> Results:
        """Measurements of all sets, on rank 0."""
        return ask(self, sum(self.world_sizes))["results"]

    def turns(self) -> list[Entry]:
        """Entries in the order of turns: each round begins with the next contestant. Every other
        round is reversed, so that a contestant does not always follow the same one."""
        order = []
        for first in range(self.settings.rounds):
            places = (first - n if first % 2 else first + n for n in range(len(self.entries)))
            order += [self.entries[place % len(self.entries)] for place in places]
        return order

    def entry(self, label: str) -> Entry:
        """The entry with this label."""
        return next(entry for entry in self.entries if entry.label == label)

    def ideal_of(self, entry: Entry) -> Entry:
        """The `none` of the same set with the same batch; it does not communicate."""
        same_set = (each for each in self.entries if each.worker_set == entry.worker_set)
        return next(each for each in same_set if each.contestant.name == ALONE)

    def ranks(self, results: Results, entry: Entry) -> Ranks:
        """Measurements of `entry`, by rank."""
        return results[entry.worker_set]["contestants"][entry.label]

    def fitting(self, room: Room, *, contestants: int) -> BenchPlan:
        """Keep models from turn to turn if `contestants` of them fit."""
        stays = room.fits(self.settings.config, contestants=contestants)
        return replace(self, settings=replace(self.settings, side_by_side=stays))


def bench_plan(settings: SyncSettings, entries: Iterable[tuple[Contestant, int, int]]) -> BenchPlan:
    """Plan of contestants, each with ranks and batch size: a set for each combination of rank count
    and allocator setting, in this order."""
    work = [(WorkerSet(world_size=w, keep_memory=c.keep_memory), c, b) for c, w, b in entries]
    sets = tuple(dict.fromkeys(each for each, _, _ in work))
    made = (
        Entry(contestant=contestant, worker_set=sets.index(each), batch_size=batch)
        for each, contestant, batch in work
    )
    return BenchPlan(settings=settings, sets=sets, entries=tuple(made))


def ranks_text(world_size: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{world_size} rank{'s' if world_size > 1 else ''}"


def turns(by_rank: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """For each round the mean over its steps, of the rank whose mean is the greatest.

    Ranks that never synchronise must not be compared step by step: the slowest one changes, and no
    rank waits for it. Ranks that synchronise end their steps together, with nearly equal means.
    `by_rank` is [rank][round][step].
    """
    return [max(map(fmean, ranks)) for ranks in zip(*by_rank, strict=True)]


def step_seconds(ranks: Ranks, part: str = "step_s") -> list[float]:
    """Each round's mean on the slowest rank, see `turns`; `part` is step_s or compute_s."""
    return turns([rank[part] for rank in ranks])


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Memory for the models and leaves to be held at once: the host's, or a device's."""

    available: int  # bytes
    leaf_tokens: int  # tokens of one micro-batch
    ranks: int  # all processes, idle ones included
    busy: int  # processes that train at the same time
    kind: Kind = "cpu"  # of a rank's device

    def needed(self, config: GPTConfig, *, contestants: int = 1) -> int:
        """Bytes of all ranks, each counted as `ddp`, if each holds `contestants` models."""
        ranks = max(self.busy, 2)  # one rank alone needs no buckets, but the others do
        leaf = {"seq_len": self.leaf_tokens, "num_leaves": ranks, "kind": self.kind}
        work = Workload(model=config, micro_batch_size=1, **leaf)
        need = memory_need(work, Split(strategy="ddp", layout=ParallelLayout(dp=ranks)))
        models = self.busy if contestants == 1 else self.ranks * contestants
        held = need.weights + need.gradients + need.optimizer + need.buckets
        rest = need.total - need.process - held
        return self.ranks * need.process + models * held + self.busy * rest

    def fits(self, config: GPTConfig, *, contestants: int = 1) -> bool:
        """Whether `contestants` models per rank leave some memory free."""
        return self.needed(config, contestants=contestants) <= _SHARE * self.available

    def choose(self, name: str) -> str:
        """The preset `name`, or for "auto" the largest that fits. One that does not fit is refused,
        with one that does."""
        names = [each for each, config in PRESETS.items() if self.fits(config)]
        largest = max(names, key=lambda each: PRESETS[each].num_params(), default="")
        name = largest or "tiny" if name == "auto" else name
        needed, usable = self.needed(preset(name)), _SHARE * self.available
        if needed > usable:
            cure = f"{largest!r} fits" if largest else "no size fits: take fewer ranks"
            raise ConfigError(
                f"model {name}: about {needed / 1e9:.1f} GB for {counted(self.busy, 'rank')}, "
                f"{usable / 1e9:.1f} GB can be used here ({(needed - usable) / 1e9:.1f} GB "
                f"short); {cure}"
            )
        return name


def uses_cuda(device: str) -> bool:
    """Whether accelerators will compute; a missing one is refused."""
    if device not in DEVICES:
        raise ConfigError(f"--device must be one of {', '.join(DEVICES)}; got {device!r}")
    has_driver = any(Path(name).exists() for name in ("/proc/driver/nvidia", "/dev/kfd"))
    if device == "cpu" or (device == "auto" and not has_driver):
        return False
    import torch

    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise ConfigError("--device cuda: torch finds no CUDA device here; take cpu or auto")
    return found


def room_for(device: str, leaf_tokens: int, *, ranks: int, busy: int) -> Room:
    """Memory for models: on a CPU all ranks share the host's, on GPUs each has its device's."""
    if not uses_cuda(device):
        free = available_bytes()
        return Room(available=free, leaf_tokens=leaf_tokens, ranks=ranks, busy=busy)
    import torch

    free = torch.cuda.get_device_properties(0).total_memory
    return Room(available=free, leaf_tokens=leaf_tokens, ranks=1, busy=1, kind="cuda")


BUDGET_S = 140.0
"""Limit for a measurement without a chosen model: including the start, under three minutes."""
_SHORTER = ({"num_steps": 5}, {"rounds": 3, "num_warmup": 1}, {"num_steps": 3})
"""Ways to shorten a measurement on a slow machine, tried in order; a value given by flag stays."""
_COMPANY = 1.5
"""Step time with other ranks and their gradients, over that of one rank alone: from 1.0
(`invariant`) to 2 (default malloc) in `benchmarks/sync/mini-512/record.json`."""


def seconds_of(plan: BenchPlan, step_s: float) -> float:
    """Total time if a step takes `step_s`: checks and turns, one after another."""
    settings = plan.settings
    # A check runs twice, the exposed one after one more step; the reference once per set.
    each = 2 * CHECK_STEPS + 1 + settings.rounds * (settings.num_warmup + settings.num_steps)
    each += DECIDING * (1 if settings.side_by_side else settings.rounds)
    return (len(plan.entries) * each + len(plan.sets) * CHECK_STEPS) * step_s


def duration(seconds: float) -> str:
    """For people: `40 s`, `3 min`, `1 h 20 min`."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def trial_step(work: Workload, *, ranks_per_host: int) -> float:
    """Seconds of a step among other ranks: timed here alone (or a smaller leaf), then scaled."""
    from gradsync.commands.plan.probe import probe_profile

    small = probe_work(work)
    measured = probe_profile(small, ranks_per_host=ranks_per_host, budget_s=1.0)
    profile = scaled_profile(measured, small, work)
    alone_s = work.num_leaves * (profile.forward_s + profile.backward_s) + profile.update_s
    return _COMPANY * alone_s


def in_time(plan: BenchPlan, kind: Kind, trial: Callable[[Workload], float]) -> BenchPlan:
    """`plan`, which holds the largest model that fits into memory, with the largest model that
    takes at most `BUDGET_S`, or the smallest, `shortened`. `trial` times a step of a rank, seconds.
    Goes from the smallest up: a larger one is timed only if its operation count allows it."""
    largest = PRESETS[plan.settings.model_size].num_params()
    length = plan.settings.context_length or 1
    found: list[tuple[BenchPlan, float]] = []
    rate = 0.0  # seconds of an operation
    for name, shape in PRESETS.items():
        if shape.num_params() > largest or shape.block_size < length:
            continue
        one = replace(plan, settings=replace(plan.settings, model_size=name))
        work = one.settings.workload(plan.entries[0].batch_size, kind)
        if found and seconds_of(one, rate * leaf_operations(work)) > 2 * BUDGET_S:
            break  # larger models use a machine better, but not by that much
        step_s = trial(work)
        rate = step_s / leaf_operations(work)
        if found and seconds_of(one, step_s) > BUDGET_S:
            break
        found.append((one, step_s))
    return shortened(*found[-1])


def shortened(plan: BenchPlan, step_s: float) -> BenchPlan:
    """`plan` and its duration if a step takes `step_s`; above `BUDGET_S`, with fewer rounds and
    steps than usual."""
    asked, usual = plan.settings, SyncSettings(model_size=plan.settings.model_size)
    for shorter in ({}, *_SHORTER):
        free: dict[str, Any] = {
            n: v for n, v in shorter.items() if getattr(asked, n) == getattr(usual, n)
        }
        plan = replace(plan, settings=replace(plan.settings, **free))
        if seconds_of(plan, step_s) <= BUDGET_S:
            break
    return replace(plan, takes_s=seconds_of(plan, step_s))
