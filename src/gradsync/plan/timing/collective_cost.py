"""The cost of a collective, by formula: latency and bandwidth of each message, nothing else; pure.

n ranks, S bytes of the whole tensor, a the latency of a message (s), b its seconds per byte
(Hockney 1994). Additions are not counted: on a GPU they run at the memory's rate, far above any
link; on a CPU, measured lines (`timing/alpha_beta.py`) take the place of these formulas.

    reduce_scatter, all_gather   ring        (n-1) a + (n-1)/n S b
    all_reduce                   ring        2 (n-1) a + 2 (n-1)/n S b
                                 halving     2 lg n a + 2 (n-1)/n S b
                                 doubling    lg n (a + S b)
                                 hierarchical  reduce_scatter inside a host, all_reduce of a rank's
                                             S/L between hosts, all_gather inside

Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in MPICH"
(ring, recursive doubling); Rabenseifner 2004, "Optimization of collective reduction operations"
(recursive halving, then doubling). Where n is no power of two, the ranks beyond it first hand their
whole tensor to a partner and get the sum back: 2 (a + S b) more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gradsync.errors import ConfigError
from gradsync.plan.description import Hardware, Link
from gradsync.plan.timing.alpha_beta import Fit
from gradsync.plan.timing.traffic import Traffic
from gradsync.plan.workload import Split


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the ranks of a group are: `ranks` of them, `per_host` on each host (the last one may
    have fewer).

    Raises:
        ConfigError: several hosts without a network.
    """

    ranks: int
    per_host: int
    link: Link
    """Between ranks of a host."""
    network: Link | None = None
    """Between hosts."""
    groups_per_host: int = 1
    """Groups like this one that use a host's network at the same time, where it has one port."""

    def __post_init__(self) -> None:
        if self.num_hosts > 1 and self.network is None:
            raise ConfigError(f"{self.num_hosts} hosts, but no network between them")

    @property
    def local(self) -> int:
        """Ranks of the group on one host."""
        return min(self.ranks, self.per_host)

    @property
    def num_hosts(self) -> int:
        """Over which it spreads."""
        return -(-self.ranks // self.per_host)

    def seconds(self, num_bytes: float, *, far: bool, senders: int = 1) -> float:
        """One message of each rank.

        Args:
            num_bytes: of it.
            far: whether it crosses hosts.
            senders: ranks of a host and group whose messages cross at the same time.
        """
        if not far or self.network is None:
            return self.link.seconds(num_bytes)
        share = senders * self.groups_per_host if self.network.per_host else 1
        return self.network.alpha_s + num_bytes * share / self.network.bytes_per_s


def ring_pass(place: Place, num_bytes: float) -> float:
    """reduce_scatter or all_gather around a ring: n - 1 messages of S/n.

    On several hosts the slowest edge sets the pace, and one rank of each host sends out. Latency
    is that of a piece on its way around, which crosses hosts H - 1 times (as NCCL counts it,
    `src/graph/tuning.cc`).
    """
    n, hosts = place.ranks, place.num_hosts
    if hosts == 1:
        return (n - 1) * place.link.seconds(num_bytes / n)
    latency = (n - hosts) * place.link.alpha_s + (hosts - 1) * place.seconds(0, far=True)
    near = (n - 1) * num_bytes / n / place.link.bytes_per_s
    crossing = (n - 1) * (place.seconds(num_bytes / n, far=True) - place.seconds(0, far=True))
    return latency + max(crossing, near if place.local > 1 else 0.0)


def ring(place: Place, num_bytes: float) -> float:
    """all_reduce: reduce_scatter, then all_gather, around a ring."""
    return 2 * ring_pass(place, num_bytes)


def halving(place: Place, num_bytes: float) -> float:
    """all_reduce by recursive halving, then doubling (Rabenseifner 2004); near partners exchange
    the large pieces."""
    return _fold(place, num_bytes) + 2 * sum(
        place.seconds(num_bytes / 2 ** (step + 1), far=far, senders=place.local)
        for step, far in enumerate(_distances_are_far(place))
    )


def doubling(place: Place, num_bytes: float) -> float:
    """all_reduce by recursive doubling: the whole tensor, lg n times; for short ones."""
    return _fold(place, num_bytes) + sum(
        place.seconds(num_bytes, far=far, senders=place.local) for far in _distances_are_far(place)
    )


def hierarchical(place: Place, num_bytes: float) -> float:
    """all_reduce in two levels: shards inside the hosts, each shard between them, back inside."""
    if place.num_hosts == 1:
        return ring(place, num_bytes)
    inside = Place(ranks=place.local, per_host=place.local, link=place.link)
    between = Place(
        ranks=place.num_hosts,
        per_host=1,
        link=place.link,
        network=place.network,
        groups_per_host=place.local * place.groups_per_host,
    )
    return 2 * ring_pass(inside, num_bytes) + ring(between, num_bytes / place.local)


def owners(place: Place, num_bytes: float) -> float:
    """all_reduce as `invariant` does it: every rank sends each other rank that one's S/n to add
    up, and gets each sum back. The bytes of a ring; the n - 1 messages of each way set out at once,
    and are posted one after the other."""
    n, crossing = place.ranks, place.ranks - place.local
    one_way = (place.local - 1) * place.link.seconds(num_bytes / n)
    one_way += crossing * place.seconds(num_bytes / n, far=True, senders=place.local)
    return 2 * one_way


ALL_REDUCE: dict[str, Callable[[Place, float], float]] = {
    "ring": ring,
    "halving": halving,
    "doubling": doubling,
    "hierarchical": hierarchical,
    "owners": owners,
}
_CHOSEN = ("ring", "halving", "doubling", "hierarchical")


def all_reduce_s(place: Place, num_bytes: float, algorithm: str = "best") -> float:
    """Seconds of one all_reduce over `num_bytes`.

    Args:
        place: of the ranks.
        num_bytes: of the tensor, the same on each rank.
        algorithm: of `ALL_REDUCE`, or best: the quickest of those that a library chooses from
            by size (NCCL between rings and trees, MPI between all of them).
    """
    if place.ranks == 1:
        return 0.0
    if algorithm == "best":
        return min(ALL_REDUCE[name](place, num_bytes) for name in _CHOSEN)
    return ALL_REDUCE[algorithm](place, num_bytes)


def half_s(place: Place, num_bytes: float) -> float:
    """Seconds of one reduce_scatter or all_gather over `num_bytes` of the whole tensor."""
    if place.ranks == 1:
        return 0.0
    if place.num_hosts == 1 or place.local == 1:
        return ring_pass(place, num_bytes)
    return min(ring_pass(place, num_bytes), hierarchical(place, num_bytes) / 2)


def _distances_are_far(place: Place) -> list[bool]:
    """For the distances 1, 2, 4, ... : whether partners at it are on different hosts."""
    steps = place.ranks.bit_length() - 1
    return [place.num_hosts > 1 and 2**step >= place.local for step in range(steps)]


def _fold(place: Place, num_bytes: float) -> float:
    """Ranks beyond the power of two hand their tensor over, and get the sum."""
    if place.ranks & (place.ranks - 1) == 0:
        return 0.0
    return 2 * place.seconds(num_bytes, far=place.num_hosts > 1, senders=place.local)


COPY = "copy"
"""Operation and algorithm of the line through a plain copy's times."""
OWN_ALGORITHMS = {
    "ring": "ring",
    "doubling": "recursive_doubling",
    "hierarchical": "hierarchical",
}
"""Algorithms that are made of messages on one host too: in `collective_cost`, and in lines."""


class Prices:
    """Made for one split on one hardware.

    Args:
        hardware: of exactly the devices that are used; ranks fill its hosts in order.
        split: its layout says which ranks talk.
        traffic: of its strategy.
        fits: measured here for as many ranks as there are replicas, on one host.
    """

    def __init__(
        self, hardware: Hardware, split: Split, traffic: Traffic, fits: Sequence[Fit] = ()
    ) -> None:
        layout, host = split.layout, hardware.hosts[0]
        on_host = len(hardware.hosts) == 1
        local = min(len(host.devices), layout.world_size)
        per_host = max(local // layout.model_ranks, 1)
        self.data = Place(
            ranks=layout.dp,
            per_host=per_host,
            link=host.link,
            network=hardware.network,
            groups_per_host=max(local // per_host, 1),
        )
        self.shards = Place(
            ranks=layout.tp,
            per_host=min(layout.tp, local),
            link=host.link,
            network=hardware.network,
        )
        self._stages_far = layout.model_ranks > local
        on_cpu = host.devices[0].kind == "cpu"
        self.hides = not (on_cpu and on_host)
        """On one host's CPU the cores that would communicate beside backward are computing it."""
        self.divided = (
            on_cpu and on_host and traffic.through_host and layout.model_ranks == 1 < layout.dp
        )
        """Whether the ranks of a host add up and update in shares, through shared memory."""
        self.scatter_s = partial(self._half_s, "reduce_scatter")
        """reduce_scatter among replicas, over so many bytes of the whole tensor."""
        self.gather_s = partial(self._half_s, "all_gather")
        """all_gather, likewise."""
        self._memory_bytes_per_s = host.devices[0].memory_bytes_per_s
        self._traffic = traffic
        # Gloo's all_reduce is a ring, whatever the size; NCCL chooses.
        gloo = on_cpu and traffic.algorithm == "best"
        self._algorithm = "ring" if gloo else traffic.algorithm
        self._fits = {(f.operation, f.algorithm): f for f in fits if on_host and layout.dp > 1}

    def all_reduce_s(self, num_bytes: float) -> float:
        """Among replicas."""
        fit = self._measured("all_reduce")
        if fit is not None:
            return fit.seconds(num_bytes)
        return all_reduce_s(self.data, num_bytes, self._algorithm)

    def tensor_s(self, num_bytes: float) -> float:
        """all_reduce among tensor shards."""
        return all_reduce_s(self.shards, num_bytes)

    def hop_s(self, num_bytes: float) -> float:
        """From stage to stage."""
        return self.data.seconds(num_bytes, far=self._stages_far)

    def copy_s(self, num_bytes: float) -> float:
        """From memory to memory of one rank, while all do so; 0 where it is not known."""
        fit = self._fits.get((COPY, COPY))
        if fit is not None:
            return fit.seconds(num_bytes)
        rate = self._memory_bytes_per_s
        return 0.0 if rate is None else 2 * num_bytes / rate  # read, and written

    def _half_s(self, operation: str, num_bytes: float) -> float:
        fit = self._measured(operation)
        return half_s(self.data, num_bytes) if fit is None else fit.seconds(num_bytes)

    def _measured(self, operation: str) -> Fit | None:
        """The line of whatever carries this strategy's messages on a host."""
        if self._traffic.by_library:
            return self._fits.get((operation, "backend"))
        ways = (OWN_ALGORITHMS.get(self._traffic.algorithm, "shared"), "shared_copies", "backend")
        found = (self._fits.get((operation, way)) for way in ways)
        return next((fit for fit in found if fit is not None), None)
