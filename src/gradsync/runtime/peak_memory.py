"""How much memory something took at its peak: of this process, or of its accelerator."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Makes the kernel forget the largest resident size so far (proc(5))."""


class PeakMemory:
    """From its making until `read`.

    Of a process it is the resident memory; pages that ranks share count in each of them.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        give_back()
        self._before = 0
        if _CLEAR.exists():
            _CLEAR.write_text(_RESET_PEAK)
            self._before = resident_bytes()

    def read(self) -> int | None:
        """Bytes above what there was at the beginning; None where the system does not tell."""
        if self._on_cuda:
            return torch.cuda.max_memory_allocated() - self._before
        return max(_status("VmHWM") - self._before, 0) if self._before else None


def give_back() -> None:
    """Return freed memory to the system: also what this process was told to keep (glibc)."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def resident_bytes() -> int:
    """Bytes that this process has in memory now; 0 where the system does not tell."""
    return _status("VmRSS") if _STATUS.exists() else 0


def _status(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
