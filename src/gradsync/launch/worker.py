"""Entry point of a rank that `launch_local` started: die with the launcher, then run the module.

    python -m gradsync.launch.worker LAUNCHER_PID MODULE ARGS…
    python -m gradsync.launch.worker LAUNCHER_PID -- PROGRAM ARGS…

Runs without torch, and takes the place of `python -m MODULE ARGS…` in every respect; a program
takes this process over.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PROGRAM = "--"
"""In the module's place: what follows is a whole command line."""

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the system send SIGTERM to this process when process `parent`, its parent, ends.

    A launcher that is killed outright (SIGKILL, out of memory) cannot pass anything on; without
    this its ranks would go on alone. Does nothing where the system has no such call.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGTERM)


def main(argv: list[str]) -> None:
    """Run `argv` = launcher's process id, module, arguments of the module."""
    parent, module, *arguments = argv
    die_with(int(parent))
    if module == PROGRAM:
        os.execvp(arguments[0], arguments)  # it still dies with the launcher: see prctl(2)
    # Until the command installs handlers, Ctrl-C just ends the rank: no traceback from an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
