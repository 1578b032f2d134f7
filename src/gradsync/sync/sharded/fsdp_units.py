"""Submodules that FSDP2 gathers and frees as one: repeated blocks, and the root for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers without a forward of their own, so that nothing can be gathered before it."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost children of `nn.ModuleList`s, in `modules()` order, each once.

    A block that shares a parameter with a module outside of it stays with the root: in FSDP2 a
    parameter belongs to one unit only.
    """
    everywhere = Counter(id(p) for p in _with_ties(model))
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        for child in module:
            own = Counter(id(p) for p in _with_ties(child))
            closed = all(everywhere[key] == count for key, count in own.items())
            if own and closed and id(child) not in inside and not isinstance(child, _CONTAINERS):
                blocks.append(child)
                inside |= {id(part) for part in child.modules()}
    return blocks


def _with_ties(model: nn.Module) -> Iterator[nn.Parameter]:
    """Every place that holds a parameter, so tied ones as often as they are held."""
    for module in model.modules():
        yield from module.parameters(recurse=False)
