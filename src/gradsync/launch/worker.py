"""Entry point of a rank that `launch_ranks` started: die with the launcher, then run the module.

    python -m gradsync.launch.worker LAUNCHER_PID MODULE ARGS…
    python -m gradsync.launch.worker LAUNCHER_PID -- PROGRAM ARGS…

Runs without torch, and takes the place of `python -m MODULE ARGS…` in every respect; a program
takes this process over.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

from gradsync.runtime.signals import signal_when_parent_ends

PROGRAM = "--"
"""In the module's place: what follows is a whole command line."""


def die_with(parent: int) -> None:
    """Have the system send SIGTERM to this process when process `parent`, its parent, ends, and
    SIGCONT, so that a stopped one acts on it.

    A launcher that is killed outright (SIGKILL, out of memory) cannot pass anything on; without
    this its ranks would go on alone, or stay stopped for ever. Not SIGKILL: one that can save in
    the seconds until the failure watch ends the rank, should. Only on Linux.
    """
    signal_when_parent_ends(signal.SIGTERM)
    threading.Thread(target=_wake_when_parent_ends, name="gradsync-wake", daemon=True).start()
    if sys.platform == "linux" and os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGTERM)


def _wake_when_parent_ends() -> None:
    signal_when_parent_ends(signal.SIGCONT)
    threading.Event().wait()


def main(argv: list[str]) -> None:
    """Run `argv` = launcher's process id, module, arguments of the module."""
    parent, module, *arguments = argv
    die_with(int(parent))
    if module == PROGRAM:
        # SIGTERM outlasts this, see prctl(2); the thread does not: a session's watch replaces it.
        # Without one, a stopped program ends once continued; SIGKILL would throw its save away.
        os.execvp(arguments[0], arguments)
    # Until the command installs handlers, Ctrl-C just ends the rank: no traceback from an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
