"""The loss of a micro-batch: from the mean that people write to the sum that a step needs.

[Note: Mean or sum] A step divides once, by the targets of the whole global batch, so it needs each
micro-batch's *sum*. A mean, the default of torch's loss functions, is multiplied by the number of
targets that it was taken over: loss_sum = loss x weight. For cross-entropy and `.mean()` this gives
the sum's gradient bit for bit (weight / weight is 1). For `mse_loss` and similar losses it is equal
up to rounding, because they divide by the number of elements first. A penalty added to the mean
counts once per target, as it would in one big batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradsync.core.torch_private import saved
from gradsync.errors import ConfigError

log = logging.getLogger("gradsync")

_NONE, _MEAN, _SUM = 0, 1, 2
"""Values of `reduction` that the node of a loss stores."""
_LOOKED_AT = 100
"""Number of a graph's nodes that are searched for losses."""
_PASSED = ("Add", "Sub", "Neg", "Mul", "Div", "ToCopy", "Clone", "Alias", "View", "Squeeze")
"""Operations between losses and the argument of `backward`: weighted sums, casts, reshapes."""


def refuse_other(micro_batch: Any) -> None:
    """Raise TypeError unless it has a micro-batch's place."""
    if not hasattr(micro_batch, "is_last") or not hasattr(micro_batch, "index"):
        raise TypeError(
            "sync.backward(loss, micro_batch) takes a micro-batch of gs.loader as its second "
            f"argument, got {type(micro_batch).__name__}; a number of targets goes by weight="
        )


def weight_of(weight: float | Tensor | None, micro_batch: Any) -> float:
    """Weight of a micro-batch, a finite number >= 0: `weight`, or its number of targets."""
    if weight is None:
        if not hasattr(micro_batch, "num_targets"):
            raise TypeError(
                "backward() needs the micro-batch of gs.loader, as in sync.backward(loss, "
                "micro_batch), or weight=, the number of targets that the loss is the mean of"
            )
        weight = micro_batch.num_targets
    weight = float(weight)
    if not 0 <= weight < math.inf:
        raise ConfigError(f"backward(weight=...) must be a finite number >= 0, got {weight}")
    return weight


def to_sum(loss: Tensor, weight: float, reduction: str) -> Tensor:
    """Convert a micro-batch's loss, [], to the sum over its `weight` targets, see [Note: Mean or
    sum]."""
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"backward(reduction=...) must be 'mean' or 'sum', got {reduction!r}")
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"backward() needs the loss's tensor (without .item()), got {type(loss).__name__}"
        )
    if loss.dim() and loss.numel() == 1:
        loss = loss.reshape(())
    if reduction == "sum":
        return loss
    return loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0


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
    hooks = [node.register_prehook(_zeros) for node in seen]
    try:
        yield
    finally:
        for hook in hooks:  # a parameter's node outlives the graph
            hook.remove()


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else torch.zeros_like(g) for g in gradients)


class LossCheck:
    """Warns, once on each rank, of a sum that was passed as a mean, of a mean that was passed as a
    sum, and of a cross-entropy over another number of targets than its weight.

    It reads the autograd graph, by names that torch does not document; the tests go through the
    losses of `torch.nn.functional`. A loss that is not recognised causes no warning. Only the first
    micro-batches are checked, since the form of a program's loss does not change.
    """

    def __init__(self, rank: int) -> None:
        self._left, self._rank = 8, rank

    def __call__(self, loss: Tensor, weight: float, reduction: str) -> None:
        """Check a micro-batch's `loss`, [], over `weight` targets, before its backward."""
        if not self._left or weight <= 1:
            return  # the mean of one target is the sum
        self._left -= 1
        if wrong := _wrong(loss, weight, reduction):
            self._left = 0
            log.warning("rank %d: %s (said once)", self._rank, wrong)


def _wrong(loss: Tensor, weight: float, reduction: str) -> str:
    if reduction == "sum":
        if saved(loss.grad_fn, "reduction") != _MEAN:  # not times its count, for example
            return ""
        return (
            "this loss is a mean, but reduction='sum' makes sync.backward take it as a sum over "
            f"{weight:g} targets: leave reduction out"
        )
    found = list(_torchs_losses(loss))
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
