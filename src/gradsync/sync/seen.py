"""Detection of parameters with a gradient on this rank, through FSDP2's public hooks only.

While a block computes, FSDP2 replaces the sharded parameters by whole ones. Gradients are ready
there first; the sharded `.grad` shows only the sum over all ranks, zeros included.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradsync.sync.reducer import trainable
from gradsync.sync.stopwatch import Stopwatch


class Seen:
    """Records gradients; made before `model` is sharded.

    Hooks on parameters refer to this object, so it must not keep the modules: Python cannot collect
    a cycle through a tensor's hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        named = trainable(model)
        index_of = {id(parameter): index for index, (_, parameter) in enumerate(named)}
        self._homes = [
            (module, attribute, index_of[id(parameter)])
            for module in model.modules()
            for attribute, parameter in module.named_parameters(recurse=False)
            if id(parameter) in index_of
        ]
        self._count = len(named)
        self._indices: set[int] = set()
        self._handles: list[Any] = []
        self.enclosed = False
        """Whether a micro-step is in progress."""
        self.outside = False
        """Whether a gradient came outside of a micro-step."""
        self.stopwatch = Stopwatch(on_cuda=any(p.is_cuda for _, p in named))
        """Started by each gradient, so it marks the end of this rank's own work."""

    def watch(self, units: Iterable[nn.Module]) -> None:
        """Watch the gradients of each unit; call it once, after sharding, root last."""
        homes, self._homes = self._homes, []
        for unit in units:
            inside = set(unit.modules())
            pending = [home for home in homes if home[0] in inside]
            homes = [home for home in homes if home[0] not in inside]
            self._handles.append(unit.register_forward_pre_hook(partial(self._attach, pending)))

    def take(self) -> list[bool]:
        """For each trainable parameter, whether it got a gradient since the last call."""
        flags = [index in self._indices for index in range(self._count)]
        self._indices.clear()
        self.outside = False
        return flags

    def any(self) -> bool:
        """Whether any gradient has come since the last `take`."""
        return bool(self._indices)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _attach(self, pending: list[tuple[nn.Module, str, int]], *_: Any) -> None:
        """Attach hooks after FSDP2's own hook: the unit's parameters are whole now, and stay the
        same objects from here on."""
        while pending:
            module, attribute, index = pending.pop()
            parameter = getattr(module, attribute)
            assert not isinstance(parameter, DTensor), "FSDP2 gathers before this hook"
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(partial(self._mark, index))
            )

    def _mark(self, index: int, _: Tensor) -> None:
        self._indices.add(index)
        self.outside |= not self.enclosed
        self.stopwatch.start()
