"""Weights that are updated when the next forward needs them.

A module waits for its own parameters before its forward, as in FSDP2 and DeAR (Zhang et al. 2023,
arXiv 2302.12445). Nothing else waits. A program that reads a weight or an optimizer's state between
two steps in another way must call `WaitingWeights.wait` first; `gradsync train` does.
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
    """A model's weights after a step; each is up to date when its module's forward begins.

    Args:
        model: if it has an attribute `read_after`, this names the modules whose weights the model's
            own forward reads, each with the module whose forward comes before: {"head": "norm"}.
    """

    def __init__(self, model: nn.Module) -> None:
        own = {m: [*m.parameters(recurse=False)] for m in model.modules()}
        reads: Any = getattr(model, "read_after", {})
        for name, before in reads.items():
            if (module := getattr(model, name)) is not None:
                own[getattr(model, before)] += own[module]
        self._modules = [(m, held) for m, held in own.items() if any(p.requires_grad for p in held)]
        self._lock = threading.RLock()
        self._hooks: list[Any] = []
        self._broken = self._kind = ""
        self._forget()

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
        parameters is needed; immediately unless `late`. Then call `ended()`, if given."""
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
        """Bring all weights up to date; needs no action by other ranks."""
        with self._lock:
            for number in sorted(self._works, reverse=True):
                self._arrive(number)

    def _before_forward(self, held: Sequence[nn.Parameter], *_: Any) -> None:
        for parameter in held:
            if (number := self._numbers.get(id(parameter))) is not None:
                self._arrive(number)

    def _arrive(self, number: int) -> None:
        """Update the weights of a bucket with the forward's modes turned off: state that is made in
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
        self._hooks = []
        self._works: dict[int, Work] = {}
        self._numbers: dict[int, int] = {}
        """The bucket of each waiting parameter, by the parameter's id."""
        self._update: Callable[[int], object] = _nothing
        self._ended: Callable[[], object] = _nothing

    def close(self) -> None:
        """Wait for all weights, and report if they do not arrive."""
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
    """Do nothing."""


def has_compiled() -> bool:
    """Whether this process has compiled anything (or may have, if torch does not count). With other
    hooks than before, code would be compiled again."""
    frames = sys.modules.get(FRAMES)
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0
