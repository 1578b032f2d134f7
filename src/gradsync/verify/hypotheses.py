"""What a wrong gradient is made of: tried against what usual mistakes would have left there.

Each test asks whether a gradient g equals c x h for a candidate h. With c = <g, h> / <h, h> the
rest |g - c h| / |g| is zero for the right candidate up to rounding, and of the order of one for any
other: a thousandth separates them in every dtype that is summed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradsync.verify.exact import Exact, add_up
from gradsync.verify.reference import LeafResult

CLOSE = 1e-3
"""Largest relative rest of an explanation."""


def ratio(got: Tensor, candidate: Tensor) -> float | None:
    """c when `got` = c x `candidate` up to `CLOSE`; None otherwise, or when one is all zeros."""
    g, h = got.double().reshape(-1), candidate.double().reshape(-1)
    size = float(h @ h)
    if not size or not bool(g.any()) or not bool(g.isfinite().all()):
        return None
    factor = float(g @ h) / size
    rest = float((g - factor * h).norm() / g.norm())
    return factor if rest < CLOSE and factor else None


def common_ratio(gradients: Mapping[str, Tensor], candidates: Mapping[str, Tensor]) -> float | None:
    """One factor for all parameters together, or None."""
    names = [name for name in candidates if name in gradients]
    if not names or len(names) < len(candidates):
        return None
    return ratio(
        torch.cat([gradients[name].double().reshape(-1) for name in names]),
        torch.cat([candidates[name].double().reshape(-1) for name in names]),
    )


def is_mean_of(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether all parameters' gradients are the expected ones up to `CLOSE`."""
    factor = common_ratio(gradients, expected)
    return factor is not None and abs(factor - 1) < CLOSE


def means(exact: Exact) -> dict[str, Tensor]:
    """Mean gradients by name."""
    return {name: exact.mean(name) for name in exact.total}


def mean_of_means(results: Sequence[LeafResult], owners: Mapping[int, int]) -> dict[str, Tensor]:
    """Each rank's mean, averaged over ranks: right only if all ranks have the same weight."""
    ranks = sorted(set(owners.values()))
    found: dict[str, Tensor] = {}
    for rank in ranks:
        mine = add_up([r for r in results if owners.get(r.index) == rank])
        if not mine.weight:
            continue
        for name, mean in means(mine).items():
            share = mean / len(ranks)
            found[name] = found[name] + share if name in found else share
    return found


def lost_or_double(
    gradients: Mapping[str, Tensor], exact: Exact, results: Sequence[LeafResult]
) -> tuple[str, int] | None:
    """("missing" or "twice", leaf) when the gradient lacks one leaf's share or has it twice."""
    for result in results:
        if not result.gradient:
            continue
        for word, sign in (("missing", -1.0), ("twice", 1.0)):
            candidate = {
                name: exact.total[name] + sign * result.gradient[name].double()
                if name in result.gradient
                else exact.total[name]
                for name in exact.total
            }
            candidate = {name: t for name, t in candidate.items() if bool(t.any())}
            got = {name: g for name, g in gradients.items() if name in candidate}
            if common_ratio(got, candidate) is not None:
                return word, result.index
    return None


def name_of_factor(
    factor: float, *, world_size: int, weight: float, own_weight: float, num_leaves: int
) -> str:
    """What a wrong factor is, in words; the number itself when it is nothing known."""
    known = [
        (float(world_size), f"{world_size}, the number of ranks: never divided by it"),
        (1 / world_size, f"1/{world_size}: divided by the number of ranks once more"),
        (weight, f"{weight:g}, the number of targets: a sum, not a mean"),
        (1 / weight, f"1/{weight:g}: divided by the number of targets twice"),
        (float(num_leaves), f"{num_leaves}, the number of leaves: not divided by it"),
        (1 / num_leaves, f"1/{num_leaves}: divided by the number of leaves as well"),
    ]
    if own_weight:
        text = f"{weight:g}/{own_weight:g}: divided by this rank's own {own_weight:g} targets"
        known.append((weight / own_weight, f"{text} instead of all {weight:g}"))
        text = f"divided by {world_size} x this rank's own {own_weight:g} targets"
        known.append((weight / own_weight / world_size, text))
    for value, text in known:
        if math.isclose(factor, value, rel_tol=CLOSE) and not math.isclose(value, 1.0):
            return text
    return f"{factor:.6g}"
