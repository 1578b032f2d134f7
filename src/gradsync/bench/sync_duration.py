"""How long `bench sync` takes, from a few timed steps, and which model is done in three minutes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gradsync.bench.sync_plan import CHECK_STEPS, Plan
from gradsync.hardware.choice.probe import leaf_operations, probe_work, scaled_profile
from gradsync.hardware.description import Kind
from gradsync.hardware.workload import Workload
from gradsync.models.presets import PRESETS

BUDGET_S = 140.0
"""Limit for a measurement without a chosen model: with its ranks' start, under three minutes."""
_COMPANY = 1.5
"""A step with other ranks beside it, and with their gradients, over that of a rank alone: from 1.0
(`invariant`) to 2 (default malloc) in `benchmarks/sync/mini-512/record.json`."""


def seconds_of(plan: Plan, step_s: float) -> float:
    """How long all of it takes when a step takes `step_s`: checks and turns, one after another."""
    settings = plan.settings
    # A check: as it is, and laid bare after a step more; and once for each set the reference.
    turns = settings.rounds * (settings.num_warmup + settings.num_steps)
    each = 2 * CHECK_STEPS + 1 + turns
    return (len(plan.entries) * each + len(plan.sets) * CHECK_STEPS) * step_s


def duration(seconds: float) -> str:
    """For people: `40 s`, `3 min`, `1 h 20 min`."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def trial_step(work: Workload, *, ranks_per_host: int) -> float:
    """Seconds of a step in company: timed here alone, or a smaller leaf of the model, scaled."""
    from gradsync.hardware.timing.probe import probe_profile

    small = probe_work(work)
    measured = probe_profile(
        small, device=work.kind, ranks_per_host=ranks_per_host, budget_s=1.0, cached=False
    )
    profile = scaled_profile(measured, small, work)
    alone_s = work.num_leaves * (profile.forward_s + profile.backward_s) + profile.update_s
    return _COMPANY * alone_s


def in_time(plan: Plan, kind: Kind, trial: Callable[[Workload], float]) -> Plan:
    """`plan` with the largest model, not above its own, that takes at most `BUDGET_S`.

    From the smallest upwards: a larger one is timed only when by its operations it may do.

    Args:
        plan: with the largest model that fits into memory.
        kind: of device.
        trial: times a step of a rank, seconds.
    """
    largest = PRESETS[plan.settings.model_size].num_params()
    length = plan.settings.context_length or 1
    found: Plan | None = None
    step_s, operations = 0.0, 1.0
    for name, shape in PRESETS.items():
        if shape.num_params() > largest or shape.block_size < length:
            continue
        one = replace(plan, settings=replace(plan.settings, model_size=name))
        work = _workload(one, kind)
        wanted = leaf_operations(work)
        if found and seconds_of(one, step_s * wanted / operations) > 2 * BUDGET_S:
            break  # larger models use a machine better, but not that much
        step_s, operations = trial(work), wanted
        if found and seconds_of(one, step_s) > BUDGET_S:
            break
        found = one
    assert found is not None, "the plan's own model is among them"
    return found


def _workload(plan: Plan, kind: Kind) -> Workload:
    """A rank's step."""
    settings = plan.settings
    return Workload(
        model=settings.config,
        micro_batch_size=plan.entries[0].batch_size // settings.leaves_per_rank,
        seq_len=settings.tokens,
        num_leaves=settings.leaves_per_rank,
        dtype="bf16" if settings.dtype == "bf16" else "fp32",
        kind=kind,
    )
