"""Tells of parameters that some ranks use and others do not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger("gradsync")


class UnusedWarning:
    """Said once per parameter, in one line for all of a step.

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
        found = [
            index
            for index, (anywhere, here) in enumerate(zip(used, touched, strict=True))
            if anywhere and not here and index not in self._said
        ]
        self._said.update(found)
        if found:
            first = self._names[found[0]]
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            log.warning(
                "parameter %r%s got no gradient on rank %d in this step, but did on another one; "
                "here that counts as zeros (said once)",
                *(first, more, rank),
            )
