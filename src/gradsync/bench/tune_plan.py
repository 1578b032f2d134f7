"""What `gradsync tune` tries: stage after stage, each with the winner of the one before.

    strategy      the default, itself once more, and whatever promises as much
    bucket size   of the winner, if buckets of it travel as messages
    first bucket  likewise
    compilation   on request

No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradsync.bench.contestant import Contestant
from gradsync.bench.sync_plan import SyncSettings
from gradsync.bench.tune_decide import fewest_rounds
from gradsync.errors import ConfigError
from gradsync.sync.engine.recipe import Recipe
from gradsync.sync.registry import STRATEGIES
from gradsync.train.config import CompileOrder
from gradsync.train.tuned import Choice
from gradsync.world import World

PROMISES = ("bitwise", "rounding")
STAGES = ("strategy", "bucket size", "first bucket", "compilation")
_BUCKETS_MB = (2.0, 5.0, 10.0, 50.0, 100.0)
_FIRST_MB = (0.25, 4.0, 10.0)
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRequest:
    """What to tune, and how.

    Raises:
        ConfigError: an unknown promise, one rank, too few rounds to tell anything.
    """

    settings: SyncSettings
    """How each contestant is measured."""
    batch_size: int
    """Sequences of a rank and step."""
    world_size: int
    """Ranks."""
    promise: str = "bitwise"
    """The least that a strategy must promise: bitwise, or rounding."""
    keep_memory: bool = True
    """Whether freed memory stays in the process."""
    compile: bool = False
    """Whether to try `torch.compile`."""

    def __post_init__(self) -> None:
        if self.promise not in PROMISES:
            raise ConfigError(
                f"--promise must be one of {', '.join(PROMISES)}; got {self.promise!r} (what is "
                "lossy changes the training, and is not chosen by its speed)"
            )
        if self.world_size < 2:
            raise ConfigError(
                f"--world-size must be at least 2; got {self.world_size}: one rank talks to nobody"
            )
        tried = [strategies(self.promise, on_cpu=True, hosts=hosts) for hosts in (1, 2)]
        most = max(len(_BUCKETS_MB), *(len(choices) - 1 for choices in tried))
        if self.settings.rounds < fewest_rounds(most):
            raise ConfigError(
                f"--rounds must be at least {fewest_rounds(most)} to tell {most} candidates from "
                f"noise; got {self.settings.rounds}"
            )

    def to_json(self) -> dict[str, Any]:
        """For the ranks."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TuneRequest:
        """What `to_json` made."""
        named = dict(data)
        return cls(settings=SyncSettings(**named.pop("settings")), **named)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One question. The first candidate is the one that stays unless another is faster."""

    name: str
    candidates: tuple[Choice, ...] = ()
    skipped: str = ""
    """Why there is nothing to measure; "" otherwise."""

    def contestants(self, *, keep_memory: bool) -> list[Contestant]:
        """The first candidate twice, which shows what noise looks like, and the others."""
        twice = [self.candidates[0], *self.candidates]
        made = [contestant_of(choice, keep_memory=keep_memory) for choice in twice]
        return [made[0], replace(made[1], label=again(made[1].label)), *made[2:]]


def again(label: str) -> str:
    """What the second copy of the first candidate is called."""
    return f"{label} (again)"


def contestant_of(choice: Choice, *, keep_memory: bool) -> Contestant:
    """A choice that takes part in a measurement."""
    return Contestant(
        label=choice.text,
        name=choice.sync,
        options=choice.options,
        keep_memory=keep_memory,
        compile=choice.compile,
    )


def strategies(promise: str, *, on_cpu: bool, hosts: int) -> list[Choice]:
    """The default, and what promises as much as was asked for.

    Args:
        promise: bitwise or rounding.
        on_cpu: where ranks of a host may share memory, or not.
        hosts: above 1 there are two levels to add in; 0 where hosts hold unequal numbers of ranks.
    """
    names = ["invariant", "zero1"]
    names += ["bucketed", "flat", "zero2", "ddp"] if promise == "rounding" else []
    found = [Choice(sync=name) for name in names]
    if on_cpu and hosts == 1:
        by_messages = [name for name in names if name in ("invariant", "bucketed")]
        found += [Choice(sync=name, options={"collective": "backend"}) for name in by_messages]
    if hosts > 1:
        found.append(Choice(sync="invariant", options={"reduction": "hierarchical"}))
        found += [Choice(sync="hierarchical")] if promise == "rounding" else []
    return found


def strategy_stage(request: TuneRequest, world: World) -> Stage:
    """The first question."""
    equal = world.local_world_size * world.num_nodes == world.world_size
    return Stage(
        name=STAGES[0],
        candidates=tuple(
            strategies(
                request.promise,
                on_cpu=world.device == "cpu",
                hosts=world.num_nodes if equal or world.num_nodes == 1 else 0,
            )
        ),
    )


def bucket_stage(winner: Choice, *, has_messages: bool, gradient_bytes: int) -> Stage:
    """Sizes of buckets that cut the model's gradients otherwise than the winner's does."""
    name = STAGES[1]
    recipe = _recipe_of(winner)
    if why := _no_buckets(winner, has_messages=has_messages):
        return Stage(name=name, skipped=why)
    usual = 25.0 if recipe is None else recipe.bucket_mb
    whole = gradient_bytes / _MIB
    sizes = [size for size in _BUCKETS_MB if size != usual and min(size, usual) < whole]
    if not sizes:
        return Stage(name=name, skipped=f"all gradients are {whole:.1f} MiB")
    return _with_each(name, winner, "bucket_mb", sizes)


def first_bucket_stage(winner: Choice, *, has_messages: bool, gradient_bytes: int) -> Stage:
    """Sizes of the first bucket."""
    name = STAGES[2]
    recipe = _recipe_of(winner)
    if why := _no_buckets(winner, has_messages=has_messages):
        return Stage(name=name, skipped=why)
    if recipe is None:
        return Stage(name=name, skipped=f"{winner.sync} chooses it by itself")
    most = min(recipe.bucket_mb, gradient_bytes / _MIB)
    sizes = [size for size in _FIRST_MB if size < most]
    if not sizes:
        return Stage(name=name, skipped=f"there is nothing beyond {most:.1f} MiB to divide")
    return _with_each(name, winner, "first_bucket_mb", sizes)


def compile_stage(winner: Choice, *, wanted: bool) -> Stage:
    """Whether to compile, and in which order with DDP."""
    if not wanted:
        return Stage(name=STAGES[3], skipped="not asked for (--compile)")
    orders: list[CompileOrder] = ["none", "model"]
    if winner.sync == "ddp":
        orders.append("ddp")
    return Stage(
        name=STAGES[3], candidates=tuple(replace(winner, compile=order) for order in orders)
    )


def _with_each(name: str, winner: Choice, option: str, values: list[float]) -> Stage:
    others = [replace(winner, options={**winner.options, option: value}) for value in values]
    return Stage(name=name, candidates=(winner, *others))


def _recipe_of(choice: Choice) -> Recipe | None:
    recipe = STRATEGIES[choice.sync].recipe
    return None if recipe is None else replace(recipe, **choice.options)


def _no_buckets(winner: Choice, *, has_messages: bool) -> str:
    """Why there are no buckets to cut otherwise; "" when there are."""
    recipe = _recipe_of(winner)
    if recipe is not None and recipe.grouping != "buckets":
        return f"{winner.sync} has no buckets"
    if recipe is None and "bucket_mb" not in STRATEGIES[winner.sync].options:
        return f"{winner.sync} has no buckets"
    if not has_messages:
        return "the ranks share memory, and no bucket travels"
    return ""
