"""The training step on larger machines (`gradsync plan --simulate`), by closed formula; no torch.

Every replica keeps its leaves, and the global batch grows with the ranks (weak scaling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradsync.commands.plan.description import Hardware, Host, Link
from gradsync.commands.plan.profile import StepProfile
from gradsync.commands.plan.step_costs import predict_step
from gradsync.commands.plan.workload import Split, Workload
from gradsync.errors import ConfigError

DEFAULT_STRATEGIES = (
    *("bucketed", "ring", "hierarchical", "invariant", "fsdp"),
    *("powersgd", "local_sgd", "diloco"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPoint:
    """One split on one number of ranks."""

    name: str  # The split, without its number of replicas
    world_size: int
    step_s: float
    tokens_per_s: float  # All ranks together
    efficiency: float
    """Tokens per second and rank, over those of one rank alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """All points, and the machine."""

    points: tuple[SplitPoint, ...]  # By split, then by world size
    world_sizes: tuple[int, ...]
    host: Host
    network: Link | None

    @property
    def names(self) -> list[str]:
        """Splits in order."""
        return list(dict.fromkeys(point.name for point in self.points))

    def point(self, name: str, world_size: int) -> SplitPoint | None:
        """One of them; None if the split does not divide that many ranks."""
        return next((p for p in self.points if (p.name, p.world_size) == (name, world_size)), None)

    def to_json(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "world_sizes": list(self.world_sizes),
            "devices_per_host": len(self.host.devices),
            "device": self.host.devices[0].name,
            "link": asdict(self.host.link),
            "network": None if self.network is None else asdict(self.network),
            "points": [asdict(point) for point in self.points],
        }


def simulate(
    work: Workload,
    host: Host,
    network: Link | None,
    world_sizes: Sequence[int],
    profile: StepProfile,
    *,
    splits: Sequence[Split] = (),
) -> Simulation:
    """A step of each split on each number of ranks; these fill the hosts in order.

    Args:
        work: one replica's leaves of a step, as `num_leaves`; the same for each replica.
        profile: of the whole model on one of the host's devices.
        splits: strategy, pp and tp; dp is the rest of the ranks. Default: data parallelism with
            each of `DEFAULT_STRATEGIES`.

    Raises:
        ConfigError: an unknown strategy, several hosts without a network, a split that divides
            none of the sizes.
    """
    sizes = tuple(sorted(set(world_sizes)))
    points = []
    for split in splits or [Split(strategy=name) for name in DEFAULT_STRATEGIES]:
        parts = split.layout.model_ranks
        name = str(replace(split, layout=replace(split.layout, dp=1)))
        fitting = [size for size in sizes if size % parts == 0]
        if not fitting:
            got = ", ".join(map(str, sizes))
            raise ConfigError(f"{name}: needs a multiple of {parts} ranks; got {got}")
        for size in fitting:
            replicas, hosts = size // parts, -(-size // len(host.devices))
            time = predict_step(
                replace(work, num_leaves=work.num_leaves * replicas),
                replace(split, layout=replace(split.layout, dp=replicas)),
                Hardware(hosts=(host,) * hosts, network=network),
                profile,
            )
            point = SplitPoint(
                name=name,
                world_size=size,
                step_s=time.total_s,
                tokens_per_s=time.tokens_per_s,
                efficiency=time.efficiency,
            )
            points.append(point)
    return Simulation(points=tuple(points), world_sizes=sizes, host=host, network=network)


def report_text(found: Simulation) -> str:
    """Efficiency of every split on every number of ranks, then the assumptions; several lines."""

    def row(name: str) -> list[str]:
        points = [found.point(name, size) for size in found.world_sizes]
        return [name, *("" if point is None else f"{point.efficiency:.1%}" for point in points)]

    rows = [
        ["efficiency", *(f"{size} ranks" for size in found.world_sizes)],
        *(row(name) for name in found.names),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(
            [title.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]
        ).rstrip()
        for title, *cells in rows
    ]
    return "\n".join([*table, "", *_notes(found)])


def _notes(found: Simulation) -> list[str]:
    """The assumptions of the figures, a line each."""
    host = found.host
    network = [] if found.network is None else [f"between hosts {_link(found.network)}"]
    return [
        f"{len(host.devices)} x {host.devices[0].name} a host, {_link(host.link)}",
        *network,
        "efficiency: tokens per second and rank over one rank alone; each replica keeps its leaves",
    ]


def _link(link: Link) -> str:
    port = " a host" if link.per_host else " a rank"
    return f"{link.name}: {link.bytes_per_s / 1e9:.3g} GB/s{port}, {link.alpha_s * 1e6:.3g} us"
