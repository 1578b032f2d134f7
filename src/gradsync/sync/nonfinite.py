"""Gradients with nan or inf: reported by the rank that has them, before sums hide it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gradsync.comm.finite import non_finite

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("gradsync")

_CUDA_STEPS = 100
"""Steps between two checks on CUDA, where each check waits for the device."""


class NonFinite:
    """One warning when this rank's gradients become nan or inf, until they are finite again.

    Per step: `look` before gradients are sent, in one or several parts; then `step_ends`.
    """

    def __init__(self) -> None:
        self._step = 0
        self._said = False
        self._found: list[str] = []

    def look(self, named: Iterable[tuple[str, Tensor]], *, on_cuda: bool) -> None:
        """Note the names of gradients that are not finite: reads their memory once."""
        if on_cuda and self._step % _CUDA_STEPS:
            return
        if found := non_finite(named):
            self._found.append(found)

    def step_ends(self, rank: int) -> None:
        """Warn about this step's findings; steps are counted from the first one of this model."""
        self._step += 1
        if self._found and not self._said:
            log.warning(
                "rank %d, step %d: nan or inf in this rank's gradient of %s; every rank gets it "
                "with the next sum or average",
                *(rank, self._step, ", ".join(self._found)),
            )
        self._said, self._found = bool(self._found), []
