"""The messages of each strategy in a step, and the cost of a collective by formula; no torch.

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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from gradsync.commands.plan.description import Kind, Link
from gradsync.sync.options import Grouping, Recipe
from gradsync.sync.registry import find_strategy


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


def _two_levels(place: GroupPlace) -> tuple[GroupPlace, GroupPlace]:
    """The ranks of one host, and the ranks that own the same shard on all hosts."""
    groups = place.local * place.groups_per_host
    return (
        replace(place, ranks=place.local, network=None),
        replace(place, ranks=place.num_hosts, per_host=1, groups_per_host=groups),
    )


def hierarchical(place: GroupPlace, num_bytes: float) -> float:
    """all_reduce in two levels: shards in each host, each shard between hosts, then back."""
    if place.num_hosts == 1:
        return ring(place, num_bytes)
    inside, between = _two_levels(place)
    return 2 * ring_pass(inside, num_bytes) + ring(between, num_bytes / place.local)


def tree(place: GroupPlace, num_bytes: float) -> float:
    """all_reduce of `invariant` with one node per rank (sync/tree_exchange.py): shards in each
    host, each shard between hosts, and back; across all ranks if hosts are unequal."""
    if place.num_hosts == 1 or place.ranks % place.local:
        return _up_and_down(place, num_bytes)
    inside, between = _two_levels(place)
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


ALL_REDUCE: dict[str, Callable[[GroupPlace, float], float]] = {
    "ring": ring,
    "halving": halving,
    "doubling": doubling,
    "hierarchical": hierarchical,
    "tree": tree,
}


def all_reduce_s(place: GroupPlace, num_bytes: float, algorithm: str = "best") -> float:
    """Seconds of one all_reduce by an algorithm of `ALL_REDUCE`; best: the fastest that a library
    selects by size (NCCL between rings and trees, MPI between all)."""
    if place.ranks == 1:
        return 0.0
    if algorithm == "best":
        return min(cost(place, num_bytes) for cost in (ring, halving, doubling, hierarchical))
    return ALL_REDUCE[algorithm](place, num_bytes)


def half_s(place: GroupPlace, num_bytes: float) -> float:
    """Seconds of one reduce_scatter or all_gather over `num_bytes` of the whole tensor."""
    if place.ranks == 1:
        return 0.0
    if place.num_hosts == 1 or place.local == 1:
        return ring_pass(place, num_bytes)
    return min(ring_pass(place, num_bytes), hierarchical(place, num_bytes) / 2)


_INNER_STEPS = {"local_sgd": 8, "diloco": 100}
"""Steps between synchronisations by their reducers' defaults."""
_POWERSGD_RANK = 1  # Torch's default


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The messages of one strategy.

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
    every: int = 1  # Steps between synchronisations; above 1: no other communication
    through_host: bool = False
    """Whether ranks of one host may use shared memory instead, and divide the update among them."""
    copies: int = 1  # Copies of all gradients in a rank's memory: into buckets, and out of them
    by_library: bool = False
    """Whether to call the process group's collectives (gloo, NCCL) in all cases."""
    low_rank: int | None = None  # PowerSGD's rank; matrices travel as their factors


def traffic_of(strategy: str, device: Kind = "cpu") -> Traffic:
    """The messages of a strategy, with buckets of their usual sizes on these devices; ConfigError
    for an unknown one."""
    found = find_strategy(strategy)
    if found.recipe is not None:
        recipe = replace(found.recipe, overlap_publish="auto")  # as the trainer sets it
        return _of_recipe(recipe, device)
    library = Traffic(by_library=True)
    apart = replace(library, overlap=False, copies=0)
    others = {
        "ddp": library,
        "fsdp": replace(library, shard="weights"),
        "powersgd": replace(library, low_rank=_POWERSGD_RANK),
        "naive": replace(apart, grouping="parameter"),
    }
    others |= {n: replace(apart, grouping="flat", every=e) for n, e in _INNER_STEPS.items()}
    return others[found.name]


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
