"""How long a step takes, by closed formula: every rank equally fast, nothing fails; pure.

The computing comes first, then what communication it could not hide. `simulate` plays the same
pieces with ranks that are not equally fast; without that, both say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradsync.hardware.description import Hardware
from gradsync.hardware.timing.alpha_beta import Fit
from gradsync.hardware.timing.step_costs import Sending, StepCosts, step_costs
from gradsync.hardware.timing.step_profile import StepProfile
from gradsync.hardware.workload import Split, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One optimizer step, seconds; the mean of one where ranks do not meet in each."""

    compute_s: float
    """Forward and backward of a rank's leaves."""
    exposed_comm_s: float
    """Communication that nothing hides."""
    bubble_s: float
    """A pipeline's stage without work."""
    update_s: float
    """Clipping and optimizer."""
    comm_s: float
    """All communication of a rank, hidden or not."""
    tokens_per_s: float
    """Of all ranks."""
    efficiency: float
    """Tokens per second and rank, over those of one rank alone with as many leaves as a replica
    has: 1 is perfect."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.exposed_comm_s + self.bubble_s + self.update_s

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "total_s": self.total_s}


def predict_step(
    work: Workload,
    split: Split,
    hardware: Hardware,
    profile: StepProfile,
    *,
    options: Mapping[str, Any] | None = None,
    fits: Sequence[Fit] = (),
) -> StepTime:
    """How long a step takes.

        data parallel    k leaves, buckets beside the last backward on one channel, update
        pipeline         (p - 1) / (m + p - 1) of the leaves' time is bubble, for GPipe and 1F1B
                         alike (arXiv 1811.06965, 1806.03377); 1F1B only keeps fewer activations
        tensor parallel  four sums of activations per layer and leaf (arXiv 1909.08053)
        local_sgd        a meeting's messages, divided by the steps between two

    Args, Raises: see `step_costs`.
    """
    costs = step_costs(work, split, hardware, profile, options=options, fits=fits)
    compute = costs.leaves * costs.leaf_s
    waits = (costs.leaves - 1) * costs.leaf_wait_s + costs.last_leaf_wait_s
    hops = exposed_hops(costs)
    exposed = waits + hops + exposed_sendings(costs) + costs.copy_s + costs.after_s
    bubble = (costs.stages - 1) * (costs.leaf_s + costs.leaf_wait_s)
    sent = sum(sending.cost_s for sending in costs.sendings) + costs.agree_s
    total = compute + exposed + bubble + costs.update_s
    tokens = work.step_tokens / total
    return StepTime(
        compute_s=compute,
        exposed_comm_s=exposed,
        bubble_s=bubble,
        update_s=costs.update_s,
        comm_s=waits + hops + sent / costs.every + costs.after_s,
        tokens_per_s=tokens,
        efficiency=tokens / split.world_size / tokens_per_s_alone(work, profile, costs.leaves),
    )


def tokens_per_s_alone(work: Workload, profile: StepProfile, leaves: int) -> float:
    """Of one rank that holds the whole model and steps after so many leaves."""
    return leaves * work.leaf_tokens / (leaves * profile.leaf_s + profile.update_s)


def exposed_sendings(costs: StepCosts) -> float:
    """What a step's end waits for after backward: buckets still on their way, and the small
    message; their mean where ranks do not meet in every step."""
    after = sum(sending.cost_s for sending in costs.sendings)
    if costs.hides:
        after = max(0.0, channel_end(costs.sendings) - costs.backward_s)
    return (after + costs.agree_s) / costs.every


def channel_end(sendings: Sequence[Sending]) -> float:
    """When a channel that carries one bucket after the other is done, seconds after backward
    began."""
    free = 0.0
    for sending in sendings:
        free = max(free, sending.ready_s) + sending.cost_s
    return free


def exposed_hops(costs: StepCosts) -> float:
    """Messages of a pipeline on the longest way: in while it fills, and out while it empties."""
    hops = 2 * (costs.stages - 1)
    return costs.hop_s * (hops if costs.hides else hops + 2 * (costs.leaves - 1))
