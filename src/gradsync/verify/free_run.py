"""Two whole runs beside each other, each going its own way: the drift, and equal bits."""

from __future__ import annotations

from gradsync.verify.difference import Difference
from gradsync.verify.finding import Finding, Kind
from gradsync.verify.trace import Trace


def bits(trace: Trace, other: Trace) -> dict[str, Difference]:
    """How far two free runs lie apart: losses, gradients, weights and optimizer states."""
    found = {part: Difference() for part in ("loss", "gradient", "weight", "state")}
    for a, b in zip(trace.steps, other.steps, strict=True):
        found["loss"].include_number(a.number, "loss", a.loss, b.loss)
        found["gradient"].include(a.number, a.gradient, b.gradient)
        found["weight"].include(a.number, a.after, b.after)
        found["state"].include(a.number, a.state, b.state)
    return found


def first_difference(differences: dict[str, Difference]) -> Finding | None:
    """Where two runs that must have the same bits first have others."""
    found = [
        (d.first_step, place, part, d)
        for place, (part, d) in enumerate(differences.items())
        if d.first_step is not None
    ]
    if not found:
        return None
    step, _, part, difference = min(found, key=lambda entry: (entry[0], entry[1]))
    assert step is not None
    detail = f"{part}: {difference.max_ulp} units in the last place, {difference.max_abs:.3g}"
    return Finding(kind=Kind.BITS, step=step, names=(difference.first_name,), detail=detail)
