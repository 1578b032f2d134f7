"""The messages of each strategy in a step, the cost of a collective by formula, and lines through
measured times; no torch.

The formulas count only the latency and bandwidth of each message: n ranks, S bytes of the whole
tensor, a the latency of a message (s), b its seconds per byte (Hockney 1994, "The communication
challenge for MPP"). They leave out additions: on a GPU these run at the memory's rate, far above
any link; on a CPU, a measured line defines the link (`machine.cpu_link`).

    reduce_scatter, all_gather   ring        (n-1) a + (n-1)/n S b
    all_reduce                   ring        2 (n-1) a + 2 (n-1)/n S b
                                 halving     2 lg n a + 2 (n-1)/n S b
                                 doubling    lg n (a + S b)
                                 hierarchical  reduce_scatter inside a host, all_reduce of a rank's
                                             S/L between hosts, all_gather inside

Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in MPICH"
(ring, recursive doubling); Rabenseifner 2004, "Optimization of collective reduction operations"
(recursive halving, then doubling). If n is no power of two, the ranks beyond it first send their
whole tensor to a partner and get the sum back: 2 (a + S b) more.

A measured line is `seconds = alpha + beta * bytes`. Times span five decades, so errors are
relative, and half the time is as wrong as twice the time. With p the predicted and t the measured
time, an error is e = (p - t) / sqrt(p t); for small ones that is p / t - 1. The line minimises
weighted squares; each iteration derives the weights from the last line's errors until they
converge: Huber's (1964, "Robust estimation of a location parameter"). A few sizes that fit no line
(the end of a cache, other load) therefore bend it little.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from gradsync.commands.plan.description import Kind, Link
from gradsync.core.files import cache_entry, read_entry, write_entry
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.sync.options import Grouping, Recipe
from gradsync.sync.registry import check_options, find_strategy

_ITERATIONS = 200
_SMALL_ERROR = 0.1  # Errors count squared up to here, linearly beyond


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The line through one algorithm's times."""

    operation: str  # Such as all_reduce
    algorithm: str  # Such as ring
    alpha_s: float  # Seconds; at least 0
    beta_s_per_byte: float
    """Seconds per byte of the whole tensor (S in the formulas above); at least 0."""
    residual: float
    """Median of |predicted / measured - 1|: 0.1 means that half of the sizes lie within 10 %."""
    worst: float  # Largest factor between predicted and measured, either way; at least 1
    num_sizes: int  # Number of fitted sizes

    def to_json(self) -> dict[str, Any]:
        """As a dictionary of its fields."""
        return asdict(self)


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Alpha (seconds) and beta (seconds per byte) of the line through times, one per size.
    ValueError for fewer than two different sizes, or a time that is not above 0."""
    if len(set(sizes)) < 2 or min(times) <= 0:
        raise ValueError(f"no line through sizes {list(sizes)} and times {list(times)}")
    import numpy as np  # planning itself needs no numpy

    # Rows are divided by the time, so that the right side is 1.
    rows = np.array([(1, size) for size in sizes]) / np.array(times)[:, None]
    line, ratios = np.zeros(2), np.ones(len(rows))  # predicted / measured
    for _ in range(_ITERATIONS):
        # Weights that make (ratio - 1)**2 count as e**2, and a large one as |e|.
        errors = abs(ratios - 1) / ratios**0.5
        weights = _SMALL_ERROR / np.maximum(errors, _SMALL_ERROR) / ratios
        products, right = (rows.T * weights) @ rows, rows.T @ weights
        line = np.linalg.solve(products, right)
        if line.min() < 0:  # the best allowed line lies on that border
            line = np.where(line < 0, 0.0, right / products.diagonal())
        # The mean of old and new: without it the iteration can oscillate between two lines.
        ratios = (ratios + rows @ line) / 2
    return float(line[0]), float(line[1])


def quality(
    alpha_s: float, beta_s_per_byte: float, sizes: Sequence[float], times: Sequence[float]
) -> tuple[float, float]:
    """`Fit.residual` and `Fit.worst` of a line."""
    found = [
        (alpha_s + beta_s_per_byte * size) / time for size, time in zip(sizes, times, strict=True)
    ]
    residual = median(abs(ratio - 1) for ratio in found)
    return residual, max(max(ratio, 1 / ratio) for ratio in found)


_KEY = (
    *("cpu", "cores", "accelerator", "backend", "world_size", "threads_per_rank", "torch"),
    *("num_nodes", "dtype"),
)
"""The parts of the environment and of the benchmark's settings that affect a cost."""


def fits_path(environment: Mapping[str, Any]) -> Path:
    """File for this machine's lines; `environment` includes `num_nodes` and `dtype`."""
    release = environment["torch"].partition("+")[0]  # metadata of PyPI's wheels omits the build
    key = json.dumps({name: environment[name] for name in _KEY} | {"torch": release})
    return cache_entry(environ.cache_dir() / "alpha-beta", key)


def save_fits(environment: Mapping[str, Any], fits: Sequence[Fit]) -> Path:
    """Save `fits`; keep the stored lines of other operations and algorithms. RunError if the cache
    cannot be written."""
    known = {(fit.operation, fit.algorithm): fit for fit in [*load_fits(environment), *fits]}
    document = {
        "environment": {name: environment[name] for name in ("date", *_KEY)},
        "fits": [fit.to_json() for fit in known.values()],
    }
    return write_entry(fits_path(environment), document)


def load_fits(environment: Mapping[str, Any]) -> list[Fit]:
    """The lines that `save_fits` stored for this environment; empty if there are none."""
    found = read_entry(fits_path(environment), lambda value: [Fit(**fit) for fit in value["fits"]])
    return found or []


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlace:
    """Hosts of a group's `ranks`: `per_host` on each host except the last."""

    ranks: int
    per_host: int
    link: Link  # Between ranks of a host
    network: Link | None = None  # Between hosts
    groups_per_host: int = 1
    """Groups like this one that use a host's single network port at the same time."""

    @property
    def local(self) -> int:
        """Ranks of the group on one host."""
        return min(self.ranks, self.per_host)

    @property
    def num_hosts(self) -> int:
        """Hosts that the group spans."""
        return -(-self.ranks // self.per_host)

    def seconds(self, num_bytes: float, *, far: bool, senders: int = 1) -> float:
        """One message of each rank, between hosts if `far`. `senders` ranks of a host and group
        send at the same time."""
        if not far or self.network is None:
            return self.link.seconds(num_bytes)
        share = senders * self.groups_per_host if self.network.per_host else 1
        return self.network.alpha_s + num_bytes * share / self.network.bytes_per_s


def ring_pass(place: GroupPlace, num_bytes: float) -> float:
    """reduce_scatter or all_gather around a ring: n - 1 messages of S/n.

    On several hosts the slowest edge sets the pace, and one rank of each host sends to another
    host. The latency is that of one piece around the ring, which crosses hosts H - 1 times (as NCCL
    counts it, `src/graph/tuning.cc`).
    """
    n, hosts = place.ranks, place.num_hosts
    if hosts == 1:
        return (n - 1) * place.link.seconds(num_bytes / n)
    latency = (n - hosts) * place.link.alpha_s + (hosts - 1) * place.seconds(0, far=True)
    near = (n - 1) * num_bytes / n / place.link.bytes_per_s
    crossing = (n - 1) * (place.seconds(num_bytes / n, far=True) - place.seconds(0, far=True))
    return latency + max(crossing, near if place.local > 1 else 0.0)


def ring(place: GroupPlace, num_bytes: float) -> float:
    """all_reduce: reduce_scatter, then all_gather, around a ring."""
    return 2 * ring_pass(place, num_bytes)


def halving(place: GroupPlace, num_bytes: float) -> float:
    """all_reduce by recursive halving, then doubling; near partners exchange the large pieces."""
    return _fold(place, num_bytes) + 2 * sum(
        place.seconds(num_bytes / 2 ** (step + 1), far=far, senders=place.local)
        for step, far in enumerate(_distances_are_far(place))
    )


def doubling(place: GroupPlace, num_bytes: float) -> float:
    """all_reduce by recursive doubling: the whole tensor, lg n times; for short tensors."""
    return _fold(place, num_bytes) + sum(
        place.seconds(num_bytes, far=far, senders=place.local) for far in _distances_are_far(place)
    )


def _distances_are_far(place: GroupPlace) -> list[bool]:
    """For the distances 1, 2, 4, ...: whether partners at that distance are on different hosts."""
    steps = place.ranks.bit_length() - 1
    return [place.num_hosts > 1 and 2**step >= place.local for step in range(steps)]


def _fold(place: GroupPlace, num_bytes: float) -> float:
    """Ranks beyond the power of two send their tensor to a partner and get the sum back."""
    if place.ranks & (place.ranks - 1) == 0:
        return 0.0
    return 2 * place.seconds(num_bytes, far=place.num_hosts > 1, senders=place.local)


def hierarchical(place: GroupPlace, num_bytes: float) -> float:
    """all_reduce in two levels: shards in each host, each shard between hosts, then back."""
    if place.num_hosts == 1:
        return ring(place, num_bytes)
    groups = place.local * place.groups_per_host
    inside = replace(place, ranks=place.local, network=None)
    between = replace(place, ranks=place.num_hosts, per_host=1, groups_per_host=groups)
    return 2 * ring_pass(inside, num_bytes) + ring(between, num_bytes / place.local)


def tree(place: GroupPlace, num_bytes: float) -> float:
    """all_reduce of `invariant` with one node per rank (sync/tree_exchange.py): shards in each
    host, each shard between hosts, and back; across all ranks if hosts are unequal."""
    if place.num_hosts == 1 or place.ranks % place.local:
        return _up_and_down(place, num_bytes)
    groups = place.local * place.groups_per_host
    inside = replace(place, ranks=place.local, network=None)
    between = replace(place, ranks=place.num_hosts, per_host=1, groups_per_host=groups)
    return _up_and_down(inside, num_bytes) + _up_and_down(between, num_bytes / place.local)


def _up_and_down(place: GroupPlace, num_bytes: float) -> float:
    """One stage of `tree`: with a power of two ranks, halves go up the tree. Otherwise every rank
    sends each other rank that one's S/n to sum, and gets each sum back; the n - 1 messages of each
    direction start at once, and are posted one after another."""
    n, crossing = place.ranks, place.ranks - place.local
    if n & (n - 1) == 0 and not n % place.local:
        return halving(place, num_bytes)
    one_way = (place.local - 1) * place.link.seconds(num_bytes / n)
    one_way += crossing * place.seconds(num_bytes / n, far=True, senders=place.local)
    return 2 * one_way


_CHOSEN: dict[str, Callable[[GroupPlace, float], float]] = {
    "ring": ring,
    "halving": halving,
    "doubling": doubling,
    "hierarchical": hierarchical,
}
ALL_REDUCE = {**_CHOSEN, "tree": tree}


def all_reduce_s(place: GroupPlace, num_bytes: float, algorithm: str = "best") -> float:
    """Seconds of one all_reduce by an algorithm of `ALL_REDUCE`; best: the fastest that a library
    selects by size (NCCL between rings and trees, MPI between all)."""
    if place.ranks == 1:
        return 0.0
    if algorithm == "best":
        return min(cost(place, num_bytes) for cost in _CHOSEN.values())
    return ALL_REDUCE[algorithm](place, num_bytes)


def half_s(place: GroupPlace, num_bytes: float) -> float:
    """Seconds of one reduce_scatter or all_gather over `num_bytes` of the whole tensor."""
    if place.ranks == 1:
        return 0.0
    if place.num_hosts == 1 or place.local == 1:
        return ring_pass(place, num_bytes)
    return min(ring_pass(place, num_bytes), hierarchical(place, num_bytes) / 2)


_INNER_STEPS = {"local_sgd": 8, "diloco": 100}
"""Steps between synchronisations if no option sets it; the same as their reducers' defaults."""
_POWERSGD_RANK = 1  # Torch's default


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The messages of one strategy with its options.

    in backward     all_reduce or reduce_scatter of each bucket, during backward or after it
    after update    all_gather of the weights, if each rank updated a share
    per leaf        gathers before each block computes (fsdp)
    periodic        an all_reduce of the weights every `every` steps (local_sgd, diloco)
    """

    grouping: Grouping = "buckets"  # Which gradients travel together
    bucket_mb: float = 25.0  # MiB; likewise `first_bucket_mb`
    first_bucket_mb: float = 1.0
    overlap: bool = True
    """Communicate during backward, if other hardware than the computing cores communicates."""
    late: bool = False
    """Whether one half of an all-reduce overlaps with backward, the other with the next forward
    (sync/late_update.py); on CPUs only, except along the tree. With shards: whether updated weights
    are gathered there."""
    shard: Literal["none", "optimizer", "gradients", "weights"] = "none"
    """How far ranks shard. optimizer: each updates its part. gradients: they are scattered, too.
    weights: they are gathered in each leaf's forward and backward, which reduces gradients, too."""
    algorithm: str = "best"  # A name in `ALL_REDUCE`, or best
    wire: float = 1.0  # Bytes that travel over bytes of gradients
    gathered: float = 1.0  # Likewise, of weights gathered in each leaf
    every: int = 1  # Steps between synchronisations; above 1: no other communication
    through_host: bool = False
    """Whether ranks of one host may use shared memory instead, and divide the update among them."""
    copies: int = 1  # Copies of all gradients in a rank's memory: into buckets, and out of them
    by_library: bool = False
    """Whether to call the process group's collectives (gloo, NCCL) in all cases."""
    low_rank: int | None = None  # PowerSGD's rank; matrices travel as their factors


def traffic_of(
    strategy: str, options: Mapping[str, Any] | None = None, device: Kind = "cpu"
) -> Traffic:
    """The messages of a strategy with the options of `gradsync train` (ConfigError if either is
    unknown). Buckets have their usual sizes on these devices."""
    found = find_strategy(strategy)
    given = dict(options or {})
    check_options(found, given)
    if found.recipe is not None:
        given.setdefault("overlap_publish", "auto")  # as the trainer sets it
        return _of_recipe(replace(found.recipe, **given), device)
    return _of_other(found.name, given)


def shares_memory(recipe: Recipe) -> bool:
    """Whether ranks of one CPU host can sum, and keep their weights, in shared memory."""
    plain = ("buckets", "none", "backend", "same")
    return (recipe.grouping, recipe.shard, recipe.reduction, recipe.wire) == plain


def _of_recipe(recipe: Recipe, device: Kind) -> Traffic:
    algorithm = "best" if recipe.reduction == "backend" else recipe.reduction
    if recipe.order == "invariant":
        algorithm = "tree"
    through_host = recipe.collective != "backend" and recipe.update == "auto"
    backends = ("buckets", "backend", "same")
    by_halves = (recipe.grouping, recipe.reduction, recipe.wire) == backends
    in_halves = recipe.overlap and (algorithm == "tree" or by_halves)
    return Traffic(
        grouping=recipe.grouping,
        bucket_mb=recipe.bucket_size_mb(device),
        first_bucket_mb=recipe.first_bucket_mb,
        overlap=recipe.overlap,
        late=bool(recipe.overlap_publish) and (recipe.shard != "none" or in_halves),
        shard=recipe.shard,
        algorithm=algorithm,
        wire=1.0 if recipe.wire == "same" else 0.5,
        by_library=recipe.collective == "backend",
        through_host=through_host and shares_memory(recipe),
    )


def _of_other(name: str, options: Mapping[str, Any]) -> Traffic:
    library = Traffic(bucket_mb=float(options.get("bucket_mb", 25.0)), by_library=True)
    if name == "ddp":
        return library
    if name == "powersgd":
        rank = options.get("matrix_approximation_rank", _POWERSGD_RANK)
        return replace(library, low_rank=rank)
    if name == "fsdp":
        # Gradients are summed in fp32 unless `reduce_dtype` says otherwise.
        gathered, wire = (
            0.5 if options.get(name) in ("bf16", "fp16") else 1.0
            for name in ("compute_dtype", "reduce_dtype")
        )
        return replace(library, shard="weights", wire=wire, gathered=gathered)
    apart = replace(library, overlap=False, copies=0)
    if name == "naive":
        return replace(apart, grouping="parameter")
    if name in _INNER_STEPS:
        steps = options.get("inner_steps", _INNER_STEPS[name])
        return replace(apart, grouping="flat", every=steps)
    raise ConfigError(f"no traffic is known of strategy {name!r}")
