"""One bucket's memory: flat buffers, and each parameter's view into them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from gradsync.sync.engine.plan import BucketPlan

if TYPE_CHECKING:
    from torch import Tensor, nn


class Bucket:
    """Gradients that are sent together.

    `flat(0)` is the buffer in which sums over all ranks end up and into which `.grad` points. Other
    buffers hold nodes that the tree order may not add yet; one leaf per rank needs none of them.
    """

    def __init__(self, plan: BucketPlan, parameters: list[nn.Parameter]) -> None:
        self.plan = plan
        self.parameters = [parameters[slot.index] for slot in plan.slots]
        self.dtype = self.parameters[0].dtype
        self.touched = [False] * len(plan.slots)
        """Slots that got a gradient in this step."""
        self.fired = [False] * len(plan.slots)
        """Slots that got a gradient from the present leaf."""
        self.missing = len(plan.slots)
        """Number of slots that got no gradient from the present leaf."""
        self.waiting: list[int] = []
        """Slots whose gradient of the present leaf is still in `.grad`."""
        self.waiting_elements = 0
        self._flats: list[Tensor] = []
        self._views: list[list[Tensor]] = []

    def flat(self, number: int) -> Tensor:
        """Buffer `number`, shape [plan.numel]; made when first asked for, padding zero."""
        while len(self._flats) <= number:
            like = self.parameters[0]
            flat = torch.zeros(self.plan.numel, dtype=self.dtype, device=like.device)
            self._flats.append(flat)
            self._views.append(self._views_into(flat))
        return self._flats[number]

    def adopt(self, number: int, memory: Tensor) -> None:
        """Put buffer `number` into `memory`, [plan.numel], with its contents if it has any.

        It exists already, or is the next one.
        """
        if number < len(self._flats):
            memory.copy_(self._flats[number])
        else:
            assert number == len(self._flats), "buffers are made one after the other"
            self._flats.append(memory)
            self._views.append([])
        self._flats[number] = memory
        self._views[number] = self._views_into(memory)

    def _views_into(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[slot.offset : slot.offset + slot.numel].view(parameter.shape)
            for slot, parameter in zip(self.plan.slots, self.parameters, strict=True)
        ]

    def view(self, number: int, slot: int) -> Tensor:
        """One parameter's part of buffer `number`, in the parameter's shape."""
        if len(self._views) <= number:
            self.flat(number)
        return self._views[number][slot]

    def views(self, number: int, slots: Sequence[int]) -> list[Tensor]:
        """`view` of several parameters."""
        if len(self._views) <= number:
            self.flat(number)
        views = self._views[number]
        return [views[slot] for slot in slots]

    def span(self, number: int, slots: Sequence[int]) -> Tensor | None:
        """The part of buffer `number` that holds `slots` and nothing else but padding; None when
        other slots lie between them."""
        first, last = min(slots), max(slots)
        if last - first + 1 != len(slots):
            return None
        start, end = self.plan.slots[first].offset, self.plan.slots[last]
        return self.flat(number)[start : end.offset + end.numel]

    def named_sums(self, names: Sequence[str], buffers: int) -> Iterator[tuple[str, Tensor]]:
        """The parameters that have a gradient, with the contents of the first `buffers` buffers.

        Args:
            names: of all parameters of the model.
            buffers: number of buffers in use.
        """
        for place, slot in enumerate(self.plan.slots):
            for number in range(buffers if self.touched[place] else 0):
                yield names[slot.index], self.view(number, place)

    def published(self) -> list[nn.Parameter]:
        """Parameters whose `.grad` is the view into `flat(0)`."""
        return [p for slot, p in enumerate(self.parameters) if p.grad is self.view(0, slot)]

    def mark(self, slot: int) -> bool:
        """Note a gradient; False when this leaf has produced one for the slot already."""
        if self.fired[slot]:
            return False
        self.fired[slot] = self.touched[slot] = True
        self.missing -= 1
        return True

    def begin_leaf(self) -> None:
        """Expect every slot again."""
        self.missing = len(self.plan.slots)
        self.fired = [False] * self.missing
        self.waiting, self.waiting_elements = [], 0

    def begin_step(self) -> None:
        """Forget which slots were touched; the memory stays."""
        self.touched = [False] * len(self.plan.slots)

    def free(self) -> None:
        """Free the memory; the next use allocates it again."""
        self._flats.clear()
        self._views.clear()
