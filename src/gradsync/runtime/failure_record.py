"""The record of a run's first failure: written by the rank that failed, read by all others.

It travels as JSON through the rendezvous store. A reader takes whatever it finds there: a rank of
another version, or one that died while it wrote, must not take the reader along.
"""

from __future__ import annotations

import json
import socket
import traceback
from dataclasses import dataclass

from gradsync.errors import GradsyncError, PeerError
from gradsync.runtime.signals import INTERRUPTED, interrupted_line

_SUMMARY_LIMIT, _TRACEBACK_LIMIT = 2_000, 20_000
_RECORD_LIMIT = 10 * _TRACEBACK_LIMIT  # bytes: JSON writes up to six for a character


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a run, as the failing rank wrote it down."""

    rank: int
    host: str
    summary: str
    traceback_text: str
    """Empty for errors that gradsync raises on purpose: their one line says it all."""
    exit_code: int = 1

    def as_error(self) -> PeerError:
        """The exception that the other ranks raise."""
        message = self.summary
        if self.rank >= 0:
            message = f"rank {self.rank} on {self.host} failed first: {self.summary}"
        if self.traceback_text:
            message += f"\n--- traceback of rank {self.rank} ---\n{self.traceback_text.rstrip()}"
        return PeerError(
            message,
            rank=self.rank,
            traceback_text=self.traceback_text,
            exit_code=self.exit_code,
        )


def read_failure(record: bytes) -> Failure:
    """The failure that a rank wrote down; one of rank -1 when `record` is none of ours."""
    try:
        failure = Failure(**json.loads(record)) if len(record) <= _RECORD_LIMIT else None
    except (ValueError, TypeError, RecursionError):
        failure = None
    if failure is not None and _is_sound(failure):
        return failure
    return Failure(
        -1,
        "",
        f"a rank failed and left an unreadable record of it ({len(record)} bytes, "
        f"{record[:40]!r}); its own output says why",
        "",
    )


def _is_sound(failure: Failure) -> bool:
    numbers, texts = (failure.rank, failure.exit_code), (failure.host, failure.summary)
    return (
        all(type(number) is int for number in numbers)
        and 0 <= failure.rank < 2**31
        and 0 < failure.exit_code < 256
        and all(isinstance(text, str) for text in (*texts, failure.traceback_text))
    )


def describe(error: BaseException, rank: int, reason: str = "") -> Failure:
    """The record that rank `rank` publishes about `error`.

    Args:
        reason: one line that says more than the error's own.
    """
    host = socket.gethostname()
    if isinstance(error, GradsyncError):
        return Failure(rank, host, _shortened(str(error)), "", error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        where = interrupted_line(error)
        said = "interrupted (Ctrl-C)" + (f" in {where}" if where else "")
        return Failure(rank, host, said, "", INTERRUPTED)
    text = "".join(traceback.format_exception(error))[-_TRACEBACK_LIMIT:]
    summary = reason or traceback.format_exception_only(error)[-1].strip()
    return Failure(rank, host, _shortened(summary), text)


def _shortened(text: str) -> str:
    return text if len(text) <= _SUMMARY_LIMIT else text[:_SUMMARY_LIMIT] + " …"
