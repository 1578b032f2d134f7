"""Which launcher process stands above us, read from /proc."""

from __future__ import annotations

import os
from pathlib import Path

# As the kernel shows them: cut to 15 characters.
_LAUNCHERS = (
    "hydra_pmi_proxy",
    "mpiexec",
    "mpirun",
    "mpispawn",
    "orted",
    "palsd",
    "prte",
    "prted",
    "prterun",
)


def launcher_ancestor(proc: Path = Path("/proc")) -> str:
    """`PID:START` of the nearest ancestor that is an MPI launcher, else of the parent process.

    All ranks that one launcher started on a host get the same text, and two launchers get
    different ones, also when the system gives a process id out again: START is the start time.

    Args:
        proc: where the process file system is mounted.
    """
    pid = parent = os.getppid()
    start = _read_stat(proc, pid)[2]
    while pid > 1:
        name, above, began = _read_stat(proc, pid)
        if name.startswith(("mpiexec.", "mpirun.")) or name in _LAUNCHERS or name == "mpirun_rsh":
            return f"{pid}:{began}"
        pid = above
    return f"{parent}:{start}"


def _read_stat(proc: Path, pid: int) -> tuple[str, int, str]:
    """Name, parent and start time (clock ticks since boot) of a process; ("", 0, "") if gone."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0, ""
    # The name is in parentheses and may itself hold spaces and parentheses.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, int(fields[1]), fields[19]
