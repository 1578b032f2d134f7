"""Accumulation of the gradients of a rank's own leaves, before any communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from gradsync.core.torch_private import foreach_add_, foreach_copy_, foreach_zero_
from gradsync.errors import ConfigError
from gradsync.sync.engine.bucket import Bucket
from gradsync.sync.engine.leaf_tree import LeafStack

if TYPE_CHECKING:
    from torch import Tensor, nn


FORGOTTEN = -2
"""Placeholder for a leaf's index when this step is discarded."""


class Sums(Protocol):
    """Called by the engine: `begin_leaf`, `fold` as gradients arrive, `end_leaf` per bucket."""

    num_leaves: int
    """Leaves begun in this step."""
    first_leaf: int | None
    """Global index of the first one; None when the caller gave none."""

    @property
    def num_buffers(self) -> int:
        """Number of buffers of a bucket in use."""
        ...

    def begin_leaf(self, index: int | None) -> None:
        """Begin leaf `index` of the global batch (None: unknown), for the gradients that follow."""
        ...

    def fold(self, bucket: Bucket, slots: Sequence[int]) -> None:
        """Accumulate the gradients that have arrived in `.grad` of these parameters."""
        ...

    def end_leaf(self, bucket: Bucket) -> None:
        """Account for the slots without a gradient from this leaf."""
        ...

    def forget(self) -> None:
        """Discard this rank's leaves of this step; the other ranks discard theirs, too."""
        ...

    def begin_step(self) -> None:
        """Start over with no leaves."""
        ...


class PlainSums:
    """Accumulates leaves in the order of arrival, in one buffer; `.grad` is a view of it."""

    num_buffers = 1

    def __init__(self) -> None:
        self.num_leaves = 0
        self.first_leaf: int | None = None

    def begin_leaf(self, index: int | None) -> None:
        """See `Sums.begin_leaf`; the leaf's index does not matter here."""
        self.num_leaves += 1

    def fold(self, bucket: Bucket, slots: Sequence[int]) -> None:
        """Copy new gradients in; after the first leaf autograd itself adds to the view.

        A `.grad` that is not the view holds everything that counts: it is new, or was cleared in
        between.
        """
        views = bucket.views(0, slots)
        parameters = [bucket.parameters[slot] for slot in slots]
        fresh = [(p, v) for p, v in zip(parameters, views, strict=True) if p.grad is not v]
        if fresh:
            gradients = _gradients([parameter for parameter, _ in fresh])
            foreach_copy_([view for _, view in fresh], gradients)
            for parameter, view in fresh:
                parameter.grad = view

    def end_leaf(self, bucket: Bucket) -> None:
        """Do nothing: a missing gradient adds nothing."""

    def forget(self) -> None:
        """See `Sums.forget`."""
        self.num_leaves = 0

    def begin_step(self) -> None:
        """See `Sums.begin_step`."""
        self.num_leaves, self.first_leaf = 0, None


class TreeSums:
    """Accumulates leaves along the fixed tree, see [Note: The tree].

    Without a leaf's global index, its nodes are known only once all ranks have exchanged their
    numbers of leaves: until then every leaf keeps its own buffer.
    """

    def __init__(self) -> None:
        self._stack = LeafStack()
        self.num_leaves = 0
        self.first_leaf: int | None = None
        self._top = 0
        self._target = 0

    @property
    def num_buffers(self) -> int:
        """One per finished node, or one per leaf."""
        return self.num_leaves if self.first_leaf is None else len(self._stack.nodes)

    def begin_leaf(self, index: int | None) -> None:
        """See `Sums.begin_leaf`; indices of a rank are consecutive.

        Raises:
            ConfigError: they are not.
        """
        if self.num_leaves == 0:
            self.first_leaf = index
        expected = None if self.first_leaf is None else self.first_leaf + self.num_leaves
        if index != expected:
            raise ConfigError(
                f"leaf {index} came where leaf {expected} was due: a rank's leaves follow each "
                "other, as gs.loader deals them, and sync.step() (or discard()) ends a step before "
                "the next one's come"
            )
        self._top = self.num_buffers
        self._target = self._top if index is None else self._stack.push(index)
        self.num_leaves += 1

    def fold(self, bucket: Bucket, slots: Sequence[int]) -> None:
        """Push new gradients down the stack; `.grad` is empty afterwards."""
        parameters = [bucket.parameters[slot] for slot in slots]
        gradients = _gradients(parameters)
        if self._target == self._top:
            self._lay_down(bucket, slots, gradients)
        else:
            foreach_add_(bucket.views(self._top - 1, slots), gradients)
            self._carry(bucket, slots)
        for parameter in parameters:
            parameter.grad = None

    def _lay_down(self, bucket: Bucket, slots: Sequence[int], gradients: list[Tensor]) -> None:
        """Store 0.0 + g, not a copy: it turns -0.0 into 0.0, which makes zeros neutral in sums."""
        views = bucket.views(self._top, slots)
        if len(slots) == 1:
            torch.add(gradients[0], 0.0, out=views[0])
            return
        foreach_copy_(views, gradients)
        span = bucket.span(self._top, slots)
        foreach_add_(views if span is None else [span], 0.0)

    def end_leaf(self, bucket: Bucket) -> None:
        """Count a leaf without a gradient as zeros."""
        if not bucket.missing:
            return
        slots = [slot for slot, fired in enumerate(bucket.fired) if not fired]
        if self._target == self._top:
            foreach_zero_(bucket.views(self._top, slots))
        else:
            self._carry(bucket, slots)

    def _carry(self, bucket: Bucket, slots: Sequence[int]) -> None:
        for number in range(self._top - 1, self._target, -1):
            foreach_add_(bucket.views(number - 1, slots), bucket.views(number, slots))

    def forget(self) -> None:
        """See `Sums.forget`; the other ranks learn of it in place of the first leaf's index."""
        self.begin_step()
        self.first_leaf = FORGOTTEN

    def begin_step(self) -> None:
        """See `Sums.begin_step`."""
        self._stack = LeafStack()
        self.num_leaves, self.first_leaf = 0, None


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    found = [parameter.grad for parameter in parameters]
    return [g.detach() if g.requires_grad else g for g in found if g is not None]
