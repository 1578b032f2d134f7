"""How a rank adds up the gradients of its own leaves, before anything travels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from gradsync.errors import ConfigError
from gradsync.sync.engine.bucket import Bucket
from gradsync.sync.engine.leaf_tree import LeafStack

if TYPE_CHECKING:
    from torch import nn


FORGOTTEN = -2
"""In place of a leaf's index: this step is given up."""


class Sums(Protocol):
    """Called by the engine: `begin_leaf`, `fold` as gradients arrive, `end_leaf` per bucket."""

    num_leaves: int
    """Leaves begun in this step."""
    first_leaf: int | None
    """Global index of the first one; None when nobody said it."""

    @property
    def num_buffers(self) -> int:
        """How many of a bucket's buffers hold something."""
        ...

    def begin_leaf(self, index: int | None) -> None:
        """The next gradients belong to leaf `index` of the global batch (None: not known)."""
        ...

    def fold(self, bucket: Bucket, slot: int, parameter: nn.Parameter) -> None:
        """Take in the gradient that has just arrived in `parameter.grad`."""
        ...

    def end_leaf(self, bucket: Bucket) -> None:
        """Account for the slots from which this leaf brought nothing."""
        ...

    def forget(self) -> None:
        """This rank's leaves of this step do not count, nor will anybody's."""
        ...

    def begin_step(self) -> None:
        """Begin with no leaves."""
        ...


class PlainSums:
    """In the order in which they come, into one buffer; `.grad` is a view of it."""

    num_buffers = 1

    def __init__(self) -> None:
        self.num_leaves = 0
        self.first_leaf: int | None = None

    def begin_leaf(self, index: int | None) -> None:
        """See `Sums.begin_leaf`; where a leaf stands does not matter here."""
        self.num_leaves += 1

    def fold(self, bucket: Bucket, slot: int, parameter: nn.Parameter) -> None:
        """After the first leaf autograd itself adds to the view, and nothing is left to do.

        A `.grad` that is not the view holds everything that shall count: it is new, or somebody
        cleared it in between.
        """
        view, gradient = bucket.view(0, slot), parameter.grad
        assert gradient is not None
        if gradient is not view:
            view.copy_(gradient.detach())
            parameter.grad = view

    def end_leaf(self, bucket: Bucket) -> None:
        """Nothing was added, nothing is missing."""

    def forget(self) -> None:
        """See `Sums.forget`."""
        self.num_leaves = 0

    def begin_step(self) -> None:
        """See `Sums.begin_step`."""
        self.num_leaves = 0


class TreeSums:
    """Along the fixed tree, see [Note: The tree].

    When a leaf's global index is not said, which nodes it belongs to is known only once all ranks
    have told how many leaves they have: until then every leaf keeps a buffer of its own.
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
        """See `Sums.begin_leaf`; indices of a rank follow each other.

        Raises:
            ConfigError: they do not.
        """
        if self.num_leaves == 0:
            self.first_leaf = index
        expected = None if self.first_leaf is None else self.first_leaf + self.num_leaves
        if index != expected:
            raise ConfigError(
                f"leaf {index} came where leaf {expected} was due: a rank's leaves follow each "
                "other, as gs.loader deals them"
            )
        self._top = self.num_buffers
        self._target = self._top if index is None else self._stack.push(index)
        self.num_leaves += 1

    def fold(self, bucket: Bucket, slot: int, parameter: nn.Parameter) -> None:
        """The fresh gradient goes down the stack; `.grad` is empty again."""
        assert parameter.grad is not None
        gradient = parameter.grad.detach()
        if self._target == self._top:
            # 0.0 + g, not a copy: it turns -0.0 into 0.0, which makes zeros neutral in every sum.
            torch.add(gradient, 0.0, out=bucket.view(self._top, slot))
        else:
            bucket.view(self._top - 1, slot).add_(gradient)
            self._carry(bucket, slot)
        parameter.grad = None

    def end_leaf(self, bucket: Bucket) -> None:
        """A leaf without a gradient counts as zeros."""
        if not bucket.missing:
            return
        for slot, fired in enumerate(bucket.fired):
            if not fired:
                if self._target == self._top:
                    bucket.view(self._top, slot).zero_()
                else:
                    self._carry(bucket, slot)

    def _carry(self, bucket: Bucket, slot: int) -> None:
        for number in range(self._top - 1, self._target, -1):
            bucket.view(number - 1, slot).add_(bucket.view(number, slot))

    def forget(self) -> None:
        """See `Sums.forget`; the other ranks learn it in place of the first leaf's index."""
        self.begin_step()
        self.first_leaf = FORGOTTEN

    def begin_step(self) -> None:
        """See `Sums.begin_step`."""
        self._stack = LeafStack()
        self.num_leaves, self.first_leaf = 0, None
