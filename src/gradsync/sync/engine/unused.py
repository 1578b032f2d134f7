"""Warning about parameters that some ranks use and others do not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger("gradsync")


class UnusedWarning:
    """Warns once per parameter, in one line for all of a step.

    Args:
        names: of the parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._said: set[int] = set()

    def say(self, used: Sequence[bool], touched: Sequence[bool], rank: int) -> None:
        """Warn about parameters with a gradient on some rank and none on this one.

        Args:
            used: for each parameter, whether any rank has a gradient.
            touched: for each parameter, whether this rank has one.
            rank: this rank.
        """
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
