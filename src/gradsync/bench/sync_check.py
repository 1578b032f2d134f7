"""Before anything is timed: does a contestant train, and what does it send?

Every contestant takes the same few steps from the same weights on the same leaves as a reference
that is as simple as can be: backward, one all-reduce per gradient, one division, clip, step. Losses
must agree, and ranks must hold equal weights afterwards. One that does not synchronise is fast, and
would win.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsync.bench.contestant import ALONE, Contestant
from gradsync.bench.entrants import (
    CLIP_NORM,
    Blocking,
    Entrant,
    Leaves,
    Site,
    enter,
    mean_loss,
)
from gradsync.bench.meter import StepClock, Wire
from gradsync.bench.sync_plan import CHECK_STEPS
from gradsync.comm.values import all_sum
from gradsync.errors import RunError
from gradsync.runtime.memory import PeakMemory, give_back
from gradsync.sync.registry import STRATEGIES

_SETTLING = 2
"""Steps in which contestants may still build things (DDP regroups its buckets after the first)."""
_COUNTED = CHECK_STEPS - _SETTLING
"""Steps in which operations and bytes are counted, or as many as repeat themselves."""
TOLERANCE = 2e-3
"""Largest relative difference of a loss, for those that promise one rank's numbers."""
_LOSSY_TOLERANCE = 2e-2
"""For those that round on the wire."""
_FREE = (ALONE, "local_sgd", "diloco", "powersgd")
"""Contestants whose losses are their own; they must fall."""
_WEIGHTS_TOLERANCE = 1e-6


class NotTrainingError(RunError):
    """A contestant does not do what it is timed for; said on all ranks of its set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Findings of the check; on each rank its own."""

    losses: list[float]
    """Each step's mean over ranks."""
    operations: float
    """Collectives (a batch of messages is one) in a step."""
    sent_bytes: float
    """By this rank in a step."""
    memory_bytes: int | None
    """At the peak, above what there was before; None where the system does not tell."""
    comm_s: float | None
    """In collectives, in a step, when nothing hides them; None where that cannot be seen."""


def reference_losses(site: Site, leaves: Leaves) -> list[float]:
    """Losses that every contestant should see; all ranks call it."""
    model = site.model()
    optimizer = site.optimizer(model)
    comm, losses = site.comm, []
    for _ in range(CHECK_STEPS):
        total = torch.zeros((), device=site.device)
        for tokens_BT, targets_BT in leaves:
            with site.autocast():
                loss = mean_loss(model(tokens_BT), targets_BT) / len(leaves)
            loss.backward()
            total += loss.detach()
        for parameter in model.parameters():
            assert parameter.grad is not None, "the model uses all its parameters"
            # Whole group, the parameter's shape and dtype; overlaps nothing.
            comm.all_reduce(parameter.grad).wait()
            parameter.grad /= comm.world_size
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(site, total))
    return losses


def check(contestant: Contestant, site: Site, leaves: Leaves, expected: list[float]) -> Checked:
    """Let `contestant` take the steps, twice: as it is, and with its communication laid bare.

    Raises:
        NotTrainingError: on all ranks of the set: it does not train, or ranks drift apart.
    """
    peak = PeakMemory(on_cuda=site.on_cuda)
    clock = StepClock(on_cuda=site.on_cuda)
    entrant = enter(contestant, site, clock)
    losses = [_step(entrant, site, leaves) for _ in range(_SETTLING)]
    wire = Wire(entrant.communicators())
    counted = whole_periods(_COUNTED, entrant.period)
    raw = [entrant_step(entrant, leaves) for _ in range(counted)]
    operations, sent = wire.read()
    memory = peak.read()
    losses += [_mean(site, loss) for loss in raw[:_COUNTED]]
    drift = _drift(entrant.weights(), site)
    entrant.close()
    del entrant, wire  # before the next one is built: there may be room for one only
    give_back()
    judge(contestant, losses, expected, drift)
    return Checked(
        losses=losses,
        operations=operations / counted,
        sent_bytes=sent / counted,
        memory_bytes=memory,
        comm_s=_communication(contestant, site, leaves),
    )


def whole_periods(steps: int, period: int) -> int:
    """At least `steps`, and as many as repeat themselves."""
    return -(-steps // period) * period


def entrant_step(entrant: Entrant, leaves: Leaves) -> Tensor:
    """One step; the rank's own mean loss, []."""
    loss = entrant.backward(leaves)
    entrant.update()
    return loss


def judge(contestant: Contestant, losses: list[float], expected: list[float], drift: float) -> None:
    """Whether these losses and weights are those of a contestant that trains.

    Args:
        contestant: who.
        losses: of each step, over all ranks.
        expected: of the reference.
        drift: largest relative difference of weights between ranks.

    Raises:
        NotTrainingError: they are not.
    """
    label = contestant.label
    if not all(torch.isfinite(torch.tensor(losses))) or not losses[-1] < losses[0]:
        raise NotTrainingError(f"contestant {label} does not train: losses {_shown(losses)}")
    if drift > _WEIGHTS_TOLERANCE:
        raise NotTrainingError(
            f"contestant {label} does not synchronise: after {CHECK_STEPS} steps the ranks' "
            f"weights differ by {drift:.1e}"
        )
    if contestant.name in _FREE:
        return
    lossy = contestant.is_ours and STRATEGIES[contestant.name].promise == "lossy"
    tolerance = _LOSSY_TOLERANCE if lossy else TOLERANCE
    off = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    if off > tolerance:
        raise NotTrainingError(
            f"contestant {label} does not train as others do: losses {_shown(losses)}, expected "
            f"{_shown(expected)} (off by {off:.1e}, {tolerance:.0e} is allowed)"
        )


def _communication(contestant: Contestant, site: Site, leaves: Leaves) -> float | None:
    """Time in collectives in a step that hides nothing, on this rank, seconds."""
    if contestant.name == ALONE or not site.world.is_distributed:
        return 0.0
    blocking = Blocking(site.comm)
    entrant = enter(contestant, site, StepClock(on_cuda=site.on_cuda), blocking=blocking)
    try:
        if not entrant.knows_communication:
            return None
        entrant_step(entrant, leaves)
        blocking.seconds = 0.0
        steps = whole_periods(CHECK_STEPS, entrant.period)
        for _ in range(steps):
            entrant_step(entrant, leaves)
        return blocking.seconds / steps
    finally:
        entrant.close()


def _step(entrant: Entrant, site: Site, leaves: Leaves) -> float:
    return _mean(site, entrant_step(entrant, leaves))


def _mean(site: Site, loss: Tensor) -> float:
    """Over all ranks, which have equally many targets."""
    (total,) = all_sum(site.comm, float(loss))
    return total / site.world.world_size


def _drift(weights: list[Tensor] | None, site: Site) -> float:
    """Largest relative difference of any parameter's checksum to its mean over ranks."""
    if weights is None:
        return 0.0
    sums = torch.stack([weight.double().abs().sum() for weight in weights]).cpu()
    mean = sums.clone()
    # Whole group, float64 [parameters]; overlaps nothing.
    site.comm.all_reduce(mean).wait()
    mean /= site.world.world_size
    off: Any = ((sums - mean).abs() / mean.abs().clamp_min(1e-30)).max().reshape(1)
    site.comm.all_reduce(off, "max").wait()
    return float(off)


def _shown(losses: list[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)
