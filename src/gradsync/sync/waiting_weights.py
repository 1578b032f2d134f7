"""Weights whose update is made when the next forward needs them.

Modules wait for their own parameters before their forward, as FSDP2's and DeAR's do (Zhang et al.
2023, arXiv 2302.12445). Nothing else waits: a program that reads a weight or an optimizer's state
between two steps in another way calls `WaitingWeights.wait` first. `gradsync train` does.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gradsync.comm.base import Work
from gradsync.core.files import one_line
from gradsync.core.torch_private import FRAMES
from gradsync.errors import RunError

log = logging.getLogger("gradsync")


class WaitingWeights:
    """A model's weights after a step: each is up to date when its module's forward begins.

    Args:
        model: its attribute `read_after`, if it has one, says which of its modules' weights its
            own forward reads, and the module whose forward comes before: {"head": "norm"}.
    """

    def __init__(self, model: nn.Module) -> None:
        own = {m: [*m.parameters(recurse=False)] for m in model.modules()}
        reads: Any = getattr(model, "read_after", {})
        for name, before in reads.items():
            if (module := getattr(model, name)) is not None:
                own[getattr(model, before)] += own[module]
        self._modules = [(m, held) for m, held in own.items() if any(p.requires_grad for p in held)]
        self._lock = threading.RLock()
        self._works: dict[int, Work] = {}
        self._numbers: dict[int, int] = {}
        """The bucket of each parameter that waits, by its id."""
        self._kind = ""
        self._hooks: list[Any] = []
        self._broken = ""
        self._update: Callable[[int], object] = _nothing
        self._ended: Callable[[], object] = _nothing

    def expect(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        works: Sequence[Work],
        update: Callable[[int], object],
        *,
        late: bool,
        ended: Callable[[], object] | None = None,
    ) -> None:
        """Call `update(number)` once for each bucket, when its work is done and one of its
        parameters is needed, or now, unless `late`; and `ended()`, if given, after the last."""
        with self._lock:
            self._update, self._ended = update, ended or _nothing
            self._works, self._kind = dict(enumerate(works)), buckets[0][0].device.type
            self._numbers = {id(p): number for number, held in enumerate(buckets) for p in held}
            if not late:
                self.wait()
                return
            self._hooks = [
                module.register_forward_pre_hook(partial(self._before_forward, held))
                for module, held in self._modules
            ]

    def wait(self) -> None:
        """Bring all of them up to date; asks nothing of other ranks."""
        with self._lock:
            for number in sorted(self._works, reverse=True):
                self._arrive(number)

    def _before_forward(self, held: Sequence[nn.Parameter], *_: Any) -> None:
        for parameter in held:
            if (number := self._numbers.get(id(parameter))) is not None:
                self._arrive(number)

    def _arrive(self, number: int) -> None:
        """Update the weights of a bucket, whatever mode the forward runs in: state that is made in
        inference mode could not be changed."""
        with self._lock:
            if self._broken:
                raise RunError(f"{self._broken}: close this handle, and go back to a checkpoint")
            if number not in self._works:
                return
            self._works[number].wait()
            self._broken = f"the update of weights was interrupted at bucket {number}"
            autocast = torch.autocast(self._kind, enabled=False)
            with torch.no_grad(), torch.inference_mode(False), autocast:
                self._update(number)
            del self._works[number]
            self._broken = ""
            if not self._works:
                self._ended()
                self._forget()

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._numbers, self._works = [], {}, {}
        self._update = self._ended = _nothing

    def close(self) -> None:
        """Wait for all, and where they do not come say so."""
        try:
            self.wait()
        except Exception as error:
            log.warning(
                "the weights of the last step did not all arrive (%s): go back to a checkpoint",
                one_line(error),
            )
        self._forget()
        self._broken = ""


def _nothing(*_: Any) -> None:
    """Nothing is left to do."""


def has_compiled() -> bool:
    """Whether this process has compiled anything (or may have: where torch does not count). Code
    with other hooks than before would be compiled once more."""
    frames = sys.modules.get(FRAMES)
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0
