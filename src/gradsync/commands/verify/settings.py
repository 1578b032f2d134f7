"""The cells of the matrix, the settings they share, and the promise of each strategy.

    bitwise    the bits of the strategy's one-rank run, at every world size
    rounding   one rank's result, up to the order in which numbers are added
    lossy      something else by design, stated in `says`; replicas equal, and the loss falls

`bitwise` includes `rounding`: equal bits that are wrong everywhere would not help. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from gradsync.core.files import check_name
from gradsync.errors import ConfigError
from gradsync.sync.options import Recipe
from gradsync.sync.registry import Promise as Kind
from gradsync.sync.registry import chosen_strategy

MODELS = ("mlp", "conv", "gpt")
"""The problems included in verify, smallest first."""
DTYPES = ("fp64", "fp32", "bf16")
"""fp64 and fp32: all tensors have this dtype. bf16: autocast over fp32 weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifySettings:
    """Settings that all cells share; ConfigError for a number below 1 or an unknown name."""

    num_steps: int = 4  # optimizer steps
    num_samples: int | None = None
    """None uses enough to make the last step short: two leaves, the second of one sample, or of two
    for the user's model."""
    num_leaves: int = 5  # in a global batch; no multiple of 2, 3 or 4 ranks: shares are uneven
    leaf_size: int = 3
    optimizer: str = "adamw"  # adamw or sgd (with momentum)
    clip_norm: float | None = 0.5  # largest L2 norm of the mean gradient; None does not clip
    batch_norm: str = "local"  # sync, local or freeze, for models that have BatchNorm
    seed: int = 0
    target: str = ""  # `pkg.module:factory` that makes the user's problem, the model "target"
    whole_steps: bool = False  # no step is short: all ranks have as many leaves
    timeout_s: float = 60.0  # longest duration of a collective, seconds

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_leaves", "leaf_size", "num_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    @property
    def global_batch_size(self) -> int:
        """Samples in a step."""
        return self.num_leaves * self.leaf_size

    @property
    def dataset_size(self) -> int:
        """Samples that are used."""
        if self.num_samples is not None:
            return self.num_samples
        # BatchNorm cannot train on a single sample, and the user's model may contain it.
        last = min(2, self.leaf_size) if self.target else 1
        return (self.num_steps - 1) * self.global_batch_size + self.leaf_size + last

    @property
    def num_epochs(self) -> int | None:
        """Passes over the data, as many as `num_steps` steps need; None never ends."""
        if self.whole_steps:
            return None
        return -(-((self.num_steps - 1) * self.global_batch_size + 1) // self.dataset_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A change to the plain run, to test whether it removes the difference."""

    dropout: bool = True  # False draws nothing at random: evaluation mode, except BatchNorm
    frozen_batch_norm: bool = False  # True uses the stored statistics instead of the batch's
    one_leaf_per_rank: bool = False  # True leaves no gradient accumulation
    dtype: str | None = None  # a dtype other than the cell's


PLAIN = Variant()


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
    says: str = ""  # A lossy strategy's promise in a few words


_DETAILS: dict[str, dict[str, Any]] = {
    "ddp": {"zeros_when_unused": True},
    "powersgd": {
        "bounded": False,
        "zeros_when_unused": True,
        "says": "gradients of low rank; replicas equal, loss falls",
    },
    "local_sgd": {"local": True, "says": "ranks step alone; weights averaged when they meet"},
    "diloco": {"local": True, "says": "ranks step alone; one outer step when they meet"},
}


def promise_of(strategy: str) -> Promise:
    """The promise of `strategy`, with or without options; ConfigError if none exists."""
    entry, options = chosen_strategy(strategy)
    recipe = options if isinstance(options, Recipe) else Recipe()
    wire = "" if recipe.wire == "same" else recipe.wire
    same_bits = entry.same_on_any_ranks
    rounded = f"nodes of the tree in {wire}" if same_bits else f"{wire} on the wire"
    details = _DETAILS.get(entry.name, {"says": rounded if wire else ""})
    kind = "lossy" if wire else entry.promise
    return Promise(kind=kind, same_bits=same_bits, wire=wire, **details)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of the matrix: from the start, or from the checkpoint of another cell."""

    strategy: str  # its name, with any options: `bucketed:overlap=false`
    world_size: int
    model: str
    dtype: str
    source: Cell | None = None  # the cell whose checkpoint this run continues

    @property
    def name(self) -> str:
        """The cell in a line of text: `invariant W=3 gpt fp32`."""
        loaded = f" from {self.source.name}" if self.source else ""
        return f"{self.strategy} W={self.world_size} {self.model} {self.dtype}{loaded}"

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cell:
        """The inverse of `dataclasses.asdict`."""
        source: Any = data["source"] and cls.from_json(data["source"])
        return cls(**{**data, "source": source})


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyPlan:
    """The matrix in the order of work."""

    settings: VerifySettings
    launches: list[list[Cell]]
    """Cells of each launch: world sizes in ascending order, each also with runs that continue a
    checkpoint of the previous size; at last, the smallest size continues from the largest."""


def make_plan(
    *,
    strategies: Iterable[str],
    world_sizes: Iterable[int],
    models: Iterable[str],
    dtypes: Iterable[str],
    cross_load: bool = True,
    num_steps: int | None = None,
    num_samples: int | None = None,
    **others: Any,
) -> VerifyPlan:
    """The full matrix: every strategy x world size x model x dtype, checked.

    There are more leaves than the largest world size, the same for all cells: they must see the
    same global batches.

    Args:
        strategies, world_sizes, models, dtypes: in any order; duplicates are allowed.
        cross_load: also continue checkpoints at another world size and with another strategy.
        num_samples: train this many: steps follow from the size of a leaf, or the size from the
            steps, rounded up (the last step then starts a second pass over the data).
        num_steps, others: fields of `VerifySettings`.
    """
    asked = {"num_steps": num_steps, "num_samples": num_samples}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    settings = VerifySettings(**given, **others)
    sizes = sorted(set(world_sizes))
    lists: dict[str, list[Any]] = {
        "strategies": list(dict.fromkeys(strategies)),
        "world sizes": sizes,
        "models": list(dict.fromkeys(models)),
        "dtypes": list(dict.fromkeys(dtypes)),
    }
    for name, values in lists.items():
        if not values:
            raise ConfigError(f"verify: no {name} given")
    if sizes[0] < 1:
        raise ConfigError(f"verify: a world size must be at least 1, got {sizes[0]}")
    for model in lists["models"]:
        check_name("model", model, ("target",) if settings.target else MODELS)
    for dtype in lists["dtypes"]:
        check_name("dtype", dtype, DTYPES)
    settings = replace(settings, num_leaves=max(settings.num_leaves, sizes[-1] + 1))
    if num_samples is not None:
        if num_steps is not None:
            leaf_size = -(-num_samples // (num_steps * settings.num_leaves))
            settings = replace(settings, leaf_size=leaf_size)
        else:
            steps = -(-num_samples // settings.global_batch_size)
            settings = replace(settings, num_steps=steps)
    cells = [
        Cell(strategy=strategy, world_size=world_size, model=model, dtype=dtype)
        for world_size in sizes
        for model in lists["models"]
        for dtype in lists["dtypes"]
        for strategy in lists["strategies"]
    ]
    launches = [[cell for cell in cells if cell.world_size == size] for size in sizes]
    if cross_load and settings.num_steps > 1:  # checkpoints are from the middle of a run
        handed = [
            _handovers(cells[0], lists["strategies"], *p) for p in pairwise([*sizes, sizes[0]])
        ]
        if len(sizes) == 1:
            launches[0] += handed[0]
        else:
            both = (own + more for own, more in zip(launches[1:], handed[:-1], strict=True))
            launches = [launches[0], *both, handed[-1]]
    return VerifyPlan(settings=settings, launches=launches)


def _handovers(first: Cell, strategies: Sequence[str], before: int, after: int) -> list[Cell]:
    """Every strategy continues one of its runs, and one of its neighbour in the list; only with the
    first model and dtype, because the checkpoint's format is the same for all."""
    return [
        replace(
            first,
            strategy=strategy,
            world_size=after,
            source=replace(first, strategy=source, world_size=before),
        )
        for strategy, neighbour in zip(strategies, [*strategies[1:], strategies[0]], strict=True)
        for source in dict.fromkeys((strategy, neighbour))
    ]
