"""Flat memory of gradients, and the accumulation of a rank's own micro-batches in it.

`Bucket` holds gradients that are sent together. `Sums` adds them in order of arrival.
`TreeSums` adds them along the fixed tree, defined by the index functions at the top.

[Note: The tree] A step's gradient is defined without reference to ranks. Leaf i is micro-batch i of
the global batch. Node (level, index) covers the leaves `index * 2**level` up to, but not including,
`(index + 1) * 2**level`. Its value is left child + right child; a child without leaves is left
out:

    level 2             (2,0) ----------------- (2,1)
    level 1       (1,0) ----- (1,1)                |          6 leaves: 6 and 7 do not exist,
    level 0      0 --- 1     2 --- 3     4 --- 5  (1,2)       so (2,1) is (1,2)

Leaf gradients contain no -0.0 (they are computed as `0.0 + g`), and neither do their sums. For such
numbers x + 0.0 is x bit for bit, so a leaf without a gradient for a parameter may count as zeros or
be left out. Rank boundaries do not appear, so any number of ranks gives the same sum.

A rank owns consecutive leaves and can finish every node within its range. It sends the largest of
these nodes, at most 2 log2(leaves) of them.

[Note: Rounded nodes] With nodes in bf16, every node (leaves and root included) is rounded to bf16
(to nearest, ties to even) when it is formed, no matter which rank forms it or whether it is sent.
Rounding belongs to (node, element), never to a rank, so bits do not depend on ranks. -0.0 becomes
0.0 after a leaf is rounded; a sum of two bf16 numbers is never rounded to zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, groupby, pairwise
from typing import TYPE_CHECKING

import torch

from gradsync.core.torch_private import foreach_add_, foreach_copy_, foreach_zero_, version
from gradsync.errors import ConfigError, RunError
from gradsync.sync.layout import BucketPlan

if TYPE_CHECKING:
    from torch import Tensor, nn


TREE_VERSION = 1
"""Part of the numeric fingerprint, since another tree gives other bits."""

UNKNOWN = -1
"""Stands for a leaf index that the caller did not give."""

FORGOTTEN = -2
"""Stands for the first leaf's index on a rank that discards the step."""

Node = tuple[int, int]
"""(level, index)."""
Pair = tuple[int, int]
"""(left, right): add operand `right` to operand `left`."""


def push_leaf(nodes: list[Node], leaf: int) -> int:
    """Fold leaf number `leaf` into the largest finished `nodes`, which are in leaf order: a binary
    counter. Node k is in the caller's slot k; returns the slot of the node that the leaf finishes.

    The caller adds the leaf to slot `len(nodes)` - 1 as counted before the call, that slot to the
    one below and so on, down to the returned slot. If that is `len(nodes)`, it just stays.
    """
    level, index = 0, leaf
    while nodes and index % 2 == 1 and nodes[-1] == (level, index - 1):
        nodes.pop()
        level, index = level + 1, index // 2
    nodes.append((level, index))
    return len(nodes) - 1


def largest_nodes(leaves: range) -> list[Node]:
    """The largest nodes that lie within `leaves`, in leaf order."""
    nodes: list[Node] = []
    for leaf in leaves:
        push_leaf(nodes, leaf)
    return nodes


def checked_shares(told: Sequence[tuple[int, int]]) -> list[range]:
    """Each rank's leaves, from (number, index of the first or `UNKNOWN`) of each rank; consecutive
    in rank order.

    Raises:
        RunError: a rank's first leaf does not follow the leaves of the rank below.
    """
    edges = [0, *accumulate(count for count, _ in told)]
    ranges = [range(first, last) for first, last in pairwise(edges)]
    for rank, (leaves, (_, first)) in enumerate(zip(ranges, told, strict=True)):
        if first not in (UNKNOWN, leaves.start):
            raise RunError(
                f"rank {rank}'s first micro-batch is {first}, but the ranks below "
                f"it have micro-batches 0..{leaves.start - 1}: micro-batches must follow each "
                "other in rank order without gaps (as gs.loader deals them, given one "
                "global_batch_size); sync.step() comes after the loop over a batch, not in it"
            )
    return ranges


def merges_of(nodes: Sequence[Node], wanted: Sequence[Node]) -> tuple[list[Pair], list[int]]:
    """Plan how to add `nodes` (in leaf order, slot k holding nodes[k]) up to the `wanted` nodes:
    the additions in order, and the final slot of each wanted node; -1 for one without leaves."""
    merges: list[Pair] = []
    starts = [index << level for level, index in nodes]

    def value(level: int, index: int, first: int, last: int) -> int:
        """Slot that will hold node (level, index), the sum of slots first .. last-1."""
        if last == first:
            return -1
        if last == first + 1:
            return first
        middle = first
        while middle < last and starts[middle] < (2 * index + 1) << (level - 1):
            middle += 1
        left = value(level - 1, 2 * index, first, middle)
        right = value(level - 1, 2 * index + 1, middle, last)
        if left >= 0 and right >= 0:
            merges.append((left, right))
        return left if left >= 0 else right

    slots, first = [], 0
    for level, index in wanted:
        end, last = (index + 1) << level, first
        while last < len(nodes) and starts[last] < end:
            last += 1
        slots.append(value(level, index, first, last))
        first = last
    assert first == len(nodes), "every node must lie below a wanted one"
    return merges, slots


def at_once(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """`pairs` in rounds: a round uses no buffer twice and depends only on earlier rounds."""
    rounds: list[list[Pair]] = []
    ready: dict[int, int] = {}
    for left, right in pairs:
        turn = max(ready.get(left, 0), ready.get(right, 0))
        rounds += [[]] * (turn + 1 - len(rounds))
        rounds[turn] = [*rounds[turn], (left, right)]
        ready[left] = ready[right] = turn + 1
    return rounds


def root(num_leaves: int) -> Node:
    """The node above all leaves."""
    return (max(num_leaves - 1, 0).bit_length(), 0)


@dataclass(frozen=True, slots=True)
class SumPlan:
    """How to add up the buffers of ranks that share memory."""

    operands: tuple[tuple[int, int], ...]
    """(rank, buffer number on that rank)."""
    pairs: tuple[Pair, ...]
    """Pairs of operands, in a valid order of execution."""
    end: int
    """The operand that then holds the sum; -1 if no rank had a leaf."""
    num_buffers: int
    """Largest number of buffers on any rank."""


def plan_sum(told: Sequence[tuple[int, int]]) -> SumPlan:
    """Plan the sum along the tree, from what `checked_shares` takes; with one leaf per rank, a
    balanced tree over ranks. A rank has a buffer for each of its largest nodes, or for each leaf if
    indices are unknown."""
    ranges = checked_shares(told)
    operands: list[tuple[int, int]] = []
    nodes: list[Node] = []
    for rank, (leaves, (_, first)) in enumerate(zip(ranges, told, strict=True)):
        own = [(0, leaf) for leaf in leaves] if first == UNKNOWN else largest_nodes(leaves)
        operands += [(rank, number) for number in range(len(own))]
        nodes += own
    merges, ends = merges_of(nodes, [root(ranges[-1].stop)])
    num_buffers = max((number + 1 for _, number in operands), default=1)
    return SumPlan(tuple(operands), tuple(merges), ends[0], num_buffers)


class Bucket:
    """Gradients that are sent together.

    `flat(0)` receives the sums over all ranks, and `.grad` points into it. Other buffers hold nodes
    that the tree order does not allow to be added yet; one micro-batch per rank needs none of them.

    Args:
        plan: which parameters, and their places.
        parameters: all parameters of the model.
        node_dtype: dtype of the buffers, see [Note: Rounded nodes]; None keeps the gradients' own.
        number: place in the order of launching, for profilers.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: list[nn.Parameter],
        node_dtype: torch.dtype | None = None,
        *,
        number: int = 0,
    ) -> None:
        self.plan, self.number = plan, number
        self.parameters = [parameters[slot.index] for slot in plan.slots]
        self.dtype = self.parameters[0].dtype
        """Dtype of the gradients."""
        real = self.dtype.is_floating_point
        self._node_dtype = node_dtype if node_dtype is not None and real else self.dtype
        self.rounded = self._node_dtype != self.dtype
        """Whether the buffers' dtype differs from the gradients'."""
        self._sums: tuple[Tensor, list[Tensor]] | None = None
        self.touched = [False] * len(plan.slots)
        """Slots that got a gradient in this step."""
        self.fired = [False] * len(plan.slots)
        """Slots that got a gradient from the current micro-batch."""
        self.missing = len(plan.slots)
        """Number of slots without a gradient from the current micro-batch."""
        self.waiting: list[int] = []
        """Slots whose gradient from the current micro-batch is still in `.grad`."""
        self.waiting_elements = 0
        self.kept: dict[int, Tensor] = {}
        """Gradients, by slot, that were in `.grad` before backward: memory that the user owns."""
        self._flats: list[Tensor] = []
        self._views: list[list[Tensor]] = []
        self._parts: dict[tuple[int, int], list[Tensor]] = {}

    def flat(self, number: int) -> Tensor:
        """Buffer `number`, shape [plan.numel]; allocated on first use, with padding zero."""
        while len(self._flats) <= number:
            device = self.parameters[0].device
            memory = torch.zeros(self.plan.numel, dtype=self._node_dtype, device=device)
            self.adopt(len(self._flats), memory)
        return self._flats[number]

    def adopt(self, number: int, memory: Tensor) -> None:
        """Move buffer `number` into `memory`, [plan.numel], with its contents if it has any.

        The buffer exists already, or is the next one.
        """
        for known in self._flats[number : number + 1]:
            memory.copy_(known)
        self._flats[number : number + 1] = [memory]
        self._views[number : number + 1] = [self._views_into(memory)]
        self._parts.clear()

    def _views_into(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[slot.offset : slot.offset + slot.numel].view(parameter.shape)
            for slot, parameter in zip(self.plan.slots, self.parameters, strict=True)
        ]

    def views(self, number: int, slots: Sequence[int]) -> list[Tensor]:
        """Parameters' parts of buffer `number`, in their shapes."""
        if len(self._views) <= number:
            self.flat(number)
        views = self._views[number]
        return [views[slot] for slot in slots]

    def view(self, number: int, slot: int) -> Tensor:
        """One parameter's part of buffer `number`."""
        if len(self._views) <= number:
            self.flat(number)
        return self._views[number][slot]

    def sums(self) -> list[Tensor]:
        """Each parameter's sum over all ranks, in its shape, dtype and strides (a fused optimizer
        walks both memories in the same order). The next step overwrites this memory."""
        views = self.views(0, range(len(self.plan.slots)))
        if self.rounded:
            if self._sums is None:
                flat = torch.empty_like(self.flat(0), dtype=self.dtype)
                self._sums = flat, self._views_into(flat)
            self._sums[0].copy_(self.flat(0))
            views = self._sums[1]
        return [
            view if parameter.is_contiguous() else torch.empty_like(parameter).copy_(view)
            for view, parameter in zip(views, self.parameters, strict=True)
        ]

    def memory(self) -> Tensor | None:
        """Flat memory of what `gradients` yields; None if a gradient lies elsewhere."""
        if self.kept or not all(parameter.is_contiguous() for parameter in self.parameters):
            return None
        return self.flat(0) if self._sums is None else self._sums[0]

    def parts(self, number: int, most: int | None = None) -> list[Tensor]:
        """Flat memory of buffer `number`: all, or only parameters of at most `most` elements, in as
        few tensors as possible."""
        if most is None:
            return [self.flat(number)]
        key = number, most
        if key not in self._parts:
            small = [place for place, slot in enumerate(self.plan.slots) if slot.numel <= most]
            turn = count()
            runs = [list(run) for _, run in groupby(small, lambda place: place - next(turn))]
            self._parts[key] = [part for r in runs if (part := self.span(number, r)) is not None]
        return self._parts[key]

    def gradients(self, used: Sequence[bool]) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Each parameter with its new `.grad`: the sum over all ranks, in the user's memory if the
        gradient was there before; None if no rank has a gradient."""
        sums = zip(self.plan.slots, self.parameters, self.sums(), strict=True)
        for place, (slot, parameter, total) in enumerate(sums):
            own = self.kept.get(place)
            if not used[slot.index]:
                yield parameter, None
            else:
                yield parameter, total if own is None else own.copy_(total)

    def span(self, number: int, slots: Sequence[int]) -> Tensor | None:
        """The part of buffer `number` that holds `slots` and otherwise only padding; None if other
        slots lie between them."""
        first, last = min(slots), max(slots)
        if last - first + 1 != len(slots):
            return None
        start, end = self.plan.slots[first].offset, self.plan.slots[last]
        return self.flat(number)[start : end.offset + end.numel]

    def mark(self, slot: int) -> None:
        """Note the slot's first gradient from this micro-batch, in `.grad`."""
        self.fired[slot] = self.touched[slot] = True
        self.missing -= 1
        self.waiting.append(slot)
        self.waiting_elements += self.plan.slots[slot].numel

    def keep(self, slot: int) -> None:
        """Note a gradient in the user's memory, where torch has added the new gradient to the old.
        A gradient that was written in another way (two uses of a tied weight) costs a copy."""
        grad = self.parameters[slot].grad
        if grad is None or grad is self.view(0, slot) or grad.requires_grad:
            return
        if version(grad):
            self.kept[slot] = grad

    def begin_micro_batch(self) -> None:
        """Expect every slot again."""
        self.missing = len(self.plan.slots)
        self.fired = [False] * self.missing
        self.waiting, self.waiting_elements = [], 0

    def free(self) -> None:
        """Free the memory; the next use allocates it again."""
        self._flats.clear()
        self._views.clear()
        self._parts.clear()


class Sums:
    """Accumulates micro-batches in order of arrival, in one buffer; `.grad` is a view of it."""

    num_buffers = 1
    """Number of buffers in use per bucket."""
    num_micro_batches = 0
    """Micro-batches begun in this step."""
    first_index: int | None = None
    """Global index of the first one; None if the caller gave none or it does not matter."""

    def begin_step(self, first_index: int | None = None) -> None:
        """Start over; with `FORGOTTEN` this rank's part of the step is discarded."""
        self.num_micro_batches, self.first_index = 0, first_index
        self.num_buffers = type(self).num_buffers

    def begin_micro_batch(self, index: int | None) -> None:
        """Begin micro-batch `index` of the global batch (None: unknown)."""
        self.num_micro_batches += 1

    def fold(self, bucket: Bucket, *, ends: bool = False) -> None:
        """Accumulate the gradients that wait in `.grad`, small ones in one call. If the micro-batch
        `ends`, slots without a gradient from it add nothing.

        Copies new gradients; after the first micro-batch autograd itself adds to the view. A
        `.grad` that is not the view holds the whole gradient: it is new, or was cleared in between.
        """
        slots, bucket.waiting, bucket.waiting_elements = bucket.waiting, [], 0
        views = bucket.views(0, slots)
        parameters = [bucket.parameters[slot] for slot in slots]
        fresh = [(p, v) for p, v in zip(parameters, views, strict=True) if p.grad is not v]
        if fresh:
            gradients = _gradients([parameter for parameter, _ in fresh])
            foreach_copy_([view for _, view in fresh], gradients)
            for parameter, view in fresh:
                parameter.grad = view


class TreeSums(Sums):
    """Accumulates along the fixed tree, whose leaves are micro-batches.

    There is one buffer for each finished node. Without global indices, a rank knows its nodes only
    after all ranks have exchanged their numbers of micro-batches. Until then each of them keeps its
    own buffer.
    """

    num_buffers = _top = _target = 0

    def begin_micro_batch(self, index: int | None) -> None:
        """Begin a micro-batch; ConfigError: a rank's indices are not consecutive."""
        if self.num_micro_batches == 0:
            self.first_index = index
            self._nodes: list[Node] = []
        first = self.first_index
        expected = None if first is None else first + self.num_micro_batches
        if index != expected:
            raise ConfigError(
                f"micro-batch {index} came where micro-batch {expected} was due: a rank's "
                "micro-batches follow each other, as gs.loader deals them, and sync.step() (or "
                "discard()) ends a step before the next one's come"
            )
        self._top = self.num_buffers
        self._target = self._top if index is None else push_leaf(self._nodes, index)
        self.num_micro_batches += 1
        self.num_buffers = self.num_micro_batches if index is None else len(self._nodes)

    def fold(self, bucket: Bucket, *, ends: bool = False) -> None:
        """Push new gradients down the stack; leaves `.grad` empty. If the micro-batch `ends`,
        missing ones count as zeros."""
        slots, bucket.waiting, bucket.waiting_elements = bucket.waiting, [], 0
        parameters = [bucket.parameters[slot] for slot in slots]
        gradients = _gradients(parameters)
        missing = [slot for slot, fired in enumerate(bucket.fired) if not fired] if ends else []
        if self._target == self._top:
            if slots:
                self._lay_down(bucket, slots, gradients)
            if missing:
                foreach_zero_(bucket.views(self._top, missing))
        elif slots or missing:
            left = bucket.views(self._top - 1, slots)
            if slots and left[0].dtype != gradients[0].dtype:  # see [Note: Rounded nodes]
                gradients = [gradient.to(left[0].dtype) for gradient in gradients]
            if slots:
                foreach_add_(left, gradients)
            slots = slots + missing
            for number in range(self._top - 1, self._target, -1):
                foreach_add_(bucket.views(number - 1, slots), bucket.views(number, slots))
        for parameter in parameters:
            parameter.grad = None

    def _lay_down(self, bucket: Bucket, slots: Sequence[int], gradients: list[Tensor]) -> None:
        """Store 0.0 + g instead of a copy: it turns -0.0 into 0.0, so zeros are neutral in sums."""
        views = bucket.views(self._top, slots)
        if len(slots) == 1 and views[0].dtype == gradients[0].dtype:
            torch.add(gradients[0], 0.0, out=views[0])
            return
        foreach_copy_(views, gradients)
        span = bucket.span(self._top, slots)
        foreach_add_(views if span is None else [span], 0.0)


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    found = [parameter.grad for parameter in parameters]
    return [g.detach() if g.requires_grad else g for g in found if g is not None]
