"""Stacks of all ranks when one is late or dead: a file for each, and torch's flight record.

    FOLDER/rank-1.txt           all Python threads of that rank, written by itself. Another rank of
                                its host writes it if it cannot: where it was last seen
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
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from gradsync.core.files import PRIVATE, printable, replace_text
from gradsync.runtime.frames import read_stack, running_threads, stack_lines
from gradsync.runtime.peers import Peers, process_state

_FRESH_S = 60.0
_MOST_ASKED = 8


class StackFiles:
    """The files of one rank, written once, to `folder`; "" for the private one."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder
        self.private_name = ""
        """Name of the private folder: equal on all ranks, and unguessable."""
        self._kept = ""

    def keep(self, peers: Peers, silent: Iterable[int], error: BaseException | None = None) -> str:
        """Write this rank's stacks, and what is known of `silent` ones on this host.

        Args:
            peers: the other ranks.
            silent: ranks that cannot write for themselves.
            error: the error that ended the main thread's wait; its traceback shows the line.

        Returns:
            The end of an error's line, which names the folder; "" if it cannot be written.
        """
        from gradsync.core.torch_private import flight_record

        if self._kept:
            return self._kept
        try:
            folder = self._made()
            own = folder / f"rank-{peers.rank}.txt"
            replace_text(own, _own_stacks(peers, error), mode=PRIVATE)
            if record := flight_record():
                replace_text(own.with_suffix(".flight.json"), record, mode=PRIVATE)
            for rank in islice(filter(peers.pids.__contains__, silent), _MOST_ASKED):
                path = folder / f"rank-{rank}.txt"
                if not path.exists() or time.time() - path.stat().st_mtime > _FRESH_S:
                    replace_text(path, _stack_of(peers, rank), mode=PRIVATE)
        except OSError:
            return ""
        self._kept = f"; stacks of the ranks are in {printable(str(folder))}"
        return self._kept

    def _made(self) -> Path:
        private = f"{tempfile.gettempdir()}/gradsync-stacks-{self.private_name}"
        folder = Path(self.folder or private).absolute()
        folder.mkdir(mode=0o777 if self.folder else 0o700, parents=True, exist_ok=True)
        if not self.folder and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
            raise OSError("another user's")
        return folder


def _own_stacks(peers: Peers, error: BaseException | None) -> str:
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    parts = [f"rank {peers.rank}, process {os.getpid()} on {socket.gethostname()}, {now}\n"]
    if error is not None:
        parts += ["--- what ended its wait\n", *traceback.format_exception(error)]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident in running_threads():
        if ident != threading.get_ident():  # it writes now; `error` has its place
            stack = stack_lines(read_stack(ident))
            parts += [f"--- thread {names.get(ident, ident)}\n", *stack]
    return printable("".join(parts))


def _stack_of(peers: Peers, rank: int) -> str:
    """The stack of a silent rank on this host."""
    process = peers.processes[rank]
    state = process_state(process.pid)
    said = f"rank {rank}, process {process.pid} on {process.host}: {state}\n"
    try:
        return f"{said}last seen in {peers.activities()[rank].where}\n"
    except RuntimeError:  # the store is gone
        return said
