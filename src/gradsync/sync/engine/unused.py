"""Tells of parameters that some ranks use and others do not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger("gradsync")


class UnusedWarning:
    """Said once per parameter.

    Args:
        names: of the parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._said: set[int] = set()

    def say(self, used: Sequence[bool], touched: Sequence[bool], rank: int) -> None:
        """Warn about parameters that a rank used (`used`) and this one did not (`touched`)."""
        if list(used) == list(touched):
            return
        for index, (anywhere, here) in enumerate(zip(used, touched, strict=True)):
            if anywhere and not here and index not in self._said:
                self._said.add(index)
                log.warning(
                    "parameter %r got no gradient on rank %d in this step, but did on another "
                    "one; here it counts as zeros (said once)",
                    self._names[index],
                    rank,
                )
