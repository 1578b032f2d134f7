"""Measures the time of a model's leaf and update on this device.

    clock   ├ forward ┤├ backward: p73, p72, ... p0 ┤├ clip, AdamW ┤     again and again

A hook on every parameter reads the clock when its gradient is ready. The profile has one bucket per
parameter; `step_costs` combines them into any strategy's buckets. On CUDA the clock is events in
the stream, read when the device is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gradsync.commands.models.gpt import GPT
from gradsync.commands.plan.profile import (
    BucketReady,
    StepProfile,
    keep_profile,
    known_profile,
    profile_conditions,
)
from gradsync.commands.plan.workload import Workload
from gradsync.runtime.machine import choose_threads, pin_threads
from gradsync.runtime.memory import keep_freed_memory

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
    (`runtime.memory.keep_freed_memory`); torch's thread count is restored afterwards.

    Args:
        work: model, leaf, dtype; a replica must fit into the device's memory.
        device: cpu or cuda.
        ranks_per_host: ranks that will share the host's cores; sets the threads of each.
        repeats: the most leaves to measure; at least three are measured, whatever they take.
        budget_s: seconds to spend on them.
        cached: whether to use an earlier measurement from this machine, and store a new one.
    """
    threads = choose_threads(ranks_per_host)
    conditions = profile_conditions(work, device=device, threads=threads)
    known = known_profile(conditions) if cached else None
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
        keep_profile(conditions, profile)
    return profile


@dataclass(slots=True)
class _Marks:
    """Times of one leaf and update."""

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
    """Medians over leaves."""
    backward_s = median(_between(marks.forward, marks.backward) for marks in found)
    ready = {
        number: min(backward_s, median(_between(m.forward, m.ready[number]) for m in found))
        for number in range(len(sizes))
    }
    return StepProfile(
        forward_s=median(_between(marks.begin, marks.forward) for marks in found),
        backward_s=backward_s,
        update_s=median(_between(marks.backward, marks.update) for marks in found),
        buckets=tuple(
            BucketReady(num_bytes=sizes[number], ready_s=ready[number])
            for number in sorted(ready, key=ready.__getitem__)
        ),
        measured=True,
    )


def _cuda_event() -> torch.cuda.Event:
    """The time at which the stream reaches this point."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, last: Any) -> float:
    """Seconds between two clock readings."""
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1000
