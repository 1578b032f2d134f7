"""Measured on this device: what a model's leaf and update take of time, and an attempt of memory.

    clock   ├ forward ┤├ backward: p73, p72, ... p0 ┤├ clip, AdamW ┤     again and again

Time: a hook on every parameter looks at the clock when its gradient is there. So the profile has a
bucket per parameter, out of which `step_costs` makes those of any strategy. On CUDA the clock is
events in the stream, read when the device is done.

Memory: on CUDA torch raises `OutOfMemoryError`, which is caught here: what the attempt held is let
go, and the device is as it was. On a CPU there is nothing to catch, since the kernel ends a process
that takes too much: there the caller keeps attempts below `limit_bytes` (see `micro_batch.py`), and
the peak is that of the resident memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gradsync.models.gpt import GPT
from gradsync.plan.profile import BucketReady, StepProfile, load_profile, profile_path, save_profile
from gradsync.plan.workload import Workload
from gradsync.runtime.machine import available_bytes, choose_threads, pin_threads
from gradsync.runtime.memory import PeakMemory, give_back, keep_freed_memory, resident_bytes

CLIP_NORM = 1.0
_WARM_UP, _FEWEST = 2, 3
"""Leaves."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def probe_profile(
    work: Workload,
    *,
    device: str = "cpu",
    ranks_per_host: int = 1,
    repeats: int = 8,
    budget_s: float = 8.0,
    cached: bool = True,
) -> StepProfile:
    """Measure one rank alone: forward and backward of one leaf, clipping and fused AdamW.

    On a CPU this process keeps freed memory from now on, as the trainer does
    (`runtime.memory.keep_freed_memory`); torch's threads are put back afterwards.

    Args:
        work: model, leaf, dtype; a replica of it must fit into the device's memory.
        device: cpu or cuda.
        ranks_per_host: ranks that will share the host's cores, which decides the threads of each.
        repeats: leaves to measure, at most; three at least, whatever they take.
        budget_s: seconds to spend on them.
        cached: whether to take what was measured before on this machine, and keep what is now.
    """
    threads = choose_threads(ranks_per_host)
    path = profile_path(work, device=device, threads=threads)
    known = load_profile(path) if cached else None
    if known is not None:
        return known
    if device == "cpu":
        keep_freed_memory()
    before = pin_threads(threads)
    try:
        profile = _measure(work, torch.device(device), repeats, budget_s)
    finally:
        pin_threads(before)
    if cached:
        save_profile(path, profile)
    return profile


@dataclass(slots=True)
class _Marks:
    """Moments of one leaf and update."""

    begin: Any
    forward: Any = None
    backward: Any = None
    update: Any = None
    ready: dict[int, Any] = field(default_factory=dict)  # By parameter


def _measure(work: Workload, device: torch.device, repeats: int, budget_s: float) -> StepProfile:
    model = GPT(
        work.model,
        seed=0,
        activation_checkpointing=work.activation_checkpointing,
        loss_rows=work.loss_rows,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    shape = (2, work.micro_batch_size, work.seq_len)
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randint(work.model.vocab_size, shape, generator=generator).to(device)
    on_cuda = device.type == "cuda"
    now: Callable[[], Any] = _cuda_event if on_cuda else time.perf_counter
    found: list[_Marks] = []

    def mark(number: int, _: Tensor) -> None:
        found[-1].ready[number] = now()

    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(partial(mark, number))

    def step() -> None:
        found.append(_Marks(begin=now()))
        dtype = _DTYPES.get(work.dtype)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = model(*leaf) / leaf[0].numel()
        found[-1].forward = now()
        loss.backward()
        found[-1].backward = now()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found[-1].update = now()

    def steps(count: int) -> None:
        found.clear()
        for _ in range(count):
            step()
        if on_cuda:
            torch.cuda.synchronize()

    steps(_WARM_UP)
    one_s = _between(found[-1].begin, found[-1].update)
    steps(max(_FEWEST, min(repeats, int(budget_s / one_s))))
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    return _profile(found, sizes)


def _profile(found: Sequence[_Marks], sizes: Sequence[int]) -> StepProfile:
    """Medians over leaves; the jitter is that of whole leaves."""
    backward_s = median(_between(marks.forward, marks.backward) for marks in found)
    ready = {
        number: min(backward_s, median(_between(m.forward, m.ready[number]) for m in found))
        for number in range(len(sizes))
    }
    leaves = [_between(marks.begin, marks.backward) for marks in found]
    middle = median(leaves)
    return StepProfile(
        forward_s=median(_between(marks.begin, marks.forward) for marks in found),
        backward_s=backward_s,
        update_s=median(_between(marks.backward, marks.update) for marks in found),
        buckets=tuple(
            BucketReady(num_bytes=sizes[number], ready_s=ready[number])
            for number in sorted(ready, key=ready.__getitem__)
        ),
        jitter=tuple(round(seconds / middle, 6) for seconds in leaves),
        measured=True,
    )


def _cuda_event() -> torch.cuda.Event:
    """The moment at which the stream gets there."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, last: Any) -> float:
    """Seconds between two looks at the clock."""
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1000


CUDA_SHARE = 0.9
"""Share of the free memory of a GPU: the rest is for fragments and for NCCL's buffers."""
CPU_SHARE = 0.8
"""Share of the free memory of a host: a process that takes too much is killed, or others are."""
_OTHER_WORDS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Memory and time of one attempt on this rank, above what there was before the first."""

    peak_bytes: int  # At its fullest moment
    held_bytes: int  # Whatever the size of the attempt: weights, gradients, the optimizer's state
    seconds: float  # As the attempt measured it


Attempt = Callable[[Callable[[], None]], float]
"""Runs; calls its argument, which marks what is held, when only that is held; returns seconds."""


class MemoryProbe:
    """The memory of one rank's device; on a CPU the host's is shared by `ranks_here`."""

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
