"""What a loss is, as far as its autograd graph shows: a mean, a sum, over how many targets."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradsync.core.torch_private import saved

_NONE, _MEAN, _SUM = 0, 1, 2
"""Values of `reduction` that the node of a loss stores."""
_LOOKED_AT = 100
"""Number of a graph's nodes that are searched for losses."""
_PASSED = ("Add", "Sub", "Neg", "Mul", "Div", "ToCopy", "Clone", "Alias", "View", "Squeeze")
"""Operations between losses and the argument of `backward`: weighted sums, casts, reshapes."""


@contextmanager
def counts_for_nothing(loss: Tensor) -> Generator[None]:
    """Enclose the backward of a mean over nothing: every gradient in its graph becomes zero, since
    0 / 0 would make it nan. Backward must still run, because torch's DDP and FSDP communicate in
    it."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [inner for inner, _ in node.next_functions]
    hooks = [
        node.register_prehook(
            lambda gradients: tuple(None if g is None else torch.zeros_like(g) for g in gradients)
        )
        for node in seen
    ]
    try:
        yield
    finally:
        for hook in hooks:  # a parameter's node outlives the graph
            hook.remove()


def check_loss(loss: Tensor, weight: float, reduction: str) -> str:
    """What is wrong with a micro-batch's `loss`, [], over `weight` targets, before its backward: a
    sum that was passed as a mean, a mean that was passed as a sum, or a cross-entropy over another
    number of targets than its weight; "" if nothing is.

    It reads the autograd graph, by names that torch does not document; the tests go through the
    losses of `torch.nn.functional`. Of a loss that is not recognised nothing is said.
    """
    if reduction == "sum":
        # A mean times its count, for example, has no such node.
        if weight <= 1 or saved(loss.grad_fn, "reduction") != _MEAN:
            return ""
        return (
            "this loss is a mean, but reduction='sum' makes sync.backward take it as a sum over "
            f"{weight:g} targets: leave reduction out"
        )
    found = list(_torchs_losses(loss)) if weight > 1 else []  # the mean of one target is the sum
    if found and all(kind == _SUM for _, kind in found):
        return (
            "this loss is a sum, but sync.backward takes it as a mean and multiplies it by its "
            f"{weight:g} targets: take the mean, or write sync.backward(..., reduction='sum')"
        )
    means = [node for node, reduction in found if reduction == _MEAN and "NllLoss" in node.name()]
    if len(means) != 1:
        return ""
    counted = saved(means[0], "total_weight")  # in the dtype of the logits, and rounded to it
    rounding = max(1e-5, 2 * torch.finfo(counted.dtype).eps)
    if math.isclose(float(counted), weight, rel_tol=rounding):
        return ""
    return (
        f"the mean of this loss was taken over {float(counted):g} (targets that are not ignored, "
        f"or their class weights), but it counts for {weight:g}: give sync.backward the number as "
        "weight=, as in weight=micro_batch.num_shifted_targets where a language model shifts its "
        "labels"
    )


def _torchs_losses(loss: Tensor) -> Iterator[tuple[Any, int]]:
    """Nodes of torch's loss functions that `loss`, [], is a weighted sum of, each with its
    reduction."""
    root = loss.grad_fn
    if root is not None and root.name().startswith("SumBackward"):
        of = root.next_functions[0][0]
        if of is not None and saved(of, "reduction") == _NONE:
            yield of, _SUM
    nodes = [root]
    for _ in range(_LOOKED_AT):
        node = nodes.pop() if nodes else None
        if node is None:
            continue
        if reduction := saved(node, "reduction"):
            yield node, reduction
        elif node.name().rstrip("0123456789").removesuffix("Backward") in _PASSED:
            nodes += [inner for inner, _ in node.next_functions]
