"""Whose failure an error is, and the record of it that travels through the store (watch.py)."""

from __future__ import annotations

import dis
import json
import re
import socket
import traceback
from dataclasses import dataclass

from gradsync.core.files import one_line, printable
from gradsync.errors import GradsyncError, LatePeerError, LostPeerError, PeerError, RunError
from gradsync.runtime.signals import INTERRUPTED, interrupted_line

_CHAIN_LIMIT = 16
_SUMMARY_LIMIT, _TRACEBACK_LIMIT = 2_000, 20_000
# Gloo's messages begin with its source line, wherever torch was built.
_GLOO = re.compile(r"\[[^]\s]*\bgloo/[^]\s]*:\d+\] *|^Application timeout caused pair closure")
_LATE = re.compile(r"timed out waiting|application timeout", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a run, recorded by the failing rank or by one that found it dead."""

    rank: int  # -1: recorded by another rank
    host: str  # its host; with rank -1 the hosts of those found dead
    summary: str
    traceback_text: str
    """Empty for errors that gradsync raises on purpose: their one line suffices."""
    exit_code: int = 1
    stuck: bool = False
    """A rank is late or dead: every rank writes its stacks."""

    def as_error(self) -> PeerError:
        """The exception that the other ranks raise."""
        rank, trace = self.rank, printable(self.traceback_text)
        message = printable(self.summary)
        if rank >= 0:
            message = f"rank {rank} on {one_line(self.host)} failed first: {message}"
        if trace:
            message += f"\n--- traceback of rank {rank} ---\n{trace.rstrip()}"
        code = self.exit_code
        return PeerError(message, rank=rank, traceback_text=trace, exit_code=code, host=self.host)


def read_failure(record: bytes) -> Failure:
    """The failure that a rank recorded; one with rank -1 if `record` is not ours."""
    try:
        return Failure(**json.loads(record))
    except (ValueError, TypeError):
        said = "a rank failed and left an unreadable record of it; its own output says why"
        return Failure(-1, "", f"{said} ({record[:40]!r})", "")


def describe(error: BaseException, rank: int, cause: RunError | None = None) -> Failure:
    """The record that rank `rank` publishes about `error`; `cause` explains the error, and has the
    exit code."""
    said, trace = cause or error, ""
    code, summary = getattr(said, "exit_code", 1), str(said)
    if isinstance(error, KeyboardInterrupt):
        where = interrupted_line(error)
        summary, code = "interrupted (Ctrl-C)" + (f" in {where}" if where else ""), INTERRUPTED
    elif not isinstance(error, GradsyncError):
        trace = "".join(traceback.format_exception(error))[-_TRACEBACK_LIMIT:]
        if cause is None:
            summary = traceback.format_exception_only(error)[-1].strip()
    if len(summary) > _SUMMARY_LIMIT:
        summary = summary[:_SUMMARY_LIMIT] + " …"
    return Failure(rank, socket.gethostname(), summary, trace, code)


def communication_error(error: BaseException) -> BaseException | None:
    """The exception in `error`'s chain that a collective or a store raised.

    Torch's types and ours show it. Gloo raises a plain `RuntimeError`: its message counts if
    compiled code raised it. A `raise` in Python never counts.
    """
    from torch.distributed import DistError

    link: BaseException | None = error
    for _ in range(_CHAIN_LIMIT):
        if link is None or not isinstance(link, Exception):
            return None  # Ctrl-C and the like are this rank's own errors
        if isinstance(link, LostPeerError | DistError) or is_gloos(link):
            return link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return None


def is_gloos(error: BaseException) -> bool:
    """Whether Gloo raised it."""
    trace = error.__traceback__
    if type(error) is not RuntimeError or trace is None or not _GLOO.search(str(error)):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    raised_by = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return dis.opname[raised_by] != "RAISE_VARARGS"


def is_late(trouble: BaseException) -> bool:
    """Whether it is a timeout, of shared memory or Gloo."""
    late = is_gloos(trouble) and _LATE.search(str(trouble))
    return bool(late) or isinstance(trouble, LatePeerError)


def symptom(trouble: BaseException) -> str:
    """The first line of what a collective raised, without Gloo's source line and advice."""
    line = _GLOO.sub("", str(trouble)).partition("\n")[0] or str(trouble)
    return line.partition(". This is typically caused")[0]
