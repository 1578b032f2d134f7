"""From the exit codes of the ranks to the one exit code of the launcher."""

from __future__ import annotations

from collections.abc import Sequence
from signal import Signals

STOPPED = 75
"""Stopped after a signal with the checkpoint written; start me again."""

# Codes with a meaning of their own; every other failure is a plain 1.
_MEANINGFUL = (2, 124, 130)


def may_restart(failures: Sequence[int]) -> bool:
    """True when starting again could help: not after a usage error or a stop that was asked for."""
    return not any(code in (2, STOPPED, 130) for code in failures)


def after_failure(codes: Sequence[int | None]) -> int:
    """The launcher's exit code when `codes` are those of the ranks that ended first, or of all.

    0 when none failed. A rank that only heard of another one's failure ends with 1, so a code
    that says more counts; 75 counts only when no rank failed otherwise.
    """
    failures = [code for code in codes if code]
    if all(code == STOPPED for code in failures):
        return STOPPED if failures else 0
    return next((code for code in failures if code in _MEANINGFUL), 1)


def after_signal(codes: Sequence[int | None], received: Signals) -> int:
    """The launcher's exit code when it got `received` and the ranks ended with `codes`.

    75 when all stopped cleanly, 128 + signal when the signal itself ended a rank.
    """
    return 128 + received if -received in codes else after_failure(codes)
