"""The training step on larger machines (`gradsync plan --simulate`), by closed formula; no torch.

Every replica keeps its leaves, and the global batch grows with the ranks (weak scaling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsync.commands.plan.description import Hardware, Host, Link
from gradsync.commands.plan.profile import StepProfile
from gradsync.commands.plan.step_costs import predict_step
from gradsync.commands.plan.workload import Split, Workload

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


def simulate(
    work: Workload,
    host: Host,
    network: Link | None,
    world_sizes: Sequence[int],
    profile: StepProfile,
    *,
    splits: Sequence[Split],
) -> list[SplitPoint]:
    """A step of each split on each number of ranks that it divides; these fill the hosts in order.

    Args:
        work: one replica's leaves of a step, as `num_leaves`; the same for each replica.
        network: None if one host has all ranks.
        profile: of the whole model on one of the host's devices.
        splits: strategy, pp and tp; dp is the rest of the ranks.
    """
    points = []
    for split in splits:
        parts = split.layout.model_ranks
        for size in sorted(set(world_sizes)):
            if size % parts:
                continue
            replicas, hosts = size // parts, -(-size // len(host.devices))
            time = predict_step(
                replace(work, num_leaves=work.num_leaves * replicas),
                replace(split, layout=replace(split.layout, dp=replicas)),
                Hardware(hosts=(host,) * hosts, network=network),
                profile,
            )
            point = SplitPoint(
                name=str(replace(split, layout=replace(split.layout, dp=1))),
                world_size=size,
                step_s=time.total_s,
                tokens_per_s=time.tokens_per_s,
                efficiency=time.efficiency,
            )
            points.append(point)
    return points


def efficiency_table(points: Sequence[SplitPoint]) -> list[str]:
    """A line per split, a column per number of ranks; efficiencies."""
    sizes = sorted({point.world_size for point in points})
    found = {(point.name, point.world_size): f"{point.efficiency:.1%}" for point in points}
    names = dict.fromkeys(point.name for point in points)
    rows = [
        ["efficiency", *(f"{size} ranks" for size in sizes)],
        *([name, *(found.get((name, size), "") for size in sizes)] for name in names),
    ]
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        "  ".join([name.ljust(first), *map(str.rjust, cells, widths)]).rstrip()
        for name, *cells in rows
    ]
