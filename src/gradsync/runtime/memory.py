"""Memory of this process: keep freed memory for the next step, and read its size.

[Note: Keeping freed memory]
Each step allocates the same big temporaries (logits, activations, gradients) and frees them again.
glibc maps every block above 32 MiB and unmaps it when freed, and returns the top of its heap
likewise. So in every step the kernel clears the same pages, one page fault each. Three settings end
that: no block is mapped, the heap's top is not returned, and threads started later share the one
heap instead of getting small heaps. Results do not change. The price: the process stays at its peak
size, even when it needs less.

The setting affects the whole process and cannot be undone, so a library must not choose it unasked:
`gradsync train` on a CPU does, `gs.init` only on request.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

# Parameters of `mallopt`, from glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8

_STATUS = Path("/proc/self/status")


def keep_freed_memory() -> bool:
    """Keep freed memory in this process from now on; returns whether it was set.

    False, without a change, for another system or C library than Linux with glibc. Has no effect
    with another allocator in its place (jemalloc, tcmalloc).

    Call it early, before other threads allocate: those keep separate heaps. Any thread may call it,
    more than once; once is enough. See [Note: Keeping freed memory].
    """
    if sys.platform != "linux":
        return False
    process = ctypes.CDLL(None)
    if not hasattr(process, "gnu_get_libc_version"):
        return False
    # -1 is the largest size_t: never. A limit for mmap does not work: above 32 MiB it is refused.
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
    accepted = [process.mallopt(name, value) for name, value in settings]
    return all(accepted)


def status_bytes(name: str) -> int:
    """A size of this process by its name in proc(5)'s `status`, such as "VmRSS"; 0 if the system
    does not report it."""
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else ()
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
