"""Entry point of a rank that `launch_ranks` starts: ends with the launcher, runs the module.

    python -m gradsync.commands.launch.worker LAUNCHER_PID MODULE ARGS…
    python -m gradsync.commands.launch.worker LAUNCHER_PID -- PROGRAM ARGS…

Runs without torch, and otherwise behaves like `python -m MODULE ARGS…`; a program replaces this
process.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

from gradsync.runtime.signals import signal_when_parent_ends

PROGRAM = "--"
"""In place of a module: a whole command line follows."""


def die_with(parent: int) -> None:
    """Make the system send SIGTERM to this process when its parent, process `parent`, ends, and
    SIGCONT, so that a stopped process acts on it.

    A launcher that is killed (SIGKILL, out of memory) cannot forward anything. Without this its
    ranks would continue alone, or stay stopped forever. Not SIGKILL: a rank should save if it can
    in the seconds before the failure watch ends it. Linux only.
    """
    signal_when_parent_ends(signal.SIGTERM)
    threading.Thread(target=_wake_when_parent_ends, name="gradsync-wake", daemon=True).start()
    if sys.platform == "linux" and os.getppid() != parent:  # it ended before the request
        os.kill(os.getpid(), signal.SIGTERM)


def _wake_when_parent_ends() -> None:
    signal_when_parent_ends(signal.SIGCONT)
    threading.Event().wait()


def main(argv: list[str]) -> None:
    """Run `argv` = launcher's process id, module, arguments of the module."""
    parent, module, *arguments = argv
    die_with(int(parent))
    if module == PROGRAM:
        # SIGTERM survives exec, see prctl(2); the thread does not, and a session's watch replaces
        # it. Without one, a stopped program ends once continued; SIGKILL would discard its save.
        os.execvp(arguments[0], arguments)
    # Until the command installs handlers, Ctrl-C ends the rank without an import traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
