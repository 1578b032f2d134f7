"""Stacks of all ranks when one is late or dead: a file for each, and torch's flight record.

    FOLDER/rank-1.txt           all Python threads of that rank, written by itself
    FOLDER/rank-1.flight.json   the collectives that torch has recorded there, if it has

The folder is the run directory's `stacks`, the argument of `gs.init(stacks_dir=…)`, or a private
temporary one. It is created when there is something to write.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
import traceback
from pathlib import Path

from gradsync.core.files import PRIVATE, printable, replace_text
from gradsync.runtime.frames import read_stack, running_threads, stack_lines


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
