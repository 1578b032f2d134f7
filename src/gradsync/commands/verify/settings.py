"""The cells of the matrix, the settings they share, and the promise of each strategy.

    bitwise    the bits of the strategy's one-rank run, at every world size
    rounding   one rank's result, up to the order in which numbers are added
    lossy      something else by design; replicas equal, and the loss falls

`bitwise` includes `rounding`: equal bits that are wrong everywhere would not help. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from gradsync.commands.train.config import with_options
from gradsync.core.files import check_name
from gradsync.errors import ConfigError
from gradsync.sync.options import Options, Recipe
from gradsync.sync.registry import Promise as Kind
from gradsync.sync.registry import Strategy, check_options, find_strategy

MODELS = ("mlp", "conv", "gpt")
"""The problems included in verify, smallest first."""
DTYPES = ("fp64", "fp32", "bf16")
"""fp64 and fp32: all tensors have this dtype. bf16: autocast over fp32 weights."""
SEED = 0
CLIP_NORM = 0.5  # largest L2 norm of the mean gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifySettings:
    """Settings that all cells share."""

    num_steps: int = 4  # optimizer steps
    num_samples: int | None = None
    """None uses enough to make the last step short: two micro-batches, the second of one sample, or
    of two for the user's model, which may contain BatchNorm."""
    num_micro_batches: int = 5  # in a global batch; no multiple of 2, 3 or 4 ranks
    micro_batch_size: int = 3
    target: str = ""  # `pkg.module:factory` that makes the user's problem, the model "target"
    whole_steps: bool = False  # no step is short: all ranks have as many micro-batches

    @property
    def global_batch_size(self) -> int:
        """Samples in a step."""
        return self.num_micro_batches * self.micro_batch_size

    @property
    def dataset_size(self) -> int:
        """Samples that are used."""
        if self.num_samples is not None:
            return self.num_samples
        last = min(2, self.micro_batch_size) if self.target else 1
        return (self.num_steps - 1) * self.global_batch_size + self.micro_batch_size + last

    @property
    def num_epochs(self) -> int | None:
        """Passes over the data, as many as `num_steps` steps need; None never ends."""
        if self.whole_steps:
            return None
        return -(-((self.num_steps - 1) * self.global_batch_size + 1) // self.dataset_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """The numbers that one strategy must meet."""

    kind: Kind = "rounding"  # the kind in its registry entry
    same_bits: bool = False  # True if its run on one rank has the same bits, right or wrong
    wire: str = ""  # bf16 or fp16 if gradients travel in it; its rounding is allowed per sum
    bounded: bool = True  # False if no bound on the gradient follows from arithmetic (low rank)
    local: bool = False  # True if each rank keeps its gradients and weights are averaged instead
    zeros_when_unused: bool = False
    """Torch's DDP gives a parameter that no rank used zeros: weight decay still moves it."""


_DETAILS: dict[str, dict[str, Any]] = {
    "ddp": {"zeros_when_unused": True},
    "powersgd": {"bounded": False, "zeros_when_unused": True},
    "local_sgd": {"local": True},
    "diloco": {"local": True},
}


def chosen_strategy(word: str) -> tuple[Strategy, Options]:
    """The strategy in `name:key=value,…`, with its options checked.

    Raises:
        ConfigError: unknown name, option or value.
    """
    name, options = with_options(word)
    strategy = find_strategy(name)
    return strategy, check_options(strategy, options)


def promise_of(strategy: str) -> Promise:
    """The promise of `strategy`, with or without options; ConfigError if none exists."""
    entry, options = chosen_strategy(strategy)
    recipe = options if isinstance(options, Recipe) else Recipe()
    wire = "" if recipe.wire == "same" else recipe.wire
    return Promise(
        kind="lossy" if wire else entry.promise,
        same_bits=entry.same_on_any_ranks,
        wire=wire,
        **_DETAILS.get(entry.name, {}),
    )


@dataclass(kw_only=True, slots=True, unsafe_hash=True)
class Cell:
    """One run of the matrix: from the start, or from the checkpoint of another cell."""

    strategy: str  # its name, with any options: `bucketed:overlap=false`
    world_size: int
    model: str
    dtype: str
    loaded_from: str = ""  # name of the cell whose checkpoint it continues; "": from the start

    @property
    def name(self) -> str:
        """The cell in a line of text: `invariant W=3 gpt fp32`."""
        loaded = f" from {self.loaded_from}" if self.loaded_from else ""
        return f"{self.strategy} W={self.world_size} {self.model} {self.dtype}{loaded}"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyPlan:
    """The matrix in the order of work."""

    settings: VerifySettings
    launches: list[list[Cell]]
    """Cells of each launch: world sizes in ascending order, each also with runs that continue a
    checkpoint of the previous size; at last, the smallest size continues from the largest."""


def make_plan(
    *,
    strategies: Sequence[str],
    world_sizes: Iterable[int],
    models: Sequence[str],
    dtypes: Sequence[str],
    num_steps: int | None = None,
    num_samples: int | None = None,
    target: str = "",
) -> VerifyPlan:
    """The full matrix: every strategy x world size x model x dtype, checked.

    There are more micro-batches than the largest world size, the same for all cells: they must see
    the same global batches. A number of samples to train determines the steps, or, with a number of
    steps, the size of a micro-batch, rounded up (the last step then starts a second pass).
    """
    sizes, strategies = sorted(set(world_sizes)), list(dict.fromkeys(strategies))
    if not (strategies and sizes and models and dtypes):
        raise ConfigError("verify: name at least one strategy, world size, model and dtype")
    least_one = {"world-sizes": sizes[0], "num-steps": num_steps, "num-samples": num_samples}
    for name, value in least_one.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    for model in models:
        check_name("model", model, ("target",) if target else MODELS)
    for dtype in dtypes:
        check_name("dtype", dtype, DTYPES)
    settings = VerifySettings(num_samples=num_samples, target=target)
    settings = replace(settings, num_micro_batches=max(settings.num_micro_batches, sizes[-1] + 1))
    if num_steps is not None:
        settings = replace(settings, num_steps=num_steps)
    if num_samples is not None and num_steps is not None:
        size = -(-num_samples // (num_steps * settings.num_micro_batches))
        settings = replace(settings, micro_batch_size=size)
    elif num_samples is not None:
        settings = replace(settings, num_steps=-(-num_samples // settings.global_batch_size))
    launches = [
        [
            Cell(strategy=strategy, world_size=size, model=model, dtype=dtype)
            for model in dict.fromkeys(models)
            for dtype in dict.fromkeys(dtypes)
            for strategy in strategies
        ]
        for size in sizes
    ]
    if settings.num_steps > 1:  # checkpoints are from the middle of a run
        first = launches[0][0]
        if len(sizes) > 1:
            launches.append([])  # the smallest size again
        pairs = pairwise([*sizes, sizes[0]])
        for launch, pair in zip(launches[1:] or launches, pairs, strict=True):
            launch.extend(_handovers(first, strategies, *pair))
    return VerifyPlan(settings=settings, launches=launches)


def _handovers(first: Cell, strategies: Sequence[str], before: int, after: int) -> list[Cell]:
    """Every strategy continues one of its runs, and one of its neighbour in the list; only with the
    first model and dtype, because the checkpoint's format is the same for all."""
    return [
        replace(
            first,
            strategy=strategy,
            world_size=after,
            loaded_from=replace(first, strategy=source, world_size=before).name,
        )
        for strategy, neighbour in zip(strategies, [*strategies[1:], strategies[0]], strict=True)
        for source in dict.fromkeys((strategy, neighbour))
    ]
