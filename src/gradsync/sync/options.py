"""Options of the strategies: declares them, with their defaults and checks.

The registry, `gs.replicate`, the command line and configuration files all use these declarations.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from gradsync.errors import ConfigError

Grouping = Literal["parameter", "flat", "buckets"]
Order = Literal["any", "invariant"]
ReductionName = Literal["backend", "ring", "hierarchical"]
Wire = Literal["same", "bf16", "fp16"]
Shard = Literal["none", "optimizer", "gradients"]
Collective = Literal["auto", "shared_memory", "backend"]
Dtype = Literal["bf16", "fp16", "fp32"]
Kind = Literal["size", "number", "count", "flag"] | tuple[str, ...]
"""Values that an option accepts: a positive number, any number, a whole number from 1 on, true or
false, or one of these words."""


def option(default: Any, text: str) -> Any:
    """A field with its text for `--help`."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of a strategy that has none, and the base of the others.

    Raises:
        ConfigError: an unknown value or combination; names the valid ones.
    """

    POSITIVE: ClassVar[tuple[str, ...]] = ()
    """Options that must be above 0."""

    def __post_init__(self) -> None:
        """Check each value."""
        hints = get_type_hints(type(self))
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or each.default is not None:
                kind = _kind_of(hints[each.name], positive=each.name in self.POSITIVE)
                check_value(each.name, value, kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Options):
    """Grouping x order x reduction x wire x sharding: gradsync's own strategies as one value."""

    POSITIVE: ClassVar[tuple[str, ...]] = ("bucket_mb", "first_bucket_mb")

    grouping: Grouping = option(
        "buckets", "One message per parameter, one for everything, or buckets."
    )
    bucket_mb: float | None = option(
        None,
        "Size at which a bucket of gradients is closed, MiB; default: 25, and 100 for sums along "
        "the tree on GPUs.",
    )
    first_bucket_mb: float = option(
        1.0,
        "The same for the first bucket, so that communication begins early (the next ones double "
        "up to bucket_mb, and halve before the end), and the last one, which nothing hides, MiB.",
    )
    overlap: bool = option(True, "Communicate while backward still runs; False waits for its end.")
    overlap_publish: Literal[True, False, "auto"] = option(
        False,
        "Between hosts let the next forward run while sums (zero1, zero2: weights) are still on "
        "their way; a weight that is used waits for its own. auto, as `gradsync train` has it: for "
        "sums on CPUs only where ranks would wait for them. See docs/guide/between-hosts.md.",
    )
    order: Order = option(
        "any",
        "Order of sums: any, or the fixed tree over micro-batches, so that bits do not depend on "
        "ranks.",
    )
    reduction: ReductionName = option(
        "backend", "The adder: the process group's all_reduce, or one of gradsync's algorithms."
    )
    wire: Wire = option("same", "Dtype of gradients on the wire: their own, or 16 bits.")
    shard: Shard = option(
        "none", "Memory divided among the ranks: none, the optimizer's, or the gradients' too."
    )
    collective: Collective = option(
        "auto",
        "Carrier of sums, under reduction=backend and inside the hosts of hierarchical: the "
        "process group, or memory that the ranks of one host share; auto takes the latter on "
        "CPUs where it is available.",
    )
    update: Literal["auto", "whole"] = option(
        "auto",
        "Through shared memory: auto lets each rank update its share of the weights, for all "
        "ranks of the host, where the optimizer is elementwise; whole leaves the whole "
        "gradient in .grad on every rank, for hooks that read it, and each rank updates "
        "everything.",
    )
    weights: Literal["replicas", "shared"] = option(
        "replicas",
        "Through shared memory: one copy per rank, or one for all ranks of the host, which "
        "then only sync.step may change.",
    )

    def __post_init__(self) -> None:
        """Check each value, then their combination."""
        Options.__post_init__(self)  # not `super()`: with slots the class is made anew
        if self.order == "invariant":
            self._check_invariant()
        elif self.wire != "same" and self.reduction != "backend":
            raise ConfigError(
                f"wire={self.wire!r} goes with reduction='backend'; got {self.reduction!r}"
            )
        legal = ("any", "backend", "same")
        if self.shard == "gradients" and (self.order, self.reduction, self.wire) != legal:
            raise ConfigError(
                "shard='gradients' goes with order='any', reduction='backend' and wire='same' "
                "(the clipping norm is summed shard by shard); got "
                f"order={self.order!r}, reduction={self.reduction!r}, wire={self.wire!r}; "
                "shard='optimizer' goes with all of them"
            )

    def _check_invariant(self) -> None:
        if self.reduction not in ("backend", "hierarchical"):
            raise ConfigError(
                f"order='invariant' adds along its own tree, which reduction={self.reduction!r} "
                "cannot follow (a ring's order depends on the number of ranks); use "
                "reduction='backend' or 'hierarchical'"
            )
        if self.wire == "fp16":
            raise ConfigError(
                "order='invariant' rounds each node of its tree, to bf16: fp16 would need a scale, "
                "which depends on how micro-batches are shared out; use wire='bf16' or 'same'"
            )

    def bucket_size_mb(self, device: str) -> float:
        """`bucket_mb`, or its default on a "cpu" or "cuda". On a GPU each bucket costs the tree's
        exchange some launches, however small it is."""
        on_gpus = device == "cuda" and self.order == "invariant"
        return self.bucket_mb or (100.0 if on_gpus else 25.0)

    @property
    def node_dtype(self) -> Dtype | None:
        """Dtype to which every node of the tree is rounded; None keeps the gradients' dtype."""
        return "bf16" if (self.order, self.wire) == ("invariant", "bf16") else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpOptions(Options):
    """Options of torch's DistributedDataParallel."""

    POSITIVE: ClassVar[tuple[str, ...]] = ("bucket_mb",)

    bucket_mb: float = option(25.0, "Size at which a bucket of gradients is closed, MiB.")
    find_unused_parameters: bool = option(
        False, "ddp: look for parameters that get no gradient in a step."
    )
    compile_wrapper: bool = option(
        False, "ddp: torch.compile around DDP, as torch's documentation recommends."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSgdOptions(DdpOptions):
    """Options of torch's PowerSGD hook, in addition to DDP's."""

    matrix_approximation_rank: int = option(
        1, "powersgd: rank of the approximation; torch's documentation suggests 1 to 4."
    )
    start_powerSGD_iter: int = option(  # noqa: N815  torch's own name
        10, "powersgd: first step that compresses; at least 2."
    )
    min_compression_rate: float = option(
        2.0, "powersgd: a matrix is compressed if that makes it smaller by this factor."
    )
    use_error_feedback: bool = option(
        True, "powersgd: without it the result is biased; for comparison only."
    )
    warm_start: bool = option(
        True, "powersgd: begin with the last step's Q (one power iteration a step, then enough)."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpOptions(Options):
    """Options of torch's FSDP2."""

    compute_dtype: Dtype | None = option(
        None, "fsdp: dtype of gathered parameters and of compute; masters stay as they are."
    )
    reduce_dtype: Dtype | None = option(
        None, "fsdp: dtype in which gradients are summed; None is fp32 where compute_dtype is set."
    )
    blocks: bool = option(
        True, "fsdp: gather each child of an nn.ModuleList separately; False: everything at once."
    )


_INNER_STEPS = (
    "local_sgd, diloco: optimizer steps between two averages. Evaluations and checkpoints need one "
    "model: they end the round early, unless they fall on multiples of this."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSgdOptions(Options):
    """Options of `local_sgd`."""

    inner_steps: int = option(8, _INNER_STEPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class DilocoOptions(Options):
    """Options of `diloco`."""

    POSITIVE: ClassVar[tuple[str, ...]] = ("outer_lr",)

    inner_steps: int = option(100, _INNER_STEPS)
    outer_lr: float = option(
        0.7,
        "diloco: learning rate of the outer optimizer; 1.0 with outer_momentum=0 averages weights.",
    )
    outer_momentum: float = option(0.9, "diloco: its Nesterov momentum, 0 .. 1.")


def every_option() -> dict[str, tuple[Any, str]]:
    """Type and text of each option of any strategy, by name; a name has one meaning everywhere."""
    found: dict[str, tuple[Any, str]] = {}
    for kind in (Recipe, PowerSgdOptions, FsdpOptions, LocalSgdOptions, DilocoOptions):
        hints = get_type_hints(kind)
        for each in fields(kind):
            found.setdefault(each.name, (hints[each.name], each.metadata["help"]))
    return found


def _kind_of(hint: Any, *, positive: bool) -> Kind:
    """The values that an option of this type accepts."""
    if NoneType in get_args(hint):  # `None` stands for a default that depends on something
        hint = next(each for each in get_args(hint) if each is not NoneType)
    plain: dict[Any, Kind] = {bool: "flag", int: "count", float: "size" if positive else "number"}
    return plain.get(hint) or get_args(hint)  # of a Literal


def check_value(name: str, value: Any, kind: Kind) -> None:
    """Raise ConfigError if option `name` does not accept `value`; lists the accepted values."""
    if isinstance(kind, tuple):
        fits = isinstance(value, str | bool) and value in kind  # because 1 == True
        wanted = f"one of {', '.join(map(str, kind))}"
    elif kind == "flag":
        fits, wanted = isinstance(value, bool), "true or false"
    elif kind == "count":
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        wanted = "a whole number, at least 1"
    else:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number and abs(value) <= sys.float_info.max and (kind == "number" or value > 0)
        wanted = "a finite number"
        if kind == "size":
            wanted = "a positive, finite number" if not is_number or value > 0 else "positive"
    if not fits:
        raise ConfigError(f"{name} must be {wanted}; got {value!r}")
