"""Read the stacks of threads, and write them down when a rank is late or dead.

    FOLDER/rank-1.txt           all Python threads of that rank, written by itself
    FOLDER/rank-1.flight.json   the collectives that torch has recorded there, if it has

The folder is the run directory's `stacks`, the argument of `gs.init(stacks_dir=…)`, or a private
temporary one. It is created when there is something to write.

[Note: Reading a running stack] A frame object keeps the variables of its call alive. If another
thread holds it after the call ends, their destructors (a guard of torch restores its thread's
state, memory is freed) run late and in the wrong thread. And up to Python 3.11, creating one can
start a garbage collection, whose finalisers let the other thread run. Python then writes to the
memory of a call that has ended, and the process dies of a segmentation fault (seen with `fsdp`,
once in hours of running, or in minutes when a stack is read 3,000 times a second).

So a stack is read while no other thread runs. The GIL changes hands only between bytecodes. The
read is one call of `list` between two bytecodes; its iterators are all written in C and switch the
collector off and on. The result holds no frame.
"""

from __future__ import annotations

import gc
import os
import re
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, compress, repeat, starmap, takewhile, tee
from operator import attrgetter, is_, is_not, methodcaller
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from gradsync.core.files import PRIVATE, printable, replace_text

PACKAGE = str(Path(__file__).parents[1]) + os.sep
_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
_PYTHON = ("<frozen", *map(sysconfig.get_path, _KINDS))
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")  # of another prefix too


def is_library(file: str) -> bool:
    """Whether it belongs to Python, an installed package or an extension; not to gradsync."""
    installed = file.startswith(_PYTHON) or _PACKAGES.search(file)
    return bool(installed) and not file.startswith(PACKAGE)


class Frame(NamedTuple):
    """One call of a stack, at the time of reading."""

    code: CodeType
    line: int | None
    names: dict[str, Any]
    """The globals of its module."""
    unseen: bool
    """Whether `mark_call` has not marked this call yet."""

    @property
    def module(self) -> str:
        """Name of its module; "" for none."""
        return str(self.names.get("__name__", ""))


_READ = attrgetter("f_code", "f_lineno", "f_globals", "f_trace_lines")


def read_stack(thread: int) -> list[Frame]:
    """The frames of the thread with this identifier, innermost first; empty once it has ended."""
    return [Frame._make(each) for each in _undisturbed(map(_READ, _frames(thread)))]


def mark_call(thread: int, code: CodeType) -> None:
    """Mark the calls of `code` on this thread's stack, until they end.

    The mark is the attribute by which debuggers switch off line events of a frame.
    """
    which, frames = tee(_frames(thread))
    chosen = compress(frames, map(is_, map(attrgetter("f_code"), which), repeat(code)))
    _undisturbed(map(setattr, chosen, repeat("f_trace_lines"), repeat(False)))


def running_threads() -> list[int]:
    """The identifiers of all threads that have a Python stack."""
    return _undisturbed(map(list, starmap(sys._current_frames, [()])))[0]


def stack_lines(frames: Sequence[Frame]) -> list[str]:
    """Like `traceback.format_stack`: outermost first, with source lines."""
    rows = [(each.code.co_filename, each.line or 0, each.code.co_name) for each in reversed(frames)]
    summaries = [traceback.FrameSummary(*row) for row in rows]
    return traceback.StackSummary.from_list(summaries).format()


def _frames(thread: int) -> Iterator[Any]:
    innermost = map(methodcaller("get", thread), starmap(sys._current_frames, [()]))
    outwards = accumulate(chain(innermost, repeat("f_back")), getattr)
    return takewhile(partial(is_not, None), outwards)


def _undisturbed(found: Iterable[Any]) -> list[Any]:
    """All items of `found`, read while nothing else runs; see [Note: Reading a running stack]."""
    if not gc.isenabled():
        return list(found)
    try:
        return list(chain(starmap(gc.disable, [()]), found, starmap(gc.enable, [()])))[1:-1]
    except BaseException:
        gc.enable()
        raise


class StackFiles:
    """The files of one rank, written once, to `folder`; "" for the private one."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder
        self.private_name = ""
        """Name of the private folder: equal on all ranks, and unguessable."""
        self._kept = ""

    def keep(self, rank: int, error: BaseException | None = None) -> str:
        """Write this rank's stacks, with the traceback of the `error` that ended the main thread's
        wait.

        Returns:
            The end of an error's line, which names the folder; "" if it cannot be written.
        """
        from gradsync.core.torch_private import flight_record

        if self._kept:
            return self._kept
        private = f"{tempfile.gettempdir()}/gradsync-stacks-{self.private_name}"
        folder = Path(self.folder or private).absolute()
        own = folder / f"rank-{rank}.txt"
        try:
            folder.mkdir(mode=0o777 if self.folder else 0o700, parents=True, exist_ok=True)
            if not self.folder and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
                return ""  # another user's
            replace_text(own, _stacks(rank, error), mode=PRIVATE)
            if record := flight_record():
                replace_text(own.with_suffix(".flight.json"), record, mode=PRIVATE)
        except OSError:
            return ""
        self._kept = f"; stacks of the ranks are in {printable(str(folder))}"
        return self._kept


def _stacks(rank: int, error: BaseException | None) -> str:
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    parts = [f"rank {rank}, process {os.getpid()} on {socket.gethostname()}, {now}\n"]
    if error is not None:
        parts += ["--- what ended its wait\n", *traceback.format_exception(error)]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident in running_threads():
        if ident != threading.get_ident():  # it writes now; `error` has its place
            stack = stack_lines(read_stack(ident))
            parts += [f"--- thread {names.get(ident, ident)}\n", *stack]
    return printable("".join(parts))
