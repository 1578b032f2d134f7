"""A step's loss and weight over leaves and ranks, and means in place of sums.

[Note: Mean or sum] A step divides once, by the targets of the whole global batch, so it needs each
leaf's *sum*. A mean, the default of torch's loss functions, is multiplied by the number of targets
it was taken over: with `reduction="mean"`, loss = mean x weight. For cross-entropy and `.mean()`
that gives the sum's gradient bit for bit (weight / weight is 1), for `mse_loss` and similar ones to
rounding, as those divide by the number of elements first.

A mean that is used as a sum is recognised in the autograd graph. Torch names a graph's nodes and
their saved values without documenting the names; the tests go through all losses of
`torch.nn.functional`. A loss that is not recognised causes no warning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.core.torch_private import saved
from gradsync.errors import ConfigError
from gradsync.sync.exact_sum import NUM_BINS, from_bins, to_bins

log = logging.getLogger("gradsync")

NO_LOSS = (0.0,) * (2 * NUM_BINS)
"""Message of a rank whose loop gives no loss: of the others' length, since a rank that discards a
step may not know how they end it."""
_MEAN = 1
"""The `reduction` that a loss's node keeps: 0 none, 1 mean, 2 sum."""
_LOOKED_AT = 100
"""Nodes of a graph that are looked at for a mean."""
_PASSED = ("Add", "Sub", "Neg", "Mul", "Div", "ToCopy", "Clone", "Alias", "View", "Squeeze")
"""Operations between losses and `backward`'s argument: weighted sums, casts, other shapes."""


class LossSum:
    """This rank's losses (on `device`) and weights in a step; sums over all ranks do not depend on
    the distribution of leaves, see [Note: Fixed bins]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._losses: list[Tensor] = []
        self._weights: list[float] = []

    @property
    def num_leaves(self) -> int:
        """Number of leaves added."""
        return len(self._losses)

    @property
    def weight(self) -> float:
        """Number of targets (or samples) of this rank's leaves."""
        return math.fsum(self._weights)

    @property
    def is_finite(self) -> bool:
        """Whether this rank's losses are finite; unchecked on CUDA, where it would wait."""
        return self._device.type == "cuda" or all(map(torch.isfinite, self._losses))

    def add(self, loss_sum: Tensor, weight: float) -> None:
        """Add one leaf's summed loss, [], and weight."""
        self._losses.append(loss_sum.detach().to(self._device, torch.float64, copy=True))
        self._weights.append(weight)

    def clear(self) -> None:
        """Start over with no leaves."""
        self._losses.clear()
        self._weights.clear()

    def message(self) -> list[float]:
        """This rank's part of the step's small message, [2 NUM_BINS]: the weight, and the loss
        where that costs no wait, on a CPU."""
        weights = to_bins(torch.tensor(self._weights, dtype=torch.float64)).tolist()
        losses = [0.0] * NUM_BINS if self._device.type == "cuda" else self._bins().tolist()
        return weights + losses

    @staticmethod
    def weight_over_ranks(summed: Sequence[float]) -> float:
        """Weight over all ranks, from the sum of their messages."""
        return from_bins(summed[:NUM_BINS])

    def over_ranks(self, comm: Communicator, summed: Sequence[float]) -> tuple[Tensor, float]:
        """Loss (float64 []) and weight over all ranks, from the sum of their messages.

        On CUDA by one more all-reduce: whole group, float64 [NUM_BINS], on the device, overlaps
        the buckets in progress.
        """
        weight = self.weight_over_ranks(summed)
        if self._device.type != "cuda":
            return torch.tensor(from_bins(summed[NUM_BINS:]), dtype=torch.float64), weight
        bins = self._bins()
        comm.all_reduce(bins).wait()
        return bins[:-1].flip(0).sum() + bins[-1], weight

    def _bins(self) -> Tensor:
        if not self._losses:
            return torch.zeros(NUM_BINS, dtype=torch.float64, device=self._device)
        return to_bins(torch.stack(self._losses))


def leaf_weight(weight: float | Tensor | None, leaf: Any) -> float:
    """Weight of a leaf, a finite number >= 0: `weight`, or else the leaf's number of targets."""
    if weight is None:
        if leaf is None:
            raise TypeError("backward() needs weight= (the number of targets) or leaf=")
        weight = leaf.num_targets
    weight = float(weight)
    if not 0 <= weight < math.inf:
        raise ConfigError(f"backward(weight=...) must be a finite number >= 0, got {weight}")
    return weight


def to_sum(loss: Tensor, weight: float, reduction: str | None) -> Tensor:
    """Convert a leaf's loss, [], to the sum over its `weight` targets, see [Note: Mean or sum];
    `reduction` None is "sum"."""
    if reduction not in (None, "sum", "mean"):
        raise ConfigError(f"backward(reduction=...) must be 'sum' or 'mean', got {reduction!r}")
    if reduction != "mean":
        return loss
    return loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0


@contextmanager
def counts_for_nothing(loss: Tensor) -> Iterator[None]:
    """Enclose the backward of a mean over nothing: every gradient in its graph is zero, where
    0 / 0 would make it nan. The backward must happen all the same: torch's DDP and FSDP
    communicate in it."""
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


class MeanCheck:
    """Warns, once and on one rank (`said`), of a mean that is used as a sum, or that was taken over
    another number of targets than its weight. Checks the first leaves only: a program's loss keeps
    its form."""

    def __init__(self, *, said: bool) -> None:
        self._leaves_left = 8 if said else 0

    def __call__(self, loss: Tensor, weight: float, leaf: Any, *, reduction: str | None) -> None:
        """Check a leaf's `loss`, [], that counts `weight` targets, before its backward."""
        if not self._leaves_left or weight <= 1 or reduction == "sum":
            return  # the mean of one is the sum
        self._leaves_left -= 1
        wrong = _wrong_count(loss, weight) if reduction else _taken_for_a_sum(loss, weight, leaf)
        if wrong:
            self._leaves_left = 0
            log.warning(wrong + " (said once)")


def _taken_for_a_sum(loss: Tensor, weight: float, leaf: Any) -> str:
    found = list(_reductions(loss, (weight, getattr(leaf, "num_samples", weight))))
    # torch's own losses say it for the rest: a penalty beside them may be a mean.
    means = [mean for node, mean in found if saved(node, "reduction") is not None]
    means = means or [mean for _, mean in found]
    # One mean per target, added up over the samples, is a sum.
    if not all(means) or not 0 < len(means) < weight:
        return ""
    who = f"weight={weight:g}" if leaf is None else "leaf=leaf"
    return (
        "this loss is a mean, and sync.backward takes a sum, which sync.step divides by all "
        f"targets of the global batch: write sync.backward(loss, {who}, reduction='mean') if it is "
        "the mean over the leaf's targets, reduction='sum' in the loss function, or "
        "sync.backward(..., reduction='sum') if it is right as it is"
    )


def _wrong_count(loss: Tensor, weight: float) -> str:
    found = [node for node, mean in _reductions(loss) if mean and "NllLoss" in node.name()]
    if len(found) != 1:
        return ""
    counted = saved(found[0], "total_weight")  # in the dtype of the logits, and rounded to it
    rounding = max(1e-5, 2 * torch.finfo(counted.dtype).eps)
    if math.isclose(float(counted), weight, rel_tol=rounding):
        return ""
    return (
        f"the mean of this loss was taken over {float(counted):g} (targets that are not ignored, "
        f"or their class weights), but it counts for {weight:g}: give sync.backward the number as "
        "weight=, as in weight=(labels[:, 1:] != -100).sum() where a language model shifts its "
        "labels"
    )


def _reductions(loss: Tensor, counts: Sequence[float] = ()) -> Iterator[tuple[Any, bool]]:
    """The reductions of which `loss`, [], is a weighted sum: nodes, and whether each is a mean.

    A division by one of `counts` makes a mean; one by 2, as in `x.square().sum() / 2`, does not.
    """
    nodes = [loss.grad_fn]
    for _ in range(_LOOKED_AT):
        node = nodes.pop() if nodes else None
        if node is None:
            continue
        name = node.name().rstrip("0123456789").removesuffix("Backward")
        if reduction := saved(node, "reduction"):
            yield node, reduction == _MEAN
        elif name == "Sum" or (name == "Mean" and (saved(node, "self_sym_numel") or 0) > 1):
            yield node, name == "Mean"
        elif name == "Div" and (divisor := _divisor(node)) in counts and divisor > 2:
            yield node, True
        elif name in _PASSED:
            nodes += [inner for inner, _ in node.next_functions]


def _divisor(node: Any) -> float:
    other = saved(node, "other")
    one = not isinstance(other, Tensor) or other.numel() == 1
    return 0.0 if other is None or not one else float(other)
