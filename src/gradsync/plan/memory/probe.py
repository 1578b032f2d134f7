"""Run something, and say what it took of the device's memory, or that there was not enough.

On CUDA torch raises `OutOfMemoryError`, which is caught here: what the attempt held is let go, and
the device is as it was. On a CPU there is nothing to catch, since the kernel ends a process that
takes too much: there the caller keeps attempts below `limit_bytes` (see `micro_batch.py`),
and the peak is that of the resident memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradsync.runtime.machine import available_bytes
from gradsync.runtime.memory import PeakMemory, give_back, resident_bytes

CUDA_SHARE = 0.9
"""Share of the free memory of a GPU: the rest is for fragments and for NCCL's buffers."""
CPU_SHARE = 0.8
"""Share of the free memory of a host: a process that takes too much is killed, or others are."""
_OTHER_WORDS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Memory and time of one attempt on this rank, above what there was before the first."""

    peak_bytes: int
    """At its fullest moment."""
    held_bytes: int
    """Whatever the size of the attempt: weights, gradients, the optimizer's state."""
    seconds: float
    """As the attempt measured it."""


Attempt = Callable[[Callable[[], None]], float]
"""Runs; calls its argument, which marks what is held, when only that is held; returns seconds."""


class MemoryProbe:
    """The memory of one rank's device.

    Args:
        device: the rank's.
        ranks_here: ranks of this host that share the memory; counts on a CPU only.
    """

    def __init__(self, device: torch.device | str, *, ranks_here: int = 1) -> None:
        self.device = torch.device(device)
        self._on_cuda = self.device.type == "cuda"
        self._before = self._held()
        if self._on_cuda:
            free = torch.cuda.mem_get_info(self.device)[0] + self._before
            self.limit_bytes = int(CUDA_SHARE * free)
            """Bytes that an attempt may take."""
        else:
            self.limit_bytes = max(int(CPU_SHARE * available_bytes()) // ranks_here, 1)

    @property
    def works(self) -> bool:
        """Whether the system tells how much memory a process has (Linux does)."""
        return self._on_cuda or self._before > 0

    def run(self, attempt: Attempt) -> Cost | None:
        """The cost of `attempt`; None when memory ran out, and then nothing of it is left."""
        if self._on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        peak = None if self._on_cuda else PeakMemory(on_cuda=False)  # gives back first
        start = torch.cuda.memory_reserved(self.device) if self._on_cuda else resident_bytes()
        held = [start]
        try:
            seconds = attempt(lambda: held.append(self._held()))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            seconds = None
        # Only here is the error gone, and with it the frames that held the attempt's tensors.
        if seconds is None:
            self.clear()
            return None
        if peak is None:
            top = torch.cuda.max_memory_reserved(self.device)
        else:
            top = start + (peak.read() or 0)
        return Cost(
            peak_bytes=top - self._before, held_bytes=held[-1] - self._before, seconds=seconds
        )

    def clear(self) -> None:
        """Give back what is no longer used."""
        if self._on_cuda:
            gc.collect()
            torch.cuda.empty_cache()
        else:
            give_back()

    def _held(self) -> int:
        if self._on_cuda:
            return torch.cuda.memory_reserved(self.device)
        give_back()
        return resident_bytes()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, of torch, Python or an allocator below them, means that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OTHER_WORDS)
