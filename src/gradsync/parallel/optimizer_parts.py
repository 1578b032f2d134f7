"""JSON of an optimizer's packed state, for parts and for the whole model; pure, no torch.

The form is that of `checkpoint/optimizer_state.py`: groups with their settings and parameters, and
for each parameter its shape, tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradsync.parallel.partition import Part


def join_states(part: Part, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole model's state from those of all parts, parameters in the whole model's order.

    Args:
        part: any of them.
        states: of the parts; parameters that several hold are said alike by all.
    """
    shapes = {weight.name: weight.shape for weight in part.weights}
    entries: dict[str, Any] = {}
    for state in states:
        entries |= state["params"]
    groups = [
        {**group, "params": _ordered(shapes, [s["groups"][index]["params"] for s in states])}
        for index, group in enumerate(states[0]["groups"])
    ]
    params = {name: {**entries[name], "shape": list(shapes[name])} for name in shapes}
    return {"class": states[0]["class"], "groups": groups, "params": params}


def state_of_part(part: Part, state: Mapping[str, Any]) -> dict[str, Any]:
    """The piece of the whole model's state that `part` needs."""
    pieces = part.pieces()
    params = {
        name: {**entry, "shape": list(pieces[name].shape)}
        for name, entry in state["params"].items()
        if name in pieces
    }
    groups = [
        {**group, "params": [name for name in group["params"] if name in pieces]}
        for group in state["groups"]
    ]
    return {"class": state["class"], "groups": groups, "params": params}


def _ordered(shapes: Mapping[str, Any], lists: Sequence[Sequence[str]]) -> list[str]:
    named = {name for names in lists for name in names}
    return [name for name in shapes if name in named]
