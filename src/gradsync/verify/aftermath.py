"""What a step leaves behind once the gradient is right: weights, optimizer state, buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.verify.difference import compare
from gradsync.verify.evidence import Evidence, leaf_results
from gradsync.verify.exact import DTYPE_NAMES, part_of_bound
from gradsync.verify.finding import Finding, Kind
from gradsync.verify.tolerance import SMALLEST_NORMAL, gamma
from gradsync.verify.trace import Tensors
from gradsync.verify.update import update_bounds


def check_update(evidence: Evidence, place: int) -> list[Finding]:
    """The optimizer, applied to the run's own gradient, gives the run's own weights and state."""
    step = evidence.trace.steps[place]
    if not step.updated:
        return []
    state = evidence.trace.state_before(place)
    weights, states = evidence.reference.update(step.before, state, step.gradient)
    wrong = []
    for name in weights:
        expected = {"": weights[name]} | _slots_of(name, states)
        got = {"": step.updated[name]} | _slots_of(name, step.state)
        if all(compare(got.get(slot), expected[slot])[3] for slot in expected):
            continue
        gradient = step.gradient.get(name)
        if evidence.promise.kind != "bitwise" and gradient is not None:
            bounds = update_bounds(
                name,
                group=evidence.reference.optimizer_group,
                weight=step.before[name],
                gradient=gradient,
                before=state[0],
                after=states,
                dtype=DTYPE_NAMES[weights[name].dtype],
            )
            if _within(got, expected, bounds):
                continue
        wrong.append(name)
    ranks = () if not evidence.promise.local else (evidence.rank,)
    if not wrong:
        return []
    return [Finding(kind=Kind.UPDATE, step=step.number, names=tuple(wrong), ranks=ranks)]


def _slots_of(name: str, states: Tensors) -> Tensors:
    """Optimizer state of one parameter, by slot."""
    keys = {key: key.removesuffix(f"/{name}") for key in states if key.endswith(f"/{name}")}
    return {slot: states[key] for key, slot in keys.items() if "/" not in slot}


def _within(got: Tensors, expected: Tensors, bounds: Tensors) -> bool:
    return all(
        slot in got and part_of_bound(got[slot], expected[slot].double(), bound) <= 1
        for slot, bound in bounds.items()
    )


def check_buffers(evidence: Evidence, place: int) -> list[Finding]:
    """Floating buffers move by the mean of what leaves with targets do to them, integers by the
    largest change ([Note: Buffers] in sync/buffers.py). Where ranks step alone, those that no leaf
    changes must stay as they are."""
    trace, step = evidence.trace, evidence.trace.steps[place]
    starts = trace.start_buffers if place == 0 else trace.steps[place - 1].buffers
    results = [result for result in leaf_results(evidence, place) if result.weight]
    wrong = []
    for name, start in starts.items():
        ends = [result.buffers[name] for result in results]
        if evidence.promise.local and not all(torch.equal(end, start) for end in ends):
            continue
        if not _moved_rightly(start, step.buffers[name], ends):
            wrong.append(name)
    return [Finding(kind=Kind.BUFFERS, step=step.number, names=tuple(wrong))] if wrong else []


def _moved_rightly(start: Tensor, got: Tensor, ends: list[Tensor]) -> bool:
    """Whether a buffer ended where its ends after each leaf say."""
    changes = [end.double() - start.double() for end in ends if not torch.equal(end, start)]
    moved = got.double() - start.double()
    if not start.is_floating_point():
        largest = max((float(change.abs().max()) for change in changes), default=0.0)
        return float(moved.abs().max()) == largest
    if not changes:
        return torch.equal(got, start)
    stack = torch.stack(changes)
    dtype = DTYPE_NAMES[start.dtype]
    # Rounded once at each leaf's end and once when the mean is put back.
    bound = gamma(3, dtype) * (start.double().abs() + stack.abs().sum(0)) + SMALLEST_NORMAL[dtype]
    return part_of_bound(got, start.double() + stack.mean(0), bound) <= 1
