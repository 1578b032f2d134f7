"""The measurement as checked values: a model, sets of processes, contestants, order of turns.

    round 0    none  naive  flat  …                a turn: some steps to warm up, then `num_steps`
    round 1    naive  flat  …  none                the next round begins with the next contestant
    round 2    flat  …  none  naive

A *set* is a number of ranks with one process group and one allocator setting. All sets stay alive;
one works at a time, the others sleep. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from gradsync.commands.bench.contestants import ALONE, Contestant
from gradsync.commands.bench.experiment import check_least
from gradsync.commands.bench.host import bucket_mb, shrunk
from gradsync.commands.models.config import PRESETS, GPTConfig, preset
from gradsync.errors import ConfigError
from gradsync.runtime.machine import available_bytes

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("fp32", "bf16")
CHECKED = "all contestants train as they should; measuring"  # printed between checks and turns
_USUAL_TOKENS = 512
_SHARE = 0.5  # fraction of the free memory for models; steps take the rest
_BYTES = 20  # of a parameter: weight, gradient, AdamW's two moments and bucket, fp32

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
    micro_batches_per_rank: int = 1  # in a step
    dtype: str = "bf16"  # fp32, or bf16 (autocast over fp32 weights)
    threads: int = 1  # intra-op threads of a rank
    device: str = "auto"  # auto, cpu or cuda
    side_by_side: bool = True  # models stay from turn to turn; else each turn builds its own
    host: bool = False  # shrink the model until computing costs nothing, see host.py

    def __post_init__(self) -> None:
        preset(self.model_size)
        check_least(self, num_steps=1, num_warmup=0, rounds=1, micro_batches_per_rank=1, threads=1)
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
        usual = min(_USUAL_TOKENS, self.config.block_size)
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

    def __post_init__(self) -> None:
        count = self.settings.micro_batches_per_rank
        for each in self.sets:
            check_least(each, world_size=1)
        for entry in self.entries:
            check_least(entry, batch_size=1)
            if entry.batch_size % count:
                raise ConfigError(
                    f"--batch-size {entry.batch_size} does not divide into {count} micro-batches"
                )

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Ranks of each set."""
        return tuple(each.world_size for each in self.sets)

    def turns(self) -> list[Entry]:
        """Entries in the order of turns: each round begins with the next contestant. Every other
        round is reversed, so that a contestant does not always follow the same one."""
        order = []
        for first in range(self.settings.rounds):
            places = (first - n if first % 2 else first + n for n in range(len(self.entries)))
            order += [self.entries[place % len(self.entries)] for place in places]
        return order

    def ideal_of(self, entry: Entry) -> Entry:
        """The `none` of the same set with the same batch; it does not communicate."""
        same_set = (each for each in self.entries if each.worker_set == entry.worker_set)
        return next(each for each in same_set if each.contestant.name == ALONE)

    def ranks(self, results: Results, entry: Entry) -> Ranks:
        """Measurements of `entry`, by rank."""
        return results[entry.worker_set]["contestants"][entry.label]


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


def side_by_side(settings: SyncSettings, *, ranks: int, models: int) -> SyncSettings:
    """`settings`, in which models stay from turn to turn if all `ranks` of a host can hold `models`
    models each. On a CPU they share the host's memory; a GPU has one rank."""
    usable = _SHARE * available_bytes()
    if uses_cuda(settings.device):
        import torch

        usable, ranks = _SHARE * torch.cuda.get_device_properties(0).total_memory, 1
    held = ranks * models * _BYTES * settings.config.num_params()
    return replace(settings, side_by_side=held <= usable)
